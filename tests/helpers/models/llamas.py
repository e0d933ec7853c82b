"""A tiny llama on disk whose tokenizer is byte-level, as those of Llama 3 and deepseek-math are."""

import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHAT_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
# As Llama 3 has it: it writes BOS and the date, and strips what it is given.
LLAMA3_TEMPLATE = """{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>
{% if loop.first %}{{ strftime_now("%d %b %Y") }}
{% endif %}{{ message.content | trim }}<|end|>
{% endfor %}{% if add_generation_prompt %}<|assistant|>
{% endif %}"""
# As Qwen3 has it: no BOS, and a switch for thinking.
QWEN3_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and enable_thinking is false %}<think>

</think>

{% endif %}{% endif %}"""


def write_byte_level_llama(
    directory: Path,
    *,
    kind: str = "",
    special: tuple[str, ...] = (),
    chat_template: str | None = CHAT_TEMPLATE,
    adds_bos: bool = False,
) -> Path:
    """A tiny llama with a byte-level tokenizer, whose class, further special tokens and chat template are as given.

    Args:
        adds_bos: whether the tokenizer begins every text with BOS, as Llama 3's does.
    """
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
    if adds_bos:
        bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|endoftext|>",
        bos_token="<s>",
        pad_token="<pad>",
        additional_special_tokens=list(special),
        chat_template=chat_template,
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


def write_chat_llama(directory: Path) -> Path:
    """A tiny llama to chat with, whose tokenizer and whose chat template write BOS, as Llama 3's do."""
    special = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    return write_byte_level_llama(directory, chat_template=LLAMA3_TEMPLATE, special=special, adds_bos=True)


def write_chat_qwen(directory: Path) -> Path:
    """A tiny llama to chat with, that has no BOS and a switch for thinking, as Qwen3 has."""
    return write_byte_level_llama(directory, chat_template=QWEN3_TEMPLATE, special=("<|im_start|>", "<|im_end|>"))
