"""The statistics of the studies against slow references, and the report that tables them."""

import itertools
import pathlib
import re
import shutil
import statistics
import sys
import types

import numpy as np
import pandas as pd
import pytest
from scipy import stats

ROOT = pathlib.Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "studies"))
import comparison  # noqa: E402
import report  # noqa: E402
import runner  # noqa: E402

METHODS = list(report.METHODS)
TASKS = ["HalfCheetah-v5", "Hopper-v5", "Walker2d-v5", "Humanoid-v5", "InvertedDoublePendulum-v5", "Swimmer-v5"]
STEPS = [0, 100, 300, 500]


def curves(auc_of, tasks=TASKS, seeds=(1, 2, 3, 4, 5), methods=METHODS):
    """Evaluations, their return AUC being auc_of(task, seed, method), and the rows of their runs."""
    keys = list(itertools.product(methods, tasks, seeds))
    rows = [(*key, step, 2 * auc_of(key[1], key[2], key[0]) * step / STEPS[-1]) for key in keys for step in STEPS]
    evaluations = pd.DataFrame(rows, columns=["method", "env_id", "seed", "global_step", "mean_return"])
    return evaluations, pd.DataFrame(keys, columns=["method", "env_id", "seed"]).assign(median_sps=1000)


def aucs_of(auc_of, **kwargs):
    return comparison.return_aucs(curves(auc_of, **kwargs)[0], METHODS)


def uneven(seed, ties):
    """Scores of 4 methods over three tasks with 6, 5 and 3 seeds; with ties, integers from 0 to 3."""
    generator = np.random.RandomState(seed)
    scores = generator.randint(0, 4, (14, 4)).astype(float) if ties else generator.randn(14, 4)
    return scores, np.array([TASKS[0]] * 6 + [TASKS[1]] * 5 + [TASKS[2]] * 3)


scored = pytest.mark.parametrize("scores, tasks", [uneven(seed, ties) for seed in range(3) for ties in (False, True)])


def test_return_auc_is_the_area_under_the_curve_over_the_horizon():
    steps, returns = [0, 10, 30, 70], [1.0, -3.0, 5.0, 2.0]
    area = sum((steps[i + 1] - steps[i]) * (returns[i] + returns[i + 1]) / 2 for i in range(3))
    assert comparison.return_auc(pd.DataFrame(dict(global_step=steps, mean_return=returns))) == pytest.approx(area / 70)


def test_pairs_are_what_every_method_has_finished():
    evaluations, _ = curves(lambda task, seed, method: 10 * seed + METHODS.index(method), TASKS[:2], (1, 2, 3))
    missing = (evaluations.env_id == TASKS[0]) & (evaluations.seed == 2) & (evaluations.method == "AMP-BF16")
    other = evaluations[evaluations.method == "FP32"].assign(method="another")
    aucs = comparison.return_aucs(pd.concat([evaluations[~missing], other]), METHODS)
    assert list(aucs.columns) == METHODS
    assert list(aucs.index) == [(TASKS[0], 1), (TASKS[0], 3), (TASKS[1], 1), (TASKS[1], 2), (TASKS[1], 3)]
    assert np.allclose(aucs.to_numpy(), [[10 * seed + i for i in range(4)] for _, seed in aucs.index])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_failed_run_is_not_taken_for_a_missing_one(value):
    with pytest.raises(ValueError, match=r"not finite: \('Hopper-v5', 2, 'PPO-FP16'\)$"):
        aucs_of(lambda task, seed, method: value if (task, seed, method) == ("Hopper-v5", 2, "PPO-FP16") else 1.0)


def test_known_ranks():
    scores = np.array([[3.0, 1.0, 2.0, 0.0], [1.0, 1.0, 0.0, 2.0], [5.0, 5.0, 5.0, 5.0], [1.0, 2.0, 2.0, 2.0]])
    assert comparison.ranks(scores).tolist() == [[1, 3, 2, 4], [2.5, 2.5, 4, 1], [2.5] * 4, [4, 2, 2, 2]]
    assert comparison.firsts(scores, None) == pytest.approx([1 + 1 / 4, 1 / 4 + 1 / 3, 1 / 4 + 1 / 3, 1 + 1 / 4 + 1 / 3])
    assert comparison.wins(scores, None)[0].tolist() == [0, 1, 2, 1]
    assert comparison.wins(scores, None)[:, 0].tolist() == [0, 1, 1, 2]


@scored
def test_statistics_equal_slow_references(scores, tasks):
    pairs, methods = range(len(scores)), range(4)
    # those ahead, and half of the others that tie
    slow_ranks = [[1 + sum(y > x for y in row) + (sum(y == x for y in row) - 1) / 2 for x in row] for row in scores.tolist()]
    assert comparison.mean_rank(scores, tasks) == pytest.approx([statistics.mean(row[i] for row in slow_ranks) for i in methods])
    for i in methods:
        middle = sorted(scores[:, i])[3:-3]  # a quarter of 14, rounded down, is 3
        assert comparison.interquartile_mean(scores, tasks)[i] == pytest.approx(statistics.mean(middle))
        first = sum(1 / list(row).count(max(row)) for row in scores if row[i] == max(row))
        assert comparison.firsts(scores, tasks)[i] == pytest.approx(first)
        for j in methods:
            assert comparison.wins(scores, tasks)[i, j] == sum(scores[k, i] > scores[k, j] for k in pairs)
            gain = statistics.mean(scores[k, i] - scores[k, j] for k in pairs)
            assert comparison.difference(scores, tasks)[i, j] == pytest.approx(gain)
            chances = []
            for task in set(tasks):
                of_task = [k for k in pairs if tasks[k] == task]
                results = [(scores[a, i] > scores[b, j]) + (scores[a, i] == scores[b, j]) / 2 for a in of_task for b in of_task]
                chances.append(statistics.mean(map(float, results)))
            assert comparison.probability_of_improvement(scores, tasks)[i, j] == pytest.approx(statistics.mean(chances))
    for k in pairs:
        of_task = [x for other in pairs if tasks[other] == tasks[k] for x in scores[other]]
        expected = [(x - min(of_task)) / (max(of_task) - min(of_task)) for x in scores[k]]
        assert comparison.normalized(scores, tasks)[k] == pytest.approx(expected)


STATISTICS = ["mean_rank", "firsts", "wins", "interquartile_mean", "difference", "probability_of_improvement"]


@scored
@pytest.mark.parametrize("name", STATISTICS)
def test_resamples_are_computed_all_at_once(name, scores, tasks):
    statistic = getattr(comparison, name)
    rows = comparison.resampled(tasks, 20, seed=1)
    together = statistic(scores[rows], tasks)
    assert len(together) == 20
    for one, row in zip(together, rows):
        assert one == pytest.approx(statistic(scores[row], tasks))


def test_resampling_stays_within_the_task_and_is_uniform():
    tasks = uneven(0, ties=False)[1]
    rows = comparison.resampled(tasks, 20_000, seed=0)
    assert (tasks[rows] == tasks).all()
    for task in set(tasks):
        of_task = np.flatnonzero(tasks == task)
        for place in of_task:
            shares = [np.mean(rows[:, place] == row) for row in of_task]
            assert shares == pytest.approx([1 / len(of_task)] * len(of_task), abs=0.02)  # 5 standard deviations or more
    assert abs(np.corrcoef(rows[:, 0], rows[:, 1])[0, 1]) < 0.04  # places are drawn apart from each other
    assert (comparison.resampled(tasks, 50, seed=3) == comparison.resampled(tasks, 50, seed=3)).all()
    assert (comparison.resampled(tasks, 50, seed=3) != comparison.resampled(tasks, 50, seed=4)).any()


@pytest.mark.parametrize("name", ["mean_rank", "interquartile_mean", "difference", "probability_of_improvement"])
def test_interval_equals_that_of_all_possible_resamples(name):
    statistic, scores = getattr(comparison, name), np.random.RandomState(1).randn(7, 4)
    tasks = np.array([TASKS[0]] * 4 + [TASKS[1]] * 3)
    every = [a + b for a in itertools.product(range(4), repeat=4) for b in itertools.product(range(4, 7), repeat=3)]
    exact = np.percentile(statistic(scores[np.array(every)], tasks), [2.5, 97.5], axis=0)
    value, *ends = comparison.estimate(statistic, scores, tasks, resamples=50_000)
    assert value == pytest.approx(statistic(scores, tasks))
    width = exact[1] - exact[0]
    assert (width > 0).sum() >= 4
    assert (abs(ends - exact) <= 0.05 * width.max()).all()


def test_methods_of_a_seed_stay_together():
    generator = np.random.RandomState(0)
    of_seed = generator.randn(14, 1)
    scores, tasks = np.hstack([of_seed, of_seed + 1]), uneven(0, ties=False)[1]
    value, low, high = comparison.estimate(comparison.difference, scores, tasks)
    assert [value[1, 0], low[1, 0], high[1, 0]] == pytest.approx([1, 1, 1])  # however much the seeds differ


def test_a_task_with_one_seed_gives_no_interval():
    scores, tasks = np.random.RandomState(0).randn(6, 4), np.array([TASKS[0]] * 5 + [TASKS[1]])
    value, low, high = comparison.estimate(comparison.mean_rank, scores, tasks)
    assert value == pytest.approx(comparison.ranks(scores).mean(0))
    assert np.isnan(low).all() and np.isnan(high).all()


def test_estimate_is_deterministic():
    scores, tasks = uneven(0, ties=False)
    first, second = (comparison.estimate(comparison.interquartile_mean, scores, tasks) for _ in range(2))
    assert (first == second).all()


def test_friedman_is_scipys():
    scores = np.random.RandomState(0).randn(30, 4) + 0.2 * np.arange(4)
    expected = stats.friedmanchisquare(*scores.T).pvalue
    assert 0.001 < expected < 0.5
    assert comparison.friedman(comparison.mean_rank(scores, None), 30) == pytest.approx(expected)
    assert comparison.friedman([2.5] * 4, 30) == 1


def rows_of(table):
    """{first cell: the others} of a Markdown table."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("|")]
    return {name: dict(zip(lines[0][1:], cells)) for name, *cells in lines[2:]}


def winning(task, seed, method):
    """PPO-FP16 is always first and FP32 always last, on tasks whose scales and signs differ."""
    return (TASKS.index(task) - 2) * 1000 + seed + 32 * METHODS.index(method)


def test_a_method_that_always_wins():
    aucs = aucs_of(winning)
    ranks = report.ranks_table(aucs)
    assert ranks.startswith("Over 30 pairs of a task and a seed (5 HalfCheetah-v5, ")
    assert "with 95% intervals" in ranks
    ours = rows_of(ranks)["PPO-FP16"]
    assert (ours["mean rank"], ours["firsts"]) == ("1.00 (1.00 to 1.00)", "30 of 30")
    assert ours["IQM of the normalized return AUC"].startswith("0.98 (")  # 0.96 to 1.00, six times each
    assert rows_of(ranks)["FP32"]["mean rank"] == "4.00 (4.00 to 4.00)"
    assert ranks.endswith("with p = 0.00 (Friedman's test; the paper's: 0.03).")
    for method, row in rows_of(report.against_table(aucs)).items():
        assert row["wins"] == "30 of 30"
        assert row["not inferior (above -0.05)"] == "yes"
        assert row["probability of improvement"] == "1.00 (1.00 to 1.00)"
        gain = 32 * (3 - METHODS.index(method)) / 100  # a task's scores span 100
        assert row["normalized return AUC, difference"] == f"{gain:.3f} ({gain:.3f} to {gain:.3f})"
    matrix = rows_of(report.wins_table(aucs))
    for i, j in itertools.permutations(range(4), 2):
        assert matrix[METHODS[i]][f"over {METHODS[j]}"] == ("30 of 30" if i > j else "0 of 30")


def test_not_inferior_needs_the_whole_interval_above_the_margin():
    def alike(task, seed, method):  # PPO-FP16 wins and loses against FP32 by turns, by the whole range
        return {"FP32": seed % 2, "PPO-FP16": 1 - seed % 2}.get(method, 0.5)

    row = rows_of(report.against_table(aucs_of(alike)))["FP32"]
    value, low, high = map(float, re.findall(r"-?\d+\.\d+", row["normalized return AUC, difference"]))
    assert value == pytest.approx(-0.2) and low < value < high
    assert row["not inferior (above -0.05)"] == "not shown"


def test_figures_have_what_there_is():
    evaluations, _ = curves(winning)
    figure = report.curves_figure(evaluations)
    assert sorted(axis.get_title() for axis in figure.axes) == sorted(TASKS)
    assert figure.axes[0].get_gridspec().get_geometry() == (2, 3)
    for axis in figure.axes:
        widths = [line.get_linewidth() for line in axis.lines]
        assert (widths.count(0.6), widths.count(2)) == (20, 4)
    four = report.curves_figure(evaluations[evaluations.env_id.isin(TASKS[:4])])
    assert len(four.axes) == 4 and four.axes[0].get_gridspec().get_geometry() == (2, 3)
    bars = report.ranks_figure(aucs_of(winning)).axes[0]
    assert [bar.get_height() for bar in bars.patches] == [4, 3, 2, 1]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of what the report reads and writes, for it to work on."""
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copytree(ROOT / "studies", tmp_path / "studies", ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(report, "ROOT", str(tmp_path))
    monkeypatch.setattr(report, "RESULTS", str(tmp_path / "studies" / "results"))
    return tmp_path


def written(project):
    """The bytes of everything that the report writes."""
    paths = [*map(project.joinpath, report.DOCUMENTS), *(project / "studies" / "results").glob("*.png")]
    return {path.name: path.read_bytes() for path in paths}


def refusal(*argv):
    with pytest.raises(SystemExit) as exit:
        report.main(argv)
    assert isinstance(exit.value.code, str)  # which sys.exit prints, with status 1
    return exit.value.code


def test_the_shipped_documents_are_current_and_rebuilding_changes_nothing(project):
    report.main(["--check"])
    before = {name: text for name, text in written(project).items() if name.endswith(".md")}
    report.main([])
    first = written(project)
    report.main([])
    assert written(project) == first
    assert before.items() <= first.items()


TABLES = [
    (document, name)
    for document in report.DOCUMENTS
    for name in re.findall(r"<!-- (\w+) -->", (ROOT / document).read_text())
    if re.search(rf"<!-- {name} -->\n[^<]*\|", (ROOT / document).read_text())
]


def with_an_edited_digit(text, name):
    """The text with another last digit in a table."""
    start, end = text.index(f"<!-- {name} -->"), text.index(f"<!-- /{name} -->")
    digit = start + max(match.start() for match in re.finditer(r"\d", text[start:end]))
    return text[:digit] + str((int(text[digit]) + 1) % 10) + text[digit + 1 :]


@pytest.mark.parametrize("document, name", TABLES)
def test_an_edited_digit_is_found(project, document, name):
    path = project / document
    path.write_text(with_an_edited_digit(path.read_text(), name))
    assert refusal("--check").startswith(f"report.py: {document} is not what the results say")


def test_edited_digits_are_mended(project):
    originals = {document: (project / document).read_text() for document in report.DOCUMENTS}
    for document, name in TABLES:
        (project / document).write_text(with_an_edited_digit((project / document).read_text(), name))
    report.main([])
    assert {document: (project / document).read_text() for document in report.DOCUMENTS} == originals
    report.main(["--check"])


@pytest.mark.parametrize("name", ["learning_curves.png", "learning_ranks.png"])
def test_a_missing_figure_is_found(project, name):
    (project / "studies" / "results" / name).unlink()
    assert f"studies/results/{name}" in refusal("--check")


def test_text_outside_the_markers_is_left_alone(project):
    path = project / "README.md"
    path.write_text(path.read_text() + "a digit 7 of one's own\n")
    report.main(["--check"])


@pytest.mark.parametrize("argv", [(), ("--check",)])
def test_a_marker_without_its_half_its_table_or_its_place_is_refused(project, argv):
    readme = project / "README.md"
    text = readme.read_text()
    readme.write_text(text.replace("<!-- /speed -->", ""))
    assert "README.md has a marker that is not one of a pair" in refusal(*argv)
    readme.write_text(text + "<!-- nothing -->\n<!-- /nothing -->\n")
    assert "or not of learning, ranks" in refusal(*argv)
    readme.write_text(text)
    studies = project / "studies" / "README.md"
    studies.write_text(re.sub(r"<!-- /?wins -->", "", studies.read_text()))
    assert "no place in README.md or studies/README.md for wins" in refusal(*argv)


def test_the_tables_follow_the_results(project):
    """A method without runs, and one whose evaluations were written just before the study was killed."""
    results = project / "studies" / "results"
    runs = pd.read_csv(results / "learning_runs.csv")
    runs[runs.method != "AMP-BF16"].to_csv(results / "learning_runs.csv", index=False)
    assert "README.md, studies/README.md" in refusal("--check")
    report.main([])
    text = (project / "README.md").read_text()
    learning, ranks = (text[text.index(f"<!-- {name} -->") : text.index(f"<!-- /{name} -->")] for name in ("learning", "ranks"))
    assert "PPO-FP16" in learning and "AMP-BF16" not in learning
    assert ranks == "<!-- ranks -->\nno runs yet\n"


def test_a_study_with_a_table_of_its_own(project, monkeypatch):
    module = types.SimpleNamespace(table=lambda evaluations, runs: f"{len(evaluations)} evaluations, {len(runs)} runs")
    monkeypatch.setitem(sys.modules, "another", module)
    monkeypatch.setattr(report, "STUDIES", (*report.STUDIES, "another"))
    readme = project / "studies" / "README.md"
    readme.write_text(readme.read_text() + "<!-- another -->\n<!-- /another -->\n")
    report.main([])
    assert readme.read_text().endswith("<!-- another -->\nno runs yet\n<!-- /another -->\n")
    evaluations, runs = curves(winning, TASKS[:1], (1, 2))
    evaluations.to_csv(project / "studies" / "results" / "another.csv", index=False)
    runs[1:].to_csv(project / "studies" / "results" / "another_runs.csv", index=False)
    report.main([])
    assert readme.read_text().endswith("<!-- another -->\n28 evaluations, 7 runs\n<!-- /another -->\n")


def test_numerics_of_a_run_are_kept_where_it_was_evaluated(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path) as writer:
        for iteration in range(1, 7):
            writer.add_scalar("numerics/swallowed_updates", iteration / 8, 2048 * iteration)
            writer.add_scalar("numerics/zero_second_moments", 1 / 2**iteration, 2048 * iteration)
            writer.add_scalar("numerics/skipped_updates", 10**iteration, 2048 * iteration)
    events = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0}).Reload()
    expected = [
        dict(global_step=2048, swallowed_updates="0.125", zero_second_moments="0.5", skipped_updates=10),
        dict(global_step=3 * 2048, swallowed_updates="0.375", zero_second_moments="0.125", skipped_updates=1110),
        dict(global_step=6 * 2048, swallowed_updates="0.75", zero_second_moments="0.015625", skipped_updates=1111110),
    ]
    assert runner.numerics_at(events, [0, 3 * 2048, 6 * 2048]) == expected
    assert runner.numerics_at(events, [0, 2048, 3 * 2048, 6 * 2048]) == expected  # the first iteration once


def test_numerics_table(project):
    path = project / "studies" / "results" / "learning_numerics.csv"
    path.unlink(missing_ok=True)
    assert report.numerics_table("learning", METHODS) == "no runs yet"
    rows = [
        (method, TASKS[0], seed, step, share, share / 2, seed + step // 6144)
        for method in METHODS
        for seed in (1, 2, 3)
        for step, share in [(2048, 0.1 * seed), (4096, 0.2 * seed), (6144, 0.3 * seed)]
        if (method, seed) != ("FP32", 3)  # so that the seed counts for none
    ]
    pd.DataFrame(rows, columns=runner.COLUMNS["_numerics"]).to_csv(path, index=False)
    table = rows_of(report.numerics_table("learning", METHODS))
    assert list(table) == METHODS
    for row in table.values():
        assert list(row.values()) == ["2", "15%", "30%", "45%", "7.5%", "15%", "22.5%", "2.5"]
