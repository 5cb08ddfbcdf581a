// Shadow memory: of each granule the last write and the last read, checked against the clock of whoever comes next.
#include "simt.h"
#include <stdio.h>
#include <sys/mman.h>

// Shadow memory stays mapped and is never cleared: the blocks of all launches are numbered on, and what an earlier
// launch noted has a lower number than `shadow_base`.
uint32_t shadow_base;
static uint32_t numbered;
static char *room;
static size_t rooms, taken;

int shadow_make(size_t bytes) {
  taken = 0;
  if (numbered > UINT32_MAX - (uint32_t)blocks - 1) shadow_free(0), numbered = 0;
  if (bytes > rooms) {
    shadow_free(0);
    room = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (room == MAP_FAILED) return room = 0, -1;
    rooms = bytes;
  }
  shadow_base = numbered;
  numbered += blocks;
  return 0;
}
void *shadow_take(size_t bytes) { return taken += bytes, room + taken - bytes; }
void shadow_free(size_t kept) {
  if (rooms > kept) munmap(room, rooms), room = 0, rooms = 0;
}

int in_shared(const char *at) { return (uintptr_t)(at - launch->shared) < SHARED_ROOM; }

Buffer *buffer_of(const char *at, int64_t size) {
  static int last;
  if (last < launch->buffers) {
    Buffer *buffer = launch->buffer + last;
    if (at >= buffer->start && at + size <= buffer->start + buffer->size) return buffer;
  }
  for (int i = 0; i < launch->buffers; i++) {
    Buffer *buffer = launch->buffer + i;
    if (at >= buffer->start && at + size <= buffer->start + buffer->size) return last = i, buffer;
  }
  return 0;
}

// Whether the access that `stamp` records is ordered before whatever the current lane does now.
static int ordered(const Stamp *stamp, int write) {
  Lane *lane = current;
  Block *block = lane->block;
  int other = stamp->block - shadow_base - 1;
  int many = stamp->flags & (OF_WARP | OF_BLOCK);
  if (other == block->index) {
    if (stamp->epoch < lane->view) return 1;
    if (!many && stamp->lane == lane->index) return 1;
    if (!(stamp->flags & OF_BLOCK) && stamp->lane / launch->warp_size == lane->warp) {
      uint32_t seen = many ? block->warp_epoch[lane->warp] : block->lanes[stamp->lane].synced;
      if (stamp->clock < seen) return 1;
    }
  } else if (!(write && launch->amd)) {  // on AMD a barrier alone does not pass writes on to other blocks
    if (block->seen && stamp->epoch < block->seen->epoch[other]) return 1;
    if (lane->seen && stamp->epoch < lane->seen->epoch[other]) return 1;
  }
  if (many) return 0;
  int64_t who = (int64_t)other * threads + stamp->lane;
  return (block->seen && stamp->clock < block->seen->lane[who]) || (lane->seen && stamp->clock < lane->seen->lane[who]);
}

static int atomic_pair(const Stamp *stamp, uint32_t flags) {
  if (!(stamp->flags & flags & ATOMIC)) return 0;
  return !((stamp->flags | flags) & IN_BLOCK) || stamp->block == current->now.block;
}

static void race(const char *what, const char *at, int64_t offset, const Stamp *stamp, const char *was, uint32_t site) {
  Buffer *buffer = buffer_of(at, 1);
  char place[64];
  if (buffer) {
    int64_t byte = at + offset - buffer->start;
    snprintf(place, sizeof place, "byte %lld of argument %d", (long long)byte, buffer->argument);
  } else {
    snprintf(place, sizeof place, "byte %lld of shared memory", (long long)(at + offset - launch->shared));
  }
  report(RACE, site, stamp->site, "%s of %s unordered with the %s by block %d thread %d", what, place, was,
         stamp->block - shadow_base - 1, stamp->lane);
}

static int same_moment(const Stamp *stamp, const Stamp *now) {
  return stamp->block == now->block && stamp->lane == now->lane && stamp->clock == now->clock &&
         stamp->epoch == now->epoch && !stamp->flags;
}

// The reader to remember of a granule that `before` has read: both, where no order between them is known.
static void note_read(Stamp *before, uint32_t site, uint32_t flags) {
  Lane *lane = current;
  Stamp now = lane->now;
  now.site = site;
  now.flags = flags;
  if (before->block == now.block && !((before->flags | flags) & ATOMIC) && !ordered(before, 0)) {
    if (before->flags & OF_BLOCK) return;
    if (before->lane / launch->warp_size == lane->warp) {
      if (before->flags & OF_WARP) return;
      now.flags |= OF_WARP;
      now.clock = lane->block->warp_epoch[lane->warp];
    } else {
      now.flags |= OF_BLOCK;
    }
  }
  *before = now;
}

static void touch(Shadow *shadow, int64_t count, int write, const char *at, uint32_t site, uint32_t flags, int shared) {
  Lane *lane = current;
  int granule = shared ? launch->shared_granule : launch->granule;
  for (int64_t i = 0; i < count; i++, shadow++) {
    Stamp *last = &shadow->write;
    if (shared ? last->block == lane->now.block : last->block > shadow_base) {
      if (!same_moment(last, &lane->now)) {
        if (last->flags & PENDING && !(write && last->lane == lane->index && last->block == lane->now.block)) {
          report(RACE, site, last->site, "%s of shared memory that an asynchronous copy of thread %d has not completed",
                 write ? "write" : "read", last->lane);
          leave();
        }
        if (!atomic_pair(last, flags) && !ordered(last, 1)) {
          race(write ? "write" : "read", at, (i << granule), last, "write", site);
          leave();
        }
      }
    } else if (shared && !write) {
      report(UNINITIALISED, site, 0, "read of byte %lld of shared memory, which nobody has written",
             (long long)(at + (i << granule) - launch->shared));
      leave();
    }
    if (!write) {
      if (!same_moment(&shadow->read, &lane->now)) note_read(&shadow->read, site, flags);
      continue;
    }
    if (shadow->products) {
      report(RACE, site, shadow->product_site, "write of shared memory that an asynchronous product may still read");
      leave();
    }
    Stamp *reader = &shadow->read;
    int read = shared ? reader->block == lane->now.block : reader->block > shadow_base;
    if (read && !same_moment(reader, &lane->now) && !atomic_pair(reader, flags) && !ordered(reader, 0)) {
      race("write", at, (i << granule), reader, "read", site);
      leave();
    }
    *last = lane->now;
    last->site = site;
    last->flags = flags;
  }
}

// Whether an asynchronous product sees what the bytes were last written with: the writer, or the current lane after a
// barrier, must have fenced the proxies.
void through_proxy(const char *at, int64_t size, uint32_t site) {
  Lane *lane = current;
  Block *block = lane->block;
  int64_t offset = at - launch->shared;
  for (int64_t i = offset >> launch->shared_granule; i <= (offset + size - 1) >> launch->shared_granule; i++) {
    Stamp *last = &block->shadow[i].write;
    if (last->block != lane->now.block || last->clock < block->lanes[last->lane].proxied || last->epoch < lane->proxy_view) continue;
    report(RACE, site, last->site, "asynchronous product reads what no fence.proxy.async has followed");
    leave();
  }
}

// Counts the asynchronous products that may still read bytes of the shared memory of a lane's block: one more or one less.
void held_by_products(const Lane *lane, const char *at, int64_t size, uint32_t site, int change) {
  int64_t offset = at - launch->shared;
  for (int64_t i = offset >> launch->shared_granule; i <= (offset + size - 1) >> launch->shared_granule; i++) {
    Shadow *shadow = lane->block->shadow + i;
    shadow->products += change;
    shadow->product_site = site;
  }
}

static int64_t granules(int64_t offset, int64_t size, int granule) {
  return size > 0 ? ((offset + size - 1) >> granule) - (offset >> granule) + 1 : 0;
}

// Checks an access of the current lane before it happens. Never returns to the lane when something is wrong.
void checked(char *at, int64_t size, int write, int align, uint32_t site, uint32_t flags) {
  launch->counts[2]++;
  if (align > 1 && (uintptr_t)at % align) {
    report(MISALIGNED, site, 0, "%s at an address that is no multiple of %d", write ? "write" : "read", align);
    leave();
  }
  if (in_shared(at)) {
    int64_t offset = at - launch->shared;
    if (offset + size > launch->shared_size) {
      report(BOUNDS, site, 0, "%s of %lld bytes at byte %lld of %lld bytes of shared memory", write ? "write" : "read",
             (long long)size, (long long)offset, (long long)launch->shared_size);
      leave();
    }
    int granule = launch->shared_granule;
    touch(current->block->shadow + (offset >> granule), granules(offset, size, granule), write, at, site, flags, 1);
    return;
  }
  Buffer *buffer = buffer_of(at, size);
  if (buffer) {
    if (buffer - launch->buffer >= launch->buffers - launch->constants) return;
    int64_t offset = at - buffer->start;
    if (write) buffer->written = 1;
    int granule = launch->granule;
    touch(buffer->shadow + (offset >> granule), granules(offset, size, granule), write, at, site, flags, 0);
    return;
  }
  if (on_stack(at)) return;
  int64_t nearest = INT64_MAX, distance = 0;
  int which = -1;
  for (int i = 0; i < launch->buffers - launch->constants; i++) {
    Buffer *candidate = launch->buffer + i;
    int64_t before = candidate->start - at, after = at - candidate->start - candidate->size;
    int64_t gap = before > after ? before : after;
    if (gap < nearest) nearest = gap, which = i, distance = at - candidate->start;
  }
  if (which >= 0 && nearest < (1 << 24))
    report(BOUNDS, site, 0, "%s of %lld bytes at byte %lld of argument %d of %lld bytes", write ? "write" : "read",
           (long long)size, (long long)distance, launch->buffer[which].argument, (long long)launch->buffer[which].size);
  else
    report(BOUNDS, site, 0, "%s of %lld bytes at %p, outside every argument", write ? "write" : "read", (long long)size,
           at);
  leave();
}

// Stands before every load and store of the device code. A loop that only reads must let others go on.
void simt_access(char *at, int64_t size, int write, int align, uint32_t site) {
  static uint32_t reads;
  if (write) progress = 1;
  else if (!(++reads % (1 << 16))) wait_here(READY);
  checked(at, size, write, align, site, 0);
}
