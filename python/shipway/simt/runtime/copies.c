// Copies the device makes by itself: cp.async, which lands when its group is waited for, and AMD's buffer accesses.
#include "simt.h"
#include <stdlib.h>
#include <string.h>

static void start_copy(Lane *lane, int filled) {
  Copy *copy = malloc(sizeof *copy), **last = &lane->copies;
  *copy = (Copy){(char *)(uintptr_t)ARGUMENT(uint32_t, lane, 0), ARGUMENT(char *, lane, 8), ARGUMENT(int, lane, 16),
                 filled, lane->groups, lane->site, 0};
  while (*last) last = &(*last)->next;
  *last = copy;
  if (!launch->check) return;
  if (copy->size != 4 && copy->size != 8 && copy->size != 16) {
    report(MISALIGNED, lane->site, 0, "asynchronous copy of %d bytes: 4, 8 and 16 exist", copy->size);
    leave();
  }
  if (filled < 0 || filled > copy->size) {
    report(BOUNDS, lane->site, 0, "asynchronous copy of %d bytes reads %d", copy->size, filled);
    leave();
  }
  if (filled) checked(copy->source, filled, 0, copy->size, lane->site, 0);
  checked(copy->target, copy->size, 1, copy->size, lane->site, PENDING);
}
void copy_async(Lane **lanes, int count) { (void)count, start_copy(*lanes, ARGUMENT(int, *lanes, 16)); }
void copy_async_filled(Lane **lanes, int count) { (void)count, start_copy(*lanes, ARGUMENT(int, *lanes, 20)); }

void copy_commit(Lane **lanes, int count) { (void)count, lanes[0]->groups++; }

static void finish(Lane *lane, int groups_left) {
  while (lane->copies && lane->copies->group < lane->groups - groups_left) {
    Copy *copy = lane->copies;
    if (launch->check) checked(copy->target, copy->size, 1, 1, copy->site, 0);
    memset(copy->target, 0, copy->size);
    memcpy(copy->target, copy->source, copy->filled);
    lane->copies = copy->next;
    free(copy);
  }
}
void copy_wait(Lane **lanes, int count) { (void)count, finish(*lanes, ARGUMENT(int, *lanes, 0)); }
void copy_wait_all(Lane **lanes, int count) {
  (void)count;
  lanes[0]->groups++;
  finish(*lanes, 0);
}
void copies_drop(Lane *lane) {
  while (lane->copies) {
    Copy *copy = lane->copies;
    lane->copies = copy->next;
    free(copy);
  }
}

// A raw buffer access: base and size come from the resource; beyond its size reads give 0 and writes do nothing.
static char *resource_address(Lane *lane, const uint32_t *resource, uint32_t offset, uint32_t scalar, int size) {
  char *base = (char *)(uintptr_t)(resource[0] | (uint64_t)(resource[1] & 0xFFFF) << 32);
  if ((uint64_t)offset + size > resource[2]) return 0;
  (void)lane;
  return base + offset + scalar;
}
static void buffer_load(Lane *lane, int size) {
  char *at = resource_address(lane, &ARGUMENT(uint32_t, lane, 0), ARGUMENT(uint32_t, lane, 16),
                              ARGUMENT(uint32_t, lane, 20), size);
  if (at && launch->check) checked(at, size, 0, size < 4 ? size : 4, lane->site, 0);
  if (at) memcpy(lane->result, at, size);
  else memset(lane->result, 0, size);
}
static void buffer_store(Lane *lane, int size) {  // the value first, then the resource at a multiple of 16
  int after = (size + 15) & ~15;
  char *at = resource_address(lane, &ARGUMENT(uint32_t, lane, after), ARGUMENT(uint32_t, lane, after + 16),
                              ARGUMENT(uint32_t, lane, after + 20), size);
  if (!at) return;
  if (launch->check) checked(at, size, 1, size < 4 ? size : 4, lane->site, 0);
  memcpy(at, lane->arguments, size);
}
#define SIZED(size)                                                                        \
  void buffer_load_##size(Lane **lanes, int count) { (void)count, buffer_load(*lanes, size); } \
  void buffer_store_##size(Lane **lanes, int count) { (void)count, buffer_store(*lanes, size); }
SIZED(1)
SIZED(2)
SIZED(4)
SIZED(8)
SIZED(16)
