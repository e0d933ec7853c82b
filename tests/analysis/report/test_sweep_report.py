"""The report of a sweep: responses as they are, and what cannot be drawn."""

import re

import pytest

from factories import a_rollout, expert_iterations
from rlvr_cli.analysis.pictures import figures
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.report.build import charts_of, write_report
from rlvr_cli.analysis.report.sweep import MOST_SHOWN, Findings, write_sweep_report
from rlvr_cli.analysis.statistics.sweep_table import evaluation_tables
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Table


def page(tmp_path, rows):
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_metrics(0, "eval", {"reward/mean": 0.5, "reward/samples": 1.0})
        run.commit_rollouts("eval", 0, [a_rollout(run_id="r", example_id=f"q{i}", **row) for i, row in enumerate(rows)])
    info = read_run(tmp_path / "r")
    findings = Findings(
        "Who?", "", {"arm": [info]}, [Table(("a",), [(1,)], title="arms")], ["One is."], [["rlvr", "eval", "a b"]]
    )
    with open_runs([info]) as database:
        markdown, html = write_sweep_report(tmp_path, findings, database)
    return markdown.read_text(), html.read_text()


def test_an_evaluation_has_no_curves_and_text_of_a_model_is_no_markdown(tmp_path):
    hostile = "````\n# no heading\x1b[31m"
    shown, html = page(tmp_path, [{"response": hostile, "reward": 0.0, "ground_truth": "a`b"}])
    assert "![" not in shown
    assert "`````text\n````\n# no heading\\x1b[31m\n`````" in shown
    assert "truth `a'b`" in shown
    assert "rlvr eval 'a b'" in shown
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "report.html", "report.md"]
    assert "None: these runs train nothing." in html
    assert "<pre>````\n# no heading\\x1b[31m</pre>" in html


def test_text_of_a_model_is_no_markup_in_the_page_which_loads_nothing(tmp_path):
    hostile = "</pre><script>alert(1)</script>"
    _, html = page(tmp_path, [{"response": hostile, "reward": 1.0, "ground_truth": "<img src=x>"}])
    assert "&lt;/pre&gt;&lt;script&gt;alert(1)&lt;/script&gt;" in html
    assert "<img" not in html
    assert "http" not in re.sub(r"http-equiv", "", html)
    assert "default-src 'none'" in html.replace("&#39;", "'")


def test_one_right_and_one_wrong_response_are_shown_the_long_one_in_part(tmp_path):
    long = "x" * (MOST_SHOWN + 5)
    rows = [
        {"response": r, "reward": reward}
        for r, reward in ((long, 1.0), ("second", 1.0), ("third", 0.0), ("fourth", None))
    ]
    shown, html = page(tmp_path, rows)
    assert "third" in html
    assert "second" not in html
    assert f"{'x' * MOST_SHOWN} … (5 more characters)" in shown
    assert "third" in shown
    assert "second" not in shown
    assert "fourth" not in shown


@pytest.mark.slow
def test_the_pictures_of_expert_iteration_have_a_point_for_each_evaluation(tmp_path):
    """Seeds differ in the number of their updates: only the evaluation before training is at the same one."""
    expert_iterations(tmp_path, {"s0": [0, 10, 21, 30], "s1": [0, 12, 22, 32], "s2": [0, 11, 20, 31]})
    infos = [read_run(tmp_path / name) for name in ("s0", "s1", "s2")]
    with open_runs(infos) as database:
        curves = charts_of(database, [infos])
        _, html = write_sweep_report(tmp_path, Findings("Who?", "", {"arm": infos}, [], [], []), database)
    lines = {panel.title: panel.lines[0] for panel in curves.panels}
    assert lines["Held-out reward"].x == pytest.approx([0, 11, 21, 31])
    assert len(lines["Training reward"].x) == 3
    assert "11: 0.5 [" in html.read_text()
    for name in ("held_out.svg", "minutes.svg"):
        assert len(re.findall(r"<use ", _curve_of(tmp_path / name))) == 4, name


def test_the_page_of_several_samples_a_question_names_their_lines(tmp_path):
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_metrics(0, "eval", {"reward/mean": 0.5})
        rows = [a_rollout(run_id="r", sample_index=i, answer_reward=float(i), reward=float(i)) for i in range(2)]
        run.commit_rollouts("eval", 0, rows)
    infos = [read_run(tmp_path / "r")]
    with open_runs(infos) as database:
        findings = Findings("Who?", "", {"arm": infos}, evaluation_tables(infos), [], [])
        markdown, html = write_sweep_report(tmp_path, findings, database)
    legend = html.read_text().split('<ul class="legend">')[1].split("</ul>")[0]
    assert [name for name in ("pass@k", "best@k", "majority@k") if name in legend] == ["pass@k", "best@k", "majority@k"]
    assert html.read_text().count("<figure>") == 1, "and no curve of one point"
    assert "![at_k.svg](at_k.svg)" in markdown.read_text()


@pytest.fixture
def more_than_one_can_tell_apart(monkeypatch):
    """Makes runs with two evaluations: three, where two are told apart in a picture."""
    monkeypatch.setattr(figures, "MAX_LINES", 2)
    return many_runs


def many_runs(folder, *, samples=1):
    for number in range(3):
        with RunDir.create(folder, "eval", name=f"r{number}", metadata={}) as run:
            for step in (0, 1):
                run.commit_metrics(step, "eval", {"reward/mean": 0.5})
                rows = [a_rollout(run_id=run.id, step=step, sample_index=i, reward=float(i)) for i in range(samples)]
                run.commit_rollouts("eval", step, rows)
    return [read_run(folder / f"r{number}") for number in range(3)]


def test_a_sweep_of_more_arms_than_one_can_tell_apart_has_all_but_their_picture(
    tmp_path, capsys, more_than_one_can_tell_apart
):
    infos = more_than_one_can_tell_apart(tmp_path, samples=2)
    arms = {info.id: [info] for info in infos}
    with open_runs(infos) as database:
        findings = Findings("Who?", "", arms, evaluation_tables(infos), ["One is."], [])
        markdown, html = write_sweep_report(tmp_path, findings, database)
    lacking = "The curves are left out. curves: a panel would have 3 lines, and 2 are all that one can tell apart."
    for text in (markdown.read_text(), html.read_text(), capsys.readouterr().err):
        assert text.count(lacking) == 1
        assert text.count("The picture of k samples is left out. at_k: a panel would have") == 1
    assert "One is." in markdown.read_text()
    assert "train nothing" not in html.read_text()
    assert not list(tmp_path.glob("*.svg"))


def test_the_page_of_more_runs_than_one_can_tell_apart_has_all_but_their_curves(tmp_path, more_than_one_can_tell_apart):
    more_than_one_can_tell_apart(tmp_path)
    page = write_report(sorted(tmp_path.glob("r*")), tmp_path / "page.html").read_text()
    assert "The curves are left out. curves: a panel would have 3 lines" in page
    assert "r2" in page


def _curve_of(path):
    """The part of a picture's file that draws the line with its marks."""
    return path.read_text().split('id="line2d_')[-1]
