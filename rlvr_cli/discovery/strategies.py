"""Strategies: which earlier programs a prompt shows, and what it says of them.

Enters: the program to start from and the attempts of earlier rounds, and a slot with its own random numbers. Leaves: the parents, and the
prompt. Nothing here depends on the order in which attempts finish. The program to start from competes with the attempts, if it is valid.
"""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rlvr_cli.config.discover import Strategy
from rlvr_cli.discovery.attempts import Known, best_of, by_rank
from rlvr_cli.discovery.fitting import SHOWN_CHARACTERS
from rlvr_cli.discovery.tasks import Task
from rlvr_cli.graders.answers.extraction import fenced

MIGRATION = 5  # an island sees the best program of all in one of so many of its turns
# Behind so many programs, weights of 2^-i no longer change their sum, 2, in floating point: what stands there is never drawn.
_IN_REACH = 64


class Standing(NamedTuple):
    """What all slots of a round look at, of the program to start from, if it is valid, and the attempts of earlier rounds."""

    best: Known | None
    start: list[Known]
    of_slots: Mapping[int, Sequence[Known]]  # the attempts of each slot, by number
    of_islands: Mapping[int, Sequence[Known]]  # by island, if it has a valid attempt: see `_ranked`


class Plan(NamedTuple):
    """What one slot of a round will show."""

    parents: tuple[Known, ...]  # in the order of the prompt; none: the program to start from
    island: int


def standing_of(known: Sequence[Known]) -> Standing:
    """How things stand before a round.

    Args:
        known: the program to start from, if it is valid, and the attempts of earlier rounds, by number.
    """
    start = [k for k in known if k.is_start]
    of_slots: dict[int, list[Known]] = defaultdict(list)
    of_islands: dict[int, list[Known]] = defaultdict(list)
    for attempt in known:
        of_slots[attempt.slot].append(attempt)
        if attempt.is_valid and not attempt.is_start:
            of_islands[attempt.island].append(attempt)
    ranked = {island: _ranked(own, start) for island, own in of_islands.items()}
    return Standing(best_of(known), start, of_slots, ranked)


def _ranked(own: Sequence[Known], start: Sequence[Known]) -> list[Known]:
    """The different programs of an island, the best first, with the program to start from until the island has one as good."""
    competing = [k for k in start if all(mine.score < k.score for mine in own)]
    first: dict[str | None, Known] = {}
    for attempt in sorted([*own, *competing], key=by_rank):
        first.setdefault(attempt.sha256, attempt)
    return list(first.values())


def plan_slot(
    standing: Standing,
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
        num_samples: slots of a round.
        generator: of this slot alone.
    """
    match strategy:
        case "best-of-n":
            return Plan((), 0)
        case "refine":
            return Plan(_refined(standing, slot=slot), 0)
        case "islands":
            turn, island = turn_of(round, slot, num_samples=num_samples, islands=islands)
            return Plan(_of_island(standing, island, turn=turn, count=parents, generator=generator), island)


def turn_of(round: int, slot: int, *, num_samples: int, islands: int) -> tuple[int, int]:
    """How often the island of a slot has had its turn before, and the island. Fewer slots than islands go round these in several rounds."""
    return divmod(round * num_samples + slot, islands) if num_samples < islands else (round, slot % islands)


def _refined(standing: Standing, *, slot: int) -> tuple[Known, ...]:
    """The slot's last attempt if it failed, after the best one; else the best one. A second failure in a row is given up."""
    own = standing.of_slots.get(slot, ())
    shown = () if standing.best is None else (standing.best,)
    if not own or own[-1].is_valid:
        return shown
    return shown if len(own) > 1 and not own[-2].is_valid else (*shown, own[-1])


def _of_island(
    standing: Standing, island: int, *, turn: int, count: int, generator: random.Random
) -> tuple[Known, ...]:
    """Draw distinct valid programs of an island, the i-th best (from 0) with weight 2^-i; the best of them last.

    The program to start from is one of them until the island has one as good.
    """
    left = list(standing.of_islands.get(island, standing.start)[: count + _IN_REACH])
    best = standing.best
    if best is not None and turn % MIGRATION == MIGRATION - 1:
        left = [best, *(k for k in left if k.sha256 != best.sha256)]
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
