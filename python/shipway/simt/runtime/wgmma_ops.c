// Hopper's asynchronous products of a warpgroup (128 lanes): D (64 x columns) = A (64 x 16) B (16 x columns) + D, B and
// perhaps A in shared memory behind descriptors. What the product reads counts as being read until its group is waited
// for. D lies apart until then: what the instruction returns are NaNs that say where. Further products take these for
// sums; simt_settle, which stands for assembly without instructions, gives the sums once they are awaited; anything else
// computes NaN, as it may run before the wait: no compiler knows that the wait writes registers. Sums that nothing has
// settled as their thread ends are a finding.
#include "simt.h"
#include <stdlib.h>
#include <string.h>

enum { ROWS = 64, DEPTH = 16, MOST_COLUMNS = 256 };

// The arguments as shipway.simt.wgmma orders them.
typedef struct {
  int64_t columns;
  uint64_t b, a;  // descriptors
  int32_t scale_d, scale_a, scale_b, transposed_a, transposed_b;
  uint32_t a_registers[4];
  float d[];
} Arguments;

struct Product {
  uint64_t a, b;
  int columns, transposed_a, transposed_b, from_shared, group;
  uint32_t site;
  Product *next;
};

// A sum in flight, or one that is settled.
struct Sum {
  float value;
  int group, settled;
  uint32_t site;  // of its last product
};

// Signalling NaNs, which no arithmetic returns: NAME + place among the lane's sums. Data hardly has NAME.
enum { NAME = 0x7F8B5D2E, MOST_SUMS = 0x7FC00000 - NAME };

static Sum *sum_of(Lane *lane, float named) {
  uint32_t bits;
  memcpy(&bits, &named, 4);
  return bits - NAME < (uint32_t)lane->sum_count ? lane->sums + (bits - NAME) : 0;
}
static void out_of_memory(Lane *lane) {
  current = lane;
  report(UNSUPPORTED, lane->site, 0, "no memory for the sums of asynchronous products");
  leave();
}
static Sum *new_sum(Lane *lane) {
  if (lane->sum_count == MOST_SUMS) {
    current = lane;
    report(UNSUPPORTED, lane->site, 0, "more than %d sums of asynchronous products in a thread", MOST_SUMS);
    leave();
  }
  if (lane->sum_count == lane->sum_room) {
    lane->sum_room = lane->sum_room ? 2 * lane->sum_room : MOST_COLUMNS / 2;
    Sum *larger = realloc(lane->sums, lane->sum_room * sizeof *lane->sums);
    if (!larger) out_of_memory(lane);
    lane->sums = larger;
  }
  return lane->sums + lane->sum_count++;
}
float simt_settle(float named, uint32_t site) {
  Sum *sum = sum_of(current, named);
  if (!sum) return named;
  if (sum->group >= current->groups_awaited) {
    report(RACE, site, 0, "use of the sums of an asynchronous product that no wgmma.wait_group has awaited");
    leave();
  }
  current->product_fence = 0;
  sum->settled = 1;
  return sum->value;
}
// Whether sums of the lane come from elsewhere than the product before, and no wgmma.fence has come since ordinary code
// was last given some. That it has written to an A in registers since is not seen.
static int unfenced(Lane *lane) {
  Arguments *mine = (Arguments *)lane->arguments;
  for (int i = 0; i < mine->columns / 2 && !lane->product_fence; i++)
    if (!sum_of(lane, mine->d[i])) return 1;
  return 0;
}

// Address of element (mn, k): bits of the descriptor and canonical layouts of 16-bit types. A transposed matrix is
// contiguous along M or N, else along K. Swizzling exchanges 16-byte units by the bits above 128 bytes.
static char *element(uint64_t descriptor, int transposed, int mn, int k) {
  int64_t start = (descriptor & 0x3FFF) << 4, leading = (descriptor >> 16 & 0x3FFF) << 4;
  int64_t stride = (descriptor >> 32 & 0x3FFF) << 4;
  static const int units[] = {1, 8, 4, 2};  // 16-byte units of a row, without swizzle and with that of 128, 64, 32 bytes
  int row = units[descriptor >> 62], at;
  if (!transposed) {
    at = mn / 8 * stride + mn % 8 * 16 * row + k % 8 * 2;
    at += row == 1 ? k / 8 * leading : k / 8 * 16;
  } else if (row == 1) {
    at = mn % 8 * 2 + mn / 8 * stride + k % 8 * 16 + k / 8 * leading;
  } else {
    at = mn % 8 * 2 + mn / 8 % row * 16 + mn / 8 / row * leading + k % 8 * 16 * row + k / 8 * stride;
  }
  int64_t place = start + at;
  place ^= place >> 3 & 16 * (row - 1);
  return launch->shared + place;
}

// Does something to what an operand reads, 16 bytes at a time.
typedef void Visit(Lane *lane, char *at, uint32_t site);
static void visit_operand(uint64_t descriptor, int transposed, int mns, Lane *lane, uint32_t site, Visit *visit) {
  for (int mn = 0; mn < mns; mn += transposed ? 8 : 1)
    for (int k = 0; k < DEPTH; k += transposed ? 1 : 8) visit(lane, element(descriptor, transposed, mn, k), site);
}
static void visit_product(const Product *product, Lane *lane, Visit *visit) {
  if (product->from_shared) visit_operand(product->a, product->transposed_a, ROWS, lane, product->site, visit);
  visit_operand(product->b, product->transposed_b, product->columns, lane, product->site, visit);
}
static void read_at_begin(Lane *lane, char *at, uint32_t site) {
  (void)lane;
  checked(at, 16, 0, 16, site, 0);
  through_proxy(at, 16, site);
}
static void read_at_end(Lane *lane, char *at, uint32_t site) { (void)lane, checked(at, 16, 0, 16, site, 0); }
static void hold(Lane *lane, char *at, uint32_t site) { held_by_products(lane, at, 16, site, 1); }
static void release(Lane *lane, char *at, uint32_t site) { held_by_products(lane, at, 16, site, -1); }

static void multiply(Lane **lanes, int from_shared, float (*value)(uint16_t)) {
  static float a[ROWS][DEPTH], b[DEPTH][MOST_COLUMNS];
  Arguments *first = (Arguments *)lanes[0]->arguments;
  int columns = first->columns;
  for (int i = 0; i < 128; i++) {
    current = lanes[i];
    if (unfenced(current)) {
      report(RACE, current->site, 0, "asynchronous product without a wgmma.fence before it");
      leave();
    }
    if (memcmp(current->arguments, first, offsetof(Arguments, a_registers))) {
      report(DIVERGENCE, current->site, 0, "asynchronous product of other descriptors or scales than the warpgroup's first lane");
      leave();
    }
  }
  current = lanes[0];
  if (launch->check) {
    Product made = {first->a,    first->b, columns, first->transposed_a, first->transposed_b, from_shared, current->product_groups,
                    current->site, current->products};
    visit_product(&made, current, read_at_begin);
    Product *product = malloc(sizeof *product);
    if (!product) out_of_memory(current);
    *product = made;
    visit_product(product, current, hold);
    current->products = product;
  }
  for (int row = 0; row < ROWS && from_shared; row++)
    for (int k = 0; k < DEPTH; k++) a[row][k] = value(*(uint16_t *)element(first->a, first->transposed_a, row, k));
  for (int t = 0; t < 128 && !from_shared; t++) {
    uint16_t *held = (uint16_t *)((Arguments *)lanes[t]->arguments)->a_registers;
    for (int i = 0; i < 8; i++) a[t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2)][t % 4 * 2 + i % 2 + 8 * (i / 4)] = value(held[i]);
  }
  for (int k = 0; k < DEPTH; k++)
    for (int column = 0; column < columns; column++)
      b[k][column] = value(*(uint16_t *)element(first->b, first->transposed_b, column, k));
  for (int t = 0; t < 128; t++) {
    Arguments *mine = (Arguments *)lanes[t]->arguments;
    for (int i = 0; i < columns / 2; i++) {
      int row = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2), column = i / 4 * 8 + t % 4 * 2 + i % 2;
      Sum *before = sum_of(lanes[t], mine->d[i]);
      float sum = !mine->scale_d ? 0 : before ? before->value : mine->d[i];
      for (int k = 0; k < DEPTH; k++) sum += mine->scale_a * a[row][k] * (mine->scale_b * b[k][column]);
      Sum *held = before ? before : new_sum(lanes[t]);
      *held = (Sum){sum, lanes[0]->product_groups, 0, lanes[0]->site};
      (&RESULT(uint32_t, lanes[t]))[i] = NAME + (held - lanes[t]->sums);
    }
  }
}
void wgmma_bf16(Lane **lanes, int count) { (void)count, multiply(lanes, 1, bf16); }
void wgmma_f16(Lane **lanes, int count) { (void)count, multiply(lanes, 1, f16); }
void wgmma_registers_bf16(Lane **lanes, int count) { (void)count, multiply(lanes, 0, bf16); }
void wgmma_registers_f16(Lane **lanes, int count) { (void)count, multiply(lanes, 0, f16); }

void wgmma_fence(Lane **lanes, int count) {
  for (int i = 0; i < count; i++) lanes[i]->product_fence = 1;
}
void wgmma_commit(Lane **lanes, int count) { (void)count, lanes[0]->product_groups++; }
void wgmma_wait(Lane **lanes, int count) {
  current = lanes[0];
  int awaited = current->product_groups - ARGUMENT(int64_t, current, 0);
  for (int i = 0; i < count; i++)
    if (lanes[i]->groups_awaited < awaited) lanes[i]->groups_awaited = awaited;
  for (Product **at = &current->products; *at;) {
    Product *product = *at;
    if (product->group >= awaited) {
      at = &product->next;
      continue;
    }
    visit_product(product, current, read_at_end);
    visit_product(product, current, release);
    *at = product->next;
    free(product);
  }
}
void products_end(Lane *lane) {
  for (int i = 0; i < lane->sum_count; i++) {
    if (lane->sums[i].settled) continue;
    current = lane;
    report(RACE, lane->sums[i].site, 0, "asynchronous product whose sums nothing settles after a wgmma.wait_group: their use may come before it");
    leave();
  }
}
void products_drop(Lane *lane) {
  while (lane->products) {
    Product *product = lane->products;
    visit_product(product, lane, release);
    lane->products = product->next;
    free(product);
  }
  lane->sum_count = lane->groups_awaited = 0;
}

// What a thread has written before is seen by products of its block once a barrier has passed, or by its own.
void proxy_fence(Lane **lanes, int count) {
  (void)count;
  lanes[0]->proxied = ++lanes[0]->now.clock;
  lanes[0]->proxy_view = lanes[0]->view;
}
