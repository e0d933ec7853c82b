"""Strategies: which earlier programs a prompt shows, and what it says of them.

Enters: the program to start from and the attempts of earlier rounds, and a slot with its own random numbers. Leaves: the parents, and the
prompt. Nothing here depends on the order in which attempts finish. The program to start from competes with the attempts, if it is valid.
"""

import random
from collections.abc import Sequence
from typing import NamedTuple

from rlvr_cli.config.discover import Strategy
from rlvr_cli.discovery.attempts import Known, best_of, by_rank
from rlvr_cli.discovery.fitting import SHOWN_CHARACTERS
from rlvr_cli.discovery.tasks import Task
from rlvr_cli.graders.answers.extraction import fenced

MIGRATION = 5  # an island sees the best program of all in one of so many of its turns


class Plan(NamedTuple):
    """What one slot of a round will show."""

    parents: tuple[Known, ...]  # in the order of the prompt; none: the program to start from
    island: int


def plan_slot(
    known: Sequence[Known],
    *,
    strategy: Strategy,
    round: int,
    slot: int,
    num_samples: int,
    islands: int,
    parents: int,
    generator: random.Random,
) -> Plan:
    """Choose the parents of a slot.

    Args:
        known: the program to start from, if it is valid, and the attempts of earlier rounds, by number.
        num_samples: slots of a round.
        generator: of this slot alone.
    """
    match strategy:
        case "best-of-n":
            return Plan((), 0)
        case "refine":
            return Plan(_refined(known, slot=slot), 0)
        case "islands":
            turn, island = turn_of(round, slot, num_samples=num_samples, islands=islands)
            return Plan(_of_island(known, island, turn=turn, count=parents, generator=generator), island)


def turn_of(round: int, slot: int, *, num_samples: int, islands: int) -> tuple[int, int]:
    """How often the island of a slot has had its turn before, and the island. Fewer slots than islands go round these in several rounds."""
    return divmod(round * num_samples + slot, islands) if num_samples < islands else (round, slot % islands)


def _refined(known: Sequence[Known], *, slot: int) -> tuple[Known, ...]:
    """The slot's last attempt if it failed, after the best one; else the best one. A second failure in a row is given up."""
    best = best_of(known)
    own = [attempt for attempt in known if attempt.slot == slot]
    shown = () if best is None else (best,)
    if not own or own[-1].is_valid:
        return shown
    return shown if len(own) > 1 and not own[-2].is_valid else (*shown, own[-1])


def _of_island(
    known: Sequence[Known], island: int, *, turn: int, count: int, generator: random.Random
) -> tuple[Known, ...]:
    """Draw distinct valid programs of an island, the i-th best (from 0) with weight 2^-i; the best of them last.

    The program to start from is one of them until the island has one as good.
    """
    own = [k for k in known if k.is_valid and k.island == island]
    start = [k for k in known if k.is_start and all(mine.score < k.score for mine in own)]
    best = best_of(known)
    migrants = [best] if best is not None and turn % MIGRATION == MIGRATION - 1 else []
    ranked = sorted([*own, *start, *migrants], key=by_rank)
    first: dict[str | None, Known] = {}
    for attempt in ranked:
        first.setdefault(attempt.sha256, attempt)
    left = list(first.values())
    drawn: list[Known] = []
    while left and len(drawn) < count:
        (index,) = generator.choices(range(len(left)), weights=[2.0**-i for i in range(len(left))])
        drawn.append(left.pop(index))
    return tuple(sorted(drawn, key=lambda k: (k.score, -k.number)))


def prompt_of(
    task: Task,
    parents: Sequence[Known],
    *,
    start_score: float | None,
    best: float = 0.0,
    shown: int | None = SHOWN_CHARACTERS,
) -> str:
    """Write a prompt: the task, the programs with their scores, and of a program that failed its error, word for word.

    Args:
        best: the highest score so far; a program with a lower one is not called the best.
        shown: characters of each program; None: all, for a proposer that answers with what it is shown.
    """

    def block(program: str | None) -> str:
        return fenced(shortened(program or "", shown))

    parts = [task.prompt.rstrip()]
    if all(parent.is_start for parent in parents):
        scored = "" if start_score is None else f", with a score of {start_score:g}"
        parts.append(f"Here is a program to start from{scored}:\n\n{block(task.program)}")
        return "\n\n".join([*parts, "Write one with a higher score.\n"])
    valid = [parent for parent in parents if parent.is_valid]
    for parent in valid:
        said = "The best program so far" if parent is valid[-1] and parent.score >= best else "This program"
        parts.append(f"{said} is valid and has a score of {parent.score:g}:\n\n{block(parent.program)}")
    if parents[-1].is_valid:
        parts.append("This is great! Now, can you improve on it, and write a program with a higher score?\n")
        return "\n\n".join(parts)
    failed = parents[-1]
    if failed.program is not None:
        parts.append(f"Your previous attempt was this program:\n\n{block(failed.program)}")
    parts.append(
        f"Your previous attempt failed with this error:\n\n```text\n{failed.error}\n```\n\n"
        "Please analyze it, and write a corrected program that fixes this error.\n"
    )
    return "\n\n".join(parts)


def shortened(program: str, shown: int | None) -> str:
    """A program without its end, if it has more characters than `shown`."""
    more = 0 if shown is None else len(program) - shown
    return program if more <= 0 else f"{program[:shown]}\n# ... and {more:,} characters more"
