"""The tables of README.md and docs/benchmarks.md, made of the rows of `results.json`.

Enters: `Results`: kind of processor -> name of a measurement -> its rows. Leaves: Markdown, and pages with their tables replaced.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from rows import Row

WIDE, NARROW = "with 512-bit units", "without 512-bit units"
Results = Mapping[str, Mapping[str, Sequence[Row]]]
SIZES = ("25M", "100M")
PROMPTS = ("short prompts", "GSM8K's prompts")


def compared(rows: Iterable[Row]) -> str:
    """One line for each row."""
    return _table(
        ["what", "work", "beside", *_right("ours", "theirs", "ratio", "goal"), ""],
        [
            [r.what, r.work, r.beside, said(r.ours, r.unit), said(r.theirs, r.unit), times(r), r.goal, verdict(r)]
            for r in rows
        ],
    )


def steps(results: Results) -> str:
    """A GRPO step beside TRL's, by size and prompts, on both kinds of processor."""
    lines = []
    for size, prompts, name, cell in _cells("grpo_step"):
        wall, memory = (_found(results, WIDE, name, what, cell) for what in ("GRPO step, wall", "GRPO step, memory"))
        if wall:
            slower = _found(results, NARROW, name, "GRPO step, wall", cell)
            line = [size, prompts, said(wall.ours, "s"), said(wall.theirs, "s") or wall.note, times(wall)]
            lines.append([*line, times(slower) or "not measured", *_memories(memory), verdict(wall)])
    right = _right("ours", "TRL", "ratio", "ratio, without 512-bit units", "memory, ours", "memory, TRL")
    return _table(["parameters", "prompts", *right, ""], lines)


def samplers(results: Results) -> str:
    """The embedded sampler beside vLLM, by size and prompts."""
    found = [
        (size, prompts, row)
        for size in SIZES
        for prompts in PROMPTS
        if (row := _found(results, WIDE, "sampling_sizes", "embedded sampler", f"{size}, {prompts}", beside="vLLM"))
    ]
    lines = [
        [size, prompts.removesuffix(" prompts"), figure(r.ours), figure(r.theirs), times(r), verdict(r)]
        for size, prompts, r in found
    ]
    return _table(["parameters", "prompts", *_right("ours", "vLLM", "ratio"), ""], lines)


def tools(results: Results) -> str:
    """A step whose episodes call a tool, beside TRL's and on vLLM; the ratio on both kinds of processor."""
    lines = []
    for row in results.get(WIDE, {}).get("episodes_step", ()):
        if row.what == "step with a tool, wall":
            memory = _found(results, WIDE, "episodes_step", "step with a tool, memory", row.cell, beside=row.beside)
            slower = _found(results, NARROW, "episodes_step", row.what, row.cell, beside=row.beside)
            line = [row.cell, row.beside, said(row.ours, "s"), said(row.theirs, "s"), times(row)]
            line += [times(slower) or "not measured", *_memories(memory)]
            lines.append([*line, row.goal, verdict(row), row.note])
    right = _right("ours", "theirs", "ratio", "ratio, without 512-bit units", "memory, ours", "theirs", "goal")
    return _table(["parameters", "beside", *right, "", "episodes"], lines)


def turns(results: Results) -> str:
    """What turns cost the embedded sampler, as ratios, on both kinds of processor."""
    found = [{row.work: row for row in results.get(kind, {}).get("episodes", ())} for kind in (WIDE, NARROW)]
    lines = []
    for work in dict.fromkeys(work for rows in found for work in rows):
        wide, narrow = (rows.get(work) for rows in found)
        row = narrow or wide
        ratios = [figure(each.ratio) if each else "not measured" for each in (wide, narrow)]
        lines.append([work, *ratios, row.goal if row else "", verdict(row) if row else ""])
    return _table(["episodes", *_right("ratio", "ratio, without 512-bit units", "goal"), ""], lines)


def queries(results: Results) -> str:
    """`rlvr analyze` beside pandas, and on ten times as many rows."""
    lines = []
    for wall in results.get(WIDE, {}).get("analyze", ()):
        if wall.unit == "s":
            memory = _found(results, WIDE, "analyze", wall.what, unit="MB")
            large = [_found(results, WIDE, "analyze_ten_million", wall.what, unit=unit) for unit in ("s", "MB")]
            ours, theirs = (said(row.ours, "MB"), _memories(row)[1]) if (row := memory) else ("", "")
            line = [wall.what, said(wall.ours, "s"), ours, said(wall.theirs, "s"), theirs]
            more = ", ".join(filter(None, (said(row.ours, row.unit) for row in large if row)))
            lines.append([*line, f"{1 / wall.ratio:.0f}x" if wall.ratio else "", more])
    right = _right("rlvr", "memory", "pandas", "memory", "ratio", "rlvr on ten million rows")
    return _table(["question", *right], lines)


def speed(results: Results) -> str:
    """README's table: the ratios of `steps` and `samplers` side by side."""
    lines = []
    for size, prompts, name, cell in _cells("grpo_step"):
        wall, slower = (_found(results, kind, name, "GRPO step, wall", cell) for kind in (WIDE, NARROW))
        memory = _found(results, WIDE, name, "GRPO step, memory", cell)
        sampler = _found(results, WIDE, name.replace("grpo_step", "sampling"), "embedded sampler", cell, beside="vLLM")
        if wall:
            mine, theirs = _memories(memory)
            line = [size, prompts, ratio_of(wall) or f"TRL: {wall.note}", ratio_of(slower) or "not measured"]
            lines.append([*line, f"{mine.removesuffix(' GB')}, {theirs}", ratio_of(sampler)])
    right = _right("GRPO, of TRL's time", "without 512-bit units", "memory, ours and TRL's", "sampling, of vLLM's")
    return _table(["parameters", "prompts", *right], lines)


TABLES: dict[str, Callable[[Results], str]] = {
    "steps": steps,
    "samplers": samplers,
    "tools": tools,
    "turns": turns,
    "queries": queries,
    "speed": speed,
}


def with_table(page: str, name: str, text: str) -> str:
    """Return the page with the table of this name replaced, indented as its marker is."""
    pattern = rf"(?ms)^( *)<!-- {name}: made by benchmarks/run.py --page -->\n.*?^ *<!-- /{name} -->\n"
    found = re.search(pattern, page)
    assert found, f"the page has no markers for the table {name}"
    lines = [f"<!-- {name}: made by benchmarks/run.py --page -->", *text.splitlines(), f"<!-- /{name} -->"]
    return page[: found.start()] + "".join(f"{found[1]}{line}".rstrip() + "\n" for line in lines) + page[found.end() :]


def figure(value: float | None) -> str:
    """Format a number with three significant digits."""
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def said(value: float | None, unit: str) -> str:
    return f"{figure(value)} {unit}" if value is not None else ""


def times(row: Row | None) -> str:
    return f"{figure(row.ratio)}x" if row and row.ratio is not None else ""


def ratio_of(row: Row | None) -> str:
    return f"{row.ratio:.2f}" if row and row.ratio is not None else ""


def verdict(row: Row) -> str:
    return "missed" if row.missed else ""


def _cells(script: str) -> list[tuple[str, str, str, str]]:
    """(parameters, prompts, name of the measurement, cell): the built-in model, then the grid of sizes."""
    grid = [(s, p.removesuffix(" prompts"), f"{script}_sizes", f"{s}, {p}") for s in SIZES for p in PROMPTS]
    return [("0.4M", "quickstart's", script, "quickstart"), *grid]


def _found(
    results: Results, kind: str, name: str, what: str, cell: str = "", *, beside: str = "", unit: str = ""
) -> Row | None:
    rows = results.get(kind, {}).get(name, ())
    for row in rows:
        if row.what.startswith(what) and row.cell == cell and beside in row.beside and unit in ("", row.unit):
            return row
    return None


def _memories(row: Row | None) -> tuple[str, str]:
    """Ours and theirs in GB, from MB; a note in place of theirs."""
    if row is None:
        return "", ""
    ours, theirs = ("" if it is None else f"{it / 1000:.1f} GB" for it in (row.ours, row.theirs))
    return ours, theirs or row.note


def _right(*names: str) -> list[str]:
    """Columns of figures."""
    return [f"{name}:" for name in names]


def _table(columns: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "| " + " | ".join(name.removesuffix(":") for name in columns) + " |"
    rule = "|" + "|".join("--:" if name.endswith(":") else "---" for name in columns) + "|"
    return "\n".join([head, rule, *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"
