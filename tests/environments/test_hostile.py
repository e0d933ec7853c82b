"""Programs that attack, run by a policy through the tool `python`: each costs its own episode."""

import os
from contextlib import closing

import pytest

from hostile_programs import PROGRAMS, a_target, descendants, hostile
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.environments.open import EnvironmentSpec
from rlvr_cli.environments.pool import EnvironmentPool
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.process import StopRequest
from rlvr_cli.rollouts.collect import log_generations
from rlvr_cli.runs.check import check_run
from rlvr_cli.runs.readers import read_rollouts
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.samplers.episodes.sampler import EpisodeSampler
from rlvr_cli.sandbox.layers import LAYERS, available_layers
from rlvr_cli.types import Completion, Example, SamplingParams

ANSWER = " </think> <answer> 3901 </answer>"
HONEST = "print(47*83)"
complete = pytest.mark.skipif(available_layers() != LAYERS, reason="the machine lacks a layer of the sandbox")


class Attacker:
    """A policy that writes the program that its prompt names, and then answers."""

    engine, seeding, notes, policy_version, worked_seconds, arrived = "attacker", "per-request", (), 0, None, ()
    context_length = None

    def __init__(self, tokenizer, programs):
        self._tokenizer, self._programs = tokenizer, programs

    def sample(self, requests, params, *, more=None):
        for index, request in enumerate(requests):
            text = ANSWER if request.after else f"<python>{self._programs[request.prompt]}</python>"
            ids = tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])
            stop = "</answer>" if request.after else "</python>"
            prompt = request.prompt_ids or tuple(self._tokenizer(request.prompt)["input_ids"])
            yield Completion(
                index, 0, text, prompt, ids, (-0.5,) * len(ids), len(prompt), len(ids), "stop", stop, 1.0
            )  # fmt: skip


def attacked(tmp_path, tokenizer, names):
    """The rows of an evaluation in which every other episode runs one of these programs, and the others an honest one."""
    folder = tmp_path / "target"
    folder.mkdir()
    before = descendants(os.getpid())
    with a_target(folder) as target:
        shown = "\nprint(globals().get('points'))"  # what a program got
        programs = {name: hostile(name, **target) + shown for name in names}
        programs |= {f"honest {name}": HONEST for name in names}
        order = [name for pair in zip(names, (f"honest {name}" for name in names), strict=True) for name in pair]
        spec = EnvironmentSpec("python")
        with (
            closing(EnvironmentPool(spec, workers=4, timeout=120.0)) as pool,
            GraderPool("r1_zero", workers=1) as grader,
            StopRequest() as stop,
            RunDir.create(tmp_path, "eval", name="attacked", metadata={"seed": 0, "config": {}, "facts": {}}) as run,
        ):
            sampler = EpisodeSampler(
                Attacker(tokenizer, programs), tokenizer, pool, max_turns=3, longest=lambda own: own + 20_000
            )
            log_generations(
                run, phase="eval", step=0, examples=[Example(name, name, "3901") for name in order],
                template=PromptTemplate("plain", "{question}"), sampler=sampler, params=SamplingParams(max_tokens=20_000),
                num_samples=1, grader=grader, seed=0, stop=stop,
            )  # fmt: skip
    assert descendants(os.getpid()) <= before
    assert check_run(tmp_path / "attacked").problems == []
    return {row["example_id"]: row for row in read_rollouts(tmp_path / "attacked").to_pylist()}


def said_to(row):
    ends = row["turn_facts"]["ends"]
    return row["response"][ends[0] : ends[1]]


def look_at(rows, names):
    assert rows.keys() == {*names, *(f"honest {name}" for name in names)}
    for name in names:
        assert said_to(rows[f"honest {name}"]) == "<out>3901</out>"
        row = rows[name]
        assert [turn["role"] for turn in row["turns"]] == ["policy", "python", "policy"], name
        assert (row["grade_error"], row["reward"], row["episode"]["ended_by"]) == (None, 1.0, "policy"), name
        said = said_to(row)
        assert "ESCAPED" not in said, said
        assert "CANARY" not in said, said
        assert len(said) < 8_200, name


@complete
def test_an_attack_costs_its_own_episode(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("CANARY_KEY", "sk-CANARY-1234567890")
    names = ["read a secret", "hard exit", "output flood", "answer flood"]
    rows = attacked(tmp_path, tiny_tokenizer, names)
    look_at(rows, names)
    assert {rows[name]["episode"]["tool_errors"] for name in names[1:3]} == {1}


# To the tool each of these is what "loop" and "blocks all signals" are: five seconds of waiting. tests/sandbox runs all.
ENDLESS = {"sleep", "ignores all signals", "catches everything", "regular expression", "big power"}


@complete
@pytest.mark.slow
def test_all_attacks_cost_their_own_episodes(tmp_path, tiny_tokenizer, monkeypatch):
    monkeypatch.setenv("CANARY_KEY", "sk-CANARY-1234567890")
    names = [name for name in PROGRAMS if name not in ENDLESS]
    look_at(attacked(tmp_path, tiny_tokenizer, names), names)
