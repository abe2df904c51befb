"""Module ablations (paper, section 4.2): PPO-FP16 with modules taken out of it, and with modules put into naive FP16.

HalfCheetah-v5, three seeds, 151,552 steps. The paper prints a return AUC of 293.3 for naive FP16 with module C, 465.8 with C and
A, and 618.3 with all three; naive FP16, and PPO-FP16 without C, are a Crash. With C and A is the same as without B, so there are
six configurations, and FP32.

A Crash is a run that fails the gate at 20,480 steps. The paper trains anew after its gate; here the gate is a look at the first
20,480 steps of the one run, in which the learning rate anneals over 151,552. A run fails it if

    - a deterministic evaluation returned NaN or infinity, as it does where an action, and so a parameter, is not finite;
    - or two evaluations in a row returned the same to the last digit: they replay the same episodes while the statistics of the
      observations move, so the actions no longer depend on what the policy sees;
    - or from an iteration before the gate to the end of the run every update was skipped for a gradient that is not finite.

A run that passes, and returns NaN or infinity later, has no AUC and is called a Crash too.

    python studies/ablations.py --workers 2      # about 1.5 hours of one core
    python studies/ablations.py --report
"""

from dataclasses import dataclass

import numpy as np
import tyro
from comparison import return_auc
from runner import Options, Run, load, markdown, mean_and_range, run_study

GATE = 20_480
METHODS = {  # trainer, modules that are switched off
    "full": ("ppo_fp16.py", ""),
    "-A": ("ppo_fp16.py", "a"),
    "-B": ("ppo_fp16.py", "b"),
    "-C": ("ppo_fp16.py", "c"),
    "naive": ("ppo_fp16.py", "abc"),
    "+C": ("ppo_fp16.py", "ab"),
    "FP32": ("ppo_fp32.py", ""),
}
PAPER = {"full": "618.3, the highest", "-A": "lower", "-B": "465.8", "-C": "Crash", "naive": "Crash", "+C": "293.3"}


@dataclass
class Args(Options):
    seeds: tuple[int, ...] = (1, 2, 3)  # seeds
    total_timesteps: int = 151_552  # environment steps of each run


def make_runs(args):
    """Seed by seed over all configurations, evaluated every second iteration."""
    length = ("--total-timesteps", str(args.total_timesteps), "--eval-every", "2")
    return [
        Run(method, trainer, (*(f"--no-module-{module}" for module in off), *length), "HalfCheetah-v5", seed)
        for seed in args.seeds
        for method, (trainer, off) in METHODS.items()
    ]


def crashed(curve, skipped_from):
    """Whether a run is a Crash. curve: its evaluations, in order; skipped_from: of its row among the runs, NaN for never."""
    early = curve[curve.global_step <= GATE]
    repeated = (early[["mean_return", "std_return"]].diff() == 0).all(axis=1).any()
    return repeated or skipped_from <= GATE or not np.isfinite(curve.mean_return).all()


def table(evaluations, runs):
    """Return AUC, and mean and standard deviation of the last return over seeds, of every configuration."""
    rows = []
    for method in METHODS:
        curves = [curve for _, curve in evaluations[evaluations.method == method].groupby("seed")]
        if not curves:
            continue
        skipped_from = runs[runs.method == method].set_index("seed").skipped_from
        crashes = sum(crashed(curve, skipped_from[curve.seed.iloc[0]]) for curve in curves)
        final = [curve.mean_return.iloc[-1] for curve in curves]
        cells = [mean_and_range([return_auc(curve) for curve in curves]), f"{np.mean(final):.0f}"]
        cells.append(f"{np.std(final, ddof=1):.0f}" if len(final) > 1 else "")
        name = {"full": "full, or +C+A+B", "-B": "-B, or +C+A"}.get(method, method)
        modules = "" if method == "FP32" else " ".join(module.upper() for module in "abc" if module not in METHODS[method][1])
        row = [name, modules, len(curves), f"{crashes} of {len(curves)}", *(["Crash"] * 3 if crashes else cells)]
        rows.append([*row, PAPER.get(method, "")])
    columns = ["configuration", "modules", "seeds", "crashes", "return AUC", "last return", "its standard deviation"]
    return markdown([*columns, "paper: return AUC"], rows)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.report:
        print(table(*load("ablations", args.results)))
    else:
        run_study("ablations", make_runs(args), args.workers, args.ray_address, args.results)
