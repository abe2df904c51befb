"""The numerics that half-precision PPO needs, in plain PyTorch; copy this file alone, it imports nothing else of ours.

    two_sum               an addition and its exact rounding error
    gaussian_log_ratio    log pi(a|s) - log pi_0(a|s) from the change of the policy, with an analytic gradient    (Module B)
    sampling_correction   what storing the rollout in 16 bits did to the behaviour log-density                    (Module B)
    clipped_surrogate     PPO's clipped objective, decided and evaluated on the log-ratio                         (Module B)
    scaled_norm           a global norm whose squares cannot overflow or underflow                                (Module A)
    rounded_sum           what module A avoids: a sum whose partial sums are all rounded to 16 bits
    stochastic_rounding   to 16 bits, up or down at random and right on average                          (beyond the paper)

"Paper" is Wu and Chen, "Structure-Aware Numerical Stabilization for Half-Precision PPO" (arXiv 2610.13306). u is the unit
roundoff of a dtype: 2^-11 for FP16, 2^-8 for BF16, 2^-24 for FP32.
"""

import math

import torch


def two_sum(x, y):
    """Error-free addition: `high = fl(x + y)` and `low = x + y - high`, exactly.

    x, y: tensors of one floating dtype and of shapes that broadcast; so are the two results. Exact for all finite x and y,
    subnormals included, whenever `high` is finite and y is not the largest finite number or its negative. Where `high` is
    not finite `low` is NaN. A compiler that keeps 16-bit chains in FP32 breaks it: compile with `emulate_precision_casts`.
    Source: Knuth, TAOCP 2, 4.2.2; Ogita, Rump and Oishi 2005, algorithm 3.1 (paper, section 3.2).
    """
    high = x + y
    y_part = high - x
    low = (x - (high - y_part)) + (y - y_part)
    return high, low


def gaussian_log_ratio(action, mean, log_std, old_mean, old_log_std, correction=None):
    """log N(action; mean, e^log_std) - log N(action; old_mean, e^old_log_std), summed over the action dimensions.

    action, mean, old_mean: (batch, D); log_std, old_log_std: (D,); one dtype for all. correction: (batch,), any floating dtype,
    the `sampling_correction` of each sample, subtracted. Returns (batch,) in FP32 (in FP64 for FP64 inputs).

    No absolute log-density is ever formed, so nothing cancels. Per dimension (paper, section 3.2), with z0 = (a - mean0)/std0,
    dl = log_std - log_std0, t = expm1(-dl) and q = (mean - mean0)/std0,

        dz = z - z0 = z0 t - q - q t            dlogp = -dl - z0 dz - dz^2/2

    in the dtype of the inputs, every sum by `two_sum`; high and low parts are summed over D separately, in FP32.
    Error: at most the sum over D of 8u (|dl| + (|z0| + |dz|)(|z0 t| + |q| + |q t|)), which vanishes as the policies meet, and,
    since products may underflow, of s (1 + (|z0| + |dz|)(1 + std0/std)), s the smallest subnormal (2^-24 in FP16, 2^-133 in
    BF16); while |z0| and |dz| are below 2^7, |dl| at most 4 and all inputs below 2^15. FP16 overflows for policies much further
    apart, to -inf or NaN.

    Gradient, analytic: with respect to mean, z e^-log_std; with respect to log_std, z^2 - 1, summed over the batch in FP32.
    action, old_mean, old_log_std and correction are constants. There is no second derivative.
    """
    log_ratio = _GaussianLogRatio.apply(action, mean, log_std, old_mean, old_log_std)
    return log_ratio if correction is None else log_ratio - correction.to(log_ratio.dtype)


class _GaussianLogRatio(torch.autograd.Function):
    @staticmethod
    def forward(ctx, action, mean, log_std, old_mean, old_log_std):
        old_precision = torch.exp(-old_log_std)  # 1/std0
        z0 = (action - old_mean) * old_precision
        dl = (log_std - old_log_std).expand_as(z0)
        t = torch.expm1(-dl)
        q = (mean - old_mean) * old_precision
        # dz = z0 t - q - q t, as dz + dz_low
        partial, low_1 = two_sum(z0 * t, -q)
        dz, low_2 = two_sum(partial, -q * t)
        dz_low = low_1 + low_2
        # dlogp = -dl - z0 dz - dz^2/2, as high + low; the last term of low is what dz_low changes, to first order
        partial, low_1 = two_sum(-dl, -z0 * dz)
        high, low_2 = two_sum(partial, -0.5 * dz * dz)
        low = low_1 + low_2 - (z0 + dz) * dz_low
        low = torch.where(high.isfinite(), low, 0)  # two_sum has no low part of an infinity
        ctx.save_for_backward(z0, dz, log_std)
        wide = _wide(high.dtype)
        return high.sum(1, dtype=wide) + low.sum(1, dtype=wide)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        z0, dz, log_std = ctx.saved_tensors
        wide = gradient.dtype
        z = z0.to(wide) + dz.to(wide)
        gradient = gradient[:, None]
        grad_mean = (gradient * z * torch.exp(-log_std.to(wide))).to(log_std.dtype)
        grad_log_std = (gradient * (z * z - 1)).sum(0).to(log_std.dtype)
        return None, grad_mean, grad_log_std, None, None


def sampling_correction(action, mean, log_std, stored_mean, stored_log_std):
    """c = Q(L0 - L~0) (paper, section 3.2): subtracted from a log-ratio, it restores the sampling-time reference.

    action, stored_mean: (batch, D), stored_log_std: (D,): the rollout as stored, in 16 bits. mean: (batch, D), log_std: (D,):
    what the action was really drawn from, in any floating dtype. Both log-densities are taken in FP32. Returns (batch,) in
    the dtype of stored_mean, rounded once; exactly 0 where the stored policy is the one that acted.
    """

    def log_density(mean, log_std):
        wide = _wide(mean.dtype)
        z = (action.to(wide) - mean.to(wide)) * torch.exp(-log_std.to(wide))
        return (-0.5 * z * z - log_std.to(wide)).sum(1)  # without the constant, which is the same in both

    return (log_density(mean, log_std) - log_density(stored_mean, stored_log_std)).to(stored_mean.dtype)


def clipped_surrogate(log_ratio, advantage, clip_coef):
    """PPO's clipped policy loss, less the constant -mean(advantage): -mean(A expm1(d)) with d clipped in the log domain.

    log_ratio d: (batch,), FP32 or FP64; advantage A: (batch,), any floating dtype; clip_coef: float in (0, 1). Returns a scalar
    in the dtype of log_ratio. d is cut to at most log1p(clip_coef) where A >= 0 and to at least log1p(-clip_coef) where A < 0:
    the decisions, the gradient and the minimum are those of -mean(min(A r, A clip(r))) with r = e^d (paper, section 3.2), and
    a change of the policy too small to move r from 1 still counts.
    """
    upper, lower = math.log1p(clip_coef), math.log1p(-clip_coef)
    clipped = torch.where(advantage >= 0, log_ratio.clamp(max=upper), log_ratio.clamp(min=lower))
    return -(advantage.to(log_ratio.dtype) * torch.expm1(clipped)).mean()


def scaled_norm(tensors):
    """The Euclidean norm over all elements of several tensors: G = s sqrt(sum (x/s)^2) with s = max |x|.

    tensors: a sequence of tensors of any shapes, 16- or 32-bit floating dtypes, and at least one element in all. Returns an FP32
    scalar, within 1e-6 of the true norm (relative, up to 2^24 elements; for FP32 subnormals within their spacing); 0 if all
    elements are 0; not finite if any element is infinite or NaN, or if the norm itself exceeds FP32. Raises ValueError if
    there is no element. Source: Blue 1978 (paper, section 3.1).
    """
    if not sum(tensor.numel() for tensor in tensors):
        raise ValueError("scaled_norm needs at least one element")
    flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in tensors])
    scale = flat.abs().max()
    return scale * (flat / torch.where(scale == 0, 1, scale)).square().sum().sqrt()


def rounded_sum(x):
    """The sum of all elements of x, pairwise, with every partial sum rounded to the dtype of x.

    What a reduction without FP32 accumulation returns, and module A avoids. x: floating tensor. Returns a scalar of its dtype.
    """
    x = x.reshape(-1)
    while len(x) > 1:
        if len(x) % 2:
            x = torch.cat([x, x.new_zeros(1)])
        x = x[0::2] + x[1::2]
    return x.sum()


def stochastic_rounding(x, dtype, step, seed):
    """x rounded to a 16-bit dtype, to one of its two neighbours with the chances that make it right on average.

    x: (n,) in FP32. step: scalar tensor of any dtype; seed: integer; both from 0 to 2^32 - 1. The coin of element i
    is the 24 highest bits of a hash of (seed, step, i), so that equal arguments round equally, on every device: there is no
    generator, whose state a CUDA graph could not hold. Expectation: x, to within 2^-24 of the spacing, if x is finite, no
    further from 0 than the largest finite number, and not below 2^-120 for BF16, where FP32 has no finer grid; what has no
    neighbours but itself stays. Source: Croci et al. 2022, 4; the hash is Mueller's, 32 bits, two multiplications.
    """
    coin = (_hash(_hash(_hash(seed) ^ step.long()) ^ torch.arange(len(x), device=x.device)) >> 8).float() / 2**24
    power = (x.view(torch.int32) & 0x7F800000).view(torch.float32)  # of two, the largest up to |x|
    spacing = (power * torch.finfo(dtype).eps).clamp(min=torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps)
    below = (x / spacing).floor()
    return ((below + (coin < x / spacing - below)) * spacing).to(dtype)


def _hash(bits):
    for _ in range(2):
        bits = (bits ^ bits >> 16) * 0x45D9F3B & 0xFFFFFFFF
    return bits ^ bits >> 16


def _wide(dtype):
    return torch.promote_types(dtype, torch.float32)
