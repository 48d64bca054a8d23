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

// Sums of two counts over the row, and over what is before this block.
__device__ __forceinline__ Counts count_row(
    Shared& shared, int low, int high, int rank, int& meeting) {
    u32 total;
    low = __reduce_add_sync(ALL, low + (high << 16));
    scan(shared.line, low, low, total);
    return counts_of(exchange(shared.header, total, meeting), rank);
}

// A cut, and how many keys above its threshold and equal to that lie before this block.
struct Split {
    Cut cut;
    int above, equal;
};

// The cut of any scores, `at.low_count` of which reach `at.low` and `at.high_count` reach `high`:
// a pass over the row per step.
__device__ Split split_any(
    Shared& shared, Mask valid, int rank, Found at, u32 high, int want, int& meeting) {
    while (at.low_count > want && high - at.low > 1) {
        u32 first, second;
        between(at, high, want, first, second);
        int reach_first = reaching(shared, valid, first);
        int reach_second = reaching(shared, valid, second);
        Counts counts = count_row(shared, reach_first, reach_second, rank, meeting);
        narrow(at, high, want, first, second, counts);
    }
    // All that reach it may be as many as are wanted.
    Cut cut{at.low, at.low_count == want ? want : want - at.high_count};
    int above = count_of(items_above(shared, valid, cut.threshold));
    int equal = count_of(items_equal(shared, valid, cut.threshold));
    Counts counts = count_row(shared, above, equal, rank, meeting);
    return {cut, counts.low_before, counts.high_before};
}

// Writes the indices, from `first` on, of the items above and of the first equal ones, in order.
__device__ __forceinline__ void write(
    Shared& shared, Mask above, Mask equal, const Split& split, int first, int* p_ids) {
    u32 total, pair = count_of(above) + (count_of(equal) << 16);
    pair = scan_threads(shared.line, pair, total);
    int budget = split.cut.budget, ties = split.equal + high_half(pair);
    int at = split.above + low_half(pair) + min(ties, budget);
    for (; equal && ties < budget; equal &= equal - 1, ties++) above |= equal & -equal;
    int end = at + count_of(above);
    while (above) p_ids[--end] = first + last_of(above);
}

// Writes what a row gives whose candidates, `count` of them, `own` of this block, are too few or
// too many.
__device__ void write_any(
    Shared& shared, Mask valid, int rank, int length, u32 pivot, int count, int own, int want,
    int* p_ids, int& meeting) {
    Split split;
    if (count >= want) {
        Found at{pivot + 1, count, 0};
        split = split_any(shared, valid, rank, at, TOP, want, meeting);
    } else {
        u32 total, equal = __reduce_add_sync(ALL, count_of(items_equal(shared, valid, pivot)));
        scan(shared.line, equal, equal, total);
        Counts counts = counts_of(exchange(shared.header, own + (total << 16), meeting), rank);
        if (count + counts.high >= want) {
            split = {{pivot, want - count}, counts.low_before, counts.high_before};
        } else {
            Found at{BOTTOM, length, count + counts.high};
            split = split_any(shared, valid, rank, at, pivot, want, meeting);
        }
    }
    Mask above = items_above(shared, valid, split.cut.threshold);
    Mask equal = items_equal(shared, valid, split.cut.threshold);
    write(shared, above, equal, split, PART * rank + ITEMS * threadIdx.x, p_ids);
    arrive();
    wait();
}
