"""The run store: grades by other graders."""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest

from checks import calls_into, findings
from rlvr_cli.errors import RlvrError
from rlvr_cli.rollouts.regrade import plan_regrade
from rlvr_cli.runs import manifest
from rlvr_cli.runs.manifest import grader_slug, parse_manifest, part_name, part_path
from rlvr_cli.runs.readers import (
    read_metadata,
    read_rollouts,
    read_run,
)
from rlvr_cli.runs.run_dir import Attempt, RunDir
from stores import a_grade, a_rollout, as_killed, tree

# Grades by other graders


GRADERS = [
    "math_verify",
    "mine.py:grade",
    "../../etc/x.py:f",
    "a/mine.py:grade",
    "r1_zero_lenient",
    "x" * 500,
    "",
    "数学.py:f",
]


def test_every_grader_has_its_own_file_name():
    slugs = [grader_slug(g) for g in GRADERS]
    assert len(set(slugs)) == len(GRADERS)
    assert slugs[0] == "math_verify"
    for slug in slugs:
        assert re.fullmatch(r"[A-Za-z0-9_.]+", slug)
        path = f"grades/{slug}-eval-000003-0012.parquet"
        assert part_name(path) == ("grades", slug, "eval", 3, 12)
    path = part_path("train", 5, 0, folder="grades", grader="mine.py:grade")
    assert path == f"grades/{slugs[1]}-train-000005-0000.parquet"
    for folder in ("rollouts", "segments"):
        assert part_name(part_path("train", 5, 0, folder=folder)) == (folder, "", "train", 5, 0)
    assert part_name("grades/train-000005-0000.parquet") is None


def test_grades_are_stored_beside_the_rollouts(finished: Path):
    before, metadata = tree(finished), read_metadata(finished)
    with RunDir.annotate(finished) as run:
        assert run.steps() == [("train", 0), ("eval", 1)]
        assert run.grade_attempts("math_verify", "train", 0) == {}
        path = run.commit_grades("train", 0, [a_grade(run.id, i) for i in range(4)])
        run.commit_grades("train", 0, [a_grade(run.id, 4)])
        run.commit_grades(
            "train", 0, [a_grade(run.id, 0, grader="mine.py:grade", grader_sha256="ab", grade_error="\ud800")]
        )
        run.commit_grades("train", 0, [a_grade(run.id, 0, attempt=1)])
        made = run.grade_attempts("math_verify", "train", 0)
        first, again = Attempt(0, None, failed=False), Attempt(1, None, failed=False)
        assert made == {(f"q{i}", 0): [first] for i in range(1, 5)} | {("q0", 0): [first, again]}
        assert run.grade_attempts("mine.py:grade", "train", 0) == {("q0", 0): [Attempt(0, "ab", failed=True)]}
        assert run.grade_attempts("math_verify", "eval", 1) == {}
        with pytest.raises(AssertionError, match="already committed"):
            run.commit_grades("train", 0, [a_grade(run.id, 7), a_grade(run.id, 3)])
        with pytest.raises(AssertionError):
            run.commit_grades("train", 0, [a_grade(run.id, 7), a_grade(run.id, 8, grader="r1_zero")])
        with pytest.raises(AssertionError):
            run.commit_grades("train", 1, [a_grade(run.id, 7)])
        with pytest.raises(AssertionError, match="cannot be changed"):
            run.update(note="no")
        assert run.committed_keys() == {("train", 0, f"q{i}", 0) for i in range(6)} | {
            ("eval", 1, f"q{i}", 0) for i in range(3)
        }
    assert path == finished / "grades" / "math_verify-train-000000-0000.parquet"
    after = tree(finished)
    written = ("manifest.jsonl", "run.json")
    assert {k: after[k] for k in before if k not in written} == {k: v for k, v in before.items() if k not in written}
    assert read_metadata(finished) == metadata | {"committed": read_metadata(finished)["committed"]}
    assert read_metadata(finished)["committed"]["parts"] == 3 + 4
    assert after["manifest.jsonl"].startswith(before["manifest.jsonl"])  # type: ignore[arg-type]
    info = read_run(finished)
    assert len(info.grades) == 4
    assert len(info.parts) == 3
    assert info.fingerprint == read_run(finished).fingerprint
    assert read_rollouts(finished).num_rows == 9
    assert findings(finished) == []
    with RunDir.resume(finished) as run:  # resuming ignores the grades
        run.commit_rollouts("train", 2, [a_rollout(run.id, step=2)])
        assert run.grade_attempts("math_verify", "train", 0) == made
    assert read_run(finished).fingerprint != info.fingerprint


def test_planning_to_grade_takes_each_step_alone(run: RunDir):
    taken = []
    for step in range(4):
        run.commit_rollouts("train", step, [a_rollout(run.id, step=step), a_rollout(run.id, 1, step=step)])
        run.commit_grades("train", step, [a_grade(run.id, step=step, attempt=0)])
        with calls_into(manifest) as calls:
            works = plan_regrade(run, grader="math_verify", grader_sha256=None, phase="all", again=False)
        assert [(work.step, work.done, work.left) for work in works] == [(s, 1, 1) for s in range(step + 1)]
        taken.append(calls.total())
    assert len({more - less for less, more in pairwise(taken[1:])}) == 1  # of one step alone, the keys are in memory


@pytest.mark.parametrize(
    ("commits", "planned"),
    [
        # Each commit is of one attempt: the questions, with - where the grade failed, and the grader's file.
        (["0123"], (0, 1, 4, 0, 0)),
        (["01 2- 3-"], (0, 1, 2, 2, 0)),
        (["01 2-"], (0, 1, 2, 1, 1)),  # a kill, and then what has no grade, and what failed
        (["01 2- 3-", "2 3-"], (0, 2, 3, 1, 0)),  # tried again, once with success
        (["01 2- 3-", "2"], (0, 2, 3, 1, 0)),  # that was interrupted
        (["012 3-", "3", "02"], (2, 3, 2, 0, 2)),  # --again was interrupted
        (["012 3-", "3 0"], (1, 2, 2, 0, 2)),  # the same, the failed one first
        (["012 3-", "3-", "0123-"], (2, 3, 3, 1, 0)),
        (["0- 1- 2- 3-", "0 1-"], (1, 2, 1, 1, 2)),  # the same, where all had failed
        (["0- 1- 2- 3-", "0 1- 2- 3-"], (0, 2, 1, 3, 0)),
        (["0123", "0- 1- 2- 3-", "3"], (1, 3, 1, 3, 0)),  # --again met a judge that was down
        (["01 2- 3-", "2 new"], (1, 2, 1, 0, 3)),  # by another file, of which no other grade is kept
        (["0- 1- 2- 3-", "0- new", "0 new"], (1, 3, 1, 0, 3)),
    ],
)
def test_planning_tells_what_failed_from_what_was_never_graded(run: RunDir, commits, planned):
    run.commit_rollouts("train", 0, [a_rollout(run.id, i) for i in range(4)])
    sha256 = None
    for attempt, grades in enumerate(commits):
        sha256 = "new" if grades.endswith("new") else None
        rows = [
            a_grade(run.id, int(q), attempt=attempt, grader_sha256=sha256, grade_error="timeout" if error else None)
            for q, error in re.findall(r"(\d)(-?)", grades)
        ]
        run.commit_grades("train", 0, rows)
    (work,) = plan_regrade(run, grader="math_verify", grader_sha256=sha256, phase="all", again=False)
    assert (work.attempt, work.retry, work.done, work.failed, work.left) == planned
    (anew,) = plan_regrade(run, grader="math_verify", grader_sha256=sha256, phase="all", again=True)
    assert (anew.attempt, anew.done, anew.failed, anew.left) == (len(commits), 0, 0, 4)


def test_a_grades_part_is_adopted_set_aside_or_reported_as_damaged(finished: Path):
    with RunDir.annotate(finished) as run:
        whole = run.commit_grades("train", 0, [a_grade(run.id, i) for i in range(3)])
    as_killed(finished, status="finished")
    manifest = finished / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    manifest.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    assert read_run(finished).grades == []
    assert any("is not in the manifest" in p for p in findings(finished))
    foreign = whole.with_name("r1_zero-train-000000-0000.parquet")
    foreign.write_bytes(whole.read_bytes())
    rollouts = whole.with_name("math_verify-train-000000-0001.parquet")
    rollouts.write_bytes((finished / "rollouts" / "train-000000-0000.parquet").read_bytes())
    (whole.parent / ".math_verify-train-000000-0002.parquet.tmp").write_bytes(b"half")
    with RunDir.annotate(finished) as run:
        assert any("math_verify-train-000000-0000.parquet" in n and "has been adopted" in n for n in run.notices)
        assert any("belong to another grader" in n for n in run.notices)
        assert any("its columns do not match" in n for n in run.notices)
        assert run.grade_attempts("math_verify", "train", 0).keys() == {(f"q{i}", 0) for i in range(3)}
    assert sorted(p.name for p in whole.parent.iterdir()) == [whole.name]
    assert manifest.read_bytes() == b"".join(lines)
    assert len(list((finished / "set-aside").iterdir())) == 2
    assert findings(finished) == []
    data = bytearray(whole.read_bytes())
    data[len(data) // 2] ^= 1
    whole.write_bytes(data)
    (problem,) = findings(finished)
    assert str(whole) in problem
    whole.write_bytes(data[:-1])
    for read in (read_run, RunDir.resume):
        with pytest.raises(RlvrError, match=re.escape(str(whole))):
            read(finished)


def test_a_grades_folder_that_is_a_link_is_rejected(finished: Path, tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    (finished / "grades").symlink_to(tmp_path / "elsewhere")
    for write in (RunDir.annotate, RunDir.resume):
        with pytest.raises(RlvrError, match="symbolic link"):
            write(finished)
    assert any("symbolic link" in p for p in findings(finished))


def test_only_valid_paths_are_parsed_as_grades_parts():
    entry = {"rows": 1, "bytes": 1, "sha256": "0", "schema_version": 1, "phase": "train", "step": 0}
    good = "grades/math_verify-train-000000-0000.parquet"
    for path in (
        "grades/../rollouts/train-000000-0000.parquet",
        "grades/a/b-train-000000-0000.parquet",
        "grades/..-train-000000-0000.parquet",
        "grades/-train-000000-0000.parquet",
        "grades/math_verify-eval-000000-0000.parquet",
        "grades/math_verify-train-000000-0000.parquet\n",
        "rollouts/math_verify-train-000000-0000.parquet",
        "grades/train-000000-0000.parquet",
        "grades/" + "x" * 65 + "-train-000000-0000.parquet",
    ):
        with pytest.raises(ValueError, match="not the path of a part"):
            parse_manifest(json.dumps({"path": path, **entry}).encode() + b"\n", newest=1)
    assert parse_manifest(json.dumps({"path": good, **entry}).encode() + b"\n", newest=1)[0][0].folder == "grades"
