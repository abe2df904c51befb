"""Rebuilds the tables and figures of the README from the raw results, and nothing else.

python studies/report.py            # writes README.md and studies/results/*.png
python studies/report.py --check    # exits with status 1 if a table in README.md is not what the results say
"""

import argparse
import os
import re
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "studies", "results")
METHODS = {"FP32": "tab:gray", "AMP-FP16": "tab:blue", "AMP-BF16": "tab:green", "PPO-FP16": "tab:red"}


def load(study):
    """The evaluations and the runs of a study, as data frames in a fixed order."""
    evaluations = pd.read_csv(os.path.join(RESULTS, f"{study}.csv")).sort_values(["env_id", "method", "seed", "global_step"])
    return evaluations, pd.read_csv(os.path.join(RESULTS, f"{study}_runs.csv"))


def return_auc(run):
    """Trapezoidal integral of the evaluation return over environment steps, over the horizon (paper, section 4.3)."""
    return np.trapezoid(run.mean_return, run.global_step) / run.global_step.iloc[-1]


def learning_table(evaluations, runs):
    """Final return and AUC of every task and method: mean over seeds, and the range."""
    lines = ["| task | method | seeds | final return | return AUC | steps/s |", "|---|---|---|---|---|---|"]
    for env_id, of_env in evaluations.groupby("env_id", sort=False):
        for method in METHODS:
            of_method = of_env[of_env.method == method]
            if of_method.empty:
                continue
            seeds = [run for _, run in of_method.groupby("seed")]
            final = [run.mean_return.iloc[-1] for run in seeds]
            auc = [return_auc(run) for run in seeds]
            cells = [f"{np.mean(x):.0f} ({min(x):.0f} to {max(x):.0f})" for x in (final, auc)]
            sps = runs[(runs.env_id == env_id) & (runs.method == method)].median_sps.median()
            lines.append(f"| {env_id} | {method} | {len(seeds)} | {cells[0]} | {cells[1]} | {sps:.0f} |")
    return "\n".join(lines)


def speed_table():
    """Steps per second on one CPU core beside the peers', from one interleaved run."""
    rows = pd.read_csv(os.path.join(RESULTS, "bench_cpu.csv"))
    by_name = rows.groupby("name", sort=False)
    speed, memory = by_name.median_steps_per_second, by_name.peak_rss_mb.max()
    peers = [name for name in ("CleanRL", "Stable-Baselines3") if name in memory.index]
    lines = ["| trainer | steps/s | " + " | ".join(f"over {peer}" for peer in peers) + " | peak RSS, MB |"]
    lines.append("|---|---|" + "---|" * len(peers) + "---|")
    for name in memory.index:
        ratios = [f"{speed.median()[name] / speed.median()[peer]:.2f}" for peer in peers]
        cells = [f"{speed.median()[name]:.0f} ({speed.min()[name]:.0f} to {speed.max()[name]:.0f})", *ratios]
        lines.append(f"| {name} | {' | '.join(cells)} | {memory[name]:.0f} |")
    return "\n".join(lines)


PAPER = {  # the figures of section 4.1: naive, protected
    "log-ratio, mean absolute error": ("1.07e-3", "4.7e-5"),
    "large-gradient norms that are finite": ("0 of 24", "24 of 24"),
    "second moments that are zero": ("64.55%", "0.58%"),
    "update magnitude over FP32 Adam's, largest": ("124.07", "1.0722"),
}
MODULE = {"advantage": "A", "value": "A", "large-gradient": "A", "log-ratio,": "B", "clip": "B", "second": "C", "update": "C"}


def sensitivity_table():
    """What FP16 loses at each stage, naively and with the module that protects it, beside the paper's figures."""
    values = pd.read_csv(os.path.join(RESULTS, "sensitivity.csv")).pivot(index="stage", columns="variant", values="value")
    lines = [
        "| module | stage | FP32 | naive FP16 | PPO-FP16 | paper: naive | paper: PPO-FP16 |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage in sorted(values.index, key=lambda stage: (MODULE[stage.split()[0]], stage)):
        measured = " | ".join(f"{values.loc[stage, variant]:.3g}" for variant in ("fp32", "naive", "protected"))
        lines.append(f"| {MODULE[stage.split()[0]]} | {stage} | {measured} | {' | '.join(PAPER.get(stage, ('', '')))} |")
    return "\n".join(lines)


def learning_figure(evaluations, path):
    """Learning curves: a thin line a seed, a thick one their mean."""
    env_ids = list(evaluations.env_id.unique())
    figure, axes = plt.subplots(1, len(env_ids), figsize=(5 * len(env_ids), 3.6), layout="constrained", squeeze=False)
    for axis, env_id in zip(axes[0], env_ids):
        for method, color in METHODS.items():
            chosen = evaluations[(evaluations.env_id == env_id) & (evaluations.method == method)]
            for _, run in chosen.groupby("seed"):
                axis.plot(run.global_step / 1000, run.mean_return, color=color, lw=0.6, alpha=0.5)
            mean = chosen.groupby("global_step").mean_return.mean()
            axis.plot(mean.index / 1000, mean, color=color, lw=2, label=method)
        axis.set(title=env_id, xlabel="environment steps / 1000", ylabel="deterministic return")
    axes[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args()
    evaluations, runs = load("learning")
    tables = {"learning": learning_table(evaluations, runs), "sensitivity": sensitivity_table(), "speed": speed_table()}
    readme = os.path.join(ROOT, "README.md")
    with open(readme) as file:
        old = new = file.read()
    for name, table in tables.items():
        pattern = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
        new, count = re.subn(pattern, lambda match, table=table: match[1] + table + "\n" + match[2], new, flags=re.DOTALL)
        if count != 1:
            sys.exit(f"report.py: error: README.md has {count} places for the table '{name}', not one")
    if args.check:
        sys.exit("report.py: README.md is not current; run `python studies/report.py`" if new != old else 0)
    with open(readme, "w") as file:
        file.write(new)
    learning_figure(evaluations, os.path.join(RESULTS, "learning_curves.png"))


if __name__ == "__main__":
    main()
