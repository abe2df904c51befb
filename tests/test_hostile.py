"""Environments that misbehave, and numbers that go wrong: each has a defined end, the same in all trainers; none is silent."""

import json
import math
import re
import sys

import gymnasium as gym
import numpy as np
import pytest
import torch
from test_resume import assert_same_run

import ppo_amp
import ppo_fp16
import ppo_fp32

TRAINERS = (ppo_fp32, ppo_amp, ppo_fp16)
trainers = pytest.mark.parametrize("trainer", TRAINERS, ids=[trainer.__name__ for trainer in TRAINERS])
FLAGS = dict(num_steps=32, num_minibatches=2, update_epochs=2, eval_every=100, eval_episodes=1, quiet=True)


class Misbehaving(gym.Env):
    """Ten steps an episode; what it returns is given by functions of the number of steps so far."""

    metadata = {}

    def __init__(self, obs=None, reward=None, observations=3, actions=None, time_limit=10):
        self.observation_space = (
            gym.spaces.Box(-np.inf, np.inf, (observations,)) if isinstance(observations, int) else observations
        )
        self.action_space = actions or gym.spaces.Box(-1, 1, (2,), np.float32)
        self.obs, self.reward, self.time_limit, self.total, self.actions = obs, reward, time_limit, 0, []

    def observe(self):
        if self.obs is None:
            return self.observation_space.sample()
        return np.full(self.observation_space.shape, self.obs(self.total), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self.now = 0
        return self.observe(), {}

    def step(self, action):
        self.now, self.total = self.now + 1, self.total + 1
        assert np.isfinite(action).all() and self.action_space.contains(action.astype(self.action_space.dtype))
        reward = float(-np.square(action).sum()) if self.reward is None else self.reward(self.total)
        return self.observe(), reward, False, self.time_limit is not None and self.now >= self.time_limit, {}


def register(**kwargs):
    gym.registry.pop("Misbehaving-v0", None)
    gym.register("Misbehaving-v0", entry_point=lambda: Misbehaving(**kwargs), disable_env_checker=True)


def train(trainer, tmp_path, iterations=3, **flags):
    """Trains on the registered environment; returns the saved model."""
    flags = FLAGS | dict(env_id="Misbehaving-v0", runs_dir=str(tmp_path), run_name="run", total_timesteps=32 * iterations) | flags
    trainer.main(trainer.Args(**flags))
    agent, normalizer = trainer.load_model(tmp_path / flags["run_name"] / "model.pt")
    assert all(parameter.isfinite().all() for parameter in agent.parameters())
    assert np.isfinite(normalizer.obs.mean).all() and np.isfinite(normalizer.obs.var).all()
    return agent, normalizer


@trainers
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["obs", "reward"])
def test_what_is_not_finite_ends_the_run_with_what_was_learned(trainer, where, value, tmp_path, capsys):
    register(**{where: lambda step: value if step == 50 else 0.5})
    with pytest.raises(SystemExit) as stop:
        train(trainer, tmp_path)
    assert "is not finite" in str(stop.value) and {"obs": "observation", "reward": "reward"}[where] in str(stop.value)
    agent, normalizer = trainer.load_model(tmp_path / "run" / "model.pt")
    assert all(parameter.isfinite().all() for parameter in agent.parameters()) and np.isfinite(normalizer.obs.mean).all()
    assert (tmp_path / "run" / "checkpoint.pt").exists()


@trainers
@pytest.mark.parametrize("async_envs", [False, True])
@pytest.mark.parametrize("when", [20, 70, "last evaluation"])  # in the first iteration, in the third, and after it
def test_what_an_environment_raises_is_shown_and_loses_nothing(trainer, when, async_envs, tmp_path, monkeypatch):
    """Once it is mended, the run goes on from where its iteration began, to the bits of one that had no trouble."""
    evaluations = []

    def evaluate(*args, evaluate=trainer.evaluate, **options):
        evaluations.append(when)
        if evaluations == ["last evaluation"] * 2:
            raise RuntimeError("joint 3")
        return evaluate(*args, **options)

    def register_one_that_raises(trouble):
        def reward(step):
            if trouble and step == when:
                raise RuntimeError("joint 3")
            return float(step % 10)

        register(obs=lambda step: step % 10, reward=reward)  # an episode has ten steps

    flags = dict(checkpoint_every=100, async_envs=async_envs)
    register_one_that_raises(False)
    train(trainer, tmp_path, run_name="whole", **flags)
    register_one_that_raises(True)
    monkeypatch.setattr(trainer, "evaluate", evaluate)
    with pytest.raises(RuntimeError, match="joint 3"):
        train(trainer, tmp_path, **flags)
    assert (tmp_path / "run" / "model.pt").exists()
    register_one_that_raises(False)
    trainer.main(trainer.Args(resume=str(tmp_path / "run")))
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@trainers
def test_an_evaluation_that_is_not_finite_ends_and_says_so(trainer, tmp_path):
    register(obs=lambda step: math.nan if step == 5 else 0.5)
    args = trainer.Args(env_id="Misbehaving-v0")
    returns, lengths = trainer.evaluate(trainer.Agent(3, 2), trainer.Normalizer(3), args, 2)
    assert np.isnan(returns).all() and (lengths == 5).all()


@trainers
def test_a_first_observation_that_is_not_finite_is_refused(trainer, tmp_path, capsys):
    register(obs=lambda step: math.nan)
    with pytest.raises(SystemExit) as stop:
        train(trainer, tmp_path)
    assert stop.value.code == 2 and "--env-id: Misbehaving-v0" in capsys.readouterr().err


@trainers
@pytest.mark.parametrize("reward", [1e8, -1e8, 0.0, 1e-30])
def test_rewards_of_any_size(trainer, reward, tmp_path):
    register(reward=lambda step: reward)
    train(trainer, tmp_path)


@trainers
def test_observations_that_never_vary(trainer, tmp_path):
    register(obs=lambda step: 3.0)
    train(trainer, tmp_path)


@trainers
def test_equal_advantages_move_no_policy(trainer, tmp_path):
    """Their standard deviation is 0: the normalised advantages are 0, not NaN."""
    torch.manual_seed(0)
    args = trainer.Args(num_steps=32, num_minibatches=1)
    agent = trainer.Agent(3, 2)
    if trainer is ppo_fp16:
        agent = agent.half()
    dtype = agent.log_std.dtype
    minibatch = dict(obs=torch.randn(32, 3), actions=torch.randn(32, 2), values=torch.zeros(32), returns=torch.randn(32))
    minibatch |= dict(advantages=torch.full((32,), 0.25), means=torch.zeros(32, 2), correction=torch.zeros(32))
    minibatch |= dict(log_probs=-0.5 * minibatch["actions"].square().sum(1) - math.log(2 * math.pi))
    minibatch = {name: tensor.to(dtype) for name, tensor in minibatch.items()}
    loss, metrics = trainer.ppo_loss(agent, minibatch, args)
    gradients = torch.autograd.grad(loss, [agent.log_std, *agent.actor_mean.parameters(), *agent.critic.parameters()])
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert all((gradient == 0).all() for gradient in gradients[:7]) and any(gradient.any() for gradient in gradients[7:])


@trainers
def test_one_sample_a_minibatch(trainer, tmp_path):
    register()
    train(trainer, tmp_path, num_minibatches=32, norm_adv=False)


@trainers
@pytest.mark.parametrize("log_std", [-20.0, 12.0])
def test_a_std_that_16_bits_cannot_hold(trainer, log_std, tmp_path, monkeypatch, capsys):
    """exp(-20) is 0 in FP16 and exp(12) infinite. FP32 goes on; FP16 skips what is not finite, counts it, and says so.

    AMP may skip the first iterations with gradients that large, until its scaler has found a scale.
    """
    register()

    class Extreme(trainer.Agent):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            torch.nn.init.constant_(self.log_std, log_std)

    monkeypatch.setattr(trainer, "Agent", Extreme)
    train(trainer, tmp_path)
    if trainer is not ppo_amp:
        assert ("every update was skipped" in capsys.readouterr().out) == (trainer is ppo_fp16)


@trainers
def test_a_diverging_critic(trainer, tmp_path, capsys):
    """With a learning rate of 100 everything explodes; the parameters stay finite, and the run ends."""
    register()
    train(trainer, tmp_path, learning_rate=100.0, iterations=5)


@trainers
def test_an_evaluation_ends_without_a_time_limit(trainer, tmp_path):
    register(time_limit=None)
    train(trainer, tmp_path, iterations=1)
    with open(tmp_path / "run" / "eval.csv") as file:
        assert len(file.readlines()) == 3


# --- any task with Box actions


@trainers
@pytest.mark.parametrize(
    "observations, actions",
    [
        (1, gym.spaces.Box(-1, 1, (1,), np.float32)),
        (400, gym.spaces.Box(-1, 1, (50,), np.float32)),
        (3, gym.spaces.Box(np.float32([-2, 0.5]), np.float32([-1, 30]))),  # neither symmetric nor about 0
        (3, gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)),
        (gym.spaces.Box(-1, 1, (2, 3)), gym.spaces.Box(-1, 1, (2, 2), np.float32)),
        (gym.spaces.Dict(goal=gym.spaces.Box(-1, 1, (2,)), observation=gym.spaces.Box(-1, 1, (3,))), None),
        (gym.spaces.Tuple([gym.spaces.Box(-1, 1, (2,)), gym.spaces.Discrete(3)]), None),
        (gym.spaces.Discrete(4), None),
    ],
    ids=["1 by 1", "400 by 50", "odd bounds", "no bounds", "matrices", "dict", "tuple", "discrete"],
)
def test_shapes_and_bounds(trainer, observations, actions, tmp_path):
    register(observations=observations, actions=actions)
    train(trainer, tmp_path, iterations=2, num_envs=2)


# --- logging


@trainers
def test_track_is_what_cleanrl_has(trainer, tmp_path, monkeypatch):
    """wandb.init with TensorBoard's scalars, the arguments and the run's name."""
    register()
    calls = []
    monkeypatch.setitem(sys.modules, "wandb", type("wandb", (), dict(init=lambda **options: calls.append(options), __spec__=1)))
    train(trainer, tmp_path, iterations=1, track=True)
    (options,) = calls
    assert options["sync_tensorboard"] and options["name"] == "run" and json.dumps(options["config"])


@trainers
def test_the_progress_bar_and_quiet(trainer, tmp_path, capfd):
    register()
    train(trainer, tmp_path, iterations=1)
    assert capfd.readouterr().err == ""
    train(trainer, tmp_path / "loud", iterations=1, quiet=False)
    assert re.search(r"1/1 \[.*eval=-?\d+, .*SPS=\d+, skipped=\d+\]", capfd.readouterr().err)
