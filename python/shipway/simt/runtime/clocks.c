// Vector clocks: who has seen which accesses. Barriers and warp synchronisation move a block's own clocks; atomic
// operations and fences carry clocks from lane to lane through the variable they meet at.
#include "simt.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
  const char *at;
  int block;  // shared memory has a variable per block, -1 otherwise
  Clock *clock;
  int narrow;  // 1 + the block that last released in block scope, 0: released for all
} Variable;
static Variable *variables;
static uint32_t used, room;

Clock *clock_new(void) {
  Clock *clock = calloc(1, sizeof *clock + 4ul * blocks * (1 + threads));
  clock->epoch = (uint32_t *)(clock + 1);
  clock->lane = clock->epoch + blocks;
  return clock;
}
void clock_clear(Clock *clock) { memset(clock->epoch, 0, 4ul * blocks * (1 + threads)); }
void clock_join(Clock *into, const Clock *other) {
  for (int64_t i = 0; i < (int64_t)blocks * (1 + threads); i++)
    if (other->epoch[i] > into->epoch[i]) into->epoch[i] = other->epoch[i];
}

int clocks_make(void) {
  room = 64, used = 0;
  variables = calloc(room, sizeof *variables);
  return variables ? 0 : -1;
}
void clocks_free(void) {
  for (uint32_t i = 0; i < room; i++) free(variables[i].clock);
  free(variables);
  variables = 0;
}

static Variable *slot(const char *at, int block) {
  uint32_t i = (uint32_t)(((uintptr_t)at >> 2) * 2654435761u + block * 40503u) & (room - 1);
  while (variables[i].clock && (variables[i].at != at || variables[i].block != block)) i = (i + 1) & (room - 1);
  return variables + i;
}
static Variable *variable(const char *at) {
  int block = in_shared(at) ? current->block->index : -1;
  if (2 * used >= room) {
    Variable *old = variables;
    uint32_t old_room = room;
    variables = calloc(room *= 2, sizeof *variables);
    for (uint32_t i = 0; i < old_room; i++)
      if (old[i].clock) *slot(old[i].at, old[i].block) = old[i];
    free(old);
  }
  Variable *found = slot(at, block);
  if (!found->clock) *found = (Variable){at, block, clock_new(), 0}, used++;
  return found;
}

static void raise_to(uint32_t *value, uint32_t to) {
  if (*value < to) *value = to;
}

// All that is ordered before a release of `lane` that covers its own accesses before `clock` in `epoch`.
static void publish(Clock *into, Lane *lane, uint32_t clock, uint32_t epoch) {
  Block *block = lane->block;
  uint32_t *own = into->lane + (int64_t)block->index * threads;
  if (block->seen) clock_join(into, block->seen);
  if (lane->seen) clock_join(into, lane->seen);
  raise_to(into->epoch + block->index, epoch);
  raise_to(own + lane->index, clock);
  int first = lane->index - lane->lane;
  for (int i = first; i < first + launch->warp_size && i < threads; i++)
    if (!launch->amd || i == lane->index) raise_to(own + i, block->lanes[i].synced);
  // On AMD a release waits for the stores of its own wave only: of the others it covers what they had released
  // themselves, to the device, before the barrier (LLVM's AMDGPU memory model, "s_waitcnt vmcnt(0)"), if it comes after.
  if (launch->amd && epoch == lane->view)
    for (int i = 0; i < threads; i++) raise_to(own + i, block->lanes[i].flushed_at_barrier);
}

static void tick(Lane *lane) { lane->now.clock++; }
static void flush(Lane *lane, int scope) {
  if (scope == DEVICE_SCOPE) lane->flushed = lane->now.clock + 1;
}

void barrier_passed(Block *block) {
  for (int i = 0; i < threads; i++) {
    Lane *lane = block->lanes + i;
    if (!lane->seen) continue;
    if (!block->seen) block->seen = clock_new();
    clock_join(block->seen, lane->seen);
    clock_clear(lane->seen);
  }
  block->epoch++;
  for (int i = 0; i < threads; i++) {
    Lane *lane = block->lanes + i;
    lane->view = lane->now.epoch = block->epoch;
    lane->flushed_at_barrier = lane->flushed;
  }
}

void warp_synced(Lane **lanes, int count) {
  lanes[0]->block->warp_epoch[lanes[0]->warp]++;
  Clock *all = 0;
  for (int i = 0; i < count; i++) {
    tick(lanes[i]);
    lanes[i]->synced = lanes[i]->now.clock;
    if (lanes[i]->seen) all = lanes[i]->seen;
  }
  if (!all) return;
  for (int i = 0; i < count; i++)
    if (lanes[i]->seen && lanes[i]->seen != all) clock_join(all, lanes[i]->seen);
  for (int i = 0; i < count; i++) {
    if (!lanes[i]->seen) lanes[i]->seen = clock_new();
    if (lanes[i]->seen != all) clock_join(lanes[i]->seen, all);
  }
}

// Whether the atomic that `lane` was about to execute has written something new.
int atomic_progress(Lane *lane) {
  if (!lane->changing) return 0;
  uint32_t now;
  memcpy(&now, lane->changing, 4);
  lane->changing = 0;
  return now != lane->before;
}

// Stands before every atomic instruction and fence: others may run first, then clocks move.
void simt_atomic(char *at, int64_t size, int kind, int order, int scope, uint32_t site) {
  Lane *lane = current;
  launch->counts[3]++;
  if (kind != FENCE) wait_here(READY);
  if (kind == FENCE) {
    if (scope == WARP_SCOPE || !launch->check) return;
    if (order & RELEASE) {
      flush(lane, scope);
      tick(lane);
      lane->fence_clock = lane->now.clock;
      lane->fence_epoch = lane->view;
    }
    if (order & ACQUIRE && lane->pending) {
      if (!lane->seen) lane->seen = clock_new();
      clock_join(lane->seen, lane->pending);
    }
    return;
  }
  if (kind != LOAD) {
    Buffer *buffer = buffer_of(at, size);
    if (buffer) buffer->written = 1;
    lane->changing = at;
    lane->before = 0;
  }
  if (!launch->check) {
    if (lane->changing) memcpy(&lane->before, at, 4);
    return;
  }
  checked(at, size, kind != LOAD, size, site, ATOMIC | (scope == DEVICE_SCOPE ? 0 : IN_BLOCK));
  if (lane->changing) memcpy(&lane->before, at, 4);
  if (scope == WARP_SCOPE) return;
  Variable *met = variable(at);
  if (kind != STORE) {
    int reaches = !met->narrow || met->narrow == 1 + lane->block->index;
    if (reaches && order & ACQUIRE) {
      if (!lane->seen) lane->seen = clock_new();
      clock_join(lane->seen, met->clock);
    } else if (reaches) {
      if (!lane->pending) lane->pending = clock_new();
      clock_join(lane->pending, met->clock);
    }
  }
  if (kind == LOAD) return;
  if (kind == STORE) clock_clear(met->clock), met->narrow = 0;
  if (order & RELEASE) {
    flush(lane, scope);
    tick(lane);
    publish(met->clock, lane, lane->now.clock, lane->view);
  } else if (lane->fence_clock) {
    publish(met->clock, lane, lane->fence_clock, lane->fence_epoch);
  }
  if (scope == BLOCK_SCOPE) met->narrow = 1 + lane->block->index;
}
