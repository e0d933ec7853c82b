"""Checkpoints: everything a training run needs to resume, written as one transaction and read back bit for bit.

Enters: a policy, its optimizer, and the caller's own state: JSON (cursors, counters) and tensors. Leaves: a directory ::

    RUN/checkpoints/step-000050/
      model/                 the policy as `Policy.save` writes it; ``rlvr eval --model`` can load it
      policy.safetensors     `Policy.extra_weights`; absent when there are none
      optimizer.safetensors  the optimizer's state, as PARAMETER/KEY (exp_avg, exp_avg_sq, step, ...)
      tensors.safetensors    the caller's tensors; absent when there are none
      state.json             the step, the caller's JSON, bytes and sha256 of the files above, and its own sha256

A checkpoint is written and flushed as ``.step-000050.tmp`` and then renamed. Older checkpoints are removed only after that,
and each is renamed to a ``.tmp`` name first. So every directory called step-N was complete once, and its checksums show
whether it still is. A checkpoint that is being replaced is called ``.step-000050.old`` between two renames. If the process
is killed there, the next load or save renames it back, and removes other leftovers. Only the process that holds the run's
lock may load or save.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlvr_cli.errors import RlvrError
from rlvr_cli.faults import fault_point
from rlvr_cli.models.policy import Policy, distinct_tensors, first_not_finite
from rlvr_cli.models.pretrained import follow_umask, rust_errors_as_os_errors
from rlvr_cli.runs.readers import read_metadata
from rlvr_cli.runs.storage.files import (
    atomic_write,
    fsync_directory,
    os_errors_as_user_errors,
    read_regular,
    refuse_links,
    shown,
)
from rlvr_cli.runs.storage.schemas import NewerVersion, newer_version
from rlvr_cli.training.optimizers.optimizer_state import layout, load_state, state_bytes

SCHEMA_VERSION = 1

KEEP = 2  # checkpoints kept

_FOLDER, _STATE = "checkpoints", "state.json"
_MODEL, _EXTRA, _OPTIMIZER, _TENSORS = "model", "policy.safetensors", "optimizer.safetensors", "tensors.safetensors"
_NAME = re.compile(r"step-([0-9]{6,12})")
_PRECISIONS = (torch.float32, torch.bfloat16, torch.float16)  # which `load_policy` reads without losing a bit


class Checkpoint(NamedTuple):
    """The state that the caller gave to `save_checkpoint`. Weights and optimizer state are loaded in place instead."""

    path: Path
    step: int
    state: dict[str, Any]
    tensors: dict[str, Tensor]  # on the CPU


def checkpoint_bytes(policy: Policy, optimizer: torch.optim.Optimizer) -> int:
    """Estimate a checkpoint's size on disk: weights, the optimizer's state, tokenizer."""
    weights = sum(tensor.nbytes for tensor in distinct_tensors(policy.saved_weights()).values())
    extra = sum(tensor.nbytes for tensor in policy.extra_weights().values())
    tokenizer = 128 * policy.vocabulary_size  # tokenizer.json of Qwen, Llama and Gemma: 75 to 135 bytes per id
    return weights + extra + state_bytes(optimizer) + tokenizer + 2**16


def save_checkpoint(
    run: Path,
    *,
    step: int,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    tensors: Mapping[str, Tensor] | None = None,
    keep: int = KEEP,
) -> Path:
    """Write the checkpoint of `step` durably, and remove all but the newest `keep`.

    A checkpoint of the same step is replaced. Checkpoints of later steps are removed: they were damaged, and the run has
    resumed from an earlier one.

    Args:
        run: the run directory, whose lock the caller holds.
        step: updates done so far.
        policy: in one of the precisions that `load_policy` reads.
        optimizer: over parameters of `policy`.
        state: loaded as JSON: keys become strings, tuples become lists. `run_created_at` says of which run the checkpoint is:
            in no other one is it loaded.
        tensors: loaded bit for bit, on the CPU.
        keep: how many checkpoints to keep, including this one.

    Returns:
        The checkpoint's directory.

    Raises:
        RlvrError: weights or optimizer state hold NaN or infinity, the disk has too little free space, or writing fails.
            Earlier checkpoints are then unchanged.
    """
    assert step >= 0, step
    assert keep >= 1, keep
    precisions = {tensor.dtype for tensor in policy.weights().values() if tensor.is_floating_point()}
    assert precisions <= set(_PRECISIONS), precisions
    folder = run / _FOLDER
    path = folder / f"step-{step:06d}"
    temporary = folder / f".{path.name}.tmp"
    moments = _optimizer_tensors(policy, optimizer)
    extra = {name: tensor.detach() for name, tensor in (tensors or {}).items()}
    with os_errors_as_user_errors(path):
        fault_point("checkpoint")
        refuse_links(run, f"{_FOLDER}/{path.name}")
        _check_finite(run, step=step, weights=policy.weights(), moments=moments)
        _prepare(folder)
        _check_space(path, needed=checkpoint_bytes(policy, optimizer) + sum(tensor.nbytes for tensor in extra.values()))
        try:
            temporary.mkdir()
            files = _write_files(temporary, policy, moments=moments, tensors=extra)
            record = {"schema_version": SCHEMA_VERSION, "step": step, "state": dict(state), "files": files}
            atomic_write(temporary / _STATE, _encoded(record))  # flushes the directory, too
            _publish(temporary, path)
        except BaseException:
            with suppress(OSError):
                _finish_interrupted(folder)
            raise
        _finish_interrupted(folder)
        _prune(folder, newest=step, keep=keep)
    return path


def load_checkpoint(
    run: Path, *, policy: Policy, optimizer: torch.optim.Optimizer
) -> tuple[Checkpoint | None, list[str]]:
    """Copy the newest intact checkpoint into `policy` and `optimizer`, in place and bit for bit, on any device.

    Tied weights stay tied. Learning rate and other settings of the optimizer are not changed.

    Args:
        run: the run directory, whose lock the caller holds.
        policy: of the checkpoint's architecture.
        optimizer: over the policy's parameters; its state is replaced.

    Returns:
        The checkpoint, or None if no checkpoint is intact; and one notice for the user per newer checkpoint that is damaged or
        another run's, which names the file.

    Raises:
        RlvrError: the checkpoint is of another model or precision (then `policy` and `optimizer` are unchanged), or the
            folder cannot be read.
    """
    folder = run / _FOLDER
    if not os.path.lexists(folder):
        return None, []
    refuse_links(run, _FOLDER)
    with os_errors_as_user_errors(folder):
        _finish_interrupted(folder)
    found, problems = _newest_intact(run)
    if found is None:
        over = f"{shown(folder)} holds no intact checkpoint: training starts over from the stored rollouts."
        return None, [*problems, over] if problems else []
    path, record = found
    weights = _fitting_weights(path, policy, extra=_read_tensors(path / _EXTRA) if _EXTRA in record["files"] else {})
    moments = _fitting_moments(path, policy, optimizer)
    policy.load_weights(weights)
    load_state(optimizer, moments)
    tensors = _read_tensors(path / _TENSORS) if _TENSORS in record["files"] else {}
    if not problems:  # otherwise keep the damaged ones until the next save
        with os_errors_as_user_errors(folder):
            _prune(folder, newest=record["step"], keep=KEEP)  # a kill may have interrupted the last pruning
    notices = [f"{problem} Training goes on from {path.name} instead." for problem in problems]
    return Checkpoint(path, record["step"], record["state"], tensors), notices


def newest_position(run: Path) -> tuple[int, dict[str, int]]:
    """The updates and the data cursor of the newest checkpoint with an intact state.json; 0 and none without one."""
    folder = run / _FOLDER
    for step, path in _steps(folder) if folder.is_dir() else []:
        with suppress(RlvrError):
            return step, _record(run, path, step=step)[0]["state"]["position"]
    return 0, {}


def check_checkpoints(run: Path) -> tuple[int, list[str]]:
    """Read every byte of the checkpoints. Returns the number of intact checkpoints' files, and one problem per other one.

    Safe while the run is being written: a checkpoint that is pruned meanwhile is ignored.
    """
    files, problems = 0, []
    folder = run / _FOLDER
    try:
        refuse_links(run, _FOLDER)
        with os_errors_as_user_errors(folder, "read"):
            steps = _steps(folder)
    except RlvrError as error:
        return 0, [error.problem]
    for step, path in steps:
        try:
            files += len(_verified(run, path, step=step)["files"]) + 1  # and state.json
        except RlvrError as error:
            if os.path.lexists(path):
                problems.append(error.problem)
    return files, problems


# What may be written


def _check_finite(run: Path, *, step: int, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor]) -> None:
    for kind, tensors in (("weights", weights), ("optimizer's state", moments)):
        name = first_not_finite(tensors)
        if name is not None:
            newest, _ = _newest_intact(run)
            raise RlvrError(
                f"The checkpoint of step {step} was not written: the {kind} hold NaN or infinity, first in {name}.",
                f"The newest intact checkpoint is {shown(newest[0])}; a lower learning rate may get past this step."
                if newest
                else "There is no earlier checkpoint: start again with a lower learning rate.",
            )


def check_space_for_training(
    run: Path,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    *,
    updates: int,
    every: int,
    merged: bool = False,
    lagging: bool = False,
) -> None:
    """Raise RlvrError if the disk lacks space for the checkpoints and the final model of a run that is about to train.

    Args:
        updates: how many updates are still to be done.
        every: updates between two checkpoints; 0: none are written.
        merged: whether the final model is also saved with its adapter merged, in float32.
        lagging: whether the tensors of each checkpoint are a copy of the weights, with which the next rollouts are sampled.
    """
    present = len(_steps(run / _FOLDER)) if (run / _FOLDER).is_dir() else 0
    most = min(KEEP + 1, present + -(-updates // every)) if every else present  # one more than are kept, for a moment
    checkpoint = checkpoint_bytes(policy, optimizer)
    if lagging:
        checkpoint += sum(tensor.nbytes for tensor in distinct_tensors(policy.weights()).values())
    model = sum(tensor.nbytes for tensor in distinct_tensors(policy.saved_weights()).values())
    if merged:
        model += 4 * policy.num_parameters
    needed = max(most - present, 0) * checkpoint + (0 if (run / _MODEL).is_dir() else model)
    with os_errors_as_user_errors(run, "read"):
        free = shutil.disk_usage(run).free
    if free < needed:
        raise RlvrError(
            f"{shown(run)} needs {needed:,} bytes for checkpoints of {checkpoint:,} bytes and the final model, and {free:,} "
            "are free on that disk.",
            "Free some space on that disk, or choose another with --runs-dir.",
        )


def _check_space(path: Path, *, needed: int) -> None:
    free = shutil.disk_usage(path.parent).free
    if free < needed:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        raise RlvrError(
            f"Cannot write {shown(path)}: a checkpoint takes {needed:,} bytes, and {free:,} are free on that disk.",
            "Free some space on that disk.",
        ) from full


# Tensors and their files


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state as PARAMETER/KEY -> tensor; empty before its first step."""
    return {
        f"{name}/{key}": tensor.detach().contiguous()
        for name, parameter in _optimized(policy, optimizer)
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def _optimized(policy: Policy, optimizer: torch.optim.Optimizer) -> list[tuple[str, torch.nn.Parameter]]:
    """The optimizer's parameters with their names in the policy."""
    names = {parameter: name for name, parameter in policy.trainable_parameters().items()}
    return [(names[parameter], parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _cpu_copy(tensor: Tensor) -> Tensor:
    """A copy on the CPU that shares no memory with another tensor, which safetensors would refuse."""
    return tensor.to("cpu", copy=True).contiguous()


def _prepare(folder: Path) -> None:
    """Make the folder of checkpoints, durably, or finish there what a killed process has begun."""
    if not folder.is_dir():
        folder.mkdir()
        fsync_directory(folder.parent)
    _finish_interrupted(folder)


def _write_files(
    folder: Path, policy: Policy, *, moments: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> dict[str, dict[str, Any]]:
    """Write all files but the state; return the bytes and sha256 of each. These are computed while others are written."""
    with ThreadPoolExecutor() as sums:
        policy.save(folder / _MODEL)
        found = {name: sums.submit(_size_and_sha256, folder, name) for name in _names_in(folder)}
        fault_point("checkpoint.torn")
        _write_tensors(folder / _OPTIMIZER, moments)
        for name, some in ((_EXTRA, policy.extra_weights()), (_TENSORS, tensors)):
            if some:
                _write_tensors(folder / name, {key: _cpu_copy(tensor) for key, tensor in some.items()})
        new = [name for name in _names_in(folder) if name not in found]
        found |= {name: sums.submit(_size_and_sha256, folder, name) for name in new}
        return {name: found[name].result() for name in sorted(found)}


def _publish(temporary: Path, path: Path) -> None:
    """Give a complete checkpoint its name, durably. One that has the name steps aside for a moment."""
    fault_point("checkpoint.rename")
    if path.is_dir():
        path.rename(path.with_name(f".{path.name}.old"))
    temporary.rename(path)
    fault_point("checkpoint.renamed")
    fsync_directory(path.parent)


def _write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    with rust_errors_as_os_errors():
        save_file(dict(tensors), path)
    follow_umask(path.parent)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _read_tensors(path: Path) -> dict[str, Tensor]:
    # Clone, because load_file maps the file: pruning a mapped file would not free its disk space.
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def _fitting_weights(path: Path, policy: Policy, *, extra: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the checkpoint's weights, on the CPU, with the names and precisions of `policy`'s weights.

    All but the `extra` ones are those of the saved model.
    """
    model = policy.read_saved(path / _MODEL)
    for stored, wanted in ((extra, policy.extra_weights()), (model, policy.saved_weights())):
        for name in sorted(stored.keys() ^ wanted.keys()):
            raise _misfit(path, name, "is not in it" if name in wanted else "is in it and not in the model")
    fitting = {}
    for name, target in policy.weights().items():
        tensor = extra[name] if name in extra else model[name]
        if tensor.shape != target.shape:
            raise _misfit(path, name, f"is {tuple(tensor.shape)} in it and {tuple(target.shape)} in the model")
        fitting[name] = tensor.to(target.dtype)
        if not fitting[name].to(tensor.dtype).equal(tensor):
            raise _misfit(path, name, f"has bits that {target.dtype} cannot hold")
    return fitting


def _fitting_moments(path: Path, policy: Policy, optimizer: torch.optim.Optimizer) -> dict[Tensor, dict[str, Tensor]]:
    """The checkpoint's optimizer state, by the parameter."""
    parameters = dict(_optimized(policy, optimizer))
    fitting: dict[Tensor, dict[str, Tensor]] = {}
    for stored_name, tensor in _read_tensors(path / _OPTIMIZER).items():
        name, _, key = stored_name.rpartition("/")
        if name not in parameters:
            raise _misfit(path, stored_name, "is the state of a parameter that the optimizer does not have")
        wanted = layout(optimizer, parameters[name]).get(key)
        if wanted is None:
            raise _other_optimizer(path, stored_name, "is in it, and not in the state of this optimizer")
        found = (tuple(tensor.shape), tensor.dtype)
        if found != (tuple(wanted.shape), wanted.dtype):
            raise _misfit(
                path, stored_name, f"is {found} in it, and {(tuple(wanted.shape), wanted.dtype)} in the optimizer"
            )
        fitting.setdefault(parameters[name], {})[key] = tensor
    for name, parameter in parameters.items():
        for key in layout(optimizer, parameter).keys() - fitting.get(parameter, layout(optimizer, parameter)).keys():
            raise _other_optimizer(path, f"{name}/{key}", "is in the state of this optimizer, and not in it")
    return fitting


def _other_optimizer(path: Path, name: str, what: str) -> RlvrError:
    return RlvrError(
        f"{shown(path)} was written by another optimizer: {shown(name)} {what}.",
        "Resume with the --optimizer and the --offload-optimizer that the run was started with.",
    )


def _misfit(path: Path, name: str, what: str) -> RlvrError:
    return RlvrError(
        f"{shown(path)} does not fit the model: {shown(name)} {what}.",
        "Resume with the model and the precision that the run was started with.",
    )


# What is on disk


def _steps(folder: Path) -> list[tuple[int, Path]]:
    """All checkpoints in the folder with their steps, newest first, intact or not."""
    found = [(_NAME.fullmatch(path.name), path) for path in folder.iterdir()]
    return sorted(((int(match[1]), path) for match, path in found if match), reverse=True)


def _newest_intact(run: Path) -> tuple[tuple[Path, dict[str, Any]] | None, list[str]]:
    """The newest intact checkpoint with its state.json, and one problem per newer, damaged checkpoint."""
    problems: list[str] = []
    folder = run / _FOLDER
    with os_errors_as_user_errors(folder, "read"):
        steps = _steps(folder) if os.path.lexists(folder) else []
    for step, path in steps:
        try:
            return (path, _verified(run, path, step=step)), problems
        except NewerVersion:
            raise
        except RlvrError as error:
            problems.append(error.problem)
    return None, problems


def _record(run: Path, path: Path, *, step: int) -> tuple[dict[str, Any], bytes]:
    """Return the state.json of a checkpoint, and its bytes. Raises RlvrError if it is damaged or another run's."""
    data = read_regular(run, f"{_FOLDER}/{path.name}/{_STATE}")
    try:
        record = json.loads(data)
        whole = isinstance(record, dict) and record.pop("sha256", None) and data == _encoded(record)
    except (ValueError, RecursionError):
        whole = False
    if whole and type(version := record.get("schema_version")) is int and version > SCHEMA_VERSION:
        raise newer_version(shown(path), version)
    kinds = {"schema_version": int, "step": int, "state": dict, "files": dict}
    if not whole or {name: type(value) for name, value in record.items()} != kinds:
        raise _damaged(path / _STATE, "it is not as it was written")
    if record["schema_version"] < 1 or record["step"] != step:
        raise _damaged(path / _STATE, "its schema_version or step is not the one that belongs here")
    owner, own = record["state"].get("run_created_at"), _created_at(run)
    if None not in (owner, own) and owner != own:
        raise RlvrError(f"{shown(path)} is a checkpoint of another run, which was created at {shown(str(owner))}.")
    return record, data


def _created_at(run: Path) -> str | None:
    """What tells a run from all others, wherever it is moved or copied to; None if run.json is damaged, which others report."""
    with suppress(RlvrError):
        return read_metadata(run)["created_at"]
    return None


def _verified(run: Path, path: Path, *, step: int) -> dict[str, Any]:
    """Return the state.json of a checkpoint, after comparing every file with its checksum.

    Raises:
        RlvrError: a file is damaged, missing or unexpected, or the checkpoint is another run's; names it.
    """
    within = f"{_FOLDER}/{path.name}"
    record, data = _record(run, path, step=step)
    recorded = {**record["files"], _STATE: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}}
    present = _names_in(path)
    for name in sorted({*recorded, *present}):
        refuse_links(run, f"{within}/{name}")
        if name not in recorded:
            raise RlvrError(f"{shown(path / name)} is not a part of its checkpoint.")
        if name not in present:
            raise RlvrError(f"{shown(path / name)} is missing.")
        with os_errors_as_user_errors(path / name, "read"):
            found = _size_and_sha256(path, name)
        if found != recorded[name]:
            raise _damaged(path / name, "its size or sha256 is not the one in state.json")
    return record


def _damaged(path: Path, what: str) -> RlvrError:
    return RlvrError(f"{shown(path)} is damaged: {what}.")


def _encoded(record: Mapping[str, Any]) -> bytes:
    """The bytes of state.json; its last field is the sha256 of the others."""
    digest = hashlib.sha256(json.dumps(record).encode()).hexdigest()
    return json.dumps({**record, "sha256": digest}, indent=2).encode() + b"\n"


def _names_in(folder: Path) -> list[str]:
    """Names of all files at any depth, relative to the folder, with "/"; links are listed but not followed."""
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_symlink() or not p.is_dir())


def _size_and_sha256(folder: Path, name: str) -> dict[str, Any]:
    """Size and sha256 of a file, as state.json records them. Raises OSError."""
    descriptor = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError("it is not a regular file")
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {"bytes": file.tell(), "sha256": digest}


# Renaming and removing. After each system call the folder still loads. All of these raise OSError.


def _finish_interrupted(folder: Path) -> None:
    """Undo or finish what a killed process left unfinished."""
    for path in sorted(folder.iterdir()):
        if path.is_symlink() or not path.is_dir() or not path.name.startswith("."):
            continue
        if path.name.endswith(".tmp"):
            shutil.rmtree(path)
        elif path.name.endswith(".old") and _NAME.fullmatch(path.name[1:-4]):
            successor = folder / path.name[1:-4]
            if successor.exists():
                _discard(path)
            else:
                path.rename(successor)


def _prune(folder: Path, *, newest: int, keep: int) -> None:
    steps = [(step, path) for step, path in _steps(folder) if path.is_dir() and not path.is_symlink()]
    abandoned = [path for step, path in steps if step > newest]
    history = [path for step, path in steps if step <= newest]
    for path in (*abandoned, *history[keep:]):
        fault_point("prune")
        _discard(path)


def _discard(path: Path) -> None:
    """Remove a checkpoint; rename it first, so that no partial checkpoint ever has a valid name."""
    aside = path.with_name(f".{path.name.removeprefix('.')}.tmp")
    path.rename(aside)
    fsync_directory(path.parent)
    fault_point("prune.torn")
    shutil.rmtree(aside)
