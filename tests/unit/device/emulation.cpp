// Runs the digest kernel on the CPU: the part of CUDA that it uses, in lock-step and the same every time.
//
// The threads of a thread block are fibers of one thread of the CPU. One runs until it has to wait for others: at a
// shuffle for its warp, at __syncthreads for all. `order` says who of those that can run is next. A kernel that lacks a
// barrier, or has a race, gives another result in some order. What is no barrier in CUDA is none here.
//
// Compiled with -fsanitize=undefined in its trapping form: a read that is not aligned ends the kernel, as on a device.

#include <csetjmp>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

namespace {

constexpr unsigned WARP_SIZE = 32;
constexpr std::size_t STACK_BYTES = 1 << 16;
constexpr unsigned char GARBAGE = 0xDD;  // what shared memory begins with

struct Index {
    unsigned x;
};
Index threadIdx, blockIdx;

struct alignas(16) ulonglong2 {
    unsigned long long x, y;
};

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack = std::make_unique_for_overwrite<char[]>(STACK_BYTES);
    unsigned long long given[2];  // to the last two shuffles: a lane may be at the next while others take from this
    unsigned shuffles;
};

struct Barrier {
    unsigned expected;
    std::vector<unsigned> waiting;
};

ucontext_t scheduler;
std::vector<Fiber> fibers;
std::vector<Barrier> warps;
Barrier whole;
std::vector<unsigned> ready;
unsigned ended;
void (*body)();

void arrive(Barrier& barrier) {
    const unsigned me = threadIdx.x;
    barrier.waiting.push_back(me);
    if (barrier.waiting.size() == barrier.expected) {
        ready.insert(ready.end(), barrier.waiting.begin(), barrier.waiting.end());
        barrier.waiting.clear();
    }
    swapcontext(&fibers[me].context, &scheduler);
}

unsigned long long __shfl_xor_sync(unsigned mask, unsigned long long value, unsigned distance) {
    if (mask != 0xFFFFFFFFU || distance >= WARP_SIZE) __builtin_trap();
    Fiber& me = fibers[threadIdx.x];
    const unsigned turn = me.shuffles++ % 2;
    me.given[turn] = value;
    const unsigned other = threadIdx.x ^ distance;
    arrive(warps[threadIdx.x / WARP_SIZE]);
    return fibers[other].given[turn];
}

[[maybe_unused]] void __syncthreads() {
    arrive(whole);
}

unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}

}  // namespace

#define __global__
#define __device__
#define __constant__ static const
#define __shared__ static __attribute__((section("shared_memory")))
#define __forceinline__ inline
#define __noinline__
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __launch_bounds__(...)

#include KERNEL

extern "C" unsigned char __start_shared_memory[], __stop_shared_memory[];

namespace {

struct Arguments {
    const unsigned char* data;
    unsigned long long nbytes, block_bytes;
    unsigned long long* digests;
    unsigned char* copy;
} arguments;

void fiber() {
    body();
    ++ended;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
}

bool run_block(unsigned threads, std::uint64_t order) {
    std::memset(__start_shared_memory, GARBAGE, __stop_shared_memory - __start_shared_memory);
    warps.assign((threads + WARP_SIZE - 1) / WARP_SIZE, Barrier{WARP_SIZE, {}});
    whole = Barrier{threads, {}};
    ready.clear();
    ended = 0;
    for (unsigned i = 0; i < threads; ++i) {
        getcontext(&fibers[i].context);
        fibers[i].context.uc_stack.ss_sp = fibers[i].stack.get();
        fibers[i].context.uc_stack.ss_size = STACK_BYTES;
        fibers[i].shuffles = 0;
        makecontext(&fibers[i].context, fiber, 0);
        ready.push_back(i);
    }
    std::uint64_t random = order;
    while (!ready.empty()) {
        std::size_t at = order == 0 ? 0 : ready.size() - 1;  // whoever could run first; whoever can run last; or any
        if (order > 1) {
            random = random * 6364136223846793005U + 1442695040888963407U;
            at = (random >> 33) % ready.size();
        }
        threadIdx.x = ready[at];
        ready.erase(ready.begin() + static_cast<std::ptrdiff_t>(at));
        swapcontext(&scheduler, &fibers[threadIdx.x].context);
    }
    return ended == threads;
}

constexpr int SIGNALS[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
sigjmp_buf broken;

void on_signal(int number) {
    siglongjmp(broken, number);
}

}  // namespace

// 0; or the number of the signal that a thread of the kernel got; or -1: threads wait for others, and none can run; or
// -2: more threads than the kernel's launch bounds allow, which CUDA refuses.
extern "C" int launch(const unsigned char* data, unsigned long long nbytes, unsigned long long block_bytes,
                      unsigned long long* digests, unsigned char* copy, unsigned grid, unsigned threads,
                      std::uint64_t order) {
    if (threads > THREADS) return -2;
    arguments = {data, nbytes, block_bytes, digests, copy};
    body = [] {
        const auto& [data, nbytes, block_bytes, digests, copy] = arguments;
        if (copy) {
            copy_blocks(data, nbytes, block_bytes, digests, copy);
        } else {
            digest_blocks(data, nbytes, block_bytes, digests);
        }
    };
    fibers.resize(threads);
    struct sigaction ours = {}, before[std::size(SIGNALS)];
    ours.sa_handler = on_signal;
    for (std::size_t i = 0; i < std::size(SIGNALS); ++i) sigaction(SIGNALS[i], &ours, &before[i]);
    int result = sigsetjmp(broken, 1);
    for (unsigned block = 0; result == 0 && block < grid; ++block) {
        blockIdx.x = block;
        if (!run_block(threads, order)) result = -1;
    }
    for (std::size_t i = 0; i < std::size(SIGNALS); ++i) sigaction(SIGNALS[i], &before[i], nullptr);
    return result;
}

namespace {

std::size_t pages(std::size_t nbytes) {
    const std::size_t page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    return (nbytes + page - 1) / page * page;
}

}  // namespace

// Memory between two pages that nobody may touch: it begins behind the first, or it ends, but for what aligning its
// beginning to 16 bytes takes, before the second.
extern "C" unsigned char* guarded(std::size_t nbytes, int at_end) {
    const std::size_t inner = pages(nbytes), page = pages(1);
    void* const all = mmap(nullptr, inner + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (all == MAP_FAILED) return nullptr;
    unsigned char* const begin = static_cast<unsigned char*>(all) + page;
    if (inner && mprotect(begin, inner, PROT_READ | PROT_WRITE)) return nullptr;
    return at_end ? begin + inner - (nbytes + 15) / 16 * 16 : begin;
}

extern "C" void release(unsigned char* memory, std::size_t nbytes) {
    const std::size_t page = pages(1);
    const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(memory) / page * page - page;
    munmap(reinterpret_cast<void*>(begin), pages(nbytes) + 2 * page);
}
