"""The studies: number formats against slow references, what they train, and their tables on made-up results."""

import pathlib
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import tyro

import ppo_amp
import ppo_fp16
import ppo_fp32

STUDIES = pathlib.Path(__file__).parents[1] / "studies"
sys.path.insert(0, str(STUDIES))
import ablations  # noqa: E402
import learning  # noqa: E402
import patched  # noqa: E402
import perturbation  # noqa: E402
import precision_boundary  # noqa: E402
import runner  # noqa: E402
import writeback  # noqa: E402
from patched import round_mantissa  # noqa: E402

PATTERNS = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)  # every FP16 number
bits_of_formats = pytest.mark.parametrize("bits", range(1, 11))


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def nearest(x, bits):
    """Reference, on x in FP64: the nearest of all numbers of the format, which are listed; 2^16 stands for infinity."""
    numbers = [j * 2.0 ** (-14 - bits) for j in range(2**bits)]
    numbers += [(1 + j / 2**bits) * 2.0**e for e in range(-14, 16) for j in range(2**bits)] + [2.0**16]
    numbers = np.array(numbers)
    above = np.searchsorted(numbers, np.abs(x)).clip(1, len(numbers) - 1)
    low, high = np.abs(x) - numbers[above - 1], numbers[above] - np.abs(x)
    index = np.where(low < high, above - 1, np.where(low > high, above, above - above % 2))  # a tie goes to the even mantissa
    values = np.where(index == len(numbers) - 1, np.inf, numbers[index])
    return torch.from_numpy(np.where(np.isnan(x), np.nan, np.copysign(values, x))).half()


@bits_of_formats
def test_rounding_of_every_fp16_number(bits):
    expected, rounded = nearest(PATTERNS.double().numpy(), bits), round_mantissa(PATTERNS, bits)
    numbers = ~PATTERNS.isnan()
    assert same_bits(rounded[numbers], expected[numbers])
    assert rounded[~numbers].isnan().all()
    assert len(rounded[numbers].unique()) == 2 * 31 * 2**bits + 1  # 0 once, infinity twice


@bits_of_formats
def test_rounding_of_fp32_numbers_is_to_the_nearest_in_one_step(bits):
    finite = PATTERNS[PATTERNS.isfinite()].float()
    grid = round_mantissa(finite, bits).float().unique()
    grid = grid[grid.isfinite()]
    middles = (grid[1:] + grid[:-1]) / 2  # exact
    middles = torch.cat([middles, torch.nextafter(middles, torch.tensor(9e9)), torch.nextafter(middles, torch.tensor(-9e9))])
    spread = torch.randn(100_000, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(100_000).remainder(60).sub(40)
    for x in (middles, spread, torch.tensor([0.0, -0.0, 1e-40, -1e-40, 3e38, torch.inf, -torch.inf])):
        assert same_bits(round_mantissa(x, bits), nearest(x.double().numpy(), bits))


def small(tmp_path, **flags):
    flags = dict(env_id="InvertedPendulum-v5", total_timesteps=512, num_steps=256, num_minibatches=8, update_epochs=2) | flags
    return patched.Args(**flags, eval_every=100, eval_episodes=1, cuda=False, runs_dir=str(tmp_path), run_name="run")


@pytest.fixture
def trainer(monkeypatch):
    """ppo_fp16, as it is again after the test."""
    for name in ("make_optimizer", "sharp_update", "rollout", "update_minibatch"):
        monkeypatch.setattr(ppo_fp16, name, getattr(ppo_fp16, name))
    return ppo_fp16


def trained(args):
    """The files that a training leaves: evaluations, and parameters with the observation statistics."""
    patched.main(args)
    saved = torch.load(pathlib.Path(args.run_dir, "model.pt"), weights_only=True)
    return pathlib.Path(args.run_dir, "eval.csv").read_text(), saved["agent"] | saved["obs_statistics"]


def test_ten_mantissa_bits_are_the_plain_trainer(trainer, tmp_path):
    args = small(tmp_path, num_envs=2)
    evaluations, plain = trained(args)
    same_evaluations, same = trained(replace(args, mantissa_bits=10, run_name="10"))
    assert evaluations == same_evaluations
    assert all(torch.equal(value, same[name]) for name, value in plain.items())
    _, fewer = trained(replace(args, mantissa_bits=9, run_name="9"))
    assert not torch.equal(fewer["log_std"], plain["log_std"])


@pytest.mark.parametrize("bits", [8, 5])
def test_every_main_tensor_has_the_mantissa_bits(trainer, tmp_path, bits):
    seen = {name: [] for name in ("theta", "gradient", "exp_avg", "root_exp_avg_sq")}
    batches = []
    patched.emulate(bits)
    rollout, update_minibatch = trainer.rollout, trainer.update_minibatch

    def spied_rollout(agent, *args):
        batch, episodes = rollout(agent, *args)
        batches.append(batch)
        assert all(same_bits(parameter, round_mantissa(parameter, bits)) for parameter in agent.parameters())  # from the start
        means = agent.mean(batch["obs"])
        assert not same_bits(means, round_mantissa(means, bits))  # activations are FP16
        agree = (round_mantissa(means, bits) == batch["means"]).double().mean()  # all but for sums in another order
        assert agree > 0.95  # the policy acted on the observations that are kept
        return batch, episodes

    def spied_update(agent, optimizer, minibatch, args, gradient_function):
        metrics = update_minibatch(agent, optimizer, minibatch, args, gradient_function)
        state = optimizer.state[optimizer.theta]
        for name, tensor in dict(theta=optimizer.theta, gradient=optimizer.theta.grad, **state).items():
            if name in seen:
                seen[name].append(tensor.detach().clone())
        norm = optimizer.theta.grad.double().norm()
        assert metrics["numerics/grad_norm"] == pytest.approx(norm.item(), rel=1e-5)  # of the gradient that is kept
        return metrics

    trainer.rollout, trainer.update_minibatch = spied_rollout, spied_update
    trainer.main(small(tmp_path))
    for tensor in [tensor for tensors in (*seen.values(), *(batch.values() for batch in batches)) for tensor in tensors]:
        assert tensor.dtype == torch.float16 and same_bits(tensor, round_mantissa(tensor, bits))
    assert {"obs", "actions", "values", "advantages", "returns", "means", "correction"} <= batches[0].keys()
    assert all((batch["correction"] == 0).all() for batch in batches)  # the policy that acted is the one that is stored
    assert all(len(tensors) == 32 for tensors in seen.values())


def test_what_sharp_writes_is_rounded_once(trainer):
    """1 + 2^-9 less almost half a spacing of E5M9: rounded to FP16 first, a tie, which would go to 1."""
    patched.emulate(9)
    theta = torch.nn.Parameter(torch.tensor([1 + 2.0**-9], dtype=torch.float16))
    lr = 2.0**-10 - 2.0**-13
    optimizer = trainer.SHARP([theta], [((1,), False)], residual=slice(0, 1), lr=lr, eps=1e-12)
    theta.grad = torch.ones_like(theta)
    optimizer.step()
    assert theta.item() == 1 + 2.0**-9
    assert optimizer.state[theta]["residual"].item() == pytest.approx(lr, rel=2e-3)
    optimizer.step()  # and what waited is written now
    assert theta.item() == 1
    assert optimizer.state[theta]["residual"].item() == pytest.approx(2 * lr - 2.0**-9, rel=1e-2)


@pytest.mark.parametrize("fp32", [False, True])
def test_root_second_moment_of_bf16_decays_only_in_fp32(trainer, fp32):
    if fp32:
        patched.keep_root_in_fp32()
    agent = trainer.Agent(4, 2).bfloat16()
    optimizer = trainer.make_optimizer(agent, trainer.Args(dtype="bfloat16"))
    state = optimizer.state[optimizer.theta]
    assert state["root_exp_avg_sq"].dtype == (torch.float32 if fp32 else torch.bfloat16)
    optimizer.theta.grad = torch.randn(optimizer.theta.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    optimizer.step()
    first = state["root_exp_avg_sq"].double()
    optimizer.theta.grad = torch.zeros_like(optimizer.theta)
    for _ in range(1000):
        optimizer.step()
    expected = first * 0.999**500 if fp32 else first
    assert first.min() > 0
    torch.testing.assert_close(state["root_exp_avg_sq"].double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize(("bits", "fp32", "decays"), [(10, False, True), (9, False, False), (5, False, False), (5, True, True)])
def test_10_mantissa_bits_are_the_fewest_with_which_the_root_second_moment_decays(trainer, bits, fp32, decays):
    """Half the spacing of a number with 10 bits is at most 4.9e-4 of it, with 9 at least that; w loses 5e-4 of itself a step."""
    if fp32:
        patched.keep_root_in_fp32()
    patched.emulate(bits)
    optimizer = trainer.make_optimizer(trainer.Agent(4, 2).half(), trainer.Args())
    state = optimizer.state[optimizer.theta]
    optimizer.theta.grad = 1 + torch.rand(optimizer.theta.shape, generator=torch.Generator().manual_seed(0)).half()
    optimizer.step()
    first = state["root_exp_avg_sq"].double()
    optimizer.theta.grad = torch.zeros_like(optimizer.theta)
    for _ in range(1000):
        optimizer.step()
    kept = state["root_exp_avg_sq"].double() / first
    assert kept.max() < 0.75 if decays else kept.min() > 0.97


def test_patched_trainings_run(trainer, tmp_path):
    _, plain = trained(small(tmp_path, dtype="bfloat16"))
    _, wide = trained(replace(small(tmp_path, dtype="bfloat16", fp32_root=True), run_name="wide"))
    assert any(not torch.equal(value, wide[name]) for name, value in plain.items())
    assert all(value.isfinite().all() for value in wide.values())


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--mantissa-bits 11", "--mantissa-bits is 11"),
        ("--mantissa-bits 0", "--mantissa-bits is 0"),
        ("--mantissa-bits 8 --dtype bfloat16", "--dtype float16"),
        ("--fp32-root --no-module-c", "--no-module-c"),
    ],
)
def test_patched_refuses_what_it_cannot_patch(trainer, flags, named, capsys):
    with pytest.raises(SystemExit, match="2"):
        patched.main(tyro.cli(patched.Args, args=flags.split()))
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert named in line


STUDY_MODULES = pytest.mark.parametrize(
    "study", [ablations, precision_boundary, perturbation, writeback], ids=lambda study: study.__name__
)
TRAINERS = {
    "ppo_fp32.py": ppo_fp32.Args,
    "ppo_amp.py": ppo_amp.Args,
    "ppo_fp16.py": ppo_fp16.Args,
    "studies/patched.py": patched.Args,
}


@STUDY_MODULES
def test_the_trainers_know_every_flag(study):
    runs = study.make_runs(study.Args())
    assert len({run.key for run in runs}) == len(runs)
    assert len({(run.trainer, run.flags, run.env_id, run.seed) for run in runs}) == len(runs)  # nothing twice under two names
    for run in {(run.trainer, run.flags): run for run in runs}.values():
        args = tyro.cli(TRAINERS[run.trainer], args=run.command[1:])
        assert (args.env_id, args.seed) == (run.env_id, run.seed)


def test_ablations_are_the_papers():
    runs = [run for run in ablations.make_runs(ablations.Args()) if run.trainer == "ppo_fp16.py"]
    on = [tyro.cli(ppo_fp16.Args, args=run.flags) for run in runs]
    modules = {run.method: (args.module_a, args.module_b, args.module_c) for run, args in zip(runs, on)}
    assert modules == {
        "full": (True, True, True),
        "-A": (False, True, True),
        "-B": (True, False, True),
        "-C": (True, True, False),
        "naive": (False, False, False),
        "+C": (False, False, True),
    }
    assert {args.total_timesteps for args in on} == {151_552} and len(runs) == 18
    assert ablations.GATE % (on[0].batch_size * on[0].eval_every) == 0  # there is an evaluation at the gate


def test_studies_go_seed_by_seed_over_all_tasks():
    runs = writeback.make_runs(writeback.Args())
    assert [run.seed for run in runs] == sorted(run.seed for run in runs)
    assert len(runs) == 7 * 3 * 5 and len({(run.method, run.env_id) for run in runs[:21]}) == 21
    runs = precision_boundary.make_runs(precision_boundary.Args())
    assert [run.method for run in runs[:6]] == [f"E5M{bits}" for bits in range(10, 4, -1)]
    assert [run.method for run in runs[12:14]] == ["E5M10, w in FP32", "E5M9, w in FP32"] and "--fp32-root" in runs[12].flags
    assert len(runs) == 2 * 6 * 2 + 3 * 5
    runs = perturbation.make_runs(perturbation.Args())
    assert len(runs) == 16 and [run.trainer for run in runs[:4]] == [run.trainer for run in runs[4:8]]


def test_what_a_study_borrows_is_the_training_that_it_stands_for():
    """And nothing is trained twice, in whatever study and by whatever flags, but the copies that perturbation.py compares."""

    def training(run):
        return run.trainer, repr(replace(tyro.cli(TRAINERS[run.trainer], args=run.command[1:]), run_name="run"))

    def trained(method, trainer, flags):
        return training(runner.Run(method, trainer, flags, "Swimmer-v5", 1))

    bf16 = [run for run in precision_boundary.make_runs(precision_boundary.Args()) if run.method == "Native-BF16"]
    (native,) = [run for run in bf16 if (run.env_id, run.seed) == ("Swimmer-v5", 1)]
    assert training(native) == trained("BF16, log_std", *writeback.ARMS["BF16, log_std"])
    assert trained("FP16, log_std", *writeback.ARMS["FP16, log_std"]) == trained("PPO-FP16", *learning.METHODS["PPO-FP16"])

    runs = [run for study in (ablations, precision_boundary, writeback) for run in study.make_runs(study.Args())]
    for method, (trainer, flags) in learning.METHODS.items():
        runs += [runner.Run(method, trainer, flags, env_id, seed) for env_id in learning.ENV_IDS for seed in range(1, 6)]
    assert len({training(run) for run in runs}) == len(runs)


def test_borrowed_runs_stand_where_a_study_has_none_of_its_own(tmp_path):
    def write(study, rows):
        frame = pd.DataFrame(rows, columns=["method", "env_id", "seed", "mean_return"]).assign(global_step=0)
        frame.to_csv(tmp_path / f"{study}.csv", index=False)
        frame[runner.KEY].to_csv(tmp_path / f"{study}_runs.csv", index=False)

    write("writeback", [("FP16, log_std", "A", 1, 10), ("BF16, log_std", "A", 1, 11), ("BF16, log_std", "A", 2, 12)])
    write("precision_boundary", [("Native-BF16", "B", 1, 20)])
    assert len(runner.load("writeback", tmp_path)[0]) == 3  # there is no learning study yet
    write("learning", [("PPO-FP16", "A", 1, 30), ("PPO-FP16", "A", 2, 31), ("FP32", "A", 1, 32)])
    rows, runs = runner.load("writeback", tmp_path)
    assert len(runs) == 3
    assert sorted(rows[rows.method == "FP16, log_std"].mean_return) == [10, 31]
    rows, _ = runner.load("precision_boundary", tmp_path)
    found = {(row.method, row.env_id, row.seed): row.mean_return for row in rows.itertuples()}
    assert found.pop(("PPO-FP16", "A", 1)) == 30 and found.pop(("PPO-FP16", "A", 2)) == 31
    assert found == {("Native-BF16", "A", 1): 11, ("Native-BF16", "A", 2): 12, ("Native-BF16", "B", 1): 20}


def results(curves, skipped_from=None):
    """The data frames of a study from {(method, env_id, seed): returns}, the steps being 10,240 apart, from 0."""
    names = ["method", "env_id", "seed"]
    evaluations = pd.DataFrame(
        dict(zip(names, key), global_step=10_240 * i, mean_return=value, std_return=1.0 + i % 2, episodes=10)
        for key, values in curves.items()
        for i, value in enumerate(values)
    )
    runs = pd.DataFrame(dict(zip(names, key), skipped_from=(skipped_from or {}).get(key, np.nan)) for key in curves)
    return evaluations, runs


def rows_of(table):
    """{first cells: all cells} of the rows of Markdown tables."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("| ")]
    return {tuple(line[:2]): line for line in lines}


@pytest.mark.parametrize(
    ("returns", "skipped_from", "crash"),
    [
        ([0, 1, 2, 3], np.nan, False),
        ([0, 1, np.nan, np.nan], np.nan, True),
        ([0, np.inf, 2, 3], np.nan, True),
        ([0, 1, 2, np.nan], np.nan, True),  # after the gate
        ([0, 1, 2, 3], 20_480, True),
        ([0, 1, 2, 3], 22_528, False),
        ([0, 5, 5, 6], np.nan, False),  # with another standard deviation
    ],
)
def test_crashes(returns, skipped_from, crash):
    key = ("naive", "HalfCheetah-v5", 1)
    evaluations, _ = results({key: returns})
    assert ablations.crashed(evaluations, skipped_from) == crash


def test_a_policy_that_no_longer_acts_is_a_crash():
    evaluations, _ = results({("naive", "HalfCheetah-v5", 1): [0.5, 5, 5, 6, 6]})
    evaluations.std_return = 1.0
    assert ablations.crashed(evaluations, np.nan)
    evaluations.loc[2, "mean_return"] = 5.5
    assert not ablations.crashed(evaluations, np.nan)  # they are the same after the gate only


def test_ablations_table():
    cheetah = "HalfCheetah-v5"
    curves = {("full", cheetah, 1): [0, 300, 600], ("full", cheetah, 2): [0, 100, 200], ("naive", cheetah, 1): [0, 1, 2]}
    curves |= {("naive", cheetah, 2): [0, 1, np.nan], ("FP32", cheetah, 1): [0, 20, 30], ("-B", cheetah, 1): [1, 1.5, 1]}
    rows = rows_of(ablations.table(*results(curves)))
    full = ["full, or +C+A+B", "A B C", "2", "0 of 2", "200 (100 to 300)", "400", "283", "618.3, the highest"]
    assert rows["full, or +C+A+B", "A B C"] == full
    assert rows["naive", ""][2:] == ["2", "1 of 2", "Crash", "Crash", "Crash", "Crash"]
    assert rows["-B, or +C+A", "A C"][4:] == ["1", "1", "", "465.8"]
    assert {name for name, _ in rows} == {"configuration", "full, or +C+A+B", "naive", "FP32", "-B, or +C+A"}


def test_precision_boundary_table():
    curves = {("PPO-FP16", "Hopper-v5", seed): [0, 100 * seed, 200 * seed] for seed in (1, 2, 3)}
    curves |= {("Native-BF16", "Hopper-v5", seed): [0, 40, 80] for seed in (1, 2)}  # the third seed is not compared
    curves |= {("Native-BF16", "Swimmer-v5", 1): [0, 1, 2], ("FP32", "Swimmer-v5", 1): [0, 1, 2]}
    curves |= {("E5M9", "HalfCheetah-v5", seed): [0, seed, 4] for seed in (1, 3)}
    curves |= {("E5M9, w in FP32", "HalfCheetah-v5", 1): [0, 8, 16]}
    rows = rows_of(precision_boundary.table(*results(curves)))
    assert rows["Hopper-v5", "2"] == ["Hopper-v5", "2", "150 (100 to 200)", "40 (40 to 40)", "26.7%"]
    assert rows["E5M9", "2"] == ["E5M9", "2", "2 (2 to 2)", "4 (4 to 4)", "learns"]
    assert rows["E5M9, w in FP32", "1"][2:] == ["8", "16", ""]
    assert rows["E5M5", "0"][-1] == "learns little"
    assert ("Swimmer-v5", "1") not in rows


def test_writeback_table():
    curves = {("FP16, log_std", "Hopper-v5", seed): [0, 50, 100 * seed] for seed in (1, 2, 3)}
    curves |= {("BF16, log_std", "Hopper-v5", seed): [10, 10, 10] for seed in (1, 2)}
    curves |= {("BF16, compensated", "Hopper-v5", seed): [0, 5 * seed, 20 * seed] for seed in (1, 2, 3)}
    curves |= {("BF16, w in FP32", "Walker2d-v5", 1): [1, 2, 3]}
    rows = rows_of(writeback.table(*results(curves)))
    assert rows["Hopper-v5", "FP16, log_std"][2:] == ["4.18", "3", "75 (50 to 100)", "200 (100 to 300)", "100.0%", ""]
    assert rows["Hopper-v5", "BF16, log_std"][2:] == ["4.18", "2", "10 (10 to 10)", "10 (10 to 10)", "16.0%", ""]
    # AUC 7.5, 15, 22.5 against 50, 75, 100 of FP16, and against 10 and 10
    assert rows["Hopper-v5", "BF16, compensated"][2:] == ["6.18", "3", "15 (8 to 22)", "40 (20 to 60)", "20.0%", "1 of 2"]
    assert rows["Walker2d-v5", "BF16, w in FP32"][2:] == ["4.35", "1", "2", "3", "", "0 of 0"]


def test_copies_differ_in_the_last_digit_of_the_learning_rate():
    rates = np.float32([perturbation.learning_rate(copy) for copy in range(5)])
    assert rates[0] == np.float32(3e-4) and (np.diff(rates) > 0).all() and rates[-1] < rates[0] * (1 + 1e-6)


def test_perturbation_table():
    cheetah, levels = "HalfCheetah-v5", {"FP32": (10, 20), "AMP-FP16": (5,), "AMP-BF16": (15,), "PPO-FP16": (1, 30)}
    curves = {(f"{method}, copy {i}", cheetah, 1): [x] * 3 for method, copies in levels.items() for i, x in enumerate(copies)}
    curves |= {("FP32", cheetah, seed): [10 * seed] * 3 for seed in (1, 2, 3)}
    curves |= {(method, cheetah, 1): [1] * 3 for method in ("AMP-FP16", "AMP-BF16", "PPO-FP16")}
    rows = rows_of(perturbation.table(*results(curves)))
    # ranks of FP32 over the four choices: 2, 1 beside 1 of PPO-FP16, and 3, 2 beside 30
    assert rows["FP32", "2"][2:] == ["15 (10 to 20)", "7", "10 (3 seeds)", "2.00", "0.71"]
    assert rows["PPO-FP16", "2"][2:] == ["16 (1 to 30)", "21", "(1 seeds)", "2.50", "1.50"]
    assert rows["AMP-BF16", "1"][2:] == ["15", "", "(1 seeds)", "2.00", "0.71"]


def test_a_study_trains_and_reports(tmp_path):
    flags = ("--mantissa-bits", "8", "--total-timesteps", "2048", "--eval-episodes", "1")
    run = runner.Run("E5M8", "studies/patched.py", flags, "InvertedPendulum-v5", 1)
    runner.run_study("precision_boundary", [run], 1, results=tmp_path)
    (row,) = runner.read(tmp_path / "precision_boundary_runs.csv")
    assert row["flags"] == " ".join(flags) and row["skipped_from"] == ""
    report = [sys.executable, STUDIES / "precision_boundary.py", "--report", "--results", tmp_path]
    done = subprocess.run(report, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert rows_of(done.stdout)["E5M8", "1"][-1] == "returns less, varies more"
