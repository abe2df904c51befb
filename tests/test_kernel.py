"""sharp_kernel.cu without a GPU: NVRTC compiles it as CuPy would, and the unmodified file, run on the CPU through the project's
own launch code, gives the bits of `sharp_update`. What needs a GPU is at the end, and skipped where there is none."""

import math
import re
import types

import emulated_cuda
import numpy as np
import pytest
import torch

import ppo_fp16

LAYOUT = [((3,), False), ((5, 17), True), ((5,), False), ((4, 64), True), ((4,), False), ((2, 64), False), ((2,), False)]
needs_emulator = pytest.mark.skipif(bool(emulated_cuda.why_not()), reason=emulated_cuda.why_not() or "-")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def compile_with_nvrtc(arch):
    """The PTX and the assembler's log, with the options that CuPy itself adds."""
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy._core import core
    from cupy.cuda import nvrtc

    with open(emulated_cuda.SOURCE) as file:
        program = nvrtc.createProgram(file.read(), "sharp_kernel.cu", (), ())
    options = core.assemble_cupy_compiler_options(("--std=c++17", "--fmad=false"))
    options += ("-ftz=true", "--device-as-default-execution-space", f"-arch={arch}", "--ptxas-options=--verbose")
    nvrtc.compileProgram(program, options)
    ptx = nvrtc.getPTX(program)
    return ptx.decode() if isinstance(ptx, bytes) else ptx, nvrtc.getProgramLog(program)


def test_nvrtc_compiles_it_for_every_architecture_without_spills():
    pytest.importorskip("cupy", reason="CuPy is not installed")
    from cupy.cuda import nvrtc

    for arch in nvrtc.getSupportedArchs():
        _, log = compile_with_nvrtc(f"sm_{arch}")
        assert re.findall(r"Compiling entry function '(\w+)'", log) and set(re.findall(r"(\d+) bytes spill", log)) == {"0"}, arch
        registers = max(int(count) for count in re.findall(r"Used (\d+) registers", log))
        assert registers <= 80, arch  # so that three blocks fit on a multiprocessor


def test_it_has_no_double_precision_no_approximation_and_wide_accesses():
    ptx, _ = compile_with_nvrtc("compute_90")
    assert set(re.findall(r"\.entry (\w+)", ptx)) == {"sharp_statistics", "sharp_apply"}
    assert not re.findall(r"\b\w+(?:\.\w+)*\.f64\b", ptx)
    assert not re.findall(r"(?:div|sqrt|rcp|rsqrt)\.approx", ptx)
    assert "ld.global.nc.v4.u32" in ptx and "st.global.v4.u32" in ptx  # 16 bytes at a time


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return emulated_cuda.build(str(tmp_path_factory.mktemp("kernel")))


@pytest.fixture
def emulated(monkeypatch):
    """Torch without CUDA has no current stream, and the kernel sums in an order of its own."""
    torch.compile(torch.neg, backend="eager")(torch.ones(1))  # TorchDynamo lists torch's functions once, as it finds them
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: types.SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.Tensor, "mean", mean_in_the_kernels_order)
    monkeypatch.setattr(torch, "hypot", lambda a, b: (a * a + b * b).sqrt())


def warp_sum(lanes):
    """(..., 32) -> (...): the butterfly of `warp_sum`."""
    for distance in (16, 8, 4, 2, 1):
        lanes = lanes + lanes[..., torch.arange(32) ^ distance]
    return lanes[..., 0]


def mean_in_the_kernels_order(x, dim=None):
    """The means of `sharp_update`: rows (dim 1) as a warp sums them, and layers as a block does."""
    if dim == 1:
        padded = torch.nn.functional.pad(x, (0, -x.shape[1] % 256)).view(len(x), -1, 32, 8)
        lanes = torch.zeros(len(x), 32)
        for step in padded.unbind(1):
            for element in step.unbind(2):
                lanes = lanes + element
        return warp_sum(lanes) / x.shape[1]
    padded = torch.nn.functional.pad(x, (0, -len(x) % 256)).view(-1, 256)
    threads = torch.zeros(256)
    for step in padded:
        threads = threads + step
    total = torch.zeros(())
    for warp in warp_sum(threads.view(8, 32)):
        total = total + warp
    return total / len(x)


def pair(library, layout, residual=slice(0, 3), order=0, loss_scale=1.0, max_grad_norm=0.5, **writeback):
    """Two optimizers with equal parameters and states, one of them with the kernel."""
    size = sum(math.prod(shape) for shape, _ in layout)
    optimizers = []
    for _ in range(2):
        theta = torch.nn.Parameter((torch.randn(size, generator=torch.Generator().manual_seed(1)) * 0.1).half())
        optimizers.append(ppo_fp16.SHARP([theta], layout, residual=residual, **writeback))
    module = emulated_cuda.Module(library, order)
    optimizers[1].update = ppo_fp16.SharpKernel(optimizers[1], max_grad_norm, loss_scale, module=module)
    return optimizers


def step(reference, kernel, gradient):
    """One step of both; the reference takes the kernel's clip coefficient, whose own error is another test's."""
    kernel.theta.grad = gradient.clone()
    kernel.step()
    reference.theta.grad = gradient.clone()
    reference.step(clip_coef=kernel.update.clip_coef.clone())


def bits(optimizer):
    state = optimizer.state[optimizer.theta]
    halves = {name: state[name] for name in ("exp_avg", "root_exp_avg_sq")} | {"theta": optimizer.theta.detach()}
    result = {name: x.clone().view(torch.int16) for name, x in halves.items()}
    return result | {name: state[name].clone().view(torch.int32) for name in ("residual", "step")}


def assert_same_bits(reference, kernel):
    for (name, expected), actual in zip(bits(reference).items(), bits(kernel).values()):
        if name == "residual":  # FP32, and so the one place where the last bit of expm1 and of division is seen
            torch.testing.assert_close(actual.view(torch.float32), expected.view(torch.float32), rtol=0, atol=1e-9)
        else:
            assert torch.equal(actual, expected), f"{name} differs in {(actual != expected).sum()} places"


def hostile(size, seed):
    """Gradients of every magnitude that FP16 has, with zeros, subnormals and the largest numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    exponents = torch.randint(-24, 16, (size,), generator=generator)
    values = torch.randn(size, generator=generator) * 2.0**exponents
    values[torch.rand(size, generator=generator) < 0.1] = 0
    return values.clamp(-65504, 65504).half()


@needs_emulator
@pytest.mark.parametrize("order", [0, 1, 2])
def test_kernel_gives_the_bits_of_the_pytorch_path(library, emulated, order):
    reference, kernel = pair(library, LAYOUT, order=order)
    for i in range(4):
        gradient = hostile(len(kernel.theta), i) if i % 2 else (torch.randn(len(kernel.theta)) * 10.0 ** (i - 2)).half()
        step(reference, kernel, gradient)
        assert_same_bits(reference, kernel)
    assert (kernel.theta != 0).any() and kernel.state[kernel.theta]["step"] == 4


@needs_emulator
@pytest.mark.parametrize(
    "layout",
    [
        [((1,), False), ((1, 1), True)],
        [((1,), False), ((7, 1), True), ((1, 33), True)],
        [((3,), False), ((2, 1000), True)],
        [((2,), False), ((1, 2500), True), ((1100,), False)],
        [((17,), False), ((64, 348), True)],
    ],
    ids=["1x1", "one column, 33", "1000", "longer than a warp's pass, a run", "348x64"],
)
def test_odd_shapes(library, emulated, layout):
    reference, kernel = pair(library, layout, residual=slice(0, layout[0][0][0]))
    for i in range(2):
        step(reference, kernel, hostile(len(kernel.theta), i))
        assert_same_bits(reference, kernel)


@needs_emulator
def test_norm_and_clip_coefficient(library, emulated):
    for seed, (scale, loss_scale) in enumerate([(1e-7, 1.0), (1e-3, 1.0), (1.0, 1024.0), (2e4, 1.0)]):
        _, kernel = pair(library, LAYOUT, loss_scale=loss_scale)
        kernel.theta.grad = (torch.randn(len(kernel.theta), generator=torch.Generator().manual_seed(seed)) * scale).half()
        kernel.step()
        norm = kernel.theta.grad.double().norm() / loss_scale
        torch.testing.assert_close(kernel.update.grad_norm.double(), norm, rtol=1e-6, atol=0)
        torch.testing.assert_close(kernel.update.clip_coef.double(), (0.5 / (norm + 1e-6)).clamp(max=1), rtol=1e-6, atol=0)


@needs_emulator
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_gradient_that_is_not_finite_changes_nothing(library, emulated, value):
    reference, kernel = pair(library, LAYOUT)
    step(reference, kernel, hostile(len(kernel.theta), 0))
    before = bits(kernel)
    gradient = hostile(len(kernel.theta), 1)
    gradient[-1] = value
    step(reference, kernel, gradient)
    assert not kernel.update.grad_norm.isfinite() and kernel.update.clip_coef.isnan()
    assert all(torch.equal(x, y) for x, y in zip(before.values(), bits(kernel).values()))
    step(reference, kernel, hostile(len(kernel.theta), 2))  # and the next step is none the worse
    assert_same_bits(reference, kernel)


@needs_emulator
def test_zero_gradient(library, emulated):
    reference, kernel = pair(library, LAYOUT)
    before = kernel.theta.clone()
    step(reference, kernel, torch.zeros_like(kernel.theta))
    assert torch.equal(kernel.theta, before) and kernel.update.clip_coef == 1
    assert_same_bits(reference, kernel)


@needs_emulator
@pytest.mark.parametrize("layout", [LAYOUT, [((3,), False), ((33, 9), True), ((1,), False)]])
def test_compensated(library, emulated, layout):
    """A 16-bit residual of every element. It is rounded from what FP32's last bit may differ in, so it may be a neighbour."""
    size = sum(math.prod(shape) for shape, _ in layout)
    optimizers = pair(library, layout, slice(0, size), residual_dtype=torch.float16)
    for i in range(4):
        step(*optimizers, hostile(size, i) if i % 2 else (torch.randn(size) * 0.01).half())
        states = [optimizer.state[optimizer.theta] for optimizer in optimizers]
        for name in ("exp_avg", "root_exp_avg_sq"):
            assert torch.equal(states[0][name], states[1][name]), name
        assert torch.equal(optimizers[0].theta, optimizers[1].theta)
        expected, actual = (state["residual"].float() for state in states)
        assert expected.any() and ((expected - actual).abs() <= expected.abs() * 2**-10 + 2**-24).all()
        assert (expected != actual).float().mean() < 0.01


@needs_emulator
@pytest.mark.parametrize("order, seed", [(0, 1), (2, 2**32 - 1)])
def test_stochastic_rounding(library, emulated, order, seed):
    """The coins of the PyTorch path, and so its bits."""
    reference, kernel = pair(library, LAYOUT, residual=slice(0, 0), order=order, rounding_seed=seed)
    for i in range(4):
        step(reference, kernel, hostile(len(kernel.theta), i) if i % 2 else (torch.randn(len(kernel.theta)) * 0.01).half())
        assert_same_bits(reference, kernel)
    assert reference.rounding_seed == seed  # so the reference rounds stochastically


def test_launch_rejects_what_the_kernel_does_not_take(library, emulated):
    _, kernel = pair(library, LAYOUT)
    with pytest.raises(TypeError, match="bytes"):  # a bare number is 8 bytes wide, the parameter 4
        kernel.update.launch(
            kernel.update.apply, *[kernel.theta] * 7, np.uint32(1), kernel.theta, 3, *[kernel.theta] * 2, *[np.float32(0)] * 5
        )
    kernel.theta.grad = torch.zeros(len(kernel.theta), dtype=torch.float16)
    kernel.update.rows = kernel.update.rows.to("meta")  # stands for another device
    with pytest.raises(ValueError, match="contiguous FP16"):
        kernel.step()


def test_rows_cover_every_element_once():
    rows, layers = ppo_fp16.SharpKernel.tables(LAYOUT, slice(0, 3), run=16)
    size = sum(math.prod(shape) for shape, _ in LAYOUT)
    covered = np.zeros(size, int)
    for offset, length, *_ in rows:
        covered[offset : offset + length] += 1
    assert (covered == 1).all() and layers == [(3, 5), (13, 4)]
    assert [row for row in rows if row[4] >= 0] == [(0, 3, 0, -1, 0)]


@needs_gpu
def test_kernel_on_the_gpu_equals_the_pytorch_path():
    """Sums have another order there, so within one unit in the last place of FP16, and almost everywhere equal."""
    size = sum(math.prod(shape) for shape, _ in LAYOUT)
    optimizers = [
        ppo_fp16.SHARP([torch.nn.Parameter(torch.randn(size).half().cuda())], LAYOUT, residual=slice(0, 3)) for _ in range(2)
    ]
    reference, kernel = optimizers
    kernel.theta.data.copy_(reference.theta)
    kernel.update = ppo_fp16.SharpKernel(kernel, 0.5, 1.0)
    for i in range(20):
        step(reference, kernel, hostile(size, i).cuda() if i % 2 else (torch.randn(size) * 0.01).half().cuda())
        difference = (kernel.theta.float() - reference.theta.float()).abs()
        assert (difference <= kernel.theta.float().abs() * 2**-10 + 2**-24).all() and (difference > 0).float().mean() < 0.01
        kernel.theta.data.copy_(reference.theta)
