"""Models with the shapes of published ones and no numbers: ``from shapes import math_1_5b``."""

from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

SIZES: dict[str, dict[str, Any]] = {  # Qwen2.5
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "3B": {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16},
    "7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152_064, "tie_word_embeddings": False,
    },
}  # fmt: skip


def qwen(
    size: str, *, layers: int | None = None, vocabulary: int | None = None, dtype: torch.dtype = torch.float32
) -> Qwen2ForCausalLM:
    """Qwen2.5 of this size, perhaps with fewer layers or tokens, on the device `meta`, for `fake_cuda(compute=False)`."""
    shape = {"num_key_value_heads": 2, "vocab_size": 151_936, "tie_word_embeddings": True} | SIZES[size]
    if layers is not None:
        shape["num_hidden_layers"] = layers
    if vocabulary is not None:
        shape["vocab_size"] = vocabulary
    config = Qwen2Config(**shape, max_position_embeddings=4096, bos_token_id=None, eos_token_id=0)
    with torch.device("meta"):
        return Qwen2ForCausalLM(config).to(dtype).eval()


def math_1_5b(*, layers: int, vocabulary: int | None = None, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    """Qwen2.5-Math-1.5B with fewer layers, perhaps with fewer tokens."""
    return qwen("1.5B", layers=layers, vocabulary=vocabulary, dtype=dtype)


def shape_of(model: Qwen2ForCausalLM) -> dict[str, int]:
    """What `model_shape` says of the model's files."""
    config = model.config
    return {
        "parameters": model.num_parameters(),
        "layers": config.num_hidden_layers,
        "hidden": config.hidden_size,
        "intermediate": config.intermediate_size,
        "kv_width": config.num_key_value_heads * config.hidden_size // config.num_attention_heads,
        "vocabulary": config.vocab_size,
    }
