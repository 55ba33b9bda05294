// Threads of a CTA as fibers of one CPU thread: each runs until it waits for others. So nothing depends on the CPU's
// scheduler, and a kernel that hangs is noticed at once.
//
// The order in which fibers run is free. reverse_order turns it round, random_order lets one warp run at a time, starve lets some
// run only when no other can: a kernel that lacks a barrier then gives another result.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <cstdio>
#include <cstdlib>

constexpr int MOST_FIBERS = 1024, STACK_BYTES = 256 * 1024;

[[noreturn]] inline void give_up(const char* reason) {
    std::fprintf(stderr, "emulated kernel: %s\n", reason);
    std::abort();
}

struct Fiber {
    ucontext_t start;
    jmp_buf state;
    bool is_started, is_waiting, is_finished;
};
static Fiber fibers[MOST_FIBERS];
static char* const stacks = static_cast<char*>(std::malloc(size_t(MOST_FIBERS) * STACK_BYTES));
static unsigned* fiber;  // index of the running one
static jmp_buf scheduler;
static void (*run_kernel)(const void*);
static const void* kernel_of_fibers;
static bool reverse_order = false;
extern "C" void set_reverse_order(bool reverse) { reverse_order = reverse; }
static bool random_order = false;
extern "C" void set_random_order(bool is_random) { random_order = is_random; }
static unsigned first_starved = 0, starved = 0;
extern "C" void starve(unsigned first, unsigned count) { first_starved = first, starved = count; }

// Lets the others run. The scheduler comes back when `is_waiting` is false.
inline void switch_to_others() {
    if (!_setjmp(fibers[*fiber].state)) _longjmp(scheduler, 1);
}

// What a fiber does: the next CTA goes on where this one has ended, because a new fiber takes system calls.
inline void run_fiber() {
    for (;;) {
        run_kernel(kernel_of_fibers);
        fibers[*fiber].is_finished = true;
        switch_to_others();
    }
}

static unsigned idle_rounds = 0;  // how often all fibers ran, and those in wait_until only found nothing to do

// An instruction that takes long: others run meanwhile.
inline void let_time_pass() {
    idle_rounds = 0;
    switch_to_others();
}

template <class Condition>
inline void wait_until(Condition condition) {
    while (!condition()) {
        if (idle_rounds > 4) give_up("it hangs");
        switch_to_others();
    }
    idle_rounds = 0;
}

// Where fibers wait for each other.
struct Meeting {
    unsigned members = 0, present = 0, blocked = 0, waiting[MOST_FIBERS];
    const void* purpose = nullptr;
    void* operands[32];

    void wait() {
        if (arrive()) leave();
    }
    // Counts as one that came, and goes on.
    void pass() {
        if (++present == members) leave();
    }
    // The last one to come calls `execute` for all. All must have come for the same `purpose`.
    template <class Execute>
    void wait(const void* what, unsigned place, void* operand, Execute execute) {
        if (present == 0) purpose = what;
        if (purpose != what) give_up("lanes of a warp execute different instructions");
        operands[place] = operand;
        if (!arrive()) return;
        execute(operands);
        leave();
    }

   private:
    // Waits; true at once for the last one, which must then call leave().
    bool arrive() {
        if (++present == members) return true;
        waiting[blocked++] = *fiber;
        fibers[*fiber].is_waiting = true;
        switch_to_others();
        return false;
    }
    void leave() {
        for (unsigned i = 0; i < blocked; ++i) fibers[waiting[i]].is_waiting = false;
        present = blocked = 0;
        idle_rounds = 0;
    }
};

template <class Kernel>
inline void run_fibers(unsigned count, unsigned* index, const Kernel& kernel) {
    fiber = index;
    kernel_of_fibers = &kernel;
    run_kernel = [](const void* kernel) { (*static_cast<const Kernel*>(kernel))(); };
    for (unsigned i = 0; i < count; ++i) fibers[i].is_waiting = fibers[i].is_finished = false;
    idle_rounds = 0;
    for (volatile bool is_running = true; is_running;) {  // volatile: it lives across _longjmp
        is_running = false;
        bool anyone_ran = false;
        ++idle_rounds;
        const unsigned warp = random_order ? std::rand() % (count / 32) : 0;
        for (volatile unsigned i = 0; i < count; i = i + 1) {
            Fiber& next = fibers[reverse_order ? count - 1 - i : i];
            if (next.is_finished) continue;
            is_running = true;
            if (next.is_waiting) continue;
            anyone_ran = true;
            *fiber = &next - fibers;
            if (*fiber - first_starved < starved && idle_rounds < 3) continue;
            if (random_order && *fiber / 32 != warp) {
                idle_rounds = 0;  // it may have found something to do
                continue;
            }
            if (_setjmp(scheduler)) continue;
            if (next.is_started) _longjmp(next.state, 1);
            next.is_started = true;
            getcontext(&next.start);
            next.start.uc_stack = {.ss_sp = stacks + size_t(*fiber) * STACK_BYTES, .ss_size = STACK_BYTES};
            makecontext(&next.start, run_fiber, 0);
            setcontext(&next.start);
        }
        if (is_running && !anyone_ran) give_up("it hangs: threads wait for others that have finished or wait elsewhere");
    }
}
