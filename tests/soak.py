"""A long training under watch: memory, disk, and whether every number that it logs is finite.

    python tests/soak.py                                     # 5,000,000 steps of InvertedDoublePendulum-v5, about 40 minutes
    python tests/soak.py --trainer ppo_fp32.py --total-timesteps 1000000

Prints the resident memory every minute; at the end its slope over the second half of the run, the size of the run's folder, and
whether all parameters and all curves are finite. Writes studies/results/soak.csv. Exits with status 1 if something is not.
"""

import csv
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np
import torch
import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@dataclass
class Args:
    trainer: str = "ppo_fp16.py"  # which trainer
    env_id: str = "InvertedDoublePendulum-v5"  # task
    total_timesteps: int = 5_000_000  # environment steps
    interval: float = 60.0  # seconds between two looks at the memory


def resident_mb(pid):
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(args):
    with tempfile.TemporaryDirectory() as folder:
        sizes = ["--env-id", args.env_id, "--total-timesteps", str(args.total_timesteps), "--quiet"]
        command = [sys.executable, os.path.join(ROOT, args.trainer), *sizes, "--runs-dir", folder, "--run-name", "run"]
        start, run, rows = time.monotonic(), os.path.join(folder, "run"), []
        process = subprocess.Popen(command)
        while process.poll() is None:
            time.sleep(args.interval)
            if process.poll() is None and os.path.exists(os.path.join(run, "checkpoint.pt")):
                events = EventAccumulator(run).Reload().Scalars("charts/SPS")
                disk = sum(entry.stat().st_size for entry in os.scandir(run)) / 2**20
                seconds, memory = round(time.monotonic() - start), round(resident_mb(process.pid), 1)
                rows.append([seconds, events[-1].step, memory, round(disk, 2)])
                print(*rows[-1], flush=True)
        model = torch.load(os.path.join(run, "model.pt"), weights_only=True)["agent"]
        events = EventAccumulator(run, size_guidance={"scalars": 0}).Reload()
        curves = {tag: [event.value for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    with open(os.path.join(ROOT, "studies", "results", "soak.csv"), "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([["seconds", "global_step", "resident_mb", "disk_mb"], *rows])
    steps, memory, disk = np.array(rows)[len(rows) // 2 :, 1:].T
    odd = [tag for tag, values in curves.items() if not all(map(math.isfinite, values))]
    finite = all(parameter.isfinite().all() for parameter in model.values()) and not odd
    slope = np.polyfit(steps, memory, 1)[0] * 1e6
    print(f"memory: {memory.max():.0f} MB at most, {slope:+.2f} MB per million steps over the second half")
    print(f"disk: {disk[-1] / steps[-1] * 1e6:.2f} MB per million steps")
    print(f"of {len(curves)} curves not finite: {', '.join(odd) or 'none'}")
    raise SystemExit(bool(process.returncode or not finite))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
