"""Several trainers, as a user runs them: `--trainers 2` gives what one gives, is exact, and ends or goes on when one dies."""

import os
import random
import re
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from forks import Forks, processes_in
from killed import (
    DISTILL,
    DPO,
    EI,
    GRPO,
    KILLS,
    PACKED,
    PPO,
    SFT,
    assert_ended_as,
    assert_readable,
    begin_or_resume,
    checkpoints_of,
    go_on,
    metrics_of,
    rows_of,
    weights_of,
    write_pairs,
)
from marks import slow
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.process import HEARD
from rlvr_cli.runs.readers import metadata_bytes, read_run
from teachers import write_teacher

TWO = ("--trainers", "2")
GRPO_2 = [*GRPO, *TWO, "--kl-coef", "0.01"]
SHORT = [*GRPO, "--kl-coef", "0.01", "--n-grpo-steps", "1", "--eval-every", "0", "--eval-examples", "2"]
SHORT_2 = [*SHORT, *TWO]


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory) -> Path:
    """A run of two trainers that nothing disturbed."""
    root = tmp_path_factory.mktemp("whole")
    forks.run(*GRPO_2, "--run", "whole", cwd=root, status=0)
    return root / "runs/whole"


@pytest.fixture(scope="module")
def short(forks: Forks, tmp_path_factory) -> Path:
    """One of a single step."""
    root = tmp_path_factory.mktemp("short")
    forks.run(*SHORT_2, "--run", "short", cwd=root, status=0)
    return root / "runs/short"


def assert_same_but_for_rounding(run: Path, other: Path) -> None:
    """What two runs have in common whose sums were added up in another order; later policies sample other tokens."""
    for phase in ("eval", "train"):
        for a, b in zip(rows_of(run, phase=phase), rows_of(other, phase=phase), strict=True):
            if a["step"] == 0:
                assert a["response_ids"] == b["response_ids"]
                assert a["sampled_logprobs"] == pytest.approx(b["sampled_logprobs"], abs=1e-5)
    ours, theirs = metrics_of(run), metrics_of(other)
    assert ours.keys() == theirs.keys()
    for key, value in ours.items():
        if key[1] == 0 and key[2] != "step/seconds":
            assert theirs[key] == pytest.approx(value, rel=1e-3, abs=1e-5, nan_ok=True), key


def divisions(run: Path) -> list[tuple[int, int, bool]]:
    """From which update on how many trainers worked, and whether on shards."""
    return [(d["from_update"], d["trainers"], d["fsdp"]) for d in read_run(run).metadata["divisions"]]


def test_two_trainers_do_what_one_does(forks: Forks, short: Path, tmp_path: Path):
    forks.run(*SHORT, "--run", "one", cwd=tmp_path, status=0)
    assert_same_but_for_rounding(short, tmp_path / "runs/one")
    assert (divisions(short), divisions(tmp_path / "runs/one")) == ([(0, 2, False)], [(0, 1, False)])
    checked = forks.run("check", str(short), "--replay", "2", cwd=tmp_path, status=0)
    assert "to 1e-6" in checked.said


@pytest.mark.slow
def test_two_trainers_of_an_adapter_do_what_one_does(forks: Forks, tmp_path: Path):
    adapter = [*GRPO, "--lora-rank", "4", "--kl-coef", "0.01"]
    for name, more in (("one", ()), ("two", TWO)):
        forks.run(*adapter, *more, "--run", name, cwd=tmp_path, status=0)
    run = tmp_path / "runs/two"
    assert_same_but_for_rounding(run, tmp_path / "runs/one")
    assert (run / "model/adapter_model.safetensors").is_file()
    assert divisions(run) == [(0, 2, False)]
    assert "to 1e-6" in forks.run("check", str(run), "--replay", "2", cwd=tmp_path, status=0).said


@pytest.mark.slow
def test_two_runs_have_the_same_bytes(forks: Forks, whole: Path, tmp_path: Path):
    forks.run(*GRPO_2, "--run", "again", cwd=tmp_path, status=0)
    assert divisions(whole) == [(0, 2, False)]
    assert weights_of(tmp_path / "runs/again") == weights_of(whole)
    assert rows_of(tmp_path / "runs/again", phase="train") == rows_of(whole, phase="train")


# What is killed. `trainer1.POINT` is a point of the other trainer.


def killed_and_gone_on(forks: Forks, whole: Path, root: Path, command: list[str], fault: str) -> None:
    run = root / "runs/cut"
    others = fault.startswith("trainer1.")
    done = go_on(forks, run, command, fault=fault, status=1 if others else -signal.SIGKILL)
    if others:
        assert "Trainer 1 ended with status -9" in done.err
    assert_nothing_runs_in(root)
    assert_readable(run)
    go_on(forks, run, command)
    assert_ended_as(whole, run)


def test_a_trainer_killed_in_a_backward_pass_ends_the_run_which_goes_on_to_the_same_bytes(
    forks: Forks, short: Path, tmp_path: Path
):
    """After the first checkpoint, which has moments."""
    killed_and_gone_on(forks, short, tmp_path, SHORT_2, "trainer1.backward:3")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault",
    [
        "trainer1.backward:5",
        "update:3",
        "checkpoint.rename:2",
        "trainer1.sampled:3",
        "trainer1.joined:1",
        "trainer1.announced:1",
    ],
)
def test_a_killed_trainer_ends_the_run_which_goes_on_to_the_same_bytes(
    forks: Forks, whole: Path, tmp_path: Path, fault: str
):
    killed_and_gone_on(forks, whole, tmp_path, GRPO_2, fault)


def assert_nothing_runs_in(folder: Path) -> None:
    """A trainer dies with its parent: the kernel's signal takes a moment."""
    until = time.monotonic() + 10
    while (left := processes_in(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == {}


@pytest.mark.slow
def test_a_signal_ends_all_trainers_and_the_run_goes_on_to_the_same_bytes(forks: Forks, whole: Path, tmp_path: Path):
    run = tmp_path / "runs/cut"
    for fault in ("backward:5:int", "sampled:10:term"):
        go_on(forks, run, GRPO_2, fault=fault, status=130)
        assert_nothing_runs_in(tmp_path)
    go_on(forks, run, GRPO_2)
    assert_ended_as(whole, run)


def stopped_in(folder: Path) -> list[int]:
    """The processes that wait for SIGCONT."""
    found = []
    for pid in processes_in(folder):
        with suppress(OSError):
            if Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].startswith("T"):
                found.append(pid)
    return found


@pytest.mark.parametrize(
    ("command", "point", "presses", "saved", "undisturbed"),
    [
        (SHORT_2, "sampled:1", 1, [], "short"),
        slow([*GRPO_2, "--checkpoint-every", "3"], "sampled:20", 1, ["step-000003", "step-000004"], "whole"),
        slow(SHORT_2, "backward:3", 2, ["step-000002"], "short"),
        slow([*GRPO_2, "--fsdp"], "sampled:1", 2, [], "divided"),
        slow([*SHORT_2, "--trainers", "3"], "sampled:1", 1, [], ""),
    ],
)
def test_ctrl_c_is_heard_while_another_trainer_is_waited_for(
    forks: Forks,
    request,
    tmp_path: Path,
    command: list[str],
    point: str,
    presses: int,
    saved: list[str],
    undisturbed: str,
):
    """While others sample, the first one saves and ends; within an update, and where they have a part of the weights, the second ends."""
    run = tmp_path / "runs/cut"
    call = forks.start(*begin_or_resume(run, command), cwd=tmp_path, fault=f"trainer1.{point}:stop")
    heard, until = 0, time.monotonic() + 30
    while forks.status(call) is None and time.monotonic() < until:
        time.sleep(0.02)
        if heard < presses and stopped_in(tmp_path) and (not heard or HEARD.decode() in call.err.read_text()):
            forks.send(call, signal.SIGINT)
            heard += 1
    done = forks.wait(call, limit=0)
    assert (done.status, done.err.count(HEARD.decode())) == (130, 1), done.said
    assert "Traceback" not in done.err
    assert "lost the others" not in done.err
    assert_nothing_runs_in(tmp_path)
    assert checkpoints_of(run) == saved
    if undisturbed:
        go_on(forks, run, command)
        assert_ended_as(request.getfixturevalue(undisturbed), run)


def second_of(folder: Path) -> int:
    """The process of the second trainer."""
    (pid,) = [pid for pid, command in processes_in(folder).items() if "parallel.follow" in command]
    return pid


@pytest.mark.slow
def test_a_trainer_that_is_stopped_is_named_and_the_run_ends_the_same_when_it_goes_on(
    forks: Forks, whole: Path, tmp_path: Path
):
    """It could be hung, or its machine gone: seen on the terminal, and from outside."""
    command = [*GRPO_2, "--stall-minutes", "0.05", "--run", "cut"]
    call = forks.start(*command, cwd=tmp_path, fault="trainer1.backward:5:stop")
    notes: list[str] = []
    while not notes and forks.status(call) is None:
        time.sleep(0.1)
        lines = call.err.read_text().splitlines() if call.err.is_file() else []
        notes = [line for line in lines if "no sign of life" in line]
    pid, note = second_of(tmp_path), notes[0]
    assert note.startswith("note: no progress for ")
    assert ": update 5 of 8, micro-batch 1, since 20" in note
    assert note.endswith(f"; no sign of life from trainer 1 (process {pid})")
    query = "SELECT activity, now()::TIMESTAMP - last_progress > INTERVAL 3 SECOND FROM runs"
    asked = forks.run("analyze", query, "cut", "--format", "csv", cwd=tmp_path, status=0)
    assert asked.out.splitlines()[1:] == ['"update 5 of 8, micro-batch 1",true']
    os.kill(pid, signal.SIGCONT)
    done = forks.wait(call)
    assert done.status == 0, done.said
    assert_ended_as(whole, tmp_path / "runs/cut")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("point", "where"),
    [
        ("backward:5", r"in an update; trainer 1 \(process \d+\) gave no sign of life: "),
        ("announced:1", "at their start or end: "),  # before it gave the first one
    ],
)
def test_a_trainer_that_stays_stopped_ends_the_run_in_time(
    forks: Forks, whole: Path, tmp_path: Path, point: str, where: str
):
    """In 8 seconds here instead of half an hour."""
    short = "from datetime import timedelta; from rlvr_cli.training.parallel import ranks; ranks.WITHIN_AN_UPDATE = timedelta(seconds=8)"
    done = forks.run(*GRPO_2, "--run", "cut", cwd=tmp_path, fault=f"trainer1.{point}:stop", before=short, status=1)
    assert re.search("The trainers lost each other " + where, done.err), done.err
    assert_nothing_runs_in(tmp_path)
    go_on(forks, tmp_path / "runs/cut", GRPO_2)
    assert_ended_as(whole, tmp_path / "runs/cut")


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_trainers_and_says_so(forks: Forks, tmp_path: Path):
    run = tmp_path / "runs/cut"
    go_on(forks, run, GRPO_2, fault="update:6", status=-signal.SIGKILL)
    first = divisions(run)
    words = ["grpo", "--resume", str(run), "--trainers"]
    done = forks.run(*words, "1", cwd=tmp_path, fault="update:3", status=-signal.SIGKILL)
    assert "with 1 trainer instead of 2 trainers" in done.err
    done = forks.run(*words, "2", cwd=tmp_path, status=0)
    assert "with 2 trainers, with copies of the weights instead of 1 trainer" in done.err
    assert read_run(run).metadata["status"] == "finished"
    found = divisions(run)
    assert first == [(0, 2, False)]
    assert [(trainers, fsdp) for _, trainers, fsdp in found] == [(2, False), (1, False), (2, False)]
    assert [update for update, *_ in found] == sorted({update for update, *_ in found})
    done = forks.run(*words, "1", cwd=tmp_path, status=0)
    assert "instead of" not in done.err, "nothing is left to do"
    assert divisions(run) == found
    assert_readable(run)


@pytest.mark.parametrize("kills", KILLS)
@pytest.mark.parametrize("victim", ["first", "second"])
def test_trainers_killed_at_random_moments_end_the_same(
    forks: Forks, whole: Path, tmp_path: Path, victim: str, kills: int
):
    """After each kill the run goes on, and is killed again somewhere in what is left."""
    random_moments = random.Random(victim)
    run = tmp_path / "runs/cut"
    for _ in range(kills):
        call = forks.start(*begin_or_resume(run, GRPO_2), cwd=tmp_path)
        time.sleep(random_moments.uniform(0.5, 8))
        others = [pid for pid, command in processes_in(tmp_path).items() if "parallel.follow" in command]
        with suppress(ProcessLookupError):
            os.kill(others[0] if victim == "second" and others else call.pid, signal.SIGKILL)
        done = forks.wait(call)
        assert not done.hung
        assert "Traceback" not in done.said, done.said
        assert_nothing_runs_in(tmp_path)
        assert_readable(run)
        if done.status == 0 or (run.exists() and read_run(run).metadata["status"] == "finished"):
            assert_ended_as(whole, run)
            shutil.rmtree(run)
    go_on(forks, run, GRPO_2)
    assert_ended_as(whole, run)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(SFT, marks=pytest.mark.slow),
        pytest.param([*PACKED, "--train-batch-size", "4"], marks=pytest.mark.slow),
        pytest.param(DPO, marks=pytest.mark.slow),
        pytest.param(PPO, marks=pytest.mark.slow),
        pytest.param(EI, marks=pytest.mark.slow),
        pytest.param(DISTILL, marks=pytest.mark.slow),
        pytest.param([*DISTILL, "--divergence", "sampled"], marks=pytest.mark.slow),
    ],
    ids=["sft", "packed", "dpo", "ppo", "ei", "distill", "sampled"],
)
def test_the_other_commands_too(forks: Forks, tmp_path: Path, command: list[str]):
    write_pairs(tmp_path)
    write_teacher(tmp_path / "teacher", of=builtin_model_path())
    forks.run(*command, "--run", "one", cwd=tmp_path, status=0)
    forks.run(*command, *TWO, "--run", "two", cwd=tmp_path, status=0)
    assert_same_but_for_rounding(tmp_path / "runs/one", tmp_path / "runs/two")


@pytest.mark.slow
def test_a_loss_of_ones_own_and_sampling_meanwhile(forks: Forks, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "def loss(inputs):\n    return -inputs.advantages * (inputs.log_probs - inputs.old_log_probs).exp()\n"
    )
    command = [*GRPO, "--loss-type", "mine.py:loss", "--async-steps", "1"]
    forks.run(*command, "--run", "one", cwd=tmp_path, status=0)
    forks.run(*command, *TWO, "--run", "two", cwd=tmp_path, status=0)
    assert_same_but_for_rounding(tmp_path / "runs/one", tmp_path / "runs/two")


def test_an_error_of_another_trainer_is_told(forks: Forks, tmp_path: Path):
    """The file of the loss is there for the first trainer, and gone when the second one reads it."""
    (tmp_path / "mine.py").write_text(
        "import os, sys\n"
        "if 'rlvr_cli.training.parallel.follow' in ' '.join(sys.orig_argv):\n    raise OSError('not on this machine')\n"
        "def loss(inputs):\n    return -inputs.advantages * inputs.log_probs\n"
    )
    done = forks.run(*GRPO, *TWO, "--loss-type", "mine.py:loss", cwd=tmp_path, status=1)
    assert "error: trainer 1: mine.py could not be loaded: OSError: not on this machine" in done.err
    assert "Trainer 1 ended with status 1" in done.err
    assert_nothing_runs_in(tmp_path)


@pytest.mark.slow
def test_trainers_that_cannot_connect_say_why(forks: Forks, tmp_path: Path):
    nowhere = {"GLOO_SOCKET_IFNAME": "nowhere"}
    done = forks.run(*GRPO, *TWO, "--run", "r", cwd=tmp_path, environment=nowhere, status=1)
    assert re.search("trainer 1 lost the others in connecting: .*Unable to find address for: nowhere", done.err), (
        done.err
    )
    assert "Trainer 1 ended with status 1" in done.err
    assert_nothing_runs_in(tmp_path)


# Divided weights

GRPO_FSDP = [*GRPO_2, "--fsdp"]


@pytest.fixture(scope="module")
def divided(forks: Forks, tmp_path_factory) -> Path:
    """A run of two trainers with a shard of the weights each, that nothing disturbed."""
    root = tmp_path_factory.mktemp("divided")
    forks.run(*GRPO_FSDP, "--run", "whole", cwd=root, status=0)
    return root / "runs/whole"


@pytest.mark.slow
def test_two_shards_do_what_two_copies_do(forks: Forks, whole: Path, divided: Path, tmp_path: Path):
    assert_same_but_for_rounding(divided, whole)
    assert divisions(divided) == [(0, 2, True)]
    assert len(weights_of(divided)) == len(weights_of(whole)), "shards are saved as one model"
    assert "to 1e-6" in forks.run("check", str(divided), "--replay", "2", cwd=tmp_path, status=0).said


@pytest.mark.slow
@pytest.mark.parametrize("command", [DISTILL, [*DISTILL, "--divergence", "sampled"]], ids=["full", "sampled"])
def test_a_student_in_shards_has_a_whole_teacher(forks: Forks, tmp_path: Path, command: list[str]):
    write_teacher(tmp_path / "teacher", of=builtin_model_path())
    forks.run(*command, "--run", "one", cwd=tmp_path, status=0)
    forks.run(*command, *TWO, "--fsdp", "--run", "two", cwd=tmp_path, status=0)
    assert_same_but_for_rounding(tmp_path / "runs/one", tmp_path / "runs/two")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["backward:7:int", "trainer1.backward:5", "update:5"])
def test_shards_go_on_to_the_same_bytes(forks: Forks, divided: Path, tmp_path: Path, fault: str):
    """A signal arrives in the middle of an update, in which all take part: all abandon it, and save what was before."""
    run = tmp_path / "runs/cut"
    status = {"backward:7:int": 130, "trainer1.backward:5": 1, "update:5": -signal.SIGKILL}[fault]
    go_on(forks, run, GRPO_FSDP, fault=fault, status=status)
    assert_nothing_runs_in(tmp_path)
    assert_readable(run)
    go_on(forks, run, GRPO_FSDP)
    assert_ended_as(divided, run)


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(GRPO_FSDP, ()), (GRPO_2, ("--fsdp",))], ids=["whole", "divided"])
def test_a_checkpoint_of_shards_is_one_of_copies(
    forks: Forks, tmp_path: Path, before: list[str], after: tuple[str, ...]
):
    run = tmp_path / "runs/cut"
    go_on(forks, run, before, fault="update:6", status=-signal.SIGKILL)
    how = ["--fsdp"] if after else ["--no-fsdp"]
    done = forks.run("grpo", "--resume", str(run), *how, cwd=tmp_path, status=0)
    assert f"it goes on with 2 trainers, with {'shards' if after else 'copies'} of the weights" in done.err
    assert_readable(run)


@pytest.mark.slow
@pytest.mark.parametrize("command", [SFT, EI, [*GRPO, "--param-dtype", "bfloat16", "--optimizer", "adamw_kahan"]])
def test_shards_of_other_commands_and_precisions(forks: Forks, tmp_path: Path, command: list[str]):
    forks.run(*command, *TWO, "--run", "one", cwd=tmp_path, status=0)
    forks.run(*command, *TWO, "--fsdp", "--run", "two", cwd=tmp_path, status=0)
    if "bfloat16" not in command:
        assert_same_but_for_rounding(tmp_path / "runs/one", tmp_path / "runs/two")
    assert_readable(tmp_path / "runs/two")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--fsdp", "Add --trainers N"),
        ("--fsdp --trainers 2 --lora-rank 4", "--lora-rank and --fsdp exclude each other"),
        ("--fsdp --trainers 2 --async-steps 1", "--async-steps and --fsdp exclude each other"),
        ("--fsdp --trainers 2 --optimizer adamw_8bit", "use --optimizer adamw_kahan"),
    ],
)
def test_what_shards_do_not_go_with(forks: Forks, tmp_path: Path, options: str, said: str):
    assert said in forks.run(*GRPO, *options.split(), cwd=tmp_path, status=2).err


# Several machines, which here are one


@pytest.mark.slow
def test_a_run_of_the_options_for_several_machines_goes_on(forks: Forks, whole: Path, tmp_path: Path):
    """They were `--nodes`, `--rendezvous` and `--node-rank` until there was `--cluster`."""
    run = tmp_path / "runs/cut"
    go_on(forks, run, GRPO_2, fault="update:3", status=-signal.SIGKILL)
    stored = read_run(run).metadata
    stored["config"] |= {"nodes": 2, "rendezvous": "10.0.0.1:29500", "node_rank": 0}
    (run / "run.json").write_bytes(metadata_bytes(stored))
    go_on(forks, run, GRPO_2)
    assert_ended_as(whole, run)


@pytest.mark.parametrize("option", ["--nodes", "--rendezvous", "--node-rank"])
def test_the_options_for_several_machines_name_cluster(forks: Forks, tmp_path: Path, option: str):
    done = forks.run(*GRPO, option, "2", cwd=tmp_path, status=2)
    assert "--cluster" in done.err
