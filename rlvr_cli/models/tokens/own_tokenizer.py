"""A model's tokenizer, as its own tokenizer.json has it.

Enters: a model directory or Hub id. Leaves: a tokenizer that encodes and decodes as that file does.

What transformers loads may differ: tokenizer_config.json names a class, and some classes replace parts of the file. A
byte-level checkpoint that calls itself LlamaTokenizerFast (deepseek-math-7b, R1-Distill-Llama from a directory) loses
its spaces that way, in its prompts and in its responses, without a word. So the two are compared, and the file wins.

BOS is also lost: for many such checkpoints (all of DeepSeek's) only `add_bos_token` in tokenizer_config.json asks for it, and
transformers no longer reads that. Here it begins every prompt, as in the model's training.

Where the tags that graders look for are special tokens, they would not show in a response's text. They become ordinary
ones here: their ids stay the same.
"""

import json
import logging
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from tokenizers import Tokenizer, processors
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from rlvr_cli.text import printable

logger = logging.getLogger(__name__)

TAGS = ("<think>", "</think>", "<answer>", "</answer>")
_FILE, _SETTINGS = "tokenizer.json", "tokenizer_config.json"
_PROBES = (
    "What is 1 + 2?\nAssistant: <think> It is\t12,345.6  </think> <answer> \\frac{1}{2} </answer>",
    "  naïve 数学 😀 ½×π\r\n\ndef f(x):\n    return x**2",
    *TAGS,
)
_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_tokenizer(name: str, *, local: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model.

    Args:
        name: a directory or a Hub id.
        local: read files of this machine only.

    Raises:
        OSError, ValueError and others of transformers: it cannot be loaded.
    """
    tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=local, trust_remote_code=False)
    return corrected(tokenizer, name) or tokenizer


def corrected_copy(name: str, *, model: str) -> "tempfile.TemporaryDirectory[str] | None":
    """Return a directory with a tokenizer, for an engine that would load another one with the model; None if it would not.

    Args:
        name: where the tokenizer is; elsewhere than the model if it came with an adapter.
    """

    def options(place: str) -> dict[str, Any]:
        return {"local_files_only": Path(place).is_dir(), "trust_remote_code": False}

    tokenizer = AutoTokenizer.from_pretrained(name, **options(name))
    own = corrected(tokenizer, name)
    if own is None and name == model:
        return None
    folder = tempfile.TemporaryDirectory(prefix="rlvr-tokenizer-")
    (own or tokenizer).save_pretrained(folder.name)
    AutoConfig.from_pretrained(model, **options(model)).save_pretrained(folder.name)  # without one vLLM complains
    return folder


def corrected(tokenizer: PreTrainedTokenizerBase, name: str) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer that the model's files describe, if the one that transformers loaded is another one.

    None if it is the same, and where there is no tokenizer.json.
    """
    file = _find(name, _FILE)
    if file is None:
        return None
    own = Tokenizer.from_file(str(file))
    own.no_truncation()
    own.no_padding()
    differing = next((text for text in _PROBES if _reads(tokenizer, text) != _reads_own(own, text)), None)
    content: dict[str, Any] = json.loads(own.to_str())
    tags = [token for token in content["added_tokens"] if token["special"] and token["content"] in TAGS]
    bos = _missing_bos(tokenizer, own, name)
    if differing is None and not tags and bos is None:
        return None
    if differing is not None:
        (ids, text), (own_ids, _) = _reads(tokenizer, differing), _reads_own(own, differing)
        how = f"as {text!r}" if text != differing else f"as {len(ids)} tokens instead of {len(own_ids)}"
        logger.warning(
            f"The tokenizer of {printable(name)} is read from its {_FILE} alone: {type(tokenizer).__name__} of transformers "
            f"would read {differing!r} {how}."
        )
    for token in tags:
        token["special"] = False
    described = Tokenizer.from_str(json.dumps(content))
    if bos is not None:
        logger.warning(
            f"Prompts begin with {printable(bos)}: the {_SETTINGS} of {printable(name)} asks for it (add_bos_token), which "
            "transformers does not read."
        )
        front = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, own.token_to_id(bos))])
        before = own.post_processor
        described.post_processor = front if before is None else processors.Sequence([before, front])
    given = {key: getattr(tokenizer, key) for key in _SPECIAL if getattr(tokenizer, key) is not None}
    more = [text for text in tokenizer.all_special_tokens if text not in TAGS and text not in given.values()]
    return PreTrainedTokenizerFast(
        tokenizer_object=described,
        **given,
        additional_special_tokens=more,
        model_max_length=tokenizer.model_max_length,
        padding_side=tokenizer.padding_side,
        chat_template=tokenizer.chat_template,
        clean_up_tokenization_spaces=False,
    )


def _find(name: str, file: str) -> Path | None:
    """The path of a file of a model; None if it has none."""
    path = Path(name, file) if Path(name).is_dir() else try_to_load_from_cache(name, file)
    return Path(path) if isinstance(path, str | Path) and Path(path).is_file() else None


def _missing_bos(tokenizer: PreTrainedTokenizerBase, own: Tokenizer, name: str) -> str | None:
    """The BOS that tokenizer_config.json asks for, if tokenizer.json does not put it in front of a text; else None."""
    path, bos = _find(name, _SETTINGS), tokenizer.bos_token
    if path is None or not isinstance(bos, str) or json.loads(path.read_text()).get("add_bos_token") is not True:
        return None
    return None if own.token_to_id(bos) in own.encode("").ids[:1] else bos


def _reads(tokenizer: PreTrainedTokenizerBase, text: str) -> tuple[list[int], str]:
    """The ids of a text, and the text of these ids."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids, str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


def _reads_own(tokenizer: Tokenizer, text: str) -> tuple[list[int], str]:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return ids, tokenizer.decode(ids, skip_special_tokens=False)
