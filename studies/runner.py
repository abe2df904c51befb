"""Runs a list of trainings as separate processes, one core each, and keeps every finished one.

A study is three files under studies/results: `<study>.csv`, a row per evaluation, `<study>_numerics.csv`, what the number format
took at the same steps, and `<study>_runs.csv`, a row per finished run. Each is replaced whole, the last one last, and a run
counts as finished once it is in that one: so a study can be killed at any moment, and started again it skips what is there.
"""

import csv
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

from joblib import Parallel, delayed
from tqdm import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
EVALUATION = ["method", "env_id", "seed", "global_step", "mean_return", "std_return", "episodes"]
NUMERICS = ["method", "env_id", "seed", "global_step", "swallowed_updates", "zero_second_moments", "skipped_updates"]
RUN = ["method", "env_id", "seed", "seconds", "median_sps", "trainer", "flags", "device", "machine", "versions", "commit"]


@dataclass(frozen=True)
class Run:
    """One training: `python <trainer> --env-id <env_id> --seed <seed> <flags>`, under the name of the method it stands for."""

    method: str
    trainer: str
    flags: tuple[str, ...]
    env_id: str
    seed: int

    @property
    def key(self):
        return self.method, self.env_id, str(self.seed)


def read(path):
    """The rows of a CSV file as dicts, none if there is no such file."""
    if not os.path.exists(path):
        return []
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def replace(path, columns, rows):
    """Writes a CSV file so that at any moment either the old or the new one is there, whole."""
    with open(path + ".new", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        file.flush()
        os.fsync(file.fileno())
    os.replace(path + ".new", path)


def numerics_at(events, steps):
    """What a training logged under `numerics/` at the environment steps at which it was evaluated: a row per step.

    Nothing is measured at step 0, before the first update; the first iteration stands for it. Swallowed updates and zero second
    moments are shares of the parameters, at the last update before the step; skipped updates are counted from the start.
    """
    swallowed, zero, skipped = (
        {event.step: event.value for event in events.Scalars(f"numerics/{name}")}
        for name in ("swallowed_updates", "zero_second_moments", "skipped_updates")
    )
    return [
        dict(
            global_step=step,
            swallowed_updates=f"{swallowed[step]:.6g}",
            zero_second_moments=f"{zero[step]:.6g}",
            skipped_updates=round(sum(count for at, count in skipped.items() if at <= step)),
        )
        for step in dict.fromkeys(step or min(swallowed) for step in steps)
    ]


def execute(run):
    """Trains in a temporary folder. Returns the run, the rows of its evaluations and of its numerics, and the row of the run."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, os.path.join(ROOT, run.trainer), "--env-id", run.env_id, "--seed", str(run.seed), *run.flags]
        start = time.perf_counter()
        done = subprocess.run([*command, "--runs-dir", folder, "--run-name", "run"], capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")
        key = dict(zip(("method", "env_id", "seed"), run.key))
        evaluations = [key | row for row in read(os.path.join(folder, "run", "eval.csv"))]
        with open(os.path.join(folder, "run", "args.json")) as file:
            args = json.load(file)
        events = EventAccumulator(os.path.join(folder, "run"), size_guidance={"scalars": 0}).Reload()
        numerics = [key | row for row in numerics_at(events, [int(row["global_step"]) for row in evaluations])]
        sps = sorted(event.value for event in events.Scalars("charts/SPS"))
    finished = key | dict(seconds=round(seconds, 1), median_sps=round(sps[len(sps) // 2]), trainer=run.trainer)
    finished |= dict(flags=" ".join(run.flags), device=args["device"], machine=f"{platform.machine()}, {os.cpu_count()} cores")
    return run, evaluations, numerics, finished | dict(versions=json.dumps(args["versions"]), commit=args["commit"])


def run_study(study, runs, workers, results=os.path.join(ROOT, "studies", "results")):
    """Executes those of the runs that are not in the study's files yet, `workers` at a time, adding each as it finishes."""
    os.makedirs(results, exist_ok=True)
    eval_path, numerics_path, runs_path = (os.path.join(results, f"{study}{part}.csv") for part in ("", "_numerics", "_runs"))
    finished = read(runs_path)
    keys = {(row["method"], row["env_id"], row["seed"]) for row in finished}
    evaluations, numerics = (
        [row for row in read(path) if (row["method"], row["env_id"], row["seed"]) in keys] for path in (eval_path, numerics_path)
    )
    todo = [run for run in runs if run.key not in keys]
    parallel = Parallel(n_jobs=workers, backend="loky", return_as="generator_unordered")
    for _, rows, measured, row in tqdm(parallel(delayed(execute)(run) for run in todo), total=len(todo), desc=study, unit="run"):
        evaluations, numerics, finished = evaluations + rows, numerics + measured, [*finished, row]
        replace(eval_path, EVALUATION, evaluations)
        replace(numerics_path, NUMERICS, numerics)
        replace(runs_path, RUN, finished)
