"""--async-envs: environments in processes of their own, which change the time that a step takes, and nothing else."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_resume import assert_same_run, ends, in_a_process, trainers

import ppo_fp32

ROOT = pathlib.Path(__file__).parents[1]
FLAGS = dict(env_id="Hopper-v5", num_envs=3, num_steps=64, num_minibatches=4, update_epochs=2, total_timesteps=768)
FLAGS |= dict(eval_every=2, eval_episodes=2, checkpoint_every=2)
STEP = 0.02  # seconds


class Slow(gym.Env):
    """Every step takes its time, and ends the episode at the tenth."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.normal(size=2), {}

    def step(self, action):
        if not np.isfinite(action).all():
            raise ValueError("the action is not finite")
        time.sleep(STEP)
        self.steps += 1
        return self.np_random.normal(size=2), float(action[0]), self.steps == 10, False, {}


gym.register("Slow-v0", Slow)


@trainers
def test_async_environments_change_no_bit(trainer, tmp_path):
    for name, flags in (("one", {}), ("async", dict(async_envs=True))):
        args = trainer.Args(**FLAGS, **flags, runs_dir=str(tmp_path), run_name=name)
        assert ends(in_a_process(lambda args=args: trainer.main(args))) == 0
    assert_same_run(tmp_path / "one", tmp_path / "async")


@trainers
def test_no_tensor_crosses_a_pipe(trainer):
    """It would travel as an open file, which processes that are forked later do not find."""
    env = trainer.make_env(trainer.Args(env_id="Slow-v0"))
    env.reset(seed=1)
    assert not any(isinstance(value, torch.Tensor) for value in env.history().values())


@trainers
def test_killed_and_resumed(trainer, tmp_path):
    for name in ("whole", "killed"):
        args = trainer.Args(**FLAGS, async_envs=True, runs_dir=str(tmp_path), run_name=name)
        pid = in_a_process(lambda args=args: trainer.main(args))
        if name == "killed":
            while not (tmp_path / name / "checkpoint.pt").exists():
                time.sleep(0.005)
            os.kill(pid, signal.SIGKILL)
            assert ends(pid) == -signal.SIGKILL
            pid = in_a_process(lambda name=name: trainer.main(trainer.Args(resume=str(tmp_path / name))))
        assert ends(pid) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "killed")


def test_slow_environments_step_side_by_side():
    seconds, batches = {}, []
    for async_envs in (False, True):
        args = ppo_fp32.Args(env_id="Slow-v0", num_envs=8, num_steps=15, async_envs=async_envs)
        torch.manual_seed(1)
        envs, agent, normalizer = ppo_fp32.make_envs(args, 8), ppo_fp32.Agent(2, 1), ppo_fp32.Normalizer(2, 8)
        obs = np.stack([normalizer.observe(env.reset(seed=i)[0]) for i, env in enumerate(envs)])
        start = time.perf_counter()
        batch, episodes = ppo_fp32.rollout(agent, envs, normalizer, obs, args)
        seconds[async_envs] = time.perf_counter() - start
        assert len(episodes) == 8 and {(step, length) for step, _, length in episodes} == {(9, 10)}
        batches.append(batch)
        for env in envs:
            env.close()
    assert all(torch.equal(tensor, batches[1][name]) for name, tensor in batches[0].items())
    assert seconds[False] > 8 * 15 * STEP and seconds[True] < seconds[False] / 3


@trainers
def test_a_recorded_environment_stays_in_the_trainer(trainer, tmp_path, monkeypatch):
    """Its graphics, once used, would hang in a forked process."""
    monkeypatch.setattr(gym.wrappers, "RecordVideo", lambda env, folder: env)
    args = trainer.Args(env_id="Pendulum-v1", async_envs=True, runs_dir=str(tmp_path))
    monkeypatch.setattr(gym, "make", lambda env_id, make=gym.make, **render: make(env_id))
    envs = trainer.make_envs(args, 2, record=True)
    assert isinstance(envs[0], trainer.Replay) and isinstance(envs[1], trainer.AsyncEnv)
    for env in envs:
        env.close()


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout
    return [int(child) for child in listed.split()]


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not pathlib.Path("/proc/self/stat").exists(), reason="no /proc")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_process_is_left(how, tmp_path):
    """Ctrl-C reaches the whole process group, and is for the trainer alone; after kill -9 the others end by themselves."""
    flags = ["--env-id", "Hopper-v5", "--num-envs", "3", "--num-steps", "128", "--num-minibatches", "4", "--eval-episodes", "1"]
    command = [
        sys.executable,
        ROOT / "ppo_fp32.py",
        *flags,
        "--async-envs",
        "--no-compile",
        "--runs-dir",
        tmp_path,
        "--run-name",
        "run",
    ]
    process = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    workers = []
    while len(workers) < 3 or not list((tmp_path / "run").glob("events*")):
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.05)
        workers = children(process.pid)
    time.sleep(1)
    workers = children(process.pid)
    if how == signal.SIGINT:
        os.killpg(process.pid, how)
    else:
        process.kill()
    output, _ = process.communicate(timeout=60)
    if how == signal.SIGINT:
        assert process.returncode == 0 and "interrupted after" in output and "Traceback" not in output, output
        assert (tmp_path / "run" / "model.pt").exists()
    deadline = time.monotonic() + 20
    while any(map(alive, workers)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(alive, workers))


def test_an_error_in_an_environment_reaches_the_trainer():
    (env,) = ppo_fp32.make_envs(ppo_fp32.Args(env_id="Slow-v0", async_envs=True), 1)
    env.reset(seed=1)
    env.send(np.array([np.nan], np.float32))
    with pytest.warns(UserWarning, match="Raising the last exception"), pytest.raises(ValueError, match="not finite"):
        env.receive()
    env.close()
