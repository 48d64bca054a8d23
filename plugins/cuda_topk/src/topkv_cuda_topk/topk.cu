// Exact top-k of a row by one cluster of thread blocks, in one kernel; README.md says how.
//
// The compiler is given CLUSTER (blocks of a row), THREADS (512 or 1024), ITEMS (scores of a
// thread, a multiple of 4), ROOM (candidates of a row) and SAMPLES, multiples of THREADS. Names: p_
// pointers, s_ strides in elements. Block r of a cluster holds the r-th part of the row, a thread
// ITEMS adjacent scores of it.
#include "candidates.cuh"
#include "any.cuh"

extern "C" __constant__ int shared_bytes = sizeof(Shared);

// ids[:length] are all, and -1 stands behind them.
__device__ __forceinline__ void write_all(int* p_ids, int rank, int length, int select) {
    for (int at = rank * THREADS + threadIdx.x; at < select; at += CLUSTER * THREADS)
        p_ids[at] = at < length ? at : -1;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1024 / THREADS) topk_kernel(
    const float* p_scores, const int* p_lengths, int* p_ids, long long s_scores, long long s_ids,
    int columns, int select) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    if (threadIdx.x < BINS) shared.search.bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) prepare(&shared.copied);
    __syncthreads();
    wait_for_kernel();
    int rank = rank_in_cluster(), row = blockIdx.x / CLUSTER, first = PART * rank;
    p_scores += row * s_scores;
    p_ids += row * s_ids;
    int length = min(max(p_lengths[row], 0), columns);
    if (length <= select) return write_all(p_ids, rank, length, select);

    // Up to ROOM scores all are candidates. The copy of the row goes behind the samples, which all
    // wait for.
    bool every = length <= ROOM;
    u32 drawn[DRAWN] = {}, pivot = BOTTOM;
    if (!every) draw(drawn, p_scores, length);
    bool sampled = every || __any_sync(ALL, drawn[DRAWN - 1] != 0);
    int count = min(max(length - first, 0), PART);
    bool copies = load_part(shared, p_scores + first, count, sampled);
    if (!every) pivot = pivot_of(shared.search, drawn, length, select);
    if (copies) wait_for_copy(&shared.copied);
    __syncthreads();

    int turn = 0, meeting = 0, mine = min(max(count - ITEMS * int(threadIdx.x), 0), ITEMS);
    Mask valid = Mask((u64(1) << mine) - 1);
    int own = list(shared, every ? valid : items_above(shared, valid, pivot), turn);
    int size = exchange(shared.header, own, meeting);
    count = __reduce_add_sync(ALL, size);
    if (count < select || count > ROOM)
        return write_any(
            shared, valid, rank, length, pivot, count, own, select, p_ids, turn, meeting);
    merge(shared, size);
    arrive();
    __syncthreads();
    int before = __reduce_add_sync(ALL, lane_of() < rank ? size : 0);
    Window in = window_of(every ? BOTTOM : pivot + 1, TOP);
    if (!every) in.bits = min(in.bits, OCTAVES);
    Cut cut = cut_of(shared, before, count, select, in, turn);
    write_listed(shared, cut, own, first, p_ids, turn);
    wait();
}
