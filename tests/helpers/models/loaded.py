"""Models that tests of something else load again and again: each is read from disk once."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from rlvr_cli.models import pretrained


class _Once:
    """`AutoModelForCausalLM`, which copies the model that it loaded of the same files with the same options."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}

    def from_pretrained(self, name: str, **options: Any) -> Any:
        files = [file for end in ("json", "safetensors") for file in sorted(Path(name).glob(f"*.{end}"))]
        state = [(str(file), file.stat().st_ino, file.stat().st_mtime_ns, file.stat().st_size) for file in files]
        key = f"{name} {options} {state}"
        if key not in self._loaded:
            self._loaded[key] = AutoModelForCausalLM.from_pretrained(name, **options)
        return copy.deepcopy(self._loaded[key])


@contextmanager
def models_read_once() -> Iterator[None]:
    """In this process, until the end; processes that it starts read them as always."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained, "AutoModelForCausalLM", _Once())
        yield
