"""Options as the words of a command line, and back.

Enters: values of options by field name, or words. Leaves: words such as ``--learning-rate 1e-05``, or values by field name.
"""

from collections.abc import Iterable, Mapping
from dataclasses import Field
from typing import Any

from rlvr_cli.config.parsing.options import Provenance, combined, flag, options, read_value, value_type
from rlvr_cli.config.parsing.synonyms import suggested_options
from rlvr_cli.errors import UsageError


def typed_options(config: Provenance) -> dict[str, Any]:
    """Return the values of the options that were given on the command line, by field name."""
    return {name: getattr(config, name) for name, source in config.sources.items() if source == "flag"}


def words_of(config_type: type[Provenance], values: Mapping[str, Any]) -> list[str]:
    """Return the words that give these options these values, in the order of `values`.

    A tuple of texts gives its option once for each; an empty one as an empty text. None has no words.
    """
    known = {option.name: option for option in options(config_type)}
    words = []
    for name, value in values.items():
        kind, repeatable, *_ = value_type(known[name])
        if kind is bool:
            words.append(flag(name) if value else flag(f"no_{name}"))
        elif repeatable:
            words += [word for one in value or ("",) for word in (flag(name), str(one))]
        elif value is not None:
            words += [flag(name), str(value)]
    return words


def values_of(config_type: type[Provenance], words: Iterable[str], *, command: str) -> dict[str, Any]:
    """Return the values that these words give, by field name; of an option that is given twice as `combined` says.

    Raises:
        RlvrError: a word is no option of the command, or a value is missing or does not fit. Most are a UsageError.
    """
    known = {option.name: option for option in options(config_type) if not option.metadata["argument"]}
    values: dict[str, list[Any]] = {}
    given = iter(words)
    for word in given:
        name, equals, text = word.partition("=")
        option, on = _option(name, known, command=command)
        if value_type(option).kind is bool:
            if equals:
                raise UsageError(
                    f"{name} takes no value.", f"Write {flag(option.name)} or {flag(f'no_{option.name}')}."
                )
            values[option.name] = [on]
            continue
        if not equals:
            try:
                text = next(given)
            except StopIteration:
                raise UsageError(f"{name} has no value.", f"rlvr {command} --help-all shows what it takes.") from None
        values.setdefault(option.name, []).append(read_value(option, text))
    return {name: combined(known[name], of_option) for name, of_option in values.items()}


def _option(word: str, known: Mapping[str, Field[Any]], *, command: str) -> tuple[Field[Any], bool]:
    """Return the option that a word names, and whether it turns it on."""
    name = word[2:].replace("-", "_") if word.startswith("--") else ""
    if name in known:
        return known[name], True
    off = name.removeprefix("no_")
    if off != name and off in known and value_type(known[off]).kind is bool:
        return known[off], False
    close = suggested_options(name, known) if name else []
    raise UsageError(
        f"{word!r} is not an option of rlvr {command}.",
        f"Did you mean {flag(close[0])}?" if close else f"rlvr {command} --help-all lists the options.",
    )
