// What blocks and clusters of blocks are made to do here, and the order of scores.
#pragma once
#include "device.cuh"

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
    return __uint_as_float(key ^ (~u32(int(key) >> 31) | 0x80000000));
}

// The score as an integer of the same order, BOTTOM or more: NaN is -inf, and -0.0 is +0.0.
__device__ __forceinline__ u32 key_of(float score) {
    u32 bits = __float_as_uint(fmaxf(score, score_of(BOTTOM)) + 0.0f);
    return bits ^ (u32(int(bits) >> 31) | 0x80000000);
}

struct Sums {
    u32 value, other;
};

// The sum of `value` over the warps before one's own, and that of `other` over all of the block, of
// which each warp has one. Between two calls all threads must have met.
__device__ __forceinline__ u32 scan(Sums (&line)[WARPS], u32 value, u32 other, u32& total) {
    if (lane_of() == 0) line[warp_of()] = {value, other};
    __syncthreads();
    Sums sums = lane_of() < WARPS ? line[lane_of()] : Sums{};
    total = __reduce_add_sync(ALL, sums.other);
    return __reduce_add_sync(ALL, lane_of() < warp_of() ? sums.value : 0);
}

// The sum over the threads before one's own, and over all of the block.
__device__ __forceinline__ u32 scan_threads(Sums (&line)[WARPS], u32 value, u32& total) {
    u32 sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        u32 other = __shfl_up_sync(ALL, sum, step);
        if (lane_of() >= step) sum += other;
    }
    u32 all = __shfl_sync(ALL, sum, 31);
    return sum - value + scan(line, all, all, total);
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
__device__ __forceinline__ u32 exchange(u32* header, u32 word, int& meeting) {
    u32* place = header + (meeting++ & 1);
    if (threadIdx.x == 0) *place = word;
    arrive();
    wait();
    return lane_of() < CLUSTER ? load_from(place, lane_of()) : 0;
}
