"""Comparing runs: hand-worked answers, coverage of the intervals, and the words that go with them."""

import random
import re
from statistics import NormalDist, fmean, variance

import pytest

from factories import a_rollout
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.statistics.comparison import compare, paired_difference
from rlvr_cli.analysis.statistics.estimators import share_interval, t_quantile
from rlvr_cli.analysis.statistics.sweep_table import sentences
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir


def rollout(run_id, example, reward, *, sample=0, step=0, truth="7", prompt="3 + 4?", grader="r1_zero"):
    return a_rollout(
        run_id=run_id, step=step, policy_version=step, example_id=example, sample_index=sample, prompt=prompt, ground_truth=truth,
        answer_reward=reward, reward=reward, grade_error=None if reward is not None else "timeout", grader=grader,
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
    # t of 19; the median of chi-square with 19 degrees of freedom is 18.3377
    assert found.detectable == pytest.approx((2.093024 + 0.860951) * (0.45 / 20 * 19 / 18.3377) ** 0.5, rel=1e-3)
    assert found.needed == 32  # 2.801585**2 * 0.45 / 0.35**2 = 28.8, and somewhat more with few degrees of freedom
    assert (found.a.low, found.a.high) == pytest.approx(share_interval(7 / 20, 20))
    # Bonett and Price: with one question more on either side 2 and 9 of 22, 7 / 22 +- t_21 sqrt((11 - 7**2 / 22) / 21 / 22)
    spread = 2.079614 * ((11 - 49 / 22) / 21 / 22) ** 0.5
    assert (found.low, found.high) == pytest.approx((7 / 22 - spread, 7 / 22 + spread), rel=1e-6)
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
    assert found.needed == pytest.approx(6594, abs=3)  # 2.801585**2 * (21 / 40) / (1 / 40)**2 = 6593.1


def test_four_discordant_questions_prove_nothing(between):
    """All of them for B, but p is 2 / 2**4."""
    found = between({"a": single("0" * 4 + "1" * 96)}, {"b": single("1" * 100)})
    assert found.low < 0
    assert found.mcnemar_p == 0.125
    assert found.detectable >= 0.06
    assert "cannot tell" in found.verdict
    six = between({"c": single("0" * 6 + "1" * 94)}, {"d": single("1" * 100)})
    assert six.mcnemar_p == pytest.approx(2 / 64)
    assert "D" not in six.verdict
    assert six.verdict.startswith("B (d) is better")


def test_an_interval_without_0_that_decides_nothing_says_why(between):
    one, five = (
        between({f"a{n}": {f"q{i}": [0.0] * 8 for i in range(n)}}, {f"b{n}": {f"q{i}": [1.0] * 8 for i in range(n)}})
        for n in (1, 5)
    )
    assert (one.detectable, five.detectable, five.needed) == (None, None, 6)
    assert one.verdict.endswith("). Only 1 question differs; at least 6 must.")
    assert five.verdict.endswith("(95% interval +25.8 to +100.0). Only 5 questions differ; at least 6 must.")
    (told,) = sentences({"b5": five}, baseline="a5")
    assert told.endswith("+100.0; p = 0.0086). Only 5 questions differ; at least 6 must.")
    others = {f"q{i}": [0.0] * 4 for i in range(40)}
    some = between({"a": others}, {"b": {**others, **{f"q{i}": [1.0] * 4 for i in range(5)}}})
    assert some.low > 0
    assert "40 questions show one of" in some.verdict
    assert some.verdict.endswith(" questions. Only 5 questions differ; at least 6 must.")
    exact = between({"c": single("1" * 2 + "0" * 9)}, {"d": single("0" * 2 + "1" * 9)})
    assert exact.low > 0
    assert exact.verdict.endswith(" questions. McNemar's exact test, which decides, does not show it: p = 0.065.")
    equal = between({"e": single("1")}, {"f": single("1")})
    assert equal.verdict.endswith("). No question differs; at least 6 must.")


def test_equal_on_every_question(between):
    found = between({"a": single("10" * 20)}, {"b": single("10" * 20)})
    assert (found.difference, found.a_better, found.b_better, found.mcnemar_p) == (0, 0, 0, 1)
    assert (found.low, found.high) == pytest.approx(
        (-0.0688, 0.0688), abs=1e-4
    )  # t_41 sqrt(2 / 41 / 42): near the rule of three
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


def test_another_grader_is_a_note(between):
    found = between({"a": single("1"), "b": single("1")}, {"c": [rollout("c", "q000", 1.0, grader="math_verify")]})
    assert found.notes[0] == "The graders differ between the runs: a by r1_zero, b by r1_zero, c by math_verify."
    # what an environment leaves ungraded, a grader grades
    arms = [
        {run: [rollout(run, q, 1.0, grader=g) for q, g in zip("xy", ("environment", other), strict=True)]}
        for run, other in (("d", "r1_zero"), ("e", "environment"))
    ]
    assert not any("graders" in note for note in between(*arms).notes)


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


# Several seeds


def test_seeds_by_hand(between):
    # Means over the seeds: A 0.5 and 0.5, B 1 and 0.5
    arm_a = {"a1": {"x": [1.0], "y": [0.0]}, "a2": {"x": [0.0], "y": [1.0]}}
    arm_b = {"b1": {"x": [1.0], "y": [1.0]}, "b2": {"x": [1.0], "y": [0.0]}}
    found = between(arm_a, arm_b)
    assert (found.a.accuracy, found.b.accuracy, found.difference) == (0.5, 0.75, 0.25)
    assert (found.a.runs, found.a.samples, found.mcnemar_p) == (("a1", "a2"), 4, None)
    assert (found.b_better, found.a_better) == (1, 0)
    assert any(note.startswith("Two seeds hardly show") for note in found.notes)


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


@pytest.mark.parametrize("seeds", [(2, 2), (2, 3), (1, 3)])
def test_fewer_than_three_seeds_promise_nothing(between, seeds):
    rng = random.Random(2)
    arms = [noisy_arm(rng, name, seeds=n, questions=100, spread=0.1) for n, name in zip(seeds, "ab", strict=True)]
    found = between(*arms)
    assert (found.detectable, found.needed) == (None, None)
    assert found.verdict.endswith("What could be told with more questions would take 3 seeds an arm to say.")
    assert [row[1] for row in found.tables()[1].rows[-2:]] == [None, None]


def test_more_questions_cannot_tell_what_seeds_hide(between):
    swing = {"1": single("1" * 30 + "0" * 30), "2": single("1" * 10 + "0" * 50), "3": single("1" * 50 + "0" * 10)}
    arm_b = {f"b{k}": v for k, v in swing.items()}
    arm_b["b1"] = single("1" * 32 + "0" * 28)
    found = between({f"a{k}": v for k, v in swing.items()}, arm_b)
    assert found.needed is None
    assert "to tell this difference would take more seeds" in found.verdict


@pytest.mark.parametrize(("a", "b"), [((0.48, 0.52), (0.5, 0.5)), ((0.1, 0.5, 0.6), (0.2, 0.3, 0.4))])
def test_seeds_without_noise_spread_as_their_mean_does(a, b):
    """Every question alike: the runs' means tell all, and the interval is Welch's."""
    found = paired_difference([[mean] * 500 for mean in a], [[mean] * 500 for mean in b], sample=0.0)
    parts = [variance(means) / len(means) for means in (a, b)]
    assert found.spread.seeds == pytest.approx(sum(parts))
    df = sum(parts) ** 2 / sum(part**2 / (len(means) - 1) for part, means in zip(parts, (a, b), strict=True))
    half = t_quantile(0.975, df) * sum(parts) ** 0.5
    assert found.high - found.low == pytest.approx(2 * half, rel=1e-5)


def test_the_noise_of_a_sample_is_counted_once():
    """Runs that differ by sampling alone: the interval is about that of the paired questions, not sqrt(3) times as wide."""
    rng = random.Random(5)
    ratios = []
    for _ in range(60):
        hard = [rng.random() for _ in range(200)]
        a, b = ([[float(rng.random() < p) for p in hard] for _ in range(3)] for _ in range(2))
        found = paired_difference(a, b, sample=1 / 3)
        paired = [fmean(y) - fmean(x) for x, y in zip(zip(*a, strict=True), zip(*b, strict=True), strict=True)]
        ratios.append((found.high - found.low) / (2 * NormalDist().inv_cdf(0.975) * (variance(paired) / 200) ** 0.5))
    assert 1.0 < fmean(ratios) < 1.5


def test_one_run_beside_several(between):
    rng = random.Random(6)
    arm = noisy_arm(rng, "b", seeds=3, questions=200, spread=0.2)
    (lone,) = noisy_arm(rng, "a", seeds=1, questions=200, spread=0.2).values()
    found = between({"a": lone}, arm)
    assert found.notes == ("One run in an arm: the interval takes the spread of its seeds from the other arm.",)
    assert found.high - found.low > 0.5


# What is printed


def test_tables(between):
    found = between({"a": single("0011")}, {"b": single("0101")})
    arms, measures = found.tables()
    assert [row[:3] for row in arms.rows] == [("A", "a", "0"), ("B", "b", "0")]
    assert [row[0] for row in measures.rows] == [
        "difference", "b_better", "a_better", "ties", "mcnemar_p", "detectable_difference", "questions_needed",
    ]  # fmt: skip
    assert measures.rows[3][1] == 2
    assert re.search("One run an arm", found.notes[0])
