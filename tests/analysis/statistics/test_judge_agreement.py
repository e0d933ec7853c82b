"""A judge beside a rule and beside labels: counts by hand, what has no verdict left out, and where they differ."""

import json
from dataclasses import replace

import pytest

from factories import a_rollout
from rlvr_cli.analysis.statistics.estimators import share_of
from rlvr_cli.analysis.statistics.judge_agreement import read_labels
from rlvr_cli.commands.store.analyze import run as analyze
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Judgement, Regrade

# Question -> of each sample: the judge's reward, the rule's, and the response, which r1_zero finds right if it says 7.
ROWS = {
    "a": [(1.0, 1.0, "7"), (0.9, 1.0, "7")],  # both right
    "b": [(1.0, 0.0, "8"), (0.2, 0.0, "8")],  # the judge likes the first
    "c": [(0.4, 1.0, "7"), (None, 1.0, "7")],  # the judge misses the first, and fails on the second
    "d": [(0.0, 0.0, "8"), (0.5, None, "8")],  # both wrong; the rule fails on the second
}
JUDGE = "judge:helpful.md"


def rollout(example, sample, judged, response, *, run_id, prompt):
    reply = Judgement(f"about {example} {sample}", "x", "big", f"{example}{sample}", 1, 1, cached=False)
    return a_rollout(
        run_id=run_id, prompt=prompt, phase="eval", step=0, policy_version=0, example_id=example, sample_index=sample, ground_truth="7",
        response=f"</think> <answer> {response} </answer>", grader=JUDGE, reward=judged, format_reward=None, answer_reward=None,
        judgement=reply if judged is not None else None, grade_error=None if judged is not None else "no_score",
        category="reward_only" if judged is not None else "grade_error", advantage=None,
    )  # fmt: skip


def make(root, name, metadata, *, prompt="3 + 4?"):
    with RunDir.create(root, "eval", name=name, metadata=metadata) as run:
        rows = [(e, i, judged, said) for e, two in ROWS.items() for i, (judged, _, said) in enumerate(two)]
        run.commit_rollouts("eval", 0, [rollout(*row, run_id=name, prompt=prompt) for row in rows])
        run.finish("finished")
    return run.path


@pytest.fixture
def made(tmp_path):
    return make(tmp_path, "r", {})


def with_rule(path, rule="math_verify", examples="abcd"):
    with RunDir.annotate(path) as run:
        run.commit_grades(
            "eval", 0,
            [
                Regrade("r", "eval", 0, e, i, rule, 0, None, None, None, reward, None if reward is not None else "timeout", None,
                    "reward_only" if reward is not None else "grade_error", None)
                for e in examples for i, (_, reward, _) in enumerate(ROWS[e])
            ],
        )  # fmt: skip


def ask(path, capsys, *others, **given):
    flags = {"query": "judge_agreement", "runs": (str(path), *map(str, others)), "format": "json", **given}
    analyze(resolve(AnalyzeConfig, flags=flags, command="analyze"))
    return json.loads(capsys.readouterr().out)


def test_agreement_is_what_a_hand_counts(made, capsys):
    with_rule(made)
    found = ask(made, capsys)
    (row,) = found["agreement"]
    assert (row["judge"], row["compared_with"]) == (JUDGE, "math_verify")
    # of six pairs: a0 a1 right for both, b1 d0 wrong for both, b0 only the judge, c0 only the rule
    counts = ("samples", "questions", "judge_right", "other_right", "only_judge", "only_other", "left_out")
    assert [row[name] for name in counts] == [6, 4, 3, 3, 1, 1, 2]
    assert (row["accuracy"], row["kappa"]) == (pytest.approx(4 / 6), pytest.approx((4 / 6 - 1 / 2) / (1 / 2)))
    interval = share_of([(2, 2, 1), (1, 2, 1), (0, 1, 1), (1, 1, 1)])
    assert (row["accuracy_low"], row["accuracy_high"]) == (pytest.approx(interval.low), pytest.approx(interval.high))
    assert row["kappa_low"] == pytest.approx(max((interval.low - 0.5) / 0.5, -1))
    assert row["kappa_high"] == pytest.approx((interval.high - 0.5) / 0.5)
    assert [(r["example_id"], r["sample_index"], r["judge_reward"], r["other_reward"], r["reply"]) for r in found["where they differ"]] == [
        ("b", 0, 1.0, 0.0, "about b 0"), ("c", 0, 0.4, 1.0, "about c 0"),
    ]  # fmt: skip
    assert len(ask(made, capsys, limit=1)["where they differ"]) == 1


def test_a_rule_without_grades_grades_now_and_stores_nothing(made, capsys):
    before = {p: p.read_bytes() for p in made.rglob("*") if p.is_file()}
    (row,) = ask(made, capsys, rule="r1_zero")["agreement"]
    assert (row["compared_with"], row["samples"], row["left_out"]) == ("r1_zero", 7, 1)
    assert (row["other_right"], row["only_judge"], row["only_other"]) == (3, 1, 1)  # c1 has no verdict of the judge
    assert before == {p: p.read_bytes() for p in made.rglob("*") if p.is_file()}


def test_a_rule_that_is_named_is_the_only_one(made, capsys):
    with_rule(made)
    for rule, samples in (("r1_zero", 7), ("math_verify", 6)):
        (row,) = ask(made, capsys, rule=rule)["agreement"]
        assert (row["compared_with"], row["samples"]) == (rule, samples)


def test_only_rows_without_a_grade_of_the_rule_are_graded_now_and_with_their_question(made, capsys, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def f(response, truth, example):\n    return float(truth in response and example['question'] == '3 + 4')\n"
    )
    rule = f"{file}:f"
    with_rule(made, rule, "abc")
    other = make(tmp_path, "s", {"facts": {"prompt": {"text": "What is {question}?"}}}, prompt="What is 3 + 4?")
    found = ask(made, capsys, other, rule=rule)
    names = ("run_id", "compared_with", "samples", "other_right", "only_judge", "only_other", "left_out")
    # the grader would find nothing right in r, whose template is not known: what is stored is not graded again
    assert [tuple(row[name] for name in names) for row in found["agreement"]] == [
        ("r", rule, 7, 3, 1, 1, 1),
        ("s", rule, 7, 3, 1, 1, 1),
    ]
    assert [row["run_id"] for row in found["where they differ"]] == ["r", "r", "s", "s"]


def again_by(path, grader, reward, **judged):
    """Every row is graded again, under the name of a grader that has graded it."""
    with RunDir.annotate(path) as run:
        run.commit_grades(
            "eval", 0,
            [
                Regrade("r", "eval", 0, e, i, grader, 0, "new", None, None, reward, None, None, "reward_only", None, **judged)
                for e, two in ROWS.items() for i in range(len(two))
            ],
        )  # fmt: skip


def test_of_two_grades_by_one_grader_the_later_counts(made, capsys, tmp_path):
    with_rule(made)
    again_by(made, JUDGE, 1.0, judgement=Judgement("of the new rubric", "x", "big", "s", 1, 1, cached=False))
    found = ask(made, capsys)
    (row,) = found["agreement"]
    names = ("samples", "judge_right", "other_right", "only_judge", "only_other", "left_out")
    assert [row[name] for name in names] == [7, 7, 4, 3, 0, 1]
    assert [(r["example_id"], r["sample_index"], r["reply"]) for r in found["where they differ"]] == [
        ("b", 0, "of the new rubric"), ("b", 1, "of the new rubric"), ("d", 0, "of the new rubric"),
    ]  # fmt: skip
    (tmp_path / "labels.jsonl").write_text(
        "".join(json.dumps({"example_id": e, "label": e == "b"}) + "\n" for e in "abcd")
    )
    found = ask(made, capsys, labels=str(tmp_path / "labels.jsonl"))
    (row,) = found["agreement"]
    assert [row[name] for name in names] == [8, 8, 2, 6, 0, 0]
    # also where the judge agrees with the stored rule, and so with no label
    assert {r["reply"] for r in found["where they differ"]} == {"of the new rubric"}


def test_a_rule_that_graded_a_run_twice_counts_once(made, capsys, tmp_path):
    with RunDir.create(tmp_path, "eval", name="r1", metadata={}) as run:
        rows = [a_rollout(run_id="r1", phase="eval", step=0, example_id=e, grader="r1_zero", reward=0.0) for e in "ab"]
        run.commit_rollouts("eval", 0, rows)
        for grader, reward in (("r1_zero", 1.0), (JUDGE, 1.0)):
            grades = [
                Regrade("r1", "eval", 0, e, 0, grader, 0, None, None, None, reward, None, None, "reward_only", None)
                for e in "ab"
            ]
            run.commit_grades("eval", 0, grades)
    for rule in ("", "r1_zero"):
        (row,) = ask(run.path, capsys, rule=rule)["agreement"]
        assert [row[name] for name in ("samples", "other_right", "accuracy")] == [2, 2, 1.0]


def test_labels_are_of_a_question_or_of_a_sample(made, capsys, tmp_path):
    file = tmp_path / "labels.jsonl"
    lines = [
        {"example_id": "a", "label": 1},
        {"example_id": "b", "sample_index": 0, "label": "no"},
        {"example_id": "d", "label": True},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = ask(made, capsys, labels=str(file))
    (row,) = found["agreement"]
    # a0 a1 agree, b0 does not, d0 d1 do not: b1, c0 and c1 have no label or no verdict
    assert [row[name] for name in ("samples", "only_judge", "only_other", "left_out")] == [5, 1, 2, 3]
    assert row["accuracy"] == pytest.approx(2 / 5)
    assert read_labels(str(file)) == {("a", None): 1.0, ("b", 0): 0.0, ("d", None): 1.0}
    file.write_text(
        '{"example_id": "a", "label": 1}\n{"example_id": "a", "label": "yes"}\n{"example_id": "a", "label": 0}'
    )
    with pytest.raises(RlvrError, match=r"labels\.jsonl:3 says 0 of a, and an earlier row says 1"):
        read_labels(str(file))
    for bad in (
        '{"example_id": "a", "label": 3}',
        '{"label": 1}',
        '{"example_id": "a", "label": 1, "sample_index": "x"}',
        "[1",
    ):
        file.write_text(bad)
        with pytest.raises(RlvrError, match=r"labels\.jsonl"):
            read_labels(str(file))


def test_labels_that_fit_no_response_are_counted_and_an_error_if_none_fits(made, capsys, tmp_path):
    file = tmp_path / "labels.csv"
    flags = {"query": "judge_agreement", "runs": (str(made),), "labels": str(file)}
    note = "note: 2 of 3 labels are of no response of the judge here, such as that of a, sample 7"
    for rows, notes in (("a,,1\na,0,1\n", []), ("a,,1\na,7,1\nq1,,0\n", [note])):
        file.write_text(f"example_id,sample_index,label\n{rows}")
        analyze(resolve(AnalyzeConfig, flags=flags, command="analyze"))
        assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")] == notes
    for rows, hint in (
        (
            "q1,,1\n",
            "The first label is of q1, and the first response of a, sample 0. --phase and --step choose others.",
        ),
        ("", "The file has no rows."),
    ):
        file.write_text(f"example_id,sample_index,label\n{rows}")
        with pytest.raises(RlvrError, match=r"No label in .*labels\.csv is of a response of the judge here") as raised:
            ask(made, capsys, labels=str(file))
        assert raised.value.hint == hint


def test_what_cannot_be_compared_says_what_to_do(made, capsys, tmp_path):
    with pytest.raises(RlvrError, match="No rule has graded") as raised:
        ask(made, capsys)
    assert "--rule r1_zero" in raised.value.hint
    with pytest.raises(RlvrError, match="No judge has graded"):
        ask(made, capsys, phase="train")
    with pytest.raises(RlvrError, match="is a judge"):
        ask(made, capsys, rule=JUDGE)
    with pytest.raises(RlvrError, match="--labels and --rule exclude each other"):
        ask(made, capsys, rule="r1_zero", labels="x.jsonl")
    with pytest.raises(RlvrError, match="There is no grader nothing"):
        ask(made, capsys, rule="nothing")
    with pytest.raises(RlvrError, match="option of judge_agreement"):
        ask(made, capsys, query="graders", labels="x.jsonl")


def test_a_label_is_of_one_response_and_not_of_those_of_other_steps_and_runs(made, capsys, tmp_path):
    file = tmp_path / "labels.jsonl"
    file.write_text(json.dumps({"example_id": "a", "label": 1}))
    other = make(tmp_path, "s", {})
    with pytest.raises(RlvrError, match=r"The label of a is of one response, .* of r at step 0 and of s at step 0"):
        ask(made, capsys, other, labels=str(file))
    with RunDir.create(tmp_path, "grpo", name="t", metadata={}) as run:
        for step in (0, 5):
            run.commit_rollouts(
                "eval", step, [replace(rollout("a", 0, 1.0, "7", run_id="t", prompt="3 + 4?"), step=step)]
            )
    with pytest.raises(RlvrError, match="of t at step 0 and of t at step 5"):
        ask(run.path, capsys, labels=str(file))
    (row,) = ask(run.path, capsys, labels=str(file), step=5)["agreement"]
    assert row["samples"] == 1
