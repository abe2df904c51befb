"""PPO for continuous control in automatic mixed precision. `diff ppo_fp32.py ppo_amp.py` shows what it takes.

Parameters (the master copy), Adam states and rollout are FP32; the networks run in FP16, with a scaled loss, or in BF16.

The algorithm and its defaults are those of CleanRL's ppo_continuous_action.py; but time limits are bootstrapped, the observation
statistics are saved with the model, and evaluations are deterministic.

    python ppo_amp.py --env-id HalfCheetah-v5 --seed 1        # then: tensorboard --logdir runs
"""

import copy
import csv
import functools
import hashlib
import importlib.util
import io
import json
import math
import os
import pickle
import platform
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Literal  # AMP

import gymnasium as gym
import numpy as np
import torch
import torch.nn as nn
import tyro
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm


@dataclass
class Args:
    exp_name: str = os.path.basename(__file__)[: -len(".py")]  # name of this experiment
    seed: int = 1  # seed of the experiment
    torch_deterministic: bool = True  # set `torch.backends.cudnn.deterministic`
    cuda: bool = True  # train on the GPU if there is one
    cuda_graph: bool = True  # on CUDA, replay each update as one CUDA graph
    compile: bool = True  # torch.compile the loss, where there is a compiler (C++, for CUDA Triton) and the run is long enough
    capture_video: bool = False  # record episodes of the first training environment into the run's folder
    save_model: bool = True  # save the model and its normalisation statistics into the run's folder
    quiet: bool = False  # show no progress bar
    track: bool = False  # log to Weights & Biases too, which needs wandb
    wandb_project_name: str = "ppo-fp16"  # its project
    wandb_entity: str | None = None  # its entity, a team or a user
    runs_dir: str = "runs"  # folder that holds the folders of all runs
    run_name: str = ""  # name of this run's folder (default: {env_id}__{exp_name}__{seed}__{time})
    eval_every: int = 10  # iterations between deterministic evaluations (there is one before the first and one after the last)
    eval_episodes: int = 10  # episodes of each evaluation
    evaluate: str = ""  # folder of a run whose saved model is evaluated, instead of training one
    checkpoint_every: int = 10  # iterations between checkpoints, which --resume continues from
    resume: str = ""  # folder of a run to continue, to the very bits that it would have had; it brings all other arguments

    env_id: str = "HalfCheetah-v5"  # id of the environment
    total_timesteps: int = 512_000  # environment steps of the whole run
    learning_rate: float = 3e-4  # learning rate of the optimizer
    num_envs: int = 1  # number of parallel environments
    async_envs: bool = False  # run each environment in a process of its own, which pays where a step takes a millisecond or more
    num_steps: int = 2048  # steps of each environment in a rollout
    anneal_lr: bool = True  # anneal the learning rate linearly to 0
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the generalised advantage estimation
    num_minibatches: int = 32  # minibatches in a rollout
    update_epochs: int = 10  # passes over a rollout
    norm_adv: bool = True  # normalise the advantages of each minibatch
    clip_coef: float = 0.2  # clipping coefficient of the surrogate objective
    clip_vloss: bool = True  # clip the value loss too
    ent_coef: float = 0.0  # coefficient of the entropy
    vf_coef: float = 0.5  # coefficient of the value loss
    max_grad_norm: float = 0.5  # global gradient norm above which gradients are scaled down to it
    target_kl: float | None = None  # end an iteration's updates at the epoch whose KL divergence exceeds this
    amp_dtype: Literal["float16", "bfloat16"] = "float16"  # AMP: dtype of the networks' products; float16 scales the loss

    def __post_init__(self):
        self.batch_size = self.num_envs * self.num_steps
        self.minibatch_size = self.batch_size // max(self.num_minibatches, 1)
        self.num_iterations = self.total_timesteps // max(self.batch_size, 1)
        self.run_name = self.run_name or f"{self.env_id}__{self.exp_name}__{self.seed}__{int(time.time())}".replace("/", "-")
        self.run_dir = os.path.join(self.runs_dir, self.run_name)


def make_env(args, record=False):
    """One environment. What else CleanRL's wrappers do is done by `Normalizer` and `env_actions`, a third faster a step."""
    env = gym.make(args.env_id, **dict(render_mode="rgb_array") if record else {})
    if record:
        env = gym.wrappers.RecordVideo(env, os.path.join(args.run_dir, "videos", str(int(time.time()))))
    if not isinstance(env.observation_space, gym.spaces.Box) or len(env.observation_space.shape) != 1:
        env = gym.wrappers.FlattenObservation(env)
    return Replay(gym.wrappers.RecordEpisodeStatistics(env))


def make_envs(args, number, record=False):
    """A list of environments. Of these the first is recorded if any, and then stays here: graphics do not survive a fork."""
    make = AsyncEnv if args.async_envs else make_env
    return [make_env(args, record) if record and i == 0 else make(args) for i in range(number)]


def env_actions(actions, space):
    """Actions (n, action_dim), any dtype and device, as environments take them: within the bounds, in the shape of the space."""
    actions = np.maximum(actions.float().cpu().numpy(), space.low.ravel())
    return np.minimum(actions, space.high.ravel()).reshape(-1, *space.shape)


class RunningMeanVar:
    """Mean and variance of all values seen, one by one (Welford 1962), from the start that Gymnasium's wrappers have."""

    def __init__(self, mean, var):
        self.mean, self.var, self.count = mean, var, 1e-4

    def state_dict(self):
        return {name: torch.as_tensor(value, dtype=torch.float64) for name, value in vars(self).items()}

    def load_state_dict(self, state):
        vars(self).update({name: value.numpy()[()] for name, value in state.items()})

    def update(self, value):
        self.count += 1
        delta = value - self.mean
        self.mean = self.mean + delta / self.count
        self.var = self.var + (delta * (value - self.mean) - self.var) / self.count


class Normalizer:
    """Running normalisation of observations and rewards, clipped to +-10; parallel environments share the statistics."""

    def __init__(self, obs_dim, num_envs=1, gamma=0.99):
        self.obs = RunningMeanVar(np.zeros(obs_dim), np.ones(obs_dim))
        self.returns = RunningMeanVar(0.0, 1.0)
        self.discounted_returns = [0.0] * num_envs
        self.gamma = gamma

    def normalize(self, obs):
        """obs (..., obs_dim), normalised by the statistics as they are: all that evaluations and final observations use."""
        return np.minimum(np.maximum((obs - self.obs.mean) / np.sqrt(self.obs.var + 1e-8), -10), 10)

    def observe(self, obs):
        """One observation (obs_dim,), taken into the statistics and normalised. Raises FloatingPointError if it is not finite."""
        if not math.isfinite(np.add.reduce(obs)):
            raise FloatingPointError("an observation is not finite")
        self.obs.update(obs)
        return self.normalize(obs)

    def reward(self, reward, done, env):
        """One reward of one environment, over the deviation of its discounted return. Raises FloatingPointError, as `observe`."""
        if not math.isfinite(reward):
            raise FloatingPointError("a reward is not finite")
        discounted_return = self.discounted_returns[env] * self.gamma + reward
        self.returns.update(discounted_return)
        self.discounted_returns[env] = 0.0 if done else discounted_return
        return min(max(reward / math.sqrt(self.returns.var + 1e-8), -10.0), 10.0)


class Linear(nn.Linear):
    """AMP: autocast's product, 16-bit factors summed in FP32, at a speed that PyTorch has on the CPU for FP32 alone."""

    def forward(self, x):
        if x.is_cuda or x.shape[0] == 1:
            return super().forward(x)
        dtype = torch.get_autocast_dtype("cpu")
        with torch.autocast("cpu", enabled=False):
            return nn.functional.linear(*(t.to(dtype).float() for t in (x, self.weight, self.bias))).to(dtype)


def layer_init(layer, std=math.sqrt(2), bias_const=0.0):
    nn.init.orthogonal_(layer.weight, std)
    nn.init.constant_(layer.bias, bias_const)
    return layer


class Agent(nn.Module):
    """A diagonal Gaussian policy and a value function, in separate networks; log_std does not depend on the observation."""

    def __init__(self, obs_dim, action_dim, width=64, amp_dtype="float16"):  # AMP
        super().__init__()
        self.amp_dtype = getattr(torch, amp_dtype)  # AMP
        self.critic = nn.Sequential(
            layer_init(Linear(obs_dim, width)),
            nn.Tanh(),
            layer_init(Linear(width, width)),
            nn.Tanh(),
            layer_init(Linear(width, 1), std=1.0),
        )
        self.actor_mean = nn.Sequential(
            layer_init(Linear(obs_dim, width)),
            nn.Tanh(),
            layer_init(Linear(width, width)),
            nn.Tanh(),
            layer_init(Linear(width, action_dim), std=0.01),
        )
        self.log_std = nn.Parameter(torch.zeros(action_dim))

    # AMP: the networks run in 16 bits under autocast; what they return goes on in FP32
    def mean(self, obs):
        with torch.autocast(obs.device.type, self.amp_dtype):
            return forward(self.actor_mean, obs).float()

    def value(self, obs):
        with torch.autocast(obs.device.type, self.amp_dtype):
            return forward(self.critic, obs).float().squeeze(-1)


def forward(network, x):
    """network(x), without what nn.Module's calls add: for a single observation that is more than the arithmetic."""
    for layer in network:
        x = layer.forward(x)
    return x


def flatten(agent):
    """Moves the parameters into one flat vector, of which each becomes a view; to an optimizer it is a single tensor."""
    parameters = list(agent.parameters())
    theta = nn.Parameter(torch.cat([parameter.detach().flatten() for parameter in parameters]))
    for parameter, view in zip(parameters, theta.detach().split([parameter.numel() for parameter in parameters])):
        parameter.data = view.view_as(parameter)
    return theta


def log_prob(action, mean, log_std):
    """Log-density (batch,) of actions (batch, action_dim) under a diagonal Gaussian."""
    z = (action - mean) * torch.exp(-log_std)
    return (-0.5 * z * z - log_std - 0.5 * math.log(2 * math.pi)).sum(1)


@torch.no_grad()
def rollout(agent, envs, normalizer, next_obs, args):
    """Runs the policy for num_steps steps of each environment.

    next_obs: the normalised observations (num_envs, obs_dim) to start from, and on return those to go on from. Returns the
    batch, a dict of tensors of num_steps * num_envs rows, and the finished episodes as (step, return, length).
    """
    device, dtype = agent.log_std.device, agent.log_std.dtype
    shape, action_dim, action_space = (args.num_steps, args.num_envs), len(agent.log_std), envs[0].action_space
    obs = torch.zeros(*shape, next_obs.shape[1], dtype=dtype)
    actor = copy.deepcopy(agent).cpu()  # the way to a GPU and back would take longer than a network of this size
    noise = torch.exp(actor.log_std) * torch.randn(*shape, action_dim, dtype=dtype)
    means, actions = [], torch.zeros(noise.shape, dtype=dtype)
    rewards, dones = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=torch.bool)
    step_rewards = np.zeros(args.num_envs)
    env_obs, env_rewards = torch.from_numpy(next_obs), torch.from_numpy(step_rewards)  # these share their memory
    final_obs, episodes = [], []  # final_obs: (step, env, observation) where the time limit cut an episode

    for step in range(args.num_steps):
        means.append(actor.mean(obs[step].copy_(env_obs)))
        sampled = torch.add(means[-1], noise[step], out=actions[step])
        for env, action in zip(envs, env_actions(sampled, action_space)):
            env.send(action)
        for i, env in enumerate(envs):
            next_ob, reward, terminated, truncated, info = env.receive()
            if terminated or truncated:
                episodes.append((step, info["episode"]["r"], info["episode"]["l"]))
                if not terminated:
                    final_obs.append((step, i, normalizer.normalize(next_ob)))
                next_ob, _ = env.reset()  # at once, so that every row of a rollout is a real transition
                dones[step, i] = True
            next_obs[i] = normalizer.observe(next_ob)
            step_rewards[i] = normalizer.reward(reward, terminated or truncated, i)
        rewards[step].copy_(env_rewards)

    def value(obs):
        return agent.value(obs.to(device, dtype)).cpu()

    # V(s_{t+1}): of the next row within an episode, 0 after a failure, V(final observation) after a time limit
    values = value(obs)
    next_values = torch.cat([values[1:], value(env_obs)[None]])
    next_values[dones] = 0
    if final_obs:
        steps, env_ids, last = zip(*final_obs)
        next_values[steps, env_ids] = value(torch.from_numpy(np.stack(last)))
    advantages, returns = compute_gae(rewards, values, next_values, dones, args.gamma, args.gae_lambda)
    batch = dict(obs=obs, actions=actions, values=values, advantages=advantages, returns=returns)
    batch = {name: tensor.flatten(0, 1) for name, tensor in batch.items()}
    batch["log_probs"] = log_prob(batch["actions"], torch.cat(means), actor.log_std)
    return {name: tensor.to(device) for name, tensor in batch.items()}, episodes


def compute_gae(rewards, values, next_values, dones, gamma, gae_lambda):
    """Generalised advantage estimation (Schulman et al. 2016): advantages and returns.

    All arguments and results are (num_steps, num_envs). next_values[t] is the value of the state that step t led to, 0 if it
    ended the episode by failure; dones[t] says whether the episode ended at step t, by failure or by time limit. Advantages
    and returns are computed in FP32 and stored in the dtype of the rewards; nothing in FP32 outlives the call.
    """
    deltas = (rewards.float() + gamma * next_values.float() - values.float()).numpy()
    decay = (gamma * gae_lambda * (~dones).float()).numpy()
    advantages, advantage = np.empty_like(deltas), np.zeros_like(deltas[0])
    for t in reversed(range(len(deltas))):  # in NumPy, whose calls cost a tenth of PyTorch's
        advantages[t] = advantage = deltas[t] + decay[t] * advantage
    advantages = torch.from_numpy(advantages)
    return advantages.to(rewards.dtype), (advantages + values).to(rewards.dtype)


def ppo_loss(agent, minibatch, args):
    """PPO's loss of a minibatch (a scalar to differentiate) and its metrics (a dict of detached scalars)."""
    value, values = agent.value(minibatch["obs"]), minibatch["values"]
    advantages, returns = minibatch["advantages"], minibatch["returns"]
    if args.norm_adv:
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)

    mean, actions = agent.mean(minibatch["obs"]), minibatch["actions"]
    log_ratio = log_prob(actions, mean, agent.log_std) - minibatch["log_probs"]
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - args.clip_coef, 1 + args.clip_coef)
    policy_loss = -torch.min(advantages * ratio, advantages * clipped_ratio).mean()
    ratio_change = ratio - 1

    value_loss = (value - returns).square()
    if args.clip_vloss:
        clipped_value = values + (value - values).clamp(-args.clip_coef, args.clip_coef)
        value_loss = torch.max(value_loss, (clipped_value - returns).square())
    value_loss = 0.5 * value_loss.mean()

    entropy = (agent.log_std.float() + 0.5 * math.log(2 * math.pi * math.e)).sum()
    loss = policy_loss - args.ent_coef * entropy + args.vf_coef * value_loss
    metrics = {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "losses/approx_kl": (ratio_change.float() - log_ratio.float()).mean(),
        "losses/clipfrac": (ratio_change.abs() > args.clip_coef).float().mean(),
    }
    return loss, {name: metric.detach() for name, metric in metrics.items()}


def ppo_gradient(agent, minibatch, args, loss_scale):  # AMP
    """The gradient of PPO's loss in the flat parameters, the scalar to clip it with, the metrics: what torch.compile is given."""
    loss, metrics = ppo_loss(agent, minibatch, args)
    loss = loss * loss_scale  # AMP: keeps small gradients out of FP16's subnormals
    gradient = torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, list(agent.parameters()))])
    metrics["numerics/grad_norm"] = grad_norm = gradient.norm() / loss_scale
    clip_coef = (args.max_grad_norm / (grad_norm + 1e-6)).clamp(max=1)
    return gradient, clip_coef, metrics


def update_minibatch(agent, optimizer, scaler, minibatch, args, gradient_function=ppo_gradient):  # AMP
    """One complete update: loss, gradient, global norm, clipping, optimizer. Returns the metrics, without synchronising.

    minibatch: rows of the batch that `rollout` returns. A gradient that is not finite changes nothing.
    """
    theta = optimizer.param_groups[0]["params"][0]
    # AMP: the loss is scaled, the gradient unscaled before it is clipped
    loss_scale = scaler.scale(torch.ones((), device=theta.device))
    theta.grad, clip_coef, metrics = gradient_function(agent, minibatch, args, loss_scale)
    scaler.unscale_(optimizer)
    theta.grad *= clip_coef
    optimizer.found_inf = (~metrics["numerics/grad_norm"].isfinite()).float()  # where this is 1, fused Adam changes nothing
    scaler.step(optimizer)  # AMP: where the gradient is not finite it is skipped, and the scale halved
    scaler.update()
    metrics["numerics/loss_scale"] = loss_scale
    return metrics


class CudaGraph:
    """update(minibatch) as one CUDA graph: a launch in place of one for each of its operations.

    The first three run as they are, on a side stream, as capturing demands; the fourth is captured, and replayed from then on.
    What changes from one to the next has to be in tensors that stay in their place, the learning rate too.
    """

    def __init__(self, update):
        self.update, self.stream, self.graph, self.calls, self.minibatch = update, torch.cuda.Stream(), None, 0, None

    def __call__(self, minibatch):
        if self.minibatch is None:
            self.minibatch = {name: torch.empty_like(tensor) for name, tensor in minibatch.items()}
        torch._foreach_copy_(list(self.minibatch.values()), list(minibatch.values()))
        self.calls += 1
        if self.calls <= 3:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream), warnings.catch_warnings(action="ignore"):  # Adam's, that it is not captured yet
                metrics = self.update(self.minibatch)
            torch.cuda.current_stream().wait_stream(self.stream)
            return metrics
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                metrics = self.update(self.minibatch)
                self.names, self.values = list(metrics), torch.stack([metric.float() for metric in metrics.values()])
        self.graph.replay()
        return dict(zip(self.names, self.values.clone()))


def grid_metrics(optimizer, before):
    """What the number format took from one update. before: a copy of the flat parameters from before it."""
    theta = optimizer.param_groups[0]["params"][0]
    pending = optimizer.state[theta]["exp_avg"] != 0  # Adam moves these, if the grid lets it
    second_moment = optimizer.state[theta]["exp_avg_sq"]
    return {
        "numerics/swallowed_updates": ((pending & (theta == before)).sum() / pending.sum().clamp(min=1)).item(),
        "numerics/zero_second_moments": (second_moment == 0).float().mean().item(),
    }


@torch.no_grad()
def evaluate(agent, normalizer, args, episodes, record=False):
    """Returns (NaN if an observation is not finite) and lengths (episodes,) of the mean action; one seed each, no learning."""
    agent, envs = copy.deepcopy(agent).cpu(), make_envs(args, episodes, record)
    obs = np.stack([env.reset(seed=args.seed + 10_000 + i)[0] for i, env in enumerate(envs)])
    returns, lengths, running = np.zeros(episodes), np.zeros(episodes, int), list(range(episodes))
    while running:
        mean = agent.mean(torch.as_tensor(normalizer.normalize(obs)).to(agent.log_std))
        actions = env_actions(mean, envs[0].action_space)
        for i in running:
            envs[i].send(actions[i])
        for i in running.copy():
            obs[i], reward, terminated, truncated, _ = envs[i].receive()
            returns[i] += reward if math.isfinite(np.add.reduce(obs[i])) else math.nan
            lengths[i] += 1
            if terminated or truncated or math.isnan(returns[i]) or lengths[i] == 10_000:  # for tasks without time limit
                running.remove(i)
                envs[i].close()
    return returns, lengths


# PPO ends here. What follows keeps a run: arguments that cannot be trained with, environments that can be brought back to a state
# or work side by side, saved models, checkpoints; and `main`, which ties all together.


def fail(message):
    """Prints one line and exits with status 2, which is how a bad argument ends a run before any work."""
    print(f"{os.path.basename(__file__)}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def check(args):
    """Ends the program through `fail` if an argument cannot be worked with; creates the folder of a run if all can."""
    at_least_1 = "total_timesteps num_envs num_steps num_minibatches update_epochs eval_every eval_episodes checkpoint_every"
    for names, valid, meaning in (
        (at_least_1, lambda x: x >= 1, "at least 1"),
        ("learning_rate max_grad_norm", lambda x: 0 < x < math.inf, "positive and finite"),
        ("ent_coef vf_coef", lambda x: 0 <= x < math.inf, "zero or more and finite"),
        ("gamma gae_lambda", lambda x: 0 <= x <= 1, "between 0 and 1"),
        ("clip_coef", lambda x: 0 < x < 1, "between 0 and 1, exclusive"),
        ("target_kl", lambda x: x is None or 0 < x < math.inf, "positive and finite, or left out"),
        ("seed", lambda x: 0 <= x < 2**32, "between 0 and 4294967295"),
    ):
        for name in names.split():
            if not valid(getattr(args, name)):
                fail(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be {meaning}")
    if args.batch_size % args.num_minibatches:
        fail(f"--num-minibatches {args.num_minibatches} must divide num_envs * num_steps = {args.batch_size}")
    if args.norm_adv and args.minibatch_size < 2:
        fail("--num-minibatches leaves one sample a minibatch, which --norm-adv cannot normalise; lower it or use --no-norm-adv")
    if args.num_iterations < 1:
        fail(f"--total-timesteps {args.total_timesteps} is less than one rollout, num_envs * num_steps = {args.batch_size}")
    if args.capture_video and importlib.util.find_spec("moviepy") is None:
        fail("--capture-video needs moviepy; install it with: pip install moviepy")
    if args.track and importlib.util.find_spec("wandb") is None:
        fail("--track needs wandb; install it with: pip install wandb")
    if "--cuda" in sys.argv and not torch.cuda.is_available():
        fail("--cuda: PyTorch finds no CUDA device here; leave the flag out to train on the CPU")
    try:
        env = make_env(args)
    except Exception as error:  # whatever the environment's own code raises
        fail(f"--env-id {args.env_id}: {error}")
    if not all(isinstance(space, gym.spaces.Box) for space in (env.action_space, env.observation_space)):
        fail(f"--env-id {args.env_id} has {env.observation_space} and {env.action_space}; choose one with Box actions")
    env.close()
    if args.capture_video:
        if sys.platform == "linux" and "DISPLAY" not in os.environ:
            os.environ.setdefault("MUJOCO_GL", "egl")  # MuJoCo's way to render without a display
        try:
            env = gym.make(args.env_id, render_mode="rgb_array")
            env.reset()
            env.render()
            env.close()
        except Exception as error:  # whatever the graphics library raises
            fail(f"--capture-video: {args.env_id} cannot be rendered here ({type(error).__name__}: {error}); leave it out")
    if args.evaluate:
        return
    try:
        os.makedirs(args.run_dir, exist_ok=bool(args.resume))
    except FileExistsError:
        fail(f"--run-name: {args.run_dir} exists already; choose another name or remove it")
    except OSError as error:
        fail(f"--runs-dir, --run-name: cannot create {args.run_dir} ({error.strerror}); choose a folder you can write to")


class Replay(gym.Wrapper):
    """Knows what led to an environment's state, whatever that consists of: the generator at the last reset, the actions since."""

    def bit_generator(self):
        """Of the environment's random numbers: of a NumPy Generator or, as dm_control has it, of the older RandomState."""
        random = self.unwrapped.np_random
        return getattr(random, "bit_generator", None) or getattr(random, "_bit_generator", None)

    def reset(self, **options):
        bits = self.bit_generator()
        self.options, self.generator = options, bits and json.loads(json.dumps(bits.state, default=np.ndarray.tolist))
        self.actions, self.dtype = bytearray(), np.float32
        self.obs, info = super().reset(**options)
        return self.obs, info

    def send(self, action):
        self.action = action

    def receive(self):
        return self.step(self.action)

    def step(self, action):
        self.actions += action.tobytes()
        self.dtype = action.dtype
        self.obs, *rest = super().step(action)
        return self.obs, *rest

    def history(self):
        actions = np.frombuffer(self.actions, self.dtype).copy()
        return dict(options=self.options, generator=self.generator, actions=actions, obs=self.obs)

    def replay(self, history):
        """Brings a new environment to the state that another one had. Raises ValueError if it comes to another one."""
        if history["generator"]:
            self.bit_generator().state = history["generator"]
        elif "seed" not in history["options"]:
            raise ValueError("the environment does not let its random numbers be set")
        self.reset(**history["options"])
        for action in history["actions"].reshape(-1, *self.action_space.shape):
            self.step(action)
        if not np.array_equal(self.obs, history["obs"], equal_nan=True):
            raise ValueError("the environment does not repeat itself")


class AsyncEnv:
    """An environment of `make_env` in a process of its own, which works between `send` and `receive`."""

    def __init__(self, args):
        make, mode = functools.partial(make_env, args), gym.vector.AutoresetMode.DISABLED
        handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as the process keeps it: Ctrl-C is for the trainer
        self.envs = gym.vector.AsyncVectorEnv([make], autoreset_mode=mode)
        signal.signal(signal.SIGINT, handler)
        self.observation_space, self.action_space = self.envs.single_observation_space, self.envs.single_action_space
        self.close, self.replay = self.envs.close, functools.partial(self.envs.call, "replay")

    def reset(self, **options):
        obs, info = self.envs.reset(**options)
        return obs[0], info

    def send(self, action):
        self.envs.step_async(action[None])

    def receive(self):
        *results, info = self.envs.step_wait()
        episode = {name: values[0] for name, values in info.get("episode", {}).items()}
        return *(values[0] for values in results), dict(episode=episode)

    def history(self):
        return self.envs.call("history")[0]


def save_model(path, agent, normalizer):
    saved = dict(agent=agent.state_dict(), obs_statistics=normalizer.obs.state_dict())
    torch.save(dict(saved, amp_dtype=str(agent.amp_dtype).removeprefix("torch.")), path)  # AMP: acts in it


def load_model(path):
    """The agent, on the CPU, and the normalizer with the training statistics, from a saved model.pt."""
    saved = torch.load(path, map_location="cpu", weights_only=True)
    weights = saved["agent"]
    width, obs_dim = weights["actor_mean.0.weight"].shape
    agent = Agent(obs_dim, len(weights["log_std"]), width, saved["amp_dtype"])  # AMP
    agent.to(weights["log_std"].dtype).load_state_dict(weights)
    normalizer = Normalizer(obs_dim)
    normalizer.obs.load_state_dict(saved["obs_statistics"])
    return agent, normalizer


def evaluate_model(args):
    """Prints what the saved model of a run returns on its task: after training, what its last evaluation found."""
    try:
        with open(os.path.join(args.evaluate, "args.json")) as file:
            saved = json.load(file)
        args.env_id, args.seed, args.run_dir = saved["env_id"], saved["seed"], os.path.join(args.evaluate, "evaluation")
        agent, normalizer = load_model(os.path.join(args.evaluate, "model.pt"))
    except Exception as error:  # whatever these files may be
        fail(f"--evaluate {args.evaluate}: no model of this trainer there ({type(error).__name__}: {error})")
    check(args)
    returns, lengths = evaluate(agent, normalizer, args, args.eval_episodes, record=args.capture_video)
    print(
        f"{args.env_id}: return {returns.mean():.2f} +- {returns.std():.2f}, length {lengths.mean():.1f}, {len(returns)} episodes"
    )


def training_state(parts, normalizer, envs, next_obs):
    """A copy of all that the iterations to come depend on, as tensors, numbers and lists: loading it back runs no code."""
    numpy_generator = [part.tolist() if isinstance(part, np.ndarray) else part for part in np.random.get_state()]
    return dict(
        parts={name: copy.deepcopy(part.state_dict()) for name, part in parts.items()},
        discounted_returns=[float(discounted_return) for discounted_return in normalizer.discounted_returns],
        next_obs=torch.tensor(next_obs),
        envs=[{k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in env.history().items()} for env in envs],
        generators=[random.getstate(), numpy_generator, torch.get_rng_state(), torch.cuda.get_rng_state_all()],
    )


def restore(state, parts, normalizer, envs, next_obs):
    """Brings all of these, made anew, to the state that `training_state` found them in."""
    for name, part in parts.items():
        part.load_state_dict(state["parts"][name])
    normalizer.discounted_returns = state["discounted_returns"]
    next_obs[:] = state["next_obs"].numpy()
    for env, history in zip(envs, state["envs"]):
        env.replay({k: v.numpy() if isinstance(v, torch.Tensor) else v for k, v in history.items()})
    setters = random.setstate, np.random.set_state, torch.set_rng_state, torch.cuda.set_rng_state_all
    for setter, generator in zip(setters, state["generators"]):
        setter(generator)


def save_checkpoint(run_dir, checkpoint):
    """Leaves a whole checkpoint.pt at any moment, with its SHA-256 in front; the one before it becomes checkpoint.previous.pt."""
    path, file = os.path.join(run_dir, "checkpoint.pt"), io.BytesIO()
    torch.save(checkpoint, file)
    with open(path + ".new", "wb") as new:
        new.write(hashlib.sha256(file.getbuffer()).digest() + file.getbuffer())
        new.flush()
        os.fsync(new.fileno())
    if os.path.exists(path):
        shutil.copyfile(path, os.path.join(run_dir, "checkpoint.previous.pt"))
    os.replace(path + ".new", path)


def load_checkpoint(args, made_by):
    """The arguments and the checkpoint of the run that --resume names; ends through `fail` if this script cannot continue it."""
    path, previous = (os.path.join(args.resume, name) for name in ("checkpoint.pt", "checkpoint.previous.pt"))
    try:
        with open(path, "rb") as file:
            digest, content = file.read(32), file.read()
        if hashlib.sha256(content).digest() != digest:
            raise ValueError
        checkpoint = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except OSError as error:
        fail(f"--resume {args.resume}: cannot read {path} ({error.strerror}); give the folder of a run that has a checkpoint")
    except (ValueError, pickle.UnpicklingError):
        remedy = f"rename {previous}, which is older, to it" if os.path.exists(previous) else "start the run anew"
        fail(f"--resume {args.resume}: {path} is damaged; {remedy}")
    for name, value in checkpoint["made_by"].items():
        if value != made_by[name]:
            fail(f"--resume {args.resume}: the run was made with {name} {value}, here it is {made_by[name]}; use the same")
    if asdict(args) != asdict(Args(resume=args.resume, run_name=args.run_name)):
        fail(f"--resume {args.resume} brings the arguments of that run; leave out all others")
    folder = dict(zip(("runs_dir", "run_name"), os.path.split(os.path.abspath(args.resume))))
    try:
        return Args(**checkpoint["args"] | folder | dict(resume=args.resume)), checkpoint
    except TypeError:
        fail(f"--resume {args.resume}: the run was made with another version of this trainer, which has other arguments")


def compile_pays(args, device):
    """Whether there is a compiler for the device, and the run has enough updates to win back its half a minute."""
    updates = args.num_iterations * args.update_epochs * args.num_minibatches
    cpp, triton = any(map(shutil.which, ("g++", "clang++", "c++"))), importlib.util.find_spec("triton") is not None
    return args.compile and updates >= 20_000 and (cpp if device.type == "cpu" else triton)


def describe(args, device):
    """The arguments, and what else a run needs to be repeated."""
    here = os.path.dirname(os.path.abspath(__file__))
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True).stdout.strip()
    versions = dict(python=platform.python_version(), torch=torch.__version__, numpy=np.__version__, gymnasium=gym.__version__)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return dict(asdict(args), device=f"{device.type} ({name})", versions=versions, commit=commit or None)


def main(args):
    torch.set_num_threads(1)  # networks this small lose more to a second thread than they gain
    if args.evaluate:
        return evaluate_model(args)
    device = torch.device("cuda" if args.cuda and torch.cuda.is_available() else "cpu")
    made_by = dict(
        trainer=os.path.basename(__file__), device=device.type, torch=str(torch.__version__), gymnasium=gym.__version__
    )
    args, checkpoint = load_checkpoint(args, made_by) if args.resume else (args, dict(iteration=0, eval_size=0))
    check(args)
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    torch.backends.cudnn.deterministic = args.torch_deterministic
    envs = make_envs(args, args.num_envs, args.capture_video)
    obs_dim, action_dim = envs[0].observation_space.shape[0], math.prod(envs[0].action_space.shape)
    agent = Agent(obs_dim, action_dim, amp_dtype=args.amp_dtype).to(device)  # AMP
    optimizer = torch.optim.Adam([flatten(agent)], lr=args.learning_rate, eps=1e-5, fused=True)
    scaler = torch.amp.GradScaler(device.type, enabled=args.amp_dtype == "float16")  # AMP: BF16 needs no scaling
    normalizer = Normalizer(obs_dim, args.num_envs, args.gamma)
    next_obs, status, first = np.zeros((args.num_envs, obs_dim)), {}, checkpoint["iteration"]
    parts = dict(agent=agent, optimizer=optimizer, obs=normalizer.obs, returns=normalizer.returns, scaler=scaler)  # AMP: scaler
    learner = parts, normalizer, envs, next_obs
    try:
        if args.resume:
            restore(checkpoint["state"], *learner)
        else:
            next_obs[:] = [normalizer.observe(env.reset(seed=args.seed + i)[0]) for i, env in enumerate(envs)]
    except (FloatingPointError, KeyError, RuntimeError, ValueError) as error:
        fail(f"--{'resume' if args.resume else 'env-id'}: {args.env_id} cannot start: {error}")

    gradient_function = ppo_gradient
    if compile_pays(args, device):
        torch._dynamo.config.suppress_errors = True  # what cannot be compiled runs as it is
        torch._dynamo.config.trace_autograd_ops = True  # forward and backward in one graph
        # the compiler may not keep chains of 16-bit operations in FP32; C++ calls what it makes of them a tenth faster
        exact = {"emulate_precision_casts": True, "cpp_wrapper": device.type == "cpu"}
        gradient_function = torch.compile(ppo_gradient, options=exact)
    update = functools.partial(update_minibatch, agent, optimizer, scaler, args=args, gradient_function=gradient_function)  # AMP
    if args.cuda_graph and device.type == "cuda":
        group = optimizer.param_groups[0]
        group["lr"], group["capturable"] = torch.tensor(float(group["lr"]), device=device), True
        update = CudaGraph(update)
    how = "compiled" if gradient_function is not ppo_gradient else "eager", "as CUDA graphs" * isinstance(update, CudaGraph)
    print(f"{args.run_dir}: training on {device}, {' '.join(how)}")

    if args.track:
        import wandb

        names = dict(project=args.wandb_project_name, entity=args.wandb_entity, name=args.run_name)
        wandb.init(**names, config=asdict(args), sync_tensorboard=True, dir=args.run_dir)
    writer = SummaryWriter(args.run_dir, flush_secs=10, purge_step=checkpoint["iteration"] * args.batch_size + 1)
    if not args.resume:
        with open(os.path.join(args.run_dir, "args.json"), "w") as file:
            json.dump(describe(args, device), file, indent=1)
        writer.add_text("hyperparameters", "|param|value|\n|-|-|\n" + "\n".join(f"|{k}|{v}|" for k, v in asdict(args).items()))
    eval_file = open(os.path.join(args.run_dir, "eval.csv"), "a", newline="")
    eval_file.seek(eval_file.truncate(checkpoint["eval_size"]))
    eval_csv = csv.writer(eval_file)

    def log_evaluation(global_step):
        returns, _ = evaluate(agent, normalizer, args, args.eval_episodes)
        eval_csv.writerow([global_step, returns.mean(), returns.std(), len(returns)])
        eval_file.flush()
        writer.add_scalar("eval/mean_return", returns.mean(), global_step)
        return returns.mean()

    def checkpoint_of(iteration):
        made = dict(made_by=made_by, args=asdict(args), iteration=iteration, eval_size=eval_file.tell())
        return dict(made, state=training_state(*learner))

    interrupted, failure = [], None
    signal.signal(signal.SIGINT, lambda *_: interrupted.append(signal.signal(signal.SIGINT, signal.default_int_handler)))
    if not args.resume:
        eval_csv.writerow(["global_step", "mean_return", "std_return", "episodes"])
        status["eval"] = log_evaluation(0)
    iterations = range(first + 1, args.num_iterations + 1)
    progress = tqdm(iterations, unit="iteration", initial=first, total=args.num_iterations, disable=args.quiet)
    checkpoint = checkpoint_of(first)
    try:
        for iteration in progress:
            if args.anneal_lr:
                lr = args.learning_rate * (1 - (iteration - 1) / args.num_iterations)
                for group in optimizer.param_groups:
                    group["lr"] = group["lr"].fill_(lr) if isinstance(group["lr"], torch.Tensor) else lr
            start = time.perf_counter()
            batch, episodes = rollout(agent, envs, normalizer, next_obs, args)
            rollout_time = time.perf_counter() - start

            metrics = []
            for _ in range(args.update_epochs):
                permutation = torch.randperm(args.batch_size, device=device)
                shuffled = {name: tensor[permutation] for name, tensor in batch.items()}
                for end in range(args.minibatch_size, args.batch_size + 1, args.minibatch_size):
                    if end == args.batch_size:
                        before = optimizer.param_groups[0]["params"][0].detach().clone()
                    minibatch = {name: tensor[end - args.minibatch_size : end] for name, tensor in shuffled.items()}
                    metrics.append(update(minibatch))
                if args.target_kl is not None and metrics[-1]["losses/approx_kl"] > args.target_kl:
                    break
            metrics = {name: torch.stack([metric[name] for metric in metrics]).float().cpu() for name in metrics[0]}
            seconds = time.perf_counter() - start

            global_step = iteration * args.batch_size
            for step, episode_return, length in episodes:
                episode_step = global_step - args.batch_size + (step + 1) * args.num_envs
                writer.add_scalar("charts/episodic_return", episode_return, episode_step)
                writer.add_scalar("charts/episodic_length", length, episode_step)
                status["return"] = episode_return
            scalars = {name: values.mean().item() for name, values in metrics.items()}
            norms = metrics["numerics/grad_norm"]
            scalars["numerics/grad_norm_clipped"] = norms.clamp(max=args.max_grad_norm).mean().item()
            scalars["numerics/skipped_updates"] = (~norms.isfinite()).sum().item()
            if not norms.isfinite().any():
                progress.write(f"warning: no gradient of iteration {iteration} was finite, so every update was skipped")
            scalars |= grid_metrics(optimizer, before)
            returns = batch["returns"].float()
            scalars["losses/explained_variance"] = (1 - (returns - batch["values"]).var() / returns.var()).item()
            scalars["charts/learning_rate"] = float(optimizer.param_groups[0]["lr"])
            scalars["charts/SPS"] = args.batch_size / seconds
            scalars["time/rollout_s"], scalars["time/update_s"] = rollout_time, seconds - rollout_time
            for name, scalar in scalars.items():
                writer.add_scalar(name, scalar, global_step)
            if iteration % args.eval_every == 0 or iteration == args.num_iterations:
                status["eval"] = log_evaluation(global_step)
            status["SPS"] = args.batch_size / seconds
            status["skipped"] = status.get("skipped", 0) + scalars["numerics/skipped_updates"]
            progress.set_postfix({name: f"{value:.0f}" for name, value in status.items()})
            checkpoint = checkpoint_of(iteration)
            if iteration % args.checkpoint_every == 0 or iteration == args.num_iterations or interrupted:
                writer.flush()
                save_checkpoint(args.run_dir, checkpoint)
            if interrupted:
                progress.write(f"interrupted after {global_step} steps; what was learned is kept in {args.run_dir}")
                break
    except Exception as error:  # a number that is not finite, or whatever the environment's own code raises
        failure = error
        save_checkpoint(args.run_dir, checkpoint)

    if args.save_model:
        save_model(os.path.join(args.run_dir, "model.pt"), agent, normalizer)
    for env in envs:
        env.close()
    writer.close()
    eval_file.close()
    if isinstance(failure, FloatingPointError):
        kept = f"what was learned before it is kept in {args.run_dir}"
        sys.exit(f"{os.path.basename(__file__)}: error: {args.env_id}: {failure}; {kept}")
    if failure:
        raise failure


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
