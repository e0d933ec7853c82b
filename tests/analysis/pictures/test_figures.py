"""What is drawn of each query: which panels, with which lines and points."""

import math
from dataclasses import replace
from datetime import date

import pytest

from factories import a_rollout, expert_iterations
from marks import slow
from rlvr_cli.analysis.pictures.arms import Arm
from rlvr_cli.analysis.pictures.figures import Wishes, draw, running_mean, seed_interval
from rlvr_cli.analysis.queries.database import open_runs
from rlvr_cli.analysis.queries.named_queries import NamedQuery, named_queries, parse_query
from rlvr_cli.analysis.statistics.comparison import compare, held_out_intervals
from rlvr_cli.analysis.statistics.progress import place, read_progress, round_starts, shared_steps
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.readers import read_run
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.types import Table

SQL = NamedQuery("", "", {}, "SELECT")
CURVES = ("run_id", "step", "wall_seconds", "eval_wall_seconds", "eval_reward", "train_reward", "length_wrong", "entropy",
          "groups_with_signal", "length", "grad_norm", "clip_fraction")  # fmt: skip


def arms(*names):
    """One arm for each name; `a+b` are two seeds."""
    return [Arm(tuple(name.split("+")), name, "grpo") for name in names]


def of(query, columns, rows, *runs, **options):
    """The picture of these rows: of a named query, of SQL, or of SQL with a line `plot:`."""
    found = (
        SQL if not query else replace(SQL, plot=parse_query("q", f"-- plot: {query}").plot) if "=" in query else None
    )
    chosen = found or named_queries()[query]
    progress, held_out = options.pop("progress", None), options.pop("held_out", None)
    return draw(
        Table(tuple(columns), rows), chosen, arms(*runs), wishes=Wishes(**options), progress=progress, held_out=held_out
    )


def lines(picture, panel=0):
    """(label, x, y) of each line of a panel."""
    return [(picture.label(line), list(line.x), list(line.y)) for line in picture.panels[panel].lines]


# The rule for any SELECT


def test_x_is_the_step_and_each_other_number_a_panel():
    picture = of("", ("step", "reward", "tokens"), [(0, 0.5, 7), (2, 0.75, 9)], "a")
    assert [(p.name, p.x_label, p.y_label) for p in picture.panels] == [
        ("reward", "updates", "reward"),
        ("tokens", "updates", "tokens"),
    ]
    assert lines(picture, 1) == [("", [0.0, 2.0], [7.0, 9.0])]
    assert picture.title == "a"


def test_x_is_else_the_first_column_of_numbers_that_varies():
    picture = of("", ("step", "size", "reward"), [(4, 1, 0.5), (4, 8, 0.75)], "a")
    assert picture.panels[0].x_label == "size"
    assert lines(picture) == [("", [1.0, 8.0], [0.5, 0.75])]


def test_runs_are_series_in_the_order_asked_for_and_other_texts_variants():
    rows = [("a", "eval", 0, 0.5), ("a", "train", 0, 0.4), ("b", "eval", 0, 0.3), ("b", "eval", 1, 0.6)]
    picture = of("", ("run_id", "phase", "step", "reward"), rows, "b", "a")
    assert picture.series == ("b", "a")
    assert picture.variants == ("eval", "train")
    assert lines(picture) == [("b eval", [0.0, 1.0], [0.3, 0.6]), ("a eval", [0.0], [0.5]), ("a train", [0.0], [0.4])]


def test_columns_behind_a_number_are_its_interval():
    columns = ("step", "reward", "low", "high", "length", "length_low", "length_high")
    picture = of("", columns, [(0, 0.5, 0.4, 0.6, 9, 8, 10), (1, 0.5, None, None, 9, 8, 10)], "a")
    reward, length = (panel.lines[0] for panel in picture.panels)
    assert (reward.low[0], reward.high[0], length.low, length.high) == (0.4, 0.6, [8, 8], [10, 10])
    assert math.isnan(reward.low[1])
    assert picture.notes == ("Bands: 95% intervals.",)


def test_without_two_points_a_line_it_is_bars():
    picture = of("", ("run_id", "accuracy"), [("a", 0.5), ("b", 0.75)], "b", "a")
    (panel,) = picture.panels
    assert (panel.bars, panel.places) == (True, ("b", "a"))
    assert lines(picture) == [("", [0.0, 1.0], [0.75, 0.5])]
    picture = of("", ("category", "n", "tokens"), [("right", 3, 8.0), ("wrong", 5, 4.0)], "a")
    assert [p.name for p in picture.panels] == ["n", "tokens"]
    assert picture.panels[0].places == ("right", "wrong")


@pytest.mark.parametrize(
    ("columns", "rows", "problem"),
    [
        (("text",), [("a",)], "its columns text hold no numbers against an x"),
        (("step", "reward"), [], "it has no rows"),
        (("step",), [(0,), (1,)], "hold no numbers against an x"),
        (("step", "reward"), [(0, 1.0), (0, 2.0), (1, 2.0)], "several rows with step = 0 in one line"),
        (("step", "word", "n"), [(i % 2, f"w{i // 2}", i) for i in range(60)], "a panel would have 30 lines"),
        (("step", *(f"c{i}" for i in range(30))), [(s, *range(30)) for s in range(2)], "there would be 30 panels"),
    ],
)
def test_what_cannot_be_drawn_says_why_and_what_to_select(columns, rows, problem):
    with pytest.raises(RlvrError) as caught:
        of("", columns, rows, "a")
    assert problem in caught.value.problem
    assert caught.value.hint


@pytest.mark.parametrize("other", ["A", None, True, 7, 0.5, ["a"]])
def test_a_run_id_that_is_no_run_is_a_series_behind_the_runs(other):
    """A SELECT may name anything so, such as NULL for the total of all runs."""
    text = "-" if other is None else str(other)
    columns, rows = ("run_id", "step", "n"), [(other, 0, 9), (other, 2, 8), ("a", 0, 1), ("b", 0, 2)]
    picture = of("", columns, rows, "b", "a")
    assert picture.series == ("b", "a", text)
    assert lines(picture) == [("b", [0.0], [2.0]), ("a", [0.0], [1.0]), (text, [0.0, 2.0], [9.0, 8.0])]
    none = of("", columns, [("A", 0, 9), ("A", 2, 8)], "b", "a")
    assert none.series == ("A",), "the runs themselves are not in the result"
    picture = of("", ("run_id", "n"), [(run, n) for run, step, n in rows if not step], "b", "a")
    assert picture.panels[0].places == ("b", "a", text)
    assert lines(picture) == [("", [0.0, 1.0, 2.0], [2.0, 1.0, 9.0])]
    picture = of("x=step y=n panels=run_id", columns, rows, "b", "a")
    assert [panel.name for panel in picture.panels] == [text, "a", "b"]


@pytest.mark.parametrize("columns", [("step",), ("run_id", "step")])
def test_what_is_of_no_run_has_nothing_of_an_arm(columns):
    """Neither the interval of its held-out rewards, nor gaps where a seed lacks it."""
    rows = [row[-len(columns) - 1 :] for row in (("A", 0, 0.5), ("A", 4, 0.75))]
    for runs in (("a", "b"), ("a+b",), ("a+b", "c")):
        picture = of("", (*columns, "eval_reward"), rows, *runs, held_out={(0, 0): (0.0, 1.0), (0, 4): (0.0, 1.0)})
        (line,) = picture.panels[0].lines
        assert (line.x, line.y, line.low) == ([0.0, 4.0], [0.5, 0.75], None)


@pytest.mark.parametrize("names", [("low", "high"), ("n_low", "n_high")])
@pytest.mark.parametrize("values", [("x", "y"), (1, date(2024, 1, 1)), ("x", None)])
def test_what_is_no_number_is_no_interval(names, values):
    rows = [(step, 5, *values) for step in range(2)]
    picture = of("", ("step", "n", *names), rows, "a")
    assert (picture.panels[0].name, picture.panels[0].lines[0].low) == ("n", None)


def test_a_place_that_is_not_finite_is_left_out():
    """It would stand anywhere in the order of the others."""
    x = [3.0, math.nan, 1.0, math.inf, None, 2.0]
    assert lines(of("", ("size", "n"), [(at, i) for i, at in enumerate(x)], "a")) == [("", [1.0, 2.0, 3.0], [2, 5, 0])]
    progress = {("a", 0): {"algorithm_steps": 1.0}, ("a", 2): {"algorithm_steps": 0.5}}
    picture = of("", ("run_id", "step", "n"), [("a", s, s) for s in range(3)], "a", x="steps", progress=progress)
    assert lines(picture)[0][1][:2] == [0.5, 1.0]


def test_a_missing_text_is_a_bar_too():
    picture = of("", ("failure_kind", "n"), [("wrong", 3), (None, 5)], "a")
    assert (picture.panels[0].places, lines(picture)) == (("wrong", "-"), [("", [0.0, 1.0], [3.0, 5.0])])


def test_the_rows_are_gone_through_as_often_however_many_they_are():
    class Counted(list):
        def __iter__(self):
            nonlocal times
            times += 1
            return super().__iter__()

    found = []
    for steps in (2, 20):
        times = 0
        rows = Counted((kind, phase, s, 0.5) for kind in "xy" for phase in ("eval", "train") for s in range(steps))
        of("", ("kind", "phase", "step", "n"), rows, "a")
        found.append(times)
    assert found[0] == found[1]


# The line `plot:`


@pytest.mark.parametrize(
    ("line", "drawn"),
    [
        ("x=phase y=n", "phase"), ("x=step y=phase", "phase"), ("x=step y=n counts=phase", "phase"), ("x=day y=n", "day"),
    ],
)  # fmt: skip
def test_a_line_plot_that_draws_what_is_no_number(line, drawn):
    rows = [(step, "eval", date(2024, 1, 1 + step), 5) for step in range(2)]
    with pytest.raises(RlvrError, match=f"q: the line plot: draws {drawn}, which is no column of numbers") as caught:
        draw(Table(("step", "phase", "day", "n"), rows), parse_query("q", f"-- plot: {line}"), arms("a"))
    assert "bars=yes or places=yes" in caught.value.hint


@pytest.mark.parametrize("value", [["x"], {"x": 1}, date(2024, 1, 1)])
def test_lines_panels_and_places_may_be_of_any_type(value):
    for line in ("x=step y=n lines=kind", "x=step y=n panels=kind", "x=kind y=n bars=yes zeros=n"):
        picture = of(line, ("run_id", "step", "kind", "n"), [("a", 0, value, 5)], "a")
        assert str(value) in (picture.variants + picture.series + picture.panels[0].places + (picture.panels[0].name,))


def test_counts_may_be_missing_and_need_not_be_whole():
    rows = [("x", 1, 0.5), ("y", 2, None), ("z", 3, 3000)]
    (line,) = of("x=kind y=n counts=d bars=yes", ("kind", "n", "d"), rows, "a").panels[0].lines
    assert line.notes == ("0.5", "", "3,000")


def test_a_panel_may_have_a_blank_name():
    columns, rows = ("name", "step", "value"), [(" ", step, 0.5) for step in range(2)]
    assert of("x=step y=value panels=name", columns, rows, "a").panels[0].y_label == "value"


def test_a_query_says_how_it_is_drawn():
    columns, rows = ("run_id", "k", "a", "b", "c"), [("r", k, k, 2 * k, 0) for k in (1, 2, 4)]
    picture = of("x=k y=a+b log=x title='The title' y_label=share", columns, rows, "r")
    (panel,) = picture.panels
    assert (panel.title, panel.y_label, panel.log) == ("The title", "share", "x")
    assert lines(picture) == [("a", [1, 2, 4], [1, 2, 4]), ("b", [1, 2, 4], [2, 4, 8])]
    with pytest.raises(RlvrError, match="names d, which is no column"):
        of("x=k y=d", columns, rows, "r")


@pytest.mark.parametrize("line", ["x", "z=1", "x='", "x=k none"])
def test_a_line_plot_of_another_form(line):
    with pytest.raises(RlvrError, match="the line plot: has another form"):
        parse_query("q", f"-- plot: {line}")


def test_many_lines_have_a_panel_for_each_variant():
    rows = [(run, step, 1, 2) for run in "abcd" for step in (0, 1)]
    picture = of("x=step y=u+v", ("run_id", "step", "u", "v"), rows, *"abcd")
    assert [(p.title, p.name, len(p.lines)) for p in picture.panels] == [("u: u", "u u", 4), ("u: v", "u v", 4)]
    assert {line.variant for p in picture.panels for line in p.lines} == {0}
    assert len(of("x=step y=u+v", ("run_id", "step", "u", "v"), rows[:6], *"abc").panels) == 1


def test_every_named_query_is_drawn_or_says_that_it_is_not(tmp_path):
    """With two runs of samples, and with runs of which there is nothing: a picture, or an error that says so."""
    drawn = set()
    config = {
        "thinking_budget": 8,
        "loss_type": "grpo_clip",
        "length_normalization": "masked_mean",
        "use_std_normalization": True,
    }
    for name in ("r", "s"):
        with RunDir.create(tmp_path, "grpo", name=name, metadata={"config": config}) as run:
            for step in (0, 2):
                for phase in ("eval", "train"):
                    rows = [
                        a_rollout(
                            run_id=name, phase=phase, step=step, example_id=f"q{q}", sample_index=i, advantage=0.5,
                            num_response_tokens=4 + i + q, response="a b c d", mean_entropy=0.5, mean_logprob=-0.5,
                            **wrong_or_right(step > 0 if q else i > 0),
                        )
                        for q in range(2) for i in range(2)
                    ]  # fmt: skip
                    run.commit_rollouts(phase, step, rows)
                    values = {
                        "reward/mean": 0.5,
                        "reward/samples": 4,
                        "step/seconds": 2.0,
                        "mismatch/position/0001": 0.1,
                    }
                    run.commit_metrics(step, phase, values)
    with open_runs([read_run(tmp_path / name) for name in ("r", "s")]) as database:
        for name, query in named_queries().items():
            if query.plot is not None and name != "at_k":  # whose rows are made of its SELECT's
                result = database.select(query.sql, {**query.parameters, "limit": None})
                if result.rows:
                    drawn |= {name} if draw(result, query, arms("r", "s")).panels else set()
    undrawn = {name for name, query in named_queries().items() if query.plot is None}
    assert undrawn == {
        "attempt_errors",
        "compare",
        "config_diff",
        "failures",
        "hardest",
        "judge_agreement",
        "lineage",
        "rollouts",
        "searches",
        "summary",
    }
    without_rows = {"attempts", "best_score_at_k", "grade_errors", "graders", "subjects", "tools", "turns"}
    assert set(named_queries()) - drawn - undrawn == {"at_k", *without_rows}


def wrong_or_right(right):
    kind = (
        {"category": "format_1_answer_1", "failure_kind": None}
        if right
        else {"category": "format_1_answer_0", "failure_kind": "wrong_answer"}
    )
    return {"reward": float(right), "answer_reward": float(right), "sampled_logprobs": (-0.5,) * 4} | kind


# Queries


def curve(run, step, eval_reward, train_reward=None, seconds=60.0):
    return (
        run,
        step,
        seconds * (step + 2),
        seconds * (step + 1),
        eval_reward,
        train_reward,
        None,
        0.5,
        None,
        None,
        None,
        None,
    )


def test_curves_have_a_panel_a_measure():
    picture = of("curves", CURVES, [curve("a", 0, 0.25, 0.5), curve("a", 1, None, 0.6), curve("b", 0, 0.5)], "b", "a")
    assert [(p.name, p.title) for p in picture.panels] == [
        ("eval_reward", "Held-out reward"), ("train_reward", "Training reward"), ("entropy", "Entropy of the policy"),
    ]  # fmt: skip
    assert lines(picture) == [("b", [0.0], [0.5]), ("a", [0.0], [0.25])]
    assert lines(picture, 1) == [("a", [0.0, 1.0], [0.5, 0.6])]
    assert [line.series for line in picture.panels[1].lines] == [1], "the color and the mark of a, as in the others"


def test_entropy_has_a_panel_a_phase():
    columns = ("run_id", "phase", "step", "entropy", "entropy_correct", "entropy_wrong")
    rows = [("a", "eval", 0, 0.5, 0.4, None), ("a", "train", 0, 0.6, None, None), ("a", "train", 1, 0.3, None, 0.9)]
    picture = of("entropy", columns, rows, "a")
    assert [p.title for p in picture.panels] == ["Entropy of the policy, eval", "Entropy of the policy, train"]
    assert picture.variants == ("all", "correct", "wrong")
    assert lines(picture, 1) == [("all", [0.0, 1.0], [0.6, 0.3]), ("wrong", [1.0], [0.9])]


def test_at_k_has_the_three_in_one_panel():
    columns = ["run_id", "step", "k", "questions"]
    columns += [f"{m}_at_k{end}" for m in ("pass", "best", "majority") for end in ("", "_low", "_high")]
    rows = [("a", 0, k, 9, *(0.5, 0.4, 0.6) * 3) for k in (1, 2, 4)]
    picture = of("at_k", columns, rows, "a")
    (panel,) = picture.panels
    assert [picture.label(line) for line in panel.lines] == ["pass@k", "best@k", "majority@k"]
    assert all(list(line.low) == [0.4] * 3 for line in panel.lines)
    x, _ = picture.axes(panel)
    assert (x.log, [text for _, text in x.ticks]) == (True, ["1", "2", "4"])


def test_the_budgets_of_one_evaluation_are_one_line():
    columns = ("run_id", "evaluation", "thinking_budget", "accuracy", "low", "high")
    rows = [("x-8", "x", 8, 0.1, 0, 1), ("y-8", "y", 8, 0.2, 0, 1), ("x-64", "x", 64, 0.5, 0, 1)]
    picture = of("thinking_budget", columns, rows, "x-8", "x-64", "y-8")
    assert lines(picture) == [("x", [8.0, 64.0], [0.1, 0.5]), ("y", [8.0], [0.2])]


def test_categories_have_a_color_each_with_counts_and_intervals():
    columns = ("run_id", "category", "samples", "share", "low", "high")
    rows = [("a", "right", 3000, 0.75, 0.7, 0.8), ("a", "wrong", 1000, 0.25, 0.2, 0.3), ("b", "wrong", 4, 1.0, 0.5, 1)]
    picture = of("categories", columns, rows, "b", "a")
    (panel,) = picture.panels
    assert (panel.bars, panel.places, picture.series) == (True, ("b", "a"), ("right", "wrong"))
    assert lines(picture) == [("right", [1.0], [0.75]), ("wrong", [0.0, 1.0], [1.0, 0.25])]
    assert [tuple(line.notes) for line in panel.lines] == [("3,000",), ("4", "1,000")]
    assert list(panel.lines[1].low) == [0.5, 0.2]


def test_lengths_have_a_panel_a_run():
    columns = ("run_id", "step", "from_tokens", "to_tokens", "correct", "wrong")
    rows = [("a", 0, 0, 9, 3, 1), ("a", 0, 10, 19, 0, 2), ("b", 0, 0, 9, 1, 1), ("b", 0, 10, 19, 1, 1)]
    picture = of("length_histogram", columns, rows, "b", "a")
    assert [(p.title, p.places) for p in picture.panels] == [
        ("Response length, a", ("0", "10")),
        ("Response length, b", ("0", "10")),
    ]
    assert lines(picture) == [("correct", [0.0, 1.0], [3.0, 0.0]), ("wrong", [0.0, 1.0], [1.0, 2.0])]


def test_the_attempts_of_a_search_are_points_and_the_best_so_far_is_a_line():
    columns = ("run_id", "attempt", "score", "best_score")
    rows = [("a", n, score, best) for n, (score, best) in enumerate([(3.0, 3.0), (9.0, 9.0), (1.0, 9.0)])]
    for smooth in (1, 3):  # neighbors have nothing to do with each other
        best, attempts = of("attempts", columns, rows, "a", smooth=smooth).panels[0].lines
        assert (best.joined, attempts.joined) == (True, False)
        assert (attempts.y, attempts.raw) == ([3.0, 9.0, 1.0], None)


def test_a_panel_has_only_the_texts_of_its_own_rows():
    columns = ("run_id", "phase", "work", "seconds")
    rows = [("a", "train", "update", 2.0), ("a", "eval", "sampling", 1.0), ("a", "train", "sampling", 3.0)]
    picture = of("slowest", columns, rows, "a")
    assert [(p.name, p.places) for p in picture.panels] == [("train", ("update", "sampling")), ("eval", ("sampling",))]
    assert lines(picture, 1) == [("", [0.0], [1.0])]
    train, evaluation = (picture.axes(panel) for panel in picture.panels)
    assert train[1] == evaluation[1], "the same y axis"


def test_metrics_have_a_panel_a_name():
    columns = ("run_id", "name", "phase", "step", "wall_seconds", "value")
    rows = [("a", name, "train", step, 1.0, 0.5) for name in ("loss/nll", "policy/kl") for step in (0, 1)]
    picture = of("metrics", columns, rows, "a")
    assert [(p.name, p.title, p.y_label) for p in picture.panels] == [
        ("loss/nll", "loss/nll", "loss/nll"),
        ("policy/kl", "policy/kl", "policy/kl"),
    ]


# Arms of seeds


def test_an_arm_is_the_mean_of_its_seeds_with_an_interval():
    values = {"a1": (1.0, 2.0, 9.0), "a2": (3.0, 2.0), "a3": (2.0, 2.0), "b": (5.0, 5.0)}
    rows = [(run, step, y) for run, its in values.items() for step, y in enumerate(its)]
    picture = of("", ("run_id", "step", "length"), rows, "a1+a2+a3", "b")
    a, b = picture.panels[0].lines
    assert (a.x, a.y) == ([0.0, 1.0], [2.0, 2.0]), "step 2 has only one of the seeds"
    half = 4.3026527 * math.sqrt(1 / 3)  # t of two degrees of freedom
    assert (a.low[0], a.high[0]) == pytest.approx((2 - half, 2 + half))
    assert (a.low[1], a.high[1]) == (2.0, 2.0)
    assert (b.y, b.low) == ([5.0, 5.0], None)
    assert picture.notes[0].endswith("Lines: means over the seeds.")


def test_two_seeds_are_faint_lines_behind_their_mean():
    """An interval of one degree of freedom is wider than the panel. The axis shows the seeds whole."""
    rows = [(run, step, value) for run, value in (("a1", 10.0), ("a2", 90.0), ("b", 50.0)) for step in range(3)]
    held_out = {(0, 0): (0.0, 100.0), (1, 0): (45.0, 55.0)}
    picture = of("", ("run_id", "step", "eval_reward"), rows, "a1+a2", "b", held_out=held_out)
    a, b = picture.panels[0].lines
    assert (a.y, a.low, a.seeds, b.seeds) == ([50.0] * 3, None, ((10.0,) * 3, (90.0,) * 3), ())
    assert b.low[0] == 45.0
    assert picture.notes == (
        "Bands: 95% intervals.",
        "Arms of two seeds: the line is their mean, and each seed is a faint line.",
    )
    assert picture.axes(picture.panels[0])[1].low <= 10.0 < 90.0 <= picture.axes(picture.panels[0])[1].high


def test_two_seeds_that_are_smoothed_are_drawn_as_they_are():
    rows = [(run, step, 3.0 * (step == 1) + add) for run, add in (("a", 0), ("b", 2)) for step in range(3)]
    (line,) = of("", ("run_id", "step", "loss"), rows, "a+b", smooth=3).panels[0].lines
    assert (line.y, line.raw, line.seeds) == ([1.0, 2.0, 1.0], None, ((0.0, 3.0, 0.0), (2.0, 5.0, 2.0)))


def test_bars_of_two_seeds_keep_their_interval():
    rows = [(run, 2.0 if run == "a1" else 4.0, bucket) for run in ("a1", "a2") for bucket in ("x", "y")]
    picture = of("x=bucket y=share bars=yes", ("run_id", "share", "bucket"), rows, "a1+a2")
    (line,) = picture.panels[0].lines
    assert (line.y, line.seeds) == ([3.0, 3.0], ())
    assert line.low[0] < 2.0
    assert picture.notes[0].startswith("Whiskers: 95% intervals over the seeds")


def test_a_kind_that_one_seed_lacks_counts_as_0():
    columns = ("run_id", "category", "samples", "share", "low", "high", "mean_reward")
    rows = [("a", "right", 6, 0.5, 0, 1, 1.0), ("a", "odd", 6, 0.5, 0, 1, 0.5), ("b", "right", 4, 1.0, 0, 1, 1.0)]
    picture = of("categories", columns, rows, "a+b")
    assert lines(picture) == [("right", [0.0], [0.75]), ("odd", [0.0], [0.25])]
    assert [line.notes for line in picture.panels[0].lines] == [("10",), ("6",)]
    picture = of("categories", columns, rows, "a+b", panels=("mean_reward",))
    assert lines(picture) == [("right", [0.0], [1.0])], "the mean of no response is not 0"
    assert picture.notes[-1] == "Only some runs of a+b have: mean reward of odd. Their mean is not drawn."


def test_a_panel_a_run_is_a_panel_an_arm_where_arms_have_seeds():
    columns = ("run_id", "category_a", "category_b", "samples", "share_of_category_a")
    rows = [("a", "right", "right", 3, 0.75), ("a", "right", "wrong", 1, 0.25), ("b", "right", "right", 4, 1.0)]
    rows += [("b", "wrong", "right", 2, 1.0), ("c", "wrong", "wrong", 2, 1.0)]
    picture = of("migration", columns, rows, "a+b", "c")
    assert [panel.title for panel in picture.panels] == [
        "Category at the later step, a+b",
        "Category at the later step, c",
    ]
    assert lines(picture) == [("right", [0.0], [0.875]), ("wrong", [0.0], [0.125])], "no share of what a seed has not"


def test_a_line_that_only_some_seeds_have_is_left_out_and_said():
    rows = [(run, step, 1.0, 2.0 if run == "a" and step else None) for run in "ab" for step in range(2)]
    picture = of("", ("run_id", "step", "reward", "grad_norm"), rows, "a+b", panels=("reward", "grad_norm"))
    assert [panel.name for panel in picture.panels] == ["reward"]
    assert picture.notes[-1] == "Only some runs of a+b have: grad norm. Their mean is not drawn."
    with pytest.raises(RlvrError, match=r"^Only some runs of a\+b have: grad norm\."):
        of("", ("run_id", "step", "reward", "grad_norm"), rows, "a+b", panels=("grad_norm",))
    with pytest.raises(RlvrError, match=r"cannot be drawn\. Only some runs of a\+b have: grad norm\."):
        of("", ("run_id", "step", "grad_norm"), [(run, step, y) for run, step, _, y in rows], "a+b")


def test_a_share_of_clipped_tokens_that_is_0_everywhere_is_said_and_not_drawn():
    def curves(clipped, **wishes):
        rows = [("a", step, 1.0, None, None, 0.5, None, None, None, None, None, clipped * step) for step in range(3)]
        return of("curves", CURVES, rows, "a", **wishes)

    none = curves(0.0)
    assert [panel.name for panel in none.panels] == ["train_reward"]
    assert none.notes == ("No token was clipped in any update.",)
    assert [panel.name for panel in curves(0.25).panels] == ["train_reward", "clip_fraction"]
    asked = curves(0.0, panels=("clip_fraction",))
    assert [panel.name for panel in asked.panels] == ["clip_fraction"]
    assert asked.notes == ()


@pytest.mark.parametrize(("x", "of_rounds"), [("updates", [0, 11, 21, 31]), slow("steps", [0, 1, 2, 3])])
def test_seeds_of_expert_iteration_have_their_rounds_in_common(tmp_path, x, of_rounds):
    """Their updates differ: a round has as many as its right responses need."""
    expert_iterations(tmp_path, {"b": [0, 10, 21, 30], "a": [0, 12, 21, 32], "c": [0, 11, 21, 31]})
    with open_runs([read_run(tmp_path / name) for name in "bac"]) as database:
        query, arm = named_queries()["curves"], Arm(("b", "a", "c"), "arm", "ei")
        held_out = held_out_intervals(database, [arm.runs])
        progress = read_progress(database)
        result = database.select(query.sql, query.parameters)
    picture = draw(result, query, [arm], wishes=Wishes(x=x), progress=progress, held_out=held_out)
    by_name = {panel.name: panel.lines[0] for panel in picture.panels}
    held, reward, entropy = by_name["eval_reward"], by_name["train_reward"], by_name["entropy"]
    assert held.x == pytest.approx(of_rounds)
    assert held.y == pytest.approx([0.5] * 4)
    assert set(held_out) == {(0, step) for step in (0, 10, 21, 30, None)}, "the updates of the first run"
    assert list(zip(held.low, held.high, strict=True)) == [held_out[0, step] for step in (0, 10, 21, 30)]
    assert reward.x == pytest.approx(of_rounds[:3])
    assert reward.y == pytest.approx([1, 1.11, 1.21])
    assert len(entropy.x) == 10 + 9 + 9, "the first updates of each round: as many as all seeds have"
    assert entropy.x[10] == pytest.approx(of_rounds[1])


def test_rounds_pair_only_where_they_began_after_other_updates():
    def progress(**starts):
        return {(run, s): {"algorithm_steps": float(n)} for run, its in starts.items() for n, s in enumerate(its)}

    assert round_starts(progress(a=[0, 4, 8], b=[0, 4, 8]), ["a", "b"]) == {}
    assert round_starts(progress(a=[0, 4, 8], b=[0, 4, 6]), ["a", "b"]) == {"a": [0, 4, 8], "b": [0, 4, 6]}
    assert round_starts(progress(a=[0, 4, 8, 12], b=[0, 4, 6]), ["a", "b"]) == {}, "b ended within a round"
    assert round_starts(progress(a=[0, 4, 8, 12], b=[0, 5, 8]), ["a", "b"]) == {"a": [0, 4, 8, 12], "b": [0, 5, 8]}
    assert round_starts(progress(a=[0, 4]), ["a", "b"]) == {}, "nothing is known of b"
    assert [place(step, [0, 4, 8]) for step in (0, 3, 4, 9)] == [(0, 0), (0, 3), (1, 0), (2, 1)]
    assert place(9, ()) == (9, 0)
    found = progress(a=[0, 4, 8], b=[0, 5, 9])
    assert shared_steps(found, {"a": [0, 4, 7, 8], "b": [0, 5, 9]}) == [(0, 0), (4, 5), (8, 9)]


def test_the_interval_of_seeds():
    assert seed_interval([1.0]) == pytest.approx((math.nan, math.nan), nan_ok=True)
    assert seed_interval([0.2, 0.8]) == (0.0, 1.0), "a share stays one"
    low, high = seed_interval([10.0, 12.0, 14.0])
    assert (low, high) == pytest.approx((12 - 4.30265273 * 2 / 3**0.5, 12 + 4.30265273 * 2 / 3**0.5))


def test_held_out_rewards_have_the_interval_of_compare(tmp_path):
    """A picture and `compare` give one answer, and with one run the summary's."""
    for seed, name in enumerate(("a0", "a1", "a2", "b")):
        with RunDir.create(tmp_path, "grpo", name=name, metadata={}) as run:
            for step in (0, 6):
                rows = [
                    a_rollout(
                        run_id=name,
                        step=step,
                        example_id=f"q{q}",
                        reward=float((q * 5 + seed * 3 + step) % 7 < 2 + seed + step // 6),
                    )
                    for q in range(40)
                ]
                run.commit_rollouts("eval", step, rows)
    with open_runs([read_run(tmp_path / name) for name in ("a0", "a1", "a2", "b")]) as database:
        found = held_out_intervals(database, [("a0", "a1", "a2"), ("b",)])
        for step in (0, 6):
            both = compare(database, ["a0", "a1", "a2"], ["b"], step=step)
            assert found[0, step] == (both.a.low, both.a.high)
            assert found[1, step] == (both.b.low, both.b.high)
    assert set(found) == {(arm, step) for arm in (0, 1) for step in (0, 6, None)}
    assert (found[0, None], found[1, None]) == (found[0, 6], found[1, 6]), "None is the last one"
    assert found[0, 0] != found[0, 6]
    rows = [curve("a0", 0, 0.4), curve("a1", 0, 0.6), curve("a2", 0, 0.5), curve("b", 0, 0.5)]
    picture = of("curves", CURVES, rows, "a0+a1+a2", "b", held_out=found)
    a, b = picture.panels[0].lines
    assert (a.y, a.low, a.high) == ([0.5], [found[0, 0][0]], [found[0, 0][1]])
    assert (b.low[0], b.high[0]) == found[1, 0]


def test_rewards_that_are_no_shares_have_no_interval_of_shares(tmp_path):
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id="a", example_id=q, reward=0.7) for q in "xy"])
    with open_runs([read_run(tmp_path / "a")]) as database:
        assert held_out_intervals(database, [("a",)]) == {}


# The options


PROGRESS = {
    ("a", 0): {"algorithm_steps": 0.0, "rollouts": 0.0, "tokens": 0.0, "minutes": 1.0},
    ("a", 4): {"algorithm_steps": 1.0, "rollouts": 256.0, "tokens": 9000.0, "minutes": 240.0},
}


@pytest.mark.parametrize(
    ("x", "expected", "label"),
    [
        ("updates", [0, 4], "updates"),
        ("steps", [0, 1], "GRPO steps"),
        ("rollouts", [0, 256], "rollouts for training"),
        ("tokens", [0, 9000], "tokens for training"),
        ("minutes", [1 / 60, 4], "hours of work"),
    ],
)
def test_x(x, expected, label):
    picture = of("", ("run_id", "step", "reward"), [("a", 0, 0.5), ("a", 4, 0.6)], "a", x=x, progress=PROGRESS)
    (panel,) = picture.panels
    assert list(panel.lines[0].x) == pytest.approx(expected)
    assert panel.x_label == label


def test_held_out_rewards_are_drawn_when_they_were_measured():
    rows = [curve("a", 0, 0.5, 0.4), curve("a", 1, 0.6, 0.5)]
    picture = of("curves", CURVES, rows, "a", x="minutes", progress={})
    assert list(picture.panels[0].lines[0].x) == [1.0, 2.0]
    assert list(picture.panels[1].lines[0].x) == [2.0, 3.0]


def test_times_of_a_run_that_are_no_numbers_are_those_of_its_progress():
    rows = [("a", step, "soon", 0.5) for step in (0, 4)]
    picture = of("", ("run_id", "step", "wall_seconds", "reward"), rows, "a", x="minutes", progress=PROGRESS)
    assert lines(picture)[0][1] == pytest.approx([1 / 60, 4])


def test_x_needs_steps():
    with pytest.raises(RlvrError, match="--x tokens needs x to be the column step; here it is k"):
        of("", ("k", "reward"), [(1, 0.5), (2, 0.5)], "a", x="tokens", progress=PROGRESS)


def test_panels_by_name_in_the_order_asked_for():
    rows = [curve("a", 0, 0.5, 0.4), (*curve("a", 1, 0.6, 0.5)[:6], 33.0, *[None] * 5)]
    picture = of("curves", CURVES, rows, "a", panels=("length_wrong", "eval_reward"))
    assert [p.name for p in picture.panels] == ["length_wrong", "eval_reward"], "also one that is not drawn by default"
    with pytest.raises(RlvrError) as caught:
        of("curves", CURVES, rows, "a", panels=("eval_rewards",))
    assert "Did you mean eval_reward?" in caught.value.problem
    assert caught.value.hint == (
        "Panels: eval_reward, train_reward, entropy. Other columns: wall_seconds, eval_wall_seconds, length_wrong. "
        "Any metric: rlvr analyze metrics RUN --set names=%eval_rewards% --plot FILE"
    )
    with pytest.raises(RlvrError, match="The column clip_fraction has no numbers to draw in these runs"):
        of("curves", CURVES, rows, "a", panels=("clip_fraction",))
    columns = ("run_id", "phase", "step", "entropy", "entropy_correct", "entropy_wrong")
    shared = [("a", phase, s, 0.6, 0.3, 0.9) for phase in ("eval", "train") for s in (0, 1)]
    picture = of("entropy", columns, shared, "a", panels=("entropy",))
    assert [(p.name, len(p.lines)) for p in picture.panels] == [("eval entropy", 1), ("train entropy", 1)], "alone"
    picture = of("entropy", columns, shared, "a", panels=("train",))
    assert [(p.name, len(p.lines)) for p in picture.panels] == [("train", 3)]
    columns = ("run_id", "name", "phase", "step", "wall_seconds", "value")
    rows = [("a", "loss", phase, s, 1.0, 0.5) for phase in ("eval", "train") for s in (0, 1)]
    assert [p.name for p in of("metrics", columns, rows, "a", panels=("train",)).panels] == ["loss train"]


def test_smooth_leaves_the_neighbors_of_a_missing_value():
    nan = math.nan
    assert running_mean([1, 2, nan, 4, 5, 6, 7], 3) == pytest.approx([1, 1.5, nan, 4.5, 5, 6, 7], nan_ok=True)
    assert running_mean([nan, 2, math.inf, 4], 3) == pytest.approx([nan, 2, math.inf, 4], nan_ok=True)


def test_smooth_averages_neighbors_of_each_run_and_keeps_the_points():
    rows = [("a", s, float(v)) for s, v in enumerate((0, 3, 6, 0, 9))]
    (line,) = of("", ("run_id", "step", "loss"), rows, "a", smooth=3).panels[0].lines
    assert line.y == [0.0, 3.0, 3.0, 5.0, 9.0]
    assert line.raw == [0.0, 3.0, 6.0, 0.0, 9.0]
    assert running_mean([1, 2, 3, 4, 100], 5) == [1.0, 2.0, 22.0, 107 / 3, 100.0]
    seeds = [*rows, *(("b", s, v + 2) for _, s, v in rows)]
    (line,) = of("", ("run_id", "step", "loss"), seeds, "a+b", smooth=3).panels[0].lines
    assert line.y == [1.0, 4.0, 4.0, 6.0, 10.0]


def test_what_has_an_interval_is_not_smoothed():
    """The interval is that of each point."""
    rows = [(s, float(s % 2), 0.0, 1.0) for s in range(5)]
    picture = of("", ("step", "reward", "low", "high"), rows, "a", smooth=3)
    assert picture.panels[0].lines[0].y == [0, 1, 0, 1, 0]
    assert picture.panels[0].lines[0].raw is None


def test_log_and_title():
    picture = of("", ("step", "norm"), [(0, 0.0), (1, 1.0), (10, 100.0)], "a", log="xy", title="Norms")
    assert (picture.panels[0].log, picture.title) == ("xy", "Norms")
    assert "Values of 0 or less cannot be shown on a logarithmic axis." in picture.notes, "those of y"
    x, y = picture.axes(picture.panels[0])
    assert x.log
    assert y.log


def test_a_short_run_beside_a_long_one_is_more_than_a_dot():
    rows = [("a", s, 0.5) for s in range(0, 701, 10)] + [("b", s, 0.5) for s in range(0, 41, 10)]
    columns = ("run_id", "step", "reward")
    picture = of("", columns, rows, "a", "b")
    x, _ = picture.axes(picture.panels[0])
    assert x.share(0) == pytest.approx(0.03, abs=0.02), "the evaluation before the first update is there"
    assert x.share(40) > 0.3
    assert x.ticks[0] == (0.0, "0")
    assert "The axis of updates is logarithmic: one run has less than a tenth of those of another." in picture.notes
    for asked, seen in (("none", ("", 0.1)), ("y", ("y", 0.1))):
        linear = of("", columns, rows, "a", "b", log=asked)
        x, _ = linear.axes(linear.panels[0])
        assert (linear.panels[0].log, x.share(40) < seen[1]) == (seen[0], True)
    assert of("", columns, [r for r in rows if r[0] == "b" or r[1] <= 400], "a", "b").panels[0].log == "", (
        "a tenth is enough"
    )
    evaluated = of("", columns, [*rows[:71], ("b", 0, 0.5)], "a", "b")
    assert evaluated.panels[0].log == "", "an evaluation by itself has no length"
    texts = [(run, f"{step} updates", reward) for run, step, reward in rows[-2:]]
    assert of("", columns, texts, "b").panels[0].places == ("30 updates", "40 updates"), "places have no length either"


def test_the_gap_of_sampler_and_trainer_says_what_it_leaves_out():
    columns = ("run_id", "step", "mismatch_mean", "nll")
    plotted = replace(named_queries()["curves"], plot={"x": "step", "y": "mismatch_mean,nll"})
    picture = draw(Table(columns, [("a", 0, 0.1, 1.0), ("a", 1, 0.2, 1.0)]), plotted, arms("a"))
    assert [note for note in picture.notes if "--sampling-min-tokens" in note]
    picture = draw(Table(columns, [("a", 0, 0.1, 1.0)]), replace(plotted, plot={"x": "step", "y": "nll"}), arms("a"))
    assert not picture.notes


def test_intervals_beyond_the_axis_are_said_to_be_cut():
    rows = [(s, 0.5 + s / 100, 0.49, 0.51 + s / 100) for s in range(5)]
    columns = ("step", "norm", "low", "high")
    assert of("", columns, rows, "a").notes == ("Bands: 95% intervals.",)
    assert (
        of("", columns, [*rows, (5, 0.55, -20.0, 20.0)], "a").notes[-1]
        == "Intervals that go beyond the axis are cut at its end."
    )


# How far a run was


def progress_of(tmp_path, metrics, *, command="grpo"):
    with RunDir.create(tmp_path, command, name="a", metadata={}) as run:
        for step, values in metrics.items():
            run.commit_metrics(step, "train", values)
    with open_runs([read_run(tmp_path / "a")]) as database:
        found = read_progress(database)
    return {step: (row["algorithm_steps"], row["rollouts"], row["tokens"]) for (_, step), row in found.items()}


def test_the_updates_of_a_batch_share_its_rollouts(tmp_path):
    """Two batches: 3 updates on 12 rollouts of 60 tokens, 2 updates on 10 of 80."""
    found = progress_of(
        tmp_path,
        {
            0: {"reward/samples": 12, "sampling/tokens": 60, "update/rows": 4},
            1: {"update/rows": 4}, 2: {"update/rows": 4},
            3: {"reward/samples": 10, "sampling/tokens": 80, "update/rows": 5},
            4: {"update/rows": 5},
        },
    )  # fmt: skip
    assert found == {
        0: (0, 0, 0), 1: pytest.approx((1 / 3, 4, 20)), 2: pytest.approx((2 / 3, 8, 40)), 3: (1, 12, 60), 4: (1.5, 17, 100),
    }  # fmt: skip


def test_without_sampling_the_responses_of_the_updates_count(tmp_path):
    metrics = {s: {"update/rows": 8, "update/tokens": 100, "optimizer/grad_norm": 1.0} for s in range(3)}
    found = progress_of(tmp_path, metrics, command="sft")
    assert found == {0: (0, 0, 0), 1: (1, 8, 100), 2: (2, 16, 200)}
    assert {type(value) for _, *counts in found.values() for value in counts} == {int}  # shown without a decimal


def test_the_end_of_a_run_is_all_that_it_took(tmp_path):
    """The last evaluation is at a step that has no update."""
    with RunDir.create(tmp_path, "grpo", name="a", metadata={}) as run:
        run.commit_metrics(0, "eval", {"reward/mean": 0.5})
        run.commit_metrics(0, "train", {"reward/samples": 12, "sampling/tokens": 60, "update/rows": 4})
        run.commit_metrics(1, "train", {"update/rows": 4})
        run.commit_metrics(2, "eval", {"reward/mean": 0.5})
    with open_runs([read_run(tmp_path / "a")]) as database:
        last = read_progress(database)["a", 2]
    assert (last["algorithm_steps"], last["rollouts"], last["tokens"]) == (1.0, 12.0, 60.0)
