"""The HTML page of `rlvr analyze report`: everything in one file, which asks nothing of any network.

Enters: plain data, in which any text may be hostile. Leaves: HTML.

Python writes the tables and charts, and no text gets into the page but through `tag`, which escapes it. The browser of
rollouts is ``assets/report/page.js``: its data stand in the page as blocks that no browser runs, and reach the screen as
text nodes alone. The content security policy names the one style and the one script by their hashes, so that nothing
else can run, load or be sent anywhere, whatever a model wrote.
"""

import base64
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.report.charts import Chart, draw
from rlvr_cli.analysis.report.html import Html, escaped, json_block, tag

ASSETS = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Share:
    """A number from 0 to 1 with its interval, drawn as a bar."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; cells are str, numbers, `Share` or None."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Setting:
    """A named value of each run, None where a run has none, and where each came from ("" where that says nothing)."""

    name: str
    values: tuple[str | None, ...]
    sources: tuple[str, ...] = ()

    @property
    def is_partial(self) -> bool:
        return None in self.values

    @property
    def differs(self) -> bool:
        return not self.is_partial and len(set(self.values)) > 1

    @property
    def is_default(self) -> bool:
        return set(self.sources) == {"default"}


@dataclass(frozen=True, slots=True)
class Browser:
    """The rollouts to browse.

    `index` has what they are filtered by, `texts` and `tokens` the rest of them, a block of `markup.pack` for each chunk.
    """

    index: Mapping[str, Any]
    texts: Sequence[str]
    tokens: Sequence[str]
    note: str  # which rollouts are not here


@dataclass(frozen=True, slots=True)
class Report:
    runs: tuple[str, ...]
    alarms: Sequence[Mapping[str, Any]]  # name, severity, sentence, query
    summary: Sequence[Grid]
    charts: Sequence[Chart]
    browser: Browser
    configuration: Sequence[Setting]
    environment: Sequence[Setting]


def page(report: Report) -> str:
    """The whole page."""
    style, script = ((ASSETS / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    )
    title = ", ".join(report.runs)
    sections = {
        "Alarms": _alarms(report.alarms),
        "Summary": [_grid(g) for g in report.summary] or [tag("p", "None of these runs has rollouts.")],
        "Curves": [tag("div", map(draw, report.charts), class_="charts")] if report.charts else [tag("p", "None.")],
        "Rollouts": _browser(report.browser),
        "Configuration": _settings(report.configuration, report.runs),
        "Environment": _settings(report.environment, report.runs),
    }
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"rlvr: {title}"),
        tag("style", Html(style)),
    )
    links = [tag("a", name, href=f"#{name.lower()}") for name in sections]
    blocks = [json_block("rollout-index", report.browser.index)]
    for kind, chunks in (("texts", report.browser.texts), ("tokens", report.browser.tokens)):
        blocks += [
            tag("script", Html(chunk), type="application/gzip", id=f"{kind}-{i}") for i, chunk in enumerate(chunks)
        ]
    body = tag(
        "body",
        tag("header", tag("h1", title), tag("nav", links, aria_label="Sections")),
        tag("main", [_section(name, *content) for name, content in sections.items()]),
        blocks,
        tag("script", Html(script)),
    )
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _section(name: str, *content: Html) -> Html:
    return tag("section", tag("h2", name), *content, id=name.lower(), aria_label=name)


def _alarms(alarms: Sequence[Mapping[str, Any]]) -> list[Html]:
    if not alarms:
        return [tag("p", "None.")]
    items = []
    for alarm in alarms:
        head = [tag("strong", str(alarm["severity"]), class_="severity"), " ", tag("strong", str(alarm["name"])), ": "]
        query = tag("details", tag("summary", "The query that shows it"), tag("pre", str(alarm["query"])))
        items.append(tag("li", tag("p", *head, str(alarm["sentence"])), query))
    return [tag("ul", items, class_="alarms")]


def _grid(grid: Grid) -> Html:
    numeric = [any(isinstance(row[i], int | float) for row in grid.rows) for i in range(len(grid.columns))]
    classes = ["number" if is_number else None for is_number in numeric]
    head = tag("tr", [tag("th", c, scope="col", class_=k) for c, k in zip(grid.columns, classes, strict=True)])
    rows = [
        tag("tr", [tag("td", _cell(value), class_=k) for value, k in zip(row, classes, strict=True)])
        for row in grid.rows
    ]
    table = tag("table", tag("thead", head), tag("tbody", rows), class_="figures")
    return tag("div", tag("h3", grid.title), tag("div", table, **_scrolling(grid.title)))


def _scrolling(label: str) -> dict[str, str]:
    """What makes a box that scrolls one that a keyboard can scroll."""
    return {"class_": "wide", "tabindex": "0", "role": "region", "aria_label": label}


def _cell(value: Any) -> str:
    match value:
        case None:
            return "–"
        case Share():
            return _share(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
    return str(value)


def _share(share: Share) -> Html:
    bar = [tag("rect", class_="bar", width=_place(share.value), height=10, y=2)]
    text = f"{share.value:.1%}"
    if share.low is not None and share.high is not None:
        low, high = _place(share.low), _place(share.high)
        bar.append(tag("path", class_="whisker", d=f"M{low} 3v8M{low} 7H{high}M{high} 3v8"))
        text += f" [{share.low:.1%}, {share.high:.1%}]"
    frame = tag("rect", class_="frame", width=100, height=10, y=2)
    return Html(tag("svg", frame, bar, viewBox="0 0 100 14", class_="share", aria_hidden="true") + f" {escaped(text)}")


def _place(share: float) -> str:
    return f"{100 * min(1.0, max(0.0, share)):.2f}"


def _settings(settings: Sequence[Setting], runs: Sequence[str]) -> list[Html]:
    """What differs between the runs first, then what was chosen; defaults, and what not all runs have, are folded away."""
    if not settings:
        return [tag("p", "None.")]
    different = [s for s in settings if s.differs]
    partial = [s for s in settings if s.is_partial]
    alike = [s for s in settings if not s.differs and not s.is_partial]
    defaults = [s for s in alike if s.is_default]
    chosen = [s for s in alike if not s.is_default]
    parts = []
    if different:
        parts += [tag("h3", "What differs between the runs"), _settings_table(different, runs)]
    if chosen:
        parts += [tag("h3", "The same in all runs" if len(runs) > 1 else "Set"), _settings_table(chosen, runs)]
    for folded, name in ((defaults, "at their defaults"), (partial, "that only some of the runs have")):
        if folded:
            parts.append(tag("details", tag("summary", f"{len(folded)} {name}"), _settings_table(folded, runs)))
    return parts


def _settings_table(settings: Sequence[Setting], runs: Sequence[str]) -> Html:
    together = not any(s.differs or s.is_partial for s in settings)
    sourced = any(s.sources for s in settings)
    columns = ["value"] if together else runs
    head = [tag("th", text, scope="col") for text in ("name", *columns)]
    if together and sourced:
        head.append(tag("th", "from", scope="col"))
    rows = []
    for setting in settings:
        cells = [tag("th", setting.name, scope="row")]
        sources = setting.sources or ("",) * len(runs)
        if together:
            cells.append(tag("td", _value(setting.values[0])))
            if sourced:
                cells.append(tag("td", ", ".join(dict.fromkeys(s for s in sources if s))))
        else:
            for value, source in zip(setting.values, sources, strict=True):
                cells.append(tag("td", _value(value), *([" ", tag("small", source)] if source else [])))
        rows.append(tag("tr", cells))
    table = tag("table", tag("thead", tag("tr", head)), tag("tbody", rows), class_="settings")
    return tag("div", table, **_scrolling("settings"))


def _value(text: str | None) -> Html:
    if text is None:
        return tag("span", "–")
    if len(text) <= 200 and text.count("\n") < 3:
        return tag("code", text)
    return tag("details", tag("summary", tag("code", text[:60].split("\n")[0] + "…")), tag("pre", text))


def _browser(browser: Browser) -> list[Html]:
    """What is there before the script fills it."""
    need = "The browser of rollouts needs JavaScript; this page runs one script of its own, and loads nothing."
    notes = [tag("p", browser.note, class_="note")] if browser.note else []
    return [tag("noscript", tag("p", need)), *notes, tag("div", id="browser")]
