"""Resolve option values: flag > ``--config FILE`` > ``--preset NAME`` > default, or the stored config of a resumed run.

The environment variable RLVR_RUNS_DIR is the default of --runs-dir.

Enters: flags by field name, TOML files, a stored config. Leaves: a config that records the source of each value.
"""

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import Field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlvr_cli.config.parsing.options import JUDGE, Provenance, combined, flag, is_path, nearest, options, value_type
from rlvr_cli.config.parsing.synonyms import suggested_options
from rlvr_cli.errors import RlvrError

if TYPE_CHECKING:
    from rlvr_cli.config.shared.run import RunOptions

C = TypeVar("C", bound=Provenance)
T = TypeVar("T")

LENGTH = re.compile("n_[a-z]+_steps|sft_epochs|rounds")  # the options that say how long a run is
BOUNDS = ("time_limit", "stop_when")  # and those that may end it earlier
PRESETS = Path(__file__).parents[1] / "presets"
VARIABLES = {"runs_dir": "RLVR_RUNS_DIR"}  # environment variables in place of a default
CONFIGURED = (
    "eval",
    "sft",
    "dpo",
    "ei",
    "grpo",
    "ppo",
    "distill",
    "discover",
    "pairwise",
)  # the commands with --config, each of which a file may have a table for


def is_partial(config: "RunOptions") -> bool:
    """Whether a config holds only the flags given with ``--resume``, not yet merged with the run's stored config."""
    return bool(config.resume) and "resumed run" not in config.sources.values()


def resolve(config_type: type[C], *, flags: Mapping[str, Any], command: str) -> C:
    """Build a config from flags > ``--config FILE`` > ``--preset NAME`` > defaults.

    What a preset sets for its loss, such as a clip range, is not taken if a flag or the file chooses another loss (`goes_with`).

    Args:
        flags: values given on the command line, by field name; options that were not given are absent.
        command: the command, which is also the name of its TOML table.

    Raises:
        RlvrError: a file cannot be read, a key is unknown, or a value has the wrong type or is not allowed.
    """
    file = at_home(flags.get("config"))
    from_file = read_toml(config_type, Path(file), command=command) if file else {}
    preset = flags.get("preset") or from_file.get("preset")
    from_preset = read_toml(config_type, preset_path(preset, command=command), command=command) if preset else {}
    replaced = {name for name, value in (from_file | dict(flags)).items() if from_preset.get(name, value) != value}
    for option in options(config_type):
        if option.metadata["goes_with"] in replaced:
            from_preset.pop(option.name, None)
    sources = {f.name: "default" for f in options(config_type)}
    from_environment = {name: value for name, value in environment_values().items() if name in sources}
    sources |= dict.fromkeys(from_environment, "environment")
    sources |= dict.fromkeys(from_preset, f"preset {preset}")
    sources |= dict.fromkeys(from_file, f"config {file}")
    sources |= dict.fromkeys(flags, "flag")
    values = _at_home(config_type, {**from_environment, **from_preset, **from_file, **flags})
    return config_type(**values, sources=sources)


def _at_home(config_type: type[Provenance], values: Mapping[str, Any]) -> dict[str, Any]:
    """Values of options, by field name, with paths that begin with ~/ in the home directory: a shell replaces it in few places."""
    paths = {option.name for option in options(config_type) if is_path(option)}
    return {name: at_home(value) if name in paths else value for name, value in values.items()}


def at_home(value: T) -> T:
    """A path, several with commas between them or in a tuple, or a judge's rubric, with the home directory for a ~ at its beginning."""
    if isinstance(value, tuple):
        return tuple(map(at_home, value))  # type: ignore[return-value]  # a tuple stays one, of the same items
    if not isinstance(value, str):
        return value
    return re.sub(rf"(^|,)({JUDGE})?~(?=/|,|$)", lambda found: found[0][:-1] + os.path.expanduser("~"), value)


def environment_values() -> dict[str, str]:
    """The options that the environment sets, by field name."""
    return {name: at_home(value) for name, variable in VARIABLES.items() if (value := os.environ.get(variable))}


def preset_path(name: str, *, command: str) -> Path:
    """Return the TOML file of a preset. Raises RlvrError, which lists the command's presets, if it has no table for the command."""
    fitting = preset_names(command)
    if name not in fitting:
        near = nearest(name, fitting)
        raise RlvrError(
            f"rlvr {command} has no preset {name!r}." + (f" Did you mean {near[0]}?" if near else ""),
            f"Its presets: {', '.join(fitting)}." if fitting else "Set the options as flags or in a --config file.",
        )
    return PRESETS / f"{name}.toml"


@cache
def preset_names(command: str) -> tuple[str, ...]:
    """Return the names of the presets that have a table for the command."""
    found = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in PRESETS.glob("*.toml")}
    return tuple(sorted(name for name, tables in found.items() if command in tables))


def resume(config: C, stored: Mapping[str, Any], *, run: str) -> C:
    """Return the config of a resumed run: the stored config, with which newly given options must agree.

    Options marked `free_on_resume` may change: they do not alter the steps that are done.

    Raises:
        RlvrError: a given option differs (all are named), or a new run length would change the learning-rate schedule.
    """
    known = {f.name: f for f in options(type(config))}
    values = {
        name: None
        if value is None and known[name].default is None
        # The file may come from someone else.
        else _typed(value, known[name], where=f"{run}: the stored option {name}")
        for name, value in stored.items()
        if name in known
    }
    given = {k for k, source in config.sources.items() if source != "default"}
    free = {k for k, f in known.items() if f.metadata["free_on_resume"]}
    started = {k: values.get(k, f.default) for k, f in known.items()}  # without an option that is newer than the run
    differing = sorted(k for k in given - free if getattr(config, k) != started[k])
    if differing:
        raise RlvrError(
            f"{run} was started with other options: "
            + ", ".join(f"{flag(k)} {started[k]!r}, not {getattr(config, k)!r}" for k in differing),
            "Leave these options out (the run's own are used), or start a new run.",
        )
    if values.get("lr_schedule", "constant") != "constant":
        lengths = {k for k in given if LENGTH.fullmatch(k)}
        if changed := sorted(k for k in lengths if getattr(config, k) != values[k]):
            raise RlvrError(
                f"{run} has a {values['lr_schedule']} learning-rate schedule for {flag(changed[0])} {values[changed[0]]}: another length would "
                "have changed the updates already made.",
                "Resume it without changing its length, or start a new run.",
            )
    values |= {k: getattr(config, k) for k in known if k in given & free or k not in values}
    as_long = {
        k for k in given if LENGTH.fullmatch(k) and getattr(config, k) == started[k]
    }  # repeated, and still the run's
    sources = {k: config.sources[k] if k in given & free - as_long else "resumed run" for k in known}
    return type(config)(**values, sources=sources)


def read_toml(config_type: type, path: Path, *, command: str) -> dict[str, Any]:
    """Read the options in a TOML file: its top level, overridden by the table ``[command]``; keys in kebab or snake case."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as e:
        raise RlvrError(f"Cannot read the config file {path}: {e.strerror}.") from e
    except ValueError as e:  # no TOML, no UTF-8, or a number of more than 4,300 digits
        raise RlvrError(f"{path} is not valid TOML: {e}.") from e
    except RecursionError as e:
        raise RlvrError(
            f"{path} is nested too deeply.", "The value of an option is a number, a text or a list of them."
        ) from e
    flat = {k: v for k, v in content.items() if not isinstance(v, dict)}
    if unknown := sorted(content.keys() - flat.keys() - {*CONFIGURED}):
        raise RlvrError(
            f"{path}: there is no command for the table [{unknown[0]}].", f"A table is one of {', '.join(CONFIGURED)}."
        )
    if not isinstance(content.get(command, {}), dict):
        raise RlvrError(
            f"{path}: {command!r} is not an option of rlvr {command}; write a table [{command}] with its options."
        )
    top, table = (
        read_options(given, config_type, command=command, where=str(path)) for given in (flat, content.get(command, {}))
    )
    return top | table


def read_options(
    given: Mapping[str, Any], config_type: type[Provenance], *, command: str, where: str
) -> dict[str, Any]:
    """Return options of a TOML table by field name, as values of their types; keys in kebab or snake case.

    Raises:
        RlvrError: a key is no option of the command, or a value has another type; `where` is named.
    """
    known = {f.name: f for f in options(config_type) if f.name != "config"}
    values: dict[str, Any] = {}
    for name, value in by_field_name(given, where=where).items():
        if name not in known:
            close = suggested_options(name, known)
            raise RlvrError(
                f"{where}: {name!r} is not an option of rlvr {command}.",
                f"Did you mean {close[0]!r}?" if close else f"rlvr {command} --help-all lists the options.",
            )
        values[name] = _typed(value, known[name], where=f"{where}: {name}")
    return values


def by_field_name(given: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """Return a TOML table with its keys, in kebab or snake case, in snake case. Raises RlvrError if it has one in both."""
    named: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in named:
            raise RlvrError(f"{where}: {name} is given twice, also as {flag(name)[2:]}.", "Leave one of them out.")
        named[name] = value
    return named


def _typed(value: Any, option: Field[Any], *, where: str) -> Any:
    if value == "auto" and option.metadata["auto"] is not None:
        return option.metadata["auto"]
    kind, repeatable, *_ = value_type(option)
    several = repeatable or (bool(option.metadata["joined_by"]) and value != [])
    items = value if several and isinstance(value, list | tuple) else [value]
    right = [
        (isinstance(v, kind) and (kind is bool or not isinstance(v, bool))) or (kind is float and type(v) is int)
        for v in items
    ]
    if not all(right):
        given = repr(value) if kind is not str else f"a {type(value).__name__}"  # what should be text may be a secret
        raise RlvrError(f"{where} is {given}; expected {kind.__name__}{' or a list of them' if several else ''}.")
    if any(isinstance(v, str) and "\0" in v for v in items):
        raise RlvrError(f"{where} has a null character, which neither a name nor an answer can have.")
    try:
        typed = tuple(kind(v) for v in items)
    except OverflowError as error:
        raise RlvrError(f"{where} has more than 308 digits.", "Give a finite number.") from error
    return combined(option, typed)
