"""Numerical sensitivity (paper, section 4.1): where FP16 loses PPO's information, and what each module keeps of it.

Trains FP32 PPO on Hopper for a while, then goes on for one iteration while every stage of each update is computed again from the
same data: in FP64 (the reference), in FP32, naively in FP16, and in FP16 with the module that protects the stage. Writes
studies/results/sensitivity.csv; `python studies/report.py` makes the table of it. Takes about 3 minutes on one core.

    python studies/sensitivity.py
"""

import csv
import os
import sys
from dataclasses import dataclass

import numpy as np
import torch
import tyro

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import ppo_fp16  # noqa: E402
import ppo_fp32  # noqa: E402
from numerics import gaussian_log_ratio, rounded_sum, scaled_norm  # noqa: E402


@dataclass
class Args:
    env_id: str = "Hopper-v5"  # task
    seed: int = 1  # seed
    iterations: int = 40  # of training before the one that is measured, and the stretch that the optimizers are fed
    stress_inputs: int = 24  # large gradients given to the norms


def stage_errors(agent, minibatch, args):
    """{(stage, variant): error} of a minibatch's advantage statistics, value loss, log-ratio and clip decisions, against FP64."""
    errors = {}
    with torch.no_grad():
        mean, value, log_std = agent.mean(minibatch["obs"]), agent.value(minibatch["obs"]), agent.log_std
    half = {name: tensor.half() for name, tensor in minibatch.items()}
    wide = {name: tensor.double() for name, tensor in half.items()}  # the reference has the same FP16 data, and no rounding after

    def relative(stage, exact, **variants):
        errors.update({(stage, name): abs(x.double() / exact - 1).item() for name, x in variants.items()})

    x, x16 = wide["advantages"], half["advantages"]
    naive_mean = rounded_sum(x16) / len(x16)
    naive_std = (rounded_sum((x16 - naive_mean).square()) / (len(x16) - 1)).sqrt()
    relative("advantage std, relative error", x.std(), naive=naive_std, protected=x16.float().std(), fp32=x.float().std())
    target, v16 = half["returns"], value.half()
    exact = (v16.double() - wide["returns"]).square().mean()
    naive = rounded_sum((v16 - target).square()) / len(target)
    kept = (v16.float() - target.float()).square().mean()
    relative("value loss, relative error", exact, naive=naive, protected=kept, fp32=kept)

    a, m, m0 = half["actions"], mean.half(), half["means"]
    s, s0 = log_std.detach().half(), half["old_log_std"][0]
    exact = ppo_fp32.log_prob(a.double(), m.double(), s.double()) - ppo_fp32.log_prob(a.double(), m0.double(), s0.double())
    variants = dict(
        naive=ppo_fp32.log_prob(a, m, s) - ppo_fp32.log_prob(a, m0, s0),
        protected=gaussian_log_ratio(a, m, s, m0, s0),
        fp32=ppo_fp32.log_prob(a.float(), m.float(), s.float()) - ppo_fp32.log_prob(a.float(), m0.float(), s0.float()),
    )
    outside = (exact.expm1().abs() > args.clip_coef).double()
    for name, log_ratio in variants.items():
        ratio_change = log_ratio.exp() - 1 if name == "naive" else log_ratio.expm1()
        errors["log-ratio, mean absolute error", name] = (log_ratio.double() - exact).abs().mean().item()
        errors["clip decisions that differ", name] = (
            ((ratio_change.abs() > args.clip_coef) != outside.bool()).double().mean().item()
        )
    return errors


class OptimizerProbe:
    """Feeds one stream of clipped gradients to FP32 Adam, naive FP16 Adam and SHARP, and compares the updates they would make."""

    def __init__(self, agent, args16):
        layout = ppo_fp16.make_optimizer(
            ppo_fp16.Agent(agent.actor_mean[0].in_features, len(agent.log_std)).half(), args16
        ).layout
        size = sum(parameter.numel() for parameter in agent.parameters())
        thetas = {
            name: torch.nn.Parameter(torch.zeros(size, dtype=dtype))
            for name, dtype in (("fp32", torch.float32), ("naive", torch.float16), ("protected", torch.float16))
        }
        self.optimizers = dict(
            fp32=torch.optim.Adam([thetas["fp32"]], lr=3e-4, eps=1e-5, fused=True),
            naive=ppo_fp16.NaiveAdam([thetas["naive"]], lr=3e-4, eps=1e-5, foreach=False),
            protected=ppo_fp16.SHARP([thetas["protected"]], layout, lr=3e-4, eps=1e-5),
        )
        self.ratios = {name: [] for name in thetas}

    def feed(self, gradient):
        norms = {}
        for name, optimizer in self.optimizers.items():
            (theta,) = optimizer.param_groups[0]["params"]
            theta.data.zero_()  # so that what it becomes is the update, unspoilt by the grid of a weight
            theta.grad = gradient.to(theta.dtype)
            optimizer.step(**({} if name == "fp32" else dict(clip_coef=torch.ones(()))))
            norms[name] = theta.detach().double().norm().item()
        for name, norm in norms.items():
            self.ratios[name].append(norm / norms["fp32"])

    def results(self):
        results = {}
        for name, optimizer in self.optimizers.items():
            state = optimizer.state[optimizer.param_groups[0]["params"][0]]
            second = state["root_exp_avg_sq" if name == "protected" else "exp_avg_sq"]
            results["second moments that are zero", name] = (second == 0).double().mean().item()
            results["update magnitude over FP32 Adam's, largest", name] = max(self.ratios[name])
        return results


def stress_norms(count, seed):
    """Share of large gradients, each representable in FP16, whose norm comes out finite."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [
        (torch.randn(10_000, generator=generator) * 10 ** (2.5 + 2 * i / count)).clamp(-65504, 65504).half() for i in range(count)
    ]
    naive = [rounded_sum(x.square()).sqrt() for x in inputs]
    finite = {"naive": naive, "protected": [scaled_norm([x]) for x in inputs], "fp32": [x.float().norm() for x in inputs]}
    return {
        ("large-gradient norms that are finite", name): np.mean([x.isfinite().item() for x in xs]) for name, xs in finite.items()
    }


def main(options):
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    args = ppo_fp32.Args(env_id=options.env_id, seed=options.seed)
    envs = [ppo_fp32.make_env(args)]
    agent = ppo_fp32.Agent(envs[0].observation_space.shape[0], envs[0].action_space.shape[0])
    optimizer = torch.optim.Adam([ppo_fp32.flatten(agent)], lr=args.learning_rate, eps=1e-5, fused=True)
    normalizer = ppo_fp32.Normalizer(envs[0].observation_space.shape[0])
    next_obs = np.stack([normalizer.observe(envs[0].reset(seed=options.seed)[0])])
    probe, errors = OptimizerProbe(agent, ppo_fp16.Args()), []
    for iteration in range(options.iterations + 1):
        batch, _ = ppo_fp32.rollout(agent, envs, normalizer, next_obs, args)
        with torch.no_grad():
            behaviour = dict(means=agent.mean(batch["obs"]), old_log_std=agent.log_std.clone().expand(args.batch_size, -1))
        for _ in range(args.update_epochs):
            for rows in torch.randperm(args.batch_size).split(args.minibatch_size):
                minibatch = {name: tensor[rows] for name, tensor in batch.items()}
                if iteration == options.iterations:
                    errors.append(stage_errors(agent, minibatch | {name: x[rows] for name, x in behaviour.items()}, args))
                ppo_fp32.update_minibatch(agent, optimizer, minibatch, args)
                if iteration < options.iterations:
                    probe.feed(optimizer.param_groups[0]["params"][0].grad)
    results = {key: np.mean([error[key] for error in errors]) for key in errors[0]}
    results |= stress_norms(options.stress_inputs, options.seed) | probe.results()
    with open(os.path.join(ROOT, "studies", "results", "sensitivity.csv"), "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["stage", "variant", "value"])
        for (stage, variant), value in results.items():
            writer.writerow([stage, variant, f"{value:.6g}"])
            print(f"{stage:45} {variant:10} {value:.4g}")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
