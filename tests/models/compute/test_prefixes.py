"""Shared prefixes: which ones are found, and hidden states and gradients against those of the padded rows."""

from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    PhiConfig,
    Qwen2Config,
    Qwen3Config,
)

import flash
from fake_cuda import fake_cuda
from rlvr_cli.models.compute.prefixes import (
    causal_attention,
    distinct_prefixes,
    gather,
    hidden_states,
    packs_rows,
    shares_prefixes,
)

SMALL = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "initializer_range": 0.5, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": 1,
}  # fmt: skip
ORDINARY = {
    "qwen2": Qwen2Config(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=8),
    "llama": LlamaConfig(**SMALL),
    "mistral": MistralConfig(**SMALL, sliding_window=None),
    "phi": PhiConfig(**SMALL),
    "gpt2": GPT2Config(vocab_size=61, n_embd=16, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0),
    "opt": OPTConfig(
        vocab_size=61, hidden_size=16, ffn_dim=24, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=16
    ),
}
OTHER = {
    "a window": MistralConfig(**SMALL, sliding_window=8),
    "a cap, and windows": Gemma2Config(**SMALL, head_dim=8),
}


def make_model(config, dtype=torch.float64):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return AutoModelForCausalLM.from_config(config).to(dtype).eval()


def padded(lines, width=None):
    width = width or max(map(len, lines))
    return torch.tensor([[*line, *[1] * (width - len(line))] for line in lines]), torch.tensor([*map(len, lines)])


def test_prefixes_worked_by_hand():
    ids, lengths = padded([[5, 6, 7], [5, 6], [4], [5, 8]])
    found = distinct_prefixes(ids, lengths)
    named = list(zip(found.tokens.tolist(), found.positions.tolist(), strict=True))
    assert named == [(4, 0), (5, 0), (6, 1), (7, 2), (8, 1)]
    assert [found.places[r, :n].tolist() for r, n in enumerate(lengths)] == [[1, 2, 3], [1, 2], [0], [1, 4]]


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=8), st.integers(5, 7))
@settings(deadline=None)
def test_every_place_finds_its_own_prefix_and_none_is_there_twice(lines, width):
    ids, lengths = padded(lines, width)
    found = distinct_prefixes(ids, lengths)
    prefixes = [tuple(line[: i + 1]) for line in lines for i in range(len(line))]
    assert len(found.tokens) == len(set(prefixes))
    by_place = {}
    for row, line in enumerate(lines):
        for i, token in enumerate(line):
            place = int(found.places[row, i])
            assert by_place.setdefault(place, tuple(line[: i + 1])) == tuple(line[: i + 1])
            assert (int(found.tokens[place]), int(found.positions[place])) == (token, i)
    assert found.spread[found.origin].tolist() == list(range(len(found.tokens)))
    assert found.spread.shape == (len(lines) * width,)
    packed = distinct_prefixes(ids, lengths, packed=True)
    assert packed.spread[packed.origin].tolist() == list(range(len(found.tokens)))
    assert len(packed.spread) == sum(map(len, lines))
    rows = sorted(lines)
    assert packed.starts.tolist() == [sum(map(len, rows[:row])) for row in range(len(rows) + 1)]
    assert [int(found.tokens[place]) for place in packed.spread] == [token for row in rows for token in row]


@pytest.mark.parametrize(("packed", "multiple"), [(False, 1), (True, 1), (False, 32)])
@pytest.mark.parametrize("name", ORDINARY)
def test_hidden_states_and_gradients_are_those_of_the_padded_rows(name, packed, multiple, monkeypatch):
    calls = flash.install(monkeypatch, dtypes=[torch.float64])
    model = make_model(ORDINARY[name])
    assert shares_prefixes(model)
    lines = [[5, 6, 7, 8, 9], [5, 6, 7, 3], [5, 6], [5, 6], [11], [2, 5, 6, 7, 8, 9, 10]]
    ids, lengths = padded(lines, width=8)
    inside = torch.arange(8) < lengths[:, None]
    weights = torch.randn(*ids.shape, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))[inside]
    found = distinct_prefixes(ids, lengths, packed=packed, multiple=multiple)
    assert len(found.tokens) == (5 + 1 + 1 + 7 if multiple == 1 else 32)
    ours = gather(hidden_states(model, found), found.places[inside])
    assert {(tokens, rows) for tokens, _, rows in calls} == ({(21, 6)} if packed else set())
    plain = model.base_model(input_ids=ids, use_cache=False).last_hidden_state[inside]
    rounding = 1e-5  # these models' norms round float64 to float32
    torch.testing.assert_close(ours, plain, rtol=rounding, atol=rounding)
    parameters = [p for p in model.base_model.parameters() if p.requires_grad]
    for a, b in zip(
        torch.autograd.grad((ours * weights).sum(), parameters, allow_unused=True),
        torch.autograd.grad((plain * weights).sum(), parameters, allow_unused=True),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=rounding, atol=20 * rounding)
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(
    ("dtype", "faults", "said"),
    [
        (torch.bfloat16, {}, None),
        (torch.float16, {}, None),
        (torch.bfloat16, {"wrong": True}, "its numbers differ from those of PyTorch's attention"),
        (
            torch.bfloat16,
            {"error": RuntimeError("FlashAttention only supports Ampere GPUs or newer.\n")},
            "only supports",
        ),
        (torch.bfloat16, {"error": ImportError("undefined symbol: _ZN3c105")}, "undefined symbol"),
    ],
)
def test_rows_are_packed_where_flash_attn_gives_the_same(monkeypatch, dtype, faults, said):
    model = make_model(ORDINARY["qwen2"], torch.float32)
    with fake_cuda():
        model.to("cuda:1")
        assert shares_prefixes(model)
        assert not packs_rows(model, dtype), "it is not installed"
        flash.install(monkeypatch, **faults)
        assert not packs_rows(model, torch.float32)
        with nullcontext() if said is None else pytest.warns(UserWarning, match=f"not used for updates: .*{said}"):
            assert packs_rows(model, dtype) == (said is None)
        assert packs_rows(model, dtype) == (said is None)  # the warning comes once


def test_rows_are_not_packed_on_a_cpu(monkeypatch):
    flash.install(monkeypatch)
    assert not packs_rows(make_model(ORDINARY["qwen2"], torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("name", OTHER)
def test_other_attention_is_left_to_the_model(name):
    model = make_model(OTHER[name])
    with pytest.warns(UserWarning, match="is not ordinary causal attention"):
        assert not shares_prefixes(model)
    assert not shares_prefixes(model)  # the warning comes once
    assert model.config._attn_implementation == "sdpa"


def test_a_modified_body_is_noticed():
    model = make_model(ORDINARY["llama"])
    model.base_model.layers[0].register_forward_hook(lambda module, given, out: out + out.mean(dim=1, keepdim=True))
    with pytest.warns(UserWarning, match="is not ordinary"):
        assert not shares_prefixes(model)


def test_the_probe_leaves_the_model_as_it_was():
    model = make_model(ORDINARY["gpt2"]).train()  # dropout is active
    state = torch.random.get_rng_state()
    assert shares_prefixes(model)
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(module.training for module in model.modules())


def test_gradients_of_shared_states_are_summed_in_float32():
    states = torch.ones(1, dtype=torch.bfloat16, requires_grad=True)
    shared = gather(states, torch.zeros(1000, dtype=torch.int64))
    shared.sum().backward()
    assert states.grad is not None
    assert states.grad.item() == 1000  # in bfloat16 a sum of ones stops at 256


@pytest.mark.parametrize("autocast", [True, False])
def test_attention_in_bfloat16_rounds_its_operands_and_its_result(autocast):
    generator = torch.Generator().manual_seed(4)
    states = [torch.randn(3, heads, 7, 8, generator=generator) for heads in (4, 2, 2)]
    query, key, value = (tensor.bfloat16().double() for tensor in states)
    future = torch.ones(7, 7, dtype=torch.bool).triu(1)
    scores = query @ key.repeat_interleave(2, dim=1).transpose(2, 3) / 8**0.5
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    expected = (weights @ value.repeat_interleave(2, dim=1)).transpose(1, 2).bfloat16()

    module = torch.nn.Module()
    module.num_key_value_groups = 2
    given = states if autocast else [tensor.bfloat16() for tensor in states]
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = causal_attention(module, *given, is_causal=True)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected)
    assert (out == expected).float().mean() > 0.99  # the others are on the edge of two bfloat16 numbers
