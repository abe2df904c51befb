"""Write-back: do the updates that the 16-bit grid swallows cause what BF16 loses? The paper (section 4.5) leaves it open.

FP16 and BF16 with each --writeback of ppo_fp16.py: log_std, the paper's, which keeps the unwritten part of an update for log_std
alone; compensated, which keeps it for every parameter, in 16 bits; stochastic, which rounds up or down at random, right on
average. 512,000 steps on three tasks with five seeds. In the paper BF16 with the first keeps 10.7 to 79.6% of FP16's return AUC.
FP16 with the first is the PPO-FP16 of learning.py, and trained there.

Two arms more test another cause: SHARP's root second moment w. It decays by at most 5e-4 of itself in a step, less than half the
spacing of BF16, which is 2^-9 of w or more: so in BF16 it never shrinks. They keep w in FP32 (by patched.py), and nothing else.

    python studies/writeback.py --workers 2      # about 10 hours of one core
    python studies/writeback.py --report
"""

from dataclasses import dataclass

import tyro
from comparison import return_auc
from runner import BORROWED, Options, Run, load, markdown, mean_and_range, run_study

ARMS = {
    f"{name}, {writeback}": ("ppo_fp16.py", ("--dtype", dtype, "--writeback", writeback))
    for name, dtype in (("FP16", "float16"), ("BF16", "bfloat16"))
    for writeback in ("log_std", "compensated", "stochastic")
} | {
    f"{name}w in FP32": ("studies/patched.py", ("--fp32-root", "--dtype", "bfloat16", "--writeback", writeback))
    for name, writeback in (("BF16, ", "log_std"), ("BF16, compensated, ", "compensated"))
}

ENV_IDS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")


@dataclass
class Args(Options):
    env_ids: tuple[str, ...] = ENV_IDS  # tasks
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)  # seeds
    total_timesteps: int = 512_000  # environment steps of each run


def make_runs(args):
    """Seed by seed over all tasks and arms, without what learning.py trains."""
    length = ("--total-timesteps", str(args.total_timesteps))
    return [
        Run(arm, trainer, (*flags, *length), env_id, seed)
        for seed in args.seeds
        for env_id in args.env_ids
        for arm, (trainer, flags) in ARMS.items()
        if arm not in BORROWED["writeback"] or args.total_timesteps != Args.total_timesteps
    ]


def bytes_a_parameter(arm):
    """What parameters and optimizer state take together on HalfCheetah-v5, in bytes a parameter; FP32 with Adam takes 12."""
    import patched  # PyTorch comes with it, and the trainings do without

    args = tyro.cli(patched.Args, args=[*ARMS[arm][1], "--no-cuda"])
    agent = patched.ppo_fp16.Agent(17, 6).to(getattr(patched.torch, args.dtype))
    optimizer = patched.ppo_fp16.make_optimizer(agent, args)
    state = optimizer.state[optimizer.theta]
    size = sum(tensor.numel() * tensor.element_size() for tensor in (optimizer.theta, *state.values()))
    size += 2 * state["root_exp_avg_sq"].numel() if args.fp32_root else 0
    return size / optimizer.theta.numel()


def table(evaluations, runs):
    """Every arm on every task: as a share of FP16 with the paper's write-back, and wins over its own dtype with that.

    Both are over the seeds that the two arms have finished.
    """
    own = evaluations[~evaluations.method.isin(BORROWED["writeback"])]  # the learning study has other tasks too
    curves = evaluations[evaluations.env_id.isin(own.env_id)].groupby(["env_id", "seed", "method"], sort=False)
    aucs = curves[["global_step", "mean_return"]].apply(return_auc).unstack().reindex(columns=list(ARMS))
    final = curves.mean_return.last().unstack().reindex(columns=list(ARMS))
    rows = []
    for env_id, of_env in aucs.groupby("env_id", sort=False):
        for arm in ARMS:
            baseline = f"{arm[:4]}, log_std"
            auc, fp16, own = of_env[arm], of_env["FP16, log_std"], of_env[baseline]
            if auc.isna().all():
                continue
            cells = [f"{bytes_a_parameter(arm):.2f}", auc.count()]
            cells += [mean_and_range(values.dropna()) for values in (auc, final.loc[env_id, arm])]
            both = auc.notna() & fp16.notna()
            cells.append(f"{100 * auc[both].mean() / fp16[both].mean():.1f}%" if both.any() else "")
            both = auc.notna() & own.notna()
            cells.append("" if arm == baseline else f"{(auc > own)[both].sum()} of {both.sum()}")
            rows.append([env_id, arm, *cells])
    columns = ["task", "arm", "bytes a parameter", "seeds", "return AUC", "last return"]
    return markdown([*columns, "AUC of FP16, log_std", "wins over its own log_std"], rows)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    if args.report:
        print(table(*load("writeback", args.results)))
    else:
        run_study("writeback", make_runs(args), args.workers, args.ray_address, args.results)
