// What the lanes of a warp do together: shuffles, votes, matches, lane permutations. 32-bit values throughout.
#include "simt.h"

#define EACH(lanes, count) for (Lane **at = (lanes); at < (lanes) + (count); at++)

static Lane *lane_of(Lane **lanes, int count, int lane) {
  EACH(lanes, count) if ((*at)->lane == lane) return *at;
  return 0;
}

// PTX shfl.sync (mask, value, by, clamp and segment): a lane out of its segment reads itself. One outside the mask has
// no defined value: a NaN that is easy to recognise.
enum { BUTTERFLY, DOWN, UP, INDEX };
static void shuffle(Lane **lanes, int count, int mode) {
  EACH(lanes, count) {
    Lane *lane = *at;
    int by = ARGUMENT(int32_t, lane, 8), control = ARGUMENT(int32_t, lane, 12);
    int segment = control >> 8 & 31, clamp = control & 31;
    int highest = (lane->lane & segment) | (clamp & ~segment), lowest = lane->lane & segment, from;
    if (mode == BUTTERFLY) from = lane->lane ^ by;
    else if (mode == DOWN) from = lane->lane + by;
    else if (mode == UP) from = lane->lane - by;
    else from = lowest | (by & ~segment);
    int inside = mode == UP ? from >= highest : from <= highest;
    Lane *source = lane_of(lanes, count, inside ? from : lane->lane);
    RESULT(uint32_t, lane) = source ? ARGUMENT(uint32_t, source, 4) : 0xFFC0DEAD;
  }
}
void shuffle_butterfly(Lane **lanes, int count) { shuffle(lanes, count, BUTTERFLY); }
void shuffle_down(Lane **lanes, int count) { shuffle(lanes, count, DOWN); }
void shuffle_up(Lane **lanes, int count) { shuffle(lanes, count, UP); }
void shuffle_index(Lane **lanes, int count) { shuffle(lanes, count, INDEX); }

// Votes (mask, predicate).
static uint32_t votes(Lane **lanes, int count) {
  uint32_t yes = 0;
  EACH(lanes, count) yes |= (uint32_t)(ARGUMENT(uint8_t, *at, 4) & 1) << (*at)->lane;
  return yes;
}
void vote_ballot(Lane **lanes, int count) {
  uint32_t yes = votes(lanes, count);
  EACH(lanes, count) RESULT(uint32_t, *at) = yes;
}
void vote_any(Lane **lanes, int count) {
  uint32_t yes = votes(lanes, count);
  EACH(lanes, count) RESULT(uint8_t, *at) = yes != 0;
}
void vote_all(Lane **lanes, int count) {
  int all = __builtin_popcount(votes(lanes, count)) == count;
  EACH(lanes, count) RESULT(uint8_t, *at) = all;
}
void vote_uniform(Lane **lanes, int count) {
  int yes = __builtin_popcount(votes(lanes, count));
  EACH(lanes, count) RESULT(uint8_t, *at) = yes == 0 || yes == count;
}
void match_any(Lane **lanes, int count) {  // (mask, value)
  EACH(lanes, count) {
    uint32_t same = 0;
    for (Lane **other = lanes; other < lanes + count; other++)
      same |= (uint32_t)(ARGUMENT(uint32_t, *other, 4) == ARGUMENT(uint32_t, *at, 4)) << (*other)->lane;
    RESULT(uint32_t, *at) = same;
  }
}
void active_mask(Lane **lanes, int count) {
  uint32_t mask = 0;
  EACH(lanes, count) mask |= 1u << (*at)->lane;
  EACH(lanes, count) RESULT(uint32_t, *at) = mask;
}

// PTX redux.sync (value, mask).
#define REDUCE(name, type, start, step)                                \
  void name(Lane **lanes, int count) {                                 \
    type all = (start);                                                \
    EACH(lanes, count) {                                               \
      type one = ARGUMENT(type, *at, 0);                               \
      all = (step);                                                    \
    }                                                                  \
    EACH(lanes, count) RESULT(type, *at) = all;                        \
  }
REDUCE(reduce_add, uint32_t, 0, all + one)
REDUCE(reduce_min, int32_t, INT32_MAX, one < all ? one : all)
REDUCE(reduce_max, int32_t, INT32_MIN, one > all ? one : all)
REDUCE(reduce_umin, uint32_t, UINT32_MAX, one < all ? one : all)
REDUCE(reduce_umax, uint32_t, 0, one > all ? one : all)
REDUCE(reduce_and, uint32_t, ~0u, all & one)
REDUCE(reduce_or, uint32_t, 0, all | one)
REDUCE(reduce_xor, uint32_t, 0, all ^ one)

// AMD ballots of 32 and 64 lanes.
static uint64_t ballot(Lane **lanes, int count) {
  uint64_t yes = 0;
  EACH(lanes, count) yes |= (uint64_t)(ARGUMENT(uint8_t, *at, 0) & 1) << (*at)->lane;
  return yes;
}
void ballot_32(Lane **lanes, int count) {
  uint32_t yes = ballot(lanes, count);
  EACH(lanes, count) RESULT(uint32_t, *at) = yes;
}
void ballot_64(Lane **lanes, int count) {
  uint64_t yes = ballot(lanes, count);
  EACH(lanes, count) RESULT(uint64_t, *at) = yes;
}

// ds_bpermute (address, value): pulls from the lane that address / 4 names, modulo the wave.
void permute_pull(Lane **lanes, int count) {
  EACH(lanes, count) {
    Lane *source = lane_of(lanes, count, ARGUMENT(uint32_t, *at, 0) / 4 % launch->warp_size);
    RESULT(uint32_t, *at) = source ? ARGUMENT(uint32_t, source, 4) : 0;
  }
}
// ds_permute (address, value): pushes to that lane; of several the highest lane wins.
void permute_push(Lane **lanes, int count) {
  EACH(lanes, count) RESULT(uint32_t, *at) = 0;
  EACH(lanes, count) {
    Lane *target = lane_of(lanes, count, ARGUMENT(uint32_t, *at, 0) / 4 % launch->warp_size);
    if (target) RESULT(uint32_t, target) = ARGUMENT(uint32_t, *at, 4);
  }
}
// ds_swizzle (value, pattern): quad permutation, or and/or/xor masks within 32 lanes.
void swizzle(Lane **lanes, int count) {
  EACH(lanes, count) {
    int lane = (*at)->lane, pattern = ARGUMENT(int32_t, *at, 4), from;
    if (pattern & 0x8000) from = (lane & ~3) | (pattern >> 2 * (lane & 3) & 3);
    else from = (lane & ~31) | (((lane & pattern & 31) | (pattern >> 5 & 31)) ^ (pattern >> 10 & 31));
    Lane *source = lane_of(lanes, count, from);
    RESULT(uint32_t, *at) = source ? ARGUMENT(uint32_t, source, 0) : 0;
  }
}
void first_lane(Lane **lanes, int count) {
  uint32_t value = ARGUMENT(uint32_t, lanes[0], 0);
  EACH(lanes, count) RESULT(uint32_t, *at) = value;
}
void read_lane(Lane **lanes, int count) {  // (value, lane), the lane the same for all
  Lane *source = lane_of(lanes, count, ARGUMENT(uint32_t, lanes[0], 4) % launch->warp_size);
  uint32_t value = source ? ARGUMENT(uint32_t, source, 0) : 0;
  EACH(lanes, count) RESULT(uint32_t, *at) = value;
}
void permute_half_rows(Lane **lanes, int count) {  // permlanex16 (old, value, low, high, fi, bound): the other row of 16
  EACH(lanes, count) {
    int lane = (*at)->lane, index = lane & 15;
    uint64_t select = ARGUMENT(uint32_t, *at, 8) | (uint64_t)ARGUMENT(uint32_t, *at, 12) << 32;
    Lane *source = lane_of(lanes, count, ((lane & ~15) ^ 16) | (select >> 4 * index & 15));
    RESULT(uint32_t, *at) = source ? ARGUMENT(uint32_t, source, 4) : ARGUMENT(uint32_t, *at, 0);
  }
}

// The lane that a DPP control reads, -1: none.
static int dpp_source(int lane, int control) {
  int row = lane & ~15, in_row = lane & 15, by = control & 15;
  if (control <= 0xFF) return (lane & ~3) | (control >> 2 * (lane & 3) & 3);          // quad_perm
  if (control > 0x100 && control <= 0x10F) return in_row + by < 16 ? lane + by : -1;  // row_shl
  if (control > 0x110 && control <= 0x11F) return in_row >= by ? lane - by : -1;      // row_shr
  if (control > 0x120 && control <= 0x12F) return row + ((in_row - by) & 15);         // row_ror
  if (control == 0x138) return lane ? lane - 1 : -1;                                  // wave_shr
  if (control == 0x140) return row + 15 - in_row;                                     // row_mirror
  if (control == 0x141) return (lane & ~7) + 7 - (lane & 7);                          // row_half_mirror
  if (control == 0x142) return row ? row - 1 : -1;                                    // row_bcast:15
  if (control == 0x143) return lane >= 32 ? 31 : -1;                                  // row_bcast:31
  if (control >= 0x150 && control <= 0x15F) return row + by;                          // row_share
  if (control >= 0x160 && control <= 0x16F) return row + (in_row ^ by);               // row_xmask
  report(UNSUPPORTED, current->site, 0, "DPP control 0x%x", control);
  leave();
  return -1;
}
void dpp(Lane **lanes, int count) {  // (old, value, control, row mask, bank mask, bound control)
  EACH(lanes, count) {
    int lane = (*at)->lane, from = dpp_source(lane, ARGUMENT(int32_t, *at, 8));
    int written = ARGUMENT(int32_t, *at, 12) >> (lane / 16 % 4) & ARGUMENT(int32_t, *at, 16) >> (lane % 16 / 4) & 1;
    Lane *source = from < 0 ? 0 : lane_of(lanes, count, from);
    uint32_t old = ARGUMENT(uint32_t, *at, 0), out_of_row = ARGUMENT(uint8_t, *at, 20) & 1 ? 0 : old;
    RESULT(uint32_t, *at) = !written ? old : source ? ARGUMENT(uint32_t, source, 4) : out_of_row;
  }
}
