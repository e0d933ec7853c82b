"""The device memory that a training run will need, estimated from the model's config alone."""

from collections.abc import Mapping

from rlvr_cli.config.shared import TrainingConfig
from rlvr_cli.samplers.open import engine_kind

# The most logits held at once on a GPU (models/log_probs.py): three chunks, and those kept.
HEAD_LOGITS = 3 * 2**26 + 5 * 2**24
GUESSED_PROMPT = 256  # tokens


def memory_estimate(
    config: TrainingConfig, shape: Mapping[str, int] | None, *, rows: int, engine: str, on_gpu: bool
) -> dict[str, float]:
    """Peak memory of training in bytes, by purpose; empty when the model's shape is unknown.

    Args:
        shape: parameters, layers, hidden, intermediate, kv_width (key-value heads times head size), vocabulary.
        rows: responses in a micro-batch.
        engine: the sampling engine.
        on_gpu: whether training computes in bfloat16 autocast; otherwise in the weights' precision.
    """
    if not shape:
        return {}
    wide, half = (4, 2) if config.param_dtype == "float32" else (2, 2)
    compute = half if on_gpu else wide
    n, tokens = shape["parameters"], GUESSED_PROMPT + config.sampling_max_tokens
    autocast = n * half if on_gpu and wide == 4 else 0
    memory = {
        "weights, gradients, AdamW": 4.0 * n * wide + autocast,
        "activations of a micro-batch": float(
            rows * tokens * shape["layers"] * (10 * shape["hidden"] + 4 * shape["intermediate"]) * compute
        ),
        "logits": 4.0 * min(HEAD_LOGITS, rows * config.sampling_max_tokens * shape["vocabulary"]),
    }
    if config.kl_coef:
        memory["reference model"] = float(n * wide)
    if config.async_steps:
        memory["the sampling process's weights, and the snapshot it samples from"] = 2.0 * n * wide
    if engine_kind(engine).share is not None:  # it samples in the trainer's memory
        sequences = min(config.rollout_batch_size, config.max_batch_size or 256)
        memory["key-value cache of sampling"] = float(
            sequences * tokens * shape["layers"] * 2 * shape["kv_width"] * compute
        )
    return memory


def memory_line(memory: Mapping[str, float], *, engine: str, utilization: float | None) -> str:
    """The estimate on one line, largest terms first; `utilization` is the share of its device that the engine takes."""
    if not memory:
        return "not known: the model's files are not on this machine"
    parts = sorted(memory.items(), key=lambda item: -item[1])
    text = f"about {_size(sum(memory.values()))}: " + ", ".join(f"{name} {_size(size)}" for name, size in parts)
    return text + (
        f"; in addition {engine_kind(engine).title} takes {utilization:.0%} of its device" if utilization else ""
    )


def _size(bytes: float) -> str:
    return f"{bytes / 2**30:.1f} GiB" if bytes >= 2**30 else f"{bytes / 2**20:.0f} MiB"
