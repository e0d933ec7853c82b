"""What the rollout browser of `rlvr view` asks: which rollouts there are, a page of them, one with its group, and where else
its question was asked.

Enters: runs, and the parameters of a request, of which none becomes SQL text. Leaves: objects for JSON.
"""

import json
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from rlvr_cli.analysis.queries.database import Database, LimitReached, check_parts, open_runs
from rlvr_cli.analysis.report.rollouts import Group, detail_of, list_entry, of_steps, pieces_of, read_groups, step_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.lock import holder_of
from rlvr_cli.runs.manifest import ROLLOUTS
from rlvr_cli.runs.readers import RunInfo, prompt_template
from rlvr_cli.text import storable

PAGE_ROWS = 25
MAX_GROUP = 64  # samples of a group in one answer
MAX_WORDS = 500  # characters of a search
SECONDS = 20.0  # time limit of each query
IDLE = 4  # opened databases kept for the next query

_FACETS = ("run_id", "phase", "step", "category", "failure_kind")
_OF_ROWS = ("category", "failure_kind", "reward", "words", "sort")  # what asks for more than the manifest says
_RIGHT = "coalesce(reward > 0.5 AND NOT isnan(reward), false)"
_REWARDS = {
    "above 0.5": _RIGHT,
    "0.5 or less": f"reward IS NOT NULL AND NOT {_RIGHT}",
    "none: the grade failed": "reward IS NULL",
}
_SEARCHED = ("prompt", "response", "ground_truth", "extracted_answer", "example_id")
_WORDS = f"({' OR '.join(f'contains(lower({name}), lower($words))' for name in _SEARCHED)})"
_KEY = "run_id, phase, step, example_id, sample_index"
_SORTS = {
    **{name: name for name in ("example_id", "extracted_answer", "ground_truth", "reward", "run_id", "phase", "step")},
    **{name: name for name in ("sample_index", "advantage", "num_response_tokens")},
    "outcome": "coalesce(failure_kind, category)",
}
_TOKENS = "policy_tokens(episode, num_response_tokens) AS num_response_tokens"  # as `list_entry` has them
_SORTED = ("reward", "advantage", _TOKENS, "extracted_answer", "ground_truth", "category", "failure_kind")
_NEWEST = (("step", True), ("phase", False), ("run_id", False), ("example_id", False), ("sample_index", False))
_PLACES = f"""
    SELECT run_id, phase, step, count(*) AS samples, count(*) FILTER ({_RIGHT}) AS "right"
    FROM rollouts WHERE example_id = $example_id GROUP BY ALL ORDER BY ALL
"""
_LISTED = f"""
    WITH wanted AS (
        SELECT unnest($runs) AS run_id, unnest($phases) AS phase, unnest($steps) AS step, unnest($examples) AS example_id,
            unnest($samples) AS sample_index
    )
    SELECT run_id, phase, step, example_id, sample_index, category, failure_kind, reward, advantage, {_TOKENS},
        extracted_answer, ground_truth, prompt
    FROM rollouts SEMI JOIN wanted USING (run_id, phase, step, example_id, sample_index)
"""


class Refused(RlvrError):
    """A request asks for what there is not, or a parameter is wrong: it would be refused again."""


class GivenUp(LimitReached):
    """Nobody waits for the answer any more."""


class Asker:
    """Who waits for an answer. It is made in one thread, and another gives it up when nobody does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._database: Database | None = None
        self._is_gone = False

    def leave(self) -> None:
        """End the query that runs, if one does at this moment."""
        with self._lock:
            self._is_gone = True
            if self._database is not None:
                self._database.stop()

    @contextmanager
    def asking(self, database: Database) -> Iterator[None]:
        """A block with queries, which raise GivenUp when they are ended."""
        with self._lock:
            self._database = database
        try:
            yield
        except LimitReached:
            if self._is_gone:
                raise GivenUp("Nobody waits for the answer any more.") from None
            raise
        finally:
            with self._lock:  # from here on the database may be another asker's
                self._database = None


_WAITS = Asker()
# Of the answer that is being made; by default one that never leaves.
ASKER: ContextVar[Asker] = ContextVar("asker", default=_WAITS)


@contextmanager
def _opened(runs: Sequence[RunInfo]) -> Iterator[Database]:
    with open_runs(runs, timeout_seconds=SECONDS) as database, ASKER.get().asking(database):
        yield database


class Databases:
    """Opened runs, kept for the next query over the same committed rollouts. Each is used by one thread at a time."""

    def __init__(self) -> None:
        self._idle: OrderedDict[tuple[Any, ...], list[tuple[Database, ExitStack]]] = OrderedDict()
        self._lock = threading.Lock()
        # Run -> sums of the parts that were read, kinds.
        self._kinds: dict[str, tuple[set[str], set[tuple[Any, ...]]]] = {}

    def kinds(self, info: RunInfo) -> set[tuple[Any, ...]]:
        """The categories and kinds of failure in a run's rollouts. Only parts that were not there before are read: parts do not change."""
        sums = {info.path / entry.path: entry.sha256 for entry in info.entries}
        parts = {part: sums[part] for part in info.parts}
        seen, kinds = self._kinds.get(info.id, (set(), set()))
        if not seen <= {*parts.values()}:  # another run has the name now
            seen, kinds = set(), set()
        if new := [part for part, sha256 in parts.items() if sha256 not in seen]:
            with _opened([replace(_rollouts_of(info), parts=new)]) as database:
                kinds = kinds | {*database.select("SELECT DISTINCT category, failure_kind FROM rollouts").rows}
            self._kinds[info.id] = {*parts.values()}, kinds
        return kinds

    @contextmanager
    def lease(self, infos: Sequence[RunInfo]) -> Iterator[Database]:
        """Lend a database over the rollouts of these runs. Raises RlvrError, also if one of their parts was damaged since it was opened."""
        key = tuple((info.id, info.path, info.fingerprint, tuple(info.parts)) for info in infos)
        with self._lock:
            idle = self._idle.pop(key, [])
            database, stack = idle.pop() if idle else (None, ExitStack())
            if idle:
                self._idle[key] = idle
        runs = [_rollouts_of(info) for info in infos]
        if database is None:
            database = stack.enter_context(open_runs(runs, timeout_seconds=SECONDS))
        try:
            with ASKER.get().asking(database):
                yield database
        except BaseException as error:
            stack.close()
            if isinstance(error, RlvrError) and not isinstance(error, LimitReached):
                check_parts(runs)  # DuckDB names no file
            raise
        with self._lock:
            self._idle.setdefault(key, []).append((database, stack))
            self._idle.move_to_end(key)
            spare = []
            while sum(map(len, self._idle.values())) > IDLE:
                oldest = next(iter(self._idle))
                spare.append(self._idle[oldest].pop(0)[1])
                if not self._idle[oldest]:
                    del self._idle[oldest]
        for other in spare:
            other.close()

    def close(self) -> None:
        """Close those that are not in use."""
        with self._lock:
            idle, self._idle = self._idle, OrderedDict()
        for members in idle.values():
            for _, stack in members:
                stack.close()


def _rollouts_of(info: RunInfo) -> RunInfo:
    return replace(info, grades=[], segments=[], metrics=None)


def facets(databases: Databases, runs: Sequence[RunInfo], asked: Mapping[str, str]) -> dict[str, list[Any]]:
    """The values of the columns that can be filtered by, each in order."""
    places = {step_of(info, part) for info in runs for part in info.parts}
    found: dict[str, set[Any]] = {name: {p[i] for p in places} for i, name in enumerate(("run_id", "phase", "step"))}
    kinds = {kind for info in runs for kind in databases.kinds(info)}
    found |= {"category": {row[0] for row in kinds}, "failure_kind": {row[1] for row in kinds}}
    return {name: sorted(found[name], key=lambda value: (value is None, value)) for name in _FACETS}


def page(databases: Databases, runs: Sequence[RunInfo], asked: Mapping[str, str]) -> dict[str, Any]:
    """`PAGE_ROWS` of the rollouts that the filters and the words find, from the row `first` on, and how many they are.

    Args:
        asked: the filters, each as JSON; reward, words, sort, down, first.

    Raises:
        Refused: a parameter is not one of these.
        LimitReached: the query took too long.
        RlvrError: a part is missing or damaged.
    """
    total = sum(_places_of(runs).values())
    chosen = _of_filters(runs, _condition(asked)[1])
    first = _count(asked.get("first", "0"))
    if not asked.get("sort"):
        chosen = sorted(chosen, key=lambda i: holder_of(i.path) is None)  # what is being written comes first
    if not any(asked.get(name) for name in _OF_ROWS):
        found, chosen, before = _newest(chosen, first)
        rows = _found(databases, chosen, asked, first - before)[1]
    else:
        found, rows = _found(databases, chosen, asked, first)
    return {"found": found, "total": total, "rows": _listed(databases, runs, rows)}


def _places_of(runs: Sequence[RunInfo]) -> Counter[tuple[str, str, int]]:
    """Run, phase and step -> how many rollouts are committed, by the manifests."""
    found: Counter[tuple[str, str, int]] = Counter()
    for info in runs:
        for entry in info.entries:
            if entry.folder == ROLLOUTS:
                found[info.id, entry.phase, entry.step] += entry.rows
    return found


def _newest(chosen: Sequence[RunInfo], first: int) -> tuple[int, list[RunInfo], int]:
    """How many rollouts the runs have, by run and the newest first, without reading them.

    Returns:
        how many; the runs with only the parts that have the `PAGE_ROWS` from the row `first` on; how many are before these parts.
    """
    order = {info.id: i for i, info in enumerate(chosen)}
    wanted = {step_of(info, part) for info in chosen for part in info.parts}
    counts = {place: rows for place, rows in _places_of(chosen).items() if place in wanted}
    end, before, kept = 0, 0, set()
    for place in sorted(counts, key=lambda p: (order[p[0]], -p[2], p[1])):
        end += counts[place]
        if end <= first:
            before = end
        elif end - counts[place] < first + PAGE_ROWS:
            kept.add(place)
    return end, [some for info in chosen if (some := of_steps(info, kept)).parts], before


def _found(
    databases: Databases, chosen: Sequence[RunInfo], asked: Mapping[str, str], first: int
) -> tuple[int, list[tuple[Any, ...]]]:
    """How many rollouts of these runs are asked for, and the keys of `PAGE_ROWS` of them from the row `first` on."""
    condition, parameters = _condition(asked)
    order = _order(asked)
    if not chosen:
        return 0, []
    if not asked.get("sort") and len(chosen) > 1:
        parameters["first_runs"] = [info.id for info in chosen]
        order = [("list_position($first_runs::VARCHAR[], run_id)", False), *order]
    source = f"(SELECT {_KEY}, {', '.join(_SORTED)} FROM rollouts WHERE {condition})"
    with databases.lease(chosen) as database:
        if "words" in parameters:  # read the texts once
            tables = database.script(
                f"CREATE OR REPLACE TEMP TABLE hits AS {source}; SELECT count(*) FROM hits", parameters
            )
            source = "hits"
            found = next(tables).rows[0][0]
        else:
            found = database.select(f"SELECT count(*) FROM rollouts WHERE {condition}", parameters).rows[0][0]
        # From the nearer end, because the rows before the page must be sorted too.
        is_reversed = first > found // 2
        offset = max(0, found - first - PAGE_ROWS) if is_reversed else first
        size = min(PAGE_ROWS, max(0, found - first))
        keys = f"SELECT {_KEY} FROM {source} ORDER BY {_order_sql(order, is_reversed)} LIMIT {size} OFFSET {offset}"
        rows = list(database.select(keys, parameters).rows) if size else []
        if source == "hits":
            list(database.script("DROP TABLE hits", {}))
    return found, rows[::-1] if is_reversed else rows


def group(databases: Databases, runs: Sequence[RunInfo], asked: Mapping[str, str]) -> dict[str, Any]:
    """The samples of one question at one step, whole; of more than `MAX_GROUP` the first ones, and the one that is asked for.

    Also how many there are, and how many of all of them have a reward above 0.5.
    """
    where = Group(*(_value(asked, name) for name in ("run_id", "phase", "step", "example_id")), rows=0, tokens=0)  # type: ignore[arg-type]
    sample = _value(asked, "sample_index")
    info = next((info for info in runs if info.id == where.run), None)
    if info is None:
        raise Refused(f"There is no run {where.run!r} here.")
    pieces, template = pieces_of(info), prompt_template(info.metadata)
    with _opened([_rollouts_of(of_steps(info, {where.key[:3]}))]) as database:
        rows = read_groups(database, [where])
    kept = [row for i, row in enumerate(rows) if i < MAX_GROUP or row["sample_index"] == sample]
    shown = [
        list_entry(row, template=template) | detail_of(row, pieces=pieces) | {"has_tokenizer": bool(pieces)}
        for row in kept
    ]
    right = sum(row["reward"] is not None and row["reward"] > 0.5 for row in rows)
    return {"rows": shown, "samples": len(rows), "right": right}


def places(databases: Databases, runs: Sequence[RunInfo], asked: Mapping[str, str]) -> dict[str, Any]:
    """Where a question was asked: run, phase, step, the number of samples, and of those with a reward above 0.5."""
    order = {info.id: i for i, info in enumerate(runs)}
    with databases.lease(runs) as database:
        table = database.select(_PLACES, {"example_id": _value(asked, "example_id")})
    found = sorted(table.records(), key=lambda place: (order.get(place["run_id"], 0), place["phase"], place["step"]))
    return {"places": found}


def _listed(databases: Databases, runs: Sequence[RunInfo], keys: Sequence[tuple[Any, ...]]) -> list[dict[str, Any]]:
    """The rows of the list with these keys, in their order, read from the parts of their steps alone."""
    if not keys:
        return []
    names = ("runs", "phases", "steps", "examples", "samples")
    columns: dict[str, Any] = {name: list(values) for name, values in zip(names, zip(*keys, strict=True), strict=True)}
    steps = {key[:3] for key in keys}
    chosen = [kept for info in runs if (kept := of_steps(info, steps)).parts]
    templates = {info.id: prompt_template(info.metadata) for info in runs}
    with _opened([_rollouts_of(info) for info in chosen]) as database:
        table = database.select(_LISTED, columns)
    rows = {tuple(row[name] for name in _KEY.split(", ")): row for row in table.records()}
    return [list_entry(rows[key], template=templates[key[0]]) for key in map(tuple, keys)]


def _condition(asked: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """The condition of the filters, and the values of its parameters."""
    parameters = {name: _value(asked, name) for name in _FACETS if name in asked}
    parts = [f"{name} IS NOT DISTINCT FROM ${name}" for name in parameters]
    if reward := asked.get("reward", ""):
        if reward not in _REWARDS:
            raise Refused(f"reward is {reward!r}.", f"It is one of: {', '.join(_REWARDS)}.")
        parts.append(_REWARDS[reward])
    if words := asked.get("words", ""):
        if len(words) > MAX_WORDS:
            raise Refused(f"The search has {len(words)} characters.", f"Search for {MAX_WORDS} at most.")
        parts.append(_WORDS)
        parameters["words"] = storable(words)
    return " AND ".join(parts) or "true", parameters


def _of_filters(runs: Sequence[RunInfo], filters: Mapping[str, Any]) -> list[RunInfo]:
    """The runs with only the parts that can hold what the filters on run, phase and step ask for."""
    wanted = {i: filters[name] for i, name in enumerate(("run_id", "phase", "step")) if name in filters}
    steps = {
        place
        for info in runs
        for place in (step_of(info, part) for part in info.parts)
        if all(place[i] == want for i, want in wanted.items())
    }
    return [kept for info in runs if (kept := of_steps(info, steps)).parts]


def _order(asked: Mapping[str, str]) -> list[tuple[str, bool]]:
    """The columns to sort by, each with whether it falls."""
    sort = asked.get("sort", "")
    if not sort:
        return list(_NEWEST)
    if sort not in _SORTS:
        raise Refused(f"sort is {sort!r}.", f"It is one of: {', '.join(_SORTS)}.")
    return [(_SORTS[sort], asked.get("down") == "1"), *_NEWEST]


def _order_sql(order: Sequence[tuple[str, bool]], is_reversed: bool) -> str:
    nulls = "FIRST" if is_reversed else "LAST"
    return ", ".join(f"{name} {'DESC' if down != is_reversed else 'ASC'} NULLS {nulls}" for name, down in order)


def _value(asked: Mapping[str, str], name: str) -> str | int | None:
    """The value of a column in a request. Raises Refused if it is missing or neither text, nor a whole number, nor null."""
    try:
        value = json.loads(asked[name])
    except (KeyError, ValueError, RecursionError):
        raise Refused(f"{name} is missing, or is not JSON.") from None
    if value is not None and (not isinstance(value, str | int) or isinstance(value, bool)):
        raise Refused(f"{name} is neither text, nor a whole number, nor null.")
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        raise Refused(f"{name} is too large.")
    return storable(value) if isinstance(value, str) else value


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 12):
        raise Refused(f"first is {text!r}, not a whole number.")
    return int(text)
