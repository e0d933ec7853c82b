"""The HTML page of `rlvr analyze report`: one file that loads nothing from the network. `rlvr view` serves the same page.

Enters: plain data, in which any text may be hostile. Leaves: HTML.

``page.html.j2`` makes the tables and charts. Every value it writes passes `text.printable` and is escaped, so that no text
can become markup. ``page.js`` is the rollout browser: its data are in the page as blocks that are not executed, and are
displayed only as text nodes. The content security policy allows only the one style and the one script, by their hashes, so
that nothing else can run, load or be sent anywhere, whatever a model wrote.
"""

import base64
import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlvr_cli.analysis.pictures.picture import Picture
from rlvr_cli.analysis.report.charts import layout_chart, layout_legend
from rlvr_cli.text import printable
from rlvr_cli.types import PValue

FOLDER = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Share:
    """A number from 0 to 1 with its interval, drawn as a bar."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def has_interval(self) -> bool:
        return self.low is not None and self.high is not None

    def __str__(self) -> str:
        return f"{self.value:.1%}" + (f" [{self.low:.1%}, {self.high:.1%}]" if self.has_interval else "")


@dataclass(frozen=True, slots=True)
class Grid:
    """A table; cells are str, numbers, `Share` or None."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[Any, ...]]

    @property
    def is_numeric(self) -> list[bool]:
        """Whether each column is numeric."""
        return [any(isinstance(row[i], int | float) for row in self.rows) for i in range(len(self.columns))]


@dataclass(frozen=True, slots=True)
class Setting:
    """A named value per run (None if the run has none), and the source of each value ("" if unknown)."""

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

    @property
    def origin(self) -> str:
        """The sources of the value, for a setting that is the same in all runs."""
        return ", ".join(dict.fromkeys(source for source in self.sources if source))


@dataclass(frozen=True, slots=True)
class SettingsGroup:
    """Settings under one heading."""

    heading: str
    settings: Sequence[Setting]
    is_folded: bool = False

    @property
    def is_alike(self) -> bool:
        """Whether all runs have the same values, so that one column is enough."""
        return not any(s.differs or s.is_partial for s in self.settings)

    @property
    def has_sources(self) -> bool:
        return any(s.sources for s in self.settings)


@dataclass(frozen=True, slots=True)
class Browser:
    """The data of the rollout browser, in the page.

    `index` has the columns for filtering, sorting and listing; `texts` and `tokens` have the others, one packed block
    (`rollouts.pack`) per chunk of rollouts.
    """

    index: Mapping[str, Any]
    texts: Sequence[str]
    tokens: Sequence[str]
    note: str  # which rollouts are left out; may be empty


@dataclass(frozen=True, slots=True)
class Search:
    """What a run of `rlvr discover` found."""

    run: str
    attempt: int | None  # the best one; None: the program to start from is the best, or nothing is valid
    score: float | None  # None: nothing is valid
    program: str | None  # None also if it is in no file that can be read
    tables: Sequence[Grid]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What a section lacks, since it would take too much time or memory."""

    section: str  # the heading
    sentence: str
    command: str  # shows it


@dataclass(frozen=True, slots=True)
class Report:
    runs: tuple[str, ...]
    alarms: Sequence[Mapping[str, Any]]  # name, severity, sentence, query
    summary: Sequence[Grid]
    charts: Picture
    browser: Browser
    configuration: Sequence[Setting]
    environment: Sequence[Setting]
    searches: Sequence[Search] = ()
    left_out: Sequence[LeftOut] = ()


@dataclass(frozen=True, slots=True)
class Assets:
    """The style and the script of a page: both stand in it, and its policy allows nothing else to run."""

    style: str
    script: str
    is_live: bool = False  # whether the page may ask the server that it came from

    @property
    def policy(self) -> str:
        """The content security policy."""
        return (
            f"default-src 'none'; style-src {_hash(self.style)}; script-src {_hash(self.script)}; base-uri 'none';"
            + (" form-action 'self'; connect-src 'self';" if self.is_live else " form-action 'none';")
            + " require-trusted-types-for 'script'; trusted-types 'none'"
        )


def assets(*paths: Path, is_live: bool = False) -> Assets:
    """The page's own style and script, followed by those in these files."""
    files = (FOLDER / "page.css", FOLDER / "page.js", *paths)
    style, script = (
        "".join(path.read_text(encoding="utf-8") for path in files if path.suffix == suffix)
        for suffix in (".css", ".js")
    )
    return Assets(style, script, is_live)


def render_page(report: Report) -> str:
    """Render the report."""
    return render("page.html.j2", assets(), **report_values(report))


def report_values(report: Report) -> dict[str, Any]:
    """What the template writes of a report."""
    return {
        "report": report,
        "title": ", ".join(report.runs) if len(report.runs) <= 3 else f"{len(report.runs)} runs",
        "drawings": [layout_chart(panel, report.charts) for panel in report.charts.panels],
        "legend_blocks": layout_legend(report.charts),
        "configuration": _grouped(report.configuration, runs=len(report.runs)),
        "environment": _grouped(report.environment, runs=len(report.runs)),
    }


def render(template: str, assets: Assets, *, folders: Sequence[Path] = (), **values: Any) -> str:
    """Render a template of the report, or of other folders.

    `finalize` handles every value that the template writes, so that none is left unescaped.
    """
    return _environment(tuple(folders)).get_template(template).render(assets=assets, **values)


@functools.cache
def _environment(folders: tuple[Path, ...]) -> Any:
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([*folders, FOLDER]),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"across": _across, "figure": _figure}
    environment.tests["share"] = lambda value: isinstance(value, Share)
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    return environment


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _figure(value: Any) -> str:
    """The text of a cell that is not a `Share`."""
    match value:
        case None:
            return "–"
        case int():
            return f"{value:,}"
        case PValue():
            return value.text
        case float():
            return f"{value:,.0f}" if 1000 <= abs(value) < math.inf else f"{value:.4g}"
    return str(value)


def _across(share: float) -> str:
    """The position of a share on a bar of width 100."""
    return f"{100 * min(1.0, max(0.0, share)):.2f}"


def _grouped(settings: Sequence[Setting], *, runs: int) -> list[SettingsGroup]:
    """Group settings: first those that differ between runs, then those set; folded: defaults, and those only some runs have."""
    alike = [s for s in settings if not s.differs and not s.is_partial]
    groups = [
        SettingsGroup("What differs between the runs", [s for s in settings if s.differs]),
        SettingsGroup("The same in all runs" if runs > 1 else "Set", [s for s in alike if not s.is_default]),
        SettingsGroup("at their defaults", [s for s in alike if s.is_default], is_folded=True),
        SettingsGroup("that only some of the runs have", [s for s in settings if s.is_partial], is_folded=True),
    ]
    return [group for group in groups if group.settings]
