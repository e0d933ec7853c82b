"""The losses of distillation: worked numbers, a slow reference, and an update that no layout and nothing outside changes."""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import slow
from policies import make_batch, make_policy
from rlvr_cli.config.distill import DistillConfig
from rlvr_cli.models.divergence import Teacher
from rlvr_cli.models.policy import as_policy
from rlvr_cli.training.losses.distillation import DIVERGENCES, distillation
from rlvr_cli.training.losses.inputs import LossInputs
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.planning.plan import distill_objective
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update

OUTSIDE = [0.0, math.nan, 1e9, -math.inf]
NAMES = list(DIVERGENCES)
LENGTHS = [(3, 4), (3, 2), (2, 1), (2, 6), (5, 3), (5, 3), (3, 5), (4, 2)]


@pytest.mark.parametrize("outside", OUTSIDE)
def test_sampled_worked_by_hand(outside):
    student = torch.tensor([[-0.4, -0.7, outside]], dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        log_probs=student,
        entropy=student.detach(),
        response_mask=torch.tensor([[True, True, False]]),
        old_log_probs=student.detach(),
        sampled_log_probs=student.detach(),
        teacher_log_probs=torch.tensor([[-0.1, -2.0, outside]], dtype=torch.float64),
        advantages=torch.tensor([[0.5]], dtype=torch.float64),
    )
    for weight, gradient in ((0.0, [-0.3, 1.3]), (2.0, [-1.3, 0.3])):
        outputs = policy_gradient(inputs, loss=partial(distillation, divergence="sampled", task_reward=weight))
        (got,) = torch.autograd.grad(outputs.loss[inputs.response_mask].sum(), student)
        assert got[0, :2].tolist() == pytest.approx(gradient)
        assert got[0, 2] == 0
        kept = outputs.statistics["divergence"][inputs.response_mask]
        assert kept.mean().item() == pytest.approx(0.5), "the estimate of the divergence"
        assert outputs.statistics["teacher_log_prob"][0, :2].tolist() == pytest.approx([-0.1, -2.0])


def test_the_plan_says_what_is_minimized():
    assert distill_objective(DistillConfig()).startswith(
        "(1/T) sum_i,t KL(p_i,t || q_i,t);  KL(p || q) = sum_v p(v) log"
    )
    assert distill_objective(DistillConfig(divergence="forward_kl")).startswith("(1/T) sum_i,t KL(q_i,t || p_i,t);")
    sampled = distill_objective(DistillConfig(divergence="sampled", sampling_temperature=0.7))
    assert sampled.startswith("-(1/T) sum_i,t rho_i,t A_i,t;  rho = p/p_old, A = log q/p_old of the sampled token")
    assert "both at temperature 0.7" in sampled
    assert "-(1/T) sum_i,t [rho_i,t A_i,t + 0.5 rho_i,t R_i];" in distill_objective(
        DistillConfig(divergence="sampled", task_reward=0.5)
    )
    assert "(1/T) sum_i,t [KL(p_i,t || q_i,t) - 0.5 rho_i,t R_i];" in distill_objective(DistillConfig(task_reward=0.5))


# The update


def moved(model, *, seed=9):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
    return model


def distill_batch(temperature=1.0):
    batch = make_batch(LENGTHS)
    for row in (1, 5):  # two rows with the prompt of the row before
        prompt = LENGTHS[row][0]
        batch["input_ids"][row, :prompt] = batch["input_ids"][row - 1, :prompt]
        batch["labels"][row, : prompt - 1] = batch["labels"][row - 1, : prompt - 1]
    generator = torch.Generator().manual_seed(4)
    batch["advantages"] = torch.randn(len(LENGTHS), 1, generator=generator, dtype=torch.float64)
    batch["sampled_log_probs"] = torch.zeros(batch["labels"].shape, dtype=torch.float64)
    batch["teacher_log_probs"] = compute_log_probs(teacher(), batch, micro_batch_size=3, temperature=temperature)
    return batch


def teacher():
    return moved(make_policy(layers=2), seed=1)


def updated(batch, name, *, size, tokens=None, task_reward=0.7, temperature=0.8):
    """The weights after one update of plain gradient descent, and its metrics."""
    student = moved(make_policy())
    metrics = train_update(
        student,
        torch.optim.SGD(student.parameters(), lr=0.1),
        {k: v for k, v in batch.items() if k != "teacher_log_probs" or name == "sampled"},
        learning_rate=0.1,
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        objective=partial(policy_gradient, loss=partial(distillation, divergence=name, task_reward=task_reward)),
        max_grad_norm=math.inf,
        temperature=temperature,
        teacher=Teacher(as_policy(teacher()), reverse=name == "reverse_kl") if DIVERGENCES[name].full else None,
    )
    return torch.cat([p.detach().flatten() for p in student.parameters()]), metrics


def plainly_updated(batch, name, *, task_reward=0.7, temperature=0.8):
    """The same by whole logits of each response alone, by the definitions."""
    student, other = moved(make_policy()), teacher()
    losses, divergences, of_teacher = [], [], []
    for row, (prompt, length) in enumerate(LENGTHS):
        ids = torch.cat([batch["input_ids"][row, :1], batch["labels"][row, : prompt + length - 1]])[None]
        p, q = ((model(ids).logits[0, prompt - 1 : -1] / temperature).log_softmax(-1) for model in (student, other))
        q = q.detach()
        places = torch.arange(length), ids[0, prompt:]
        kl = {
            "reverse_kl": (p.exp() * (p - q)).sum(-1),
            "forward_kl": (q.exp() * (q - p)).sum(-1),
            "sampled": (p - q)[places].detach(),
        }[name]
        ratio = (p[places] - p[places].detach()).exp()
        losses.append((kl * ratio if name == "sampled" else kl) - task_reward * batch["advantages"][row, 0] * ratio)
        divergences.append(kl.detach())
        of_teacher.append(q[places])
    loss = torch.cat(losses).mean()
    loss.backward()
    weights = [p.detach() - 0.1 * (p.grad if p.grad is not None else 0) for p in student.parameters()]
    means = {
        "divergence": torch.cat(divergences).mean().item(),
        "teacher_log_prob": torch.cat(of_teacher).mean().item(),
    }
    return torch.cat([w.flatten() for w in weights]), loss.item(), means


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("size", "tokens"), [(1, None), slow(2, None), (3, None), slow(8, None), (4, 12), slow(4, 30)])
def test_an_update_is_the_plain_one_in_any_micro_batches(name, size, tokens):
    batch = distill_batch(temperature=0.8)
    weights, metrics = updated(batch, name, size=size, tokens=tokens)
    expected, loss, means = plainly_updated(batch, name)
    torch.testing.assert_close(weights, expected, rtol=0, atol=1e-10)
    assert metrics["loss/objective"] == pytest.approx(loss, abs=1e-12)
    for statistic, mean in means.items():
        assert metrics[f"policy/{statistic}_mean"] == pytest.approx(mean, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=2)
@given(order=st.permutations(range(len(LENGTHS))), size=st.integers(1, 8))
def test_an_update_does_not_depend_on_the_order_of_the_rows(name, order, size):
    batch = distill_batch()
    expected, _ = updated(batch, name, size=8)
    shuffled = {key: tensor[list(order)] for key, tensor in batch.items()}
    torch.testing.assert_close(updated(shuffled, name, size=size)[0], expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("value", OUTSIDE[1:])
def test_values_outside_the_responses_change_nothing(name, value):
    batch = distill_batch()
    outside = ~batch["response_mask"]
    spoiled = {key: batch[key].masked_fill(outside, value) for key in ("teacher_log_probs", "sampled_log_probs")}
    expected, metrics = updated(batch, name, size=4)
    found, same = updated(batch | spoiled, name, size=4)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert {k: v for k, v in same.items() if "seconds" not in k} == {
        k: v for k, v in metrics.items() if "seconds" not in k
    }


def test_padding_after_the_responses_changes_nothing():
    """Its ids reach neither model's distributions at the response tokens."""
    batch = distill_batch()
    after = ~batch["response_mask"] & (batch["response_mask"].cumsum(1) > 0)
    spoiled = batch | {"labels": batch["labels"].masked_fill(after, 7)}
    for name in NAMES:
        torch.testing.assert_close(updated(spoiled, name, size=4)[0], updated(batch, name, size=4)[0], rtol=0, atol=0)


@pytest.mark.parametrize("name", ["reverse_kl", "forward_kl"])
def test_a_student_that_is_its_teacher_does_not_move(name):
    batch, student = distill_batch(), moved(make_policy())
    before = [p.detach().clone() for p in student.parameters()]
    metrics = train_update(
        student,
        torch.optim.SGD(student.parameters(), lr=0.1),
        {k: v for k, v in batch.items() if k != "teacher_log_probs"},
        learning_rate=0.1,
        micro_batch_size=3,
        objective=partial(policy_gradient, loss=partial(distillation, divergence=name)),
        teacher=Teacher(as_policy(moved(make_policy())), reverse=name == "reverse_kl"),
    )
    assert metrics["policy/divergence_mean"] == 0
    assert all(torch.equal(p, b) for p, b in zip(student.parameters(), before, strict=True))
