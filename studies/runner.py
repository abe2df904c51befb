"""Runs a list of trainings as separate processes, one core each, and keeps every finished one.

A study is two files under studies/results: `<study>.csv`, a row per evaluation, and `<study>_runs.csv`, a row per finished run.
Both are replaced whole, the second after the first, and a run counts as finished once it is in the second: so a study can
be killed at any moment, and started again it skips what is there.
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


def execute(run):
    """Trains in a temporary folder. Returns the rows of its evaluations and the row of the run."""
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
        sps = sorted(event.value for event in events.Scalars("charts/SPS"))
    finished = key | dict(seconds=round(seconds, 1), median_sps=round(sps[len(sps) // 2]), trainer=run.trainer)
    finished |= dict(flags=" ".join(run.flags), device=args["device"], machine=f"{platform.machine()}, {os.cpu_count()} cores")
    return run, evaluations, finished | dict(versions=json.dumps(args["versions"]), commit=args["commit"])


def run_study(study, runs, workers, results=os.path.join(ROOT, "studies", "results")):
    """Executes those of the runs that are not in the study's files yet, `workers` at a time, adding each as it finishes."""
    os.makedirs(results, exist_ok=True)
    eval_path, runs_path = os.path.join(results, f"{study}.csv"), os.path.join(results, f"{study}_runs.csv")
    finished = read(runs_path)
    keys = {(row["method"], row["env_id"], row["seed"]) for row in finished}
    evaluations = [row for row in read(eval_path) if (row["method"], row["env_id"], row["seed"]) in keys]
    todo = [run for run in runs if run.key not in keys]
    parallel = Parallel(n_jobs=workers, backend="loky", return_as="generator_unordered")
    for _, rows, row in tqdm(parallel(delayed(execute)(run) for run in todo), total=len(todo), desc=study, unit="run"):
        evaluations, finished = evaluations + rows, [*finished, row]
        replace(eval_path, EVALUATION, evaluations)
        replace(runs_path, RUN, finished)
