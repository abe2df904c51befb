"""Perturbation: how much of what lies between two trainings with the same seed is chance?

Copies of a training that differ in the last digit of the learning rate, 3e-4 (1 + k 2^-23) for copy k: 2^-23 is the spacing of
FP32, and no one would call the copies different. The four methods of learning.py, HalfCheetah-v5, seed 1, 512,000 steps.

If the copies of a method lie as far apart as its seeds, then two methods on one seed are two draws and not a pair, and the rank
of a method on one task and seed says as little as a single throw of a die.

    python studies/perturbation.py --workers 2      # about 1.3 hours of one core
    python studies/perturbation.py --report
"""

import itertools
from dataclasses import dataclass

import numpy as np
import tyro
from comparison import ranks, return_aucs
from learning import METHODS
from runner import Options, Run, load, markdown, mean_and_range, run_study

ENV_ID = "HalfCheetah-v5"


@dataclass
class Args(Options):
    copies: int = 4  # of every method
    total_timesteps: int = 512_000  # environment steps of each run


def learning_rate(copy):
    return 3e-4 * (1 + copy * 2**-23)


def make_runs(args):
    """Copy by copy over all methods."""
    length = ("--total-timesteps", str(args.total_timesteps))
    return [
        Run(f"{method}, copy {copy}", trainer, (*flags, "--learning-rate", repr(learning_rate(copy)), *length), ENV_ID, 1)
        for copy in range(args.copies)
        for method, (trainer, flags) in METHODS.items()
    ]


def table(evaluations, runs):
    """The return AUC of the copies of every method, its spread over them and over seeds, and the ranks that the copies can have.

    The rank is that among the four methods, over all choices of one copy of each; of methods that do not differ at all it
    would be 2.5, with a standard deviation of 1.12.
    """
    evaluations = evaluations[evaluations.env_id == ENV_ID]  # the learning study's are of other tasks too
    copies = {method: sorted({name for name in runs.method if name.startswith(f"{method}, ")}) for method in METHODS}
    if not all(copies.values()):
        return "not a copy of every method yet"
    aucs = {method: [float(return_aucs(evaluations, [name]).iloc[0, 0]) for name in copies[method]] for method in METHODS}
    rank = ranks(np.array(list(itertools.product(*aucs.values()))))

    def deviation(values):
        return f"{np.std(values, ddof=1):.0f}" if len(values) > 1 else ""

    def over(seeds):
        return f"{deviation(seeds)} ({len(seeds)} seeds)".strip()

    rows = []
    for i, method in enumerate(METHODS):
        seeds = return_aucs(evaluations, [method])[method] if method in set(evaluations.method) else ()
        spread = deviation(aucs[method]), over(seeds), f"{rank[:, i].mean():.2f}"
        rows.append([method, len(aucs[method]), mean_and_range(aucs[method]), *spread, f"{rank[:, i].std():.2f}"])
    columns = ["method", "copies", "return AUC", "its standard deviation over copies", "over seeds"]
    return markdown([*columns, "rank", "its standard deviation"], rows)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.report:
        print(table(*load("perturbation", args.results)))
    else:
        run_study("perturbation", make_runs(args), args.workers, args.ray_address, args.results)
