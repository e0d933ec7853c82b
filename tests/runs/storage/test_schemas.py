"""The columns of the Parquet files: version 1 never changes, and readers handle older and newer versions."""

from dataclasses import field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from factories import a_rollout
from pages import limited_memory
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.storage.parquet import _table, from_parquet, rollout_table, to_parquet, to_records, version_of
from rlvr_cli.runs.storage.schemas import VERSION_KEY, NewerVersion, arrow_schema, columns_of
from rlvr_cli.types import SCHEMA_VERSION, Float32, Metric, Regrade, Rollout, Since, Turn

NEXT = SCHEMA_VERSION + 1
V1 = Path(__file__).parents[2] / "fixtures/v1/written"
PARTS = {
    Rollout: V1 / "eval/rollouts/eval-000000-0000.parquet",
    Regrade: V1 / "eval/grades/math_verify-eval-000000-0000.parquet",
    Metric: V1 / "eval/metrics.parquet",
}
VERSION_1 = {
    Rollout: """
        run_id: string not null
        phase: string not null
        step: int64 not null
        policy_version: int64 not null
        example_id: string not null
        sample_index: int64 not null
        prompt: string not null
        response: string not null
        ground_truth: string not null
        prompt_ids: list<element: int32 not null> not null
        response_ids: list<element: int32 not null> not null
        sampled_logprobs: list<element: float not null> not null
        finish_reason: string not null
        stop_reason: string
        num_prompt_tokens: int32 not null
        num_response_tokens: int32 not null
        grader: string not null
        format_reward: double
        answer_reward: double
        reward: double
        grade_error: string
        extracted_answer: string
        category: string not null
        failure_kind: string
        advantage: double
        mean_logprob: double
        mean_entropy: double
        seed: int64 not null
        sampled_at: timestamp[us] not null
    """,
    Regrade: """
        run_id: string not null
        phase: string not null
        step: int64 not null
        example_id: string not null
        sample_index: int64 not null
        grader: string not null
        attempt: int64 not null
        grader_sha256: string
        format_reward: double
        answer_reward: double
        reward: double
        grade_error: string
        extracted_answer: string
        category: string not null
        failure_kind: string
    """,
    Metric: """
        step: int64 not null
        phase: string not null
        name: string not null
        value: double not null
        wall_seconds: double not null
        gpu_seconds: double
    """,
}


def later(record, *added):
    """Return the record as a later version with more fields, given as (name, annotation, default)."""
    known = [(f.name, f.type, field(default=f.default)) for f in fields(record)]
    return make_dataclass("Later", [*known, *added], frozen=True)


def as_version(data, version):
    """Return the same file with another schema version in its metadata."""
    table = pq.read_table(pa.BufferReader(data))
    return bytes(to_parquet(table.replace_schema_metadata({VERSION_KEY: str(version)})))


@pytest.mark.parametrize("record", PARTS)
def test_version_1_never_changes(record):
    schema = arrow_schema(record, version=1)
    found = [f"{f.name}: {f.type}{'' if f.nullable else ' not null'}" for f in schema]
    assert found == [line.strip() for line in VERSION_1[record].strip().split("\n")]
    assert schema.equals(pq.read_schema(PARTS[record]), check_metadata=True)


@pytest.mark.parametrize("record", PARTS)
def test_new_columns_come_last_and_raise_the_version(record):
    since = [column.since for column in columns_of(record)]
    assert since == sorted(since)
    assert since[-1] <= SCHEMA_VERSION
    assert arrow_schema(record).names == [f.name for f in fields(record)]
    assert arrow_schema(record).metadata == {VERSION_KEY: str(SCHEMA_VERSION).encode()}


ADDED = [
    (("later_value", Annotated[Float32 | None, Since(NEXT)], None), pa.float32(), None),
    (("later_values", Annotated[tuple[Float32, ...] | None, Since(NEXT)], None), arrow_schema(Rollout).field("sampled_logprobs").type, None),
    (("later_tries", Annotated[int, Since(NEXT)], 7), pa.int64(), 7),
    (("later_source", Annotated[str, Since(NEXT)], "policy"), pa.string(), "policy"),
]  # fmt: skip


@pytest.mark.parametrize(("added", "kind", "older"), ADDED, ids=lambda a: a[0] if isinstance(a, tuple) else "")
def test_newer_columns_are_filled_in_a_file_of_version_1(added, kind, older):
    record, data = later(Rollout, added), PARTS[Rollout].read_bytes()
    table = from_parquet(data, record)
    assert table.schema.equals(arrow_schema(record), check_metadata=True)
    assert table.schema.field(added[0]).type == kind
    assert table[added[0]].to_pylist() == [older] * 32
    before = pq.read_table(pa.BufferReader(data))
    assert table.select(before.column_names).equals(before)
    assert table["turns"].null_count == table["response_mask"].null_count == 32  # added in version 2

    assert from_parquet(data, record, columns=[added[0]]).to_pydict() == {added[0]: [older] * 32}
    some = from_parquet(data, record, columns=["step", added[0], "phase"])
    assert some.column_names == ["step", added[0], "phase"]


class Step(NamedTuple):
    """A value of a list column, with every kind of field."""

    name: str | None
    places: tuple[int, ...]
    turn: Turn | None


def test_a_second_column_of_named_tuples_comes_back():
    steps = Annotated[tuple[Step, ...] | None, Since(NEXT)]
    record = later(Rollout, ("steps", steps, None))
    turns = (Turn("policy", 0, 2), Turn("environment", 2, 3))
    values = [None, (), (Step("a", (1, 2), turns[0]), Step(None, (), None))]
    plain = {f.name: getattr(a_rollout(), f.name) for f in fields(Rollout)}
    rows = [record(**plain | {"turns": turns if value else None, "steps": value}) for value in values]
    data = to_parquet(_table(rows, arrow_schema(record)))
    found = to_records(pq.read_table(pa.BufferReader(data)), record)
    assert found == rows
    assert type(found[2].steps[0]) is Step
    assert type(found[2].steps[0].turn) is type(found[2].turns[0]) is Turn


def test_a_newer_column_needs_a_fitting_default():
    with pytest.raises(AssertionError, match="needs a default"):
        columns_of(make_dataclass("NoDefault", [("value", Annotated[float | None, Since(NEXT)])]))
    for annotation, default in [(int, None), (float | None, 0.0)]:
        with pytest.raises(AssertionError, match="the default of a nullable column must be None"):
            columns_of(make_dataclass("Wrong", [("value", Annotated[annotation, Since(NEXT)], default)]))


def test_a_newer_file_and_columns_of_another_version_are_rejected():
    data = bytes(to_parquet(rollout_table([a_rollout()])))
    assert version_of(data) == SCHEMA_VERSION
    with pytest.raises(NewerVersion, match="newer rlvr") as caught:
        from_parquet(as_version(data, SCHEMA_VERSION + 1), Rollout)
    assert "Upgrade" in caught.value.hint
    table = pq.read_table(pa.BufferReader(data))
    strange = bytes(to_parquet(table.append_column("more", pa.array([1]))))
    with pytest.raises(ValueError, match="its columns do not match"):
        from_parquet(strange, Rollout)
    with pytest.raises(NewerVersion):
        from_parquet(as_version(strange, SCHEMA_VERSION + 1), Rollout)
    for version in ("", "0", "-1", "one"):
        with pytest.raises(ValueError, match="schema version"):
            from_parquet(as_version(data, version), Rollout)
    with pytest.raises(ValueError, match="its columns do not match"):
        from_parquet(data, later(Rollout, ("later_value", Annotated[float | None, Since(1)], None)))


def test_short_memory_is_not_called_a_damaged_file():
    data = bytes(1 << 31)
    with (
        limited_memory(1 << 28),
        pytest.raises(RlvrError, match=r"refused memory or a thread \(malloc of size 2147") as error,
    ):
        from_parquet(data, Rollout)
    assert "ulimit -v" in error.value.hint


# Columns that a version added to those of the version before; runs of it have been written, so that none may be added to it.
ADDED = {
    2: {
        Rollout: [
            "response_mask",
            "turns",
            "shaped_reward",
            "format_term",
            "length_term",
            "language_term",
            "overlong_term",
        ],
        Regrade: [],
    },
    3: {Rollout: ["token_versions", "grade_error_detail"], Regrade: ["grade_error_detail"]},
    4: {Rollout: ["candidate"], Regrade: []},
    5: {Rollout: ["episode"], Regrade: []},
    6: {Rollout: ["turn_advantages", "turn_facts"], Regrade: []},
    7: {Rollout: ["judgement"], Regrade: ["judgement"]},
    8: {Rollout: ["measured"], Regrade: []},
    9: {Rollout: ["own_prompt"], Regrade: []},
}


@pytest.mark.parametrize("version", ADDED)
@pytest.mark.parametrize("record", [Rollout, Regrade])
def test_a_version_that_has_been_written_gets_no_more_columns(record, version):
    before, now = (arrow_schema(record, version=v).names for v in (version - 1, version))
    assert [name for name in now if name not in before] == ADDED[version][record]
    assert max(ADDED) == SCHEMA_VERSION
