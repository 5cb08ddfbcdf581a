// What compiled kernels call by the names of the compiler's own library, where the host's LLVM does not expand it.
#include "simt.h"
#include <string.h>

// float32 to bfloat16, to nearest even. Returned in the register of a 16-bit float, as LLVM expects.
_Float16 __truncsfbf2(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t rounded = value != value ? bits >> 16 | 0x40 : (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  _Float16 out;
  return memcpy(&out, &rounded, 2), out;
}

// llvm.trap: what abort() and a failed assertion become.
void trapped(Lane **lanes, int count) {
  (void)count;
  report(CRASH, lanes[0]->site, 0, "the kernel aborts");
  leave();
}
