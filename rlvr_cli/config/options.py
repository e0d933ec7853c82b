"""What an option is: a field of a config dataclass made by `knob`, which is a flag, a TOML key and a line of run.json.

Enters: config dataclasses. Leaves: their options in the order of ``--help``, and the checks that configs share.
"""

import inspect
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple

from rlvr_cli.errors import RlvrError

Format = Literal["table", "json", "csv", "markdown"]
FileFunction = Annotated[str, "FILE.py:FUNCTION"]  # beside a Literal: a function of the user's own does too


def knob(
    default: Any,
    help: str,
    *,
    group: str,
    common: bool = False,
    completes: str = "",
    argument: bool = False,
    free_on_resume: bool = False,
) -> Any:
    """A field that is an option. Its type is the annotation; a Literal lists its choices.

    Args:
        group: its heading in the help.
        common: whether ``--help`` shows it; ``--help-all`` shows every option.
        completes: what the Tab key offers where the annotation does not say it, see `rlvr_cli.completion`.
        argument: it is given by its place, without a name.
        free_on_resume: a run that goes on may change it.
    """
    metadata = {
        "help": help,
        "group": group,
        "common": common,
        "completes": completes,
        "argument": argument,
        "free_on_resume": free_on_resume,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Provenance:
    """Not options: where each option's value came from ("flag", "config FILE", "preset NAME", "resumed run" or "default")."""

    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def described(config_type: type) -> tuple[str, list[str]]:
    """What a command does, and examples of it, from its config's docstring."""
    summary, _, examples = (inspect.getdoc(config_type) or "").partition("\n\nExamples:\n")
    return " ".join(summary.split()), [line.strip() for line in examples.splitlines()]


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


class ValueType(NamedTuple):
    """What the annotation of an option says of its values."""

    kind: type  # str, int, float or bool
    several: bool  # it may be given more than once
    choices: tuple[str, ...]  # empty: any value
    own: bool  # FILE.py:FUNCTION stands beside the choices


def value_type(option: Field[Any]) -> ValueType:
    """`int | None` -> int; `tuple[str, ...]` -> several str; `Literal["a", "b"]` -> str with choices."""
    kind: Any = option.type
    parts = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    parts = [part for part in parts if part is not type(None)]
    own = FileFunction in parts
    kind = next(part for part in parts if part is not FileFunction)
    several = typing.get_origin(kind) is tuple
    if several:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Literal:
        return ValueType(str, several, typing.get_args(kind), own)
    return ValueType(kind, several, (), own)


def read_value(option: Field[Any], text: str) -> Any:
    """A value as it is typed. Raises RlvrError when it is none of the option's type or choices."""
    kind = value_type(option).kind
    try:
        value = kind(text)
    except ValueError as e:
        wanted = "a whole number" if kind is int else "a number"
        raise RlvrError(f"{flag(option.name)} is {text!r}.", f"It takes {wanted}.") from e
    check_value(option, value)
    return value


def check_value(option: Field[Any], value: Any) -> None:
    """RlvrError when a value is no finite number, or none of the option's choices."""
    name = flag(option.name)
    if isinstance(value, float) and not math.isfinite(value):
        raise RlvrError(f"{name} is {value}.", "Give a number.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise RlvrError(f"{name} is {value}.", "Give a number of at most 18 digits.")
    expected = value_type(option)
    if expected.choices and value not in expected.choices and not (expected.own and ".py:" in str(value)):
        near = nearest(str(value), expected.choices)
        listed = [choice for choice in expected.choices if choice] + ["FILE.py:FUNCTION"] * expected.own
        raise RlvrError(
            f"{name} is {value!r}." + (f" Did you mean {near[0]}?" if near else ""),
            f"Choose one of {', '.join(listed)}.",
        )


def check_values(config: Any) -> None:
    """`check_value` of every option."""
    for option in options(type(config)):
        if not value_type(option).several:
            check_value(option, getattr(config, option.name))


def nearest(word: str, known: Iterable[str], *, most: int = 1) -> list[str]:
    """The known words that a mistyped one resembles, the nearest first."""
    import difflib  # only where something is wrong

    return difflib.get_close_matches(word, list(known), n=most)


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
