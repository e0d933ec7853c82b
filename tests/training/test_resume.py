"""Training that is killed, stopped, refused or out of disk goes on to the same bits: `rlvr grpo`, `rlvr ei`, `rlvr sft`."""

import json
import os
import re
import shlex
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from checks import findings
from forks import Done, Forks, processes_in
from killed import (
    DISTILL,
    DPO,
    EI,
    GRPO,
    ONLINE_DPO,
    PACKED,
    POINTS,
    PPO,
    SFT,
    Whole,
    assert_ended_as,
    assert_readable,
    begin_or_resume,
    checkpoints_of,
    go_on,
    kill_at_random,
    metrics_of,
    rows_of,
    weights_of,
    write_pairs,
)
from marks import full, slow
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.runs.run_dir import RunDir
from teachers import write_teacher


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory) -> Whole:
    root = tmp_path_factory.mktemp("whole")
    begun = forks.run(*GRPO, "--run", "whole", cwd=root, status=0)
    assert "starts over" not in begun.said
    forks.run(*GRPO, "--run", "cut", cwd=root, fault="update:7", status=-signal.SIGKILL)
    whole, cut = root / "runs/whole", root / "runs/cut"
    assert checkpoints_of(cut) == ["step-000004", "step-000006"]
    assert {k[1] for k in metrics_of(whole) if k[2] == "loss/nll"} == set(range(8))
    return Whole(whole, cut, seconds=read_run(whole).metadata["wall_seconds"])


@pytest.fixture
def cut(whole: Whole, tmp_path: Path) -> Path:
    """A copy of the run that was killed."""
    return Path(shutil.copytree(whole.cut, tmp_path / "runs/cut"))


# kill -9


@pytest.mark.slow
def test_grpo_killed_at_8_random_points_ends_the_same(forks: Forks, whole: Whole, tmp_path: Path):
    kill_at_random(forks, tmp_path, whole, kills=8, seed=1)


def stopped_in_turn(forks: Forks, root: Path, whole: Whole, faults: Sequence[str]) -> None:
    """By a kill, a signal or a full disk: each time what was stored can be read, and in the end nothing differs."""
    run = root / "runs/cut"
    for fault in faults:
        match fault.split(":")[2:]:
            case ["term"]:
                assert_stopped(go_on(forks, run, GRPO, fault=fault, status=130), run)
            case ["enospc"]:
                assert_disk_is_full(go_on(forks, run, GRPO, fault=fault, status=1))
            case _:
                go_on(forks, run, GRPO, fault=fault, status=-signal.SIGKILL)
        assert_readable(run)
    go_on(forks, run, GRPO)
    assert_ended_as(whole.run, run)


def test_grpo_killed_stopped_and_out_of_disk_in_turn_ends_the_same(forks: Forks, whole: Whole, tmp_path: Path):
    """The last kill is before the last pruning. More points: slow."""
    faults = "update:3:term", "checkpoint.torn:1:enospc", "checkpoint.renamed:1"
    stopped_in_turn(forks, tmp_path, whole, faults)


@pytest.mark.slow
def test_grpo_killed_at_every_named_point_in_turn_ends_the_same(forks: Forks, whole: Whole, tmp_path: Path):
    passages = (
        "create:1", "write:1", "write.torn:2", "rename:3", "renamed:3", "manifest:1", "manifest.torn:1", "manifest.done:1",
        "update:1", "updated:1", "checkpoint:1", "checkpoint.torn:1", "checkpoint.rename:1", "checkpoint.renamed:1",
        "sampled:3", "graded:1", "backward:2", "prune:1", "prune.torn:1",
    )  # fmt: skip
    assert {p.partition(":")[0] for p in passages} == set(POINTS)
    stopped_in_turn(forks, tmp_path, whole, passages)


@pytest.mark.full
def test_grpo_stopped_and_out_of_disk_at_more_points_ends_the_same(forks: Forks, whole: Whole, tmp_path: Path):
    full = "write:1", "write:5", "write:6", "write:7", "manifest.torn:2", "checkpoint:1"
    stopped = "sampled:3", "updated:1", "write:2", "manifest.torn:2", "checkpoint.torn:1", "prune:1"
    for number, fault in enumerate([*(f"{p}:enospc" for p in full), *(f"{p}:term" for p in stopped)]):
        folder = tmp_path / str(number)
        folder.mkdir()
        stopped_in_turn(forks, folder, whole, [fault])


SHAPED = shlex.split(
    "--std-normalization batch --loss-type gspo --format-weight 0.5 --length-reward 0.5 --length-reward-after 2 "
    "--language-reward 0.2 --dynamic-sampling --max-sampling-rounds 2 --question-order prioritized"
)


@pytest.mark.parametrize(
    "command",
    [
        slow(EI),
        slow([*SFT, "--num-examples", "24"]),
        slow([*PACKED, "--num-examples", "24"]),
        full([*PACKED, "--packing-attend-across", "--num-examples", "24"]),
        slow(DPO),
        full(PPO),  # at one point in a slow test
        slow([*PPO, "--critic", "shared", "--critic-warmup-steps", "0", "--kl-in", "loss"]),
        full([*PPO, "--lora-rank", "4", "--learning-rate", "5e-3"]),
        full([*DPO, "--loss-type", "dpo_norm", "--lora-rank", "4"]),
        slow(ONLINE_DPO),
        slow(DISTILL),
        full([*DISTILL, "--divergence", "sampled", "--lora-rank", "4"]),
        full([*GRPO, "--dynamic-sampling", "--max-sampling-rounds", "4"]),  # so is "shaped"
        full([*GRPO, "--kl-coef", "0.1", "--importance-correction", "truncated"]),
        slow([*GRPO, *SHAPED]),
        slow([*GRPO, "--param-dtype", "bfloat16", "--optimizer", "adamw_kahan", "--gradient-checkpointing"]),
        full([*GRPO, "--param-dtype", "bfloat16", "--offload-optimizer"]),
        slow([*GRPO, "--optimizer", "adamw_8bit", "--async-steps", "1"]),
        slow([*GRPO, "--partial-rollout-tokens", "4", "--question-order", "prioritized"]),
        full([*GRPO, "--compute-dtype", "bfloat16", "--kl-coef", "0.1"]),
        slow([*GRPO, "--lora-rank", "4", "--learning-rate", "5e-3", "--kl-coef", "0.1", "--lora-merge"]),
        full([*GRPO, "--lora-rank", "4", "--param-dtype", "bfloat16", "--async-steps", "1"]),
        full([*SFT, "--lora-rank", "4", "--gradient-checkpointing"]),
        full([*EI, "--lora-rank", "4"]),
        full([*GRPO, "--async-steps", "1", "--dynamic-sampling", "--max-sampling-rounds", "4"]),
    ],
    ids=[
        "ei",
        "sft",
        "packed",
        "packed-across",
        "dpo",
        "ppo",
        "ppo-shared",
        "lora-ppo",
        "lora-dpo",
        "online-dpo",
        "distill",
        "lora-distill",
        "dynamic-sampling",
        "kl-and-importance-correction",
        "shaped",
        "kahan",
        "offload",
        "8bit-async",
        "partial",
        "bfloat16",
        "lora",
        "lora-async",
        "lora-sft",
        "lora-ei",
        "async-dynamic-sampling",
    ],
)
def test_other_training_killed_at_some_points_ends_the_same(forks: Forks, tmp_path: Path, command: list[str]):
    whole, run = tmp_path / "runs/whole", tmp_path / "runs/cut"
    write_pairs(tmp_path)
    if command[0] == "distill":
        write_teacher(tmp_path / "teacher", of=builtin_model_path())
    go_on(forks, whole, command)
    torn = () if command[0] == "grpo" else ("checkpoint.torn:1",)  # GRPO is killed at all points above
    for fault in (*torn, f"updated:{read_run(whole).metadata['updates'] - 1}"):
        go_on(forks, run, command, fault=fault, status=-signal.SIGKILL)
        assert_readable(run)
    go_on(forks, run, command)
    assert_ended_as(whole, run)


@pytest.mark.slow
def test_ppo_killed_before_its_last_update_ends_the_same(forks: Forks, tmp_path: Path):
    """It has what others have not: scores, values and another network in its checkpoints, here within a batch."""
    whole, run = tmp_path / "runs/whole", tmp_path / "runs/cut"
    go_on(forks, whole, PPO)
    last = read_run(whole).metadata["updates"] - 1
    go_on(forks, run, PPO, fault=f"updated:{last}", status=-signal.SIGKILL)
    assert checkpoints_of(run)[-1] == f"step-{last - 1:06}"
    go_on(forks, run, PPO)
    assert_ended_as(whole, run)


@pytest.mark.slow
def test_partial_rollouts_killed_between_segments_and_rollouts_end_the_same(forks: Forks, tmp_path: Path):
    """In every step: its segments are committed, and the rollouts that are made of them are not."""
    command = [*GRPO, "--n-grpo-steps", "3", "--partial-rollout-tokens", "4", "--question-order", "prioritized"]
    command += ["--warmup-steps", "2", "--lr-schedule", "cosine"]
    whole, run = tmp_path / "runs/whole", tmp_path / "runs/cut"
    go_on(forks, whole, command)
    steps = [json.loads(line) for line in (whole / "manifest.jsonl").read_text().splitlines()]
    steps = [entry["step"] for entry in steps if entry["path"].startswith("segments/")]
    assert len(steps) == 3
    for step in steps:
        go_on(forks, run, command, fault="segments:1", status=-signal.SIGKILL)
        assert_readable(run)
        last = json.loads((run / "manifest.jsonl").read_text().splitlines()[-1])
        assert (last["path"].partition("/")[0], last["step"]) == ("segments", step)
    go_on(forks, run, command)
    assert_ended_as(whole, run)
    assert segments_of(run) == segments_of(whole)


def segments_of(run: Path) -> list[dict]:
    """The segments of a run, in the order of their commits, but for the run's name and the time."""
    with RunDir.annotate(run) as opened:
        rows = [asdict(segment) for step in opened.segment_steps() for segment in opened.segments(step)]
    return [{k: v for k, v in row.items() if k not in ("run_id", "sampled_at")} for row in rows]


def test_sampling_ahead_is_stopped_with_its_process(forks: Forks, tmp_path: Path):
    run, command = tmp_path / "runs/cut", [*GRPO, "--async-steps", "1"]
    for fault in ("update:3:term", "update:5"):
        call = forks.start(*begin_or_resume(run, command), cwd=tmp_path, fault=fault)
        done = forks.wait(call)
        assert done.status == (130 if fault.endswith("term") else -signal.SIGKILL), done.said
        deadline = time.monotonic() + 10  # of a process that was killed, the kernel kills the child
        while processes_in(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert processes_in(tmp_path) == {}


def test_killed_while_the_final_model_is_written_nothing_is_left_over(forks: Forks, whole: Whole, cut: Path):
    before = set(os.listdir(cut))
    call = forks.start("grpo", "--resume", cut, cwd=cut.parents[1])
    while forks.status(call) is None and not any(p.endswith(".new") for p in set(os.listdir(cut)) - before):
        time.sleep(0.0005)
    forks.send(call, signal.SIGKILL)
    forks.wait(call)
    go_on(forks, cut, GRPO)
    assert_ended_as(whole.run, cut)


@pytest.mark.parametrize(
    ("given", "kept"), [([], [2, 8]), pytest.param(["--checkpoint-minutes", "0"], [6, 8], marks=pytest.mark.slow)]
)
def test_after_a_checkpoint_that_took_a_long_time_the_next_ones_wait(forks: Forks, tmp_path: Path, given, kept):
    """The first one is stopped while it is written, for more than a second."""
    call = forks.start(*GRPO, *given, "--run", "r", cwd=tmp_path, fault="checkpoint.torn:1:stop")
    checkpoints = tmp_path / "runs/r/checkpoints"
    while not [*checkpoints.glob(".step-*")]:
        assert forks.status(call) is None
        time.sleep(0.05)
    time.sleep(1.5)
    forks.send(call, signal.SIGCONT)
    assert forks.wait(call).status == 0
    assert [path.name for path in sorted(checkpoints.iterdir())] == [f"step-{step:06}" for step in kept]


def test_a_finished_run_that_goes_on_stays_as_it_is(forks: Forks, whole: Whole, tmp_path: Path):
    run = Path(shutil.copytree(whole.run, tmp_path / "runs/whole"))
    go_on(forks, run, GRPO)
    assert_ended_as(whole.run, run)


# Responses that are all cut


@pytest.mark.slow
def test_a_batch_without_a_token_to_train_on_is_skipped(forks: Forks, tiny_model_dir: Path, tmp_path: Path):
    options = [
        "--overlong",
        "mask",
        "--sampling-max-tokens",
        "4",
        "--n-grpo-steps",
        "1",
        "--model",
        str(tiny_model_dir),
    ]
    forks.run(*GRPO, *options, "--run", "r", cwd=tmp_path, status=0)
    metrics = metrics_of(tmp_path / "runs/r")
    assert [metrics["train", step, "update/skipped"] for step in range(4)] == [1.0] * 4


@pytest.mark.slow
def test_killed_after_an_update_that_was_skipped_it_ends_the_same(forks: Forks, tiny_model_dir: Path, tmp_path: Path):
    (tmp_path / "odd.py").write_text(
        "def grade(response, truth):\n"
        "    return {'format_reward': 1.0, 'answer_reward': 0.0, 'reward': float(len(response) % 2)}\n"
    )
    command = [
        *GRPO, "--model", str(tiny_model_dir), "--grader", str(tmp_path / "odd.py:grade"), "--overlong", "mask",
        "--sampling-min-tokens", "1", "--sampling-max-tokens", "6", "--stop", "a", "--stop", "e", "--stop", "i", "--stop", "t",
        "--n-grpo-steps", "1", "--group-size", "2", "--train-batch-size", "2", "--gradient-accumulation-steps", "1",
        "--rollout-batch-size", "8", "--eval-every", "0", "--grader-workers", "1",
        "--checkpoint-every", "1", "--learning-rate", "1e-3",
    ]  # fmt: skip
    whole, run = tmp_path / "runs/whole", tmp_path / "runs/cut"
    go_on(forks, whole, command)
    metrics = metrics_of(whole)
    skipped = [metrics["train", step, "update/skipped"] for step in range(8)]
    made = skipped[: skipped.index(1.0)].count(0.0)
    assert any(metrics["train", step, "optimizer/grad_norm"] for step in range(made)), "the policy is to move first"
    after_it = f"update:{made + 1}"
    go_on(forks, run, command, fault=after_it, status=-signal.SIGKILL)
    go_on(forks, run, command)
    assert_ended_as(whole, run)


# SIGINT and SIGTERM

LONG = shlex.split(
    "grpo --dataset arithmetic:300 --n-grpo-steps 1 --rollout-batch-size 256 --group-size 8 --train-batch-size 128 "
    "--gradient-accumulation-steps 64 --loss-type grpo_clip --sampling-max-tokens 32 --learning-rate 2e-4 "
    "--eval-dataset arithmetic:1000:7 --eval-examples 1000 --checkpoint-every 0"
)


@pytest.fixture(scope="module")
def long(forks: Forks, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("long") / "runs/long"
    go_on(forks, run, LONG)
    return run


def stop_when(forks: Forks, run: Path, ready: Callable[[], bool], *, number: signal.Signals) -> None:
    """Start the run or go on with it, and stop it by a signal when it is ready."""
    call = forks.start(*begin_or_resume(run, LONG), cwd=run.parents[1])
    while not ready():
        assert forks.status(call) is None, "it has ended before it could be stopped"
        time.sleep(0.01)
    forks.send(call, number)
    assert_stopped(forks.wait(call), run)
    assert processes_in(run.parents[1]) == {}


def assert_stopped(done: Done, run: Path) -> None:
    assert done.status == 130, done.said
    assert (named := re.search(r"rlvr grpo --resume (\S+)", done.said)), done.said
    assert run.parents[1] / named[1] == run
    assert read_run(run).metadata["status"] == "interrupted"
    assert_readable(run)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_grpo_stopped_in_each_phase_goes_on_to_the_same_end(
    forks: Forks, long: Path, tmp_path: Path, number: signal.Signals
):
    run = tmp_path / "runs/cut"
    sampling = lambda: run.exists() and "sampler" in read_run(run).metadata  # noqa: E731
    stop_when(forks, run, sampling, number=number)
    assert read_rollouts(run).num_rows == 0

    evaluating = lambda: (run / "rollouts/eval-000000-0000.parquet").exists()  # noqa: E731
    stop_when(forks, run, evaluating, number=number)
    assert 0 < len(rows_of(run, phase="eval")) < 1000

    updating = lambda: ("eval", 0, "reward/mean") in metrics_of(run)  # noqa: E731
    stop_when(forks, run, updating, number=number)
    assert not (run / "checkpoints").exists()
    assert ("train", 0, "loss/nll") not in metrics_of(run)

    go_on(forks, run, LONG)
    assert_ended_as(long, run, checkpoints=(0,))


def test_a_checkpoint_is_saved_when_training_is_stopped_between_two_updates(forks: Forks, cut: Path):
    shutil.rmtree(cut / "checkpoints")
    done = go_on(forks, cut, GRPO, fault="update:2:term", status=130)
    assert f"{cut / 'checkpoints'} holds no checkpoint: training starts over from the stored rollouts" in done.said
    assert_stopped(done, cut)
    assert checkpoints_of(cut) == ["step-000001"]


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait(forks: Forks, tmp_path: Path):
    run = tmp_path / "runs/cut"
    grading = tmp_path / "grading"
    (tmp_path / "slow.py").write_text(
        "import pathlib, time\n"
        "def grade(response, truth):\n"
        f"    if not pathlib.Path({str(grading)!r}).exists():\n"
        f"        pathlib.Path({str(grading)!r}).touch()\n"
        "        time.sleep(3600)\n"
        "    return {'format_reward': 1.0, 'answer_reward': 0.0, 'reward': float(len(response) % 2)}\n"
    )
    command = [*GRPO, "--n-grpo-steps", "1", "--grader", str(tmp_path / "slow.py:grade"), "--grader-timeout", "7200"]
    call = forks.start(*command, "--run", "cut", cwd=tmp_path)
    while not grading.exists():
        assert forks.status(call) is None
        time.sleep(0.01)
    assert len(processes_in(tmp_path)) > 1, "the grader's process"
    forks.send(call, signal.SIGINT)
    time.sleep(0.2)
    forks.send(call, signal.SIGINT)
    assert_stopped(forks.wait(call), run)
    assert processes_in(tmp_path) == {}
    go_on(forks, run, command)
    assert read_run(run).metadata["status"] == "finished"


# What is not gone on with


def refused(forks: Forks, run: Path, *arguments: object, command: str = "grpo") -> str:
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"}
    done = forks.run(command, "--resume", run, *arguments, cwd=run.parents[1], status=1)
    assert {p: p.read_bytes() for p in run.rglob("*") if p.is_file() and p.name != ".lock"} == before
    return done.said


def test_other_options_are_named(forks: Forks, cut: Path):
    output = refused(forks, cut, "--learning-rate", 2e-3, "--group-size", 8, "--eval-examples", 8)
    assert "--learning-rate 0.0002, not 0.002" in output
    assert "--group-size 4, not 8" in output
    assert "--eval-examples" not in output  # is the same


@pytest.mark.parametrize("command", ["ei", "sft", "eval"])
def test_a_run_of_another_command_is_refused(forks: Forks, cut: Path, command: str):
    assert f"is a run of rlvr grpo, not of rlvr {command}" in refused(forks, cut, command=command)


def test_other_inputs_are_named(forks: Forks, tmp_path: Path):
    from rlvr_cli.models.identity import model_path

    model, data, held_out = tmp_path / "model", tmp_path / "data.jsonl", tmp_path / "held-out.jsonl"
    shutil.copytree(model_path(""), model)
    data.write_text("".join(f'{{"question": "{i} + 3?", "answer": "{i + 3}"}}\n' for i in range(40)))
    held_out.write_text("".join(f'{{"question": "{i} + 4?", "answer": "{i + 4}"}}\n' for i in range(8)))
    command = [
        *GRPO,
        "--dataset",
        "data.jsonl",
        "--eval-dataset",
        "held-out.jsonl",
        "--model",
        "model",
        "--n-grpo-steps",
        "1",
    ]
    run = tmp_path / "runs/cut"
    forks.run(*command, "--run", "cut", cwd=tmp_path, fault="update:3", status=-signal.SIGKILL)
    weights = bytearray((model / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    for path, changed, named in (
        (data, data.read_bytes().replace(b"7 + 3", b"8 + 3", 1), "its dataset fingerprint was"),
        (held_out, held_out.read_bytes().replace(b"7 + 4", b"8 + 4", 1), "its eval_dataset fingerprint was"),
        (model / "tokenizer_config.json", (model / "tokenizer_config.json").read_bytes() + b"\n", "its model tokenizer_sha256"),
        (model / "model.safetensors", bytes(weights), "its model sha256"),
    ):  # fmt: skip
        was = path.read_bytes()
        path.write_bytes(changed)
        output = refused(forks, run)
        assert named in output
        assert output.count(", now is ") == 1, "only what differs is named"
        path.write_bytes(was)


def test_two_writers_at_once_are_refused(forks: Forks, whole: Whole, cut: Path):
    call = forks.start("grpo", "--resume", cut, cwd=cut.parents[1])
    status = read_run(cut).metadata["updated_at"]
    while read_run(cut).metadata["updated_at"] == status:
        assert forks.status(call) is None
        time.sleep(0.005)
    os.kill(call.pid, signal.SIGSTOP)
    try:
        assert f"is being written by process {call.pid}" in refused(forks, cut)
    finally:
        os.kill(call.pid, signal.SIGCONT)
    assert forks.wait(call).status == 0
    assert_ended_as(whole.run, cut)


# Checkpoints that are damaged


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    match how:
        case "flipped":
            path.write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
        case "cut":
            path.write_bytes(data[: len(data) // 2])
        case "deleted":
            path.unlink()


@pytest.mark.slow  # by default: without any intact one, below
@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("model/model.safetensors", "flipped"),
        ("optimizer.safetensors", "cut"),
        ("tensors.safetensors", "deleted"),
    ],
)
def test_training_goes_on_from_the_checkpoint_before_a_damaged_one(
    forks: Forks, whole: Whole, cut: Path, file: str, how: str
):
    damage(cut / "checkpoints/step-000006" / file, how)
    done = go_on(forks, cut, GRPO)
    assert file in done.said
    assert "Training goes on from step-000004 instead." in done.said
    assert_ended_as(whole.run, cut)


def test_without_an_intact_checkpoint_training_starts_over_from_the_stored_rollouts(
    forks: Forks, whole: Whole, cut: Path
):
    stored = {p.name: (p.stat().st_ino, p.read_bytes()) for p in (cut / "rollouts").iterdir()}
    damage(cut / "checkpoints/step-000006/model/model.safetensors", "flipped")
    damage(cut / "checkpoints/step-000004/state.json", "deleted")
    shutil.copytree(whole.run / "checkpoints/step-000008", cut / "checkpoints/step-000008")
    done = go_on(forks, cut, GRPO)
    assert "step-000008 is a checkpoint of another run" in done.said
    assert done.said.count("training starts over from the stored rollouts") == 1
    now = {p.name: (p.stat().st_ino, p.read_bytes()) for p in (cut / "rollouts").iterdir()}
    assert stored.items() <= now.items()
    assert_ended_as(whole.run, cut)


# What ends a run early


def assert_newest_checkpoint_is_finite(run: Path) -> None:
    from safetensors.numpy import load_file

    newest = run / "checkpoints" / checkpoints_of(run)[-1]
    for file in ("model/model.safetensors", "optimizer.safetensors"):
        assert all(bool((abs(tensor) < float("inf")).all()) for tensor in load_file(newest / file).values())


def test_updates_that_are_not_finite_end_the_run_and_leave_finite_weights(forks: Forks, tmp_path: Path):
    run = tmp_path / "runs/r"
    options = shlex.split("--learning-rate 1e30 --epochs-per-rollout-batch 4 --eval-every 0 --checkpoint-every 1")
    done = go_on(forks, run, [*GRPO, *options], status=1)
    assert "3 updates in a row had a loss or gradient that is not finite" in done.said
    assert "They were skipped, so the checkpoints in runs/r/checkpoints hold finite weights" in done.said
    assert read_run(run).metadata["status"] == "failed"
    assert findings(run) == []
    assert_newest_checkpoint_is_finite(run)
    skipped = [v for k, v in sorted(metrics_of(run).items()) if k[2] == "update/skipped"]
    assert skipped[-3:] == [1.0] * 3
    assert 1.0 not in skipped[:-3]
    assert "not finite" in go_on(forks, run, GRPO, status=1).said


def test_weights_that_have_diverged_are_not_sampled_from(forks: Forks, tmp_path: Path):
    run = tmp_path / "runs/r"
    options = shlex.split(
        "--learning-rate 1e30 --epochs-per-rollout-batch 1 --train-batch-size 16 --checkpoint-every 1"
    )
    done = go_on(forks, run, [*GRPO, *options], status=1)
    assert "Its weights have diverged" in done.said
    assert findings(run) == []
    assert_newest_checkpoint_is_finite(run)


@pytest.mark.slow
def test_a_time_limit_leaves_time_for_the_last_evaluation(forks: Forks, tmp_path: Path):
    run = tmp_path / "runs/r"
    done = forks.run(*GRPO, "--n-grpo-steps", 100_000, "--time-limit", "1s", "--run", "r", cwd=tmp_path, status=0)
    assert "time limit 1s: stopping after" in done.said
    metadata = read_run(run).metadata
    assert metadata["status"] == "finished"
    assert metadata["updates"] < 400_000
    assert max(r["step"] for r in rows_of(run, phase="eval")) == metadata["updates"]
    assert len([r for r in rows_of(run, phase="eval") if r["step"] == metadata["updates"]]) == 8
    assert (run / "model/config.json").exists()


@pytest.mark.slow
def test_a_run_that_ran_out_of_time_goes_on_with_more(forks: Forks, whole: Whole, tmp_path: Path):
    run = tmp_path / "runs/r"
    forks.run(*GRPO, "--time-limit", "0.5s", "--run", "r", cwd=tmp_path, status=0)
    forks.run("grpo", "--resume", "r", "--time-limit", "1h", cwd=tmp_path, status=0)
    assert read_run(run).metadata["config"]["time_limit"] == "1h", "as long as it was to be at last"
    assert weights_of(run) == weights_of(whole.run)
    assert rows_of(run, phase="train") == rows_of(whole.run, phase="train")


def assert_disk_is_full(done: Done) -> None:
    *_, problem, hint = done.said.splitlines()
    assert problem.startswith("error: Cannot write ")
    assert problem.endswith(": No space left on device.")
    assert hint.startswith("  Free some space")


@dataclass
class Diverging:
    """A command whose second update ruins its policy, and a run of it without checkpoints that diverged, with what that said."""

    command: list[str]
    run: Path
    done: Done


@pytest.fixture(scope="module")
def diverging(forks: Forks, tmp_path_factory) -> Diverging:
    root = tmp_path_factory.mktemp("diverged")
    (root / "mine.py").write_text(
        "def grade(response, truth):\n"
        "    reward = float(response.endswith('</answer>'))\n"
        "    return {'format_reward': 1.0, 'answer_reward': reward, 'reward': reward}\n"
    )
    options = f"--learning-rate 0.3 --eval-every 1 --stop-when diverged --grader {root / 'mine.py'}:grade"
    command = [*GRPO, *shlex.split(options)]
    done = forks.run(*command, "--checkpoint-every", 0, "--run", "whole", cwd=root, status=0)
    return Diverging(command, root / "runs/whole", done)


def test_a_run_that_diverges_ends_as_such_and_so_does_one_that_was_killed(
    forks: Forks, diverging: Diverging, tmp_path: Path
):
    whole, said, cut = diverging.run, diverging.done.said, tmp_path / "runs/cut"
    metadata = read_run(whole).metadata
    assert metadata["status"] == "diverged"
    assert metadata["updates"] == 4
    assert metadata["diverged"] == {"updates": 4, "why": metadata["diverged"]["why"]}
    assert f"diverged       {metadata['diverged']['why']}" in said
    assert f"error: it diverged: {metadata['diverged']['why']}" in said
    assert max(r["step"] for r in rows_of(whole, phase="eval")) == 4
    go_on(forks, cut, diverging.command, fault="updated:3", status=-signal.SIGKILL)
    go_on(forks, cut, diverging.command)
    assert_ended_as(whole, cut)
    assert read_run(cut).metadata["diverged"] == metadata["diverged"]


def test_a_run_that_has_diverged_goes_on_only_if_it_is_told_to(forks: Forks, diverging: Diverging, tmp_path: Path):
    run = Path(shutil.copytree(diverging.run, tmp_path / "runs/r"))
    again = forks.run("grpo", "--resume", "r", cwd=tmp_path, status=0)
    assert "--resume runs/r --stop-when never" in again.said
    assert (read_run(run).metadata["status"], read_run(run).metadata["updates"]) == ("diverged", 4)
    forks.run("grpo", "--resume", "r", "--stop-when", "never", cwd=tmp_path, status=0)
    assert (read_run(run).metadata["status"], read_run(run).metadata["updates"]) == ("finished", 8)
    assert findings(run) == []
