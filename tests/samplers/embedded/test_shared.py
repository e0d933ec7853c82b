"""samplers/embedded/shared.py: one copy of a prompt for all samples of a question gives what copies give."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded.cache import RowCache
from rlvr_cli.samplers.embedded.engine import _PREFILL_TOKENS, TransformersSampler
from rlvr_cli.samplers.embedded.shared import Block, Readers, attend_to_part, merged
from rlvr_cli.types import Request, SamplingParams
from tests.helpers.sampled import assert_same

SIZE = 4  # of a head


def states(draw, *shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.getrandbits(32)), dtype=torch.float64)


def prefixes_of(draw, lengths, kv_heads):
    return [[(states(draw, kv_heads, n, SIZE), states(draw, kv_heads, n, SIZE))] for n in lengths]


def plainly(query, keys, values):
    """Attention of one row: (heads, size) to (key-value heads, tokens, size)."""
    keys, values = (part.repeat_interleave(len(query) // len(part), dim=0) for part in (keys, values))
    weights = (keys @ query[:, :, None])[..., 0].softmax(-1)
    return (weights[:, None] @ values)[:, 0]


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_merged_parts_are_attention_to_all_keys(draw):
    """Any rows begin with any prefixes or with none; some prefixes have no rows any more, and are forgotten."""
    kv_heads, of_each = draw.choice(((1, 1), (2, 2), (1, 3)))
    blocks, begins = [], []  # begins: (prefix, its keys and values)
    for _ in range(draw.randint(1, 2)):
        made = prefixes_of(draw, [draw.randint(1, 7) for _ in range(draw.randint(1, 5))], kv_heads)
        blocks.append(Block(made))
        begins += zip(blocks[-1].prefixes, made, strict=True)
    chosen = [draw.choice(begins)] + [draw.choice([*begins, None]) for _ in range(draw.randint(0, 9))]
    draw.shuffle(chosen)
    for prefix, _ in begins:
        prefix.awaited = draw.random() < 0.2
    for row, begin in enumerate(chosen):
        if begin is not None:
            begin[0].rows.append(row)
    heads, columns = kv_heads * of_each, draw.randint(1, 5)
    queries = states(draw, len(chosen), heads, SIZE)
    keys, values = (states(draw, len(chosen), kv_heads, columns, SIZE) for _ in "kv")
    mask = torch.zeros(len(chosen), 1, columns, dtype=torch.float64)
    mask[..., : draw.randrange(columns)] = -torch.inf
    asked = queries.reshape(-1, of_each, SIZE)
    own = attend_to_part(asked, keys.flatten(0, 1), values.flatten(0, 1), mask)
    own = type(own)(own.out.view(queries.shape), own.log_sum.view(queries.shape[:2]))
    those = [begin and begin[0] for begin in chosen]
    readers = Readers(those, heads=heads, kv_heads=kv_heads, device=torch.device("cpu"))
    out = merged(own, readers.attend(0, queries))
    for row, begin in enumerate(chosen):
        seen = mask[row, 0] == 0
        both = [keys[row][:, seen], values[row][:, seen]]
        if begin is not None:
            both = [torch.cat(parts, dim=1) for parts in zip(begin[1][0], both, strict=True)]
        torch.testing.assert_close(out[row], plainly(queries[row], *both), atol=1e-12, rtol=1e-12)
    for block in blocks:
        live = [prefix for prefix in block.prefixes if prefix.rows or prefix.awaited]
        longest = max((prefix.length for prefix in live), default=0)
        room = block.layers[0][0].shape
        assert not any(prefix.rows for prefix in block.prefixes) or room[0] * room[2] < 2 * len(live) * longest


@given(st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_attention_in_blocks_is_attention_to_what_the_mask_shows(draw):
    """Each block reads from a column on that no row of it needs more; the others hold large numbers."""
    kv_heads, rows, columns = draw.choice((1, 2)), draw.randint(2, 6), draw.randint(1, 7)
    first = [draw.randrange(columns) for _ in range(rows)]
    borders = [0, *sorted(draw.sample(range(1, rows), draw.randint(1, rows - 1))), rows]
    blocks = [
        (slice(a * kv_heads, b * kv_heads), slice(draw.randint(0, min(first[a:b])), None))
        for a, b in itertools.pairwise(borders)
    ]
    queries, keys, values = (states(draw, rows * kv_heads, n, SIZE) for n in (3, columns, columns))
    mask = torch.zeros(rows, 1, columns, dtype=torch.float64)
    for row, start in enumerate(first):
        mask[row, 0, :start] = -torch.inf
    expected = attend_to_part(queries, keys, values, mask)
    read = torch.zeros(rows * kv_heads, columns, dtype=torch.bool)
    for those, seen in blocks:
        read[those, seen] = True
    keys[~read] = values[~read] = 1e9
    for one, other in zip(attend_to_part(queries, keys, values, mask, blocks), expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def asked(lengths, samples):
    return [
        Request("", tuple(100 * i + j for j in range(samples)), prompt_ids=tuple(range(20 + i, 20 + i + n)))
        for i, n in enumerate(lengths)
    ]


def collect(sampler, requests, params):
    return {(c.request_index, c.sample_index): c for c in sampler.sample(requests, params)}


def bytes_of(sampler):
    return sum(states.nbytes for pair in sampler._spare.slots for states in pair)


@pytest.fixture
def shared_bytes(monkeypatch):
    """What rows shared before each step."""
    seen, forward = [], RowCache.forward

    def watched(self):
        seen.append(self.shared_bytes)
        return forward(self)

    monkeypatch.setattr(RowCache, "forward", watched)
    return seen


@pytest.mark.parametrize("compute_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rows", [5, 64])
def test_one_copy_gives_the_tokens_of_copies(tiny_model, tiny_tokenizer, compute_dtype, rows, shared_bytes):
    """Rows leave, others take their place in the middle of a question, and those that are left move."""
    tiny_model.generation_config.eos_token_id = [tiny_tokenizer.eos_token_id, *range(288, 312)]
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer, compute_dtype=compute_dtype), max_batch_size=rows)
    params = SamplingParams(max_tokens=24, min_tokens=2, stop=())
    requests = [*asked([90, 88, 40, 88], samples=6), *asked([70], samples=1)]
    shared_bytes.clear()
    done = collect(sampler, requests, params)
    assert any(shared_bytes)
    shared_bytes.clear()
    sampler._shares = False
    copies = collect(sampler, requests, params)
    assert not any(shared_bytes)
    assert_same(done, copies, compute_dtype=compute_dtype)


def test_short_prompts_and_single_samples_are_copied(tiny_model, tiny_tokenizer, shared_bytes):
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    params = SamplingParams(max_tokens=2, min_tokens=0, stop=())
    shared_bytes.clear()
    for lengths, samples in (([60, 60], 4), ([100] * 3, 1)):
        collect(sampler, asked(lengths, samples), params)
    assert not any(shared_bytes)


def test_the_cache_holds_shared_prompts_once(tiny_model, tiny_tokenizer, shared_bytes):
    """The same memory then holds more rows, and no more prompts come than it holds."""
    params = SamplingParams(max_tokens=8, min_tokens=8, stop=())
    requests = asked([100] * 12, samples=8)
    alone = TransformersSampler(Policy(tiny_model, tiny_tokenizer))
    shared_bytes.clear()
    expected = collect(alone, requests, params)
    column = sum(t.shape[0] * t.shape[2] * t.element_size() for pair in alone._empty_prefix for t in pair)
    assert bytes_of(alone) <= 96 * 32 * column  # of 96 rows with no prompt in them
    assert max(shared_bytes) == 12 * 99 * column
    budget = 150 * (124 * column + 20 * alone._vocab_size) // 10  # of 15 rows with prompts
    little = TransformersSampler(Policy(tiny_model, tiny_tokenizer), kv_memory_bytes=budget)
    shared_bytes.clear()
    assert {key: c.token_ids for key, c in collect(little, requests, params).items()} == {
        key: c.token_ids for key, c in expected.items()
    }
    assert len(little._spare.inputs) == 30
    assert max(shared_bytes) <= budget - bytes_of(little) + _PREFILL_TOKENS * column


def test_no_more_prompts_come_while_memory_is_full(tiny_model, tiny_tokenizer, shared_bytes, monkeypatch):
    """Rows then get all of it, and prompts are read only when no row is left."""
    monkeypatch.setattr("rlvr_cli.samplers.embedded.engine._PADDED_SHARE", 0.0)
    tiny_model.generation_config.eos_token_id = [tiny_tokenizer.eos_token_id, *range(288, 312)]
    params = SamplingParams(max_tokens=8, min_tokens=0, stop=())
    sampler = TransformersSampler(Policy(tiny_model, tiny_tokenizer), kv_memory_bytes=16 * (32 * 256 + 20 * 320))
    shared_bytes.clear()
    assert len(collect(sampler, asked([100] * 6, samples=8), params)) == 48
    assert max(shared_bytes) == 2 * 99 * 256
