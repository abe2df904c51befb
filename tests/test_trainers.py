"""The parts of the three trainers: rollout, advantages, normalisation, evaluation, saving, updates, compiling, same bits."""

import ast
import copy
import csv
import difflib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import types
from collections import namedtuple

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import NormalizeReward
from gymnasium.wrappers.utils import RunningMeanStd

import ppo_amp
import ppo_fp16
import ppo_fp32
from numerics import sampling_correction

ROOT = pathlib.Path(__file__).parents[1]
TRAINERS = (ppo_fp32, ppo_amp, ppo_fp16)
MODES = {
    "fp32": (ppo_fp32, {}),
    "amp-float16": (ppo_amp, dict(amp_dtype="float16")),
    "amp-bfloat16": (ppo_amp, dict(amp_dtype="bfloat16")),
    "fp16-float16": (ppo_fp16, dict(dtype="float16")),
    "fp16-bfloat16": (ppo_fp16, dict(dtype="bfloat16")),
}
trainers = pytest.mark.parametrize("trainer", TRAINERS, ids=[trainer.__name__ for trainer in TRAINERS])
modes = pytest.mark.parametrize("trainer, flags", MODES.values(), ids=MODES)
has_compiler = any(map(shutil.which, ("g++", "clang++", "c++")))
needs_compiler = pytest.mark.skipif(not has_compiler, reason="torch.compile needs a C++ compiler for the CPU")


# --- what the tests work on


def lengths(env, episode):
    return (3, 5, 4, 1, 7)[(env + episode) % 5]


def fails(env, episode):
    """Whether this episode of the scripted environment ends by failure, else by time limit."""
    return (env + 2 * episode) % 3 == 0


class Scripted(gym.Env):
    """Observations say where they come from: (seed mod 8, episode, step) / 8, exact in every dtype. Reward: episode + step/8."""

    observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float64)
    action_space = gym.spaces.Box(-0.5, 0.5, (2,), np.float32)

    def __init__(self, render_mode=None, action_weight=0.0):
        self.index, self.episode, self.action_weight, self.actions = 0, -1, action_weight, []

    def observation(self):
        return np.array([self.index, self.episode, self.time]) / 8

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.index = self.index if seed is None else seed % 8
        self.episode, self.time = self.episode + 1, 0
        return self.observation(), {}

    def step(self, action):
        self.time += 1
        self.actions.append(action)
        over, fail = self.time == lengths(self.index, self.episode), fails(self.index, self.episode)
        reward = self.episode + self.time / 8 + self.action_weight * float(action.sum())
        return self.observation(), reward, over and fail, over and not fail, {}


gym.register("Scripted-v0", entry_point=Scripted)
gym.register("ScriptedAction-v0", entry_point=Scripted, kwargs=dict(action_weight=1.0))


class Identity:
    """Stands in for the normalizer, changes nothing, and remembers what it was shown."""

    def __init__(self):
        self.observed, self.rewards = [], []

    def normalize(self, obs):
        return obs

    def observe(self, obs):
        self.observed.append(obs)
        return obs

    def reward(self, reward, done, env):
        self.rewards.append((reward, done, env))
        return reward


def build(trainer, env_id="InvertedDoublePendulum-v5", normalizer=None, **flags):
    """What main sets up before it trains, on the CPU, in a namespace."""
    args = trainer.Args(env_id=env_id, **flags)
    torch.manual_seed(args.seed)
    envs = [trainer.make_env(args) for _ in range(args.num_envs)]
    dims = envs[0].observation_space.shape[0], envs[0].action_space.shape[0]
    scaler = None
    if trainer is ppo_fp16:
        agent = ppo_fp16.Agent(*dims).to(getattr(torch, args.dtype))
        optimizer = ppo_fp16.make_optimizer(agent, args)
    else:
        agent = trainer.Agent(*dims, **(dict(amp_dtype=args.amp_dtype) if trainer is ppo_amp else {}))
        optimizer = torch.optim.Adam([trainer.flatten(agent)], lr=args.learning_rate, eps=1e-5, fused=True)
    if trainer is ppo_amp:
        scaler = torch.amp.GradScaler("cpu", enabled=args.amp_dtype == "float16")
    normalizer = normalizer or trainer.Normalizer(dims[0], args.num_envs, args.gamma)
    next_obs = np.stack([normalizer.observe(env.reset(seed=args.seed + i)[0]) for i, env in enumerate(envs)])
    run = types.SimpleNamespace(trainer=trainer, args=args, envs=envs, agent=agent, optimizer=optimizer, scaler=scaler)
    run.normalizer, run.next_obs = normalizer, next_obs
    return run


def collect(run):
    return run.trainer.rollout(run.agent, run.envs, run.normalizer, run.next_obs, run.args)


def update(run, minibatch):
    scaler = (run.scaler,) if run.scaler else ()
    return run.trainer.update_minibatch(run.agent, run.optimizer, *scaler, minibatch, run.args)


def gradient(run, minibatch, gradient_function=None):
    """ppo_gradient's gradient, clip coefficient and metrics, in AMP of the loss as it is."""
    scale = (torch.ones(()),) if run.scaler else ()
    return (gradient_function or run.trainer.ppo_gradient)(run.agent, minibatch, run.args, *scale)


def tensors(value):
    """All tensors in nested dicts, lists and tuples, in order."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, (list, tuple)) else []


def same_bits(x, y):
    """Whether two tensors, or two nests of them, agree in dtype, shape and every bit (so NaN equals NaN)."""

    def bits(tensor):
        return tensor.dtype, tensor.shape, tensor.detach().reshape(-1).contiguous().view(torch.uint8).tolist()

    return [bits(tensor) for tensor in tensors(x)] == [bits(tensor) for tensor in tensors(y)]


def python(*arguments, cwd, **environment):
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONDONTWRITEBYTECODE="1", **environment)
    return subprocess.run([sys.executable, *map(str, arguments)], cwd=cwd, env=environment, capture_output=True, text=True)


# --- the files as such


@trainers
def test_importing_runs_nothing(trainer, tmp_path):
    done = python("-c", f"import {trainer.__name__}", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())


def changed_lines(variant):
    """Lines that differ from ppo_fp32.py, counted on both sides, as `diff` does."""
    reference = (ROOT / "ppo_fp32.py").read_text().splitlines()
    matcher = difflib.SequenceMatcher(None, reference, variant.splitlines(), autojunk=False)
    return sum(i2 - i1 + j2 - j1 for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def test_trainers_differ_in_few_lines():
    # the diff against FP32 is read as documentation, so what need not differ does not
    assert 0 < changed_lines((ROOT / "ppo_amp.py").read_text()) <= 60
    fp16 = (ROOT / "ppo_fp16.py").read_text()
    kernel_launch = fp16[fp16.index("class SharpKernel") : fp16.index("class NaiveAdam")]
    assert 0 < changed_lines(fp16.replace(kernel_launch, "")) <= 260
    assert changed_lines(fp16) <= 330


@pytest.mark.skipif(shutil.which("diff") is None, reason="diff is not installed")
@pytest.mark.parametrize("other", ["ppo_amp.py", "ppo_fp16.py"])
def test_readme_counts_the_lines_that_diff_prints(other):
    printed = subprocess.run(["diff", "ppo_fp32.py", other], cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    changed = sum(line[0] in "<>" for line in printed)
    assert re.search(rf"`diff ppo_fp32.py {other}`.*\| {changed}\b", (ROOT / "README.md").read_text())


def test_ppo_comes_first_and_fits_in_400_lines():
    ppo, _ = (ROOT / "ppo_fp32.py").read_text().split("\n\n\n# PPO ends here.")
    assert ppo.count("\n") < 400 and "def update_minibatch" in ppo and "def evaluate" in ppo


@pytest.mark.parametrize("other, names", [("ppo_amp.py", r"AMP|autocast|16 bits"), ("ppo_fp16.py", r"[Mm]odule|Storage|16 bits")])
def test_every_hunk_names_its_module(other, names):
    """In the lines that differ, or just above them; the docstrings explain themselves."""
    reference, variant = ((ROOT / file).read_text().splitlines() for file in ("ppo_fp32.py", other))
    matcher = difflib.SequenceMatcher(None, reference, variant, autojunk=False)
    hunks = [
        (i1, reference[i1:i2], variant[max(j1 - 2, 0) : j2]) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"
    ]
    unnamed = [new or old for at, old, new in hunks if at > 10 and not re.search(names, "\n".join(old + new))]
    assert len(hunks) > 10 and not unnamed


@pytest.mark.parametrize("other", ["ppo_amp.py", "ppo_fp16.py"])
def test_trainers_have_the_same_sections_in_the_same_order(other):
    def names(file):
        body = ast.parse((ROOT / file).read_text()).body
        return [node.name for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef))]

    shared = set(names("ppo_fp32.py"))
    assert [name for name in names(other) if name in shared] == names("ppo_fp32.py")


# --- advantages


# by hand, gamma = lambda = 1/2. Steps 0-1 end by failure, 2-3 by time limit (V = 4 of the final observation), 4 goes on (V = 2):
#   delta_0 = 1 + 0.5 * 2 - 1 = 1       A_0 = 1 + 0.25 * 1 = 1.25
#   delta_1 = 3 + 0 - 2 = 1             A_1 = 1
#   delta_2 = 0 + 0.5 * 2 - 1 = 0       A_2 = 0 + 0.25 * 4 = 1
#   delta_3 = 4 + 0.5 * 4 - 2 = 4       A_3 = 4
#   delta_4 = -1 + 0.5 * 2 - 3 = -3     A_4 = -3
@trainers
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gae_by_hand(trainer, dtype):
    def column(values):
        return torch.tensor(values, dtype=dtype)[:, None]

    rewards, values, next_values = column([1, 3, 0, 4, -1]), column([1, 2, 1, 2, 3]), column([2, 0, 2, 4, 2])
    dones = column([0, 1, 0, 1, 0]).bool()
    advantages, returns = trainer.compute_gae(rewards, values, next_values, dones, 0.5, 0.5)
    assert advantages.dtype == returns.dtype == dtype
    assert advantages.flatten().tolist() == [1.25, 1, 1, 4, -3]  # all exact in FP16
    assert returns.flatten().tolist() == [2.25, 3, 2, 6, 0]


@trainers
@pytest.mark.parametrize("num_envs", [1, 3])
def test_gae_equals_stable_baselines3(trainer, num_envs):
    buffers = pytest.importorskip("stable_baselines3.common.buffers", reason="stable_baselines3 is not installed")
    steps, gamma, gae_lambda, rng = 200, 0.99, 0.95, np.random.default_rng(0)
    shape = steps, num_envs
    rewards, values, final_values = (rng.normal(size=shape).astype(np.float32) for _ in range(3))
    last_values = rng.normal(size=num_envs).astype(np.float32)
    dones, terminated = rng.random(shape) < 0.1, rng.random(shape) < 0.5
    dones[-1] = np.arange(num_envs) % 2 == 0  # a rollout that ends with an episode, and one that does not

    # SB3's convention: the value of the final observation is in the reward already, and the next step starts an episode
    box = gym.spaces.Box(-1, 1, (1,))
    buffer = buffers.RolloutBuffer(steps, box, box, "cpu", gae_lambda, gamma, num_envs)
    buffer.rewards[:] = rewards + gamma * final_values * (dones & ~terminated)
    buffer.values[:] = values
    buffer.episode_starts[1:] = dones[:-1]
    buffer.compute_returns_and_advantage(torch.from_numpy(last_values), dones[-1])

    next_values = np.where(dones, np.where(terminated, 0, final_values), np.concatenate([values[1:], last_values[None]]))
    arrays = (torch.from_numpy(array) for array in (rewards, values, next_values, dones))
    advantages, returns = trainer.compute_gae(*arrays, gamma, gae_lambda)
    # both add FP32 in another order: some u = 6e-8 of sums of up to about 20
    np.testing.assert_allclose(advantages, buffer.advantages, rtol=0, atol=2e-5)
    np.testing.assert_allclose(returns, buffer.returns, rtol=0, atol=2e-5)

    # 16 bits in and out, the recurrence in FP32: inputs rounded first, so only what is stored rounds
    halves = [torch.from_numpy(array) for array in (rewards, values, next_values)]
    halves = [tensor.half() for tensor in halves]
    wide = trainer.compute_gae(*(tensor.float() for tensor in halves), torch.from_numpy(dones), gamma, gae_lambda)
    narrow = trainer.compute_gae(*halves, torch.from_numpy(dones), gamma, gae_lambda)
    for exact, stored in zip(wide, narrow):
        torch.testing.assert_close(stored, exact.half(), rtol=2**-10, atol=1e-6)  # one unit in the last place


# --- rollout


Transition = namedtuple("Transition", "obs led_to failed cut reward length")  # length: of the episode so far


def script(env, steps):
    """The transitions of one scripted environment."""
    episode, time = 0, 0
    for _ in range(steps):
        over, fail = time + 1 == lengths(env, episode), fails(env, episode)
        here, there = (np.array([env, episode, t]) / 8 for t in (time, time + 1))
        yield Transition(here, there, over and fail, over and not fail, episode + (time + 1) / 8, time + 1)
        episode, time = (episode + 1, 0) if over else (episode, time + 1)


@modes
@pytest.mark.parametrize("num_envs", [1, 3])
def test_rollout_holds_the_transitions_of_the_script(trainer, flags, num_envs):
    steps, first_env = 24, 1  # environment i is reset with seed + i, and the seed is 1
    run = build(trainer, "Scripted-v0", Identity(), num_envs=num_envs, num_steps=steps, num_minibatches=1, **flags)
    dtype = run.agent.log_std.dtype
    # rows come from an actor whose means are worth comparing
    with torch.no_grad():
        run.agent.actor_mean[-1].weight *= 50
        run.agent.actor_mean[-1].bias += 0.25
    expected = [list(script(first_env + i, 2 * steps)) for i in range(num_envs)]
    # the script must contain, for every environment and in each rollout, both ways to end
    for start in (0, steps):
        for i in range(num_envs):
            part = expected[i][start : start + steps]
            assert any(row.failed for row in part) and any(row.cut for row in part)

    for start in (0, steps):  # the second rollout goes on where the first stopped
        run.normalizer.observed, run.normalizer.rewards = [], []
        batch, episodes = collect(run)
        part = [[expected[i][start + step] for i in range(num_envs)] for step in range(steps)]
        flat = [(step, i, part[step][i]) for step in range(steps) for i in range(num_envs)]

        # every row is a real transition: within an episode the next row is where this one led, after it the reset observation
        assert batch["obs"].dtype == dtype
        np.testing.assert_array_equal(batch["obs"].float(), [row.obs for _, _, row in flat])
        following = [expected[i][start + step + 1].obs for step, i, _ in flat if start + step + 1 < 2 * steps]
        np.testing.assert_array_equal(run.normalizer.observed[: len(following)], following)  # final observations: never observed
        assert len(run.normalizer.observed) == steps * num_envs
        np.testing.assert_array_equal(run.next_obs, run.normalizer.observed[-num_envs:])

        # rewards and ends of episodes
        assert run.normalizer.rewards == [(row.reward, row.failed or row.cut, i) for _, i, row in flat]

        # the environments got the stored actions, clipped to their bounds
        executed = [run.envs[i].unwrapped.actions[start + step] for step, i, _ in flat]
        np.testing.assert_array_equal(batch["actions"].float().clamp(-0.5, 0.5), np.stack(executed))
        assert 0.05 < (batch["actions"].abs() < 0.5).float().mean() < 0.95  # some clipped, some not
        for tensor in batch.values():
            assert len(tensor) == steps * num_envs and tensor.isfinite().all()

        # values and advantages, from sums over the rest of each episode in FP64
        with torch.no_grad():

            def value(observations):
                return run.agent.value(torch.tensor(np.array(observations)).to(dtype)).double().numpy()

            values = value([row.obs for _, _, row in flat]).reshape(steps, num_envs)
            led_to = value([row.led_to for _, _, row in flat]).reshape(
                steps, num_envs
            )  # final observations where a time limit cut
        gamma, gae_lambda, advantages = run.args.gamma, run.args.gae_lambda, np.zeros((steps, num_envs))
        for step, i, _ in flat:
            weight = 1.0
            for t in range(step, steps):
                row = part[t][i]
                delta = row.reward + gamma * led_to[t, i] * (not row.failed) - values[t, i]
                advantages[step, i] += weight * delta
                weight *= gamma * gae_lambda
                if row.failed or row.cut:
                    break
        # 16 bits: values near 2 are rounded by up to 2^-10 (BF16 2^-7), rewards and advantages up to 32 by up to 2^-6 (2^-3)
        bf16 = "bfloat16" in flags.values()
        rounding = 1e-5 if trainer is ppo_fp32 else (0.15 if bf16 else 0.02)
        np.testing.assert_allclose(batch["values"].float(), values.flatten(), atol=rounding, rtol=0)
        np.testing.assert_allclose(batch["advantages"].float(), advantages.flatten(), atol=rounding, rtol=rounding / 16)
        returns = (advantages + values).flatten()
        np.testing.assert_allclose(batch["returns"].float(), returns, atol=2 * rounding, rtol=rounding / 16)

        # every finished episode, with its undiscounted return
        ends = [(step, row) for step, _, row in flat if row.failed or row.cut]
        assert [(step, length) for step, _, length in episodes] == [(step, row.length) for step, row in ends]
        # reward: episode + time/8, for the times 1 to length
        totals = [row.obs[1] * 8 * row.length + row.length * (row.length + 1) / 16 for _, row in ends]
        np.testing.assert_allclose([episode_return for _, episode_return, _ in episodes], totals, atol=1e-4)


@trainers
def test_rollout_stores_the_behaviour_policy(trainer):
    run = build(trainer, num_steps=128, num_minibatches=4)
    with torch.no_grad():
        run.agent.log_std += 0.25
    batch, _ = collect(run)
    with torch.no_grad():
        mean = run.agent.mean(batch["obs"])
        noise = (batch["actions"].float() - mean.float()) / run.agent.log_std.float().exp()
        log_probs = torch.distributions.Normal(mean.float(), run.agent.log_std.float().exp()).log_prob(batch["actions"].float())
    # 128 standard normal numbers: mean 0 +- 0.09, standard deviation 1 +- 0.06; four sigma
    assert noise.mean().abs() < 0.36 and (noise.std() - 1).abs() < 0.25
    if trainer is ppo_fp16:
        # one row at a time or all at once may round the means, about 0.01, differently
        torch.testing.assert_close(batch["means"], mean, rtol=2**-9, atol=2**-16)
        assert same_bits(run.agent.old_log_std, run.agent.log_std)
    else:
        torch.testing.assert_close(batch["log_probs"], log_probs.sum(1), rtol=0, atol=1e-5 if trainer is ppo_fp32 else 1e-3)


# --- normalisation


@trainers
def test_observation_statistics_equal_gymnasiums(trainer):
    observations = np.random.default_rng(0).normal(3, [0.01, 1, 100], (500, 3))
    normalizer, reference = trainer.Normalizer(3), RunningMeanStd(shape=(3,))
    for obs in observations:
        normalized = normalizer.observe(obs)
        reference.update(obs[None])
        np.testing.assert_allclose(normalizer.obs.mean, reference.mean, rtol=1e-9)
        np.testing.assert_allclose(normalizer.obs.var, reference.var, rtol=1e-9)
        expected = np.clip((obs - reference.mean) / np.sqrt(reference.var + 1e-8), -10, 10)
        np.testing.assert_allclose(normalized, expected, rtol=1e-6, atol=1e-9)
    before = copy.deepcopy(vars(normalizer.obs))
    batch = normalizer.normalize(observations)  # of a batch, and without looking
    np.testing.assert_allclose(batch[-1], normalized)
    assert batch.shape == (500, 3)
    np.testing.assert_equal(vars(normalizer.obs), before)


class Rewards(gym.Env):
    """Gives these rewards, in one episode."""

    observation_space = action_space = gym.spaces.Box(-1, 1, (1,), np.float32)

    def __init__(self, rewards):
        self.rewards = iter(rewards)

    def step(self, action):
        return np.zeros(1, np.float32), next(self.rewards), False, False, {}


@trainers
def test_reward_scale_equals_gymnasiums_within_an_episode(trainer):
    rewards = np.random.default_rng(0).normal(1, 2, 300)
    normalizer, reference = trainer.Normalizer(1, gamma=0.9), NormalizeReward(Rewards(rewards), gamma=0.9)
    ours = [normalizer.reward(reward, False, 0) for reward in rewards]
    theirs = [float(np.squeeze(reference.step(None)[1])) for _ in rewards]
    np.testing.assert_allclose(ours, np.clip(theirs, -10, 10), rtol=1e-6)
    assert max(map(abs, theirs)) > 10  # so that the clipping was tried


@trainers
def test_reward_scale_forgets_the_discounted_return_when_an_episode_ends(trainer):
    # Gymnasium's goes on after a time limit; and of a step that ends in failure it takes the reward for all that went before
    rng = np.random.default_rng(1)
    normalizer, statistics, discounted = trainer.Normalizer(1, num_envs=2, gamma=0.9), RunningMeanStd(shape=()), [0.0, 0.0]
    for _ in range(200):
        for env in range(2):
            reward, done = rng.normal(1, 2), rng.random() < 0.1
            discounted[env] = 0.9 * discounted[env] + reward
            statistics.update(np.array([discounted[env]]))
            expected = np.clip(reward / np.sqrt(statistics.var + 1e-8), -10, 10)
            np.testing.assert_allclose(normalizer.reward(reward, done, env), expected, rtol=1e-6)
            discounted[env] = 0.0 if done else discounted[env]


@trainers
def test_normalised_values_are_clipped_to_10(trainer):
    normalizer = trainer.Normalizer(2)
    assert normalizer.normalize(np.array([1e6, -1e6])).tolist() == [10, -10]
    assert normalizer.normalize(np.array([9.5, -9.5])) == pytest.approx([9.5, -9.5], abs=1e-6)
    # the first reward is about 70 running standard deviations
    assert trainer.Normalizer(2).reward(1.0, False, 0) == 10 and trainer.Normalizer(2).reward(-1.0, False, 0) == -10


# --- evaluation, saving


def warmed_up(trainer, flags, env_id="InvertedDoublePendulum-v5"):
    """A run with statistics of 64 steps and an optimizer that has stepped."""
    run = build(trainer, env_id, num_steps=64, num_minibatches=1, **flags)
    run.batch, _ = collect(run)
    update(run, run.batch)
    return run


@modes
def test_evaluation_leaves_no_trace(trainer, flags):
    run = warmed_up(trainer, flags)

    def state():
        everything = run.agent.state_dict(), run.optimizer.state_dict(), [vars(run.normalizer.obs)]
        others = vars(run.normalizer.returns), run.normalizer.discounted_returns, run.next_obs
        envs = [(env.unwrapped.np_random.bit_generator.state, env.unwrapped.data.qpos) for env in run.envs]
        return copy.deepcopy((tensors(everything), everything[2], others, envs))

    random_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    before = state()
    first = trainer.evaluate(run.agent, run.normalizer, run.args, 4)[0]
    after = state()
    assert torch.equal(random_state[0], torch.get_rng_state()) and random_state[2] == random.getstate()
    np.testing.assert_equal(np.random.get_state(), random_state[1])
    assert len(before[0]) > 13 and same_bits(before[0], after[0])
    np.testing.assert_equal(after[1:], before[1:])
    second = trainer.evaluate(run.agent, run.normalizer, run.args, 4)[0]
    assert first.shape == (4,) and first.tobytes() == second.tobytes()
    assert len(set(first)) == 4  # each episode is another one


@modes
def test_evaluation_returns_what_the_mean_action_earns(trainer, flags):
    run = warmed_up(trainer, flags, "ScriptedAction-v0")
    with torch.no_grad():
        run.agent.actor_mean[-1].weight *= 20
        run.agent.actor_mean[-1].bias += 0.3
    expected = []
    for i in range(5):
        env = Scripted(action_weight=1.0)
        obs, _ = env.reset(seed=run.args.seed + 10_000 + i)
        over, total = False, 0.0
        while not over:
            normalized = torch.tensor(run.normalizer.normalize(obs))[None].to(run.agent.log_std.dtype)
            with torch.no_grad():
                action = run.agent.mean(normalized)[0].float().numpy()
            obs, reward, terminated, truncated, _ = env.step(np.clip(action, -0.5, 0.5))
            total, over = total + reward, terminated or truncated
        expected.append(total)
    returns, lengths = trainer.evaluate(run.agent, run.normalizer, run.args, 5)
    # up to 7 steps of two actions below 1, each rounded by at most 2^-12 or, in BF16, 2^-9
    np.testing.assert_allclose(returns, expected, rtol=0, atol=14 * 2**-9 if "bfloat16" in flags.values() else 14 * 2**-12)


@modes
def test_saved_model_evaluates_to_the_same_bits(trainer, flags, tmp_path):
    run = warmed_up(trainer, flags)
    path = tmp_path / "model.pt"
    trainer.save_model(path, run.agent, run.normalizer)
    saved = torch.load(path, weights_only=True)  # nothing in it that executes
    assert {tensor.dtype for tensor in saved["agent"].values()} == {run.agent.log_std.dtype}

    agent, normalizer = trainer.load_model(path)
    assert same_bits(dict(agent.state_dict()), dict(run.agent.state_dict()))
    np.testing.assert_equal(vars(normalizer.obs), vars(run.normalizer.obs))
    if trainer is ppo_amp:
        assert agent.amp_dtype == run.agent.amp_dtype == getattr(torch, flags["amp_dtype"])
    returns = [trainer.evaluate(*pair, run.args, 4)[0].tobytes() for pair in ((agent, normalizer), (run.agent, run.normalizer))]
    assert returns[0] == returns[1]
    # a policy without its statistics is another policy
    assert trainer.evaluate(agent, trainer.Normalizer(len(normalizer.obs.mean)), run.args, 4)[0].tobytes() != returns[0]


# --- updates


@modes
@pytest.mark.parametrize("norm_adv", [True, False])
@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_non_finite_advantage_changes_nothing(trainer, flags, norm_adv, bad):
    run = warmed_up(trainer, dict(flags, norm_adv=norm_adv))
    theta = run.optimizer.param_groups[0]["params"][0]
    before = copy.deepcopy((run.agent.state_dict(), run.optimizer.state_dict()["state"]))
    scale = run.scaler.get_scale() if run.scaler else None
    minibatch = dict(run.batch, advantages=run.batch["advantages"].clone())
    minibatch["advantages"][5] = bad
    metrics = update(run, minibatch)
    assert not metrics["numerics/grad_norm"].isfinite()
    assert same_bits(before, (run.agent.state_dict(), run.optimizer.state_dict()["state"]))
    if trainer is ppo_amp:
        assert run.scaler.get_scale() == (scale / 2 if flags["amp_dtype"] == "float16" else 1)

    # and the next clean minibatch trains again
    metrics = update(run, run.batch)
    assert metrics["numerics/grad_norm"].isfinite() and theta.isfinite().all()
    assert not same_bits(before, (run.agent.state_dict(), run.optimizer.state_dict()["state"]))


@modes
def test_overflowing_norm_of_finite_gradients_changes_nothing(trainer, flags, monkeypatch):
    run = warmed_up(trainer, flags)
    before = copy.deepcopy((run.agent.state_dict(), run.optimizer.state_dict()["state"]))
    theta = run.optimizer.param_groups[0]["params"][0]

    def steep(agent, minibatch, args):
        return 1e38 * sum(parameter.float().sum() for parameter in agent.parameters()), {}

    monkeypatch.setattr(trainer, "ppo_loss", steep)
    metrics = update(run, run.batch)
    if "float16" not in flags.values():  # in FP16 the elements overflow too
        assert theta.grad.isfinite().all()
    assert not metrics["numerics/grad_norm"].isfinite()
    assert same_bits(before, (run.agent.state_dict(), run.optimizer.state_dict()["state"]))


def test_amp_skips_a_step_whose_scaled_gradient_overflows():
    run = warmed_up(ppo_amp, {})
    run.scaler.update(2.0**40)  # far above what FP16 gradients of this loss bear
    before = copy.deepcopy((run.agent.state_dict(), run.optimizer.state_dict()["state"]))
    metrics = update(run, run.batch)
    assert not metrics["numerics/grad_norm"].isfinite() and metrics["numerics/loss_scale"] == 2.0**40
    assert same_bits(before, (run.agent.state_dict(), run.optimizer.state_dict()["state"]))
    assert run.scaler.get_scale() == 2.0**39


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 64])
def test_amp_products_are_those_of_autocast(dtype, rows):
    torch.manual_seed(0)
    ours, autocasts = ppo_amp.Linear(17, 64), torch.nn.Linear(17, 64)
    autocasts.load_state_dict(ours.state_dict())
    x, results = torch.randn(rows, 17), []
    for layer in (ours, autocasts):
        with torch.autocast("cpu", dtype):
            y = layer(x)
        y.float().square().sum().backward()
        results.append((y, layer.weight.grad, layer.bias.grad))
    for mine, theirs in zip(*results):
        assert mine.dtype == theirs.dtype
        # both sum products of 16 bits in FP32, in an order of their own: a last place apart at most, and that seldom
        spacing = torch.finfo(dtype).eps * theirs.abs().float().clamp(min=0.01)
        assert ((mine.float() - theirs.float()).abs() <= spacing).all()
        assert (mine != theirs).float().mean() < 0.05


@modes
def test_update_clips_the_global_norm(trainer, flags):
    # m after the first step is (1 - beta1) times the clipped gradient
    run = build(trainer, num_steps=64, num_minibatches=1, max_grad_norm=0.01, **flags)
    batch, _ = collect(run)
    flat, _, _ = gradient(run, batch)
    norm = flat.double().norm()
    assert norm > 0.1
    metrics = update(run, batch)
    theta = run.optimizer.param_groups[0]["params"][0]
    clipped = run.optimizer.state[theta]["exp_avg"].double() / 0.1
    relative = 1e-3  # 16-bit moments add up to 1e-4, and AMP's scaled loss rounds other gradients
    assert metrics["numerics/grad_norm"].item() == pytest.approx(norm.item(), rel=relative)
    assert clipped.norm().item() == pytest.approx(0.01, rel=relative)
    assert torch.nn.functional.cosine_similarity(clipped, flat.double(), 0) > 0.999


@pytest.mark.parametrize(
    "flags",
    [dict(), dict(norm_adv=False, clip_vloss=False, ent_coef=0.01, vf_coef=0.25, clip_coef=0.1, max_grad_norm=0.05)],
    ids=["default", "other"],
)
def test_fp32_gradient_is_that_of_the_papers_loss(flags):
    # the loss as Schulman et al. (2017) and CleanRL have it, in FP64; the other trainers are compared with FP32 below
    reference, _, _, batch, _ = twins()
    run = build(ppo_fp32, "Hopper-v5", **flags)
    run.agent.load_state_dict(reference.agent.state_dict())
    flat, clip_coef, metrics = gradient(run, batch)

    agent, args = copy.deepcopy(run.agent).double(), run.args
    rows = {name: tensor.double() for name, tensor in batch.items()}
    policy = torch.distributions.Normal(agent.actor_mean(rows["obs"]), agent.log_std.exp())
    ratio = (policy.log_prob(rows["actions"]).sum(1) - rows["log_probs"]).exp()
    advantages, values = rows["advantages"], agent.critic(rows["obs"])[:, 0]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    policy_loss = -torch.min(ratio * advantages, ratio.clip(1 - args.clip_coef, 1 + args.clip_coef) * advantages).mean()
    value_loss = (values - rows["returns"]) ** 2
    if args.clip_vloss:
        near = rows["values"] + (values - rows["values"]).clip(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, (near - rows["returns"]) ** 2)
    value_loss = value_loss.mean() / 2
    entropy = policy.entropy().sum(1).mean()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    expected = torch.cat([part.flatten() for part in torch.autograd.grad(loss, list(agent.parameters()))])

    norm = expected.norm()
    assert (flat - expected).norm() < 1e-5 * norm
    assert norm > args.max_grad_norm or not flags  # with the small limit, clipping is tried
    named = dict(policy_loss=policy_loss, value_loss=value_loss, entropy=entropy, approx_kl=(ratio - 1 - ratio.log()).mean())
    named["clipfrac"] = ((ratio - 1).abs() > args.clip_coef).double().mean()
    for name, value in named.items():
        assert metrics[f"losses/{name}"].item() == pytest.approx(value.item(), rel=1e-4, abs=1e-6), name
    assert metrics["numerics/grad_norm"].item() == pytest.approx(norm.item(), rel=1e-5)
    assert clip_coef.item() == pytest.approx(min(1, args.max_grad_norm / norm.item()), rel=1e-4)


@trainers
def test_grid_metrics_count_what_the_grid_swallowed(trainer):
    run = warmed_up(trainer, {})
    theta = run.optimizer.param_groups[0]["params"][0]
    for lr, expected in ((0.0, 1.0), (1e-7, None), (1e-2, 0.0)):
        run.optimizer.param_groups[0]["lr"] = lr
        before = theta.detach().clone()
        update(run, run.batch)
        swallowed = trainer.grid_metrics(run.optimizer, before)["numerics/swallowed_updates"]
        if expected is not None:
            # at lr 0 the residual may still move log_std; at 1e-2 some elements have a gradient too small to move them
            assert swallowed == pytest.approx(expected, abs=0.05)
        elif trainer is ppo_fp16:
            assert swallowed > 0.9  # most weights are near 0.1, where FP16's steps are 6e-5
        else:
            assert swallowed < 0.5
    assert 0 <= trainer.grid_metrics(run.optimizer, before)["numerics/zero_second_moments"] < 0.1


# --- training as a whole


@pytest.fixture
def in_process(tmp_path, monkeypatch):
    """Runs a trainer's main in this process, and puts back what it sets in it."""
    handler, deterministic = signal.getsignal(signal.SIGINT), torch.backends.cudnn.deterministic

    def run(trainer, name="run", **arguments):
        sizes = dict(
            num_steps=128, total_timesteps=256, num_minibatches=4, update_epochs=2, eval_episodes=2, cuda=False, compile=False
        )
        args = trainer.Args(**(sizes | arguments), runs_dir=str(tmp_path), run_name=name)
        trainer.main(args)
        return pathlib.Path(args.run_dir)

    yield run
    signal.signal(signal.SIGINT, handler)
    torch.backends.cudnn.deterministic = deterministic


@trainers
def test_same_seed_gives_same_bits(trainer, in_process, tmp_path):
    sizes = dict(env_id="InvertedDoublePendulum-v5", num_steps=256, total_timesteps=768, num_minibatches=16)
    sizes |= dict(update_epochs=3, eval_every=1, eval_episodes=3, cuda=False)
    flags = [text for name, value in sizes.items() if name != "cuda" for text in (f"--{name.replace('_', '-')}", value)]
    for name, hash_seed in (("first", "1"), ("again", "2")):
        command = [ROOT / f"{trainer.__name__}.py", *flags, "--seed", 7, "--no-cuda", "--no-compile"]
        done = python(*command, "--runs-dir", tmp_path, "--run-name", name, cwd=tmp_path, PYTHONHASHSEED=hash_seed)
        assert done.returncode == 0, done.stderr
    in_process(trainer, "other", seed=8, **sizes)

    models = [torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("first", "again", "other")]
    evaluations = [(tmp_path / name / "eval.csv").read_bytes() for name in ("first", "again", "other")]
    assert len(tensors(models[0])) == 13 + 3 and same_bits(models[0], models[1])
    assert evaluations[0] == evaluations[1] and evaluations[0].count(b"\n") == 5
    assert evaluations[2] != evaluations[0]
    for name in ("actor_mean.0.weight", "critic.0.weight"):  # of another seed, from the first weights on: nearly orthogonal
        ours, others = (models[i]["agent"][name].double().flatten() for i in (0, 2))
        assert torch.nn.functional.cosine_similarity(ours, others, 0).abs() < 0.3


@trainers
def test_every_epoch_takes_every_row_once(trainer, in_process, monkeypatch):
    batches, minibatches = [], []
    rollout, update_minibatch = trainer.rollout, trainer.update_minibatch

    def record_batch(*args):
        batch, episodes = rollout(*args)
        batches.append(batch)
        return batch, episodes

    def record_minibatch(*args, **kwargs):
        (minibatch,) = (argument for argument in args if isinstance(argument, dict))
        minibatches.append(minibatch)
        return update_minibatch(*args, **kwargs)

    monkeypatch.setattr(trainer, "rollout", record_batch)
    monkeypatch.setattr(trainer, "update_minibatch", record_minibatch)
    in_process(trainer, env_id="Pendulum-v1", num_envs=2, num_steps=64, total_timesteps=256)  # 2 iterations, 2 epochs, 4 each

    def rows_of(batch):  # all columns of a row together, so that tensors shuffled apart are seen
        return torch.cat([tensor.double().reshape(len(tensor), -1) for _, tensor in sorted(batch.items())], 1)

    assert len(batches) == 2 and len(minibatches) == 2 * 2 * 4
    epochs = [torch.cat([rows_of(minibatch) for minibatch in minibatches[i : i + 4]]) for i in range(0, 16, 4)]
    for epoch, batch in zip(epochs, [batches[0], batches[0], batches[1], batches[1]]):
        assert sorted(epoch.tolist()) == sorted(rows_of(batch).tolist())
    assert not torch.equal(epochs[0], epochs[1]) and not torch.equal(epochs[0], rows_of(batches[0]))
    assert all(len(minibatch["obs"]) == 32 for minibatch in minibatches)


@trainers
def test_target_kl_ends_the_updates_of_an_iteration(trainer, in_process, monkeypatch):
    calls = []
    original = trainer.update_minibatch
    monkeypatch.setattr(trainer, "update_minibatch", lambda *args, **kwargs: calls.append(1) or original(*args, **kwargs))
    for target_kl, expected in ((1e-12, 2 * 4), (1e6, 2 * 4 * 5)):  # two iterations of four minibatches, five epochs
        calls.clear()
        in_process(trainer, f"{target_kl}", env_id="Pendulum-v1", update_epochs=5, target_kl=target_kl, learning_rate=1e-2)
        assert len(calls) == expected


# --- PPO-FP16 alone

MODULES = {
    "naive": dict(module_a=False, module_b=False, module_c=False),
    "without A": dict(module_a=False),
    "without B": dict(module_b=False),
    "without C": dict(module_c=False),
    "acting in FP32": dict(acting_dtype="float32"),
    "BF16": dict(dtype="bfloat16"),
    "naive BF16": dict(module_a=False, module_b=False, module_c=False, dtype="bfloat16"),
    "loss scale": dict(loss_scale=1024.0),
}


@pytest.mark.parametrize("flags", MODULES.values(), ids=MODULES)
def test_fp16_runs_with_any_modules(flags, in_process):
    folder = in_process(ppo_fp16, env_id="HalfCheetah-v5", eval_episodes=1, **flags)
    with open(folder / "eval.csv") as file:
        steps = [int(row["global_step"]) for row in csv.DictReader(file)]
    assert steps == [0, 256]
    agent, _ = ppo_fp16.load_model(folder / "model.pt")
    assert agent.log_std.dtype == getattr(torch, flags.get("dtype", "float16"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("flags", [{}, dict(acting_dtype="float32"), MODULES["without C"]], ids=["default", "acting", "naive C"])
def test_fp16_stores_16_bits(dtype, flags):
    run = warmed_up(ppo_fp16, dict(flags, dtype=dtype))
    half, theta = getattr(torch, dtype), run.optimizer.param_groups[0]["params"][0]
    assert {name: tensor.dtype for name, tensor in run.batch.items()} == dict.fromkeys(
        ("obs", "actions", "values", "advantages", "returns", "means", "correction"), half
    )
    assert theta.dtype == theta.grad.dtype == run.agent.old_log_std.dtype == half
    assert {parameter.dtype for parameter in run.agent.parameters()} == {half}
    states = {name: state.dtype for name, state in run.optimizer.state[theta].items()}
    if "module_c" in flags:
        assert states == dict(step=torch.float32, exp_avg=half, exp_avg_sq=half)
    else:
        assert states == dict(step=torch.float32, exp_avg=half, root_exp_avg_sq=half, residual=torch.float32)


@pytest.mark.parametrize(
    "env_id", ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Humanoid-v5", "InvertedDoublePendulum-v5", "Swimmer-v5"]
)
def test_fp16_keeps_less_than_a_thousandth_in_fp32(env_id):
    run = warmed_up(ppo_fp16, {}, env_id)
    batch = {name: tensor.repeat(32, *[1] * (tensor.ndim - 1)) for name, tensor in run.batch.items()}  # 2,048 rows, as a run has
    share = ppo_fp16.fp32_share(run.agent, run.optimizer, run.normalizer, batch)
    assert 0 < share < 1e-3
    # one wide tensor of the batch would be seen
    batch["returns"] = batch["returns"].float()
    assert ppo_fp16.fp32_share(run.agent, run.optimizer, run.normalizer, batch) > 1e-3


def acting(acting_dtype):
    run = build(ppo_fp16, "Hopper-v5", num_steps=512, num_minibatches=1, acting_dtype=acting_dtype)
    with torch.no_grad():  # a policy whose means, of the order 1, have something to lose in 16 bits
        run.agent.actor_mean[-1].weight *= 100
    run.batch, _ = collect(run)
    return run


@pytest.mark.parametrize("acting_dtype", [None, "float16"])
def test_fp16_correction_is_0_where_the_stored_policy_acted(acting_dtype):
    run = acting(acting_dtype)
    assert (run.batch["correction"] == 0).all()


def test_fp16_correction_restores_the_sampling_time_reference():
    run = acting("float32")
    batch, agent = run.batch, run.agent
    assert (batch["correction"] != 0).float().mean() > 0.5

    # at theta = theta0: the change that the learner sees, against FP64 densities of what learns and of what acted
    actor = copy.deepcopy(agent).float()

    def density(mean, log_std):
        return torch.distributions.Normal(mean.double(), log_std.double().exp()).log_prob(batch["actions"].double()).sum(1)

    with torch.no_grad():
        mean = agent.mean(batch["obs"])
        acted = actor.mean(batch["obs"].float())
        reference = density(mean, agent.log_std) - density(acted, actor.log_std)
        arguments = batch["actions"], mean, agent.log_std, batch["means"], agent.old_log_std
        without = ppo_fp16.gaussian_log_ratio(*arguments).double() - reference
        with_correction = ppo_fp16.gaussian_log_ratio(*arguments, batch["correction"]).double() - reference
    # measured: mean error 1e-4 without, 2e-7 with it
    assert with_correction.abs().mean() < without.abs().mean() / 100
    assert with_correction.abs().max() < without.abs().max() / 50


def test_fp16_loss_subtracts_the_correction():
    # at theta = theta0 the log-ratio is 0, so with c = 1/2 it is -1/2 everywhere, beyond clipping
    run = build(ppo_fp16, num_steps=64, num_minibatches=1)
    batch, _ = collect(run)
    _, metrics = ppo_fp16.ppo_loss(run.agent, batch, run.args)
    assert abs(metrics["losses/approx_kl"]) < 1e-6 and metrics["losses/clipfrac"] == 0
    batch["correction"][:] = 0.5
    _, metrics = ppo_fp16.ppo_loss(run.agent, batch, run.args)
    assert metrics["losses/approx_kl"].item() == pytest.approx(np.exp(-0.5) - 1 + 0.5, rel=1e-3)
    assert metrics["losses/clipfrac"] == 1


# --- the trainers among each other, and compiled


def twins():
    """FP32, AMP and PPO-FP16 with the same parameters, some updates after the rollout whose rows each holds in its own format."""
    sizes = dict(env_id="Hopper-v5", num_steps=512, num_minibatches=1)
    reference = build(ppo_fp32, learning_rate=3e-3, **sizes)
    batch, _ = collect(reference)
    with torch.no_grad():
        behaviour, old_log_std = reference.agent.mean(batch["obs"]), reference.agent.log_std.clone()
    for _ in range(10):
        update(reference, batch)

    # a sample at the edge of clipping may fall on either side of it, which is no matter of precision: leave those out
    with torch.no_grad():
        log_probs = ppo_fp32.log_prob(batch["actions"], reference.agent.mean(batch["obs"]), reference.agent.log_std)
        changes = (log_probs - batch["log_probs"]).expm1(), reference.agent.value(batch["obs"]) - batch["values"]
    clear = torch.stack([(change.abs() - reference.args.clip_coef).abs() > 0.03 for change in changes]).all(0)
    batch, behaviour = {name: tensor[clear] for name, tensor in batch.items()}, behaviour[clear]
    for change in changes:  # both sides are tried
        assert 0.1 < (change[clear].abs() > reference.args.clip_coef).float().mean() < 0.9

    amp = {}
    for dtype in ("float16", "bfloat16"):
        amp[dtype] = build(ppo_amp, amp_dtype=dtype, **sizes)
        amp[dtype].agent.load_state_dict(reference.agent.state_dict())
    half = build(ppo_fp16, **sizes)
    half.agent.load_state_dict(reference.agent.state_dict())
    half.agent.old_log_std.copy_(old_log_std)
    narrow = {name: batch[name].half() for name in ("obs", "actions", "values", "advantages", "returns")}
    narrow["means"] = behaviour.half()
    stored = narrow["means"], half.agent.old_log_std
    narrow["correction"] = sampling_correction(narrow["actions"], behaviour, old_log_std, *stored)
    return reference, amp, half, batch, narrow


def test_the_trainers_agree_on_a_gradient():
    reference, amp, half, batch, narrow = twins()
    expected, _, expected_metrics = gradient(reference, batch)
    sizes = [parameter.numel() for parameter in reference.agent.parameters()]
    cases = [("AMP-FP16", amp["float16"], batch, 5e-3), ("AMP-BF16", amp["bfloat16"], batch, 2e-2), ("FP16", half, narrow, 5e-3)]
    for case, run, minibatch, bound in cases:
        flat, _, metrics = gradient(run, minibatch)
        parts = zip(("log_std", "critic", "actor"), *(split(vector.float(), sizes) for vector in (flat, expected)))
        for part, ours, theirs in parts:
            error = (ours - theirs).norm() / theirs.norm()
            assert error < bound, f"{case}, {part}: {error:.2e}"
        for name, value in expected_metrics.items():
            assert metrics[name].item() == pytest.approx(value.item(), rel=bound), (case, name)


def split(gradient, sizes):
    """The flat gradient's parts: of log_std, which is the first parameter, of the critic, of the actor."""
    log_std, *others = gradient.split(sizes)
    return log_std, torch.cat(others[:6]), torch.cat(others[6:])


@needs_compiler
@trainers
def test_compiled_gradient_equals_eager(trainer):
    reference, amp, half, batch, narrow = twins()
    run, minibatch = {ppo_fp32: (reference, batch), ppo_amp: (amp["float16"], batch), ppo_fp16: (half, narrow)}[trainer]
    minibatch = {name: tensor[:64] for name, tensor in minibatch.items()}
    torch._dynamo.reset()
    with torch._dynamo.config.patch(trace_autograd_ops=True):
        exact = {"emulate_precision_casts": True, "cpp_wrapper": True}
        compiled = torch.compile(trainer.ppo_gradient, fullgraph=True, options=exact)
        ours, clip_coef, metrics = gradient(run, minibatch, compiled)
    theirs, expected_coef, expected_metrics = gradient(run, minibatch)
    assert ours.dtype == theirs.dtype
    error = (ours.double() - theirs.double()).norm() / theirs.double().norm()
    # FP32 sums may be ordered otherwise (measured: 1e-7). In FP16 that hardly ever survives the rounding: all bits were equal,
    # where without emulated casts the error is 4e-4 and 6 of 10 elements differ
    assert error < (1e-5 if trainer is ppo_fp16 else 1e-6)
    if trainer is ppo_fp16:
        assert (ours != theirs).float().mean() < 0.01
    assert clip_coef.item() == pytest.approx(expected_coef.item(), rel=1e-5)
    for name, value in expected_metrics.items():
        assert metrics[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name


@trainers
def test_whatever_is_compiled_emulates_the_casts(trainer, in_process, monkeypatch):
    # a compiler that keeps 16-bit chains in FP32 takes from two_sum what it measures
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled.append((function.__name__, how)) or function)
    monkeypatch.setattr(trainer, "compile_pays", lambda args, device: True)
    with torch._dynamo.config.patch(suppress_errors=False, trace_autograd_ops=False):
        in_process(trainer, env_id="Pendulum-v1", cuda=False, compile=True)
        assert torch._dynamo.config.trace_autograd_ops
    assert {name for name, _ in compiled} >= {"ppo_gradient"} | ({"sharp_update"} if trainer is ppo_fp16 else set())
    assert all(how["options"]["emulate_precision_casts"] for _, how in compiled)
