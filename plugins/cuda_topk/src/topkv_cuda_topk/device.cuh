// What takes instructions that CUDA C++ has no words for. tests/emulator has the same for a CPU.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) Four {
    u32 keys[4];
};

__device__ __forceinline__ unsigned char* shared_memory() {
    extern __shared__ __align__(16) unsigned char memory[];
    return memory;
}

__device__ __forceinline__ u32 address_of(const void* shared) {
    return static_cast<u32>(__cvta_generic_to_shared(shared));
}

// Waits for the kernel before this one, behind which it was launched early.
__device__ __forceinline__ void wait_for_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ u32 rank_in_cluster() {
    u32 rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// The two halves of a barrier of the cluster that orders shared memory alone. A release of all
// memory, which is what the barrier does by itself, would wait for global memory as well.
__device__ __forceinline__ void arrive() {
    asm volatile("fence.release.sync_restrict::shared::cta.cluster;" ::: "memory");
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}

__device__ __forceinline__ void wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    asm volatile("fence.acquire.sync_restrict::shared::cluster.cluster;" ::: "memory");
}

// Where another block of the cluster has what this one has at `mine`.
__device__ __forceinline__ u32 address_in(const u32* mine, u32 rank) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address_of(mine)), "r"(rank));
    return there;
}

// The word that another block of the cluster has where this one has `mine`.
__device__ __forceinline__ u32 load_from(const u32* mine, u32 rank) {
    u32 value;
    asm volatile("ld.shared::cluster.u32 %0, [%1];"
                 : "=r"(value) : "r"(address_in(mine, rank)) : "memory");
    return value;
}

// As load_from, four words that lie on 16 bytes.
__device__ __forceinline__ Four load_four_from(const u32* mine, u32 rank) {
    Four four;
    asm volatile("ld.shared::cluster.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(four.keys[0]), "=r"(four.keys[1]), "=r"(four.keys[2]), "=r"(four.keys[3])
                 : "r"(address_in(mine, rank)) : "memory");
    return four;
}

// A copy of whole 16 bytes into shared memory, which a barrier in shared memory waits for.
__device__ __forceinline__ void prepare(u64* barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address_of(barrier)) : "memory");
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void copy(
    float* to, const float* from, u32 bytes, u64* barrier) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(address_of(barrier)), "r"(bytes) : "memory");
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1], %2, [%3];"
                 :: "r"(address_of(to)), "l"(from), "r"(bytes), "r"(address_of(barrier))
                 : "memory");
}

__device__ __forceinline__ void wait_for_copy(u64* barrier) {
    u32 done;
    do {
        asm volatile("{.reg .pred done;\n"
                     "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], 0;\n"
                     "selp.u32 %0, 1, 0, done;}"
                     : "=r"(done) : "r"(address_of(barrier)) : "memory");
    } while (!done);
}
