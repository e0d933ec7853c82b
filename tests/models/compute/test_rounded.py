"""models/compute/rounded.py: passes with rounded weights are those of autocast, to the last bit, and leave the model as it was."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, PhiConfig, Qwen2Config

from rlvr_cli.models.compute.rounded import rounded_weights
from rlvr_cli.models.log_probs import get_response_log_probs
from rlvr_cli.models.policy import Policy

SMALL = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "initializer_range": 0.5,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
GPT2 = {"vocab_size": 61, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}
CONFIGS = {
    "qwen2 tied": Qwen2Config(**SMALL, tie_word_embeddings=True),
    "llama": LlamaConfig(**SMALL),
    "phi, with biases": PhiConfig(**SMALL),
    "gemma2 caps its logits": Gemma2Config(**SMALL, head_dim=8, final_logit_softcapping=3.0),
    "gpt2 has no linear layer": GPT2Config(**GPT2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0),
}


def make_policy(name):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    return Policy(model, compute_dtype="bfloat16")


def passes(policy):
    """Two passes, forward and backward: their log-probabilities and entropies."""
    found = []
    for seed in range(2):
        ids = torch.randint(2, 61, (3, 9), generator=torch.Generator().manual_seed(seed))
        with policy.autocast():
            scores = get_response_log_probs(policy, ids, ids.roll(-1, 1), True)
        (scores["log_probs"].sum() + scores["token_entropy"].sum()).backward()
        found += [tensor.detach() for tensor in scores.values()]
    return found


@pytest.mark.filterwarnings("ignore:The (logits|attention) of Gemma2ForCausalLM")
@pytest.mark.parametrize("name", CONFIGS)
def test_every_bit_is_that_of_autocast(name):
    policy = make_policy(name)
    values, weights = passes(policy), dict(policy.model.named_parameters())
    gradients = {name: p.grad for name, p in weights.items()}
    policy.model.zero_grad(set_to_none=True)
    with policy.rounded_weights():
        rounded = {name for name, p in policy.model.named_parameters() if p.dtype == torch.bfloat16}
        assert (policy.dtype, policy.compute_dtype) == (torch.float32, torch.bfloat16)
        found = passes(policy)
    assert bool(rounded) == ("gpt2" not in name)
    assert not {name for name in rounded if "head" in name or "embed" in name}
    assert all(map(torch.equal, found, values))
    after = dict(policy.model.named_parameters())
    assert after.keys() == weights.keys()
    assert all(after[name] is p for name, p in weights.items())
    for name, parameter in after.items():
        assert parameter.grad.dtype == torch.float32
        assert parameter.grad is not gradients[name]
        assert parameter.grad.equal(gradients[name]), name


@pytest.mark.parametrize("name", ["llama", "phi, with biases"])
def test_gradients_that_are_not_rounded_are_nearer_to_exact_ones(name):
    """Those of two passes, of layers whose inputs and outputs have gradients of their own; nothing else changes."""
    found, inputs = {}, [torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(i)) for i in range(2)]

    def gradients(dtype, compute=None, **how):
        model = make_policy(name).model.to(dtype)
        first, last = model.model.embed_tokens, model.model.layers[0]
        layers = [module for module in last.modules() if type(module) is torch.nn.Linear and module.in_features == 16]
        context = rounded_weights(model, compute, **how) if compute else nullcontext()
        forwards = {}
        with context, torch.autocast("cpu", compute, enabled=compute is not None):
            for number, x in enumerate(inputs):
                x = x.to(dtype).requires_grad_()
                outputs = [layer(x) for layer in layers]
                torch.stack([out.to(dtype).square().sum() for out in outputs]).sum().backward()
                forwards[number] = [*outputs, x.grad]
        assert "forward" not in vars(layers[0])
        assert first.weight.grad is None
        return forwards, {n: p.grad for n, p in last.named_parameters() if p.grad is not None}

    _, exact = gradients(torch.float64)
    for unrounded in (False, True):
        found[unrounded] = gradients(torch.float32, torch.bfloat16, unrounded_gradients=unrounded)
    for number in range(2):
        assert all(map(torch.equal, found[True][0][number], found[False][0][number]))
    assert found[True][1].keys() == exact.keys()
    errors = {u: {n: (g.double() - exact[n]).norm() / exact[n].norm() for n, g in found[u][1].items()} for u in found}
    assert all(g.dtype == torch.float32 for g in found[True][1].values())
    assert all(errors[True][n] == errors[False][n] for n in exact if n.endswith("bias"))
    better = [n for n in exact if errors[True][n] < errors[False][n]]
    assert set(better) == {n for n in exact if n.endswith("weight")}, errors


def test_frozen_weights_get_no_gradient_and_an_error_restores_the_model():
    policy = make_policy("llama")
    frozen = policy.model.model.layers[0]
    frozen.requires_grad_(False)
    weights = list(policy.model.parameters())

    def interrupted():
        with policy.rounded_weights():
            passes(policy)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(p.grad is None for p in frozen.parameters())
    assert policy.model.model.layers[1].mlp.up_proj.weight.grad is not None
    assert all(a is b for a, b in zip(policy.model.parameters(), weights, strict=True))
    assert policy.head().rounded is None


def test_a_layer_keeps_a_forward_of_its_own():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].forward = own = lambda x: 2 * x
    with rounded_weights(model, torch.bfloat16):
        assert model[1].forward is own
    assert model[1].forward is own


def test_the_first_parameter_keeps_the_models_precision():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    with rounded_weights(model, torch.bfloat16):
        assert [p.dtype for p in model.parameters()] == [torch.float32, *[torch.bfloat16] * 3]


def test_weights_in_the_precision_of_products_stay_as_they_are():
    policy = make_policy("llama")
    exact = Policy(policy.model, compute_dtype="float32")
    weights = list(policy.model.parameters())
    with exact.rounded_weights():
        assert all(a is b for a, b in zip(policy.model.parameters(), weights, strict=True))
        assert exact.head().rounded is None
