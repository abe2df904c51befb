"""numerics.py against exact arithmetic, FP64 and the textbook formulas."""

import math
import shutil
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from numerics import (
    clipped_surrogate,
    gaussian_log_ratio,
    rounded_sum,
    sampling_correction,
    scaled_norm,
    stochastic_rounding,
    two_sum,
)

torch.set_num_threads(1)

HALVES = [torch.float16, torch.bfloat16]
UNIT = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # unit roundoff
TINY = {torch.float16: 2.0**-24, torch.bfloat16: 2.0**-133}  # smallest positive number
has_compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
needs_compiler = pytest.mark.skipif(not has_compiler, reason="torch.compile needs a C++ compiler for the CPU")


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


# --- two_sum


def from_bits(bits, dtype):
    """The finite numbers among these 16-bit patterns, of which the sign bit is the highest."""
    values = bits.to(torch.int16).view(dtype)
    return values[values.isfinite()]


def all_finite(dtype):
    return from_bits(torch.arange(-(2**15), 2**15), dtype)


def assert_error_free(x, y):
    """two_sum is exact for each pair with a finite high part. Returns the number of these."""
    high, low = two_sum(x, y)
    finite = high.isfinite()
    assert torch.equal(high[finite], (x + y)[finite])
    assert low[~finite].isnan().all()
    x, y, high, low = (tensor.double()[finite] for tensor in (*torch.broadcast_tensors(x, y), high, low))
    larger, smaller = torch.where(x.abs() >= y.abs(), x, y), torch.where(x.abs() >= y.abs(), y, x)
    total = x + y
    # Fast2Sum: total is the exact sum where it gives back the smaller term, and then total - high is exact as well. Elsewhere the
    # sum spans more than 53 bits, so that the smaller term lies far below the last bit of the larger: no rounding at all
    exact = total - larger == smaller
    assert torch.equal(low[exact], (total - high)[exact])
    assert torch.equal(high[~exact], larger[~exact])
    assert torch.equal(low[~exact], smaller[~exact])
    return len(high)


@pytest.mark.parametrize("dtype", HALVES)
def test_two_sum_of_special_values_with_every_number(dtype):
    """Zeros, one and its neighbours, subnormals, the smallest normal, the largest numbers, with all others, in both orders."""
    info = torch.finfo(dtype)
    magnitudes = [0, 1, 1 - info.eps / 2, 1 + info.eps, 1 / 3, 2**11 - 1, 2**11 + 2, info.tiny, info.tiny * info.eps]
    magnitudes += [info.tiny * (1 - info.eps), 3 * info.tiny * info.eps, info.max * (1 - info.eps / 2), info.max / 2]
    special = torch.tensor(magnitudes, dtype=torch.float64).to(dtype)
    assert special.isfinite().all() and (special[1:] > 0).all() and not (special == info.max).any()
    special, every = torch.cat([special, -special])[:, None], all_finite(dtype)
    assert assert_error_free(special, every[every.abs() < info.max]) > 1_000_000
    assert assert_error_free(every, special) > 1_000_000


@pytest.mark.parametrize("dtype", HALVES)
def test_two_sum_of_random_bit_patterns(dtype):
    bits = torch.randint(-(2**15), 2**15, (2, 2_000_000), generator=seeded())
    x, y = (from_bits(b, dtype)[:1_900_000] for b in bits)
    assert len(x) == len(y)
    assert assert_error_free(x[y.abs() < torch.finfo(dtype).max], y[y.abs() < torch.finfo(dtype).max]) > 1_700_000


@pytest.mark.parametrize("dtype", HALVES)
def test_two_sum_of_the_largest_number(dtype):
    """As first argument it does no harm; as second, high - x can overflow although high does not: the precondition is needed."""
    largest, every = torch.tensor(torch.finfo(dtype).max, dtype=dtype), all_finite(dtype)
    for x in (largest, -largest):
        assert_error_free(x, every[every.abs() < largest])
        high, low = two_sum(every, x)
        broken = high.isfinite() & low.isnan()
        assert 0 < broken.sum() < 1000
        assert_error_free(every[~broken], x)
    assert two_sum(torch.tensor(-48.0).half(), torch.tensor(65504.0).half())[1].isnan()


fp32 = st.floats(width=32, allow_nan=False, allow_infinity=False)
mantissas, exponents = st.integers(-(2**24) + 1, 2**24 - 1), st.integers(-149, 104)


@settings(max_examples=500)
@given(
    st.one_of(
        st.tuples(fp32, fp32),
        st.tuples(mantissas, mantissas, exponents, st.integers(-30, 30)).map(  # terms that overlap, by all amounts
            lambda args: (math.ldexp(args[0], args[2]), math.ldexp(args[1], min(max(args[2] + args[3], -149), 104)))
        ),
    )
)
@example((float(np.float32(3.4e38)), -1.5))
@example((2.0**-149, -(2.0**-126)))
def test_two_sum_in_fp32_is_exact_as_fractions(terms):
    x, y = (torch.tensor(term, dtype=torch.float32) for term in terms)
    assert (x.item(), y.item()) == terms
    high, low = two_sum(x, y)
    assume(high.isfinite() and y.abs() < torch.finfo(torch.float32).max)
    assert Fraction(high.item()) + Fraction(low.item()) == Fraction(terms[0]) + Fraction(terms[1])


def test_two_sum_of_random_fp32_bit_patterns():
    x, y = torch.randint(-(2**31), 2**31, (2, 1_000_000), generator=seeded()).to(torch.int32).view(torch.float32)
    near = y.sign() * x.abs() * torch.exp2(10 * torch.randn(len(x), generator=seeded(1)))
    finite = x.isfinite() & y.isfinite() & near.isfinite()
    assert assert_error_free(x[finite], y[finite]) > 900_000
    assert assert_error_free(x[finite], near[finite]) > 900_000


# --- gaussian_log_ratio


def reference(action, mean, log_std, old_mean, old_log_std):
    """The log-ratio of each sample in FP64, from the two standardised actions, and the names its error bounds speak of."""
    action, mean, log_std, old_mean, old_log_std = (x.double() for x in (action, mean, log_std, old_mean, old_log_std))
    z0, z, dl = (action - old_mean) / old_log_std.exp(), (action - mean) / log_std.exp(), log_std - old_log_std
    log_ratio = (-dl - (z - z0) * (z + z0) / 2).sum(1)
    t, q = torch.expm1(-dl), (mean - old_mean) / old_log_std.exp()
    return log_ratio, dl, z0, z - z0, (z0 * t).abs() + q.abs() + (q * t).abs()


def error_bound(inputs):
    """Documented bound: 8u (|dl| + (|z0| + |dz|)(|z0 t| + |q| + |q t|)), over D; and what subnormals cost, which FP16 feels."""
    _, dl, z0, dz, parts = reference(*inputs)
    dtype = inputs[0].dtype
    size = z0.abs() + dz.abs()
    relative, absolute = dl.abs() + size * parts, 1 + size * (1 + torch.exp(-dl))
    return (8 * UNIT[dtype] * relative + TINY[dtype] * absolute).sum(1)


def policies(dtype, batch, dims, mean_change, log_std_change, seed):
    """A batch drawn from an old policy, and a new one: mean moved by +-mean_change old std, log_std by +-log_std_change."""
    g = seeded(seed)
    sign = torch.randn(batch + 1, dims, generator=g).sign()
    old_log_std = (2.5 * torch.rand(dims, generator=g) - 2).to(dtype)
    log_std = (old_log_std.float() + log_std_change * sign[-1]).to(dtype)
    std = old_log_std.float().exp()
    old_mean = (0.5 * torch.randn(batch, dims, generator=g)).to(dtype)
    mean = (old_mean.float() + mean_change * std * sign[:-1]).to(dtype)
    action = (old_mean.float() + std * torch.randn(batch, dims, generator=g)).to(dtype)
    return action, mean, log_std, old_mean, old_log_std


def naive_log_ratio(action, mean, log_std, old_mean, old_log_std):
    """The textbook in 16 bits: two absolute log-densities, subtracted."""

    def log_density(mean, log_std):
        z = (action - mean) * torch.exp(-log_std)
        return (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(1)

    return log_density(mean, log_std) - log_density(old_mean, old_log_std)


def mean_errors(batches):
    """Mean absolute errors, of ours and of the naive log-ratio, against FP64."""
    errors = []
    for function in (gaussian_log_ratio, naive_log_ratio):
        errors.append(torch.cat([function(*inputs).double() - reference(*inputs)[0] for inputs in batches]).abs().mean().item())
    return errors


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [1, 3, 6, 17])
def test_log_ratio_error_where_policies_are_near(dtype, dims):
    """Within the bound for each sample, at all distances down to a single step of the grid."""
    for seed, change in enumerate(10 ** torch.linspace(-5, 0.5, 23).double()):
        inputs = policies(dtype, 512, dims, change, change / 3, seed)
        log_ratio = gaussian_log_ratio(*inputs)
        assert log_ratio.dtype == torch.float32 and log_ratio.shape == (512,)
        assert ((log_ratio.double() - reference(*inputs)[0]).abs() <= error_bound(inputs)).all(), change


dimensions = st.tuples(
    st.floats(-6, 6),  # old log_std
    st.one_of(st.just(0.0), st.floats(-4, 4), st.floats(-(2**-8), 2**-8)),  # its change
    st.floats(-8, 8),  # old mean
    st.one_of(st.floats(-60, 60), st.floats(-(2**-10), 2**-10)),  # standardised action, old
    st.one_of(st.just(None), st.floats(-60, 60), st.floats(-(2**-10), 2**-10)),  # and new; None: the mean stays
)


@settings(max_examples=400)
@given(st.sampled_from(HALVES), st.lists(dimensions, min_size=1, max_size=17))
def test_log_ratio_error_of_hostile_inputs(dtype, rows):
    """Actions 60 std away, std from 1/400 to 400, changed by factors up to 50, subnormal moves, in any mixture."""
    inputs = []
    for old_log_std, change, old_mean, z0, z in rows:
        std, new_std = math.exp(old_log_std), math.exp(old_log_std + change)
        action = old_mean + std * z0
        inputs.append((action, old_mean if z is None else action - new_std * z, old_log_std + change, old_mean, old_log_std))
    action, mean, log_std, old_mean, old_log_std = torch.tensor(inputs, dtype=torch.float64).T.to(dtype)
    inputs = action[None], mean[None], log_std, old_mean[None], old_log_std
    assume(all((x.abs() < 2**15).all() for x in inputs))  # so that no difference of two overflows
    log_ratio, _, z0, dz, _ = reference(*inputs)
    assume((z0.abs() < 2**7).all() and (dz.abs() < 2**7).all())
    assert abs(gaussian_log_ratio(*inputs).item() - log_ratio.item()) <= error_bound(inputs).item()


def test_log_ratio_of_a_move_that_underflows():
    """Why the bound has an absolute part: here -z0 q = -2^-25.3 is less than FP16 can hold, and the log-ratio is 0."""
    action, mean, old_mean = (torch.tensor([[x]]).half() for x in (2.0**-12, 2.0**-13.3, 0.0))
    inputs = action, mean, torch.zeros(1).half(), old_mean, torch.zeros(1).half()
    assert gaussian_log_ratio(*inputs).item() == 0 != reference(*inputs)[0].item()
    assert abs(reference(*inputs)[0].item()) <= error_bound(inputs).item() < 2**-23


@pytest.mark.parametrize("dtype", HALVES)
def test_log_ratio_loses_nothing_in_its_sums(dtype):
    """What the low parts and the FP32 sums over D are for. With std0 = 1, actions that are powers of two, and t as it is in 16
    bits, only q t and dz^2/2 are rounded, which is second order; a first-order term rounded anywhere would be far more."""
    u, g = UNIT[dtype], seeded(4)
    action = torch.tensor([-2.0, -1.0, -0.5, 0.5, 1.0, 2.0]).repeat_interleave(100)[:, None].expand(-1, 17).to(dtype)
    mean, log_std = (0.01 * torch.randn(600, 17, generator=g)).to(dtype), (0.01 * torch.randn(17, generator=g)).to(dtype)
    log_ratio = gaussian_log_ratio(action, mean, log_std, torch.zeros_like(mean), torch.zeros_like(log_std))
    z0, q, dl, t = action.double(), mean.double(), log_std.double(), torch.expm1(-log_std).double()
    dz, size = z0 * t - q - q * t, z0.abs() + 0.1
    expected = (-dl - z0 * dz - dz * dz / 2).sum(1)
    bound = u * (size * (q * t).abs() + dz * dz) + 4 * u * u * (dl.abs() + size * (t.abs() + q.abs()))
    assert ((log_ratio.double() - expected).abs() <= bound.sum(1)).all()
    assert bound.sum(1).mean() < 0.1 * u * (dl.abs() + size * (t.abs() + q.abs())).sum(1).mean()  # the bound is sharp


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [1, 3, 6, 17])
def test_log_ratio_is_50_times_closer_than_the_naive_one_where_policies_are_near(dtype, dims):
    """Means moved by 0.01 to 0.03 std and log_std by 0.003 to 0.01, which is what PPO's updates do."""
    changes = torch.linspace(0.01, 0.03, 24).tolist()
    ours, naive = mean_errors([policies(dtype, 256, dims, change, change / 3, seed) for seed, change in enumerate(changes)])
    assert 50 * ours < naive


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [1, 3, 6, 17])
@pytest.mark.parametrize("change", [1e-4, 1e-3, 1e-2, 0.1, 0.3, 1, 2, 3, 4, 5])
def test_log_ratio_is_nowhere_worse_than_the_naive_one(dtype, dims, change):
    """As far as 5 std, where the probability ratio is past all meaning; log_std moved along, by up to 0.1."""
    ours, naive = mean_errors([policies(dtype, 256, dims, change, min(change / 3, 0.1), seed) for seed in range(24)])
    assert ours <= naive if change <= 2 else ours <= 1.1 * naive  # far away both are the rounding of z


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32, torch.float64])
def test_log_ratio_of_equal_policies_is_exactly_zero(dtype):
    for dims, seed in ((1, 0), (6, 1), (17, 2)):
        action, _, log_std, mean, _ = policies(dtype, 256, dims, 0, 0, seed)
        action = torch.cat([action, mean, action * 100])  # far actions as well, and the mean itself
        mean = mean.repeat(3, 1)
        for old_mean, old_log_std in ((mean, log_std), (mean.clone(), log_std.clone())):
            log_ratio = gaussian_log_ratio(action, mean, log_std, old_mean, old_log_std)
            assert log_ratio.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            assert torch.equal(log_ratio, torch.zeros_like(log_ratio))


def test_log_ratio_subtracts_the_correction():
    inputs = policies(torch.float16, 64, 3, 0.02, 0.01, 0)
    for dtype in (torch.float16, torch.float32):
        correction = (0.1 * torch.randn(64, generator=seeded())).to(dtype)
        expected = gaussian_log_ratio(*inputs) - correction.float()
        assert torch.equal(gaussian_log_ratio(*inputs, correction), expected)
        assert torch.equal(gaussian_log_ratio(*inputs, correction=correction), expected)


@pytest.mark.parametrize("dims", [1, 4])
@pytest.mark.parametrize("batch", [1, 5])
def test_gradients_of_the_log_ratio_in_fp64(dims, batch):
    action, mean, log_std, old_mean, old_log_std = policies(torch.float64, batch, dims, 0.5, 0.2, 0)
    mean.requires_grad_()
    log_std.requires_grad_()
    correction = torch.randn(batch, generator=seeded(), dtype=torch.float64)

    def function(mean, log_std):
        return gaussian_log_ratio(action, mean, log_std, old_mean, old_log_std, correction)

    assert torch.autograd.gradcheck(function, (mean, log_std), eps=1e-6, atol=1e-7)


def test_the_log_ratio_has_constants_and_no_second_derivative():
    inputs = [x.requires_grad_() for x in policies(torch.float64, 4, 2, 0.5, 0.2, 0)]
    gradients = torch.autograd.grad(gaussian_log_ratio(*inputs).sum(), inputs, allow_unused=True, create_graph=True)
    assert [gradient is None for gradient in gradients] == [True, False, False, True, True]
    with pytest.raises(RuntimeError):
        torch.autograd.grad(gradients[1].sum(), inputs[2])


@pytest.mark.parametrize("dtype", HALVES)
def test_gradients_of_the_log_ratio_in_16_bits(dtype):
    """Against z/std and z^2 - 1 in FP64. Both follow from z = z0 + dz, which is within e = 4u (|z0| + |z0 t| + |q| + |q t|)."""
    for seed, change in enumerate([0, 1e-3, 0.01, 0.1, 1, 3]):
        action, mean, log_std, old_mean, old_log_std = policies(dtype, 256, 6, change, change / 3, seed)
        weight = torch.randn(256, generator=seeded(seed))
        mean.requires_grad_()
        log_std.requires_grad_()
        (weight * gaussian_log_ratio(action, mean, log_std, old_mean, old_log_std)).sum().backward()
        assert mean.grad.dtype == log_std.grad.dtype == dtype
        inputs = [x.detach() for x in (action, mean, log_std, old_mean, old_log_std)]
        _, _, z0, dz, parts = reference(*inputs)
        z, std, weight, u = z0 + dz, inputs[2].double().exp(), weight.double()[:, None], UNIT[dtype]
        e = 4 * u * (z0.abs() + parts) + 3 * TINY[dtype]
        expected, bound = weight * z / std, weight.abs() * e / std
        assert ((mean.grad.double() - expected).abs() <= bound + u * (expected.abs() + bound) + TINY[dtype]).all()
        expected, bound = (weight * (z * z - 1)).sum(0), (weight.abs() * (2 * z.abs() * e + e * e + 1e-6 * (z * z + 1))).sum(0)
        assert ((log_std.grad.double() - expected).abs() <= bound + u * (expected.abs() + bound) + TINY[dtype]).all()


@pytest.mark.parametrize("move", [100, 300, 400, 1000, -1000, 8000, -8000])
@pytest.mark.parametrize("z0", [0, 0.5, -3, 6])
@pytest.mark.parametrize("change", [0, 0.0625, -0.0625])
def test_a_log_ratio_that_overflows_is_minus_infinity_and_not_nan(move, z0, change):
    """From 362 std on, dz^2/2 overflows. The ratio is 0, and so is the gradient, whatever the advantage."""
    mean, log_std = torch.tensor([[0.0], [move]]).half().requires_grad_(), torch.tensor([change]).half().requires_grad_()
    inputs = torch.full((2, 1), z0).half(), mean, log_std, torch.zeros(2, 1).half(), torch.zeros(1).half()
    log_ratio = gaussian_log_ratio(*inputs)
    exact = reference(*(x.detach() for x in inputs))[0].tolist()
    assert log_ratio.tolist() == pytest.approx([exact[0], exact[1] if abs(move) < 350 else -math.inf], rel=0.01, abs=0.01)
    for advantage in (-1.0, 0.0, 1.0):
        loss = clipped_surrogate(log_ratio, torch.tensor([0.5, advantage]).half(), 0.2)
        gradients = torch.autograd.grad(loss, (mean, log_std), retain_graph=True)
        assert loss.isfinite() and all(gradient.isfinite().all() for gradient in gradients)
        assert gradients[0][1] == 0


# --- sampling_correction


@pytest.mark.parametrize("dtype", HALVES)
def test_correction_is_zero_where_the_stored_policy_acted(dtype):
    action, _, log_std, mean, _ = policies(dtype, 512, 6, 0, 0, 0)
    correction = sampling_correction(action, mean, log_std, mean.clone(), log_std.clone())
    assert correction.dtype == dtype and torch.equal(correction, torch.zeros(512, dtype=dtype))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("dims", [1, 6, 17])
def test_correction_restores_the_sampling_time_reference(dtype, dims):
    """An FP32 policy acts, its rollout is stored in 16 bits. At theta = theta_0 the 16-bit forward pass differs by roundings.

    Bound: that of the log-ratio, one rounding of c, and 2^-20 of what the two FP32 log-densities add up.
    """
    u, g = UNIT[dtype], seeded(dims)
    acting_mean, acting_log_std = 0.5 * torch.randn(1024, dims, generator=g), 0.2 * torch.randn(dims, generator=g) - 0.5
    action = (acting_mean + acting_log_std.exp() * torch.randn(1024, dims, generator=g)).to(dtype)
    old_mean, old_log_std = acting_mean.to(dtype), acting_log_std.to(dtype)
    mean, log_std = (acting_mean * (1 + u * torch.randn(1024, dims, generator=g))).to(dtype), old_log_std.clone()
    assert not torch.equal(mean, old_mean)
    correction = sampling_correction(action, acting_mean, acting_log_std, old_mean, old_log_std)
    assert correction.dtype == dtype and correction.shape == (1024,)

    true = reference(action, mean, log_std, acting_mean, acting_log_std)[0]  # L - L0, L0 of the policy that acted
    true_correction = reference(action, acting_mean, acting_log_std, old_mean, old_log_std)[0]
    inputs = action, mean, log_std, old_mean, old_log_std
    error = (gaussian_log_ratio(*inputs, correction).double() - true).abs()
    z0 = (action.double() - acting_mean.double()) / acting_log_std.double().exp()
    wide = 2**-20 * (1 + z0 * z0 + acting_log_std.double().abs()).sum(1)
    assert ((correction.double() - true_correction).abs() <= u * true_correction.abs() + wide).all()
    assert (error <= error_bound(inputs) + u * true_correction.abs() + 2 * wide).all()
    without = (gaussian_log_ratio(*inputs).double() - true).abs()
    assert error.mean() < without.mean() / 50
    # at the stored mean exactly, the log-ratio before the correction is 0 and all of it is the correction
    assert torch.equal(gaussian_log_ratio(action, old_mean, old_log_std, old_mean, old_log_std, correction), -correction.float())


# --- clipped_surrogate

CLIP = 0.2
samples = st.tuples(
    st.one_of(st.floats(-5, 5), st.floats(-0.3, 0.3), st.floats(-1e-12, 1e-12)),  # log-ratio
    st.one_of(st.just(0.0), st.floats(-10, 10), st.floats(-1e-5, 1e-5)),  # advantage
)


@settings(max_examples=300)
@given(st.lists(samples, min_size=1, max_size=20))
@example([(5.0, 1.0), (5.0, -1.0), (-5.0, 1.0), (-5.0, -1.0), (5.0, 0.0), (-5.0, 0.0), (0.0, 1.0), (0.1, -1.0)])
def test_surrogate_is_the_textbook_one(rows):
    log_ratio, advantage = torch.tensor(rows, dtype=torch.float64).T
    tie = torch.minimum((log_ratio - math.log1p(CLIP)).abs(), (log_ratio - math.log1p(-CLIP)).abs()) < 1e-12
    assume(not tie.any())  # at the boundary itself there is no derivative

    def textbook(log_ratio):
        ratio = log_ratio.exp()
        return -torch.min(advantage * ratio, advantage * ratio.clamp(1 - CLIP, 1 + CLIP)).mean()

    losses, gradients = [], []
    for function in (lambda d: clipped_surrogate(d, advantage, CLIP) - advantage.mean(), textbook):
        leaf = log_ratio.clone().requires_grad_()
        loss = function(leaf)
        losses.append(loss.item())
        gradients.append(torch.autograd.grad(loss, leaf)[0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-12, abs=1e-12)
    torch.testing.assert_close(*gradients, rtol=1e-12, atol=1e-300)
    clipped = (log_ratio > math.log1p(CLIP)) & (advantage > 0) | (log_ratio < math.log1p(-CLIP)) & (advantage < 0)
    normal = advantage.abs() > 1e-300  # smaller ones make products of 0
    assert torch.equal((gradients[0] == 0)[normal], clipped[normal])


def test_surrogate_sees_changes_too_small_to_move_the_ratio_from_1():
    log_ratio, advantage = torch.tensor([1e-9, -1e-9, 1e-9]), torch.tensor([1.0, -2.0, 4.0]).half()
    loss = clipped_surrogate(log_ratio, advantage, CLIP)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert loss.item() == pytest.approx(-7e-9 / 3)
    assert torch.equal(log_ratio.exp(), torch.ones(3))  # which the textbook's cannot


def test_surrogate_of_an_unimportant_sample_is_zero_however_far_the_policy_went():
    """With no advantage, ratios that FP32 cannot hold do not matter, nor do clipped ones; the gradient is 0 as well."""
    log_ratio = torch.tensor([1000.0, 1000.0, -1000.0, -math.inf]).requires_grad_()
    loss = clipped_surrogate(log_ratio, torch.tensor([0.0, 1.0, -1.0, -1.0]).half(), CLIP)
    loss.backward()
    assert loss.item() == pytest.approx(-(0 + CLIP + CLIP + CLIP) / 4)
    assert torch.equal(log_ratio.grad, torch.zeros(4))


# --- scaled_norm


def test_norm_is_finite_where_squares_in_fp16_are_not():
    """24 large gradients, elements between 257 and the largest FP16."""
    g = seeded()
    for i in range(24):
        largest = 257 + (65504 - 257) * i / 23
        tensors = [torch.randn(shape, generator=g) for shape in [(64, 17), (64,), (6, 64)]]
        scale = largest / max(tensor.abs().max() for tensor in tensors)
        tensors = [(tensor * scale).clamp(-65504, 65504).half() for tensor in tensors]
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        assert flat.isfinite().all() and not rounded_sum(flat.square()).sqrt().isfinite()
        norm = scaled_norm(tensors)
        assert norm.dtype == torch.float32 and norm.shape == ()
        assert norm.item() == pytest.approx(math.hypot(*flat.tolist()), rel=1e-6)


NORM_INPUTS = {
    "random FP16": lambda g: torch.randn(10007, generator=g).half(),
    "random BF16": lambda g: torch.randn(10007, generator=g).bfloat16(),
    "random FP32": lambda g: torch.randn(10007, generator=g),
    "a million": lambda g: torch.randn(2**20, generator=g).half(),
    "a million equal": lambda g: torch.full((2**20,), 0.1).half(),
    "scales mixed": lambda g: torch.randn(1000, generator=g) * 10 ** (10 * torch.randn(1000, generator=g)),
    "subnormal FP16": lambda g: (2.0**-24 * torch.randint(-1023, 1024, (1000,), generator=g)).half(),
    "smallest FP16": lambda g: torch.full((1000,), 2.0**-24).half(),
    "FP32, squares underflow": lambda g: 1e-30 * torch.randn(1000, generator=g),
    "subnormal FP32": lambda g: 2.0**-140 * torch.randn(1000, generator=g),
    "smallest FP32": lambda g: torch.full((9,), 2.0**-149),
    "largest FP16": lambda g: torch.full((1000,), -65504.0).half(),
    "FP32, squares overflow": lambda g: 1e30 * torch.randn(1000, generator=g),
    "largest FP32": lambda g: torch.tensor([3.4e38, 1e36, -1e35, 1.0]),
    "one element": lambda g: torch.tensor(-3.0).half(),
}


@pytest.mark.parametrize("name", NORM_INPUTS)
def test_norm_against_fp64(name):
    """Within 1e-6, and half a step of the grid where the norm itself is an FP32 subnormal."""
    tensor = NORM_INPUTS[name](seeded())
    exact = math.hypot(*tensor.double().flatten().tolist())
    assert exact > 0
    assert scaled_norm([tensor]).item() == pytest.approx(exact, rel=1e-6, abs=0.5001 * 2**-149)


def test_norm_of_mixed_shapes_and_dtypes():
    g = seeded()
    tensors = [torch.randn(shape, generator=g) for shape in [(3, 4, 5), (), (7,), (0,), (2, 2)]]
    tensors = [tensor.to(dtype) for tensor, dtype in zip(tensors, [*HALVES, torch.float32, torch.float16, torch.float64])]
    exact = math.hypot(*torch.cat([tensor.double().flatten() for tensor in tensors]).tolist())
    assert scaled_norm(tensors).item() == pytest.approx(exact, rel=1e-6)
    assert scaled_norm(tuple(tensors)).item() == pytest.approx(exact, rel=1e-6)
    assert scaled_norm([torch.ones(3).requires_grad_()]).requires_grad is False


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_norm_of_zeros_is_zero(dtype):
    assert scaled_norm([torch.zeros(5, dtype=dtype), torch.zeros(2, 3, dtype=dtype)]).item() == 0
    assert scaled_norm([-torch.zeros(5, dtype=dtype)]).item() == 0


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("rest", [0.0, 1.0, 65504.0])
def test_norm_of_infinities_and_nans_is_not_finite(dtype, bad, rest):
    for position in (0, 3, 99):
        tensor = torch.full((100,), rest, dtype=dtype)
        tensor[position] = bad
        assert not scaled_norm([torch.ones(2), tensor]).isfinite()


def test_norm_that_exceeds_fp32_is_not_finite():
    assert not scaled_norm([torch.full((4,), 3e38)]).isfinite()


def test_norm_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one"):
        scaled_norm([])
    with pytest.raises(ValueError, match="at least one"):
        scaled_norm([torch.zeros(0)])


# --- rounded_sum


def test_rounded_sum_of_ones():
    """Pairwise sums double exactly; one after the other would stop at 2048."""
    ones = torch.ones(4096).half()
    assert rounded_sum(ones).dtype == torch.float16 and rounded_sum(ones).shape == ()
    assert rounded_sum(ones).item() == 4096


def test_rounded_sum_rounds_partial_sums():
    assert rounded_sum(torch.tensor([2048.0, 1.0]).half()).item() == 2048
    assert rounded_sum(torch.tensor([2048.0, 1.0, 1.0]).half()).item() == 2048
    assert torch.tensor([2048.0, 1.0, 1.0]).half().sum().item() == 2050  # PyTorch's own sum has FP32 partial sums
    assert rounded_sum(torch.tensor([65504.0, 65504.0, -65504.0, -65504.0]).half()).isnan()


@pytest.mark.parametrize("size", [*range(1, 18), 63, 64, 65, 1000])
def test_rounded_sum_is_the_pairwise_loop(size):
    x = 100 * torch.randn(size, generator=seeded(size)) ** 3
    values = [np.float16(value) for value in x.half().tolist()]
    while len(values) > 1:
        values = [np.float16(sum(values[i : i + 2], np.float16(0))) for i in range(0, len(values), 2)]
    assert rounded_sum(x.half()).item() == float(values[0])
    assert rounded_sum(x.half()[:, None].expand(-1, 1)).item() == float(values[0])


# --- stochastic rounding


@pytest.mark.parametrize("dtype", HALVES)
@given(st.integers(-0x8000, 0x7FFF), st.floats(0, 1), st.integers(0, 2**24), st.integers(0, 2**32 - 1))
def test_stochastic_rounding_gives_the_neighbours_with_the_right_chances(dtype, bits, position, step, seed):
    low, high = torch.tensor([bits, bits + 1 if bits & 0x7FFF != 0x7FFF else bits], dtype=torch.int16).view(dtype).float()
    assume(
        low.isfinite() and high.isfinite() and low.abs() >= 2**-120 * (dtype == torch.bfloat16)
    )  # FP32 resolves them below that no more
    x = low + position * (high - low)
    rounded = stochastic_rounding(x.expand(2000).contiguous(), dtype, torch.tensor(float(step)), seed).float()
    assert ((rounded == low) | (rounded == high)).all()
    if low != high:
        assert (rounded == high).float().mean().item() == pytest.approx(((x - low) / (high - low)).item(), abs=0.06)


@pytest.mark.parametrize("dtype", HALVES)
def test_stochastic_rounding_leaves_what_needs_none(dtype):
    for value in all_finite(dtype).float().split(64):
        assert torch.equal(stochastic_rounding(value, dtype, torch.tensor(3.0), 1).float(), value)
    infinite = torch.tensor([math.inf, -math.inf, math.nan])
    assert not stochastic_rounding(infinite, dtype, torch.tensor(3.0), 1).isfinite().any()


def coins(count, step, seed):
    """The positions between 1 and the next FP16 number, of 2^10, from which on each element is rounded up, by bisection."""
    low, high = torch.zeros(count), torch.full((count,), 2.0**10)
    for _ in range(10):
        middle = (low + high) / 2
        up = stochastic_rounding(1 + middle * 2.0**-20, torch.float16, torch.tensor(float(step)), seed) > 1
        low, high = torch.where(up, low, middle), torch.where(up, middle, high)
    return low


def test_coins_are_even_and_know_nothing_of_each_other():
    """Not of their neighbours in the vector, in time, or under another seed: within 4 standard errors of independent ones."""
    count, steps = 50_000, [(s, seed) for s in (1, 2, 3, 1000) for seed in (0, 1, 2**32 - 1)]
    samples = {at: coins(count, *at) for at in steps}
    for sample in samples.values():
        observed = torch.histc(sample, 64, 0, 2**10)
        chi_square = (observed - count / 64).square().sum() / (count / 64)
        assert chi_square < 63 + 4 * math.sqrt(2 * 63)
        for lag in (1, 2, 64, 4096):
            assert abs(torch.corrcoef(torch.stack([sample[lag:], sample[:-lag]]))[0, 1]) < 4 / math.sqrt(count)
    correlations = torch.corrcoef(torch.stack(list(samples.values()))) - torch.eye(len(samples))
    assert correlations.abs().max() < 4.5 / math.sqrt(count)


# --- compiled


def compiled(function, exact):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, options={"emulate_precision_casts": True} if exact else None)


@needs_compiler
def test_compiled_two_sum_is_bit_equal_only_with_emulated_casts():
    """Without the option the compiler keeps FP16 chains in FP32, where there is no rounding for the low part to measure."""
    x, y = torch.randn(2, 4096, generator=seeded()).half()
    high, low = two_sum(x, y)
    assert (low != 0).float().mean() > 0.5
    exact_high, exact_low = compiled(two_sum, exact=True)(x, y)
    assert torch.equal(exact_high, high) and torch.equal(exact_low, low)
    fused_high, fused_low = compiled(two_sum, exact=False)(x, y)
    assert torch.equal(fused_high, high) and not torch.equal(fused_low, low)
    assert (fused_low != 0).float().mean() < 0.05


@needs_compiler
def test_compiled_log_ratio_is_bit_equal_to_eager():
    """With the option, and the gradient too; without it, it is not."""
    inputs = policies(torch.float16, 256, 6, 0.02, 0.005, 0)
    inputs[1].requires_grad_()
    inputs[2].requires_grad_()
    outputs = []
    for function in (gaussian_log_ratio, compiled(gaussian_log_ratio, exact=True)):
        log_ratio = function(*inputs)
        outputs.append((log_ratio, *torch.autograd.grad(log_ratio.sum(), inputs[1:3])))
    for eager, exact in zip(*outputs):
        assert torch.equal(eager, exact)
    with torch.no_grad():
        assert not torch.equal(outputs[0][0], compiled(gaussian_log_ratio, exact=False)(*inputs))
