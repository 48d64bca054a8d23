// The way of nearly all rows: the K best are among a few more that lie above the pivot.
#pragma once
#include "part.cuh"

// Puts the candidates of this block into its list, in order of index; returns how many they are.
__device__ __forceinline__ int list(Shared& shared, Mask above, int& turn) {
    u32 total;
    int end = count_of(above);
    end += scan_threads(shared.partial, end, turn, total);
    while (above) {
        int item = last_of(above);
        if (--end < ROOM) shared.index[end] = ITEMS * threadIdx.x + item;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < min(total, ROOM); i += THREADS)
        shared.list[i] = key_of(shared.row[shared.index[i]]);
    return total;
}

// Brings the lists of all blocks to where the row was, one behind the other; a lane knows the size
// of one.
__device__ __forceinline__ void merge(Shared& shared, int size) {
    constexpr int STRIDE = THREADS / CLUSTER, AHEAD = 4;
    u32* merged = reinterpret_cast<u32*>(shared.row);
    int source = threadIdx.x / STRIDE;
    int start = __reduce_add_sync(ALL, lane_of() < source ? size : 0);
    size = __shfl_sync(ALL, size, source);
    for (int at = threadIdx.x % STRIDE; at < size; at += AHEAD * STRIDE) {
        u32 keys[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            int from = at + i * STRIDE;
            keys[i] = from < size ? load_from(shared.list + from, source) : 0;
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++)
            if (at + i * STRIDE < size) merged[start + at + i * STRIDE] = keys[i];
    }
}

// The cut among `count` merged candidates, of which `before` lie before.
__device__ __forceinline__ Cut cut_of(
    Shared& shared, int before, int count, int want, Window in, int& turn) {
    constexpr int N = ROOM / THREADS;
    const u32* merged = reinterpret_cast<const u32*>(shared.row);
    u32 keys[N], pair = 0, total;
#pragma unroll
    for (int i = 0; i < N; i++) {
        int at = i * THREADS + threadIdx.x;
        keys[i] = at < count ? merged[at] : 0;
    }
    int used = (count + THREADS - 1) / THREADS;
    Found found = search(shared.search, keys, used, in, count, want, want);
    // Keys from `low` on are all taken, or those above it and the first of its equals.
    bool exact = found.low_count == want;
    Cut cut{exact ? found.low - 1 : found.low, exact ? 0 : want - found.high_count, 0, 0};
#pragma unroll
    for (int i = 0; i < N; i++) {
        if (i * THREADS >= before) break;
        bool mine = i * THREADS + threadIdx.x < before;
        if (mine && keys[i] > cut.threshold) pair++;
        if (mine && keys[i] == cut.threshold) pair += 1 << 16;
    }
    scan(shared.partial, __reduce_add_sync(ALL, pair), turn, total);
    cut.above = low_half(total), cut.equal = high_half(total);
    return cut;
}

// Writes the indices of those candidates of this block that the cut takes.
__device__ __forceinline__ void write_listed(
    Shared& shared, const Cut& cut, int count, int first, int* p_ids, int& turn) {
    // An odd number each, so that lanes read from different banks.
    int each = (count + THREADS - 1) / THREADS | 1, start = each * threadIdx.x;
    u32 above = 0, equal = 0;
    for (int i = 0; i < each && start + i < count; i++) {
        u32 key = shared.list[start + i];
        if (key > cut.threshold) above |= 1u << i;
        if (key == cut.threshold) equal |= 1u << i;
    }
    const unsigned short* p_index = shared.index + start;
    write(shared, above, equal, cut, p_ids, turn, [=](int item) { return first + p_index[item]; });
}
