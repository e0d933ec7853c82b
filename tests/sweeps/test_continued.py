"""A run that exists and what the sweep would make now: the same, changed where it may be, or another run."""

import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_facts
from rlvr_cli.sweeps.continued import changed_options, other_bounds


def changed(stored, *, facts=None, sources=None, command="grpo", status="interrupted", run: Any = "runs/r", **flags):
    metadata = {"command": command, "config": stored, "facts": facts or {}, "sources": sources or {}, "status": status}
    config = resolve(GrpoConfig, flags={"run": "r", **flags}, command="grpo")
    return changed_options(metadata, config, command="grpo", run=Path(run))


@pytest.mark.parametrize(
    ("stored", "now", "problem"),
    [
        ({"group_size": 4}, {"group_size": 2}, "--group-size was 4, and is now 2"),
        ({"group_size": 4}, {}, "--group-size was 4, and is now 8"),
        ({}, {"group_size": 4}, "--group-size was 8, and is now 4"),
        ({"stop": ["a", "b"]}, {"stop": ()}, "--stop was a b, and is now not given"),
        ({"dataset": "a.jsonl"}, {"dataset": "b.jsonl"}, r"--dataset was a\.jsonl, and is now b\.jsonl"),
        ({"model": "a"}, {"model": "b"}, "--model was a, and is now b"),
        ({"n_grpo_steps": 9}, {"n_grpo_steps": 8}, "was made with --n-grpo-steps 9, and is now to have 8"),
        ({"n_grpo_steps": "\x1b"}, {}, r"was made with --n-grpo-steps \\x1b, and"),
    ],
)
def test_another_run_is_refused_with_the_option_and_its_values(stored, now, problem):
    with pytest.raises(RlvrError, match=problem):
        changed(stored, **now)


def test_a_run_of_another_command_is_refused():
    with pytest.raises(RlvrError, match="the command was rlvr sft, and is now rlvr grpo"):
        changed({}, command="sft")


def test_what_may_change_is_returned_where_it_is_given():
    now = {"track": ("tensorboard",), "n_grpo_steps": 300, "runs_dir": "/abs/runs/mine", "preset": "quickstart"}
    stored = asdict(resolve(GrpoConfig, flags={"preset": "quickstart"}, command="grpo"))
    stored |= {"runs_dir": "runs/mine", "preset": "", "sampler_urls": ["http://localhost:1"], "n_grpo_steps": 200}
    assert changed(stored, **now) == {"track": ("tensorboard",), "n_grpo_steps": 300}


def test_a_default_of_another_version_is_no_other_option():
    stored, sources = {"loss_type": "grpo_clip", "cliprange": 0.2}, {"cliprange": "default"}
    assert changed(stored, sources=sources, loss_type="grpo_clip") == {}
    with pytest.raises(RlvrError, match=r"--cliprange was 0\.2, and is now 0\.3"):
        changed(stored, sources=sources, loss_type="grpo_clip", cliprange=0.3)


def test_an_option_that_this_version_refuses_as_without_effect_is_no_other_option():
    stored = {"loss_type": "no_baseline", "std_normalization": "batch"}
    sources = dict.fromkeys(stored, "flag")
    assert changed(stored, sources=sources, loss_type="no_baseline") == {}
    with pytest.raises(RlvrError, match="--std-normalization was batch, and is now not given"):
        changed(stored | {"loss_type": "grpo_clip"}, sources=sources, loss_type="grpo_clip")


def stored_before(**flags):
    """The options of a run and their sources as an earlier version stored them: with the preset's clip range, whatever the loss."""
    config = resolve(GrpoConfig, flags=flags, command="grpo")
    stored = {key: value for key, value in asdict(config).items() if key != "sources"} | {"cliprange": 0.2}
    return stored, {**config.sources, "cliprange": f"preset {flags['preset']}"}


def test_an_option_without_effect_is_no_other_option_where_a_preset_sets_it_too():
    stored, sources = stored_before(preset="cispo", loss_type="no_baseline")
    given = {"std_normalization": "group"}
    sources |= dict.fromkeys(given, "flag")
    assert changed(stored | given, sources=sources, preset="cispo", loss_type="no_baseline") == {}


def test_what_a_preset_set_in_another_version_is_the_runs_own():
    for loss in ("gspo", "no_baseline", "grpo_clip"):
        stored, sources = stored_before(preset="cs336", loss_type=loss)
        assert changed(stored, sources=sources, preset="cs336", loss_type=loss) == {}
    stored["weight_decay"] = 0.1
    assert changed(stored, sources=sources, preset="cs336", loss_type="grpo_clip") == {}
    with pytest.raises(RlvrError, match=r"--weight-decay was 0\.1, and is now 0\.2"):
        changed(stored, sources=sources, preset="cs336", loss_type="grpo_clip", weight_decay=0.2)
    sources["weight_decay"] = "flag"
    with pytest.raises(RlvrError, match=r"--weight-decay was 0\.1, and is now 0\.0"):
        changed(stored, sources=sources, preset="cs336", loss_type="grpo_clip")


@pytest.mark.parametrize(
    ("before", "now"),
    [({"time_limit": "4h"}, {"time_limit": "6h"}), ({"time_limit": "4h"}, {}), ({"stop_when": "diverged"}, {})],
)
def test_a_run_that_has_ended_has_its_own_bounds_and_one_that_goes_on_gets_new_ones(before, now):
    """Of an arm whose runs have different ones, that is said."""
    config = resolve(GrpoConfig, flags=now, command="grpo")
    for status in ("finished", "diverged"):
        assert changed(before, status=status, **now) == {}
        metadata = {"command": "grpo", "config": {**asdict(config), **before}, "status": status}
        metadata["sources"] = dict.fromkeys(before, "flag")
        (said,) = other_bounds(metadata, config)
        assert re.match(r"--(time-limit 4h|stop-when diverged), and not (6h|not given|never)", said)
        assert other_bounds({**metadata, "status": "running"}, config) == []
        assert other_bounds({**metadata, "config": asdict(config)}, config) == []
    bounds = {name: now.get(name, GrpoConfig.__dataclass_fields__[name].default) for name in before}
    assert changed(before, **now) == bounds
    longer = {"n_grpo_steps": 300}
    assert changed({**before, "n_grpo_steps": 200}, status="finished", **now, **longer) == {**bounds, **longer}


@pytest.mark.parametrize("status", ["finished", "interrupted"])
def test_a_schedule_of_the_learning_rate_has_the_length_that_it_began_with(status):
    flags = {"lr_schedule": "cosine", "status": status}
    assert changed({"n_grpo_steps": 2, "lr_schedule": "cosine"}, n_grpo_steps=2, **flags) == {}
    with pytest.raises(RlvrError, match="has a cosine learning-rate schedule for --n-grpo-steps 2") as raised:
        changed({"n_grpo_steps": 2, "lr_schedule": "cosine"}, n_grpo_steps=4, **flags)
    assert "--n-grpo-steps 2, or choose another directory with --name" in raised.value.hint
    with pytest.raises(RlvrError, match="was made with --n-grpo-steps 4, and is now to have 2"):
        changed({"n_grpo_steps": 4, "lr_schedule": "cosine"}, n_grpo_steps=2, **flags)
    diverged = {**flags, "status": "diverged"}
    assert changed({"n_grpo_steps": 2, "lr_schedule": "cosine"}, n_grpo_steps=4, **diverged) == {"n_grpo_steps": 4}


@pytest.mark.parametrize(("before", "now"), [("cs336", "dapo"), ("", "cs336"), ("cs336", "")])
def test_another_preset_has_other_options(before, now):
    config = resolve(GrpoConfig, flags={"preset": before}, command="grpo")
    with pytest.raises(RlvrError, match="is a run with other options"):
        changed(asdict(config), sources=config.sources, preset=now)


def test_a_file_by_another_path_is_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for one, other in (("t.jsonl", str(tmp_path / "t.jsonl")), ("./t.jsonl", "t.jsonl")):
        assert changed({"dataset": one}, dataset=other) == changed({"dataset": other}, dataset=one) == {}
    stored = {"dataset": "t.jsonl", "runs_dir": "runs/mine"}  # and elsewhere, while the run does not go on from there
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    given = {"run": "../runs/mine/r", "dataset": str(tmp_path / "t.jsonl")}
    assert changed(stored, status="finished", **given) == {}
    for other in ({"status": "interrupted"}, {"status": "finished", "n_grpo_steps": 300}):
        with pytest.raises(RlvrError, match=r"--dataset was t\.jsonl, and is now /"):
            changed({"n_grpo_steps": 200, **stored}, **other, **given)
    with pytest.raises(RlvrError, match=r"--dataset was t\.jsonl, and is now /"):
        changed(stored, status="finished", **{**given, "run": "other/mine/r"})


def test_passes_beside_a_number_of_updates_are_no_length(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text("sft-epochs = 3\n")
    config = resolve(SftConfig, flags={"config": str(file), "n_sft_steps": 500}, command="sft")
    metadata = {"command": "sft", "config": {"sft_epochs": 9, "n_sft_steps": 400}, "status": "finished"}
    assert changed_options(metadata, config, command="sft", run=Path("runs/r")) == {"n_sft_steps": 500}


@pytest.mark.parametrize("runs", ["runs", "/data/runs", "s3://bucket/runs"])
def test_a_run_beside_the_sweep_is_the_same_wherever_both_are(runs):
    def of_sft(dataset):
        metadata = {
            "command": "sft",
            "config": {"dataset": dataset, "runs_dir": f"{runs}/mine"},
            "status": "finished",
        }
        config = resolve(SftConfig, flags={"run": "r", "dataset": "named"}, command="sft")
        return changed_options(metadata, config, command="sft", run=Path("runs/r"))

    assert of_sft(f"{runs}/named") == of_sft("named") == {}
    with pytest.raises(RlvrError, match="--dataset was elsewhere/named, and is now named"):
        of_sft("elsewhere/named")


@pytest.mark.parametrize("steps", [2, 3])
def test_a_run_that_goes_on_needs_the_run_beside_it_where_it_was(tmp_path, monkeypatch, steps):
    """--resume reads the stored directory: without it the run would fail once the sweep has begun."""
    monkeypatch.chdir(tmp_path)

    def of_sft(status):
        stored = {"dataset": "runs/named", "runs_dir": "runs/mine", "n_sft_steps": 2}
        config = resolve(SftConfig, flags={"run": "r", "dataset": "named", "n_sft_steps": steps}, command="sft")
        metadata = {"command": "sft", "config": stored, "status": status}
        return changed_options(metadata, config, command="sft", run=Path("moved/mine/r"))

    for status in ["interrupted"] + ["finished"] * (steps > 2):
        with pytest.raises(
            RlvrError, match="moved/mine/r would go on with --dataset runs/named, which is no longer there"
        ):
            of_sft(status)
    assert of_sft("diverged" if steps > 2 else "finished") is not None
    (tmp_path / "runs/named").mkdir(parents=True)
    assert of_sft("interrupted") == ({"n_sft_steps": 3} if steps > 2 else {})


def test_a_model_at_another_place_is_the_same_and_a_run_goes_on_with_it(tiny_model_dir, tmp_path):
    moved = str(tmp_path / "moved")
    shutil.copytree(tiny_model_dir, moved)
    stored, facts = {"model": "before"}, {"model": model_facts(str(tiny_model_dir))}
    assert changed(stored, facts=facts, model=moved) == {"model": moved}
    other = str(tmp_path / "other")
    shutil.copytree(moved, other)
    weights = Path(other, "model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    with pytest.raises(RlvrError, match="--model was before, and is now"):
        changed(stored, facts=facts, model=other)
