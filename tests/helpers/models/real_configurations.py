"""Published models in small: the fields of their config.json, their kind of tokenizer, random weights.

`write_model(NAME, directory)` writes what a user has on disk: the config as it is published (in the spelling of its time),
only with fewer layers, units and tokens, and positions, windows and scaling factors that a few dozen tokens reach.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM

LINES = (
    "What is 12 + 30?\nAssistant: <think> 12 + 30 = 42 </think> <answer> 42 </answer>",
    "Natalia sold 48 clips in April and half as many in May: 48 / 2 = 24, so 48 + 24 = 72 clips.",
)
VOCABULARY = 384  # of the models; their tokenizers have fewer
SHRUNK = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
}
_SPLIT = r"""(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""


@dataclass(frozen=True)
class Configuration:
    """A published model.

    Attributes:
        config: fields of its config.json beside those of `SHRUNK`; `*_token_id` are texts of special tokens.
        special: the special tokens of its tokenizer, `bos`, `eos`, `pad` and others.
        ends: the tokens that end a response, by its generation config; empty: its EOS token alone.
        kind: of its tokenizer: "bytes", or as SentencePiece has it "metaspace" (a space before the text) and "spaces".
        template: whether its tokenizer.json puts BOS in front.
        adds_bos: whether its prompts begin with BOS.
        tokenizer: fields of its tokenizer_config.json.
        own_step: whether the engine has its own decoding step for it.
        shares: whether an update computes shared prompts once.
    """

    config: Mapping[str, Any]
    special: Mapping[str, str]
    tokenizer: Mapping[str, Any]
    ends: tuple[str, ...] = ()
    kind: str = "bytes"
    template: bool = False
    adds_bos: bool = False
    own_step: bool = True
    shares: bool = True
    more: tuple[str, ...] = field(default=())  # further special tokens


_QWEN2 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "attention_dropout": 0.0,
    "rms_norm_eps": 1e-6, "use_cache": True, "use_mrope": False, "use_sliding_window": False, "sliding_window": 64,
    "max_window_layers": 1, "rope_theta": 10000, "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "attention_bias": False,
    "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5, "use_cache": True,
    "rope_theta": 500000.0, "torch_dtype": "bfloat16",
}  # fmt: skip
_LLAMA3_ROPE = {
    "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 32, "rope_type": "llama3",
}  # fmt: skip
_PHI3 = {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "hidden_act": "silu", "attention_bias": False,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config", "AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"},
    "attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "num_key_value_heads": 4, "tie_word_embeddings": False, "use_cache": True, "torch_dtype": "bfloat16",
}  # fmt: skip
_GEMMA = {
    "attention_bias": False, "attention_dropout": 0.0, "cache_implementation": "hybrid", "head_dim": 16,
    "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6, "use_cache": True,
    "torch_dtype": "bfloat16",
}  # fmt: skip
_QWEN_SPECIAL = {"eos": "<|endoftext|>", "pad": "<|endoftext|>"}
_QWEN_TOKENIZER = {
    "tokenizer_class": "Qwen2Tokenizer",
    "add_prefix_space": False,
    "errors": "replace",
    "split_special_tokens": False,
}
_DEEPSEEK = {"bos": "<｜begin▁of▁sentence｜>", "eos": "<｜end▁of▁sentence｜>", "pad": "<｜end▁of▁sentence｜>"}
_DEEPSEEK_TOKENIZER = {
    "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True, "add_eos_token": False, "legacy": True,
    "sp_model_kwargs": {}, "unk_token": None,
}  # fmt: skip
_SENTENCEPIECE = {"bos": "<s>", "eos": "</s>"}
_GEMMA_TOKENS = {"bos": "<bos>", "eos": "<eos>", "pad": "<pad>"}
_GEMMA_TOKENIZER = {
    "tokenizer_class": "GemmaTokenizer", "add_bos_token": True, "add_eos_token": False, "unk_token": "<unk>",
    "sp_model_kwargs": {}, "spaces_between_special_tokens": False,
}  # fmt: skip
_PHI3_TOKENS = {"bos": "<s>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"}
_PHI3_TOKENIZER = {
    "tokenizer_class": "LlamaTokenizer", "add_bos_token": False, "add_eos_token": False, "legacy": False,
    "sp_model_kwargs": {}, "unk_token": "<unk>",
}  # fmt: skip
_PHI3_ENDS = ("<|end|>", "<|assistant|>", "<|endoftext|>")

CONFIGURATIONS = {
    "Qwen2.5-Math-1.5B": Configuration(
        _QWEN2 | {"tie_word_embeddings": True}, _QWEN_SPECIAL, _QWEN_TOKENIZER, more=("<|im_start|>", "<|im_end|>")
    ),
    "Qwen2.5-7B": Configuration(
        _QWEN2 | {"tie_word_embeddings": False, "max_window_layers": 2, "rope_theta": 1000000.0}, _QWEN_SPECIAL, _QWEN_TOKENIZER
    ),
    "Qwen3-1.7B": Configuration(
        {
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_act": "silu", "attention_bias": False,
            "attention_dropout": 0.0, "head_dim": 16, "max_window_layers": 2, "rms_norm_eps": 1e-6, "rope_scaling": None,
            "rope_theta": 1000000, "sliding_window": None, "use_sliding_window": False, "tie_word_embeddings": True,
            "use_cache": True, "torch_dtype": "bfloat16",
        },
        {"eos": "<|im_end|>", "pad": "<|endoftext|>"},
        _QWEN_TOKENIZER,
        ends=("<|im_end|>", "<|endoftext|>"),
        more=("<|im_start|>",),
    ),
    "Llama-3.2-1B-Instruct": Configuration(
        _LLAMA | {"head_dim": 8, "rope_scaling": _LLAMA3_ROPE, "tie_word_embeddings": True},
        {"bos": "<|begin_of_text|>", "eos": "<|eot_id|>"},
        {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": True, "model_input_names": ["input_ids", "attention_mask"]},
        ends=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        template=True,
        adds_bos=True,
    ),
    "Mistral-7B-v0.3": Configuration(
        {
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu", "attention_dropout": 0.0,
            "rms_norm_eps": 1e-5, "rope_theta": 1000000.0, "sliding_window": None, "tie_word_embeddings": False,
            "use_cache": True, "torch_dtype": "bfloat16",
        },
        _SENTENCEPIECE,
        {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "add_eos_token": False, "legacy": False,
         "add_prefix_space": True, "sp_model_kwargs": {}, "unk_token": "<unk>"},
        kind="metaspace",
        template=True,
        adds_bos=True,
    ),
    "gemma-2-2b": Configuration(
        _GEMMA | {
            "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "hidden_act": "gelu_pytorch_tanh",
            "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0, "rope_theta": 10000.0, "sliding_window": 16,
        },
        _GEMMA_TOKENS, _GEMMA_TOKENIZER, kind="spaces", template=True, adds_bos=True, own_step=False, shares=False,
    ),
    "gemma-3-1b": Configuration(
        _GEMMA | {
            "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "attn_logit_softcapping": None,
            "final_logit_softcapping": None, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
            "sliding_window": 16, "sliding_window_pattern": 2, "num_key_value_heads": 1,
        },
        _GEMMA_TOKENS, _GEMMA_TOKENIZER, kind="spaces", template=True, adds_bos=True, own_step=False, shares=False,
        ends=("<eos>", "<end_of_turn>"),
    ),
    "Phi-3-mini-4k": Configuration(
        _PHI3 | {"original_max_position_embeddings": 512, "rope_scaling": None, "sliding_window": 16},
        _PHI3_TOKENS, _PHI3_TOKENIZER, ends=_PHI3_ENDS, kind="metaspace", own_step=False, shares=False,
    ),
    "Phi-3-mini-128k": Configuration(
        _PHI3 | {
            "original_max_position_embeddings": 256, "sliding_window": 1024,
            "rope_scaling": {"long_factor": [1.0, 1.5, 2.0, 4.0], "short_factor": [1.0, 1.0, 1.1, 1.2], "type": "longrope"},
        },
        _PHI3_TOKENS, _PHI3_TOKENIZER, ends=_PHI3_ENDS, kind="metaspace", own_step=False, shares=False,
    ),
    "OLMo-2-1B": Configuration(
        {
            "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "hidden_act": "silu", "attention_bias": False,
            "attention_dropout": 0.0, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "rope_scaling": None,
            "rope_theta": 500000, "tie_word_embeddings": False, "use_cache": False, "torch_dtype": "float32",
        },
        {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<|pad|>"},
        {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False, "unk_token": "<|endoftext|>"},
        own_step=False,
    ),
    "R1-Distill-Qwen-1.5B": Configuration(
        _QWEN2 | {"tie_word_embeddings": False}, _DEEPSEEK, _DEEPSEEK_TOKENIZER, adds_bos=True
    ),
    "R1-Distill-Llama-8B": Configuration(
        _LLAMA | {"rope_scaling": _LLAMA3_ROPE | {"factor": 8.0}, "tie_word_embeddings": False},
        _DEEPSEEK, _DEEPSEEK_TOKENIZER, adds_bos=True,
    ),
    "deepseek-math-7b": Configuration(
        _LLAMA | {"rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 10000.0, "tie_word_embeddings": False, "num_key_value_heads": 4},
        _DEEPSEEK, _DEEPSEEK_TOKENIZER, adds_bos=True,
    ),
}  # fmt: skip


def write_model(name: str, directory: Path) -> Path:
    """Write a model of `CONFIGURATIONS`, with weights from a fixed seed."""
    published = CONFIGURATIONS[name]
    directory.mkdir(parents=True)
    tokenizer = make_tokenizer(published)
    tokenizer.save(str(directory / "tokenizer.json"))
    ids = {f"{role}_token_id": tokenizer.token_to_id(text) for role, text in published.special.items()}
    ends = [tokenizer.token_to_id(text) for text in published.ends] or ids["eos_token_id"]
    settings = {f"{role}_token": text for role, text in published.special.items()} | {"model_max_length": 512}
    fields = {
        "tokenizer_config": {**settings, **published.tokenizer},
        "generation_config": {**ids, "eos_token_id": ends, "do_sample": True, "temperature": 0.6, "top_p": 0.9},
        "config": {**SHRUNK, **published.config, **ids, "eos_token_id": ends},
    }
    for file, content in fields.items():
        (directory / f"{file}.json").write_text(json.dumps(content))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(directory, trust_remote_code=False), dtype=torch.float32
        )
    model.save_pretrained(directory)
    for file, content in fields.items():  # as published, not as this version of transformers writes it
        (directory / f"{file}.json").write_text(json.dumps(content))
    return directory


def make_tokenizer(published: Configuration) -> Tokenizer:
    """Train a tokenizer of the model's kind on a few lines."""
    special = [*dict.fromkeys([*published.special.values(), *published.ends, *published.more])]
    if published.kind == "bytes":
        tokenizer = Tokenizer(models.BPE())
        split = pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.post_processor = processors.ByteLevel(add_prefix_space=False, trim_offsets=False, use_regex=False)
        tokenizer.train_from_iterator(LINES, _trainer(special, pre_tokenizers.ByteLevel.alphabet()))
    else:
        tokenizer = _like_sentencepiece(special, prepends=published.kind == "metaspace")
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if published.template:
        bos = published.special["bos"]
        front = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
        own = tokenizer.post_processor
        tokenizer.post_processor = processors.Sequence([own, front]) if own is not None else front
    return tokenizer


def _trainer(special: list[str], alphabet: list[str]) -> trainers.BpeTrainer:
    return trainers.BpeTrainer(vocab_size=340, special_tokens=special, initial_alphabet=alphabet, show_progress=False)


def _like_sentencepiece(special: list[str], *, prepends: bool) -> Tokenizer:
    """Pieces with "▁" for spaces, and bytes for what no piece has."""
    learned = Tokenizer(models.BPE())
    learned.train_from_iterator([line.replace(" ", "▁") for line in LINES], _trainer([], ["▁", "\n"]))
    content = json.loads(learned.to_str())["model"]
    first = [*special, *(["<unk>"] if "<unk>" not in special else []), *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces = [piece for piece, _ in sorted(content["vocab"].items(), key=lambda item: item[1])][: 360 - len(first)]
    merges = [tuple(pair) for pair in content["merges"] if {*pair, "".join(pair)} <= set(pieces)]
    vocabulary = {text: number for number, text in enumerate([*first, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    replace = normalizers.Replace(" ", "▁")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), replace]) if prepends else replace
    if not prepends:
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    strip = [decoders.Strip(content=" ", left=1, right=0)] if prepends else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer
