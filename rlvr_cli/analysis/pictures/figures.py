"""Result of a query -> the picture of it, for `--plot` and for the page.

Enters: the rows of a query, the arms that they are of, and what the options ask for. Leaves: a `Picture`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from rlvr_cli.analysis.pictures.arms import Arm
from rlvr_cli.analysis.pictures.picture import Line, Panel, Picture, number, numbers
from rlvr_cli.analysis.queries.columns import (
    Columns,
    are_numbers,
    columns_of,
    count_distinct,
    interval_columns,
    kind_of,
    nothing_to_draw,
    other_columns,
    with_wanted,
)
from rlvr_cli.analysis.queries.named_queries import NamedQuery
from rlvr_cli.analysis.statistics.estimators import mean_interval
from rlvr_cli.analysis.statistics.progress import Progress, place, round_starts
from rlvr_cli.config.parsing.options import nearest
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Table

MAX_LINES, MAX_PANELS = 24, 24  # more are no picture
MAX_OVERLAID = 6  # lines that may share a panel with their variants; more get a panel for each variant
LONG_MINUTES = 180.0  # above which x is in hours
SHORT = 0.1  # of the longest run: where another one is shorter, x is logarithmic, so that it is more than a dot

# column of a named query -> (title, label of the y axis); of other columns both are the name
MEASURES = {
    "eval_reward": ("Held-out reward", "mean reward"),
    "train_reward": ("Training reward", "mean reward"),
    "train_format_reward": ("Format reward in training", "mean reward"),
    "groups_with_signal": ("Groups with a signal", "share of groups"),
    "signal": ("Groups with a signal", "share of groups"),
    "all_correct": ("Groups all correct", "share of groups"),
    "all_wrong": ("Groups all wrong", "share of groups"),
    "length": ("Response length", "tokens"),
    "length_correct": ("Length of correct responses", "tokens"),
    "length_wrong": ("Length of wrong responses", "tokens"),
    "lengths.mean": ("Mean length", "tokens"),
    "lengths.p95": ("95th percentile of lengths", "tokens"),
    "truncated_share": ("Truncated responses", "share of responses"),
    "entropy": ("Entropy of the policy", "nats per token"),
    "estimate_correct": ("Entropy by position", "nats per token"),
    "clip_fraction": ("Clipped tokens", "share of tokens"),
    "grad_norm": ("Gradient norm", "norm before clipping"),
    "mismatch_mean": ("Sampler against trainer, mean", "log-probability, nats"),
    "mismatch_largest": ("Sampler against trainer, largest", "log-probability, nats "),
    "nll": ("Loss", "nats per token "),
    "accuracy": ("Accuracy", "share of samples"),
    "best_score": ("Best score of the search", "score"),
    "turns": ("Turns of the policy", "per episode"),
    "tool_calls": ("Calls of tools", "per episode"),
    "tool_errors": ("Calls that failed", "per episode"),
    "failed_share": ("Calls that failed", "share of calls"),
    "environment_share": ("Said by the environment", "share of tokens"),
    "share": ("Responses", "share of responses"),
    "repetitions.shared": ("Responses that another question also got", "share of responses"),
    "repetitions.duplicates": ("Responses equal to an earlier one to the question", "share of responses"),
    "repetitions.repeating": ("Responses that repeat words", "share of responses"),
    "repetitions.distinct_words": ("Different words", "share of a response's words"),
    "disagreement": ("Verdicts that differ", "share of samples"),
}
VARIANTS = {
    **{"pass_at_k": "pass@k", "best_at_k": "best@k", "majority_at_k": "majority@k"},
    **{"best_score": "best so far", "score": "attempt"},
    **{"entropy": "all", "entropy_correct": "correct", "entropy_wrong": "wrong"},
    **{"push_share": "the run's objective", "other_push_share": "the other"},
    **{"estimate_correct": "correct", "estimate_wrong": "wrong", "correct": "correct", "wrong": "wrong"},
}
X_LABELS = {
    "step": "updates",
    "k": "samples k",
    "thinking_budget": "thinking budget, tokens",
    "from_tokens": "tokens, from",
    "position": "position in the response, from",
    "bucket_from": "position or length in tokens, from",
    "run_id": "",
}
PROGRESS = {"steps": "algorithm_steps", "rollouts": "rollouts", "tokens": "tokens", "minutes": "minutes"}

# Columns that are drawn only if they are not 0 everywhere, among others; and what the picture says then.
EMPTY_AT_0 = {"clip_fraction": "No token was clipped in any update.", "tool_errors": "No call of a tool failed."}
CUT = "Intervals that go beyond the axis are cut at its end."
NO_EARLY_END = "Sampler against trainer: without the tokens before --sampling-min-tokens, where the sampler forbids the end of a response."

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Wishes:
    """What the options ask for; see the config of `rlvr analyze`."""

    x: str = "updates"
    panels: tuple[str, ...] = ()
    smooth: int = 1
    log: str = ""
    title: str = ""


class TooMany(RlvrError):
    """A picture would have more lines or panels than one can tell apart."""


class NothingShared(RlvrError):
    """No line of a picture has values that all runs of an arm have."""


class Point(NamedTuple):
    """One value: of a run, at an x. `key` is x before --x, `shown` its text; the arm is None of what is of no run of them."""

    run: str
    arm: int | None
    key: Any
    shown: str
    x: float
    y: float
    low: float
    high: float
    count: float | None


class Merged(NamedTuple):
    """One point of a line: of a run, or the mean of several, whose values are `of_runs`."""

    x: float
    y: float
    low: float
    high: float
    note: str
    of_runs: tuple[float, ...]


def draw(
    result: Table,
    query: NamedQuery,
    arms: Sequence[Arm],
    *,
    wishes: Wishes = Wishes(),
    progress: Progress | None = None,
    held_out: Mapping[tuple[int, int | None], Interval] | None = None,
) -> Picture:
    """Make the picture of a query's result.

    Args:
        arms: the runs of the result, in the order in which they were asked for; several runs of an arm are seeds.
        progress: needed for `wishes.x` other than updates, and for arms whose seeds differ in the updates of their rounds.
        held_out: (number of the arm, updates of its first run) -> interval of its held-out accuracy, for the column eval_reward.

    Raises:
        RlvrError: the result cannot be drawn (a TooMany if it is too much, or NothingShared), with what to select; or a panel has another name.
    """
    name, plot = query.name or "The result", query.plot or {}
    result = _with_names(result, plot)
    columns = columns_of(result, plot, name)
    others = other_columns(result, columns)
    if wishes.panels:
        columns = with_wanted(columns, result, plot, wishes.panels)
    if wishes.x != "updates" and columns.x != "step":
        raise RlvrError(
            f"--x {wishes.x} needs x to be the column step; here it is {columns.x}.",
            "Select run_id and step, or leave --x out.",
        )
    maker = _Maker(result, columns, query, arms, wishes=wishes, progress=progress or {}, held_out=held_out or {})
    panels = maker.panels()
    if not panels and maker.partial:
        raise NothingShared(
            f"{name} cannot be drawn. {maker.partial_note}", "Draw the runs one by one, without the commas."
        )
    if not panels:
        raise nothing_to_draw(name, result, columns)
    if wishes.panels:
        wanted = [w for w in wishes.panels if w not in maker.partial or any(w in p.name.split() for p in panels)]
        if not wanted:
            raise NothingShared(maker.partial_note, "Draw the runs one by one, without the commas, or other panels.")
        panels = _chosen(panels, wanted, others=others, result=result, query=query)
    for panel in panels:
        if len(panel.lines) > MAX_LINES:
            raise TooMany(
                f"{name}: a panel would have {len(panel.lines)} lines, and {MAX_LINES} are all that one can tell apart.",
                "Select fewer rows, or fewer columns of text: each of their combinations is a line.",
            )
    if len(panels) > MAX_PANELS:
        raise TooMany(
            f"{name}: there would be {len(panels)} panels; at most {MAX_PANELS} are drawn.",
            f"Choose with --panels: {', '.join(panel.name for panel in panels)}.",
        )
    title = wishes.title or (arms[0].label if len(arms) == 1 else "")
    picture = Picture(panels, maker.series, maker.variants, title, tuple(maker.notes(panels)))
    return replace(picture, notes=(*picture.notes, CUT)) if has_cut_intervals(picture) else picture


def has_cut_intervals(picture: Picture) -> bool:
    """Whether an interval goes beyond the ends of its axis, where the drawers cut it."""
    for panel in picture.panels:
        axes = picture.axes(panel)
        for line in panel.lines if axes else ():
            bounds = [v for bound in (line.low, line.high) for v in numbers(bound or (), log="y" in panel.log)]
            if axes and any(not axes[1].low <= v <= axes[1].high for v in bounds if math.isfinite(v)):
                return True
    return False


def _chosen(
    panels: Sequence[Panel], wanted: Sequence[str], *, others: Sequence[str], result: Table, query: NamedQuery
) -> tuple[Panel, ...]:
    """The panels of these names, in this order; a name may also be a word of several names, such as a phase.

    Raises:
        RlvrError: there is no such panel, with those that there are, and the columns `others` that could be.
    """
    kept: dict[int, Panel] = {}
    for name in wanted:
        found = [p for p in panels if name == p.name] or [p for p in panels if name in p.name.split()]
        if not found:
            near = nearest(name, [*(panel.name for panel in panels), *others])
            problem = f"There is no panel {name!r}." + (f" Did you mean {near[0]}?" if near else "")
            if name in result.columns:
                problem = f"The column {name} has no numbers to draw in these runs."
            hint = f"Panels: {', '.join(panel.name for panel in panels)}."
            hint += f" Other columns: {', '.join(others)}." if others else ""
            if query.name == "curves":
                hint += f" Any metric: rlvr analyze metrics RUN --set names=%{name}% --plot FILE"
            raise RlvrError(problem, hint)
        kept |= {id(panel): panel for panel in found}
    return tuple(kept.values())


# Points


class _Maker:
    """Groups the rows of a result into lines and panels."""

    def __init__(
        self,
        result: Table,
        columns: Columns,
        query: NamedQuery,
        arms: Sequence[Arm],
        *,
        wishes: Wishes,
        progress: Progress,
        held_out: Mapping[tuple[int, int | None], Interval],
    ) -> None:
        self.result, self.columns, self.arms = result, columns, arms
        self.named, self.plot = query.name, query.plot or {}
        self.wishes, self.progress, self.held_out = wishes, progress, held_out
        self.arm_of = {run: number for number, arm in enumerate(arms) for run in arm.runs}
        self.starts = {run: its for arm in arms for run, its in round_starts(progress, arm.runs).items()}
        self.firsts = {run: arm.runs[0] for arm in arms for run in arm.runs}
        self.varied = [c for c in columns.lines[1:] if count_distinct(result, c) > 1]
        self.bounds = {c: interval_columns(result, c) for group in columns.y for c in group}
        is_text = kind_of(result, columns.x) == "text"
        self.rows = [row for row in result.records() if is_text or _is_place(row[columns.x])]
        self.rows += [row for arm in arms for row in self._absent(arm)]
        self.hours = wishes.x == "minutes" and max((p["minutes"] for p in progress.values()), default=0) > LONG_MINUTES
        self.by_run = columns.lines[:1] == ("run_id",)
        self.log = "".join(axis for axis in "xy" if axis in wishes.log or axis in self.plot.get("log", ""))
        if wishes.log == "none":
            self.log = ""
        elif not wishes.log and self._is_uneven():
            self.log += "x"
        self.series, self.variants = self._labels()
        self.empty: set[str] = set()  # columns without a panel, because they are 0 everywhere
        self.partial: dict[str, set[str]] = {}  # what is not drawn -> the arms in which only some runs have it

    def _absent(self, arm: Arm) -> Iterator[dict[str, Any]]:
        """Rows of what some runs of an arm have and others lack, such as a category, in columns that are then 0.

        A run without rows has no zeros: maybe it was never evaluated. Neither has a share of x in a run without this x.
        """
        zeros, x = dict.fromkeys(filter(None, self.plot.get("zeros", "").split(",")), 0), self.columns.x
        names = [c for c in dict.fromkeys((x, *self.columns.lines, *self.columns.panels)) if c != "run_id"]
        of_run: dict[str, dict[tuple[Any, ...], None]] = {}
        for row in self.rows:
            if zeros and row.get("run_id") in arm.runs:
                of_run.setdefault(row["run_id"], {})[tuple(row[c] for c in names)] = None
        for run, own in of_run.items():
            for key in dict.fromkeys(key for its in of_run.values() for key in its):
                if key not in own and (f"share_of_{x}" not in zeros or key[0] in {k[0] for k in own}):
                    found = dict.fromkeys(self.result.columns) | zeros | dict(zip(names, key, strict=True))
                    yield found | {"run_id": run}

    def _is_uneven(self) -> bool:
        """Whether x is the progress of runs, of which one is shorter than `SHORT` of another."""
        is_along_places = self.columns.bars or self.plot.get("places") == "yes"
        if self.columns.x != "step" or not self.by_run or is_along_places:
            return False
        ends: dict[str, float] = {}
        for row in self.rows:
            x = self._moved(row, row["run_id"], "")
            if math.isfinite(x):
                ends[self._series(row)] = max(x, ends.get(self._series(row), 0.0))
        begun = [end for end in ends.values() if end > 0]
        return len(begun) > 1 and min(begun) < SHORT * max(begun)

    def _places(self, rows: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
        """The texts along an x axis of places; none if x is a number. Those of numbers are the same in all panels."""
        x = self.columns.x
        if x == "run_id":
            return self._labels_of_runs(self._run(row[x]) for row in self.rows)
        if not self.columns.bars and self.plot.get("places") != "yes":
            return ()
        values = {_text(row[x]): row[x] for row in self.rows}
        if all(isinstance(v, int | float | Decimal) for v in values.values()):
            return tuple(sorted(values, key=values.__getitem__))
        return tuple(dict.fromkeys(_text(row[x]) for row in rows))

    def _labels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The labels of the series, in the order asked for, and those of the variants, in the order of the rows."""
        series, variants = {}, {}
        for row in self.rows:
            series.setdefault(self._series(row))
        for group in self.columns.y:  # by column, then by text
            for column in group:
                for row in self.rows:
                    if row[column] is not None:
                        variants.setdefault(self._variant(row, column, group))
        ordered = self._labels_of_runs(series) if self.by_run else tuple(series)
        return ordered or ("",), tuple(variants) or ("",)

    def _labels_of_runs(self, found: Iterable[str]) -> tuple[str, ...]:
        """The labels of the arms, in the order asked for, and behind them what else stands in the column run_id."""
        series, arms = dict.fromkeys(found), [arm.label for arm in self.arms]
        return tuple(series) if series.keys().isdisjoint(arms) else tuple(dict.fromkeys((*arms, *series)))

    def _run(self, value: Any) -> str:
        """The label of a run, or the text itself if it is none of the runs: a SELECT may name anything run_id."""
        return self.arms[self.arm_of[value]].label if value in self.arm_of else _text(value)

    def _series(self, row: Mapping[str, Any]) -> str:
        if not self.columns.lines:
            return ""
        value = row[self.columns.lines[0]]
        return self._run(value) if self.by_run else _text(value)

    def _variant(self, row: Mapping[str, Any], column: str, group: Sequence[str]) -> str:
        texts = [_text(row[c]) for c in self.varied]
        return " ".join([VARIANTS.get(column, _plain(column))] * (len(group) > 1) + texts)

    def panels(self) -> tuple[Panel, ...]:
        found = []
        named = [c for c in self.columns.panels if c != "run_id"]
        named = [c for c in named if c == named[0] or count_distinct(self.result, c) > 1]
        of_panel: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
        for row in self.rows:
            of_panel.setdefault(self._panel(row), []).append(row)
        for key, rows in of_panel.items():
            shown = dict(zip(self.columns.panels, key, strict=True))
            of = " ".join(_text(shown[c]) for c in named)
            if "run_id" in shown and (len(self.arms) > 1 or shown["run_id"] not in self.arm_of):
                of = " ".join(filter(None, (self._run(shown["run_id"]), of)))
            for group in self.columns.y:
                found += self._group_panels(rows, group, of)
        return tuple(found)

    def _panel(self, row: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the rows of a panel have in common; the runs of an arm are the first of them."""
        return tuple(self.firsts.get(row[c], row[c]) if c == "run_id" else row[c] for c in self.columns.panels)

    def _group_panels(self, rows: Sequence[Mapping[str, Any]], group: Sequence[str], of: str) -> list[Panel]:
        """The panel of columns that share one, or a panel for each variant if they would be too many lines."""
        places = self._places(rows)
        lines = [line for column in group for line in self._lines(rows, column, group, places)]
        if not lines:
            return []
        is_optional = group[0] in EMPTY_AT_0 and len(self.columns.y) > 1 and group[0] not in self.wishes.panels
        if is_optional and not any(y for line in lines for y in line.y):
            self.empty.add(group[0])
            return []
        known = self.named and (MEASURES.get(f"{self.named}.{group[0]}") or MEASURES.get(group[0]))
        title, y_label = known or (_plain(group[0]), _plain(group[0]))
        title, y_label = (
            self.plot.get("title", title if known or len(self.columns.y) > 1 or not of else ""),
            self.plot.get("y_label", y_label),
        )
        title = ", ".join(filter(None, (title, of)))
        if group == ("value",) and of.strip():  # of `metrics`: each name has its own unit
            y_label = of.split()[0]
        by_column = len(self.columns.y) > 1 or not of or group[0] in self.wishes.panels
        panel = Panel(
            title=title,
            x_label=self._x_label(),
            y_label=y_label,
            lines=tuple(lines),
            name=" ".join(filter(None, (of, group[0] if by_column else ""))),
            bars=self.columns.bars,
            places=places,
            log="" if self.columns.bars else self.log.replace("x", "") if places else self.log,
        )
        variants = list(dict.fromkeys(line.variant for line in lines))
        if len(variants) < 2 or len(self.series) < 2 or len(lines) <= MAX_OVERLAID or panel.bars:
            return [panel]
        return [
            replace(
                panel,
                title=f"{panel.title}: {self.variants[v]}",
                name=f"{panel.name} {self.variants[v]}",
                lines=tuple(replace(line, variant=0) for line in lines if line.variant == v),
            )
            for v in variants
        ]

    def _x_label(self) -> str:
        x, asked = self.columns.x, self.wishes.x
        if x != "step":
            return X_LABELS.get(x, _plain(x))
        commands = {arm.command for arm in self.arms}
        algorithm = {"ei": "EI", "grpo": "GRPO", "ppo": "PPO", "sft": "SFT", "dpo": "DPO"}.get(
            next(iter(commands), ""), ""
        )
        return {
            "updates": "updates",
            "steps": f"{algorithm} steps".strip() if len(commands) == 1 else "steps of the algorithm",
            "rollouts": "rollouts for training",
            "tokens": "tokens for training",
            "minutes": "hours of work" if self.hours else "minutes of work",
        }[asked]

    def _lines(
        self, rows: Sequence[Mapping[str, Any]], column: str, group: Sequence[str], places: Sequence[str]
    ) -> Iterator[Line]:
        points: dict[tuple[int, int], list[Point]] = {}
        series_at, variant_at, place_at = (
            {text: i for i, text in enumerate(texts)} for texts in (self.series, self.variants, places)
        )
        for row in rows:
            if row[column] is not None:
                at = series_at[self._series(row)], variant_at[self._variant(row, column, group)]
                points.setdefault(at, []).append(self._point(row, column, place_at))
        for (series, variant), of_line in sorted(points.items(), key=lambda item: item[0]):
            if self._merged(of_line, column, smooth=1):
                yield replace(self._line(of_line, column), series=series, variant=variant)
            else:
                shown = column if self.by_run or not self.series[series] else f"{column} of {self.series[series]}"
                self.partial.setdefault(shown, set()).update(
                    self.arms[p.arm].label for p in of_line if p.arm is not None
                )

    def _point(self, row: Mapping[str, Any], column: str, places: Mapping[str, int]) -> Point:
        run, value = str(row.get("run_id", "")), row[self.columns.x]
        whose = 0 if "run_id" not in row and len(self.arm_of) == 1 else self.arm_of.get(run)
        bounds = self.bounds[column]
        low, high = (number(row[b]) for b in bounds) if bounds else (math.nan, math.nan)
        count = row[self.plot["counts"]] if "counts" in self.plot else None
        shown = self._run(value) if self.columns.x == "run_id" else _text(value)
        x = float(places[shown]) if places else self._moved(row, run, column)
        return Point(run, whose, x if places else value, shown, x, number(row[column]), low, high, count)

    def _moved(self, row: Mapping[str, Any], run: str, column: str) -> float:
        """x as --x asks for it."""
        value, asked = row[self.columns.x], self.wishes.x
        if asked == "updates":
            return number(value)
        if asked == "minutes":
            own = "eval_wall_seconds" if column == "eval_reward" and "eval_wall_seconds" in row else "wall_seconds"
            found = self.progress.get((run, value), {}).get("minutes")
            if isinstance(seconds := row.get(own), int | float | Decimal):
                found = seconds / 60
            return number(found) / (60 if self.hours else 1)
        return number(self.progress.get((run, value), {}).get(PROGRESS[asked]))

    def _line(self, points: Sequence[Point], column: str) -> Line:
        """The line of an arm's points: those of its one run, or the mean over its runs.

        Three seeds or more have an interval. That of two has one degree of freedom: it is wider than the panel, and changes from
        point to point by chance, so each seed is a faint line instead.
        """
        of_one_arm = points[0].arm is not None and len({p.arm for p in points}) == 1
        are_two = of_one_arm and len({p.run for p in points}) == 2 and not self.columns.bars
        joined = column not in self.plot.get("points", "").split(",")
        is_whole = self.columns.bars or not joined or (self._has_interval(points, column) and not are_two)
        smooth = 1 if is_whole else self.wishes.smooth
        merged = self._merged(points, column, smooth=smooth)
        x, y, low, high, notes, _ = (list(column) for column in zip(*merged, strict=True))
        bounds = (low, high) if any(map(math.isfinite, low)) and not are_two else (None, None)
        before = self._merged(points, column, smooth=1)
        raw = [p.y for p in before] if smooth > 1 and not are_two else None
        seeds = tuple(zip(*(p.of_runs for p in before), strict=True)) if are_two else ()
        return Line(x, y, *bounds, raw=raw, seeds=seeds, notes=tuple(notes) if any(notes) else (), joined=joined)

    def _has_interval(self, points: Sequence[Point], column: str) -> bool:
        return any(math.isfinite(p.low) for p in points) or (
            column == "eval_reward" and any((p.arm, p.key) in self.held_out for p in points)
        )

    def _merged(self, points: Sequence[Point], column: str, *, smooth: int) -> list[Merged]:
        """The points in order of x; where an arm has several runs, only what all of them have: the same x, or the same place in a
        round, whose x is then the mean of theirs."""
        of_run = {}
        for run, its in groupby(sorted(points, key=lambda p: p.run), key=lambda p: p.run):
            ordered = sorted(its, key=lambda p: p.key)
            self._check_once(ordered)
            values = running_mean([p.y for p in ordered], smooth)
            of_run[run] = {self._shared_key(p): p._replace(y=y) for p, y in zip(ordered, values, strict=True)}
        merged = []
        for key in sorted({key for its in of_run.values() for key in its}):
            here = [its[key] for its in of_run.values() if key in its]
            arm = here[0].arm
            asked: Sequence[str] = () if arm is None else self.arms[arm].runs
            if len({p.arm for p in here}) == 1 and len(asked) > 1 and len(here) < len(asked):
                continue
            x, y = math.fsum(p.x for p in here) / len(here), math.fsum(p.y for p in here) / len(here)
            low, high = (here[0].low, here[0].high) if len(here) == 1 else seed_interval([p.y for p in here])
            if column == "eval_reward" and arm is not None and asked:
                first = next((p for p in here if p.run == asked[0]), here[0])
                low, high = self.held_out.get((arm, first.key), (low, high))
            counts = [p.count for p in here if p.count is not None]
            merged.append(Merged(x, y, low, high, f"{sum(counts):,}" if counts else "", tuple(p.y for p in here)))
        return sorted(merged, key=lambda point: (math.isnan(point.x), point.x))

    def _shared_key(self, point: Point) -> Any:
        """What the points of an arm's runs that belong together have in common."""
        starts = self.starts.get(point.run)
        return place(point.key, starts) if starts and self.by_run and self.columns.x == "step" else point.key

    def _check_once(self, ordered: Sequence[Point]) -> None:
        for before, after in pairwise(ordered):
            if before.key == after.key:
                raise RlvrError(
                    f"The result has several rows with {self.columns.x} = {after.shown} in one line.",
                    "Aggregate them: GROUP BY the x and the columns of text that name a line.",
                )

    @property
    def partial_note(self) -> str:
        arms = " and of ".join(sorted(set().union(*self.partial.values())))
        return f"Only some runs of {arms} have: {', '.join(map(_plain, self.partial))}."

    def notes(self, panels: Sequence[Panel]) -> Iterator[str]:
        lines = [line for panel in panels for line in panel.lines]
        seeds = any(len(arm.runs) > (1 if self.columns.bars else 2) for arm in self.arms)
        if "x" in self.log and not self.wishes.log and "x" not in self.plot.get("log", ""):
            yield f"The axis of {self._x_label()} is logarithmic: one run has less than a tenth of those of another."
        if any(panel.y_label.startswith("log-probability, nats") for panel in panels):
            yield NO_EARLY_END
        whiskers = {panel.has_whiskers for panel in panels if any(line.low is not None for line in panel.lines)}
        if whiskers:
            mark = " and ".join(name for name, drawn in (("Bands", False), ("Whiskers", True)) if drawn in whiskers)
            what = (
                "95% intervals over the seeds; of held-out rewards over questions and seeds"
                if seeds
                else "95% intervals"
            )
            yield f"{mark}: {what}." + (" Lines: means over the seeds." if seeds else "")
        if any(line.seeds for line in lines):
            yield "Arms of two seeds: the line is their mean, and each seed is a faint line."
        if self.wishes.smooth > 1 and any(line.faint for line in lines):
            yield f"Lines: mean of {self.wishes.smooth} neighboring points; the points themselves are faint."
        yield from (EMPTY_AT_0[column] for column in sorted(self.empty))
        if self.partial:
            yield f"{self.partial_note} Their mean is not drawn."
        hidden = [v for line in lines for values in [(line.y if "y" in self.log else ())] for v in values if v <= 0]
        if hidden or any(x < 0 for panel in panels if "x" in panel.log for line in panel.lines for x in line.x):
            yield "Values of 0 or less cannot be shown on a logarithmic axis."


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """The mean over up to `width` points around each one; at an end over those that are there, as many on both sides.

    Points that are not finite are in no mean, and stay as they are.
    """
    half = max(width - 1, 0) // 2
    means = []
    for i, value in enumerate(values):
        reach = min(half, i, len(values) - 1 - i)
        around = [v for v in values[i - reach : i + reach + 1] if math.isfinite(v)]
        means.append(math.fsum(around) / len(around) if math.isfinite(value) else value)
    return means


def seed_interval(values: Sequence[float]) -> Interval:
    """95 % interval of a mean over seeds: Student's t, inside 0 to 1 if all values are; NaN for one seed or a gap."""
    if len(values) < 2 or not all(map(math.isfinite, values)):
        return math.nan, math.nan
    low, high = mean_interval([(value, 1, 1) for value in values]) or (values[0], values[0])  # equal seeds
    return (max(low, 0.0), min(high, 1.0)) if all(0 <= v <= 1 for v in values) else (low, high)


def _with_names(result: Table, plot: Mapping[str, str]) -> Table:
    """The result with texts for the values, of any type, that name runs, lines, panels and places."""
    names = {c for key in ("x", "lines", "panels") for c in plot.get(key, "").split(",")}
    named = [c == "run_id" or (c in names and not are_numbers(result, c)) for c in result.columns]
    if not any(named):
        return result
    rows = [
        tuple(_text(v) if is_name and v is not None else v for v, is_name in zip(row, named, strict=True))
        for row in result.rows
    ]
    return replace(result, rows=rows)


def _is_place(x: Any) -> bool:
    """Whether a value can stand on an axis."""
    return not math.isnan(number(x)) if isinstance(x, int | float | Decimal) else x is not None


def _plain(column: str) -> str:
    return column.replace("_", " ")


def _text(value: Any) -> str:
    return "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
