"""SHARP (module C) against a slow reference, Adam, and its promises; and what the whole training state is made of."""

import io
import itertools
import math
import random
import shutil

import numpy as np
import pytest
import torch

import ppo_fp16
from ppo_fp16 import SHARP, Agent, sharp_update

torch.set_num_threads(1)

has_compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
needs_compiler = pytest.mark.skipif(not has_compiler, reason="torch.compile needs a C++ compiler for the CPU")
# (observations, actions) of the six tasks
SIZES = {"HalfCheetah-v5": (17, 6), "Hopper-v5": (11, 3), "Walker2d-v5": (17, 6), "Humanoid-v5": (348, 17)}
SIZES |= {"InvertedDoublePendulum-v5": (9, 1), "Swimmer-v5": (8, 2)}
LAYOUTS = {
    "1x1": [((1, 1), True)],
    "one row": [((1, 7), True), ((3,), False)],
    "one column": [((9, 1), True), ((2,), False)],
    "vectors": [((5,), False), ((3, 4), False), ((1,), False)],
    "a small agent": [
        ((3,), False),
        ((8, 5), True),
        ((8,), False),
        ((8, 8), True),
        ((8,), False),
        ((3, 8), False),
        ((3,), False),
    ],
    "all shared": [((6, 3), True), ((1, 5), True), ((4, 1), True), ((2, 2), True)],
}


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def make(layout, dtype=torch.float16, theta=None, **kwargs):
    """SHARP on random parameters."""
    size = sum(math.prod(shape) for shape, _ in layout)
    theta = torch.randn(size, generator=seeded(size)) if theta is None else theta
    return SHARP([torch.nn.Parameter(theta.to(dtype))], layout, **kwargs)


def step(optimizer, gradient, clip_coef=None):
    optimizer.theta.grad = gradient.to(optimizer.theta.dtype)
    optimizer.step(clip_coef=None if clip_coef is None else torch.tensor(clip_coef))


def copy_of(optimizer):
    """Parameters and state, as bits."""
    tensors = dict(theta=optimizer.theta.detach(), **optimizer.state[optimizer.theta])
    bits = {2: torch.int16, 4: torch.int32}
    return {name: tensor.clone().view(bits[tensor.element_size()]) for name, tensor in tensors.items()}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name in one:
        assert one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]), name


def random_gradients(layout, count, seed):
    """Gradients that differ by orders of magnitude between rows, and in time."""
    g, scale, gradients = seeded(seed), [], []
    for shape, _ in layout:
        rows = 10 ** (2 * torch.rand(shape[0], generator=g) - 2)
        scale.append(rows.repeat_interleave(math.prod(shape[1:])))
    scale = torch.cat(scale)
    for _ in range(count):
        gradients.append(scale * torch.randn(len(scale), generator=g) * 10 ** (2 * torch.rand(1, generator=g) - 1))
    return gradients


# --- against a reference


def spacing(x):
    """Distance of neighbouring FP16 numbers about x."""
    return 2.0 ** (max(math.floor(math.log2(abs(x))), -14) - 10) if x else 2.0**-24


def root_mean_square(values):
    return math.sqrt(math.fsum(value * value for value in values) / len(values))


def reference_step(theta, m, w, gradient, residual, t, lr, clip_coef, layout, beta1=0.9, beta2=0.999, eps=1e-5):
    """One step, as it is defined, in FP64, element by element: the new m and w, and a function from w to theta - u."""
    new_m, new_w, groups, element, group = [], [], [], 0, 0
    for shape, shared in layout:
        rows = shape[0] if shared else math.prod(shape)
        columns = math.prod(shape) // rows
        for _ in range(rows):
            row = [gradient[element + column] * clip_coef for column in range(columns)]
            new_w.append(math.sqrt(beta2 * w[group] ** 2 + (1 - beta2) * root_mean_square(row) ** 2))
            for g in row:
                new_m.append(beta1 * m[element] + (1 - beta1) * g)
                groups.append(group)
                element += 1
            group += 1

    def unrounded_theta(w):
        preconditioner, first = [], 0
        for shape, shared in layout:
            rows = shape[0] if shared else math.prod(shape)
            layer = root_mean_square(w[first : first + rows])
            for root in w[first : first + rows]:
                preconditioner.append(min(max(root, layer / 4), layer * 4) if shared else root)
            first += rows
        result = []
        for i, group in enumerate(groups):
            u = lr * (new_m[i] / (1 - beta1**t)) / (preconditioner[group] / math.sqrt(1 - beta2**t) + eps)
            result.append(theta[i] - u - residual[i])
        return result

    return new_m, new_w, unrounded_theta


def assert_rounded(values, exact, slack=2**-20):
    """Each value is within half a step of the FP16 grid of the exact one, and what FP32 arithmetic adds."""
    for value, x in zip(values, exact):
        assert abs(value - x) <= spacing(x) / 2 + slack * max(abs(x), 2.0**-20), (value, x)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("clip_coef", [1.0, 0.137])
def test_steps_against_the_reference(name, clip_coef):
    """30 steps; each from the same FP16 state. m and w: correctly rounded, up to FP32 errors. theta: the same, for the w that was
    stored or for the one before its rounding. residual: exactly what the parameter lacks."""
    layout = LAYOUTS[name]
    size = sum(math.prod(shape) for shape, _ in layout)
    compensated = min(2, size)
    optimizer = make(layout, residual=slice(0, compensated), lr=0.01)
    state = optimizer.state[optimizer.theta]
    for t, gradient in enumerate(random_gradients(layout, 30, seed=1), 1):
        gradient = gradient.half()
        before = [x.tolist() for x in (optimizer.theta.detach(), state["exp_avg"], state["root_exp_avg_sq"], gradient)]
        residual = state["residual"].tolist() + [0.0] * (size - compensated)
        m, w, unrounded_theta = reference_step(*before, residual, t, 0.01, np.float32(clip_coef).item(), layout)
        step(optimizer, gradient, clip_coef)
        theta, new_m, new_w = (x.tolist() for x in (optimizer.theta.detach(), state["exp_avg"], state["root_exp_avg_sq"]))
        assert state["step"].item() == t
        assert_rounded(new_m, m)
        assert_rounded(new_w, w)
        exact = unrounded_theta(new_w), unrounded_theta(w)
        for i, (value, one, other) in enumerate(zip(theta, *exact)):
            low, high = min(one, other), max(one, other)
            slack = spacing(max(abs(low), abs(high))) / 2 + 2**-20 * abs(before[0][i]) + 2**-18 * abs(before[0][i] - one)
            assert low - slack <= value <= high + slack
        for i, left in enumerate(state["residual"].tolist()):
            low, high = sorted(theta[i] - x[i] for x in exact)
            assert low - 1e-6 <= left <= high + 1e-6
    assert any(theta != start for theta, start in zip(optimizer.theta.tolist(), before[0]))


def test_element_wise_sharp_in_fp32_is_adam():
    layout = [((20,), False), ((10, 8), False), ((1, 1), False)]
    ours = make(layout, dtype=torch.float32, lr=3e-3, eps=1e-5)
    theta = torch.nn.Parameter(ours.theta.detach().clone())
    start, adam = theta.detach().clone(), torch.optim.Adam([theta], lr=3e-3, eps=1e-5)
    for gradient in random_gradients(layout, 50, seed=2):
        step(ours, gradient)
        theta.grad = gradient
        adam.step()
    state, expected = ours.state[ours.theta], adam.state[theta]
    torch.testing.assert_close(ours.theta - start, theta - start, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.theta, theta, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(state["exp_avg"], expected["exp_avg"], rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(state["root_exp_avg_sq"], expected["exp_avg_sq"].sqrt(), rtol=1e-5, atol=0)
    assert state["step"].item() == expected["step"].item() == 50


def test_lr_betas_and_eps_are_those_of_the_group():
    """As Adam's, and read at every step, since the schedule changes lr."""
    layout, options = [((7,), False)], dict(lr=0.1, betas=(0.5, 0.9), eps=0.3)
    ours = make(layout, dtype=torch.float32, **options)
    theta = torch.nn.Parameter(ours.theta.detach().clone())
    adam = torch.optim.Adam([theta], **options)
    for i, gradient in enumerate(random_gradients(layout, 10, seed=3)):
        ours.param_groups[0]["lr"] = adam.param_groups[0]["lr"] = 0.1 * (1 - i / 10)
        step(ours, gradient)
        theta.grad = gradient
        adam.step()
    torch.testing.assert_close(ours.theta, theta, rtol=1e-5, atol=1e-6)


def test_row_roots_are_clipped_to_a_quarter_and_four_times_the_rms_of_the_layer():
    """64 rows, one of them 100 times larger: 8 times the RMS of the layer, the others 1/12. Parameters 0: there FP16 is fine."""
    layout = [((64, 5), True), ((64,), False)]
    gradient = torch.ones(64, 5)
    gradient[17] = 100
    optimizer = make(layout, theta=torch.zeros(64 * 6), lr=1e-3, eps=0.0)
    step(optimizer, torch.cat([gradient.flatten(), gradient[:, 0]]))
    layer = math.sqrt((63 + 100**2) / 64)
    matrix, vector = (-optimizer.theta.detach().float()).split([64 * 5, 64])
    expected = 1e-3 * gradient / gradient.clamp(layer / 4, 4 * layer)
    assert expected[17, 0] > 1.9e-3 and expected[0, 0] < 0.4e-3  # 1e-3 without clipping
    torch.testing.assert_close(matrix.view(64, 5), expected, rtol=2e-3, atol=0)
    torch.testing.assert_close(vector, torch.full((64,), 1e-3), rtol=2e-3, atol=0)  # not shared, not clipped
    roots = optimizer.state[optimizer.theta]["root_exp_avg_sq"][:64].float()
    torch.testing.assert_close(roots, math.sqrt(0.001) * gradient[:, 0], rtol=1e-3, atol=0)  # the state is not clipped


# --- extremes


@pytest.mark.parametrize("name", LAYOUTS)
def test_zero_gradients_move_nothing(name):
    optimizer = make(LAYOUTS[name], residual=slice(0, 1), lr=1.0)
    before = copy_of(optimizer)
    for _ in range(5):
        step(optimizer, torch.zeros(len(optimizer.theta)))
    optimizer.state[optimizer.theta]["step"].sub_(5)  # all that changed
    assert_same_bits(before, copy_of(optimizer))
    assert not optimizer.state[optimizer.theta]["root_exp_avg_sq"].any()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("sizes", [(65504.0,), (2.0**-24,), (65504.0, 2.0**-24, 0.0)])
def test_extreme_gradients_stay_finite(name, sizes):
    """The largest and the smallest FP16, alone and row by row. The first step of Adam is lr, or less where eps is felt."""
    optimizer = make(LAYOUTS[name], residual=slice(0, 1), lr=1e-2)
    start, size = optimizer.theta.detach().float().clone(), len(optimizer.theta)
    gradient = torch.tensor(sizes).repeat_interleave(3).repeat(size // 3 + 1)[:size].half()
    assert gradient.abs().max() == max(sizes)
    for i in range(200):
        step(optimizer, gradient)
        assert all(tensor.isfinite().all() for tensor in (optimizer.theta, *optimizer.state[optimizer.theta].values()))
        if i == 0:
            moved = start - optimizer.theta.float()
            assert (moved >= 0).all() and (moved <= 0.041 + 2**-10 * start.abs()).all()  # a clipped root: four times as far
    assert (optimizer.theta < start).any()


@pytest.mark.parametrize("bad", [1.0, math.inf, math.nan])
def test_a_clip_coef_of_nan_changes_no_bit(bad):
    """Which is how an update with a gradient norm that is not finite is skipped."""
    layout = LAYOUTS["a small agent"]
    optimizer = make(layout, residual=slice(0, 3), lr=1e-3)
    for gradient in random_gradients(layout, 5, seed=4):
        step(optimizer, gradient)
    before = copy_of(optimizer)
    assert optimizer.state[optimizer.theta]["step"] == 5 and before["residual"].any()
    gradient = random_gradients(layout, 1, seed=5)[0]
    gradient[3] = bad
    step(optimizer, gradient, math.nan)
    assert_same_bits(before, copy_of(optimizer))
    step(optimizer, random_gradients(layout, 1, seed=6)[0], 1.0)  # and the next one counts again
    assert optimizer.state[optimizer.theta]["step"] == 6
    assert not torch.equal(before["theta"], copy_of(optimizer)["theta"])


def test_clip_coef_is_applied_in_fp32():
    """In FP16 the first coefficient would be 0, and the second would make these gradients 0."""
    for coefficient, size in ((2e-8, 60000.0), (1e-4, 2e-4)):
        assert torch.tensor(coefficient).half() * torch.tensor(size).half() == 0
        optimizer = make([((4,), False)], theta=torch.zeros(4), lr=1e-3)
        step(optimizer, torch.full((4,), size), coefficient)
        assert (optimizer.theta < 0).all() and optimizer.theta.isfinite().all()


@pytest.mark.parametrize(
    "dtype, scales", [(torch.float16, (2**-23, 1.0, 2.0**13)), (torch.bfloat16, (1e-36, 1e-20, 1.0, 1e20, 5e37))]
)
def test_the_rms_of_a_row_over_the_whole_range(dtype, scales):
    """Scale-safe: no square overflows or underflows. Zeros give 0."""
    for scale in scales:
        gradient = torch.tensor([[3.0, 4.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 7.0]], dtype=torch.float64) * scale
        optimizer = make([((3, 4), True)], dtype=dtype)
        optimizer.theta.grad = gradient.flatten().to(dtype)
        optimizer.step()
        rows = optimizer.theta.grad.double().view(3, 4)
        exact = [math.sqrt(0.001) * root_mean_square(row) for row in rows.tolist()]
        w = optimizer.state[optimizer.theta]["root_exp_avg_sq"].double().tolist()
        assert w == pytest.approx(exact, rel=torch.finfo(dtype).eps, abs=2**-24 if dtype == torch.float16 else 1e-40)


# --- residual


def test_residual_accumulates_what_the_grid_swallows():
    """Below 1.0 the grid has steps of 2^-11, updates of about 1e-5 do not reach half of one. Where there is a residual the
    parameter follows the sum of the updates, from the first step at which that sum exceeds 2^-12; elsewhere it never moves."""
    optimizer = make([((2,), False), ((3,), False)], theta=torch.ones(5), residual=slice(0, 2), lr=1e-5)
    state, total, crossed = optimizer.state[optimizer.theta], 0.0, None
    for t in range(1, 401):
        m = 0.9 * state["exp_avg"][0].item() + 0.1
        step(optimizer, torch.ones(5))
        w = state["root_exp_avg_sq"][0].item()
        total += 1e-5 * (m / (1 - 0.9**t)) / (w / math.sqrt(1 - 0.999**t) + 1e-5)
        theta, residual = optimizer.theta.double().tolist(), state["residual"].double().tolist()
        assert 1 - (theta[0] - residual[0]) == pytest.approx(total, rel=1e-5)
        assert theta[0] == theta[1] and abs(residual[0]) <= 2**-12 + 1e-6
        assert theta[2:] == [1.0, 1.0, 1.0]
        assert (theta[0] < 1) == (total > 2**-12)
        crossed = t if crossed is None and theta[0] < 1 else crossed
    assert 20 < crossed < 30
    assert 0.0039 < total < 0.0048  # eight steps of the grid
    assert abs(1 - theta[0] - total) <= 2**-12 + 1e-6


def test_residual_of_log_std_only():
    """The parameters that the trainer compensates are log_std, which come first in the flat vector."""
    agent = Agent(5, 3).half()
    agent.log_std.data = torch.tensor([0.1, 0.2, 0.3]).half()
    optimizer = ppo_fp16.make_optimizer(agent, ppo_fp16.Args())
    residual = optimizer.theta[optimizer.residual]
    assert residual.tolist() == torch.tensor([0.1, 0.2, 0.3]).half().tolist()
    assert residual.data_ptr() == agent.log_std.data_ptr()
    assert optimizer.state[optimizer.theta]["residual"].dtype == torch.float32


# --- write-back


def errors(dtype, **writeback):
    """After 400 updates of 1e-5, of 600 parameters between 1 and 1.5: how far each is from the FP64 sum, and that sum."""
    optimizer = make([((600,), False)], dtype, 1 + torch.rand(600, generator=seeded()) / 2, lr=1e-5, **writeback)
    start, total, state = optimizer.theta.detach().double(), 0.0, optimizer.state[optimizer.theta]
    torch.manual_seed(0)
    for t in range(1, 401):
        step(optimizer, torch.ones(600))
        m, w = (state[name][0].item() for name in ("exp_avg", "root_exp_avg_sq"))
        total += 1e-5 * (m / (1 - 0.9**t)) / (w / math.sqrt(1 - 0.999**t) + 1e-5)
    return optimizer.theta.detach().double() - (start - total), total


@pytest.mark.parametrize("dtype, spacing", [(torch.float16, 2**-10), (torch.bfloat16, 2**-7)])
def test_writeback_keeps_updates_that_the_grid_swallows(dtype, spacing):
    error, total = errors(dtype)
    assert total > 0.003 and error.mean() >= 0.9 * total  # hardly a parameter has moved
    error, _ = errors(dtype, residual=slice(0, 600), residual_dtype=dtype)
    assert error.abs().max() <= 0.51 * spacing  # one rounding, however many updates
    error, _ = errors(dtype, rounding_seed=1)
    assert error.abs().max() < 10 * spacing and abs(error.mean()) < 4 * error.std() / math.sqrt(600)  # right on average


def test_writeback_of_the_trainer():
    for writeback, residual, dtype in (
        ("log_std", 6, torch.float32),
        ("compensated", 11085, torch.float16),
        ("stochastic", 0, None),
    ):
        optimizer = ppo_fp16.make_optimizer(Agent(17, 6).half(), ppo_fp16.Args(writeback=writeback))
        state = optimizer.state[optimizer.theta]["residual"]
        assert len(state) == residual and state.dtype == (dtype or torch.float32)
        assert optimizer.rounding_seed == (1 if writeback == "stochastic" else None)


# --- state


def trained(layout, seed=7):
    optimizer = make(layout, residual=slice(0, 3), lr=1e-3)
    for gradient in random_gradients(layout, 7, seed):
        step(optimizer, gradient)
    return optimizer


def test_state_dict_round_trip_is_exact_and_in_place():
    layout = LAYOUTS["a small agent"]
    optimizer = trained(layout)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    copy = make(layout, theta=optimizer.theta.detach().clone(), residual=slice(0, 3), lr=5.0)
    pointers = {name: tensor.data_ptr() for name, tensor in copy.state[copy.theta].items()}
    copy.load_state_dict(torch.load(file, weights_only=True))
    assert {name: tensor.data_ptr() for name, tensor in copy.state[copy.theta].items()} == pointers
    assert copy.param_groups[0]["lr"] == 1e-3
    state = copy.state[copy.theta]
    assert state["residual"].dtype == state["step"].dtype == torch.float32
    residual = state["residual"]
    assert residual.all() and not torch.equal(residual.half().float(), residual)  # which 16 bits could not have carried
    assert_same_bits(copy_of(optimizer), copy_of(copy))
    for gradient in random_gradients(layout, 5, seed=8):
        step(optimizer, gradient)
        step(copy, gradient)
        assert_same_bits(copy_of(optimizer), copy_of(copy))


def test_loading_copies():
    """What is loaded stays apart from where it came from."""
    optimizer, copy = trained(LAYOUTS["a small agent"]), make(LAYOUTS["a small agent"], residual=slice(0, 3))
    copy.load_state_dict(optimizer.state_dict())
    before = copy_of(optimizer)
    step(copy, torch.ones(len(copy.theta)))
    assert_same_bits(before, copy_of(optimizer))


@pytest.mark.parametrize("layout", [[], [((3, 4), True)], [((3, 4), True), ((2,), False)], [((14,), True)]])
def test_a_layout_of_the_wrong_size_is_an_error(layout):
    with pytest.raises(ValueError, match="layout"):
        make([((13,), False)]) and SHARP([torch.nn.Parameter(torch.zeros(13))], layout)


def bytes_of(optimizer, theta):
    return sum(tensor.numel() * tensor.element_size() for tensor in optimizer.state[theta].values())


def state_bytes(obs_dim, action_dim, width):
    """Bytes of the optimizer state: SHARP's, and Adam's for the same network in FP32."""
    agent = Agent(obs_dim, action_dim, width)
    theta = torch.nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in agent.parameters()]))
    theta.grad = torch.zeros_like(theta)
    adam = torch.optim.Adam([theta])
    adam.step()
    optimizer = ppo_fp16.make_optimizer(agent.half(), ppo_fp16.Args())
    assert optimizer.theta.numel() == theta.numel()
    return bytes_of(optimizer, optimizer.theta), bytes_of(adam, theta)


def test_state_bytes_at_width_2048():
    sharp, adam = state_bytes(17, 6, width=2048)
    assert f"{sharp / 2**20:.2f} {adam / 2**20:.2f}" == "16.23 64.70"


@pytest.mark.parametrize("env_id", SIZES)
def test_state_bytes_at_width_64(env_id):
    sharp, adam = state_bytes(*SIZES[env_id], width=64)
    assert 1 - sharp / adam >= 0.717


def test_rows_are_shared_in_hidden_layers_only():
    agent = Agent(17, 6).half()
    optimizer = ppo_fp16.make_optimizer(agent, ppo_fp16.Args())
    parameters, offset, starts = dict(agent.named_parameters()), 0, {}
    for name, parameter in parameters.items():
        starts[offset] = name
        offset += parameter.numel()
    offsets = [0, *itertools.accumulate(math.prod(shape) for shape, _ in optimizer.layout)]
    found = {starts[offset]: shape for offset, (shape, of_rows) in zip(offsets, optimizer.layout) if of_rows}
    hidden = [f"{network}.{layer}.weight" for network in ("actor_mean", "critic") for layer in (0, 2)]
    assert found == {name: tuple(parameters[name].shape) for name in hidden}
    assert offsets[-1] == offset


# --- scale of the gradient


@pytest.mark.parametrize("exponent", [-3, 1, 8])
def test_a_power_of_two_in_gradient_and_eps_changes_no_bit(exponent):
    """Adam does not see a scale that gradient, states and eps share; exactly so for powers of two without over- or underflow.

    Gradients of one sign, so that no first moment comes close to 0.
    """
    layout, scale = LAYOUTS["a small agent"], 2.0**exponent
    options = dict(residual=slice(0, 3), lr=1e-2)
    one, other = make(layout, eps=1e-2, **options), make(layout, eps=1e-2 * scale, **options)
    sign = torch.randn(len(one.theta), generator=seeded(9)).sign()
    for i in range(20):
        gradient = sign * (1 + 10 * torch.rand(len(sign), generator=seeded(i)))
        step(one, gradient.half(), 0.37)
        step(other, gradient.half() * scale, 0.37)
    one, other = copy_of(one), copy_of(other)
    for name in ("exp_avg", "root_exp_avg_sq"):
        assert torch.equal(one.pop(name).view(torch.float16) * scale, other.pop(name).view(torch.float16)), name
    assert_same_bits(one, other)
    unscaled_eps = make(layout, eps=1e-2, **options)
    for i in range(20):
        step(unscaled_eps, (sign * (1 + 10 * torch.rand(len(sign), generator=seeded(i)))).half() * scale, 0.37)
    assert not torch.equal(copy_of(unscaled_eps)["theta"], one["theta"])  # eps is felt here: the test can fail


# --- compiled


@needs_compiler
def test_compiled_update_agrees_with_eager():
    """Ten steps, each from the same state: FP32 sums in another order move a rounding by one step of the FP16 grid at most."""
    layout = [((3,), False), ((16, 5), True), ((16,), False), ((3, 16), False)]
    eager, compiled = (make(layout, residual=slice(0, 3), lr=1e-2) for _ in range(2))
    torch._dynamo.reset()
    compiled.update = torch.compile(sharp_update, fullgraph=True, options={"emulate_precision_casts": True, "cpp_wrapper": True})
    for i, gradient in enumerate(random_gradients(layout, 10, seed=10)):
        clip_coef = math.nan if i == 5 else 0.5
        compiled.theta.data.copy_(eager.theta)
        compiled.load_state_dict(eager.state_dict())
        before = copy_of(eager)
        step(eager, gradient, clip_coef)
        step(compiled, gradient, clip_coef)
        if i == 5:
            assert_same_bits(before, copy_of(compiled))
        one, other = ((opt.theta.detach(), opt.state[opt.theta]) for opt in (eager, compiled))
        pairs = [(one[0], other[0]), *((one[1][name], other[1][name]) for name in ("exp_avg", "root_exp_avg_sq"))]
        for one, other in pairs:
            assert ((one.float() - other.float()).abs() <= one.float().abs() * 2**-10 + 2**-24).all()
        exact = [optimizer.theta[:3].float() - optimizer.state[optimizer.theta]["residual"] for optimizer in (eager, compiled)]
        torch.testing.assert_close(*exact, rtol=1e-6, atol=1e-7)
        assert eager.state[eager.theta]["step"] == compiled.state[compiled.theta]["step"]


# --- the training state


@pytest.mark.parametrize("env_id", SIZES)
def test_the_training_state_is_fp16(env_id):
    """Less than 0.1% of all elements are wider than 16 bits, after a real rollout and update at width 64."""
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    args = ppo_fp16.Args(env_id=env_id, run_name="test")
    env = ppo_fp16.make_env(args)
    obs_dim, action_dim = env.observation_space.shape[0], env.action_space.shape[0]
    assert (obs_dim, action_dim) == SIZES[env_id]
    agent = Agent(obs_dim, action_dim).half()
    optimizer, normalizer = ppo_fp16.make_optimizer(agent, args), ppo_fp16.Normalizer(obs_dim)
    batch, _ = ppo_fp16.rollout(agent, [env], normalizer, normalizer.observe(env.reset(seed=1)[0])[None], args)
    env.close()
    ppo_fp16.update_minibatch(agent, optimizer, {name: tensor[:64] for name, tensor in batch.items()}, args)
    state = optimizer.state[optimizer.theta]
    assert state["step"] == 1  # not skipped

    halves = [optimizer.theta, optimizer.theta.grad, state["exp_avg"], state["root_exp_avg_sq"]]
    halves += [*agent.parameters(), *batch.values(), agent.mean(batch["obs"][:2]), agent.value(batch["obs"][:2])]
    assert all(tensor.dtype == torch.float16 for tensor in halves)
    assert {"obs", "actions", "means", "values", "advantages", "returns", "correction"} <= batch.keys()
    assert all(len(tensor) == 2048 for tensor in batch.values())

    share = ppo_fp16.fp32_share(agent, optimizer, normalizer, batch)
    assert 0 < share < 0.001
    wide = dict(batch, values=batch["values"].float())
    assert ppo_fp16.fp32_share(agent, optimizer, normalizer, wide) > 0.001  # one tensor in FP32, and the count shows it
