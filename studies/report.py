"""Rebuilds the tables and figures of README.md and studies/README.md from the raw results, and nothing else.

A table stands between `<!-- name -->` and `<!-- /name -->`, in one of the two files or in both.

python studies/report.py            # writes README.md, studies/README.md and studies/results/*.png
python studies/report.py --check    # exits with status 1 if a table is not what the results say, or a figure is missing
"""

import argparse
import importlib
import os
import re
import sys

import ablations
import comparison
import numpy as np
import pandas as pd
import runner
import writeback
from comparison import estimate, return_auc
from matplotlib.figure import Figure
from runner import markdown, mean_and_range

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "studies", "results")
DOCUMENTS = ("README.md", "studies/README.md")
METHODS = {"FP32": "tab:gray", "AMP-FP16": "tab:blue", "AMP-BF16": "tab:green", "PPO-FP16": "tab:red"}
STUDIES = (
    "ablations",
    "precision_boundary",
    "writeback",
    "perturbation",
)  # modules beside this one, each with a `table(evaluations, runs)` of the results under its name
NO_RUNS = "no runs yet"


def load(study, part=""):
    """`runner.load`, in a fixed order."""
    rows, runs = runner.load(study, RESULTS, part)
    return rows.sort_values(["env_id", "method", "seed", "global_step"]), runs


def study_table(study):
    """The table that a study's own module makes, or a text while it has no runs."""
    if not os.path.exists(os.path.join(RESULTS, f"{study}_runs.csv")):
        return NO_RUNS
    return importlib.import_module(study).table(*load(study))


def learning_table(evaluations, runs):
    """Final return and AUC of every task and method: mean over seeds, and the range."""
    rows = []
    for env_id, of_env in evaluations.groupby("env_id", sort=False):
        for method in METHODS:
            of_method = of_env[of_env.method == method]
            if of_method.empty:
                continue
            seeds = [run for _, run in of_method.groupby("seed")]
            final = [run.mean_return.iloc[-1] for run in seeds]
            auc = [return_auc(run) for run in seeds]
            sps = runs[(runs.env_id == env_id) & (runs.method == method)].median_sps.median()
            rows.append([env_id, method, len(seeds), mean_and_range(final), mean_and_range(auc), f"{sps:.0f}"])
    return markdown(["task", "method", "seeds", "final return", "return AUC", "steps/s"], rows)


PAPER_RANKS = {
    "FP32": (2.83, 7),
    "AMP-FP16": (2.63, 5),
    "AMP-BF16": (2.63, 1),
    "PPO-FP16": (1.90, 17),
}  # section 4.3: mean, firsts
PAPER_AGAINST = {  # section 4.3: PPO-FP16 against each: wins of 30, difference of the normalized AUC
    "FP32": (20, "interval includes 0"),
    "AMP-FP16": (21, "0.208 (0.026 to 0.371)"),
    "AMP-BF16": (22, "interval includes 0"),
}
INFERIOR = -0.05  # PPO-FP16 is "not inferior" where the whole interval of its difference is above this


def interval(value, low, high, digits=2):
    """A cell with a figure and its interval, if it has one."""
    value, low, high = (f"{x:z.{digits}f}" for x in (value, low, high))
    return value if low == "nan" else f"{value} ({low} to {high})"


def scores_of(aucs):
    """Return AUCs, their min-max normalization, and the task of each pair, as arrays."""
    scores, tasks = aucs.to_numpy(), aucs.index.get_level_values("env_id").to_numpy()
    return scores, comparison.normalized(scores, tasks), tasks


def over_pairs(aucs):
    """The sentence above a comparison: the pairs that it is over, and whether they allow an interval."""
    seeds = aucs.groupby("env_id", sort=False).size()
    text = f"Over {len(aucs)} pairs of a task and a seed ({', '.join(f'{count} {env_id}' for env_id, count in seeds.items())})"
    return text + (": no intervals, since a task has one seed only." if seeds.min() == 1 else ", with 95% intervals.")


def ranks_table(aucs):
    """Rank by return AUC, firsts, and interquartile mean (IQM) of the normalized return AUC; and whether ranks are chance."""
    if aucs.empty:
        return NO_RUNS
    scores, normalized, tasks = scores_of(aucs)
    rank, iqm = estimate(comparison.mean_rank, scores, tasks), estimate(comparison.interquartile_mean, normalized, tasks)
    first = comparison.firsts(scores, tasks)
    rows = [
        [method, interval(*rank[:, i]), f"{first[i]:g} of {len(aucs)}", interval(*iqm[:, i]), f"{mean:.2f}", f"{count} of 30"]
        for i, (method, (mean, count)) in enumerate(PAPER_RANKS.items())
    ]
    columns = ["method", "mean rank", "firsts", "IQM of the normalized return AUC", "paper: mean rank", "paper: firsts"]
    here = comparison.friedman(rank[0], len(aucs))
    paper = comparison.friedman([mean for mean, _ in PAPER_RANKS.values()], 30)
    chance = f"Mean ranks as far apart come of equal methods with p = {here:.2f} (Friedman's test; the paper's: {paper:.2f})."
    return f"{over_pairs(aucs)}\n\n{markdown(columns, rows)}\n\n{chance}"


def against_table(aucs):
    """PPO-FP16 against each other method: the difference of the normalized return AUC and the probability of improvement."""
    if aucs.empty:
        return NO_RUNS
    scores, normalized, tasks = scores_of(aucs)
    won = comparison.wins(scores, tasks)
    gain = estimate(comparison.difference, normalized, tasks)
    better = estimate(comparison.probability_of_improvement, scores, tasks)
    rows, i = [], list(METHODS).index("PPO-FP16")
    for method, (paper_wins, paper_gain) in PAPER_AGAINST.items():
        j = list(METHODS).index(method)
        verdict = "yes" if gain[1, i, j] > INFERIOR else "not shown"
        cells = [f"{won[i, j]} of {len(aucs)}", interval(*gain[:, i, j], digits=3), verdict, interval(*better[:, i, j])]
        rows.append([method, *cells, f"{paper_wins} of 30", paper_gain])
    columns = ["PPO-FP16 against", "wins", "normalized return AUC, difference", f"not inferior (above {INFERIOR})"]
    columns += ["probability of improvement", "paper: wins", "paper: difference"]
    return f"{over_pairs(aucs)}\n\n{markdown(columns, rows)}"


def wins_table(aucs):
    """In how many pairs the method of the row has a higher return AUC than the method of the column."""
    if aucs.empty:
        return NO_RUNS
    scores, _, tasks = scores_of(aucs)
    won = comparison.wins(scores, tasks)
    rows = [
        [method, *("" if i == j else f"{won[i, j]} of {len(aucs)}" for j in range(len(METHODS)))]
        for i, method in enumerate(METHODS)
    ]
    return markdown(["wins of", *(f"over {method}" for method in METHODS)], rows)


def numerics_table(study, methods):
    """What the number format takes as the learning rate anneals to 0: at the first iteration, half way and at the last one.

    Over the pairs of a task and a seed that all the methods have finished.
    """
    if not os.path.exists(os.path.join(RESULTS, f"{study}_numerics.csv")):
        return NO_RUNS
    numerics, _ = load(study, "_numerics")
    numerics = numerics[numerics.groupby(["env_id", "seed"]).method.transform("nunique") == len(methods)]
    if numerics.empty:
        return NO_RUNS
    columns = ["method", "runs", *(f"swallowed updates, {when}" for when in ("first iteration", "half way", "last"))]
    columns += [*(f"zero second moments, {when}" for when in ("first iteration", "half way", "last")), "skipped updates a run"]
    rows = []
    for method in methods:
        runs = [run for _, run in numerics[numerics.method == method].groupby(["env_id", "seed"])]
        shares = [
            np.mean([run[share].iloc[when] for run in runs])
            for share in ("swallowed_updates", "zero_second_moments")
            for when in (0, len(runs[0]) // 2, -1)
        ]
        skipped = np.mean([run.skipped_updates.iloc[-1] for run in runs])
        rows.append([method, len(runs), *(f"{100 * share:.3g}%" for share in shares), f"{skipped:.1f}"])
    return markdown(columns, rows)


def speed_table():
    """Steps per second on one CPU core beside the peers', from one interleaved run."""
    rows = pd.read_csv(os.path.join(RESULTS, "bench_cpu.csv"))
    by_name = rows.groupby("name", sort=False)
    speed, memory = by_name.median_steps_per_second, by_name.peak_rss_mb.max()
    peers = [name for name in ("CleanRL", "Stable-Baselines3") if name in memory.index]
    rows = []
    for name in memory.index:
        ratios = [f"{speed.median()[name] / speed.median()[peer]:.2f}" for peer in peers]
        cells = [f"{speed.median()[name]:.0f} ({speed.min()[name]:.0f} to {speed.max()[name]:.0f})", *ratios]
        rows.append([name, *cells, f"{memory[name]:.0f}"])
    return markdown(["trainer", "steps/s", *(f"over {peer}" for peer in peers), "peak RSS, MB"], rows)


def soak_table():
    """What a long training takes of memory and disk, from tests/soak.py."""
    rows = pd.read_csv(os.path.join(RESULTS, "soak.csv"))
    later, last = rows[len(rows) // 2 :], rows.iloc[-1]
    slope = 1e6 * np.polyfit(later.global_step, later.resident_mb, 1)[0]
    memory, disk = f"{rows.resident_mb.max():.0f}", f"{1e6 * last.disk_mb / last.global_step:.2f}"
    columns = ["steps, at the last look", "memory at most, MB", "its slope in the second half, MB per million steps"]
    columns += ["disk, MB per million steps"]
    return markdown(columns, [[f"{last.global_step:,.0f}", memory, f"{slope:+.2f}", disk]])


def update_table():
    """Time and optimizer state of one update, from benchmark_update.py."""
    columns = {"configuration": "width x minibatch", "method": "method", "processes": "processes", "seconds": "ms an update"}
    columns |= {"speedup": "over FP32", "state_bytes": "optimizer state, KiB", "state_change": "against FP32's"}
    columns |= {"gradient_error": "gradient's error over its tolerance"}
    rows = []
    for row in pd.read_csv(os.path.join(RESULTS, "benchmark_update.csv")).itertuples():
        time = f"{1e3 * row.seconds:.3g} ({1e3 * row.least_seconds:.3g} to {1e3 * row.most_seconds:.3g})"
        cells = [f"{row.speedup:.2f}", f"{row.state_bytes / 2**10:.1f}", f"{row.state_change:+.1%}", f"{row.gradient_error:.2f}"]
        rows.append([row.configuration, row.method, row.processes, time, *cells])
    return markdown(columns.values(), rows)


def sharp_table():
    """The time of one step of the optimizers, from tests/bench_sharp.py: medians over the turns, and quartiles."""
    turns, rows = pd.read_csv(os.path.join(RESULTS, "bench_sharp.csv")), []
    for name in turns:
        low, time, high = turns[name].quantile([0.25, 0.5, 0.75])
        rows.append([name, f"{time:.0f} ({low:.0f} to {high:.0f})", f"{(turns[name] / turns.iloc[:, 0]).median():.2f}"])
    return markdown(["optimizer", "microseconds a step", f"over {turns.columns[0]}"], rows)


PAPER_SENSITIVITY = {  # the figures of section 4.1: naive, protected
    "log-ratio, mean absolute error": ("1.07e-3", "4.7e-5"),
    "large-gradient norms that are finite": ("0 of 24", "24 of 24"),
    "second moments that are zero": ("64.55%", "0.58%"),
    "update magnitude over FP32 Adam's, largest": ("124.07", "1.0722"),
}
MODULE = {"advantage": "A", "value": "A", "large-gradient": "A", "log-ratio,": "B", "clip": "B", "second": "C", "update": "C"}


def sensitivity_table():
    """What FP16 loses at each stage, naively and with the module that protects it, beside the paper's figures."""
    values = pd.read_csv(os.path.join(RESULTS, "sensitivity.csv")).pivot(index="stage", columns="variant", values="value")
    rows = []
    for stage in sorted(values.index, key=lambda stage: (MODULE[stage.split()[0]], stage)):
        measured = [f"{values.loc[stage, variant]:.3g}" for variant in ("fp32", "naive", "protected")]
        rows.append([MODULE[stage.split()[0]], stage, *measured, *PAPER_SENSITIVITY.get(stage, ("", ""))])
    return markdown(["module", "stage", "FP32", "naive FP16", "PPO-FP16", "paper: naive", "paper: PPO-FP16"], rows)


def curves_figure(evaluations):
    """Learning curves: a thin line a seed, a thick one their mean."""
    env_ids = list(evaluations.env_id.unique())
    columns = min(3, len(env_ids))
    rows = -(-len(env_ids) // columns)
    figure = Figure(figsize=(5 * columns, 3.6 * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat[len(env_ids) :]:
        axis.remove()
    for axis, env_id in zip(axes.flat, env_ids):
        for method, color in METHODS.items():
            chosen = evaluations[(evaluations.env_id == env_id) & (evaluations.method == method)]
            for _, run in chosen.groupby("seed"):
                axis.plot(run.global_step / 1000, run.mean_return, color=color, lw=0.6, alpha=0.5)
            mean = chosen.groupby("global_step").mean_return.mean()
            axis.plot(mean.index / 1000, mean, color=color, lw=2, label=method)
        axis.set(title=env_id, xlabel="environment steps / 1000", ylabel="deterministic return")
    axes[0][0].legend(frameon=False)
    return figure


def ranks_figure(aucs):
    """Mean ranks as bars with their intervals, beside the paper's."""
    scores, _, tasks = scores_of(aucs)
    rank, low, high = estimate(comparison.mean_rank, scores, tasks)
    figure = Figure(figsize=(5, 3), layout="constrained")
    axis = figure.subplots()
    axis.bar(list(METHODS), rank, color=list(METHODS.values()), width=0.6)
    if not np.isnan(low).any():
        axis.errorbar(list(METHODS), rank, [rank - low, high - rank], fmt="none", color="black", capsize=4)
    axis.plot(list(METHODS), [PAPER_RANKS[method][0] for method in METHODS], "kD", mfc="white", label="paper, 30 pairs")
    axis.set(title=f"{len(aucs)} pairs of a task and a seed", ylabel="mean rank by return AUC", ylim=(0, len(METHODS)))
    axis.legend(frameon=False)
    return figure


def fill(document, tables):
    """A document with the tables between its markers made anew, and the names of these tables. Exits if a marker stands alone."""
    with open(os.path.join(ROOT, document)) as file:
        text = file.read()
    marked = re.compile(r"(<!-- (\w+) -->\n).*?(<!-- /\2 -->)", flags=re.DOTALL)
    names = {match[2] for match in marked.finditer(text)}
    if 2 * len(names) != text.count("<!-- ") or not names <= tables.keys():
        sys.exit(f"report.py: error: {document} has a marker that is not one of a pair, or not of {', '.join(tables)}")
    return marked.sub(lambda match: f"{match[1]}{tables[match[2]]}\n{match[3]}", text), names


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    args = parser.parse_args(argv)
    evaluations, runs = load("learning")
    aucs = comparison.return_aucs(evaluations, list(METHODS))
    tables = {"learning": learning_table(evaluations, runs), "ranks": ranks_table(aucs), "against": against_table(aucs)}
    tables |= {"wins": wins_table(aucs), "sensitivity": sensitivity_table(), "speed": speed_table(), "soak": soak_table()}
    tables |= {"update": update_table(), "sharp": sharp_table()}
    tables |= {study: study_table(study) for study in STUDIES}
    methods = dict(learning=METHODS, ablations=ablations.METHODS, writeback=writeback.ARMS)
    tables |= {f"{study}_numerics": numerics_table(study, methods[study]) for study in methods}
    figures = {"learning_curves.png": (curves_figure, evaluations)}
    if not aucs.empty:
        figures["learning_ranks.png"] = (ranks_figure, aucs)

    placed, stale = set(), []
    for document in DOCUMENTS:
        new, names = fill(document, tables)
        placed |= names
        path = os.path.join(ROOT, document)
        with open(path) as file:
            if file.read() == new:
                continue
        stale.append(document)
        if not args.check:
            with open(path, "w") as file:
                file.write(new)
    for name, (draw, data) in figures.items():
        path = os.path.join(RESULTS, name)
        if not args.check:
            draw(data).savefig(path, dpi=100, metadata={"Software": None})
        elif not os.path.exists(path):
            stale.append(os.path.relpath(path, ROOT))
    if homeless := tables.keys() - placed:
        sys.exit(f"report.py: error: no place in {' or '.join(DOCUMENTS)} for {', '.join(sorted(homeless))}")
    if args.check and stale:
        sys.exit(f"report.py: {', '.join(stale)} is not what the results say; run `python studies/report.py`")


if __name__ == "__main__":
    main()
