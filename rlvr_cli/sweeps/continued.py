"""A run that exists, and what the sweep would make now: whether it is the same one, and what has changed that may.

Enters: the content of its run.json, and the config of the sweep's run of that name. Leaves: the options that it goes on with, or an
RlvrError that names the first one in which it is another run.
"""

import functools
import os
from collections.abc import Mapping
from dataclasses import Field, replace
from pathlib import Path
from typing import Any

from rlvr_cli.config.parsing.options import NoEffect, Provenance, flag, options
from rlvr_cli.config.parsing.sources import BOUNDS, LENGTH
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_identity, model_path
from rlvr_cli.runs.readers import ENDED
from rlvr_cli.runs.remote.store import is_address
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.text import printable

_OF_THE_SWEEP = ("run", "runs_dir", "resume", "config", "preset")  # where a run is, and where its options were read


def lengths_of(config: Provenance) -> dict[str, Any]:
    """The options that say how long a run is and may grow later, with their values; of --n-sft-steps and --sft-epochs one counts."""
    lengths = {option.name: getattr(config, option.name) for option in options(type(config)) if _is_length(option)}
    if lengths.get("n_sft_steps"):
        lengths.pop("sft_epochs")
    return lengths


def changed_options(metadata: Mapping[str, Any], config: Provenance, *, command: str, run: Path) -> dict[str, Any]:
    """Return the options that have another value now, which a run that goes on may change.

    Args:
        metadata: the content of run.json.
        command: that the sweep runs, such as grpo.
        run: its directory.

    Raises:
        RlvrError: the run has other options, another model, or is longer than it is to be; or it cannot go on in another directory.
    """
    if metadata["command"] != command:
        raise _other(shown(run), "the command", f"rlvr {metadata['command']}", f"rlvr {command}")
    stored, lengths, where = metadata.get("config") or {}, lengths_of(config), shown(run)
    goes_on = _goes_on(metadata, lengths)
    began_in = "" if goes_on else _began_in(stored, run)  # one that goes on finds its files from here
    changed = {}
    for option in options(type(config)):
        name, before, now = option.name, stored.get(option.name, option.default), getattr(config, option.name)
        is_its_own = name not in lengths if _is_length(option) else _is_never_given(name, metadata, config)
        if name in _OF_THE_SWEEP or is_its_own or (name in BOUNDS and not goes_on):
            continue
        if _is_same(option, before, now, stored, began_in=began_in):
            if goes_on and option.metadata["completes"] == "source":
                _check_there(where, flag(name), before, now)
            continue
        is_model = option.metadata["completes"] == "model"
        if not option.metadata["free_on_resume"] or (is_model and not _is_same_model(metadata, name, now)):
            if _is_left_out(metadata, config, name, before):
                continue
            raise _other(where, flag(name), before, now)
        if name in lengths:
            _check_longer(where, flag(name), before, now, schedule=stored.get("lr_schedule") if goes_on else None)
        if name in lengths or name in BOUNDS or config.sources.get(name) != "default":
            changed[name] = now
    return changed


def other_bounds(metadata: Mapping[str, Any], config: Provenance) -> list[str]:
    """What may have ended a run elsewhere than the sweep's others, in words: it has ended, and its limits are not those of now."""
    stored, lengths = metadata.get("config") or {}, lengths_of(config)
    if _goes_on(metadata, lengths):
        return []
    return [
        f"{flag(option.name)} {_text(before)}, and not {_text(now)}"
        for option in options(type(config))
        if option.name in BOUNDS
        and not _is_never_given(option.name, metadata, config)
        and (before := stored.get(option.name, option.default)) != (now := getattr(config, option.name))
    ]


def _goes_on(metadata: Mapping[str, Any], lengths: Mapping[str, int]) -> bool:
    """Whether the sweep would go on with the run: it has not ended, or is finished and is to be longer now."""
    stored, status = metadata.get("config") or {}, metadata["status"]
    is_longer = any(stored.get(name, value) != value for name, value in lengths.items())
    return status not in ENDED or (status == "finished" and is_longer)


def _is_length(option: Field[Any]) -> bool:
    return LENGTH.fullmatch(option.name) is not None and option.metadata["free_on_resume"]


def _is_never_given(name: str, metadata: Mapping[str, Any], config: Provenance) -> bool:
    """Whether neither the run nor the sweep was given the option: then it has what the run's version took from the same preset, if any,
    and else by default."""
    stored, sources = metadata.get("config") or {}, metadata.get("sources") or {}
    before = sources.get(name, "" if name in stored else "default")
    preset = getattr(config, "preset", "")
    taken = {"default", f"preset {preset}"} if stored.get("preset", "") == preset else {"default"}
    return {before, config.sources.get(name)} <= taken


def _is_left_out(metadata: Mapping[str, Any], config: Provenance, name: str, value: Any) -> bool:
    """Whether the run was given an option that a sweep leaves out now, as one without effect, which the run's version did not refuse."""
    if (metadata.get("sources") or {}).get(name) != "flag" or config.sources.get(name) == "flag":
        return False
    try:
        replace(config, **{name: value}, sources={**config.sources, name: "flag"})
    except NoEffect as error:
        return error.option == name
    except RlvrError:
        pass
    return False


def _began_in(stored: Mapping[str, Any], run: Path) -> str:
    """The directory in which a run began, if the --runs-dir that it was given tells; else "", the one of now."""
    folder, named = os.path.abspath(run.parent), os.path.normpath(str(stored.get("runs_dir", "")))
    began_in = folder.removesuffix(f"/{named}")
    return "" if began_in == folder else began_in


def _is_same(option: Field[Any], before: Any, now: Any, stored: Mapping[str, Any], *, began_in: str) -> bool:
    """Whether two values of an option mean the same: a file by another path, or a run beside the sweep, wherever that is by now."""
    if isinstance(now, tuple):
        return [*now] == ([*before] if isinstance(before, tuple) else before)
    if not (isinstance(before, str) and isinstance(now, str) and before and now):
        return before == now
    beside = os.path.join(os.path.dirname(str(stored.get("runs_dir", ""))), now)
    is_beside = option.metadata["completes"] == "source" and before == beside
    files = {os.path.abspath(before), os.path.abspath(os.path.join(began_in, before))}
    return is_beside or os.path.abspath(now) in files


def _is_same_model(metadata: Mapping[str, Any], name: str, model: str) -> bool:
    """Whether a model under another name has the weights that the run began with."""
    facts = (metadata.get("facts") or {}).get(name)
    known = facts.get("sha256") if isinstance(facts, dict) else None
    return known is not None and _sha256(model) == known


@functools.cache  # all runs of a sweep may have the same one
def _sha256(model: str) -> str | None:
    return model_identity(model_path(model)).get("sha256")


def _check_longer(where: str, name: str, before: Any, now: Any, *, schedule: Any) -> None:
    """Raise RlvrError if a run is to be shorter, or goes on and its schedule of the learning rate is for the length that it had."""
    if not isinstance(before, int) or now < before:
        raise RlvrError(
            f"{where} was made with {name} {_text(before)}, and is now to have {now}.",
            "Give at least as many to go on with it, or choose another directory with --name.",
        )
    if schedule not in (None, "constant"):
        raise RlvrError(
            f"{where} has a {_text(schedule)} learning-rate schedule for {name} {before}: another length would have changed the updates "
            "already made.",
            f"Give {name} {before}, or choose another directory with --name.",
        )


def _check_there(where: str, name: str, before: Any, now: Any) -> None:
    """Raise RlvrError if the run beside the sweep, which has another path now, is not at the one with which the run goes on."""
    if before != now and not is_address(before) and not os.path.exists(before):
        raise RlvrError(
            f"{where} would go on with {name} {_text(before)}, which is no longer there.",
            "Only where all runs have ended can the directory be moved: move it back, or choose another with --name.",
        )


def _other(where: str, name: str, before: Any, now: Any) -> RlvrError:
    return RlvrError(
        f"{where} is a run with other options: {name} was {_text(before)}, and is now {_text(now)}.",
        "Give the same options to go on with it, or choose another directory with --name.",
    )


def _text(value: Any) -> str:
    """A value in a message, which may come from anyone."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return "not given" if value is None or not text else printable(text, keep="")
