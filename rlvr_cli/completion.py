"""Shell completion of option values that the option's type does not list (runs, models, datasets, ...).

Enters: the kind of value (`completes` of an option) and the text typed so far. Leaves: (value, description) pairs; none
where the shell should complete file names.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlvr_cli.config.parsing.sources import at_home, environment_values, preset_names
from rlvr_cli.errors import RlvrError

Candidates = Iterator[tuple[str, str]]


def complete_value(kind: str, *, command: str, given: Mapping[str, Any], typed: str) -> list[tuple[str, str]]:
    """Return the values that begin with the typed text, each with a short description.

    Args:
        kind: `preset`, `run`, `run of the command`, `query`, `model`, `dataset`, `source`, `prompt` or `experiment`.
        command: the command on the line.
        given: the values of the options before this one.
        typed: the text typed so far.
    """
    runs_dir = Path(at_home(given.get("runs_dir")) or environment_values().get("runs_dir", "runs"))
    with suppress(RlvrError, OSError):  # an error message would appear in the middle of the command line
        return [
            (value, about) for value, about in _candidates(kind, command, runs_dir, typed) if value.startswith(typed)
        ]
    return []


def _candidates(kind: str, command: str, runs_dir: Path, typed: str) -> Candidates:
    match kind:
        case "preset":
            yield from ((name, "") for name in preset_names(command))
        case "run":
            before = typed[: typed.rfind(",") + 1]  # rlvr analyze compare A1,A2 B1,B2
            yield from ((before + name, about) for name, about in _runs(runs_dir))
        case "run of the command":
            yield from _runs(runs_dir, command=command)
        case "query":
            yield from _queries()
            yield from _runs(runs_dir)
        case "model":
            yield from _models(runs_dir, typed)
        case "dataset":
            yield from _datasets()
        case "source":
            yield from _runs(runs_dir)
            yield from _datasets()
        case "experiment":
            from rlvr_cli.sweeps.experiment import experiment_names

            yield from ((name, "") for name in experiment_names())
        case "environment":
            from rlvr_cli.environments.open import BUILT_IN

            yield from ((name, "") for name in BUILT_IN)
        case "prompt":
            from rlvr_cli.data.prompts import prompt_names

            yield from ((name, "") for name in prompt_names())
        case _:
            raise AssertionError(kind)


def _runs(runs_dir: Path, *, command: str = "") -> Candidates:
    """Yield the runs, newest first; with `command`, only the runs of that command."""
    from rlvr_cli.runs.manifest import RUN_FILE
    from rlvr_cli.runs.readers import run_names

    for name in run_names(runs_dir):
        metadata: Any = {}
        with suppress(OSError, ValueError):
            metadata = json.loads((runs_dir / name / RUN_FILE).read_bytes())
        if not command or metadata.get("command") == command:
            yield name, f"{metadata.get('command', 'run')}, {metadata.get('status', 'damaged')}"


def _queries() -> Candidates:
    from rlvr_cli.analysis.queries.named_queries import named_queries

    yield from ((query.name, query.description) for query in named_queries().values())
    yield "report", "one HTML page"


def _datasets() -> Candidates:
    from rlvr_cli.data.datasets import dataset_names

    yield from ((name, "") for name in dataset_names())


def _models(runs_dir: Path, typed: str) -> Candidates:
    """Yield the models of runs and matching directories; if the only match is not a model, also its subdirectories."""
    for path in sorted(path for path in runs_dir.glob("*/model*") if _is_model(path)):
        yield str(path), "model of a run"
    name = typed.rpartition(os.sep)[2]
    inside = Path(typed[: len(typed) - len(name)] or ".")
    folders = [p for p in sorted(inside.iterdir()) if p.name.startswith(name) and p.is_dir() and _shown(p, name)]
    if len(folders) == 1 and not _is_model(folders[0]):  # the shell appends a space to a single candidate
        folders += [p for p in sorted(folders[0].iterdir()) if p.is_dir() and _shown(p, "")]
    for folder in folders:
        yield (str(folder), "model") if _is_model(folder) else (f"{folder}{os.sep}", "directory")


def _is_model(folder: Path) -> bool:
    from rlvr_cli.models.directory import holds_model

    return holds_model(folder)


def _shown(path: Path, typed: str) -> bool:
    return typed.startswith(".") or not path.name.startswith(".")
