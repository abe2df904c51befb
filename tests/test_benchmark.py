"""The update benchmark: what it counts, that it finds planted errors, and its quick run on the CPU from end to end."""

import csv
import importlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
import torch
import tyro
from torch.utils.flop_counter import FlopCounterMode

import benchmark_update
from benchmark_update import ACTION, OBS, all_methods, build, make_problem, measure, state_bytes, summarize, work

ROOT = pathlib.Path(__file__).parents[1]
METHODS = list(all_methods("cpu"))
EAGER = [name for name in METHODS if name != "FP32 fastest"]
JOB = dict(width=64, minibatch=64, device="cpu", warmup=0, updates=1, cpu_seconds=1.0, cuda_graph=True, compile=False)


def test_quick_run(tmp_path):
    output, figure = tmp_path / "results.json", tmp_path / "figure.png"
    command = [sys.executable, ROOT / "benchmark_update.py", "--quick", "--device", "cpu", "--output", output, "--plot", figure]
    short = ["--warmup", "5", "--updates", "20"]
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    run = subprocess.run([*command, *short], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "threads=1. CPU: says nothing about a GPU" in run.stdout
    results = json.loads(output.read_text())
    rows = {row["method"]: row for row in results["rows"]}
    assert list(rows) == METHODS and len(results["measurements"]) == len(METHODS)
    for name, row in rows.items():
        assert f"| {name} " in run.stdout
        assert row["error"] is None and row["gradient_error"] <= 1 and row["change_error"] <= 1
        assert row["seconds"] > 0 and 1 <= row["updates"] <= 20 and 0 < row["share_of_floor"] < 1
        assert row["peak_bytes"] is None and (row["launches"] is None) == (name == "FP32 fastest")
    assert rows["FP32"]["speedup"] == 1 and rows["FP32"]["state_change"] == 0
    assert rows["PPO-FP16"]["state_change"] <= -0.717  # the paper's figure for the narrowest network
    with open(tmp_path / "results.csv", newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["method"], float(row["seconds"])) for row in table] == [(name, row["seconds"]) for name, row in rows.items()]
    assert figure.read_bytes().startswith(b"\x89PNG")


# --- the check


@pytest.fixture
def no_timing(monkeypatch):
    def elapsed(*_):
        raise AssertionError("timed")

    monkeypatch.setattr(benchmark_update, "elapsed", elapsed)


def scaled(gradient):
    return gradient * 1.1


def flipped(gradient):
    return -gradient


def flipped_log_std(gradient):
    return torch.cat([-gradient[:ACTION], gradient[ACTION:]])


def not_a_number(gradient):
    return gradient * float("nan")


@pytest.mark.parametrize("error", [scaled, flipped, flipped_log_std, not_a_number])
@pytest.mark.parametrize("name", EAGER)
def test_wrong_gradient_is_not_timed(name, error, monkeypatch, no_timing):
    trainer = importlib.import_module(all_methods("cpu")[name].trainer)
    ppo_gradient = trainer.ppo_gradient

    def planted(agent, *arguments):
        gradient, clip_coef, metrics = ppo_gradient(agent, *arguments)
        is_reference = gradient.dtype == torch.float64
        return gradient if is_reference else error(gradient), clip_coef, metrics

    monkeypatch.setattr(trainer, "ppo_gradient", planted)
    found = measure(name, **JOB)
    assert list(found) == ["error"] and "out of tolerance" in found["error"]


@pytest.mark.parametrize("times", [0, 2])
@pytest.mark.parametrize("name", EAGER)
def test_update_that_is_not_done_once_is_not_timed(name, times, monkeypatch, no_timing):
    trainer = importlib.import_module(all_methods("cpu")[name].trainer)
    update_minibatch = trainer.update_minibatch
    monkeypatch.setattr(trainer, "update_minibatch", lambda **keywords: [update_minibatch(**keywords) for _ in range(times)])
    assert "out of tolerance" in measure(name, **JOB)["error"]


@pytest.mark.skipif(not benchmark_update.compiler("cpu"), reason="no C++ compiler")
def test_compiled_update_is_measured():
    job = dict(JOB, name="PPO-FP16", compile=True, updates=20)
    code = f"import json, benchmark_update; print(json.dumps(benchmark_update.measure(**{job})))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    found = json.loads(done.stdout)
    assert found["gradient_error"] <= 1 and found["change_error"] <= 1 and found["updates"] == 20
    assert found["launches"] is None  # so it was compiled


def test_all_methods_start_from_the_same_numbers():
    start, problem = make_problem(16, 512, "cpu")
    theta = torch.cat([parameter.detach().flatten() for parameter in start.parameters()])
    for name in METHODS:
        _, _, minibatch, optimizer, _ = build(name, start, problem, "cpu", False, False)
        assert torch.equal(optimizer.param_groups[0]["params"][0].double(), theta)
        for column in ("obs", "actions", "values", "advantages", "returns"):
            assert torch.equal(minibatch[column].double(), problem[column]) and len(minibatch[column]) == 512


def test_minibatch_is_like_those_of_training():
    start, problem = make_problem(64, 2048, "cpu")
    _, _, metrics = benchmark_update.ppo_fp32.ppo_gradient(start, problem, benchmark_update.ppo_fp32.Args())
    assert 0.03 < metrics["losses/clipfrac"] < 0.3 and 0 < metrics["losses/approx_kl"] < 0.03
    assert abs(problem["advantages"].mean()) < 0.1 and abs(problem["advantages"].std() - 1) < 0.1


# --- what is counted


@pytest.mark.parametrize("width, saved, adam_mib, sharp_mib", [(64, 0.717, None, None), (2048, 0.749, 64.70, 16.23)])
def test_state_bytes(width, saved, adam_mib, sharp_mib):
    """The paper's figures (section 4.4), on the tensors of optimizers that have taken a step."""
    with torch.device("meta"):  # without the time that initialising 2,048 x 2,048 weights takes
        start = benchmark_update.ppo_fp32.Agent(OBS, ACTION, width)
    start.to_empty(device="cpu").double()
    problem = {column: torch.zeros(2, n) for column, n in (("obs", OBS), ("actions", ACTION), ("means", ACTION))}
    problem |= {column: torch.zeros(2) for column in ("values", "advantages", "returns", "log_probs")}
    problem["old_log_std"] = torch.zeros(ACTION)
    found = {}
    for name in ("FP32", "AMP-FP16", "PPO-FP16"):
        optimizer = build(name, start, problem, "cpu", False, False)[3]
        theta = optimizer.param_groups[0]["params"][0]
        theta.grad = torch.zeros_like(theta)
        optimizer.step()
        found[name] = state_bytes(optimizer)
    assert found["AMP-FP16"] == found["FP32"] == 8 * theta.numel() + 4
    assert 1 - found["PPO-FP16"] / found["FP32"] >= saved
    if adam_mib:
        assert [round(found[name] / 2**20, 2) for name in ("FP32", "PPO-FP16")] == [adam_mib, sharp_mib]


@pytest.mark.parametrize("width, minibatch", [(OBS, 8), (32, 24)])
@pytest.mark.parametrize("name", EAGER)
def test_work(name, width, minibatch):
    """FLOPs as PyTorch counts them, bytes of the very tensors that an update reads and writes."""
    start, problem = make_problem(width, minibatch, "cpu")
    update, _, rows, optimizer, _ = build(name, start, problem, "cpu", False, False)
    with FlopCounterMode(display=False) as counter:
        update(rows)
    trainer = all_methods("cpu")[name].trainer
    traffic, flops = work(width, minibatch, trainer)
    assert flops == counter.get_total_flops()

    def size(*tensors):
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    moved, dtype = 0, torch.float32 if trainer == "ppo_fp32" else torch.float16
    for network in (start.actor_mean, start.critic):
        x = problem["obs"]
        for layer in network:
            y = layer(x)
            if isinstance(layer, torch.nn.Linear):
                operands = [tensor.to(dtype) for tensor in (layer.weight, x, y)]
                moved += 2 * size(*operands) + (size(*operands[:2]) if x.requires_grad else 0)
            x = y
    (theta,) = optimizer.param_groups[0]["params"]
    states = [tensor for name, tensor in optimizer.state[theta].items() if name != "step"]
    moved += size(theta.grad) + size(theta.grad) + 2 * size(theta, *states)
    if trainer == "ppo_amp":
        moved += size(theta, theta.half()) + size(theta.grad.half(), theta.grad)
    assert traffic == moved + size(*(tensor for name, tensor in rows.items() if name != "obs"))


RUN = dict(updates=10, state_bytes=100, peak_bytes=None, launches=7, share_of_floor=0.5, gradient_error=0.1, change_error=0.1)


def test_summary():
    """Ratios are taken within a round, so that a machine that slows down from round to round does not change them."""
    fp32, fp16 = dict(RUN, configuration="64x64", method="FP32"), dict(RUN, configuration="64x64", method="PPO-FP16")
    runs = [dict(fp32, round=i, seconds=4.0 * (1 + i), state_bytes=400) for i in range(3)]
    runs += [dict(fp16, round=i, seconds=2.0 * (1 + i), gradient_error=0.1 * i) for i in range(2)]
    runs += [dict(configuration="64x64", method="PPO-FP16", round=2, error="lost")]
    runs += [dict(fp32, round=0, seconds=1.0, configuration="512x256")]
    fp32, fp16, other = summarize(runs)
    assert (fp32["seconds"], fp32["least_seconds"], fp32["most_seconds"], fp32["processes"]) == (8, 4, 12, 3)
    assert (fp16["seconds"], fp16["speedup"], fp16["state_change"], fp16["processes"]) == (3, 2, -0.75, 2)
    assert fp16["error"] == "lost" and fp16["gradient_error"] == 0.1 and fp16["peak_bytes"] is None
    assert fp16["speedup_over_fastest"] is None and other["speedup"] == 1


def test_rounds_interleave_and_a_failure_is_reported(monkeypatch, tmp_path, capsys):
    jobs = []

    def in_own_process(job):
        jobs.append((job["width"], job["minibatch"], job["name"]))
        return dict(error="out of tolerance: planted") if job["name"] == "PPO-FP16" else dict(RUN, seconds=1.0)

    def run(*methods):
        arguments = ["--device", "cpu", "--processes", "2", "--configurations", "64x64", "512x256", "--methods", *methods]
        with pytest.raises(SystemExit) as stop:
            benchmark_update.main(tyro.cli(benchmark_update.Args, args=[*arguments, "--output", str(tmp_path / "r.json")]))
        return stop.value.code

    monkeypatch.setattr(benchmark_update, "in_own_process", in_own_process)
    assert run("PPO-FP16", "FP32") == 1
    one_round = [(width, rows, name) for width, rows in ((64, 64), (512, 256)) for name in ("FP32", "PPO-FP16")]
    assert jobs == one_round * 2
    out = capsys.readouterr().out
    assert "64x64, PPO-FP16: out of tolerance: planted" in out and "512x256, PPO-FP16: out of tolerance: planted" in out
    assert run("FP32") == 0


# --- bad arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["--processes", "0"],
        ["--updates", "0"],
        ["--warmup", "-1"],
        ["--cpu-seconds", "0"],
        ["--cpu-seconds", "nan"],
        ["--configurations", "64"],
        ["--configurations", "64x64", "0x64"],
        ["--configurations", "64x1"],
        ["--configurations"],
        ["--methods", "FP8"],
        ["--device", "cuda"],
        ["--output", "results.txt"],
        ["--output", "no/such/folder/results.json"],
        ["--plot", "figure.gif"],
        ["--plot", "no/such/folder/figure.png"],
    ],
    ids=" ".join,
)
def test_bad_arguments_give_one_line(arguments, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as stop:
        benchmark_update.main(tyro.cli(benchmark_update.Args, args=["--device", "cpu", *arguments]))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and f"error: {arguments[0]} " in error


def test_figure_needs_matplotlib(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        benchmark_update.main(benchmark_update.Args(device="cpu", plot="figure.png"))
    assert "pip install matplotlib" in capsys.readouterr().err
