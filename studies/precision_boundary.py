"""Precision boundary (paper, section 4.5): PPO-FP16 with BF16 for FP16, and with fewer mantissa bits than FP16 has.

Native-BF16: PPO-FP16 with BF16 in place of FP16, its three modules as they are, on the tasks and seeds of learning.py, with whose
PPO-FP16 it is compared. In the paper it keeps 10.7 to 79.6% of the return AUC. On the tasks of writeback.py it is trained there,
as "BF16, log_std".

E5M10 to E5M5: five exponent bits, as FP16 has, and 10 to 5 mantissa bits, emulated by patched.py, on HalfCheetah-v5 with two
seeds and 100,352 steps. E5M10 is FP16. In the paper E5M9 still learns, E5M8 and E5M7 return less and vary more between seeds,
E5M6 and E5M5 learn little.

Beyond the paper, the same with SHARP's root second moment w in FP32. Where gradients vanish w decays by 5e-4 of itself a step,
and half the spacing of a format is 2^-(bits + 2) to 2^-(bits + 1) of a number: at most 4.9e-4 with FP16's 10 mantissa bits, so
that w shrinks, and at least that with 9, so that it stays where it is. If that is what ends the learning, these learn.

    python studies/precision_boundary.py --workers 2      # about 3.5 hours of one core, one of them for E5M10 to E5M5
    python studies/precision_boundary.py --report
"""

from dataclasses import dataclass

import tyro
import writeback
from comparison import return_auc
from learning import ENV_IDS
from runner import Options, Run, load, markdown, mean_and_range, run_study

BITS = (10, 9, 8, 7, 6, 5)
ROOTS = {"": (), ", w in FP32": ("--fp32-root",)}  # of SHARP's root second moment, what follows a format's name, and the flags
PAPER = {
    "E5M9": "learns",
    "E5M8": "returns less, varies more",
    "E5M7": "returns less, varies more",
    "E5M6": "learns little",
    "E5M5": "learns little",
}


@dataclass
class Args(Options):
    env_ids: tuple[str, ...] = tuple(env_id for env_id in ENV_IDS if env_id not in writeback.ENV_IDS)  # tasks of Native-BF16
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # seeds of Native-BF16; the first two are those of E5M10 to E5M5
    total_timesteps: int = 512_000  # environment steps of each run of Native-BF16
    emulated_timesteps: int = 100_352  # environment steps of each run of E5M10 to E5M5


def make_runs(args):
    """E5M10 to E5M5 first, which are short, then these with w in FP32; each part seed by seed."""
    length = ("--total-timesteps", str(args.emulated_timesteps), "--eval-every", "5")
    emulated = [
        Run(f"E5M{bits}{name}", "studies/patched.py", ("--mantissa-bits", str(bits), *flags, *length), "HalfCheetah-v5", seed)
        for name, flags in ROOTS.items()
        for seed in args.seeds[:2]
        for bits in BITS
    ]
    flags = ("--dtype", "bfloat16", "--total-timesteps", str(args.total_timesteps))
    return emulated + [Run("Native-BF16", "ppo_fp16.py", flags, env_id, seed) for seed in args.seeds for env_id in args.env_ids]


def table(evaluations, runs):
    """Two tables: Native-BF16 against PPO-FP16 on the seeds of a task that both have finished; E5M10 to E5M5."""
    curves = evaluations.groupby(["env_id", "seed", "method"], sort=False)[["global_step", "mean_return"]]
    formats = [f"E5M{bits}{root}" for root in ROOTS for bits in BITS]
    aucs = curves.apply(return_auc).unstack().reindex(columns=["PPO-FP16", "Native-BF16", *formats])
    rows = []
    for env_id, pairs in aucs[["PPO-FP16", "Native-BF16"]].dropna().groupby("env_id", sort=False):
        kept = f"{100 * pairs['Native-BF16'].mean() / pairs['PPO-FP16'].mean():.1f}%"
        rows.append([env_id, len(pairs), mean_and_range(pairs["PPO-FP16"]), mean_and_range(pairs["Native-BF16"]), kept])
    columns = ["task", "seeds", "return AUC of PPO-FP16", "return AUC of Native-BF16", "kept (paper: 10.7 to 79.6%)"]
    native = markdown(columns, rows)
    rows = []
    for name in formats:
        final = evaluations[evaluations.method == name].groupby("seed").mean_return.last()
        rows.append([name, len(final), mean_and_range(aucs[name].dropna()), mean_and_range(final), PAPER.get(name, "")])
    return native + "\n\n" + markdown(["format", "seeds", "return AUC", "last return", "paper"], rows)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.report:
        print(table(*load("precision_boundary", args.results)))
    else:
        run_study("precision_boundary", make_runs(args), args.workers, args.ray_address, args.results)
