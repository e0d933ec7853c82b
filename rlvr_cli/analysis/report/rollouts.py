"""The rollouts of a report: choose which ones it holds, and pack their columns into blocks.

Enters: runs. Leaves: a `page.Browser`, with a note on what was left out.
"""

import base64
import gzip
import json
import math
import re
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.queries.database import Database, open_runs
from rlvr_cli.analysis.report.episodes import turns_of
from rlvr_cli.analysis.report.page import Browser
from rlvr_cli.analysis.report.token_spans import token_pieces
from rlvr_cli.data.prompts import PLACEHOLDER
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.manifest import part_name
from rlvr_cli.runs.provenance import tokenizer_digest
from rlvr_cli.runs.readers import RunInfo, prompt_template
from rlvr_cli.runs.storage.files import read_regular
from rlvr_cli.text import storable

MAX_ROLLOUTS = 50_000  # most rollouts in a page
MAX_TOKENS = 30_000_000  # most response tokens in a page: about 110 MB of HTML
CHUNK_ROWS, CHUNK_TOKENS = 500, 200_000  # size of a block, which the page unpacks as a whole; a group is never split
READ_ROWS, READ_TOKENS = 5_000, 1_000_000  # size of one query's result
MAX_LISTED = {"extracted_answer": 60, "ground_truth": 60, "question": 160}  # characters shown in the list of rollouts
LIST_COLUMNS = (
    *("run_id", "phase", "step", "example_id", "sample_index", "category", "failure_kind", "reward", "advantage"),
    *("num_response_tokens", "extracted_answer", "ground_truth"),
)
TEXT_COLUMNS = (
    *("prompt", "response", "ground_truth", "extracted_answer", "format_reward", "answer_reward", "grade_error"),
    "grade_error_detail",
    *("grader", "finish_reason", "stop_reason", "mean_logprob", "mean_entropy", "policy_version", "seed", "sampled_at"),
)

_GROUPS = """
    SELECT run_id, phase, step, example_id, count(*), sum(num_response_tokens)::BIGINT FROM rollouts GROUP BY ALL
"""
JUDGED = ("reply", "score", "model", "prompt_tokens", "reply_tokens", "cached")
EPISODE_FACTS = ("ended_by", "tool_calls", "tool_errors", "forged", "environment_seconds")
_OWN = "coalesce(response_mask[i], true)"  # tokens of the environment have no log-probability
_LOGPROBS = f"[CASE WHEN isfinite(p) AND {_OWN} THEN least(round(-100 * p), 99999)::INT END FOR p, i IN sampled_logprobs] AS centinats"
_ROLLOUTS = f"""
    WITH wanted AS (
        SELECT unnest($runs) AS run_id, unnest($phases) AS phase, unnest($steps) AS step, unnest($examples) AS example_id
    )
    SELECT {", ".join(dict.fromkeys(LIST_COLUMNS + TEXT_COLUMNS))}, response_ids, turns, episode, measured, judgement, turn_facts, {_LOGPROBS}
    FROM rollouts SEMI JOIN wanted USING (run_id, phase, step, example_id)
"""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Group:
    """The samples of one question at one step; a report has all of them or none."""

    run: str
    phase: str
    step: int
    example_id: str
    rows: int
    tokens: int

    @property
    def key(self) -> tuple[str, str, int, str]:
        return self.run, self.phase, self.step, self.example_id


def groups_of(database: Database, runs: Sequence[str]) -> list[Group]:
    """All groups, by run in the order given, phase, step and question."""
    place = {run: i for i, run in enumerate(runs)}
    groups = [Group(*row) for row in database.select(_GROUPS).rows]
    known = [group for group in groups if group.run in place]
    return sorted(known, key=lambda g: (place[g.run], g.phase, g.step, _natural(g.example_id), g.example_id))


def pack_rollouts(
    database: Database, infos: Sequence[RunInfo], groups: Sequence[Group], *, timeout_seconds: float
) -> Browser:
    """Pack the rollouts of these groups, or of those that `choose_groups` keeps if a page cannot hold all.

    Args:
        database: has all of the runs.
        timeout_seconds: of each query on a database with a part of them.
    """
    total, tokens = _rows(groups), sum(group.tokens for group in groups)
    limit = min(MAX_ROLLOUTS, int(total * min(1.0, MAX_TOKENS / max(tokens, 1))))
    kept = list(groups) if total <= limit else choose_groups(groups, limit)
    pieces = {info.id: pieces_of(info) for info in infos}
    templates = {info.id: prompt_template(info.metadata) for info in infos}
    index: dict[str, list[Any]] = {name: [] for name in (*LIST_COLUMNS, "question")}
    starts, texts, spans = [], [], []
    for rows in _read_chunks(database, infos, kept, timeout_seconds=timeout_seconds):
        starts.append(len(index["step"]))
        listed = [list_entry(row, template=templates[row["run_id"]]) for row in rows]
        for name, values in index.items():
            values += [entry[name] for entry in listed]
        details = [detail_of(row, pieces=pieces[row["run_id"]]) for row in rows]
        columns = {
            name: [detail[name] for detail in details] for name in (*TEXT_COLUMNS, "turns", "episode", "judgement")
        }
        texts.append(pack(columns | {"prompt": _coded(columns["prompt"])}))
        spans.append(pack({name: [detail[name] for detail in details] for name in ("centinats", "lengths")}))
    columns = {name: _coded(values) for name, values in index.items()}
    with_tokenizer = [info.id for info in infos if pieces[info.id]]
    return Browser(
        {"rows": len(index["step"]), "starts": starts, "columns": columns, "tokenizers": with_tokenizer},
        texts,
        spans,
        _left_out(groups, kept, by_rows=limit == MAX_ROLLOUTS),
    )


def list_entry(row: Row, *, template: str) -> dict[str, Any]:
    """What the list shows of a rollout: `LIST_COLUMNS` and the question, long texts cut; of an episode the policy's tokens."""
    entry = {name: _listed(name, row[name]) for name in LIST_COLUMNS}
    if row.get("episode"):
        entry["num_response_tokens"] = row["episode"]["num_policy_tokens"]
    return entry | {"question": _listed("question", question_in(row["prompt"], template))}


def detail_of(row: Row, *, pieces: Mapping[int, bytes]) -> dict[str, Any]:
    """What only the open rollout shows: `TEXT_COLUMNS`, each token's log-probability and length in the text, the turns of an episode,
    and what a judge said."""
    detail = {name: _plain(row[name]) for name in TEXT_COLUMNS}
    turns, lengths = turns_of(row, pieces=pieces)
    episode = row["episode"] and {name: _plain(row["episode"][name]) for name in EPISODE_FACTS}
    measured = [[each["name"], each["value"]] for each in row["measured"] or ()]
    judgement = row["judgement"] and {name: _plain(row["judgement"][name]) for name in JUDGED}
    own = {
        "centinats": row["centinats"],
        "lengths": lengths,
        "turns": turns,
        "episode": episode and episode | {"tokens": row["num_response_tokens"], "measured": measured},
        "judgement": judgement,
    }
    return detail | own


def question_in(prompt: str, template: str) -> str:
    """The question in a prompt, on one line: what stands where the template has it, also within a chat, else the whole prompt."""
    head, hole, tail = (part.strip() for part in template.partition(PLACEHOLDER))
    start = prompt.find(head) + len(head) if hole and head in prompt else 0
    end = prompt.rfind(tail) if hole and tail else len(prompt)
    return " ".join(prompt[start:end].split() if start < end else ()) or " ".join(prompt.split())


def pack(value: Any) -> str:
    """A value as JSON, compressed, in base64."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return base64.b64encode(gzip.compress(storable(text).encode(), 6, mtime=0)).decode()


def choose_groups(groups: Sequence[Group], limit: int) -> list[Group]:
    """Choose groups with at most `limit` rollouts in total, in their order.

    Each run and phase gets an equal share of the rollouts, or all if it has fewer. Of its steps the last and the first are kept,
    then steps spread evenly between them; of the step that does not fit completely, groups spread evenly over it.
    """
    series: dict[tuple[str, str], list[Group]] = {}
    for group in groups:
        series.setdefault((group.run, group.phase), []).append(group)
    kept: set[tuple[str, str, int, str]] = set()
    room = limit
    smallest_first = sorted(series.values(), key=_rows)
    for number, members in enumerate(smallest_first):
        left = room // (len(smallest_first) - number)
        by_step = [list(step) for _, step in groupby(members, lambda g: g.step)]
        for i in _spread(len(by_step)):
            whole = _rows(by_step[i]) <= left
            for j in range(len(by_step[i])) if whole else _spread(len(by_step[i])):
                group = by_step[i][j]
                if group.rows <= left:
                    kept.add(group.key)
                    left -= group.rows
                    room -= group.rows
            if not whole:
                break
    return [group for group in groups if group.key in kept]


def _spread(count: int) -> Iterator[int]:
    """Yield 0 to count - 1 in this order: the last, the first, then always the middle of the widest gap."""
    yield from dict.fromkeys((count - 1, 0) if count else ())
    gaps = deque([(0, count - 1)])
    while gaps:
        low, high = gaps.popleft()
        middle = (low + high) // 2
        if low < middle < high:
            yield middle
            gaps += [(low, middle), (middle, high)]


def _rows(groups: Sequence[Group]) -> int:
    return sum(group.rows for group in groups)


def _natural(text: str) -> list[Any]:
    """A sort key that puts q-2 before q-10."""
    parts = re.split(r"([0-9]+)", text)
    return [(len(part.lstrip("0")), part.lstrip("0")) if i % 2 else part for i, part in enumerate(parts)]


def _read_chunks(
    whole: Database, infos: Sequence[RunInfo], groups: Sequence[Group], *, timeout_seconds: float
) -> Iterator[list[Row]]:
    """Yield the rollouts of these groups, sorted by group and sample, one block at a time."""
    for batch in _batches(groups, rows=READ_ROWS, tokens=READ_TOKENS):
        steps = {group.key[:3] for group in batch}
        runs = [of_steps(info, steps) for info in infos]
        is_whole = all(run.parts == info.parts for run, info in zip(runs, infos, strict=True))
        with nullcontext(whole) if is_whole else open_runs(runs, timeout_seconds=timeout_seconds) as database:
            rows = iter(read_groups(database, batch))
        for chunk in _batches(batch, rows=CHUNK_ROWS, tokens=CHUNK_TOKENS):
            yield list(islice(rows, _rows(chunk)))


def of_steps(info: RunInfo, steps: Collection[tuple[str, str, int]]) -> RunInfo:
    """The run with only its rollout parts of these (run, phase, step), without segments: other parts are not opened."""
    return replace(info, parts=[part for part in info.parts if step_of(info, part) in steps], segments=[])


def step_of(info: RunInfo, part: Path) -> tuple[str, str, int]:
    """The run, phase and step of a part."""
    name = part_name(part.relative_to(info.path).as_posix())
    assert name is not None, part
    return info.id, name.phase, name.step


def _batches(groups: Sequence[Group], *, rows: int, tokens: int) -> Iterator[list[Group]]:
    """Yield consecutive groups with at most `rows` rows and `tokens` tokens; a larger group is a batch by itself."""
    batch: list[Group] = []
    rows_left, tokens_left = rows, tokens
    for group in groups:
        if batch and (group.rows > rows_left or group.tokens > tokens_left):
            yield batch
            batch, rows_left, tokens_left = [], rows, tokens
        batch.append(group)
        rows_left, tokens_left = rows_left - group.rows, tokens_left - group.tokens
    if batch:
        yield batch


def read_groups(database: Database, groups: Sequence[Group]) -> list[Row]:
    """The rollouts of these groups, by group and sample."""
    runs, phases, steps, examples = (list(column) for column in zip(*(g.key for g in groups), strict=True))
    table = database.select(_ROLLOUTS, {"runs": runs, "phases": phases, "steps": steps, "examples": examples})
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    place = {group.key: i for i, group in enumerate(groups)}
    return sorted(rows, key=lambda r: (place[r["run_id"], r["phase"], r["step"], r["example_id"]], r["sample_index"]))


def _coded(values: Sequence[Any]) -> dict[str, list[Any]]:
    """Dictionary encoding: the distinct values, and for each value its index among them."""
    codes: dict[Any, int] = {}
    return {"codes": [codes.setdefault(value, len(codes)) for value in values], "values": list(codes)}


def _listed(name: str, value: Any) -> Any:
    value, most = _plain(value), MAX_LISTED.get(name)
    return value[:most] + "…" if most and isinstance(value, str) and len(value) > most else value


def _plain(value: Any) -> Any:
    """A value that JSON and JavaScript can hold: numbers that are not finite, or that a double would round, become text."""
    match value:
        case None | str():
            return value
        case int() if abs(value) < 2**53:
            return value
        case float() if math.isfinite(value):
            return value
    return str(value)


def _left_out(groups: Sequence[Group], kept: Sequence[Group], *, by_rows: bool) -> str:
    """A note on the rollouts that are not in the page; empty when nothing is missing."""
    if len(kept) == len(groups):
        return ""
    series = dict.fromkeys((g.run, g.phase) for g in groups)

    def steps(of: Sequence[Group], which: tuple[str, str]) -> int:
        return len({g.step for g in of if (g.run, g.phase) == which})

    counts = [
        f"{run} {phase}: {steps(kept, (run, phase))} of {steps(groups, (run, phase))} steps" for run, phase in series
    ]
    why = f"limited to {MAX_ROLLOUTS:,} rollouts" if by_rows else f"limited to {MAX_TOKENS:,} tokens"
    return (
        f"This page has {_rows(kept):,} of {_rows(groups):,} rollouts ({why}): the first and the last step of each run and"
        f" phase, and steps spread evenly between them, in whole groups. {'; '.join(counts)}. Summary and curves use all rollouts."
    )


def pieces_of(info: RunInfo) -> dict[int, bytes]:
    """The text of each token id, from the tokenizer of the run's final model, else of the model it sampled from; may be empty.

    The latter is read only if its hash is the recorded one: run.json may come from someone else.
    """
    with suppress(RlvrError):
        return token_pieces(read_regular(info.path, "model/tokenizer.json"))
    try:
        model = info.metadata["facts"]["model"]
        directory = _sampled_model(model)
        if directory is not None and tokenizer_digest(directory) == model.get("tokenizer_sha256"):
            return token_pieces((directory / "tokenizer.json").read_bytes())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass  # run.json has no valid entry for the model, or the model is gone
    return {}


def _sampled_model(model: Mapping[str, Any]) -> Path | None:
    if "path" in model:
        return Path(model["path"])
    if "id" not in model:
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(model["id"], "tokenizer.json", revision=model.get("revision"))
    return Path(cached).parent if isinstance(cached, str) else None
