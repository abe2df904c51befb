"""The trainers as programs: arguments that cannot be trained with, what a run leaves behind, Ctrl-C."""

import contextlib
import csv
import dataclasses
import importlib.util
import io
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types

import numpy as np
import pytest
import torch
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_amp
import ppo_fp16
import ppo_fp32

ROOT = pathlib.Path(__file__).parents[1]
TRAINERS = (ppo_fp32, ppo_amp, ppo_fp16)
trainers = pytest.mark.parametrize("trainer", TRAINERS, ids=[trainer.__name__ for trainer in TRAINERS])

ENVIRONMENTS = """
import gymnasium as gym
import numpy as np

class Odd(gym.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, observations, actions, blind=False, broken=False, render_mode=None):
        if broken:
            raise AttributeError("it is broken")
        self.observation_space, self.action_space, self.blind = observations, actions, blind
        self.render_mode = render_mode

    def render(self):
        if self.blind:
            raise RuntimeError("no\\nlight")
        return np.full((32, 32, 3), 8 * self.time, np.uint8)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.time = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        assert np.shape(action) == self.action_space.shape
        self.time += 1
        return self.observation_space.sample(), 1.0, False, self.time == 5, {}

box = gym.spaces.Box(-1, 1, (2,), np.float32)
for name, observations, actions in (
    ("DictObservation", gym.spaces.Dict(a=box), box),
    ("DictAction", box, gym.spaces.Dict(a=box)),
    ("TupleObservation", gym.spaces.Tuple((box, box)), box),
    ("MultiBinaryAction", box, gym.spaces.MultiBinary(3)),
    ("ScalarObservation", gym.spaces.Box(-1, 1, (), np.float32), box),
    ("ImageObservation", gym.spaces.Box(0, 255, (4, 4, 3), np.uint8), box),
    ("ScalarAction", box, gym.spaces.Box(-1, 1, (), np.float32)),
    ("MatrixAction", box, gym.spaces.Box(-1, 1, (2, 3), np.float32)),
    ("IntegerAction", box, gym.spaces.Box(-3, 3, (2,), np.int64)),
):
    gym.register(name + "-v0", entry_point=Odd, kwargs=dict(observations=observations, actions=actions))
gym.register("Blind-v0", entry_point=Odd, kwargs=dict(observations=box, actions=box, blind=True))
gym.register("Broken-v0", entry_point=Odd, kwargs=dict(observations=box, actions=box, broken=True))
"""


@pytest.fixture(scope="module", autouse=True)
def environments(tmp_path_factory):
    """A module of odd environments on the path: `--env-id odd_environments:DictAction-v0`."""
    folder = tmp_path_factory.mktemp("environments")
    (folder / "odd_environments.py").write_text(ENVIRONMENTS)
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


def start(trainer, *arguments, cwd, **options):
    command = [sys.executable, ROOT / f"{trainer.__name__}.py", *arguments]
    environment = dict(os.environ, PYTHONDONTWRITEBYTECODE="1")
    return subprocess.Popen([str(part) for part in command], cwd=cwd, env=environment, text=True, **options)


# --- bad arguments


def bad(*arguments, names=None):
    """A case: arguments, and what the message must name (the first argument, if nothing else)."""
    return pytest.param(arguments, names or arguments[0], id=" ".join(arguments))


BAD = [
    bad("--env-id", "Nope-v0"),
    bad("--env-id", "HalfCheetah-v99"),
    bad("--env-id", "not an id"),
    bad("--env-id", ""),
    bad("--env-id", "no_such_module:Env-v0"),
    bad("--env-id", "no_such.submodule:Env-v0"),
    bad("--env-id", "odd_environments:Nope-v0"),
    bad("--env-id", ":Env-v0"),
    bad("--env-id", ".:Env-v0"),
    bad("--env-id", "CartPole-v1"),
    bad("--env-id", "FrozenLake-v1"),
    bad("--env-id", "odd_environments:DictAction-v0"),
    bad("--env-id", "odd_environments:Broken-v0"),
    bad("--env-id", "odd_environments:MultiBinaryAction-v0"),
    bad("--num-envs", "3", "--num-steps", "100", names="--num-minibatches"),
    bad("--num-minibatches", "4096"),
    bad("--num-minibatches", "2048"),  # one sample each
    bad("--total-timesteps", "2047"),
    bad("--total-timesteps", "4095", "--num-envs", "2"),
    *(
        bad(f"--{size}", value)
        for size in "total-timesteps num-envs num-steps num-minibatches update-epochs eval-every eval-episodes".split()
        for value in ("0", "-1")
    ),
    *(bad(f"--{name}", value) for name in ("learning-rate", "max-grad-norm") for value in ("0", "-1", "nan", "inf", "-inf")),
    *(bad(f"--{name}", value) for name in ("ent-coef", "vf-coef") for value in ("-0.1", "nan", "inf", "-inf")),
    *(bad(f"--{name}", value) for name in ("gamma", "gae-lambda") for value in ("-0.1", "1.1", "nan", "inf")),
    *(bad("--clip-coef", value) for value in ("0", "1", "-0.1", "nan", "inf")),
    *(bad("--target-kl", value) for value in ("0", "-1", "nan", "inf")),
    *(bad("--seed", value) for value in ("-1", "4294967296")),
]
BAD_FP16 = [bad("--loss-scale", value) for value in ("0", "-2", "3", "nan", "inf")]
BAD_FP16 += [bad("--writeback", "compensated", "--no-module-c")]
CASES = [pytest.param(trainer, *case.values, id=f"{trainer.__name__} {case.id}") for trainer in TRAINERS for case in BAD]
CASES += [pytest.param(ppo_fp16, *case.values, id=f"ppo_fp16 {case.id}") for case in BAD_FP16]


def check(trainer, arguments, monkeypatch):
    """What main does with a command line before it trains."""
    monkeypatch.setattr(sys, "argv", [f"{trainer.__name__}.py", *arguments])
    trainer.check(tyro.cli(trainer.Args, args=arguments))


def is_refused(trainer, arguments, names, tmp_path, monkeypatch, capsys, runs_dir="runs"):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        check(trainer, [*arguments, "--runs-dir", runs_dir], monkeypatch)
    output = capsys.readouterr()
    assert stop.value.code == 2
    # one line, which names the argument; no folder
    assert output.out == "" and output.err.count("\n") == 1 and output.err.endswith("\n")
    assert output.err.startswith(f"{trainer.__name__}.py: error: ") and names in output.err
    assert sorted(tmp_path.rglob("*")) == before
    return output.err


@pytest.mark.parametrize("trainer, arguments, names", CASES)
def test_bad_argument_is_refused(trainer, arguments, names, tmp_path, monkeypatch, capsys):
    is_refused(trainer, arguments, names, tmp_path, monkeypatch, capsys)


@trainers
def test_the_edges_of_what_is_allowed_pass(trainer, tmp_path, monkeypatch, capsys):
    edges = "--gamma 1 --gae-lambda 0 --ent-coef 0 --vf-coef 0 --seed 4294967295 --clip-coef 0.999 --target-kl None"
    edges += " --num-envs 2 --num-steps 16 --num-minibatches 32 --no-norm-adv --total-timesteps 32 --env-id Pendulum-v1"
    check(trainer, [*edges.split(), "--runs-dir", str(tmp_path), "--run-name", "run"], monkeypatch)
    assert (tmp_path / "run").is_dir() and capsys.readouterr().err == ""


@trainers
def test_bad_runs_dir_or_run_name_is_refused(trainer, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "runs" / "taken").mkdir(parents=True)
    arguments = ["--env-id", "Pendulum-v1"]
    for runs_dir in ("file", "file/below"):
        is_refused(trainer, arguments, "--runs-dir", tmp_path, monkeypatch, capsys, runs_dir)
    is_refused(trainer, [*arguments, "--run-name", "taken"], "--run-name", tmp_path, monkeypatch, capsys)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@trainers
def test_cuda_is_refused_where_there_is_none(trainer, tmp_path, monkeypatch, capsys):
    is_refused(trainer, ["--env-id", "Pendulum-v1", "--cuda"], "--cuda", tmp_path, monkeypatch, capsys)


@trainers
def test_video_without_moviepy_is_refused(trainer, tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "moviepy" else find_spec(name, *rest))
    is_refused(trainer, ["--env-id", "Pendulum-v1", "--capture-video"], "--capture-video", tmp_path, monkeypatch, capsys)


@trainers
def test_what_cannot_be_rendered_is_refused(trainer, tmp_path, monkeypatch, capsys):
    pytest.importorskip("moviepy")
    arguments = ["--env-id", "odd_environments:Blind-v0", "--capture-video"]
    error = is_refused(trainer, arguments, "--capture-video", tmp_path, monkeypatch, capsys)
    assert "cannot be rendered here (RuntimeError: no light)" in error


@trainers
@pytest.mark.parametrize("flags", ["", "--async-envs"])
def test_videos(trainer, flags, tmp_path, monkeypatch, capfd):
    """Of the first environment in training, of the first episode in an evaluation, and none that overwrites another."""
    pytest.importorskip("moviepy")
    sizes = "--env-id odd_environments:ScalarAction-v0 --num-envs 2 --num-steps 16 --total-timesteps 32 --num-minibatches 2"
    sizes += f" --eval-episodes 2 --no-compile --quiet --capture-video --runs-dir {tmp_path} --run-name run {flags}"
    monkeypatch.setattr(sys, "argv", [f"{trainer.__name__}.py", *sizes.split()])
    monkeypatch.setattr(time, "time", lambda clock=itertools.count(1000): float(next(clock)))
    trainer.main(tyro.cli(trainer.Args, args=sizes.split()))
    trained = sorted(path.name for path in (tmp_path / "run" / "videos").rglob("*.mp4"))
    assert trained == ["rl-video-episode-0.mp4", "rl-video-episode-1.mp4"]  # of three: those at cubes, as Gymnasium has it
    for recorded in (1, 2):
        trainer.main(trainer.Args(evaluate=str(tmp_path / "run"), eval_episodes=2, capture_video=True, async_envs=bool(flags)))
        assert len(list((tmp_path / "run" / "evaluation").rglob("*.mp4"))) == recorded
    assert "Traceback" not in capfd.readouterr().err


@trainers
def test_evaluating_checks_its_arguments(trainer, tmp_path, monkeypatch, capsys):
    model = trainer.Agent(3, 1), trainer.Normalizer(3)
    trainer.save_model(tmp_path / "model.pt", *model)
    (tmp_path / "args.json").write_text(json.dumps(dict(env_id="Pendulum-v1", seed=1)))
    with pytest.raises(SystemExit) as stop:
        trainer.main(trainer.Args(evaluate=str(tmp_path), eval_episodes=0))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "--eval-episodes" in error
    assert sorted(path.name for path in tmp_path.iterdir()) == ["args.json", "model.pt"]
    (tmp_path / "args.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        trainer.main(trainer.Args(evaluate=str(tmp_path)))
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.count("\n") == 1 and "no model of this trainer there (KeyError: 'env_id')" in error


def test_kernel_that_cannot_run_is_refused(tmp_path, monkeypatch, capsys):
    arguments = ["--env-id", "Pendulum-v1", "--cuda-kernel"]
    is_refused(ppo_fp16, [*arguments, "--no-cuda"], "--cuda-kernel", tmp_path, monkeypatch, capsys)
    # where there is a device, it still does modules A and C of the paper in FP16 only
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for flags in (["--no-module-a"], ["--no-module-c"], ["--dtype", "bfloat16"]):
        is_refused(ppo_fp16, [*arguments, *flags], "--cuda-kernel", tmp_path, monkeypatch, capsys)


def test_cupy_that_cannot_launch_is_refused(tmp_path, monkeypatch, capsys):
    """Missing, too old or of another CUDA; where the flag is left at its default too. With another step it is not needed."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    arguments = ["--env-id", "Nope-v0"]  # which is refused after CuPy is

    def cupy(version, cuda):
        runtime = types.SimpleNamespace(runtimeGetVersion=lambda: cuda)
        return types.SimpleNamespace(__version__=version, cuda=types.SimpleNamespace(runtime=runtime))

    for module in (None, cupy("12.3.0", 13000), cupy("14.1.0", 12090)):
        monkeypatch.setitem(sys.modules, "cupy", module)
        line = is_refused(ppo_fp16, arguments, "--cuda-kernel", tmp_path, monkeypatch, capsys)
        assert "pip install cupy-cuda13x" in line and "--no-cuda-kernel" in line
        is_refused(ppo_fp16, [*arguments, "--no-cuda-kernel"], "--env-id", tmp_path, monkeypatch, capsys)
        is_refused(ppo_fp16, [*arguments, "--dtype", "bfloat16"], "--env-id", tmp_path, monkeypatch, capsys)
    monkeypatch.setitem(sys.modules, "cupy", cupy("14.1.0", 13010))
    is_refused(ppo_fp16, arguments, "--env-id", tmp_path, monkeypatch, capsys)


HOSTILE = ["", " ", "-1", "0", "1", "2", "64", "nan", "inf", "-inf", "1e999", "1e-320", "0x10", "9" * 30, "1_000", "None", "True"]
HOSTILE += ["-", "--", "é☃", "a" * 300, "..", "/", "/dev/null", "no/such/folder", "%s%n", "{seed}"]
HOSTILE += ["Pendulum-v1", "CartPole-v1", "ALE/Pong-v5", ":", "a:b"]


@trainers
@settings(max_examples=int(os.environ.get("LINES", 30)))
@given(data=st.data())
def test_no_command_line_gives_a_traceback(trainer, data):
    """Every flag with hostile values: each line is accepted, or refused with status 2. LINES=334 tries 1,002 of them."""
    flags = [f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(trainer.Args)]
    flags += [flag.replace("--", "--no-", 1) for flag in flags]
    line = data.draw(st.lists(st.sampled_from(flags) | st.sampled_from(HOSTILE) | st.text(max_size=5), max_size=6))
    line = [word.replace("\0", "") for word in line]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sys, "argv", ["trainer.py", *line])
        output = io.StringIO()
        with contextlib.redirect_stderr(output), contextlib.redirect_stdout(output):
            try:
                args = tyro.cli(trainer.Args, args=line)
                if args.evaluate:
                    trainer.evaluate_model(args)
                if args.resume:
                    trainer.load_checkpoint(args, {})
                trainer.check(args)
            except SystemExit as stop:
                assert stop.code in (0, 2)


@trainers
@pytest.mark.parametrize("arguments", [["--seed", "x"], ["--seed", "nan"], ["--num-envs", "1.5"], ["--no-such-flag"], ["word"]])
def test_command_line_that_cannot_be_parsed_is_refused(trainer, arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        check(trainer, arguments, monkeypatch)
    output = capsys.readouterr()
    assert stop.value.code == 2 and "Traceback" not in output.err + output.out
    assert arguments[0] in output.err + output.out
    assert not list(tmp_path.iterdir())


@trainers
def test_help_explains_every_argument(trainer, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "400")  # so that nothing is wrapped
    with pytest.raises(SystemExit) as stop:
        tyro.cli(trainer.Args, description=trainer.__doc__, args=["--help"])
    assert stop.value.code == 0
    output = " ".join(re.sub(r"\x1b\[[0-9;]*m|│", " ", capsys.readouterr().out).split())
    assert trainer.__doc__.splitlines()[0] in output
    source = pathlib.Path(trainer.__file__).read_text()
    for field in dataclasses.fields(trainer.Args):
        (comment,) = re.findall(rf"^    {field.name}: .*?  # (.{{10,}})$", source, re.MULTILINE)
        assert re.search(rf"--{field.name.replace('_', '-')}[ ,].{{0,60}}{re.escape(comment)}", output), field.name


@pytest.mark.parametrize(
    "trainer, arguments, status, names",
    [
        (ppo_fp32, ("--env-id", "CartPole-v1"), 2, "--env-id"),
        (ppo_amp, ("--learning-rate", "nan"), 2, "--learning-rate"),
        (ppo_fp16, ("--help",), 0, "--module-a"),
    ],
)
def test_exit_status_of_the_program(trainer, arguments, status, names, tmp_path):
    process = start(trainer, *arguments, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    output = process.communicate()
    assert process.returncode == status
    assert names in "".join(output) and "Traceback" not in "".join(output)
    if names in ("--env-id", "--learning-rate"):
        assert output[0] == "" and output[1].count("\n") == 1
    assert not list(tmp_path.iterdir())


# --- what a run leaves behind


def scalars(folder):
    """All scalars of a run's TensorBoard events: tag -> [(step, value), ...]."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def train(trainer, folder, **arguments):
    """A run of main in this process, which gets back what main sets in it. Returns the arguments and the run's folder."""
    handler, deterministic = signal.getsignal(signal.SIGINT), torch.backends.cudnn.deterministic
    args = trainer.Args(**arguments, cuda=False, compile=False, runs_dir=str(folder), run_name="run")
    try:
        trainer.main(args)
    finally:
        signal.signal(signal.SIGINT, handler)
        torch.backends.cudnn.deterministic = deterministic
    return args, folder / "run"


@pytest.fixture(scope="module", params=TRAINERS, ids=[trainer.__name__ for trainer in TRAINERS])
def finished(request, tmp_path_factory):
    """Three iterations of 256 steps (and 100 steps too few for a fourth)."""
    sizes = dict(num_steps=256, total_timesteps=868, num_minibatches=4, update_epochs=2, eval_every=2, eval_episodes=3, seed=3)
    folder = tmp_path_factory.mktemp(request.param.__name__)
    args, run = train(request.param, folder, env_id="InvertedPendulum-v5", **sizes)
    return request.param, args, run, scalars(run)


STEPS = [256, 512, 768]


def test_run_folder_is_complete(finished):
    _, _, run, _ = finished
    events = [path.name for path in run.iterdir() if path.name.startswith("events.out.tfevents")]
    assert len(events) == 1
    assert sorted(path.name for path in run.iterdir()) == sorted(["args.json", "checkpoint.pt", "eval.csv", "model.pt", *events])


def test_args_json_repeats_the_run(finished):
    _, args, run, _ = finished
    saved = json.loads((run / "args.json").read_text())
    assert saved.keys() == {field.name for field in dataclasses.fields(args)} | {"device", "versions", "commit"}
    assert {name: saved[name] for name in dataclasses.asdict(args)} == dataclasses.asdict(args)
    assert saved["device"].startswith("cpu (")
    assert saved["versions"] | dict(torch=torch.__version__, numpy=np.__version__) == saved["versions"]
    assert saved["versions"].keys() >= {"python", "torch", "numpy", "gymnasium"}
    assert saved["commit"] is None or re.fullmatch("[0-9a-f]{40}", saved["commit"])


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_eval_csv_goes_from_the_start_to_the_end(finished):
    _, args, run, events = finished
    assert (run / "eval.csv").read_text().splitlines()[0] == "global_step,mean_return,std_return,episodes"
    table = read(run / "eval.csv")
    assert [int(row["global_step"]) for row in table] == [0, 512, 768]  # the second, and the last
    assert all(int(row["episodes"]) == args.eval_episodes and float(row["std_return"]) >= 0 for row in table)
    logged = [(step, pytest.approx(value, rel=1e-6)) for step, value in events["eval/mean_return"]]
    assert [(int(row["global_step"]), float(row["mean_return"])) for row in table] == logged


def test_model_is_the_one_last_evaluated(finished):
    trainer, args, run, _ = finished
    agent, normalizer = trainer.load_model(run / "model.pt")
    returns, _ = trainer.evaluate(agent, normalizer, args, args.eval_episodes)
    last = read(run / "eval.csv")[-1]
    assert (returns.mean(), returns.std()) == (float(last["mean_return"]), float(last["std_return"]))


def test_events_have_a_value_for_every_iteration(finished):
    trainer, args, _, events = finished
    tags = "charts/SPS charts/learning_rate time/rollout_s time/update_s numerics/grad_norm numerics/grad_norm_clipped"
    tags += " numerics/swallowed_updates numerics/zero_second_moments numerics/skipped_updates"
    tags += " losses/policy_loss losses/value_loss losses/entropy losses/approx_kl losses/clipfrac losses/explained_variance"
    tags = [*tags.split(), *{ppo_fp32: (), ppo_amp: ["numerics/loss_scale"], ppo_fp16: ["numerics/fp32_share"]}[trainer]]
    for tag in tags:
        assert [step for step, _ in events[tag]] == STEPS, tag
        assert all(math.isfinite(value) for _, value in events[tag]), tag
    others = {"charts/episodic_return", "charts/episodic_length", "eval/mean_return"}
    assert events.keys() == {*tags, *others}

    def values(tag):
        return np.array([value for _, value in events[tag]])

    np.testing.assert_allclose(values("charts/learning_rate"), args.learning_rate * np.array([1, 2 / 3, 1 / 3]), rtol=1e-6)
    np.testing.assert_allclose(values("charts/SPS"), 256 / (values("time/rollout_s") + values("time/update_s")), rtol=1e-4)
    assert (values("time/rollout_s") > 0).all() and (values("time/update_s") > 0).all()
    assert (values("numerics/grad_norm_clipped") <= args.max_grad_norm * (1 + 1e-6)).all()
    assert (values("numerics/grad_norm_clipped") <= values("numerics/grad_norm") * (1 + 1e-6)).all()
    for share in ("numerics/swallowed_updates", "numerics/zero_second_moments", "losses/clipfrac"):
        assert ((0 <= values(share)) & (values(share) <= 1)).all()
    if trainer is not ppo_amp:  # whose scale of 2^16 may overflow at first, and that step is skipped
        assert (values("numerics/skipped_updates") == 0).all()
    # one standard normal action: entropy 1.419, which six updates at 3e-4 hardly move
    np.testing.assert_allclose(values("losses/entropy"), 0.5 * math.log(2 * math.pi * math.e), atol=0.02)


def test_every_finished_episode_is_logged(finished):
    # InvertedPendulum gives 1 a step, 0 for the one that fails; an untrained policy fails long before the time limit
    _, _, _, events = finished
    steps, lengths = zip(*events["charts/episodic_length"])
    assert list(steps) == list(np.cumsum(lengths))  # one environment: every episode starts where the one before ended
    assert 768 - 100 < steps[-1] <= 768 and len(steps) > 20
    assert events["charts/episodic_return"] == [(step, length - 1) for step, length in events["charts/episodic_length"]]


@trainers
def test_eight_environments(trainer, tmp_path):
    # Pendulum's episodes end at the time limit of 200 steps: 250 steps in each rollout, so at step 200, and at 400 in the second
    sizes = dict(num_envs=8, num_steps=250, total_timesteps=4000, num_minibatches=8, update_epochs=1, eval_episodes=1)
    _, run = train(trainer, tmp_path, env_id="Pendulum-v1", **sizes)
    events = scalars(run)
    assert events["charts/episodic_length"] == [(8 * 200, 200)] * 8 + [(8 * 400, 200)] * 8
    returns = [value for _, value in events["charts/episodic_return"]]
    assert len(set(returns)) == 16 and all(-2000 < value < 0 for value in returns)
    assert [step for step, _ in events["charts/SPS"]] == [2000, 4000]


@trainers
@pytest.mark.parametrize("spaces", ["ScalarObservation", "ImageObservation", "ScalarAction", "MatrixAction", "IntegerAction"])
def test_boxes_of_any_shape_can_be_trained_on(trainer, spaces, tmp_path):
    sizes = dict(num_envs=2, num_steps=8, total_timesteps=32, num_minibatches=2, update_epochs=1, eval_episodes=2)
    _, run = train(trainer, tmp_path, env_id=f"odd_environments:{spaces}-v0", **sizes)
    assert [float(row["mean_return"]) for row in read(run / "eval.csv")] == [5, 5]


def test_a_copy_of_the_trainer_runs_alone(tmp_path):
    """Single-file: with no other file of ours, and no git."""
    shutil.copy(ROOT / "ppo_fp32.py", tmp_path)
    sizes = "--env-id InvertedPendulum-v5 --num-steps 64 --total-timesteps 64 --num-minibatches 2 --update-epochs 1".split()
    command = [sys.executable, "ppo_fp32.py", *sizes, "--eval-episodes", "1", "--no-cuda"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (run,) = (tmp_path / "runs").iterdir()  # the default name of a run
    assert re.fullmatch(r"InvertedPendulum-v5__ppo_fp32__1__\d+", run.name)
    assert (run / "model.pt").exists()
    assert json.loads((run / "args.json").read_text())["commit"] is None


# --- Ctrl-C


@trainers
def test_interrupt_keeps_what_was_learned(trainer, tmp_path):
    sizes = "--env-id InvertedPendulum-v5 --num-steps 256 --num-minibatches 4 --update-epochs 2 --eval-every 1 --eval-episodes 2"
    flags = [*sizes.split(), "--no-compile", "--no-cuda", "--runs-dir", tmp_path, "--run-name", "run"]
    evaluations = tmp_path / "run" / "eval.csv"
    process = start(trainer, *flags, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 120
        while not evaluations.exists() or evaluations.read_bytes().count(b"\n") < 4:  # head, start, two iterations
            assert process.poll() is None and time.monotonic() < deadline, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0 and "Traceback" not in errors
    assert "interrupted after" in output + errors

    table = read(evaluations)
    assert evaluations.read_bytes().endswith(b"\n")
    assert all(math.isfinite(float(value)) for row in table for value in row.values()) and len(table) >= 3
    steps = [int(row["global_step"]) for row in table]
    assert steps == list(range(0, 256 * len(steps), 256)) and steps[-1] < 512_000
    # the iteration under way was finished, evaluated and saved
    agent, normalizer = trainer.load_model(tmp_path / "run" / "model.pt")
    args = trainer.Args(env_id="InvertedPendulum-v5")
    assert trainer.evaluate(agent, normalizer, args, 2)[0].mean() == float(table[-1]["mean_return"])
    assert [step for step, _ in scalars(tmp_path / "run")["eval/mean_return"]] == steps
