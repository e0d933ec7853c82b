"""The functions of Stanford CS336 assignment 5, with the handout's names, arguments and return values, in one module.

The reward functions are in `rlvr_cli.graders`. The training loops use the same building blocks; the functions defined
here exist only for the handout and its supplement on instruction tuning and DPO.
"""

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader, Dataset

from rlvr_cli.data.examples import usable_rows
from rlvr_cli.data.files import BadRow, Row, file_rows, join_names, text_of
from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.errors import RlvrError
from rlvr_cli.graders.answers.choices import chosen_letters
from rlvr_cli.graders.answers.extraction import last_number
from rlvr_cli.graders.custom import error_detail, grade_of
from rlvr_cli.graders.pool import described_error
from rlvr_cli.models.log_probs import compute_entropy, get_response_log_probs
from rlvr_cli.models.tokens.packing import PackedDataset
from rlvr_cli.models.tokens.tokenization import collate, encode, encode_prompts, pad_id_of, tokenize_prompt_and_output
from rlvr_cli.rollouts.collect import log_generations, make_rollout
from rlvr_cli.rollouts.grading import check_some_graded, utc_now_naive
from rlvr_cli.rollouts.metrics import rollout_metrics
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.runs.storage.files import typed
from rlvr_cli.terminal import console
from rlvr_cli.training.credit.advantages import compute_group_normalized_rewards
from rlvr_cli.training.losses.normalization import masked_mean, masked_normalize
from rlvr_cli.training.losses.policy_gradient import (
    HandoutLoss,
    compute_grpo_clip_loss,
    compute_naive_policy_gradient_loss,
    compute_policy_gradient_loss,
)
from rlvr_cli.types import Completion, Example, Grade, Request, Rollout

__all__ = [
    "compute_entropy",
    "compute_group_normalized_rewards",
    "compute_grpo_clip_loss",
    "compute_naive_policy_gradient_loss",
    "compute_per_instance_dpo_loss",
    "compute_policy_gradient_loss",
    "evaluate_vllm",
    "get_packed_sft_dataset",
    "get_response_log_probs",
    "grpo_microbatch_train_step",
    "iterate_batches",
    "log_generations",
    "masked_mean",
    "masked_normalize",
    "parse_gsm8k_response",
    "parse_mmlu_response",
    "sft_microbatch_train_step",
    "tokenize_prompt_and_output",
]


def sft_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    normalize_constant: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one micro-batch and run its backward pass (handout, section 4.2).

    The summed negative log-likelihood of each row's response, divided by `normalize_constant`, averaged over the rows
    and divided by `gradient_accumulation_steps`. Micro-batches of equally many rows accumulate to the gradient of their
    union; `train_update` does the same for micro-batches of any size.

    Args:
        policy_log_probs: (batch, seq), nats, with an autograd graph.
        response_mask: (batch, seq), 1 for response tokens.
        gradient_accumulation_steps: micro-batches per optimizer update.
        normalize_constant: the divisor of each row's sum.

    Returns:
        The loss, a detached scalar; `num_response_tokens` and `mean_nll` (nats per response token; NaN without response
        tokens).
    """
    per_example = masked_normalize(-policy_log_probs, response_mask, normalize_constant, dim=1)  # (batch,)
    loss = per_example.mean() / gradient_accumulation_steps
    loss.backward()
    with torch.no_grad():
        metadata = {
            "num_response_tokens": response_mask.bool().sum(),
            "mean_nll": -masked_mean(policy_log_probs, response_mask),
        }
    return loss.detach(), metadata


def grpo_microbatch_train_step(
    policy_log_probs: Tensor,
    response_mask: Tensor,
    gradient_accumulation_steps: int,
    loss_type: HandoutLoss,
    raw_rewards: Tensor | None = None,
    advantages: Tensor | None = None,
    old_log_probs: Tensor | None = None,
    cliprange: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss of one micro-batch and run its backward pass (handout, section 7.2).

    The per-token loss averaged over each response (`masked_mean`), then over the rows, divided by
    `gradient_accumulation_steps`. Micro-batches of equally many rows accumulate to the gradient of their union;
    `train_update` does the same for micro-batches of any size and for every length normalization.

    Args:
        policy_log_probs: (batch, seq), nats, with an autograd graph.
        response_mask: (batch, seq), 1 for response tokens; every row has at least one.
        gradient_accumulation_steps: micro-batches per optimizer update.
        loss_type, raw_rewards, advantages, old_log_probs, cliprange: see `losses.compute_policy_gradient_loss`.

    Returns:
        The loss, a detached scalar; the mean over the response tokens of each of the loss's statistics.
    """
    per_token, statistics = compute_policy_gradient_loss(
        policy_log_probs,
        loss_type,
        raw_rewards=raw_rewards,
        advantages=advantages,
        old_log_probs=old_log_probs,
        cliprange=cliprange,
    )
    loss = masked_mean(per_token, response_mask, dim=1).mean() / gradient_accumulation_steps
    loss.backward()
    metadata = {name: masked_mean(values.float(), response_mask) for name, values in statistics.items()}
    return loss.detach(), metadata


def evaluate_vllm(
    vllm_model: Any,
    reward_fn: Callable[[str, str], Any],
    prompts: Sequence[str],
    eval_sampling_params: Any,
    *,
    ground_truths: Sequence[str],
    runs_dir: str = "runs",
    run: str | None = None,
) -> None:
    """Evaluate a vLLM model on formatted prompts and serialize rows and metrics to a run directory (handout, section 3.2).

    A response on which the reward function fails is a row with the error and no reward, and a warning says so.

    Args:
        vllm_model: a `vllm.LLM`.
        reward_fn: (response, ground_truth) -> {"format_reward", "answer_reward", "reward"}, or less of it, or a number, as of
            `rlvr eval --grader FILE.py:FUNCTION`; called in this process.
        prompts: formatted prompts.
        eval_sampling_params: a `vllm.SamplingParams`.
        ground_truths: one per prompt.
        runs_dir: directory that holds the runs.
        run: the name of the run; None generates one. `rlvr analyze` shows the latest run.

    Raises:
        RlvrError: there are not as many ground truths as prompts; or, once the run is stored, not one response could be graded.
    """
    if not prompts or len(prompts) != len(ground_truths):
        raise RlvrError(
            f"Got {len(prompts)} prompts and {len(ground_truths)} ground truths.",
            "Pass at least one prompt, and one ground truth per prompt.",
        )
    name = getattr(reward_fn, "__name__", type(reward_fn).__name__)
    outputs = vllm_model.generate(list(prompts), eval_sampling_params)
    with RunDir.create(runs_dir, "eval", name=run, metadata={"grader": name, "engine": "vllm"}) as directory:
        rollouts = [
            _rollout(answer, output, Example(str(index), prompts[index], truth), reward_fn, name, run_id=directory.id)
            for index, (output, truth) in enumerate(zip(outputs, ground_truths, strict=True))
            for answer in output.outputs
        ]
        directory.commit_rollouts("eval", 0, rollouts)
        directory.commit_metrics(0, "eval", rollout_metrics(rollouts))
        directory.finish("finished")
    _report_failures(rollouts, directory.path)


def _rollout(
    answer: Any, output: Any, example: Example, reward_fn: Callable[[str, str], Any], grader: str, *, run_id: str
) -> Rollout:
    """One of vLLM's answers to a prompt, graded, as a row. The example's question is the prompt."""
    steps = zip(answer.token_ids, answer.logprobs, strict=True) if answer.logprobs else ()
    completion = Completion(
        request_index=int(example.id),
        sample_index=answer.index,
        text=answer.text,
        prompt_ids=tuple(output.prompt_token_ids or ()),
        token_ids=tuple(answer.token_ids),
        logprobs=tuple(step[token].logprob for token, step in steps),
        num_prompt_tokens=len(output.prompt_token_ids or ()),
        num_tokens=len(answer.token_ids),
        finish_reason="length" if answer.finish_reason == "length" else "stop",
        stop_reason=None if answer.finish_reason == "length" else str(answer.stop_reason or "eos"),
        mean_entropy=None,
    )
    return make_rollout(
        completion,
        _grade_here(reward_fn, answer.text, example.ground_truth),
        run_id=run_id,
        phase="eval",
        step=0,
        policy_version=0,
        example=example,
        sample_index=answer.index,
        request=Request(example.question, (0,) * (answer.index + 1)),
        grader=grader,
        sampled_at=utc_now_naive(),
    )


def _grade_here(reward_fn: Callable[[str, str], Any], response: str, truth: str) -> Grade:
    """Grade in this process; a reward function that fails must not lose the responses, as in a grader's worker."""
    try:
        return grade_of(reward_fn(response, truth))
    except Exception as error:  # whatever the user's function raises
        code = getattr(inspect.unwrap(reward_fn), "__code__", None)
        spec = f"{code.co_filename}:{code.co_name}" if code else ""
        return Grade(None, None, None, error=type(error).__name__, error_detail=error_detail(error, spec, reward_fn))


def _report_failures(rollouts: Sequence[Rollout], run: Path) -> None:
    """Say how many grades failed, and how the first did; raise RlvrError if all did."""
    path = typed(run)
    hint = f"rlvr analyze failures {path} shows them. Correct the reward function; rlvr grade {path} --grader FILE.py:FUNCTION grades them again."
    check_some_graded(run, of="the run", hint=hint)
    failed = [r for r in rollouts if r.grade_error is not None]
    if failed:
        first = described_error(failed[0].grade_error or "", failed[0].grade_error_detail)
        console.say(
            f"warning: {len(failed)} of the {len(rollouts)} responses could not be graded; the first: {first}\n{hint}"
        )


# The supplement


def get_packed_sft_dataset(
    tokenizer: Any, dataset_path: str | os.PathLike[str], seq_length: int, shuffle: bool
) -> PackedDataset:
    """Instruction-tuning examples in the Alpaca template, packed without gaps (supplement, section 3.2).

    Each document is the template with prompt and response, tokenized as one text with the special tokens that the
    tokenizer puts in front of it (Llama's BOS), and ends with EOS. The template's own last newline is left out.

    Args:
        tokenizer: with an EOS token.
        dataset_path: a file that `rlvr` can read, such as JSON lines, with rows of {prompt, response}.
        seq_length: tokens per example of the dataset.
        shuffle: shuffle the documents before they are packed; `torch.manual_seed` determines the order.

    Returns:
        A dataset of `input_ids` and `labels`, int64, (seq_length,) each, the labels shifted by one (`PackedDataset`).

    Raises:
        RlvrError: the file or a row cannot be used, there is no EOS token, or `seq_length` is below 1.
    """
    eos: Any = tokenizer.eos_token_id
    if eos is None or seq_length < 1:
        what = "The tokenizer has no EOS token to end a document with" if eos is None else f"seq_length is {seq_length}"
        raise RlvrError(f"{what}.", "Set tokenizer.eos_token." if eos is None else "Give at least 1.")
    path, template = Path(dataset_path), load_prompt("alpaca")

    def read(row: Row) -> str:
        prompt, response = (text_of(row, name) for name in ("prompt", "response"))
        if prompt is None or response is None:
            raise BadRow(row.where, f"no prompt or no response; the keys are {join_names(row.keys)}.")
        return template.fill(prompt) + response

    texts, _ = usable_rows(file_rows(path), read, name=str(path), skip_bad_lines=False)
    order = torch.randperm(len(texts)).tolist() if shuffle else range(len(texts))
    encoded = encode_prompts(tokenizer, list(texts))
    return PackedDataset([torch.tensor([*encoded[i], eos]) for i in order], seq_length)


def iterate_batches(
    dataset: Dataset[dict[str, Tensor]], batch_size: int, shuffle: bool
) -> DataLoader[dict[str, Tensor]]:
    """One epoch of a dataset in batches, the last of which may be smaller (supplement, section 3.2).

    Args:
        dataset: of `get_packed_sft_dataset`.
        batch_size: examples per batch.
        shuffle: shuffle the examples, anew in each iteration; `torch.manual_seed` determines the order.

    Returns:
        A loader of `input_ids` and `labels`, (batch, seq_length) each; its length is the number of batches.
    """
    return DataLoader(dataset, batch_size=batch_size, shuffle=shuffle)


def parse_mmlu_response(mmlu_example: Mapping[str, Any], model_output: str) -> str | None:
    """The letter of the option that a response chooses, or None (supplement, section 2.1).

    Args:
        mmlu_example: `subject`, `question`, `options` and `answer`; only the options are read.
        model_output: the response. Where a letter counts: `graders.answers.choices`.
    """
    letters = chosen_letters(model_output, [str(option) for option in mmlu_example["options"]])
    return letters[-1] if letters else None


def parse_gsm8k_response(model_output: str) -> str | None:
    """The last number of a response as text, without dollar sign and thousands commas, or None (supplement, section 2.2)."""
    number = last_number(model_output)
    return None if number is None else number.replace(",", "").replace("$", "")


def compute_per_instance_dpo_loss(
    lm: Any,
    lm_ref: Any,
    tokenizer: Any,
    beta: float,
    prompt: str,
    response_chosen: str,
    response_rejected: str,
) -> Tensor:
    """The DPO loss of one pair: -log sigma(beta (h_w - h_l)), h = log p/p_ref of a response (supplement, section 5.3).

    Log-probabilities are summed over the response and the EOS that ends it, given the prompt in the Alpaca template.
    Prompt and response are tokenized separately, so that both responses have the same prompt tokens.

    Args:
        lm: the model that is trained; the loss has its gradient and is on its device.
        lm_ref: the reference model, which may be on another device.
        tokenizer: of both.
        beta: factor of the difference.
        prompt, response_chosen, response_rejected: texts.

    Returns:
        The loss, a scalar.
    """
    prompts = [load_prompt("alpaca").fill(prompt)] * 2
    prompt_ids, response_ids = encode(prompts, [response_chosen, response_rejected], tokenizer, append_eos=True)
    batch = collate(prompt_ids, response_ids, pad_id=pad_id_of(tokenizer))

    def scores(model: Any) -> Tensor:
        """The log-probability of both responses, (2,), nats."""
        ids, labels, mask = (batch[name].to(model.device) for name in ("input_ids", "labels", "response_mask"))
        return get_response_log_probs(model, ids, labels)["log_probs"].masked_fill(~mask, 0).sum(dim=1)

    with torch.no_grad():
        reference = scores(lm_ref).to(lm.device)
    chosen, rejected = (scores(lm) - reference).unbind()
    return -logsigmoid(beta * (chosen - rejected))
