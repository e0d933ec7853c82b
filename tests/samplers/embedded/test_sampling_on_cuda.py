"""The embedded engine on a CUDA device, with the shapes of Qwen2.5-Math-1.5B: types, kernels, and what the host waits for."""

import pytest
import torch

from fake_cuda import fake_cuda
from rlvr_cli.models.adapter import AdaptedPolicy, add_adapter
from rlvr_cli.models.policy import Lora, Policy
from rlvr_cli.samplers.embedded import questions
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.types import Request, SamplingParams
from shapes import math_1_5b

HALF = torch.bfloat16
STEPS = 4
PARAMS = SamplingParams(max_tokens=STEPS, min_tokens=STEPS, stop=())


def make_model(dtype, *, layers=1, lora=False):
    """Before the devices are there: what peft imports looks for CUDA's own functions."""
    model = math_1_5b(layers=layers, dtype=dtype)
    if lora:
        add_adapter(model, Lora(rank=32, alpha=64, seed=0))
    return model


def sampler_of(model, tokenizer, *, lora=False, **how):
    model.to("cuda:1")
    policy = AdaptedPolicy(model, tokenizer, base="") if lora else Policy(model, tokenizer)
    sampler = TransformersSampler(policy, **how)
    assert sampler.notes == ()
    return policy, sampler


def answered(cuda, sampler, *, samples, common=""):
    """Answer six questions; return the number of steps that were replayed."""
    before = cuda.replayed.total()
    cuda.forget()
    asked = [Request("What is 12 + 30? " * (i + 1), tuple(range(samples)), common_prefix=common) for i in range(6)]
    completions = list(sampler.sample(asked, PARAMS))
    assert len(completions) == 6 * samples
    assert {c.num_tokens for c in completions} == {STEPS}
    return cuda.replayed.total() - before


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "lora"), [(HALF, True), (torch.float32, False)])
def test_a_step_waits_only_for_what_it_drew_and_multiplies_in_half_precision(tiny_tokenizer, dtype, lora):
    model = make_model(dtype, layers=2, lora=lora)
    with fake_cuda(compute=False) as cuda:
        _, sampler = sampler_of(model, tiny_tokenizer, lora=lora, max_batch_size=64)
        steps = answered(cuda, sampler, samples=16)
    assert steps == 2 * STEPS  # 96 samples in 64 rows
    assert cuda.waits == {
        ("stream", "device.py:to_host"): steps,  # tokens, log-probabilities and entropies together
        ("stream", "cuda_graphs.py:_recorded"): cuda.captured.total() - 1,  # one was captured before
    }
    assert set(cuda.uploads) == {"device.py:to_device"}
    assert set(cuda.captured) == {"cuda:1"}
    assert not cuda.astray
    assert {types for name in ("mm", "addmm", "bmm") for types in cuda.types[name]} <= {(HALF,) * 2, (HALF,) * 3}
    assert cuda.types["_log_softmax"] == {(torch.float32,)}
    assert cuda.types["searchsorted"] == {(torch.float64,) * 2}
    assert {call.dtype for call in cuda.attentions} == {HALF}
    prefills = [call for call in cuda.attentions if call.query[2] > 6]
    assert {(call.kernel, call.mask) for call in prefills} == {("flash", None)}
    steps_taken = [call for call in cuda.attentions if call not in prefills]
    for call in steps_taken:
        assert call.kernel == "efficient"
        assert call.query[1:] == (
            2,
            6,
            128,
        )  # the six heads of a key-value head are six queries to it: nothing is copied
        assert call.mask[1:3] == (1, 1)
        assert call.mask[3] % 8 == 0
    lengths = {call.query[2] for call in prefills}
    assert not {shape for shape in cuda.shapes if len(shape) > 1 and shape[-1] == shape[-2] and shape[-1] in lengths}


@pytest.mark.parametrize(("dtype", "lora"), [(torch.float32, False), pytest.param(HALF, True, marks=pytest.mark.slow)])
def test_the_next_call_takes_the_new_weights_into_the_same_buffers(tiny_tokenizer, dtype, lora):
    """No graph is recorded again, no memory taken, and only what changed is copied: on the device."""
    model = make_model(dtype, lora=lora)
    with fake_cuda(compute=False) as cuda:
        policy, sampler = sampler_of(model, tiny_tokenizer, lora=lora, max_batch_size=64)
        answered(cuda, sampler, samples=16)
        sampler.load_weights(policy, 1)
        workspace, captured, held = sampler._spare, cuda.captured.total(), cuda.allocated
        slots = {(keys.dtype, keys.shape, keys.device) for pair in workspace.slots for keys in pair}
        assert slots == {(HALF, (64, 2, 128, 128), policy.device)}
        assert workspace.mask.dtype == HALF
        buffers = [workspace.mask, workspace.inputs, workspace.positions]
        places = [tensor.data_ptr() for tensor in buffers]
        with torch.no_grad():
            for parameter in policy.trainable_parameters().values():
                parameter.mul_(1.1)
        sampler.load_weights(policy, 2)
        assert answered(cuda, sampler, samples=16) == 2 * STEPS
        assert sampler._spare is workspace
        assert [tensor.data_ptr() for tensor in buffers] == places
        assert cuda.captured.total() == captured
        assert cuda.allocated <= held
        assert {why for why, _ in cuda.waits} == {"stream"}
        assert cuda.waits["stream", "device.py:to_host"] == 2 * STEPS


@pytest.mark.parametrize("dtype", [HALF, pytest.param(torch.float32, marks=pytest.mark.slow)])
def test_a_prefill_after_what_prompts_begin_with_needs_no_scores_in_memory(tiny_tokenizer, monkeypatch, dtype):
    monkeypatch.setattr(questions, "COMMON_TOKENS", 4)
    with fake_cuda(compute=False) as cuda:
        _, sampler = sampler_of(make_model(dtype, layers=2), tiny_tokenizer, cuda_graphs=False)
        answered(cuda, sampler, samples=2, common="What is 12 + 30? ")
    after = [call for call in cuda.attentions if call.keys[2] > call.query[2] > 1 and call.query[1] == 12]
    assert {call.kernel for call in after} == {"efficient"}
    assert {call.mask for call in after} == {(call.query[2], call.keys[2]) for call in after}


def test_without_graphs_a_step_waits_for_nothing_else(tiny_tokenizer):
    with fake_cuda(compute=False) as cuda:
        _, sampler = sampler_of(make_model(HALF), tiny_tokenizer, max_batch_size=64, cuda_graphs=False)
        assert answered(cuda, sampler, samples=16) == 0
        assert not cuda.captured
        assert not cuda.astray
        assert cuda.waits == {("stream", "device.py:to_host"): 2 * STEPS}
        assert {call.dtype for call in cuda.attentions} == {HALF}


@pytest.mark.slow
def test_more_rows_take_no_more_kernels(tiny_tokenizer):
    counts = []
    for rows in (6, 24):
        with fake_cuda(compute=False) as cuda:
            _, sampler = sampler_of(make_model(HALF), tiny_tokenizer, max_batch_size=rows)
            assert answered(cuda, sampler, samples=rows // 6) == STEPS
        counts.append(cuda.kernels)
    assert counts[0] == counts[1]
