"""Experiments: what is asked, the command that answers it, and the options that vary.

Enters: a TOML file, and what the command line changes. Leaves: an `Experiment`, and its runs in their order.

A file has `title`, `command`, `seeds` and, each if it is wanted, `problem` (its name in the handout), `look_at` (what the answer is
read from), `baseline` (the arm that the others are compared with: the first one), `order` (`seeds`: all arms with the first seed
come first; or `arms`), the tables `[options]` (of all runs), `[grid]` (lists of values, each with each), `[paired]` (lists of
equal length, the first values together, then the second ones) and `[[arms]]` (options of an arm, with its `name`). Options have
the names and values of a `--config` file; an arm does without those of `[options]` that its own leave without effect. `[[stages]]`
follow one another: each takes the `best` arms of the stage before, and the baseline, for runs that are `longer` times as long, with
`[stages.options]` and `seeds` of its own.
"""

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.command_line import values_of, words_of
from rlvr_cli.config.parsing.options import NoEffect, Provenance, flag, nearest, options
from rlvr_cli.config.parsing.sources import CONFIGURED, at_home, by_field_name, read_options, read_toml, resolve
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.manifest import RUN_FILE, RUN_NAME
from rlvr_cli.sweeps.arms import (
    SameArms,
    arms_of,
    baseline_of,
    check_number,
    name_part,
    named_value,
    put_varied,
    replaced_in_arms,
)
from rlvr_cli.terminal import console

Order = Literal["seeds", "arms"]
EXPERIMENTS = Path(__file__).parent / "experiments"
OWN = {
    "run": "--name",
    "runs_dir": "--runs-dir",
    "seed": "--seeds",
    "resume": "--name",
}  # options that the sweep sets itself
COMMANDS = tuple(command for command in CONFIGURED if command != "discover")  # a search has a score, no accuracy
_TEXTS = ("title", "command", "problem", "look_at", "baseline", "order")
_TABLES = ("options", "grid", "paired")


@dataclass(frozen=True)
class Stage:
    """What follows once all runs before are finished."""

    name: str
    best: int  # how many arms go on, besides the baseline
    longer: int = 1  # times as many steps
    options: Mapping[str, Any] = field(default_factory=dict)
    seeds: Sequence[int] = ()  # none: those of the stage before


@dataclass(frozen=True)
class Experiment:
    """Runs of one command: arms that differ in options, and seeds."""

    name: str
    command: str
    options: Mapping[str, Any]  # of all runs
    arms: Sequence[Mapping[str, Any]]  # the options of each arm; several if they differ
    names: Sequence[str]  # of the arms
    seeds: Sequence[int]
    title: str = ""
    problem: str = ""
    look_at: str = ""
    baseline: str = ""
    order: Order = "seeds"
    stages: Sequence[Stage] = ()

    @property
    def varied(self) -> list[str]:
        """The options that vary, in their order."""
        return list(dict.fromkeys(name for arm in self.arms for name in arm))


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str
    arm: str
    seed: int
    options: Mapping[str, Any]


def experiment_names() -> list[str]:
    """The names of the built-in experiments."""
    return sorted(path.stem for path in EXPERIMENTS.glob("*.toml"))


def experiment_path(name: str) -> Path:
    """Return the file of a built-in experiment, or one of the user's own. Raises RlvrError if there is none."""
    if name in experiment_names():
        return EXPERIMENTS / f"{name}.toml"
    if name.endswith(".toml") or "/" in name:
        return Path(name)
    near = nearest(name, experiment_names())
    raise UsageError(
        f"There is no experiment {name!r}." + (f" Did you mean {near[0]}?" if near else ""),
        "rlvr sweep --list lists them; a file of your own ends in .toml.",
    )


def experiment_text(name: str) -> str:
    """The text of an experiment's file. Raises RlvrError if there is none, or it cannot be read."""
    path = experiment_path(name)
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as e:
        raise RlvrError(
            f"Cannot read the experiment {path}: {e.strerror}.", "rlvr sweep --list lists the built-in ones."
        ) from e
    except UnicodeDecodeError as e:
        raise RlvrError(f"{path} is not valid TOML: {e}.", "Save it as UTF-8.") from e


def load_experiment(
    name: str, *, overrides: Sequence[str] = (), vary: Sequence[str] = (), seeds: Sequence[int] = ()
) -> Experiment:
    """Read an experiment, with what the command line changes.

    Args:
        name: of a built-in experiment, or a TOML file.
        overrides: words of the command's options, for all runs.
        vary: OPTION=V1,V2,... each: values in place of the file's.
        seeds: in place of the file's, if there are any.

    Raises:
        RlvrError: the file cannot be read, or it or a word names no option, or values do not fit.
    """
    path = experiment_path(name)
    content = _read(experiment_text(name), path)
    command = content["command"]
    kind = config_of(command)
    for table in _TABLES:
        content[table] = by_field_name(content.get(table, {}), where=str(path))
    varied = put_varied(content, vary, kind)
    given = values_of(kind, overrides, command=command)
    content["arms"] = [by_field_name(arm, where=str(path)) for arm in content.get("arms", [])]
    replaced = replaced_in_arms(content["arms"], {*given, *varied})
    own = read_options(content["options"], kind, command=command, where=str(path))
    in_file = _in_config_file(given, kind, command=command)
    common = {option: value for option, value in own.items() if option not in in_file} | given
    try:
        arms, names = arms_of(content, kind, command=command, where=str(path))
    except SameArms as error:
        if replaced:
            raise UsageError(
                f"Without their own {flag(replaced[0])}, two arms of {name} have the same options.",
                f"Change the arms in a copy: rlvr sweep {name} --show > mine.toml",
            ) from error
        raise
    for option in replaced:
        console.say(f"note: {flag(option)} of the command line replaces what the arms of {name} set; their names stay")
    _check_given(given, in_file, own=common, arms=arms, name=name)
    chosen = list(seeds) or content.get("seeds", [0])
    found = Experiment(
        name=path.stem,
        command=command,
        options=common,
        arms=arms,
        names=names,
        seeds=list(dict.fromkeys(chosen)),
        title=content.get("title", ""),
        problem=content.get("problem", ""),
        look_at=content.get("look_at", ""),
        baseline=baseline_of(content, names, are_varied=bool(vary), where=str(path)),
        order=content.get("order", "seeds"),
        stages=[
            _stage(
                stage,
                kind,
                command=command,
                where=f"{path}: {stage['name']}",
                given={*in_file, *given, *varied},
                seeds=seeds,
            )
            for stage in content.get("stages", [])
        ],
    )
    _check_stage_options(found, where=str(path))
    _check_effects(found)
    return found


def _check_given(
    given: Mapping[str, Any],
    in_file: Mapping[str, Any],
    *,
    own: Mapping[str, Any],
    arms: Sequence[Mapping[str, Any]],
    name: str,
) -> None:
    """Say which options of the --config file have no effect.

    Args:
        given: on the command line.
        in_file: the options of the --config file.
        own: of all runs.
        arms: the options of each arm.
        name: of the experiment.

    Raises:
        RlvrError: the sweep sets an option itself, or arms set one of the command line.
    """
    of_arms = dict.fromkeys(option for arm in arms for option in arm)
    for option in in_file:
        unheard = f"note: {flag(option)} of {given['config']} has no effect"
        if option in OWN:
            console.say(f"{unheard}, since a sweep sets it: it has {OWN[option]}")
        if option in of_arms:
            console.say(f"{unheard} in arms that have their own")
    for option in dict.fromkeys([*own, *of_arms]):
        if option in OWN:
            raise UsageError(f"A sweep sets {flag(option)} itself.", f"rlvr sweep has {OWN[option]}.")
    if clash := [option for option in given if option in of_arms]:
        raise UsageError(
            f"{flag(clash[0])} varies in {name}.",
            f"Give all its values: --vary {clash[0]}=V1,V2, or one: --vary {clash[0]}={named_value(given[clash[0]])}",
        )


def _in_config_file(given: Mapping[str, Any], kind: type[Provenance], *, command: str) -> dict[str, Any]:
    """The options of the --config file that the command line names: they come before the experiment's own. Raises RlvrError."""
    file = at_home(given.get("config"))
    return read_toml(kind, Path(file), command=command) if file else {}


def _check_stage_options(experiment: Experiment, *, where: str) -> None:
    """Raise RlvrError for an option of a stage that arms set, too: their own value would hold, without a word."""
    for stage in experiment.stages:
        if twice := next((option for option in stage.options if option in experiment.varied), None):
            raise RlvrError(
                f"{where}: {twice} varies in two places: arms set it, and so does the stage {stage.name}.",
                "An arm keeps its own value in every stage: leave the option out of one of the two.",
            )


def _check_effects(experiment: Experiment) -> None:
    """Say which options of all runs some arms do without. Raises RlvrError for one that has no effect in any arm."""
    common = dict(experiment.options)
    for stage in experiment.stages:
        common |= stage.options
    arms = [_options_of(replace(experiment, options=common), arm) for arm in experiment.arms]
    for option, value in common.items():
        without = sum(option not in arm for arm in arms)
        if without == len(arms):
            try:
                _config(experiment.command, {**arms[0], option: value})
            except RlvrError as error:
                raise UsageError(f"{experiment.name}: {error.problem}", error.hint) from error
        if without:
            console.say(f"note: {flag(option)} has no effect in {without} of the {len(arms)} arms, which do without it")


def _options_of(experiment: Experiment, arm: Mapping[str, Any]) -> dict[str, Any]:
    """The options of an arm's runs: its own, and those of all runs that its own do not leave without effect."""
    given = {**experiment.options, **arm}
    while True:
        try:
            _config(experiment.command, given)
        except NoEffect as error:
            if error.option not in arm:
                del given[error.option]
                continue
        except RlvrError:
            pass  # `check_runs` says of which run
        return given


def _config(command: str, given: Mapping[str, Any], *, run: str = "x") -> Any:
    """The config of a run. Raises RlvrError: the command refuses its options."""
    return resolve(config_of(command), flags={**given, "run": run}, command=command)


def _stage(
    stage: Mapping[str, Any],
    kind: type[Provenance],
    *,
    command: str,
    where: str,
    given: Collection[str],
    seeds: Sequence[int],
) -> Stage:
    """Read a stage; what the command line gives all runs is not the stage's to set."""
    own = read_options(stage.get("options", {}), kind, command=command, where=where)
    return Stage(
        name=stage["name"],
        best=stage["best"],
        longer=stage.get("longer", 1),
        options={key: value for key, value in own.items() if key not in given},
        seeds=list(seeds) or stage.get("seeds", []),
    )


def next_stage(experiment: Experiment, reached: Mapping[str, float]) -> Experiment:
    """The next stage of an experiment whose runs are finished.

    The arms with the highest accuracy go on, in their order, of equal ones the first; and the baseline.

    Args:
        reached: arm -> accuracy; an arm that is not in it does not go on.

    Raises:
        RlvrError: the command has no number of steps that could be made longer, or refuses the options.
    """
    stage, *later = experiment.stages
    ranked = sorted((name for name in experiment.names if name in reached), key=lambda name: -reached[name])
    kept = [i for i, name in enumerate(experiment.names) if name in ranked[: stage.best] or name == experiment.baseline]
    arms = [experiment.arms[i] for i in kept]
    common = {**experiment.options, **stage.options}
    if stage.longer > 1:
        common, arms = _longer(replace(experiment, options=common), arms, stage)
    return replace(
        experiment,
        name=f"{experiment.name}-{stage.name}",
        options=common,
        arms=arms,
        names=[experiment.names[i] for i in kept],
        seeds=stage.seeds or experiment.seeds,
        stages=later,
    )


def _longer(
    experiment: Experiment, arms: Sequence[Mapping[str, Any]], stage: Stage
) -> tuple[dict[str, Any], list[Mapping[str, Any]]]:
    """The options of all runs and of each arm with more steps: an arm that has another number than the rest has its own."""
    steps = f"n_{experiment.command}_steps"
    before = [getattr(_config(experiment.command, _options_of(experiment, arm)), steps, 0) for arm in arms]
    if not all(before):
        raise RlvrError(
            f"The stage {stage.name} has longer = {stage.longer}, but the runs have no {flag(steps)}.",
            "Give it in [options], or the length of this stage in [stages.options].",
        )
    counted = [(arm, stage.longer * count) for arm, count in zip(arms, before, strict=True)]
    shared = next((count for arm, count in counted if steps not in arm), None)
    own = [{**arm, steps: count} if steps in arm or count != shared else arm for arm, count in counted]
    return {**experiment.options, **({steps: shared} if shared else {})}, own


def runs_of(experiment: Experiment) -> list[SweepRun]:
    """The runs, in the order in which they start.

    Raises:
        RlvrError: the command refuses the options of a run, or there are too many runs.
    """
    check_number(len(experiment.arms) * len(experiment.seeds))
    arms = list(zip(experiment.names, (_options_of(experiment, arm) for arm in experiment.arms), strict=True))
    pairs = [(arm, seed) for seed in experiment.seeds for arm in arms]
    if experiment.order == "arms":
        pairs = [(arm, seed) for arm in arms for seed in experiment.seeds]
    return [SweepRun(f"{name}-s{seed}", name, seed, {**given, "seed": seed}) for (name, given), seed in pairs]


def configs_of(experiment: Experiment, runs: Sequence[SweepRun]) -> Iterator[Any]:
    """Yield the config of each run. Raises RlvrError: the command refuses its options, or would not make exactly one run."""
    for run in runs:
        try:
            config = _config(experiment.command, run.options, run=run.name)
            _check_makes_one_run(config)
        except RlvrError as error:
            raise UsageError(f"{experiment.name}/{run.name}: {error.problem}", error.hint) from error
        yield config


def _check_makes_one_run(config: Any) -> None:
    for name in ("check_dataset", "dry_run"):
        if getattr(config, name, False):
            raise UsageError(f"{flag(name)} makes no run.", "Leave it out; rlvr sweep has a --dry-run of its own.")
    for name in ("dataset", "thinking_budget"):
        if len(getattr(config, f"{name}s", ())) > 1:
            raise UsageError(
                f"{flag(name)} {getattr(config, name)} names several, and makes a run for each.",
                f"A run of a sweep has one: vary it with --vary {name}=V1,V2, or make a sweep for each, with --name.",
            )


def check_runs(experiment: Experiment, runs: Sequence[SweepRun]) -> list[Any]:
    """Return the config of each run.

    Raises:
        RlvrError: the command refuses the options of a run, or of a later stage with any of the arms: before the first one starts.
    """
    configs = [*configs_of(experiment, runs)]
    if experiment.stages:
        stage, *later = experiment.stages
        every = [replace(stage, best=len(experiment.names)), *later]
        following = next_stage(replace(experiment, stages=every), dict.fromkeys(experiment.names, 0.0))
        check_runs(following, runs_of(following))
    return configs


def command_of(experiment: Experiment, run: SweepRun, *, runs_dir: Path) -> list[str]:
    """The words of the command that makes a run in `runs_dir`. NAME or SWEEP/NAME of another run, as a dataset, is from beside the sweep."""
    config = config_of(experiment.command)
    values = {**run.options, "run": run.name, "runs_dir": str(runs_dir)}
    for option in options(config):
        named = values.get(option.name)
        if option.metadata["completes"] != "source" or not isinstance(named, str):
            continue
        if all(map(RUN_NAME.fullmatch, named.split("/"))):
            beside = runs_dir.parent / named
            values[option.name] = str(beside) if (beside / RUN_FILE).is_file() else named
    return ["rlvr", experiment.command, *words_of(config, values)]


def _read(text: str, path: Path) -> dict[str, Any]:
    """Parse the text of a file and check its form."""
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as e:
        raise RlvrError(f"{path} is not valid TOML: {e}.") from e
    known = (*_TEXTS, *_TABLES, "seeds", "arms", "stages")
    if unknown := [key for key in content if key not in known]:
        raise RlvrError(
            f"{path}: {unknown[0]!r} is no key of an experiment.",
            f"Its keys: {', '.join(known)}. Options of all runs are in the table [options].",
        )
    for key in _TEXTS:
        if not isinstance(content.get(key, ""), str):
            raise RlvrError(f"{path}: {key} is not a text.")
    for key in _TABLES:
        if not isinstance(content.get(key, {}), dict):
            raise RlvrError(f"{path}: {key} is not a table.", f"Write a line [{key}], and its options below.")
    seeds, arms = content.get("seeds", [0]), content.get("arms", [])
    if not isinstance(seeds, list) or not seeds or not all(type(seed) is int and seed >= 0 for seed in seeds):
        raise RlvrError(f"{path}: seeds is not a list of whole numbers.", "Write seeds = [0, 1, 2].")
    if not isinstance(arms, list) or not all(isinstance(arm, dict) for arm in arms):
        raise RlvrError(
            f"{path}: arms is not a list of tables.", "Write a line [[arms]] for each, and its options below."
        )
    _check_stages(content.get("stages", []), path)
    if content.get("command") not in COMMANDS:
        raise RlvrError(
            f"{path}: the command is {content.get('command', '')!r}.",
            f"An experiment runs one of {', '.join(COMMANDS)}.",
        )
    if content.get("order", "seeds") not in get_args(Order):
        raise RlvrError(f"{path}: the order is {content['order']!r}.", "It is seeds or arms.")
    return content


def _check_stages(stages: Any, path: Path) -> None:
    """Raise RlvrError if stages have another form."""
    if not isinstance(stages, list) or not all(isinstance(stage, dict) for stage in stages):
        raise RlvrError(f"{path}: stages is not a list of tables.", "Write a line [[stages]] for each.")
    for stage in stages:
        if unknown := [key for key in stage if key not in ("name", "best", "longer", "options", "seeds")]:
            raise RlvrError(
                f"{path}: {unknown[0]!r} is no key of a stage.", "Its keys: name, best, longer, options, seeds."
            )
        name, seeds = stage.get("name"), stage.get("seeds", [])
        if not isinstance(name, str) or not name or name_part(name) != name:
            raise RlvrError(f"{path}: the name of a stage is {name!r}.", 'Write name = "long".')
        for key, least in (("best", None), ("longer", 1)):
            if type(number := stage.get(key, least)) is not int or number < 1:
                raise RlvrError(f"{path}: {key} of the stage {name} is no whole number above 0.", f"Write {key} = 3.")
        if not isinstance(seeds, list) or not all(type(seed) is int and seed >= 0 for seed in seeds):
            raise RlvrError(f"{path}: seeds of the stage {name} is not a list of whole numbers.")
        if not isinstance(stage.get("options", {}), dict):
            raise RlvrError(f"{path}: options of the stage {name} is not a table.", "Write a line [stages.options].")
    if len({stage["name"] for stage in stages}) < len(stages):
        raise RlvrError(f"{path}: two stages have the same name.")
