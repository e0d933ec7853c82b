"""`rlvr dpo`: preference optimization on pairs of a right and a wrong response, with evaluations.

Enters: a DpoConfig. Leaves: a run directory with metrics, the evaluations' rollouts, and the trained model in `model/`.
"""

import math
import time
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from rlvr_cli.analysis.run_end import report_end
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.data.order import batches
from rlvr_cli.data.pairs import Pairs, load_pairs
from rlvr_cli.models.identity import model_facts
from rlvr_cli.models.tokenization import Batch, collate, pad_id_of
from rlvr_cli.rollouts.grading import grader_pool
from rlvr_cli.rollouts.inputs import input_facts, load_template
from rlvr_cli.runs.provenance import resumed_config
from rlvr_cli.samplers.open import Engine
from rlvr_cli.terminal import console
from rlvr_cli.training.losses.preference import PREFERENCE_LOSSES, preference
from rlvr_cli.training.nodes import lend_trainers
from rlvr_cli.training.plan import FEW_UPDATES, dpo_plan, print_plan
from rlvr_cli.training.session import Inputs, divide_devices, load_eval_dataset, open_trainer
from rlvr_cli.training.traces import check_lengths, encode_traces
from rlvr_cli.training.trainer import Trainer


def run(config: DpoConfig) -> None:
    """Train a model. Raises RlvrError for user errors, Interrupted after a signal."""
    if lend_trainers(config):
        return
    config = resumed_config(config, command="dpo")
    template = load_template(config, model=config.model)
    pairs = load_pairs(
        config.dataset,
        template,
        question_field=config.question_field,
        skip_bad_lines=config.skip_bad_lines,
        runs_dir=config.runs_dir,
        pairs_per_question=config.pairs_per_question,
        seed=config.seed,
    )
    for message in pairs.messages:
        console.say(message)
    own = sum(not e.question for e in pairs.examples) // 2
    if config.chat and own:
        console.say(
            f"note: {own} pairs have a prompt of their own, which --chat leaves as it is; if it is the question: --question-field prompt"
        )
    num_pairs = len(pairs.examples) // 2
    num_updates = config.dpo_epochs * math.ceil(num_pairs / config.train_batch_size)
    eval_dataset = load_eval_dataset(config)
    pool = grader_pool(config, eval_dataset.default_grader if eval_dataset else None)
    facts = input_facts(
        {
            "dataset": {"name": pairs.name, "rows": num_pairs, "fingerprint": pairs.fingerprint},
            "eval_dataset": eval_dataset and eval_dataset.facts,
        },
        model=model_facts(config.model),
        template=template,
        grader=pool.spec,
        engine=config.engine,
    )
    rows, engine = 2 * config.micro_batch_size, Engine(config.engine, "shares the trainer's model")
    devices = divide_devices(config, engine=engine.name, rows=rows)
    inputs = Inputs(template, [], eval_dataset, pool, engine, *devices, facts)
    print_plan(dpo_plan(config, facts, num_updates=num_updates), config, inputs, rows=rows)
    if num_updates < FEW_UPDATES:
        console.say(
            f"note: {num_updates} updates change a model little; a smaller --train-batch-size or more --dpo-epochs gives more updates"
        )
    if config.dry_run:
        return
    with open_trainer(config, inputs, command="dpo", num_updates=num_updates) as trainer:
        train(config, trainer, pairs)
    report_end(trainer, output=config.format)


def train(config: DpoConfig, trainer: Trainer, pairs: Pairs) -> None:
    """Minimize the loss of the pairs. Resumes after an interruption: the number of updates done determines all data that follow."""
    loss = PREFERENCE_LOSSES[config.loss_type]
    objective = partial(preference, loss=loss, beta=config.scale, gamma=config.target_margin)
    prompt_ids, response_ids, _ = encode_traces(
        pairs.examples, pairs.token_ids, trainer.tokenizer, append_eos=config.append_eos, end_sampled=False
    )
    own = trainer.policy.context_length or math.inf
    check_lengths(pairs.examples, prompt_ids, response_ids, longest=own, note=trainer.policy.context_note)

    def batch_of(chosen: list[int]) -> Batch:
        """The rows of these pairs, chosen and rejected in turn."""
        rows = [row for pair in chosen for row in (2 * pair, 2 * pair + 1)]
        batch = collate(
            [prompt_ids[row] for row in rows], [response_ids[row] for row in rows], pad_id=pad_id_of(trainer.tokenizer)
        )
        return batch | {"unit": torch.arange(len(rows))[:, None] // 2}

    num_pairs = len(response_ids) // 2
    updates = [
        chosen
        for epoch in range(config.dpo_epochs)
        for chosen in batches(range(num_pairs), batch_size=config.train_batch_size, seed=config.seed, epoch=epoch)
    ]
    # Of the policy that the run starts with. Kept in checkpoints: a resumed run could not compute them again.
    reference = trainer.tensors.get("reference_log_probs")
    lengths = [len(response_ids[2 * pair]) + len(response_ids[2 * pair + 1]) for pair in range(num_pairs)]
    if loss.with_reference and reference is None:
        first_epoch = updates[: len(updates) // config.dpo_epochs]
        reference = reference_log_probs(
            trainer,
            ((chosen, batch_of(chosen)) for chosen in first_epoch),
            lengths,
            micro_batch_size=2 * config.micro_batch_size,
        )
    with console.progress("updates", trainer.num_updates - trainer.updates, running_mean=False) as bar:
        for chosen in islice(updates, trainer.updates, None):
            if not trainer.has_time():
                break
            trainer.evaluate_if_due()
            batch, kept = batch_of(chosen), {}
            if reference is not None:
                by_pair, mask = reference.split(lengths), batch["response_mask"]
                flat = torch.cat([by_pair[pair] for pair in chosen])
                batch["reference_log_probs"] = torch.zeros(mask.shape, dtype=flat.dtype).masked_scatter(mask, flat)
                kept = {"reference_log_probs": reference}
            update = trainer.update(
                batch, cursor={}, tensors=kept, objective=objective, micro_batch_size=2 * config.micro_batch_size
            )
            signals = {
                "loss": update["loss/objective"],
                "margin": update["policy/margin_mean"],
                "accuracy": update["policy/accuracy_mean"],
                "chosen": update["policy/chosen_log_ratio_mean"],
                "rejected": update["policy/rejected_log_ratio_mean"],
            }
            bar.advance(1, **signals)
    trainer.finish()


def reference_log_probs(
    trainer: Trainer, batches: Iterable[tuple[list[int], Batch]], lengths: Sequence[int], *, micro_batch_size: int
) -> Tensor:
    """Compute the log-probabilities of all responses under the current policy.

    In the batches in which they are trained on: so the first update finds the same numbers, and every margin is 0.

    Args:
        batches: each pair once: the numbers of a batch's pairs, and the batch.
        lengths: of each pair, the tokens of both responses.

    Returns:
        (tokens,), nats: chosen and rejected response of pair 0, of pair 1, ...
    """
    started = time.perf_counter()
    trainer.weights.sleep()
    found = [torch.empty(0)] * len(lengths)
    for pairs, batch in batches:
        scored = trainer.log_probs(batch, micro_batch_size=micro_batch_size, temperature=1.0)
        of_pairs = scored[batch["response_mask"]].split([lengths[pair] for pair in pairs])
        for pair, log_probs in zip(pairs, of_pairs, strict=True):
            found[pair] = log_probs
    trainer.metrics.add(trainer.updates, {"scoring/seconds": time.perf_counter() - started})
    return torch.cat(found)
