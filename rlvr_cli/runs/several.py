"""Several runs together, each under a name of its own.

Enters: run directories. Leaves: a `RunInfo` of each, whose id is that of no other; of a directory, the command for the runs of its folders.
"""

import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rlvr_cli.runs.readers import RunInfo, folders_of_runs, pattern_below, read_run
from rlvr_cli.runs.storage.sources import place_of


def read_runs(paths: Iterable[Path]) -> list[RunInfo]:
    """Read runs, each directory once. Where two have the same id, all get those of `telling_names` instead. Raises as `read_run`."""
    infos = list({path.resolve(): read_run(path) for path in paths}.values())
    if len({info.id for info in infos}) == len(infos):
        return infos
    names = telling_names([info.path for info in infos])
    return [replace(info, id=name) for info, name in zip(infos, names, strict=True)]


def read_named(paths: Mapping[str, Path]) -> list[RunInfo]:
    """Read different runs, each under the name that it has here: of a copy, run.json has that of the original. Raises as `read_run`."""
    return [replace(read_run(path), id=name) for name, path in paths.items()]


def read_here(paths: Iterable[Path]) -> list[RunInfo]:
    """Read runs, each directory once, under `telling_names`. Raises as `read_run`."""
    distinct = list({path.resolve(): path for path in paths}.values())
    return read_named(dict(zip(telling_names(distinct), distinct, strict=True)))


def telling_names(paths: Sequence[Path]) -> list[str]:
    """The last parts of these different paths or addresses, of each as many as it takes to tell all of them apart: a/r, b/r."""
    parts = [place_of(os.path.abspath(path)).split("/") for path in paths]
    for number in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-number:]) for each in parts]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def command_below(command: str, root: Path | str) -> str:
    """The command for the runs of a directory's folders, such as rlvr view 'runs/sweep/*'; "" if they hold none. Raises RlvrError."""
    patterns = [pattern_below(root, folder) for folder in folders_of_runs(root)]
    return shlex.join(["rlvr", command, *patterns]) if patterns else ""
