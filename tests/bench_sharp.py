"""One step of SHARP on the CPU beside one of PyTorch's fused Adam in FP32, for the trainers' agent on HalfCheetah-v5.

    pip install -r requirements.txt
    python tests/bench_sharp.py                     # two minutes, most of them compiling

One thread. All take turns, 20 steps each, so that a machine whose speed changes changes it for all; what counts is the median
over the turns of each one's time over Adam's. Writes studies/results/bench_sharp.csv; studies/report.py tables it.
"""

import csv
import functools
import os
import sys
import time

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.insert(0, ROOT)
import ppo_fp16  # noqa: E402


def optimizers():
    """Name -> the step of an optimizer that has a gradient; SHARP compiled as ppo_fp16.py does it."""
    steps, args = {}, ppo_fp16.Args(cuda=False)
    for name, dtype in (("fused Adam, FP32", torch.float32), ("SHARP, eager", torch.float16), ("SHARP, compiled", torch.float16)):
        agent = ppo_fp16.Agent(17, 6).to(dtype)
        if dtype == torch.float32:
            optimizer = torch.optim.Adam([ppo_fp16.flatten(agent)], lr=args.learning_rate, eps=1e-5, fused=True)
        else:
            optimizer = ppo_fp16.make_optimizer(agent, args)
        if name == "SHARP, compiled":
            options = {"emulate_precision_casts": True, "cpp_wrapper": True}
            optimizer.update = torch.compile(ppo_fp16.sharp_update, options=options)
        theta = optimizer.param_groups[0]["params"][0]
        theta.grad = 0.01 * torch.randn_like(theta)
        steps[name] = functools.partial(optimizer.step, **({} if dtype == torch.float32 else dict(clip_coef=torch.ones(()))))
    return steps


def main(turns=500, steps=20):
    torch.set_num_threads(1)
    torch.manual_seed(1)
    contenders, rows = optimizers(), []
    for _ in range(10 + turns):
        row = []
        for step in contenders.values():
            start = time.perf_counter()
            for _ in range(steps):
                step()
            row.append(round(1e6 * (time.perf_counter() - start) / steps, 1))
        rows.append(row)
    with open(os.path.join(ROOT, "studies", "results", "bench_sharp.csv"), "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([contenders, *rows[10:]])  # the first ones compiled and warmed up


if __name__ == "__main__":
    main()
