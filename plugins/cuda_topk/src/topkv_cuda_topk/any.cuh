// The way of rows whose pivot was a bad guess, and of those that tie at it.
#pragma once
#include "part.cuh"

// Two thresholds inside (low, high) in order: where the wanted key would lie if keys were spread
// evenly, and the middle, so that a pass at least halves what is left.
__device__ __forceinline__ void between(
    const Found& at, u32 high, int want, u32& first, u32& second) {
    u32 width = high - at.low, half = width >> 1;
    float part = __fdividef(float(at.low_count - want), float(at.low_count - at.high_count));
    u32 step = min(max(__float2uint_rz(float(width) * part), 1u), width - 1);
    first = at.low + min(step, half);
    second = at.low + max(step, half);
}

__device__ __forceinline__ void narrow(
    Found& at, u32& high, int want, u32 first, u32 second, const Counts& counts) {
    if (counts.high >= want) {
        at.low = second, at.low_count = counts.high;
    } else {
        high = second, at.high_count = counts.high;
        if (counts.low >= want) {
            at.low = first, at.low_count = counts.low;
        } else {
            high = first, at.high_count = counts.low;
        }
    }
}

__device__ __forceinline__ int reaching(const Shared& shared, Mask valid, u32 key) {
    return count_of(items_above(shared, valid, key) | items_equal(shared, valid, key));
}

// Sums of two counts over the row, and over what lies before this block.
__device__ __forceinline__ Counts count_row(
    Shared& shared, int low, int high, int rank, int& turn, int& meeting) {
    u32 total;
    scan(shared.partial, __reduce_add_sync(ALL, low + (high << 16)), turn, total);
    return counts_of(exchange(shared.header, total, meeting), rank);
}

// The cut of any scores, `at.low_count` of which reach `at.low` and `at.high_count` reach `high`:
// a pass over the row per step.
__device__ Cut cut_of_any(
    Shared& shared, Mask valid, int rank, Found at, u32 high, int want, int& turn, int& meeting) {
    while (at.low_count > want && high - at.low > 1) {
        u32 first, second;
        between(at, high, want, first, second);
        int reach_first = reaching(shared, valid, first);
        int reach_second = reaching(shared, valid, second);
        Counts counts = count_row(shared, reach_first, reach_second, rank, turn, meeting);
        narrow(at, high, want, first, second, counts);
    }
    Cut cut{at.low, want - at.high_count, 0, 0};
    if (at.low_count == want) cut.budget = want;  // All that reach it.
    int above = count_of(items_above(shared, valid, cut.threshold));
    int equal = count_of(items_equal(shared, valid, cut.threshold));
    Counts counts = count_row(shared, above, equal, rank, turn, meeting);
    cut.above = counts.low_before, cut.equal = counts.high_before;
    return cut;
}

// Writes what a row gives whose candidates, `count` of them, `own` of this block, are too few or
// too many.
__device__ void write_any(
    Shared& shared, Mask valid, int rank, int length, u32 pivot, int count, int own, int want,
    int* p_ids, int& turn, int& meeting) {
    Cut cut;
    if (count > ROOM) {
        Found at{pivot + 1, count, 0};
        cut = cut_of_any(shared, valid, rank, at, TOP, want, turn, meeting);
    } else {
        u32 total, equal = count_of(items_equal(shared, valid, pivot));
        scan(shared.partial, __reduce_add_sync(ALL, equal), turn, total);
        u32 pair = exchange(shared.header, own + (total << 16), meeting);
        Counts counts = counts_of(pair, rank);
        if (count + counts.high >= want) {
            cut = {pivot, want - count, counts.low_before, counts.high_before};
        } else {
            Found at{BOTTOM, length, count + counts.high};
            cut = cut_of_any(shared, valid, rank, at, pivot, want, turn, meeting);
        }
    }
    Mask above = items_above(shared, valid, cut.threshold);
    Mask equal = items_equal(shared, valid, cut.threshold);
    int first = PART * rank + ITEMS * threadIdx.x;
    write(shared, above, equal, cut, p_ids, turn, [=](int item) { return first + item; });
    arrive();
    wait();
}
