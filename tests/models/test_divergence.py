"""KL divergences between two models' distributions: worked numbers, identities, and the chunks they are computed in."""

import json
import math
import shutil

import pytest
import torch

from largest import LargestTensor
from policies import VOCAB, make_batch, make_policy
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.divergence import Teacher, check_teacher
from rlvr_cli.models.log_probs import get_response_log_probs, wanted_in
from rlvr_cli.models.policy import Head, as_policy

STUDENT, TEACHER = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3]
SIZES = [1, 2, 3, 7, 100]


def teacher_states(states, weight=None, bias=None, *, reverse):
    """What a teacher with these hidden states, or logits, computes."""
    from rlvr_cli.models.divergence import TeacherStates, _source

    return TeacherStates(_source(states, None if weight is None else Head(weight, bias)), reverse)


@pytest.mark.parametrize("chunk_size", SIZES)
@pytest.mark.parametrize(
    ("reverse", "value", "gradient"),
    [(True, 0.223805, [0.346243, -0.220389, -0.125854]), (False, 0.193794, [0.3, -0.2, -0.1])],
)
def test_worked_numbers(reverse, value, gradient, chunk_size):
    logits = torch.tensor([STUDENT], dtype=torch.float64).log().requires_grad_()
    of_teacher = torch.tensor([TEACHER], dtype=torch.float64).log() + 5.0  # logits are up to a constant
    found = teacher_states(of_teacher, reverse=reverse).compared(
        logits, None, torch.tensor([1]), temperature=1.0, chunk_size=chunk_size
    )
    assert found["divergence"].item() == pytest.approx(value, abs=1e-6)
    assert found["teacher_log_probs"].item() == pytest.approx(math.log(0.5), abs=1e-12)
    (got,) = torch.autograd.grad(found["divergence"].sum(), logits)
    assert got[0].tolist() == pytest.approx(gradient, abs=1e-6)


def plain(student, teacher, *, reverse, temperature, bias=0.0, of_teacher_bias=0.0):
    """The divergences from whole logits over the ids that both have."""
    logits = [hidden @ weight.T for hidden, weight in (student, teacher)]
    size = min(len(student[1]), len(teacher[1]))
    p, q = (
        ((values + b)[:, :size] / temperature).log_softmax(-1)
        for values, b in zip(logits, (bias, of_teacher_bias), strict=True)
    )
    first, second = (p, q) if reverse else (q, p)
    return (first.exp() * (first - second)).sum(-1), q


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("chunk_size", SIZES)
@pytest.mark.parametrize("sizes", [(11, 11), (11, 13), (13, 11)], ids=str)
def test_every_chunk_size_gives_the_plain_divergence_and_gradients(sizes, chunk_size, reverse):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    hidden, weight, bias = draw(6, 5).requires_grad_(), draw(sizes[0], 5).requires_grad_(), draw(sizes[0])
    bias.requires_grad_()
    of_teacher, other, other_bias, labels = draw(6, 4), draw(sizes[1], 4), draw(sizes[1]), torch.arange(6)
    found = teacher_states(of_teacher, other, other_bias, reverse=reverse).compared(
        hidden, Head(weight, bias), labels, temperature=0.7, chunk_size=chunk_size
    )
    expected, q = plain(
        (hidden, weight), (of_teacher, other), reverse=reverse, temperature=0.7, bias=bias, of_teacher_bias=other_bias
    )
    torch.testing.assert_close(found["divergence"], expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found["teacher_log_probs"], q[torch.arange(6), labels], rtol=1e-12, atol=1e-12)
    assert not found["teacher_log_probs"].requires_grad
    upstream = draw(6)
    got = torch.autograd.grad((upstream * found["divergence"]).sum(), (hidden, weight, bias))
    wanted = torch.autograd.grad((upstream * expected).sum(), (hidden, weight, bias))
    torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("reverse", [True, False])
def test_equal_distributions_have_no_divergence_and_no_gradient(reverse):
    """Also where float32 logits are so large that a difference of sums would keep 1e-5."""
    logits = (100 + 30 * torch.randn(4, 50, generator=torch.Generator().manual_seed(0))).requires_grad_()
    for chunk_size in (7, 50):
        found = teacher_states(logits.detach(), reverse=reverse).compared(
            logits, None, torch.arange(4), temperature=1.0, chunk_size=chunk_size
        )["divergence"]
        (gradient,) = torch.autograd.grad(found.sum(), logits)
        assert found.abs().max() == 0
        assert gradient.abs().max() == 0


@pytest.mark.parametrize("reverse", [True, False])
def test_a_token_without_probability_adds_nothing(reverse):
    """A bias of -inf forbids a token; both forbid it here."""
    hidden, weight = torch.ones(2, 3, dtype=torch.float64, requires_grad=True), torch.randn(5, 3).double()
    bias = torch.tensor([0.0, -math.inf, 0.5, 0.0, 0.0], dtype=torch.float64)
    found = teacher_states(torch.ones(2, 3).double(), weight.flip(1), bias, reverse=reverse).compared(
        hidden, Head(weight, bias), torch.tensor([0, 2]), temperature=1.0, chunk_size=2
    )["divergence"]
    kept = [0, 2, 3, 4]
    expected, _ = plain(
        (hidden, weight[kept]),
        (torch.ones(2, 3).double(), weight.flip(1)[kept]),
        reverse=reverse,
        temperature=1.0,
        bias=bias[kept],
        of_teacher_bias=bias[kept],
    )
    torch.testing.assert_close(found, expected)
    got, wanted = (torch.autograd.grad(values.sum(), hidden)[0] for values in (found, expected))
    torch.testing.assert_close(got, wanted)


def moved(model, *, by=0.3, seed=1):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += by * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return model


def scored(student, teacher, batch, *, reverse, temperature=1.0, chunk_size=None):
    """`get_response_log_probs` with a teacher."""
    policy = as_policy(teacher)
    wanted = wanted_in(policy, batch["input_ids"], batch["response_mask"])
    return get_response_log_probs(
        student,
        batch["input_ids"],
        batch["labels"],
        response_mask=batch["response_mask"],
        temperature=temperature,
        chunk_size=chunk_size,
        teacher=Teacher(policy, reverse).states(batch["input_ids"], wanted),
    )


LENGTHS = [(3, 4), (3, 2), (2, 1), (5, 6)]


@pytest.mark.parametrize("reverse", [True, False])
@pytest.mark.parametrize("full", [False, True], ids=["head", "logits"])
def test_two_models_are_compared_at_the_response_tokens(full, reverse, monkeypatch):
    """By chunks of their heads, or by the logits of models without a linear one."""
    student, teacher, batch = make_policy(), moved(make_policy(layers=2)), make_batch(LENGTHS)
    if full:
        monkeypatch.setattr("rlvr_cli.models.policy._has_linear_head", lambda model: False)
    found = scored(student, teacher, batch, reverse=reverse, temperature=0.8, chunk_size=9)
    p, q = ((model(batch["input_ids"]).logits / 0.8).log_softmax(-1) for model in (student, teacher))
    first, second = (p, q) if reverse else (q, p)
    expected = (first.exp() * (first - second)).sum(-1) * batch["response_mask"]
    torch.testing.assert_close(found["divergence"], expected, rtol=1e-10, atol=1e-12)
    labels = q.gather(-1, batch["labels"][..., None]).squeeze(-1) * batch["response_mask"]
    torch.testing.assert_close(found["teacher_log_probs"], labels, rtol=1e-10, atol=1e-12)
    parameters = list(student.parameters())
    got = torch.autograd.grad(found["divergence"].sum(), parameters)
    wanted = torch.autograd.grad(expected.sum(), parameters)
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_the_sampled_advantage_has_the_full_gradient_in_expectation():
    """Over all responses of two tokens, each with its probability: log q - log p of each token alone, a discount of 0."""
    student, teacher = moved(make_policy(), by=0.1), moved(make_policy(), by=0.1, seed=2)
    parameters = list(student.parameters())
    prompt, vocabulary = torch.tensor([[3, 5]]), torch.arange(VOCAB)
    second = torch.cat([prompt.expand(VOCAB, 2), vocabulary[:, None]], dim=1)

    def log_softmax(model):
        """Of the first token, (1, V), and of the second after each first one, (V, V)."""
        return model(prompt).logits[:, -1].log_softmax(-1), model(second).logits[:, -1].log_softmax(-1)

    p, q = log_softmax(student), log_softmax(teacher)
    weights = (p[0].exp().detach(), (p[0].exp().T * p[1].exp()).detach())  # of each path up to the token
    sampled = sum((w * p_t * -(q_t - p_t).detach()).sum() for w, p_t, q_t in zip(weights, p, q, strict=True))
    reach = (torch.ones(1).double(), p[0].exp().detach()[0])  # of each prefix
    full = sum((r * (p_t.exp() * (p_t - q_t)).sum(-1)).sum() for r, p_t, q_t in zip(reach, p, q, strict=True))
    got = torch.autograd.grad(sampled, parameters, retain_graph=True)
    wanted = torch.autograd.grad(full, parameters, retain_graph=True)
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)
    assert max(float(g.abs().max()) for g in wanted) > 1e-3


def test_the_logits_of_a_batch_never_exist(monkeypatch):
    monkeypatch.setattr("rlvr_cli.models.log_probs._KEPT_LOGITS", 0)
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(300, 8, generator=generator), torch.randn(1000, 8, generator=generator)
    states = teacher_states(hidden + 1, weight + 0.1, reverse=True)
    with LargestTensor() as largest:
        found = states.compared(
            hidden.requires_grad_(),
            Head(weight.requires_grad_(), None),
            torch.arange(300),
            temperature=1.0,
            chunk_size=20,
        )
        found["divergence"].sum().backward()
    assert largest.numel == weight.numel()
    assert largest.numel < 300 * 1000 / 30


# What makes a teacher


def changed(model_dir, folder, **files):
    """A copy of a model's directory in which these JSON files have other entries."""
    shutil.copytree(model_dir, folder)
    for name, entries in files.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | entries))
    return str(folder)


def test_a_model_with_the_same_tokens_is_a_teacher(tiny_model_dir, tmp_path):
    check_teacher(str(tiny_model_dir), student=str(tiny_model_dir))
    check_teacher(changed(tiny_model_dir, tmp_path / "a", config={"vocab_size": 999}), student=str(tiny_model_dir))


def test_another_vocabulary_of_the_same_size_is_refused(tiny_model_dir, tmp_path):
    tokens = json.loads((tiny_model_dir / "tokenizer.json").read_text())["model"]
    a, b = (name for name, i in tokens["vocab"].items() if i in (300, 301))
    swapped = {"model": tokens | {"vocab": tokens["vocab"] | {a: 301, b: 300}}}
    teacher = changed(tiny_model_dir, tmp_path / "a", tokenizer=swapped)
    with pytest.raises(RlvrError, match=r"different vocabularies: token 300 is .* to the student, .* to the teacher"):
        check_teacher(teacher, student=str(tiny_model_dir))


@pytest.mark.parametrize("of_teacher", [True, False])
def test_another_end_of_a_response_is_refused(of_teacher, tiny_model_dir, tmp_path):
    other = changed(tiny_model_dir, tmp_path / "a", generation_config={"eos_token_id": [0, 7]})
    names = (other, str(tiny_model_dir)) if of_teacher else (str(tiny_model_dir), other)
    with pytest.raises(RlvrError, match="Responses of the student end with token 0") as raised:
        check_teacher(names[0], student=names[1])
    assert "eos_token_id" in raised.value.hint
