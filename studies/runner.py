"""Runs a list of trainings as separate processes, one core each, and keeps every finished one.

A study is three files under studies/results: `<study>.csv`, a row per evaluation, `<study>_numerics.csv`, what the number format
took at the same steps, and `<study>_runs.csv`, a row per finished run. Each is replaced whole, the last one last, and a run
counts as finished once it is in that one: so a study can be killed at any moment, and started again it skips what is there.
On Linux its trainings end with it, even by kill -9.
"""

import csv
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import pandas as pd
from joblib import Parallel, delayed
from tqdm import tqdm

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
RESULTS = os.path.join(ROOT, "studies", "results")
KEY = ["method", "env_id", "seed"]
COLUMNS = {  # of the files of a study, by the ending of their names, in the order in which they are replaced
    "": [*KEY, "global_step", "mean_return", "std_return", "episodes"],
    "_numerics": [*KEY, "global_step", "swallowed_updates", "zero_second_moments", "skipped_updates"],
    "_runs": [*KEY, *"seconds median_sps skipped_from trainer flags device machine versions commit".split()],
}

BORROWED = {  # what a study has not trained itself: the name that it goes by there, and the study and method that it is
    "precision_boundary": {"PPO-FP16": ("learning", "PPO-FP16"), "Native-BF16": ("writeback", "BF16, log_std")},
    "writeback": {"FP16, log_std": ("learning", "PPO-FP16")},
    "perturbation": {method: ("learning", method) for method in ("FP32", "AMP-FP16", "AMP-BF16", "PPO-FP16")},
}

# Becomes the command it is given, and has the kernel kill it when the thread that started it ends. The parent is compared, for
# it may have ended before prctl. (A preexec_fn would do the same, but may deadlock in a process that has threads.)
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


@dataclass
class Options:
    """What a study of many trainings can be told."""

    workers: int = 2  # runs at a time; one core each
    ray_address: str | None = None  # run on this Ray cluster instead, whose nodes have this folder at the same path
    results: str = RESULTS  # folder of the study's files
    report: bool = False  # print the table of the runs that are finished, and train nothing


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

    @property
    def command(self):
        return [os.path.join(ROOT, self.trainer), "--env-id", self.env_id, "--seed", str(self.seed), *self.flags]


def fail(message):
    """Prints one line and exits with status 2, which is how a bad argument ends a study before any work."""
    print(f"{os.path.basename(sys.argv[0])}: error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(2)


def key(row):
    """The key of the run that a row of a study's file belongs to."""
    return tuple(row[name] for name in KEY)


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


def skipped_from(skipped_updates, updates):
    """The step from which on every update was skipped for a gradient that is not finite; None if the last iteration learned.

    skipped_updates: TensorBoard's events, one per iteration. updates: how many an iteration has.
    """
    first = None
    for event in skipped_updates:
        first = None if event.value < updates else first or event.step
    return first


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
    """Trains in a temporary folder. Returns the rows that the run adds to each of the study's files, under the keys of COLUMNS.

    Raises RuntimeError if the training failed, or was interrupted before its last step.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with tempfile.TemporaryDirectory() as folder:
        launch = [sys.executable, "-c", LAUNCH, str(os.getpid())] if sys.platform == "linux" else []
        command = [*launch, sys.executable, *run.command, "--runs-dir", folder, "--run-name", "run"]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        seconds = time.perf_counter() - start
        if done.returncode:
            last_lines = "\n".join(done.stderr.splitlines()[-10:])
            raise RuntimeError(f"ended with status {done.returncode}:\n{last_lines}")
        names = dict(zip(KEY, run.key))
        evaluations = [names | row for row in read(os.path.join(folder, "run", "eval.csv"))]
        with open(os.path.join(folder, "run", "args.json")) as file:
            args = json.load(file)
        events = EventAccumulator(os.path.join(folder, "run"), size_guidance={"scalars": 0}).Reload()
        sps = sorted(event.value for event in events.Scalars("charts/SPS"))
        skipped = events.Scalars("numerics/skipped_updates")
        numerics = [names | row for row in numerics_at(events, [int(row["global_step"]) for row in evaluations])]
    last_step, batch_size = int(evaluations[-1]["global_step"]), args["num_envs"] * args["num_steps"]
    if last_step + batch_size <= args["total_timesteps"]:
        raise RuntimeError(f"was interrupted after {last_step} of {args['total_timesteps']} steps")
    finished = names | dict(seconds=round(seconds, 1), median_sps=round(sps[len(sps) // 2]), trainer=run.trainer)
    finished |= dict(skipped_from=skipped_from(skipped, args["update_epochs"] * args["num_minibatches"]))
    finished |= dict(flags=" ".join(run.flags), device=args["device"], machine=f"{platform.machine()}, {os.cpu_count()} cores")
    finished |= dict(versions=json.dumps(args["versions"]), commit=args["commit"])
    return {"": evaluations, "_numerics": numerics, "_runs": [finished]}


def attempt(run):
    """The run and what `execute` returns of it, or the error that it raises."""
    try:
        return run, execute(run)
    except Exception as error:
        return run, error


def attempts(runs, workers):
    """Yields what `attempt` returns of each run as soon as it ends; the runs start in the order of the list."""
    # threads, since each only waits for its training: so there is no worker process that could outlive this one
    parallel = Parallel(workers, backend="threading", batch_size=1, return_as="generator_unordered")
    return parallel(delayed(attempt)(run) for run in runs)


def ray_attempts(runs):
    """`attempts` on the Ray cluster. Not by joblib's Ray backend, which gives no result before it has them all."""
    import ray

    waiting = {ray.remote(attempt).remote(run): run for run in runs}
    while waiting:
        (done,), _ = ray.wait(list(waiting))
        run = waiting.pop(done)
        try:
            yield ray.get(done)
        except ray.exceptions.RayError as error:  # the node is gone, say
            yield run, error


def connect_to_ray(address):
    """Joins a Ray cluster, or ends the program through `fail`."""
    try:
        import ray
    except ImportError:
        fail("--ray-address needs Ray; install it with: pip install -r studies/requirements-ray.txt")
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        if host:  # Ray itself tries for minutes
            socket.create_connection((host, port), 10).close()
        ray.init(address, log_to_driver=False)
    except (OSError, ValueError) as error:
        fail(f"--ray-address {address}: {error}; give the host:port that `ray start --head` prints")


def run_study(study, runs, workers, ray_address=None, results=RESULTS):
    """Executes those of the runs that are not in the study's files yet, `workers` at a time, adding each as it finishes.

    A run that fails does not end the others. Exits with status 1 if any failed, after a list of them with their last lines.
    """
    if workers < 1:
        fail(f"--workers is {workers}; it must be at least 1")
    if ray_address is not None:
        connect_to_ray(ray_address)
    os.makedirs(results, exist_ok=True)
    paths = {part: os.path.join(results, f"{study}{part}.csv") for part in COLUMNS}
    finished = {key(row): row["flags"] for row in read(paths["_runs"])}
    runs = list(dict.fromkeys(runs))
    for run in runs:
        if finished.get(run.key, flags := " ".join(run.flags)) != flags:
            fail(f"{paths['_runs']} has {', '.join(run.key)} with other flags than '{flags}'; choose another folder by --results")
    rows = {part: [row for row in read(path) if key(row) in finished] for part, path in paths.items()}
    todo = [run for run in runs if run.key not in finished]
    failures = []
    # smoothing=0: the time left from the mean over all runs, since those that run side by side end side by side
    progress = tqdm(total=len(runs), initial=len(runs) - len(todo), desc=study, unit="run", smoothing=0, mininterval=0)

    def interrupt(*_):  # without a wait for joblib's threads: the files are whole, and the trainings end with this process
        os.write(2, b"\ninterrupted; the runs that have finished are kept, and the same command goes on from there\n")
        os._exit(130)

    handler = signal.signal(signal.SIGINT, interrupt)
    try:
        for run, outcome in attempts(todo, workers) if ray_address is None else ray_attempts(todo):
            if isinstance(outcome, Exception):
                failures.append((run, outcome))
                progress.set_postfix(failed=len(failures))
            else:
                for part, path in paths.items():
                    rows[part] += outcome[part]
                    replace(path, COLUMNS[part], rows[part])
            progress.update()
    finally:
        signal.signal(signal.SIGINT, handler)
    progress.close()
    if failures:
        print(f"{len(failures)} of {len(runs)} runs failed:", file=sys.stderr)
        for run, error in failures:
            print(f"\npython {' '.join(run.command)}\n{type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(1)


def load(study, results=RESULTS, part=""):
    """The rows of a study's file (of COLUMNS, by the ending of its name) that finished runs have, and these runs: data frames.

    Among the rows are those that the study has borrowed, where it has none of its own for the task and seed.
    """
    path = os.path.join(results, f"{study}_runs.csv")
    if not os.path.exists(path):
        fail(f"--report: there is no {path} yet; run the study first, without --report")
    runs = pd.read_csv(path)
    rows = pd.read_csv(os.path.join(results, f"{study}{part}.csv")).merge(runs[KEY])
    for name, (other, method) in BORROWED.get(study, {}).items():
        if os.path.exists(os.path.join(results, f"{other}_runs.csv")):
            others, _ = load(other, results, part)
            others = others[others.method == method].assign(method=name)
            own = pd.MultiIndex.from_frame(others[KEY]).isin(pd.MultiIndex.from_frame(rows[KEY]))
            rows = pd.concat([rows, others[~own]])
    return rows, runs


def markdown(columns, rows):
    """A table in Markdown."""
    header, *body = [f"| {' | '.join(map(str, row))} |" for row in (columns, *rows)]
    return "\n".join([header, "|" + "---|" * len(columns), *body])


def mean_and_range(values):
    """A cell: the mean over seeds, and the range where there is more than one."""
    spread = f" ({min(values):.0f} to {max(values):.0f})" if len(values) > 1 else ""
    return f"{np.mean(values):.0f}{spread}" if len(values) else ""
