"""The runner of the studies, with a trainer that only writes files: runners are killed, runs fail, and nothing is lost."""

import collections
import csv
import functools
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest
from torch.utils.tensorboard import SummaryWriter

STUDIES = pathlib.Path(__file__).parents[1] / "studies"
sys.path.insert(0, str(STUDIES))
import runner  # noqa: E402
from runner import Run  # noqa: E402

TRAINER = """
import argparse, json, os, shutil, sys, time
parser = argparse.ArgumentParser()
for flag in ("--env-id", "--runs-dir", "--run-name"):
    parser.add_argument(flag)
parser.add_argument("--seed", type=int)
parser.add_argument("--seconds", type=float, default=0.05)
parser.add_argument("--last-step", type=int, default=4096)
parser.add_argument("--fails", action="store_true")
args = parser.parse_args()
here, folder = os.path.dirname(__file__), os.path.join(args.runs_dir, args.run_name)
with open(os.path.join(here, "started"), "a") as file:
    file.write(f"{args.seed} {os.getpid()}\\n")
if args.fails:
    sys.exit("first line\\nboom")
shutil.copytree(os.path.join(here, "events"), folder)
time.sleep(args.seconds)
sizes = dict(total_timesteps=4096, num_envs=1, num_steps=2048, update_epochs=10, num_minibatches=32)
with open(os.path.join(folder, "args.json"), "w") as file:
    json.dump(dict(sizes, device="none", versions={}, commit=None), file)
with open(os.path.join(folder, "eval.csv"), "w") as file:
    file.write("global_step,mean_return,std_return,episodes\\n")
    file.writelines(f"{step},{args.seed + 0.5},0.25,10\\n" for step in range(0, args.last_step + 1, 2048))
"""

STUDY = """
import json, sys
sys.path.insert(0, {studies!r})
from runner import Run, run_study
workers, address, *runs = json.loads(sys.argv[1])
run_study("fake", [Run(*run[:2], tuple(run[2]), *run[3:]) for run in runs], workers, address, {results!r})
"""


@pytest.fixture
def trainer(tmp_path):
    (tmp_path / "trainer.py").write_text(TRAINER)
    writer = SummaryWriter(tmp_path / "events")
    for step, sps, skipped in ((2048, 100, 0), (4096, 300, 320)):
        writer.add_scalar("charts/SPS", sps, step)
        writer.add_scalar("numerics/skipped_updates", skipped, step)
        writer.add_scalar("numerics/swallowed_updates", 0.5, step)
        writer.add_scalar("numerics/zero_second_moments", 0, step)
    writer.close()
    return tmp_path / "trainer.py"


def started(trainer):
    """The seeds and the process ids of the trainings, in the order in which they started."""
    path = trainer.parent / "started"
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []


def start(trainer, runs, workers=2, address=None):
    """A runner in its own process."""
    script, results = trainer.parent / "study.py", trainer.parent / "results"
    script.write_text(STUDY.format(studies=str(STUDIES), results=str(results)))
    arguments = json.dumps([workers, address, *([run.method, run.trainer, run.flags, run.env_id, run.seed] for run in runs)])
    command = [sys.executable, str(script), arguments]
    return subprocess.Popen(command, cwd=STUDIES, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def results(trainer):
    """The rows of the study's evaluations and of its runs."""
    return [runner.read(trainer.parent / "results" / name) for name in ("fake.csv", "fake_runs.csv")]


def check_whole(trainer, seeds=None):
    """Every run that counts as finished is there once, with all its evaluations; all of them are, if seeds are given."""
    evaluations, runs = results(trainer)
    keys = [runner.key(row) for row in runs]
    assert len(set(keys)) == len(keys)
    assert collections.Counter(runner.key(row) for row in evaluations if runner.key(row) in keys) == dict.fromkeys(keys, 3)
    assert all(float(row["mean_return"]) == int(row["seed"]) + 0.5 for row in evaluations)
    assert seeds is None or {int(row["seed"]) for row in runs} == {int(row["seed"]) for row in evaluations} == set(seeds)
    return len(runs)


def alive(pid):
    """Whether a process runs; a zombie, which waits for init to notice, does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition, seconds=30):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_a_run_leaves(trainer):
    runs = [Run("m", str(trainer), ("--seconds", "0"), "Env-v1", 3)]
    study = start(trainer, runs)
    assert study.wait() == 0, study.stderr.read()
    evaluations, (row,) = results(trainer)
    expected = [["m", "Env-v1", "3", step, "3.5", "0.25", "10"] for step in ("0", "2048", "4096")]
    assert [list(evaluation.values()) for evaluation in evaluations] == expected
    assert (row["flags"], row["median_sps"], row["skipped_from"]) == ("--seconds 0", "300", "4096")


@pytest.mark.parametrize(
    ("skipped", "expected"), [([0, 0], None), ([320, 320], 1), ([0, 320, 320], 2), ([320, 319], None), ([320, 0, 320], 3)]
)
def test_skipped_from(skipped, expected):
    Event = collections.namedtuple("Event", "step value")
    assert runner.skipped_from([Event(i + 1, value) for i, value in enumerate(skipped)], 320) == expected


def test_finished_runs_are_skipped_and_none_is_done_twice(trainer):
    runs = [Run("m", str(trainer), (), "Env-v1", seed) for seed in (1, 2)]
    runner.run_study("fake", runs, 1, results=trainer.parent / "results")
    before = results(trainer)
    more = [*runs, Run("m", str(trainer), (), "Env-v1", 3)]
    runner.run_study("fake", more + more, 2, results=trainer.parent / "results")
    assert [seed for seed, _ in started(trainer)] == [1, 2, 3]
    assert [rows[: len(old)] for rows, old in zip(results(trainer), before)] == before
    assert check_whole(trainer, [1, 2, 3]) == 3


@pytest.mark.parametrize("workers", [1, 3])
def test_runs_start_in_the_order_of_the_list(tmp_path, monkeypatch, workers):
    order, seeds = [], [5, 3, 9, 1, 7, 2, 8]

    def execute(run):
        order.append(run.seed)
        time.sleep(0.1)
        return dict.fromkeys(runner.COLUMNS, [])

    monkeypatch.setattr(runner, "execute", execute)
    runner.run_study("fake", [Run("m", "trainer.py", (), "Env-v1", seed) for seed in seeds], workers, results=tmp_path)
    assert sorted(order) == sorted(seeds)
    assert all(abs(order.index(seed) - i) < workers for i, seed in enumerate(seeds))


def test_a_failed_run_ends_no_other_and_is_listed(trainer):
    fails, interrupted = ("--fails",), ("--last-step", "2048")
    flags = {2: fails, 4: interrupted}
    runs = [Run("m", str(trainer), flags.get(seed, ()), "Env-v1", seed) for seed in range(1, 6)]
    study = start(trainer, runs)
    error = study.communicate()[1]
    assert study.returncode == 1
    assert check_whole(trainer, [1, 3, 5]) == 3
    _, listed = error.split("2 of 5 runs failed:")
    first, second = listed.strip().split("\n\n")
    assert first.endswith(f"{trainer} --env-id Env-v1 --seed 2 --fails\nRuntimeError: ended with status 1:\nfirst line\nboom")
    assert second.endswith("RuntimeError: was interrupted after 2048 of 4096 steps")
    # and, mended, they are what is left to do
    runs = [Run("m", str(trainer), (), "Env-v1", seed) for seed in range(1, 6)]
    assert start(trainer, runs).wait() == 0
    assert check_whole(trainer, range(1, 6)) == 5
    assert sorted(seed for seed, _ in started(trainer)) == [1, 2, 2, 3, 4, 4, 5]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_killed_runner_leaves_neither_orphans_nor_torn_rows(trainer):
    rng, finished = random.Random(0), 0
    long = Run("m", str(trainer), ("--seconds", "60"), "Env-v1", 99)
    runs = [Run("m", str(trainer), ("--seconds", "0.1"), "Env-v1", seed) for seed in range(50)]
    for _ in range(3):
        before = len(started(trainer))
        study = start(trainer, [long, *runs])
        wait_until(lambda before=before: len(started(trainer)) > before + 2)
        time.sleep(rng.uniform(0, 0.5))
        study.send_signal(signal.SIGKILL)
        assert study.wait() == -signal.SIGKILL
        wait_until(lambda: not any(alive(pid) for _, pid in started(trainer)), 2)
        assert check_whole(trainer) >= finished  # what was finished stays so
        finished = check_whole(trainer)
    study = start(trainer, runs[: finished + 3])
    assert study.wait() == 0, study.stderr.read()
    check_whole(trainer, range(finished + 3))


class Killed(BaseException):
    pass


@pytest.mark.parametrize("moment", range(18))
def test_killed_at_any_step_of_writing(trainer, monkeypatch, moment):
    """Two runs, three files each, and of each file: half its rows are written, all are, it is replaced."""
    folder, moments = trainer.parent / "results", iter(range(19))

    def rows(run):
        evaluations = [dict(zip(runner.KEY, run.key), mean_return=run.seed + 0.5) for _ in range(3)]
        numerics = [dict(zip(runner.KEY, run.key), swallowed_updates=0.5) for _ in range(3)]
        return {"": evaluations, "_numerics": numerics, "_runs": [dict(zip(runner.KEY, run.key), flags="")]}

    def killed_before(function, *args):
        if next(moments) == moment:
            raise Killed
        return function(*args)

    class Writer(csv.DictWriter):
        def writerows(self, rows):
            super().writerows(rows[: len(rows) // 2])
            killed_before(super().writerows, rows[len(rows) // 2 :])

    runs = [Run("m", str(trainer), (), "Env-v1", seed) for seed in (1, 2)]
    monkeypatch.setattr(runner, "execute", rows)
    with monkeypatch.context() as patch:
        patch.setattr(csv, "DictWriter", Writer)
        patch.setattr(os, "fsync", functools.partial(killed_before, os.fsync))
        patch.setattr(os, "replace", functools.partial(killed_before, os.replace))
        with pytest.raises(Killed):
            runner.run_study("fake", runs, 1, results=folder)
    assert check_whole(trainer) == moment // 9
    runner.run_study("fake", runs, 1, results=folder)
    assert check_whole(trainer, [1, 2]) == 2


def test_ctrl_c_ends_the_runner_and_its_trainings(trainer):
    study = start(trainer, [Run("m", str(trainer), ("--seconds", "60"), "Env-v1", seed) for seed in range(4)])
    wait_until(lambda: len(started(trainer)) == 2)
    study.send_signal(signal.SIGINT)
    assert study.wait(10) == 130
    wait_until(lambda: not any(alive(pid) for _, pid in started(trainer)), 2)
    assert check_whole(trainer, []) == 0


def test_a_ray_cluster_of_two_runs_the_same_list(trainer):
    ray = pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args=dict(num_cpus=1))
    try:
        cluster.add_node(num_cpus=1)
        flags = {0: ("--seconds", "60"), 3: ("--fails",)}
        runs = [Run("m", str(trainer), flags.get(seed, ()), "Env-v1", seed) for seed in range(6)]
        study = start(trainer, runs, address=cluster.address)
        wait_until(lambda: check_whole(trainer) == 4, 60)  # each is kept as it ends, whatever the first does
        study.send_signal(signal.SIGKILL)
        study.wait()
        wait_until(lambda: not any(alive(pid) for _, pid in started(trainer)), 30)
        study = start(trainer, runs[1:], address=cluster.address)
        error = study.communicate()[1]
        assert study.returncode == 1 and "1 of 5 runs failed" in error and "boom" in error, error
        assert check_whole(trainer, [1, 2, 4, 5]) == 4
    finally:
        cluster.shutdown()
    assert not ray.is_initialized()


def one_line(capsys):
    (line,) = capsys.readouterr().err.strip().splitlines()
    return line


def test_errors_of_a_user_are_one_line(trainer, capsys):
    results = trainer.parent / "results"
    run = Run("m", str(trainer), (), "Env-v1", 1)
    with pytest.raises(SystemExit, match="2"):
        runner.run_study("fake", [run], 0, results=results)
    assert "--workers is 0" in one_line(capsys)
    with pytest.raises(SystemExit, match="2"):
        runner.load("fake", results)
    assert "without --report" in one_line(capsys)
    runner.run_study("fake", [run], 1, results=results)
    capsys.readouterr()
    with pytest.raises(SystemExit, match="2"):
        runner.run_study("fake", [Run("m", str(trainer), ("--seconds", "1"), "Env-v1", 1)], 1, results=results)
    assert "--results" in one_line(capsys)
    pytest.importorskip("ray")
    with pytest.raises(SystemExit, match="2"):
        runner.run_study("fake", [run], 1, ray_address="localhost:1", results=results)
    assert "--ray-address localhost:1" in one_line(capsys)
    assert len(started(trainer)) == 1
