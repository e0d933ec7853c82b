"""Options: a field of a config dataclass made by `knob` becomes a flag, a TOML key and an entry of run.json.

Enters: config dataclasses. Leaves: their options in the order of ``--help``, and the checks shared by the configs.
"""

import functools
import inspect
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from typing import Annotated, Any, Literal, NamedTuple

from rlvr_cli.errors import RlvrError
from rlvr_cli.text import printable

Format = Literal["table", "json", "csv", "markdown"]
LONGEST = 31_536_000  # seconds, a year: the most that an option in seconds takes; far above it, clocks overflow
# In a union with a Literal, values of these forms are accepted, too: the user's own function, and a model that grades by a rubric.
FUNCTION_FORM, JUDGE_FORM = "FILE.py:FUNCTION", "judge:RUBRIC.md"
FileFunction = Annotated[str, "FILE.py:FUNCTION"]
JudgeFile = Annotated[str, "judge:RUBRIC.md"]
JUDGE = "judge:"  # begins a value of the second form
_TRIED = 1_000_000  # numbers of which is seen whether they divide another


def knob(
    default: Any,
    help: str,
    *,
    group: str,
    common: bool = False,
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    completes: str = "",
    argument: bool = False,
    free_on_resume: bool = False,
    auto: float | None = None,
    joined_by: str = "",
    goes_with: str = "",
    instead: Mapping[str, str] | None = None,
    path: bool = False,
) -> Any:
    """Declare a dataclass field as an option. The annotation gives its type; a Literal gives its choices.

    Args:
        group: the option's heading in the help.
        common: whether ``--help`` shows it; ``--help-all`` shows every option.
        above, at_least, at_most: the value's exclusive and inclusive minimum, and its maximum; None: no such limit.
        completes: the kind of value that shell completion suggests, see `rlvr_cli.completion`; empty: the choices.
        argument: whether it is a positional argument.
        free_on_resume: whether a resumed run may change it.
        auto: the number for which the word `auto` may be given: it means that the value is chosen.
        joined_by: what stands between the texts of an option that is given several times; empty: the last one counts.
        goes_with: the option for whose value this one is chosen: if that gets another one, what a preset sets here is not taken.
        instead: words that are no choice, though people try them -> what does what they ask for.
        path: whether a value is a file or directory. Those with a form `FILE.py:FUNCTION`, or that complete to names of files, may be one anyway.
    """
    metadata = {
        "help": help,
        "group": group,
        "common": common,
        "above": above,
        "at_least": at_least,
        "at_most": at_most,
        "completes": completes,
        "argument": argument,
        "free_on_resume": free_on_resume,
        "auto": auto,
        "joined_by": joined_by,
        "goes_with": goes_with,
        "instead": instead or {},
        "path": path,
    }
    return field(default=default, metadata=metadata)


@dataclass(frozen=True)
class Provenance:
    """Base of all configs: the source of each option's value ("flag", "config FILE", "preset NAME", "environment", "resumed run" or
    "default")."""

    sources: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)


def summary_and_examples(config_type: type) -> tuple[str, list[str]]:
    """Return a command's summary and its examples, from the docstring of its config."""
    summary, _, examples = (inspect.getdoc(config_type) or "").partition("\n\nExamples:\n")
    return " ".join(summary.split()), [line.strip() for line in examples.splitlines()]


def flag(name: str) -> str:
    """`field_name` -> ``--option-name``."""
    return "--" + name.replace("_", "-")


def options(config_type: type) -> list[Field[Any]]:
    """Return the fields of a config that are options, in the order of ``--help``: by group, in a fixed order of groups."""
    knobs = [f for f in fields(config_type) if "group" in f.metadata]
    order = (
        "Query",
        "Data",
        "Model",
        "Sampling",
        "Episodes",
        "Grading",
        "Filter",
        "Algorithm",
        "Critic",
        "Optimization",
        "Evaluation",
        "Output",
        "Run",
    )
    return sorted(knobs, key=lambda f: order.index(f.metadata["group"]))


class ValueType(NamedTuple):
    """The type of an option's values, read from its annotation."""

    kind: type  # str, int, float or bool
    repeatable: bool  # the option is repeatable
    choices: tuple[str, ...]  # empty: any value
    forms: tuple[str, ...] = ()  # accepted besides the choices: FILE.py:FUNCTION, judge:RUBRIC.md

    def has_form(self, value: Any) -> bool:
        """Whether a value has one of the `forms`."""
        text = str(value)
        return (FUNCTION_FORM in self.forms and ".py:" in text) or (JUDGE_FORM in self.forms and text.startswith(JUDGE))


@functools.cache  # by option, not by type: types whose choices are in another order are equal
def value_type(option: Field[Any]) -> ValueType:
    """`int | None` -> int; `tuple[str, ...]` -> repeatable str; `Literal["a", "b"]` -> str with choices."""
    kind: Any = option.type
    parts = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
    parts = [part for part in parts if part is not type(None)]
    forms = tuple(form for kind, form in ((FileFunction, FUNCTION_FORM), (JudgeFile, JUDGE_FORM)) if kind in parts)
    kind = next(part for part in parts if part not in (FileFunction, JudgeFile))
    repeatable = typing.get_origin(kind) is tuple
    if repeatable:
        kind = typing.get_args(kind)[0]
    if typing.get_origin(kind) is Literal:
        return ValueType(str, repeatable, typing.get_args(kind), forms)
    return ValueType(kind, repeatable, (), forms)


def is_path(option: Field[Any]) -> bool:
    """Whether the values of an option may be paths of files or directories."""
    completes_names_alone = option.metadata["completes"] in ("", "preset", "query")
    return option.metadata["path"] or bool(value_type(option).forms) or not completes_names_alone


def combined(option: Field[Any], values: Sequence[Any]) -> Any:
    """Return the value of an option that is given several times: a tuple, its texts joined, or the last one."""
    if value_type(option).repeatable:
        return tuple(values)
    separator = option.metadata["joined_by"]
    return separator.join(values) if separator else values[-1]


def read_value(option: Field[Any], text: str) -> Any:
    """Parse a value from the command line. Raises RlvrError if it does not fit the option's type or choices."""
    if text == "auto" and option.metadata["auto"] is not None:
        return option.metadata["auto"]
    kind = value_type(option).kind
    try:
        value = kind(text)
    except ValueError as e:
        wanted = "a whole number" if kind is int else "a number"
        raise RlvrError(f"{flag(option.name)} is {text!r}.", f"It takes {wanted}.") from e
    check_value(option, value)
    return value


def check_value(option: Field[Any], value: Any) -> None:
    """Raise RlvrError if a number is not finite or too large, or a value is not among the option's choices."""
    name = flag(option.name)
    if isinstance(value, float) and not math.isfinite(value):
        raise RlvrError(f"{name} is {value}.", "Give a finite number.")
    if isinstance(value, int) and abs(value) >= 2**63:
        raise RlvrError(f"{name} is {value}.", "Give a number of at most 18 digits.")
    expected = value_type(option)
    if expected.choices and value not in expected.choices and not expected.has_form(value):
        near = nearest(str(value), expected.choices)
        listed = [*filter(None, expected.choices), *expected.forms]
        raise RlvrError(
            f"{name} is {value!r}." + (f" Did you mean {near[0]}?" if near else ""),
            option.metadata["instead"].get(value) or f"Choose one of {', '.join(listed)}.",
        )


def check_values(config: Provenance) -> None:
    """Apply `check_value` to every option, and check the limits that its `knob` declares."""
    for option in options(type(config)):
        value = getattr(config, option.name)
        above, least, most = (option.metadata[key] for key in ("above", "at_least", "at_most"))
        for one in value if value_type(option).repeatable else (value,):
            if one is not None:
                check_value(option, one)
        if above is not None and value is not None and not value > above:
            raise RlvrError(f"{flag(option.name)} is {value}.", f"It must be above {above:g}.")
        if least is not None and value is not None and not value >= least:
            raise RlvrError(f"{flag(option.name)} is {value}.", f"It must be at least {least:g}.")
        if most is not None and value is not None and not value <= most:
            raise RlvrError(f"{flag(option.name)} is {value}.", f"It must be at most {most:,}.")


class NoEffect(RlvrError):
    """An option of the command line has no effect beside the others; `option` is its field name."""

    def __init__(self, problem: str, hint: str = "", *, option: str = "") -> None:
        super().__init__(problem, hint)
        self.option = option


def check_effects(config: Provenance, needs: Mapping[str, tuple[bool, str]]) -> None:
    """Raise NoEffect for an option of the command line that the others leave without effect.

    Args:
        needs: field name -> whether the option has an effect, and what would give it one.
    """
    for name, (has_effect, needed) in needs.items():
        if config.sources.get(name) == "flag" and not has_effect:
            raise NoEffect(
                f"{flag(name)} has no effect without {needed}.", f"Add {needed}, or leave it out.", option=name
            )


def check_count_or_all(config: Provenance, name: str, *, at_least: int) -> None:
    """Raise RlvrError unless an option that is text is `all` or a whole number."""
    text = getattr(config, name)
    if text != "all" and not (re.fullmatch("[0-9]{1,18}", text) and int(text) >= at_least):
        what = "a positive number" if at_least else "a whole number"
        raise RlvrError(f"{flag(name)} is {printable(text[:80])!r}.", f"Give {what}, or all.")


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Return the known word most similar to a mistyped one, in a list; none if no word is similar."""
    import difflib  # here: needed only for errors

    return difflib.get_close_matches(word, list(known), n=1)


def divides(config: Provenance, divisor: str, dividend: str) -> None:
    """Raise RlvrError, with values that would fit, unless the value of `divisor` divides the value of `dividend`."""
    d, n = getattr(config, divisor), getattr(config, dividend)
    if n % d:
        small = [k for k in range(1, min(math.isqrt(n), _TRIED) + 1) if n % k == 0]
        fitting = {*small, *(n // k for k in small)}
        near = sorted(sorted(fitting, key=lambda k: abs(k - d))[:3])
        raise RlvrError(
            f"{flag(dividend)} {n} is not a multiple of {flag(divisor)} {d}.",
            f"Use {flag(dividend)} {max(n // d, 1) * d}, or {flag(divisor)} {' or '.join(map(str, near))}.",
        )
