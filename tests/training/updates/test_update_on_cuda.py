"""An update on a CUDA device: its numbers, and with the shapes of Qwen2.5-Math-1.5B its types, memory and waits."""

import copy
import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch

import flash
from fake_cuda import fake_cuda
from marks import slow
from policies import make_batch, make_policy
from rlvr_cli.models import log_probs
from rlvr_cli.models.adapter import AdaptedPolicy, add_adapter
from rlvr_cli.models.compute import logits as logits_module
from rlvr_cli.models.compute.bitsandbytes import import_bitsandbytes
from rlvr_cli.models.divergence import Teacher
from rlvr_cli.models.policy import Critic, Lora, Policy, as_policy
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.training.losses.distillation import distillation
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.losses.value import actor_critic
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.updates.scores import compute_log_probs, compute_scores
from rlvr_cli.training.updates.update import train_update
from shapes import math_1_5b

HALF, WIDE = torch.bfloat16, torch.float32
OBJECTIVE = partial(policy_gradient, loss=partial(LOSSES["grpo_clip"].function, cliprange=0.2))


def with_columns(batch):
    """The batch, with what the objective reads."""
    rows = len(batch["labels"])
    sampled = torch.full(batch["labels"].shape, -2.0)
    advantages = torch.linspace(-1, 1, rows)[:, None]
    return batch | {"advantages": advantages, "sampled_log_probs": sampled, "old_log_probs": sampled - 0.1}


def update(model, batch, *, micro_batch_size=2, seen=lambda: None, **how):
    """Its metrics; `seen` is called before AdamW's step."""
    optimizer = make_optimizer(model, learning_rate=0.01)
    optimizer.register_step_pre_hook(lambda *_: seen())
    options = {"learning_rate": 0.01, "micro_batch_size": micro_batch_size, "objective": OBJECTIVE, **how}
    return train_update(model, optimizer, batch, **options)


def update_and_score(model, batch, **how):
    """The metrics of an update, its gradients, and the log-probabilities after it."""
    gradients = {}

    def see():
        gradients.update({name: p.grad.cpu() for name, p in model.named_parameters()})

    metrics = update(model, batch, seen=see, **how)
    return metrics, gradients | {"log-probabilities": compute_log_probs(model, batch, micro_batch_size=2)}


def weights_of(model):
    return {name: p.detach().cpu() for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [(torch.float64, True), (WIDE, False), slow(torch.float64, False), slow(WIDE, True)]
)
def test_an_update_is_that_of_a_cpu(dtype, checkpointing, monkeypatch):
    """To the last digits in float64; float32 weights compute in bfloat16. The head works in chunks, and keeps some of them."""
    for name in ("_LOGITS_ON_CUDA", "_LOGITS_ON_CPU"):
        monkeypatch.setattr(logits_module, name, 1)
    monkeypatch.setattr(logits_module, "_MIN_CHUNK", 8)
    monkeypatch.setattr(log_probs, "_KEPT_LOGITS", 600)
    batch = with_columns(make_batch([(3, 9), (3, 5), (6, 7), (2, 11)]))
    model = make_policy(dtype)
    there, before = copy.deepcopy(model), weights_of(model)
    expected_metrics, expected = update_and_score(model, batch)
    with fake_cuda() as cuda:
        there.to("cuda:1")
        cuda.forget()
        metrics, found = update_and_score(there, batch, gradient_checkpointing=checkpointing)
        assert not cuda.astray
        assert torch.cuda.current_device() == 0
        after = weights_of(there)
    assert sum(not weight.equal(before[name]) for name, weight in after.items()) > len(after) // 2
    assert metrics.keys() == expected_metrics.keys()
    if dtype == torch.float64:
        torch.testing.assert_close(found | after, expected | weights_of(model), rtol=1e-9, atol=1e-11)
        for name in metrics.keys() - {"update/seconds"}:
            assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-6), name
        return
    assert metrics["optimizer/grad_norm"] == pytest.approx(expected_metrics["optimizer/grad_norm"], rel=0.05)
    for name, tensor in expected.items():
        assert found[name].dtype == WIDE
        assert 0 < (found[name] - tensor).norm() < 0.15 * tensor.norm(), name


@pytest.mark.slow
def test_an_update_with_flash_attn_leaves_out_the_padding_of_rows(monkeypatch):
    """Its numbers are those without it, to what the order of sums in bfloat16 makes of them."""
    batch = with_columns(make_batch([(3, 9), (3, 5), (6, 7), (2, 11)]))
    model = make_policy(WIDE)
    found = []
    with fake_cuda() as cuda:
        for with_flash in (False, True):
            calls = flash.install(monkeypatch) if with_flash else []
            there = copy.deepcopy(model).to("cuda:1")
            update(there, batch)  # tests the model's attention
            there.load_state_dict(model.state_dict())
            calls.clear()
            cuda.forget()
            found.append(update_and_score(there, batch)[1])
            assert not cuda.astray
            assert bool(cuda.attentions) != with_flash
        layers = model.config.num_hidden_layers
        passes = [calls[place] for place in range(0, len(calls), layers)]
        assert sum(tokens for tokens, _, _ in passes[: len(passes) // 2]) == 11 + 7 + 12 + 12
    for name, tensor in found[0].items():
        assert (found[1][name] - tensor).norm() < 0.05 * tensor.norm(), name


@pytest.mark.parametrize(
    ("dtype", "checkpointing"),
    [
        (HALF, True),
        *(slow(WIDE, on) for on in (False, True)),
        *(slow(torch.float64, on) for on in (False, True)),
        slow(HALF, False),
    ],
)
def test_an_update_of_an_adapter_is_that_of_a_cpu(dtype, checkpointing):
    batch, model = with_columns(make_batch([(3, 9), (3, 5), (6, 7), (2, 11)])), make_policy(dtype)
    add_adapter(model, Lora(rank=2, alpha=4, seed=0))
    there = copy.deepcopy(model)
    here = AdaptedPolicy(model, base="", compute_dtype="auto" if dtype != WIDE else "bfloat16")
    update(here, batch)
    with fake_cuda() as cuda:
        policy = AdaptedPolicy(there.to("cuda:1"), base="")
        cuda.forget()
        update(policy, batch, gradient_checkpointing=checkpointing)
        assert not cuda.astray
        adapters = [{name: tensor.cpu() for name, tensor in each.weights().items()} for each in (policy, here)]
    assert {tensor.dtype for tensor in adapters[0].values()} == {torch.float64 if dtype == torch.float64 else WIDE}
    for name, tensor in adapters[1].items():
        gap = (adapters[0][name] - tensor).abs()
        assert gap.max() < 1e-9 if dtype == torch.float64 else gap.mean() < 0.003, name  # AdamW's first step is 0.01


@pytest.mark.parametrize(
    ("dtype", "own"), [(WIDE, False), *(slow(torch.float64, own) for own in (False, True)), slow(WIDE, True)]
)
def test_an_update_with_a_critic_is_that_of_a_cpu(dtype, own):
    """Its values are float32 or wider, also where the products of its body are in bfloat16."""
    batch = with_columns(make_batch([(3, 9), (3, 5), (6, 7), (2, 11)]))
    shape = batch["labels"].shape
    batch |= {
        "old_values": torch.zeros(shape),
        "returns": torch.ones(shape),
        "advantages": batch["advantages"].expand(shape),
    }

    model = make_policy(dtype)

    def trained(device, *, ready=lambda: None):
        policy = Policy(copy.deepcopy(model).to(device))
        policy.critic = Critic(policy, Policy(copy.deepcopy(model).to(device)) if own else None)
        with torch.no_grad():
            policy.critic.head.bias.fill_(0.25)
        ready()
        how = {"objective": partial(actor_critic, cliprange=0.2, vf_coef=0.5), "skip_zero_advantage": False}
        metrics = update(policy, batch, gradient_checkpointing=own, **how)
        scores = compute_scores(policy, batch, micro_batch_size=2)
        return metrics, scores, {name: tensor.detach().cpu() for name, tensor in policy.weights().items()}

    expected = trained("cpu")
    with fake_cuda() as cuda:
        found = trained("cuda:1", ready=cuda.forget)
        assert not cuda.astray
    assert found[0].keys() == expected[0].keys()
    assert found[0]["critic/value_mean"] == expected[0]["critic/value_mean"] == 0.25
    assert {scored.dtype for scored in found[1].values()} == {dtype}
    if dtype == torch.float64:
        torch.testing.assert_close(found[1:], expected[1:], rtol=1e-9, atol=1e-11)
        return
    assert found[0]["critic/grad_norm"] == pytest.approx(expected[0]["critic/grad_norm"], rel=0.05)
    for name, tensor in expected[2].items():
        assert (found[2][name] - tensor).abs().mean() < 0.003, name  # AdamW's first step is 0.01


def distill(student, batch, teacher, *, reverse, **how):
    """The metrics of an update that descends the divergence from a teacher."""
    objective = partial(policy_gradient, loss=partial(distillation, divergence="reverse_kl"))
    of_teacher = Teacher(as_policy(teacher), reverse)
    return update(student, batch, objective=objective, teacher=of_teacher, **how)


@pytest.mark.parametrize(
    ("dtype", "reverse"),
    [(torch.float64, True), slow(torch.float64, False), *(slow(WIDE, reverse) for reverse in (False, True))],
)
def test_an_update_with_a_teacher_is_that_of_a_cpu(dtype, reverse, monkeypatch):
    """To the last digits in float64; float32 weights compute in bfloat16. The heads work in chunks."""
    for name in ("_LOGITS_ON_CUDA", "_LOGITS_ON_CPU"):
        monkeypatch.setattr(logits_module, name, 1)
    monkeypatch.setattr(logits_module, "_MIN_CHUNK", 8)
    batch = with_columns(make_batch([(3, 9), (3, 5), (6, 7), (2, 11)]))
    del batch["old_log_probs"]
    student, teacher = make_policy(dtype), make_policy(dtype, layers=2)
    there = copy.deepcopy(student), copy.deepcopy(teacher)
    gradients = [{}, {}]

    def see(model, found):
        found.update({name: p.grad.cpu() for name, p in model.named_parameters()})

    expected = distill(student, batch, teacher, reverse=reverse, seen=lambda: see(student, gradients[0]))
    with fake_cuda() as cuda:
        for model in there:
            model.to("cuda:1")
        cuda.forget()
        metrics = distill(there[0], batch, there[1], reverse=reverse, seen=lambda: see(there[0], gradients[1]))
        assert not cuda.astray
    close = {"rel": 1e-6} if dtype == torch.float64 else {"rel": 0.15}
    for name in ("policy/divergence_mean", "policy/teacher_log_prob_mean", "loss/objective", "optimizer/grad_norm"):
        assert metrics[name] == pytest.approx(expected[name], **close), name
    for name, tensor in gradients[0].items():
        gap = (gradients[1][name] - tensor).norm()
        assert gap < 1e-9 if dtype == torch.float64 else 0 < gap < 0.4 * tensor.norm(), name


def large_batch(rows=4, vocabulary=151_000):
    """Rows of about 700 tokens, with two prompts."""
    generator = torch.Generator().manual_seed(0)

    def draw(count):
        return torch.randint(vocabulary, (count,), generator=generator).tolist()

    one, other = draw(180), draw(160)
    prompts = [one, one, other, other] * (rows // 4)
    return with_columns(collate(prompts, [draw(n) for n in (500, 300, 400, 600)] * (rows // 4), pad_id=0))


@pytest.fixture
def measured():
    """A model of one layer on cuda:1, which one update has tested, and the devices, which begin to count."""
    with fake_cuda(compute=False) as cuda:
        model = math_1_5b(layers=1).to("cuda:1")
        update(model, large_batch())
        cuda.forget()
        yield model, cuda


def test_an_update_multiplies_in_half_precision_keeps_what_must_be_exact_and_holds_neither_masks_nor_all_logits(
    measured,
):
    model, cuda = measured
    update(model, large_batch())
    assert not cuda.astray
    products = cuda.types["mm"] | cuda.types["addmm"] | cuda.types["bmm"]
    assert products <= {(HALF,) * 2, (HALF,) * 3}
    assert {dtype for types in cuda.types["_fused_adamw_"] | cuda.types["_foreach_norm"] for dtype in types} == {WIDE}
    assert cuda.types["exp"] == {(WIDE,)}  # of logits, ratios and entropies
    assert cuda.types["index_add_"] == {(WIDE, torch.int64, WIDE)}  # the gradients of rows that share a prefix
    assert {(p.dtype, str(p.device)) for p in model.parameters()} == {(WIDE, "cuda:1")}

    # Neither a mask of all pairs nor all logits
    assert {(call.kernel, call.dtype, call.mask) for call in cuda.attentions} == {("flash", HALF, None)}
    widths = {call.query[2] for call in cuda.attentions}
    assert widths == {679, 759}
    assert not {shape for shape in cuda.shapes if len(shape) > 1 and shape[-1] in widths and shape[-2] in widths}
    responses = {500 + 300, 400 + 600}  # tokens of each micro-batch
    logits = {math.prod(shape) for shape in cuda.shapes if len(shape) > 1 and responses & {*shape[:-1]}}
    assert max(logits) <= log_probs._KEPT_LOGITS < min(responses) * 151_936


@pytest.mark.slow
@pytest.mark.parametrize(("name", "checkpointing"), [("grpo_clip", True), *((name, False) for name in LOSSES)])
def test_the_host_waits_for_the_device_once_in_an_update(measured, name, checkpointing):
    """For the norm of the gradient and all statistics, after the last micro-batch; never within one."""
    model, cuda = measured
    loss = LOSSES[name]
    objective = partial(policy_gradient, loss=partial(loss.function, **dict.fromkeys(loss.options, 0.2)), kl_coef=0.1)
    batch = large_batch()
    batch |= {"reference_log_probs": batch["sampled_log_probs"], "group": torch.tensor([[0], [0], [1], [1]])}
    update(model, batch, objective=objective, gradient_checkpointing=checkpointing)
    assert cuda.waits == {("stream", "device.py:to_host"): 1}
    assert cuda.uploads == {"device.py:to_device": 2 * (8 + 2 + 5 + 1)}  # columns, positions, prefixes, denominators


@pytest.mark.slow
def test_with_a_teacher_the_host_waits_once_too_and_no_logits_are_held(measured):
    model, cuda = measured
    teacher = math_1_5b(layers=1).to("cuda:1").requires_grad_(False)
    batch = large_batch()
    del batch["old_log_probs"]
    distill(model, batch, teacher, reverse=True)  # tests the teacher
    cuda.forget()
    distill(model, batch, teacher, reverse=True)
    assert not cuda.astray
    assert cuda.waits == {("stream", "device.py:to_host"): 1}
    products = cuda.types["mm"] | cuda.types["addmm"] | cuda.types["bmm"]
    assert products <= {(HALF,) * 2, (HALF,) * 3}
    assert cuda.types["exp"] == cuda.types["logsumexp"] == {(WIDE,)}
    responses = {500 + 300, 400 + 600}  # tokens of each micro-batch
    logits = {math.prod(shape) for shape in cuda.shapes if len(shape) > 1 and responses & {*shape[:-1]}}
    assert max(logits) <= log_probs._KEPT_LOGITS < min(responses) * 151_936


class Case(NamedTuple):
    """Options of an update."""

    weights: torch.dtype = WIDE
    optimizer: str = "adamw"  # or "offload"
    lora: bool = False
    attention: str = "sdpa"  # or "flash-attn"
    kernels: str = "torch"  # or "liger"
    critic: str = ""  # "own", or the policy's body "shared"
    how: Mapping[str, Any] = MappingProxyType({})  # arguments of `train_update`


CHECKPOINTED, BY_TOKENS = {"gradient_checkpointing": True}, {"micro_batch_tokens": 1200}
CASES = {
    "checkpointed": Case(how=CHECKPOINTED),
    "by tokens": Case(how=BY_TOKENS),
    "kahan": Case(HALF, "adamw_kahan"),
    "8bit": Case(optimizer="adamw_8bit"),
    "8bit in bfloat16": Case(HALF, "adamw_8bit"),
    "offload": Case(optimizer="offload"),
    "offload in bfloat16": Case(HALF, "offload"),
    "lora": Case(lora=True),
    "lora in bfloat16, checkpointed": Case(HALF, lora=True, how=CHECKPOINTED),
    "flash-attn": Case(attention="flash-attn"),
    "flash-attn, lora in bfloat16, checkpointed": Case(HALF, lora=True, attention="flash-attn", how=CHECKPOINTED),
    "liger": Case(kernels="liger"),
    "liger, lora in bfloat16, checkpointed": Case(HALF, lora=True, kernels="liger", how=CHECKPOINTED),
    "liger, critic": Case(critic="own", kernels="liger"),
    "liger and flash-attn, kahan": Case(HALF, "adamw_kahan", attention="flash-attn", kernels="liger"),
    "critic": Case(critic="own"),
    "critic of the policy's body, in bfloat16": Case(HALF, "adamw_kahan", critic="shared"),
}
# Each optimizer and kernel once, together with others.
OFTEN = (
    "8bit in bfloat16",
    "offload in bfloat16",
    "flash-attn, lora in bfloat16, checkpointed",
    "liger and flash-attn, kahan",
)
OF_STATE = {  # what each optimizer keeps of a large weight
    "adamw": {WIDE},
    "adamw_kahan": {HALF},
    "adamw_8bit": {torch.uint8, WIDE},
    "offload": {WIDE},
}


@pytest.fixture
def prepared(case, monkeypatch):
    """A policy on cuda:1 with these options, a function that updates it, which has run once, the devices, which begin to count,
    and the calls of flash-attn."""
    if case.kernels == "liger":
        launches = pytest.importorskip("liger_launches", reason="needs liger-kernel", exc_type=ImportError)
    if case.optimizer == "adamw_8bit":
        import_bitsandbytes()
    calls = flash.install(monkeypatch, compute=False) if case.attention == "flash-attn" else []
    # An optimizer on the host computes with real numbers there: fewer, of the same layer.
    small = {"vocabulary": 2048} if case.optimizer == "offload" else {}
    models = [math_1_5b(dtype=case.weights, layers=1, **small) for _ in range(1 + (case.critic == "own"))]
    with ExitStack() as stack:
        if case.lora:
            add_adapter(models[0], Lora(rank=32, alpha=64, seed=0))
        cuda = stack.enter_context(fake_cuda(compute=False))
        policy, *body = [
            (AdaptedPolicy if case.lora else Policy)(model.to("cuda:1"), **({"base": ""} if case.lora else {}))
            for model in models
        ]
        objective, batch = OBJECTIVE, large_batch(vocabulary=small.get("vocabulary", 151_000))
        if case.critic:
            policy.critic = Critic(policy, *body)
            shape = batch["labels"].shape
            batch |= {"old_values": torch.zeros(shape), "returns": torch.ones(shape)}
            batch["advantages"] = batch["advantages"].expand(shape)
            objective = partial(actor_critic, cliprange=0.2, vf_coef=0.5)
        if case.kernels == "liger":
            stack.enter_context(launches.launches_counted(cuda))
            assert policy.use_kernels("liger") == ""
        offload = case.optimizer == "offload"
        kind = "adamw" if offload else case.optimizer
        optimizer = make_optimizer(policy, learning_rate=0.01, kind=kind, offload=offload)
        options = {"learning_rate": 0.01, "micro_batch_size": 2, "objective": objective, **case.how}

        def updated():
            metrics = train_update(policy, optimizer, batch, **options)
            assert (metrics["update/micro_batches"], metrics["update/skipped"]) == (2, 0)
            return optimizer

        updated()
        calls.clear()
        cuda.forget()
        yield policy, updated, cuda, calls


@pytest.mark.parametrize(
    "case",
    [case if name in OFTEN else slow(case) for name, case in CASES.items()],
    ids=CASES,
)
def test_each_option_keeps_waits_precisions_and_shapes(case, prepared):
    """An update of 1.5B shapes. bitsandbytes' kernels are those that it declares for tensors without numbers, Liger's and
    flash-attn's are launched and compute nothing: the tests of each option compare their numbers."""
    policy, updated, cuda, calls = prepared
    optimizer = updated()
    assert not cuda.astray
    trained = policy.trainable_parameters()

    # Waits and copies: an optimizer on the host reads gradients, and the weights that it does not keep itself.
    waits, uploads = {("stream", "device.py:to_host"): 1}, {"device.py:to_device"}
    if case.optimizer == "offload":
        waits["copy", "offload.py:_on_host"] = len(trained) * (2 if case.weights == WIDE else 1)
        uploads.add("offload.py:_update")
    assert cuda.waits == waits
    assert set(cuda.uploads) == uploads

    # Precision: of products, of what is exponentiated, of gradients that several rows add to, of weights and moments
    products = cuda.types["mm"] | cuda.types["addmm"] | cuda.types["bmm"]
    summed = {(WIDE, HALF, HALF, WIDE)} if case.kernels == "liger" else set()  # added to what is wide
    assert products <= {(HALF,) * 2, (HALF,) * 3} | summed | ({(WIDE,) * 2, (WIDE,) * 3} if case.critic else set())
    assert bool(cuda.types["addmm"] & summed) == bool(summed)
    assert cuda.types["exp"] == {(WIDE,)}
    assert cuda.types["index_add_"] == {(WIDE, torch.int64, WIDE)}
    of_adapter = {p.dtype for name, p in trained.items() if ".lora_" in name}
    assert of_adapter == ({WIDE} if case.lora else set())
    assert {p.dtype for p in policy.model.parameters() if not (case.lora and p.requires_grad)} == {case.weights}
    assert {str(p.device) for p in policy.model.parameters()} == {"cuda:1"}
    kept = [t for p in trained.values() for key, t in optimizer.state[p].items() if key != "step" and t.numel() > 2**13]
    assert {t.dtype for t in kept} == (
        OF_STATE[case.optimizer] | ({HALF} if case[:2] == (HALF, "adamw_8bit") else set())
    )
    assert {str(t.device) for t in kept} == {"cpu" if case.optimizer == "offload" else "cuda:1"}

    # Attention and logits
    widths, heads = {679, 759}, policy.config.num_attention_heads
    if case.attention == "flash-attn":
        assert not cuda.attentions
        assert {tokens for tokens, _, _ in calls} == {2 * 180 + 798, 2 * 160 + 998}
    else:
        assert {(call.kernel, call.dtype, call.mask) for call in cuda.attentions} == {("flash", HALF, None)}
        assert {call.query[1:3] for call in cuda.attentions} == {(heads, width) for width in widths}
    assert not {shape for shape in cuda.shapes if len(shape) > 1 and shape[-1] in widths and shape[-2] in widths}
    responses = {500 + 300, 400 + 600}  # tokens of each micro-batch
    logits = {math.prod(shape) for shape in cuda.shapes if len(shape) > 1 and responses & {*shape[:-1]}}
    assert max(logits) <= log_probs._KEPT_LOGITS < min(responses) * 151_936
    fused = {
        name
        for name in cuda.types
        if name.endswith(
            ("rms_norm_forward_kernel", "_triton_rope", "swiglu_backward_kernel", "_statistics", "_gradient")
        )
    }
    assert len(fused) == (5 if case.kernels == "liger" else 0)


SCORING = ("lora in bfloat16, checkpointed", "flash-attn", "liger, lora in bfloat16, checkpointed", "critic")


@pytest.mark.parametrize("case", [*(slow(CASES[name]) for name in SCORING[:3]), CASES[SCORING[3]]], ids=SCORING)
def test_with_each_option_the_host_waits_once_for_scores(case, prepared):
    """Of the policy and, with an adapter, of its reference, which is the model without it."""
    policy, _, cuda, calls = prepared
    for scored in [policy, policy.reference()] if case.lora else [policy]:
        cuda.forget()
        calls.clear()
        compute_log_probs(scored, large_batch(), micro_batch_size=2)
        assert cuda.waits == {("stream", "device.py:to_host"): 1}
        assert not cuda.astray
        products = cuda.types["mm"] | cuda.types["addmm"] | cuda.types["bmm"]
        assert products <= {(HALF,) * 2, (HALF,) * 3} | ({(WIDE,) * 2, (WIDE,) * 3} if case.critic else set())
        assert {call.mask for call in cuda.attentions} <= {None}
        assert bool(calls) == (case.attention == "flash-attn") != bool(cuda.attentions)
        assert ("_triton_rope" in cuda.types) == (case.kernels == "liger")


@pytest.mark.slow  # with a critic, by default: above
def test_the_host_waits_once_for_all_log_probabilities(measured):
    model, cuda = measured
    compute_log_probs(model, large_batch(), micro_batch_size=2)
    assert cuda.waits == {("stream", "device.py:to_host"): 1}


@pytest.mark.slow
def test_weights_are_rounded_once_in_an_update_of_two_micro_batches(measured):
    """And so are the first gradients widened; later ones are added as they are."""
    model, cuda = measured
    update(model, large_batch(), micro_batch_size=2)
    layer = model.model.layers[0].mlp.down_proj.weight.numel()
    of_the_mlps = [one for one in cuda.work if one.name == "_to_copy" and one.bytes == (4 + 2) * layer]
    assert len(of_the_mlps) == 2 * 3
    assert cuda.types["add_"] >= {(WIDE, HALF)}
    assert {one.bytes for one in cuda.work if one.name == "_to_copy"} & {(4 + 2) * 151_936 * 1536}


@pytest.mark.slow
def test_more_rows_in_a_micro_batch_take_no_more_kernels(measured, monkeypatch):
    model, cuda = measured
    counts = []
    for rows in (4, 16):
        monkeypatch.setattr(logits_module, "_LOGITS_ON_CUDA", rows * 2**24)  # as many chunks
        monkeypatch.setattr(log_probs, "_KEPT_LOGITS", rows * 2**25)
        cuda.forget()
        update(model, large_batch(rows), micro_batch_size=rows)
        counts.append(cuda.kernels)
    assert counts[0] == counts[1]
