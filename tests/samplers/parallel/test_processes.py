"""Engines in several processes as one sampler: the samples of one engine, also when processes die; and runs that use them."""

import os
import random
import shlex
import signal
import time
from contextlib import suppress
from pathlib import Path
from unittest import TestCase

import pytest
import torch

from forks import Forks, processes_in
from killed import (
    DPO,
    EI,
    GRPO,
    KILLS,
    ONLINE_DPO,
    SFT,
    assert_ended_as,
    assert_readable,
    begin_or_resume,
    rows_of,
    weights_of,
    write_pairs,
)
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Policy
from rlvr_cli.runs.readers import read_run
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.parallel.processes import SamplingProcesses
from rlvr_cli.types import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("forked")
PARAMS = SamplingParams(max_tokens=6, min_tokens=0, stop=())
REQUESTS = [Request(f"What is {i} + 30?", tuple(range(10 * i, 10 * i + 3))) for i in range(4)]


@pytest.fixture
def start(tiny_model_dir):
    opened = []

    def start(number=2, **given):
        options = {
            "model": str(tiny_model_dir), "param_dtype": "float32", "compute_dtype": "auto", "gpu_memory_utilization": 0.3,
            "max_batch_size": 1,
        } | given  # fmt: skip
        opened.append(SamplingProcesses("transformers", options, devices=["cpu"] * number))
        return opened[-1]

    yield start
    for there in opened:
        pids = pids_of(there)
        there.close()
        there.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids), "no process is left over"


@pytest.fixture
def policy(tiny_model_dir) -> Policy:
    return load_policy(tiny_model_dir)


def pids_of(there: SamplingProcesses) -> list[int]:
    return [process.worker.pid for process in there.members.values()]


def moved(policy: Policy) -> Policy:
    with torch.no_grad():
        for parameter in policy.trainable_parameters().values():
            parameter.mul_(1.1)
    return policy


def answers(sampler, requests=REQUESTS) -> list:
    return sorted(sampler.sample(requests, PARAMS), key=lambda c: (c.request_index, c.sample_index))


def here(policy: Policy) -> list:
    return answers(TransformersSampler(policy, max_batch_size=1))


def test_they_sample_what_one_engine_does_from_the_weights_that_they_get(start, policy):
    there = start()
    assert (there.engine, there.seeding, there.notes, there.policy_version) == ("transformers", "per-request", [], 0)
    assert there.context_length == policy.context_length
    assert answers(there) == here(policy)
    there.load_weights(moved(policy), 4)
    assert there.policy_version == 4
    assert answers(there) == here(policy)
    assert {process.policy_version for process in there.members.values()} == {4}
    there.sleep()


def test_one_that_dies_is_started_again_with_the_current_weights(start, policy):
    there = start()
    there.load_weights(moved(policy), 1)
    whole = here(policy)
    first, second = pids_of(there)
    found = []
    with TestCase().assertLogs(level="WARNING") as logged:
        for completion in there.sample(REQUESTS, PARAMS):
            if not found:
                os.kill(second, signal.SIGKILL)
            found.append(completion)
        assert sorted(found, key=lambda c: (c.request_index, c.sample_index)) == whole
        if len(there.members) == 2:  # it had sent everything before it died
            assert answers(there) == whole
    said = "The sampler 1 (cpu) died, and is started again: The sampling process ended with status -9."
    assert any(said in line for line in logged.output)
    assert answers(there) == whole
    assert sorted(there.members) == ["0 (cpu)", "1 (cpu)"]
    assert pids_of(there)[0] == first
    assert second not in pids_of(there)
    assert {process.policy_version for process in there.members.values()} == {1}


def test_one_that_died_meanwhile_is_started_again(start, policy):
    there = start()
    there.load_weights(policy, 0)
    os.kill(pids_of(there)[0], signal.SIGKILL)
    there.members["0 (cpu)"].worker._process.wait()
    assert answers(there) == here(policy)
    assert len(there.members) == 2
    os.kill(pids_of(there)[0], signal.SIGKILL)
    there.load_weights(moved(policy), 1)
    assert answers(there) == here(policy)
    assert [process.policy_version for process in there.members.values()] == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "left"),
    [("sampler1.load:2", 2), ("sampler1.load:1", 1), ("sampler0.completion:3", 2), ("sampler1.completion:1", 2)],
)
def test_one_that_dies_at_a_bad_moment(start, policy, monkeypatch, fault, left):
    """One that dies when it gets the weights dies so again when it is started again: it is then left out."""
    monkeypatch.setenv("RLVR_FAULT", fault)
    there = start()
    for version in range(3):
        there.load_weights(moved(policy), version)
        assert answers(there) == here(policy)
    answers(there)
    assert len(there.members) + len(there._started_again) == left
    assert any("in vain" in note for note in there.notes) is (left == 1)


def test_without_one_left_the_error_is_that_of_the_last(start):
    there = start()
    assert there.notes == []
    for pid in pids_of(there):
        os.kill(pid, signal.SIGKILL)
    # One that is found dead before the other dies is started again, and then answers.
    for member in there.members.values():
        member.worker._process.wait()
    with pytest.raises(RlvrError, match="ended with status -9") as raised:
        answers(there)
    assert "resume" in raised.value.hint


def test_an_error_of_the_engine_is_raised_and_nothing_is_started_again(start):
    there = start()
    pids = pids_of(there)
    with pytest.raises(RlvrError, match="the model's context holds 512"):
        list(there.sample(REQUESTS, SamplingParams(max_tokens=510)))
    assert pids_of(there) == pids
    with pytest.raises(RlvrError, match="Unknown parameter precision 'float7'"):
        _ = start(param_dtype="float7").seeding


def test_weights_that_did_not_arrive_are_detected(start, policy):
    there = start()
    there.load_weights(policy, 0)
    hook = policy.model.lm_head.register_forward_hook(lambda module, given, logits: logits * 1.5)
    with pytest.raises(RlvrError, match="does not serve the model's weights"):
        there.load_weights(policy, 1)
    hook.remove()
    assert there.policy_version == 0


def test_closing_a_call_cancels_it(start, policy):
    there = start()
    long = SamplingParams(max_tokens=60, min_tokens=60, stop=())
    completions = there.sample([Request(f"What is {i}?", tuple(range(500))) for i in range(4)], long)
    next(completions)
    completions.close()
    assert answers(there) == here(policy), "2,000 samples of 60 tokens would take longer than this test may"


# Through the command line

ALONE = ("--max-batch-size", "1")  # then the last bits of a sample depend on nothing else
EVAL = shlex.split("eval --dataset arithmetic:6 --num-samples 2 --sampling-max-tokens 8")
TWO = ("--samplers", "2")
FEW = shlex.split("--sampling-max-tokens 8 --eval-examples 4 --eval-every 2")
RUN = [*GRPO, *ALONE, *shlex.split("--n-grpo-steps 2 --eval-every 1 --checkpoint-every 1 --sampling-max-tokens 12")]


@pytest.fixture(scope="module")
def whole(forks: Forks, tmp_path_factory) -> Path:
    """A run that samples in its own process."""
    root = tmp_path_factory.mktemp("whole")
    forks.run(*RUN, "--run", "whole", cwd=root, status=0)
    return root / "runs/whole"


def assert_same_bytes(run: Path, whole: Path) -> None:
    assert weights_of(run) == weights_of(whole)
    for phase in ("train", "eval"):
        assert rows_of(run, phase=phase) == rows_of(whole, phase=phase)


def assert_nothing_runs_in(folder: Path) -> None:
    until = time.monotonic() + 10
    while (left := processes_in(folder)) and time.monotonic() < until:
        time.sleep(0.05)
    assert left == {}


def test_an_evaluation_has_the_same_rows_also_when_a_process_dies(forks: Forks, tmp_path: Path):
    forks.run(*EVAL, *ALONE, "--run", "one", cwd=tmp_path, status=0)
    done = forks.run(*EVAL, *ALONE, *TWO, "--run", "two", cwd=tmp_path, fault="sampler1.completion:2", status=0)
    assert "devices  cpu for 2 processes" in done.err
    assert "The sampler 1 (cpu) died" in done.err
    assert rows_of(tmp_path / "runs/two", phase="eval") == rows_of(tmp_path / "runs/one", phase="eval")
    assert_nothing_runs_in(tmp_path)


@pytest.mark.slow
def test_a_run_has_the_same_bytes_also_when_processes_die(forks: Forks, whole: Path, tmp_path: Path):
    done = forks.run(*RUN, *TWO, "--run", "two", cwd=tmp_path, fault="sampler1.completion:7", status=0)
    assert "cpu, for training and transformers in 2 processes" in done.err
    assert "The sampler 1 (cpu) died" in done.err
    assert_same_bytes(tmp_path / "runs/two", whole)
    assert_ended_as(whole, tmp_path / "runs/two")
    assert_nothing_runs_in(tmp_path)


@pytest.mark.slow
def test_dpo_samples_its_pairs_with_processes(forks: Forks, tmp_path: Path):
    forks.run(*ONLINE_DPO, *ALONE, "--run", "one", cwd=tmp_path, status=0)
    done = forks.run(*ONLINE_DPO, *ALONE, *TWO, "--run", "two", cwd=tmp_path, status=0)
    assert "cpu, for training and transformers in 2 processes" in done.err
    assert_same_bytes(tmp_path / "runs/two", tmp_path / "runs/one")


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        [*SFT, *shlex.split("--sft-epochs 1 --dataset arithmetic:24")],
        [*DPO, "--dpo-epochs", "1"],
    ],
    ids=["sft", "dpo"],
)
def test_what_trains_on_given_responses_evaluates_with_processes(forks: Forks, tmp_path: Path, command: list[str]):
    write_pairs(tmp_path)
    command = [*command, *ALONE, *FEW]
    forks.run(*command, "--run", "one", cwd=tmp_path, status=0)
    done = forks.run(*command, *TWO, "--run", "two", cwd=tmp_path, fault="sampler1.completion:3", status=0)
    assert "cpu, for training and transformers in 2 processes" in done.err
    assert "The sampler 1 (cpu) died" in done.err
    one, two = (tmp_path / "runs" / name for name in ("one", "two"))
    assert_same_bytes(two, one)
    assert {row["policy_version"] for row in rows_of(two, phase="eval")} == {
        row["step"] for row in rows_of(one, phase="eval")
    }
    assert read_run(two).metadata["sampler"]["engine"] == "transformers"
    assert_nothing_runs_in(tmp_path)


@pytest.mark.slow
def test_with_several_trainers(forks: Forks, tmp_path: Path):
    command = [*RUN, "--trainers", "2"]
    forks.run(*command, "--run", "one", cwd=tmp_path, status=0)
    done = forks.run(*command, *TWO, "--run", "two", cwd=tmp_path, fault="sampler0.load:2", status=0)
    assert "The sampler 0 (cpu) died" in done.err
    assert_same_bytes(tmp_path / "runs/two", tmp_path / "runs/one")


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--lora-rank 4", "--param-dtype bfloat16 --optimizer adamw_kahan"])
def test_expert_iteration_adapters_and_half_precision(forks: Forks, tmp_path: Path, more: str):
    command = [*EI, *ALONE, *more.split()]
    forks.run(*command, "--run", "one", cwd=tmp_path, status=0)
    forks.run(*command, *TWO, "--run", "two", cwd=tmp_path, fault="sampler1.completion:20", status=0)
    assert_same_bytes(tmp_path / "runs/two", tmp_path / "runs/one")


@pytest.mark.parametrize("kills", KILLS)
def test_a_process_killed_at_random_moments_changes_nothing(forks: Forks, whole: Path, tmp_path: Path, kills: int):
    """Where all died at once the run ends with an error, and goes on."""
    moments, killed, finished = random.Random(0), 0, 0
    while killed < kills or not finished:
        run = tmp_path / f"runs/run-{finished}"
        call = forks.start(*begin_or_resume(run, [*RUN, *TWO]), cwd=tmp_path)
        while forks.status(call) is None:
            time.sleep(moments.uniform(0.2, 2))
            there = [pid for pid, command in processes_in(tmp_path).items() if "parallel.serve" in command]
            if there and killed < kills:
                with suppress(ProcessLookupError):
                    os.kill(moments.choice(there), signal.SIGKILL)
                    killed += 1
        done = forks.wait(call)
        assert not done.hung
        assert "Traceback" not in done.said, done.said
        assert_nothing_runs_in(tmp_path)
        assert_readable(run)
        if done.status == 0:
            assert_same_bytes(run, whole)
            assert_ended_as(whole, run)
            finished += 1
        else:
            assert "ended with status -9" in done.err


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["update:3", "sampled:30:term", "checkpoint.rename:1"])
def test_the_processes_die_with_the_run_which_goes_on(forks: Forks, whole: Path, tmp_path: Path, fault: str):
    run = tmp_path / "runs/cut"
    command = [*RUN, *TWO]
    forks.run(*begin_or_resume(run, command), cwd=tmp_path, fault=fault, status=130 if "term" in fault else -9)
    assert_nothing_runs_in(tmp_path)
    forks.run("grpo", "--resume", str(run), "--samplers", "3", cwd=tmp_path, status=0)
    assert_ended_as(whole, run)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("grpo --samplers 2 --async-steps 1", "--samplers 2 and --async-steps 1 cannot be combined"),
        ("grpo --samplers 2 --sampler-urls http://a:8000", "names servers that run"),
        (
            "eval --samplers 2 --base-url http://localhost:1/v1 --model m",
            "--base-url and --samplers cannot be combined",
        ),
        ("eval --samplers 0", "--samplers"),
    ],
)
def test_samplers_that_cannot_be(forks: Forks, tmp_path: Path, command: str, said: str):
    assert said in forks.run(*command.split(), cwd=tmp_path, status=2).err
    assert list(tmp_path.iterdir()) == [], "nothing was begun"
