// Exact top-k of a row by one cluster of thread blocks, in one kernel; README.md says how.
//
// The compiler is given CLUSTER (blocks of a row), THREADS (512 or 1024), ITEMS (scores of a
// thread, a multiple of 4), ROOM (candidates of a row) and SAMPLES, multiples of THREADS, and
// RESIDENT (blocks of a multiprocessor that registers have to do for). Names: p_ pointers, s_
// strides in elements. Block r of a cluster holds the r-th part of the row, a thread ITEMS adjacent
// scores of it.
#include "candidates.cuh"
#include "any.cuh"

extern "C" __constant__ int shared_bytes = sizeof(Shared);

// ids[:length] are all, and -1 stands behind them.
__device__ __forceinline__ void write_all(int* p_ids, int rank, int length, int select) {
    for (int at = rank * THREADS + threadIdx.x; at < select; at += CLUSTER * THREADS)
        p_ids[at] = at < length ? at : -1;
}

// The pivot has rank `first_rank` to `last_rank` among the samples.
extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1)
    __launch_bounds__(THREADS, RESIDENT) topk_kernel(
        const float* p_scores, const int* p_lengths, int* p_ids, long long s_scores,
        long long s_ids, int columns, int select, int first_rank, int last_rank) {
    Shared& shared = *reinterpret_cast<Shared*>(shared_memory());
    if (threadIdx.x < BINS) shared.search.bins[threadIdx.x] = 0;
    if (threadIdx.x == 0) shared.search.listed = 0, prepare(&shared.copied);
    int rank = rank_in_cluster(), row = blockIdx.x / CLUSTER, first = PART * rank;
    p_scores += row * s_scores;
    p_ids += row * s_ids;
    int places[DRAWN];
    choose_places(places, columns);
    __syncthreads();
    wait_for_kernel();

    // Samples are drawn before it is known how long the row is.
    u32 drawn[DRAWN] = {};
    if (columns > ROOM)
        for (int i = 0; i < DRAWN; i++) drawn[i] = key_of(p_scores[places[i]]);
    int length = min(max(p_lengths[row], 0), columns);
    if (length <= select) return write_all(p_ids, rank, length, select);

    // Up to ROOM scores all are candidates. The copy of the row goes behind the samples, which all
    // wait for.
    bool every = length <= ROOM;
    int count = min(max(length - first, 0), PART);
    bool copies = load_part(shared, p_scores + first, count, every ? 1 : drawn[DRAWN - 1]);
    Range range{BOTTOM, BOTTOM};  // From the pivot to the highest sample.
    if (!every)
        range = pivot_of(shared.search, drawn, places, length, first_rank, last_rank);
    if (copies) wait_for_copy(&shared.copied);
    if (every) __syncthreads();  // Else all threads have met in the search for the pivot.

    int meeting = 0, mine = min(max(count - ITEMS * int(threadIdx.x), 0), ITEMS);
    Mask valid = Mask((u64(1) << mine) - 1);
    int own = list(shared, every ? valid : items_above(shared, valid, range.low));
    int size = exchange(shared.header, own, meeting);
    int at = 4 * (threadIdx.x % STRIDE);
    Ahead ahead = read_ahead(shared, at);  // Before it is known how many there are.
    count = __reduce_add_sync(ALL, size);
    int merged = __reduce_add_sync(ALL, in_fours(size));
    int before = __reduce_add_sync(ALL, lane_of() < rank ? in_fours(size) : 0);
    if (count < select || merged > ROOM)
        return write_any(
            shared, valid, rank, length, range.low, count, own, select, p_ids, meeting);
    merge(shared, size, at, ahead);
    arrive();
    __syncthreads();
    u32 prior = 0;
    Cut cut = cut_of(shared, before, merged, select, every, range, prior);
    write_listed(shared, cut, prior, own, first, p_ids);
    wait();
}
