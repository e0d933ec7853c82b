"""Whether a model's name is a directory on this machine, and whether that directory can hold a model.

Enters: a path or a Hub id. Leaves: the directory, or an RlvrError that says what it lacks; of an adapter, its base. Imports
neither torch nor transformers.
"""

import json
import os
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.remote.views import folder_of
from rlvr_cli.text import printable

CONVERT = (
    'If you trust it, convert it once: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('OLD').save_pretrained('NEW')\", and copy its tokenizer files."
)


WEIGHTS = "model.safetensors"
ADAPTER = "adapter_config.json"  # in a directory that holds an adapter, in peft's layout, instead of a whole model
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_BITSANDBYTES_OFF = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": False}


def holds_model(path: Path) -> bool:
    """Return whether a directory has the configuration of a model or of an adapter."""
    return (path / "config.json").is_file() or (path / ADAPTER).is_file()


def adapter_settings(path_or_id: str | Path) -> dict[str, Any] | None:
    """Return what the adapter_config.json of an adapter's directory says; None for everything else.

    Raises:
        RlvrError: it is not readable, or not that of a LoRA adapter with a base.
    """
    file = Path(os.path.expanduser(path_or_id), ADAPTER)
    if not str(path_or_id) or not file.is_file():
        return None
    try:
        settings = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise RlvrError(f"{printable(str(file))} cannot be read.", "Copy the adapter again.") from error
    kinds = {"base_model_name_or_path": str, "r": int, "lora_alpha": int | float}
    plain = isinstance(settings, dict) and settings.get("peft_type") == "LORA"
    if not plain or any(not isinstance(settings.get(key), kind) for key, kind in kinds.items()):
        raise RlvrError(
            f"{printable(str(file))} is not that of a LoRA adapter which names its base.",
            "Use an adapter that rlvr or peft has saved, with base_model_name_or_path.",
        )
    return settings


def base_of(path_or_id: str | Path) -> str | None:
    """Return the model, a directory or a Hub id, that the adapter in a directory belongs to; None if it holds no adapter.

    Of a base in object storage it is what was fetched.

    Raises:
        RlvrError: the base is a directory that is not there, or is no model; or it cannot be fetched.
    """
    settings = adapter_settings(path_or_id)
    if settings is None:
        return None
    base: str = settings["base_model_name_or_path"]
    try:
        if is_address(base):
            base = str(folder_of(base))
        directory = local_directory(base)
    except RlvrError as error:
        raise RlvrError(
            f"The adapter in {printable(str(path_or_id))} needs its base: {error.problem}",
            f"Put the base back there, or write where it is into {ADAPTER}: base_model_name_or_path.",
        ) from error
    if directory is not None and (directory / ADAPTER).is_file():
        raise RlvrError(
            f"The adapter in {printable(str(path_or_id))} has another adapter as its base: {printable(base)}.",
            "Merge that one into its own base first (--lora-merge).",
        )
    return base


def tokenizer_of(path_or_id: str | Path) -> str | Path:
    """Return where a model's tokenizer is: beside its weights, or beside the base of an adapter that has none of its own."""
    base = base_of(path_or_id)
    own = base is None or Path(os.path.expanduser(path_or_id), "tokenizer_config.json").is_file()
    return path_or_id if base is None or own else base


def snapshot_of(model_id: str) -> Path | None:
    """Return where a Hub model that was downloaded lies: the cache names this directory by the commit. None if it was not."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model_id, "config.json")
    return Path(cached).parent if isinstance(cached, str) else None


def check_unquantized(path_or_id: str | Path) -> None:
    """Refuse a model whose weights are quantized, and an adapter of one. Of one that is not on this machine nothing is known.

    Raises:
        RlvrError: also as `local_directory`.
    """
    weights_of = str(base_of(path_or_id) or path_or_id)
    directory = local_directory(weights_of) or snapshot_of(weights_of)
    try:
        config = json.loads((directory / "config.json").read_text()) if directory is not None else {}
    except (OSError, ValueError, RecursionError):  # what is wrong with it says who loads it
        return
    if found := _quantization(config):
        method = found.get("quant_method", "bitsandbytes") if isinstance(found, dict) else found
        raise RlvrError(
            f"{printable(weights_of)} is quantized ({printable(str(method))}).",
            "rlvr trains and samples unquantized weights: use the model that it was made from, or a dequantized copy. "
            "rlvr eval takes it with --engine vllm.",
        )


def _quantization(config: Any) -> Any:
    """What a configuration says of its weights' quantization, also where that of the text model is a part of it; else None.

    A dequantized copy may still have that of bitsandbytes, with both of its kinds off.
    """
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        found = part.get("quantization_config") if isinstance(part, dict) else None
        if found and not (isinstance(found, dict) and found.items() >= _BITSANDBYTES_OFF.items()):
            return found
    return None


def weight_files(directory: Path) -> list[Path]:
    """Return the files with the weights that are loaded, by name; others lie beside them, such as a second copy in another layout.

    They are one file of the name that transformers gives it, else those that the index lists, else all.
    """
    files = sorted(directory.glob("*.safetensors"))
    names = {ADAPTER_WEIGHTS if (directory / ADAPTER).is_file() else WEIGHTS}
    if not any(file.name in names for file in files):
        try:
            names = {*json.loads((directory / f"{WEIGHTS}.index.json").read_text())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # none, or a damaged one
            return files
    return [file for file in files if file.name in names] or files


def local_directory(path_or_id: str | Path) -> Path | None:
    """Return the directory that `path_or_id` names, or None for a Hub id.

    Raises:
        RlvrError: it is a path, but there is no model with safetensors weights.
    """
    text = os.path.expanduser(path_or_id)
    path, shown = Path(text), printable(str(path_or_id))
    if not text or not path.exists():
        if isinstance(path_or_id, Path) or text.startswith((".", "/")) or text.count("/") > 1 or not text.strip("/"):
            raise RlvrError(f"There is no model directory {shown!r}.", "Check the path given to --model.")
        return None
    holds_weights = any(path.glob("*.safetensors"))
    has_gguf = path.suffix == ".gguf" if path.is_file() else any(path.glob("*.gguf"))
    if has_gguf and not holds_weights:
        raise RlvrError(
            f"{shown} has its weights in GGUF; a model is a directory with config.json and *.safetensors.",
            "Use the model that it was made from, whose weights are not quantized: on the Hub, its page names that as the base model.",
        )
    if path.is_file():
        raise RlvrError(
            f"{shown} is a file; a model is a directory with config.json and *.safetensors.",
            "Give the directory that contains it." if path.suffix == ".safetensors" else CONVERT,
        )
    if not holds_model(path):
        inner = next((p for p in (path / "model", path / "final") if holds_model(p)), None)
        raise RlvrError(
            f"{shown} is not a model directory: it has no config.json.",
            f"Did you mean {inner}?" if inner else "Give a directory that save_pretrained wrote, or a Hub id.",
        )
    if not holds_weights:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in path.glob(pattern))
        if pickles:
            raise RlvrError(
                f"{shown} has its weights in {pickles[0]}, a pickle, which can run any code when it is loaded.",
                CONVERT,
            )
        raise RlvrError(f"{shown} has no weights: no *.safetensors.", "Copy or download the model again.")
    return path
