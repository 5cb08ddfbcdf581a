// Fibers: a stack and a saved stack pointer per lane. A fault in a fiber ends the launch, not the process.
#define _GNU_SOURCE
#include "simt.h"
#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>

#define STACK (128 << 10)
#define GUARD (4 << 10)
#define SHIFT 448  // between the tops of stacks: as multiples of STACK they would all share a few cache lines

static char *pool;
static int pooled;

// The stacks stay mapped between launches: their pages are paid for once. The lowest page of each is out of bounds.
int fiber_stacks(int count) {
  if (count <= pooled) return 0;
  if (pool) munmap(pool, (size_t)pooled * STACK);
  pooled = 0;
  pool = mmap(0, (size_t)count * STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pool == MAP_FAILED) return pool = 0, -1;
  for (int i = 0; i < count; i++) mprotect(pool + (size_t)i * STACK, GUARD, PROT_NONE);
  return pooled = count, 0;
}
char *fiber_stack(int index) { return pool + (size_t)index * STACK; }
int on_stack(const char *at) { return (uintptr_t)(at - pool) < (uintptr_t)pooled * STACK; }

#if defined(__x86_64__) && !defined(SIMT_UCONTEXT)
static void *outside;
__attribute__((naked, noinline)) static void change(void **save __attribute__((unused)), void *to __attribute__((unused))) {
  __asm__ volatile("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15;"
                   "mov %rsp, (%rdi); mov %rsi, %rsp;"
                   "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}
void fiber_start(Lane *lane, void (*run)(void)) {
  void **top = (void **)(lane->stack + STACK - lane->index % 64 * SHIFT);
  *--top = 0;
  *--top = (void *)run;
  for (int i = 0; i < 6; i++) *--top = 0;
  lane->stack_pointer = top;
}
void fiber_enter(Lane *lane) { change(&outside, lane->stack_pointer); }
void fiber_leave(Lane *lane) { change(&lane->stack_pointer, outside); }
#else
#include <ucontext.h>
static ucontext_t outside;  // slower: each switch asks the kernel for the signal mask
void fiber_start(Lane *lane, void (*run)(void)) {
  ucontext_t *context = (ucontext_t *)(lane->stack + GUARD);  // at the far end of the stack
  getcontext(context);
  char *low = lane->stack + GUARD + ((sizeof *context + 63) & ~63ul);
  context->uc_stack.ss_sp = low;
  context->uc_stack.ss_size = lane->stack + STACK - low;
  context->uc_link = 0;
  makecontext(context, run, 0);
  lane->stack_pointer = context;
}
void fiber_enter(Lane *lane) { swapcontext(&outside, lane->stack_pointer); }
void fiber_leave(Lane *lane) { swapcontext(lane->stack_pointer, &outside); }
#endif

static sigjmp_buf landing;  // reached from any fiber: none of them is entered again
static void faulted(int number, siginfo_t *info, void *context) {
  (void)context;
  if (number == SIGFPE) report(CRASH, 0, 0, "integer division by zero");
  else if (on_stack(info->si_addr)) report(CRASH, 0, 0, "a thread uses more than %d bytes of private memory", STACK - GUARD);
  else report(CRASH, 0, 0, "access to address %p", info->si_addr);
  siglongjmp(landing, 1);
}

void leave(void) { siglongjmp(landing, 1); }

// Runs `run`; a fault in it, or `leave`, gives -1.
int guarded(int (*run)(void)) {
  static char alternative[64 << 10];
  static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE};
  struct sigaction old[3], mine = {.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
  stack_t mine_stack = {.ss_sp = alternative, .ss_size = sizeof alternative}, old_stack;
  mine.sa_sigaction = faulted;
  sigaltstack(&mine_stack, &old_stack);
  for (int i = 0; i < 3; i++) sigaction(faults[i], &mine, old + i);
  int code = sigsetjmp(landing, 1) ? -1 : run();
  for (int i = 0; i < 3; i++) sigaction(faults[i], old + i, 0);
  if (old_stack.ss_flags & SS_DISABLE || old_stack.ss_sp) sigaltstack(&old_stack, 0);
  return code;
}
