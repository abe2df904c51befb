"""CudaGraph of the three trainers: a replayed update is the update. Without a GPU it runs on recorded_graph.py's stand-in."""

import copy
import functools

import pytest
import recorded_graph
import torch

import ppo_amp
import ppo_fp16
import ppo_fp32

MODES = {
    "fp32": (ppo_fp32, {}),
    "amp-float16": (ppo_amp, dict(amp_dtype="float16")),
    "amp-bfloat16": (ppo_amp, dict(amp_dtype="bfloat16")),
    "fp16": (ppo_fp16, {}),
    "fp16-bfloat16": (ppo_fp16, dict(dtype="bfloat16")),
    "fp16-compensated": (ppo_fp16, dict(writeback="compensated")),
    "fp16-stochastic": (ppo_fp16, dict(writeback="stochastic")),
    "fp16-no-module-a": (ppo_fp16, dict(module_a=False)),
    "fp16-no-module-b": (ppo_fp16, dict(module_b=False)),
}


def learner(trainer, flags, device, compiled=False):
    """update(minibatch), the optimizer and all tensors that an update changes, as `main` makes them for a CUDA graph."""
    torch.manual_seed(0)
    args = trainer.Args(**flags)
    scaler = []
    if trainer is ppo_fp16:
        agent = trainer.Agent(17, 6).to(device, getattr(torch, args.dtype))
        optimizer = trainer.make_optimizer(agent, args)
    else:
        agent = trainer.Agent(17, 6, **flags).to(device)
        optimizer = torch.optim.Adam([trainer.flatten(agent)], eps=1e-5, fused=True)
    if trainer is ppo_amp:
        scaler = [torch.amp.GradScaler(device.type, enabled=args.amp_dtype == "float16")]
    optimizer.param_groups[0] |= dict(lr=torch.tensor(3e-4, device=device), capturable=True)
    update = functools.partial(trainer.update_minibatch, agent, optimizer, *scaler, args=args)
    if compiled:
        update.keywords["gradient_function"] = torch.compile(trainer.ppo_gradient, options={"emulate_precision_casts": True})

    def state():
        theta = optimizer.param_groups[0]["params"][0]
        values = [theta.detach(), *optimizer.state[theta].values()]
        return [value.clone() for value in values] + [torch.tensor(one.get_scale()) for one in scaler]

    return update, optimizer, state


def minibatch(trainer, dtype, seed, device):
    """64 samples such as a rollout has; of some the return or the advantage is not finite."""
    generator = torch.Generator().manual_seed(seed)
    sizes = dict(obs=(64, 17), actions=(64, 6), values=(64,), advantages=(64,), returns=(64,))
    sizes |= dict(means=(64, 6), correction=(64,)) if trainer is ppo_fp16 else dict(log_probs=(64,))
    batch = {name: torch.randn(size, generator=generator) for name, size in sizes.items()}
    if trainer is ppo_fp16:
        batch["means"] *= 0.01
        batch["correction"] *= 1e-3
    else:
        batch["log_probs"] = -0.5 * batch["actions"].square().sum(1) - 6 * 0.919 + 1e-2 * batch["log_probs"]
    if seed == 20:
        batch["returns"][3] = torch.inf
    if seed == 21:
        batch["advantages"][3] = torch.nan
    return {name: tensor.to(device, dtype) for name, tensor in batch.items()}


@torch._dynamo.config.patch(trace_autograd_ops=True)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("trainer, flags", MODES.values(), ids=MODES)
def test_replaying_is_updating(trainer, flags, compiled, device):
    if compiled and device.type == "cpu":
        pytest.skip("no CUDA device; compiled code calls no operators that the stand-in could record")
    eager, graphed = (learner(trainer, flags, device, compiled) for _ in range(2))
    replay = trainer.CudaGraph(graphed[0])
    dtype = graphed[2]()[0].dtype
    updates = 200 if device.type == "cuda" else 40
    for i in range(updates):
        for _, optimizer, _ in (eager, graphed):
            optimizer.param_groups[0]["lr"].fill_(3e-4 * (1 - i / updates))
        before = graphed[2]()[0]
        batch = minibatch(trainer, dtype, i, device)
        expected, metrics = eager[0](batch), replay(batch)
        batch["obs"].zero_()  # what was given is not what is kept
        assert metrics.keys() == expected.keys()
        for name in expected:
            assert torch.equal(metrics[name].float().nan_to_num(-1), expected[name].float().nan_to_num(-1)), (i, name)
        for one, other in zip(eager[2](), graphed[2](), strict=True):
            assert torch.equal(one, other), i
        assert i in (20, 21) or not torch.equal(before, graphed[2]()[0])
    assert replay.graph is not None


def test_sharp_is_loaded_under_a_graph(device):
    """In place, so that a graph captured before goes on with what was loaded."""
    update, optimizer, state = learner(ppo_fp16, {}, device)
    replay, batches = ppo_fp16.CudaGraph(update), [minibatch(ppo_fp16, torch.float16, i, device) for i in range(12)]
    for batch in batches[:6]:
        replay(batch)
    saved, theta = copy.deepcopy(optimizer.state_dict()), optimizer.theta.detach().clone()
    results = []
    for _ in range(2):
        for batch in batches[6:]:
            replay(batch)
        results.append(state())
        optimizer.load_state_dict(saved)
        optimizer.theta.data.copy_(theta)
    assert not torch.equal(results[0][0], theta)
    for one, other in zip(*results):
        assert torch.equal(one, other)


def test_metrics_are_kept(device):
    """Those of an iteration are read when it ends, so a replay must not write over those of the one before."""
    update, _, _ = learner(ppo_fp32, {}, device)
    replay = ppo_fp32.CudaGraph(update)
    kept = [replay(minibatch(ppo_fp32, torch.float32, i, device)) for i in range(8)]
    assert len({metrics["losses/value_loss"].item() for metrics in kept}) == 8


def test_a_learning_rate_of_python_is_refused():
    """Why `main` keeps it in a tensor; a GPU would take it from the host for once and all."""
    with recorded_graph.emulated():
        update, optimizer, _ = learner(ppo_fp16, {}, torch.device("cpu"))
        replay, optimizer.param_groups[0]["lr"] = ppo_fp16.CudaGraph(update), 3e-4
        for i in range(3):
            replay(minibatch(ppo_fp16, torch.float16, i, torch.device("cpu")))
        with pytest.raises(RuntimeError, match="capturing"):
            replay(minibatch(ppo_fp16, torch.float16, 3, torch.device("cpu")))
