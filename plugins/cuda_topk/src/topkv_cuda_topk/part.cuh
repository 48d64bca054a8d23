// A block's part of the row in shared memory, and which of its scores a threshold takes.
#pragma once
#include "search.cuh"

constexpr int PART = THREADS * ITEMS;

// A bit for each item of a thread.
template <bool LONG> struct MaskOf { typedef u32 type; };
template <> struct MaskOf<true> { typedef u64 type; };
typedef MaskOf<(ITEMS > 32)>::type Mask;

// Keys above the threshold are taken, and the first `budget` of those equal to it.
struct Cut {
    u32 threshold;
    int budget;
};

struct Shared {
    float row[PART > ROOM ? PART : ROOM];  // Later the candidates of all blocks.
    u32 list[ROOM];                        // Keys of the candidates of this block,
    unsigned short index[ROOM];            // and where in its part they lie.
    Sums line[WARPS];
    u64 copied;
    u32 header[2];
    Search search;
};

// The first `count` scores of the part on their way to `row`. Those that are not copied as a whole
// are there after this; returns whether there is something to wait for. The copy goes behind what
// `behind` of the first warp was read by, which is not 0.
__device__ __forceinline__ bool load_part(
    Shared& shared, const float* p_part, int count, u32 behind) {
    bool aligned = (reinterpret_cast<u64>(p_part) & 15) == 0;
    int whole = aligned ? count & ~3 : 0;
    if (whole && warp_of() == 0 && __any_sync(ALL, behind) && threadIdx.x == 0)
        copy(shared.row, p_part, 4 * whole, &shared.copied);
    for (int at = whole + threadIdx.x; at < count; at += THREADS) shared.row[at] = p_part[at];
    return whole > 0;
}

// The items of this thread for which `test` holds, of those that are valid. Lanes whose items begin
// at the same bank begin at different items.
template <class Test>
__device__ __forceinline__ Mask items_where(const Shared& shared, Mask valid, Test test) {
    constexpr int FOURS = ITEMS / 4;
    const float* p_mine = shared.row + ITEMS * threadIdx.x;
    int turned = FOURS % 2 ? 0 : lane_of() * FOURS / 8 % FOURS;
    Mask mask = 0;
#pragma unroll
    for (int i = 0; i < FOURS; i++) {
        float4 four = *reinterpret_cast<const float4*>(p_mine + 4 * ((i + turned) % FOURS));
        if (test(four.x)) mask |= Mask(1) << 4 * i;
        if (test(four.y)) mask |= Mask(2) << 4 * i;
        if (test(four.z)) mask |= Mask(4) << 4 * i;
        if (test(four.w)) mask |= Mask(8) << 4 * i;
    }
    if (FOURS % 2) return valid & mask;
    return valid & Mask(u64(mask) << 4 * turned | u64(mask) >> (ITEMS - 4 * turned));
}

__device__ __forceinline__ Mask items_above(const Shared& shared, Mask valid, u32 key) {
    float score = score_of(key);
    return items_where(shared, valid, [=](float item) { return item > score; });
}

__device__ __forceinline__ Mask items_equal(const Shared& shared, Mask valid, u32 key) {
    float score = score_of(key), least = score_of(BOTTOM);
    return items_where(shared, valid, [=](float item) { return fmaxf(item, least) == score; });
}
