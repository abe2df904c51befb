"""Learning quality (paper, section 4.3): FP32, AMP-FP16, AMP-BF16 and PPO-FP16 on six tasks, five seeds, 512,000 steps.

The runs go seed by seed over all tasks and methods, so that what is finished is always a fair comparison.

    python studies/learning.py --workers 2                                          # all, continuing what is there
    python studies/learning.py --env-ids HalfCheetah-v5 Hopper-v5 --seeds 1 2 3     # a part
"""

from dataclasses import dataclass

import tyro
from report import learning_table
from runner import Options, Run, load, run_study

ENV_IDS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Humanoid-v5", "InvertedDoublePendulum-v5", "Swimmer-v5")
METHODS = {
    "FP32": ("ppo_fp32.py", ()),
    "AMP-FP16": ("ppo_amp.py", ("--amp-dtype", "float16")),
    "AMP-BF16": ("ppo_amp.py", ("--amp-dtype", "bfloat16")),
    "PPO-FP16": ("ppo_fp16.py", ()),
}


@dataclass
class Args(Options):
    env_ids: tuple[str, ...] = ENV_IDS  # tasks
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # seeds


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    runs = [
        Run(method, trainer, flags, env_id, seed)
        for seed in args.seeds
        for env_id in args.env_ids
        for method, (trainer, flags) in METHODS.items()
    ]
    if args.report:
        print(learning_table(*load("learning", args.results)))
    else:
        run_study("learning", runs, args.workers, args.ray_address, args.results)
