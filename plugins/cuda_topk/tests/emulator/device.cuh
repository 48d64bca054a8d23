// In place of src/topkv_cuda_topk/device.cuh.
#pragma once
#include "cuda.h"

inline unsigned char* shared_memory() { return this_block().memory; }

inline void wait_for_kernel() {}

inline u32 rank_in_cluster() { return current / THREADS; }

inline void arrive() {
    fibers[current].arrived++;
    if (++cluster.arrived == cluster.members) end(cluster);
}

inline void wait() {
    while (cluster.ended < fibers[current].arrived) {
        cluster.waiting.push_back(current);
        yield();
    }
}

template <class T> T loaded(const u32* mine, u32 rank) {
    Block& other = blocks[rank];
    if (other.left == 0) throw std::logic_error("shared memory of a block that has ended is read");
    if (u64(mine) % sizeof(T)) throw std::logic_error("a load across its alignment");
    T value;
    auto offset = (const unsigned char*)mine - this_block().memory;
    std::memcpy(&value, other.memory + offset, sizeof(T));
    return value;
}

inline u32 load_from(const u32* mine, u32 rank) { return loaded<u32>(mine, rank); }

struct alignas(16) Four {
    u32 keys[4];
};

inline Four load_four_from(const u32* mine, u32 rank) { return loaded<Four>(mine, rank); }

inline void prepare(u64*) {}

inline void copy(float* to, const float* from, u32 bytes, u64*) {
    if ((u64(to) | u64(from) | bytes) & 15) throw std::logic_error("a copy of parts of 16 bytes");
    Block& block = this_block();
    block.to = to, block.from = from, block.bytes = bytes;
    ready.insert(ready.end(), block.waiting.begin(), block.waiting.end());
    block.waiting.clear();
}

inline void wait_for_copy(u64*) {
    Block& block = this_block();
    if (block.bytes == 0) {  // Not asked for yet.
        block.waiting.push_back(current);
        yield();
    }
    if (block.to) std::memcpy(block.to, block.from, block.bytes);
    block.to = nullptr;
}
