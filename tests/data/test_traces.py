"""SFT traces: filtered as requested, and every trace left out is counted in a message."""

import json
from dataclasses import replace

import pytest

from factories import a_rollout, an_episode
from rlvr_cli.data.datasets import load_dataset
from rlvr_cli.data.order import epoch_order
from rlvr_cli.data.prompts import PromptTemplate, load_prompt
from rlvr_cli.data.traces import choose_examples, keep_correct, load_traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.pool import GraderPool
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.training.session import warn_of_shared_questions
from rlvr_cli.types import Example

TEMPLATE = load_prompt("r1_zero")


def write(path, rows):
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def test_formatted_prompts_are_kept_and_duplicates_dropped(tmp_path):
    rows = [
        {"prompt": "P1", "response": " a"},
        {"prompt": "P1", "response": " a"},
        {"prompt": "P1", "response": " b"},
        {"prompt": "P2 {question}", "response": " c", "ground_truth": "3"},
    ]
    traces = load_traces(write(tmp_path / "t.jsonl", rows), TEMPLATE)
    assert [(e.prompt, e.response, e.ground_truth) for e in traces.examples] == [
        ("P1", " a", ""),
        ("P1", " b", ""),
        ("P2 {question}", " c", "3"),
    ]
    assert any("1 trace" in m or "1 traces" in m for m in traces.messages)


TALK = {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]}
SYSTEM = {"role": "system", "content": "Be brief."}
EPISODE = {"prompt": "P", "turns": [{"role": "policy", "text": "a"}, {"role": "calc", "text": "b"}]}


@pytest.mark.parametrize(
    ("row", "changed"),
    [
        (EPISODE, EPISODE | {"turns": [EPISODE["turns"][0], {"role": "policy", "text": "b"}]}),
        (EPISODE, {"prompt": "P", "response": "ab"}),
        (TALK, {"messages": [SYSTEM, *TALK["messages"]]}),
        (TALK, TALK | {"tools": [{"name": "calc"}]}),
    ],
)
def test_the_fingerprint_is_also_of_who_says_what_and_of_tools(tmp_path, row, changed):
    """That of earlier versions, with which their runs go on, was of the text alone; without turns and messages it is the same."""
    before, after = (write(tmp_path / f"{name}.jsonl", [{"id": "a", **r}]) for name, r in (("b", row), ("c", changed)))
    prints = [load_traces(path, TEMPLATE).fingerprint for path in (before, before, after)]
    assert prints[0] == prints[1] != prints[2]
    for told in ("messages", None):
        assert len({load_traces(path, TEMPLATE, told_apart_by=told).fingerprint for path in (before, after)}) == 1
    plain = write(tmp_path / "p.jsonl", [{"prompt": "P", "response": "ab"}])
    assert load_traces(plain, TEMPLATE).fingerprint == load_dataset(plain, purpose="traces").fingerprint


def test_generated_traces_get_the_template():
    traces = load_traces("arithmetic:20:3", TEMPLATE)
    assert len(traces.examples) == 20
    assert all(e.prompt == TEMPLATE.fill(e.question) and e.response for e in traces.examples)


def test_correct_only_keeps_what_the_grader_rewards():
    examples = [
        Example("a", "q", "6", prompt="p", response=" </think> <answer> 6 </answer>"),
        Example("b", "q", "6", prompt="p", response=" </think> <answer> 7 </answer>"),
        Example("c", "q", "6", prompt="p", response=" 6"),
    ]
    with GraderPool("r1_zero", workers=1) as pool:
        assert [e.id for e in keep_correct(examples, pool)] == ["a"]
        with pytest.raises(RlvrError, match="None of the 2"):
            keep_correct(examples[1:], pool)
        with pytest.raises(RlvrError, match="ground truth"):
            keep_correct([Example("d", "q", "", prompt="p", response="r")], pool)


def test_a_smaller_choice_is_part_of_a_larger_one():
    examples = [Example(str(i), "q", "1", prompt="p", response=str(i)) for i in range(50)]
    order = epoch_order(50, seed=1, epoch=-1)
    few, more = (choose_examples(examples, n, order=order) for n in ("8", "16"))
    assert set(few) < set(more) < set(examples)
    assert choose_examples(examples, "8", order=epoch_order(50, seed=2, epoch=-1)) != few
    assert choose_examples(examples, "all", order=order) == examples
    with pytest.raises(RlvrError, match="there are 50"):
        choose_examples(examples, "51", order=order)


def test_rollouts_of_a_run_become_traces_unless_cut_off(tmp_path):
    from rlvr_cli.types import Rollout

    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:

        def rollout(index: int, finish: str) -> Rollout:
            return a_rollout(
                run_id=run.id,
                example_id="q",
                sample_index=index,
                prompt="P",
                response=f" {index}",
                ground_truth="1",
                response_ids=(2, index),
                sampled_logprobs=(-1.0, -1.0),
                finish_reason=finish,
                grader="gsm8k",
            )

        run.commit_rollouts(
            "eval",
            0,
            [rollout(0, "stop"), rollout(1, "length"), replace(rollout(2, "stop"), response_mask=(False, True))],
        )
    traces = load_traces(str(tmp_path / "r"), TEMPLATE)
    assert load_traces("r", TEMPLATE, runs_dir=str(tmp_path)) == traces
    with pytest.raises(RlvrError, match=r"There is no run 'rr' in .*, and no dataset of that name") as error:
        load_traces("rr", TEMPLATE, runs_dir=str(tmp_path))
    assert error.value.hint.startswith("Did you mean the run r? The built-in datasets are ")
    assert [(e.prompt, e.response, e.ground_truth) for e in traces.examples] == [("P", " 0", "1"), ("P", " 2", "1")]
    assert traces.token_ids == {
        "eval-0-q-0": ([1], [2, 0], None, []),
        "eval-0-q-2": ([1], [2, 2], [False, True], []),
    }
    assert traces.default_grader == "gsm8k"
    assert any("1 responses were cut" in m for m in traces.messages)


def test_of_a_run_that_trains_its_evaluations_are_no_traces(tmp_path, capsys):
    facts = {"prompt": {"text": "Q: {question}\nA:"}}
    with RunDir.create(tmp_path, "grpo", name="r", metadata={"facts": facts}) as run:
        for phase in ("train", "eval"):
            run.commit_rollouts(phase, 0, [a_rollout(run_id=run.id, phase=phase, prompt=f"Q: {phase}?\nA:")])
    (part,) = (tmp_path / "r").glob("rollouts/eval-*.parquet")
    part.write_bytes(bytes(part.stat().st_size))  # nor are they read
    traces = load_traces(str(tmp_path / "r"), TEMPLATE)
    assert [(e.question, e.prompt) for e in traces.examples] == [("train?", "Q: train?\nA:")]
    assert traces.messages == ["1 responses of its evaluations are left out"]
    for question, shared in (("train?", True), ("eval?", False)):
        (tmp_path / "held-out.jsonl").write_text(json.dumps({"question": question, "answer": "1"}))
        warn_of_shared_questions(traces.examples, load_dataset(str(tmp_path / "held-out.jsonl")))
        assert ("1 of the 1 evaluation questions are also trained on" in capsys.readouterr().err) == shared


def test_wrong_responses_of_a_run_that_trains_are_said(tmp_path):
    """Also expert iteration samples them, though it trains on the right ones alone."""
    with RunDir.create(tmp_path, "ei", name="r", metadata={}) as run:
        rewards = (1.0, 0.0, None, 1.0)
        rows = [
            a_rollout(run_id=run.id, phase="train", sample_index=i, response=f"{i}", reward=r)
            for i, r in enumerate(rewards)
        ]
        run.commit_rollouts("train", 0, [*rows[:3], replace(rows[3], finish_reason="length")])
    traces = load_traces(str(tmp_path / "r"), TEMPLATE)
    assert len(traces.examples) == 3
    assert traces.messages[-1].startswith(
        "note: of the 3 whole responses of the training of r, 2 have a reward of 0.5 or less;"
    )


def test_a_run_that_has_evaluations_alone_holds_no_traces(tmp_path):
    with RunDir.create(tmp_path, "sft", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id=run.id)])
    with pytest.raises(RlvrError, match="has sampled nothing to train on, only its evaluations"):
        load_traces(str(tmp_path / "r"), TEMPLATE)


def test_episodes_that_were_cut_off_are_no_traces(tmp_path):
    endings = ["policy", "environment", "turns", "error"]
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        rows = [replace(an_episode(run_id=run.id, sample_index=i), response=f" {e}") for i, e in enumerate(endings)]
        rows = [replace(r, episode=r.episode._replace(ended_by=e)) for r, e in zip(rows, endings, strict=True)]
        run.commit_rollouts("eval", 0, rows)
    traces = load_traces(str(tmp_path / "r"), TEMPLATE)
    assert [e.response for e in traces.examples] == [" policy", " environment"]
    assert traces.messages == ["2 responses were cut at their length limit, or as episodes, and are left out"]


def test_turns_without_one_of_the_policy_are_no_trace(tmp_path):
    (tmp_path / "t.jsonl").write_text(json.dumps({"question": "1+1?", "turns": [{"role": "assistant", "text": "2"}]}))
    with pytest.raises(RlvrError, match="none of its turns is the policy's"):
        load_traces(str(tmp_path / "t.jsonl"), TEMPLATE)


def test_the_question_of_a_runs_trace_is_unknown(tmp_path):
    """A run keeps the prompt that was made from it; `rlvr grade` tells a grader the same."""
    with RunDir.create(tmp_path, "eval", name="r", metadata={}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id=run.id, phase="eval", step=0, prompt="P", ground_truth="1")])
    (tmp_path / "mine.py").write_text(
        "def grade(response, truth, example):\n"
        "    return {'reward': example['question'] is None and example['prompt'] == 'P'}\n"
    )
    with GraderPool(f"{tmp_path / 'mine.py'}:grade", workers=1) as pool:
        assert len(keep_correct(load_traces(str(tmp_path / "r"), TEMPLATE).examples, pool)) == 1


@pytest.mark.parametrize(
    ("row", "solution", "truth"),
    [
        ({"answer": "He has 4/2=<<4/2=2>>2 left.\nSo 2+1,000=<<2+1000=1002>>1,002.\n#### 1,002"}, "He has 4/2=2 left.\nSo 2+1,000=1,002.", "1002"),
        ({"solution": "Add: $1+1=\\boxed{2}$.", "answer": "2"}, "Add: $1+1=\\boxed{2}$.", "2"),
    ],
)  # fmt: skip
def test_a_worked_solution_becomes_a_response_in_the_prompts_format(tmp_path, row, solution, truth):
    rows = [json.dumps({"question": question, **row}) + "\n" for question in ("How many?", "How much?")]
    (tmp_path / "d.jsonl").write_text("".join(rows))
    tagged = load_traces(str(tmp_path / "d.jsonl"), load_prompt("r1_zero"))
    assert [e.response for e in tagged.examples] == 2 * [f" {solution} </think> <answer> {truth} </answer>"]
    assert "2 responses were made from worked solutions" in " ".join(tagged.messages)
    boxed = load_traces(str(tmp_path / "d.jsonl"), load_prompt("question_only")).examples[0].response
    assert boxed.startswith(f" {solution}")
    assert f"\\boxed{{{truth}}}" in boxed
    chat = load_traces(str(tmp_path / "d.jsonl"), PromptTemplate("chat", "<user>{question}<assistant>\n")).examples[0]
    assert chat.response == boxed.removeprefix(" ")
    with GraderPool("r1_zero", workers=1) as pool:
        assert keep_correct(tagged.examples, pool)


@pytest.mark.parametrize(
    ("end", "response", "once"),
    [
        ("<think>\n", "<think>\nIt is 2.\n</think>\n\n2", "It is 2.\n</think>\n\n2"),  # DeepSeek-R1-Distill's
        ("<think>\n", "\n<think>\n\n</think>\n\n2", "\n</think>\n\n2"),
        ("<think>\n", "<think>It is 2.</think>2", "It is 2.</think>2"),
        ("<think>", "<think> It is 2. </think> 2", " It is 2. </think> 2"),
        ("<think>", " It is 2. </think> 2", None),
        ("\n", "<think>\nIt is 2.\n</think>\n\n2", None),
    ],
)
def test_thinking_is_opened_once(tmp_path, end, response, once):
    """A prompt of a row's own stays as it is, and so do its response, turns and conversations."""
    turns = [{"role": "policy", "text": response}]
    messages = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": response}]
    rows = [{"question": "Q", "response": response}, {"prompt": f"Q{end}", "response": response}]
    more = [{"question": "Q", "turns": turns}, {"messages": messages}]
    found = []
    for number, some in enumerate((rows[:1], rows[1:], more)):
        spec = write(tmp_path / f"{number}.jsonl", some)
        found.append(load_traces(spec, PromptTemplate("t", "{question}" + end)))
    (trace,) = found[0].examples
    assert (trace.prompt, trace.response) == (f"Q{end}", once or response)
    assert ("1 responses begin with <think>" in " ".join(found[0].messages)) == bool(found[0].num_opened) == bool(once)
    assert {e.response.strip() for traces in found[1:] for e in traces.examples} == {response.strip()}
    assert not any(traces.num_opened for traces in found[1:])


@pytest.mark.parametrize("answer", ["72", "#### 72", "\\boxed{72}"])
def test_a_bare_answer_is_not_a_trace(tmp_path, answer):
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "How many?", "answer": answer}) + "\n")
    with pytest.raises(RlvrError, match="no response to train on"):
        load_traces(str(tmp_path / "d.jsonl"), load_prompt("r1_zero"))


def test_a_built_in_dataset_precedes_a_run_of_its_name(tmp_path):
    from rlvr_cli.runs.run_dir import RunDir

    with RunDir.create(tmp_path, "eval", name="arithmetic", metadata={}) as run:
        run.commit_rollouts("eval", 0, [a_rollout(run_id=run.id)])
    assert load_traces("arithmetic", TEMPLATE, runs_dir=str(tmp_path)).name == "arithmetic"
    assert load_traces(str(tmp_path / "arithmetic"), TEMPLATE).name == run.id
