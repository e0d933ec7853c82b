"""What an option is: a field of a config dataclass made by `knob`, which is a flag, a TOML key and a line of run.json.

Enters: config dataclasses. Leaves: their options in the order of ``--help``, and the checks that configs share.
"""

import math
import types
import typing
from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.user_code import names_file

FORMATS = ("table", "json", "csv", "markdown")


def knob(
    default: Any,
    help: str,
    *,
    group: str,
    choices: tuple[str, ...] = (),
    or_file: bool = False,
    argument: bool = False,
    free_on_resume: bool = False,
) -> Any:
    """A field with its help line, its heading in ``--help``, and whether a resumed run may change it.

    With `or_file` a value is one of the choices or a user's own function, FILE.py:FUNCTION.
    """
    metadata = {
        "help": help,
        "group": group,
        "choices": choices,
        "or_file": or_file,
        "argument": argument,
        "free_on_resume": free_on_resume,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Provenance:
    """Not options: where each option's value came from ("flag", "config FILE", "preset NAME", "resumed run" or "default")."""

    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def flag(name: str) -> str:
    """`field_name` -> ``--option-name``."""
    return "--" + name.replace("_", "-")


def options(config_type: type) -> list[Field[Any]]:
    """The fields of a config that are options, in the order of ``--help``: grouped, groups in order of first use."""
    knobs = [f for f in fields(config_type) if "group" in f.metadata]
    order = (
        "Query",
        "Data",
        "Model",
        "Sampling",
        "Grading",
        "Filter",
        "Algorithm",
        "Optimization",
        "Evaluation",
        "Output",
        "Run",
    )
    return sorted(knobs, key=lambda f: order.index(f.metadata["group"]))


def value_type(option: Field[Any]) -> tuple[type, bool]:
    """(type of one value, whether several are taken): `int | None` -> (int, False), `tuple[str, ...]` -> (str, True)."""
    kind: Any = option.type
    if typing.get_origin(kind) is types.UnionType:
        kind = next(t for t in typing.get_args(kind) if t is not type(None))
    if typing.get_origin(kind) is tuple:
        return typing.get_args(kind)[0], True
    return kind, False


def check_values(config: Any) -> None:
    for option in options(type(config)):
        value = getattr(config, option.name)
        if isinstance(value, float) and not math.isfinite(value):
            raise RlvrError(f"{flag(option.name)} is {value}.", "Give a number.")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise RlvrError(f"{flag(option.name)} is {value}.", "Give a number of at most 18 digits.")
        choices = option.metadata["choices"]
        or_file = option.metadata["or_file"]
        if choices and value not in choices and not (or_file and names_file(str(value))):
            own = ", or FILE.py:FUNCTION" if or_file else ""
            raise RlvrError(f"{flag(option.name)} is {value!r}.", f"Choose one of {', '.join(choices)}{own}.")


def at_least(config: Any, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value >= minimum:
            raise RlvrError(f"{flag(name)} is {value}.", f"It must be at least {minimum}.")


def above_zero(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise RlvrError(f"{flag(name)} is {value}.", "It must be above 0.")


def divides(config: Any, divisor: str, dividend: str) -> None:
    """RlvrError with values that would do, unless the one option's value divides the other's."""
    d, n = getattr(config, divisor), getattr(config, dividend)
    if n % d:
        fitting = [k for k in range(1, n + 1) if n % k == 0]
        near = sorted(sorted(fitting, key=lambda k: abs(k - d))[:3])
        raise RlvrError(
            f"{flag(dividend)} {n} is not a multiple of {flag(divisor)} {d}.",
            f"Take {flag(dividend)} {max(n // d, 1) * d}, or {flag(divisor)} {' or '.join(map(str, near))}.",
        )
