"""`rlvr analyze --plot`: what the pictures of runs and arms of seeds show."""

import re

import pytest

from factories import a_rollout, expert_iterations
from rlvr_cli.analysis.pictures import plots
from rlvr_cli.commands.store.analyze import run
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.store.analyze import AnalyzeConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.run_dir import RunDir


@pytest.fixture(scope="module")
def seeds_dir(tmp_path_factory):
    """Two loss types with two seeds each: 2 updates a step, evaluated at 0 and 4 updates."""
    root = tmp_path_factory.mktemp("seeds")
    for loss in ("no_baseline", "grpo_clip"):
        for seed in (0, 1):
            name = f"{loss}-s{seed}"
            metadata = {"config": {"loss_type": loss, "seed": seed, "run": name}}
            with RunDir.create(root, "grpo", name=name, metadata=metadata) as made:
                for step in (0, 4):
                    rows = [
                        a_rollout(run_id=name, phase="eval", step=step, example_id=q, reward=float(i < step + seed))
                        for i, q in enumerate("abcdef")
                    ]
                    made.commit_rollouts("eval", step, rows)
                    made.commit_metrics(step, "eval", {"reward/mean": (step + seed) / 6, "reward/samples": 6})
                for step in range(4):
                    sampled = (
                        {"reward/mean": 0.25 * step, "reward/samples": 8, "sampling/tokens": 1000}
                        if step % 2 == 0
                        else {}
                    )
                    updated = {"optimizer/grad_norm": 10.0**step, "update/rows": 4}
                    made.commit_metrics(step, "train", sampled | updated)
    return root


@pytest.fixture
def picture(seeds_dir, tmp_path, capsys):
    """The texts of the picture that the command draws, in order, and what it said."""

    def call(query="curves", runs=("grpo_clip-s0,grpo_clip-s1", "no_baseline-s0,no_baseline-s1"), **flags):
        path = tmp_path / "p.svg"
        given = {"runs_dir": str(seeds_dir), "query": query, "runs": runs, "plot": str(path), **flags}
        run(resolve(AnalyzeConfig, flags=given, command="analyze"))
        assert f"picture {path}" in capsys.readouterr().err
        return re.findall(r"<text [^>]*>([^<]*)</text>", path.read_text())

    return call


@pytest.fixture
def drawn(picture, monkeypatch):
    """The picture of the command itself, which is not written."""
    pictures = []
    monkeypatch.setattr(plots, "save_plot", lambda made, path: pictures.append(made) or path.write_text(""))

    def call(*query, **flags):
        picture(*query, **flags)
        return pictures.pop()

    return call


def test_seeds_of_expert_iteration_in_a_picture(drawn, tmp_path):
    expert_iterations(tmp_path, {"s0": [0, 2, 5], "s1": [0, 3, 6]})
    (panel,) = drawn(runs=("s0,s1",), runs_dir=str(tmp_path), panels=("eval_reward",), x="updates").panels
    assert [list(line.x) for line in panel.lines] == [[0, 2.5, 5.5]], "also the evaluations after training are there"


def test_arms_of_seeds_in_one_picture(picture):
    found = picture()
    for label in (
        "loss_type grpo_clip (2 seeds)",
        "loss_type no_baseline (2 seeds)",
        "Held-out reward",
        "Gradient norm",
    ):
        assert found.count(label) == 1, label
    legend = [text for text in found if text.startswith("loss_type")]
    assert legend == ["loss_type grpo_clip (2 seeds)", "loss_type no_baseline (2 seeds)"], "as typed"
    assert any(text.startswith("Arms of two seeds: the line is their mean") for text in found)


def test_of_two_columns_with_one_name_both_are_drawn(drawn):
    query = "SELECT step, min(reward) AS r, max(reward) AS r FROM rollouts GROUP BY ALL"
    found = drawn(query, runs=("grpo_clip-s0",)).panels
    assert [(panel.name, panel.lines[0].y) for panel in found] == [("r", [0.0, 0.0]), ("r_2", [0.0, 1.0])]


def test_what_the_options_of_a_picture_change(picture):
    one = {"panels": ("eval_reward",)}
    smooth = "Lines: mean of 3 neighboring points; the points themselves are faint."
    plain, changed = picture(**one), picture(**one, x="tokens", title="Which loss?", smooth=3)
    for label, found in (
        ("updates", plain),
        *((text, changed) for text in ("tokens for training", "Which loss?", smooth)),
    ):
        assert [label in texts for texts in (plain, changed)] == [found is plain, found is changed]
    assert {"0", "500", "1,000", "1,500", "2,000"} <= set(changed), "what training took"


def test_minutes_of_a_picture(drawn):
    assert drawn(panels=("eval_reward",), x="minutes").panels[0].x_label == "minutes of work"


def test_panels_of_a_picture(drawn):
    found = drawn(panels=("grad_norm,eval_reward",)).panels
    assert [panel.title for panel in found] == ["Gradient norm", "Held-out reward"]
    with pytest.raises(RlvrError, match="no panel 'reward'") as caught:
        drawn(panels=("reward",))
    assert caught.value.hint == (
        "Panels: eval_reward, train_reward, grad_norm. Other columns: wall_seconds, eval_wall_seconds, eval_samples. "
        "Any metric: rlvr analyze metrics RUN --set names=%reward% --plot FILE"
    )


def test_a_logarithmic_picture(picture, drawn):
    assert [drawn(panels=("grad_norm",), log=log).panels[0].log for log in ("y", "")] == ["y", ""]


def test_any_select_can_be_drawn(drawn):
    sql = "SELECT run_id, step, avg(reward) AS my_mean FROM rollouts GROUP BY ALL ORDER BY ALL"
    found = drawn(sql, runs=("no_baseline-s0", "grpo_clip-s0"))
    assert [(panel.title, panel.y_label) for panel in found.panels] == [("my mean", "my mean")]
    assert found.series == ("loss_type no_baseline", "loss_type grpo_clip")


def test_the_ks_of_a_picture(drawn):
    (panel,) = drawn("at_k", runs=("no_baseline-s1",), set=("k=1",)).panels
    assert panel.lines[0].x == [1]


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"query": "compare"}, "There is no picture of compare"),
        ({"query": "summary"}, "There is no picture of summary"),
        ({"query": "SELECT 'a' AS b"}, "hold no numbers against an x"),
        ({"plot": "p.pdf"}, r"p\.pdf does not end in \.png or \.svg"),
        ({"plot": "", "x": "steps"}, "--x is an option of the picture"),
        ({"plot": "", "panels": ("eval_reward",)}, "--panels is an option of the picture"),
        ({"query": "report"}, "--plot has no effect on the report"),
        ({"out": "curves.html"}, "--out is the file of the report"),
        ({"smooth": 4}, "--smooth is 4"),
        ({"runs": ("no_baseline-s0", "no_baseline-s0,no_baseline-s1")}, "no_baseline-s0 is in two arms"),
        ({"runs": (",",)}, "An arm has no run"),
    ],
)
def test_what_cannot_be_drawn(picture, flags, problem):
    with pytest.raises(RlvrError, match=problem) as caught:
        picture(**flags)
    assert caught.value.hint
