"""Products by oneDNN against float64, where they are used and where not, and a model that uses them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from fake_cuda import fake_cuda
from policies import make_batch
from rlvr_cli.models.compute import onednn
from rlvr_cli.models.compute.onednn import Linear, add_product, linear, product, use_onednn
from rlvr_cli.models.compute.rounded import rounded_weights
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded.decode_step import unsupported_reason
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.types import Request, SamplingParams

wide = pytest.mark.skipif(not onednn._has_wide_kernels(), reason="needs oneDNN and AVX-512")


class Counted(TorchDispatchMode):
    """Counts the products by oneDNN."""

    def __enter__(self):
        self.count = 0
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += "_linear_pointwise" in str(func)
        return func(*args, **(kwargs or {}))


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("leading", [(48,), (3, 16), (2, 3, 8), (5,), (0,)])
def test_a_linear_map_and_its_gradients(leading, with_bias):
    x, weight, bias = draw(*leading, 256), draw(512, 256, seed=1), draw(512, seed=2) if with_bias else None
    upstream = draw(*leading, 512, seed=3)
    found = []
    for compute, dtype in ((linear, torch.float32), (F.linear, torch.float64)):
        given = [None if t is None else t.to(dtype, copy=True).requires_grad_() for t in (x, weight, bias)]
        with torch.no_grad():
            plain = compute(*given)
        out = compute(*given)
        assert torch.equal(plain, out)
        out.backward(upstream.to(dtype))
        found.append([out.detach(), *(t.grad for t in given if t is not None)])
    for ours, expected in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("trained", [(True, False, False), (False, True, False), (False, False, True)])
def test_only_the_gradients_that_are_needed_are_computed(trained):
    given = [draw(32, 256), draw(512, 256, seed=1), draw(512, seed=2)]
    for tensor, needed in zip(given, trained, strict=True):
        tensor.requires_grad_(needed)
    with Counted() as counted:
        linear(*given).sum().backward()
    assert [tensor.grad is not None for tensor in given] == list(trained)
    assert counted.count in (0, 1 + sum(trained[:2]))
    assert torch.equal(given[2].grad, torch.full((512,), 32.0)) if trained[2] else True


def test_products_of_any_strides():
    for a in (draw(40, 512), draw(512, 40).T, draw(40, 1024)[:, ::2]):
        for b in (draw(512, 300, seed=1), draw(300, 512, seed=1).T):
            expected = a.double() @ b.double()
            torch.testing.assert_close(product(a, b).double(), expected, rtol=1e-5, atol=1e-4)
            out = torch.ones(40, 300)
            add_product(out, a, b)
            torch.testing.assert_close(out.double(), expected + 1, rtol=1e-5, atol=1e-4)


@wide
def test_where_they_are_used():
    weight = draw(512, 256)
    with Counted() as counted:
        linear(draw(16, 256), weight)
        product(draw(16, 256), weight.T)
        assert counted.count == 2
        linear(draw(15, 256), weight)  # too few rows
        linear(draw(16, 256), weight[:511])  # too few weights
        linear(draw(16, 256).double(), weight.double())
        linear(draw(16, 256).bfloat16(), weight.bfloat16())
        with torch.autocast("cpu", torch.bfloat16):
            assert linear(draw(16, 256), weight).dtype == torch.bfloat16
        product(draw(16, 256).double(), weight.T.double())
        assert counted.count == 2
    with fake_cuda():
        x = draw(16, 256).to("cuda")
        torch.testing.assert_close(linear(x, weight.to("cuda")).cpu(), F.linear(x.cpu(), weight))


@pytest.fixture(scope="module")
def large_model_dir(tmp_path_factory, tiny_model_dir):
    """A model whose layers are large enough."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_dir, local_files_only=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=len(tokenizer), hidden_size=256, intermediate_size=768, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )  # fmt: skip
        directory = tmp_path_factory.mktemp("large")
        Policy(Qwen2ForCausalLM(config), tokenizer).save(directory)
    return directory


@wide
def test_the_large_layers_of_a_model_use_them(large_model_dir, monkeypatch):
    policy = load_policy(large_model_dir)
    kinds = {name.rpartition(".")[2]: type(module) for name, module in policy.model.named_modules()}
    assert {name for name, kind in kinds.items() if kind is Linear} == {"gate_proj", "up_proj", "down_proj"}
    assert kinds["lm_head"] is kinds["q_proj"] is nn.Linear
    assert type(copy.deepcopy(policy.model).model.layers[0].mlp.up_proj) is Linear
    assert not unsupported_reason(policy)
    assert not TransformersSampler(policy).notes
    monkeypatch.setattr(onednn, "_has_wide_kernels", lambda: False)
    assert not any(type(module) is Linear for module in load_policy(large_model_dir).model.modules())


@wide
def test_a_model_computes_and_samples_the_same(large_model_dir, monkeypatch):
    batch = make_batch([(3, 9), (3, 5), (6, 7), (2, 11)])
    requests = [Request("What is 1 + 2?", tuple(range(24)))]
    found = []
    for faster in (True, False):
        if not faster:
            monkeypatch.setattr(onednn, "_has_wide_kernels", lambda: False)
        policy = load_policy(large_model_dir)
        with Counted() as counted:
            scores = compute_log_probs(policy, batch, micro_batch_size=4)
            completions = list(TransformersSampler(policy).sample(requests, SamplingParams(max_tokens=12)))
        assert bool(counted.count) == faster
        found.append((scores, sorted(completions, key=lambda completion: completion.sample_index)))
    (ours, samples), (expected, expected_samples) = found
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    same = [a.token_ids == b.token_ids for a, b in zip(samples, expected_samples, strict=True)]
    assert sum(same) >= len(same) - 1


@wide
def test_rounded_weights_are_those_of_plain_layers():
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(512, 512))
    ours = copy.deepcopy(plain)
    use_onednn(ours)
    assert [type(layer) for layer in ours] == [nn.Linear, Linear]
    x = draw(32, 512)
    for model in (plain, ours):
        with rounded_weights(model, torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
            assert model[1].weight.dtype == torch.bfloat16
            model[1](x).float().square().sum().backward()
        assert model[1].weight.dtype == torch.float32
    assert torch.equal(plain[1].weight.grad, ours[1].weight.grad)


def test_a_model_elsewhere_is_left_alone():
    with fake_cuda():
        model = nn.Sequential(nn.Linear(512, 512)).to("cuda")
        use_onednn(model)
        assert type(model[0]) is nn.Linear
