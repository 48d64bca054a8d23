// The search for the key of a rank among keys that the threads of a block hold. 0 is no key.
#pragma once
#include "block.cuh"

constexpr int DRAWN = SAMPLES / THREADS;
constexpr int BIN_BITS = 9;
constexpr int BINS = 1 << BIN_BITS;
constexpr u32 NONE = BINS;  // The bin of what is in none.
constexpr int FEW = 64;  // So many keys at most are compared with each other.
static_assert(BINS <= THREADS, "a thread has one bin or none");

// `reach` keys lie in the bin or above it, `above` of them above it.
struct Choice {
    u32 bin;
    int reach, above;
};

// `low_count` keys reach `low`, `high_count` of them above all that is in question.
struct Found {
    u32 low;
    int low_count, high_count;
};

struct Range {
    u32 low, high;
};

struct Search {
    u32 bins[BINS];  // 0 between searches.
    u32 partial[WARPS];
    u32 few[FEW], listed;  // listed as bins.
    Choice choice;
    Found found;
    Range ranges[WARPS];
};

// Bins of the same width in scores around `low` and above; the first and the last hold what is
// beyond. Any rounding leaves scores in order, which is all that a search needs.
struct Line {
    float low, scale;

    __device__ __forceinline__ u32 bin_of(u32 key) const {
        float place = fminf(fmaxf((score_of(key) - low) * scale, 0.0f), BINS - 1);
        // The sum has no bits for a fraction.
        return key ? __float_as_uint(place + 8388608.0f) & (BINS - 1) : NONE;
    }
};

// Bins of a power of two of keys, from `low` on and below `end`.
struct Window {
    u32 low, end;
    int shift;

    __device__ __forceinline__ u32 bin_of(u32 key) const {
        return key - low < end - low ? (key - low) >> shift : NONE;
    }
};

__device__ __forceinline__ Line line_over(Range range) {
    float low = score_of(range.low);
    return {low, __fdividef(BINS, score_of(range.high) - low)};
}

__device__ __forceinline__ Window window_over(u32 low, u32 end) {
    return {low, end, max(32 - __clz(end - low - 1) - BIN_BITS, 0)};
}

// The lowest and the highest of the block's keys for which `test` holds; a thread looks at its first
// `used`.
template <int N, class Test>
__device__ __forceinline__ Range range_of(
    Search& shared, const u32 (&keys)[N], int used, Test test) {
    Range range{~0u, 0};
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i >= used) break;
        if (test(i)) range = {min(range.low, keys[i]), max(range.high, keys[i])};
    }
    range = {__reduce_min_sync(ALL, range.low), __reduce_max_sync(ALL, range.high)};
    if (lane_of() == 0) shared.ranges[warp_of()] = range;
    __syncthreads();
    range = lane_of() < WARPS ? shared.ranges[lane_of()] : Range{~0u, 0};
    return {__reduce_min_sync(ALL, range.low), __reduce_max_sync(ALL, range.high)};
}

// The bin that holds the key of rank `want`, `above` of which lie above all bins. A thread has a bin.
__device__ __forceinline__ void choose(Search& shared, int above, int want) {
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
    if (above < want && above + own >= want)
        shared.choice = {threadIdx.x, above + own, above};
    __syncthreads();
}

// Puts keys in bins, and chooses one.
template <int N, class Bins>
__device__ __forceinline__ Choice count(
    Search& shared, const u32 (&keys)[N], u32 (&bin)[N], int used, Bins bins, int above,
    int want) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i >= used) break;
        bin[i] = bins.bin_of(keys[i]);
        if (bin[i] != NONE) atomicAdd(&shared.bins[bin[i]], 1);
    }
    __syncthreads();
    choose(shared, above, want);
    return shared.choice;
}

// The key of rank `want`, which is one of few in its bin. These are put side by side; a warp takes
// one of them after the other, and its lanes compare that with all.
template <int N>
__device__ __forceinline__ Found compare(
    Search& shared, const u32 (&keys)[N], const u32 (&bin)[N], int used, Choice in, int want) {
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i >= used) break;
        if (bin[i] == in.bin) shared.few[atomicAdd(&shared.listed, 1)] = keys[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) shared.listed = 0;
    u32 others[FEW / 32];
    int count = in.reach - in.above;
#pragma unroll
    for (int i = 0; i < FEW / 32; i++) {
        int at = 32 * i + lane_of();
        others[i] = at < count ? shared.few[at] : 0;
    }
    for (int at = warp_of(); at < count; at += WARPS) {
        u32 own = shared.few[at], pair = 0;
#pragma unroll
        for (u32 other : others) pair += (other > own) + ((other >= own) << 16);
        pair = __reduce_add_sync(ALL, pair);
        int above = in.above + low_half(pair), reach = in.above + high_half(pair);
        if (lane_of() == 0 && above < want && reach >= want) shared.found = {own, reach, above};
    }
    __syncthreads();
    return shared.found;
}

// The same for any number of them, or a threshold that `want` keys reach. Each round counts the
// keys that lie in the bin and goes on in a part of it.
template <int N>
__device__ __forceinline__ Found search(
    Search& shared, const u32 (&keys)[N], u32 (&bin)[N], int used, Choice in, int want) {
    if (in.reach - in.above <= FEW) return compare(shared, keys, bin, used, in, want);
    Range range = range_of(shared, keys, used, [&](int i) { return bin[i] == in.bin; });
    Found found{range.low, in.reach, in.above};
    u32 end = range.high + 1;
    while (found.low_count > want && end - found.low > 1) {
        Window window = window_over(found.low, end);
        in = count(shared, keys, bin, used, window, found.high_count, want);
        if (in.reach - in.above <= FEW) return compare(shared, keys, bin, used, in, want);
        found = {window.low + (in.bin << window.shift), in.reach, in.above};
        end = found.low + min(end - found.low, 1u << window.shift);
    }
    return found;
}

// Places of scores at random, one in each of SAMPLES equal parts of the columns: the part gives the
// upper bits of the place, as a fraction of them, and a hash of the part the lower ones.
__device__ __forceinline__ void choose_places(int (&places)[DRAWN], int columns) {
#pragma unroll
    for (int i = 0; i < DRAWN; i++) {
        u32 part = i * THREADS + threadIdx.x, mix = part * 0x9e3779b1u;
        mix = (mix ^ (mix >> 15)) * 0x85ebca77u;
        u32 fraction = part * u32(0x100000000ull / SAMPLES) + (mix ^ (mix >> 13)) / SAMPLES;
        places[i] = __umulhi(fraction, columns);
    }
}

// A key that in all likelihood a few more scores of the row exceed than are wanted, of about rank
// `first` to `last` among the samples; and the highest of these. Samples from behind the end of the
// row are garbage.
__device__ __forceinline__ Range pivot_of(
    Search& shared, u32 (&keys)[DRAWN], const int (&places)[DRAWN], int length, int first,
    int last) {
#pragma unroll
    for (int i = 0; i < DRAWN; i++)
        if (places[i] >= length) keys[i] = BOTTOM;
    Range range = range_of(shared, keys, DRAWN, [&](int i) { return keys[i] > BOTTOM; });
    Line line = line_over(range);
    u32 bin[DRAWN];
    Choice in = count(shared, keys, bin, DRAWN, line, 0, first);
    float low = line.low + __fdividef(in.bin - 0.5f, line.scale);
    // Of the two keys that stand for 0 no score has the lower one.
    if (in.reach > last) low = score_of(search(shared, keys, bin, DRAWN, in, first).low);
    return {key_of(low), range.high};
}
