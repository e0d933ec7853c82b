"""Models with the shapes of published ones and no numbers: ``from shapes import math_1_5b``."""

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM


def math_1_5b(*, layers: int, dtype: torch.dtype = torch.float32) -> Qwen2ForCausalLM:
    """Qwen2.5-Math-1.5B with fewer layers, on the device `meta`, for `fake_cuda(compute=False)`."""
    config = Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
    )
    with torch.device("meta"):
        return Qwen2ForCausalLM(config).to(dtype).eval()
