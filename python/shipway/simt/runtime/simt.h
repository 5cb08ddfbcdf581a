// Shared by the files of the runtime: one launch of one kernel, its blocks, its lanes (GPU threads), their clocks.
#pragma once
#include <stddef.h>
#include <stdint.h>

// Whom an operation waits for: nobody, its warp, the lanes of its mask, its warpgroup (128 lanes), its block.
enum { LANE, WARP, MASK, GROUP, BLOCK };
enum { READY, AT_WARP, AT_GROUP, AT_BLOCK, DONE };
enum { LOAD, STORE, UPDATE, FENCE };                          // kinds of atomic operations
enum { ACQUIRE = 1, RELEASE = 2 };                            // bits of an ordering
enum { WARP_SCOPE, BLOCK_SCOPE, DEVICE_SCOPE };               // whom an atomic operation synchronises
enum { RACE = 1, BOUNDS, UNINITIALISED, MISALIGNED, DIVERGENCE, DEADLOCK, CRASH, UNSUPPORTED, UNDEFINED };

#define SHARED_ROOM (256 << 10)  // bytes of address space that a block's shared memory has

typedef struct Lane Lane;
typedef struct Block Block;
typedef struct Product Product;
typedef struct Sum Sum;

// What an instruction outside plain LLVM does. `run` gets the lanes that execute it together.
typedef struct {
  int scope, orders;  // orders: lanes of the warp see each other's earlier accesses afterwards
  void (*run)(Lane **lanes, int count);
  const char *name;
} Op;

// Who accessed a granule of memory last, and when on their clocks.
typedef struct {
  uint32_t block;  // shadow_base + 1 + index; what is lower is nobody's
  uint16_t lane : 11, flags : 5;
  uint16_t site;
  uint32_t epoch;  // of its block: barriers passed
  uint32_t clock;  // of the lane; for several lanes of a warp the warp's
} Stamp;
enum { OF_WARP = 1, OF_BLOCK = 2, ATOMIC = 4, IN_BLOCK = 8, PENDING = 16 };

typedef struct {
  Stamp write, read;
  uint16_t products, product_site;  // asynchronous products that may still read it, of shared memory; one of their sites
} Shadow;

// Memory that an argument names.
typedef struct {
  char *start;
  int64_t size;
  Shadow *shadow;
  int written, argument;  // argument: the first that lies in it
} Buffer;

// What is known of the past: of each block all accesses before an epoch, of each lane all accesses before a clock.
typedef struct {
  uint32_t *epoch, *lane;
} Clock;

typedef struct Copy {
  char *target, *source;
  int size, filled;  // bytes written, bytes read from the source
  int group;
  uint32_t site;
  struct Copy *next;
} Copy;

struct Lane {
  void *stack_pointer;
  char *stack;
  int thread[3], lane, warp, index, state;
  const Op *op;
  uint32_t site;
  char *arguments, *result;
  Block *block;
  Stamp now;            // what its accesses are stamped with
  uint32_t view;        // epoch before which it sees all accesses of its block
  uint32_t synced;      // clock before which its warp sees it
  uint32_t fence_clock, fence_epoch;  // what its last release fence covers, 0: none
  uint32_t flushed, flushed_at_barrier;  // clock before which its stores have left the compute unit (AMD)
  Clock *seen, *pending;
  Copy *copies;
  int groups;
  Product *products;  // of its warpgroup, held by its first lane
  int product_groups, product_fence;
  Sum *sums;  // of asynchronous products, its own
  int sum_count, sum_room, groups_awaited;
  uint32_t proxied, proxy_view;  // its last proxy fence: clock that it covers, epoch before which it covers all
  char *changing;  // an atomic it is about to write, and what was there
  uint32_t before;
};

struct Block {
  Lane *lanes;
  int id[3], index, live, held_back;  // held_back: lane of each warp that runs last, -1: none
  char *saved;  // its shared memory while another block runs
  uint32_t epoch, *warp_epoch;
  Clock *seen;
  Shadow *shadow;
};

typedef struct {
  int kind, block, thread;
  uint32_t site, other;
  char text[256];
} Report;

typedef struct {
  void (*entry)(void *);
  void *arguments;
  int grid[3], threads[3];
  int warp_size, resident, check, amd, granule, shared_granule, buffers, ops, warpgroups;  // granules: log2 of bytes
  unsigned seed;
  char *shared;
  int64_t shared_size;
  Buffer *buffer;
  const Op *op;
  int constants;  // of the buffers, the last ones: the module's own
  Report report;
  int64_t counts[4];  // calls, switches, checked accesses, atomics
} Launch;

extern Launch *launch;
extern Lane *current;  // the lane that runs, or on whose behalf a check runs
extern int threads, blocks, progress;

// schedule.c
void report(int kind, uint32_t site, uint32_t other, const char *format, ...);
void wait_here(int state);
// fiber.c
void fiber_start(Lane *lane, void (*run)(void));
void fiber_enter(Lane *lane);
void fiber_leave(Lane *lane);
int fiber_stacks(int count);
int on_stack(const char *at);
char *fiber_stack(int index);
int guarded(int (*run)(void));
void leave(void);  // ends the launch
// clocks.c
int atomic_progress(Lane *lane);
int clocks_make(void);
void clocks_free(void);
Clock *clock_new(void);
void clock_join(Clock *into, const Clock *other);
void clock_clear(Clock *clock);
void barrier_passed(Block *block);
void warp_synced(Lane **lanes, int count);
// shadow.c
extern uint32_t shadow_base;
int shadow_make(size_t bytes);
void *shadow_take(size_t bytes);
void shadow_free(size_t kept);  // unless it is no larger
void checked(char *at, int64_t size, int write, int align, uint32_t site, uint32_t flags);
int in_shared(const char *at);
void through_proxy(const char *at, int64_t size, uint32_t site);
void held_by_products(const Lane *lane, const char *at, int64_t size, uint32_t site, int change);
Buffer *buffer_of(const char *at, int64_t size);
// copies.c
void copies_drop(Lane *lane);
// wgmma_ops.c
void products_end(Lane *lane);  // as its block ends: reports sums that nothing has settled
void products_drop(Lane *lane);
// matrix_ops.c
float bf16(uint16_t bits);
float f16(uint16_t bits);

#define ARGUMENT(type, lane, offset) (*(type *)((lane)->arguments + (offset)))
#define RESULT(type, lane) (*(type *)((lane)->result))
