"""LoRA: a new adapter changes nothing, its gradients are those of a plain forward pass, and no bit of it is lost on the way."""

import copy
import hashlib
import json
import shutil
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PhimoeConfig,
    PhimoeForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from disks import largest_file
from marks import slow
from real_configurations import CONFIGURATIONS, write_model
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.adapter import AdaptedPolicy, add_adapter
from rlvr_cli.models.identity import model_identity, model_shape
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Lora, Policy
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.runs.run_dir import RunDir
from rlvr_cli.samplers.embedded.decode_step import DecodeStep
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.parallel.process import SamplingProcess
from rlvr_cli.training.checkpoints import checkpoint_bytes, load_checkpoint, save_checkpoint
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.planning.memory import adapter_parameters
from rlvr_cli.training.planning.plan import adapter_line
from rlvr_cli.training.planning.trial import mean_gap
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update
from rlvr_cli.types import Request, SamplingParams

pytestmark = pytest.mark.usefixtures("read_once")

LORA = Lora(rank=4, alpha=8, seed=0)
BATCH = collate([[5, 6, 7, 8]] * 3 + [[3]], [[9, 10], [9, 11, 12], [13], [2, 3, 4, 5, 6]], pad_id=1)
REQUESTS = [Request("What is 12 + 30?", tuple(range(8))), Request("5 - 3 =", (4, 5))]
PARAMS = SamplingParams(max_tokens=12, min_tokens=0, stop=())
log_probs_of = partial(compute_log_probs, batch=BATCH, micro_batch_size=4)


def train(policy, *, updates=3, learning_rate=1e-2, **how):
    optimizer = make_optimizer(policy, learning_rate=learning_rate)
    for _ in range(updates):
        metrics = train_update(policy, optimizer, BATCH, learning_rate=learning_rate, micro_batch_size=2, **how)
    return metrics, optimizer


def make_llama(*, tied, dtype=torch.float64):
    config = Qwen2Config(
        vocab_size=41, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.3, tie_word_embeddings=tied,
        bos_token_id=None, eos_token_id=0, pad_token_id=1,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Qwen2ForCausalLM(config).to(dtype).eval()


def make_adapted(*, tied=True, dtype=torch.float64, lora=LORA, moved=True):
    """A policy with an adapter whose second matrices are not 0 any more."""
    model = make_llama(tied=tied, dtype=dtype)
    add_adapter(model, lora)
    policy = AdaptedPolicy(model, base="nowhere")
    if moved:
        draw = torch.Generator().manual_seed(1)
        for name, tensor in policy.weights().items():
            if ".lora_B." in name:
                tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float32) / 10)
    return policy


# What it computes


@pytest.mark.parametrize("compute", ["auto", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_new_adapter_changes_nothing(tiny_model_dir, dtype, compute):
    plain = load_policy(tiny_model_dir, dtype=dtype, compute_dtype=compute)
    policy = load_policy(tiny_model_dir, dtype=dtype, compute_dtype=compute, lora=LORA)
    assert log_probs_of(policy).equal(log_probs_of(plain))
    before = {name: tensor.clone() for name, tensor in plain.weights_for_engine().items()}
    assert policy.weights_for_engine().keys() == before.keys()
    assert all(tensor.equal(before[name].to(tensor.dtype)) for name, tensor in policy.weights_for_engine().items())
    assert policy.dtype == plain.dtype
    assert {tensor.dtype for tensor in policy.weights().values()} == {torch.float32}
    assert policy.shares_prefixes


@pytest.mark.parametrize("recomputes", [False, True])
def test_inputs_of_adapted_layers_stay_in_the_precision_of_products(tiny_model_dir, recomputes):
    """Also where a layer is computed a second time: a float32 copy of each input would take more memory than checkpointing saves."""
    policy = load_policy(tiny_model_dir, dtype="bfloat16", lora=LORA)
    assert policy.shares_prefixes, "tested in float32, before the hooks"
    inputs = []
    for name, module in policy.model.named_modules():
        if name.endswith("lora_A.default"):
            module.register_forward_pre_hook(lambda _module, given: inputs.append(given[0].dtype))
    train(policy, updates=1, gradient_checkpointing=recomputes)
    layers = policy.config.num_hidden_layers * 7
    assert len(inputs) == 2 * layers * (2 if recomputes else 1)  # two micro-batches
    assert set(inputs) == {torch.bfloat16}


@pytest.mark.parametrize(
    ("tied", "how"),
    [
        (True, {"gradient_checkpointing": True}),
        (False, {"micro_batch_tokens": 8}),
        *(
            slow(tied, how)
            for tied in (True, False)
            for how in ({}, {"gradient_checkpointing": not tied}, {"micro_batch_tokens": 8})
        ),
    ],
)
def test_gradients_are_those_of_a_plain_forward_pass(tied, how):
    policy = make_adapted(tied=tied)
    plain = copy.deepcopy(policy.model)
    logits = plain(input_ids=BATCH["input_ids"]).logits.log_softmax(-1)
    mask = BATCH["response_mask"].bool()
    (-logits.gather(-1, BATCH["labels"][..., None]).squeeze(-1)[mask].mean()).backward()
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {}

    def keep(*_):
        found.update({name: p.grad.clone() for name, p in policy.trainable_parameters().items()})

    optimizer = torch.optim.SGD(policy.trainable_parameters().values(), lr=0.0)
    optimizer.register_step_pre_hook(keep)
    metrics = train_update(
        policy, optimizer, BATCH, learning_rate=0.0, micro_batch_size=4, max_grad_norm=float("inf"), **how
    )
    assert metrics["update/shared"] > 0
    assert found.keys() == expected.keys() == policy.weights().keys()
    assert len(found) == 2 * 7 * 2  # matrices, linear layers, layers: the head has none
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=1e-6)  # transformers' norms are in float32


def test_checkpointing_gives_the_same_update_in_bfloat16(tiny_model_dir):
    ends = []
    for recompute in (False, True):
        policy = load_policy(tiny_model_dir, dtype="bfloat16", lora=LORA)
        metrics, _ = train(policy, gradient_checkpointing=recompute)
        ends.append((metrics["loss/objective"], metrics["optimizer/grad_norm"], policy.weights()))
    assert ends[0][:2] == ends[1][:2]
    assert all(ends[0][2][name].equal(tensor) for name, tensor in ends[1][2].items())


def test_an_adapter_is_multiplied_in_the_precision_of_half_weights(tiny_model_dir):
    policy = load_policy(tiny_model_dir, dtype="bfloat16", lora=LORA)
    layer = policy.model.model.layers[0].self_attn.q_proj
    log_probs_of(policy)  # the first time, the model is probed outside of `autocast`
    seen = []
    layer.lora_A["default"].register_forward_hook(lambda _module, inputs, output: seen.append((inputs[0], output)))
    log_probs_of(policy)
    assert {tensor.dtype for pair in seen for tensor in pair} == {torch.bfloat16}
    assert layer.cast_input_dtype_enabled  # as it was: outside of `autocast` peft casts


@pytest.mark.parametrize("full", ["adapter_model.safetensors", "tokenizer.json"])
def test_a_full_disk_is_an_error_of_the_system(tiny_model_dir, tmp_path, full):
    """safetensors and tokenizers have errors of their own."""
    policy = load_policy(tiny_model_dir, lora=Lora(rank=1, alpha=1, seed=0))
    policy.save(tmp_path / "whole")
    with largest_file((tmp_path / "whole" / full).stat().st_size - 1), pytest.raises(OSError, match="File too large"):
        policy.save(tmp_path / "adapter")


@pytest.mark.parametrize("optimizer", [{}, {"kind": "adamw_kahan"}, {"kind": "adamw_8bit"}, {"offload": True}], ids=str)
def test_an_update_moves_the_adapter_alone(tiny_model_dir, optimizer):
    policy = load_policy(tiny_model_dir, dtype="bfloat16", lora=LORA)
    before = {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}
    optimizer = make_optimizer(policy, learning_rate=1e-2, **optimizer)
    for _ in range(2):
        train_update(policy, optimizer, BATCH, learning_rate=1e-2, micro_batch_size=2)
    moved = {name for name, tensor in policy.model.state_dict().items() if not tensor.equal(before[name])}
    assert moved == policy.weights().keys() == policy.trainable_parameters().keys()
    assert not any("embed" in name or "head" in name for name in moved)
    assert sum(p.numel() for p in policy.trainable_parameters().values()) == adapter_parameters(
        model_shape(tiny_model_dir), LORA.rank
    )


def test_alpha_over_rank_scales_what_is_added():
    changes = []
    for alpha in (8, 16):
        policy = make_adapted(lora=LORA._replace(alpha=alpha))
        weights, added = policy.factored_weights()
        name = "model.layers.1.mlp.down_proj"
        down = policy.weights()[f"{name}.lora_A.default.weight"]
        up = policy.weights()[f"{name}.lora_B.default.weight"]
        torch.testing.assert_close(added[name].up @ added[name].down, alpha / LORA.rank * up @ down)
        changes.append(policy.weights_for_engine()[f"{name}.weight"] - weights[f"{name}.weight"].float())
    torch.testing.assert_close(2 * changes[0], changes[1], atol=1e-6, rtol=1e-4)


def test_the_seed_determines_the_first_weights(tiny_model_dir):
    state = torch.random.get_rng_state()
    first, again, other = (load_policy(tiny_model_dir, lora=LORA._replace(seed=seed)).weights() for seed in (3, 3, 4))
    assert all(tensor.equal(again[name]) for name, tensor in first.items())
    assert not any(tensor.equal(other[name]) for name, tensor in first.items() if ".lora_A." in name)
    assert torch.random.get_rng_state().equal(state)


# The reference of a KL penalty


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_reference_is_the_base_without_a_second_model(tiny_model_dir, dtype):
    policy = load_policy(tiny_model_dir, dtype=dtype, lora=LORA)
    base = log_probs_of(load_policy(tiny_model_dir, dtype=dtype))
    train(policy)
    moved, reference = log_probs_of(policy), policy.reference()
    assert reference.model is policy.model
    assert reference.trainable_parameters() == {}
    assert log_probs_of(reference).equal(base)
    assert log_probs_of(policy).equal(moved)
    assert not moved.equal(base)
    assert len(policy.trainable_parameters()) == 28
    ids = torch.arange(6)[None]
    with torch.no_grad():  # also of a model whose logits are not one linear map
        torch.testing.assert_close(
            reference.forward(input_ids=ids).logits, load_policy(tiny_model_dir, dtype=dtype).model(ids).logits
        )


def test_the_reference_of_an_adapter_that_goes_on_is_its_start(tiny_model_dir, tmp_path):
    first = load_policy(tiny_model_dir, lora=LORA)
    train(first)
    first.save(tmp_path / "adapter")
    policy = load_policy(tmp_path / "adapter", lora=LORA)
    start = log_probs_of(first)
    assert log_probs_of(policy).equal(start)
    train(policy)
    assert log_probs_of(policy.reference()).equal(start)
    assert not log_probs_of(policy).equal(start)


# Sampling


@pytest.mark.parametrize(
    ("dtype", "compute", "bound"),
    [slow("float32", "auto", 5e-6), ("float32", "bfloat16", 5e-3), ("bfloat16", "auto", 5e-2)],
)
def test_sampler_and_trainer_agree_as_without_an_adapter(tiny_model_dir, dtype, compute, bound):
    gaps = []
    for lora in (LORA, None):
        policy = load_policy(tiny_model_dir, dtype=dtype, compute_dtype=compute, lora=lora)
        train(policy, learning_rate=1e-3)
        sampler = TransformersSampler(policy)
        assert sampler.notes == ()  # it takes its own step
        sampler.load_weights(policy, 1)
        gaps.append(mean_gap(policy, list(sampler.sample(REQUESTS, PARAMS))))
    assert gaps[0] < bound
    assert gaps[0] < 3 * gaps[1] + 1e-6


def test_the_decode_step_keeps_what_bfloat16_would_round_away(tiny_model_dir):
    policy = load_policy(tiny_model_dir, compute_dtype="bfloat16", lora=LORA)
    draw = torch.Generator().manual_seed(0)
    for name, tensor in policy.weights().items():
        if ".lora_B." in name:
            tensor.copy_(1e-3 * torch.randn(tensor.shape, generator=draw))
    weights, added = policy.factored_weights()
    name = "model.layers.0.mlp.up_proj"
    weight, delta = weights[f"{name}.weight"], added[name].up @ added[name].down
    assert delta.norm() < 0.01 * weight.norm()
    merged = (weight + delta).bfloat16().float() - weight.bfloat16().float()
    assert (merged - delta).norm() > 0.3 * delta.norm()
    (gate_up,) = DecodeStep(policy, dtype=torch.bfloat16, positions=8)._layers[0].gate_up
    ours = (gate_up.added.up.float() @ gate_up.added.down.float())[len(weight) :]
    assert (ours - delta).norm() < 0.01 * delta.norm()


@pytest.mark.parametrize(
    ("dtype", "compute"), [slow("float32", "float32"), ("float32", "bfloat16"), slow("bfloat16", "bfloat16")]
)
def test_a_step_that_is_kept_has_the_adapter_of_now(tiny_model_dir, dtype, compute):
    policy = load_policy(tiny_model_dir, dtype=dtype, compute_dtype=compute, lora=LORA)
    train(policy)
    step = DecodeStep(policy, dtype=policy.compute_dtype, positions=8)
    before = [tensor.data_ptr() for tensor in low_rank_of(step)]
    train(policy)
    new = DecodeStep(policy, dtype=policy.compute_dtype, positions=8)
    assert not all(map(torch.equal, low_rank_of(step), low_rank_of(new))), "it reads the weights: this proves nothing"
    assert step.refresh(policy)
    assert all(map(torch.equal, low_rank_of(step), low_rank_of(new)))
    assert [tensor.data_ptr() for tensor in low_rank_of(step)] == before, "a recorded graph reads the same memory"
    assert step.nbytes == new.nbytes


def low_rank_of(step):
    """The matrices of all layers' adapters."""
    linears = [x for layer in step._layers for x in (*layer.heads, *layer.attended, *layer.gate_up, *layer.down)]
    return [matrix for linear in linears for matrix in linear.added]


def test_a_sampler_that_is_kept_samples_with_the_adapter_of_now(tiny_model_dir):
    policy = load_policy(tiny_model_dir, lora=LORA)
    sampler = TransformersSampler(policy)
    for version in range(1, 4):
        train(policy)
        sampler.load_weights(policy, version)
        assert mean_gap(policy, list(sampler.sample(REQUESTS, PARAMS))) < 1e-5


def test_the_decode_step_takes_an_adapter_of_some_layers(tiny_model_dir, tmp_path):
    """Joined with layers that have none: their share of what is added is 0."""
    policy = load_policy(tiny_model_dir, lora=LORA)
    train(policy)
    policy.save(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    config["target_modules"] = ["q_proj", "v_proj", "up_proj"]
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    stored = load_file(tmp_path / "adapter/adapter_model.safetensors")
    some = {name: t for name, t in stored.items() if any(f".{layer}." in name for layer in config["target_modules"])}
    save_file(some, tmp_path / "adapter/adapter_model.safetensors", metadata={"format": "pt"})
    policy = load_policy(tmp_path / "adapter")
    sampler = TransformersSampler(policy)
    assert sampler.notes == ()
    assert mean_gap(policy, list(sampler.sample(REQUESTS, PARAMS))) < 1e-5


@pytest.mark.parametrize("loaded", [slow(False), True])
def test_rounded_once_the_adapter_gives_the_same_update(tiny_model_dir, tmp_path, monkeypatch, loaded):
    """The base's and the adapter's weights are rounded once for all micro-batches; gradients stay in float32."""
    source = tiny_model_dir
    if loaded:
        first = load_policy(tiny_model_dir, lora=LORA)
        train(first)
        first.save(tmp_path / "adapter")
        source = tmp_path / "adapter"

    def results():
        policy = load_policy(source, compute_dtype="bfloat16", lora=LORA)
        metrics, _ = train(policy)
        return policy.weights(), metrics, log_probs_of(policy), log_probs_of(policy.reference())

    weights, metrics, scores, reference = results()
    monkeypatch.setattr(Policy, "rounded_weights", lambda self: nullcontext())
    expected = results()
    assert all(tensor.equal(expected[0][name]) for name, tensor in weights.items())
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert metrics["optimizer/grad_norm"] == expected[1]["optimizer/grad_norm"]
    assert scores.equal(expected[2])
    assert reference.equal(expected[3])
    assert not scores.equal(reference)


def test_an_adapter_of_some_layers_by_peft_is_sampled_from(tiny_model_dir, tmp_path):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], init_lora_weights=False, use_rslora=True
    )
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir), config)
    theirs.save_pretrained(tmp_path / "adapter")
    policy = load_policy(tmp_path / "adapter")  # it has the tokenizer of its base
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(policy.forward(input_ids=ids).logits, theirs.eval()(input_ids=ids).logits)
    sampler = TransformersSampler(policy)
    assert sampler.notes == ()
    assert mean_gap(policy, list(sampler.sample(REQUESTS, PARAMS))) < 5e-6


def test_an_adapter_reaches_a_sampling_process(forked, tiny_model_dir):
    policy = load_policy(tiny_model_dir, lora=LORA._replace(seed=7))
    train(policy)
    sizes = sum(tensor.nbytes for tensor in policy.weights_for_process().values())
    assert sizes == 4 * sum(p.numel() for p in policy.trainable_parameters().values())  # the base is there already
    how = {
        "dtype": "auto", "param_dtype": "float32", "compute_dtype": "auto", "device": "cpu", "max_batch_size": None,
        "cuda_graphs": True, "max_model_len": None, "gpu_memory_utilization": 0.3, "seed": 0, "lora_rank": 4, "lora_alpha": 8,
    }  # fmt: skip
    there = SamplingProcess("transformers", {"model": str(tiny_model_dir), **how})
    try:
        there.load_weights(policy, 1)
        assert mean_gap(policy, list(there.sample(REQUESTS, PARAMS))) < 1e-5
    finally:
        there.close()


# Saved and loaded


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("Phi-3-mini-4k", "gemma-2-2b")  # joined projections, other norms
        else pytest.param(name, marks=pytest.mark.slow)
        for name in CONFIGURATIONS
    ],
)
@pytest.mark.filterwarnings("ignore:The (logits|attention) of:UserWarning")  # what a model does not have
def test_published_models_take_an_adapter(name, tmp_path):
    """Those with joined projections, windows or other norms too: trained, sampled from, saved, loaded and merged."""
    base = write_model(name, tmp_path / "base")
    policy = load_policy(base, lora=LORA)
    assert log_probs_of(policy).equal(log_probs_of(load_policy(base)))
    train(policy)
    moved = log_probs_of(policy)
    assert not moved.equal(log_probs_of(policy.reference()))
    sampler = TransformersSampler(policy)
    sampler.load_weights(policy, 1)
    assert mean_gap(policy, list(sampler.sample(REQUESTS[:1], PARAMS))) < 5e-6
    policy.save(tmp_path / "adapter")
    assert log_probs_of(load_policy(tmp_path / "adapter")).equal(moved)
    policy.save(tmp_path / "merged", merged=True)
    torch.testing.assert_close(log_probs_of(load_policy(tmp_path / "merged")), moved, atol=1e-5, rtol=0)


def test_layers_with_transposed_weights_are_merged(tiny_tokenizer, tmp_path):
    """GPT-2's are (in, out), also the square ones, which take the adapter's matrices either way round."""
    config = GPT2Config(
        vocab_size=320, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=None, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).eval()
    add_adapter(model, LORA)
    policy = AdaptedPolicy(model, tiny_tokenizer, base="nowhere")
    for name, tensor in policy.weights().items():
        if ".lora_B." in name:
            tensor.normal_(std=0.1)
    ids = torch.arange(20).view(2, 10)
    policy.save(tmp_path / "merged", merged=True)
    engine = GPT2LMHeadModel(config).eval()
    engine.load_state_dict(policy.weights_for_engine())
    with torch.no_grad():
        adapted = policy.forward(input_ids=ids).logits
        assert not torch.allclose(policy.reference().forward(input_ids=ids).logits, adapted, atol=1e-3)
        for merged in (engine, load_policy(tmp_path / "merged").model):
            torch.testing.assert_close(merged(input_ids=ids).logits, adapted)


def test_a_mixture_of_experts_has_its_adapter_beside_the_experts(tiny_tokenizer, tmp_path):
    """Experts are one tensor: an adapter of it could not be loaded again. The first layer's MLP has the names of experts."""
    config = Qwen3MoeConfig(
        vocab_size=320, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=4, num_experts_per_tok=2,
        mlp_only_layers=[0], max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    base = tmp_path / "base"
    Policy(Qwen3MoeForCausalLM(config), tiny_tokenizer).save(base)
    policy = load_policy(base, lora=LORA)
    adapted = {name.partition(".lora_")[0].rpartition(".")[2] for name in policy.weights()}
    assert adapted == {"q_proj", "k_proj", "v_proj", "o_proj"}
    trained = sum(p.numel() for p in policy.trainable_parameters().values())
    assert f"on the attention, and on MLPs whose names no expert has: about {trained:,} parameters" in adapter_line(
        SftConfig(lora_rank=4), model_shape(base)
    )
    train(policy, updates=1)
    moved = log_probs_of(policy)
    assert not moved.equal(log_probs_of(policy.reference()))
    policy.save(tmp_path / "adapter")
    assert log_probs_of(load_policy(tmp_path / "adapter")).equal(moved)
    policy.save(tmp_path / "merged", merged=True)
    torch.testing.assert_close(log_probs_of(load_policy(tmp_path / "merged")), moved, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model", "config", "adapted"),
    [
        (PhimoeForCausalLM, PhimoeConfig(num_key_value_heads=1, num_local_experts=2, intermediate_size=8), 4),
        (FalconForCausalLM, FalconConfig(), 4),
    ],
)
def test_of_the_layers_that_are_nearly_linear_those_of_falcon_are_adapted(model, config, adapted):
    """The router of a Phi-MoE is an `nn.Linear` by its class, and returns a tuple."""
    config.update({"vocab_size": 41, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2})
    made = model(config)
    add_adapter(made, LORA)
    assert sum(".lora_A." in name for name in made.state_dict()) == adapted
    assert made(torch.tensor([[1, 2, 3]])).logits.isfinite().all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_save_and_load_are_inverse(tiny_model_dir, tmp_path, dtype):
    policy = load_policy(tiny_model_dir, dtype=dtype, lora=LORA)
    train(policy)
    policy.save(tmp_path / "adapter")
    assert {p.name for p in (tmp_path / "adapter").iterdir()} == {
        "adapter_config.json", "adapter_model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert [p.name for p in tmp_path.iterdir()] == ["adapter"]  # nothing temporary is left
    assert len({path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}) == 1
    settings = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(tiny_model_dir)
    assert (settings["r"], settings["lora_alpha"], settings["inference_mode"]) == (4, 8, True)
    assert settings["target_modules"] == sorted(settings["target_modules"])
    loaded = load_policy(tmp_path / "adapter", dtype=dtype)
    assert log_probs_of(loaded).equal(log_probs_of(policy))
    assert loaded.trainable_parameters() == {}
    assert loaded.tokenizer("1 + 1 = 数")["input_ids"] == policy.tokenizer("1 + 1 = 数")["input_ids"]
    loaded.save(tmp_path / "again")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "adapter" / name).read_bytes()


def test_peft_itself_loads_what_is_saved(tiny_model_dir, tmp_path):
    from peft import PeftModel

    policy = load_policy(tiny_model_dir, lora=LORA)
    train(policy)
    policy.save(tmp_path / "adapter")
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_model_dir), str(tmp_path / "adapter"))
    ids = torch.arange(20).view(2, 10)
    with torch.no_grad():
        torch.testing.assert_close(theirs(input_ids=ids).logits, policy.forward(input_ids=ids).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_merged_model_is_a_plain_one_in_float32(tiny_tokenizer, tmp_path, dtype, tied):
    policy = make_adapted(tied=tied, dtype=dtype)
    policy = AdaptedPolicy(policy.model, tiny_tokenizer, base="nowhere")
    policy.save(tmp_path / "merged", merged=True)
    assert json.loads((tmp_path / "merged/config.json").read_text())["dtype"] == "float32"
    stored = load_file(tmp_path / "merged/model.safetensors")
    assert ("lm_head.weight" in stored) != tied
    plain = make_llama(tied=tied, dtype=dtype)
    name = "model.layers.0.self_attn.q_proj"
    up, down = (policy.weights()[f"{name}.lora_{which}.default.weight"] for which in "BA")
    expected = plain.state_dict()[f"{name}.weight"].float() + 2 * up @ down
    torch.testing.assert_close(stored[f"{name}.weight"], expected, atol=1e-6, rtol=1e-6)
    assert stored["model.norm.weight"].equal(plain.state_dict()["model.norm.weight"].float())
    if dtype == torch.float32:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
        ids = torch.arange(20).view(2, 10)
        with torch.no_grad():
            torch.testing.assert_close(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_a_checkpoint_holds_the_adapter_and_its_moments_alone(tiny_model_dir, tmp_path):
    policy = load_policy(tiny_model_dir, dtype="bfloat16", lora=LORA)
    _, optimizer = train(policy)
    path = save_checkpoint(tmp_path, step=1, policy=policy, optimizer=optimizer, state={})
    written = {p.relative_to(path).as_posix(): p.stat().st_size for p in path.rglob("*") if p.is_file()}
    assert "model/adapter_model.safetensors" in written
    assert not {"model/model.safetensors", "model/config.json", "policy.safetensors"} & written.keys()
    assert sum(written.values()) <= checkpoint_bytes(policy, optimizer)
    tensors = sum(size for name, size in written.items() if name.endswith(".safetensors"))
    assert tensors < 16 * sum(p.numel() for p in policy.trainable_parameters().values())  # 12 and the names
    resumed = load_policy(tiny_model_dir, dtype="bfloat16", lora=LORA._replace(seed=9))
    again = make_optimizer(resumed, learning_rate=1e-2)
    load_checkpoint(tmp_path, policy=resumed, optimizer=again)
    for one, its_optimizer in ((policy, optimizer), (resumed, again)):
        train_update(one, its_optimizer, BATCH, learning_rate=1e-2, micro_batch_size=2)
    assert all(tensor.equal(resumed.weights()[name]) for name, tensor in policy.weights().items())
    for other in (load_policy(tiny_model_dir), load_policy(tiny_model_dir, lora=LORA._replace(rank=2))):
        with pytest.raises(RlvrError, match="does not fit the model"):
            load_checkpoint(tmp_path, policy=other, optimizer=make_optimizer(other, learning_rate=1e-2))


# What is refused


def test_a_model_without_linear_layers_gets_no_adapter():
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_embd=4, n_layer=0, n_head=1, n_positions=4))
    with pytest.raises(RlvrError, match="GPT2LMHeadModel has no linear layers") as info:
        add_adapter(model, LORA)
    assert "without --lora-rank" in info.value.hint


def test_a_model_for_which_peft_has_no_adapter_is_named():
    model = MambaForCausalLM(MambaConfig(vocab_size=8, hidden_size=8, num_hidden_layers=1, state_size=2))
    with pytest.raises(RlvrError, match="MambaForCausalLM takes no LoRA adapter") as info:
        add_adapter(model, LORA)
    assert "without --lora-rank" in info.value.hint


@pytest.fixture
def saved(tiny_model_dir, tmp_path):
    """An adapter, and its base beside it."""
    base = shutil.copytree(tiny_model_dir, tmp_path / "base")
    load_policy(base, lora=LORA).save(tmp_path / "adapter")
    return tmp_path / "adapter"


def edit(adapter, **changes):
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refusal(path):
    with pytest.raises(RlvrError) as info:
        load_policy(path)
    assert info.value.hint
    return info.value


def test_a_base_that_is_gone_is_named(saved):
    (saved.parent / "base").rename(saved.parent / "elsewhere")
    error = refusal(saved)
    assert str(saved) in error.problem
    assert str(saved.parent / "base") in error.problem
    assert "base_model_name_or_path" in error.hint
    edit(saved, base_model_name_or_path=str(saved.parent / "elsewhere"))
    load_policy(saved)
    edit(saved, base_model_name_or_path="some-org/no-such-model")
    assert "some-org/no-such-model" in refusal(saved).problem


def test_an_adapter_that_does_not_fit_is_refused(saved):
    edit(saved, base_model_name_or_path=str(saved))
    assert "another adapter as its base" in refusal(saved).problem
    edit(saved, base_model_name_or_path=str(saved.parent / "base"), r=2)
    assert "(4, 64) and should be (2, 64)" in refusal(saved).problem
    edit(saved, r=4, target_modules=["q_proj"])
    assert "belongs to no linear layer" in refusal(saved).problem
    edit(saved, target_modules=["no_such_proj"])
    assert "no_such_proj" in refusal(saved).problem
    edit(saved, target_modules=["q_proj"], use_dora=True)
    assert "not plain LoRA" in refusal(saved).problem
    edit(saved, peft_type="IA3")
    assert "not that of a LoRA adapter" in refusal(saved).problem
    (saved / "adapter_config.json").write_text("{")
    assert "cannot be read" in refusal(saved).problem


def test_without_peft_the_error_says_what_to_install(saved, tiny_model_dir, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    assert "pip install -e '.[lora]'" in refusal(saved).hint
    with pytest.raises(RlvrError, match="peft is not installed"):
        load_policy(tiny_model_dir, lora=LORA)
    load_policy(tiny_model_dir)


def test_the_identity_of_an_adapter_has_its_base(saved, monkeypatch):
    base = saved.parent / "base"
    identity = model_identity(saved)
    shutil.copy(base / "model.safetensors", saved)  # of a merge: not loaded
    assert model_identity(saved) == identity
    assert identity["base"] == str(base)
    assert identity["base_sha256"] == model_identity(base)["sha256"]
    assert identity["sha256"] != identity["base_sha256"]
    monkeypatch.setattr(
        hashlib, "file_digest", None
    )  # sizes are those of the headers: to hash large weights takes minutes
    assert model_shape(saved) == model_shape(base)
    assert model_shape(base)["parameters"] == sum(p.numel() for p in load_policy(base).model.parameters())


def test_an_adapter_of_a_run_knows_the_weights_of_its_base(saved, tmp_path, tiny_model):
    base = tmp_path / "base"
    with RunDir.create(tmp_path / "runs", "sft", name="r", metadata={"facts": {"model": model_identity(base)}}) as run:
        shutil.copytree(saved, run.path / "model")
    assert model_identity(run.path / "model")["base"] == str(base)
    shutil.copy(base / "model.safetensors", base / "consolidated.safetensors")
    assert model_identity(run.path / "model")["base"] == str(base)
    digest = hashlib.sha256((base / "model.safetensors").read_bytes()).hexdigest()
    of_both = hashlib.sha256(f"consolidated.safetensors {digest}\nmodel.safetensors {digest}\n".encode()).hexdigest()
    older = {
        "facts": {"model": model_identity(base) | {"sha256": of_both}}
    }  # earlier versions hashed what is not loaded, too
    with RunDir.create(tmp_path / "runs", "sft", name="older", metadata=older) as earlier:
        shutil.copytree(saved, earlier.path / "model")
    assert model_identity(earlier.path / "model")["base"] == str(base)
    with torch.no_grad():
        tiny_model.model.norm.weight.add_(1.0)
    Policy(tiny_model, load_policy(base).tokenizer).save(base)
    with pytest.raises(RlvrError, match="was trained on other weights"):
        model_identity(run.path / "model")
