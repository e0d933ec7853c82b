"""`rlvr pairwise`: both orders of each pair are asked, wins and position bias are what a hand counts, and a run goes on."""

import json
import shutil

import pytest

from checks import findings
from endpoint import error, serving
from factories import a_rollout
from judging import PAIRS, answers_until, asked, said, write_rubric
from rlvr_cli.analysis.report.build import summary_tables
from rlvr_cli.analysis.statistics.estimators import share_of
from rlvr_cli.analysis.statistics.pairwise import pairwise_table
from rlvr_cli.commands.pairwise import compare
from rlvr_cli.config.shared.prompt import JudgeOptions
from rlvr_cli.errors import Interrupted
from rlvr_cli.judges.pool import JudgePool
from rlvr_cli.judges.rubric import PAIRWISE
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.comparisons import Comparison
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

TEMPLATE = "Please: {question}!"
# Question -> responses of A and B. The judge prefers the longer one; of equals the one that is shown first, or neither ("same").
ANSWERS = {
    "a": ("a long one", "short"), "b": ("a long one", "brief"), "c": ("no", "a long one"), "d": ("one", "two"), "e": ("same", "same"),
    "f": ("odd", "bad"),
}  # fmt: skip


def judged(body):
    first, second = (asked(body).partition(f"<{tag}>")[2].partition(f"</{tag}>")[0] for tag in ("first", "second"))
    if "odd" in (first, second):
        return said("I cannot say.")
    if first == second == "same":
        return said("tie")
    return said("Because.\n**A**" if len(first) >= len(second) else "B")


@pytest.fixture
def judge():
    with serving(judged) as served:
        yield served


@pytest.fixture
def pairwise(tmp_path, judge, forks):
    """Two runs, and how they are compared."""
    for name, place in (("first", 0), ("second", 1)):
        metadata = {"facts": {"prompt": {"name": "p", "text": TEMPLATE if place else "{question}"}}}
        with RunDir.create(tmp_path / "runs", "eval", name=name, metadata=metadata) as run:
            rows = []
            for example, two in ANSWERS.items():
                prompt = (TEMPLATE if place else "{question}").format(question=f"Q {example}")
                rows.append(
                    a_rollout(run_id=name, phase="eval", step=0, example_id=example, prompt=prompt, response=two[place])
                )
            if place:
                rows.append(a_rollout(run_id=name, phase="eval", step=0, example_id="g"))  # of B alone
            run.commit_rollouts("eval", 0, rows)
    rubric = write_rubric(tmp_path, PAIRS)
    words = ("--rubric", rubric.name, "--judge-url", judge.url, "--judge-model", "big", "--format", "json")

    def call(*arguments, status=0, given=words, **how):
        return forks.run("pairwise", *arguments, *given, cwd=tmp_path, status=status, **how)

    return call


def test_each_pair_is_judged_in_both_orders_and_counted_once(pairwise, judge, tmp_path):
    done = pairwise("first", "second", "--run", "r")
    (row,) = json.loads(done.out)
    counts = ("a", "b", "questions", "pairs", "a_in_both", "b_in_both", "ties", "order_decides", "left_out")
    assert [row[name] for name in counts] == ["first", "second", 5, 5, 2, 1, 1, 1, 1]
    wins = share_of([(1.0, 1, 2), (0.0, 1, 1), (0.5, 1, 2)])
    assert [row[name] for name in ("a_wins", "a_wins_low", "a_wins_high")] == pytest.approx(
        [3 / 5, wins.low, wins.high]
    )
    assert [row["a_wins_when_first"], row["a_wins_when_second"]] == pytest.approx([3.5 / 5, 2.5 / 5])
    first = share_of([(1, 2, 3), (2, 2, 1)])  # of 8 without ties: of each clear pair one, and of d both
    assert [row[name] for name in ("first_wins", "first_wins_low", "first_wins_high")] == pytest.approx(
        [5 / 8, first.low, first.high]
    )
    assert "neither is shown to be better: first wins 60.0% of the pairs" in done.err
    assert "no position bias is shown: what stands first wins 62.5%" in done.err
    texts = [asked(body) for body in judge.bodies]
    assert len(texts) == 11  # e is the same text in both orders
    assert "Which response to Q a is better?\n<first>a long one</first>\n<second>short</second>" in texts
    assert "Which response to Q a is better?\n<first>short</first>\n<second>a long one</second>" in texts
    run = tmp_path / "runs/r"
    rows = {(r["example_id"], r["sample_index"]): r for r in read_rollouts(run).to_pylist()}
    assert len(rows) == 12
    assert [(rows["a", i]["reward"], rows["a", i]["extracted_answer"], rows["a", i]["judgement"]["score"]) for i in (0, 1)] == [
        (1.0, "A", "a"), (1.0, "A", "b"),
    ]  # fmt: skip
    assert [(rows["d", i]["reward"], rows["d", i]["extracted_answer"]) for i in (0, 1)] == [(1.0, "A"), (0.0, "B")]
    assert [(rows["f", i]["reward"], rows["f", i]["failure_kind"]) for i in (0, 1)] == [(None, "judge_no_score")] * 2
    assert findings(run) == []
    facts = read_run(run).metadata["facts"]
    assert (facts["rubric"]["text"], facts["a"]["run"], facts["b"]["run"]) == (PAIRS, "first", "second")


def test_the_summary_of_a_comparison_is_its_table_and_wins_and_ties_are_no_accuracy(pairwise, forks, tmp_path):
    (row,) = json.loads(pairwise("first", "second", "--run", "r").out)
    done = forks.run("analyze", "r", "--format", "json", cwd=tmp_path, status=0)
    assert json.loads(done.out) == [{"run_id": "r", **row}]
    assert json.loads(forks.run("analyze", "r", "first", "--format", "json", cwd=tmp_path, status=0).out)["measures"]
    alone = forks.run("analyze", "at_k", "r", cwd=tmp_path, status=1)
    assert "r is a comparison with wins and ties, and has no accuracy." in alone.err
    both = forks.run("analyze", "pass_at_k", "r", "first", "--format", "json", cwd=tmp_path, status=0)
    assert {row["run_id"] for row in json.loads(both.out)} == {"first"}
    assert "passed over, since searches and comparisons have no accuracy: r" in both.err
    assert "do not have: r." in forks.run("analyze", "compare", "r", "first", cwd=tmp_path, status=1).err
    (table,) = summary_tables([read_run(tmp_path / "runs/r")], timeout_seconds=60, left_out=[])
    assert dict(zip(table.columns, table.rows[0], strict=True))["a_wins"] == pytest.approx(3 / 5)


def test_runs_of_one_name_are_called_as_they_were_typed(pairwise, tmp_path):
    shutil.copytree(tmp_path / "runs/first", tmp_path / "old/first")
    done = pairwise("first", "old/first", "--run", "r")
    (row,) = json.loads(done.out)
    assert (row["a"], row["b"]) == ("first", "old/first")


def test_eval_pairwise_is_the_same_command(pairwise, forks, judge, tmp_path):
    words = ("--rubric", "rubric.md", "--judge-url", judge.url, "--judge-model", "big", "--format", "json")
    done = forks.run("eval", "--pairwise", "first", "second", *words, "--run", "r", cwd=tmp_path, status=0)
    (row,) = json.loads(done.out)
    assert (row["a"], row["b"], row["pairs"], row["a_wins"]) == ("first", "second", 5, 3 / 5)
    assert read_run(tmp_path / "runs/r").metadata["command"] == "pairwise"


def test_a_judge_that_prefers_what_stands_first_is_told(pairwise, judge):
    judge.answer = lambda body: said("A")
    done = pairwise("first", "second")
    (row,) = json.loads(done.out)
    assert (row["order_decides"], row["a_wins"], row["first_wins"]) == (6, 0.5, 1.0)
    assert "position bias: what stands first wins 100.0% of the comparisons" in done.err


def test_pairs_of_one_question_are_not_independent_comparisons(tmp_path):
    with RunDir.create(tmp_path, "pairwise", name="r", metadata={}) as run:
        rows = [
            a_rollout(run_id="r", phase="eval", step=0, example_id="a", sample_index=i, reward=float(i % 2 == 0 or i == 1))
            for i in range(16)
        ]  # fmt: skip
        run.commit_rollouts("eval", 0, rows)
    table, words = pairwise_table(read_run(run.path), timeout_seconds=60)
    (row,) = table.records()
    one = share_of([(15, 16, 1)])
    assert (row["first_wins"], row["first_wins_low"], row["first_wins_high"]) == (15 / 16, one.low, one.high)
    assert one.low < 0.5  # of 16 independent comparisons: 0.7
    assert "no position bias is shown: what stands first wins 93.8%" in words


def test_a_comparison_goes_on_and_a_changed_run_is_named(pairwise, judge, tmp_path):
    pairwise("first", "second", "--run", "r", "--limit", 2, fault="write:3:kill", status=-9)
    rows = read_rollouts(tmp_path / "runs/r").num_rows
    before = len(judge.bodies)
    (row,) = json.loads(pairwise("--resume", "r", given=("--format", "json")).out)
    assert (row["pairs"], row["a_in_both"]) == (2, 2)
    assert len(judge.bodies) - before == 4 - rows
    with RunDir.annotate(tmp_path / "runs/second") as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id="second", phase="eval", step=0, example_id="h")])
    assert "its b manifest_sha256 was" in pairwise("--resume", "r", given=(), status=1).err


def test_a_comparison_that_was_not_answered_is_asked_again_on_resume(pairwise, judge, tmp_path):
    judge.answer = lambda body: error(413, "too long")
    done = pairwise("first", "second", "--limit", 1, "--run", "none", status=1)
    assert "The judge answered none of the 2 comparisons." in done.err
    assert "refused" in done.err
    refused = "<second>brief<", "<first>one<", "<second>one<"  # an order of one pair, and both of another
    judge.answer = lambda body: error(413, "too long") if any(t in asked(body) for t in refused) else judged(body)
    done = pairwise("first", "second", "--run", "r")
    (row,) = json.loads(done.out)
    assert (row["pairs"], row["left_out"]) == (3, 3)  # and f, to which the judge gives no score
    assert (
        "note: the judge did not answer 3 of 12 comparisons; to ask it again: rlvr pairwise --resume runs/r" in done.err
    )
    assert findings(tmp_path / "runs/r") == []
    judge.answer = judged
    paid = len(judge.bodies)
    done = pairwise("--resume", "r", given=("--format", "json"))
    (row,) = json.loads(done.out)
    assert (row["pairs"], row["left_out"], len(judge.bodies) - paid) == (5, 1, 3)
    assert "did not answer" not in done.err
    assert findings(tmp_path / "runs/r") == []


def test_a_stop_keeps_every_comparison_that_was_answered(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "x")
    stop, pairs = StopRequest(), [Comparison(str(i), 0, "", f"text {i}") for i in range(12)]
    with answers_until(stop, 9, said("A")) as answer, serving(answer) as judge:
        options = JudgeOptions(judge_url=judge.url, judge_model="big", judge_concurrency=2)
        with (
            JudgePool(f"judge:{write_rubric(tmp_path, PAIRS)}", options, placeholders=PAIRWISE) as pool,
            RunDir.create(tmp_path, "pairwise", metadata={}) as run,
            pytest.raises(Interrupted),
        ):
            compare(run, pool, pairs, seed=0, stop=stop)
    assert read_rollouts(run.path)["reward"].to_pylist() == [1.0] * 8


def with_shots(root, name, shots):
    """A run that has answered the questions of `ANSWERS` after these shots."""
    facts = {"prompt": {"name": "p", "text": "{question}\nA:"}, "dataset": {"shots": {"count": 2}}}
    with RunDir.create(root, "eval", name=name, metadata={"facts": facts}) as run:
        rows = [
            a_rollout(run_id=name, phase="eval", step=0, example_id=e, prompt=f"{shots}Q {e}\nA:", response=two[0])
            for e, two in ANSWERS.items()
        ]
        run.commit_rollouts("eval", 0, rows)


def test_a_run_with_shots_is_compared_and_the_judge_reads_the_question_alone(pairwise, judge, tmp_path):
    for name, shots in (("clear", "1\nA: 2\n\n3\nA: 4\n\n"), ("unclear", "1\nA: 2\n\n5\n\n3\nA: 4\n\n")):
        with_shots(tmp_path / "runs", name, shots)
        judge.bodies.clear()
        (row,) = json.loads(pairwise(name, "second", "--run", f"of-{name}").out)
        assert row["pairs"] == 5
        texts = [asked(body) for body in judge.bodies]
        assert "Which response to Q a is better?\n<first>a long one</first>\n<second>short</second>" in texts
    with_shots(tmp_path / "runs", "again", "1\nA: 2\n\n5\n\n3\nA: 4\n\n")
    pairwise("unclear", "again", "--limit", 1)
    assert "Which response to 1\nA: 2" in asked(judge.bodies[-1])  # which part of it is the question cannot be told
    for name, shots in (("contained", "1\nA: 2\n\n5\n\n3\nA: 4\n\n1"), ("in-a-shot", "Q a\n\nB\n\n3\nA: 4\n\n1")):
        with_shots(tmp_path / "runs", name, shots)  # each asks 1Q a
        assert f"Whether a is the same question in {name} and second" in pairwise(name, "second", status=1).err
    with_shots(tmp_path / "runs", "others", "1\nA: 2\n\n5\n\n\n6\nA: 4\n\n")
    assert "Whether a is the same question in unclear and others" in pairwise("unclear", "others", status=1).err


def test_the_first_questions_are_the_datasets_and_what_has_no_counterpart_is_counted(pairwise, judge, tmp_path):
    for name, samples in (("many", 3), ("few", 1)):
        with RunDir.create(tmp_path / "runs", "eval", name=name, metadata={}) as run:
            rows = [
                a_rollout(run_id=name, phase="eval", step=0, example_id=f"test-{i}", prompt=f"Q{i}", sample_index=s, response=f"{name} {i}")
                for i in reversed(range(9, 13 if samples == 3 else 12)) for s in range(samples)
            ]  # fmt: skip
            run.commit_rollouts("eval", 0, rows)
    done = pairwise("many", "few", "--limit", 2)
    (row,) = json.loads(done.out)
    assert (row["questions"], row["pairs"], row["left_out"]) == (2, 2, 0)
    assert {asked(body).split()[3] for body in judge.bodies} == {"Q9", "Q10"}
    note = "note: 9 of 12 responses of many have no counterpart, of the same question and sample, and are left out"
    assert note in done.err
    done = pairwise("few", "second", status=1)
    assert "in common" in done.err
    both = pairwise("first", "second")
    assert "note: 1 of 7 responses of second have no counterpart" in both.err
    assert "of first have no" not in both.err


def test_an_id_of_another_question_is_refused(pairwise, tmp_path):
    with RunDir.create(tmp_path / "runs", "eval", name="other", metadata={}) as run:
        run.commit_rollouts(
            "eval", 0, [a_rollout(run_id="other", phase="eval", step=0, example_id="a", prompt="Another?")]
        )
    assert "a is one question in first and another one in other" in pairwise("first", "other", status=1).err


@pytest.mark.parametrize(
    ("words", "status", "problem"),
    [
        (["first"], 2, "Two different runs are compared"),
        (["first", "first"], 2, "Two different runs are compared"),
        (["first", "second"], 2, "Nothing says how they are compared"),
        (["first", "second", "--rubric", "rubric.md"], 2, "A judge needs --judge-url"),
        (["first", "second", "--rubric", "bad.md", "--judge-url", "http://127.0.0.1:1/v1", "--judge-model", "m"], 1, "does not say which is better"),
        (["first", "second", "--rubric", "rubric.md", "--judge-url", "http://127.0.0.1:1/v1", "--judge-model", "m", "--step", "9"], 1, "in common"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused(pairwise, tmp_path, words, status, problem):
    write_rubric(tmp_path, PAIRS.replace("A/B/tie", "1-10"), "bad.md")
    assert problem in pairwise(*words, given=(), status=status).err
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["first", "second"]
