"""`rlvr analyze --plot`: what the pictures of runs and arms of seeds show."""

import re

import pytest

from factories import a_rollout, expert_iterations
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


def test_seeds_of_expert_iteration_in_a_picture(picture, tmp_path):
    expert_iterations(tmp_path, {"s0": [0, 10, 21, 30], "s1": [0, 12, 22, 32]})
    found = picture(runs=("s0,s1",), runs_dir=str(tmp_path), panels=("eval_reward",), x="updates")
    assert {"0", "10", "20", "30"} <= set(found), "also the evaluations after training are there"


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


def test_what_the_options_of_a_picture_change(picture):
    one = {"panels": ("eval_reward",)}
    smooth = "Lines: mean of 3 neighboring points; the points themselves are faint."
    shown = {
        "updates": {},
        "minutes of work": {"x": "minutes"},
        "tokens for training": {"x": "tokens", "title": "Which loss?", "smooth": 3},
    }
    found = {label: picture(**one, **flags) for label, flags in shown.items()}
    for label in (*shown, "Which loss?", smooth):
        changed = "tokens for training" if label in ("Which loss?", smooth) else label
        assert [name for name, texts in found.items() if label in texts] == [changed]
    assert {"0", "500", "1,000", "1,500", "2,000"} <= set(found["tokens for training"]), "what training took"


def test_panels_of_a_picture(picture):
    found = picture(panels=("grad_norm,eval_reward",))
    assert [text for text in found if text in ("Held-out reward", "Gradient norm", "Training reward")] == [
        "Gradient norm",
        "Held-out reward",
    ]
    with pytest.raises(RlvrError, match="no panel 'reward'") as caught:
        picture(panels=("reward",))
    assert caught.value.hint == (
        "Panels: eval_reward, train_reward, grad_norm. Other columns: wall_seconds, eval_wall_seconds, eval_samples. "
        "Any metric: rlvr analyze metrics RUN --set names=%reward% --plot FILE"
    )


def test_a_logarithmic_picture(picture):
    assert {"1", "10", "100", "1,000"} <= set(picture(panels=("grad_norm",), log="y"))
    assert "10" not in picture(panels=("grad_norm",))


def test_any_select_can_be_drawn(picture):
    sql = "SELECT run_id, step, avg(reward) AS my_mean FROM rollouts GROUP BY ALL ORDER BY ALL"
    found = picture(sql, runs=("no_baseline-s0", "grpo_clip-s0"))
    assert found.count("my mean") == 2  # the title, and the label of the axis
    assert [t for t in found if t.startswith("loss_type")] == ["loss_type no_baseline", "loss_type grpo_clip"]


def test_the_ks_of_a_picture(picture):
    assert "pass@k" in picture("at_k", runs=("no_baseline-s1",), set=("k=1",))


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
