"""The summary of a run, worked out by hand from its rollouts."""

import pytest

from factories import a_rollout, an_episode
from ranking import ranked
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.at_k import at_k_table
from rlvr_cli.analysis.statistics.estimators import (
    best_at_k,
    effective_number,
    mean_interval,
    pass_at_k,
    share_interval,
)
from rlvr_cli.analysis.summary import combined_tables, summarize
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir


def rollout(run_id, example, sample, reward, *, answer="7", logprob=-1.0, tokens=10, phase="eval", step=0, **changes):
    formatted = answer is not None
    values = {
        "run_id": run_id, "phase": phase, "step": step, "policy_version": step, "example_id": example,
        "sample_index": sample, "response": "r", "finish_reason": "stop" if formatted else "length", "num_response_tokens": tokens,
        "format_reward": float(formatted), "answer_reward": reward, "reward": reward,
        "extracted_answer": answer, "category": f"format_{int(formatted)}_answer_{int(reward or 0)}",
        "failure_kind": None if reward else "wrong_answer" if formatted else "truncated", "mean_logprob": logprob, "mean_entropy": 0.5,
    }  # fmt: skip
    return a_rollout(**{**values, **changes})


def ungraded(run_id, example, sample, **changes):
    failed = {"format_reward": None, "answer_reward": None, "category": "grade_error", "grade_error": "timeout"}
    return rollout(run_id, example, sample, None, **{**failed, "failure_kind": None, **changes})


def make_run(root, name, rollouts, *, metrics=None):
    with RunDir.create(root, "eval", name=name, metadata={}) as run:
        for phase, step in sorted({(r.phase, r.step) for r in rollouts}):
            run.commit_rollouts(phase, step, [r for r in rollouts if (r.phase, r.step) == (phase, step)])
        if metrics:
            run.commit_metrics(0, "eval", metrics)
    return root / name


@pytest.fixture
def greedy(tmp_path):
    """One sample of each of 5 questions: 2 right, 1 wrong, 1 cut off, 1 whose grader timed out."""
    rows = [
        rollout("g", "a", 0, 1.0, tokens=10),
        rollout("g", "b", 0, 1.0, tokens=20),
        rollout("g", "c", 0, 0.0, answer="8", tokens=30),
        rollout("g", "d", 0, 0.0, answer=None, tokens=100),
        ungraded("g", "e", 0, tokens=40, mean_entropy=1.5),
    ]
    return make_run(tmp_path, "g", rows, metrics={"sampling/tokens_per_second": 12.5})


@pytest.fixture
def sampled(tmp_path):
    """Four samples of each of 2 questions.

    a: right (logprob -1), right (-4), wrong "8" (-2), wrong "8" (-3).
    b: no answer four times.
    """
    rows = [
        rollout("s", "a", 0, 1.0, logprob=-1.0),
        rollout("s", "a", 1, 0.0, answer="8", logprob=-2.0),
        rollout("s", "a", 2, 0.0, answer=" 8 ", logprob=-3.0),
        rollout("s", "a", 3, 1.0, logprob=-4.0),
        *(rollout("s", "b", i, 0.0, answer=None) for i in range(4)),
    ]
    return make_run(tmp_path, "s", rows)


def test_one_sample_per_question(greedy):
    s = summarize(greedy)
    assert (s.run_id, s.phase, s.step, s.questions, s.samples, s.grade_errors) == ("g", "eval", 0, 5, 5, 1)
    assert (s.accuracy.value, s.accuracy.interval) == (0.4, "agresti-coull")  # the failed grade counts as wrong
    assert (s.accuracy.low, s.accuracy.high) == share_interval(2 / 5, 5)
    assert s.mean_reward is None
    assert s.at_k == ()
    assert [(c.category, c.samples, c.share.value, c.mean_tokens) for c in s.categories] == [
        ("format_1_answer_1", 2, 0.4, 15.0),
        ("format_1_answer_0", 1, 0.2, 30.0),
        ("format_0_answer_0", 1, 0.2, 100.0),
        ("grade_error", 1, 0.2, 40.0),
    ]
    assert (s.categories[1].share.low, s.categories[1].share.high) == share_interval(1 / 5, 5)
    assert s.failure_kinds == (("grade_error: timeout", 1), ("truncated", 1), ("wrong_answer", 1))
    assert (s.mean_tokens, s.mean_tokens_correct, s.mean_tokens_wrong) == (40.0, 15.0, pytest.approx(170 / 3))
    assert (s.truncated_share, s.mean_entropy, s.mean_logprob, s.tokens_per_second) == (0.2, 0.7, -1.0, 12.5)


def test_lengths_are_of_what_the_policy_wrote(tmp_path):
    rows = [an_episode(4, 30, 2, run_id="e"), an_episode(10, run_id="e", example_id="q1", reward=0.0)]
    s = summarize(make_run(tmp_path, "e", rows))
    assert (s.mean_tokens, s.mean_tokens_correct, s.mean_tokens_wrong) == (8.0, 6.0, 10.0)
    assert s.categories[0].mean_tokens == 8.0


def test_several_samples_per_question(sampled):
    s = summarize(sampled)
    assert (s.questions, s.samples, s.accuracy.value) == (2, 8, 0.25)
    # 0 and 2 of 4 right: share 1/4, squares 2, so 2 / 64 / (3/16) = 1/6 above 1/8; one question shows a right sample
    assert s.accuracy.interval == "agresti-coull"
    assert (s.accuracy.low, s.accuracy.high) == pytest.approx(share_interval(0.25, 2 / (1 / 6 + 1 / 2)))
    assert (s.at_k[0].pass_at_k.low, s.at_k[0].pass_at_k.high) == pytest.approx((s.accuracy.low, s.accuracy.high))
    assert [a.k for a in s.at_k] == [1, 2, 4]
    assert [a.questions for a in s.at_k] == [2, 2, 2]
    # a: 1 - C(2, k) / C(4, k) = 1/2, 5/6, 1; b: 0
    assert [a.pass_at_k.value for a in s.at_k] == pytest.approx([1 / 4, 5 / 12, 1 / 2])
    # a, ranked 1 0 0 1: 1/2; of 6 pairs the 3 with the first: 1/2; 1. b: 0
    assert [a.best_at_k.value for a in s.at_k] == pytest.approx([1 / 4, 1 / 4, 1 / 2])
    # a: 1/2; of 6 pairs 1 both right and 4 tied; of the one draw of four a tie: 1/2. b never votes.
    assert [a.majority_at_k.value for a in s.at_k] == pytest.approx([1 / 4, 1 / 4, 1 / 4])


def test_the_best_of_k_is_that_of_each_question_averaged(tmp_path):
    rewards = {"a": [1.0, 0.0, 0.5, 1.0], "b": [0.0, 0.0, 1.0, 0.25], "c": [0.0, 1.0]}
    scores = {"a": [-1.0, -2.0, -2.0, -3.0], "b": [-4.0, -1.0, -1.0, -1.0], "c": [-2.0, -1.0]}
    rows = [rollout("r", q, i, reward, logprob=scores[q][i]) for q in rewards for i, reward in enumerate(rewards[q])]
    s = summarize(make_run(tmp_path, "r", rows))
    for at in s.at_k:
        asked = [q for q in rewards if len(rewards[q]) >= at.k]
        expected = [best_at_k(ranked(rewards[q], scores[q]), at.k) for q in asked]
        assert at.best_at_k.value == pytest.approx(sum(expected) / len(asked)), at.k


def test_without_log_probabilities_there_is_no_best(tmp_path):
    rows = [rollout("r", "a", i, float(i == 0), logprob=-1.0 if i else None) for i in range(2)]
    s = summarize(make_run(tmp_path, "r", rows))
    assert [a.best_at_k for a in s.at_k] == [None, None]
    assert s.mean_logprob == -1.0
    at_k = next(t for t in s.tables() if t.title == "at_k")
    assert [row[at_k.columns.index("best_at_k")] for row in at_k.rows] == [None, None]


def test_questions_with_fewer_samples_are_left_out_of_larger_k(tmp_path):
    rows = [rollout("r", "a", i, float(i == 0)) for i in range(3)] + [rollout("r", "b", 0, 1.0)]
    s = summarize(make_run(tmp_path, "r", rows))
    assert [(a.k, a.questions) for a in s.at_k] == [(1, 2), (2, 1), (3, 1)]
    assert s.at_k[0].pass_at_k.value == pytest.approx((1 / 3 + 1) / 2)  # each question weighs the same
    assert s.at_k[1].pass_at_k.value == pytest.approx(2 / 3)
    one = share_interval(2 / 3, effective_number([(pass_at_k(3, 1, 2), 1, 1)], draws=3 / 2))
    assert (s.at_k[1].pass_at_k.low, s.at_k[1].pass_at_k.high) == pytest.approx(one)
    assert s.accuracy.value == 0.5


def test_shares_of_nothing_and_of_all_have_an_interval(tmp_path):
    rows = [rollout("r", f"q{q}", i, 1.0) for q in range(10) for i in range(2)]
    s = summarize(make_run(tmp_path, "r", rows))
    assert (s.accuracy.value, s.accuracy.interval) == (1.0, "agresti-coull")
    assert (s.accuracy.low, s.accuracy.high) == share_interval(1.0, 10)
    assert (s.categories[1].samples, s.categories[1].share.value, s.categories[1].mean_tokens) == (0, 0.0, None)
    assert (s.categories[1].share.low, s.categories[1].share.high) == share_interval(0.0, 10)
    assert s.failure_kinds == ()
    assert s.mean_tokens_wrong is None


def test_equal_shares_have_equal_intervals(tmp_path):
    rows = [rollout("r", f"q{q}", i, float(i < q % 5)) for q in range(20) for i in range(4)]
    s = summarize(make_run(tmp_path, "r", rows))
    assert s.categories[0].share == s.accuracy
    assert s.at_k[0].pass_at_k.value == pytest.approx(s.accuracy.value)


def test_rewards_between_0_and_1_have_a_mean(tmp_path):
    rows = [rollout("r", f"q{q}", 0, 0.1 if q < 3 else 1.0) for q in range(4)]
    s = summarize(make_run(tmp_path, "r", rows))
    assert s.accuracy.value == 0.25
    assert s.mean_reward is not None
    assert s.mean_reward.value == pytest.approx(0.325)
    assert (s.mean_reward.low, s.mean_reward.high) == mean_interval([(0.1, 1, 3), (1.0, 1, 1)])
    assert s.mean_reward.interval == "t by question"
    assert any(row[0] == "mean_reward" for row in s.tables()[2].rows)


def test_a_failed_grade_is_no_reward_everywhere(tmp_path):
    rows = [rollout("r", "a", 0, 0.8), ungraded("r", "a", 1), rollout("r", "b", 0, 0.4), rollout("r", "b", 1, 0.8)]
    s = summarize(make_run(tmp_path, "r", rows))
    assert s.grade_errors == 1
    assert s.mean_reward is not None
    assert s.mean_reward.value == pytest.approx((0.8 + 0 + 0.4 + 0.8) / 4)
    assert s.at_k[1].best_at_k.value == pytest.approx(0.5)  # all log-probabilities are equal: the mean of 0.4 and 0.6


def test_the_last_step_of_the_phase_is_the_default(tmp_path):
    rows = [
        rollout("r", "a", 0, 0.0),
        rollout("r", "a", 0, 1.0, step=10),
        rollout("r", "a", 0, 0.0, phase="train", step=12),
    ]
    run = make_run(tmp_path, "r", rows)
    assert (summarize(run).step, summarize(run).accuracy.value) == (10, 1.0)
    assert summarize(run, step=0).accuracy.value == 0.0
    assert summarize(run, phase="train").step == 12
    with pytest.raises(RlvrError, match="r has no eval rollouts of step 3") as caught:
        summarize(run, step=3)
    assert "eval rollouts of steps 0 to 10 (--phase eval); train rollouts of steps 12 to 12" in caught.value.hint


def test_a_run_without_rollouts(tmp_path):
    run = make_run(tmp_path / "my runs", "r", [], metrics={"loss": 1.0})
    with pytest.raises(RlvrError, match="r has no eval rollouts") as caught:
        summarize(run)
    assert caught.value.hint.endswith(f"rlvr analyze \"SELECT * FROM metrics\" '{run}'")


def together(summaries):
    return combined_tables((summary.run_id, summary.tables()) for summary in summaries)


def test_tables(greedy, sampled):
    first, second = summarize(greedy), summarize(read_run(sampled))
    assert [t.title for t in first.tables()] == ["run", "categories", "measures", "failures"]
    assert [t.title for t in second.tables()] == ["run", "categories", "measures", "at_k", "failures"]
    for table in [*first.tables(), *second.tables(), *together([first, second])]:
        assert all(len(row) == len(table.columns) for row in table.rows), table.title
    both = {t.title: t for t in together([first, second])}
    assert [row[0] for row in both["run"].rows] == ["g", "s"]
    assert both["categories"].columns[:2] == ("run_id", "category")
    assert {row[0] for row in both["categories"].rows} == {"g", "s"}
    assert {row[0] for row in both["at_k"].rows} == {"s"}


def test_a_thousand_questions_take_no_time(tmp_path):
    import random
    import time

    rng = random.Random(0)
    rows = [
        rollout("r", f"q{q}", i, float(rng.random() < q / 500), answer=str(rng.randrange(3)), logprob=-rng.random())
        for q in range(500)
        for i in range(8)
    ]
    run = make_run(tmp_path, "r", rows)
    start = time.process_time()
    assert summarize(run).samples == 4000
    assert time.process_time() - start < 3


def test_a_summary_needs_little_memory(tmp_path, monkeypatch):
    make_run(tmp_path, "r", [rollout("r", "q", 0, 1.0), rollout("r", "q", 1, 0.0)])
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.MEMORY_LIMIT", "no limit of this database")
    assert summarize(tmp_path / "r").samples == 2


def test_a_summary_that_cannot_be_spilled_has_more_memory(tmp_path, monkeypatch):
    rows = [
        rollout("s", q, i, float(i % 7 == 0), answer=str(i % 5), logprob=-float(i)) for q in "ab" for i in range(1000)
    ]
    run = make_run(tmp_path, "s", rows)
    expected = summarize(run)
    monkeypatch.setattr("rlvr_cli.analysis.queries.database.SPILLING_MB", 1)
    with open_runs([read_run(run)], spills=True) as database, pytest.raises(RlvrError, match="more than 1MB"):
        at_k_table(database, named_queries()["at_k"].parameters)
    assert summarize(run) == expected
