"""What `rlvr sft` trains on: the traces of a dataset or a run, those that are chosen, and what the run records of them.

Enters: an SftConfig and its prompt template. Leaves: the traces, and the examples to train on. A run that is resumed reads its
traces as it began.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.parsing.command_line import typed_options
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.order import epoch_order
from rlvr_cli.data.pairs import Pairs
from rlvr_cli.data.prompts import PromptTemplate, prompt_of
from rlvr_cli.data.traces import BY_TURNS, Traces, choose_examples, keep_correct, keep_rewarded, load_traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.pretrained import load_end_tokens, load_tokenizer
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.rollouts.inputs import check_of_one_kind
from rlvr_cli.runs.readers import fact_of, read_metadata, resolve_run
from rlvr_cli.samplers.episodes.turns import chat_turns
from rlvr_cli.terminal import console
from rlvr_cli.text import printable
from rlvr_cli.types import Example


def read_traces(config: SftConfig, template: PromptTemplate) -> tuple[Traces, Sequence[Example]]:
    """Return all traces, and those to train on."""
    apart_by = told_apart_by(config)
    traces = load_traces(
        config.dataset,
        template,
        split=config.split,
        question_field=config.question_field,
        answer_field=config.answer_field,
        skip_bad_lines=config.skip_bad_lines,
        runs_dir=config.runs_dir,
        told_apart_by=apart_by,
        opened_twice=opened_twice(config),
    )
    if traces.rewards is not None and "split" in typed_options(config):
        raise RlvrError(
            f"--split {printable(config.split)} is of datasets, and {printable(config.dataset)} is a run, without splits.",
            "Leave --split out.",
        )
    for message in traces.messages:
        console.say(message)
    to_tokenize = [e for e in traces.examples if e.question and e.id not in traces.token_ids]
    own = sum(e.prompt != prompt_of(replace(e, prompt=None), template) for e in to_tokenize)
    if config.chat and own:
        console.say(
            f"note: {own} traces have a prompt of their own, which --chat leaves as it is; if it is the question: --question-field prompt"
        )
    examples = traces.examples
    if apart_by != BY_TURNS and any(e.conversation for e in examples):
        console.say(
            "note: the run began with an earlier version, which wrote other tokens for some conversations: those of Parquet files with "
            "several tools, or of tokenizers that put a `▁` in front of texts. It goes on with the new ones."
        )
    for conversation in (e.conversation for e in examples if e.conversation):
        if not config.chat:
            raise RlvrError(
                f"{config.dataset} holds conversations (messages), and the prompt is raw text.", "Add --chat."
            )
        chat_turns(config, tools=conversation.tools)  # what its chat template cannot do is said before the run is made
    if traces.rewards is not None and chooses_by_reward(config, traces):
        examples = keep_rewarded(examples, traces.rewards)
    elif config.correct_only:
        check_of_one_kind(config, traces.name, traces.mixed)
        with grader_pool(config, traces.default_grader) as pool:
            examples = keep_correct(examples, pool, graded=traces.graded)
    order = epoch_order(len(examples), seed=config.seed, epoch=-1)  # an epoch that training never uses
    return traces, choose_examples(examples, config.num_examples, order=order)


def recorded(
    config: SftConfig, traces: Traces, examples: Sequence[Example], other_ends: Sequence[int]
) -> dict[str, Any]:
    """What run.json says of the traces. Runs of earlier versions lack what follows the fingerprint, and go on as they began."""
    apart_by = told_apart_by(config)
    return {
        "name": traces.name,
        "rows": len(examples),
        "fingerprint": traces.fingerprint,
        **({"chosen_by": "reward"} if chooses_by_reward(config, traces) else {}),
        **({"told_apart_by": apart_by} if apart_by else {}),
        **recorded_opening(traces),
        **({"other_ends": other_ends} if other_ends else {}),
        **recorded_end(config),
    }


def recorded_end(config: SftConfig | DpoConfig) -> dict[str, int]:
    """What run.json says of the end of responses, among the facts of the dataset: nothing where it is EOS."""
    end = end_of_turn(config)
    return {} if end is None else {"end_of_turn": end}


def recorded_opening(traces: Traces | Pairs) -> dict[str, str]:
    """What run.json says of responses without their <think>, among the facts of the dataset."""
    return {"thinking_opened": "once"} if traces.num_opened else {}


def opened_twice(config: SftConfig | DpoConfig) -> bool:
    """Whether responses keep a <think> that their prompt has opened: as in runs of earlier versions, which go on as they began."""
    return bool(config.resume) and "thinking_opened" not in began_with(config)


def told_apart_by(config: SftConfig) -> str | None:
    """By what conversations are told apart, as for `load_traces`: a run that is resumed goes on as it began."""
    return began_with(config).get("told_apart_by") if config.resume else BY_TURNS


def chooses_by_reward(config: SftConfig, traces: Traces) -> bool:
    """Whether --correct-only goes by the rewards that a run has stored: without --grader. Runs that began otherwise go on so."""
    if not config.correct_only or config.grader or traces.rewards is None:
        return False
    return not config.resume or began_with(config).get("chosen_by") == "reward"


def began_with(config: SftConfig | DpoConfig) -> Mapping[str, Any]:
    """What the run that is resumed has recorded of its traces."""
    return fact_of(read_metadata(resolve_run(config.resume, config.runs_dir)), "dataset") or {}


def ends_besides_eos(config: SftConfig, traces: Traces) -> list[int]:
    """The ids after which sampled responses need no EOS; none where the run that is resumed began without."""
    if not config.append_eos or not traces.token_ids:
        return []
    if config.resume:
        return began_with(config).get("other_ends", [])
    path = model_path(config.model)
    tokenizer = load_tokenizer(path)
    return [end for end in load_end_tokens(path, tokenizer) if end != tokenizer.eos_token_id]


def end_of_turn(config: SftConfig | DpoConfig) -> int | None:
    """The token that --append-eos appends in place of EOS: the one with which a chat template ends an assistant's turn, where it ends
    responses of the model.

    None: it is EOS, also where the run that is resumed began so, and where the end of a turn in the chat template is not known.
    """
    if not config.chat or not config.append_eos:
        return None
    if config.resume:
        return began_with(config).get("end_of_turn")
    try:
        turns = chat_turns(config, tools=[])
    except RlvrError:
        return None
    return None if turns.end == turns.chat.tokenizer.eos_token_id else turns.end
