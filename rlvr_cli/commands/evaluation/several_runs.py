"""An evaluation of several datasets or thinking budgets: a run for each, its name and its options.

Enters: the options of the command. Leaves: the options of each run, resumed where an earlier command began it, and the
command that goes on with all of them.
"""

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import count

from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.config.parsing.command_line import typed_options, words_of
from rlvr_cli.config.parsing.options import flag, options
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.runs.readers import is_run, run_at, run_names
from rlvr_cli.runs.run_dir import made_name, short_name
from rlvr_cli.runs.storage.sources import place_of


def own_options(config: EvalConfig) -> dict[str, dict[str, str]]:
    """End of a run's name -> the options that are this run's own: its dataset and its thinking budget. Empty if there is one run."""
    budgets = [{"thinking_budget": str(budget)} for budget in config.thinking_budgets]
    of_datasets: dict[str, dict[str, str]] = {}
    for name in config.datasets if len(config.datasets) > 1 else ():
        short = short_name(name) or "dataset"
        numbered = (short if number == 1 else f"{short}-{number}" for number in count(1))
        of_datasets[next(end for end in numbered if end not in of_datasets)] = {"dataset": name}
    if len(budgets) < 2:
        return of_datasets
    return {
        "-".join(filter(None, (end, budget["thinking_budget"]))): {**dataset, **budget}
        for end, dataset in (of_datasets or {"": {}}).items()
        for budget in budgets
    }


def with_name(config: EvalConfig, *, about: Sequence[str]) -> EvalConfig:
    """The config with the name from which those of several runs are made, if --run does not give it."""
    ends = own_options(config)
    if config.run or not ends:
        return config
    return replace(config, run=_free_name(config, about[:1] if len(config.datasets) > 1 else about, ends))


def command_of(config: EvalConfig) -> str:
    """The command that goes on with all of several runs, whose name is given."""
    return shlex.join(["rlvr", "eval", *words_of(EvalConfig, typed_options(config) | {"run": config.run})])


def config_of_each_run(config: EvalConfig) -> list[EvalConfig]:
    """The config of each run: of each thinking budget or dataset, if there are several. Those that an earlier command began are resumed."""
    ends = own_options(config)
    if not ends:
        return [config]
    configs = []
    for end, own in ends.items():
        one = replace(config, **own, run=f"{config.run}-{end}")
        path = run_at(config.runs_dir, one.run)
        if is_run(place_of(path), config.runs_dir):
            sources = {**one.sources, "resume": "earlier command"}
            one = resumed_config(replace(one, resume=place_of(path), sources=sources), command="eval")
            differing = [
                f"{flag(f.name)} {getattr(one, f.name)!r}, not {getattr(config, f.name)!r}"
                for f in options(EvalConfig)
                if f.name not in ("run", "resume", *own) and not f.metadata["free_on_resume"]
                if getattr(one, f.name) != getattr(config, f.name)
            ]
            if differing:
                raise RlvrError(
                    f"{path.name} was started with other options: {', '.join(differing)}.",
                    "Give the same command again, or another --run.",
                )
        configs.append(one)
    return configs


def _free_name(config: EvalConfig, about: Sequence[str], ends: Iterable[str]) -> str:
    """Return a name that no run begins with, so that none of an earlier command is taken for one of this."""
    made = made_name("eval", about)
    taken = run_names(config.runs_dir)
    names = (made if number == 1 else f"{made}-{number}" for number in count(1))
    return next(name for name in names if not any(f"{name}-{end}" in taken for end in ends))
