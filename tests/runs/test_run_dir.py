"""The run store: parts, metrics, run.json, one writer and its readers. Kill tests are in test_run_dir_kill.py."""

import json
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import time
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
from checks import calls_into, findings
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.runs import commits, lock, manifest, recovery, run_dir
from rlvr_cli.runs.readers import (
    RUN_NAME,
    latest_run,
    read_metadata,
    read_parts,
    read_rollouts,
    read_run,
    resolve_run,
)
from rlvr_cli.runs.run_dir import RunDir, short_name
from rlvr_cli.runs.storage import files
from rlvr_cli.runs.storage.keys import bit_positions, bits_of_keys, merge, overlap
from rlvr_cli.runs.storage.parquet import to_rollouts
from rlvr_cli.runs.storage.schemas import rollout_schema
from rlvr_cli.text import storable
from rlvr_cli.types import SCHEMA_VERSION, Rollout, Turn
from stores import a_rollout, as_killed, metrics_of, some_rollouts, tree

SOURCE = Path(rlvr_cli.__file__).parents[1]


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
    for position in pages[::37]:
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
    assert caught > len(pages[::37]) / 2


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


@pytest.fixture(params=[20_000, 1])
def in_memory(request, monkeypatch):
    """How many questions have their keys in memory: all, or one."""
    monkeypatch.setattr("rlvr_cli.runs.storage.spilled.IN_MEMORY", request.param)
    return request.param


def test_committed_keys(finished: Path, in_memory: int):
    with RunDir.resume(finished) as run:
        assert len(run._keys.committed("train", 0)._held) == (6 if in_memory > 6 else 0)  # pyright: ignore
        assert run.committed_keys("train", 0) == {("train", 0, f"q{i}", 0) for i in range(6)}
        assert run.committed_keys("eval") == {("eval", 1, f"q{i}", 0) for i in range(3)}
        assert run.committed_keys("eval", 0) == set()
        assert len(run.committed_keys()) == 9
        run.commit_rollouts("train", 1, [a_rollout(run.id, step=1)])
        assert run.committed_keys(step=1) == run.committed_keys("eval") | {("train", 1, "q0", 0)}


def test_the_keys_of_one_step_of_a_phase_are_held(run: RunDir):
    def held() -> list[tuple]:
        return sorted((phase, step) for _, _, phase, step in run._keys._held)

    for step in range(3):
        run.commit_rollouts("train", step, some_rollouts(run, step=step))
    run.commit_rollouts("eval", 0, some_rollouts(run, phase="eval"))
    assert held() == [("eval", 0), ("train", 2)]
    run.commit_rollouts("train", 1, [a_rollout(run.id, 3, step=1)])  # a step to which the run returns
    assert held() == [("eval", 0), ("train", 1)]
    with pytest.raises(AssertionError, match="already committed"):
        run.commit_rollouts("train", 2, [a_rollout(run.id, 2, step=2)])
    with pytest.raises(AssertionError, match="already committed"):
        run.commit_rollouts("train", 1, [a_rollout(run.id, 3, step=1)])
    assert len(run.committed_keys()) == 13


@pytest.mark.usefixtures("in_memory")
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


def test_a_step_takes_no_longer_the_more_steps_were_before(run: RunDir):
    taken = []
    for step in range(4):
        with calls_into(manifest) as calls:
            assert run.missing_indices("train", step, "q0", num_samples=1) == [0]
            run.commit_rollouts("train", step, [a_rollout(run.id, step=step)], cost={"seconds": 1.0})
            assert run.cost("train", step) == {"seconds": 1.0}
            assert run.committed_keys("train", step) == {("train", step, "q0", 0)}
            assert run.num_rollouts("train", step) == run.rollouts("train", step, columns=["step"]).num_rows == 1
            assert run.segments(step) == []
        taken.append(calls)
    assert taken == 4 * taken[:1]
    assert taken[0]


def test_an_entry_that_is_removed_is_not_found():
    names = ["train-000001-0000", "eval-000001-0000", "train-000000-0000", "train-000001-0001"]
    first, evaluated, second, last = all_ = [
        manifest.entry_of(
            b"", path=f"rollouts/{n}.parquet", rows=1, phase=n.partition("-")[0], step=int(n[-11:-5]), schema_version=1
        )
        for n in names
    ]
    entries = manifest.Entries(all_)
    assert [*entries] == [*entries.of("rollouts")] == all_
    assert entries.last == last
    assert [*entries.of("rollouts", "train", 1)] == [first, last]
    assert [*entries.of("rollouts", "train")] == [first, second, last]
    assert [*entries.of("segments", "train", 1)] == entries.steps("segments") == []
    assert entries.steps("rollouts") == [("train", 1), ("eval", 1), ("train", 0)]
    for left in ([first, evaluated, second], [first, evaluated]):
        entries.remove_last()
        assert [*entries] == left
        assert [*entries.of("rollouts", "train", 1)] == [first]
    assert entries.steps("rollouts") == [("train", 1), ("eval", 1)]
    entries.append(second)
    assert entries.steps("rollouts") == [("train", 1), ("eval", 1), ("train", 0)]


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
    began = time.monotonic()
    with RunDir.resume(run.path) as run:
        assert first <= run.wall_seconds <= first + time.monotonic() - began
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
    with pytest.raises(RlvrError) as caught:
        resolve_run(f"{tmp_path.name}/mangos", tmp_path.parent)
    assert caught.value.hint.startswith(f"Did you mean: {tmp_path.name}/mango")
    for name, hint in (
        ("./mangos", "Did you mean: mango?"),
        (f"{'x' * 300}/q17", "The newest runs: zebra, apple, mango."),
    ):
        with pytest.raises(RlvrError, match="There is no run") as caught:
            resolve_run(name, tmp_path)
        assert caught.value.hint == hint


@pytest.mark.slow
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


def test_unlisted_parts_are_adopted_in_the_order_of_their_commits(tmp_path: Path):
    """As in a copy that was made while the run was written: its manifest is older than its parts."""
    with RunDir.create(tmp_path, "grpo", name="r", metadata={}) as run:
        for step in (0, 1):
            run.commit_segments(step, [factories.a_segment(run_id="r", step=step, policy_version=step)])
            run.commit_rollouts("train", step, some_rollouts(run, step=step))
    manifest = tmp_path / "r/manifest.jsonl"
    lines = manifest.read_text().splitlines(keepends=True)
    manifest.write_text("")
    as_killed(run.path)
    with RunDir.resume(run.path) as run:
        assert len(run.notices) == 4
    assert manifest.read_text() == "".join(lines)
    as_killed(run.path)
    manifest.write_text("".join(lines[i] for i in (1, 3, 0, 2)))  # as an earlier version adopted them: folder by folder
    assert findings(run.path) == []


def test_the_short_name_of_a_file_has_no_ending():
    for name in ("t.csv", "t.csv.gz", "data/t.jsonl.gz", "t.json", "t.parquet"):
        assert short_name(name) == "t"
    assert short_name("runs/q0-sft/model") == "q0-sft"
