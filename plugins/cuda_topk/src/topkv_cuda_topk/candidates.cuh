// The way of nearly all rows: the K best are among a few more that lie above the pivot.
#pragma once
#include "part.cuh"

// Puts the candidates of this block into its list, in order of index; returns how many they are.
__device__ __forceinline__ int list(Shared& shared, Mask above) {
    u32 total;
    int end = count_of(above);
    end += scan_threads(shared.line, end, total);
    while (above) {
        int index = ITEMS * threadIdx.x + last_of(above);
        if (--end >= ROOM) continue;
        shared.index[end] = index;
        shared.list[end] = key_of(shared.row[index]);
    }
    return total;
}

constexpr int STRIDE = THREADS / CLUSTER;  // Threads that read the list of a block.
constexpr int AHEAD = 2;

struct Ahead {
    Four fours[AHEAD];
};

// What this thread reads of a list next, from place `at` on.
__device__ __forceinline__ Ahead read_ahead(const Shared& shared, int at) {
    Ahead ahead;
#pragma unroll
    for (int i = 0; i < AHEAD; i++) {
        int from = min(at + 4 * i * STRIDE, ROOM - 4);
        ahead.fours[i] = load_four_from(shared.list + from, threadIdx.x / STRIDE);
    }
    return ahead;
}

// Keys of a list as they are merged, in fours.
__device__ __forceinline__ int in_fours(int size) { return (size + 3) & ~3; }

// Brings the lists of all blocks to where the row was, one behind the other, each in fours that are
// filled with 0. A lane knows the size of one; `ahead` is what this thread has read, from `at` on.
__device__ __forceinline__ void merge(Shared& shared, int size, int at, Ahead ahead) {
    int source = threadIdx.x / STRIDE;
    int start = __reduce_add_sync(ALL, lane_of() < source ? in_fours(size) : 0);
    size = __shfl_sync(ALL, size, source);
    while (at < size) {
#pragma unroll
        for (int i = 0; i < AHEAD; i++, at += 4 * STRIDE) {
            if (at >= size) break;
            Four four = ahead.fours[i];
#pragma unroll
            for (int j = 1; j < 4; j++)
                if (at + j >= size) four.keys[j] = 0;
            *reinterpret_cast<Four*>(shared.row + start + at) = four;
        }
        if (at < size) ahead = read_ahead(shared, at);
    }
}

// The cut among the candidates, which are merged as `size` keys, `before` of them of blocks before;
// of the latter `prior` is what this thread has seen above the threshold, and equal to it. Most
// candidates lie in `range`, if not every score is one.
__device__ __forceinline__ Cut cut_of(
    Shared& shared, int before, int size, int want, bool every, Range range, u32& prior) {
    constexpr int N = ROOM / THREADS;
    const u32* merged = reinterpret_cast<const u32*>(shared.row);
    u32 keys[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        int at = i * THREADS + threadIdx.x;
        keys[i] = at < size ? merged[at] : 0;
    }
    int used = (size + THREADS - 1) / THREADS;
    if (every)
        range = range_of(shared.search, keys, used, [&](int i) { return keys[i] > BOTTOM; });
    u32 bin[N];
    Choice in = count(shared.search, keys, bin, used, line_over(range), 0, want);
    Found found = search(shared.search, keys, bin, used, in, want);
    // Keys from `low` on are all taken, or those above it and the first of its equals.
    bool exact = found.low_count == want;
    Cut cut{exact ? found.low - 1 : found.low, exact ? 0 : want - found.high_count};
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i * THREADS >= before) break;
        bool mine = i * THREADS + threadIdx.x < before;
        if (mine && keys[i] > cut.threshold) prior++;
        if (mine && keys[i] == cut.threshold) prior += 1 << 16;
    }
    return cut;
}

// Writes the indices of those candidates of this block that the cut takes. A warp has adjacent ones.
__device__ __forceinline__ void write_listed(
    Shared& shared, Cut cut, u32 prior, int count, int first, int* p_ids) {
    int each = (count + THREADS - 1) / THREADS, start = 32 * each * warp_of() + lane_of();
    u32 pair = 0, total, before = (1u << lane_of()) - 1;
    for (int i = 0; i < each; i++) {
        u32 key = start + 32 * i < count ? shared.list[start + 32 * i] : 0;
        pair += (key > cut.threshold) + ((key == cut.threshold) << 16);
    }
    pair = __reduce_add_sync(ALL, pair), prior = __reduce_add_sync(ALL, prior);
    pair = scan(shared.line, pair, prior, total);
    int above = low_half(total) + low_half(pair), ties = high_half(total) + high_half(pair);
    for (int i = 0; i < each; i++) {
        int at = start + 32 * i;
        u32 key = at < count ? shared.list[at] : 0;
        u32 higher = __ballot_sync(ALL, key > cut.threshold);
        u32 equal = __ballot_sync(ALL, key == cut.threshold);
        int tie = ties + count_of(equal & before);
        if (key > cut.threshold || (key == cut.threshold && tie < cut.budget)) {
            int to = above + count_of(higher & before) + min(tie, cut.budget);
            p_ids[to] = first + shared.index[at];
        }
        above += count_of(higher), ties += count_of(equal);
    }
}
