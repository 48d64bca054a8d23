// Enough of CUDA to run one cluster of thread blocks on a CPU. Every thread is a fiber; a scheduler
// chooses at random which one runs until it has to wait for others. Words and functions of CUDA C++
// that the kernel uses are here, and what stands for instructions of the device in `device.cuh`.
#pragma once
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __constant__
#define __forceinline__ inline
#define __cluster_dims__(...)
#define __launch_bounds__(...)

typedef unsigned int u32;
typedef unsigned long long u64;

struct alignas(16) float4 {
    float x, y, z, w;
};

struct Index {
    u32 x;
};

// Fibers that wait for each other; the last one to come lets all go on.
struct Meeting {
    int members = 0, arrived = 0;
    u64 ended = 0;
    std::vector<int> waiting;
};

struct Warp {
    Meeting meeting;
    // What lanes brought to this meeting and to the one before, and for which function.
    u64 values[2][32];
    int functions[2][32];
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    u64 arrived = 0;  // How often it has come to the barrier of the cluster.
    bool done = false;
};

struct Block {
    Meeting meeting;
    unsigned char* memory = nullptr;
    int left = 0;
    // The copy on its way, which is made as late as can be: when somebody waits for it.
    void* to = nullptr;
    const void* from = nullptr;
    u32 bytes = 0;
    std::vector<int> waiting;
};

constexpr int FIBERS = CLUSTER * THREADS;

inline Fiber fibers[FIBERS];
inline Warp warps[FIBERS / 32];
inline Block blocks[CLUSTER];
inline Meeting cluster;
inline ucontext_t scheduler;
inline std::vector<int> ready;
inline int current;
inline Index threadIdx, blockIdx;

inline Block& this_block() { return blocks[current / THREADS]; }

inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

inline void end(Meeting& meeting) {
    meeting.arrived = 0, meeting.ended++;
    ready.insert(ready.end(), meeting.waiting.begin(), meeting.waiting.end());
    meeting.waiting.clear();
}

inline void meet(Meeting& meeting) {
    meeting.waiting.push_back(current);
    if (++meeting.arrived == meeting.members) end(meeting);
    yield();
}

inline void __syncthreads() { meet(this_block().meeting); }

// What all lanes of the warp brought; they must have called the same function.
inline const u64* together(u64 value, int function) {
    Warp& warp = warps[current / 32];
    int side = warp.meeting.ended & 1;
    warp.values[side][current % 32] = value;
    warp.functions[side][current % 32] = function;
    meet(warp.meeting);
    for (int other : warp.functions[side])
        if (other != function) throw std::logic_error("lanes of a warp part at a collective");
    return warp.values[side];
}

enum { ADD = 1000, MIN, MAX, ANY, BALLOT, SHUFFLE, UP, DOWN = UP + 32 };

inline u32 __reduce_add_sync(u32, u32 value) {
    u32 sum = 0;
    const u64* values = together(value, ADD);
    for (int i = 0; i < 32; i++) sum += u32(values[i]);
    return sum;
}

inline int __reduce_add_sync(u32 all, int value) { return int(__reduce_add_sync(all, u32(value))); }

inline u32 __reduce_min_sync(u32, u32 value) {
    u32 least = ~0u;
    const u64* values = together(value, MIN);
    for (int i = 0; i < 32; i++) least = values[i] < least ? u32(values[i]) : least;
    return least;
}

inline u32 __reduce_max_sync(u32, u32 value) {
    u32 most = 0;
    const u64* values = together(value, MAX);
    for (int i = 0; i < 32; i++) most = values[i] > most ? u32(values[i]) : most;
    return most;
}

inline bool __any_sync(u32, bool value) {
    bool any = false;
    const u64* values = together(value, ANY);
    for (int i = 0; i < 32; i++) any |= values[i] != 0;
    return any;
}

inline u32 __ballot_sync(u32, bool value) {
    u32 mask = 0;
    const u64* values = together(value, BALLOT);
    for (int i = 0; i < 32; i++) mask |= u32(values[i]) << i;
    return mask;
}

template <class T> T __shfl_sync(u32, T value, int lane) {
    return T(u32(together(u32(value), SHUFFLE)[lane & 31]));
}

template <class T> T __shfl_up_sync(u32, T value, int step) {
    const u64* values = together(u32(value), UP + step);
    int lane = current % 32;
    return lane >= step ? T(u32(values[lane - step])) : value;
}

template <class T> T __shfl_down_sync(u32, T value, int step) {
    const u64* values = together(u32(value), DOWN + step);
    int lane = current % 32;
    return lane + step < 32 ? T(u32(values[lane + step])) : value;
}

inline u32 atomicAdd(u32* p, u32 value) { return std::exchange(*p, *p + value); }
inline int __clz(u32 x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(u64 x) { return x ? __builtin_clzll(x) : 64; }
inline int __popc(u32 x) { return __builtin_popcount(x); }
inline int __popcll(u64 x) { return __builtin_popcountll(x); }
inline u32 __umulhi(u32 a, u32 b) { return u64(a) * b >> 32; }
inline float __fdividef(float a, float b) { return a / b; }
inline u32 __float2uint_rz(float x) { return x >= 4294967296.0f ? ~0u : x > 0 ? u32(x) : 0; }

inline float __uint_as_float(u32 x) {
    float value;
    std::memcpy(&value, &x, 4);
    return value;
}

inline u32 __float_as_uint(float x) {
    u32 value;
    std::memcpy(&value, &x, 4);
    return value;
}

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline u32 min(u32 a, u32 b) { return a < b ? a : b; }
inline u32 max(u32 a, u32 b) { return a > b ? a : b; }
inline u32 min(u32 a, int b) { return min(a, u32(b)); }

// The number, if one of two is none, as the device has it also for signalling ones.
inline float larger(float a, float b) { return a != a ? b : b != b ? a : a > b ? a : b; }
inline float smaller(float a, float b) { return a != a ? b : b != b ? a : a < b ? a : b; }
#define fmaxf larger
#define fminf smaller
