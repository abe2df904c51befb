"""Compares methods over tasks and seeds, as the paper (section 4.3) and Agarwal et al. (2021, arXiv 2108.13264) do.

A pair is a task and a seed that all the methods have finished; nothing else is compared. Scores are arrays of shape (..., pairs,
methods), higher is better. A statistic takes them and the task of each pair and reduces the pairs; the dimensions before those
are resamples, so that the function that gives a figure gives its interval too.

Definitions are rliable's where it has them. The library itself has no paired resampling, no ranks and no tasks with different
numbers of seeds, and would bring arch, statsmodels and seaborn for the few lines that are left.
"""

import numpy as np
from scipy import stats


def return_auc(run):
    """Trapezoidal integral of the evaluation return over environment steps, over the horizon (paper, section 4.3)."""
    return np.trapezoid(run.mean_return, run.global_step) / run.global_step.iloc[-1]


def return_aucs(evaluations, methods):
    """Return AUC of every pair: a frame with a row a pair, under its (env_id, seed), and a column a method.

    evaluations: a row per evaluation, in the order of the steps. Raises ValueError for a return AUC that is not finite: to leave
    its pair out, like one that is not finished, would spare a method its failure.
    """
    runs = evaluations[evaluations.method.isin(methods)].groupby(["env_id", "seed", "method"])
    aucs = runs[["global_step", "mean_return"]].apply(return_auc)
    if not np.isfinite(aucs).all():
        raise ValueError(f"return AUC that is not finite: {', '.join(map(str, aucs.index[~np.isfinite(aucs)]))}")
    return aucs.unstack().reindex(columns=methods).dropna()


def ranks(scores):
    """Rank of each method within its pair, 1 for the highest; methods that tie share the mean of their ranks. Shape of scores."""
    return stats.rankdata(-scores, axis=-1)


def normalized(scores, tasks):
    """Scores of shape (pairs, methods) mapped so that in each task the lowest of any method and seed is 0 and the highest is 1.

    This is the paper's normalization (section 4.3), and unlike a ratio to FP32's score it holds for returns of either sign. Its
    unit is the spread of the runs that there are: with few seeds that is a small and a chancy one.
    """
    result = np.empty(scores.shape)
    for task in np.unique(tasks):
        of_task = scores[tasks == task]
        result[tasks == task] = (of_task - of_task.min()) / (of_task.max() - of_task.min())
    return result


def mean_rank(scores, tasks):
    """Mean over pairs of the rank. Shape (..., methods)."""
    return ranks(scores).mean(-2)


def friedman(mean_ranks, pairs):
    """p-value of Friedman's test: the chance of mean ranks as far apart if methods do not differ. Ties are not corrected for."""
    methods = len(mean_ranks)
    spread = np.square(np.subtract(mean_ranks, (methods + 1) / 2)).sum()
    return stats.chi2.sf(12 * pairs / (methods * (methods + 1)) * spread, methods - 1)


def firsts(scores, tasks):
    """In how many pairs each method has the highest score, k methods that tie having 1/k each. Shape (..., methods)."""
    highest = scores == scores.max(-1, keepdims=True)
    return (highest / highest.sum(-1, keepdims=True)).sum(-2)


def wins(scores, tasks):
    """[..., i, j]: in how many pairs method i scores higher than method j, ties not counted. Shape (..., methods, methods)."""
    return (scores[..., :, None] > scores[..., None, :]).sum(-3)


def interquartile_mean(scores, tasks):
    """Mean over pairs without the lowest and the highest quarter of them (rounded down). Shape (..., methods)."""
    return stats.trim_mean(scores, 0.25, axis=-2)


def difference(scores, tasks):
    """[..., i, j]: mean over pairs of the score of method i less that of method j. Shape (..., methods, methods)."""
    means = scores.mean(-2)
    return means[..., :, None] - means[..., None, :]


def probability_of_improvement(scores, tasks):
    """[..., i, j]: chance that a run of method i scores higher than one of method j on the same task, a tie counting half.

    Any seed against any seed, which is the Mann-Whitney statistic over its largest value, and then the mean over tasks, however
    many seeds each has. Shape (..., methods, methods).
    """
    of_tasks = []
    for task in np.unique(tasks):
        of_task = scores[..., tasks == task, :]
        outcome = np.sign(of_task[..., :, None, :, None] - of_task[..., None, :, None, :])  # (..., seed, seed, method, method)
        of_tasks.append((1 + outcome.mean((-4, -3))) / 2)
    return np.mean(of_tasks, axis=0)


def resampled(tasks, resamples, seed):
    """Rows that stand for the pairs in each resample, every one drawn from its own task. Integers of shape (resamples, pairs).

    A row brings the scores of all methods with it, so these stay paired; and every task keeps its number of seeds.
    """
    generator = np.random.RandomState(seed)  # not default_rng: this is the stream that NumPy keeps from version to version
    rows = np.empty((resamples, len(tasks)), dtype=int)
    for task in np.unique(tasks):
        of_task = np.flatnonzero(tasks == task)
        rows[:, of_task] = of_task[generator.randint(len(of_task), size=(resamples, len(of_task)))]
    return rows


def estimate(statistic, scores, tasks, resamples=10_000, seed=0):
    """A statistic and the ends of its 95% interval, stacked: shape (3, ...).

    The interval is the percentile one of the task-stratified paired bootstrap: over seeds, with the tasks as given. A task with
    one seed does not show how seeds differ, so then there is no interval: its ends are NaN. With n seeds a task the bootstrap's
    spread is sqrt(1 - 1/n) of the true one, so that with five the intervals are about a tenth too narrow.
    """
    value = np.asarray(statistic(scores, tasks))
    if np.unique(tasks, return_counts=True)[1].min() == 1:
        return np.stack([value, np.full(value.shape, np.nan), np.full(value.shape, np.nan)])
    return np.stack([value, *np.percentile(statistic(scores[resampled(tasks, resamples, seed)], tasks), [2.5, 97.5], axis=0)])
