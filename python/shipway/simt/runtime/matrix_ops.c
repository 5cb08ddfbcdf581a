// Matrix units, whole warps at a time: D[i][j] = C[i][j] + sum over k of A[i][k] B[k][j], products exact in float32,
// summed in ascending k. The hardware's order is not documented. Lane maps are those of the documents in intrinsics.toml.
#include "simt.h"
#include <string.h>

float bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  return memcpy(&value, &wide, 4), value;
}
float f16(uint16_t bits) {
  _Float16 value;
  return memcpy(&value, &bits, 2), value;
}
// float32 as tf32, which lies in its upper 19 bits as far as hardware has shown; that is not documented, so that an
// operand is defined only where it has been converted.
#define BELOW_TF32 0x1FFFu
void round_tf32(Lane **lanes, int count) {
  (void)count;
  uint32_t bits = ARGUMENT(uint32_t, *lanes, 0), size = bits & 0x7FFFFFFF;
  if (size < 0x7F800000) bits += (BELOW_TF32 + 1) / 2;
  RESULT(uint32_t, *lanes) = size > 0x7F800000 ? 0x7FFFFFFF & ~BELOW_TF32 : bits & ~BELOW_TF32;
}
static float tf32(Lane *lane, uint32_t bits) {
  float value;
  if (bits & BELOW_TF32) {
    memcpy(&value, &bits, 4);
    current = lane;
    report(UNDEFINED, lane->site, 0, "%s: lane %d gives %.9g, which is not rounded to tf32", lane->op->name, lane->lane, value);
    leave();
  }
  return memcpy(&value, &bits, 4), value;
}

static int whole(int count) {
  if (count == launch->warp_size) return 1;
  report(DIVERGENCE, current->site, 0, "%s by %d of %d lanes", current->op->name, count, launch->warp_size);
  leave();
  return 0;
}

#define HALVES(lane, offset) ((uint16_t *)((lane)->arguments + (offset)))

// PTX mma.m16n8k16 of 16-bit types: A in 4 registers, B in 2, C in 4.
static inline void mma_16816(Lane **lanes, float (*value)(uint16_t)) {
  float a[16][16], b[16][8];
  for (int t = 0; t < 32; t++) {
    uint16_t *p = HALVES(lanes[t], 0);
    for (int i = 0; i < 8; i++) a[t / 4 + 8 * (i / 2 % 2)][t % 4 * 2 + i % 2 + 8 * (i / 4)] = value(p[i]);
    for (int i = 0; i < 4; i++) b[t % 4 * 2 + i % 2 + 8 * (i / 2)][t / 4] = value(p[8 + i]);
  }
  for (int t = 0; t < 32; t++)
    for (int i = 0; i < 4; i++) {
      int row = t / 4 + 8 * (i / 2), column = t % 4 * 2 + i % 2;
      float sum = ARGUMENT(float, lanes[t], 24 + 4 * i);
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
      (&RESULT(float, lanes[t]))[i] = sum;
    }
}
void mma_m16n8k16_bf16(Lane **lanes, int count) {
  if (whole(count)) mma_16816(lanes, bf16);
}
void mma_m16n8k16_f16(Lane **lanes, int count) {
  if (whole(count)) mma_16816(lanes, f16);
}
void mma_m16n8k8_tf32(Lane **lanes, int count) {
  if (!whole(count)) return;
  float a[16][8], b[8][8];
  for (int t = 0; t < 32; t++) {
    uint32_t *p = (uint32_t *)lanes[t]->arguments;
    for (int i = 0; i < 4; i++) a[t / 4 + 8 * (i % 2)][t % 4 + 4 * (i / 2)] = tf32(lanes[t], p[i]);
    for (int i = 0; i < 2; i++) b[t % 4 + 4 * i][t / 4] = tf32(lanes[t], p[4 + i]);
  }
  for (int t = 0; t < 32; t++)
    for (int i = 0; i < 4; i++) {
      int row = t / 4 + 8 * (i / 2), column = t % 4 * 2 + i % 2;
      float sum = ARGUMENT(float, lanes[t], 24 + 4 * i);
      for (int k = 0; k < 8; k++) sum += a[row][k] * b[k][column];
      (&RESULT(float, lanes[t]))[i] = sum;
    }
}

// PTX ldmatrix: lane 8 m + r names row r of matrix m; lane t gets elements 2 (t % 4) and the next of row t / 4, or with
// .trans elements t / 4 of rows 2 (t % 4) and the next.
static void load_matrix(Lane **lanes, int count, int matrices, int transposed) {
  if (!whole(count)) return;
  for (int t = 0; t < 8 * matrices; t++) {
    current = lanes[t];
    if (launch->check) checked(ARGUMENT(char *, lanes[t], 0), 16, 0, 16, lanes[t]->site, 0);
  }
  for (int t = 0; t < 32; t++)
    for (int m = 0; m < matrices; m++)
      for (int i = 0; i < 2; i++) {
        int row = transposed ? t % 4 * 2 + i : t / 4, column = transposed ? t / 4 : t % 4 * 2 + i;
        uint16_t *source = ARGUMENT(uint16_t *, lanes[8 * m + row], 0);
        ((uint16_t *)lanes[t]->result)[2 * m + i] = source[column];
      }
}
void load_matrix_1(Lane **lanes, int count) { load_matrix(lanes, count, 1, 0); }
void load_matrix_2(Lane **lanes, int count) { load_matrix(lanes, count, 2, 0); }
void load_matrix_4(Lane **lanes, int count) { load_matrix(lanes, count, 4, 0); }
void load_matrix_1_transposed(Lane **lanes, int count) { load_matrix(lanes, count, 1, 1); }
void load_matrix_2_transposed(Lane **lanes, int count) { load_matrix(lanes, count, 2, 1); }
void load_matrix_4_transposed(Lane **lanes, int count) { load_matrix(lanes, count, 4, 1); }

// The 16x16x16 products of AMD: `held` elements of A and B per lane, C in `rows` registers.
typedef struct {
  int held, rows;
  int (*k_of)(int lane, int i);   // k of element i; its row of A, or column of B, is lane % 16
  int (*row_of)(int lane, int i);  // row of C in register i; its column is lane % 16
} Map;
static inline void product_16(Lane **lanes, const Map *map, float (*value)(uint16_t)) {
  float a[16][16], b[16][16];
  for (int t = 0; t < launch->warp_size; t++) {
    uint16_t *p = HALVES(lanes[t], 0);
    for (int i = 0; i < map->held; i++) {
      int k = map->k_of(t, i);
      a[t % 16][k] = value(p[i]);
      b[k][t % 16] = value(p[map->held + i]);
    }
  }
  for (int t = 0; t < launch->warp_size; t++)
    for (int i = 0; i < map->rows; i++) {
      int row = map->row_of(t, i), column = t % 16;
      float sum = ARGUMENT(float, lanes[t], 4 * map->held + 4 * i);
      for (int k = 0; k < 16; k++) sum += a[row][k] * b[k][column];
      (&RESULT(float, lanes[t]))[i] = sum;
    }
}
static int quarter(int lane, int i) { return lane / 16 * 4 + i; }
static int whole_row(int lane, int i) { return (void)lane, i; }
static int every_other(int lane, int i) { return 2 * i + lane / 16; }
static int half_row(int lane, int i) { return lane / 16 * 8 + i; }
static const Map CDNA = {4, 4, quarter, quarter}, RDNA3 = {16, 8, whole_row, every_other}, RDNA4 = {8, 8, half_row, half_row};

#define PRODUCT(name, map, value) \
  void name(Lane **lanes, int count) { \
    if (whole(count)) product_16(lanes, &map, value); \
  }
// RDNA3 wants A and B twice: lanes 16 to 31 must hold what lanes 0 to 15 do.
static int repeated(Lane **lanes) {
  for (int t = 0; t < 16; t++)
    if (memcmp(lanes[t]->arguments, lanes[t + 16]->arguments, 64)) {
      report(DIVERGENCE, lanes[t]->site, 0, "%s: lane %d does not hold the A and B of lane %d", lanes[t]->op->name, t + 16, t);
      leave();
    }
  return 1;
}
PRODUCT(mfma_16_bf16, CDNA, bf16)
PRODUCT(mfma_16_f16, CDNA, f16)
void wmma_rdna3_bf16(Lane **lanes, int count) {
  if (whole(count) && repeated(lanes)) product_16(lanes, &RDNA3, bf16);
}
void wmma_rdna3_f16(Lane **lanes, int count) {
  if (whole(count) && repeated(lanes)) product_16(lanes, &RDNA3, f16);
}
PRODUCT(wmma_rdna4_bf16, RDNA4, bf16)
PRODUCT(wmma_rdna4_f16, RDNA4, f16)
