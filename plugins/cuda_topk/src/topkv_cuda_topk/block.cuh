// What blocks and clusters of blocks are made to do here, and the order of scores.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

constexpr int WARPS = THREADS / 32;
constexpr u32 ALL = 0xffffffff;
constexpr u32 BOTTOM = 0x007fffff;  // The key of -inf.
constexpr u32 TOP = 0xff800001;     // One more than the key of +inf.

__device__ __forceinline__ int lane_of() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_of() { return threadIdx.x >> 5; }

// The highest bit of a mask, which is taken out.
__device__ __forceinline__ int last_of(u32& mask) {
    int bit = 31 - __clz(mask);
    mask ^= 1u << bit;
    return bit;
}

__device__ __forceinline__ int last_of(u64& mask) {
    int bit = 63 - __clzll(mask);
    mask ^= 1ull << bit;
    return bit;
}

__device__ __forceinline__ int count_of(u32 mask) { return __popc(mask); }
__device__ __forceinline__ int count_of(u64 mask) { return __popcll(mask); }

// Two counts in one word, each below 2**16.
__device__ __forceinline__ int low_half(u32 pair) { return pair & 0xffff; }
__device__ __forceinline__ int high_half(u32 pair) { return pair >> 16; }

__device__ __forceinline__ float score_of(u32 key) {
    return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

// The score as an integer of the same order, BOTTOM or more: NaN is -inf, and -0.0 is +0.0.
__device__ __forceinline__ u32 key_of(float score) {
    u32 bits = __float_as_uint(fmaxf(score, score_of(BOTTOM)) + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000;
}

__device__ __forceinline__ u32 address_of(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// Waits for the kernel before this one, behind which it was launched early.
__device__ __forceinline__ void wait_for_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The two halves of a barrier of the cluster that orders shared memory alone. A release of all
// memory, which is what the barrier does by itself, would wait for global memory as well.
__device__ __forceinline__ void arrive() {
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}

// The word that another block of the cluster has where this one has `mine`.
__device__ __forceinline__ u32 load_from(const u32* mine, u32 rank) {
    u32 there, value;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
                 : "=r"(there) : "r"(address_of(mine)), "r"(rank));
    asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(value) : "r"(there) : "memory");
    return value;
}

// A copy of whole 16 bytes into shared memory, which a barrier in shared memory waits for.
__device__ __forceinline__ void prepare(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address_of(barrier)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void copy(
    float* to, const float* from, u32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(address_of(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];"
                 :: "r"(address_of(to)), "l"(from), "r"(bytes), "r"(address_of(barrier))
                 : "memory");
}

__device__ __forceinline__ void wait_for_copy(u64* barrier) {
    u32 done;
    do {
        asm volatile("{.reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, done;}"
                     : "=r"(done) : "r"(address_of(barrier)) : "memory");
    } while (!done);
}

// Sums over the warps before one's own, and over all of the block. `partial` are two lines, of
// which calls take turns.
__device__ __forceinline__ u32 scan(u32 (*partial)[WARPS], u32 value, int& turn, u32& total) {
    u32* line = partial[turn++ & 1];
    if (lane_of() == 0) line[warp_of()] = value;
    __syncthreads();
    u32 other = lane_of() < WARPS ? line[lane_of()] : 0;
    total = __reduce_add_sync(ALL, other);
    return __reduce_add_sync(ALL, lane_of() < warp_of() ? other : 0);
}

// As scan, over the threads before one's own.
__device__ __forceinline__ u32 scan_threads(
    u32 (*partial)[WARPS], u32 value, int& turn, u32& total) {
    u32 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane_of() >= step) sum += other;
    }
    return sum - value + scan(partial, __shfl_sync(ALL, sum, 31), turn, total);
}

// What the blocks of the cluster have in a word of two counts: all of them, and those of lower
// rank than this one, which are "before" it.
struct Counts {
    int low, high, low_before, high_before;
};

__device__ __forceinline__ Counts counts_of(u32 pair, int rank) {
    bool before = lane_of() < rank;
    return {
        __reduce_add_sync(ALL, low_half(pair)),
        __reduce_add_sync(ALL, high_half(pair)),
        __reduce_add_sync(ALL, before ? low_half(pair) : 0),
        __reduce_add_sync(ALL, before ? high_half(pair) : 0),
    };
}

// Tells all blocks a word of each, one a lane. `header` are two words, of which calls take turns.
__device__ __forceinline__ u32 exchange(u32* header, u32 word, int& turn) {
    u32* place = header + (turn++ & 1);
    if (threadIdx.x == 0) *place = word;
    arrive();
    wait();
    return lane_of() < CLUSTER ? load_from(place, lane_of()) : 0;
}
