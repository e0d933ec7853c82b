"""The named queries, each on a small run whose answer is worked out by hand."""

import random
import statistics
import tempfile
from hashlib import sha256
from itertools import combinations, groupby
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from factories import a_candidate, a_rollout, an_episode
from ranking import ranked
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.estimators import best_at_k, pass_at_k, share_interval, share_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.multiple_choice import truth_of
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.credit.advantages import batch_normalized, group_advantages
from rlvr_cli.training.losses.normalization import loss_denominators
from rlvr_cli.types import Turn

FORMAT = "</think> <answer> 7 </answer>"


def row(example, sample=0, reward=1.0, *, step=0, phase="eval", **changes):
    """What is its own of a rollout: rewarded, wrong (0.0) or with a grade that failed (None)."""
    kind = None if reward == 1 else "wrong_answer" if reward is not None else None
    category = "grade_error" if reward is None else f"format_1_answer_{int(reward > 0.5)}"
    values = {
        "phase": phase, "step": step, "policy_version": step, "example_id": example, "sample_index": sample,
        "prompt": f"question {example}", "response": FORMAT, "sampled_logprobs": (), "num_response_tokens": 10,
        "format_reward": None if reward is None else 1.0, "answer_reward": reward, "reward": reward,
        "grade_error": "timeout" if reward is None else None, "category": category, "failure_kind": kind, "mean_logprob": None,
    }  # fmt: skip
    return {**values, **changes}


@pytest.fixture
def ask(tmp_path):
    """Makes runs and asks a named query of them: the rows as dicts."""

    def make(name, rows, metrics=None, metadata=None, command="grpo"):
        def place(r):
            return r["phase"], r["step"]

        with RunDir.create(tmp_path, command, name=name, metadata=metadata or {}) as run:
            for (phase, step), of_step in groupby(sorted(rows, key=place), key=place):
                run.commit_rollouts(phase, step, [a_rollout(run_id=name, **r) for r in of_step])
            for (phase, step), values in (metrics or {}).items():
                run.commit_metrics(step, phase, values)

    def call(query, runs, *, metrics=None, metadata=None, searches=(), **parameters):
        if not isinstance(runs, dict):
            runs = {"r": runs}
        for name, rows in runs.items():
            if not (tmp_path / name).exists():
                command = "discover" if name in searches else "grpo"
                make(name, rows, (metrics or {}).get(name), (metadata or {}).get(name), command)
        chosen = named_queries()[query]
        with open_runs([read_run(tmp_path / name) for name in runs]) as database:
            table = database.select(chosen.sql, {**chosen.parameters, **parameters})
        return [dict(zip(table.columns, values, strict=True)) for values in table.rows]

    return call


def columns(rows, *names):
    """These columns of each row."""
    return [tuple(r[name] for name in names) for r in rows]


SELECTS = sorted(set(named_queries()) - {"summary"})  # the summary is a script, and has tests of its own


@pytest.mark.slow
def test_every_query_takes_a_run_of_anything(ask):
    """One without rows; one of evaluation alone without entropies and log-probabilities, all of whose grades failed."""
    lonely = [row("x", reward=None), row("y", reward=None)]
    runs = {"nothing": [], "lonely": lonely, "other": [row("x")]}
    for query in SELECTS:
        rows = ask(query, runs)
        if query != "config_diff":
            assert {r["run_id"] for r in rows} <= {"lonely", "other"}, query
            assert ask(query, {"nothing": []}) == [], query


def test_every_query_says_what_it_answers():
    for name, query in named_queries().items():
        assert 40 <= len(query.description) <= 160, name
        assert query.description.endswith("."), name
        assert all(f"${parameter}" in query.sql for parameter in query.parameters), name


def test_categories(ask):
    rows = [
        row("x", num_response_tokens=4),
        row("y", reward=0.0),
        row("y", 1, 0.0, finish_reason="length"),
        row("z", reward=None),
    ]
    found = ask("categories", rows)
    expected = [
        ("format_1_answer_1", 1, 0.25, 1.0, 4.0, 0.0),
        ("format_1_answer_0", 2, 0.5, 0.0, 10.0, 0.5),
        ("grade_error", 1, 0.25, 0.0, 10.0, 0.0),
    ]
    assert columns(found, "category", "samples", "share", "mean_reward", "mean_tokens", "truncated_share") == expected


def test_categories_are_the_same_bits_by_several_threads(ask, monkeypatch):
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.ONE_THREAD", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    drawn = random.Random(0)
    rows = [row(f"q{i}", sample, float(drawn.random() < 0.3)) for i in range(200) for sample in range(3)]
    assert len({repr(ask("categories", rows)) for _ in range(5)}) == 1


def test_curves(ask):
    metrics = {
        ("eval", 0): {"reward/mean": 0.25, "reward/samples": 8},
        ("train", 0): {"policy/entropy": 1.5},
        ("train", 1): {"length/mean": 9},
    }
    found = ask("curves", [], metrics={"r": metrics})
    expected = [(0, 0.25, 8.0, 1.5, None), (1, None, None, None, 9.0)]
    assert columns(found, "step", "eval_reward", "eval_samples", "entropy", "length") == expected


def test_failures_take_turns(ask):
    """Of 30 wrong answers, 2 unparsed ones and 1 without tags the rare ones are all there, in their categories."""
    rows = [row(f"w{i:02}", reward=0.0) for i in range(30)]
    rows += [row(f"u{i}", reward=0.0, failure_kind="unparsed_answer") for i in range(2)]
    rows += [row("n", reward=0.0, category="format_0_answer_0", failure_kind="correct_but_unformatted"), row("right")]
    found = ask("failures", rows, limit=7)
    expected = [
        ("format_1_answer_0", "unparsed_answer", "u0"), ("format_1_answer_0", "unparsed_answer", "u1"),
        *(("format_1_answer_0", "wrong_answer", f"w{i:02}") for i in range(3)),
        ("format_0_answer_0", "correct_but_unformatted", "n"),
        ("format_1_answer_0", "wrong_answer", "w03"),  # the one that shows that there are more
    ]  # fmt: skip
    assert columns(found, "category", "failure_kind", "example_id") == expected
    assert "the fault is the parser's, not the model's" in found[5]["why"]
    assert len(ask("failures", rows, limit=None)) == 33
    assert len(ask("failures", rows, limit=None, category="format_0_answer_0")) == 1
    assert len(ask("failures", rows, limit=None, failure_kind="unparsed_answer")) == 2


def test_rollouts_are_drawn_at_random_with_a_seed(ask):
    rows = [row(f"q{i}", reward=float(i % 2), step=s) for i in range(40) for s in (0, 5)]
    first = columns(ask("rollouts", rows, limit=8), "step", "example_id")
    assert {step for step, _ in first} == {5}  # the last one
    assert len({example for _, example in first}) == 8
    assert first == columns(ask("rollouts", rows, limit=8), "step", "example_id")
    other = columns(ask("rollouts", rows, limit=8, seed=1), "step", "example_id")
    assert set(other) != set(first)
    earlier = columns(ask("rollouts", rows, limit=8, step=0), "step", "example_id")
    assert [example for _, example in earlier] == [example for _, example in first]  # the same questions
    assert columns(ask("rollouts", rows, limit=4), "step", "example_id") == first[:4]


def test_rollouts_of_a_kind(ask):
    rows = [row("right"), row("wrong", reward=0.0), row("failed", reward=None, grade_error_detail="m.py:3: no")]
    found = ask("rollouts", rows)
    assert {(r["example_id"], r["why"]) for r in found} == {
        ("right", "it was rewarded"), ("wrong", "the answer differs from the truth"),
        ("failed", "the grade failed: timeout: m.py:3: no"),
    }  # fmt: skip
    assert columns(ask("rollouts", rows, correct=True), "example_id") == [("right",)]
    assert {*columns(ask("rollouts", rows, correct=False), "example_id")} == {("wrong",), ("failed",)}
    assert columns(ask("rollouts", rows, category="grade_error"), "example_id") == [("failed",)]
    more = {"more": [*rows, row("nothing", reward=0.0, failure_kind=None), row("right too", failure_kind=None)]}
    named = {"wrong_answer": "wrong", "grade_error: timeout": "failed", "unknown": "nothing"}
    assert {kind for (kind,) in columns(ask("failure_kinds", more), "failure_kind")} == named.keys()
    for kind, example in named.items():
        for query in ("rollouts", "failures"):
            assert columns(ask(query, more, failure_kind=kind), "example_id") == [(example,)]


def test_failures_show_one_sample_of_each_question_first(ask):
    rows = [row(example, sample, 0.0) for example in "ab" for sample in range(3)]
    assert columns(ask("failures", rows, limit=4), "example_id", "sample_index")[:3] == [("a", 0), ("b", 0), ("a", 1)]


def test_failure_kinds(ask):
    rows = [
        *(row(f"right{i}") for i in range(4)), row("a", reward=0.0, num_response_tokens=4),
        row("b", reward=0.0, num_response_tokens=6, finish_reason="length"),
        row("c", reward=0.0, category="format_0_answer_0", failure_kind="correct_but_unformatted"), row("d", reward=None),
    ]  # fmt: skip
    found = ask("failure_kinds", rows)
    expected = [
        ("wrong_answer", 2, 0.25, 0.5, 5.0, 0.5, "model"),
        ("correct_but_unformatted", 1, 0.125, 0.25, 10.0, 0.0, "parser"),
        ("grade_error: timeout", 1, 0.125, 0.25, 10.0, 0.0, "grader"),
    ]
    names = ("failure_kind", "samples", "share", "share_of_failures", "mean_tokens", "truncated_share", "at_fault")
    assert columns(found, *names) == expected


def test_an_environment_that_failed_is_at_fault_itself(ask):
    rows = [
        row(
            "a",
            reward=None,
            grade_error="KeyError",
            grade_error_detail="mine.py:3: x",
            failure_kind="environment_error",
        )
    ]
    assert columns(ask("failure_kinds", rows), "failure_kind", "at_fault") == [("environment_error", "environment")]
    (failure,) = ask("failures", rows)
    assert failure["why"] == "the environment failed: KeyError: mine.py:3: x"


FOUR = [
    *(row("x", i, float(i == 0)) for i in range(4)),  # 1 of 4
    *(row("y", i, [1.0, 1.0, 0.0, None][i]) for i in range(4)),  # 2 of 4, one grade failed
    *(row("z", i, 0.0) for i in range(2)),  # 0 of 2
]


def test_pass_at_k(ask):
    # k = 2: 1 - C(3, 2) / C(4, 2) = 1 / 2, 1 - C(2, 2) / C(4, 2) = 5 / 6, and 0
    found = ask("pass_at_k", FOUR)
    assert columns(found, "k", "questions", "too_few_samples", "grade_errors") == [
        (1, 3, 0, 1),
        (2, 3, 0, 1),
        (4, 2, 1, 1),
    ]
    assert [r["pass_at_k"] for r in found] == pytest.approx([(1 / 4 + 2 / 4) / 3, (1 / 2 + 5 / 6) / 3, 1])
    (found,) = ask("pass_at_k", FOUR, k=3)
    assert (found["k"], found["questions"]) == (3, 2)
    assert found["pass_at_k"] == pytest.approx((3 / 4 + 1) / 2)
    (found,) = ask("pass_at_k", FOUR, k=8)
    assert (found["questions"], found["pass_at_k"], found["too_few_samples"]) == (0, None, 3)


@pytest.mark.parametrize("query", ["pass_at_k", "best_at_k"])
def test_a_k_that_is_given_twice_counts_once(ask, query):
    assert ask(query, FOUR, k=[2, 1, 2]) == ask(query, FOUR, k="1,2") != []


def test_at_k_of_one_sample_each(ask):
    rows = [row("x"), row("y", reward=0.0, mean_logprob=-1.0)]
    assert columns(ask("pass_at_k", rows), "k", "pass_at_k") == [(1, 0.5)]
    assert columns(ask("best_at_k", rows), "k", "questions", "best_at_k", "without_logprobs") == [(1, 1, 0.0, 1)]


def test_best_at_k(ask):
    # x ranked: 1, 0, 0, 1: of 6 pairs the first is the best of 3, the second of 2, the third of 1. y is a tie.
    rewards, scores = [0.0, 1.0, 1.0, 0.0], [-2.0, -1.0, -4.0, -3.0]
    rows = [row("x", i, rewards[i], mean_logprob=scores[i]) for i in range(4)]
    rows += [row("y", i, float(i), mean_logprob=-5.0) for i in range(2)]
    rows += [row("z", i, 1.0, mean_logprob=[-5.0, None][i]) for i in range(2)]
    found = ask("best_at_k", rows)
    assert columns(found, "k", "questions", "too_few_samples", "without_logprobs") == [
        (1, 2, 0, 1),
        (2, 2, 0, 1),
        (4, 1, 2, 0),
    ]
    assert [r["best_at_k"] for r in found] == pytest.approx([0.5, (3 / 6 + 1 / 2) / 2, 1.0])


def test_at_k_is_that_of_the_statistics(ask):
    rng = random.Random(0)
    samples = {
        f"q{q}": [(rng.choice([0.0, 0.5, 1.0]), rng.choice([-1.0, -2.0, -3.0])) for _ in range(60)] for q in range(5)
    }
    rows = [row(q, i, reward, mean_logprob=score) for q, of in samples.items() for i, (reward, score) in enumerate(of)]
    for k in (1, 7, 60):
        best = [best_at_k(ranked(*zip(*of, strict=True)), k) for of in samples.values()]
        passed = [pass_at_k(60, sum(r > 0.5 for r, _ in of), k) for of in samples.values()]
        assert ask("best_at_k", rows, k=k)[0]["best_at_k"] == pytest.approx(sum(best) / 5)
        assert ask("pass_at_k", rows, k=k)[0]["pass_at_k"] == pytest.approx(sum(passed) / 5)


def attempt(number, score):
    """A row of a search; one without a score is not valid."""
    valid = {} if score is not None else {"points_sha256": None, "error": "no", "seconds": None}
    kind = {"failure_kind": None if score is not None else "no_code", "num_prompt_tokens": 30}
    return {
        **row("t", number % 2, score or 0.0, step=number // 2),
        **kind,
        "candidate": a_candidate(number=number, **valid),
    }


def start_of(score, *, competes=True):
    """What run.json has of the program to start from."""
    return {"start": {"score": score, "points_sha256": "c0ffee" if competes else None}}


def test_searches(ask):
    first = [attempt(0, None), attempt(1, 22.0), attempt(2, 220.0), attempt(3, 220.0), attempt(4, None)]
    runs = {"a": first, "b": [row("q")], "c": [attempt(0, None)]}
    metadata = {"a": {"start": {"score": 20.0}}, "c": start_of(None, competes=False)}
    assert [tuple(r.values()) for r in ask("searches", runs, metadata=metadata, searches="ac")] == [
        ("a", 5, 3, 0.6, 20.0, 22.0, 220.0, 2, 200, 1.5),
        ("c", 1, 0, 0.0, None, None, None, None, 40, None),
    ]


def test_the_program_to_start_from_is_the_best_of_a_search_until_an_attempt_is_as_good(ask):
    rows = [attempt(0, None), attempt(1, 22.0), attempt(2, 220.0)]
    runs = {"above": rows, "equal": rows, "alone": [], "earlier": rows, "failed": rows[:1]}
    metadata = {
        "above": start_of(582.0),
        "equal": start_of(220.0),
        "alone": start_of(582.0),
        "earlier": {"start": {"score": 582.0}},  # by a version in which it did not compete
        "failed": start_of(582.0),
    }

    def asked(query, *names):
        return columns(ask(query, runs, metadata=metadata, searches=runs), "run_id", *names)

    assert asked("searches", "attempts", "valid", "tokens", "start_score", "best_score", "best_attempt") == [
        ("above", 3, 2, 120, 582.0, 582.0, None),
        ("alone", 0, 0, 0, 582.0, 582.0, None),
        ("earlier", 3, 2, 120, 582.0, 220.0, 2),
        ("equal", 3, 2, 120, 220.0, 220.0, 2),
        ("failed", 1, 0, 40, 582.0, 582.0, None),
    ]
    scores = {"above": [582.0] * 3, "earlier": [None, 22.0, 220.0], "equal": [220.0] * 3, "failed": [582.0]}
    assert asked("attempts", "best_score") == [(run, score) for run, of_run in scores.items() for score in of_run]
    assert asked("lineage", "attempt") == [("earlier", 2), ("equal", 2)]
    chosen = ask("lineage", runs, metadata=metadata, searches=runs, attempt=1)
    assert columns(chosen, "run_id", "attempt") == [("above", 1), ("earlier", 1), ("equal", 1)]


@given(st.lists(st.sampled_from([None, 1.0, 2.0, 5.5]), min_size=1, max_size=6))
@settings(max_examples=8)
def test_best_score_at_k_is_the_mean_over_all_subsets(scores):
    with tempfile.TemporaryDirectory() as folder:
        with RunDir.create(Path(folder), "discover", name="r", metadata={}) as run:
            for step in range((len(scores) + 1) // 2):
                of_step = [(i, s) for i, s in enumerate(scores) if i // 2 == step]
                run.commit_rollouts("eval", step, [a_rollout(run_id="r", **attempt(*which)) for which in of_step])
        with open_runs([read_run(Path(folder) / "r")]) as database:
            query = named_queries()["best_score_at_k"]
            default = list(database.select(query.sql, query.parameters).records())
            every = list(database.select(query.sql, {"k": [*range(1, len(scores) + 2), 1]}).records())
    assert [r["k"] for r in default] == [k for k in (1, 2, 4) if k < len(scores)] + [len(scores)]
    assert [r["k"] for r in every] == list(range(1, len(scores) + 2))
    for r in every:
        subsets = list(combinations([score or 0.0 for score in scores], r["k"]))
        expected = statistics.mean(map(max, subsets)) if subsets else None
        assert r["best_score_at_k"] == (expected if expected is None else pytest.approx(expected, abs=1e-6))
    assert default == [r for r in every if r["k"] in {d["k"] for d in default}]


def test_metrics(ask):
    metrics = {
        ("train", 1): {"length/mean": 3.0, "length/wrong": 5.0, "loss/nll": 1.0},
        ("eval", 0): {"length/mean": 2.0},
    }
    found = ask("metrics", [], metrics={"r": metrics}, names="length/%")
    expected = [("length/mean", "eval", 0, 2.0), ("length/mean", "train", 1, 3.0), ("length/wrong", "train", 1, 5.0)]
    assert columns(found, "name", "phase", "step", "value") == expected
    assert all(r["wall_seconds"] >= 0 for r in found)
    assert len(ask("metrics", [], names="length/%", phase="eval")) == 1


def test_entropy_is_a_mean_over_tokens(ask):
    rows = [
        row("x", mean_entropy=0.5, mean_logprob=-1.0, num_response_tokens=2),
        row("y", reward=0.0, mean_entropy=1.5, num_response_tokens=6),
        row("z", reward=None, mean_logprob=-2.0, num_response_tokens=2),
        row("empty", reward=0.0, num_response_tokens=0),
        row("x", step=3, phase="train"),
    ]
    found = ask("entropy", rows)
    names = (
        "phase",
        "step",
        "entropy",
        "entropy_correct",
        "entropy_wrong",
        "estimate",
        "estimate_correct",
        "estimate_wrong",
    )
    # (0.5 * 2 + 1.5 * 6) / 8 = 1.25 and (1 * 2 + 2 * 2) / 4 = 1.5; a response whose grade failed is neither of the two
    assert columns(found, *names) == [
        ("eval", 0, 1.25, 0.5, 1.5, 1.5, 1.0, None),
        ("train", 3, None, None, None, None, None, None),
    ]


def test_entropy_counts_only_what_the_policy_sampled(ask):
    mask = (True, *[False] * 98, True)
    rows = [
        row(
            "x",
            response_ids=(7,) * 100,
            sampled_logprobs=tuple(-1.0 if own else 0.0 for own in mask),
            response_mask=mask,
            num_response_tokens=100,
            mean_entropy=1.0,
            mean_logprob=-1.0,
        ),
        row("y", mean_entropy=3.0, mean_logprob=-3.0, num_response_tokens=2),
    ]
    found = ask("entropy", rows)
    assert columns(found, "entropy", "estimate") == [(2.0, 2.0)]  # two sampled tokens of each


def test_entropy_by_position(ask):
    rows = [
        row("x", sampled_logprobs=(-1.0, -2.0, -3.0, -4.0, -5.0, -6.0, -7.0, -8.0, -9.0)),
        row("y", reward=0.0, sampled_logprobs=(-3.0,)),
        row("z", reward=None),
    ]
    found = ask("entropy_by_position", rows)
    expected = [
        (0, 2, 2.0, 1.0, 3.0),
        (1, 1, 2.0, 2.0, None),
        (2, 2, 3.5, 3.5, None),
        (4, 4, 6.5, 6.5, None),
        (8, 1, 9.0, 9.0, None),
    ]
    assert columns(found, "position", "tokens", "estimate", "estimate_correct", "estimate_wrong") == expected


def test_lengths(ask):
    rows = [row("x", i, num_response_tokens=n) for i, n in enumerate([1, 2, 3, 4, 90])]
    rows += [row("y", reward=0.0, num_response_tokens=7, finish_reason="length"), row("z", reward=None)]
    rows += [row("x", step=2, phase="train", num_response_tokens=5)]
    found = ask("lengths", rows)
    names = ("phase", "step", "responses", "samples", "mean", "p50", "longest", "truncated_share")
    assert columns(found, *names) == [
        ("eval", 0, "correct", 5, 20.0, 3.0, 90, 0.0),
        ("eval", 0, "ungraded", 1, 10.0, 10.0, 10, 0.0),
        ("eval", 0, "wrong", 1, 7.0, 7.0, 7, 1.0),
        ("train", 2, "correct", 1, 5.0, 5.0, 5, 0.0),
    ]
    assert found[0]["p95"] == pytest.approx(4 + 0.8 * 86)  # at 0.95 * 4 = 3.8 of the places 0 to 4


def test_groups(ask):
    rewards = {"right": (1.0, 1.0), "wrong": (0.0, None), "mixed": (1.0, None), "half": (0.5, 0.5)}
    advantages = {"mixed": (1.0, -1.0)}
    rows = [
        row(e, i, r, phase="train", step=4, advantage=advantages.get(e, (0.0, 0.0))[i])
        for e, of in rewards.items()
        for i, r in enumerate(of)
    ]
    (found,) = ask("groups", rows)
    assert found == {
        "run_id": "r", "step": 4, "groups": 4, "size": 2.0, "signal": 0.25, "zero_variance": 0.75, "all_correct": 0.25,
        "all_wrong": 0.5, "mean_abs_advantage": 0.25, "grade_errors": 2,
    }  # fmt: skip


@pytest.mark.parametrize(("wrong", "right"), [(-1.0, 1.0), (0.25, 0.75)])
def test_groups_are_right_or_wrong_as_the_rewards_are_above_a_half(ask, wrong, right):
    groups = {"right": (right, right), "wrong": (wrong, wrong), "failed": (wrong, None), "mixed": (wrong, right)}
    rows = [row(e, i, r, phase="train") for e, of in groups.items() for i, r in enumerate(of)]
    assert columns(ask("groups", rows), "all_correct", "all_wrong") == [(0.25, 0.5)]


def test_groups_of_dynamic_sampling_and_of_turns(ask):
    """Dropped groups have a stored advantage where the shaped rewards differ. From the second turn on, a sum that is equal may differ."""
    rows = [
        row(q, i, r, phase="train", advantage=a) for q, r, a in (("a", 1.0, 0.75), ("b", 0.0, 0.25)) for i in (0, 1)
    ]
    rows[2]["reward"] = 1.0
    (found,) = ask("groups", rows, metadata={"r": {"config": {"dynamic_sampling": True}}})
    assert (found["signal"], found["mean_abs_advantage"]) == (0.5, 0.25)
    played = [an_episode(2, 1, 2, turn_rewards=rewards) for rewards in ((1.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 0.0))]
    names = ("response_ids", "sampled_logprobs", "num_response_tokens", "response_mask", "turns", "episode", "grader")
    rows = [
        row(f"q{i // 2}", i % 2, phase="train", advantage=0.0, **{n: getattr(e, n) for n in names})
        for i, e in enumerate(played)
    ]
    signals = [
        ask("groups", {n: rows}, metadata={n: {"config": {"credit": n}}})[-1]["signal"] for n in ("turn", "response")
    ]
    assert signals == [0.5, 0.0]


def test_hardest(ask):
    wrong = {"extracted_answer": "9"}
    rows = [row("easy", step=s) for s in (0, 5)]
    rows += [row("hard", step=s, reward=0.0, prompt="A. User: Why?\nAssistant: <think>", **wrong) for s in (0, 5)]
    rows += [
        row("hard", 1, reward=0.0, step=5, extracted_answer="8"),
        row("half", step=0),
        row("half", step=5, reward=None),
    ]
    found = ask("hardest", rows, limit=2)
    assert columns(
        found, "example_id", "samples", "pass_rate", "grade_errors", "wrong_answer", "times", "question"
    ) == [
        ("hard", 3, 0.0, 0, "9", 2, "Why?"),
        ("half", 2, 0.5, 1, "7", 1, "question half"),
    ]
    assert columns(ask("hardest", rows, least=3), "example_id") == [("hard",)]
    assert columns(ask("hardest", rows, step=0), "example_id", "samples") == [("hard", 1), ("easy", 1), ("half", 1)]


def test_hardest_of_two_runs_takes_turns(ask):
    runs = {run: [row(e, reward=0.0) for e in "abc"] for run in ("one", "two")}
    assert columns(ask("hardest", runs), "run_id", "example_id")[:3] == [("one", "a"), ("two", "a"), ("one", "b")]


def test_learned_and_forgotten(ask):
    solved = {
        "learned": (0, 0, 1, 1), "wavers": (1, 0, 0, 1), "forgot": (0, 1, 0, 0), "lost": (1, 1, 1, 0), "always": (1, 1, 1, 1),
        "never": (0, 0, 0, 0),
    }  # fmt: skip
    rows = [row(e, step=10 * i, reward=float(r)) for e, of in solved.items() for i, r in enumerate(of)]
    rows += [row("once", step=30)]  # no change to see
    found = ask("learned_and_forgotten", rows)
    assert columns(found, "change", "step", "questions", "examples") == [
        ("learned at step", 20, 1, ["learned"]),
        ("learned at step", 30, 1, ["wavers"]),
        ("forgotten after step", 10, 1, ["forgot"]),
        ("forgotten after step", 20, 1, ["lost"]),
        ("always solved", None, 1, ["always"]),
        ("never solved", None, 1, ["never"]),
    ]
    assert [r["share"] for r in found] == pytest.approx([1 / 6] * 6)


def test_learned_with_several_samples_is_half_of_them(ask):
    rows = [row("x", i, float(i < correct), step=step) for step, correct in ((0, 1), (1, 2)) for i in range(4)]
    assert columns(ask("learned_and_forgotten", rows), "change", "step") == [("learned at step", 1)]


def test_migration(ask):
    rows = [row("x", step=s, reward=r) for s, r in ((0, 0.0), (5, None), (9, 1.0))]
    rows += [row("y", step=s) for s in (0, 5, 9)]
    rows += [row("z", step=0, reward=0.0), row("z", step=9, reward=0.0), row("late", step=9)]
    found = ask("migration", rows)
    names = ("step_a", "step_b", "category_a", "category_b", "samples", "share_of_category_a")
    assert columns(found, *names) == [
        (0, 9, "format_1_answer_1", "format_1_answer_1", 1, 1.0),
        (0, 9, "format_1_answer_0", "format_1_answer_1", 1, 0.5),
        (0, 9, "format_1_answer_0", "format_1_answer_0", 1, 0.5),
    ]
    assert [r["share"] for r in found] == pytest.approx([1 / 3] * 3)
    assert columns(ask("migration", rows, step_a=5, step_b=9), "category_a") == [
        ("format_1_answer_1",),
        ("grade_error",),
    ]


def test_mismatch(ask):
    metrics = {
        ("train", 0): {"mismatch/logprob_mean_abs": 0.1, "mismatch/position/0064": 0.2, "mismatch/position/0004": 0.1},
        ("train", 1): {"mismatch/logprob_mean_abs": 0.5, "mismatch/length/0016": 0.3, "loss/nll": 9.0},
        ("train", 2): {"mismatch/logprob_mean_abs": 0.3},
    }
    found = ask("mismatch", [], metrics={"r": metrics})
    assert columns(found, "measure", "bucket_from", "steps", "first", "last", "largest", "at_step") == [
        ("length", 16, 1, 0.3, 0.3, 0.3, 1),
        ("logprob_mean_abs", None, 3, 0.1, 0.3, 0.5, 1),
        ("position", 4, 1, 0.1, 0.1, 0.1, 0),
        ("position", 64, 1, 0.2, 0.2, 0.2, 0),
    ]
    assert found[1]["mean"] == pytest.approx(0.3)


def test_an_environment_that_failed_gives_no_reward(ask):
    played = an_episode(2, 1, 2)
    names = ("response_ids", "sampled_logprobs", "num_response_tokens", "response_mask", "turns", "episode")
    own = {name: getattr(played, name) for name in names}
    rows = [row("q", i, reward, **own) for i, reward in enumerate((1.0, None))]
    (found,) = ask("turns", rows)
    assert (found["reward"], found["reward_with_call"], found["reward_without"]) == (0.5, 0.5, None)
    assert [r["reward"] for r in ask("tools", {"s": rows})] == [0.5]


def test_repetitions(ask):
    loop = "again " * 20
    rows = [row("x", i, response=text) for i, text in enumerate(["same", "same", "one two", loop])]
    rows += [row("y", 0, response="same"), row("y", 1, response="")]
    (found,) = ask("repetitions", rows)
    # "same" went to both questions, twice to x. Distinct words: 3 of 1, "one two" of 1, the loop of 1/20; "" has no words
    assert found["samples"] == 6
    assert found["shared"] == pytest.approx(3 / 6)
    assert found["duplicates"] == pytest.approx(1 / 6)
    assert found["distinct_words"] == pytest.approx((3 + 1 + 1 / 20) / 5)
    assert found["repeating"] == pytest.approx(1 / 6)
    assert (found["times"], found["most_frequent_response"]) == (3, "same")


def test_slowest(ask):
    metrics = {
        ("train", 0): {"step/seconds": 4.0, "update/seconds": 3.0, "update/tokens": 99.0},
        ("train", 1): {"step/seconds": 6.0, "update/seconds": 5.0},
        ("train", 2): {"sampling/waiting_seconds": 1.0, "synchronisation/seconds": 0.5},  # an old run that went on
        ("train", 3): {"weight_sync/seconds": 0.25},
        ("eval", 0): {"sampling/seconds": 9.0},
    }
    found = ask("slowest", [], metrics={"r": metrics})
    names = ("phase", "work", "steps", "seconds", "share_of_steps", "per_step", "slowest", "slowest_step")
    assert columns(found, *names) == [
        ("train", "step", 2, 10.0, 1.0, 5.0, 6.0, 1),
        ("eval", "sampling", 1, 9.0, None, 9.0, 9.0, 0),
        ("train", "update", 2, 8.0, 0.8, 4.0, 5.0, 1),
        ("train", "waiting for the sampler", 1, 1.0, 0.1, 1.0, 1.0, 2),
        ("train", "weight_sync", 2, 0.75, 0.075, 0.375, 0.5, 2),
    ]


def test_grade_errors(ask):
    rows = [row(e, step=s, reward=None) for s in (2, 6) for e in "ba"]
    rows += [row("c", step=2, reward=None, grade_error="crash"), *(row(f"right{i}", step=2) for i in range(5))]
    found = ask("grade_errors", rows, examples=2)
    names = ("phase", "grader", "error", "samples", "share", "first_step", "last_step", "examples", "response_end")
    assert columns(found, *names) == [
        ("eval", "r1_zero", "timeout", 4, 0.4, 2, 6, ["a", "b"], FORMAT),
        ("eval", "r1_zero", "crash", 1, 0.1, 2, 2, ["c"], FORMAT),
    ]
    assert columns(found, "detail") == [(None,), (None,)]


def test_grade_errors_show_the_commonest_text_of_each_error(ask):
    details = ["m.py:3: rare", "m.py:9: often", "m.py:9: often", None]
    rows = [row(f"q{i}", reward=None, grade_error="ValueError", grade_error_detail=d) for i, d in enumerate(details)]
    found = ask(
        "grade_errors", [*rows, row("x", reward=None, grade_error="KeyError", grade_error_detail="m.py:1: 'a'")]
    )
    assert columns(found, "error", "samples", "detail") == [
        ("ValueError", 4, "m.py:9: often"), ("KeyError", 1, "m.py:1: 'a'")
    ]  # fmt: skip


def test_config_diff(ask):
    def metadata(weights, prompt="Q: {question}", computes="float32", **config):
        facts = {"model": {"name": "m", "sha256": weights}, "prompt": {"name": "p", "text": prompt}}
        return {"config": config, "facts": facts, "policy": {"compute_dtype": computes}}

    facts = {
        "base": metadata("a" * 64, seed=0, run="base", stop=["x"], lr=0.1, only_here=None),
        "same": metadata("a" * 64, seed=0, run="same", stop=["x"], lr=0.1),
        "other": metadata("b" * 64, "{question}", "bfloat16", seed=1, run="other", stop=["x", "y"], lr=0.1, new="v"),
    }
    found = ask("config_diff", {"base": [], "same": [], "other": []}, metadata=facts)
    assert columns(found, "option", "first_run", "first_value", "run_id", "value") == [
        ("(computes in)", "base", "float32", "other", "bfloat16"),
        ("(model sha256)", "base", "a" * 16, "other", "b" * 16),
        (
            "(prompt sha256)",
            "base",
            sha256(b"Q: {question}").hexdigest()[:16],
            "other",
            sha256(b"{question}").hexdigest()[:16],
        ),
        ("new", "base", None, "other", "v"),
        ("seed", "base", "0", "other", "1"),
        ("stop", "base", '["x"]', "other", '["x","y"]'),
    ]
    with pytest.raises(RlvrError, match="config_diff wants two runs"):
        ask("config_diff", {"base": []})


def test_queries_of_two_runs_keep_them_apart(ask):
    runs = {"one": [row("x"), row("y", reward=0.0)], "two": [row("x", step=7), row("y", step=7)]}
    assert columns(ask("pass_at_k", runs), "run_id", "step", "pass_at_k") == [("one", 0, 0.5), ("two", 7, 1.0)]
    assert columns(ask("failure_kinds", runs), "run_id", "share") == [("one", 0.5)]
    assert columns(ask("lengths", runs), "run_id", "responses", "samples") == [
        ("one", "correct", 1), ("one", "wrong", 1), ("two", "correct", 2),
    ]  # fmt: skip


def test_the_length_of_an_episode_is_that_of_what_the_policy_wrote(ask):
    """Two episodes of 4 + 2 tokens of the policy, with 30 of the environment between; and a response of 10 tokens."""
    said = an_episode(4, 30, 2)
    names = ("response_ids", "sampled_logprobs", "num_response_tokens", "response_mask", "turns", "episode")
    own = {name: getattr(said, name) for name in names}
    rows = [row("x", **own), row("y", **own, reward=0.0), row("z", reward=0.0)]
    columns_of_lengths = ("responses", "mean", "p50", "longest")
    assert columns(ask("lengths", rows), *columns_of_lengths) == [("correct", 6, 6, 6), ("wrong", 8, 8, 10)]
    assert [r["mean_tokens"] for r in ask("categories", rows)] == [6, 8]
    assert [r["mean_tokens"] for r in ask("failure_kinds", rows)] == [8]
    assert columns(ask("rollouts", rows, correct=True), "num_response_tokens") == [(6,)]
    cut = {"cut": [row("x", **own, reward=0.0, finish_reason="length", failure_kind="truncated")]}
    for query in ("failures", "rollouts"):
        shown = columns(ask(query, cut), "num_response_tokens", "why")
        assert shown == [(6, "cut off after 6 tokens, before its answer")]
    bins = ask("length_histogram", rows, bins=2)
    assert columns(bins, "from_tokens", "correct", "wrong") == [(0, 0, 0), (6, 1, 2)]
    config = {
        "loss_type": "grpo_clip",
        "use_std_normalization": False,
        "length_normalization": "masked_mean",
        "sampling_max_tokens": 64,
    }
    found = ask(
        "objective",
        {"o": rows},
        metadata={"o": {"config": config | {"overlong": "none"}}},
        phase="eval",
        kind="correctness",
    )
    assert columns(found, "bucket", "tokens") == [("wrong", 8), ("correct", 6)]
    with pytest.raises(RlvrError, match="t has --credit turn: its advantages are of turns, not of responses"):
        ask("objective", {"t": rows}, metadata={"t": {"config": config | {"credit": "turn"}}}, phase="eval")


def test_length_histogram_has_its_empty_bins(ask):
    """Lengths 0 to 9 in five bins of two; the runs share the bins."""
    a = [row("x", i, num_response_tokens=n) for i, n in enumerate([0, 1, 1, 8])]
    a += [row("y", reward=0.0, num_response_tokens=9), row("z", reward=None, num_response_tokens=4)]
    found = ask("length_histogram", {"a": a, "b": [row("x", num_response_tokens=3)]}, bins=5)
    assert columns(found, "run_id", "from_tokens", "to_tokens", "correct", "wrong") == [
        ("a", 0, 1, 3, 0),
        ("a", 2, 3, 0, 0),
        ("a", 4, 5, 0, 1),
        ("a", 6, 7, 0, 0),
        ("a", 8, 9, 1, 1),
        ("b", 0, 1, 0, 0),
        ("b", 2, 3, 1, 0),
        ("b", 4, 5, 0, 0),
        ("b", 6, 7, 0, 0),
        ("b", 8, 9, 0, 0),
    ]


def test_the_interval_of_pass_at_k_by_hand(ask):
    """Chances of 1, 1/2 and 0: mean 1/2, squares 1/2, so 1/2 / 9 / (1/4) = 2/9 above 1/6; two questions show the rarer outcome."""
    rows = (
        [row("x", i) for i in range(2)]
        + [row("y"), row("y", 1, reward=0.0)]
        + [row("z", i, reward=0.0) for i in range(2)]
    )
    (found,) = ask("pass_at_k", rows, k=1)
    assert (found["low"], found["high"]) == pytest.approx(share_interval(0.5, 3 / (2 * 2 / 9 + 1 / 3)))


@pytest.mark.parametrize("shares", [(0.0,), (1.0,), (0.01, 0.05), (0.3, 0.6, 1.0), (0.9, 0.99, 1.0)])
def test_pass_at_k_has_the_interval_of_the_summary(ask, shares):
    """The same digits from SQL and from Python, for questions with equally many samples and with different numbers."""
    rng = random.Random(7)
    kinds: dict[int, list[tuple[int, int]]] = {8: [], 3: []}
    rows = []
    for q in range(40):
        n, share = (8 if q % 3 else 3), rng.choice(shares)
        of = [float(rng.random() < share) for _ in range(n)]
        kinds[n].append((n, int(sum(of))))
        rows += [row(f"q{q}", i, reward=reward) for i, reward in enumerate(of)]
    for found in ask("pass_at_k", rows):
        k = found["k"]
        asked = [pair for n in kinds if n >= k for pair in kinds[n]]
        expected = share_of([(pass_at_k(n, c, k), 1, 1) for n, c in asked], draws=sum(n for n, _ in asked) / k)
        assert [found[name] for name in ("pass_at_k", "low", "high")] == pytest.approx(
            [expected.value, expected.low, expected.high], rel=1e-12, abs=1e-15
        )
        assert 0 <= found["low"] < found["high"] <= 1


def test_no_question_has_no_interval(ask):
    (found,) = ask("pass_at_k", [row("x"), row("y")], k=2)
    assert (found["questions"], found["pass_at_k"], found["low"], found["high"]) == (0, None, None, None)


def test_thinking_budget_has_the_accuracy_of_the_summary(ask):
    rng = random.Random(3)
    turns = (Turn("environment", 0, 1),)
    runs, expected = {}, {}
    for budget in (512, 64):
        kinds, runs[f"b-{budget}"] = [], []
        for q in range(30):
            n = 4 if q % 3 else 2
            of = [float(rng.random() < 0.3 + q / 60) for _ in range(n)]
            if (budget, q) == (512, 0):
                of[0] = None  # a failed grade counts as wrong
            kinds.append((sum(r or 0.0 for r in of), n, 1))
            runs[f"b-{budget}"] += [
                row(f"q{q}", i, reward=r, turns=turns if budget == 64 and q < 3 else None) for i, r in enumerate(of)
            ]
        expected[budget] = share_of(kinds)
    runs["plain"] = [row("q")]
    metadata = {name: {"config": {"thinking_budget": name[2:] if name != "plain" else ""}} for name in runs}
    found = ask("thinking_budget", runs, metadata=metadata)
    assert columns(found, "run_id", "thinking_budget", "questions", "samples", "grade_errors", "ended_share") == [
        ("b-64", 64, 30, 100, 0, 0.1), ("b-512", 512, 30, 100, 1, 0.0)
    ]  # fmt: skip
    for r in found:
        share = expected[r["thinking_budget"]]
        assert (r["accuracy"], r["low"], r["high"]) == pytest.approx((share.value, share.low, share.high))


OBJECTIVE = {
    "loss_type": "reinforce_with_baseline", "use_std_normalization": True, "std_normalization": None, "advantage_eps": 1e-6,
    "length_normalization": "masked_mean", "normalize_constant": None, "sampling_max_tokens": 7,
}  # fmt: skip


def test_the_handouts_example_of_length_normalization(ask):
    """Two responses of 4 and 7 tokens with advantage 2: 0.5 and 0.2857 a token, or 0.2857 for both."""
    rows = [row("q", i, 2.0, phase="train", num_response_tokens=n) for i, n in enumerate((4, 7))]
    choice = {"length_normalization": "masked_normalize", "kind": "response"}
    metadata = {"r": {"config": OBJECTIVE | {"loss_type": "no_baseline"}}}
    found = ask("objective", rows, metadata=metadata, **choice)
    assert [r["tokens"] for r in found] == [4, 7]
    assert [round(r["token_weight"], 4) for r in found] == [0.5, 0.2857]
    assert [round(r["other_token_weight"], 4) for r in found] == [0.2857, 0.2857]
    assert [round(r["push_share"], 4) for r in found] == [0.5, 0.5]
    assert [round(r["other_push_share"], 4) for r in found] == [round(4 / 11, 4), round(7 / 11, 4)]


@pytest.mark.parametrize("std", ["group", "batch", "none"])
@pytest.mark.parametrize("length", ["masked_mean", "masked_normalize", "token_mean"])
def test_weights_of_an_objective_are_those_of_training(ask, std, length):
    """Also in groups with an episode that failed before its first token, and with responses that --overlong leaves out."""
    overlong = "none" if std == "none" else "mask"
    generator = random.Random(f"{std} {length}")
    rewards, lengths = [[generator.choice([0.0, 0.3, 1.0]) for _ in range(4)] for _ in range(5)], []
    rewards[2] = [1.0] * 4  # no signal
    rows = []
    for group, of_group in enumerate(rewards):
        for i, reward in enumerate(of_group):
            lengths.append(0 if (group, i) in ((0, 1), (3, 2)) else generator.randint(1, 7))
            cut = {"finish_reason": "length"} if lengths[-1] > 5 else {}
            rows.append(row(f"q{group}", i, reward, phase="train", num_response_tokens=lengths[-1], **cut))
    found = ask(
        "objective", rows, metadata={"r": {"config": OBJECTIVE | {"overlong": overlong}}}, kind="response",
        std_normalization=std, length_normalization=length,
    )  # fmt: skip
    flat = torch.tensor(rewards, dtype=torch.float64).flatten()

    def weights(std, length):
        advantages = group_advantages(flat, group_size=4, normalize_by_std=std == "group")
        advantages = batch_normalized(advantages) if std == "batch" else advantages
        learned = [0 if overlong == "mask" and n > 5 else n for n in lengths]
        mask = torch.arange(7) < torch.tensor(learned)[:, None]
        constant = 7.0 if length == "masked_normalize" else None
        denominators = loss_denominators(mask, normalization=length, normalize_constant=constant)
        rows_of_mean = len(flat) if constant else mask.any(dim=1).sum()
        return (mask[:, 0] * (advantages[:, None] / denominators * rows_of_mean)[:, 0]).tolist()

    order = [f"step 0, q{group}, sample {i}" for group in range(5) for i in range(4)]
    by_name = {r["bucket"]: r for r in found}
    assert len(by_name) == len(order) - 2
    nothing = {"token_weight": 0, "other_token_weight": 0}  # of a response without a token
    of = [by_name.get(name, nothing) for name in order]
    assert [r["token_weight"] for r in of] == pytest.approx(weights("group", "masked_mean"))
    assert [r["other_token_weight"] for r in of] == pytest.approx(weights(std, length))


@pytest.mark.parametrize("overlong", ["none", "mask"])
def test_a_failed_episode_is_of_its_group_but_in_no_bucket(ask, overlong):
    rows = [
        row("q", 0, 1.0, phase="train", num_response_tokens=4, finish_reason="length"),
        row("q", 1, None, phase="train", num_response_tokens=0),
    ]
    own = OBJECTIVE | {"overlong": overlong, "length_normalization": "token_mean"}
    found = ask("objective", rows, metadata={"r": {"config": own}})
    weight = 0 if overlong == "mask" else pytest.approx(0.5**0.5, rel=1e-5)
    assert columns(found, "bucket", "responses", "response_weight") == [
        ("correct", 1, weight), ("half or more correct", 1, weight), ("correct, shortest quarter", 1, weight)
    ]  # fmt: skip


def test_kimi_divides_by_no_length_and_gspo_by_each_responses(ask):
    """Kimi's loss has the log-probability of the whole response, gspo's a ratio of its own: whatever the run divided by."""
    rows = [row("q", i, 1.0 - i, phase="train", num_response_tokens=n) for i, n in enumerate((4, 7))]
    given = {"kind": "response", "std_normalization": "none", "phase": "train"}
    own = OBJECTIVE | {"std_normalization": "none"}
    kimi, each, mean = [0.5, -0.5], [0.5 / 4, -0.5 / 7], [0.5 / 5.5, -0.5 / 5.5]
    for loss, length, other, expected in (
        ("kimi", "masked_mean", "grpo_clip", (kimi, each)),
        ("gspo", "masked_mean", "kimi", (each, kimi)),
        ("grpo_clip", "token_mean", "gspo", (mean, each)),
    ):
        metadata = {loss: {"config": own | {"loss_type": loss, "length_normalization": length}}}
        found = ask("objective", {loss: rows}, metadata=metadata, loss_type=other, **given)
        found.sort(key=lambda r: r["tokens"])
        weights = [[r[name] for r in found] for name in ("token_weight", "other_token_weight")]
        assert weights == [pytest.approx(e) for e in expected]


def test_an_objectives_push_by_correctness_length_and_difficulty(ask):
    rows = [
        row(f"q{group}", i, reward, phase="train", num_response_tokens=tokens)
        for group, of_group in enumerate(([(1.0, 2), (0.0, 6)], [(1.0, 3), (1.0, 5)], [(0.0, 1), (0.0, 7)]))
        for i, (reward, tokens) in enumerate(of_group)
    ]
    found = ask("objective", rows, metadata={"r": {"config": OBJECTIVE}}, length_normalization="token_mean")
    shares = {(r["kind"], r["bucket"]): (r["responses"], r["push_share"], r["other_push_share"]) for r in found}
    assert shares["correctness", "correct"] == (3, pytest.approx(0.5), pytest.approx(0.25))
    assert shares["correctness", "wrong"] == (3, pytest.approx(0.5), pytest.approx(0.75))
    assert shares["difficulty", "half or more correct"] == (2, 1, 1)
    assert shares["difficulty", "all of the group correct"] == (2, 0, 0)
    assert shares["difficulty", "none of the group correct"] == (2, 0, 0)
    assert shares["length", "wrong, longest quarter"][0] == 1
    assert sum(r["responses"] for r in found if r["kind"] == "length") == 6
    no_baseline = ask("objective", {"r": rows}, loss_type="no_baseline")
    pushed = {r["bucket"]: r["other_push_share"] for r in no_baseline if r["kind"] == "correctness"}
    assert pushed == {"correct": 1, "wrong": 0}


def test_groups_that_dynamic_sampling_dropped_are_not_pushed(ask):
    """Their shaped rewards may differ."""
    rows = [
        row(q, i, float(q == "kept" and i > 0), phase="train", shaped_reward=float(i), num_response_tokens=2)
        for q in ("kept", "dropped") for i in (0, 1)
    ]  # fmt: skip
    rows[2]["num_response_tokens"] = 90
    own = OBJECTIVE | {"dynamic_sampling": True, "length_normalization": "token_mean", "std_normalization": "batch"}
    found = ask("objective", rows, metadata={"r": {"config": own}}, kind="response", std_normalization="none")
    assert [r["bucket"] for r in found] == ["step 0, kept, sample 0", "step 0, kept, sample 1"]
    assert [r["token_weight"] for r in found] == pytest.approx([-(0.5**1.5), 0.5**1.5], rel=1e-5)
    assert [r["other_token_weight"] for r in found] == [-0.25, 0.25]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"std_normalization": "batches"}, "std_normalization is group, batch or none"),
        ({"length_normalization": "mean"}, "length_normalization is masked_mean"),
        ({"loss_type": "ppo"}, "loss_type is no_baseline, or any with a baseline"),
        ({"loss_type": "kimi", "length_normalization": "token_mean"}, "length_normalization has no effect on r: kimi"),
        ({"loss_type": "kimi", "normalize_constant": 3}, "normalize_constant has no effect on r: kimi"),
        ({"loss_type": "gspo", "length_normalization": "token_mean"}, "length_normalization has no effect on r: gspo"),
        ({"loss_type": "gspo", "normalize_constant": 3}, "normalize_constant has no effect on r: gspo"),
    ],
)
def test_an_unknown_choice_of_an_objective_is_refused(ask, wrong, said):
    rows = [row("q", i, float(i), phase="train") for i in range(2)]
    with pytest.raises(RlvrError, match=said):
        ask("objective", rows, metadata={"r": {"config": OBJECTIVE}}, **wrong)


def test_accuracy_by_subject(ask):
    def asked(example, subject, reward, kind=None):
        truth, format_reward = truth_of("A", ["1", "2"], subject), float(kind not in ("unparsed_answer", "truncated"))
        changes = {
            "ground_truth": truth,
            "grader": "multiple_choice",
            "failure_kind": kind,
            "format_reward": format_reward,
        }
        return row(example, reward=reward, **changes)

    rows = [
        asked(f"v{i}", "virology", float(i < 3), (None, "truncated", "unparsed_answer")[(i > 2) + (i > 5)])
        for i in range(10)
    ]
    rows += [asked(f"a{i}", "astronomy", 1.0) for i in range(4)] + [asked("n", None, 0.0, "wrong_answer")]
    found = ask("subjects", [*rows, row("other", ground_truth="not JSON")])
    assert columns(found, "subject", "questions", "accuracy", "unparsed_share") == [
        ("astronomy", 4, 1.0, 0.0), ("virology", 10, pytest.approx(0.3), pytest.approx(0.7)), (None, 1, 0.0, 0.0),
    ]  # fmt: skip
    for group, share, n in zip(found, (1.0, 0.3, 0.0), (4, 10, 1), strict=True):
        assert (group["low"], group["high"]) == pytest.approx(share_interval(share, n), abs=0.02)
