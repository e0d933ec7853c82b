"""Comparing runs: hand-worked answers, coverage of the intervals, and the words that go with them."""

import random
import re
from statistics import variance

import pytest

from factories import a_rollout
from rlvr_cli.analysis.comparison import _percentile_interval, _resampled, compare
from rlvr_cli.analysis.database import open_runs
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir


def rollout(run_id, example, reward, *, sample=0, step=0, truth="7", prompt="3 + 4?"):
    return a_rollout(
        run_id=run_id, step=step, policy_version=step, example_id=example, sample_index=sample, prompt=prompt, ground_truth=truth,
        answer_reward=reward, reward=reward, grade_error=None if reward is not None else "timeout",
    )  # fmt: skip


@pytest.fixture
def between(tmp_path):
    """Compares arms given as {run: {question: its rewards}}, or as rollouts."""

    def call(arm_a, arm_b, **options):
        for name, content in {**arm_a, **arm_b}.items():
            rows = content
            if isinstance(content, dict):
                rows = [rollout(name, q, r, sample=i) for q, rewards in content.items() for i, r in enumerate(rewards)]
            with RunDir.create(tmp_path, "eval", name=name, metadata={}) as run:
                for step in sorted({r.step for r in rows}):
                    run.commit_rollouts("eval", step, [r for r in rows if r.step == step])
        with open_runs([read_run(tmp_path / name) for name in (*arm_a, *arm_b)]) as database:
            return compare(database, list(arm_a), list(arm_b), **options)

    return call


def single(pattern):
    """One sample a question: "1101" -> q000 right, q001 right, q002 wrong, q003 right."""
    return {f"q{i:03}": [float(c)] for i, c in enumerate(pattern)}


def test_by_hand(between):
    # Of 20 questions A alone has 1, B alone 8, both 6, neither 5: 7 / 20 and 14 / 20; p = 2 (1 + 9) / 2**9
    found = between({"a": single("1" + "0" * 8 + "1" * 6 + "0" * 5)}, {"b": single("0" + "1" * 8 + "1" * 6 + "0" * 5)})
    assert (found.a.accuracy, found.b.accuracy) == (0.35, 0.7)
    assert found.difference == pytest.approx(0.35)
    assert (found.questions, found.a_better, found.b_better) == (20, 1, 8)
    assert found.mcnemar_p == pytest.approx(20 / 512)
    assert found.detectable == pytest.approx(2.801585 * (0.45 / 20) ** 0.5, rel=1e-6)
    assert found.needed == 29  # 2.801585**2 * 0.45 / 0.35**2 = 28.8
    assert (found.a.low, found.a.high) == pytest.approx((0.1812, 0.5671), abs=5e-5)  # Wilson
    # Each question adds -1 (p = 1/20), 1 (8/20) or 0: the mean of 20 has a standard error of sqrt(0.45 - 0.35**2) / sqrt(20)
    spread = 1.96 * (0.3275 / 20) ** 0.5
    assert (found.low, found.high) == pytest.approx((0.35 - spread, 0.35 + spread), abs=0.03)
    assert found.decided
    assert found.verdict.startswith("B (b) is better: B - A is +35.0 points of accuracy (95% interval +")
    assert found.verdict.endswith(" on 20 questions.")


def test_the_other_way_round(between):
    found = between({"a": single("1" * 10 + "0" * 10)}, {"b": single("0" * 20)})
    assert found.difference == -0.5
    assert found.verdict.startswith("A (a) is better: B - A is -50.0 points of accuracy (95% interval -")


def test_what_the_data_cannot_tell(between):
    found = between({"a": single("1100" * 10)}, {"b": single("1010" * 9 + "1011")})  # 20 against 21 of 40
    assert found.low < 0 < found.high
    assert found.verdict.startswith(
        "The data cannot tell which is better: B - A is +2.5 points of accuracy (95% interval -"
    )
    assert f"40 questions show one of {100 * found.detectable:.1f} points or more in 4 of 5 trials" in found.verdict
    assert f"would take about {found.needed:,} questions." in found.verdict
    assert found.needed == 6594  # 2.801585**2 * (21 / 40) / (1 / 40)**2 = 6593.1


def test_four_discordant_questions_prove_nothing(between):
    """All of them for B: no resample of the bootstrap goes below 0 often enough, but p is 2 / 2**4."""
    found = between({"a": single("0" * 4 + "1" * 96)}, {"b": single("1" * 100)})
    assert found.low > 0
    assert found.mcnemar_p == 0.125
    assert found.detectable >= 0.06
    assert "cannot tell" in found.verdict
    six = between({"c": single("0" * 6 + "1" * 94)}, {"d": single("1" * 100)})
    assert six.mcnemar_p == pytest.approx(2 / 64)
    assert "D" not in six.verdict
    assert six.verdict.startswith("B (d) is better")


def test_equal_on_every_question(between):
    found = between({"a": single("10" * 20)}, {"b": single("10" * 20)})
    assert (found.difference, found.a_better, found.b_better, found.mcnemar_p) == (0, 0, 0, 1)
    assert (found.low, found.high) == pytest.approx((-0.0722, 0.0722), abs=1e-4)  # 1 - 0.05**(1/40): the rule of three
    assert found.detectable == 6 / 40
    assert found.needed is None
    assert found.verdict.endswith("here they are equal.")


def test_several_samples_count_by_question(between):
    # q1: 2 of 4 against 4 of 4; q2: 1 of 2 against 0 of 1; q3: 1 of 1 against one grade that failed
    found = between(
        {"a": {"q1": [1.0, 1.0, 0.0, 0.0], "q2": [1.0, 0.0], "q3": [1.0]}},
        {"b": {"q1": [1.0] * 4, "q2": [0.0], "q3": [None]}},
    )
    assert found.a.accuracy == pytest.approx((0.5 + 0.5 + 1) / 3)
    assert found.b.accuracy == pytest.approx((1 + 0 + 0) / 3)
    assert (found.b_better, found.a_better, found.mcnemar_p) == (1, 2, None)
    assert (found.a.samples, found.b.samples, found.b.grade_errors) == (7, 6, 1)


def test_only_shared_questions_count(between):
    found = between(
        {"a": {"x": [1.0], "y": [0.0], "z": [0.0]}}, {"b": {"y": [1.0], "z": [1.0], "u": [0.0], "v": [0.0]}}
    )
    assert (found.questions, found.a.left_out, found.b.left_out) == (2, 1, 2)
    assert (found.a.accuracy, found.b.accuracy) == (0, 1)


def test_the_last_step_of_each_run_or_the_one_asked_for(between):
    rows = [rollout("a", "x", 0.0), rollout("a", "x", 1.0, step=8)]
    other = [rollout("b", "x", 1.0), rollout("b", "x", 1.0, step=3)]
    last = between({"a": rows}, {"b": other})
    assert (last.a.steps, last.b.steps, last.difference) == ((8,), (3,), 0)


def test_the_step_asked_for(between):
    rows = [rollout("a", "x", 0.0), rollout("a", "x", 1.0, step=8)]
    found = between({"a": rows}, {"b": single("1") | {"x": [1.0]}}, step=0)
    assert (found.a.steps, found.difference) == ((0,), 1)
    assert not found.decided


def test_another_truth_is_another_question(between):
    with pytest.raises(RlvrError, match=r"The ground truth of question q2 is '8' in a and '9' in b\."):
        between(
            {"a": [rollout("a", "q1", 1.0), rollout("a", "q2", 1.0, truth="8")]},
            {"b": [rollout("b", "q1", 1.0), rollout("b", "q2", 1.0, truth="9")]},
        )


def test_another_prompt_is_a_note(between):
    found = between({"a": [rollout("a", "q", 1.0)]}, {"b": [rollout("b", "q", 1.0, prompt="What is 3 + 4?")]})
    assert found.notes[0] == "The prompts of 1 of the 1 questions differ between the runs."


@pytest.mark.parametrize(
    ("b", "options", "message"),
    [
        ({"y": [1.0]}, {}, "share no question"),
        ({"x": [1.0]}, {"phase": "train"}, "a has no train rollouts"),
        ({"x": [1.0]}, {"step": 4}, "a has no eval rollouts of step 4"),
    ],
)
def test_nothing_to_compare(between, b, options, message):
    with pytest.raises(RlvrError, match=message):
        between({"a": {"x": [1.0]}}, {"b": b}, **options)


def test_the_seed_decides_the_interval(between):
    rng = random.Random(0)
    a, b = (single("".join(rng.choice("01") for _ in range(50))) for _ in range(2))
    first = between({"a": a}, {"b": b}, resamples=25)
    again = between({"c": a}, {"d": b}, resamples=25)
    assert (first.low, first.high) == (again.low, again.high)
    other = between({"e": a}, {"f": b}, resamples=25, seed=1)
    assert (first.low, first.high) != (other.low, other.high)


# Several seeds


def test_seeds_by_hand(between):
    # Means over the seeds: A 0.5 and 0.5, B 1 and 0.5
    arm_a = {"a1": {"x": [1.0], "y": [0.0]}, "a2": {"x": [0.0], "y": [1.0]}}
    arm_b = {"b1": {"x": [1.0], "y": [1.0]}, "b2": {"x": [1.0], "y": [0.0]}}
    found = between(arm_a, arm_b)
    assert (found.a.accuracy, found.b.accuracy, found.difference) == (0.5, 0.75, 0.25)
    assert (found.a.runs, found.a.samples, found.mcnemar_p) == (("a1", "a2"), 4, None)
    assert (found.b_better, found.a_better) == (1, 0)
    assert any("Fewer than 3 seeds" in note for note in found.notes)


def noisy_arm(rng, name, *, seeds, questions, spread):
    arm = {}
    for s in range(seeds):
        shift = rng.gauss(0, spread)
        arm[f"{name}{s}"] = {f"q{i}": [float(rng.random() < i / questions + shift)] for i in range(questions)}
    return arm


def test_seeds_that_differ_widen_the_interval(between):
    rng = random.Random(1)
    alike = between(*(noisy_arm(rng, name, seeds=3, questions=300, spread=0.0) for name in "ab"))
    apart = between(*(noisy_arm(rng, name, seeds=3, questions=300, spread=0.2) for name in "cd"))
    assert apart.high - apart.low > 2 * (alike.high - alike.low)
    assert apart.detectable > 2 * alike.detectable
    assert alike.notes == apart.notes == ()


def test_more_questions_cannot_tell_what_seeds_hide(between):
    swing = {"1": single("1" * 30 + "0" * 30), "2": single("1" * 10 + "0" * 50), "3": single("1" * 50 + "0" * 10)}
    arm_b = {f"b{k}": v for k, v in swing.items()}
    arm_b["b1"] = single("1" * 32 + "0" * 28)
    found = between({f"a{k}": v for k, v in swing.items()}, arm_b)
    assert found.needed is None
    assert "to tell this difference would take more seeds" in found.verdict


@pytest.mark.parametrize("means", [(0.2, 0.6), (0.1, 0.5, 0.6)])
def test_drawn_seeds_spread_as_their_mean_does(means):
    drawn, _ = _resampled([[mean] * 50 for mean in means], [[0.5] * 50], resamples=20_000, seed=0)
    assert variance(drawn) == pytest.approx(variance(means) / len(means), rel=0.05)


def test_the_interval_covers_the_truth():
    """Of two equal arms the interval holds 0 about 95 times in 100: with one run an arm, and with three that differ."""
    rng = random.Random(2)
    for seeds, spread in ((1, 0.0), (3, 0.05)):
        held = 0
        for trial in range(150):
            arms = []
            for _ in range(2):
                runs = noisy_arm(rng, "r", seeds=seeds, questions=200, spread=spread).values()
                arms.append([[rewards[0] for rewards in run.values()] for run in runs])
            drawn = _resampled(*arms, resamples=200, seed=trial)
            low, high = _percentile_interval([b - a for a, b in zip(*drawn, strict=True)])
            held += low <= 0 <= high
        assert 0.88 <= held / 150 <= 0.99


# What is printed


def test_tables(between):
    found = between({"a": single("0011")}, {"b": single("0101")})
    arms, measures, words = found.tables()
    assert [row[:3] for row in arms.rows] == [("A", "a", "0"), ("B", "b", "0")]
    assert [row[0] for row in measures.rows] == [
        "difference", "b_better", "a_better", "ties", "mcnemar_p", "detectable_difference", "questions_needed",
    ]  # fmt: skip
    assert measures.rows[3][1] == 2
    assert words.rows[0] == (found.verdict,)
    assert re.search("One run an arm", words.rows[1][0])
