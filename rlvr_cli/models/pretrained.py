"""Models on disk: a path or a Hub id -> model and tokenizer; model and tokenizer -> a directory that vLLM loads too.

Weights are read from safetensors only, and no code that a model repository brings is ever run.
"""

import copy
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import torch
from huggingface_hub.errors import HfHubHTTPError, StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    BertGenerationConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as transformers_logging

from rlvr_cli.errors import RlvrError, short_of_resources
from rlvr_cli.models.compute.device import dtype_name, resolve_device
from rlvr_cli.models.compute.onednn import use_onednn
from rlvr_cli.models.directory import CONVERT, base_of, check_unquantized, local_directory, snapshot_of, tokenizer_of
from rlvr_cli.models.tokens.own_tokenizer import read_tokenizer
from rlvr_cli.text import printable

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_ATTENTIONS = ("flash_attention_2", "sdpa", "eager")  # the fastest first; all models have the last one
LOAD_ERRORS = (
    OSError,
    ValueError,
    RuntimeError,
    LookupError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    TypeError,
    ImportError,
    SafetensorError,
    StrictDataclassError,
)


def read_pretrained(
    path_or_id: str | Path, *, dtype: str, device: str
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model, in eval mode, and its tokenizer: see `load.load_policy`.

    Of a directory with an adapter: the base of the adapter, and the tokenizer of `load_tokenizer`.
    """
    if dtype not in _DTYPES:
        raise RlvrError(f"Unknown parameter precision {printable(dtype)!r}.", f"Choose one of {', '.join(_DTYPES)}.")
    target = resolve_device(device)
    check_unquantized(path_or_id)
    weights_of = base_of(path_or_id) or path_or_id
    directory = local_directory(weights_of)
    name = str(directory or weights_of)
    options: dict[str, Any] = {"local_files_only": directory is not None, "trust_remote_code": False}
    if target.type == "cuda":  # cuDNN plans each new shape of attention for 23 to 400 ms, and most shapes here are new
        torch.backends.cuda.enable_cudnn_sdp(False)
    half = dtype != "float32"
    flash = target.type == "cuda" and half and find_spec("flash_attn")
    _check_generation_config(name, directory)
    with quiet():
        try:
            model, report = _from_pretrained(
                name,
                attentions=_ATTENTIONS if flash else _ATTENTIONS[1:],
                dtype=_DTYPES[dtype],
                use_safetensors=True,
                ignore_mismatched_sizes=True,  # reported below as a user error
                output_loading_info=True,
                **options,
            )
        except LOAD_ERRORS as error:
            raise load_error("model", name, directory, error) from error
    if getattr(model, "_hf_peft_config_loaded", False):  # transformers has loaded it together with its base
        raise RlvrError(
            f"{printable(name)} on the Hub is an adapter, and only one in a directory is loaded.",
            f"Download it: hf download {printable(name)} --local-dir DIR, and use --model DIR.",
        )
    if _is_encoder(model.config):
        raise RlvrError(
            f"{printable(name)} is an encoder ({type(model).__name__}): its tokens see those that follow.",
            "rlvr trains and samples decoder-only language models, such as Llama or Qwen: use one of them.",
        )
    if (
        model.config._attn_implementation == "sdpa"
        and getattr(model.config, "attn_logit_softcapping", None) is not None
    ):
        model.set_attn_implementation("eager")  # sdpa leaves out Gemma 2's soft capping of attention scores, silently
    tokenizer = load_tokenizer(path_or_id)
    if missing := sorted(report["missing_keys"]):
        raise RlvrError(
            f"The weights of {printable(name)} are incomplete: {missing[0]} is missing, and {len(missing) - 1} more.",
            "Copy or download the model again.",
        )
    if mismatched := sorted(report["mismatched_keys"]):
        key, stored, wanted = mismatched[0]
        raise RlvrError(
            f"The weights of {printable(name)} do not match its config.json: {key} is "
            f"{tuple(stored)} and should be {tuple(wanted)}.",
            "Copy or download the weights and config.json again, from the same place.",
        )
    _fit_tokenizer(model, tokenizer, name)
    try:
        model.to(target)
    except torch.OutOfMemoryError as error:
        need = model.num_parameters() * _DTYPES[dtype].itemsize / 2**30
        raise RlvrError(
            f"{printable(name)} needs {need:.1f} GiB in {dtype} and does not fit on {target}.",
            "Free memory on the device, or use a smaller model or bfloat16.",
        ) from error
    use_onednn(model, but=model.get_output_embeddings())
    return model.eval(), tokenizer


def _is_encoder(config: PreTrainedConfig) -> bool:
    """Whether the tokens of a model see those that follow; a config may say is_decoder=False of a model that has no other way."""
    has_both = type(config) in MODEL_FOR_MASKED_LM_MAPPING or isinstance(config, BertGenerationConfig)
    return has_both and getattr(config, "is_decoder", getattr(config, "causal", None)) is False  # XLM's is `causal`


def _from_pretrained(name: str, *, attentions: Sequence[str], **options: Any) -> Any:
    """Load a model, with the first of these implementations of attention that it supports."""
    try:
        return AutoModelForCausalLM.from_pretrained(name, attn_implementation=attentions[0], **options)
    except ValueError as error:  # raised before any weights are read
        if len(attentions) == 1 or "does not support" not in str(error):
            raise
    return _from_pretrained(name, attentions=attentions[1:], **options)


def load_tokenizer(path_or_id: str | Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model: see `own_tokenizer.read_tokenizer`. An adapter without one has that of its base.

    Raises:
        RlvrError: it cannot be loaded.
    """
    path_or_id = tokenizer_of(path_or_id)
    directory = local_directory(path_or_id)
    name = str(directory or path_or_id)
    with quiet():
        try:
            return read_tokenizer(name, local=directory is not None)
        except LOAD_ERRORS as error:
            raise load_error("tokenizer", name, directory, error) from error


def load_end_tokens(path_or_id: str | Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the ids of `end_tokens` of a model that need not be loaded, with its tokenizer."""
    path_or_id = base_of(path_or_id) or path_or_id
    directory = local_directory(path_or_id)
    name = str(directory or path_or_id)
    options: dict[str, Any] = {"local_files_only": directory is not None}
    _check_generation_config(name, directory)
    with quiet():
        try:
            found: Any = GenerationConfig.from_pretrained(name, **options)
        except OSError:  # without the file, a model has what its config says
            try:
                found = AutoConfig.from_pretrained(name, trust_remote_code=False, **options)
            except LOAD_ERRORS as error:
                raise load_error("config", name, directory, error) from error
        except LOAD_ERRORS as error:
            raise load_error("generation config", name, directory, error) from error
    return end_tokens(tokenizer, found)


def _check_generation_config(name: str, directory: Path | None) -> None:
    """Raise RlvrError if a model's generation_config.json is damaged: transformers would take it for a missing one."""
    where = directory or snapshot_of(name)
    if where is None or not (file := where / "generation_config.json").exists():
        return
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(settings, dict):
            raise ValueError("generation_config.json is not a JSON object")
        ends = settings.get("eos_token_id")
        if not all(isinstance(end, int | None) for end in (ends if isinstance(ends, list) else [ends])):
            raise ValueError("eos_token_id is neither an id nor a list of ids")
    except LOAD_ERRORS as error:
        raise load_error("generation config", name, where, error) from error


def load_context_length(path_or_id: str | Path) -> int | None:
    """Return the context of a model that need not be loaded; None if nothing here says."""
    path_or_id = base_of(path_or_id) or path_or_id
    directory = local_directory(path_or_id)
    with quiet():
        try:
            name, local = str(directory or path_or_id), directory is not None
            config = AutoConfig.from_pretrained(name, local_files_only=local, trust_remote_code=False)
        except LOAD_ERRORS:
            return None
    return configured_context(config)


def configured_context(config: Any) -> int | None:
    """The most tokens that a model can read by its config; None if this sets no limit."""
    return getattr(config.get_text_config(), "max_position_embeddings", None)


def end_tokens(tokenizer: PreTrainedTokenizerBase, generation_config: Any) -> tuple[int, ...]:
    """Return every id that ends a response: the tokenizer's EOS and those of the generation config, ascending.

    A negative one, with which some configs say that there is none, is left out.
    """
    configured: Any = getattr(generation_config, "eos_token_id", None)
    own: Any = tokenizer.eos_token_id
    ids = {own, *(configured if isinstance(configured, list | tuple) else [configured])}
    return tuple(sorted(i for i in ids if i is not None and i >= 0))


def write_pretrained(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    directory: str | Path,
    *,
    weights: Mapping[str, torch.Tensor],
) -> None:
    """Write a model with these weights, and its tokenizer, in a form that `transformers` and vLLM can load.

    All or nothing: see `replaced`. Raises OSError.
    """
    with replaced(directory) as fresh:
        with quiet(), rust_errors_as_os_errors(), _valid_generation_config(model), _without_peft(model):
            model.save_pretrained(fresh, state_dict=dict(weights))  # save_pretrained empties this dict
            tokenizer.save_pretrained(fresh)
        precisions = {tensor.dtype for tensor in weights.values() if tensor.is_floating_point()}
        if model.dtype not in precisions and len(precisions) == 1:  # config.json names the model's own
            config, dtype = fresh / "config.json", dtype_name(*precisions)
            config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": dtype}, indent=2) + "\n")


@contextmanager
def rust_errors_as_os_errors() -> Iterator[None]:
    """Raise OSError where safetensors or tokenizers raise their own exceptions for an OS error, such as a full disk."""
    try:
        yield
    except Exception as error:  # both have kinds of their own, with no base in common
        code = re.search(r"\(os error ([0-9]+)\)", str(error))
        if code is None or isinstance(error, OSError):
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1]))) from error


@contextmanager
def replaced(directory: str | Path) -> Iterator[Path]:
    """Give an empty directory to write into, which then takes the place of `directory`.

    Everything is written and flushed under a temporary name and then renamed, so `directory` is never half written. An
    existing one is replaced; for an instant, between the two renames, neither the old nor the new one is there.
    """
    directory = Path(directory)
    mark = secrets.token_hex(4)
    fresh = directory.with_name(f".{directory.name}.{mark}.new")
    stale = directory.with_name(f".{directory.name}.{mark}.old")
    directory.parent.mkdir(parents=True, exist_ok=True)
    fresh.mkdir()
    try:
        yield fresh
        follow_umask(fresh)
        for path in (*fresh.rglob("*"), fresh):
            _flush(path)
        if directory.exists():
            directory.rename(stale)
        fresh.rename(directory)
        _flush(directory.parent)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    shutil.rmtree(stale, ignore_errors=True)


def follow_umask(directory: Path) -> None:
    """Give the weights in a directory the mode of any new file there: safetensors makes its files for their owner alone.

    Raises:
        OSError: nothing can be written there.
    """
    any_file = directory / ".mode"
    any_file.touch()
    mode = any_file.stat().st_mode
    any_file.unlink()
    for path in directory.glob("*.safetensors"):
        if path.stat().st_mode != mode:  # some file systems have no modes, and refuse to change them
            path.chmod(mode)


def fetch_model(model_id: str) -> None:
    from huggingface_hub import snapshot_download

    with quiet():
        try:
            snapshot_download(
                model_id,
                allow_patterns=["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"],
                ignore_patterns=["consolidated*", "original/*"],  # the weights again, in the layout of their maker
            )
        except (*LOAD_ERRORS, HfHubHTTPError) as error:
            raise load_error("model", model_id, None, error) from error


def load_error(part: str, name: str, directory: Path | None, error: Exception) -> RlvrError:
    """Turn an exception of `transformers` into a user error; the first line of its message usually names the cause.

    A check of the config names itself there, and what is wrong in the next one.
    """
    if (short := short_of_resources(error)) is not None:
        return short
    lines = printable(str(error), keep="\n").strip().splitlines()
    if isinstance(error, StrictDataclassError):
        lines = [" ".join(line.strip() for line in lines)]
    reason = f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    if "trust_remote_code" in str(error) or "auto_map" in str(error):
        return RlvrError(
            f"The {part} {printable(name)} needs code from its repository, which rlvr never runs.",
            "Use a model whose architecture is part of transformers.",
        )
    if isinstance(error, AttributeError) and (unknown := re.search("module 'torch' has no attribute '(.*)'", reason)):
        return RlvrError(
            f"config.json of {printable(name)} has the dtype {unknown[1]!r}, which PyTorch does not know.",
            f"Write that of the weights there: {', '.join(_DTYPES)}.",
        )
    if directory is None:
        if "safetensors" in str(error) and "pytorch_model.bin" in str(error):
            return RlvrError(f"{printable(name)} has no safetensors weights on the Hub.", CONVERT)
        return RlvrError(
            f"There is no {part} {printable(name)!r}: no such directory, and the Hugging Face Hub did not provide it "
            f"({reason}).",
            "Check its name and the network; with HF_HUB_OFFLINE=1 only models that were downloaded before are found; "
            "a gated model needs `hf auth login`.",
        )
    return RlvrError(
        f"The {part} in {printable(name)} cannot be loaded ({reason}).",
        "Use a causal language model that this version of transformers supports."
        if isinstance(error, ValueError) and part == "model"
        else "Copy or download it again.",
    )


def _fit_tokenizer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Give the tokenizer a padding token, and check that it fits the model."""
    # For a directory without tokenizer files, transformers makes a tokenizer that encodes everything as nothing.
    if not tokenizer("0", add_special_tokens=False)["input_ids"]:
        raise RlvrError(f"{printable(name)} has no tokenizer.", "Copy its tokenizer files (tokenizer.json) into it.")
    if tokenizer.eos_token_id is None:
        raise RlvrError(
            f"The tokenizer of {printable(name)} has no EOS token.", "Set `eos_token` in its tokenizer_config.json."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    rows = cast(torch.nn.Embedding, model.get_input_embeddings()).num_embeddings
    highest = max(tokenizer.get_vocab().values())
    if highest >= rows:
        raise RlvrError(
            f"The tokenizer of {printable(name)} has ids up to {highest}, but the model only has {rows} embeddings.",
            "Use the tokenizer that the model was trained with, or resize the embeddings.",
        )


@contextmanager
def quiet() -> Iterator[None]:
    """Turn off the progress bars and load reports of transformers, which would break up our own output."""
    shown, verbosity = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if shown:
            transformers_logging.enable_progress_bar()


@contextmanager
def _valid_generation_config(model: PreTrainedModel) -> Iterator[None]:
    """Replace a generation config that `transformers` refuses to save by a valid one; restore it on exit.

    Some published models have one. The usual fault is a temperature without `do_sample`; vLLM applies such a
    temperature, so `do_sample` is turned on here. With any other fault, only the special tokens are kept.
    """
    original = model.generation_config
    assert original is not None, "a causal language model can generate"
    special = {name: getattr(original, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    sampling = copy.deepcopy(original)
    sampling.do_sample = True
    candidates = (original, sampling, GenerationConfig(**special))
    model.generation_config = next(config for config in candidates if _is_valid(config))
    try:
        yield
    finally:
        model.generation_config = original


@contextmanager
def _without_peft(model: PreTrainedModel) -> Iterator[None]:
    """Hide an adapter from `save_pretrained`, which would write the adapter instead of the weights that it is given."""
    flag = "_hf_peft_config_loaded"
    before = getattr(model, flag, False)
    setattr(model, flag, False)
    try:
        yield
    finally:
        setattr(model, flag, before)


def _is_valid(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
