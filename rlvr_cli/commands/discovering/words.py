"""What `rlvr discover` says: what is searched for, by whom and how, and what was found.

Enters: a DiscoverConfig, its task and settings, attempts. Leaves: lines on stderr, the result on stdout.
"""

from collections.abc import Sequence
from pathlib import Path

from rlvr_cli.commands.discovering.proposer import chosen_engine
from rlvr_cli.config.discover import DiscoverConfig
from rlvr_cli.discovery.attempts import Known, best_of
from rlvr_cli.discovery.search import Settings
from rlvr_cli.discovery.strategies import prompt_of
from rlvr_cli.discovery.tasks import Task
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.samplers.open import Engine
from rlvr_cli.sandbox.run import available_layers
from rlvr_cli.terminal import console, tables


def say_inputs(config: DiscoverConfig, task: Task, settings: Settings, engine: Engine) -> None:
    """Say what is searched for, by whom, and how programs are bounded."""
    console.say(f"task     {task.name}; verified by {task.grader}")
    console.say(f"proposer {engine.name} ({engine.reason})" + (f": {config.model}" if config.model else ""))
    if config.base_url:
        console.say(f"endpoint {config.base_url}; it gets the key in {config.api_key_env}")
    console.say(f"search   {config.strategy}: {described(config, settings)}")
    layers = ", ".join(available_layers()) or "no layer"
    console.say(f"sandbox  {settings.limits.seconds:g} s, {config.program_memory_gb:g} GiB; {layers}")


def described(config: DiscoverConfig, settings: Settings) -> str:
    """How long the search is, in words."""
    ends = [f"{settings.rounds} rounds of {settings.num_samples} attempts"]
    if settings.max_attempts is not None:
        ends.append(f"at most {settings.max_attempts} attempts")
    if settings.max_tokens is not None:
        ends.append(f"at most {settings.max_tokens:,} tokens and what the last round takes")
    if settings.target is not None:
        ends.append(f"until a score of {settings.target:g}")
    return ", ".join(ends)


def say_plan(config: DiscoverConfig, task: Task, settings: Settings) -> None:
    """Print what the run would do, and the first prompt. Nothing is asked, run or written."""
    say_inputs(config, task, settings, chosen_engine(config))
    console.print_text(prompt_of(task, (), start_score=None))


def print_result(
    config: DiscoverConfig, path: Path, known: list[Known], *, start: Sequence[Known], start_score: float | None
) -> None:
    """Print the scores, and say where the best program is.

    Args:
        start: the program to start from, if it competes with the attempts `known`.
    """
    best, any_valid = best_of([*start, *known]), any(attempt.is_valid for attempt in known)
    columns = ("attempts", "valid", "start_score", "best_score", "best_attempt", "tokens")
    row = (
        len(known),
        sum(attempt.is_valid for attempt in known),
        start_score,
        best and best.score,
        None if best is None or best.is_start else best.number,
        sum(attempt.tokens for attempt in known),
    )
    tables.print_table(columns, [row], output=config.format)
    if not known:
        console.say("nothing was asked: the program to start from has the score --target")
    elif best is None or not any_valid:
        console.say(f"nothing valid was found; why: rlvr analyze attempt_errors {typed(path)}")
    elif best.is_start or (start_score is not None and best.score < start_score):
        console.say(f"nothing is better than the program to start from; why: rlvr analyze attempts {typed(path)}")
    else:
        console.say(f"program  {path / 'best' / 'program.py'}; its ancestors: rlvr analyze lineage {typed(path)}")
