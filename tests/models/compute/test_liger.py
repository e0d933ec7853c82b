"""Fused kernels: results and gradients are PyTorch's but for rounding, and only the one model's layers use them, within a block.

Where there is no GPU, Triton's interpreter runs the kernels on the CPU (tests/conftest.py).
"""

import importlib
import json

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from fake_cuda import fake_cuda
from rlvr_cli.commands import grpo
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.adapter import AdaptedPolicy, add_adapter
from rlvr_cli.models.compute import liger
from rlvr_cli.models.compute.device import product
from rlvr_cli.models.compute.onednn import rows_multiple
from rlvr_cli.models.policy import Lora, Policy
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update
from triton_on_cpu import mend_interpreter

pytest.importorskip("liger_kernel", reason="needs liger-kernel")
pytestmark = pytest.mark.slow
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BATCH = collate([[5, 6, 7, 8]] * 3 + [[3]], [[9, 10], [9, 11, 12], [13], [2, 3, 4, 5, 6]], pad_id=1)


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch):
    if DEVICE == "cpu":
        mend_interpreter(monkeypatch)


def gradients(policy, **how):
    """The gradients of an update, by name."""
    found = {}
    parameters = policy.trainable_parameters()
    optimizer = torch.optim.SGD(parameters.values(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: found.update({n: p.grad.clone() for n, p in parameters.items()}))
    metrics = train_update(
        policy, optimizer, BATCH, learning_rate=0.0, micro_batch_size=2, max_grad_norm=float("inf"), **how
    )
    assert policy.shares_prefixes
    assert (
        metrics["update/shared"] > 0 or rows_multiple(policy.compute_dtype, policy.device) > 1
    )  # which adds more than is shared
    return found


def make_model(kind="qwen2", dtype=torch.float32, *, layers=2):
    """A model with separate key-value heads; head sizes and widths that are no powers of two."""
    config = CONFIG_MAPPING[kind](
        vocab_size=41, hidden_size=24, intermediate_size=40, num_hidden_layers=layers, num_attention_heads=4, head_dim=6,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=0, pad_token_id=1, sliding_window=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.to(DEVICE, dtype).eval()


@pytest.fixture
def calls(monkeypatch):
    """How often each kernel is launched, forwards and backwards."""
    counts = dict.fromkeys(("rms_norm", "rope", "swiglu"), 0)
    for name in counts:
        module = __import__(f"liger_kernel.ops.{name}", fromlist=[name])
        for way in ("forward", "backward"):
            launch = getattr(module, f"{name}_{way}")

            def counted(*args, _launch=launch, _name=name, **kwargs):
                counts[_name] += 1
                return _launch(*args, **kwargs)

            monkeypatch.setattr(module, f"{name}_{way}", counted)
    return counts


@pytest.mark.parametrize(
    ("kind", "dtype", "compute"),
    [
        *((kind, "float32", "float32") for kind in ("llama", "mistral", "qwen2", "qwen3")),
        ("qwen2", "float32", "bfloat16"),
        ("qwen3", "bfloat16", "bfloat16"),
    ],
)
def test_updates_are_as_near_to_float64_as_those_of_pytorch(calls, kind, dtype, compute):
    """Of one layer where numbers are rounded: there a micro-batch has many more rows, and the interpreter goes from row to row."""
    layers = 2 if compute == "float32" else 1
    policy = Policy(make_model(kind, torch.float64, layers=layers))
    exact, exact_log_probs = gradients(policy), compute_log_probs(policy, BATCH, micro_batch_size=2)
    models = (make_model(kind, getattr(torch, dtype), layers=layers) for _ in range(2))
    plain, fused = (Policy(model, compute_dtype=compute) for model in models)
    assert fused.use_kernels("liger") == ""
    assert (plain.kernels, fused.kernels) == ("torch", "liger")
    errors = []
    for policy in (plain, fused):
        before = dict(calls)
        found, log_probs = gradients(policy), compute_log_probs(policy, BATCH, micro_batch_size=2)
        assert all((calls[name] > before[name]) == (policy is fused) for name in calls)
        squares = [(found[name].double() - gradient).square().sum() for name, gradient in exact.items()]
        errors.append(((log_probs - exact_log_probs).abs().max(), torch.stack(squares).sum().sqrt()))
    for theirs, ours in zip(*errors, strict=True):
        assert ours <= 2 * theirs + (1e-5 if compute == "float32" else 0), errors


def test_of_a_tied_weight_both_gradients_of_all_micro_batches_are_added():
    """Its head adds to the gradient that is there, where weights are rounded, and the embedding's comes through autograd."""
    exact = gradients(Policy(make_model(dtype=torch.float64)))
    policy = Policy(make_model(), compute_dtype="bfloat16")
    policy.use_kernels("liger")
    found = gradients(policy)["model.embed_tokens.weight"]
    assert found.dtype == torch.float32
    assert (found - exact["model.embed_tokens.weight"]).norm() <= 0.05 * exact["model.embed_tokens.weight"].norm()


@pytest.mark.parametrize(
    ("compute", "how"),
    [
        ("float32", {"gradient_checkpointing": True}),
        ("float32", {"micro_batch_tokens": 8}),
        ("bfloat16", {"gradient_checkpointing": True}),
    ],
    ids=["again", "tokens", "rounded"],
)
def test_layers_may_be_computed_again(compute, how):
    plain, fused = Policy(make_model()), Policy(make_model(), compute_dtype=compute)
    fused.use_kernels("liger")
    expected, found = gradients(plain), gradients(fused, **how)
    bound = 1e-4 if compute == "float32" else 0.05
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= bound * gradient.norm() + 1e-2 * bound, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_and_its_reference(dtype):
    def adapted():
        model = make_model(dtype=dtype)
        add_adapter(model, Lora(rank=3, alpha=6, seed=0))
        policy = AdaptedPolicy(model, base="nowhere", compute_dtype="bfloat16")
        draw = torch.Generator().manual_seed(1)
        for name, tensor in policy.weights().items():
            if ".lora_B." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=draw) / 10)
        return policy

    plain, fused = adapted(), adapted()
    fused.use_kernels("liger")
    assert fused.reference().kernels == "liger"
    expected, found = (gradients(policy, gradient_checkpointing=True) for policy in (plain, fused))
    for name, gradient in expected.items():
        assert (found[name] - gradient).norm() <= 0.1 * gradient.norm(), name


@pytest.mark.parametrize("kernels", ["none", "liger"])
def test_with_them_no_gradient_of_a_weight_is_rounded(kernels):
    policy = Policy(make_model(), compute_dtype="bfloat16")
    policy.use_kernels(kernels)
    layer = policy.model.model.layers[1].mlp.up_proj
    weight, x = layer.weight, torch.linspace(-1, 1, 120, device=DEVICE).view(5, 24)
    with policy.rounded_weights(), policy.autocast():
        layer(x).float().square().sum().backward()
    halves = weight.grad.bfloat16().float()
    assert weight.grad.equal(halves) == (kernels == "none")


def test_norms_round_their_output_once_for_the_products_after_them():
    policy = Policy(make_model("qwen3"), compute_dtype="bfloat16")
    policy.use_kernels("liger")
    layer = policy.model.model.layers[0]
    hidden = torch.randn(1, 3, 24, device=DEVICE)
    with policy.fused_kernels(), policy.autocast():
        assert layer.input_layernorm(hidden).dtype == layer.post_attention_layernorm(hidden).dtype == torch.bfloat16
        assert policy.model.model.norm(hidden).dtype == torch.float32
        assert layer.self_attn.q_norm(hidden[..., :6]).dtype == torch.float32
    with policy.fused_kernels():
        assert layer.input_layernorm(hidden).dtype == torch.float32


def test_each_layer_is_one_kernel_and_only_within_the_block(calls):
    policy, other = Policy(make_model()), make_model()
    policy.use_kernels("liger")
    calls.update(dict.fromkeys(calls, 0))
    ids = torch.tensor([[3, 1, 4]], device=DEVICE)
    outside = policy.forward(input_ids=ids).logits
    assert set(calls.values()) == {0}
    with policy.fused_kernels():
        within = policy.forward(input_ids=ids).logits
        assert calls == {"rms_norm": 5, "rope": 2, "swiglu": 2}
        other(input_ids=ids)
        assert calls == {"rms_norm": 5, "rope": 2, "swiglu": 2}, "another model of the class is as it was"
    assert policy.forward(input_ids=ids).logits.equal(outside)
    torch.testing.assert_close(within, outside, atol=1e-5, rtol=1e-5)
    assert calls["rms_norm"] == 5
    assert not any("forward" in vars(module) for module in policy.model.modules())


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (
            lambda: Policy(make_model("gemma")),
            "they are for llama, mistral, qwen2, qwen3, and the model is GemmaForCausalLM",
        ),
        (lambda: Policy(make_model(dtype=torch.float64)), "they do not compute in float64"),
    ],
)
def test_models_that_the_kernels_do_not_know(policy, problem):
    with pytest.raises(RlvrError, match=f"--fused-kernels liger: {problem}"):
        policy().use_kernels("liger")


def test_changed_layers_are_left_alone():
    policy = Policy(make_model())
    policy.model.base_model.norm.forward = lambda hidden: hidden
    with pytest.raises(RlvrError, match="layers have been changed"):
        policy.use_kernels("liger")


@pytest.mark.parametrize("wanted", ["auto", "none"])
def test_the_choice_without_a_gpu(wanted):
    if DEVICE == "cuda" and wanted == "auto":
        pytest.skip("there is a GPU")
    policy = Policy(make_model())
    assert policy.use_kernels(wanted) == ""
    assert policy.facts["kernels"] == "torch"


def test_kernels_that_compute_something_else_are_not_used(monkeypatch):
    ops = importlib.import_module("liger_kernel.ops")  # of peft and all of it: not when the tests are collected
    right = ops.LigerSiLUMulFunction

    class Wrong(right):
        @staticmethod
        def backward(ctx, grad):
            return tuple(g if g is None else 2 * g for g in right.backward(ctx, grad))

    monkeypatch.setattr(ops, "LigerSiLUMulFunction", Wrong)
    with pytest.raises(RlvrError, match="their gradients differ by more than rounding"):
        Policy(make_model()).use_kernels("liger")


def test_products_that_cannot_be_added_are_noticed(monkeypatch):
    monkeypatch.setattr(liger, "add_product", lambda total, a, b: total.copy_(product(a, b)))
    with pytest.raises(RlvrError, match="products are added to gradients with more than rounding"):
        Policy(make_model()).use_kernels("liger")


def test_kernels_that_fail_on_a_gpu_are_not_used_and_a_note_says_so():
    """The emulated GPU runs no kernel of Triton."""
    if DEVICE == "cuda":
        pytest.skip("there is a GPU")
    model = make_model()
    with fake_cuda():
        policy = Policy(model.to("cuda"))
        assert policy.use_kernels("auto").startswith("without fused kernels: they fail here with ")
        assert policy.kernels == "torch"
        with pytest.raises(RlvrError, match="they fail here"):
            policy.use_kernels("liger")


def test_a_run_trains_with_them_and_says_so(tmp_path):
    small = {
        "dataset": "arithmetic:16", "eval_dataset": "arithmetic:4", "n_grpo_steps": 1, "rollout_batch_size": 4, "group_size": 2,
        "train_batch_size": 2, "gradient_accumulation_steps": 1, "sampling_max_tokens": 6, "eval_every": 0,
        "checkpoint_every": 0, "kl_coef": 0.1, "loss_type": "grpo_clip", "engine": "transformers", "runs_dir": str(tmp_path),
    }  # fmt: skip
    for kernels in ("none", "liger"):
        grpo.run(GrpoConfig(**small, run=kernels, fused_kernels=kernels))
        record = json.loads((tmp_path / kernels / "run.json").read_text())
        assert record["policy"]["kernels"] == {"none": "torch", "liger": "liger"}[kernels]
        assert record["status"] == "finished"
