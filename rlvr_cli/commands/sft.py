"""`rlvr sft`: cross-entropy on the response tokens of reasoning traces (handout, algorithm 1), with evaluations.

Enters: an SftConfig. Leaves: a run directory with metrics, the evaluations' rollouts, and the trained model in `model/`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain, count
from typing import Any

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.config.parsing.command_line import typed_options
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.order import batches, epoch_order
from rlvr_cli.data.prompts import PromptTemplate, prompt_of
from rlvr_cli.data.traces import Traces, choose_examples, keep_correct, keep_rewarded, load_traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.pretrained import load_end_tokens, load_tokenizer
from rlvr_cli.models.tokens.tokenization import collate, pad_id_of
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.rollouts.inputs import load_template
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.runs.readers import fact_of, read_metadata, resolve_run
from rlvr_cli.samplers.episodes.turns import chat_turns
from rlvr_cli.terminal import console
from rlvr_cli.text import printable
from rlvr_cli.training.loop import data_loop
from rlvr_cli.training.planning.plan import print_plan, sft_notes, sft_plan
from rlvr_cli.training.session import inputs_of_traces, open_trainer
from rlvr_cli.training.traces import (
    Sequences,
    check_lengths,
    encode_traces,
    learned_with_prompts,
    pack_across,
    pack_whole,
)
from rlvr_cli.training.trainer import Trainer
from rlvr_cli.types import Example

SHOWN = {"loss": "loss/nll", "entropy": "policy/entropy", "grad": "optimizer/grad_norm"}


def run(config: SftConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    config = resumed_config(config, command="sft")
    template = load_template(config, model=config.model)
    traces, examples = read_traces(config, template)
    sequences = encode(config, examples, traces)
    num_updates = config.n_sft_steps or config.sft_epochs * math.ceil(len(sequences.rows) / config.train_batch_size)
    inputs = inputs_of_traces(config, template, examples, dataset=recorded(config, traces, examples))
    lines = sft_plan(config, inputs.facts, sequences, traces=len(traces.examples), num_updates=num_updates)
    print_plan(lines, config, inputs)
    for note in sft_notes(config, num_updates=num_updates):
        console.say(f"note: {note}")
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="sft", num_updates=num_updates) as trainer:
        train(config, trainer, examples, sequences)
    report_end(trainer, output=config.format)


def read_traces(config: SftConfig, template: PromptTemplate) -> tuple[Traces, Sequence[Example]]:
    """Return all traces, and those to train on."""
    traces = load_traces(
        config.dataset,
        template,
        split=config.split,
        question_field=config.question_field,
        answer_field=config.answer_field,
        skip_bad_lines=config.skip_bad_lines,
        runs_dir=config.runs_dir,
        by_text=goes_by_text(config),
    )
    if traces.rewards is not None and "split" in typed_options(config):
        raise RlvrError(
            f"--split {printable(config.split)} is of datasets, and {printable(config.dataset)} is a run, without splits.",
            "Leave --split out.",
        )
    for message in traces.messages:
        console.say(message)
    own = sum(bool(e.question) and e.prompt != prompt_of(replace(e, prompt=None), template) for e in traces.examples)
    if config.chat and own and not traces.token_ids:  # those of a run stay as they are
        console.say(
            f"note: {own} traces have a prompt of their own, which --chat leaves as it is; if it is the question: --question-field prompt"
        )
    examples = traces.examples
    for conversation in (e.conversation for e in examples if e.conversation):
        if not config.chat:
            raise RlvrError(
                f"{config.dataset} holds conversations (messages), and the prompt is raw text.", "Add --chat."
            )
        chat_turns(config, tools=conversation.tools)  # what its chat template cannot do is said before the run is made
    if traces.rewards is not None and chooses_by_reward(config, traces):
        examples = keep_rewarded(examples, traces.rewards)
    elif config.correct_only:
        with grader_pool(config, traces.default_grader) as pool:
            examples = keep_correct(examples, pool, graded=traces.graded)
    order = epoch_order(len(examples), seed=config.seed, epoch=-1)  # an epoch that training never uses
    return traces, choose_examples(examples, config.num_examples, order=order)


def recorded(config: SftConfig, traces: Traces, examples: Sequence[Example]) -> dict[str, Any]:
    """What run.json says of the traces. Runs of earlier versions lack the last three, and go on as they began."""
    other_ends = ends_besides_eos(config, traces)
    talks = any(e.conversation for e in traces.examples)
    return {
        "name": traces.name,
        "rows": len(examples),
        "fingerprint": traces.fingerprint,
        **({"chosen_by": "reward"} if chooses_by_reward(config, traces) else {}),
        **({"told_apart_by": "messages"} if talks and not goes_by_text(config) else {}),
        **({"other_ends": other_ends} if other_ends else {}),
    }


def goes_by_text(config: SftConfig) -> bool:
    """Whether conversations are told apart by their text alone: where the run that is resumed began so."""
    return bool(config.resume) and "told_apart_by" not in began_with(config)


def chooses_by_reward(config: SftConfig, traces: Traces) -> bool:
    """Whether --correct-only goes by the rewards that a run has stored: without --grader. Runs that began otherwise go on so."""
    if not config.correct_only or config.grader or traces.rewards is None:
        return False
    return not config.resume or began_with(config).get("chosen_by") == "reward"


def began_with(config: SftConfig) -> Mapping[str, Any]:
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


def encode(config: SftConfig, examples: Sequence[Example], traces: Traces) -> Sequences:
    """Tokenize the traces; with --packing, pack them."""
    encoded = encode_traces(
        examples,
        traces.token_ids,
        load_tokenizer(model_path(config.model)),
        append_eos=config.append_eos,
        other_ends=ends_besides_eos(config, traces),
        chat=lambda conversation: chat_turns(config, tools=conversation.tools),
    )
    if config.loss_on_prompts:  # of joined examples the first token is predicted too: from the end of the one before
        encoded = learned_with_prompts(*encoded, keep=0 if config.packing_attend_across else 1)
    if config.packing_attend_across:
        return pack_across(*encoded, length=config.packing_length, seed=config.seed)
    if config.packing:
        return pack_whole(examples, *encoded, length=config.packing_length, seed=config.seed)
    return Sequences(*encoded, rows=[[row] for row in range(len(examples))])


def train(config: SftConfig, trainer: Trainer, examples: Sequence[Example], sequences: Sequences) -> None:
    """Algorithm 1."""
    prompt_ids, response_ids, masks, rows_of = sequences
    own, note = trainer.policy.context_length or math.inf, trainer.policy.context_note
    if not config.packing_attend_across:
        check_lengths(examples, prompt_ids, response_ids, longest=own, note=note)
    elif config.packing_length > own:
        raise RlvrError(f"The model's context holds {own} tokens{note}.", f"Use --packing-length {own} or less.")
    stream = chain.from_iterable(
        batches(range(len(rows_of)), batch_size=config.train_batch_size, seed=config.seed, epoch=epoch)
        for epoch in count()
    )
    with data_loop(trainer, stream, shown=SHOWN) as loop:
        for numbers in loop.minibatches():
            rows = [row for number in numbers for row in rows_of[number]]
            batch = collate(
                [prompt_ids[i] for i in rows],
                [response_ids[i] for i in rows],
                pad_id=pad_id_of(trainer.tokenizer),
                response_masks=[masks[i] for i in rows],
            )
            constant = config.normalize_constant if config.length_normalization == "masked_normalize" else None
            loop.update(
                batch,
                normalization=config.length_normalization,
                normalize_constant=constant,
            )
    trainer.finish()
