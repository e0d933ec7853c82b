"""The columns of the run store's Parquet files, and the version of its format."""

import functools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pyarrow as pa


SCHEMA_VERSION = 1  # of run.json, the manifest and the Parquet files together


@functools.cache
def rollout_schema() -> "pa.Schema":
    """The columns of a rollout part: the fields of `Rollout`, in their order.

    Token ids are int32 and their log-probabilities float32, as the engines compute them; what is averaged is float64.
    `sampled_at` has microseconds and no time zone (it is UTC).
    """
    import pyarrow as pa

    required = functools.partial(pa.field, nullable=False)

    def list_of(kind: "pa.DataType") -> "pa.DataType":
        return pa.list_(pa.field("element", kind, nullable=False))

    return pa.schema(
        [
            required("run_id", pa.string()),
            required("phase", pa.string()),
            required("step", pa.int64()),
            required("policy_version", pa.int64()),
            required("example_id", pa.string()),
            required("sample_index", pa.int64()),
            required("prompt", pa.string()),
            required("response", pa.string()),
            required("ground_truth", pa.string()),
            required("prompt_ids", list_of(pa.int32())),
            required("response_ids", list_of(pa.int32())),
            required("sampled_logprobs", list_of(pa.float32())),
            required("finish_reason", pa.string()),
            pa.field("stop_reason", pa.string()),
            required("num_prompt_tokens", pa.int32()),
            required("num_response_tokens", pa.int32()),
            required("grader", pa.string()),
            pa.field("format_reward", pa.float64()),
            pa.field("answer_reward", pa.float64()),
            pa.field("reward", pa.float64()),
            pa.field("grade_error", pa.string()),
            pa.field("extracted_answer", pa.string()),
            required("category", pa.string()),
            pa.field("failure_kind", pa.string()),
            pa.field("advantage", pa.float64()),
            pa.field("mean_logprob", pa.float64()),
            pa.field("mean_entropy", pa.float64()),
            required("seed", pa.int64()),
            required("sampled_at", pa.timestamp("us")),
        ],
        metadata={"rlvr.schema_version": str(SCHEMA_VERSION)},
    )


@functools.cache
def grade_schema() -> "pa.Schema":
    """The columns of a part of grades: the fields of `Regrade`, in their order."""
    import pyarrow as pa

    required = functools.partial(pa.field, nullable=False)
    return pa.schema(
        [
            required("run_id", pa.string()),
            required("phase", pa.string()),
            required("step", pa.int64()),
            required("example_id", pa.string()),
            required("sample_index", pa.int64()),
            required("grader", pa.string()),
            required("attempt", pa.int64()),
            pa.field("grader_sha256", pa.string()),
            pa.field("format_reward", pa.float64()),
            pa.field("answer_reward", pa.float64()),
            pa.field("reward", pa.float64()),
            pa.field("grade_error", pa.string()),
            pa.field("extracted_answer", pa.string()),
            required("category", pa.string()),
            pa.field("failure_kind", pa.string()),
        ],
        metadata={"rlvr.schema_version": str(SCHEMA_VERSION)},
    )


@functools.cache
def metrics_schema() -> "pa.Schema":
    """The columns of metrics.parquet; (step, phase, name) is unique in it."""
    import pyarrow as pa

    return pa.schema(
        [
            pa.field("step", pa.int64(), nullable=False),
            pa.field("phase", pa.string(), nullable=False),
            pa.field("name", pa.string(), nullable=False),
            pa.field("value", pa.float64(), nullable=False),
            pa.field("wall_seconds", pa.float64(), nullable=False),  # of work since the run started, pauses left out
            pa.field("gpu_seconds", pa.float64()),
        ],
        metadata={"rlvr.schema_version": str(SCHEMA_VERSION)},
    )
