// Operations of a lane alone: who it is, and the arithmetic that LLVM has no instruction for.
#include "simt.h"
#include <math.h>
#include <string.h>

#define WHO(name, value)                    \
  void name(Lane **lanes, int count) {      \
    Lane *lane = *lanes;                    \
    (void)lane, (void)count;                \
    RESULT(int32_t, lane) = (value);        \
  }
WHO(thread_x, lane->thread[0])
WHO(thread_y, lane->thread[1])
WHO(thread_z, lane->thread[2])
WHO(block_x, lane->block->id[0])
WHO(block_y, lane->block->id[1])
WHO(block_z, lane->block->id[2])
WHO(threads_x, launch->threads[0])
WHO(threads_y, launch->threads[1])
WHO(threads_z, launch->threads[2])
WHO(grid_x, launch->grid[0])
WHO(grid_y, launch->grid[1])
WHO(grid_z, launch->grid[2])
WHO(lane_id, lane->lane)
WHO(warp_size, launch->warp_size)

// Bits of the mask below this lane, in the lower and the upper half of a wave.
WHO(mask_count_low, ARGUMENT(int32_t, lane, 4) + __builtin_popcount(ARGUMENT(uint32_t, lane, 0) &
                                                 (lane->lane >= 32 ? ~0u : (1u << lane->lane) - 1)))
WHO(mask_count_high, ARGUMENT(int32_t, lane, 4) + (lane->lane < 32 ? 0 : __builtin_popcount(ARGUMENT(uint32_t, lane, 0) &
                                                 ((1u << (lane->lane - 32)) - 1))))

// The implicit arguments of a code object of version 5: grid in blocks, block in threads, dimensions.
void implicit_arguments(Lane **lanes, int count) {
  (void)count;
  static char hidden[256];
  uint16_t sizes[3] = {launch->threads[0], launch->threads[1], launch->threads[2]}, dimensions = 3;
  memcpy(hidden, launch->grid, 12);
  memcpy(hidden + 12, sizes, 6);
  memcpy(hidden + 64, &dimensions, 2);
  RESULT(void *, *lanes) = hidden;
}

void nothing(Lane **lanes, int count) { (void)lanes, (void)count; }

static float flushed(float x) { return fpclassify(x) == FP_SUBNORMAL ? copysignf(0, x) : x; }

#define FLOAT(name, value)                  \
  void name(Lane **lanes, int count) {      \
    float x = ARGUMENT(float, *lanes, 0);   \
    (void)count;                            \
    RESULT(float, *lanes) = (value);        \
  }
FLOAT(exp2_ftz, flushed(exp2f(flushed(x))))
FLOAT(log2_ftz, flushed(log2f(flushed(x))))
FLOAT(sin_ftz, flushed(sinf(flushed(x))))
FLOAT(cos_ftz, flushed(cosf(flushed(x))))
FLOAT(tanh_approximate, tanhf(x))
FLOAT(sqrt_ftz, flushed(sqrtf(flushed(x))))
FLOAT(rsqrt_ftz, flushed(1 / sqrtf(flushed(x))))
FLOAT(reciprocal_ftz, flushed(1 / flushed(x)))
FLOAT(exp2_plain, exp2f(x))
FLOAT(log2_plain, log2f(x))
FLOAT(rsqrt_plain, 1 / sqrtf(x))
FLOAT(reciprocal_plain, 1 / x)
FLOAT(sqrt_plain, sqrtf(x))
FLOAT(sin_turns, (float)sin(6.283185307179586 * x))
FLOAT(cos_turns, (float)cos(6.283185307179586 * x))
FLOAT(fraction, fminf(x - floorf(x), 0x1.fffffep-1f))

// AMD instructions that Mojo writes as inline assembly to round float32 to bfloat16.
void is_nan_mask(Lane **lanes, int count) {
  (void)count;
  RESULT(int64_t, *lanes) = isnan(ARGUMENT(float, *lanes, 0)) ? -1 : 0;
}
void bit_16(Lane **lanes, int count) {
  (void)count;
  RESULT(int32_t, *lanes) = ARGUMENT(uint32_t, *lanes, 0) >> 16 & 1;
}
void add_3(Lane **lanes, int count) {
  (void)count;
  RESULT(uint32_t, *lanes) =
      ARGUMENT(uint32_t, *lanes, 0) + ARGUMENT(uint32_t, *lanes, 4) + ARGUMENT(uint32_t, *lanes, 8);
}
void select_by_mask(Lane **lanes, int count) {
  (void)count;
  RESULT(uint32_t, *lanes) =
      ARGUMENT(int64_t, *lanes, 8) ? ARGUMENT(uint32_t, *lanes, 4) : ARGUMENT(uint32_t, *lanes, 0);
}

// The two halves of a barrier: what a lane does after `signal` is unordered until its `wait`.
void barrier_signal(Lane **lanes, int count) {
  (void)count;
  lanes[0]->now.epoch++;
}
void barrier_wait(Lane **lanes, int count) {
  (void)count;
  if (lanes[0]->now.epoch == lanes[0]->block->epoch + 1) return;
  report(DIVERGENCE, lanes[0]->site, 0, "wait for a barrier that the thread has not signalled exactly once");
  leave();
}
