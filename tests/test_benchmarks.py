"""The scripts load, and the table in docs/benchmarks.md matches what `benchmarks/run.py` makes from `results.json`."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest
from _pytest.mark import KeywordMatcher  # what -k selects has no public name
from _pytest.mark.expression import Expression

from rlvr_cli.config import config_of
from rlvr_cli.config.parsing.options import options
from rlvr_cli.runs.readers import read_rollouts

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    spec = importlib.util.spec_from_file_location("benchmarks_run", ROOT / "benchmarks/run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    for name in ("rows", "tables"):
        sys.modules.pop(name, None)


def row(ours: float, theirs: float | None, goal: str = "", **more: str) -> dict:
    return {"what": "w", "work": "q", "beside": "p", "unit": "s", "ours": ours, "theirs": theirs, "goal": goal} | more


def made_of(run, rows: dict[str, list[dict]], narrow: dict[str, list[dict]] | None = None) -> dict[str, str]:
    kinds = {run.tables.WIDE: rows, run.tables.NARROW: narrow or {}}
    return run.made({kind: {"machines": dict.fromkeys(of, "m"), "rows": of} for kind, of in kinds.items()})


def test_the_tables_of_the_pages_match_the_results(run):
    parts = run.made(json.loads((ROOT / "benchmarks/results.json").read_text(encoding="utf-8")))
    pages = [page.read_text(encoding="utf-8") for page in run.PAGES]
    assert [run.with_tables(page, parts) for page in pages] == pages
    assert all(any(f"<!-- /{name} -->" in page for page in pages) for name in parts)
    assert run.with_tables(pages[0], parts | {"steps": "another\n"}) != pages[0]


def test_the_sentence_about_grading_has_the_figures_of_the_results(run):
    (found,) = json.loads((ROOT / "benchmarks/results.json").read_text())[run.tables.WIDE]["rows"]["grading"]
    said = (
        f"{found['ours']:,.0f} responses a second in one process, {found['ours'] / found['theirs']:.0f} times as many"
    )
    assert said in " ".join((ROOT / "README.md").read_text().split())


def test_a_row_that_missed_its_goal_says_so(run):
    rows = [row(1.0, 4.0, goal) for goal in ("<= 0.25", "<= 0.2", ">= 0.25", ">= 0.3")]
    lines = made_of(run, {"sft": rows})[run.tables.WIDE].splitlines()[-4:]
    assert [line.endswith("| missed |") for line in lines] == [False, True, False, True]
    assert "| 1 s | 4 s | 0.25x | <= 0.25 |" in lines[0]


def test_the_machine_of_each_measurement_is_named(run):
    machines = {"sft": "old", "gpu": "new", "padding": "old", "grading": "none"}
    rows = {"sft": [row(1.0, 4.0)], "gpu": [row(1.0, 4.0)], "padding": [row(1.0, 4.0)], "grading": []}
    page = run.made({run.tables.WIDE: {"machines": machines, "rows": rows}})[run.tables.WIDE]
    assert [line for line in page.splitlines() if line.startswith("- ")] == ["- sft, padding: old.", "- gpu: new."]


def test_a_table_has_both_kinds_of_processor_and_says_what_there_is_not(run):
    wall, memory = {"what": "GRPO step, wall"}, {"what": "GRPO step, memory of the process", "unit": "MB"}
    cell = {"cell": "25M, GSM8K's prompts"}
    ours = [row(2.0, None, note="killed", **wall, **cell), row(1500.0, None, note="above 3 GB", **memory, **cell)]
    small = [row(1.0, 4.0, cell="quickstart", **wall), row(500.0, 600.0, cell="quickstart", **memory)]
    other = [row(1.0, 2.0, cell="quickstart", **wall)]
    ragged = [row(6.0, 2.0, what="embedded sampler, ragged lengths", beside="vLLM, in process", cell="quickstart")]
    rows = {"grpo_step": small, "grpo_step_sizes": ours, "sampling": ragged}
    parts = made_of(run, rows, {"grpo_step": other})
    assert parts["speed"].splitlines()[2:] == [
        "| 0.4M | quickstart's | 0.25 | 0.50 | 0.5, 0.6 GB | 3.00 |",
        "| 25M | GSM8K's | TRL: killed | not measured | 1.5, above 3 GB |  |",
    ]
    assert parts["steps"].splitlines()[2:] == [
        "| 0.4M | quickstart's | 1 s | 4 s | 0.25x | 0.5x | 0.5 GB | 0.6 GB |  |",
        "| 25M | GSM8K's | 2 s | killed |  | not measured | 1.5 GB | above 3 GB |  |",
    ]


def test_rows_are_read_as_they_were_written(run, tmp_path):
    rows = [run.Row(**row(1.0, 4.0, "<= 1", cell="c")), run.Row(**row(1.0, None))]
    sys.modules["rows"].write(str(tmp_path / "rows.json"), rows)
    assert run.read(tmp_path / "rows.json") == rows


def test_every_script_loads_and_what_they_clock_exists(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    scripts = {path.stem: importlib.import_module(path.stem) for path in (ROOT / "benchmarks").glob("*.py")}
    for clocked in (*scripts["step_profile"].PHASES.values(), *scripts["overhead"].CLOCKED.values()):
        assert [(owner, name) for owner, name, *_ in clocked if not hasattr(owner, name)] == []
    for name in scripts:
        sys.modules.pop(name)


def test_the_run_that_is_measured_has_every_column(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("analyze")
    monkeypatch.setattr(script, "PER_PART", 50)
    run = script.make_run(tmp_path, rows=1)
    rows = read_rollouts(run, columns=["run_id", "response_mask"])
    assert rows.num_rows > 0
    assert rows.column("response_mask").null_count == rows.num_rows


def test_the_table_of_reliability_matches_the_figures(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    reliability = importlib.import_module("reliability")
    page = reliability.PAGE.read_text(encoding="utf-8")
    table = reliability.table(json.loads(reliability.RESULTS.read_text(encoding="utf-8")))
    assert reliability.with_table(page, table) == page
    assert reliability.with_table(page, "another\n") != page


@pytest.fixture
def mutations(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module("mutations")
    sys.modules.pop("mutations", None)


def test_every_mutation_applies_and_names_tests_that_are_there(mutations):
    for mutation in mutations.MUTATIONS:
        source = (ROOT / mutations.PACKAGE / mutation.file).read_text(encoding="utf-8")
        mutations.applied(mutation, source)  # the text occurs exactly once
        for argument in mutation.tests.split(" -k ")[0].split(" tests/"):
            path = ROOT / f"tests/{argument.removeprefix('tests/')}".partition("::")[0]
            assert path.is_file(), mutation
            assert argument.partition("::")[2].partition("[")[0] in path.read_text(encoding="utf-8"), mutation
    names = [m.name for m in mutations.MUTATIONS]
    assert len(set(names)) == len(names) >= 120
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    assert f"breaks the code in {len(names)} places" in page


def test_the_default_suite_alone_has_tests_for_95_percent_of_the_mutations(mutations, request):
    """Of those whose tests need no extra that is missing here; with fewer tests than all there is nothing to count."""
    items = request.session.items
    of_file: dict[str, list[pytest.Item]] = {}
    for item in items:
        of_file.setdefault(item.nodeid.partition("::")[0], []).append(item)
    found = {m.name: _selects(mutations, m, of_file) for m in mutations.MUTATIONS}
    here = {name: selects for name, selects in found.items() if selects is not None}
    if len(of_file) < 200:
        pytest.skip("some tests were chosen")
    assert len(here) > 800
    assert len(without := [name for name, selects in here.items() if not selects]) <= len(here) // 20, without


def _selects(mutations, mutation, of_file: dict[str, list[pytest.Item]]) -> bool | None:
    """Whether a test of a mutation is among those that run; None if nothing of its files is."""
    arguments = mutations._arguments(mutation.tests)
    chosen: list[pytest.Item] = []
    known = False
    for argument in arguments:
        place, _, name = argument.partition("::")
        inside = [it for file, of in of_file.items() if file == place or file.startswith(f"{place}/") for it in of]
        known = known or bool(inside)
        chosen += [it for it in inside if not name or it.nodeid == argument or it.nodeid.startswith(f"{argument}[")]
    if "-k" in arguments:
        expression = Expression.compile(arguments[arguments.index("-k") + 1])
        chosen = [item for item in chosen if expression.evaluate(KeywordMatcher.from_item(item))]
    return bool(chosen) if known else None


def test_every_option_that_reaches_training_or_sampling_has_a_mutation(mutations):
    covered = {option for m in mutations.MUTATIONS for option in m.options}
    for command in ("sft", "dpo", "ei", "grpo", "ppo", "distill", "eval"):
        names = {f.name for f in options(config_of(command))} - mutations.WITHOUT_EFFECT.keys()
        assert {n for n in names if n not in covered and f"{command}.{n}" not in covered} == set(), command
    commands = ("sft", "dpo", "ei", "grpo", "ppo", "distill", "eval", "discover")
    known = {f.name for command in commands for f in options(config_of(command))}
    assert {option.rpartition(".")[2] for option in covered} <= known
