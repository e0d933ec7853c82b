"""What a sweep says of its arms: p-values corrected for their number, and words that fit them."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

from factories import a_rollout, an_episode
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.statistics.estimators import share_interval
from rlvr_cli.analysis.statistics.sweep_table import (
    arm_table,
    corrected,
    difference_table,
    divergences,
    evaluation_tables,
    sentences,
)
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir


@dataclass
class Found:
    """The fields of a `Comparison` that are read."""

    p: float
    difference: float = 0.05
    low: float = 0.01
    high: float = 0.09
    decided: bool = True
    detectable: float | None = 0.04
    questions: int = 100
    too_few: str = ""
    a: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(accuracy=0.5))


def test_p_values_are_corrected_for_the_number_of_arms():
    found = {"a": Found(0.01), "b": Found(0.04), "c": Found(0.2, decided=False, low=-0.02)}
    assert corrected(found) == {"a": 0.03, "b": 0.08, "c": 0.2}
    rows = list(difference_table(found, baseline="z").records())
    assert [(r["arm"], r["p"], r["p_holm"], r["decided"]) for r in rows] == [
        ("a", 0.01, 0.03, "yes"), ("b", 0.04, 0.08, "no"), ("c", 0.2, 0.2, "no"),
    ]  # fmt: skip
    told = list(sentences(found, baseline="z"))
    assert told[0] == (
        "a is better than z: +5.0 points (95% interval +1.0 to +9.0; p = 0.01; for 3 comparisons p = 0.03)."
    )
    assert told[1].startswith("Taken alone, b is better than z: +5.0 points")
    assert "Among 3 comparisons a difference like this one arises by chance too often to count." in told[1]
    assert told[2].startswith("The data cannot tell c from z: +5.0 points (95% interval -2.0 to +9.0;")
    assert told[2].endswith("4.0 points or more would show in 4 of 5 trials.")
    assert "3 arms are compared with one baseline" in told[3]


def test_a_tiny_p_is_no_row_of_digits():
    assert "p < 0.0001)" in next(sentences({"a": Found(3e-71)}, baseline="z"))


def test_two_seeds_promise_nothing_and_the_sentence_says_why():
    found = {"a": Found(0.4, decided=False, low=-0.02, detectable=None)}
    (told,) = sentences(found, baseline="z")
    assert told.endswith("p = 0.4). What could be told with more questions would take 3 seeds an arm to say.")


def test_one_comparison_needs_no_correction():
    (told,) = sentences({"a": Found(0.01, difference=-0.05, low=-0.09, high=-0.01)}, baseline="z")
    assert told == "a is worse than z: -5.0 points (95% interval -9.0 to -1.0; p = 0.01)."


def test_seeds_whose_updates_differ_are_compared_evaluation_by_evaluation(tmp_path):
    """Rounds of expert iteration make as many updates as there were right responses."""
    right = {"a": {0: 1, 10: 3, 25: 2}, "b": {0: 2, 14: 4, 31: 3}, "lone": {0: 1}}  # of 4 questions
    for name, by_step in right.items():
        with RunDir.create(tmp_path, "ei", name=name, metadata={}) as run:
            for step in range(max(by_step)):
                sampled = {"reward/samples": 8.0} if step in by_step else {}
                run.commit_metrics(step, "train", {"update/rows": 4.0, **sampled})
            for step, count in by_step.items():
                run.commit_metrics(step, "eval", {"reward/mean": count / 4})
                rows = [
                    a_rollout(run_id=name, step=step, example_id=f"q{i}", answer_reward=r, reward=r)
                    for i, r in enumerate([1.0] * count + [0.0] * (4 - count))
                ]
                run.commit_rollouts("eval", step, rows)
    with open_runs([read_run(tmp_path / name) for name in right]) as database:
        both, lone, cut = arm_table(database, {"both": ["a", "b"], "lone": ["lone"], "cut": ["a", "lone"]}).records()
    assert both["accuracy"] == pytest.approx(5 / 8)  # 2 and 3 of 4, at the last evaluation of each
    assert both["low"] < 5 / 8 < both["high"]
    assert (both["best"], both["at_update"]) == (pytest.approx(7 / 8), 12)  # the second evaluations, after 10 and 14
    assert 0 <= both["best_low"] < 7 / 8 < both["best_high"] <= 1
    assert (both["best_low"], both["best_high"]) != (both["low"], both["high"])
    assert (lone["accuracy"], lone["best"], lone["at_update"]) == (0.25, 0.25, 0)
    assert (lone["low"], lone["high"]) == pytest.approx(share_interval(1 / 4, 4))
    assert (lone["best_low"], lone["best_high"]) == (lone["low"], lone["high"]), "it is the same evaluation"
    assert cut["accuracy"] == pytest.approx(3 / 8), "a seed that ended early counts as it was then"


def test_seeds_without_an_evaluation_in_common_have_no_best_one(tmp_path):
    for name, step in (("a", 3), ("b", 5)):
        with RunDir.create(tmp_path, "grpo", name=name, metadata={}) as run:
            reward = {"a": 1.0, "b": 0.7}[name]  # an accuracy is of rewards above 0.5, whatever they are
            run.commit_rollouts("eval", step, [a_rollout(run_id=name, step=step, reward=reward, answer_reward=1.0)])
    with open_runs([read_run(tmp_path / name) for name in "ab"]) as database:
        (row,) = arm_table(database, {"both": ["a", "b"]}).records()
        (lone,) = arm_table(database, {"lone": ["b"]}).records()
    assert (lone["low"], lone["high"]) == (lone["best_low"], lone["best_high"]) == pytest.approx(share_interval(1, 1))
    assert row["accuracy"] == 1.0
    assert [row[name] for name in ("best", "best_low", "best_high", "at_update")] == [None] * 4


@pytest.mark.parametrize(
    ("command", "metrics", "sampled", "tokens"),
    [
        ("grpo", {"update/tokens": 5.0}, 2, 14),  # those sampled for training
        ("eval", {}, 0, 21),  # its responses
        ("sft", {"update/tokens": 5.0}, 0, 5),  # those trained on, and not those of its evaluation
        ("dpo", {"update/rows": 5.0}, 0, None),  # nobody knows
    ],
)
def test_what_the_tokens_of_an_arm_count(tmp_path, command, metrics, sampled, tokens):
    with RunDir.create(tmp_path, command, name="r", metadata={}) as run:
        run.commit_metrics(0, "train", metrics)
        for phase, count in (("train", sampled), ("eval", 3)):
            own = [{"run_id": "r", "phase": phase, "example_id": f"q{i}"} for i in range(count)]
            rows = [
                an_episode(4, 30, 3, **own[i]) if i else a_rollout(num_response_tokens=7, **own[i])
                for i in range(count)
            ]
            if rows:
                run.commit_rollouts(phase, 0, rows)
    with open_runs([read_run(tmp_path / "r")]) as database:
        (row,) = arm_table(database, {"arm": ["r"]}).records()
    assert row["tokens"] == tokens


def test_evaluations_show_their_categories_and_what_k_samples_give(tmp_path, monkeypatch):
    answers = {"one": [[1.0], [0.0]], "two": [[1.0, 0.0], [0.0, 0.0]]}  # run -> question -> its samples
    for name, questions in answers.items():
        with RunDir.create(tmp_path, "eval", name=name, metadata={}) as run:
            rows = [
                a_rollout(
                    run_id=name,
                    step=0,
                    example_id=f"q{q}",
                    sample_index=i,
                    answer_reward=r,
                    reward=r,
                    category=f"format_1_answer_{r:.0f}",
                )
                for q, samples in enumerate(questions)
                for i, r in enumerate(samples)
            ]
            run.commit_rollouts("eval", 0, rows)

    def tables_of(name):
        return evaluation_tables([read_run(tmp_path / name)])

    monkeypatch.setattr("rlvr_cli.analysis.queries.database.MEMORY_LIMIT", "no limit of a database that spills")

    (categories,) = tables_of("one")
    assert {row["category"]: row["samples"] for row in categories.records()} == {
        "format_1_answer_1": 1,
        "format_1_answer_0": 1,
    }
    _, of_k = tables_of("two")
    assert [(row["k"], row["pass_at_k"]) for row in of_k.records()] == [(1, 0.25), (2, 0.5)]


@dataclass
class Info:
    metadata: dict
    id: str = "r"
    path: Path = Path()


def test_arms_that_diverged_are_named_with_what_went_wrong():
    ended = [
        {"status": "diverged", "diverged": {"updates": n, "why": f"the entropy is 4, after {n} updates"}}
        for n in (12, 9)
    ]
    arms = {"a": [Info({"status": "finished"}), *map(Info, ended)], "b": [Info(ended[0])], "c": []}
    assert list(divergences(arms)) == [
        "a diverged with 2 of its 3 seeds: the entropy is 4, after 12 updates; the entropy is 4, after 9 updates. "
        "It is compared as it was then.",
        "b diverged with its one seed: the entropy is 4, after 12 updates. It is compared as it was then.",
    ]
