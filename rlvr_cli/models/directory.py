"""Whether a model's name is a directory on this machine, and whether that directory can hold a model.

Enters: a path or a Hub id. Leaves: the directory, or an RlvrError that says what it lacks. Imports neither torch nor transformers.
"""

import os
from pathlib import Path

from rlvr_cli.errors import RlvrError
from rlvr_cli.text import printable

CONVERT = (
    'If you trust it, convert it once: python -c "from transformers import AutoModelForCausalLM as M; '
    "M.from_pretrained('OLD').save_pretrained('NEW')\", and copy its tokenizer files."
)


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
    if path.is_file():
        raise RlvrError(
            f"{shown} is a file; a model is a directory with config.json and *.safetensors.",
            "Give the directory that contains it." if path.suffix == ".safetensors" else CONVERT,
        )
    if not (path / "config.json").is_file():
        inner = next((p for p in (path / "model", path / "final") if (p / "config.json").is_file()), None)
        raise RlvrError(
            f"{shown} is not a model directory: it has no config.json.",
            f"Did you mean {inner}?" if inner else "Give a directory that save_pretrained wrote, or a Hub id.",
        )
    if not any(path.glob("*.safetensors")):
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth", "*.ckpt") for p in path.glob(pattern))
        if pickles:
            raise RlvrError(
                f"{shown} has its weights in {pickles[0]}, a pickle, which can run any code when it is loaded.",
                CONVERT,
            )
        raise RlvrError(f"{shown} has no weights: no *.safetensors.", "Copy or download the model again.")
    return path
