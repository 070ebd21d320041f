/* Runs the blocks of a kernel on the host, one after another, each thread of a block as a fiber.
 *
 * A thread runs until it waits: at __syncthreads for its block, at a shuffle or __syncwarp for its warp.  Threads, warps
 * and blocks go in ascending or descending order, so that a missing barrier shows as another result.  What else shows:
 *
 *     memory            a kernel works on copies of its arrays that end at pages which cannot be touched (and, where the
 *                       length is no multiple of 32, bytes that must not change): beyond the array is an error
 *     shared memory     filled with `poison` before each block
 *     barriers          threads that wait at different lines, or for a thread that has ended, are an error
 *     index, alignment  the compiler traps (-fsanitize=bounds,alignment)
 *
 * The caller holds Python's lock: one kernel runs at a time.
 */
#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

struct Three {
    unsigned int x, y, z;
};

struct Emulator { /* as mt_emulator in cuda_emulation.h */
    Three thread, block, threads, blocks;
    void *dynamic;
    void (*barrier)(int line);
    int (*barrier_sum)(int line, int value, int how);
    unsigned long long (*exchange)(unsigned mask, unsigned long long bits, int source, int line, int kind);
    void (*fail)(const char *why, int line);
};

enum State : unsigned char { FRESH, READY, AT_BARRIER, AT_WARP, DONE };
constexpr int WARP = 32, MOST = 1024;
constexpr size_t STACK = 128 << 10, PAGE = 4096, ALIGNED = 32; /* the widest load of a kernel */

Emulator emu;

/* ------------------------------------------------------------------------------------------------------------ fibers */

#if defined(__x86_64__)
extern "C" void mt_switch(void **save, void *load);
asm(R"(
.text
.globl mt_switch
.hidden mt_switch
.type mt_switch,@function
mt_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
.size mt_switch,.-mt_switch
)");
typedef void *Context;
void enter();
void switch_to(Context &from, Context &to) { mt_switch(&from, to); }
void prepare(Context &context, char *top) {
    void **sp = (void **)((uintptr_t)top & ~(uintptr_t)15);
    *--sp = nullptr;             /* where `enter` would return to: it never does; leaves the stack as a call does */
    *--sp = (void *)&enter;
    for (int i = 0; i < 6; i++) *--sp = nullptr;
    context = sp;
}
#else
typedef ucontext_t Context;
void enter();
void switch_to(Context &from, Context &to) { swapcontext(&from, &to); }
void prepare(Context &context, char *top) {
    getcontext(&context);
    context.uc_stack.ss_sp = top - (STACK - 4 * PAGE);
    context.uc_stack.ss_size = STACK - 4 * PAGE;
    context.uc_link = nullptr;
    makecontext(&context, enter, 0);
}
#endif

struct Fiber {
    Context context;
    int stack;
    int line, kind, source;
    unsigned mask;
};
Fiber fibers[MOST];
State state[MOST];
Three place[MOST];
unsigned long long slots[2][MOST];
unsigned char parity[MOST / WARP];
Context main_context;
std::vector<char *> stacks; /* their tops */
std::vector<int> idle;
int count, warps, current, warp, lane; /* the thread that runs; where the search for the next one goes on */
bool down;
int votes[3], vote_of_last[3];
void (*invoke)(void **);
void **arguments;

char error_text[256];
sigjmp_buf way_out;
volatile sig_atomic_t is_running;

[[noreturn]] void give_up() { siglongjmp(way_out, 1); }

[[noreturn]] void fail(const char *why, int line) {
    snprintf(error_text, sizeof error_text, "%s (line %d, thread %d, block %u %u %u)", why, line, current, emu.block.x,
             emu.block.y, emu.block.z);
    give_up();
}

int new_stack() {
    if (!idle.empty()) {
        const int taken = idle.back();
        idle.pop_back();
        return taken;
    }
    char *memory = (char *)mmap(nullptr, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) fail("no memory for a stack", 0);
    mprotect(memory, PAGE, PROT_NONE);
    /* Not all at the same place of their page: the cache could hold but a few such. */
    stacks.push_back(memory + STACK - (stacks.size() % 37) * 320);
    return (int)stacks.size() - 1;
}

bool warp_goes_on(int first, int end) {
    int waiting = 0, live = 0, one = -1;
    bool same = true;
    for (int t = first; t < end; t++) {
        live += state[t] != DONE;
        if (state[t] != AT_WARP) continue;
        waiting++;
        if (one < 0) one = t;
        same = same && fibers[t].line == fibers[one].line && fibers[t].kind == fibers[one].kind;
    }
    if (!waiting) return false;
    current = one;
    if (fibers[one].mask != 0xFFFFFFFFu) fail("a warp operation with a mask that is not full", fibers[one].line);
    if (!same) fail("threads of a warp wait at different warp operations", fibers[one].line);
    if (waiting < live) fail("a warp operation that not all threads of the warp reach", fibers[one].line);
    if (live < end - first) fail("a warp operation with threads that have ended", fibers[one].line);
    parity[first / WARP] ^= 1;
    for (int t = first; t < end; t++) state[t] = READY;
    return true;
}

bool block_goes_on() {
    int one = -1;
    for (int t = 0; t < count; t++) {
        if (state[t] == DONE) continue;
        if (one < 0) one = t;
        if (fibers[t].line != fibers[one].line) {
            current = t;
            fail("threads of a block wait at different __syncthreads()", fibers[t].line);
        }
    }
    if (one < 0) return false;
    for (int t = 0; t < count; t++)
        if (state[t] != DONE) state[t] = READY;
    memcpy(vote_of_last, votes, sizeof votes);
    memset(votes, 0, sizeof votes);
    votes[2] = 1;
    return true;
}

/* The next thread that can run, or -1 when the block is done. */
int next() {
    for (;;) {
        const int first = (down ? warps - 1 - warp : warp) * WARP;
        const int end = first + WARP < count ? first + WARP : count;
        while (lane < end - first) {
            const int t = down ? end - 1 - lane : first + lane;
            lane++;
            if (state[t] <= READY) return t;
        }
        lane = 0;
        if (warp_goes_on(first, end)) continue;
        if (++warp < warps) continue;
        warp = 0;
        if (!block_goes_on()) return -1;
    }
}

void leave_to(int t, Context &from) {
    current = t;
    if (t < 0) {
        switch_to(from, main_context);
        return;
    }
    emu.thread = place[t];
    if (state[t] == FRESH) {
        fibers[t].stack = new_stack();
        prepare(fibers[t].context, stacks[fibers[t].stack]);
    }
    switch_to(from, fibers[t].context);
}

void enter() {
    for (;;) {
        const int mine = current;
        invoke(arguments);
        state[mine] = DONE;
        const int t = next();
        if (t >= 0 && state[t] == FRESH) { /* goes on with this stack */
            fibers[t].stack = fibers[mine].stack;
            current = t;
            emu.thread = place[t];
            continue;
        }
        idle.push_back(fibers[mine].stack);
        Context gone;
        leave_to(t, gone);
    }
}

void wait(State as) {
    const int mine = current;
    state[mine] = as;
    const int t = next();
    if (t == mine) {
        current = t;
        return;
    }
    leave_to(t, fibers[mine].context);
}

void barrier(int line) {
    fibers[current].line = line;
    wait(AT_BARRIER);
}

int barrier_sum(int line, int value, int how) {
    votes[0] += value;
    votes[1] |= value;
    votes[2] &= value;
    barrier(line);
    return vote_of_last[how];
}

unsigned long long exchange(unsigned mask, unsigned long long bits, int source, int line, int kind) {
    const int mine = current, first = mine & ~(WARP - 1);
    Fiber &fiber = fibers[mine];
    fiber.line = line;
    fiber.kind = kind;
    fiber.mask = mask;
    const int now = parity[mine / WARP] ^ 1;
    slots[now][mine] = bits;
    wait(AT_WARP);
    if (source >= 0) return first + source < count ? slots[now][first + source] : ~0ull; /* no such thread: poison */
    if (source == -1) return 0;
    unsigned long long ballot = 0;
    for (int i = 0; i < WARP && first + i < count; i++) ballot |= (slots[now][first + i] & 1) << i;
    return ballot;
}

/* ------------------------------------------------------------------------------------------------------------ memory */

struct Slot {
    char *memory; /* [page none] pages [page none] */
    size_t pages;
    char *data;
    size_t size;
};
std::multimap<size_t, char *> free_slots;
std::vector<Slot> slots_in_use;

Slot take_slot(size_t size, size_t offset) {
    Slot slot;
    const size_t odd = offset % ALIGNED, end = (odd + size + ALIGNED - 1) / ALIGNED * ALIGNED;
    slot.pages = (end + PAGE - 1) / PAGE + (end == 0);
    slot.size = size;
    auto found = free_slots.find(slot.pages);
    if (found != free_slots.end()) {
        slot.memory = found->second;
        free_slots.erase(found);
    } else {
        const size_t whole = (slot.pages + 2) * PAGE;
        slot.memory = (char *)mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (slot.memory == MAP_FAILED) {
            fail("no memory for the arrays of a kernel", 0);
        }
        mprotect(slot.memory, PAGE, PROT_NONE);
        mprotect(slot.memory + (slot.pages + 1) * PAGE, PAGE, PROT_NONE);
    }
    slot.data = slot.memory + (slot.pages + 1) * PAGE - end + odd;
    memset(slot.memory + PAGE, 0xFF, slot.data - slot.memory - PAGE);
    memset(slot.data + size, 0xFF, slot.memory + (slot.pages + 1) * PAGE - slot.data - size);
    slots_in_use.push_back(slot);
    return slot;
}

bool is_untouched(const Slot &slot) {
    const char *from = slot.memory + PAGE, *end = slot.memory + (slot.pages + 1) * PAGE;
    for (const char *p = from; p < slot.data; p++)
        if (*p != (char)0xFF) return false;
    for (const char *p = slot.data + slot.size; p < end; p++)
        if (*p != (char)0xFF) return false;
    return true;
}

const char *const TRAP = "an index beyond a declared array, or an address that is not aligned for its type";

void on_signal(int number, siginfo_t *info, void *) {
    if (!is_running) {
        signal(number, SIG_DFL);
        return;
    }
    const char *address = (const char *)info->si_addr;
    char why[200] = "";
    for (size_t i = 0; number == SIGSEGV && i < slots_in_use.size(); i++) {
        const Slot &slot = slots_in_use[i];
        if (address < slot.memory || address >= slot.memory + (slot.pages + 2) * PAGE) continue;
        const bool is_dynamic = i + 1 == slots_in_use.size();
        const long long away = address < slot.data ? address - slot.data : address - (slot.data + slot.size);
        snprintf(why, sizeof why, "touched memory out of bounds: %lld bytes %s %s of %zu bytes", away < 0 ? -away : away,
                 away < 0 ? "before" : "after the end of", is_dynamic ? "the dynamic shared memory" : "an array",
                 slot.size);
    }
    if (!*why)
        snprintf(why, sizeof why, "%s", number == SIGSEGV ? "touched memory that is nobody's, or the stack is full"
                                        : number == SIGFPE ? "a division of whole numbers by zero" : TRAP);
    snprintf(error_text, sizeof error_text, "%s (thread %u %u %u, block %u %u %u)", why, emu.thread.x, emu.thread.y,
             emu.thread.z, emu.block.x, emu.block.y, emu.block.z);
    give_up();
}

char signal_stack[64 << 10];

} // namespace

struct Argument {
    long long region; /* of the array, or -1: a number, or a null pointer */
    unsigned long long value; /* the number's bits, or the offset in the region */
};
struct Region {
    char *memory;
    size_t size;
    long long is_written;
    long long offset; /* from where its array's owner begins, which on a device is a multiple of 512 */
};

EXPORT void *emulator() {
    emu.barrier = barrier;
    emu.barrier_sum = barrier_sum;
    emu.exchange = exchange;
    emu.fail = (void (*)(const char *, int))fail;
    return &emu;
}

/* All blocks, one after another. */
static void run_blocks(char *shared, char *shared_end, size_t dynamic, int poison, int descending) {
    const unsigned long long x = emu.blocks.x, y = emu.blocks.y, blocks = x * y * emu.blocks.z;
    down = descending;
    for (unsigned long long i = 0; i < blocks; i++) {
        const unsigned long long b = down ? blocks - 1 - i : i;
        emu.block = {(unsigned)(b % x), (unsigned)(b / x % y), (unsigned)(b / (x * y))};
        if (shared_end > shared) memset(shared, poison, shared_end - shared);
        if (dynamic) memset(emu.dynamic, poison, dynamic);
        memset(state, FRESH, count);
        votes[0] = votes[1] = 0;
        votes[2] = 1;
        warp = lane = 0;
        leave_to(next(), main_context);
    }
    for (const Slot &slot : slots_in_use)
        if (!is_untouched(slot))
            snprintf(error_text, sizeof error_text, "wrote out of bounds: next to an array of %zu bytes", slot.size);
}

/* Both orders from the same beginning must give the same bytes. */
static void compare_orders(char *shared, char *shared_end, size_t dynamic, const Region *regions, int region_count) {
    static std::vector<char> first;
    first.clear();
    for (int i = 0; i < region_count; i++) {
        const Slot &slot = slots_in_use[i];
        if (regions[i].is_written) first.insert(first.end(), slot.data, slot.data + slot.size);
        memcpy(slot.data, regions[i].memory, slot.size);
    }
    run_blocks(shared, shared_end, dynamic, 0x7B, 1);
    size_t at = 0;
    for (int i = 0; i < region_count && !*error_text; i++) {
        if (!regions[i].is_written) continue;
        for (size_t k = 0; k < regions[i].size; k++)
            if (first[at + k] != slots_in_use[i].data[k]) {
                snprintf(error_text, sizeof error_text,
                         "the result depends on the order of threads, or on shared memory that nobody wrote: byte %zu of "
                         "%zu of written array %d", k, regions[i].size, i);
                break;
            }
        at += regions[i].size;
    }
}

/* Runs the kernel and says what went wrong: "" if nothing did.  If something did, nothing was written to the arrays.
 *
 * order: 0 ascending, 1 descending, 2 both, which must agree.
 */
EXPORT const char *emulate(void (*kernel)(void **), const unsigned *shape, char *shared, char *shared_end, size_t dynamic,
                           int order, const Region *regions, int region_count, const Argument *args, int arg_count) {
    emu.blocks = {shape[0], shape[1], shape[2]};
    emu.threads = {shape[3], shape[4], shape[5]};
    count = (int)(shape[3] * shape[4] * shape[5]);
    warps = (count + WARP - 1) / WARP;
    error_text[0] = 0;
    current = 0;
    for (unsigned t = 0; t < (unsigned)count; t++)
        place[t] = {t % shape[3], t / shape[3] % shape[4], t / (shape[3] * shape[4])};

    struct sigaction action = {}, old[4];
    const int numbers[4] = {SIGSEGV, SIGILL, SIGFPE, SIGBUS};
    stack_t stack = {}, old_stack;
    stack.ss_sp = signal_stack;
    stack.ss_size = sizeof signal_stack;
    sigaltstack(&stack, &old_stack);
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    for (int i = 0; i < 4; i++) sigaction(numbers[i], &action, &old[i]);

    static std::vector<unsigned long long> values;
    static std::vector<void *> pointers;
    if (sigsetjmp(way_out, 1) == 0) {
        is_running = 1;
        for (int i = 0; i < region_count; i++) {
            const Slot slot = take_slot(regions[i].size, regions[i].offset);
            memcpy(slot.data, regions[i].memory, slot.size);
        }
        emu.dynamic = take_slot(dynamic, 0).data;
        values.assign(arg_count + 1, 0);
        pointers.assign(arg_count + 1, nullptr);
        for (int i = 0; i < arg_count; i++) {
            const bool is_array = args[i].region >= 0;
            values[i] = args[i].value + (is_array ? (unsigned long long)slots_in_use[args[i].region].data : 0);
            pointers[i] = &values[i];
        }
        invoke = kernel;
        arguments = pointers.data();
        run_blocks(shared, shared_end, dynamic, 0xFF, order == 1);
        if (order == 2 && !*error_text) compare_orders(shared, shared_end, dynamic, regions, region_count);
        for (int i = 0; i < region_count && !*error_text; i++)
            if (regions[i].is_written) memcpy(regions[i].memory, slots_in_use[i].data, regions[i].size);
    } else { /* fibers were left in the middle: their stacks are free again */
        idle.clear();
        for (size_t i = 0; i < stacks.size(); i++) idle.push_back((int)i);
    }
    is_running = 0;
    for (const Slot &slot : slots_in_use) {
        if (slot.pages > 4096)
            munmap(slot.memory, (slot.pages + 2) * PAGE);
        else
            free_slots.emplace(slot.pages, slot.memory);
    }
    slots_in_use.clear();
    for (int i = 0; i < 4; i++) sigaction(numbers[i], &old[i], nullptr);
    sigaltstack(&old_stack, nullptr);
    return error_text;
}
