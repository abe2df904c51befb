// SHARP on the GPU: the gradient's norm and clipping, and one optimizer step over all parameters, in two launches.
//
// The same step as `sharp_update` of ppo_fp16.py (Wu and Chen, arXiv 2610.13306, section 3.3): for every element of the flat vector,
//
//     G     = sqrt(sum g^2) / loss_scale               clip = min(1, max_grad_norm / (G + 1e-6)), NaN if G is not finite
//     r     = |g|, or the RMS of g over the row        w    = Q(sqrt((sqrt(beta2) w)^2 + (sqrt(1 - beta2) clip r)^2))
//     w^    = w, in a row-shared layer clipped to [1/4, 4] times the RMS of w over the layer's rows
//     m     = beta1 m + (1 - beta1) clip g             u    = lr / (1 - beta1^t) m / (w^ / sqrt(1 - beta2^t) + eps)
//     theta = Q(theta - u)                             where there is a residual: u += it before, it = u - (theta_old - theta) after
//
// The residual is FP32 for log_std alone, or FP16 (`low`) for every element, which makes it a compensated sum. Where `step` is
// given to the second launch, Q rounds theta stochastically, as `stochastic_rounding` of numerics.py.
//
// FP16 is read, FP32 computed, FP16 written. Squares of FP16 numbers neither overflow nor underflow FP32, so no sum is rescaled.
// If any element of g is not finite, nothing changes but grad_norm, clip_coef and the counter of skipped updates.
//
// Launch contract. Both kernels: grid (ceil(row_count / WARPS)), block (32 * WARPS), no dynamic shared memory, on one stream, statistics
// first. `rows` describes the flat vector, one warp a row: the rows of row-shared matrices, and runs of at most RUN elements
// of everything else. What changes from step to step (lr, step and all results) is in device memory, so that a CUDA graph can hold
// both launches. Every sum has a fixed order and there are no float atomics: equal inputs give equal bits.

#include <cuda_fp16.h>

constexpr int WARPS = 8;  // of a block

struct Row {
    int offset, length;  // elements of the flat vector
    int root;            // index of its root second moment; of the first of them where each element has its own
    int layer;           // which layer's rows share with it, or -1: each element has its own root second moment
    int residual;        // index of its first residual, or -1
};

struct Layer {
    int root, rows;  // its root second moments
};

struct Scalars {
    float lr;                                              // in
    float grad_norm, clip_coef, correction1, correction2;  // out: 1 - beta1^t and sqrt(1 - beta2^t)
    unsigned finished_blocks;                              // 0 before and after every launch
};

__device__ int lane() { return threadIdx.x % 32; }

__device__ float warp_sum(float x) {
    for (int distance = 16; distance > 0; distance /= 2) x += __shfl_xor_sync(0xffffffffu, x, distance);
    return x;
}

// The sum over the block, in every thread.
__device__ float block_sum(float x) {
    __shared__ float partial[WARPS];
    x = warp_sum(x);
    if (lane() == 0) partial[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0.0f;
    for (int i = 0; i < WARPS; i++) x += partial[i];
    __syncthreads();  // partial may be written again
    return x;
}

struct alignas(16) Eight {
    __half values[8];  // one 16-byte access
};

// Eight consecutive values, or the n that are left, in one access where the address allows.
__device__ void load(const __half* from, int n, float (&x)[8]) {
    if (n >= 8 && reinterpret_cast<size_t>(from) % 16 == 0) {
        const Eight eight = *reinterpret_cast<const Eight*>(from);
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = __half2float(eight.values[i]);
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++) x[i] = i < n ? __half2float(from[i]) : 0.0f;
    }
}

__device__ void store(__half* to, int n, const float (&x)[8]) {
    if (n >= 8 && reinterpret_cast<size_t>(to) % 16 == 0) {
        Eight eight;
#pragma unroll
        for (int i = 0; i < 8; i++) eight.values[i] = __float2half_rn(x[i]);
        *reinterpret_cast<Eight*>(to) = eight;
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < n) to[i] = __float2half_rn(x[i]);
    }
}

__device__ unsigned hash(unsigned bits) {
    for (int i = 0; i < 2; i++) bits = (bits ^ bits >> 16) * 0x45D9F3Bu;
    return bits ^ bits >> 16;
}

// x, rounded to a neighbour in FP16 by the coin that these bits are.
__device__ float stochastic_rounding(float x, unsigned bits) {
    const float power = __uint_as_float(__float_as_uint(x) & 0x7F800000u);  // of two, the largest up to |x|
    const float spacing = fmaxf(power * 0x1p-10f, 0x1p-24f), below = floorf(x / spacing);
    const float coin = static_cast<float>(bits >> 8) * 0x1p-24f;
    return (below + (coin < x / spacing - below ? 1.0f : 0.0f)) * spacing;
}

// Launch 1: the sum of squares of every row; then, in the block that finishes last, the norm, the clip coefficient, the bias
// corrections, the shared root second moments and their RMS over each layer.
extern "C" __global__ void sharp_statistics(
    const __half* __restrict__ gradient, const Row* __restrict__ rows, int row_count, const Layer* __restrict__ layers,
    int layer_count, float* row_sums, __half* root, float* layer_rms, Scalars* scalars, float* step, float max_grad_norm,
    float loss_scale, float sqrt_beta2, float sqrt_1_beta2, float log_beta1, float log_beta2)
{
    const int row = blockIdx.x * WARPS + threadIdx.x / 32;
    if (row < row_count) {
        float sum = 0.0f, g[8];
        for (int j = 8 * lane(); j < rows[row].length; j += 256) {
            load(gradient + rows[row].offset + j, rows[row].length - j, g);
#pragma unroll
            for (int i = 0; i < 8; i++) sum += g[i] * g[i];
        }
        sum = warp_sum(sum);
        if (lane() == 0) row_sums[row] = sum;
    }

    __shared__ bool last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicAdd(&scalars->finished_blocks, 1u) == gridDim.x - 1;
    __syncthreads();
    if (!last) return;
    __threadfence();

    const volatile float* sums = row_sums;  // written by other blocks
    float sum = 0.0f;
    for (int i = threadIdx.x; i < row_count; i += blockDim.x) sum += sums[i];
    const float grad_norm = sqrtf(block_sum(sum)) / loss_scale;
    const bool finite = isfinite(grad_norm);
    const float clip = fminf(max_grad_norm / (grad_norm + 1e-6f), 1.0f);
    if (threadIdx.x == 0) {
        scalars->grad_norm = grad_norm;
        scalars->clip_coef = finite ? clip : nanf("");
        scalars->finished_blocks = 0;
        if (finite) {
            const float t = *step += 1.0f;
            scalars->correction1 = -expm1f(t * log_beta1);
            scalars->correction2 = sqrtf(-expm1f(t * log_beta2));
        }
    }
    if (!finite) return;

    for (int i = threadIdx.x; i < row_count; i += blockDim.x) {
        if (rows[i].layer < 0) continue;
        const float rms = sqrtf(sums[i] / static_cast<float>(rows[i].length));
        const float a = sqrt_beta2 * __half2float(root[rows[i].root]), b = sqrt_1_beta2 * (clip * rms);
        root[rows[i].root] = __float2half_rn(sqrtf(a * a + b * b));
    }
    __syncthreads();
    for (int i = 0; i < layer_count; i++) {
        float square_sum = 0.0f;
        for (int j = threadIdx.x; j < layers[i].rows; j += blockDim.x) {
            const float w = __half2float(root[layers[i].root + j]);
            square_sum += w * w;
        }
        square_sum = block_sum(square_sum);
        if (threadIdx.x == 0) layer_rms[i] = sqrtf(square_sum / static_cast<float>(layers[i].rows));
    }
}

// Launch 2: the first moments, the root second moments that elements have of their own, and the parameters.
extern "C" __global__ __launch_bounds__(32 * WARPS, 3) void sharp_apply(
    __half* __restrict__ theta, const __half* __restrict__ gradient, __half* __restrict__ exp_avg, __half* __restrict__ root,
    float* __restrict__ residual, __half* __restrict__ low, const float* __restrict__ step, unsigned seed,
    const Row* __restrict__ rows, int row_count, const float* __restrict__ layer_rms,
    const Scalars* __restrict__ scalars, float beta1, float one_minus_beta1, float sqrt_beta2, float sqrt_1_beta2, float eps)
{
    const int index = blockIdx.x * WARPS + threadIdx.x / 32;
    const float clip = scalars->clip_coef;
    if (index >= row_count || isnan(clip)) return;
    const Row row = rows[index];
    const float step_size = scalars->lr / scalars->correction1, correction2 = scalars->correction2;
    const bool shared = row.layer >= 0, stochastic = step != nullptr;
    const unsigned key = stochastic ? hash(hash(seed) ^ static_cast<unsigned>(*step)) : 0u;
    float denominator = 0.0f;
    if (shared) {
        const float rms = layer_rms[row.layer];
        const float w = fminf(fmaxf(__half2float(root[row.root]), rms / 4.0f), rms * 4.0f);
        denominator = w / correction2 + eps;
    }

    for (int j = 8 * lane(); j < row.length; j += 256) {
        const int at = row.offset + j, n = row.length - j;
        float p[8], g[8], m[8], w[8], l[8];
        load(theta + at, n, p);
        load(gradient + at, n, g);
        load(exp_avg + at, n, m);
        if (!shared) load(root + row.root + j, n, w);
        if (low != nullptr) load(low + at, n, l);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            m[i] = beta1 * m[i] + one_minus_beta1 * (clip * g[i]);
            if (!shared) {
                const float a = sqrt_beta2 * w[i], b = sqrt_1_beta2 * (clip * fabsf(g[i]));
                w[i] = __half2float(__float2half_rn(sqrtf(a * a + b * b)));
                denominator = w[i] / correction2 + eps;
            }
            float u = step_size * m[i] / denominator;
            if (row.residual >= 0 && i < n) {
                float* left = residual + row.residual + j + i;
                u += *left;
                *left = u - (p[i] - __half2float(__float2half_rn(p[i] - u)));
            }
            if (low != nullptr) {
                u += l[i];
                l[i] = u - (p[i] - __half2float(__float2half_rn(p[i] - u)));
            }
            p[i] -= u;
            if (stochastic) p[i] = stochastic_rounding(p[i], hash(key ^ (at + i)));
        }
        store(theta + at, n, p);
        store(exp_avg + at, n, m);
        if (!shared) store(root + row.root + j, n, w);
        if (low != nullptr) store(low + at, n, l);
    }
}
