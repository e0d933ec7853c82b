"""Load SFT traces: prompts and responses, from a dataset or from the rollouts of a run.

Enters: a dataset spec or a run (its name or directory). Leaves: examples that all have a prompt and a response, filtered and counted.
"""

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rlvr_cli.config.parsing.options import nearest
from rlvr_cli.data.datasets import Dataset, UnknownDataset, dataset_names, load_dataset
from rlvr_cli.data.fusion import BEGIN
from rlvr_cli.data.prompts import PromptTemplate, after, opens_thinking, prompt_of, stored_prompts
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders import multiple_choice
from rlvr_cli.runs.manifest import ROLLOUTS
from rlvr_cli.runs.readers import RunInfo, is_run, read_rollouts, read_run, resolve_run, run_names
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.types import ENVIRONMENT, Example, Graders, Phase, SampledIds

CUT_OFF = ("turns", "error")  # what ends an episode in its middle: of its `ended_by`
BY_TURNS = "turns"  # of `load_traces`: how runs tell traces apart now
_TRAIN = ("sft", "ei", "grpo", "ppo", "dpo", "distill")  # the commands whose evaluations are of held-out questions


@dataclass(frozen=True)
class Traces:
    """Examples that all have `prompt` and `response`; none occurs twice, with the messages and tools of a conversation."""

    name: str
    fingerprint: str  # sha256 of the source, before any filter
    examples: Sequence[Example]
    default_grader: str | None
    messages: list[str]  # skipped lines and notes, to be shown
    token_ids: Mapping[str, SampledIds]  # by example id, where they are known
    graded: Mapping[str, str]  # by example id: what a grader reads of an episode, the last turn of the policy
    rewards: Mapping[str, float | None] | None = None  # by example id, of a run's rollouts; None: it is a dataset
    mixed: str = ""  # as in `Dataset`
    num_opened: int = 0  # responses without their <think>, since the prompt has it


def load_traces(
    spec: str,
    template: PromptTemplate,
    *,
    split: str = "",
    question_field: str = "",
    answer_field: str = "",
    skip_bad_lines: bool = False,
    runs_dir: str = "runs",
    told_apart_by: str | None = BY_TURNS,
    opened_twice: bool = False,
) -> Traces:
    """Load traces from a run (one per rollout) or from a dataset that `load_dataset` can read.

    Args:
        spec: a run's directory or its name in `runs_dir`, or a dataset; a built-in dataset precedes a run of that name.
        told_apart_by: by what conversations are, and what the fingerprint is of. "turns": all that they are made of. In runs of
            earlier versions: "messages", with a fingerprint of their text alone, or None: both by the text.
        opened_twice: whether a response keeps its <think> after a prompt that ends in one, as in runs of earlier versions.

    Raises:
        RlvrError: nothing to train on, or what `load_dataset` raises.
    """
    if spec.partition(":")[0] not in dataset_names() and is_run(spec, runs_dir):
        source = _from_run(resolve_run(spec, runs_dir))
    else:
        with told_as_run_too(spec, runs_dir):
            dataset = load_dataset(
                spec,
                split=split,
                question_field=question_field,
                answer_field=answer_field,
                skip_bad_lines=skip_bad_lines,
                purpose="traces",
            )
        source = Traces(
            dataset.name,
            _fingerprint(dataset) if told_apart_by == BY_TURNS else dataset.fingerprint,
            dataset.examples,
            dataset.default_grader,
            [f"skipped: {reason}" for reason in dataset.skipped] + dataset.notes,
            dataset.sampled,
            {e.id: last for e in dataset.examples if (last := _last_turn(e)) is not None},
            mixed=dataset.mixed,
        )
    with_prompts = [replace(e, prompt=prompt_of(e, template)) for e in source.examples]
    worked = sum(e.solution is not None for e in with_prompts)
    with_prompts = [replace(e, response=e.response or response_from_solution(e)) for e in with_prompts]
    by_template = [] if opened_twice else [i for i, e in enumerate(source.examples) if e.prompt is None]
    twice = [i for i in by_template if opens_again(with_prompts[i])]
    for i in twice:
        with_prompts[i] = opened_once(with_prompts[i])
    by_key = {(e.prompt, e.response, _messages_of(e) if told_apart_by else ""): e for e in with_prompts if e.response}
    unique = list(by_key.values())
    messages = list(source.messages)
    if worked:
        messages.append(f"{worked} responses were made from worked solutions, in the format that the prompt asks for")
    if twice:
        messages.append(opened_note(len(twice)))
    if len(unique) < len(with_prompts):
        messages.append(f"{len(with_prompts) - len(unique)} traces were empty or duplicates and are left out")
    if not unique:
        raise RlvrError(f"{spec} holds no response to train on.", "SFT needs rows with a prompt and a response.")
    return replace(source, examples=unique, messages=messages, num_opened=len(twice))


@contextmanager
def told_as_run_too(name: str, runs_dir: str) -> Iterator[None]:
    """Where a name may be one of a run: an error that it is no dataset tells that it is no run, either, and of a similar one."""
    try:
        yield
    except UnknownDataset as error:
        near = nearest(name, run_names(runs_dir, like=name))
        raise RlvrError(
            f"There is no run {name!r} in {shown(runs_dir)}, and no dataset of that name.",
            (f"Did you mean the run {near[0]}? " if near else "") + error.hint,
        ) from error


def _messages_of(example: Example) -> str:
    """All that a conversation is made of, as JSON; empty if it is none."""
    return json.dumps(example.conversation, default=str) if example.conversation is not None else ""


def _fingerprint(dataset: Dataset) -> str:
    """The dataset's, with what its text does not show: who says what, token ids, and the system messages and tools of conversations."""
    digest = hashlib.sha256(dataset.fingerprint.encode())
    talks = [e for e in dataset.examples if e.turns is not None or e.conversation is not None]
    for e in talks:
        ids = [dataset.sampled[e.id]] if e.id in dataset.sampled else []
        digest.update(json.dumps([e.id, e.turns, _messages_of(e), *ids]).encode() + b"\n")
    return digest.hexdigest() if talks else dataset.fingerprint


def _last_turn(example: Example) -> str | None:
    """The policy's last turn; None: the response is one turn."""
    if example.conversation is not None:
        return example.conversation.messages[-1]["content"]
    return [text for role, text in example.turns if role == "policy"][-1] if example.turns else None


def response_from_solution(example: Example) -> str | None:
    """Format a worked solution as a response: with r1_zero's tags if the prompt ends in <think>, else with a box.

    It begins with a space unless the prompt ends in white space. None if the example has no worked solution.
    """
    if example.solution is None:
        return None
    prompt = example.prompt or ""
    solution = after(prompt, example.solution)
    if example.solution == multiple_choice.reference_response(example.ground_truth):
        return solution
    if opens_thinking(prompt):
        return f"{solution} </think> <answer> {example.ground_truth} </answer>"
    if "\\boxed" in solution:
        return solution
    return f"{solution}\nThe answer is $\\boxed{{{example.ground_truth}}}$."


def opens_again(example: Example) -> bool:
    """Whether a response of one turn begins with the <think> that ends its prompt."""
    is_one_turn = example.turns is None and example.conversation is None
    return is_one_turn and opens_thinking(example.prompt or "") and (example.response or "").lstrip().startswith(BEGIN)


def opened_note(count: int) -> str:
    """What is said of so many responses of `opens_again`."""
    return f"note: {count} responses begin with <think>, which their prompt has opened: they are trained on without it"


def opened_once(example: Example) -> Example:
    """An example of `opens_again` whose response goes on where its prompt ends, after the same white space."""
    prompt, response = example.prompt or "", example.response or ""
    return replace(example, response=response.lstrip().removeprefix(BEGIN).removeprefix(prompt[len(prompt.rstrip()) :]))


def _from_run(path: Path) -> Traces:
    """The rollouts of a run; of one that trains, all that it sampled for training, also those that it then left out, and not its
    evaluations.

    Raises:
        RlvrError: it has evaluations alone.
    """
    run = read_run(path)
    key_columns = ["phase", "step", "example_id", "sample_index"]
    texts = ["prompt", "own_prompt", "response", "ground_truth", "grader", "finish_reason", "reward"]
    phase = phase_to_train_on(run, {e.phase for e in run.entries if e.folder == ROLLOUTS and e.rows})
    evaluations = sum(e.rows for e in run.entries if e.folder == ROLLOUTS and e.phase != phase)
    rows = read_rollouts(
        path,
        phase=phase,
        columns=[*key_columns, *texts, "prompt_ids", "response_ids", "response_mask", "episode", "turns", "turn_facts"],
    ).to_pylist()
    rows.sort(key=lambda r: (r["step"], r["example_id"], r["sample_index"]))
    prompts = stored_prompts(run.metadata)
    digest = hashlib.sha256()
    examples, token_ids, graded, rewards, unrewarded = [], {}, {}, {}, 0
    for r in rows:
        key = f"{r['phase']}-{r['step']}-{r['example_id']}-{r['sample_index']}"
        digest.update(f"{key}\0{r['prompt']}\0{r['response']}\0{r['ground_truth']}\0".encode())
        if was_cut(r):
            continue  # it would teach the model to stop in the middle
        rewards[key] = r["reward"]
        unrewarded += r["reward"] is None or not r["reward"] > 0.5
        question = prompts.question_of(r) or ""
        examples.append(Example(key, question, r["ground_truth"], prompt=r["prompt"], response=r["response"]))
        if r["prompt_ids"] and r["response_ids"]:
            facts = r["turn_facts"]  # older runs have none
            ends = [
                (turn["end"], end) for turn, end in zip(r["turns"] or [], facts["ends"] if facts else [], strict=False)
            ]
            token_ids[key] = SampledIds(r["prompt_ids"], r["response_ids"], r["response_mask"], ends)
        if r["episode"]:
            graded[key] = r["response"][r["episode"]["graded_from"] : r["episode"]["graded_to"]]
    cut = len(rows) - len(examples)
    messages = [f"{evaluations} responses of its evaluations are left out"] if evaluations else []
    if cut:
        messages.append(f"{cut} responses were cut at their length limit, or as episodes, and are left out")
    if unrewarded and phase == "train":
        messages.append(
            f"note: of the {len(examples)} whole responses of the training of {run.id}, {unrewarded} have a reward of 0.5 or less;"
            " --correct-only leaves these out"
        )
    grader = next((r["grader"] for r in rows if r["grader"] != ENVIRONMENT), None)
    return Traces(run.id, digest.hexdigest(), examples, grader, messages, token_ids, graded, rewards)


def was_cut(row: Mapping[str, Any]) -> bool:
    """Whether a response ends in its middle, by its `finish_reason` and `episode`."""
    return row["finish_reason"] == "length" or (row["episode"] is not None and row["episode"]["ended_by"] in CUT_OFF)


def phase_to_train_on(run: RunInfo, phases: Collection[str]) -> Phase:
    """The phase of a run's rollouts that may be trained on: of a run that trains, not that of its evaluations.

    Args:
        phases: those that it has rollouts of.

    Raises:
        RlvrError: it trains, and has evaluations alone.
    """
    phase = "train" if run.metadata["command"] in _TRAIN else "eval"
    if phases and phase not in phases:
        raise RlvrError(
            f"{run.id} is a run of rlvr {run.metadata['command']} that has sampled nothing to train on, only its evaluations.",
            "Sample responses to questions that are not held out: rlvr eval.",
        )
    return phase


def keep_correct(
    examples: Sequence[Example], grader: Graders, *, graded: Mapping[str, str] | None = None
) -> list[Example]:
    """The examples whose response the grader rewards.

    Args:
        graded: see `Traces`.

    Raises:
        RlvrError: an example has no ground truth to grade against, or none is correct.
    """
    without_truth = next((e for e in examples if not e.ground_truth), None)
    if without_truth is not None:
        raise RlvrError(
            f"--correct-only needs a ground truth for every trace; {without_truth.id} has none.",
            "Add a ground_truth field, or leave --correct-only out.",
        )
    pairs = [((graded or {}).get(e.id, e.response or ""), e.ground_truth) for e in examples]
    grades = grader.grade(pairs, example_of=lambda i: asdict(examples[i]) | {"question": examples[i].question or None})
    return _correct(examples, [g.reward for g in grades])


def keep_rewarded(examples: Sequence[Example], rewards: Mapping[str, float | None]) -> list[Example]:
    """The examples whose rollout has a reward above 0.5.

    Args:
        rewards: see `Traces`.

    Raises:
        RlvrError: there are none.
    """
    return _correct(examples, [rewards[e.id] for e in examples])


def _correct(examples: Sequence[Example], rewards: Sequence[float | None]) -> list[Example]:
    correct = [e for e, reward in zip(examples, rewards, strict=True) if reward is not None and reward > 0.5]
    if not correct:
        raise RlvrError(f"None of the {len(examples)} traces is correct: --correct-only leaves nothing to train on.")
    return correct


def choose_examples(examples: Sequence[Example], num_examples: str, *, order: Sequence[int]) -> list[Example]:
    """The first `num_examples` in `order`, or all. With the same order, a smaller choice is part of every larger one.

    Raises:
        RlvrError: there are fewer examples than `num_examples`.
    """
    if num_examples == "all":
        return list(examples)
    if int(num_examples) > len(examples):
        raise RlvrError(
            f"--num-examples {num_examples}, but there are {len(examples)} traces to choose from.",
            "Ask for fewer, or for all. (--correct-only chooses among the correct ones.)",
        )
    return [examples[i] for i in sorted(order[: int(num_examples)])]
