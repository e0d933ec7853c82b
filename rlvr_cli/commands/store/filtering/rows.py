"""The rows that `rlvr filter` writes: questions, traces, pairs, and both forms of a trace.

Enters: items that were selected, and their responses. Leaves: rows as dicts.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.queries.selection import Item, Key, Question, Selected, Stage
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.data.datasets import Dataset
from rlvr_cli.data.examples import is_prompt
from rlvr_cli.data.fusion import fused_forms
from rlvr_cli.data.pairs import GRADED_BOTH_WAYS, pair_id, pair_row, pair_up
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.storage.files import os_errors_as_user_errors
from rlvr_cli.runs.storage.spilled import spilled

Rows = list[dict[str, Any]]
OF_PAIRS = ("prompt_ids", "response_ids")  # columns that `pair_rows` reads besides the texts
OF_TURNS = (*OF_PAIRS, "response_mask", "turns", "turn_facts")  # and `trace_row`, of episodes
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


def dataset_rows(dataset: Dataset, *, out: str) -> dict[str, dict[str, Any]]:
    """The rows of a dataset by id, for the commands that read it. A prompt is no question where the rows have no other.

    Raises:
        RlvrError: `out` is a Parquet file, and they have tools or calls of tools.
    """
    if out.endswith(".parquet") and any('"tools":' in t or '"tool_calls":' in t for t in dataset.trace_of.values()):
        raise RlvrError(
            f"{dataset.name} has tools, and in {out} each would have the parameters of all: a column of Parquet has one type.",
            "Give --out a name that ends in .jsonl.",
        )
    texts = ("id", "question", "ground_truth", "prompt", "response")
    rows: dict[str, dict[str, Any]] = {}
    for e in dataset.examples:
        row = {t: getattr(e, t) for t in texts if getattr(e, t) is not None}
        if e.turns:  # of generated data: its response is all of them as one text
            row["turns"] = [{"role": role, "text": text} for role, text in e.turns]
            del row["response"]
        row |= json.loads(dataset.trace_of.get(e.id, "{}"))
        if "prompt" in row and is_prompt(dataset.question_field):
            del row["question"]
        rows[e.id] = row
    return rows


def trace_row(row: Mapping[str, Any], question: Question, *, with_question: bool) -> dict[str, Any]:
    """The row of a response, for `rlvr sft`. One that the policy has not sampled alone has its turns, with their token ids.

    Args:
        row: of `response_rows`; with the columns `OF_TURNS`, if there are episodes.
    """
    run_id, _, step, _, _ = row["key"]
    return {
        "id": "/".join(map(str, row["key"])),
        **({"question": question.text} if with_question else {}),
        "prompt": row["prompt"],
        **({"response": row["response"]} if all(row.get("response_mask") or [True]) else _in_turns(row)),
        "ground_truth": row["ground_truth"],
        "reward": row["reward"],
        "step": step,
        "run": run_id,
    }


def _in_turns(row: Mapping[str, Any]) -> dict[str, Any]:
    """The turns of an episode, and the ids of its prompt, without which those of the turns would be of no use."""
    texts = [row["response"][start:end] for start, end in pairwise([0, *row["turn_facts"]["ends"]])]
    turns = [
        {"role": turn["role"], "text": text, "ids": row["response_ids"][turn["start"] : turn["end"]]}
        for turn, text in zip(row["turns"], texts, strict=True)
    ]
    return {"prompt_ids": row["prompt_ids"], "turns": turns}


@dataclass(frozen=True)
class _Response:
    """What a pair has of a response."""

    id: str
    prompt: str
    response: str
    reward: float | None
    prompt_ids: list[int]
    response_ids: list[int]


def pair_rows(
    config: FilterConfig,
    items: Sequence[Item],
    responses: Iterable[Mapping[str, Any]],
    questions: Mapping[str, Question],
) -> tuple[list[str], RowsOf]:
    """The ids of the pairs of each question, and what gives their rows. Many responses are kept in a file beside --out.

    Args:
        responses: of the items, in their order, with token ids.
    """
    groups: dict[str, list[tuple[Key, int]]] = {}  # by the prompt, which questions with different truths may share

    def grouped() -> Iterator[_Response]:
        for place, (item, row) in enumerate(zip(items, responses, strict=True)):
            assert row["key"] == item.key, "responses come in the order in which they were selected"
            groups.setdefault(row["prompt"], []).append((item.key, place))
            own = {name: row[name] for name in ("prompt", "response", "reward", "prompt_ids", "response_ids")}
            yield _Response(id="/".join(map(str, item.key)), **own)

    out = Path(config.out)
    with os_errors_as_user_errors(out):
        kept = spilled(grouped(), _Response, folder=out.parent)

    def to_choose(place: int) -> dict[str, Any]:
        found = kept[place]
        return {
            "place": place, "id": found.id, "prompt": found.prompt, "response": found.response, "reward": found.reward,
        }  # fmt: skip

    pairs: dict[str, tuple[int, int]] = {}
    for members in groups.values():
        group = [to_choose(place) for _, place in sorted(members)]
        for chosen, rejected in pair_up(group, count=config.pairs_per_question, seed=config.seed):
            pairs[pair_id(chosen, rejected)] = (chosen["place"], rejected["place"])

    def row(chosen: int, rejected: int) -> dict[str, Any]:
        question = questions[items[chosen].question]
        known = {"question": question.text} if question.text is not None else {}
        return {**known, "ground_truth": question.ground_truth, **pair_row(vars(kept[chosen]), vars(kept[rejected]))}

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
        why = f"no question has both a right and a wrong response; {GRADED_BOTH_WAYS}"
        stage = Stage("pairs", 0, len(selected.kept), why)
    return Selected([Item(pair, "") for pair in pairs], [*selected.stages, stage])


def fused_rows(traces: Callable[[], Iterable[dict[str, Any]]], selected: Selected) -> tuple[RowsOf, Selected]:
    """What gives both forms of each trace, and the selection with a stage that makes them. Equal forms are one row.

    Args:
        traces: reads them: first to choose, then to write.
    """

    def forms() -> Iterator[list[dict[str, Any]]]:
        for trace in traces():
            of_question = {name: value for name, value in trace.items() if name != "prompt"}
            yield [
                of_question | {"id": f"{trace['id']}/{name}", "question": question, "response": response}
                for name, question, response in fused_forms(trace["question"], trace["response"])
            ]

    kept: list[Item] = []
    taken: set[bytes] = set()
    thinking = 0
    for both in forms():
        thinking += bool(both)
        for row in both:
            digest = hashlib.sha256(json.dumps([row["question"], row["response"]]).encode()).digest()
            if digest not in taken:
                taken.add(digest)
                kept.append(Item(row["id"], ""))
    why = f"two forms of each of {thinking} responses, equal ones once; the others do not think, or do not answer"
    stage = Stage("fused", len(kept), len(selected.kept) - thinking, why)

    def rows_of(items: Sequence[Item]) -> Iterator[dict[str, Any]]:
        wanted = {item.key for item in items}
        return (row for both in forms() for row in both if row["id"] in wanted)

    return rows_of, Selected(kept, [*selected.stages, stage])
