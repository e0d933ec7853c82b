"""A policy of a few hundred float64 weights, and batches for it: exact enough for identities to 1e-10."""

import torch
import torch.nn.functional as F
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rlvr_cli.models.tokens.tokenization import collate

VOCAB = 41


class WideRMSNorm(Qwen2RMSNorm):
    """In the precision of its input. That of transformers rounds float64 to float32, and 1e-16 may become 1e-7."""

    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def make_policy(dtype=torch.float64, *, layers=1, vocab_size=VOCAB):
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.5,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = Qwen2ForCausalLM(config).to(dtype).eval()
    for module in model.modules():
        if isinstance(module, Qwen2RMSNorm):
            module.__class__ = WideRMSNorm
    return model


def make_batch(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return torch.randint(2, VOCAB, (count,), generator=generator).tolist()

    return collate([draw(p) for p, _ in lengths], [draw(r) for _, r in lengths], pad_id=1)
