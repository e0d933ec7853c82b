"""samplers/embedded/engine.py against `transformers.generate` and plain forward passes."""

import copy
import gc
import math
import random
from collections import deque
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers

from marks import slow
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.samplers.embedded import engine, questions
from rlvr_cli.samplers.embedded.batch import Batch
from rlvr_cli.samplers.embedded.cache import RowCache, Workspace, make_slots
from rlvr_cli.samplers.embedded.decode_step import DecodeStep
from rlvr_cli.samplers.embedded.draw import nucleus, uniforms
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.samplers.embedded.questions import Question
from rlvr_cli.samplers.stop_strings import StopStrings, first_stop, response_text
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.types import Request, SamplingParams

PROMPTS = ["What is 12 + 30?", "1", "User: Solve x^2 - 5x + 6 = 0. " * 3, "数学 😀", "Natalia sold 48 clips", "a b c"]
FREE = SamplingParams(max_tokens=16, min_tokens=0, stop=())


@pytest.fixture
def sampler(tiny_model, tiny_tokenizer):
    return TransformersSampler(Policy(tiny_model, tiny_tokenizer))


def requests(prompts=PROMPTS, samples=3, seed=0):
    return [Request(p, tuple(hash((seed, i, j)) & (2**63 - 1) for j in range(samples))) for i, p in enumerate(prompts)]


def collect(sampler, asked, params):
    """Return the completions by (request, sample)."""
    done = {(c.request_index, c.sample_index): c for c in sampler.sample(asked, params)}
    assert sorted(done) == [(i, j) for i, r in enumerate(asked) for j in range(len(r.seeds))]
    return done


def end_often(model, tokenizer):
    """Make a tenth of the vocabulary end a response, so that rows leave the batch at different times."""
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *range(288, 312)]


@torch.no_grad()
def plain_logits(model, ids):
    """Return the (vocab,) logits of the token after `ids`."""
    return model(input_ids=torch.tensor([ids])).logits[0, -1]


@torch.no_grad()
def plain_logprobs(model, completion, *, temperature=1.0):
    """Return (tokens, vocab) log-probabilities of a forward pass over prompt and response, and the response's ids."""
    ids = torch.tensor([completion.prompt_ids + completion.token_ids])
    logits = model(input_ids=ids).logits[0, len(completion.prompt_ids) - 1 : -1].float()
    return (logits / temperature).log_softmax(-1), torch.tensor(completion.token_ids)


def greedy_reference(model, ids, max_tokens):
    prompt = torch.tensor([ids])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_tokens, do_sample=False)
    return tuple(out[0, len(ids) :].tolist())


def test_greedy_equals_generate(tiny_model, tiny_tokenizer, sampler):
    end_often(tiny_model, tiny_tokenizer)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=4)
    params = SamplingParams(temperature=0.0, max_tokens=40, min_tokens=0, stop=())
    done = collect(sampler, requests(samples=2), params)
    assert len({c.num_tokens for c in done.values()}) > 2  # rows did leave at different times
    for completion in done.values():
        assert completion.token_ids == greedy_reference(tiny_model, completion.prompt_ids, 40)
        logp, ids = plain_logprobs(tiny_model, completion)
        torch.testing.assert_close(torch.tensor(completion.logprobs), logp.max(-1).values, atol=1e-4, rtol=0)
        assert (logp.argmax(-1) == ids).all()


SMALL = {
    "vocab_size": 320,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "eos_token_id": 0,
    "bos_token_id": None,
}
LLAMA_SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
ARCHITECTURES = {
    "Qwen3": {**LLAMA_SHAPE, "num_key_value_heads": 1, "head_dim": 16},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 4},
    "Granite": {**LLAMA_SHAPE, "num_key_value_heads": 2, "logits_scaling": 4.0, "attention_multiplier": 0.5},
    "OPT": {**LLAMA_SHAPE, "ffn_dim": 64, "word_embed_proj_dim": 32, "dropout": 0.0, "init_std": 0.3},
    "Mistral": {**LLAMA_SHAPE, "num_key_value_heads": 2, "sliding_window": 8},
    "Phi3": {**LLAMA_SHAPE, "num_key_value_heads": 4, "sliding_window": 5},
    "Gemma2": {
        **LLAMA_SHAPE, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8,
        "attn_logit_softcapping": 0.5, "final_logit_softcapping": 3.0, "attn_implementation": "eager",
    },
}  # fmt: skip


def small_model(architecture, **extra):
    torch.manual_seed(1)
    config = getattr(transformers, f"{architecture}Config")(**{**SMALL, "pad_token_id": 1, **extra})
    return getattr(transformers, f"{architecture}{'LMHeadModel' if architecture == 'GPT2' else 'ForCausalLM'}")(
        config
    ).eval()


@pytest.mark.parametrize(
    "architecture", [name if name in ("GPT2", "Mistral", "Gemma2") else slow(name) for name in ARCHITECTURES]
)
def test_greedy_equals_generate_for_other_architectures(architecture, tiny_tokenizer):
    model = small_model(architecture, **ARCHITECTURES[architecture])
    prompts = ["What is 12 + 30?", "1", "Natalia sold 48", "a b c"]
    sampler = TransformersSampler(Policy(model, tiny_tokenizer), max_batch_size=3)
    done = collect(
        sampler, requests(prompts, samples=2), SamplingParams(temperature=0.0, max_tokens=16, stop=(), min_tokens=0)
    )
    for completion in done.values():
        assert completion.token_ids == greedy_reference(model, completion.prompt_ids, 16)


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (1.7, 0.7)])
def test_logprobs_and_entropy_equal_a_plain_forward(tiny_model, sampler, temperature, top_p):
    params = SamplingParams(temperature=temperature, top_p=top_p, max_tokens=30, min_tokens=0, stop=())
    for completion in sampler.sample(requests(), params):
        logp, ids = plain_logprobs(tiny_model, completion, temperature=temperature)
        entropy = -(logp.exp() * logp).sum(-1).mean()
        assert completion.mean_entropy == pytest.approx(entropy.item(), abs=1e-4)
        if top_p < 1:
            kept = nucleus(logp.exp(), top_p)
            logp = (kept / kept.sum(-1, keepdim=True)).log()
        expected = logp.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-4, rtol=0)


def test_tokens_are_the_inverse_cdf_of_the_seeds_draws(tiny_model, sampler):
    for completion in sampler.sample(requests(samples=1), FREE):
        logp, ids = plain_logprobs(tiny_model, completion)
        seed = requests(samples=1)[completion.request_index].seeds[0]
        u = torch.from_numpy(uniforms(np.full(len(ids), seed), np.arange(len(ids))))
        running = logp.double().exp().cumsum(-1)
        assert torch.searchsorted(running, u[:, None] * running[:, -1:], right=True)[:, 0].equal(ids)


@pytest.mark.parametrize("rows", [3, slow(64)])
def test_tokens_do_not_depend_on_the_rest_of_the_batch(tiny_model, tiny_tokenizer, rows):
    end_often(tiny_model, tiny_tokenizer)
    asked = requests(samples=3)
    params = SamplingParams(max_tokens=16, min_tokens=2, stop=("a",))
    alone = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    expected = {
        (i, j): next(iter(alone.sample([Request(r.prompt, (seed,))], params)))
        for i, r in enumerate(asked)
        for j, seed in enumerate(r.seeds)
    }
    done = collect(TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=rows), asked, params)
    backwards = collect(
        TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=rows), asked[::-1], params
    )
    for (i, j), single in expected.items():
        for other in (done[i, j], backwards[len(asked) - 1 - i, j]):
            assert other.token_ids == single.token_ids
            assert (other.text, other.finish_reason, other.stop_reason) == (
                single.text,
                single.finish_reason,
                single.stop_reason,
            )
            np.testing.assert_allclose(other.logprobs, single.logprobs, atol=1e-4)


def test_one_prefill_serves_all_samples_of_a_question(tiny_model, tiny_tokenizer):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=3)
    shapes = []
    tiny_model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: shapes.append(tuple(args[0].shape))
    )
    shared = collect(sampler, requests(PROMPTS[:2], samples=5), FREE)
    prefilled = sum(rows * length for rows, length in shapes if length > 1)
    assert prefilled == len(shared[0, 0].prompt_ids) - 1  # the other prompt is one token, which is a step's input
    separate = [Request(r.prompt, (seed,)) for r in requests(PROMPTS[:2], samples=5) for seed in r.seeds]
    for index, completion in {k: v for (k, _), v in collect(sampler, separate, FREE).items()}.items():
        assert completion.token_ids == shared[divmod(index, 5)].token_ids


def test_prompts_of_other_lengths_are_not_padded_to_the_longest(tiny_model, tiny_tokenizer):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    lengths, shapes = [120, 119, 60, 58, 57, 10, 9, 8, 7], []
    asked = [Request("", (i,), prompt_ids=tuple(range(20, 20 + length))) for i, length in enumerate(lengths)]
    handle = tiny_model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: shapes.append(tuple(args[0].shape))
    )
    together = collect(sampler, asked, FREE)
    handle.remove()
    assert [shape for shape in shapes if shape[1] > 1] == [(4, 119), (3, 56), (2, 7)]
    for index, request in enumerate(asked):
        (alone,) = sampler.sample([request], FREE)
        assert together[index, 0].token_ids == alone.token_ids


def recorded(monkeypatch):
    """Of each prefill, how many tokens it computes for each prompt, and after how many."""
    passes, prefill = [], DecodeStep.prefill

    def recording(step, prompts, *, after):
        passes.append(([*map(len, prompts)], after[0][0].shape[1]))
        return prefill(step, prompts, after=after)

    monkeypatch.setattr(DecodeStep, "prefill", recording)
    return passes


TEMPLATE = "User: Solve x^2 - 5x + 6 = 0. " * 3


@pytest.mark.parametrize("samples", [1, 40])
def test_what_prompts_begin_with_is_computed_once(sampler, monkeypatch, samples):
    """Also where the samples of a question read one copy of its prompt."""
    prompts = [TEMPLATE + prompt for prompt in PROMPTS]
    plain = collect(sampler, requests(prompts, samples), FREE)
    passes = recorded(monkeypatch)
    asked = [replace(request, common_prefix=TEMPLATE) for request in requests(prompts, samples)]
    done = collect(sampler, asked, FREE)
    common = len(sampler._tokenizer(TEMPLATE).input_ids) - 1
    assert passes[0] == ([common], 0)
    assert {after for _, after in passes[1:]} == {common}
    rest = sorted(length for lengths, _ in passes[1:] for length in lengths)
    assert rest == sorted(len(done[i, 0].prompt_ids) - 1 - common for i in range(len(prompts)))
    for key, completion in done.items():
        assert completion.token_ids == plain[key].token_ids
        assert completion.logprobs == pytest.approx(plain[key].logprobs, abs=1e-4)
    passes.clear()
    collect(sampler, asked[2:3], FREE)
    assert [after for _, after in passes] == [0, common]  # alone it is computed as with others


def test_prompts_that_do_not_begin_alike_are_computed_whole(sampler, monkeypatch):
    """A template that breaks off within what becomes a token with the text after it, and one that is too short."""
    prompts, passes = (
        [TEMPLATE + "12", "Natalia sold 48 clips. " * 9, TEMPLATE[:-1], TEMPLATE[:-1] + "!"],
        recorded(monkeypatch),
    )
    asked = [replace(r, common_prefix=TEMPLATE[:-1]) for r in requests(prompts, 1)]
    done = collect(sampler, [*asked, replace(asked[0], prompt="12 + 30", common_prefix="12 + ")], FREE)
    ids = {i: sampler._tokenizer(prompt).input_ids for i, prompt in enumerate([*prompts, "12 + 30"])}
    common = sampler._tokenizer(TEMPLATE[:-1]).input_ids[:-1]
    whole = [i for i in ids if ids[i][: len(common)] != common or len(ids[i]) == len(common) or i == 4]
    assert len(common) >= questions.COMMON_TOKENS
    assert {1, 4} <= set(whole) < {*ids}
    assert {i: list(done[i, 0].prompt_ids) for i in ids} == ids
    computed = sorted(length for lengths, after in passes if not after for length in lengths)
    assert computed == sorted([len(common), *(len(ids[i]) - 1 for i in whole)])


def test_what_prompts_begin_with_holds_no_more_memory_than_a_few_prefills(sampler, monkeypatch):
    monkeypatch.setattr(engine, "_PREFILL_TOKENS", 200)
    passes = recorded(monkeypatch)
    prompts = [TEMPLATE + str(i) for i in range(40)]
    collect(sampler, [replace(r, common_prefix=TEMPLATE) for r in requests(prompts, 1)], FREE)
    held = [len(lengths) * after + sum(lengths) for lengths, after in passes]
    assert 200 < max(held) <= 4 * 200


def test_a_twentieth_of_the_rows_waits_for_a_prefill_on_a_cpu(tiny_model, tiny_tokenizer, monkeypatch):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=40)
    counts, compute = [], RowCache.prefill
    monkeypatch.setattr(
        RowCache, "prefill", lambda cache, ids, **asked: counts.append(len(ids)) or compute(cache, ids, **asked)
    )
    asked = [Request("", (i,), prompt_ids=(7, 8, 9), max_tokens=i + 1) for i in range(50)]  # one ends in each step
    assert len(list(sampler.sample(asked, SamplingParams(max_tokens=50, min_tokens=50, stop=())))) == 50
    assert counts == [40, 2, 2, 2, 2, 2]


def test_first_tokens_have_the_policys_distribution(tiny_model, sampler):
    n = 6000
    params = SamplingParams(max_tokens=1, min_tokens=0, stop=())
    tokens = [c.token_ids[0] for c in sampler.sample([Request(PROMPTS[0], tuple(range(n)))], params)]
    p = plain_logits(tiny_model, sampler._tokenizer(PROMPTS[0])["input_ids"]).softmax(-1).numpy()
    counts = np.bincount(tokens, minlength=len(p))
    common = n * p >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(n * p[common], n * p[~common].sum())
    degrees = len(observed) - 1
    assert degrees > 50
    assert abs(((observed - expected) ** 2 / expected).sum() - degrees) < 4 * math.sqrt(2 * degrees)


def test_rows_that_wait_take_the_place_of_rows_that_finish(tiny_model, tiny_tokenizer):
    end_often(tiny_model, tiny_tokenizer)
    widths = []
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=10)
    tiny_model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: widths.append(tuple(args[0].shape))
    )
    done = collect(sampler, requests(PROMPTS * 5, samples=4), SamplingParams(max_tokens=60, min_tokens=0, stop=()))
    steps = [rows for rows, length in widths if length == 1]
    assert max(steps) == 10
    assert steps[-1] < 3  # and without waiting rows, the batch shrinks
    tokens = sum(c.num_tokens for c in done.values())
    assert tokens / sum(steps) > 0.75  # of the computed rows were live
    assert len(steps) < 1.4 * tokens / 10  # most steps were nearly full


def test_finish_reasons(tiny_model, tiny_tokenizer):
    end_often(tiny_model, tiny_tokenizer)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    eos = set(tiny_model.generation_config.eos_token_id)
    params = SamplingParams(max_tokens=12, min_tokens=3, stop=("e", "s"))
    seen = set()
    for c in sampler.sample(requests(samples=20), params):
        seen.add((c.finish_reason, c.stop_reason))
        assert c.num_tokens == len(c.token_ids) == len(c.logprobs) <= 12
        assert c.num_prompt_tokens == len(c.prompt_ids)
        assert not eos & set(c.token_ids[:-1])
        full = response_text(tiny_tokenizer, c.token_ids)
        if c.stop_reason == "eos":
            assert c.token_ids[-1] in eos
            protected = response_text(tiny_tokenizer, c.token_ids[:3]).rstrip("\ufffd")
            assert first_stop(full, params.stop, start=len(protected)) is None  # else that was the reason
            assert c.num_tokens > 3
            assert c.text == full
            assert "<|endoftext|>" not in c.text
        elif c.finish_reason == "length":
            assert c.stop_reason is None
            assert c.num_tokens == 12
            assert c.text == full
        else:
            assert c.stop_reason in params.stop
            assert c.num_tokens > 3
            assert c.text.endswith(c.stop_reason)
            assert full.startswith(c.text)  # the rest of the last token is cut from the text, not from the ids
            assert len(response_text(tiny_tokenizer, c.token_ids[:-1]).rstrip("\ufffd")) < len(c.text)
    assert seen == {("stop", "eos"), ("stop", "e"), ("stop", "s"), ("length", None)}


def test_a_stop_string_on_the_last_token_is_a_stop(sampler):
    asked = requests(samples=1)
    for (i, _), free in collect(sampler, asked, FREE).items():
        text = free.text
        if free.finish_reason != "length" or text[-1] == "\ufffd" or text[-1] in text[:-1]:
            continue
        params = SamplingParams(max_tokens=free.num_tokens, min_tokens=0, stop=(text[-1],))
        (again,) = sampler.sample([asked[i]], params)
        assert (again.token_ids, again.finish_reason, again.stop_reason) == (free.token_ids, "stop", text[-1])
        return
    raise AssertionError("no response ends in a character of its own: change the seeds")


def test_the_default_stop_string_ends_a_response_across_tokens(tiny_model, tiny_tokenizer):
    """A policy that can only spell `</answer>`, letter by letter."""
    letters = tiny_tokenizer.convert_tokens_to_ids(list("</answer>"))
    assert len(set(letters)) == 9
    with torch.no_grad():
        embeddings = torch.zeros_like(tiny_model.get_input_embeddings().weight)
        embeddings[letters, range(9)] = 1.0
        head = torch.zeros_like(embeddings)
        for k in range(9):
            head[letters[(k + 1) % 9], k] = 50.0
        for layer in tiny_model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        tiny_model.get_input_embeddings().weight = torch.nn.Parameter(embeddings)
        tiny_model.lm_head.weight = torch.nn.Parameter(head)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    (completion,) = sampler.sample([Request("<", (7,))], SamplingParams(max_tokens=100))
    assert (completion.text, completion.stop_reason) == ("/answer></answer>", "</answer>")
    assert completion.num_tokens == 17
    (completion,) = sampler.sample([Request("<", (7,))], SamplingParams(max_tokens=100, min_tokens=17))
    assert completion.num_tokens == 26  # the first one is complete within min_tokens and does not count


@pytest.mark.parametrize("begun", [slow((1,)), slow((3,)), slow((5,)), slow((8,)), (1, 3, 5, 8)])
def test_a_response_that_has_begun_ends_where_it_would_have(tiny_model, tiny_tokenizer, begun):
    """Greedy, so that the continuation is known: minimum, EOS and stop strings, also one across the border, are of the whole."""
    end_often(tiny_model, tiny_tokenizer)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer), max_batch_size=8)
    free = collect(sampler, requests(), SamplingParams(temperature=0.0, max_tokens=24, min_tokens=7, stop=()))
    stop = {c.text[-4:] for c in free.values()}
    for place in begun:
        stop |= {response_text(tiny_tokenizer, c.token_ids[place - 1 : place + 2]) for c in free.values()}
    params = SamplingParams(temperature=0.0, max_tokens=24, min_tokens=7, stop=tuple(sorted(filter(None, stop))))
    wholes = [c for c in collect(sampler, requests(), params).values() if c.num_tokens > max(begun)]
    if len(begun) > 1:  # what is left to the limit differs
        wholes = [c for c in wholes if c.finish_reason == "stop"]
    assert len({c.stop_reason for c in wholes}) > 2
    borders = [begun[number % len(begun)] for number in range(len(wholes))]
    continuing = [
        Request("", (1,), prompt_ids=c.prompt_ids + c.token_ids[:border], begun=border)
        for c, border in zip(wholes, borders, strict=True)
    ]
    rest = collect(sampler, continuing, replace(params, max_tokens=24 - min(begun)))
    for number, (whole, border) in enumerate(zip(wholes, borders, strict=True)):
        part = rest[number, 0]
        assert whole.token_ids == whole.token_ids[:border] + part.token_ids
        assert (part.text, part.finish_reason, part.stop_reason) == (whole.text, whole.finish_reason, whole.stop_reason)
        assert part.logprobs == pytest.approx(whole.logprobs[border:], abs=1e-5)


def test_min_tokens_bars_eos_and_renormalizes(tiny_model, tiny_tokenizer):
    end_often(tiny_model, tiny_tokenizer)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    eos = tiny_model.generation_config.eos_token_id
    free = collect(sampler, requests(samples=8), SamplingParams(max_tokens=9, min_tokens=0, stop=()))
    done = collect(sampler, requests(samples=8), SamplingParams(max_tokens=9, min_tokens=6, stop=()))
    assert any(c.num_tokens <= 6 for c in free.values())
    assert {c.num_tokens for c in done.values()} == {7, 8, 9}
    for c in done.values():
        logp, ids = plain_logprobs(tiny_model, c)
        logp[:6, eos] = -torch.inf
        expected = logp.log_softmax(-1).gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(c.logprobs), expected, atol=1e-4, rtol=0)


def test_an_end_that_the_model_does_not_have_ends_nothing(tiny_model, tiny_tokenizer, sampler):
    params = SamplingParams(temperature=4.0, max_tokens=30, min_tokens=3, stop=())
    without = collect(sampler, requests(samples=8), params)
    assert any(len(tiny_tokenizer) - 1 in c.token_ids[:-1] for c in without.values())
    tiny_model.generation_config.eos_token_id = [tiny_tokenizer.eos_token_id, -1, 5000]
    other = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    assert collect(other, requests(samples=8), params) == without


def test_text_is_the_decoding_of_all_ids(tiny_tokenizer, sampler):
    texts = []
    for c in sampler.sample(requests(samples=10), FREE):
        assert c.text == tiny_tokenizer.decode(list(c.token_ids), skip_special_tokens=True)
        texts.append(c.text)
    assert any(ord(char) > 127 and char != "\ufffd" for text in texts for char in text)


def test_the_model_is_left_as_it_was_between_completions(tiny_model, sampler):
    tiny_model.train()
    tiny_model.model.layers[0].eval()
    weights = {name: p.clone() for name, p in tiny_model.named_parameters()}
    modes = [m.training for m in tiny_model.modules()]
    ids = torch.tensor([[5, 6, 7]])
    for completion in sampler.sample(requests(samples=2), FREE):
        assert [m.training for m in tiny_model.modules()] == modes
        assert tiny_model.config._attn_implementation == "sdpa"
        assert torch.is_grad_enabled()
        assert not torch.is_inference_mode_enabled()
        tiny_model(input_ids=ids).logits.sum().backward()  # a trainer at work on the same model
        assert completion.num_tokens
    assert all(p.grad is not None for p in tiny_model.parameters())
    assert all(p.equal(weights[name]) for name, p in tiny_model.named_parameters())


def test_dropout_is_off_while_sampling(tiny_model, tiny_tokenizer):
    model = small_model("GPT2", n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    sampler = TransformersSampler(Policy(model, tiny_tokenizer))
    quiet = collect(sampler, requests(PROMPTS[:2]), FREE)
    model.train()
    assert collect(sampler, requests(PROMPTS[:2]), FREE) == quiet
    assert model.training


def alive_batches():
    return sum(type(o) is Batch for o in gc.get_objects())


@pytest.mark.slow
def test_closing_early_frees_the_memory(sampler):
    gc.collect()
    gc.disable()  # reference counts alone must do it
    try:
        stream = sampler.sample(requests(samples=4), FREE)
        next(stream)
        assert alive_batches() == 1
        stream.close()
        assert alive_batches() == 0
        list(sampler.sample(requests(samples=4), FREE))
        assert alive_batches() == 0
    finally:
        gc.enable()


def test_weights_must_not_change_under_a_running_sample(tiny_model, tiny_tokenizer):
    end_often(tiny_model, tiny_tokenizer)
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    stream = sampler.sample(requests(samples=8), FREE)
    next(stream)
    sampler.load_weights(Policy(tiny_model), 1)
    with pytest.raises(AssertionError, match="weights changed"):
        list(stream)


def test_load_weights_copies_another_models(tiny_model, tiny_tokenizer, sampler):
    other = small_model("Qwen2", **LLAMA_SHAPE, num_key_value_heads=2, tie_word_embeddings=True)
    other.config.max_position_embeddings = 512
    before = collect(sampler, requests(), FREE)
    storage = tiny_model.lm_head.weight.data_ptr()
    sampler.load_weights(Policy(other), 5)
    assert sampler.policy_version == 5
    assert tiny_model.lm_head.weight.data_ptr() == storage
    after = collect(sampler, requests(), FREE)
    assert after != before
    assert after == collect(TransformersSampler(Policy(other, tiny_tokenizer)), requests(), FREE)
    sampler.load_weights(Policy(tiny_model), 6)  # the engine's own model: nothing to copy
    assert sampler.policy_version == 6
    assert collect(sampler, requests(), FREE) == after


def nudge(model, size):
    """Move every weight a little, as a training step does."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * size)


def test_a_load_that_put_other_weights_in_is_caught(tiny_model, sampler):
    trained = copy.deepcopy(tiny_model)
    nudge(trained, 0.01)
    handle = tiny_model.register_load_state_dict_post_hook(lambda model, _: nudge(model, 0.01))
    with pytest.raises(
        RlvrError, match=r"does not serve the model's weights \(version 3\).* bound for float32 is 0.001"
    ):
        sampler.load_weights(Policy(trained), 3)
    assert sampler.policy_version == 0
    with pytest.raises(RlvrError, match="in doubt"):
        sampler.sample(requests(), FREE)
    handle.remove()
    sampler.load_weights(Policy(trained), 3)
    assert sampler.policy_version == 3
    assert collect(sampler, requests(), FREE) == collect(
        TransformersSampler(Policy(trained, sampler._tokenizer)), requests(), FREE
    )


def test_decoding_that_differs_from_the_model_is_caught(tiny_model, sampler):
    """The weights are shared and the prefill is right: only single-token decoding is wrong."""
    sampler.load_weights(Policy(tiny_model), 1)
    handle = tiny_model.model.norm.register_forward_hook(
        lambda module, args, out: 1.01 * out if out.shape[1] == 1 else out
    )
    with pytest.raises(RlvrError, match=r"does not serve the model's weights \(version 2\)"):
        sampler.load_weights(Policy(tiny_model), 2)
    assert sampler.policy_version == 1
    handle.remove()
    sampler.load_weights(Policy(tiny_model), 2)
    assert sampler.policy_version == 2


def test_in_bfloat16_a_step_too_small_for_the_bound_still_shows_stale_weights(tiny_model, tiny_tokenizer):
    trained, old = copy.deepcopy(tiny_model), copy.deepcopy(tiny_model.state_dict())
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype="bfloat16"))
    sampler.load_weights(Policy(trained), 1)
    nudge(trained, 3e-4)
    handle = tiny_model.register_load_state_dict_pre_hook(lambda module, new, *_: new.update(old))
    with pytest.raises(RlvrError, match="still serves version 1"):
        sampler.load_weights(Policy(trained), 2)
    handle.remove()
    sampler.load_weights(Policy(trained), 2)
    assert sampler.policy_version == 2


def test_weights_of_another_shape_are_refused(tiny_model, sampler):
    other = small_model("Qwen2", **{**LLAMA_SHAPE, "hidden_size": 64}, num_key_value_heads=2, tie_word_embeddings=True)
    with pytest.raises(RlvrError, match=r"do not fit the engine's model: .*size mismatch"):
        sampler.load_weights(Policy(other), 1)
    assert sampler.policy_version == 0
    with pytest.raises(RlvrError, match="in doubt"):
        sampler.sample(requests(), FREE)


def test_diverged_weights_are_a_user_error(tiny_model, sampler):
    with torch.no_grad():
        tiny_model.model.norm.weight[0] = torch.nan
    with pytest.raises(RlvrError, match="logits are not finite"):
        sampler.load_weights(Policy(tiny_model), 1)
    assert sampler.policy_version == 0


def test_the_weight_check_changes_no_state(tiny_tokenizer):
    model = small_model("GPT2", n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)
    sampler = TransformersSampler(Policy(model, tiny_tokenizer))
    model.train()
    model.transformer.h[0].eval()
    modes = [m.training for m in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    sampler.load_weights(Policy(model), 1)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    assert [m.training for m in model.modules()] == modes
    assert model.config._attn_implementation == "sdpa"
    assert all(tensor.equal(weights[name]) for name, tensor in model.state_dict().items())
    model(input_ids=torch.tensor([[5, 6, 7]])).logits.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_an_answer_to_the_probe_may_hold_eos(tiny_model, tiny_tokenizer):
    tokens = []
    for _ in range(2):
        sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
        sampler.load_weights(Policy(tiny_model), 1)
        tokens.append(sampler._last_probe.tokens)
        tiny_model.generation_config.eos_token_id = list(tokens[0][0])
    assert tokens[0] == tokens[1]
    assert {len(answer) for answer in tokens[0]} == {4}


def test_stale_weights_in_the_autocast_cache_are_not_used(tiny_model, tiny_tokenizer):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype="bfloat16"))
    with torch.autocast("cpu", torch.bfloat16):
        ids = torch.tensor([[5, 6, 7]])
        old = tiny_model(input_ids=ids).logits
        nudge(tiny_model.model.layers[0].mlp, 0.5)
        assert tiny_model(input_ids=ids).logits.equal(old), "autocast kept no copies: this test proves nothing"
        sampler.load_weights(Policy(tiny_model), 1)
        inside = collect(sampler, requests(), FREE)
    assert inside == collect(
        TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype="bfloat16")), requests(), FREE
    )


def test_sleep_changes_nothing(tiny_model, sampler):
    before = collect(sampler, requests(), FREE)
    sampler.sleep()
    assert collect(sampler, requests(), FREE) == before


def test_cache_memory_is_reused_but_not_its_contents(sampler):
    before = collect(sampler, requests(), FREE)
    workspace = sampler._spare
    slots = workspace.slots
    assert any(t.count_nonzero() for pair in slots for t in pair), (
        "the call left nothing behind: this test proves nothing"
    )
    with torch.inference_mode():
        for t in (t for pair in slots for t in pair):
            t.fill_(1e30)
    assert collect(sampler, requests(), FREE) == before
    assert sampler._spare is workspace
    wider = SamplingParams(max_tokens=FREE.max_tokens + 50, min_tokens=0, stop=())
    collect(sampler, requests(), wider)
    assert sampler._spare.columns > workspace.columns
    assert collect(sampler, requests(), FREE) == before  # in a part of the larger memory
    sampler.close()
    assert not sampler._spare


def test_cache_memory_of_a_failed_call_is_not_reused(tiny_model, sampler):
    before = collect(sampler, requests(), FREE)
    kept = {name: t.clone() for name, t in tiny_model.state_dict().items()}
    with torch.no_grad():
        next(tiny_model.parameters()).fill_(torch.nan)
    longest = [max(PROMPTS, key=len)] * len(PROMPTS)  # would leave NaN outside the shorter prompts of the next call
    with pytest.raises(RlvrError, match="not finite"):
        collect(sampler, requests(longest), FREE)
    tiny_model.load_state_dict(kept)
    assert collect(sampler, requests(), FREE) == before


def test_the_cache_memory_of_a_large_call_is_freed(sampler, monkeypatch):
    monkeypatch.setattr(engine, "_KEPT_BYTES", 1000)
    collect(sampler, requests(), FREE)
    assert not sampler._spare


def test_a_longer_prompt_joins_rows_that_are_under_way(tiny_model, tiny_tokenizer, sampler):
    short, middle, long = [7, 8, 9], [60, 61, 62, 63, 64], list(range(20, 40))
    stops = StopStrings(tiny_tokenizer, (), vocab_size=320)
    with sampler._sampling():
        cache = RowCache(Policy(tiny_model), Workspace(make_slots(sampler._empty_prefix, rows=3, columns=24)))
        batch = Batch(cache, params=FREE, eos=sampler._eos, stops=stops)
        expected = []
        for prompt in (short, middle, long):  # a call of `sample` would start with the longest
            (prefix,) = cache.prefill([prompt[:-1]])
            batch.seat(Question(0, prompt, deque([(0, 3)]), prefix))
            expected.append(list(prompt))
            for _ in range(2):
                step = batch.step
                batch.advance()
                for row, ids in enumerate(expected):
                    ids.append(int(batch.drawn.tokens[row, step % FREE.max_tokens]))
        logits = cache.forward()
    for row, ids in enumerate(expected):
        torch.testing.assert_close(logits[row], plain_logits(tiny_model, ids), atol=1e-4, rtol=1e-4)


def test_no_requests_and_no_seeds(sampler):
    assert list(sampler.sample([], FREE)) == []
    assert [c.request_index for c in sampler.sample([Request("a", ()), Request("b", (1,))], FREE)] == [1]


def test_a_prompt_beyond_the_context_is_refused_before_sampling(sampler):
    long = "1 " * 150
    tokens = len(sampler._tokenizer(long)["input_ids"])
    params = SamplingParams(max_tokens=512 - tokens)
    assert next(sampler.sample([Request(long, (0,))], params)).num_tokens > 0
    with pytest.raises(
        RlvrError, match=rf"Question 1: its prompt has {tokens} tokens and up to 213 .* holds 512"
    ) as info:
        sampler.sample([Request("1", (0,)), Request(long, (0,))], SamplingParams(max_tokens=213))
    assert f"--sampling-max-tokens to at most {512 - tokens}" in info.value.hint
    with pytest.raises(RlvrError, match="holds 512") as info:
        sampler.sample([Request("1 " * 600, (0,))], SamplingParams())
    assert "longer context" in info.value.hint


def test_a_response_may_fill_a_learned_position_table_to_the_end(tiny_tokenizer):
    model = small_model("GPT2", **ARCHITECTURES["GPT2"])
    end_often(model, tiny_tokenizer)  # rows that ended early stay in the batch for a while: their positions must too
    sampler = TransformersSampler(Policy(model, tiny_tokenizer), max_batch_size=9)
    params = SamplingParams(max_tokens=60, min_tokens=0, stop=())
    done = collect(sampler, requests(["1 + 1"], samples=60), params)
    assert max(c.num_prompt_tokens + c.num_tokens for c in done.values()) > 50


def test_more_minimum_than_maximum_tokens_is_refused(sampler):
    with pytest.raises(RlvrError, match="minimum of 5 tokens per response exceeds the maximum of 3"):
        sampler.sample(requests(), SamplingParams(max_tokens=3, min_tokens=5))


def test_memory_limits_the_rows_and_not_the_tokens(tiny_model, tiny_tokenizer):
    asked = requests([PROMPTS[2] * 3, *PROMPTS], samples=4)
    expected = collect(TransformersSampler(Policy(tiny_model, tiny_tokenizer)), asked, FREE)
    widths = []
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer), kv_memory_bytes=1_000_000)
    tiny_model.get_input_embeddings().register_forward_hook(
        lambda module, args, out: widths.append(tuple(args[0].shape))
    )
    assert {k: c.token_ids for k, c in collect(sampler, asked, FREE).items()} == {
        k: c.token_ids for k, c in expected.items()
    }
    steps = [rows for rows, length in widths if length == 1]
    assert steps[0] < 28
    assert max(steps) > steps[0]  # short questions had a batch of their own, with more rows
    with pytest.raises(RlvrError, match=r"One sample of question 0 may take .* MiB of memory"):
        list(TransformersSampler(Policy(tiny_model, tiny_tokenizer), kv_memory_bytes=10_000).sample(asked, FREE))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_a_user_error(tiny_model, sampler, temperature):
    with torch.no_grad():
        tiny_model.model.norm.weight[0] = torch.nan
    with pytest.raises(RlvrError, match="logits are not finite"):
        list(sampler.sample(requests(), SamplingParams(temperature=temperature, max_tokens=8)))


def test_sampler_and_trainer_agree_in_the_precision_of_the_policy(tiny_model, tiny_tokenizer):
    """Better than bfloat16 allows for one rounding of the logits: it would part them by 0.004 nats on average."""
    policies = {name: Policy(tiny_model, tiny_tokenizer, compute_dtype=name) for name in ("float32", "bfloat16")}
    gaps = {}
    for sampled, policy in policies.items():
        sampler = TransformersSampler(policy)
        assert sampler.notes == ()
        done = collect(sampler, requests(samples=8), FREE).values()
        batch = collate([c.prompt_ids for c in done], [c.token_ids for c in done], pad_id=1)
        logprobs = torch.tensor([x for c in done for x in c.logprobs])
        for scored, trainer in policies.items():
            own = compute_log_probs(trainer, batch, micro_batch_size=8)[batch["response_mask"]]
            gaps[sampled, scored] = float((own - logprobs).abs().mean())
    assert gaps["float32", "float32"] < 1e-5
    assert gaps["bfloat16", "bfloat16"] < 1e-3
    assert min(gaps["float32", "bfloat16"], gaps["bfloat16", "float32"]) > 1e-2


def test_the_bound_of_the_weight_check_is_that_of_the_precision(tiny_model, tiny_tokenizer):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype="bfloat16"))
    wrong = tiny_model.model.norm.register_forward_hook(lambda module, args, out: 2 * out if out.shape[1] == 1 else out)
    with pytest.raises(RlvrError, match=r"the bound for bfloat16 is 0\.3"):
        sampler.load_weights(sampler._policy, 1)
    wrong.remove()
    sampler.load_weights(sampler._policy, 1)


UNSUPPORTED = {
    "Qwen2": {**LLAMA_SHAPE, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
    "Mamba": {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "Bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Falcon": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "GPTJ": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
    "CodeGen": {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4},
}


@pytest.mark.parametrize("architecture", UNSUPPORTED)
def test_unsupported_models_are_refused_with_a_hint(architecture, tiny_tokenizer):
    model = small_model(architecture, **UNSUPPORTED[architecture])
    with pytest.raises(RlvrError, match=f"cannot sample from {architecture}ForCausalLM") as info:
        TransformersSampler(Policy(model, tiny_tokenizer))
    assert "--engine vllm" in info.value.hint


@pytest.mark.parametrize("sink", [0.0, -9.0])
def test_attention_sinks_are_refused_however_little_they_do(tiny_tokenizer, sink):
    shape = {**LLAMA_SHAPE, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2, "num_experts_per_tok": 1}
    model = small_model("GptOss", **shape, layer_types=["full_attention"] * 2)
    for layer in model.model.layers:
        torch.nn.init.constant_(layer.self_attn.sinks, sink)
    with pytest.raises(RlvrError, match="cannot sample from GptOssForCausalLM"):
        TransformersSampler(Policy(model, tiny_tokenizer))


def test_a_model_that_ignores_the_mask_is_refused(tiny_model, tiny_tokenizer):
    forward = tiny_model.model.forward
    tiny_model.model.forward = lambda *args, attention_mask=None, **kwargs: forward(*args, **kwargs)
    with pytest.raises(RlvrError, match="cannot sample from Qwen2ForCausalLM"):
        TransformersSampler(Policy(tiny_model, tiny_tokenizer))


def test_a_request_with_token_ids_is_answered_from_exactly_these(sampler, tiny_tokenizer):
    text = "What is 12 + 30?"
    as_text = tuple(tiny_tokenizer(text).input_ids)
    spelled = tuple(i for character in text for i in tiny_tokenizer(character).input_ids)
    assert tiny_tokenizer.decode(spelled) == text
    assert spelled != as_text
    seeds = (3, 4)
    plain = collect(sampler, [Request(text, seeds)], FREE)
    same = collect(sampler, [Request("unread", seeds, prompt_ids=as_text)], FREE)
    assert list(same.values()) == list(plain.values())
    other = collect(sampler, [Request(text, seeds, prompt_ids=spelled), Request(text, seeds)], FREE)
    assert {other[0, j].prompt_ids for j in (0, 1)} == {spelled}
    assert {other[1, j].prompt_ids for j in (0, 1)} == {as_text}
    for completion in other.values():
        log_probs, ids = plain_logprobs(sampler._policy.model, completion)
        expected = log_probs.gather(1, ids[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, rtol=1e-3, atol=1e-4)
    with pytest.raises(RlvrError, match="token id that the model does not have"):
        sampler.sample([Request(text, seeds, prompt_ids=(5, 320))], FREE)
