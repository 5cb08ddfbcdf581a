// The scheduler: runs the lanes of the resident blocks in an order that the seed draws, executes what a warp or a block
// waits for once all its lanes are there, and says who waits for whom when nothing can go on.
#include "simt.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WARPGROUP 128
#define SHADOW_KEPT (256l << 20)  // bytes of shadow memory that stay mapped between launches
#define IDLE_ROUNDS 200  // rounds over all lanes without any change before a spinning launch counts as deadlocked

Launch *launch;
Lane *current;
int threads, blocks, progress;
static Block *inside;  // whose shared memory is in place
static uint32_t seed;

void report(int kind, uint32_t site, uint32_t other, const char *format, ...) {
  Report *report = &launch->report;
  if (report->kind) return;
  report->kind = kind;
  report->site = site;
  report->other = other;
  report->block = current ? current->block->index : -1;
  report->thread = current ? current->index : -1;
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(report->text, sizeof report->text, format, arguments);
  va_end(arguments);
}

static uint32_t draw(uint32_t below) {
  seed = seed * 1664525u + 1013904223u;
  return (uint64_t)(seed >> 8) * below >> 24;
}
static void shuffle(int *order, int count) {
  for (int i = count - 1; i > 0; i--) {
    int j = draw(i + 1), other = order[i];
    order[i] = order[j];
    order[j] = other;
  }
}

void wait_here(int state) {
  launch->counts[1]++;
  current->state = state;
  fiber_leave(current);
}
// Stands before a volatile access: it may wait for what others write.
void simt_pause(void) { wait_here(READY); }
static void lane_body(void) {
  launch->entry(launch->arguments);
  wait_here(DONE);
}

// The device code's call of an operation that is not plain LLVM.
void simt_call(int32_t op, char *arguments, char *result, uint32_t site) {
  Lane *lane = current;
  launch->counts[0]++;
  lane->op = launch->op + op;
  lane->arguments = arguments;
  lane->result = result;
  lane->site = site;
  if (lane->op->scope == LANE)
    lane->op->run(&lane, 1);
  else
    wait_here(lane->op->scope == BLOCK ? AT_BLOCK : lane->op->scope == GROUP ? AT_GROUP : AT_WARP);
}

static void swap_in(Block *block) {
  if (inside == block) return;
  if (inside) memcpy(inside->saved, launch->shared, launch->shared_size);
  memcpy(launch->shared, block->saved, launch->shared_size);
  inside = block;
}

static size_t shadow_bytes(int64_t size, int granule) { return ((size >> granule) + 16) * sizeof(Shadow); }

static void hold_back(Block *block) { block->held_back = launch->seed && draw(2) ? (int)draw(launch->warp_size) : -1; }

static void start(Block *block, int index) {
  block->index = index;
  block->id[0] = index % launch->grid[0];
  block->id[1] = index / launch->grid[0] % launch->grid[1];
  block->id[2] = index / launch->grid[0] / launch->grid[1];
  block->live = threads;
  hold_back(block);
  block->epoch = 1;
  memset(block->saved, 0xFF, launch->shared_size);  // NaN in every floating-point type
  if (inside == block) inside = 0;
  memset(block->warp_epoch, 0, 4 * threads);
  if (block->seen) clock_clear(block->seen);
  for (int i = 0; i < threads; i++) {
    Lane *lane = block->lanes + i;
    lane->now = (Stamp){.block = shadow_base + 1 + index, .lane = i, .epoch = 1, .clock = 1};
    lane->view = 1;
    lane->product_groups = lane->product_fence = lane->proxied = lane->proxy_view = 0;
    lane->synced = lane->fence_clock = lane->fence_epoch = lane->flushed = lane->flushed_at_barrier = 0;
    if (lane->seen) clock_clear(lane->seen);
    if (lane->pending) clock_clear(lane->pending);
    lane->groups = 0;
    lane->changing = 0;
    lane->state = READY;
    fiber_start(lane, lane_body);
  }
}

static void enter(Lane *lane) {
  current = lane;
  fiber_enter(lane);
  progress |= atomic_progress(lane) | (lane->state != READY);
  current = 0;
}

static void execute(Lane **lanes, int count) {
  current = lanes[0];
  lanes[0]->op->run(lanes, count);
  if (lanes[0]->op->orders) warp_synced(lanes, count);
  for (int i = 0; i < count; i++) lanes[i]->state = READY;
  progress = 1;
  current = 0;
}

static void diverged(Lane *one, Lane *other) {
  static const char *of[] = {"", "warp", "warp", "warpgroup", "block"};
  current = other;
  if (one->state == READY || one->state == DONE)
    report(DIVERGENCE, other->site, 0, "%s, while thread %d of the same %s has ended", other->op->name, one->index,
           of[other->op->scope]);
  else
    report(DIVERGENCE, other->site, one->site, "%s, while thread %d of the same %s is at %s", other->op->name, one->index,
           of[other->op->scope], one->op->name);
  leave();
}

static int wants(const Lane *leader, const Lane *lane) {
  return leader->op->scope != MASK || *(uint32_t *)leader->arguments >> lane->lane & 1;
}

// Executes what the lanes of a warp or warpgroup wait for together, where all that it needs have come.
static void run_together(Block *block, int first, int width, int state) {
  Lane *waiting[WARPGROUP], *elsewhere = 0;
  int count = 0, ready = 0, last = first + width < threads ? first + width : threads;
  for (int i = first; i < last; i++) {
    Lane *lane = block->lanes + i;
    if (lane->state == state) waiting[count++] = lane;
    else if (lane->state == READY) ready++;
    else elsewhere = lane;
  }
  while (count) {
    Lane *group[WARPGROUP], *leader = waiting[0], *other = 0;
    int members = 0, rest = 0, missing = 0;
    for (int i = 0; i < count; i++) {
      Lane *lane = waiting[i];
      if (lane->site == leader->site && wants(leader, lane)) group[members++] = lane;
      else waiting[rest++] = other = lane;
    }
    for (int i = first; i < last; i++) missing += wants(leader, block->lanes + i);
    missing -= members;
    if (missing == 0 && (state != AT_GROUP || members == WARPGROUP)) {
      execute(group, members);
    } else if (missing == 0) {
      current = leader;
      report(DIVERGENCE, leader->site, 0, "%s by a warpgroup of %d threads", leader->op->name, members);
      leave();
    } else if (!ready) {  // nobody can still come
      for (int i = 0; i < rest; i++)
        if (wants(leader, waiting[i])) diverged(waiting[i], leader);
      if (elsewhere || other) diverged(elsewhere ? elsewhere : other, leader);
    }
    count = rest;
  }
}

static void run_barrier(Block *block) {
  int waiting = 0, done = 0;
  Lane *first = 0, *ended = 0;
  for (int i = 0; i < threads; i++) {
    Lane *lane = block->lanes + i;
    if (lane->state == AT_BLOCK) waiting++, first = first ? first : lane;
    if (lane->state == DONE) done++, ended = lane;
  }
  block->live = threads - done;
  if (!waiting || waiting + done < threads) return;
  if (ended) diverged(ended, first);
  for (int i = 0; i < threads; i++)
    if (block->lanes[i].site != first->site) diverged(block->lanes + i, first);
  for (int i = 0; i < threads; i++) {
    Lane *lane = block->lanes + i;
    current = lane;
    lane->op->run(&lane, 1);
    lane->state = READY;
  }
  current = 0;
  barrier_passed(block);
  progress = 1;
}

// Which of the ready lanes a round lets run: all, those of one warp, or a random half; at times without one lane of each
// warp, which runs when nothing else moves. A wait for one arrival too few, or a lane nobody waits for, then shows.
enum { ALL_LANES, ONE_WARP, HALF };
static void round_of(Block *block, int *order, int idle) {
  int warps = (threads + launch->warp_size - 1) / launch->warp_size, mode = ALL_LANES, warp = 0;
  swap_in(block);
  if (launch->seed) {
    if (!draw(4)) shuffle(order, threads);
    if (!draw(16)) hold_back(block);
    if (!idle) {
      uint32_t drawn = draw(8);
      mode = drawn < 4 ? ONE_WARP : drawn < 6 ? HALF : ALL_LANES;
      warp = draw(warps);
    }
  }
  for (int i = 0; i < threads; i++) {
    Lane *lane = block->lanes + order[i];
    if (lane->state != READY || (mode == ONE_WARP && lane->warp != warp)) continue;
    if (mode == HALF && draw(2)) continue;
    if (!idle && lane->lane == block->held_back) continue;
    enter(lane);
  }
  for (int i = 0; i < warps; i++) run_together(block, i * launch->warp_size, launch->warp_size, AT_WARP);
  if (launch->warpgroups)
    for (int i = 0; i < threads; i += WARPGROUP) run_together(block, i, WARPGROUP, AT_GROUP);
  run_barrier(block);
}

static void deadlocked(Block *resident, int count) {
  char text[240] = "";
  int length = 0, waiting_blocks = 0;
  Lane *spinning = 0;
  for (int i = 0; i < count; i++) {
    if (resident[i].live <= 0) continue;
    waiting_blocks++;
    int states[5] = {0};
    for (int j = 0; j < threads; j++) {
      states[resident[i].lanes[j].state]++;
      if (resident[i].lanes[j].state == READY && !spinning) spinning = resident[i].lanes + j;
    }
    if (length < 160)
      length += snprintf(text + length, sizeof text - length, "; block %d: %d threads spin, %d at a barrier, %d at a warp operation",
                         resident[i].index, states[READY], states[AT_BLOCK], states[AT_WARP] + states[AT_GROUP]);
  }
  current = spinning;
  report(DEADLOCK, spinning ? spinning->site : 0, 0, "%d of %d blocks resident%s", waiting_blocks, blocks, text);
}

static Block *resident;
static int *lane_order, *block_order, *turn;

static int run_all(void) {
  int count = launch->resident, next = 0, idle = 0, alive = count;
  for (int i = 0; i < count; i++) start(resident + i, block_order[next++]);
  while (alive) {
    progress = 0;
    if (launch->seed) shuffle(turn, count);
    for (int i = 0; i < count; i++) {
      Block *block = resident + turn[i];
      if (block->live < 0) continue;
      round_of(block, lane_order, idle);
      if (block->live) continue;
      progress = 1;
      for (int j = 0; j < threads; j++) products_end(block->lanes + j);
      for (int j = 0; j < threads; j++) copies_drop(block->lanes + j), products_drop(block->lanes + j);
      if (next < blocks) start(block, block_order[next++]);
      else block->live = -1, alive--;
    }
    idle = progress ? 0 : idle + 1;
    if (idle > IDLE_ROUNDS) {
      deadlocked(resident, count);
      leave();
    }
  }
  return 0;
}

static int *counted(int count) {
  int *order = malloc(sizeof(int) * count);
  for (int i = 0; i < count; i++) order[i] = i;
  return order;
}

// Runs a launch. 0: it ran to its end; else `report` says why not.
int simt_launch(Launch *wanted) {
  launch = wanted;
  current = 0;
  inside = 0;
  seed = launch->seed * 2654435761u;  // neighbouring seeds must not draw alike
  seed = (seed ^ seed >> 15) * 2246822519u;
  seed ^= seed >> 13;
  threads = launch->threads[0] * launch->threads[1] * launch->threads[2];
  blocks = launch->grid[0] * launch->grid[1] * launch->grid[2];
  if (launch->resident <= 0 || launch->resident > blocks) launch->resident = blocks;
  int count = launch->resident;
  size_t of_shared = launch->check ? shadow_bytes(launch->shared_size, launch->shared_granule) : 0, needed = count * of_shared;
  for (int i = 0; i < launch->buffers - launch->constants && launch->check; i++)
    needed += shadow_bytes(launch->buffer[i].size, launch->granule);
  if (fiber_stacks(count * threads) || shadow_make(needed) || clocks_make()) {
    report(UNSUPPORTED, 0, 0, "no memory for %d blocks of %d threads", count, threads);
    return -1;
  }
  for (int i = 0; i < launch->buffers - launch->constants && launch->check; i++)
    launch->buffer[i].shadow = shadow_take(shadow_bytes(launch->buffer[i].size, launch->granule));
  resident = calloc(count, sizeof *resident);
  lane_order = counted(threads), block_order = counted(blocks), turn = counted(count);
  if (launch->seed) shuffle(block_order, blocks);
  for (int i = 0; i < count; i++) {
    Block *block = resident + i;
    block->lanes = calloc(threads, sizeof(Lane));
    block->saved = malloc(launch->shared_size + 16);
    block->warp_epoch = calloc(threads, 4);
    block->shadow = shadow_take(of_shared);
    for (int j = 0; j < threads; j++) {
      Lane *lane = block->lanes + j;
      lane->block = block;
      lane->index = j;
      lane->lane = j % launch->warp_size;
      lane->warp = j / launch->warp_size;
      lane->stack = fiber_stack(i * threads + j);
      lane->thread[0] = j % launch->threads[0];
      lane->thread[1] = j / launch->threads[0] % launch->threads[1];
      lane->thread[2] = j / launch->threads[0] / launch->threads[1];
    }
  }
  int code = guarded(run_all);
  for (int i = 0; i < count; i++) {
    Block *block = resident + i;
    for (int j = 0; j < threads; j++) {
      copies_drop(block->lanes + j);
      products_drop(block->lanes + j);
      free(block->lanes[j].sums);
      free(block->lanes[j].seen);
      free(block->lanes[j].pending);
    }
    free(block->lanes), free(block->saved), free(block->warp_epoch), free(block->seen);
  }
  shadow_free(SHADOW_KEPT);
  free(resident), free(lane_order), free(block_order), free(turn);
  clocks_free();
  return code;
}
