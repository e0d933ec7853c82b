"""A tiny llama on disk whose tokenizer is byte-level, as those of Llama 3 and deepseek-math are."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def write_byte_level_llama(directory: Path, *, kind: str = "", special: tuple[str, ...] = ()) -> Path:
    """A tiny llama with a byte-level tokenizer, whose class and further special tokens are as given."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<|endoftext|>", "<s>", "<pad>", *special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(["What is 1 + 2?\nAssistant: <think> 1 + 2 = 3 </think> <answer> 3 </answer>"] * 3, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|endoftext|>",
        bos_token="<s>",
        pad_token="<pad>",
        additional_special_tokens=list(special),
        chat_template=CHAT_TEMPLATE,
    ).save_pretrained(directory)
    if kind:
        path = directory / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": kind}))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=320,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=1,
                num_attention_heads=1,  # vLLM's kernels for CPU need heads of 32
                max_position_embeddings=256,
                eos_token_id=0,
                bos_token_id=1,
                pad_token_id=2,
            )
        ).save_pretrained(directory)
    return directory
