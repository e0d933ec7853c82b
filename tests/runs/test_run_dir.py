"""The run store, except the kill tests (test_run_dir_kill.py)."""

import json
import math
import os
import random
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import factories
import rlvr_cli
from checks import findings
from rlvr_cli import faults
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.runs import commits, lock, recovery, run_dir
from rlvr_cli.runs.manifest import grader_slug, parse_manifest, part_name, part_path
from rlvr_cli.runs.readers import (
    RUN_NAME,
    latest_run,
    metadata_bytes,
    read_metadata,
    read_parts,
    read_rollouts,
    read_run,
    resolve_run,
)
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage import files
from rlvr_cli.runs.storage.files import atomic_write
from rlvr_cli.runs.storage.keys import bit_positions, bits_of_keys, merge, overlap
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.runs.storage.schemas import rollout_schema
from rlvr_cli.text import storable
from rlvr_cli.types import SCHEMA_VERSION, Regrade, Rollout, Turn

SOURCE = Path(rlvr_cli.__file__).parents[1]


def a_rollout(run_id: str, index: int = 0, **values) -> Rollout:
    own = {"phase": "train", "example_id": f"q{index}", "response": f"<think> {index} </think> <answer> 4 </answer>"}
    return factories.a_rollout(**{"run_id": run_id, **own, **values})


def some_rollouts(run: RunDir, n: int = 3, **values) -> list[Rollout]:
    return [a_rollout(run.id, i, **values) for i in range(n)]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDir]:
    with RunDir.create(tmp_path / "runs", "grpo", name="a-run", metadata={"argv": ["rlvr", "grpo"]}) as run:
        yield run


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """A run with three parts and two commits of metrics."""
    with RunDir.create(tmp_path / "runs", "grpo", name="done", metadata={}) as run:
        run.commit_rollouts("train", 0, some_rollouts(run))
        run.commit_metrics(0, "train", {"loss": 0.5})
        run.commit_rollouts("train", 0, [a_rollout(run.id, i) for i in range(3, 6)])
        run.commit_rollouts("eval", 1, some_rollouts(run, phase="eval", step=1))
        run.commit_metrics(1, "eval", {"reward/mean": 1.0})
    return run.path


@pytest.mark.parametrize("more", ["a line that is there already", "half a line"])
def test_a_finished_run_with_more_than_it_recorded_is_damaged(finished: Path, more: str):
    manifest = finished / "manifest.jsonl"
    data = manifest.read_bytes()
    last = data.splitlines(keepends=True)[-1]
    manifest.write_bytes(data + (last if more.startswith("a") else last[:-20]))
    for read in (read_run, RunDir.resume, RunDir.annotate):
        with pytest.raises(RlvrError, match="it is not the manifest of 3 parts with 9 rollouts"):
            read(finished)


@pytest.mark.parametrize("record", [1.5, "x", [], {}, {"parts": "3", "manifest_bytes": 1.5}, True])
def test_a_record_of_another_kind_is_damage(finished: Path, record):
    metadata = read_metadata(finished) | {"committed": record}
    (finished / "run.json").write_bytes(metadata_bytes(metadata))
    for read in (read_run, RunDir.resume, RunDir.annotate):
        with pytest.raises(RlvrError, match=r"committed is not an object|it is not the manifest of"):
            read(finished)


def as_killed(run: Path, *, status: str = "running") -> None:
    """Give a run the run.json of a killed one: of one that was being written or, with a status, to which grades were added."""
    metadata = {k: v for k, v in read_metadata(run).items() if k != "committed"} | {"status": status}
    (run / "run.json").write_bytes(metadata_bytes(metadata))


def tree(root: Path) -> dict[str, bytes | str]:
    """Return every file below a directory with its bytes, and every link with its target."""
    return {
        str(p.relative_to(root)): os.readlink(p) if p.is_symlink() else p.read_bytes()
        for p in sorted(root.rglob("*"))
        if p.is_symlink() or p.is_file()
    }


# Parts


TEXTS = st.one_of(
    st.text(max_size=30),
    st.text(st.characters(categories=["Cs", "Cc", "Cf", "Co", "Lu"]), max_size=10),
    st.sampled_from(["", "\0", "a\0b", "\ud800", "x\udc80y", "😀 ½ × π", "\u2028", "\u202egnp.exe", "\r\n", "\ufeff"]),
)
FLOAT32S = st.floats(width=32, allow_nan=False)
INT32S = st.integers(-(2**31), 2**31 - 1)


@st.composite
def masks_and_turns(draw: st.DrawFn) -> dict:
    """A response of up to 3 turns of up to 3 tokens each, with or without its mask and its turns."""
    lengths = draw(st.lists(st.integers(0, 3), max_size=3))
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    mask = tuple(draw(st.booleans()) for _ in range(sum(lengths)))
    turns = tuple(
        Turn(draw(st.sampled_from(["policy", "tool", "数学"])), start, start + n)
        for start, n in zip(starts, lengths, strict=True)
    )
    return {
        "response_ids": tuple(draw(INT32S) for _ in mask),
        "response_mask": draw(st.sampled_from([None, mask])),
        "turns": draw(st.sampled_from([None, turns])),
    }


@st.composite
def rollout_values(draw: st.DrawFn) -> dict:
    optional_floats = st.none() | st.floats(allow_nan=False)
    return {
        "example_id": draw(TEXTS),
        "prompt": draw(TEXTS),
        "response": draw(TEXTS),
        "ground_truth": draw(TEXTS),
        "prompt_ids": tuple(draw(st.lists(INT32S, max_size=4))),
        "response_ids": tuple(draw(st.lists(INT32S, max_size=4))),
        "sampled_logprobs": tuple(draw(st.lists(FLOAT32S, max_size=4))),
        "finish_reason": draw(st.sampled_from(["stop", "length"])),
        "stop_reason": draw(st.none() | TEXTS),
        "grader": draw(TEXTS),
        "format_reward": draw(optional_floats),
        "answer_reward": draw(optional_floats),
        "reward": draw(optional_floats),
        "grade_error": draw(st.none() | TEXTS),
        "extracted_answer": draw(st.none() | TEXTS),
        "category": draw(TEXTS),
        "failure_kind": draw(st.none() | TEXTS),
        "advantage": draw(optional_floats),
        "mean_logprob": draw(optional_floats),
        "mean_entropy": draw(optional_floats),
        "seed": draw(st.integers(0, 2**63 - 1)),
        "sampled_at": draw(st.datetimes(datetime(1970, 1, 1), datetime(9999, 1, 1))),
    } | draw(st.just({}) | masks_and_turns())


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(rollout_values(), min_size=1, max_size=4))
def test_rows_read_back_as_committed(tmp_path: Path, rows: list[dict]):
    with RunDir.create(tmp_path, "eval", metadata={}) as run:
        written = [a_rollout(run.id, sample_index=i, **values) for i, values in enumerate(rows)]
        part = run.commit_rollouts("train", 0, written)
    expected = [
        replace(r, **{k: storable(v) for k in Rollout.__slots__ if isinstance(v := getattr(r, k), str)})
        for r in written
    ]
    assert to_rollouts(read_rollouts(run.path)) == expected
    with_duckdb = (
        duckdb.connect().execute(f"select prompt, response_ids, reward from read_parquet('{part}')").fetchall()
    )
    assert with_duckdb == [(r.prompt, list(r.response_ids), r.reward) for r in expected]
    shutil.rmtree(run.path)


def test_only_log_probabilities_are_rounded_to_float32(run: RunDir):
    run.commit_rollouts("train", 0, [a_rollout(run.id, sampled_logprobs=(-0.1,), mean_logprob=-0.1, reward=0.1)])
    (row,) = to_rollouts(read_rollouts(run.path))
    assert row.sampled_logprobs == struct.unpack("f", struct.pack("f", -0.1))
    assert (row.mean_logprob, row.reward) == (-0.1, 0.1)


def test_nan_and_infinities_survive(run: RunDir):
    run.commit_rollouts("train", 0, [a_rollout(run.id, reward=math.nan, sampled_logprobs=(-math.inf, math.nan))])
    (row,) = to_rollouts(read_rollouts(run.path))
    assert math.isnan(row.reward or 0)
    assert row.sampled_logprobs[0] == -math.inf
    assert math.isnan(row.sampled_logprobs[1])


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"response_mask": (True,)}, "one element per token"),
        ({"turns": (Turn("policy", 0, 3),)}, "within the response"),
        ({"turns": (Turn("policy", 1, 2), Turn("tool", 0, 1))}, "in order and within"),
    ],
)
def test_a_mask_and_turns_must_fit_the_response(run: RunDir, wrong: dict, why: str):
    with pytest.raises(AssertionError, match=why):
        run.commit_rollouts("train", 0, [a_rollout(run.id, response_ids=(4, 5), **wrong)])


def test_parts_are_numbered_and_named_by_phase_and_step(run: RunDir):
    names = [
        run.commit_rollouts("train", 12, [a_rollout(run.id, 0, step=12)]).name,
        run.commit_rollouts("train", 12, [a_rollout(run.id, 1, step=12)]).name,
        run.commit_rollouts("eval", 12, [a_rollout(run.id, 0, step=12, phase="eval")]).name,
        run.commit_rollouts("train", 1_234_567, [a_rollout(run.id, 0, step=1_234_567)]).name,
    ]
    assert names == [
        "train-000012-0000.parquet",
        "train-000012-0001.parquet",
        "eval-000012-0000.parquet",
        "train-1234567-0000.parquet",
    ]
    assert [p.name for p in read_run(run.path).parts] == names
    lines = [json.loads(line) for line in (run.path / "manifest.jsonl").read_text().splitlines()]
    assert [(e["phase"], e["step"], e["rows"]) for e in lines] == [
        ("train", 12, 1),
        ("train", 12, 1),
        ("eval", 12, 1),
        ("train", 1_234_567, 1),
    ]


def test_a_part_has_page_checksums_and_the_schema_version(run: RunDir):
    part = run.commit_rollouts("train", 0, some_rollouts(run))
    assert pq.read_schema(part).metadata[b"rlvr.schema_version"] == str(SCHEMA_VERSION).encode()
    table, data = pq.read_table(part), part.read_bytes()
    columns = [pq.read_metadata(part).row_group(0).column(c) for c in range(pq.read_metadata(part).num_columns)]
    pages = range(4, max(c.data_page_offset + c.total_compressed_size for c in columns) - 100)
    caught = 0
    for position in pages[::11]:
        broken = bytearray(data)
        broken[position] ^= 1
        try:
            found = pq.ParquetFile(pa.BufferReader(bytes(broken)), page_checksum_verification=True).read()
        except (OSError, pa.ArrowInvalid):
            caught += 1
        else:
            assert found.equals(table), (
                position
            )  # a byte that carries no data, for instance in a page header's statistics
    assert caught > len(pages[::11]) / 2


def test_a_key_is_committed_once(run: RunDir):
    run.commit_rollouts("train", 0, some_rollouts(run))
    before = tree(run.path)
    with pytest.raises(AssertionError, match="already committed"):
        run.commit_rollouts("train", 0, [a_rollout(run.id, 9), a_rollout(run.id, 1)])
    with pytest.raises(AssertionError, match="same key"):
        run.commit_rollouts("train", 0, [a_rollout(run.id, 9), a_rollout(run.id, 9, response="another")])
    with pytest.raises(AssertionError):
        run.commit_rollouts("train", 1, [a_rollout(run.id, 9)])  # a row of step 0
    with pytest.raises(AssertionError):
        run.commit_rollouts("train", 0, [a_rollout("another-run", 9)])
    assert tree(run.path) == before
    run.commit_rollouts("train", 0, [a_rollout(run.id, 1, sample_index=1)])


def test_a_key_is_committed_once_across_sessions(finished: Path):
    with RunDir.resume(finished) as run, pytest.raises(AssertionError, match="already committed"):
        run.commit_rollouts("train", 0, [a_rollout(run.id, 4)])


def test_committed_keys(finished: Path):
    with RunDir.resume(finished) as run:
        assert run.committed_keys("train", 0) == {("train", 0, f"q{i}", 0) for i in range(6)}
        assert run.committed_keys("eval") == {("eval", 1, f"q{i}", 0) for i in range(3)}
        assert run.committed_keys("eval", 0) == set()
        assert len(run.committed_keys()) == 9
        run.commit_rollouts("train", 1, [a_rollout(run.id, step=1)])
        assert run.committed_keys(step=1) == run.committed_keys("eval") | {("train", 1, "q0", 0)}


def test_missing_samples_are_those_not_committed(finished: Path):
    with RunDir.resume(finished) as run:
        assert run.missing_indices("train", 0, "q1", num_samples=3) == [1, 2]
        run.commit_rollouts("train", 0, [a_rollout(run.id, 1, sample_index=i) for i in (9, 2, 64)])
        assert run.missing_indices("train", 0, "q1", num_samples=11) == [1, 3, 4, 5, 6, 7, 8, 10]
        assert run.missing_indices("train", 0, "another", num_samples=2) == [0, 1]
        assert run.missing_indices("train", 7, "q1", num_samples=2) == [0, 1]
        assert run.missing_indices("train", 0, "q1", num_samples=0) == []
        assert (run.num_rollouts("train", 0), run.num_rollouts("eval", 1), run.num_rollouts("eval", 0)) == (9, 3, 0)
        with pytest.raises(AssertionError, match=r"already committed.*q1.*64"):
            run.commit_rollouts("train", 0, [a_rollout(run.id, 1, sample_index=i) for i in (63, 64)])
    with RunDir.resume(finished) as run:
        assert run.missing_indices("train", 0, "q1", num_samples=66) == [1, *range(3, 9), *range(10, 64), 65]


@settings(max_examples=8)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 300)), unique=True, min_size=1, max_size=40), st.data())
def test_keys_in_memory_are_the_keys_given(keys: list[tuple[str, int]], data: st.DataObject):
    cut = data.draw(st.integers(0, len(keys)))
    held = bits_of_keys(keys[:cut])
    fresh = bits_of_keys(keys[cut:])
    assert overlap(held, fresh) == []
    merge(held, fresh)
    assert sorted((who, i) for who, bits in held.items() for i in bit_positions(bits)) == sorted(keys)
    assert overlap(held, bits_of_keys(keys[:1])) == [keys[0]]


@pytest.mark.parametrize("index", [-1, 2**40])
def test_a_part_with_an_impossible_sample_index_is_set_aside(run: RunDir, index: int):
    part = run.commit_rollouts("train", 0, [a_rollout(run.id, 0)])
    table = pq.read_table(part).set_column(5, rollout_schema().field("sample_index"), pa.array([index], pa.int64()))
    run.close()
    pq.write_table(table, part.with_name("train-000000-0001.parquet"))
    with RunDir.resume(run.path) as again:
        assert again.num_rollouts("train", 0) == 1
        assert f"a sample index in it is {index}" in " ".join(again.notices)


def test_parts_are_read_one_at_a_time(finished: Path):
    parts = [t.to_pydict() for t in read_parts(finished, phase="train", columns=["example_id"])]
    assert parts == [{"example_id": []}, {"example_id": ["q0", "q1", "q2"]}, {"example_id": ["q3", "q4", "q5"]}]


def test_read_rollouts_chooses_rows_and_columns(finished: Path):
    assert read_rollouts(finished).num_rows == 9
    assert read_rollouts(finished, phase="eval")["step"].to_pylist() == [1, 1, 1]
    assert read_rollouts(finished, phase="train", step=0, columns=["example_id"]).to_pydict() == {
        "example_id": [f"q{i}" for i in range(6)]
    }
    assert read_rollouts(finished, columns=["reward", "prompt_ids", "phase"]).column_names == [
        "reward",
        "prompt_ids",
        "phase",
    ]
    empty = read_rollouts(finished, phase="eval", step=7)
    assert empty.num_rows == 0
    assert empty.schema == rollout_schema()
    with pytest.raises(AssertionError):
        read_rollouts(finished, columns=["rewrad"])


# Metrics


def metrics_of(run: Path) -> dict[tuple[int, str, str], float]:
    table = pq.read_table(run / "metrics.parquet")
    rows = table.to_pylist()
    values = {(r["step"], r["phase"], r["name"]): r["value"] for r in rows}
    assert len(values) == len(rows)
    return values


def test_metrics_are_long_form_and_replaced_by_key(run: RunDir):
    assert read_run(run.path).metrics is None
    run.commit_metrics(0, "train", {"loss": 0.5, "reward/mean": math.nan, "grad": math.inf})
    run.commit_metrics(0, "eval", {"loss": 0.25})
    run.commit_metrics(0, "train", {"loss": 0.75, "more": -math.inf})
    values = metrics_of(run.path)
    assert math.isnan(values.pop((0, "train", "reward/mean")))
    assert values == {
        (0, "train", "grad"): math.inf,
        (0, "eval", "loss"): 0.25,
        (0, "train", "loss"): 0.75,
        (0, "train", "more"): -math.inf,
    }
    table = pq.read_table(run.path / "metrics.parquet")
    assert table.column_names == ["step", "phase", "name", "value", "wall_seconds", "gpu_seconds"]
    assert table["gpu_seconds"].to_pylist() == [None] * 5
    assert read_run(run.path).metrics == run.path / "metrics.parquet"
    assert findings(run.path) == []


def test_metrics_of_several_steps_are_one_commit(run: RunDir):
    run.commit_metrics(1, "train", {"loss": 9.0, "grad": 1.0})
    run.commit_metrics(1, "eval", {"loss": 8.0})
    run.commit_metric_rows("train", {1: {"loss": 0.5}, 2: {"loss": 0.25, "grad": 2.0}, 3: {}})
    assert metrics_of(run.path) == {
        (1, "train", "grad"): 1.0,
        (1, "eval", "loss"): 8.0,
        (1, "train", "loss"): 0.5,
        (2, "train", "loss"): 0.25,
        (2, "train", "grad"): 2.0,
    }
    before = tree(run.path)
    run.commit_metric_rows("train", {})
    run.commit_metric_rows("train", {4: {}})
    assert tree(run.path) == before
    assert len(before["manifest.jsonl"].splitlines()) == 3


def test_metrics_that_are_committed_late_keep_their_wall_seconds(run: RunDir):
    run.commit_metric_rows("train", {1: {"loss": 0.5}, 2: {"loss": 0.25}}, wall_seconds={1: 3.0, 2: 4.5})
    run.commit_metric_rows("train", {2: {"grad": 1.0}, 3: {"loss": 0.1}}, wall_seconds={2: 5.0})
    table = pq.read_table(run.path / "metrics.parquet").to_pylist()
    found = {(r["step"], r["name"]): r["wall_seconds"] for r in table}
    now = found.pop((3, "loss"))
    assert found == {(1, "loss"): 3.0, (2, "loss"): 4.5, (2, "grad"): 5.0}
    assert 0 <= now <= run.wall_seconds


def test_metrics_and_their_clock_continue_after_resuming(tmp_path: Path):
    with RunDir.create(tmp_path, "sft", name="r", metadata={}) as run:
        time.sleep(0.05)
        run.commit_metrics(0, "train", {"loss": 1.0})
    first = read_run(run.path).metadata["wall_seconds"]
    assert first >= 0.05
    time.sleep(0.3)  # a pause between sessions does not count
    with RunDir.resume(run.path) as run:
        assert first <= run.wall_seconds < first + 0.3
        run.commit_metrics(1, "train", {"loss": 0.5})
        run.commit_metrics(2, "train", {"loss": 0.25})
    walls = pq.read_table(run.path / "metrics.parquet")["wall_seconds"].to_pylist()
    assert len(walls) == 3
    assert walls == sorted(walls)
    assert walls[1] >= first


def test_the_clock_of_a_killed_session_is_taken_from_its_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    run = RunDir.create(tmp_path, "sft", name="r", metadata={})
    monkeypatch.setattr(run, "_session_start", time.monotonic() - 100)
    run.commit_metrics(0, "train", {"loss": 1.0})
    run.close()  # run.json still has the seconds from opening, as after a kill
    with RunDir.resume(run.path) as run:
        assert run.wall_seconds >= 100


# run.json and the status of a run


def test_a_generated_run_id_says_command_model_dataset_and_time(tmp_path: Path):
    ids = set()
    for _ in range(5):
        with RunDir.create(tmp_path, "eval", about=["runs/q0-sft/model", "arithmetic"], metadata={}) as run:
            assert re.fullmatch(r"eval-q0-sft-arithmetic-\d{8}-\d{4}(-\d)?", run.id)
            assert run.path == tmp_path / run.id
            ids.add(run.id)
    assert len(ids) == 5


@pytest.mark.parametrize(
    ("about", "says"),
    [
        (["tiny-math (built in; name another with --model)", "arithmetic"], "tiny-math-arithmetic-"),
        (["Qwen/Qwen2.5-Math-1.5B", "hf:org/name"], "Qwen2.5-Math-1.5B-name-"),
        (["../a b/model-merged/", "/data/my questions.jsonl"], "a-b-my-questions-"),
        (["model", ""], "model-"),
        (["...", "数学", "\x1b[2J/\x00"], ""),
        (["x" * 500, "-" * 500], "x" * 32 + "-"),
        ([], ""),
    ],
)
def test_a_generated_run_id_is_safe_whatever_it_is_about(tmp_path: Path, about, says):
    with RunDir.create(tmp_path, "grpo", about=about, metadata={}) as run:
        assert re.fullmatch(re.escape(f"grpo-{says}") + r"\d{8}-\d{4}", run.id)
        assert RUN_NAME.fullmatch(run.id)


def test_run_json_describes_the_run(run: RunDir):
    on_disk = read_metadata(run.path)
    assert on_disk == run.metadata
    assert on_disk["argv"] == ["rlvr", "grpo"]
    assert (on_disk["run_id"], on_disk["command"], on_disk["status"]) == ("a-run", "grpo", "running")
    assert on_disk["schema_version"] == SCHEMA_VERSION
    assert on_disk["created_at"] <= on_disk["updated_at"]
    run.update(dataset={"name": "gsm8k", "rows": 7473}, note="\ud800 😀")
    again = read_metadata(run.path)
    assert again["dataset"] == {"name": "gsm8k", "rows": 7473}
    assert again["argv"] == ["rlvr", "grpo"]
    assert again["created_at"] == on_disk["created_at"]
    with pytest.raises(AssertionError):
        run.update(run_id="another")


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (None, "finished"),
        (ValueError("no"), "failed"),
        (Interrupted(), "interrupted"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_the_status_says_how_the_context_was_left(tmp_path: Path, error: BaseException | None, status: str):
    with_error = pytest.raises(type(error)) if error else pytest.MonkeyPatch.context()
    with with_error, RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        assert read_run(run.path).metadata["status"] == "running"
        if error:
            raise error
    assert read_run(tmp_path / "r").metadata["status"] == status
    with RunDir.resume(tmp_path / "r") as run:
        assert read_run(run.path).metadata["status"] == "running"
        run.finish("interrupted")
    assert read_run(tmp_path / "r").metadata["status"] == "interrupted"


HOSTILE_NAMES = [
    *("../x", "../../etc/x", "/etc/x", "/tmp/x", "a/b", "a/../b", "./x", ".", "..", "...", ".hidden", "-rf", "--help"),
    *("_x", "a b", " a", "a ", "a\n", "\na", "a\tb", "a\0b", "\0", "a\\b", "..\\x", "~", "~root", "$HOME", "`id`"),
    *("$(id)", "a;b", "a|b", "a&b", "a'b", 'a"b', "a*b", "a?b", "[a]", "{a}", "a:b", "C:", "a=b", "a,b", "%2e%2e", "é"),
    *("数学", "😀", "a\u202eb", "a\ud800", "\x1b[2J", "a\x7f", "a\x85", "x" * 129, "a" * 5000, "//x", "file:///x"),
]


def test_hostile_run_names_create_no_file(tmp_path: Path):
    root = tmp_path / "deep" / "runs"
    root.mkdir(parents=True)
    assert len(set(HOSTILE_NAMES)) >= 50
    for name in HOSTILE_NAMES:
        with pytest.raises(RlvrError, match="cannot be the name of a run") as caught:
            RunDir.create(root, "eval", name=name, metadata={})
        assert all(c.isprintable() or c == "\n" for c in str(caught.value)), name
    assert list(tmp_path.rglob("*")) == [tmp_path / "deep", root]


def test_a_name_that_is_a_link_out_of_the_root_is_not_followed(tmp_path: Path):
    outside, root = tmp_path / "outside", tmp_path / "runs"
    outside.mkdir()
    root.mkdir()
    (root / "link").symlink_to(outside)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    for name in ("link", "dangling"):
        with pytest.raises(RlvrError, match="exists already"):
            RunDir.create(root, "eval", name=name, metadata={})
    assert tree(tmp_path) == {"runs/link": str(outside), "runs/dangling": str(tmp_path / "nowhere")}


def test_a_name_is_used_once(finished: Path):
    before = tree(finished.parent)
    with pytest.raises(RlvrError, match="exists already") as caught:
        RunDir.create(finished.parent, "grpo", name="done", metadata={})
    assert caught.value.hint == "Choose another name with --run, or resume it: --resume done"
    assert tree(finished.parent) == before


def test_metadata_that_is_not_json_leaves_no_directory(tmp_path: Path):
    with pytest.raises(TypeError):
        RunDir.create(tmp_path, "eval", name="r", metadata={"path": tmp_path})
    assert list(tmp_path.iterdir()) == []


# One writer


def test_the_error_of_a_second_writer_names_the_first(run: RunDir):
    start = time.monotonic()
    with pytest.raises(RlvrError, match="is being written by") as caught:
        RunDir.resume(run.path)
    assert f"process {os.getpid()} on {os.uname().nodename} since 20" in caught.value.problem
    assert time.monotonic() - start < 1
    run.commit_rollouts("train", 0, some_rollouts(run))  # the first writer still works
    run.close()
    RunDir.resume(run.path).close()


FORKER = """
import os, signal, sys
from rlvr_cli.runs.run_dir import RunDir
run = RunDir.create(sys.argv[1], "eval", name="r", metadata={})
if os.fork() == 0:
    run.__exit__(None, None, None)
    try:
        run.update(note="from the child")
    except AssertionError:
        print("refused", flush=True)
    sys.stdin.read()
    print("was alive", flush=True)
    os._exit(0)
signal.pause()
"""


def test_a_forked_child_neither_writes_nor_keeps_the_lock(tmp_path: Path):
    command, environment = [sys.executable, "-c", FORKER, str(tmp_path)], os.environ | {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=environment) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "refused\n"
        with pytest.raises(RlvrError, match=f"written by process {process.pid}"):
            RunDir.resume(tmp_path / "r")
        process.kill()
        process.wait()
        assert read_run(tmp_path / "r").metadata["status"] == "running"
        RunDir.resume(tmp_path / "r").close()
        process.stdin.close()
        assert process.stdout.read() == "was alive\n"


def test_resuming_a_directory_that_is_not_a_run_creates_no_file(tmp_path: Path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RlvrError, match=r"run\.json"):
            RunDir.resume(path)
    assert list(tmp_path.iterdir()) == []


# Damage by a kill or by hand


def test_a_manifest_torn_at_any_byte_of_its_last_line_loses_nothing(tmp_path: Path):
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, some_rollouts(run))
        whole = (run.path / "manifest.jsonl").read_bytes()
        run.commit_rollouts("train", 1, some_rollouts(run, step=1))
        both = (run.path / "manifest.jsonl").read_bytes()
    as_killed(run.path)
    for end in range(len(whole), len(both), 17):
        copy = tmp_path / f"copy-{end}"
        shutil.copytree(run.path, copy)
        (copy / "manifest.jsonl").write_bytes(both[:end])
        assert read_rollouts(copy).num_rows == 3  # the second commit was not acknowledged
        with RunDir.resume(copy) as resumed:
            assert len(resumed.committed_keys()) == 6  # but its part is whole
            assert any("incomplete line" in n for n in resumed.notices) == (end > len(whole))
            assert any("has been adopted" in n for n in resumed.notices)
        assert (copy / "manifest.jsonl").read_bytes() == both
        assert findings(copy) == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "line 3"),
        (b"", "line 3"),
        (b"[]", "not a JSON object"),
        (b"{}", "keys"),
        (b"\xff\xfe", "line 3"),
        (b"[" * 100_000, "line 3"),
        ("rollouts/../../secret.parquet", "not the path of a part"),
        ("/etc/passwd", "not the path of a part"),
        ("rollouts/train-000000-0000.parquet", "is listed twice"),
        ("rollouts/eval-000000-0000.parquet", "not the path of a part"),
        ("rollouts/train-000009-0000.parquet", "not the path of a part"),
        ("rollouts/train-000000-0000.parquet\n", "not the path of a part"),
        ("run.json", "not the path of a part"),
        (("rows", "3"), "rows is"),
        (("step", True), "step is"),
        (("schema_version", SCHEMA_VERSION + 1), "newer rlvr"),
        (("schema_version", 0), "schema_version is 0"),
    ],
)
def test_a_bad_line_of_the_manifest_is_named(finished: Path, line: bytes | str | tuple, reason: str):
    manifest = finished / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines()
    entry = json.loads(lines[2])
    if isinstance(line, str):
        line = json.dumps(entry | {"path": line}).encode()
    elif isinstance(line, tuple):
        line = json.dumps(entry | {line[0]: line[1]}).encode()
    lines[2] = line
    manifest.write_bytes(b"\n".join(lines) + b"\n")
    for read in (read_run, read_rollouts, RunDir.resume):
        with pytest.raises(RlvrError, match=re.escape(reason)) as caught:
            read(finished)
        assert "newer" in str(caught.value) or "manifest.jsonl" in str(caught.value)
    assert any(reason in problem for problem in findings(finished))


@pytest.mark.parametrize("name", ["run.json", "manifest.jsonl"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff", b"null", b"[" * 100_000])
def test_a_missing_or_broken_index_is_named(finished: Path, name: str, content: bytes | None):
    file = finished / name
    file.unlink()
    if content is not None:
        file.write_bytes(content + b"\n")
    for read in (read_run, read_rollouts, RunDir.resume):
        with pytest.raises(RlvrError, match=re.escape(str(file))):
            read(finished)
    assert any(str(file) in problem for problem in findings(finished))


@pytest.mark.parametrize(
    "change",
    [
        {"schema_version": SCHEMA_VERSION + 1},
        {"schema_version": 0},
        {"schema_version": "1"},
        {"run_id": "../x"},
        {"run_id": 3},
        {"created_at": None},
        {"config": None},
        {"facts": [1]},
        {"sampler": "x"},
        {"wall_seconds": "1"},
        {"wall_seconds": float("inf")},
        {"facts": {"x": [float("nan")]}},
    ],
)
def test_an_invalid_run_json_is_rejected(finished: Path, change: dict):
    file = finished / "run.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(RlvrError, match=re.escape(str(finished))):
        read_run(finished)


def test_any_flipped_byte_of_a_part_is_detected(finished: Path):
    part = finished / "rollouts" / "train-000000-0001.parquet"
    data = part.read_bytes()
    generator = random.Random(0)
    for position in [0, len(data) - 1, *generator.sample(range(len(data)), 60)]:
        broken = bytearray(data)
        broken[position] ^= 1 << generator.randrange(8)
        part.write_bytes(broken)
        assert [p for p in findings(finished) if str(part) in p] == findings(finished) != []
        with pytest.raises(RlvrError, match=re.escape(str(part))):
            read_rollouts(finished)
        read_rollouts(finished, phase="eval")  # the other parts are intact
    part.write_bytes(data)
    assert findings(finished) == []


def test_any_flipped_byte_of_the_metrics_is_detected(finished: Path):
    file = finished / "metrics.parquet"
    data = file.read_bytes()
    for position in range(0, len(data), 397):
        broken = bytearray(data)
        broken[position] ^= 64
        file.write_bytes(broken)
        (problem,) = findings(finished)
        assert str(file) in problem
        manifest = (finished / "manifest.jsonl").read_bytes()
        with pytest.raises(RlvrError, match=re.escape(str(file))):
            RunDir.resume(finished)
        assert (finished / "manifest.jsonl").read_bytes() == manifest
    file.write_bytes(data)
    assert findings(finished) == []


@pytest.mark.parametrize("change", ["truncate", "empty", "delete", "link", "directory", "fifo", "link to itself"])
def test_a_missing_or_truncated_part_is_named(finished: Path, tmp_path: Path, change: str):
    part = finished / "rollouts" / "eval-000001-0000.parquet"
    data = part.read_bytes()
    part.unlink()
    if change == "truncate":
        part.write_bytes(data[:-1])
    elif change == "empty":
        part.touch()
    elif change == "link":
        (tmp_path / "elsewhere.parquet").write_bytes(data)
        part.symlink_to(tmp_path / "elsewhere.parquet")
    elif change == "directory":
        part.mkdir()
    elif change == "fifo":
        os.mkfifo(part)
    elif change == "link to itself":
        part.symlink_to(part)
    for read in (read_run, read_rollouts, RunDir.resume):
        with pytest.raises(RlvrError, match=re.escape(str(part))):
            read(finished)
    assert any(str(part) in problem for problem in findings(finished))


@pytest.mark.parametrize("name", ["rollouts", "run.json", "manifest.jsonl", "metrics.parquet", ".lock"])
def test_links_within_a_run_are_rejected(finished: Path, tmp_path: Path, name: str):
    (finished / name).rename(tmp_path / "moved")
    (finished / name).symlink_to(tmp_path / "moved")
    before = tree(tmp_path)
    with pytest.raises(RlvrError, match=re.escape(str(finished / name))):
        RunDir.resume(finished)
    if name != ".lock":  # readers ignore the lock
        with pytest.raises(RlvrError, match="symbolic link"):
            read_run(finished)
        assert any("symbolic link" in problem for problem in findings(finished))
    assert tree(tmp_path) == before


def test_a_complete_part_missing_from_the_manifest_is_adopted(finished: Path):
    manifest = finished / "manifest.jsonl"
    lines = manifest.read_bytes().splitlines(keepends=True)
    as_killed(finished)
    manifest.write_bytes(b"".join(lines[:3]))  # as after a kill between the rename and the line of eval-000001
    assert len(read_run(finished).parts) == 2
    assert any("eval-000001-0000.parquet is not in the manifest" in p for p in findings(finished))
    # metrics.parquet was announced on a line that is gone: done by hand, not by a kill.
    (finished / "metrics.parquet").unlink()
    with RunDir.resume(finished) as run:
        assert run.committed_keys("eval", 1) == {("eval", 1, f"q{i}", 0) for i in range(3)}
        assert any("eval-000001-0000.parquet" in n and "has been adopted" in n for n in run.notices)
        assert any("metrics.parquet was missing" in n for n in run.notices)
        run.commit_metrics(1, "eval", {"reward/mean": 1.0})
    assert manifest.read_bytes().count(b"eval-000001-0000.parquet") == 1
    assert findings(finished) == []
    assert metrics_of(finished) == {(1, "eval", "reward/mean"): 1.0}


def test_parts_that_cannot_belong_to_the_run_are_set_aside(finished: Path, tmp_path: Path):
    rollouts = finished / "rollouts"
    with RunDir.create(tmp_path / "other", "grpo", name="other", metadata={}) as other:
        foreign = other.commit_rollouts("train", 0, some_rollouts(other))
    strangers = {
        "train-000000-0002.parquet": (rollouts / "train-000000-0000.parquet").read_bytes(),  # existing keys
        "train-000000-0003.parquet": foreign.read_bytes(),
        "train-000005-0000.parquet": (rollouts / "train-000000-0000.parquet").read_bytes(),  # rows of step 0
        "train-000006-0000.parquet": b"",
        "train-000007-0000.parquet": (rollouts / "train-000000-0000.parquet").read_bytes()[:-1],
        "mine.parquet": (rollouts / "train-000000-0000.parquet").read_bytes(),
    }
    pq.write_table(pa.table({"a": [1]}), rollouts / "eval-000009-0000.parquet")
    strangers["eval-000009-0000.parquet"] = (rollouts / "eval-000009-0000.parquet").read_bytes()
    for name, data in strangers.items():
        (rollouts / name).write_bytes(data)
    for leftover in (rollouts / ".train-000008-0000.parquet.tmp", finished / ".run.json.tmp"):
        leftover.write_bytes(b"half")
    with RunDir.resume(finished) as run:
        assert len(run.notices) == len(strangers)
        for name in strangers:
            assert any(name in notice and "set-aside" in notice for notice in run.notices)
        assert len(run.committed_keys()) == 9
        run.commit_rollouts("train", 0, [a_rollout(run.id, 7)])
    assert {p.name: p.read_bytes() for p in (finished / "set-aside").iterdir()} == {
        f"0-{name}": data for name, data in strangers.items()
    }
    assert not list(finished.rglob(".*.tmp"))
    assert findings(finished) == []
    assert duckdb.connect().execute(f"select count(*) from read_parquet('{rollouts}/*.parquet')").fetchall() == [(10,)]


def test_no_directory_scan_matches_the_temporary_name(run: RunDir):
    import pyarrow.dataset as ds

    run.commit_rollouts("train", 0, some_rollouts(run))
    (run.path / "rollouts" / ".train-000001-0000.parquet.tmp").write_bytes(b"PAR1 half a file")
    assert ds.dataset(run.path / "rollouts", format="parquet").count_rows() == 3
    glob = f"{run.path}/rollouts/*.parquet"
    assert duckdb.connect().execute(f"select count(*) from read_parquet('{glob}')").fetchall() == [(3,)]


def test_an_announcement_of_metrics_without_its_file_is_removed(finished: Path):
    as_killed(finished)
    manifest = finished / "manifest.jsonl"
    before = manifest.read_bytes()
    announcement = json.loads(before.splitlines()[-1]) | {"sha256": "0" * 64}
    assert announcement["path"] == "metrics.parquet"
    manifest.write_bytes(before + json.dumps(announcement).encode() + b"\n")
    assert findings(finished) == []  # as while the writer is between the line and the rename
    with RunDir.resume(finished):
        assert manifest.read_bytes() == before
    as_killed(finished)
    # Two announcements without their file cannot come from a kill.
    manifest.write_bytes(before + 2 * (json.dumps(announcement).encode() + b"\n"))
    assert len(findings(finished)) == 1
    with pytest.raises(RlvrError, match=r"metrics\.parquet is damaged"):
        RunDir.resume(finished)


# Grades by other graders


def a_grade(run_id: str, index: int = 0, **values) -> Regrade:
    return factories.a_grade(**{"run_id": run_id, "phase": "train", "example_id": f"q{index}", **values})


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
        assert run.last_attempt("math_verify", "train") is None
        path = run.commit_grades("train", 0, [a_grade(run.id, i) for i in range(4)])
        run.commit_grades("train", 0, [a_grade(run.id, 4)])
        run.commit_grades(
            "train", 0, [a_grade(run.id, 0, grader="mine.py:grade", grader_sha256="ab", grade_error="\ud800")]
        )
        run.commit_grades("train", 0, [a_grade(run.id, 0, attempt=1)])
        assert run.last_attempt("math_verify", "train") == (1, None)
        assert run.last_attempt("math_verify", "eval") is None
        assert run.last_attempt("mine.py:grade", "train") == (0, "ab")
        assert run.graded_keys("math_verify", "train", 0, attempt=0) == {(f"q{i}", 0) for i in range(5)}
        assert run.graded_keys("math_verify", "train", 0, attempt=1) == {("q0", 0)}
        assert run.graded_keys("math_verify", "eval", 1, attempt=0) == set()
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
        assert run.graded_keys("math_verify", "train", 0, attempt=0) == {(f"q{i}", 0) for i in range(5)}
    assert read_run(finished).fingerprint != info.fingerprint


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
        assert run.graded_keys("math_verify", "train", 0, attempt=0) == {(f"q{i}", 0) for i in range(3)}
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


# A disk that is full, read-only, or limited


FAULTY_POINTS = ("write", "write.torn", "rename", "renamed", "manifest", "manifest.torn")


@pytest.mark.parametrize("point", FAULTY_POINTS)
def test_a_full_disk_at_any_point_of_a_commit_changes_nothing(run: RunDir, monkeypatch: pytest.MonkeyPatch, point: str):
    run.commit_rollouts("train", 0, some_rollouts(run))
    run.commit_metrics(0, "train", {"loss": 1.0})
    before = tree(run.path)
    more = some_rollouts(run, step=1)
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        with pytest.raises(RlvrError, match=r"Cannot write .*(train-000001|manifest).*No space left") as caught:
            run.commit_rollouts("train", 1, more)
    assert "Free some space" in caught.value.hint
    assert tree(run.path) == before
    faults.fault_point("")  # without the variable the count starts again from one
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        with pytest.raises(RlvrError, match=r"(metrics|manifest).*No space left"):
            run.commit_metrics(1, "train", {"loss": 2.0})
    if point != "renamed":
        assert tree(run.path) == before
    assert findings(run.path) == []
    faults.fault_point("")
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        with pytest.raises(RlvrError, match=r"(grades|manifest).*No space left"):
            run.commit_grades("train", 0, [a_grade(run.id)])
    assert findings(run.path) == []
    run.commit_grades("train", 0, [a_grade(run.id)])
    run.commit_rollouts("train", 1, more)  # once there is space again, the same process continues
    run.commit_metrics(1, "train", {"loss": 3.0})
    assert metrics_of(run.path) == {(0, "train", "loss"): 1.0, (1, "train", "loss"): 3.0}
    assert findings(run.path) == []
    run.close()
    with RunDir.resume(run.path) as resumed:
        assert len(resumed.committed_keys()) == 6
        assert resumed.notices == []


@pytest.mark.parametrize("point", ["create", "write", "write.torn", "rename"])
def test_a_run_that_cannot_be_created_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str):
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        with pytest.raises(RlvrError, match="No space left"):
            RunDir.create(tmp_path, "eval", name="r", metadata={})
    assert list(tmp_path.iterdir()) == []
    RunDir.create(tmp_path, "eval", name="r", metadata={}).close()


@pytest.mark.parametrize("point", ["write", "write.torn", "rename"])
def test_run_json_survives_a_full_disk(run: RunDir, monkeypatch: pytest.MonkeyPatch, point: str):
    before = tree(run.path)
    with monkeypatch.context() as patch:
        patch.setenv("RLVR_FAULT", f"{point}:1:enospc")
        run.update(note="new")  # in the space that was reserved
    assert tree(run.path).keys() == before.keys()
    assert read_run(run.path).metadata["note"] == "new"


def test_a_full_disk_does_not_hide_the_original_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def work() -> None:
        with RunDir.create(tmp_path, "eval", name="r", metadata={}):
            monkeypatch.setenv("RLVR_FAULT", "write:1:enospc")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        work()
    monkeypatch.delenv("RLVR_FAULT")
    RunDir.resume(tmp_path / "r").close()  # the lock was released


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 256 KB."""
    directory = Path(tempfile.mkdtemp())
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(directory)]
    try:
        mounted = shutil.which("mount") and subprocess.run(mount, capture_output=True).returncode == 0
        if not mounted:
            pytest.skip("mounting a tmpfs takes root")
        yield directory
        subprocess.run(["umount", str(directory)], check=True)
    finally:
        directory.rmdir()


def test_a_disk_that_fills_up_keeps_what_was_committed(small_disk: Path):
    noise = random.Random(0)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(64 * 1024))
    run = RunDir.create(small_disk, "grpo", name="r", metadata={})
    committed = 0

    def fill() -> None:
        nonlocal committed
        while True:
            text = "".join(chr(noise.randrange(32, 0x2000)) for _ in range(3000))
            run.commit_rollouts("train", committed, [a_rollout(run.id, step=committed, response=text)])
            committed += 1

    with pytest.raises(RlvrError, match=rf"Cannot write {run.path}.*No space left on device") as caught:
        fill()
    assert caught.value.hint == "Free some space on that disk."
    assert committed > 3
    for _ in range(3):  # fill the last bytes, then fail
        with pytest.raises(RlvrError, match="No space left"):
            run.update(note="x" * 50_000)
        assert findings(run.path) == []
        assert not list(run.path.rglob("*.tmp"))
        assert read_rollouts(run.path)["step"].to_pylist() == list(range(committed))
    ballast.unlink()
    run.commit_metrics(0, "train", {"loss": 1.0})
    run.finish("finished")
    run.close()
    assert findings(run.path) == []
    with RunDir.resume(run.path) as run:
        assert len(run.committed_keys()) == committed


FILE_LIMIT = """
import resource, sys
sys.path[:0] = sys.argv[2:]
import test_run_dir
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.run_dir import RunDir
run = RunDir.create(sys.argv[1], "eval", name="r", metadata={})
run.commit_rollouts("train", 0, test_run_dir.some_rollouts(run))
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    text = "".join(chr(i) for i in range(32, 0xD000))
    run.commit_rollouts("train", 1, [test_run_dir.a_rollout(run.id, step=1, response=text)])
except RlvrError as error:
    print(error)
run.commit_rollouts("train", 2, [test_run_dir.a_rollout(run.id, step=2)])
"""


def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path: Path):
    paths = [SOURCE, Path(__file__).parent, Path(factories.__file__).parent]
    command = [sys.executable, "-c", FILE_LIMIT, str(tmp_path), *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert re.search(r"Cannot write .*train-000001-0000\.parquet: File too large", done.stdout)
    assert "ulimit" in done.stdout
    assert findings(tmp_path / "r") == []
    assert read_rollouts(tmp_path / "r", columns=["step"])["step"].to_pylist() == [0, 0, 0, 2]
    assert not list(tmp_path.rglob("*.tmp"))


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A directory of this process, which drops root for the test, because root may write anywhere."""
    directory = Path(tempfile.mkdtemp())
    user = os.geteuid()
    if user == 0:
        os.chown(directory, 65534, -1)
        os.seteuid(65534)
    yield directory
    os.seteuid(user)
    for path in [directory, *directory.rglob("*")]:
        path.chmod(stat.S_IRWXU)
    shutil.rmtree(directory)


def test_a_directory_that_cannot_be_written_is_named(unprivileged: Path):
    with RunDir.create(unprivileged, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("train", 0, some_rollouts(run))
    unprivileged.chmod(0o555)
    with pytest.raises(RlvrError, match=rf"Cannot write {unprivileged}/s: Permission denied") as caught:
        RunDir.create(unprivileged, "eval", name="s", metadata={})
    assert "--runs-dir" in caught.value.hint
    with pytest.raises(RlvrError, match=rf"Cannot write {unprivileged}/deeper: Permission denied"):
        RunDir.create(unprivileged / "deeper", "eval", metadata={})
    for path in (run.path, run.path / "rollouts"):
        path.chmod(0o555)
    for path in run.path.iterdir():
        if path.is_file():
            path.chmod(0o444)
    with pytest.raises(RlvrError, match=r"Cannot write .*\.lock: Permission denied"):
        RunDir.resume(run.path)
    assert read_rollouts(run.path).num_rows == 3  # reading takes no lock
    assert findings(run.path) == []


def test_each_write_is_durable_before_the_next_step_relies_on_it(run: RunDir, monkeypatch: pytest.MonkeyPatch):
    """A power failure cannot be tested, but the order of the system calls can."""
    calls = []
    fsync, rename, manifest = os.fsync, os.replace, os.stat(run.path / "manifest.jsonl").st_ino

    def spied_fsync(descriptor: int) -> None:
        state = os.fstat(descriptor)
        kind = "manifest" if state.st_ino == manifest else "directory" if stat.S_ISDIR(state.st_mode) else "file"
        calls.append((f"fsync {kind}", state.st_size if kind == "file" else 0))
        fsync(descriptor)

    def spied_rename(source: Path, target: Path) -> None:
        calls.append(("replace", Path(source).stat().st_size))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", spied_fsync)
    monkeypatch.setattr(os, "replace", spied_rename)
    atomic_write(run.path / "x", b"whole")
    assert calls == [("fsync file", 5), ("replace", 5), ("fsync directory", 0)]
    assert (run.path / "x").read_bytes() == b"whole"
    calls.clear()
    size = run.commit_rollouts("train", 0, some_rollouts(run)).stat().st_size
    assert calls == [("fsync file", size), ("replace", size), ("fsync directory", 0), ("fsync manifest", 0)]
    calls.clear()
    run.commit_metrics(0, "train", {"loss": 1.0})
    assert [name for name, _ in calls] == ["fsync manifest", "fsync file", "replace", "fsync directory"]


# Readers


def test_the_latest_run_is_by_creation_not_by_name(tmp_path: Path):
    for name in ("b", "c", "a"):
        with RunDir.create(tmp_path, "eval", name=name, metadata={}):
            pass
    (tmp_path / "not-a-run").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / ".b.tmp").symlink_to(tmp_path / "b")
    assert latest_run(tmp_path) == tmp_path / "a"
    with RunDir.resume(tmp_path / "b"):
        assert latest_run(tmp_path) == tmp_path / "a"


def test_an_unreadable_run_does_not_hide_the_others(tmp_path: Path):
    for name in ("a", "b", "c"):
        with RunDir.create(tmp_path, "eval", name=name, metadata={}):
            pass
    (tmp_path / "c" / "run.json").write_text("{")
    assert latest_run(tmp_path) == tmp_path / "b"
    newer = json.loads((tmp_path / "b" / "run.json").read_text()) | {"schema_version": 1000}
    (tmp_path / "b" / "run.json").write_text(json.dumps(newer))
    assert latest_run(tmp_path) == tmp_path / "a"
    (tmp_path / "a" / "run.json").unlink()
    (tmp_path / "b" / "run.json").unlink()
    with pytest.raises(RlvrError, match=r"c/run\.json"):
        latest_run(tmp_path)


def test_the_error_for_no_runs_has_a_hint(tmp_path: Path):
    for root in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RlvrError, match="There is no run in") as caught:
            latest_run(root)
        assert "`rlvr eval`" in caught.value.hint


def test_a_run_is_found_by_name_or_path(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    root = finished.parent
    assert resolve_run("done", root) == finished
    assert resolve_run(str(finished), tmp_path) == finished
    monkeypatch.chdir(root)
    assert resolve_run("../runs/done", "elsewhere").resolve() == finished
    for name in ("dome", "../done", "", "\0", "x" * 10_000, "\x1b[2Jdone"):
        with pytest.raises(RlvrError, match="There is no run") as caught:
            resolve_run(name, root)
        assert "done" in caught.value.hint
        assert "\x1b" not in str(caught.value)


def test_an_unknown_run_name_suggests_the_newest_runs(tmp_path: Path):
    for number, name in enumerate(("berry", "mango", "apple", "zebra")):
        RunDir.create(tmp_path, "eval", name=name, metadata={}).close()
        os.utime(tmp_path / name / "run.json", (1e9 - number, 1e9 - number))  # as a copy may leave it
    with pytest.raises(RlvrError) as caught:
        resolve_run("q17", tmp_path)
    assert caught.value.hint == "The newest runs: zebra, apple, mango."
    with pytest.raises(RlvrError) as caught:
        resolve_run("mangos", tmp_path)
    assert caught.value.hint == "Did you mean: mango?"


def test_a_run_can_be_read_while_it_is_written(run: RunDir):
    """A reader in another process never fails and never sees a row disappear."""
    code = """
import sys, time
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts, read_run
seen, reads, until = 0, 0, time.monotonic() + 1.5
print("ready", flush=True)
while time.monotonic() < until:
    rows = read_rollouts(sys.argv[1], columns=["step"]).num_rows
    assert rows >= seen, (rows, seen)
    read_run(sys.argv[1])
    problems = check_run(sys.argv[1]).problems
    assert not problems, problems
    seen, reads = rows, reads + 1
print(reads, seen)
"""
    run.commit_rollouts("train", 0, some_rollouts(run))
    command = [sys.executable, "-c", code, str(run.path)]
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "ready\n"
        step = 1
        while reader.poll() is None:
            run.commit_rollouts("train", step, some_rollouts(run, step=step))
            run.commit_metrics(step, "train", {"loss": float(step)})
            step += 1
        reads, seen = map(int, reader.stdout.readline().split())
    assert reader.returncode == 0
    assert reads > 0  # the number depends on the machine
    assert seen > 6


def test_importing_the_store_is_light():
    code = """
import sys
import rlvr_cli.runs.run_dir
from rlvr_cli.runs.readers import latest_run, read_run
read_run(sys.argv[1]); latest_run(sys.argv[2])
heavy = {"pyarrow", "numpy", "torch", "duckdb", "subprocess", "importlib.metadata"} & sys.modules.keys()
assert not heavy, heavy
"""
    with tempfile.TemporaryDirectory() as root:
        with RunDir.create(root, "eval", name="r", metadata={}) as run:
            run.commit_rollouts("train", 0, some_rollouts(run))
        environment = os.environ | {"PYTHONPATH": str(SOURCE)}
        subprocess.run([sys.executable, "-S", "-c", code, str(run.path), root], check=True, env=environment)


# Faults


def test_the_kill_tests_cover_every_fault_point(request: pytest.FixtureRequest):
    """A new fault point must be added to POINTS in test_run_dir_kill.py."""
    source = "".join(Path(module.__file__).read_text() for module in (run_dir, commits, recovery, files, lock))
    points = set(re.findall(r'fault_point\("([a-z.]+)"\)', source))
    kill_test = Path(__file__).with_name("test_run_dir_kill.py").read_text()
    assert points == set(re.findall(r'"([a-z.]+)"', kill_test.split("POINTS = (")[1].split(")")[0]))


def test_segments_that_a_kill_left_unlisted_are_adopted(tmp_path: Path):
    rows = [factories.a_segment(), factories.a_segment(sample_index=1, finish_reason="stop")]
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        run.commit_segments(0, rows)
        run.commit_segments(3, [replace(rows[0], step=3)])
    manifest = tmp_path / "r/manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("".join(lines[:-1]))
    (tmp_path / "r/segments/.train-000003-0001.parquet.tmp").write_text("half")
    with RunDir.resume(tmp_path / "r") as run:
        assert [notice for notice in run.notices if "has been adopted" in notice]
        assert run.segment_steps() == [0, 3]
        assert (run.segments(0), run.segments(3)) == (rows, [replace(rows[0], step=3)])
    assert manifest.read_text().splitlines()[-1] == lines[-1].strip()
    assert sorted(os.listdir(tmp_path / "r/segments")) == ["train-000000-0000.parquet", "train-000003-0000.parquet"]
    part = tmp_path / "r/segments/train-000003-0000.parquet"
    part.write_bytes(part.read_bytes()[:-1])
    for read in (read_run, RunDir.resume):
        with pytest.raises(RlvrError, match=r"segments/train-000003-0000\.parquet is damaged"):
            read(tmp_path / "r")
