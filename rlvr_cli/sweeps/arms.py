"""What an experiment varies: its arms, and their names.

Enters: the tables [[arms]], [grid] and [paired] of an experiment, and the command line's --vary. Leaves: the options of each arm, its name, and
which one is the baseline.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import Field
from itertools import product
from typing import Any

from rlvr_cli.config.parsing.options import Provenance, flag, nearest, options, read_value, value_type
from rlvr_cli.config.parsing.sources import read_options
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.terminal import console

MAX_RUNS = 10_000


class SameArms(RlvrError):
    """Nothing tells two arms apart."""


def put_varied(content: dict[str, Any], vary: Sequence[str], kind: type[Provenance]) -> list[str]:
    """Put the values of --vary in place of the file's, where it varies the option, or beside them. Returns the options."""
    varied = [_varied(text, kind, command=content["command"]) for text in vary]
    for option, values in varied:
        if [name for name, _ in varied].count(option) > 1:
            raise UsageError(f"--vary has {flag(option)} twice.", f"Give all its values at once: --vary {option}=V1,V2")
        for table in ("grid", "paired"):
            if option in content[table]:
                content[table][option] = values
                break
        else:
            content["grid"][option] = values
            content["options"].pop(option, None)
    return [option for option, _ in varied]


def replaced_in_arms(arms: Sequence[dict[str, Any]], chosen: Collection[str]) -> list[str]:
    """Take the options that the command line has chosen out of [[arms]]. Returns those that were there."""
    replaced = {key for arm in arms for key in arm if key in chosen}
    for arm in arms:
        for key in replaced & arm.keys():
            del arm[key]
    return sorted(replaced)


def baseline_of(content: Mapping[str, Any], names: Sequence[str], *, are_varied: bool, where: str) -> str:
    """The arm that a file names as its baseline; where --vary has changed the arms' names, the first one that comes of it; else the first.

    Raises:
        RlvrError: the file names no arm of its own.
    """
    named = content.get("baseline", "")
    if not named or named in names:
        return named or names[0]
    if not are_varied:
        raise RlvrError(f"{where}: the baseline {named!r} is no arm.", f"The arms: {', '.join(names)}.")
    longer = [f"{own}_" for arm in content["arms"] if (own := name_part(arm.get("name", ""))).startswith(f"{named}_")]
    of_it = (name for name in names if name.startswith(f"{named}_") and not name.startswith(tuple(longer)))
    found = next(of_it, names[0])
    console.say(f"note: the baseline is {found}: with --vary no arm of {where} is named {named}")
    return found


def _varied(text: str, kind: type[Provenance], *, command: str) -> tuple[str, list[Any]]:
    """`OPTION=V1,V2` -> the option's field name and its values."""
    name, equals, values = text.partition("=")
    known = {option.name: option for option in options(kind)}
    name = name.lstrip("-").replace("-", "_")
    if not equals or not values:
        raise UsageError(
            f"--vary {text} has no values.", "Write --vary OPTION=V1,V2, such as --vary learning_rate=1e-5,3e-5."
        )
    if name not in known:
        near = nearest(name, known)
        raise UsageError(
            f"--vary {text}: rlvr {command} has no option {flag(name)}.",
            f"Did you mean {near[0]}?" if near else f"rlvr {command} --help-all lists them.",
        )
    option = known[name]
    if value_type(option).kind is bool:
        truth = {"true": True, "false": False}
        if wrong := [word for word in values.split(",") if word.lower() not in truth]:
            raise UsageError(f"--vary {text}: {wrong[0]!r} is neither true nor false.")
        return name, [truth[word.lower()] for word in values.split(",")]
    return name, [read_value(option, word) for word in values.split(",")]


def arms_of(
    content: Mapping[str, Any], kind: type[Provenance], *, command: str, where: str
) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the options of each arm, and their names."""
    factors: list[list[tuple[str, dict[str, Any]]]] = []  # each: (name or "", options)
    if content.get("arms"):
        named = []
        for arm in content["arms"]:
            own = {key: value for key, value in arm.items() if key != "name"}
            if not isinstance(arm.get("name", ""), str):
                raise RlvrError(f"{where}: the name of an arm is not a text.")
            if arm.get("name") and not name_part(arm["name"]):
                raise RlvrError(
                    f"{where}: the arm's name {arm['name']!r} has no character that the name of a run can have.",
                    "Use letters and digits, A-Z a-z 0-9.",
                )
            named.append((arm.get("name", ""), own))
        factors.append(named)
    for key in ("grid", "paired"):
        for option, values in content[key].items():
            if not isinstance(values, list) or not values:
                raise RlvrError(f"{where}: {option} in [{key}] is not a list of values.", f"Write {option} = [V1, V2].")
    if paired := content["paired"]:
        if len({len(values) for values in paired.values()}) > 1:
            lengths = ", ".join(f"{option} {len(values)}" for option, values in paired.items())
            raise RlvrError(f"{where}: the lists in [paired] are not equally long: {lengths}.")
        factors.append([("", dict(zip(paired, row, strict=True))) for row in zip(*paired.values(), strict=True)])
    factors += [[("", {option: value}) for value in values] for option, values in content["grid"].items()]
    check_number(math.prod(map(len, factors)))
    known = {option.name: option for option in options(kind)}
    arms, names = [], []
    for combination in product(*factors):
        own: dict[str, Any] = {}
        for _, given in combination:
            if twice := own.keys() & given.keys():
                raise RlvrError(f"{where}: {min(twice)} varies in two places.")
            own |= read_options(given, kind, command=command, where=where)
        parts = [name or "_".join(_part(known[o], own[o]) for o in given) for name, given in combination]
        arms.append(own)
        names.append("_".join(map(name_part, parts))[:100] or command)
    if len({json.dumps(arm, sort_keys=True, default=str) for arm in arms}) < len(arms):
        raise SameArms(f"{where}: two arms have the same options.")
    if more := Counter(names) - Counter(set(names)):
        raise RlvrError(f"{where}: two arms are named {next(iter(more))}.", "Give them names: [[arms]] with name = ...")
    return arms, names


def check_number(runs: int) -> None:
    """Raise RlvrError if these are too many runs."""
    if runs > MAX_RUNS:
        raise RlvrError(f"These are {runs:,} runs.", f"A sweep has at most {MAX_RUNS:,}.")


def _part(option: Field[Any], value: Any) -> str:
    """The part of an arm's name that an option's value makes: one of several choices speaks for itself."""
    part = name_part(named_value(value))
    return part if value_type(option).choices else f"{option.name}-{part}"


def named_value(value: Any) -> str:
    """A value as --vary takes it; a float without a +, which no name has."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return "+".join(map(str, value))
    return f"{value:g}".replace("e+", "e") if isinstance(value, float) else str(value)


def name_part(text: str) -> str:
    """A text as part of a run's name: file names and functions by their last part."""
    text = text.rpartition("/")[2]
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-._")
