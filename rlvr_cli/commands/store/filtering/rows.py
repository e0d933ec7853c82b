"""The rows that `rlvr filter` writes: questions, traces, pairs, and both forms of a trace.

Enters: items that were selected, and their responses. Leaves: rows as dicts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rlvr_cli.analysis.queries.selection import Item, Question, Selected, Stage
from rlvr_cli.config.store.filter import FilterConfig
from rlvr_cli.data.fusion import fused_forms
from rlvr_cli.data.pairs import pair_row, pair_up

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


def pair_rows(
    config: FilterConfig, responses: Iterable[Mapping[str, Any]], questions: Mapping[str, Question]
) -> dict[str, dict[str, Any]]:
    """The pairs of each question by their ids."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in responses:
        groups.setdefault(row["question"], []).append({**row, "id": "/".join(map(str, row["key"]))})
    rows = {}
    for question, group in groups.items():
        group.sort(key=lambda row: row["key"])
        for pair in pair_up(group, count=config.pairs_per_question, seed=config.seed):
            known = {"question": questions[question].text} if questions[question].text is not None else {}
            row = {**known, "ground_truth": questions[question].ground_truth, **pair_row(*pair)}
            rows[row["id"]] = row
    return rows


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


def fused_rows(traces: Iterable[dict[str, Any]], selected: Selected) -> tuple[dict[str, Any], Selected]:
    """Both forms of each trace by their ids, and the selection with a stage that makes them. Equal forms are one row."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    thinking = 0
    for trace in traces:
        of_question = {name: value for name, value in trace.items() if name != "prompt"}
        forms = list(fused_forms(trace["question"], trace["response"]))
        thinking += bool(forms)
        for name, question, response in forms:
            row = of_question | {"id": f"{trace['id']}/{name}", "question": question, "response": response}
            rows.setdefault((question, response), row)
    why = f"two forms of each of {thinking} responses, equal ones once; the others do not think, or do not answer"
    stage = Stage("fused", len(rows), len(selected.kept) - thinking, why)
    by_id = {row["id"]: row for row in rows.values()}
    return by_id, Selected([Item(name, "") for name in by_id], [*selected.stages, stage])
