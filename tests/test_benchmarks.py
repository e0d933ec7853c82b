"""The scripts load, and the table in docs/benchmarks.md matches what `benchmarks/run.py` makes from `results.json`."""

import importlib
import importlib.util
import json
import sys
from pathlib import Path

import pytest

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
    sys.modules.pop("rows", None)


def test_the_table_of_the_page_matches_the_results(run):
    page = run.PAGE.read_text(encoding="utf-8")
    table = run.table(json.loads((ROOT / "benchmarks/results.json").read_text(encoding="utf-8")))
    assert run.with_table(page, table) == page
    assert run.with_table(page, "another\n") != page


def test_a_row_that_missed_its_goal_says_so(run):
    row = {"what": "w", "work": "q", "beside": "p", "unit": "s", "ours": 1.0, "theirs": 4.0}
    rows = [row | {"goal": goal} for goal in ("<= 0.25", "<= 0.2", ">= 0.25", ">= 0.3")]
    lines = run.table({"machines": {"a": "m"}, "rows": {"a": rows}}).splitlines()[-4:]
    assert [line.endswith("| missed |") for line in lines] == [False, True, False, True]
    assert "| 1 s | 4 s | 0.25x | <= 0.25 |" in lines[0]


def test_each_table_names_the_machine_of_its_rows(run):
    row = {"what": "w", "work": "q", "beside": "p", "unit": "s", "ours": 1.0, "theirs": 4.0, "goal": "<= 1"}
    machines, rows = {"a": "old", "b": "new", "c": "old", "d": "none"}, {"a": [row], "b": [row], "c": [row], "d": []}
    said = [line for line in run.table({"machines": machines, "rows": rows}).splitlines() if line.startswith("Machine")]
    assert said == ["Machine of a, c: old.", "Machine of b: new."]
    assert run.table({"machines": {"a": "old"}, "rows": {"a": [row]}}).startswith("Machine: old.\n")


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


def test_every_option_that_reaches_training_or_sampling_has_a_mutation(mutations):
    covered = {option for m in mutations.MUTATIONS for option in m.options}
    for command in ("sft", "dpo", "ei", "grpo", "ppo", "distill", "eval"):
        names = {f.name for f in options(config_of(command))} - mutations.WITHOUT_EFFECT.keys()
        assert {n for n in names if n not in covered and f"{command}.{n}" not in covered} == set(), command
    commands = ("sft", "dpo", "ei", "grpo", "ppo", "distill", "eval", "discover")
    known = {f.name for command in commands for f in options(config_of(command))}
    assert {option.rpartition(".")[2] for option in covered} <= known
