"""`rlvr sft`: cross-entropy on the response tokens of reasoning traces (handout, algorithm 1), with evaluations.

Enters: an SftConfig. Leaves: a run directory with metrics, the evaluations' rollouts, and the trained model in `model/`.
"""

import math
from collections.abc import Sequence
from itertools import chain, count

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.data.order import batches
from rlvr_cli.data.traces import Traces
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.pretrained import load_tokenizer
from rlvr_cli.models.tokens.tokenization import collate, pad_id_of
from rlvr_cli.rollouts.inputs import load_template
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.samplers.episodes.turns import chat_turns
from rlvr_cli.terminal import console
from rlvr_cli.training.loop import data_loop
from rlvr_cli.training.planning.notes import sft_notes
from rlvr_cli.training.planning.plan import print_plan, sft_plan
from rlvr_cli.training.read_traces import end_of_turn, ends_besides_eos, read_traces, recorded
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
    other_ends = ends_besides_eos(config, traces)
    sequences = encode(config, examples, traces, other_ends=other_ends)
    num_updates = config.n_sft_steps or config.sft_epochs * math.ceil(len(sequences.rows) / config.train_batch_size)
    inputs = inputs_of_traces(config, template, examples, dataset=recorded(config, traces, examples, other_ends))
    lines = sft_plan(config, inputs.facts, sequences, traces=len(traces.examples), num_updates=num_updates)
    print_plan(lines, config, inputs, most_updates=num_updates)
    for note in sft_notes(config, num_updates=num_updates):
        console.say(f"note: {note}")
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="sft", num_updates=num_updates) as trainer:
        train(config, trainer, examples, sequences)
    report_end(trainer, output=config.format)


def encode(config: SftConfig, examples: Sequence[Example], traces: Traces, *, other_ends: Sequence[int]) -> Sequences:
    """Tokenize the traces; with --packing, pack them."""
    encoded = encode_traces(
        examples,
        traces.token_ids,
        load_tokenizer(model_path(config.model)),
        append_eos=config.append_eos,
        other_ends=other_ends,
        end=end_of_turn(config),
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
