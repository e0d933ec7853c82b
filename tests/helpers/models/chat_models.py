"""Tiny models with the chat templates and the markers of models that one trains, and a byte-level tokenizer."""

from pathlib import Path
from typing import NamedTuple

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[2] / "fixtures/chat_templates"
# As Mistral 7B v0.3 has it: tools before the last question, ids of calls, calls as a list, results in a pair of markers.
MISTRAL_TEMPLATE = """{%- set last = namespace(user=0) -%}
{%- for message in messages -%}{%- if message.role == "user" -%}{%- set last.user = loop.index0 -%}{%- endif -%}{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == "user" -%}
{%- if tools and loop.index0 == last.user -%}{{- "[AVAILABLE_TOOLS] " + (tools | tojson) + "[/AVAILABLE_TOOLS]" -}}{%- endif -%}
{{- "[INST] " + message.content + "[/INST]" -}}
{%- elif message.tool_calls -%}
{{- "[TOOL_CALLS] [" -}}
{%- for call in message.tool_calls -%}
{{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + ("" if loop.last else ", ") -}}
{%- endfor -%}
{{- "]" + eos_token -}}
{%- elif message.role == "assistant" -%}
{{- " " + message.content + eos_token -}}
{%- elif message.role == "tool" -%}
{%- if not messages[loop.index0 - 1].tool_calls and messages[loop.index0 - 1].role != "tool" -%}
{{- raise_exception("a result without a call") -}}
{%- endif -%}
{{- '[TOOL_RESULTS] {"content": ' + message.content + ', "call_id": "' + message.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- else -%}
{{- raise_exception("Only user, assistant and tool") -}}
{%- endif -%}
{%- endfor -%}"""

# As Llama 2 has it, and Mistral 7B v0.1: its markers are text.
LLAMA_2_TEMPLATE = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' -%}
{{ '[INST] ' + message.content + ' [/INST]' }}{% else %}{{ ' ' + message.content + eos_token }}{% endif %}{% endfor %}"""
# As Zephyr has it, and TinyLlama: a line break follows its markers, which are text.
ZEPHYR_TEMPLATE = """{% for message in messages %}
{{ '<|' + message.role + '|>\n' + message.content + eos_token }}
{% endfor %}
{% if add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}"""


class ChatModel(NamedTuple):
    """What a model's tokenizer adds to its bytes. `ends` are among the special tokens, the first is the tokenizer's EOS."""

    name: str  # as `renderers` knows it
    special: tuple[str, ...]
    ends: tuple[str, ...]
    plain: tuple[str, ...] = ()  # single tokens that are not special
    knows_tools: bool = False
    bos: str | None = None


QWEN = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>", "<|end_header_id|>")
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>")
CALLS = ("<tool_call>", "</tool_call>")
THINKS = ("<think>", "</think>")
CHAT_MODELS = {
    "qwen2_5": ChatModel("Qwen/Qwen2.5-0.5B-Instruct", QWEN, QWEN[::-2], CALLS, knows_tools=True),
    "qwen3": ChatModel(
        "Qwen/Qwen3-0.6B", QWEN, QWEN[::-2], (*CALLS, *THINKS, "<tool_response>", "</tool_response>"), knows_tools=True
    ),
    "llama3_2": ChatModel(
        "meta-llama/Llama-3.2-1B-Instruct", (*LLAMA, "<|python_tag|>"), (LLAMA[2], LLAMA[3], LLAMA[1]), (), knows_tools=True, bos=LLAMA[0]
    ),
    "gemma3": ChatModel(
        "google/gemma-3-1b-it", ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"), ("<end_of_turn>", "<eos>"), bos="<bos>"
    ),
    "phi3": ChatModel(
        "microsoft/Phi-3-mini-4k-instruct",
        ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"),
        ("<|endoftext|>", "<|end|>"),
    ),
    "deepseek_r1_distill": ChatModel(
        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B", DEEPSEEK, DEEPSEEK[1:2], THINKS, bos=DEEPSEEK[0]
    ),
    "mistral": ChatModel(
        "mistralai/Mistral-7B-Instruct-v0.3",
        ("<s>", "</s>", *(f"[{end}{name}]" for name in ("INST", "AVAILABLE_TOOLS", "TOOL_RESULTS") for end in ("", "/")), "[TOOL_CALLS]"),
        ("</s>",),
        knows_tools=True,
        bos="<s>",
    ),
}  # fmt: skip


def write_chat_model(directory: Path, name: str, *, likely: tuple[str, ...] = ()) -> Path:
    """A tiny Llama with the markers and the chat template of one of `CHAT_MODELS`, and a context of 4,096 tokens.

    Args:
        likely: tokens that it samples far more often than others.
    """
    kind = CHAT_MODELS[name]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    bpe.train_from_iterator(["What is 1 + 2?.\n\nassistant user tool</ 3901.\n"] * 3, trainer)
    bpe.add_special_tokens(list(kind.special))
    bpe.add_tokens([AddedToken(text, normalized=False) for text in kind.plain])
    if kind.bos:
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{kind.bos} $A", special_tokens=[(kind.bos, bpe.token_to_id(kind.bos))]
        )
    template = MISTRAL_TEMPLATE if name == "mistral" else (TEMPLATES / f"{name}.jinja").read_text()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token=kind.ends[0], pad_token=kind.ends[-1], bos_token=kind.bos, chat_template=template,
        additional_special_tokens=list(kind.special),
    )  # fmt: skip
    tokenizer.save_pretrained(directory)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=1,
            max_position_embeddings=4096, eos_token_id=bpe.token_to_id(kind.ends[0]),
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    if likely:  # the first component of all hidden states is large, and only these tokens' logits read it
        with torch.no_grad():
            model.model.embed_tokens.weight[:, 0] = 1.0
            model.lm_head.weight[:, 0] = 0.0
            model.lm_head.weight[tokenizer.convert_tokens_to_ids(list(likely)), 0] = 1.0
    model.save_pretrained(directory)
    ids = [tokenizer.convert_tokens_to_ids(text) for text in kind.ends]
    GenerationConfig(eos_token_id=ids).save_pretrained(directory)
    return directory


def sentencepiece_tokenizer(template: str, *, prepends: bool) -> PreTrainedTokenizerFast:
    """A tokenizer whose words begin with `▁`, which it puts in front of every text, too.

    Args:
        prepends: with a normalizer, as Llama 2 and Zephyr; else with a pre-tokenizer, as newer conversions.
    """
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *map(chr, range(33, 127))]
    bpe = Tokenizer(
        models.BPE(
            vocab={text: i for i, text in enumerate([*vocab, "It", "▁It"])},
            merges=[("I", "t"), ("▁", "It")],
            byte_fallback=True,
            unk_token="<unk>",
        )
    )
    if prepends:
        bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        bpe.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    bpe.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    bpe.add_special_tokens(vocab[:3])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
