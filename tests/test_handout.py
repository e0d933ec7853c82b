"""`rlvr_cli.handout` exports all functions of the course, with the handout's arguments."""

import inspect
import itertools
import json
from types import SimpleNamespace
from typing import get_args

import pytest
import torch

from rlvr_cli import handout
from rlvr_cli.errors import RlvrError
from rlvr_cli.handout import grpo_microbatch_train_step, sft_microbatch_train_step
from rlvr_cli.runs.readers import read_rollouts, read_run
from rlvr_cli.training.losses.policy_gradient import HandoutLoss

ARGUMENTS = {
    "tokenize_prompt_and_output": "prompt_strs output_strs tokenizer",
    "compute_entropy": "logits",
    "get_response_log_probs": "model input_ids labels return_token_entropy",
    "masked_normalize": "tensor mask normalize_constant dim",
    "sft_microbatch_train_step": "policy_log_probs response_mask gradient_accumulation_steps normalize_constant",
    "log_generations": None,
    "compute_group_normalized_rewards": "reward_fn rollout_responses repeated_ground_truths group_size advantage_eps normalize_by_std",
    "compute_naive_policy_gradient_loss": "raw_rewards_or_advantages policy_log_probs",
    "compute_grpo_clip_loss": "advantages policy_log_probs old_log_probs cliprange",
    "compute_policy_gradient_loss": "policy_log_probs loss_type raw_rewards advantages old_log_probs cliprange",
    "masked_mean": "tensor mask dim",
    "grpo_microbatch_train_step": "policy_log_probs response_mask gradient_accumulation_steps loss_type raw_rewards advantages "
    "old_log_probs cliprange",
    "evaluate_vllm": "vllm_model reward_fn prompts eval_sampling_params",
    "get_packed_sft_dataset": "tokenizer dataset_path seq_length shuffle",
    "iterate_batches": "dataset batch_size shuffle",
    "parse_mmlu_response": "mmlu_example model_output",
    "parse_gsm8k_response": "model_output",
    "compute_per_instance_dpo_loss": "lm lm_ref tokenizer beta prompt response_chosen response_rejected",
}  # fmt: skip


def test_all_functions_are_exported():
    assert set(handout.__all__) == set(ARGUMENTS)


@pytest.mark.parametrize("name", ARGUMENTS)
def test_the_arguments_are_the_handouts(name):
    """In the handout's order; our additional parameters follow, with a default or keyword-only."""
    parameters = inspect.signature(getattr(handout, name)).parameters
    names = (ARGUMENTS[name] or "").split()
    assert list(parameters)[: len(names)] == names
    if names:
        ours = list(parameters.values())[len(names) :]
        assert all(p.default is not p.empty or p.kind is p.KEYWORD_ONLY for p in ours), ours


class Answers:
    """Stands in for a `vllm.LLM` that gives these texts, each to a prompt of its own."""

    def __init__(self, *texts):
        self.texts = texts

    def generate(self, prompts, params):
        given = {"index": 0, "token_ids": [1], "logprobs": None, "finish_reason": "stop", "stop_reason": None}
        answers = [SimpleNamespace(text=text, **given) for text in self.texts]
        return [SimpleNamespace(prompt_token_ids=[2], outputs=[answer]) for answer in answers]


def evaluated(folder, reward_fn, *texts):
    """The rows of a run whose ground truths are all 7."""
    prompts = [f"{i}?" for i in range(len(texts))]
    handout.evaluate_vllm(
        Answers(*texts), reward_fn, prompts, None, ground_truths=["7"] * len(texts), runs_dir=str(folder), run="r"
    )
    return read_rollouts(folder / "r").to_pylist()


def strict(response, truth):
    return {"reward": float(int(response) == int(truth))}


def test_failed_grades_are_told_and_kept(tmp_path, capsys):
    rows = evaluated(tmp_path, strict, "7", "seven", "8", "")
    line = inspect.getsourcelines(strict)[1] + 1
    where = f"{__file__}:{line}: invalid literal for int() with base 10"
    assert [r["reward"] for r in rows] == [1.0, None, 0.0, None]
    assert [r["grade_error"] for r in rows] == [None, "ValueError", None, "ValueError"]
    assert rows[1]["grade_error_detail"] == f"{where}: 'seven'"
    told = " ".join(capsys.readouterr().err.split())
    assert f"warning: 2 of the 4 responses could not be graded; the first: ValueError: {where}: 'seven'" in told
    assert read_run(tmp_path / "r").metadata["status"] == "finished"


def test_a_reward_function_that_fails_on_all_is_an_error_once_the_rows_are_kept(tmp_path):
    with pytest.raises(RlvrError, match=r"2 of the 2 responses of the run could not be graded; .* invalid literal"):
        evaluated(tmp_path, strict, "seven", "eight")
    assert [r["response"] for r in read_rollouts(tmp_path / "r").to_pylist()] == ["seven", "eight"]
    assert read_run(tmp_path / "r").metadata["status"] == "finished"


def test_what_a_reward_function_returns_is_what_a_grader_may(tmp_path, capsys):
    def of_any_form(response, truth):
        forms = {"float": 0.5, "reward": {"reward": 1}, "answer": {"answer_reward": 1.0}, "none": None}
        return forms[response]

    rows = evaluated(tmp_path, of_any_form, "float", "reward", "answer", "none")
    assert [r["reward"] for r in rows] == [0.5, 1.0, 1.0, None]
    assert [r["category"] for r in rows] == ["reward_only", "reward_only", "format_1_answer_1", "grade_error"]
    assert rows[3]["grade_error"] == "BadGrade"
    assert "it returned None, not a number or a dictionary of rewards" in " ".join(capsys.readouterr().err.split())


def test_sft_microbatch_train_step_worked_by_hand():
    log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], requires_grad=True)
    mask = torch.tensor([[False, True, True], [False, False, True]])
    loss, metadata = sft_microbatch_train_step(log_probs, mask, 4, 10.0)
    assert loss.item() == pytest.approx(((2 + 3) / 10 + 6 / 10) / 2 / 4)
    expected = torch.tensor([[0, -1, -1], [0, 0, -1]]) / 80
    torch.testing.assert_close(log_probs.grad, expected)
    assert metadata["num_response_tokens"] == 3
    assert metadata["mean_nll"].item() == pytest.approx(11 / 3)
    assert not loss.requires_grad


@pytest.mark.parametrize("constant", [1.0, 42.0])
def test_sft_microbatch_train_step_accumulates_like_the_courses_ten_step_test(constant):
    generator = torch.Generator().manual_seed(42)
    log_probs = torch.randn(2, 10, generator=generator, requires_grad=True)
    mask = torch.rand(2, 10, generator=generator) > 0.5
    for step in range(1, 11):
        loss, _ = sft_microbatch_train_step(
            policy_log_probs=log_probs,
            response_mask=mask,
            gradient_accumulation_steps=2,
            normalize_constant=constant,
        )
        rows = [-sum(v for v, m in zip(r, k, strict=True) if m) for r, k in zip(log_probs.tolist(), mask, strict=True)]
        assert loss.item() == pytest.approx(sum(rows) / constant / 2 / 2, rel=1e-5)
        torch.testing.assert_close(log_probs.grad, -step * mask / constant / 4)


def test_eight_micro_batches_of_one_are_one_of_eight():
    log_probs = -torch.rand(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = torch.rand(8, 5, generator=torch.Generator().manual_seed(1)) < 0.6
    whole, pieces = log_probs.clone().requires_grad_(), log_probs.clone().requires_grad_()
    loss, _ = sft_microbatch_train_step(whole, mask, 1, 3.0)
    parts = [sft_microbatch_train_step(pieces[row : row + 1], mask[row : row + 1], 8, 3.0)[0] for row in range(8)]
    torch.testing.assert_close(whole.grad, pieces.grad)
    torch.testing.assert_close(loss, sum(parts))


def test_the_handouts_signature_of_the_grpo_step():
    names = list(inspect.signature(grpo_microbatch_train_step).parameters)
    assert names == [
        "policy_log_probs",
        "response_mask",
        "gradient_accumulation_steps",
        "loss_type",
        "raw_rewards",
        "advantages",
        "old_log_probs",
        "cliprange",
    ]


def test_grpo_microbatch_train_step_worked_by_hand():
    mask = torch.tensor([[False, True, True], [False, False, True]])
    column = torch.tensor([[2.0], [-1.0]])
    for loss_type, name in (("no_baseline", "raw_rewards"), ("reinforce_with_baseline", "advantages")):
        log_probs = torch.tensor([[-1.0, -2.0, -3.0], [-4.0, -5.0, -6.0]], requires_grad=True)
        loss, metadata = grpo_microbatch_train_step(log_probs, mask, 4, loss_type, **{name: column})
        assert loss.item() == pytest.approx(((2 * 2 + 2 * 3) / 2 - 6) / 2 / 4)
        torch.testing.assert_close(log_probs.grad, torch.tensor([[0, -1, -1], [0, 0, 1]]) / 8)
        assert not loss.requires_grad
        assert metadata == {}


def test_grpo_clip_microbatch_train_step_worked_by_hand():
    mask = torch.tensor([[True, True, True, True], [True, True, False, False]])
    ratio = torch.tensor([[1.0, 0.5, 1.5, 1.1], [0.5, 1.5, 0.1, 9.0]])
    old = torch.full((2, 4), -1.0)
    log_probs = (old + ratio.log()).requires_grad_()
    loss, metadata = grpo_microbatch_train_step(
        log_probs, mask, 2, "grpo_clip", advantages=torch.tensor([[2.0], [-1.0]]), old_log_probs=old, cliprange=0.2
    )
    assert loss.item() == pytest.approx((-2 * (1 + 0.5 + 1.2 + 1.1) / 4 + (0.8 + 1.5) / 2) / 2 / 2)
    expected = torch.tensor([[-2 * 1.0, -2 * 0.5, 0, -2 * 1.1], [0, 2 * 1.5, 0, 0]]) / 4 / 4
    torch.testing.assert_close(log_probs.grad, expected)
    assert {name: value.item() for name, value in metadata.items()} == pytest.approx(
        {"ratio": 6.1 / 6, "clipped": 2 / 6, "clipped_low": 1 / 6, "clipped_high": 1 / 6}
    )


@pytest.mark.parametrize("loss_type", get_args(HandoutLoss))
def test_equal_grpo_micro_batches_accumulate_to_their_union(loss_type):
    generator = torch.Generator().manual_seed(3)
    log_probs = -torch.rand(8, 5, dtype=torch.float64, generator=generator)
    mask = torch.rand(8, 5, generator=generator) < 0.6
    mask[:, 2] = True
    column = torch.randn(8, 1, dtype=torch.float64, generator=generator)
    old = log_probs + 0.4 * torch.randn(8, 5, dtype=torch.float64, generator=generator)

    def accumulated(size):
        pieces = log_probs.clone().requires_grad_()
        losses = []
        for rows in torch.arange(8).split(size):
            loss, _ = grpo_microbatch_train_step(
                pieces[rows],
                mask[rows],
                8 // size,
                loss_type,
                raw_rewards=column[rows],
                advantages=column[rows],
                old_log_probs=old[rows],
                cliprange=0.2,
            )
            losses.append(loss)
        return pieces.grad, sum(losses)

    gradient, loss = accumulated(8)
    assert gradient.abs().sum() > 0
    for size in (1, 2, 4):
        torch.testing.assert_close(accumulated(size)[0], gradient, rtol=1e-12, atol=1e-15)
        torch.testing.assert_close(accumulated(size)[1], loss, rtol=1e-12, atol=1e-15)


# The supplement

ROWS = [
    {"prompt": "Add 1 and 1.", "response": "2"},
    {"prompt": "Say {question}.", "response": "{question}\n"},
    {"prompt": "And?", "response": "the end"},
]
ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{}\n\n### Response:\n{}"
)


@pytest.fixture
def instructions(tmp_path):
    path = tmp_path / "sft.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def documents(tokenizer):
    return [[*tokenizer(ALPACA.format(r["prompt"], r["response"])).input_ids, tokenizer.eos_token_id] for r in ROWS]


@pytest.mark.parametrize("seq_length", [1, 7, 32])
def test_packed_examples_are_the_documents_without_gaps_and_labels_are_shifted_by_one(
    tiny_tokenizer, instructions, seq_length
):
    packed = handout.get_packed_sft_dataset(tiny_tokenizer, instructions, seq_length, shuffle=False)
    ids = list(itertools.chain(*documents(tiny_tokenizer)))
    assert len(packed) == (len(ids) - 1) // seq_length
    whole = len(packed) * seq_length
    assert [i for example in packed for i in example["input_ids"].tolist()] == ids[:whole]
    assert [i for example in packed for i in example["labels"].tolist()] == ids[1 : whole + 1]
    assert {(e[name].dtype, e[name].shape) for e in packed for name in e} == {(torch.int64, (seq_length,))}
    with pytest.raises(IndexError):
        packed[len(packed)]


def test_a_last_example_without_its_last_label_is_dropped(tiny_tokenizer, instructions):
    ids = list(itertools.chain(*documents(tiny_tokenizer)))
    assert len(handout.get_packed_sft_dataset(tiny_tokenizer, instructions, len(ids), shuffle=False)) == 0
    assert len(handout.get_packed_sft_dataset(tiny_tokenizer, instructions, len(ids) - 1, shuffle=False)) == 1


def test_shuffling_moves_whole_documents(tiny_tokenizer, instructions):
    torch.manual_seed(0)
    seen = set()
    for _ in range(20):
        packed = handout.get_packed_sft_dataset(tiny_tokenizer, instructions, 1, shuffle=True)
        text = tiny_tokenizer.decode([example["input_ids"].item() for example in packed])
        seen.add(tuple(text.split(tiny_tokenizer.eos_token)))
    whole = {tiny_tokenizer.decode(document[:-1]) for document in documents(tiny_tokenizer)}
    assert {frozenset(order) for order in seen} == {frozenset(whole)}
    assert len(seen) > 3


def test_each_document_begins_with_the_tokenizers_bos(tiny_tokenizer, instructions, monkeypatch):
    from tokenizers.processors import TemplateProcessing

    kept = tiny_tokenizer.backend_tokenizer.post_processor
    tiny_tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", tiny_tokenizer.pad_token_id)]
    )
    try:
        packed = handout.get_packed_sft_dataset(tiny_tokenizer, instructions, 1, shuffle=False)
    finally:
        tiny_tokenizer.backend_tokenizer.post_processor = kept
    ids = [example["input_ids"].item() for example in packed]
    assert ids.count(tiny_tokenizer.pad_token_id) == len(ROWS)
    assert ids[0] == tiny_tokenizer.pad_token_id


def test_instructions_that_cannot_be_packed_are_an_error(tiny_tokenizer, instructions):
    with pytest.raises(RlvrError, match="seq_length is 0"):
        handout.get_packed_sft_dataset(tiny_tokenizer, instructions, 0, shuffle=False)
    instructions.write_text('{"prompt": "a"}\n')
    with pytest.raises(RlvrError, match=r"sft\.jsonl:1: no prompt or no response; the keys are prompt"):
        handout.get_packed_sft_dataset(tiny_tokenizer, instructions, 4, shuffle=False)


def test_iterate_batches_is_one_epoch(tiny_tokenizer, instructions):
    packed = handout.get_packed_sft_dataset(tiny_tokenizer, instructions, 4, shuffle=False)
    batches = handout.iterate_batches(packed, 8, shuffle=False)
    assert len(batches) == -(-len(packed) // 8)
    torch.testing.assert_close(torch.cat([b["labels"] for b in batches]), torch.stack([e["labels"] for e in packed]))
    torch.manual_seed(0)
    shuffled = torch.cat([b["input_ids"] for b in handout.iterate_batches(packed, 8, shuffle=True)]).tolist()
    in_order = [e["input_ids"].tolist() for e in packed]
    assert shuffled != in_order
    assert sorted(shuffled) == sorted(in_order)


@pytest.mark.parametrize(
    ("output", "letter"),
    [
        ("The correct answer is B. There is only one human polyomavirus known at present.", "B"),
        ("The correct answer is 10000 polyomaviruses.", None),
        ("The answer is a virus. I say (C)", None),
        ("The answer is (D), I think.", "D"),
        ("First I thought that the answer is A. The correct answer is C.", "C"),
        ("Answer: **B**", "B"),
        ("B", "B"),
        ("B) 1", "B"),
        ("A virus is small.", None),
        ("A-level answers vary.", None),
        ("Option D is right.", "D"),
        (r"so \boxed{C}", "C"),
        ("it is </think> <answer> A </answer>", "A"),
        ("The correct answer is E.", None),
        ("", None),
    ],
)  # fmt: skip
def test_parse_mmlu_response(output, letter):
    example = {"subject": "virology", "question": "How many?", "options": ["100", "1", "10", "unknown"], "answer": "A"}
    assert handout.parse_mmlu_response(example, output) == letter


@pytest.mark.parametrize(
    ("output", "number"),
    [
        ("Natalia sold 48/2 = 24 clips in May. Natalia sold 48+24 = 72 clips altogether in April and May.", "72"),
        ("Natalia sold seventy-two clips altogether in April and May.", None),
        ("It costs $1,250.50.", "1250.50"),
        ("-3", "-3"),
    ],
)
def test_parse_gsm8k_response(output, number):
    assert handout.parse_gsm8k_response(output) == number


def test_the_dpo_loss_is_that_of_the_unconditional_log_probabilities(tiny_model, tiny_tokenizer):
    """The log-probability of the prompt cancels, as the supplement says; computed here with one row at a time."""
    from copy import deepcopy

    reference = deepcopy(tiny_model)
    with torch.no_grad():
        for parameter in tiny_model.parameters():
            parameter.mul_(1.1)

    def log_prob(model, response):
        ids = tiny_tokenizer(ALPACA.format("The quick brown fox", response), return_tensors="pt").input_ids
        ids = torch.cat([ids, torch.tensor([[tiny_tokenizer.eos_token_id]])], dim=1)
        return model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None]).sum()

    def loss(beta):
        chosen, rejected = (log_prob(tiny_model, r) - log_prob(reference, r) for r in ("the lazy dog.", "2"))
        return -torch.nn.functional.logsigmoid(beta * (chosen - rejected))

    for beta in (0.1, 0.5):
        found = handout.compute_per_instance_dpo_loss(
            tiny_model, reference, tiny_tokenizer, beta, "The quick brown fox", "the lazy dog.", "2"
        )
        assert found.shape == ()
        torch.testing.assert_close(found, loss(beta), rtol=1e-4, atol=1e-4)
    found.backward()
    assert all(parameter.grad is None for parameter in reference.parameters())
    gradients = [parameter.grad.clone() for parameter in tiny_model.parameters()]
    tiny_model.zero_grad()
    loss(0.5).backward()
    torch.testing.assert_close(gradients, [p.grad for p in tiny_model.parameters()], rtol=1e-2, atol=1e-3)


def test_the_dpo_loss_of_a_gpt2(tiny_tokenizer):
    """The course's test has one: its head has another name, and it has positions of its own."""
    from transformers import GPT2Config, GPT2LMHeadModel

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, reference = (
            GPT2LMHeadModel(GPT2Config(vocab_size=len(tiny_tokenizer), n_embd=16, n_layer=2, n_head=2)).eval()
            for _ in range(2)
        )
    arguments = (tiny_tokenizer, 0.5, "The quick brown fox", "the lazy dog.", "their frog.")
    same = handout.compute_per_instance_dpo_loss(model, model, *arguments)
    torch.testing.assert_close(same, torch.tensor(2.0).log())
    other = handout.compute_per_instance_dpo_loss(model, reference, *arguments)
    assert abs(other.item() - same.item()) > 1e-4
