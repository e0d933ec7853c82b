"""What a command writes down before it starts: its config, where each value came from, and the facts of its inputs.

Enters: a config and the facts (dataset fingerprint, model, engine, grader). Leaves: an open run whose run.json holds them, or,
for a run that goes on, the proof that they are what they were.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, TypeVar

from rlvr_cli.config import Provenance, options, resume
from rlvr_cli.environment import environment
from rlvr_cli.errors import Interrupted, RlvrError
from rlvr_cli.store import RunDir, RunInfo, read_run, resolve_run

C = TypeVar("C", bound=Provenance)


def resumed_config(config: C, *, command: str) -> C:
    """The config to work with: as given, or, with ``--resume``, the stored one (see `config.resume`)."""
    if not config.resume:  # type: ignore[attr-defined]
        return config
    run = read_run(resolve_run(config.resume, config.runs_dir))  # type: ignore[attr-defined]
    if run.metadata["command"] != command:
        raise RlvrError(
            f"{run.id} is a run of rlvr {run.metadata['command']}, not of rlvr {command}.",
            f"Name a run of rlvr {command}.",
        )
    if "config" not in run.metadata:
        raise RlvrError(
            f"{run.id} was not started by rlvr {command} and has no options to go on with.", "Start a new run."
        )
    return resume(config, run.metadata["config"], run=run.id)


@contextmanager
def open_run(config: Any, *, command: str, facts: Mapping[str, Any]) -> Iterator[RunDir]:
    """Create the run, or open it again when its facts are the same; its status says how the block ended.

    Raises:
        RlvrError: the run is being written by another process, or it was made from other inputs (all of them named).
    """
    resumable = "resume" in {f.name for f in options(type(config))}
    if resumable and config.resume:
        path = resolve_run(config.resume, config.runs_dir)
        _check_facts(read_run(path), facts)
        run = RunDir.resume(path)
    else:
        knobs = {f.name for f in options(type(config))}
        metadata = {
            "seed": config.seed,
            "config": {k: v for k, v in asdict(config).items() if k in knobs},
            "sources": dict(config.sources),
            "facts": dict(facts),
            "environment": environment(),
        }
        run = RunDir.create(config.runs_dir, command, name=config.run, metadata=metadata)
    with run:
        try:
            yield run
        except (Interrupted, KeyboardInterrupt):
            hint = f"; go on with: rlvr {command} --resume {run.path}" if resumable else ""
            raise Interrupted(f"what is done is kept in {run.path}{hint}") from None


def _check_facts(run: RunInfo, facts: Mapping[str, Any]) -> None:
    stored = run.metadata["facts"]
    differing = [
        f"its {kind} {name} was {_brief(was)}, now is {_brief(now)}"
        for kind in facts
        for name, was, now in _differences(stored.get(kind), facts[kind])
    ]
    if differing:
        raise RlvrError(
            f"{run.id} was made from other inputs: {'; '.join(differing)}.",
            "Give it the same inputs, or start a new run.",
        )


def _differences(was: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """(key, was, now) of what differs. Of weights that have a hash the hash counts, not where they lie."""
    if isinstance(was, dict) and isinstance(now, dict) and was.get("sha256") and now.get("sha256"):
        was, now = ({k: v for k, v in facts.items() if k.endswith("sha256")} for facts in (was, now))
    if isinstance(was, dict) and isinstance(now, dict):
        return [(k, was.get(k), now.get(k)) for k in sorted(was.keys() | now.keys()) if was.get(k) != now.get(k)]
    return [] if was == now else [("", was, now)]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
