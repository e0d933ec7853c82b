"""`rlvr grade`: what another grader says is stored beside the old grades, whatever interrupts it, and compared by hand."""

import json
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from checks import findings
from factories import a_rollout, an_episode
from forks import Done
from marks import slow
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import named_queries
from rlvr_cli.analysis.statistics.grade_changes import cohen_kappa, compare_grades
from rlvr_cli.commands.store.grade import rest_of
from rlvr_cli.commands.store.grade import run as grade
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.store.grade import GradeConfig
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.regrade import plan_regrade, regrade
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import FinishReason, Phase

ROOT = Path(__file__).parents[3]
GRADER = """
def grade(response, truth):
    if "fails" in response:
        raise ZeroDivisionError
    return {"format_reward": 1.0, "answer_reward": float(truth in response), "reward": float(truth in response)}
"""


def rollout(run_id, example, sample, response, reward, *, phase: Phase = "eval", step=0, finish: FinishReason = "stop"):
    failed = reward is None
    return a_rollout(
        run_id=run_id, phase=phase, step=step, policy_version=step, example_id=example, sample_index=sample, response=response,
        finish_reason=finish, format_reward=reward, answer_reward=reward, reward=reward, grade_error="timeout" if failed else None,
        extracted_answer=None, category="grade_error" if failed else f"format_{int(reward)}_answer_{int(reward)}",
        failure_kind=None if reward or failed else "malformed_tags", advantage=0.0 if phase == "train" else None,
    )  # fmt: skip


EVAL = {  # example -> (response, old reward) of each of its two samples
    "a": [("7", 1.0), ("7", 1.0)],  # right, right
    "b": [("7", 0.0), ("8", 1.0)],  # wrong to right, right to wrong
    "c": [("7", None), ("8", 0.0)],  # an error to right, wrong
    "d": [("fails", 1.0), ("8", 0.0)],  # right to an error, wrong
}
TRAIN = {
    "e": [("7", 1.0), ("8", 0.0)],  # as before
    "f": [("7", 0.0), ("8", 1.0)],  # each sign turns
    "g": [("7", 0.0), ("8", 0.0)],  # gains its signal
    "h": [("7", 1.0), ("7", 0.0)],  # loses it
}


@pytest.fixture
def grader(tmp_path) -> str:
    return write_grader(tmp_path)


def write_grader(folder: Path) -> str:
    (folder / "mine.py").write_text(GRADER)
    return f"{folder / 'mine.py'}:grade"


def test_a_grader_that_asks_gets_what_the_row_knows_of_the_example(made, tmp_path):
    (tmp_path / "asks.py").write_text(
        "def grade(response, truth, example):\n"
        "    unknown = {name for name, value in example.items() if value is None}\n"
        "    whole = unknown == {'question', 'response', 'solution', 'turns', 'conversation'} and example['ground_truth'] == truth\n"
        "    return {'reward': float(whole), 'extracted_answer': example['id'] + ' ' + example['prompt']}\n"
    )
    call(made, grader=f"{tmp_path / 'asks.py'}:grade", phase="eval")
    with open_runs([read_run(made)]) as database:
        found = database.select("SELECT DISTINCT reward, extracted_answer = example_id || ' 3 + 4?' FROM grades").rows
    assert found == [(1.0, True)]


@pytest.fixture
def made(tmp_path) -> Path:
    """A run with an evaluation of 4 questions x 2 samples at step 5, another at step 0, and 4 training groups of 2."""
    return make(tmp_path / "runs")


def make(folder: Path) -> Path:
    with RunDir.create(folder, "grpo", name="r", metadata={"config": {"loss_type": "grpo_clip"}}) as run:
        run.commit_rollouts("eval", 0, [rollout("r", "a", 0, "8", 0.0)])
        tables: list[tuple[Phase, int, dict]] = [("eval", 5, EVAL), ("train", 3, TRAIN)]
        for phase, step, table in tables:
            rows = [
                rollout("r", e, i, *cell, phase=phase, step=step)
                for e, two in table.items()
                for i, cell in enumerate(two)
            ]
            run.commit_rollouts(phase, step, rows)
        run.finish("interrupted")
    return run.path


class Graded(NamedTuple):
    run: Path
    grader: str


@pytest.fixture(scope="module")
def graded(tmp_path_factory) -> Graded:
    """A run as `made`, and its grader, which has graded it; to read, or to copy."""
    folder = tmp_path_factory.mktemp("graded")
    run, grader = make(folder / "runs"), write_grader(folder)
    call(run, grader=grader)
    return Graded(run, grader)


def call(path: Path, **flags):
    grade(resolve(GradeConfig, flags={"run": (str(path),), "grader_workers": 1, **flags}, command="grade"))


def grades_of(path: Path, columns="*"):
    with open_runs([read_run(path)]) as database:
        return database.select(
            f"SELECT {columns} FROM grades ORDER BY grader, phase, step, example_id, sample_index"
        ).rows


def test_wins_and_scores_are_not_graded_as_answers(made, grader, tmp_path, capsys):
    for name, command in (("pairs", "pairwise"), ("found", "discover")):
        with RunDir.create(made.parent, command, name=name, metadata={}) as run:
            run.commit_rollouts("eval", 0, [rollout(name, "a", 0, "7", 0.5)])
        with pytest.raises(RlvrError, match=f"{name} is a .*, and has no accuracy"):
            call(run.path, grader=grader)
        assert read_run(run.path).grades == []
    call(made, run=(str(made.parent / "*"),), grader=grader, phase="train", format="json")
    printed = capsys.readouterr()
    assert "passed over, since searches and comparisons have no accuracy: found, pairs" in printed.err
    assert [row["phase"] for row in json.loads(printed.out)["accuracy"]] == ["train"]


def test_what_changed_is_what_a_hand_counts(made, grader, capsys):
    replaced = ("manifest.jsonl", "run.json", ".lock")
    before = {p: p.read_bytes() for p in made.rglob("*") if p.is_file() and p.name not in replaced}
    described = read_run(made).metadata
    call(made, grader=grader, format="json")
    tables = json.loads(capsys.readouterr().out)
    by_step = {(r["phase"], r["step"]): r for r in tables["accuracy"]}
    assert list(by_step) == [("eval", 0), ("eval", 5), ("train", 3)]
    assert (by_step["eval", 5]["before"], by_step["eval", 5]["after"], by_step["eval", 5]["change"]) == (0.5, 0.5, 0.0)
    assert (by_step["train", 3]["before"], by_step["train", 3]["after"]) == (3 / 8, 5 / 8)
    last = by_step["eval", 5]
    assert last["before_low"] < 0.5 < last["before_high"]
    assert last["interval"] == "agresti-coull"
    # pass@1: before (1 + 1/2 + 0 + 1/2) / 4, after (1 + 1/2 + 1/2 + 0) / 4; pass@2: 3 of 4 before (a, b, d), after (a, b, c)
    assert [(r["k"], r["questions"], r["before"], r["after"]) for r in tables["pass_at_k"]] == [
        (1, 4, 0.5, 0.5),
        (2, 4, 0.75, 0.75),
    ]
    verdicts = {r["phase"]: r for r in tables["verdicts"]}
    counts = (
        "samples",
        "both_right",
        "right_to_wrong",
        "wrong_to_right",
        "both_wrong",
        "errors_before",
        "errors_after",
    )
    assert [verdicts["eval"][c] for c in counts] == [9, 2, 2, 2, 3, 1, 1]
    assert [verdicts["train"][c] for c in counts] == [8, 2, 1, 3, 2, 0, 0]
    # agreement 5/9, by chance (4 * 4 + 5 * 5) / 81
    assert verdicts["eval"]["kappa"] == pytest.approx((5 / 9 - 41 / 81) / (1 - 41 / 81))
    confusion = {(r["phase"], r["before \\ after"]): r for r in tables["confusion"]}
    assert [confusion["eval", "grade_error"][n] for n in ("grade_error", "format_1_answer_1", "format_1_answer_0")] == [
        0,
        1,
        0,
    ]
    assert confusion["eval", "format_1_answer_1"]["grade_error"] == 1
    assert sum(v for r in tables["confusion"] for v in r.values() if isinstance(v, int)) == 17
    detail = {(r["phase"], r["what"], r["name"]): (r["before"], r["after"]) for r in tables["last step"]}
    assert detail["eval", "category", "format_1_answer_1"] == (4, 4)
    assert detail["eval", "category", "grade_error"] == (1, 1)
    assert detail["eval", "failure", "wrong_answer"] == (0, 3)
    assert detail["eval", "failure", "malformed_tags"] == (3, 0)
    assert detail["eval", "failure", "grade_error: timeout"] == (1, 0)
    assert detail["eval", "failure", "grade_error: ZeroDivisionError"] == (0, 1)
    examples = [(r["phase"], r["change"], r["example_id"], r["sample_index"]) for r in tables["examples"]]
    assert examples == [
        ("eval", "wrong to right", "b", 0),
        ("eval", "wrong to right", "c", 0),
        ("eval", "right to wrong", "b", 1),
        ("eval", "right to wrong", "d", 0),
        ("train", "wrong to right", "f", 0),
        ("train", "wrong to right", "g", 0),
        ("train", "wrong to right", "h", 1),
        ("train", "right to wrong", "f", 1),
    ]
    assert {r["training groups"]: r["count"] for r in tables["groups"]} == {
        "all": 4,
        "signal before": 3,  # e, f, h
        "signal after": 3,  # e, f, g
        "gained their signal": 1,  # g
        "lost their signal": 1,  # h
        "an advantage changed its sign (+, 0 or -)": 3,  # f, g, h
    }
    # Nothing of the run itself has changed, and its status is what it was.
    assert {p: p.read_bytes() for p in before} == before
    assert read_run(made).metadata == described | {"committed": read_run(made).metadata["committed"]}
    assert read_run(made).metadata["status"] == "interrupted"
    assert findings(made) == []


def test_other_formats_print(graded, tmp_path, capsys):
    run = shutil.copytree(graded.run, tmp_path / "r")
    call(run, grader=graded.grader, format="csv", phase="eval")
    out = capsys.readouterr().out
    assert ",kappa" in out
    assert "training groups" not in out


def test_without_a_baseline_the_advantage_is_the_reward(graded):
    info, grader = read_run(graded.run), graded.grader
    metadata = {**info.metadata, "config": {"loss_type": "no_baseline"}}
    (groups,) = [
        t for t in compare_grades(replace(info, metadata=metadata), grader=grader, phase="all") if t.title == "groups"
    ]
    assert groups.rows[-1][:2] == ("an advantage changed its sign (+, 0 or -)", 3)  # f, g and h: a reward turned
    # A punishment of the longest responses belongs to the reward: all have 1 token, so that nothing but its size is seen.
    punished = {
        **info.metadata,
        "config": {"loss_type": "no_baseline", "overlong": "soft_punish", "sampling_max_tokens": 1},
    }
    tables = compare_grades(replace(info, metadata=punished), grader=grader, phase="all")
    assert tables[-1].rows[-1][:2] == ("an advantage changed its sign (+, 0 or -)", 3)  # now from 0 to -1, or back
    assert tables[-1].rows[1][:2] == ("signal before", 3)


def test_groups_that_dynamic_sampling_dropped_are_not_counted(graded):
    info = read_run(graded.run)
    dynamic = replace(info, metadata={**info.metadata, "config": {"loss_type": "grpo_clip", "dynamic_sampling": True}})
    *_, groups = compare_grades(dynamic, grader=graded.grader, phase="all")
    assert {name: count for name, count, _ in groups.rows} == {
        "all": 3,  # g had no signal, and was not trained on
        "signal before": 3,
        "signal after": 2,
        "gained their signal": 0,
        "lost their signal": 1,
        "an advantage changed its sign (+, 0 or -)": 2,
    }


def test_what_an_environment_said_is_not_punished(tmp_path):
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        own = {"run_id": "r", "phase": "train", "advantage": 0.0}
        run.commit_rollouts("train", 0, [an_episode(4, n, 2, sample_index=i, **own) for i, n in enumerate((1, 30))])
    call(run.path, grader="r1_zero")
    config = {"loss_type": "grpo_clip", "overlong": "soft_punish", "sampling_max_tokens": 10, "overlong_buffer": 4}
    info = read_run(run.path)
    tables = compare_grades(replace(info, metadata={**info.metadata, "config": config}), grader="r1_zero", phase="all")
    assert tables[-1].rows[1][:2] == ("signal before", 0)


def test_the_signs_are_those_within_the_group(tmp_path):
    (tmp_path / "parts.py").write_text("def grade(response, truth):\n    return {'reward': float(response)}\n")
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        turned = [("0", 0.0), ("0.2", 0.1), ("0.4", 1.0)]  # the middle one was below the mean, and is it now
        groups = {"a": [("0.6", 0.0), ("1", 1.0)], "b": turned, "c": turned}
        rows = [
            rollout("r", e, i, response, reward, phase="train")
            for e, group in groups.items()
            for i, (response, reward) in enumerate(group)
        ]
        run.commit_rollouts("train", 0, rows)
    grader = f"{tmp_path / 'parts.py'}:grade"
    call(run.path, grader=grader)
    (table,) = [t for t in compare_grades(read_run(run.path), grader=grader, phase="all") if t.title == "groups"]
    assert {name: count for name, count, _ in table.rows} == {
        "all": 3,
        "signal before": 3,
        "signal after": 3,
        "gained their signal": 0,
        "lost their signal": 0,
        "an advantage changed its sign (+, 0 or -)": 2,  # of a only the sizes changed
    }


def test_the_signs_are_those_of_shaped_rewards(tmp_path):
    """Length and language terms are as they were; the format's is that of the new grade."""
    (tmp_path / "parts.py").write_text(
        "def grade(response, truth):\n"
        "    return {'reward': 1.0, 'answer_reward': 1.0, 'format_reward': float(response)}\n"
    )
    with RunDir.create(tmp_path / "runs", "grpo", name="r", metadata={}) as run:
        terms = {
            "a": [{"length_term": 0.5, "format_reward": 0.0}, {"length_term": -0.5, "format_reward": 0.0}],
            "b": [{"language_term": 0.2, "format_reward": 1.0}, {"language_term": 0.2, "format_reward": 0.5}],
        }
        rows = [
            replace(rollout("r", e, i, "0.5", 1.0, phase="train"), **term)
            for e, group in terms.items()
            for i, term in enumerate(group)
        ]
        run.commit_rollouts("train", 0, rows)
    grader = f"{tmp_path / 'parts.py'}:grade"
    call(run.path, grader=grader)
    info = read_run(run.path)
    info = replace(info, metadata={**info.metadata, "config": {"loss_type": "grpo_clip", "format_weight": 0.25}})
    (table,) = [t for t in compare_grades(info, grader=grader, phase="all") if t.title == "groups"]
    counts = {name: count for name, count, _ in table.rows}
    assert (counts["signal before"], counts["signal after"], counts["lost their signal"]) == (2, 1, 1)


def test_a_failed_grade_is_null_a_cut_response_was_cut_and_the_lenient_rule_is_another_grader(tmp_path, grader):
    with RunDir.create(tmp_path / "runs", "eval", name="r", metadata={}) as run:
        rows = [rollout("r", "a", 0, "fails", 1.0), rollout("r", "b", 0, "no end", 0.0, finish="length")]
        rows.append(rollout("r", "c", 0, "x </think>\n<answer> 7 </answer>", 0.0))
        run.commit_rollouts("eval", 0, rows)
    call(run.path, grader=grader)
    call(run.path, grader="r1_zero")
    call(run.path, grader="r1_zero", format_rule="lenient")
    rows = {
        row[:2]: row[2:]
        for row in grades_of(run.path, "grader, example_id, reward, grade_error, category, failure_kind")
    }
    assert rows[grader, "a"] == (None, "ZeroDivisionError", "grade_error", None)
    assert rows[grader, "b"] == (0.0, None, "format_1_answer_0", "wrong_answer")
    assert rows["r1_zero", "b"] == (0.0, None, "format_0_answer_0", "truncated")
    assert [rows[rule, "c"][0] for rule in ("r1_zero", "r1_zero_lenient")] == [0.0, 1.0]


def test_what_is_graded_is_not_graded_twice_but_what_failed_is_tried_once_more(made, grader, tmp_path, capsys):
    def graded(number: int, **flags) -> str:
        capsys.readouterr()
        call(made, grader=grader, **flags)
        assert len(list((made / "grades").iterdir())) == number
        return capsys.readouterr().err.partition(f"{grader}: ")[2].partition("\n")[0]

    assert graded(2, phase="eval") == "9 rollouts to grade"
    assert graded(4) == "9 rollouts to grade, 1 of them failed before, 8 graded already"
    before = grades_of(made, "example_id, sample_index, reward, attempt")
    assert [row for row in before if row[3]] == [("d", 0, None, 1)]
    assert graded(5) == "1 rollouts to grade, 1 of them failed before, 16 graded already"  # no error: it has grades
    held = dict(zip(before, grades_of(made, "example_id, sample_index, reward, attempt"), strict=True))
    assert [new for old, new in held.items() if new != old] == [("d", 0, None, 2)]
    assert findings(made) == []


@pytest.fixture
def down(tmp_path) -> str:
    """A grader that fails until there is a file `up` beside it."""
    (tmp_path / "waits.py").write_text(
        "from pathlib import Path\n"
        "def grade(response, truth):\n"
        "    if not (Path(__file__).parent / 'up').exists():\n"
        "        raise OSError('down')\n"
        "    return {'reward': float(truth in response)}\n"
    )
    return f"{tmp_path / 'waits.py'}:grade"


def test_of_a_grader_that_was_down_all_failed_grades_are_tried_again_by_the_same_command(made, down, tmp_path, capsys):
    flags = {"grader": down, "phase": "train"}
    for times in range(2):
        with pytest.raises(RlvrError, match="Not one of the 8 responses could be graded") as caught:
            call(made, **flags)
        assert "the same command again, which tries those that failed once more" in caught.value.hint
        assert grades_of(made, "DISTINCT attempt, grade_error") == [(times, "OSError")]
        (row,) = disagreements(made, phase="train")
        assert [row[c] for c in ("samples", "left_out", "disagreement", "kappa")] == [0, 8, None, None]
    (tmp_path / "up").touch()
    call(made, **flags)
    assert grades_of(made, "DISTINCT attempt, grade_error") == [(2, None)]
    call(made, **flags)
    assert "0 rollouts to grade, 8 graded already" in capsys.readouterr().err


def test_again_and_a_changed_file_supersede(made, grader, tmp_path, capsys):
    call(made, grader=grader)
    before = grades_of(made, "reward, attempt")
    call(made, grader=grader, again=True)
    assert "17 rollouts to grade\n" in capsys.readouterr().err
    assert grades_of(made, "reward, attempt") == [(reward, 1) for reward, _ in before]
    (tmp_path / "mine.py").write_text(GRADER.replace("truth in response", "truth not in response"))
    call(made, grader=grader, phase="eval")
    assert "9 rollouts to grade\n" in capsys.readouterr().err
    rows = grades_of(made, "phase, example_id, sample_index, reward, attempt")
    assert len(rows) == 17
    assert {(phase, attempt) for phase, *_, attempt in rows} == {("eval", 2), ("train", 1)}
    now = {row[:3]: row[3] for row in rows}
    assert now["eval", "b", 1] == 1.0  # it said 8, and the truth is 7
    assert now["eval", "d", 0] is None
    assert findings(made) == []
    call(made, grader=grader)  # the training rollouts have grades of the old file
    assert "9 rollouts to grade, 1 of them failed before, 8 graded already" in capsys.readouterr().err


def test_an_interrupted_regrading_keeps_what_it_did(made, grader):
    class Bar:
        def advance(self, n, **signals):
            stop.requested = True

    stop = StopRequest()
    digest = "0" * 64
    with GraderPool(grader, workers=1) as pool, RunDir.annotate(made) as run:
        works = plan_regrade(run, grader=grader, grader_sha256=digest, phase="all", again=False)
        assert [(w.phase, w.step, w.done, w.left) for w in works] == [
            ("eval", 0, 0, 1),
            ("eval", 5, 0, 8),
            ("train", 3, 0, 8),
        ]
        with pytest.raises(Interrupted):
            regrade(run, works, grader=grader, grader_sha256=digest, pool=pool, stop=stop, progress=Bar())
    assert len(grades_of(made)) == 1
    assert read_run(made).metadata["status"] == "interrupted"
    with RunDir.annotate(made) as run:
        works = plan_regrade(run, grader=grader, grader_sha256=digest, phase="all", again=False)
        assert [w.left for w in works] == [0, 8, 8]
        works = plan_regrade(run, grader=grader, grader_sha256=digest, phase="all", again=True)
        assert [(w.attempt, w.left) for w in works] == [(1, 1), (1, 8), (0, 8)]


def test_an_interrupted_again_of_grades_that_had_all_failed_goes_on_with_the_rest(made, down, tmp_path):
    class Bar:
        def advance(self, n, **signals):
            stop.requested = True

    stop = StopRequest()
    with pytest.raises(RlvrError, match="Not one of the 9 responses"):
        call(made, grader=down, phase="eval")
    (tmp_path / "up").touch()
    config = resolve(GradeConfig, flags={"grader": down, "phase": "eval", "again": True}, command="grade")
    with GraderPool(down, workers=1) as pool, RunDir.annotate(made) as run:
        of = {"grader": down, "grader_sha256": pool.sha256}
        works = plan_regrade(run, **of, phase="eval", again=True)
        with pytest.raises(Interrupted):
            regrade(run, works, **of, pool=pool, stop=stop, progress=Bar())
        rest = rest_of(config, made, run, works, sha256=pool.sha256, paths=[made])
        works = plan_regrade(run, **of, phase="eval", again=False)
        assert [(w.attempt, w.done, w.failed, w.left) for w in works] == [(1, 1, 0, 0), (1, 0, 0, 8)]
    assert rest == [f"rlvr grade {made} --grader {down} --phase eval"]
    call(made, grader=down, phase="eval")
    assert grades_of(made, "DISTINCT attempt, grade_error") == [(1, None)]
    assert len(list((made / "grades").iterdir())) == 4, "none was graded a third time"


@pytest.fixture
def spawn(forks):
    def spawn(path: Path, grader: str, fault: str = "") -> Done:
        return forks.run("grade", path, "--grader", grader, "--grader-workers", 1, cwd=ROOT, fault=fault)

    return spawn


@pytest.mark.parametrize(
    "point",
    [
        "manifest.torn",
        *map(slow, ("write", "write.torn", "rename", "renamed", "manifest", "manifest.done")),
    ],
)
def test_a_kill_at_any_point_loses_nothing(made, grader, spawn, point):
    Path(grader.removesuffix(":grade")).write_text(
        GRADER.replace("fails", "never")
    )  # a grade that fails is tried again
    opening = point.startswith(("write", "rename"))  # run.json is written once before
    killed = spawn(made, grader, f"{point}:{3 if opening else 2}")
    assert killed.status == -9, killed.err
    seen = grades_of(made)  # readers see whole commits
    assert len(seen) in (1, 9)
    assert check_run(made).problems == []
    call(made, grader=grader)
    assert len(grades_of(made)) == 17
    assert set(seen) <= set(grades_of(made))
    assert findings(made) == []
    assert not list(made.rglob("*.tmp"))
    assert not (made / "set-aside").exists()
    assert len(list((made / "grades").iterdir())) == 3  # none was graded twice


def test_a_signal_exits_130_and_says_how_to_go_on_with_the_same_options(made, grader, forks):
    given = ("--grader-timeout", "7.5", "--format", "json")
    done = forks.run("grade", made, "--grader", grader, *given, cwd=ROOT, fault="manifest.done:1:term", status=130)
    command = f"rlvr grade {made} --grader {grader} --grader-timeout 7.5 --format json"
    assert done.err.strip().endswith(f"what is done is kept in {made}; go on with: {command}")
    assert len(grades_of(made)) == 1


@pytest.mark.parametrize(
    ("point", "commands"),
    [
        slow("write:1", ["{r} {other} --grader {grader} --again"]),  # nothing has begun
        (
            "manifest.done:1",
            [
                "{r} --grader {grader} --phase eval",
                "{r} --grader {grader} --phase train --again",
                "{other} --grader {grader} --again",
            ],
        ),
        slow("manifest.done:3", ["{other} --grader {grader} --again"]),
    ],
)
def test_what_an_interrupted_again_names_grades_the_rest_once(graded, tmp_path, forks, point, commands):
    made, other, grader = shutil.copytree(graded.run, tmp_path / "r"), tmp_path / "other", graded.grader
    with RunDir.create(tmp_path, "eval", name="other", metadata={}) as run:
        run.commit_rollouts("eval", 0, [rollout("other", "a", 0, "8", 0.0)])
    call(other, grader=grader)
    done = forks.run("grade", made, other, "--grader", grader, "--again", cwd=ROOT, fault=f"{point}:term", status=130)
    named = done.err.strip().rpartition("go on with: ")[2].split(" && ")
    assert named == [f"rlvr grade {words}".format(r=made, other=other, grader=grader) for words in commands]
    for words in named:
        forks.run(*shlex.split(words)[1:], cwd=ROOT, status=0)
    for path, rows, parts in ((made, 17, 3), (other, 1, 1)):
        assert grades_of(path, "attempt") == [(1,)] * rows
        assert len(list((path / "grades").iterdir())) == 2 * parts  # of two attempts; none was graded a third time


def test_a_run_that_is_being_written_is_left_alone(made, grader, spawn):
    with RunDir.resume(made) as writer:
        done = spawn(made, grader)
        assert done.status == 1
        assert "is being written by process" in done.err
        assert len(done.err.splitlines()) == 2
        writer.finish("interrupted")
    assert not (made / "grades").exists()


def test_a_killed_run_can_be_graded_and_stays_as_it_is(made, grader):
    run = RunDir.resume(made)
    run.close()  # its run.json says that it is running, as after a kill
    call(made, grader=grader)
    assert read_run(made).metadata["status"] == "running"


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({}, "No grader is given."),
        ({"grader": "nobody"}, "--grader is 'nobody'"),
        ({"grader": "no/such/file.py:grade"}, "There is no grader file"),
        ({"grader": "r1_zero", "run": ("nowhere",)}, "There is no run 'nowhere'"),
        ({"grader": "r1_zero", "phase": "train"}, "has no train rollouts"),
        ({"grader": "r1_zero", "phase": "test"}, "--phase is 'test'"),
        ({"grader": "r1_zero", "grader_timeout": 0.0}, "--grader-timeout is 0.0"),
    ],
)
def test_what_the_user_can_put_right(tmp_path, flags, problem):
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, [rollout("r", "a", 0, "7", 1.0)])
    with pytest.raises(RlvrError) as caught:
        call(run.path, **flags)
    assert problem in caught.value.problem
    assert caught.value.hint


def test_kappa():
    assert cohen_kappa(20, 5, 10, 15) == pytest.approx(0.4)  # the example of Cohen's that textbooks repeat
    assert cohen_kappa(5, 0, 0, 5) == 1.0
    assert cohen_kappa(0, 5, 5, 0) == -1.0
    assert cohen_kappa(9, 0, 0, 0) is None
    assert cohen_kappa(0, 0, 0, 0) is None


def disagreements(run: Path, **parameters):
    query = named_queries()["graders"]
    with open_runs([read_run(run)]) as database:
        table = database.select(query.sql, {**query.parameters, **parameters})
    return [dict(zip(table.columns, row, strict=True)) for row in table.rows]


def test_the_query_graders_counts_the_same(graded, tmp_path):
    grader, run = graded.grader, shutil.copytree(graded.run, tmp_path / "r")

    def rows(**parameters):
        return disagreements(run, **parameters)

    assert rows(against="r1_zero") == rows() != []  # the run's own, by its name
    call(run, grader="r1_zero")  # which says wrong to all: nothing has tags
    mine, zero = rows()
    assert (mine["grader"], mine["against"], zero["grader"]) == (grader, "r1_zero", "r1_zero")
    counts = ("samples", "both_right", "only_grader", "only_against", "neither", "left_out")
    assert [mine[c] for c in counts] == [7, 2, 1, 1, 3, 2]  # the run's grade of c 0 failed, and the second one of d 0
    assert mine["disagreement"] == 2 / 7
    assert mine["kappa"] == pytest.approx(cohen_kappa(2, 1, 1, 3))
    assert mine["only_grader_examples"] == ["step 5, b, sample 0"]
    assert mine["only_against_examples"] == ["step 5, b, sample 1"]
    assert [zero[c] for c in counts] == [8, 0, 0, 4, 4, 1]
    assert zero["kappa"] == 0.0
    (two,) = rows(grader=grader, against="r1_zero")
    assert [two[c] for c in counts] == [8, 0, 4, 0, 4, 1]
    (train,) = rows(grader=grader, phase="train", examples=1)
    assert [train[c] for c in counts] == [8, 2, 3, 1, 2, 0]
    assert train["only_grader_examples"] == ["step 3, f, sample 0"]
    assert rows(step=0)[0]["samples"] == 1
    by_step = rows(grader=grader, by_step=True)
    assert [(r["step"], r["samples"], r["left_out"]) for r in by_step] == [(0, 1, 0), (5, 6, 2)]
    assert sum(r["only_grader"] for r in by_step) == mine["only_grader"]
    assert rows(grader="nobody") == []


def test_several_runs_are_graded_by_one_command(made, tmp_path, capsys):
    with RunDir.create(tmp_path / "runs", "eval", name="other", metadata={}) as run:
        run.commit_rollouts("eval", 0, [rollout("other", "a", 0, "8", 0.0), rollout("other", "b", 0, "9", 1.0)])
    flags = {"grader": "question_only", "grader_workers": 1, "format": "json", "runs_dir": str(tmp_path / "runs")}
    flags["run"] = ("r", "oth*")
    grade(resolve(GradeConfig, flags=flags, command="grade"))
    tables = json.loads(capsys.readouterr().out)
    places = [(row["run_id"], row["phase"], row["step"]) for row in tables["accuracy"]]
    assert places == [("r", "eval", 0), ("r", "eval", 5), ("r", "train", 3), ("other", "eval", 0)]
    assert len(grades_of(run.path)) == 2
    assert len(grades_of(made)) == 17
    flags["run"] = ("r", "oth*", str(shutil.copytree(run.path, tmp_path / "copies/other")))
    grade(resolve(GradeConfig, flags=flags, command="grade"))
    said = capsys.readouterr()
    assert "0 rollouts to grade, 2 graded already" in said.err
    assert [row["run_id"] for row in json.loads(said.out)["accuracy"]][2:] == ["runs/r", "runs/other", "copies/other"]


def test_explain_needs_no_run_and_makes_none(tmp_path, monkeypatch, capsys, grader):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    grade(resolve(GradeConfig, flags={"explain": "2/4", "run": (r"\frac{1}{2}",), "format": "json"}, command="grade"))
    told = json.loads(capsys.readouterr().out)
    assert [row["step"] for row in told["steps"]] == ["format", "extracted", "L0 text", "L0 spelling", "L2 value"]
    assert told["steps"][-1]["result"] == "the same: this decides"
    assert {row["verdict"]: row["value"] for row in told["verdict"]}["reward"] == 1.0
    grade(resolve(GradeConfig, flags={"explain": "fails", "run": ("5",), "grader": grader}, command="grade"))
    assert "ZeroDivisionError" in capsys.readouterr().out
    for truths in ({}, {"run": ("5", "6")}, {"run": (" ",)}):
        with pytest.raises(RlvrError, match="needs one ground truth"):
            resolve(GradeConfig, flags={"explain": "5", **truths}, command="grade")
    assert sorted(p for p in tmp_path.rglob("*") if "__pycache__" not in p.parts) == before
