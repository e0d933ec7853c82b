"""Pairs of a chosen and a rejected response to one prompt, for `rlvr dpo`: from a file, or made of a run's rollouts.

Enters: the path of a file, or a run (its name or directory). Leaves: `Pairs`.
"""

import hashlib
import json
import math
import random
from collections import defaultdict
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.data.examples import QUESTION_FIELDS, SHOWN_BAD_ROWS, first_field, usable_rows
from rlvr_cli.data.files import SUFFIXES, BadRow, Row, file_rows, ids_of, join_names, stem_of, suffix_of, text_of
from rlvr_cli.data.prompts import PromptTemplate, StoredPrompts, stored_prompts
from rlvr_cli.data.traces import opened_note, opened_once, opens_again, phase_to_train_on, was_cut
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import ROLLOUTS, Entry
from rlvr_cli.runs.readers import fact_of, is_run, read_part, read_run, resolve_run
from rlvr_cli.text import storable
from rlvr_cli.types import Example, SampledIds

_IDS = ("prompt_ids", "chosen_ids", "rejected_ids")
_KEY = ("phase", "step", "example_id", "sample_index")  # of a rollout
_HINT = (
    "A pair has the fields prompt or question, chosen and rejected; rlvr filter RUN --emit pairs writes such a file."
)
GRADED_BOTH_WAYS = "a response that was graded right once and wrong once is neither"
OF_EPISODES = (
    "Episodes of several turns can be no pairs of a run or a file: rlvr dpo --n-dpo-steps N --environment ... samples "
    "episodes and pairs them."
)


@dataclass(frozen=True)
class Pairs:
    """Pairs of responses."""

    name: str
    fingerprint: str  # sha256 of the pairs
    examples: list[Example]  # chosen and rejected in turn, each with `prompt` and `response`, and an id of its own
    messages: list[str]  # skipped lines and notes, to be shown
    token_ids: Mapping[str, SampledIds]  # by example id, where they are known
    num_opened: int = 0  # responses without their <think>, since the prompt has it


def load_pairs(
    spec: str,
    template: PromptTemplate,
    *,
    question_field: str = "",
    field_is_shared: bool = False,
    skip_bad_lines: bool = False,
    runs_dir: str = "runs",
    pairs_per_question: int,
    seed: int,
    opened_twice: bool = False,
) -> Pairs:
    """Load pairs from a file, or make them of a run's rollouts: of one that trains, not of its evaluations.

    Args:
        spec: a run's directory or its name in `runs_dir`, or a .jsonl, .json, .csv or .parquet file.
        template: makes the prompt of a row that has only a question.
        question_field: the field of the question; with `prompt` here, that field is not formatted yet. The pairs of a run have none.
        field_is_shared: whether other questions have that field too: rows with a prompt and without the field keep their prompt.
        pairs_per_question, seed: of a run, see `pair_up`.
        opened_twice: see `load_traces`.

    Raises:
        RlvrError: there is no such file or run, a row is bad, there is no pair, or as `phase_to_train_on`.
    """
    messages: list[str] = []
    if is_run(spec, runs_dir):
        path = resolve_run(spec, runs_dir)
        rows: Generator[Row | BadRow] = (
            Row(f"{path.name}: pair {number}", number, row, list(row))
            for number, row in enumerate(_of_run(path, count=pairs_per_question, seed=seed, messages=messages), start=1)
        )
        name, question_field = path.name, ""
    else:
        path = Path(spec)
        if not spec or not path.is_file():
            raise RlvrError(f"There is no file or run {spec!r} with pairs." if spec else "--dataset is missing.", _HINT)
        if suffix_of(path) not in SUFFIXES:
            raise RlvrError(
                f"{spec}: cannot tell what kind of file this is.", f"Its name must end in {join_names(SUFFIXES)}."
            )
        name, rows = storable(spec), file_rows(path, like='{"prompt": …, "chosen": …, "rejected": …}')
    taken: dict[str, str] = {}

    def read(row: Row) -> tuple[list[Example], list[SampledIds], int]:
        field = "" if field_is_shared and question_field not in row.keys else question_field
        stem = storable(stem_of(path))
        return _pair(row, template, stem=stem, question_field=field, taken=taken, opened_twice=opened_twice)

    with closing(rows) as open_rows:
        pairs, skipped = usable_rows(open_rows, read, name=name, skip_bad_lines=skip_bad_lines)
    more = len(skipped) - SHOWN_BAD_ROWS
    messages += [f"skipped: {storable(str(bad))}" for bad in skipped[:SHOWN_BAD_ROWS]]
    messages += [f"skipped: {more:,} more"] if more > 0 else []
    num_opened = sum(opened for _, _, opened in pairs)
    messages += [opened_note(num_opened)] if num_opened else []
    digest = hashlib.sha256()
    for examples, ids, _ in pairs:
        digest.update(json.dumps([[(e.id, e.prompt, e.response) for e in examples], ids]).encode() + b"\n")
    return Pairs(
        name=name,
        fingerprint=digest.hexdigest(),
        examples=[e for examples, *_ in pairs for e in examples],
        messages=messages,
        token_ids={e.id: i for examples, ids, _ in pairs for e, i in zip(examples, ids, strict=False)},
        num_opened=num_opened,
    )


def pair_up(
    rows: Sequence[Mapping[str, Any]], *, count: int, seed: int
) -> list[tuple[Mapping[str, Any], Mapping[str, Any]]]:
    """Choose pairs of a right and a wrong response to one prompt, so that each response is in as few pairs as possible.

    Args:
        rows: rollouts with the same `prompt`, each with `response` and `reward`; equal responses count once. A response that is
            right in one row and wrong in another, and one whose grade failed, is neither right nor wrong.
        count: of pairs, at most.
        seed: with the prompt, it determines the choice.

    Returns:
        Different pairs, the right response first.
    """
    with_right = {r["response"]: r for r in rows if r["reward"] is not None and r["reward"] > 0.5}
    with_wrong = {r["response"]: r for r in rows if r["reward"] is not None and r["reward"] <= 0.5}
    right = [r for response, r in with_right.items() if response not in with_wrong]
    wrong = [r for response, r in with_wrong.items() if response not in with_right]
    if not right or not wrong:
        return []
    draw = random.Random(f"pairs {seed} {rows[0]['prompt']}")
    draw.shuffle(right)
    draw.shuffle(wrong)
    turn = math.lcm(len(right), len(wrong))  # after so many pairs both lists are at their start again: shift one
    return [
        (right[place % len(right)], wrong[(place + place // turn) % len(wrong)])
        for place in range(min(count, len(right) * len(wrong)))
    ]


def pair_id(chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> str:
    """The id of a pair, made of those of its responses."""
    return f"{chosen['id']}>{rejected['id']}"


def pair_row(chosen: Mapping[str, Any], rejected: Mapping[str, Any]) -> dict[str, Any]:
    """A pair as a row of a file.

    Args:
        chosen, rejected: rollouts: `id`, `prompt`, `response`; and `prompt_ids` and `response_ids`, empty if they are not known.
    """
    row = {
        "id": pair_id(chosen, rejected),
        "chosen_id": chosen["id"],
        "rejected_id": rejected["id"],
        "prompt": chosen["prompt"],
        "chosen": chosen["response"],
        "rejected": rejected["response"],
    }
    ids = (chosen["prompt_ids"], chosen["response_ids"], rejected["response_ids"])
    if all(ids) and chosen["prompt_ids"] == rejected["prompt_ids"]:
        row |= zip(_IDS, map(list, ids), strict=True)
    return row


def _of_run(path: Path, *, count: int, seed: int, messages: list[str]) -> Iterable[dict[str, Any]]:
    """Yield the pairs of a run's rollouts, each with its question, if it is known: chosen with little of each in memory, then read whole."""
    run = read_run(path)
    entries = [e for e in run.entries if e.folder == ROLLOUTS]
    phase = phase_to_train_on(run, {e.phase for e in entries if e.rows})
    entries = [e for e in entries if e.phase == phase]
    usable = sorted(_usable(path, entries), key=lambda r: r["key"])
    left_out = sum(e.rows for e in entries) - len(usable)
    reasons = "cut at their length limit or as episodes, empty, or not sampled by the policy alone"
    without = [f"{left_out} responses were {reasons}, and are left out"] if left_out else []
    messages += without
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in usable:
        groups[row["prompt"]].append(row)
    pairs = [pair for group in groups.values() for pair in pair_up(group, count=count, seed=seed)]
    if not pairs:
        among = "; ".join([f"{len(usable)} {phase} rollouts", *without])
        raise RlvrError(
            f"{path.name} has no question with both a right and a wrong response among its {among}; {GRADED_BOTH_WAYS}.",
            OF_EPISODES
            if left_out > len(usable) and fact_of(run.metadata, "environment")
            else "Sample more responses per question: rlvr eval --num-samples 8, or more questions.",
        )
    prompts = stored_prompts(run.metadata)
    whole = _whole(path, entries, {row["place"] for pair in pairs for row in pair})
    yield from (_with_question(whole[chosen["place"]], whole[rejected["place"]], prompts) for chosen, rejected in pairs)


def _usable(path: Path, entries: Iterable[Entry]) -> Iterator[dict[str, Any]]:
    """Yield what `pair_up` needs of the rollouts of these parts that may be in a pair: the `response` as its hash, the `place` as (part, row)."""
    prompts: dict[str, str] = {}  # each once
    columns = [*_KEY[1:], "prompt", "response", "reward", "finish_reason", "response_mask", "episode"]
    for number, entry in enumerate(entries):
        for index, r in enumerate(read_part(path, entry, columns).to_pylist()):
            if not was_cut(r) and r["response"].strip() and all(r["response_mask"] or []):
                yield {
                    "key": (r["step"], r["example_id"], r["sample_index"]),
                    "place": (number, index),
                    "prompt": prompts.setdefault(r["prompt"], r["prompt"]),
                    "response": hashlib.sha256(r["response"].encode()).digest(),
                    "reward": r["reward"],
                }


def _whole(
    path: Path, entries: Sequence[Entry], places: Iterable[tuple[int, int]]
) -> dict[tuple[int, int], dict[str, Any]]:
    """Read the rollouts at these places, see `_usable`, as `pair_row` takes them."""
    of_part: dict[int, list[int]] = defaultdict(list)
    for number, index in sorted(places):
        of_part[number].append(index)
    columns = [*_KEY, "prompt", "own_prompt", "response", "ground_truth", "prompt_ids", "response_ids"]
    whole = {}
    for number, indices in of_part.items():
        part = read_part(path, entries[number], columns)
        for index, r in zip(indices, part.take(indices).to_pylist(), strict=True):
            whole[number, index] = r | {"id": "/".join(str(r[name]) for name in _KEY)}
    return whole


def _with_question(chosen: Mapping[str, Any], rejected: Mapping[str, Any], prompts: StoredPrompts) -> dict[str, Any]:
    """A pair of a run as a row, with its question if that is known."""
    question = prompts.question_of(chosen)
    known = {} if question is None else {"question": question}
    return known | pair_row(chosen, rejected)


def _pair(
    row: Row, template: PromptTemplate, *, stem: str, question_field: str, taken: dict[str, str], opened_twice: bool
) -> tuple[list[Example], list[SampledIds], int]:
    """Return the two examples of a row, their sampled ids if it has them, and how many lack a <think> that the prompt has."""
    prompt_field = None if question_field else first_field(["prompt"], row.keys)
    formatted = prompt_field is not None and bool(text_of(row, prompt_field))
    field = prompt_field if formatted else question_field or first_field(QUESTION_FIELDS, row.keys)
    question = (text_of(row, field) if field else None) or ""
    prompt = question if formatted else template.fill(question)
    beside = row.values.get("question") if formatted else question  # beside the prompt that was made of it
    asked = beside if isinstance(beside, str) else ""
    pair_id = text_of(row, "id") or f"{stem}-{row.number}"
    ids = [ids_of(row.values, name, where=row.where) for name in _IDS]
    whole = [
        Example(f"{pair_id}, {name}", asked, "", prompt=prompt, response=text_of(row, name) or "")
        for name in ("chosen", "rejected")
    ]
    opened = [not (opened_twice or formatted or any(ids)) and opens_again(e) for e in whole]
    chosen, rejected = (opened_once(e) if once else e for e, once in zip(whole, opened, strict=True))
    for name, example in (("chosen", chosen), ("rejected", rejected)):
        if not (example.response or "").strip():
            raise BadRow(row.where, f"no {name} response; the keys are {join_names(row.keys)}.", _HINT)
    if chosen.response == rejected.response:
        raise BadRow(row.where, "the chosen and the rejected response are the same.", "Leave the pair out.")
    if not question.strip():
        raise BadRow(
            row.where, f"no prompt: looked for {question_field or join_names(QUESTION_FIELDS)}; the keys are {join_names(row.keys)}.", _HINT
        )  # fmt: skip
    if pair_id in taken:
        raise BadRow(
            row.where, f"the id {join_names([pair_id])} is taken: {taken[pair_id]} has it too.", "Ids must be unique."
        )
    if any(ids) and not all(ids):
        raise BadRow(row.where, f"it has some of {join_names(_IDS)}, but not all.", "Give all of them, or none.")
    taken[pair_id] = row.where
    return [chosen, rejected], [SampledIds(ids[0], response, None) for response in ids[1:] if response], sum(opened)
