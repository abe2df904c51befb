"""A run that is killed and resumed ends with the bits of one that is not; a checkpoint that cannot be continued is refused.

KILLS=20 kills each trainer that often instead of the few times that fit the test suite.
"""

import contextlib
import csv
import hashlib
import io
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import ppo_amp
import ppo_fp16
import ppo_fp32

KILLS = int(os.environ.get("KILLS", 1))
TRAINERS = (ppo_fp32, ppo_amp, ppo_fp16)
FLAGS = dict(env_id="Hopper-v5", num_envs=2, num_steps=128, num_minibatches=4, update_epochs=2, total_timesteps=2048)
FLAGS |= dict(eval_every=3, eval_episodes=1, checkpoint_every=2, learning_rate=3e-3)
trainers = pytest.mark.parametrize("trainer", TRAINERS, ids=[trainer.__name__ for trainer in TRAINERS])


def in_a_process(function):
    """Starts function() in a process of its own; without the seconds that importing PyTorch takes."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
            function()
        status = 0
    except SystemExit as stop:
        status = stop.code or 0
    finally:
        os._exit(status)


def ends(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def curves(folder):
    """Every curve of a run but those of time: tag -> steps and values."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    tags = [tag for tag in events.Tags()["scalars"] if not tag.startswith("time/") and tag != "charts/SPS"]
    return {tag: [(event.step, repr(event.value)) for event in events.Scalars(tag)] for tag in tags}


def assert_same_run(one, other):
    first, second = (torch.load(folder / "model.pt", weights_only=True) for folder in (one, other))
    for name, tensor in first["agent"].items():
        assert torch.equal(tensor, second["agent"][name]), name
    assert (one / "eval.csv").read_bytes() == (other / "eval.csv").read_bytes()
    assert curves(one) == curves(other)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Trainer -> folder and seconds of a run that nothing stops."""
    folder, runs = tmp_path_factory.mktemp("whole"), {}
    for trainer in TRAINERS:
        args = trainer.Args(**FLAGS, runs_dir=str(folder), run_name=trainer.__name__)
        assert ends(in_a_process(lambda args=args, trainer=trainer: trainer.main(args))) == 0
        run = folder / trainer.__name__
        runs[trainer] = run, (run / "model.pt").stat().st_mtime - (run / "args.json").stat().st_mtime
    return runs


@trainers
def test_killed_runs_end_with_the_same_bits(trainer, whole, tmp_path):
    reference, seconds = whole[trainer]
    generator = random.Random(trainer.__name__)
    resumed = 0
    for kill in range(KILLS):
        folder = tmp_path / str(kill)
        args = trainer.Args(**FLAGS, runs_dir=str(tmp_path), run_name=str(kill))
        pid = in_a_process(lambda args=args: trainer.main(args))
        while not (folder / "checkpoint.pt").exists():
            time.sleep(0.005)
        for _ in range(2):  # once in the run, and once where it was resumed
            time.sleep(generator.uniform(0, 0.4 * seconds))
            os.kill(pid, signal.SIGKILL)
            resumed += ends(pid) == -signal.SIGKILL
            pid = in_a_process(lambda folder=folder: trainer.main(trainer.Args(resume=str(folder))))
        assert ends(pid) == 0
        assert_same_run(reference, folder)
    assert resumed >= KILLS  # most were killed in the middle


@pytest.mark.parametrize(
    "trainer, moment", [(ppo_fp32, "write"), (ppo_amp, "fsync"), (ppo_fp16, "copyfile"), (ppo_fp32, "replace")]
)
def test_killed_while_it_writes_a_checkpoint(trainer, moment, whole, tmp_path):
    """The second checkpoint stops half way; the first is whole, and the run goes on from it."""

    def train():
        calls = []

        def stop(original):
            def call(*arguments):
                calls.append(arguments)
                if len(calls) == 2 if moment in ("fsync", "replace") else True:
                    if moment == "copyfile":
                        with open(arguments[1], "wb") as file:
                            file.write(b"half of it")
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments)

            return call

        if moment == "write":
            original = torch.save

            def save(value, file):
                original(value, file)
                calls.append(file)
                if isinstance(value, dict) and value.get("iteration") == 4:
                    with open(tmp_path / "run" / "checkpoint.pt.new", "wb") as new:
                        new.write(file.getvalue()[:1000])
                    os.kill(os.getpid(), signal.SIGKILL)

            torch.save = save
        else:
            module = trainer.shutil if moment == "copyfile" else os
            setattr(module, moment, stop(getattr(module, moment)))
        trainer.main(trainer.Args(**FLAGS, runs_dir=str(tmp_path), run_name="run"))

    assert ends(in_a_process(train)) == -signal.SIGKILL
    assert ends(in_a_process(lambda: trainer.main(trainer.Args(resume=str(tmp_path / "run"))))) == 0
    assert_same_run(whole[trainer][0], tmp_path / "run")


def test_ctrl_c_can_be_resumed(whole, tmp_path):
    folder, reference = tmp_path / "run", whole[ppo_fp16][0]
    pid = in_a_process(lambda: ppo_fp16.main(ppo_fp16.Args(**FLAGS, runs_dir=str(tmp_path), run_name="run")))
    while not (folder / "checkpoint.pt").exists():
        time.sleep(0.005)
    os.kill(pid, signal.SIGINT)
    assert ends(pid) == 0
    with open(folder / "eval.csv") as file:
        assert int(list(csv.reader(file))[-1][0]) < 2048
    assert ends(in_a_process(lambda: ppo_fp16.main(ppo_fp16.Args(resume=str(folder))))) == 0
    assert_same_run(reference, folder)


def test_resuming_a_run_that_ended_changes_nothing(whole, tmp_path):
    folder = whole[ppo_fp32][0]
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".csv", ".pt", ".json")}
    expected = curves(folder)
    assert ends(in_a_process(lambda: ppo_fp32.main(ppo_fp32.Args(resume=str(folder))))) == 0
    assert {name: (folder / name).read_bytes() for name in before if name != "model.pt"} == {
        name: content for name, content in before.items() if name != "model.pt"
    }
    assert curves(folder) == expected


# --- what is refused


def refused(trainer, arguments, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"{trainer.__name__}.py"])
    with pytest.raises(SystemExit) as stop:
        trainer.main(trainer.Args(**arguments))
    output = capsys.readouterr()
    assert stop.value.code == 2 and output.out == "" and output.err.count("\n") == 1
    assert output.err.startswith(f"{trainer.__name__}.py: error: --resume ")
    return output.err


@pytest.fixture
def run(whole, tmp_path):
    """A copy of a finished run of ppo_fp16.py."""
    folder = tmp_path / "run"
    subprocess.run(["cp", "-r", whole[ppo_fp16][0], folder], check=True)
    return folder


def change(folder, **entries):
    """Writes other entries into a checkpoint, checksum and all."""
    path = folder / "checkpoint.pt"
    checkpoint = torch.load(io.BytesIO(path.read_bytes()[32:])) | entries
    torch.save(checkpoint, file := io.BytesIO())
    path.write_bytes(hashlib.sha256(file.getvalue()).digest() + file.getvalue())


def test_no_checkpoint_is_refused(run, capsys, monkeypatch):
    assert "nowhere/checkpoint.pt" in refused(ppo_fp16, dict(resume="nowhere"), capsys, monkeypatch)


def test_another_trainer_version_or_argument_is_refused(run, capsys, monkeypatch):
    assert "trainer ppo_fp16.py, here it is ppo_fp32.py" in refused(ppo_fp32, dict(resume=str(run)), capsys, monkeypatch)
    assert "leave out all others" in refused(ppo_fp16, dict(resume=str(run), env_id="Walker2d-v5"), capsys, monkeypatch)
    assert "leave out all others" in refused(ppo_fp16, dict(resume=str(run), seed=2), capsys, monkeypatch)
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert "torch" in refused(ppo_fp16, dict(resume=str(run)), capsys, monkeypatch)


def test_another_version_of_the_trainer_is_refused(run, capsys, monkeypatch):
    args = torch.load(io.BytesIO((run / "checkpoint.pt").read_bytes()[32:]))["args"]
    change(run, args=args | dict(no_longer_an_argument=1))
    assert "another version of this trainer" in refused(ppo_fp16, dict(resume=str(run)), capsys, monkeypatch)
    change(run, args=args, state={})
    with pytest.raises(SystemExit):
        ppo_fp16.main(ppo_fp16.Args(resume=str(run)))
    assert "--resume" in capsys.readouterr().err.splitlines()[-1]


def test_an_environment_that_has_changed_is_refused(run, capsys, monkeypatch):
    args = torch.load(io.BytesIO((run / "checkpoint.pt").read_bytes()[32:]))["args"]
    change(run, args=args | dict(env_id="Walker2d-v5"))  # other shapes
    with pytest.raises(SystemExit):
        ppo_fp16.main(ppo_fp16.Args(resume=str(run)))
    assert "--resume" in capsys.readouterr().err.splitlines()[-1]
    change(run, args=args)
    state = torch.load(io.BytesIO((run / "checkpoint.pt").read_bytes()[32:]))["state"]
    state["envs"][0]["obs"] += 1e-9  # an environment that is the same in shape but not in what it does
    change(run, state=state)
    with pytest.raises(SystemExit):
        ppo_fp16.main(ppo_fp16.Args(resume=str(run)))
    assert "repeat itself" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("seed", range(30))
def test_a_damaged_checkpoint_is_refused(seed, run, capsys, monkeypatch):
    """A flipped bit anywhere, or any end cut off; with the older one named while there is one."""
    path, generator = run / "checkpoint.pt", random.Random(seed)
    content = bytearray(path.read_bytes())
    if seed % 2:
        content[generator.randrange(len(content))] ^= 1 << generator.randrange(8)
    else:
        content = content[: generator.choice([0, 31, 32, 33, generator.randrange(len(content))])]
    path.write_bytes(content)
    message = refused(ppo_fp16, dict(resume=str(run)), capsys, monkeypatch)
    assert "damaged" in message and "checkpoint.previous.pt" in message
    (run / "checkpoint.previous.pt").unlink()
    assert "start the run anew" in refused(ppo_fp16, dict(resume=str(run)), capsys, monkeypatch)


def test_a_checkpoint_runs_no_code(run, capsys, monkeypatch, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    change(run, evil=Evil())
    assert "damaged" in refused(ppo_fp16, dict(resume=str(run)), capsys, monkeypatch)
    assert not (tmp_path / "owned").exists()


# --- a saved model


@trainers
def test_evaluate_prints_what_training_logged(trainer, whole, capsys):
    folder = whole[trainer][0]
    trainer.main(trainer.Args(evaluate=str(folder), eval_episodes=1))
    with open(folder / "eval.csv") as file:
        last = list(csv.DictReader(file))[-1]
    printed = re.fullmatch(r"Hopper-v5: return (\S+) \+- (\S+), length (\d+)\.0, 1 episodes\n", capsys.readouterr().out)
    assert printed[1] == f"{float(last['mean_return']):.2f}" and printed[2] == f"{float(last['std_return']):.2f}"


@trainers
def test_evaluating_what_is_no_model_is_refused(trainer, whole, tmp_path, capsys):
    (tmp_path / "args.json").write_text("{}")
    (tmp_path / "model.pt").write_bytes(b"no model")
    other = whole[ppo_fp32 if trainer is ppo_amp else ppo_amp][0]  # AMP's Agent acts in another dtype than its weights have
    for folder in ("nowhere", str(tmp_path), *([str(other)] if trainer is ppo_amp else [])):
        with pytest.raises(SystemExit) as stop:
            trainer.main(trainer.Args(evaluate=folder))
        error = capsys.readouterr().err
        assert stop.value.code == 2 and error.count("\n") == 1 and f"--evaluate {folder}" in error


def test_the_programs_of_the_readme(whole, tmp_path, monkeypatch):
    """They act as training evaluated, in FP16; the exported files as the policy in FP32."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    readme = (pathlib.Path(ppo_fp16.__file__).parent / "README.md").read_text()
    programs = re.findall(r"```python\n(.*?)```", readme, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    folder, names = whole[ppo_fp16][0], {}
    program = (
        programs[0].replace("runs/<name>", str(folder)).replace("HalfCheetah-v5", "Hopper-v5").replace("seed=0", "seed=10_001")
    )
    program = program.replace("    over =", "    total += reward\n    over =").replace("over = False", "over, total = False, 0.0")
    exec(program, names)
    with open(folder / "eval.csv") as file:
        assert names["total"] == float(list(csv.DictReader(file))[-1]["mean_return"])
    exec(programs[1], names)
    exec(programs[2], names)
    policy, session = torch.export.load("policy.pt2").module(), onnxruntime.InferenceSession("policy.onnx")
    obs = torch.randn(50, 1, 11, generator=torch.Generator().manual_seed(0))
    agent, normalizer = ppo_fp16.load_model(folder / "model.pt")
    for one in obs:
        expected = agent.float().mean(torch.as_tensor(normalizer.normalize(one.double().numpy())).float())
        (onnx,) = session.run(None, {"obs": one.numpy()})
        for acted in (policy(one), torch.from_numpy(onnx)):
            torch.testing.assert_close(acted, expected, rtol=1e-5, atol=1e-6)


# --- Replay


@pytest.mark.parametrize("env_id", ["Hopper-v5", "Pendulum-v1", "MountainCarContinuous-v0"])
@pytest.mark.parametrize("steps", [0, 1, 300])
def test_replay_brings_back_the_state(env_id, steps):
    args = ppo_fp32.Args(env_id=env_id)
    env, other, generator = ppo_fp32.make_env(args), ppo_fp32.make_env(args), np.random.default_rng(0)

    def step(environments):
        action = generator.uniform(-1, 1, env.action_space.shape).astype(np.float32)
        results = [environment.step(action) for environment in environments]
        if results[0][2] or results[0][3]:
            for environment in environments:
                environment.reset()
        return results

    env.reset(seed=3)
    for _ in range(steps):
        step([env])
    other.replay(env.history())
    for _ in range(400):
        one, two = step([env, other])
        assert np.array_equal(one[0], two[0]) and one[1:4] == two[1:4]
        assert one[4].get("episode", {}).get("r") == two[4].get("episode", {}).get("r")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64])
def test_replay_of_actions_of_any_dtype(dtype, monkeypatch):
    """`env_actions` gives floats, wider where the bounds are."""
    space = gym.spaces.Box(-3, 3, (2, 2), dtype)

    class Sums(gym.Env):
        observation_space, action_space = gym.spaces.Box(-np.inf, np.inf, (4,), np.float64), space

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            self.sum = self.np_random.normal(size=4)
            return self.sum.copy(), {}

        def step(self, action):
            self.sum = self.sum + action.ravel()
            return self.sum.copy(), 0.0, False, False, {}

    one, other = ppo_fp32.Replay(Sums()), ppo_fp32.Replay(Sums())
    one.reset(seed=1)
    one.reset()
    for action in ppo_fp32.env_actions(2 * torch.randn(20, 4), space):
        one.step(action)
    other.replay(one.history())
    assert np.array_equal(one.obs, other.obs)


class Drawn(gym.Env):
    """Observations drawn by a function of its random numbers, which are not a Generator of NumPy."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (2,), np.float64)

    def __init__(self, make, draw):
        self.make, self.draw, self.np_random = make, draw, make(0)

    def reset(self, *, seed=None, options=None):
        if seed is not None:
            self.np_random = self.make(seed)
        return np.array([self.draw(self.np_random), self.draw(self.np_random)]), {}

    def step(self, action):
        return np.array([self.draw(self.np_random), 0.0]), 0.0, False, False, {}


@trainers
def test_random_numbers_of_numpys_older_kind(trainer):
    """As dm_control has them."""
    one, other = (trainer.Replay(Drawn(np.random.RandomState, np.random.RandomState.normal)) for _ in range(2))
    one.reset(seed=1)
    for _ in range(3):
        one.step(np.zeros(2))
        file = io.BytesIO()
        torch.save(one.history() | dict(obs=None, actions=None), file)
        file.seek(0)
        other.replay(one.history() | torch.load(file, weights_only=True) | dict(obs=one.obs, actions=one.history()["actions"]))
        assert np.array_equal(one.step(np.zeros(2))[0], other.step(np.zeros(2))[0])
        one.reset()


@trainers
def test_random_numbers_of_an_unknown_kind(trainer):
    """Such an environment trains, and is replayed from a seed, or refused."""
    one, other = (trainer.Replay(Drawn(random.Random, random.Random.random)) for _ in range(2))
    one.reset(seed=1)
    one.step(np.zeros(2))
    other.replay(one.history())
    assert np.array_equal(one.obs, other.obs)
    one.reset()
    with pytest.raises(ValueError, match="random numbers"):
        other.replay(one.history())
