"""`rlvr sweep`: the runs that it makes, what it says of them, and that nothing is repeated or lost."""

import json
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from rlvr_cli.commands.sweep import run
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.config.parsing.command_line import values_of
from rlvr_cli.config.parsing.sources import resolve
from rlvr_cli.config.sweep import SweepConfig
from rlvr_cli.errors import RlvrError, UsageError
from rlvr_cli.runs.readers import read_metadata
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.sweeps.experiment import experiment_names

pytestmark = pytest.mark.usefixtures("forked")

# Small enough for seconds.
SMALL = (
    "--preset quickstart --dataset arithmetic:64 --eval-dataset arithmetic:64 --n-grpo-steps 2 --rollout-batch-size 8 --group-size 4 "
    "--train-batch-size 8 --gradient-accumulation-steps 1 --eval-examples 6 --eval-every 2 --sampling-max-tokens 8 --grader-workers 1 --device cpu"
).split()


@pytest.fixture
def sweep(tmp_path, capsys, tiny_model_dir):
    """Calls `rlvr sweep` with runs in tmp_path; gives stdout and stderr."""

    def call(experiment="grpo_baselines", *words, model=tiny_model_dir, **flags):
        overrides = () if flags.get("list") else ("--model", str(model), *SMALL, *words)
        given = {"experiment": experiment, "overrides": overrides, "runs_dir": str(tmp_path), "format": "json", **flags}
        run(resolve(SweepConfig, flags=given, command="sweep"))
        return capsys.readouterr()

    return call


def tables(text):
    """The tables that were printed as JSON, by title, without the minutes; one alone has no title."""
    found = json.loads(text)
    if isinstance(found, list):
        return found
    return {title: [{k: v for k, v in row.items() if k != "minutes"} for row in rows] for title, rows in found.items()}


@pytest.mark.slow
def test_each_arm_and_seed_is_a_run_and_none_is_repeated(sweep, tmp_path):
    shown = sweep(seeds="0,1")
    folder = tmp_path / "grpo_baselines"
    names = [f"{arm}-s{seed}" for seed in (0, 1) for arm in ("no_baseline", "reinforce_with_baseline")]
    for name in names:
        stored = read_metadata(folder / name)
        assert (stored["status"], stored["command"]) == ("finished", "grpo")
        assert f"{stored['config']['loss_type']}-s{stored['config']['seed']}" == name
    arms, differences = tables(shown.out).values()
    assert [(row["arm"], row["seeds"], row["updates"]) for row in arms] == [
        ("no_baseline", 2, 2), ("reinforce_with_baseline", 2, 2),
    ]  # fmt: skip
    assert [(row["arm"], row["against"], row["questions"]) for row in differences] == [
        ("reinforce_with_baseline", "no_baseline", 6)
    ]
    assert "The data cannot tell reinforce_with_baseline from no_baseline" in shown.err
    assert "the handout's problem grpo_baselines" in shown.err
    page = (folder / "report.md").read_text()
    assert page.startswith("# Does a baseline help?\n")
    assert "| no_baseline | 2 |" in page
    assert "The data cannot tell reinforce_with_baseline from no_baseline" in page
    assert "no_baseline, after 0 updates, wrong (question arithmetic-validation-0-" in page
    assert "no_baseline, after 2 updates, wrong" in page
    assert page.count("rlvr grpo --preset quickstart") == 4
    html = (folder / "report.html").read_text()
    assert "The data cannot tell reinforce_with_baseline from no_baseline" in html
    assert "Entropy of the policy" in html
    assert "loss_type reinforce_with_baseline (2 seeds)" in html
    for picture in ("held_out.svg", "curves.svg", "minutes.svg"):
        assert f"![{picture}]({picture})" in page
        assert "loss_type reinforce_with_baseline (2 seeds)" in (folder / picture).read_text()
    again = sweep(seeds="0,1", dry_run=True)
    assert [row["status"] for row in tables(again.out)] == ["finished"] * 4
    with pytest.raises(RlvrError, match="--group-size was 4, and is now 2"):
        sweep("grpo_baselines", "--group-size", "2", seeds="0,1")


@pytest.mark.slow
def test_evaluations_are_reported_by_category_and_by_samples(tmp_path, capsys, tiny_model_dir):
    overrides = f"--model {tiny_model_dir} --dataset arithmetic:4 --sampling-max-tokens 8 --grader-workers 1 --device cpu".split()

    def report_of(*words):
        flags = {
            "experiment": "best_of_n",
            "overrides": (*overrides, *words),
            "runs_dir": str(tmp_path),
            "name": words[1],
        }
        run(resolve(SweepConfig, flags={**flags, "format": "json"}, command="sweep"))
        titles = list(json.loads(capsys.readouterr().out))
        folder = tmp_path / words[1]
        return titles, (folder / "report.md").read_text(), sorted(path.name for path in folder.glob("*.svg"))

    titles, page, pictures = report_of("--num-samples", "2")
    assert titles == ["arms", "categories", "of k samples a question"]
    assert "![at_k.svg](at_k.svg)" in page
    assert pictures == ["at_k.svg"], "one evaluation is no curve"
    titles, page, pictures = report_of("--num-samples", "1")
    assert titles == ["arms", "categories"]
    assert pictures == []


@pytest.mark.slow
def test_more_steps_make_the_same_runs_longer(sweep, tmp_path):
    flags = {"vary": ("loss_type=no_baseline",), "seeds": "0"}
    sweep(**flags)
    longer = ("--n-grpo-steps", "3", "--group-size", "4")  # in another order
    shown = sweep("grpo_baselines", *longer, dry_run=True, **flags)
    assert [row["status"] for row in tables(shown.out)] == ["short"]
    shown = sweep("grpo_baselines", *longer, **flags)
    assert [(row["arm"], row["updates"]) for row in tables(shown.out)] == [("no_baseline", 3)]
    stored = read_metadata(tmp_path / "grpo_baselines/no_baseline-s0")
    assert (stored["status"], stored["config"]["n_grpo_steps"]) == ("finished", 3)
    assert "finished before" in sweep("grpo_baselines", *longer, **flags).err
    with pytest.raises(RlvrError, match="was made with --n-grpo-steps 3, and is now to have 2"):
        sweep(**flags)


STAGES = """
command = "grpo"
seeds = [0]
[grid]
group_size = [4, 2]
[[stages]]
name = "long"
best = 1
longer = 2
"""


@pytest.mark.slow
def test_the_best_arms_go_on_for_longer_and_nothing_is_repeated(sweep, tmp_path, tiny_model_dir):
    (tmp_path / "two.toml").write_text(STAGES)
    words = [word for word in SMALL if word not in ("--group-size", "4")]
    assert len(words) == len(SMALL) - 2
    flags = {
        "experiment": str(tmp_path / "two.toml"),
        "name": "two",
        "overrides": ("--model", str(tiny_model_dir), *words),
    }
    first = sweep(**flags, stages=1)
    assert [row["arm"] for row in tables(first.out)["arms"]] == ["group_size-4", "group_size-2"]
    assert not (tmp_path / "two-long").exists()
    shown = sweep(**flags)
    assert shown.err.count("finished before") == 2
    found = tables(shown.out)
    assert found["arms"] == tables(first.out)["arms"]
    best = max(found["arms"], key=lambda row: row["accuracy"])["arm"]
    arms = list(dict.fromkeys(["group_size-4", best]))
    long = found["two-long arms"]
    assert [(row["arm"], row["updates"]) for row in long] == [(arm, 4) for arm in arms]
    assert {read_metadata(tmp_path / "two-long" / f"{arm}-s0")["config"]["n_grpo_steps"] for arm in arms} == {4}
    assert (tmp_path / "two-long/report.html").exists()
    again = sweep(**flags)
    assert tables(again.out) == found
    assert again.err.count("finished before") == 2 + len(arms)


def test_a_later_stage_is_told_before_its_arms_are_known(sweep, tmp_path):
    (tmp_path / "two.toml").write_text(STAGES.replace("[4, 2]", "[8, 4]"))
    words = ("--rollout-batch-size", "16", "--train-batch-size", "16")
    shown = sweep(
        str(tmp_path / "two.toml"), dry_run=True,
        overrides=("--model", "tiny", "--preset", "quickstart", "--gradient-accumulation-steps", "1", *words),
    )  # fmt: skip
    assert (
        "then     long: the best 1 arms and the baseline, 2 times as long; chosen once these runs are finished"
        in shown.err
    )
    assert [row["run"] for row in tables(shown.out)] == ["group_size-8-s0", "group_size-4-s0"]


@pytest.mark.slow
def test_three_arms_are_each_compared_with_the_baseline(sweep):
    shown = sweep(vary=("loss_type=no_baseline,grpo_clip,gspo",), seeds="3", name="three")
    _, differences = tables(shown.out).values()
    assert [(row["arm"], row["against"]) for row in differences] == [
        ("grpo_clip", "no_baseline"),
        ("gspo", "no_baseline"),
    ]
    assert "2 arms are compared with one baseline" in shown.err


def test_a_run_that_fails_is_told_and_tried_again_and_the_others_go_on(sweep, tmp_path):
    grader = tmp_path / "mine.py"
    grader.write_text(
        "import os\ndef late(response, truth):\n    raise ValueError('not yet on ' + os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    flags = {
        "vary": (f"grader={grader}:late,r1_zero", "loss_type=no_baseline"),
        "seeds": "5",
        "name": "mine",
        "devices": "7",
    }
    with pytest.raises(RlvrError, match=r"1 of the 2 runs failed: no_baseline_mine\.py-late-s5") as raised:
        sweep("grpo_baselines", "--n-grpo-steps", "1", "--eval-examples", "2", **flags)
    assert str(tmp_path / "mine/logs") in raised.value.hint
    assert "not yet on 7" in (tmp_path / "mine/logs/no_baseline_mine.py-late-s5.log").read_text()
    assert read_metadata(tmp_path / "mine/no_baseline_r1_zero-s5")["status"] == "finished"


def test_the_commands_can_be_printed_instead(sweep, tmp_path):
    shown = sweep(seeds="0", dry_run=True)
    rows = tables(shown.out)
    assert [(row["run"], row["status"]) for row in rows] == [
        ("no_baseline-s0", "new"),
        ("reinforce_with_baseline-s0", "new"),
    ]
    commands = sweep(seeds="0", emit="commands").out.splitlines()
    assert commands == [row["command"] for row in rows]
    table = sweep(seeds="0", dry_run=True, format="table").out
    assert all(len(command) > 400 and command in table for command in commands), "whole, to be typed"
    assert shlex.split(commands[1])[-6:] == [
        *("--seed", "0", "--run", "reinforce_with_baseline-s0", "--runs-dir", str(tmp_path / "grpo_baselines")),
    ]
    script = sweep(seeds="0", emit="slurm").out
    assert "#SBATCH --array=0-1\n" in script
    assert "gres" not in script, "all is on the CPU"
    words = ("--device", "cuda", "--trainers", "2", "--samplers", "2")
    wide = sweep("grpo_baselines", *words, seeds="0", jobs=2, emit="slurm").out
    assert "#SBATCH --array=0-1%2\n#SBATCH --gres=gpu:4\n" in wide
    subprocess.run(["bash", "-n", "-c", script], check=True)
    file = tmp_path / "two.toml"
    file.write_text(
        'command = "grpo"\n[grid]\nstd_normalization = ["group", "none"]\n[[stages]]\nname = "long"\nbest = 1\n'
    )
    for flags in ({"emit": "slurm"}, {"emit": "commands"}, {"dry_run": True}):
        assert "then     long: the best 1 arms" in sweep(str(file), **flags).err
    assert list(tmp_path.iterdir()) == [file]


@pytest.fixture
def emitted(sweep):
    """Makes the runs of the emitted commands, without their rows: finished ones."""

    def call(*words):
        for line in sweep("grpo_baselines", *words, seeds="0", emit="commands").out.splitlines():
            given = values_of(GrpoConfig, shlex.split(line)[2:], command="grpo")
            config = resolve(GrpoConfig, flags=given, command="grpo")
            about = {"config": {k: v for k, v in asdict(config).items() if k != "sources"}, "sources": config.sources}
            with RunDir.create(config.runs_dir, "grpo", name=config.run, metadata=about):
                pass

    return call


def test_runs_that_others_made_are_this_sweeps_only_with_its_options(sweep, emitted, tmp_path, monkeypatch):
    emitted()
    monkeypatch.chdir(tmp_path.parent)
    for more, runs_dir in (((), tmp_path), (("--track", "tensorboard"), tmp_path.name)):
        rows = tables(sweep("grpo_baselines", *more, runs_dir=str(runs_dir), seeds="0", dry_run=True).out)
        assert [row["status"] for row in rows] == ["finished"] * 2
    for flags in ({}, {"dry_run": True}, {"emit": "slurm"}):
        with pytest.raises(
            RlvrError, match="no_baseline-s0 is a run with other options: --group-size was 4, and is now 2"
        ):
            sweep("grpo_baselines", "--group-size", "2", seeds="0", **flags)


def test_runs_that_have_ended_give_no_server_their_weights(sweep, emitted, tmp_path):
    words = ("grpo_baselines", "--sampler-urls", "http://127.0.0.1:9")
    emitted(*words[1:])
    assert "finished" in sweep(*words, seeds="0", jobs=2, dry_run=True).out
    with pytest.raises(RlvrError, match="while another run would sample with it") as raised:
        sweep(*words, seeds="0,1", jobs=2, dry_run=True)
    assert "servers of its own (one seed per arm)" in raised.value.hint
    assert "#SBATCH --array=0-1\n" in sweep(*words, seeds="0", emit="slurm").out
    assert len(sweep(*words, seeds="0,1", emit="commands").out.splitlines()) == 4, "one after another"
    for jobs, at_once in ((1, 2), (3, 3)):
        with pytest.raises(RlvrError, match=f"would sample with it: {at_once} run at a time") as raised:
            sweep(*words, seeds="0,1", jobs=jobs, emit="slurm")
        assert "--emit commands" in raised.value.hint


def test_a_config_file_that_has_changed_is_other_options(sweep, emitted, tmp_path):
    file = tmp_path / "my.toml"
    file.write_text("learning_rate = 1e-5\n")
    emitted("--config", str(file))
    file.write_text("learning_rate = 2e-5\n")
    with pytest.raises(RlvrError, match="--learning-rate was 1e-05, and is now 2e-05"):
        sweep("grpo_baselines", "--config", str(file), seeds="0")


def test_what_has_no_steps_is_not_probed(sweep, capsys):
    with pytest.raises(RlvrError, match="rlvr eval has none"):
        run(resolve(SweepConfig, flags={"experiment": "math_baseline", "probe": True}, command="sweep"))
    assert "begins" not in capsys.readouterr().err


def test_the_job_of_slurm_begins_a_run_or_goes_on_with_it(sweep, tmp_path):
    script = sweep(seeds="0", emit="slurm").out
    (tmp_path / "srun").write_text(
        '#!/bin/bash\ntest "$1" = rlvr && echo "${@:2}"\n'
    )  # signals reach its processes alone
    (tmp_path / "srun").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "1"}

    def said():
        return subprocess.run(
            ["bash", "-c", script], env=environment, check=True, capture_output=True, text=True
        ).stdout

    assert "--loss-type reinforce_with_baseline" in said()
    (tmp_path / "grpo_baselines/reinforce_with_baseline-s0").mkdir(parents=True)
    (tmp_path / "grpo_baselines/reinforce_with_baseline-s0/run.json").touch()
    assert said().startswith("grpo --resume reinforce_with_baseline-s0 --runs-dir")
    assert said().endswith("--n-grpo-steps 2\n"), "more steps make the same run longer"
    (tmp_path / "grpo_baselines/reinforce_with_baseline-s0/run.json").unlink()
    script = sweep("grpo_baselines", "--time-limit", "6h", seeds="0", emit="slurm").out
    (tmp_path / "grpo_baselines/reinforce_with_baseline-s0/run.json").touch()
    assert said().endswith("--n-grpo-steps 2 --time-limit 6h\n")


def test_the_list_and_the_file_of_an_experiment(sweep, capsys):
    rows = tables(sweep("", list=True).out)
    assert [row["experiment"] for row in rows] == experiment_names()
    assert {row["experiment"]: row["arms"] for row in rows}["sft_dataset_size"] == 5
    assert 'loss_type = ["no_baseline", "reinforce_with_baseline"]' in sweep(show=True).out


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"experiment": ""}, "No experiment is named"),
        ({"experiment": "--model"}, "--model comes before the experiment"),
        ({"seeds": "1,a"}, "--seeds is '1,a'"),
        ({"devices": "0,,1"}, "--devices is '0,,1'"),
        ({"devices": "0,1", "jobs": 3}, "--jobs 3 is more than the 2 of --devices"),
        (
            {"cluster": "auto", "devices": "0"},
            "--cluster chooses where runs are made, and --devices names GPUs of this machine",
        ),
        ({"cluster": "auto", "emit": "slurm"}, "and --emit is for others to start"),
        ({"emit": "slurm", "devices": "0"}, "--emit slurm prints what others start, so that --devices has no effect"),
        (
            {"emit": "commands", "probe": True},
            "--emit commands prints what others start, so that --probe has no effect",
        ),
        ({"emit": "commands", "jobs": 2}, "--emit commands prints what others start, so that --jobs has no effect"),
        (
            {"devices": "0,1", "overrides": ("--model", "tiny", "--trainers", "2"), "dry_run": True},
            "With --devices each run of a sweep has one GPU",
        ),
        ({"name": "a/b"}, r"'a/b' cannot be the name of a sweep\.\nGive --name"),
    ],
)
def test_what_is_refused(sweep, flags, problem):
    with pytest.raises((RlvrError, UsageError), match=problem):
        sweep(**flags)


def command(tmp_path, model, *words):
    return [
        *(sys.executable, "-m", "rlvr_cli", "sweep", "grpo_baselines", "--model", str(model), *SMALL, "--seeds", "0,1"),
        *("--runs-dir", str(tmp_path), "--format", "json", *words),
    ]


def ended(folder):
    """Wait until no process writes a run of this sweep."""
    from rlvr_cli.runs.lock import holder_of

    for _ in range(600):
        if not any(holder_of(path) for path in folder.glob("*-s*")):
            return
        time.sleep(0.1)
    raise AssertionError("a run's process outlives the sweep")


def killed_and_resumed(tmp_path, model, *, kills, number):
    """The tables of a sweep that was killed at random moments, and of one that was not."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    draw = random.Random(0)
    for _ in range(kills):
        process = subprocess.Popen(
            command(tmp_path / "killed", model),
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        time.sleep(draw.uniform(2.0, 14.0))
        process.send_signal(number)
        process.communicate(timeout=60)
        ended(tmp_path / "killed/grpo_baselines")
    found = [
        subprocess.run(
            command(tmp_path / name, model), env=environment, check=True, capture_output=True, text=True
        ).stdout
        for name in ("killed", "whole")
    ]
    return [tables(text) for text in found]


@pytest.mark.slow
def test_a_signal_ends_the_sweep_with_its_run_saved_and_the_same_command_goes_on(
    sweep, forks, tmp_path, tiny_model_dir
):
    call = forks.start(*command(tmp_path, tiny_model_dir, "--n-grpo-steps", "300")[3:], cwd=tmp_path)
    run = tmp_path / "grpo_baselines/no_baseline-s0"
    for _ in range(600):
        if run.exists() and len(list(run.glob("rollouts/**/*.parquet"))) > 2:
            break
        time.sleep(0.1)
    forks.send(call, signal.SIGTERM)
    done = forks.wait(call)
    said = done.err
    assert done.status == 130, said
    assert "what is done is kept; the same command goes on" in said
    assert read_metadata(run)["status"] == "interrupted"
    assert not (tmp_path / "grpo_baselines/reinforce_with_baseline-s0").exists()
    rows = tables(sweep("grpo_baselines", "--n-grpo-steps", "300", seeds="0,1", dry_run=True).out)
    assert [row["status"] for row in rows] == ["begun", "new", "new", "new"]


@pytest.mark.parametrize(
    ("number", "kills"),
    [
        pytest.param(signal.SIGKILL, 2, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, 10, marks=pytest.mark.full),
        pytest.param(signal.SIGINT, 10, marks=pytest.mark.full),
    ],
)
def test_kills_at_random_moments_change_nothing(tmp_path, tiny_model_dir, number, kills):
    found, expected = killed_and_resumed(tmp_path, tiny_model_dir, kills=kills, number=number)
    assert found == expected


TWO_STEPS = {
    "eval": "--limit 4",
    "sft": "--n-sft-steps 2 --train-batch-size 4 --micro-batch-size 4",
    "ei": "--n-ei-steps 2 --train-batch-size 4 --micro-batch-size 4",
    "grpo": "--n-grpo-steps 2 --gradient-accumulation-steps 1",
}
SIZES = {  # values of what varies for this size; of many of one kind two (tests/sweeps/test_experiment.py has all values)
    "sft_dataset_size": ["--dataset", "arithmetic:160", "--vary", "num_examples=128,all"],
    "grpo_learning_rate": ["--vary", "learning_rate=3e-6,3e-4"],
    "objectives": ["--vary", "loss_type=grpo_clip,kimi"],
    "leaderboard": ["--eval-max-tokens", "8", "--final-eval-examples", "4"],
    "grpo_off_policy_sweep": [
        "--vary",
        "train_batch_size=8,4",
        "--vary",
        "epochs_per_rollout_batch=1,2",
        "--stages",
        "1",
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", experiment_names())
def test_each_built_in_experiment_of_few_steps(name, tmp_path, tiny_model_dir):
    from rlvr_cli.sweeps.experiment import experiment_path, load_experiment

    experiment = name
    if name == "ei_rollouts":  # its arms have thousands of questions; in a copy, few
        text = re.sub(r"(512|1024|2048)\b", lambda found: str(int(found[0]) // 128), experiment_path(name).read_text())
        (tmp_path / f"{name}.toml").write_text(text)
        experiment = str(tmp_path / f"{name}.toml")
    kind = load_experiment(name).command
    small = {
        "eval": "", "sft": "--eval-dataset arithmetic:8", "ei": "--eval-dataset arithmetic:8",
        "grpo": "--eval-dataset arithmetic:8 --rollout-batch-size 8 --group-size 4",
    }[kind]  # fmt: skip
    if kind == "grpo" and name != "grpo_off_policy_sweep":
        small += " --train-batch-size 8"
    if kind != "eval":
        small += " --eval-examples 4"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "rlvr_cli", "sweep", experiment, "--model", str(tiny_model_dir), "--dataset", "arithmetic:64"),
            *("--sampling-max-tokens", "8", "--grader-workers", "1", "--device", "cpu", "--seeds", "0"),
            *TWO_STEPS[kind].split(), *small.split(), *SIZES.get(name, ()), "--runs-dir", str(tmp_path), "--format", "json",
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    logs = "".join(path.read_text()[-500:] for path in Path(tmp_path, name, "logs").glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    arms = tables(done.stdout)
    arms = arms["arms"] if isinstance(arms, dict) else arms
    runs = [path for path in Path(tmp_path, name).iterdir() if (path / "run.json").exists()]
    assert len(arms) == len(runs)
    assert {read_metadata(path)["status"] for path in runs} == {"finished"}
