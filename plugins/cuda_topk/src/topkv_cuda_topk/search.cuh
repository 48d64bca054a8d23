// The search for the key of a rank among keys that the threads of a block hold.
#pragma once
#include "block.cuh"

constexpr int DRAWN = SAMPLES / THREADS;
constexpr float SIGMAS = 3.5f;  // How far the pivot's rank lies on the safe side.
constexpr int SLACK = 16;       // The pivot may lie one SLACKth of its rank too low.
constexpr int OCTAVES = 24;     // Two of them, as the logarithm of a number of keys.
constexpr int BIN_BITS = 9;
constexpr int BINS = 1 << BIN_BITS;
static_assert(BINS <= THREADS, "a thread has one bin or none");

// Keys from `floor` on and below `end`. Bins start at `low`, and up to low + 2**bits all have the
// same width; the first and the last also hold what lies beyond.
struct alignas(16) Window {
    u32 floor, end, low;
    int bits;
};

// `low_count` keys reach `low`, and `high_count` of these lie above all that is in question.
struct alignas(16) Found {
    u32 low;
    int low_count, high_count;
};

struct Search {
    u32 bins[BINS];  // 0 between searches.
    u32 partial[WARPS];
    Window window;
    Found found;
};

__device__ __forceinline__ Window window_of(u32 floor, u32 end) {
    return {floor, end, floor, 32 - __clz(end - floor - 1)};
}

// The bin of this thread, counted from above, makes the next window if the wanted key lies in it.
__device__ __forceinline__ void choose(Search& shared, const Window& in, int shift, int above, int want) {
    int own = threadIdx.x < BINS ? shared.bins[threadIdx.x] : 0, sum = own;
    if (threadIdx.x < BINS) shared.bins[threadIdx.x] = 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        int other = __shfl_down_sync(ALL, sum, step);
        if (lane_of() + step < 32) sum += other;
    }
    if (lane_of() == 0) shared.partial[warp_of()] = sum;
    __syncthreads();
    bool later = lane_of() > warp_of() && lane_of() < WARPS;
    above += __reduce_add_sync(ALL, later ? shared.partial[lane_of()] : 0) + sum - own;
    if (above < want && above + own >= want) {
        u32 bin = threadIdx.x, from = in.low + (bin << shift), width = 1u << shift;
        bool last = bin == BINS - 1 || in.end - from <= width;
        u32 floor = bin == 0 ? in.floor : from;
        shared.found = {floor, above + own, above};
        shared.window = window_of(floor, last ? in.end : from + width);
    }
    __syncthreads();
}

// A threshold that `want` to `most` of the block's keys reach, or else the key of rank `want`
// itself. Each round counts keys in bins and goes on in one of them. `count` keys reach the floor;
// a thread looks at its first `used`, and 0 is no key.
template <int N>
__device__ __forceinline__ Found search(
    Search& shared, const u32 (&keys)[N], int used, Window in, int count, int want, int most) {
    Found found{in.floor, count, 0};
    while (found.low_count > most && in.end - in.floor > 1) {
        int shift = max(in.bits - BIN_BITS, 0);
#pragma unroll
        for (int i = 0; i < N; i++) {
            if (i >= used) break;
            bool counts = keys[i] - in.floor < in.end - in.floor;
            if (!__any_sync(ALL, counts)) continue;
            u32 bin = min((max(keys[i], in.low) - in.low) >> shift, BINS - 1);
            if (counts) atomicAdd(&shared.bins[bin], 1);
        }
        __syncthreads();
        choose(shared, in, shift, found.high_count, want);
        found = shared.found, in = shared.window;
    }
    return found;
}

// The keys of scores at random, one of each of SAMPLES equal parts of the row: the part gives the
// upper bits of the place, as a fraction of the row, and a hash of it the lower ones.
__device__ __forceinline__ void draw(u32 (&keys)[DRAWN], const float* p_row, int length) {
#pragma unroll
    for (int i = 0; i < DRAWN; i++) {
        u32 part = i * THREADS + threadIdx.x, mix = part * 0x9e3779b1u;
        mix = (mix ^ (mix >> 15)) * 0x85ebca77u;
        u32 fraction = part * u32(0x100000000ull / SAMPLES) + (mix ^ (mix >> 13)) / SAMPLES;
        keys[i] = key_of(p_row[__umulhi(fraction, length)]);
    }
}

// A key that in all likelihood a few more than `want` scores of the row exceed. The number of
// samples among the `want` best is about Poisson. Bins cover two octaves below the largest.
__device__ __forceinline__ u32 pivot_of(
    Search& shared, const u32 (&keys)[DRAWN], int length, int want) {
    float mean = float(SAMPLES) * float(want) / float(length);
    int rank = min(int(mean + SIGMAS * sqrtf(mean)) + 4, SAMPLES);
    u32 highest = 0;
#pragma unroll
    for (int i = 0; i < DRAWN; i++) highest = max(highest, keys[i]);
    highest = __reduce_max_sync(ALL, highest);
    if (lane_of() == 0) shared.partial[warp_of()] = highest;
    __syncthreads();
    highest = __reduce_max_sync(ALL, lane_of() < WARPS ? shared.partial[lane_of()] : 0);
    u32 low = max(highest, BOTTOM + (1u << OCTAVES)) - (1u << OCTAVES);
    Window in{BOTTOM, highest + 1, low, OCTAVES};
    return search(shared, keys, DRAWN, in, SAMPLES, rank, rank + rank / SLACK).low;
}
