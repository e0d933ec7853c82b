"""Arms: runs that are compared, and what distinguishes them in words.

Enters: the RUN arguments of a command; `A1,A2,A3` are runs of one arm, such as seeds. Leaves: `Arm`s, labeled by the options in
which they differ.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.options import options
from rlvr_cli.runs.readers import RunInfo, expanded_by_shell, is_run, resolve_runs

MAX_OPTIONS = 3  # arms that differ in more options are labeled by name
_COMMANDS = ("distill", "dpo", "ei", "eval", "grpo", "ppo", "sft")  # whose runs are compared


@dataclass(frozen=True, slots=True)
class Arm:
    """Runs of one configuration; several are seeds."""

    runs: tuple[str, ...]  # ids
    label: str = ""
    command: str = ""  # "" if its runs are of different ones


def split_arms(
    arguments: Sequence[str], runs_dir: str, *, patterns_are_arms: bool = False
) -> tuple[list[list[Path]], list[str]]:
    """`A1,A2 B1` -> the directories of each arm, and what patterns match besides, which is no run.

    A run whose own path has a comma is one run. The runs of a pattern ('abl-*') are an arm each, or together one; with a
    comma ('abl-*,') they are always one.

    Raises:
        RlvrError: there is no such run.
    """
    arms: list[list[Path]] = []
    others: list[str] = []
    expanded = expanded_by_shell(arguments)
    for argument in arguments:
        if argument in expanded and not is_run(argument, runs_dir):
            others.append(argument)
            continue
        names = [argument] if is_run(argument, runs_dir) else [name for name in argument.split(",") if name]
        named = [resolve_runs([name], runs_dir) for name in names]
        runs = [path for each in named for path in each.runs]
        others += [name for each in named for name in each.others]
        if patterns_are_arms or names != [argument]:
            arms.append(runs)
        else:
            arms += [[path] for path in runs if [path] not in arms]
    if others and not arms:
        resolve_runs(others, runs_dir)  # raises: none is a run
    return arms, others


def arms_of(runs: Sequence[Sequence[RunInfo]]) -> list[Arm]:
    """Label arms by the options in which they differ, such as `learning_rate 3e-05`.

    An option counts if all runs have it, and if it is the same in all runs of each arm. The label is the name if there is no such
    option, or more than `MAX_OPTIONS`, or if the arms are of different commands; the name is also added where two labels are equal.
    An arm of several runs says how many.
    """
    configs, silent = [[_config(info) for info in arm] for arm in runs], _silent()
    names = dict.fromkeys(name for arm in configs for config in arm for name in config if name not in silent)
    differing = []
    for name in sorted(names, key=lambda name: name == "seed"):  # the seed last
        values = [{_text(config[name]) if name in config else "" for config in arm} for arm in configs]
        if all(len(of_arm) == 1 and "" not in of_arm for of_arm in values) and len(set().union(*values)) > 1:
            differing.append(name)
    named = [_name([info.id for info in arm]) for arm in runs]
    labels = named
    commands = {info.metadata.get("command") for arm in runs for info in arm}
    if 0 < len(differing) <= MAX_OPTIONS and len(commands) == 1:
        labels = [", ".join(f"{name} {_text(arm[0].get(name))}" for name in differing) for arm in configs]
        labels = [
            f"{text} ({name})" if labels.count(text) > 1 else text for text, name in zip(labels, named, strict=True)
        ]
    if len(set(labels)) < len(labels):
        labels = [", ".join(info.id for info in arm) for arm in runs]
    found = []
    for arm, of_arm, label in zip(runs, configs, labels, strict=True):
        own = {str(info.metadata.get("command", "")) for info in arm}
        seeds = len({_text(config.get("seed")) for config in of_arm}) == len(arm)
        count = f" ({len(arm)} {'seeds' if seeds else 'runs'})" if len(arm) > 1 else ""
        found.append(Arm(tuple(info.id for info in arm), label + count, own.pop() if len(own) == 1 else ""))
    return found


def arm_names(runs: Sequence[Sequence[str]]) -> list[str]:
    """A name for each arm, of the ids of its runs: what they begin with, or all of them where two would have the same."""
    names = [_name(ids) for ids in runs]
    return names if len(set(names)) == len(names) else [", ".join(ids) for ids in runs]


@cache
def _silent() -> set[str]:
    """The options in which runs of the same experiment may differ."""
    found = {
        option.name
        for command in _COMMANDS
        for option in options(config_of(command))
        if option.metadata["group"] == "Run" or option.metadata["free_on_resume"]
    }
    more = "device engine eval_every final_eval_examples skip_bad_lines grader_timeout fused_kernels".split()
    return found.union(more) - {"seed", "model", "sft_epochs", "n_sft_steps"}


def _config(info: RunInfo) -> Mapping[str, Any]:
    config = info.metadata.get("config")
    return config if isinstance(config, Mapping) else {}


def _name(ids: Sequence[str]) -> str:
    """What the names of an arm begin with, or all of them."""
    if len(ids) == 1:
        return ids[0]
    shared = "".join(
        letters[0] for letters in takewhile(lambda letters: len(set(letters)) == 1, zip(*ids, strict=False))
    )
    shared = shared.rstrip("-_.0123456789").removesuffix("-s").removesuffix("-seed")
    return shared if len(shared) > 2 else ", ".join(ids)


def _text(value: Any) -> str:
    return "none" if value in (None, "") else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
