"""Steps per second of the trainers on one CPU core, beside Stable-Baselines3, in one interleaved run.

    pip install -r requirements.txt -r tests/requirements.txt
    python tests/bench_cpu.py                       # about 10 minutes; nothing else should run
    python tests/bench_cpu.py --script CleanRL=path/to/ppo_continuous_action.py

Every contender trains on the same task with CleanRL's sizes, one thread, in a process of its own, for a while; what counts is the
median duration of its whole iterations (rollout, update, logging) after the first two. A script given with --script must know
CleanRL's flags and log `charts/SPS` once an iteration. Writes studies/results/bench_cpu.csv; studies/report.py tables it.
"""

import csv
import glob
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
SB3 = """
import gymnasium, torch
from stable_baselines3 import PPO
from stable_baselines3.common.logger import configure
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize
torch.set_num_threads(1)
envs = VecNormalize(DummyVecEnv([lambda: Monitor(gymnasium.make({env_id!r}))]))
network = dict(pi=[64, 64], vf=[64, 64])
model = PPO("MlpPolicy", envs, n_steps=2048, batch_size=64, n_epochs=10, device="cpu", policy_kwargs=dict(net_arch=network))
model.set_logger(configure("runs/sb3", ["tensorboard"]))
model.learn(512_000)
"""


@dataclass
class Args:
    env_id: str = "HalfCheetah-v5"  # task
    rounds: int = 3  # times that each contender runs
    seconds: int = 30  # of each run, after the compiler has finished
    script: tuple[str, ...] = ()  # further contenders, as NAME=PATH


def contenders(args):
    """Name -> command."""
    python, steps = sys.executable, ["--env-id", args.env_id, "--total-timesteps", "512000"]
    commands = {"Stable-Baselines3": [python, "-c", SB3.format(env_id=args.env_id)]}
    commands |= {name: [python, path, *steps] for name, path in (script.split("=", 1) for script in args.script)}
    trainers = {"FP32": ["ppo_fp32.py"], "AMP-FP16": ["ppo_amp.py"], "AMP-BF16": ["ppo_amp.py", "--amp-dtype", "bfloat16"]}
    for name, (trainer, *flags) in (trainers | {"PPO-FP16": ["ppo_fp16.py"]}).items():
        command = [python, os.path.join(ROOT, trainer), *flags, *steps, "--eval-every", "1000", "--eval-episodes", "1"]
        commands |= {f"{name}, eager": [*command, "--no-compile"], f"{name}, compiled": command}
    return commands


def measure(command, seconds):
    """The durations of the iterations that a command does in some seconds, without its first two, and its peak RSS in MB."""
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        times, deadline = [], time.monotonic() + 300
        while len(times) < 4 or times[-1] - times[2] < seconds:
            time.sleep(1)
            if process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"bench_cpu.py: error: no iterations came from {' '.join(command)[:200]}")
            if logs := glob.glob(os.path.join(folder, "runs", "*", "events*")):
                events = EventAccumulator(os.path.dirname(logs[0])).Reload()
                tags = {"charts/SPS", "time/fps"} & set(events.Tags()["scalars"])
                times = [event.wall_time for event in events.Scalars(tags.pop())] if tags else []
        process.send_signal(signal.SIGKILL)
        _, _, usage = os.wait4(process.pid, 0)
    return [after - before for before, after in zip(times[2:], times[3:])], usage.ru_maxrss / 1024


def main(args):
    with open(os.path.join(ROOT, "studies", "results", "bench_cpu.csv"), "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["env_id", "name", "round", "iterations", "median_steps_per_second", "peak_rss_mb"])
        for number in range(args.rounds):
            for name, command in contenders(args).items():
                durations, memory = measure(command, args.seconds)
                row = [args.env_id, name, number, len(durations), round(2048 / statistics.median(durations), 1), round(memory)]
                writer.writerow(row)
                file.flush()
                print(*row)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
