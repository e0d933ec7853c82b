"""samplers/embedded/decode_step.py and cuda_graphs.py against the models' own forward passes."""

from collections import deque
from unittest import TestCase

import numpy as np
import pytest
import torch
import transformers

from marks import slow
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded import cuda_graphs, decode_step
from rlvr_cli.samplers.embedded.batch import Batch
from rlvr_cli.samplers.embedded.cache import RowCache, Workspace, make_slots
from rlvr_cli.samplers.embedded.decode_step import DecodeStep, Window, unsupported_reason
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.embedded.prefill import prefill
from rlvr_cli.samplers.embedded.questions import Question
from rlvr_cli.samplers.stop_strings import StopStrings
from rlvr_cli.types import Request, SamplingParams
from tests.helpers.sampled import assert_same

SHAPE = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "pad_token_id": 1,
    "eos_token_id": 0,
    "bos_token_id": None,
}
ARCHITECTURES = {
    "Llama": {"attention_bias": True},
    "Mistral": {"sliding_window": None},
    "Qwen2": {"tie_word_embeddings": True},
    "Qwen3": {"head_dim": 16},
}
SLOWER = "Sampling is slower than it could be, since the model's own code runs each step: "
PROMPTS = ["What is 12 + 30?", "1", "Natalia sold 48 clips in April", "a b c"]


def small_model(architecture, **extra):
    torch.manual_seed(1)
    config = getattr(transformers, f"{architecture}Config")(**{**SHAPE, **extra})
    model = getattr(transformers, f"{architecture}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():  # else norms are ones and biases zeros
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.3)
    return model


def requests(prompts=PROMPTS, samples=3):
    return [Request(p, tuple(1000 * i + j for j in range(samples))) for i, p in enumerate(prompts)]


def collect(sampler, params, asked=None):
    return {(c.request_index, c.sample_index): c for c in sampler.sample(asked or requests(), params)}


DTYPES = [torch.float32, slow(torch.float64)]


@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_step_gives_the_models_logits(architecture, dtype, joined, monkeypatch):
    model = small_model(architecture, **ARCHITECTURES[architecture]).to(dtype)
    if not joined:
        monkeypatch.setattr(decode_step, "_JOINED_BELOW", 0)
    assert unsupported_reason(Policy(model)) == ""
    step = DecodeStep(Policy(model), dtype=dtype, positions=16)
    ids = torch.randint(320, (3, 9), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids).logits
    heads, size = model.config.num_key_value_heads, model.model.layers[0].self_attn.head_dim
    cache = [(torch.zeros(4, heads, 12, size, dtype=dtype), torch.zeros(4, heads, 12, size, dtype=dtype)) for _ in "ab"]
    mask = torch.zeros(3, 1, 1, 12, dtype=dtype)
    for position in range(9):  # from an empty cache, one token after the other
        window = Window(3, 2, 2 + position + 1)
        seen = mask[..., window.low : window.high]
        logits = step(ids[:, position], torch.full((3,), position), mask=seen, cache=cache, window=window)
        torch.testing.assert_close(logits, expected[:, position].float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_step_after_several_tokens_in_a_pass_gives_the_models_logits(architecture, dtype):
    """They go to the columns since their row was parked, and to those before its first."""
    policy = Policy(small_model(architecture, **ARCHITECTURES[architecture]).to(dtype))
    ids = torch.randint(320, (3, 30), generator=torch.Generator().manual_seed(0)).tolist()
    prefixes = prefill(policy, [one[:2] for one in ids])
    slots = make_slots([(k[:, :0], v[:, :0]) for k, v in prefixes[0]], rows=3, columns=36, value=1.0)
    cache = RowCache(policy, Workspace(slots, step=DecodeStep(policy, dtype=dtype, positions=36)))
    for one, prefix in zip(ids, prefixes, strict=True):
        cache.seat(one[:3], prefix, most=1)
    lengths = [3, 3, 3]
    cache.forward()
    for waits, news in ((0, (1, 2, 6)), (4, (9, 1, 3)), (1, (1, 1, 1)), (2, (5, 7, 3))):
        cache.feed(torch.tensor([one[length] for one, length in zip(ids, lengths, strict=True)]))
        cache.park([0, 1, 2])  # a step that follows reads what was fed
        for _ in range(waits):
            cache.forward()
        lengths = [length + new for length, new in zip(lengths, news, strict=True)]
        for rows in ([2, 0], [1]):
            cache.resume(np.array(rows), [ids[row][: lengths[row]] for row in rows])
        logits = cache.forward()
        for one, length, found in zip(ids, lengths, logits, strict=True):
            plain = policy.forward(input_ids=torch.tensor([one[:length]])).logits[0, -1]
            torch.testing.assert_close(found, plain.float(), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@torch.no_grad()
def test_a_prefill_gives_the_models_keys_and_values(architecture, dtype, before):
    """Of prompts of all lengths, one of them nothing but what all begin with."""
    policy = Policy(small_model(architecture, **ARCHITECTURES[architecture]).to(dtype))
    ids = torch.randint(320, (3, 12), generator=torch.Generator().manual_seed(0)).tolist()
    prompts = [ids[0][:before] + one[:length] for one, length in zip(ids, (0 if before else 1, 12, 7), strict=True)]
    nothing = [(keys[:, :0], values[:, :0]) for keys, values in prefill(policy, [[0]])[0]]
    step = DecodeStep(policy, dtype=dtype, positions=16)
    after = step.prefill([prompts[0][:before]], after=nothing)[0] if before else nothing
    found = step.prefill([prompt[before:] for prompt in prompts], after=after)
    for prefix, expected in zip(found, prefill(policy, prompts), strict=True):
        torch.testing.assert_close(prefix, expected, atol=2e-5, rtol=1e-5)


def test_a_prefill_that_goes_wrong_after_known_tokens_is_found_at_the_start(tiny_model, tiny_tokenizer, monkeypatch):
    prefill = DecodeStep.prefill

    def wrong(step, prompts, *, after):
        found = prefill(step, prompts, after=after)
        return [[(keys, -values) for keys, values in one] for one in found] if after[0][0].shape[1] else found

    monkeypatch.setattr(DecodeStep, "prefill", wrong)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    assert sampler.notes == (f"{SLOWER}the faster one gives different logits.",)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_sampler_uses_the_decode_step_without_a_note(architecture, tiny_tokenizer):
    model = small_model(architecture, **ARCHITECTURES[architecture])
    sampler = TransformersSampler(Policy(model, tiny_tokenizer), max_batch_size=4)
    assert sampler.notes == ()
    params = SamplingParams(max_tokens=12, min_tokens=0, stop=())
    done = collect(sampler, params)
    calls = []
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    by_the_model = collect(sampler, params)
    handle.remove()
    assert calls, "a hook must be called"
    assert_same(done, by_the_model)
    assert sampler.notes == (f"{SLOWER}lm_head has a hook or a patch.",)


@pytest.mark.parametrize(
    ("architecture", "extra", "reason"),
    [
        ("Granite", {}, "granite is none of"),
        ("Qwen2", {"hidden_act": "gelu"}, "not supported"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "not supported"),
    ],
)
def test_a_note_says_what_a_decode_step_does_not_support(architecture, extra, reason, tiny_tokenizer):
    with TestCase().assertLogs() as logged:
        sampler = TransformersSampler(Policy(small_model(architecture, **extra), tiny_tokenizer))
    assert [record.getMessage() for record in logged.records] == list(sampler.notes)
    assert len(sampler.notes) == 1
    assert reason in sampler.notes[0]


def test_copies_that_do_not_fit_are_not_made(tiny_model, tiny_tokenizer, monkeypatch):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype="bfloat16"))
    limit = 4 * (4 * tiny_model.num_parameters() - 1)
    monkeypatch.setattr("rlvr_cli.samplers.embedded.engine.memory_limit", lambda: limit)
    assert not sampler._may_step()
    assert sampler.notes == (f"{SLOWER}0.0 GiB for its weights in bfloat16 leave too little memory.",)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))  # nothing is cast, nothing needs to fit
    assert sampler.notes == ()


def test_a_replaced_layer_is_not_supported():
    class Adapted(torch.nn.Linear):
        pass

    model = small_model("Qwen2")
    model.model.layers[1].mlp.up_proj = Adapted(32, 64, bias=False)
    assert (
        unsupported_reason(Policy(model))
        == "model.layers.1.mlp.up_proj has type Adapted, which is not part of the architecture"
    )
    model = small_model("Qwen2")
    model.model.norm.forward = lambda x: x
    assert unsupported_reason(Policy(model)) == "model.norm has a hook or a patch"


def test_a_decode_step_that_differs_from_the_model_is_not_used(tiny_tokenizer):
    model = small_model("Qwen2")
    model.model.layers[1].self_attn.scaling *= 1.1
    sampler = TransformersSampler(Policy(model, tiny_tokenizer))
    assert sampler.notes == (f"{SLOWER}the faster one gives different logits.",)
    for c in collect(sampler, SamplingParams(temperature=0.0, max_tokens=12, min_tokens=0, stop=())).values():
        prompt = torch.tensor([c.prompt_ids])
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False)
        assert c.token_ids == tuple(out[0, len(c.prompt_ids) :].tolist())


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("rows", "columns"), [slow(1, 1), (2, 8), slow(32, 128)])
def test_fixed_shapes_give_the_same_tokens(tiny_model, tiny_tokenizer, rows, columns, compute_dtype, monkeypatch):
    """Rows leave, others take their place, and the window moves, with fine, medium and coarse rounding of shapes."""
    monkeypatch.setattr(cuda_graphs, "ROWS", rows)
    monkeypatch.setattr(cuda_graphs, "COLUMNS", columns)
    tiny_model.generation_config.eos_token_id = [tiny_tokenizer.eos_token_id, *range(288, 312)]
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype=compute_dtype), max_batch_size=5)
    params = SamplingParams(max_tokens=24, min_tokens=2, stop=("a",))
    expected = collect(sampler, params, requests(PROMPTS * 2))
    sampler._fixed = True
    done = collect(sampler, params, requests(PROMPTS * 2))
    assert_same(done, expected, compute_dtype=compute_dtype)


def test_unused_rows_do_not_change_other_rows(tiny_model, tiny_tokenizer):
    """In a fixed shape they are computed from the first step on, over columns that were never written."""
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    stops = StopStrings(tiny_tokenizer, (), vocab_size=320)
    first, second = list(range(20, 40)), [7, 8, 9, 10]
    params = SamplingParams(max_tokens=24, min_tokens=0, stop=())
    with sampler._sampling():
        slots = make_slots(sampler._empty_prefix, rows=3, columns=40)
        cache = RowCache(Policy(tiny_model), Workspace(slots, step=sampler._new_step(40), fixed=True))
        batch = Batch(cache, params=params, eos=(), stops=stops)
        for index, prompt in enumerate((first, second)):
            (prefix,) = cache.prefill([prompt[:-1]])
            batch.seat(Question(index, prompt, deque([(0, index)]), prefix))
            for _ in range(3):
                batch.advance()
        assert all(slots.isfinite().all() for pair in cache.slots for slots in pair)
        logits = cache.forward()
        for row, prompt in enumerate((first, second)):
            drawn = batch.drawn.tokens[row, batch.born[row] : batch.step].tolist()
            plain = tiny_model(input_ids=torch.tensor([[*prompt, *drawn]])).logits[0, -1]
            torch.testing.assert_close(logits[row], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
def test_recorded_steps_give_the_same_tokens(tiny_model, tiny_tokenizer, compute_dtype, monkeypatch):
    """All of them in float32, most of them in bfloat16."""
    monkeypatch.setattr(cuda_graphs, "COLUMNS", 8)
    tiny_model.to("cuda")
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype=compute_dtype), max_batch_size=40)
    assert sampler._fixed
    assert sampler.notes == ()
    params = SamplingParams(max_tokens=24, min_tokens=2, stop=("a",))
    done = collect(sampler, params, requests(PROMPTS * 6))
    sampler._fixed = False
    expected = collect(sampler, params, requests(PROMPTS * 6))
    equal = [done[key].token_ids == expected[key].token_ids for key in expected]
    assert sum(equal) >= len(equal) * (0.95 if compute_dtype == "float32" else 0.5)
