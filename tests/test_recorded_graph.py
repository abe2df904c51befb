"""recorded_graph.py against what a CUDA graph does: what it freezes, what it refuses, what it leaves as it was."""

import functools
import math

import emulated_cuda
import numpy as np
import pytest
import recorded_graph
import torch

import ppo_fp16

WARMUP = 3
needs_emulator = pytest.mark.skipif(bool(emulated_cuda.why_not()), reason=emulated_cuda.why_not() or "-")


@pytest.fixture
def emulated():
    with recorded_graph.emulated():
        yield


def capture(update, *inputs, warmup=WARMUP):
    """Warms up on a side stream and captures update(*inputs); the graph and what the update returned in the capture."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            update(*inputs)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = update(*inputs)
    return graph, outputs


def bits(tensors):
    return [x.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist() for x in tensors]


class Toy:
    """Gradient descent on a small problem, its learning rate a Python number or a tensor."""

    def __init__(self, device, lr):
        self.theta = torch.linspace(-1, 1, 12, device=device).requires_grad_()
        self.lr = lr

    def __call__(self, x):
        loss = ((self.theta * x).sin() ** 2).sum()
        (gradient,) = torch.autograd.grad(loss, self.theta)
        with torch.no_grad():
            self.theta -= self.lr * gradient
        return loss.detach()

    def set_lr(self, lr):
        if isinstance(self.lr, torch.Tensor):
            self.lr.fill_(lr)
        else:
            self.lr = lr

    def tensors(self):
        return [self.theta]


class Adam:
    """PyTorch's Adam on the same problem; with a scaler, as automatic mixed precision uses it."""

    def __init__(self, device, lr, fused=True, capturable=True, scaler=None):
        self.theta = torch.linspace(-1, 1, 12, device=device).requires_grad_()
        self.optimizer = torch.optim.Adam([self.theta], lr=lr, fused=fused, capturable=capturable, foreach=False)
        self.optimizer._warned_capturable_if_run_uncaptured = True  # it warms up uncaptured
        self.scaler = scaler

    def __call__(self, x):
        loss = ((self.theta * x).sin() ** 2).sum()
        if self.scaler:
            (self.theta.grad,) = torch.autograd.grad(self.scaler.scale(loss), self.theta)
            self.scaler.unscale_(self.optimizer)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            (self.theta.grad,) = torch.autograd.grad(loss, self.theta)
            if self.optimizer.defaults["fused"]:
                self.optimizer.found_inf = (~self.theta.grad.norm().isfinite()).float()
            self.optimizer.step()
        return loss.detach()

    def set_lr(self, lr):
        group = self.optimizer.param_groups[0]
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr

    def tensors(self):
        scaler = [self.scaler._scale, self.scaler._growth_tracker] if self.scaler else []
        return [self.theta, *self.optimizer.state[self.theta].values(), *scaler]


def first_difference(make, device, lr, updates=60):
    """The first of `updates` replays after which a captured update and an eager one differ in a bit, or None.

    lr: maps the number of the update to the learning rate. Every tenth gradient is not finite, where a loss is scaled or guarded.
    """
    captured, eager = make(), make()
    x = torch.ones(12, device=device)
    graph, loss = capture(captured, x)
    for _ in range(WARMUP):
        eager(x)
    for i in range(updates):
        values = torch.linspace(0.1, 2, 12) * (1 + i % 7)
        if i % 10 == 5 and isinstance(captured, Adam):
            values[3] = math.inf
        x.copy_(values)
        captured.set_lr(lr(i))
        eager.set_lr(lr(i))
        graph.replay()
        expected = eager(x)
        if bits([loss, *captured.tensors()]) != bits([expected, *eager.tensors()]):
            return i
    return None


def constant(i):
    return 0.01


def falls_at_20(i):
    return 0.01 if i < 20 else 0.001


def scaler(device):
    return torch.amp.GradScaler(device.type, init_scale=2.0**10, growth_interval=4)


def test_a_python_learning_rate_is_frozen(device):
    assert first_difference(lambda: Toy(device, 0.01), device, constant) is None
    assert first_difference(lambda: Toy(device, 0.01), device, falls_at_20) == 20
    assert first_difference(lambda: Adam(device, 0.01), device, falls_at_20) == 20


def test_a_tensor_learning_rate_is_read_at_every_replay(device):
    def lr():
        return torch.tensor(0.01, device=device)

    assert first_difference(lambda: Toy(device, lr()), device, falls_at_20) is None
    assert first_difference(lambda: Adam(device, lr()), device, falls_at_20) is None
    assert first_difference(lambda: Adam(device, lr(), scaler=scaler(device)), device, falls_at_20) is None


def test_adam_skips_and_the_scaler_adapts_within_a_graph(device):
    x = torch.ones(12, device=device)
    update = Adam(device, torch.tensor(0.01, device=device), scaler=scaler(device))
    graph, _ = capture(update, x)
    x[0] = math.inf
    before = bits([update.theta, *update.optimizer.state[update.theta].values()])
    graph.replay()
    assert bits([update.theta, *update.optimizer.state[update.theta].values()]) == before
    assert update.scaler._scale == 2**9
    x.fill_(1)
    for _ in range(4):
        graph.replay()
    assert update.scaler._scale == 2**10 and update.optimizer.state[update.theta]["step"] == WARMUP + 4


def test_a_capture_changes_nothing_and_computes_nothing(device):
    update = Adam(device, torch.tensor(0.01, device=device))
    x = torch.ones(12, device=device)
    for _ in range(2):
        update(x)
    before = bits(update.tensors())
    graph, loss = capture(update, x, warmup=0)
    assert bits(update.tensors()) == before
    graph.replay()
    assert bits(update.tensors()) != before and loss.isfinite()


def test_what_a_capture_makes_holds_nothing_before_the_first_replay(emulated):
    _, loss = capture(Toy("cpu", 0.01), torch.ones(12))
    assert loss.isnan()


def test_a_number_that_python_counts_is_frozen(device):
    calls, x = [], torch.zeros((), device=device)

    def update():
        calls.append(1)
        return x + len(calls)

    graph, result = capture(update)
    for _ in range(3):
        graph.replay()
        assert result == WARMUP + 1 and len(calls) == WARMUP + 1


def test_without_warm_up_adam_starts_anew_at_every_replay(device):
    x, update = torch.ones(12, device=device), Adam(device, torch.tensor(0.01, device=device))
    graph, _ = capture(update, x, warmup=0)
    for _ in range(3):
        graph.replay()
        assert update.optimizer.state[update.theta]["step"] == 1


def test_views_of_a_flat_vector_keep_their_memory(device):
    flat = torch.zeros(6, device=device)
    first, second = flat.split([2, 4])
    matrix = second.view(2, 2).T

    def update():
        first.add_(1)
        matrix[0].mul_(2).add_(first)
        doubled = flat[1:] * 2  # a new tensor, of which the next are views
        doubled.view(5)[3:].neg_()
        return doubled, flat.unsqueeze(0)

    graph, (doubled, view) = capture(update, warmup=0)
    flat.copy_(torch.arange(6.0))
    graph.replay()
    # flat is 1 2 | 2 3 4 5, of which matrix[0] is 2 and 4: 2 * 2 + 1 and 2 * 4 + 2
    assert flat.tolist() == [1, 2, 5, 3, 10, 5] and doubled.tolist() == [4, 10, 6, -20, -10]
    assert view.data_ptr() == flat.data_ptr() and view.tolist() == [flat.tolist()]


def test_a_tensor_that_is_replaced_is_not_the_graphs(device):
    settings = dict(lr=torch.tensor(0.5, device=device))
    graph, result = capture(lambda: settings["lr"] * 2)
    old, settings["lr"] = settings["lr"], torch.tensor(0.25, device=device)
    graph.replay()
    assert result == 1
    old.fill_(3)
    graph.replay()
    assert result == 6


def test_a_tensor_that_is_gone_ends_the_replay(emulated):
    settings = dict(lr=torch.tensor(0.5))
    graph, _ = capture(lambda: settings["lr"] * 2)
    settings["lr"] = torch.tensor(0.25)
    with pytest.raises(RuntimeError, match="gone"):
        graph.replay()


REFUSED = {
    "item": lambda x: x[0].item(),
    "a branch": lambda x: x if x[0] > 0 else -x,
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "numpy": lambda x: x.numpy(),
    "nonzero": lambda x: x.nonzero(),
    "reading by a mask": lambda x: x[x > 0],
    "writing by a mask": lambda x: x.index_put_((x > 0,), x[:1]),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "a number from the host": lambda x: x * torch.tensor(0.5, device=x.device),
    "as_tensor of a number": lambda x: x * torch.as_tensor(0.5, device=x.device),
    "random numbers": lambda x: x + torch.randn(3),
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("operation", REFUSED.values(), ids=REFUSED)
def test_refused(emulated, operation):
    x = torch.ones(3)
    operation(x)
    before, graph = x.clone(), torch.cuda.CUDAGraph()
    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"), torch.cuda.graph(graph):
        x.mul_(2)
        operation(x)
    assert torch.equal(x, before) and not torch.cuda.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="without a successful capture"):
        graph.replay()


def test_indices_that_are_numbers_are_not_refused(device):
    x, at = torch.arange(4.0, device=device), torch.tensor([2, 0], device=device)
    graph, result = capture(lambda: x[at])
    at.copy_(torch.tensor([3, 1]))
    graph.replay()
    assert result.tolist() == [3, 1]


@pytest.mark.parametrize("flags", [dict(capturable=False), dict(capturable=False, fused=False)], ids=["fused", "plain"])
def test_adam_that_is_not_capturable_is_refused(emulated, flags):
    with pytest.raises(RuntimeError, match="capturable"):
        capture(Adam("cpu", torch.tensor(0.01), **flags), torch.ones(12))


def test_plain_adam_can_be_captured_but_not_with_a_scaler(emulated):
    """The scaler then asks on the host whether to step."""
    cpu = torch.device("cpu")
    x, update = torch.ones(12), Adam(cpu, torch.tensor(0.01), fused=False)
    graph, _ = capture(update, x)
    graph.replay()
    assert update.optimizer.state[update.theta]["step"] == WARMUP + 1
    with pytest.raises(RuntimeError, match="_local_scalar_dense"):
        capture(Adam(cpu, torch.tensor(0.01), fused=False, scaler=scaler(cpu)), x)


def test_a_stream_must_be_waited_for(emulated):
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    with pytest.raises(RuntimeError, match="stream 1 has not waited for stream 0"), torch.cuda.stream(side):
        pass
    update, x = Toy("cpu", 0.01), torch.ones(12)
    graph, _ = capture(update, x)
    side.wait_stream(main)
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
    with pytest.raises(RuntimeError, match="stream 0 has not waited for stream 1"):
        graph.replay()
    main.wait_stream(side)
    graph.replay()


def test_a_foreign_kernel_is_recorded_on_the_capturing_stream_alone(emulated):
    x, other = np.zeros(2), torch.cuda.Stream()
    here, elsewhere = (functools.partial(np.add, view, 1, out=view) for view in np.split(x, 2))

    def update():
        recorded_graph.launch(here, torch.cuda.current_stream().cuda_stream)
        recorded_graph.launch(elsewhere, other.cuda_stream)

    graph, _ = capture(update, warmup=0)
    assert x.tolist() == [0, 1]
    for _ in range(3):
        graph.replay()
    assert x.tolist() == [3, 1]
    with pytest.raises(RuntimeError, match="default stream"):
        capture(lambda: recorded_graph.launch(here, 0), warmup=0)


@needs_emulator
def test_sharp_kernel_is_recorded(emulated, tmp_path):
    """With the launches of `SharpKernel`, and lr and a skipped step in device memory."""
    library = emulated_cuda.build(str(tmp_path))
    layout, optimizers, lr = [((3,), False), ((4, 64), True)], [], torch.tensor(3e-4)
    for _ in range(2):
        theta = torch.nn.Parameter(torch.linspace(-1, 1, 259).half())
        optimizers.append(ppo_fp16.SHARP([theta], layout, residual=slice(0, 3), lr=lr))
        optimizers[-1].update = ppo_fp16.SharpKernel(optimizers[-1], 0.5, 1.0, module=emulated_cuda.Module(library))
    captured, eager = optimizers
    gradient = torch.linspace(0, 1, 259).half()
    captured.theta.grad = eager.theta.grad = gradient
    graph, _ = capture(captured.step, warmup=0)
    for i in range(4):
        gradient.copy_(torch.linspace(-i, 1, 259))
        gradient[i] = math.inf if i == 2 else 0
        lr.fill_(3e-4 / (i + 1))
        graph.replay()
        eager.step()
        assert bits([captured.theta, *captured.state[captured.theta].values()]) == bits(
            [eager.theta, *eager.state[eager.theta].values()]
        )
    assert captured.state[captured.theta]["step"] == 3


def test_everything_is_put_back():
    names = "CUDAGraph graph Stream stream current_stream synchronize is_current_stream_capturing".split()
    before = [getattr(torch.cuda, name) for name in names]
    with recorded_graph.emulated():
        assert not any(getattr(torch.cuda, name) is x for name, x in zip(names, before))
    assert [getattr(torch.cuda, name) for name in names] == before
