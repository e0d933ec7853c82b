"""The rows that `rlvr filter` writes: questions, traces, pairs, and both forms of a trace.

Enters: items that were selected, and their responses. Leaves: rows as dicts.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.queries.selection import Item, Key, Question, Selected, Stage
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.data.fusion import fused_forms
from rlvr_cli.data.pairs import pair_id, pair_row, pair_up
from rlvr_cli.runs.storage.files import os_errors_as_user_errors
from rlvr_cli.runs.storage.spilled import spilled

Rows = list[dict[str, Any]]
RowsOf = Callable[[Sequence[Item]], Iterable[dict[str, Any]]]  # the rows to write of items, in their order


def held(rows: Mapping[Any, dict[str, Any]]) -> RowsOf:
    """Rows that are in memory, by the keys of their items."""
    return lambda items: (rows[item.key] for item in items)


def question_rows(order: Sequence[str], questions: Mapping[str, Question], keys: set[Any]) -> dict[str, dict[str, Any]]:
    """One row per question of `keys`. If different questions have the same id, later ones get a number appended."""
    rows: dict[str, dict[str, Any]] = {}
    taken: set[str] = set()
    for key in order:
        q = questions[key]
        name, number = q.id, 1
        while name in taken:
            number += 1
            name = f"{q.id}-{number}"
        taken.add(name)
        if key in keys:
            truth = {"question": q.text, "ground_truth": q.ground_truth}
            rows[key] = {"id": name, **truth, "pass_rate": q.pass_rate, "n": q.n}
    return rows


def trace_row(row: Mapping[str, Any], question: Question, *, with_question: bool) -> dict[str, Any]:
    """The row of a response, for `rlvr sft`."""
    run_id, _, step, _, _ = row["key"]
    return {
        "id": "/".join(map(str, row["key"])),
        **({"question": question.text} if with_question else {}),
        "prompt": row["prompt"],
        "response": row["response"],
        "ground_truth": row["ground_truth"],
        "reward": row["reward"],
        "step": step,
        "run": run_id,
    }


@dataclass(frozen=True)
class _Response:
    """A row of `response_rows` with its token ids."""

    key: Key  # a list where it was in a file
    question: str
    prompt: str
    response: str
    ground_truth: str
    reward: float | None
    grader: str
    prompt_ids: list[int]
    response_ids: list[int]


def pair_rows(
    config: FilterConfig, responses: Iterable[Mapping[str, Any]], questions: Mapping[str, Question]
) -> tuple[list[str], RowsOf]:
    """The ids of the pairs of each question, and what gives their rows. The responses, if they are many, are in a file beside --out."""
    groups: dict[str, list[tuple[Key, int]]] = {}

    def grouped() -> Iterator[_Response]:
        for place, row in enumerate(responses):
            groups.setdefault(row["question"], []).append((row["key"], place))
            yield _Response(**row)

    out = Path(config.out)
    with os_errors_as_user_errors(out):
        kept = spilled(grouped(), _Response, folder=out.parent)

    def response(place: int) -> dict[str, Any]:
        row = vars(kept[place])
        return {**row, "id": "/".join(map(str, row["key"])), "place": place}

    pairs: dict[str, tuple[Question, int, int]] = {}
    for question, members in groups.items():
        group = [response(place) for _, place in sorted(members)]
        for chosen, rejected in pair_up(group, count=config.pairs_per_question, seed=config.seed):
            pairs[pair_id(chosen, rejected)] = (questions[question], chosen["place"], rejected["place"])

    def row(question: Question, chosen: int, rejected: int) -> dict[str, Any]:
        known = {"question": question.text} if question.text is not None else {}
        return {**known, "ground_truth": question.ground_truth, **pair_row(response(chosen), response(rejected))}

    return list(pairs), lambda items: (row(*pairs[item.key]) for item in items)


def paired(config: FilterConfig, selected: Selected, pairs: Sequence[str]) -> Selected:
    """The selection with a stage that makes pairs of its responses."""
    stage = Stage(
        "pairs",
        len(pairs),
        0,
        f"of {len(selected.kept)} responses: right x wrong ones of a question, at most {config.pairs_per_question}",
    )
    if not pairs:
        stage = Stage("pairs", 0, len(selected.kept), "no question has both a right and a wrong response")
    return Selected([Item(pair, "") for pair in pairs], [*selected.stages, stage])


def fused_rows(traces: Callable[[], Iterable[dict[str, Any]]], selected: Selected) -> tuple[RowsOf, Selected]:
    """What gives both forms of each trace, and the selection with a stage that makes them. Equal forms are one row.

    Args:
        traces: reads them, once to count the rows and once to write them.
    """

    def forms() -> Iterator[tuple[bool, list[dict[str, Any]]]]:
        """Of each trace: whether it thinks, and the rows that no trace before it had."""
        taken: set[bytes] = set()
        for trace in traces():
            of_question = {name: value for name, value in trace.items() if name != "prompt"}
            both, new = list(fused_forms(trace["question"], trace["response"])), []
            for name, question, response in both:
                digest = hashlib.sha256(json.dumps([question, response]).encode()).digest()
                if digest not in taken:
                    taken.add(digest)
                    new.append(
                        of_question | {"id": f"{trace['id']}/{name}", "question": question, "response": response}
                    )
            yield bool(both), new

    kept, thinking = [], 0
    for thinks, rows in forms():
        thinking += thinks
        kept += [Item(row["id"], "") for row in rows]
    why = f"two forms of each of {thinking} responses, equal ones once; the others do not think, or do not answer"
    stage = Stage("fused", len(kept), len(selected.kept) - thinking, why)
    return lambda _: (row for _, rows in forms() for row in rows), Selected(kept, [*selected.stages, stage])
