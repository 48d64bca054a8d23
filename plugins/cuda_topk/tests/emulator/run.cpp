// A library with the kernel for one shape; see cuda.h.
#include "cuda.h"

#include "topk.cu"

namespace {

struct Call {
    const float* scores;
    const int* lengths;
    int* ids;
    long long s_scores, s_ids;
    int columns, select, first_rank, last_rank;
} call;

const char* fault;

// No row takes a tenth of it.
constexpr long MOST_STEPS = 4000L * FIBERS;

void thread() {
    try {
        topk_kernel(
            call.scores, call.lengths, call.ids, call.s_scores, call.s_ids, call.columns,
            call.select, call.first_rank, call.last_rank);
    } catch (const std::logic_error& error) {
        static std::string said;
        said = error.what();
        fault = said.c_str();
    }
    Block& block = this_block();
    // Whoever reads it after the block has ended reads garbage.
    if (--block.left == 0) std::memset(block.memory, 0xcd, sizeof(Shared));
    fibers[current].done = true;
    yield();
}

void prepare_row(std::mt19937& random) {
    ready.clear();
    cluster = Meeting{FIBERS};
    for (Warp& warp : warps) warp.meeting = Meeting{32};
    for (Block& block : blocks) {
        unsigned char* memory = block.memory;
        if (!memory) memory = (unsigned char*)aligned_alloc(128, (sizeof(Shared) + 127) / 128 * 128);
        for (size_t i = 0; i < sizeof(Shared); i++) memory[i] = random();
        block = Block{Meeting{THREADS}, memory, THREADS};
    }
    for (int i = 0; i < FIBERS; i++) {
        Fiber& fiber = fibers[i];
        fiber.stack.resize(32768);
        fiber.arrived = 0, fiber.done = false;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = fiber.stack.size();
        makecontext(&fiber.context, thread, 0);
        ready.push_back(i);
    }
}

// Lets one of those that can go on do so: any, the last that came, or mostly the last.
void step(std::mt19937& random, int order) {
    size_t chosen = ready.size() - 1;
    if (order == 0 || (order == 2 && random() % 64 == 0)) chosen = random() % ready.size();
    current = ready[chosen];
    ready[chosen] = ready.back();
    ready.pop_back();
    threadIdx.x = current % THREADS;
    swapcontext(&scheduler, &fibers[current].context);
}

}  // namespace

// As a launch of the kernel, in an order that `seed` gives; nullptr, or what went wrong.
extern "C" __attribute__((visibility("default"))) const char* run(
    const float* scores, const int* lengths, int* ids, long long s_scores, long long s_ids,
    int columns, int select, int first_rank, int last_rank, int rows, u32 seed) {
    std::mt19937 random(seed);
    call = {scores, lengths, ids, s_scores, s_ids, columns, select, first_rank, last_rank};
    fault = nullptr;
    for (int row = 0; row < rows; row++) {
        prepare_row(random);
        int order = random() % 3;
        blockIdx.x = row * CLUSTER;  // All that the kernel takes from it is the row.
        long steps = 0;
        while (!ready.empty() && !fault && steps++ < MOST_STEPS) step(random, order);
        if (fault) return fault;
        if (!ready.empty()) return "threads go on for ever";
        for (Fiber& fiber : fibers)
            if (!fiber.done) return "threads wait for each other";
    }
    return nullptr;
}
