// Runs one unmodified .cu file on the CPU: every CUDA thread of a block is a thread here, blocks run one after another.
//
// Enough of CUDA for sharp_kernel.cu: one-dimensional grids, fixed __shared__ arrays, __syncthreads, __shfl_xor_sync of whole warps,
// integer atomicAdd. A barrier or shuffle that not all threads reach hangs until the alarm ends the process. Real threads let
// ThreadSanitizer and AddressSanitizer see a missing barrier or a wrong index as they would in any C++ program.
#pragma once
#include <signal.h>
#include <unistd.h>
#include <xmmintrin.h>
#include <algorithm>
#include <atomic>
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#ifdef __SANITIZE_THREAD__
#define __global__ __attribute__((flatten))  // what a call takes or returns by value, g++ instruments only where it is inlined
#else
#define __global__
#endif
#define __device__
#define __host__
#define __shared__ static __attribute__((section("cuda_shared")))
#include <cuda_fp16.h>  // NVIDIA's own: its conversions have a host version
#undef __launch_bounds__
#define __launch_bounds__(...)

using std::isfinite, std::isnan;

#ifndef TIME_LIMIT
#define TIME_LIMIT 120  // seconds of a launch
#endif

namespace emulation {
struct Thread { uint3 index; };
inline thread_local Thread self;
inline uint3 block;
inline dim3 block_dim, grid_dim;
inline std::unique_ptr<std::barrier<>> block_barrier;
inline std::vector<std::unique_ptr<std::barrier<>>> warp_barriers;
inline std::vector<float> exchanged;
extern "C" char __start_cuda_shared[] __attribute__((weak)), __stop_cuda_shared[] __attribute__((weak));

// order: 0 runs blocks forwards, 1 backwards, any other number shuffles them
template <class... A, size_t... I> void launch(void (*kernel)(A...), int grid, int size, void** arguments, int order, std::index_sequence<I...>) {
    block_dim = dim3(size), grid_dim = dim3(grid);
    block_barrier = std::make_unique<std::barrier<>>(size);
    warp_barriers.clear();
    for (int warp = 0; warp < size / 32; warp++) warp_barriers.push_back(std::make_unique<std::barrier<>>(32));
    exchanged.assign(size, 0.0f);
    std::vector<unsigned> blocks(grid);
    std::iota(blocks.begin(), blocks.end(), 0u);
    if (order == 1) std::reverse(blocks.begin(), blocks.end());
    if (order > 1) std::shuffle(blocks.begin(), blocks.end(), std::mt19937(order));
    alarm(TIME_LIMIT);
    auto run = [&](unsigned thread) {
        _mm_setcsr(_mm_getcsr() | 0x8040);  // CuPy compiles with -ftz=true: FP32 subnormals are flushed
        self.index = {thread, 0, 0};
        for (unsigned next : blocks) {
            block_barrier->arrive_and_wait();
            if (thread == 0) {
                block = {next, 0, 0};
                if (__start_cuda_shared) memset(__start_cuda_shared, 0xff, __stop_cuda_shared - __start_cuda_shared);  // NaN
            }
            block_barrier->arrive_and_wait();
            kernel(*static_cast<std::remove_reference_t<A>*>(arguments[I])...);
        }
    };
    std::vector<std::thread> threads;
    for (int thread = 0; thread < size; thread++) threads.emplace_back(run, thread);
    for (auto& thread : threads) thread.join();
    alarm(0);
}
}  // namespace emulation

#define threadIdx (emulation::self.index)
#define blockIdx (emulation::block)
#define blockDim (emulation::block_dim)
#define gridDim (emulation::grid_dim)
inline void __syncthreads() { emulation::block_barrier->arrive_and_wait(); }
inline void __threadfence() { std::atomic_thread_fence(std::memory_order_seq_cst); }
inline float __shfl_xor_sync(unsigned, float value, int distance) {
    auto& barrier = *emulation::warp_barriers[threadIdx.x / 32];
    emulation::exchanged[threadIdx.x] = value;
    barrier.arrive_and_wait();
    value = emulation::exchanged[threadIdx.x ^ distance];
    barrier.arrive_and_wait();
    return value;
}
inline unsigned __float_as_uint(float x) { return std::bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline unsigned atomicAdd(unsigned* at, unsigned value) { return std::atomic_ref<unsigned>(*at).fetch_add(value); }

// For each kernel: the launch, with the arguments as cuLaunchKernel takes them, and the sizes of its parameters.
template <class... A> void launch_typed(void (*kernel)(A...), int grid, int size, void** arguments, int order) {
    emulation::launch(kernel, grid, size, arguments, order, std::index_sequence_for<A...>{});
}
template <class... A> int parameter_sizes(void (*)(A...), int* sizes) {
    int count = 0;
    ((sizes[count++] = sizeof(A)), ...);
    return count;
}
#define EXPORT(K)                                                                            \
    extern "C" void launch_##K(int grid, int size, void** arguments, int order) {            \
        launch_typed(K, grid, size, arguments, order);                                       \
    }                                                                                        \
    extern "C" int sizes_##K(int* sizes) { return parameter_sizes(K, sizes); }
