"""The keys and values of prompts, computed in one pass for several of them.

Enters: prompts, and what is known of the first tokens of some. Leaves: a `cache.Prefix` of each.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import pad
from transformers import DynamicCache

from rlvr_cli.models.compute.device import to_device
from rlvr_cli.models.policy import Policy
from rlvr_cli.samplers.embedded.cache import Prefix


def prefill(policy: Policy, prompts: Sequence[list[int]]) -> list[Prefix]:
    """Compute the keys and values of each prompt. They are padded on the right, so causal attention needs no mask."""
    length = max(map(len, prompts))
    cache = DynamicCache()  # without the config it keeps what lies before a sliding window, as the batch does
    padded = torch.tensor([[*prompt, *[0] * (length - len(prompt))] for prompt in prompts])
    policy.body(input_ids=to_device(padded, policy.device), past_key_values=cache, use_cache=True)
    layers = _layers(cache, policy.compute_dtype)
    return [
        [(keys[row, :, : len(prompt)], values[row, :, : len(prompt)]) for keys, values in layers]
        for row, prompt in enumerate(prompts)
    ]


def extend(policy: Policy, known: Sequence[Prefix], prompts: Sequence[list[int]]) -> list[Prefix]:
    """Compute the keys and values of prompts of whose first tokens they are known: of the rest alone.

    What is known is padded on the left, what is new on the right. Not for models with a sliding window, whose attention to
    several new tokens at once has no mask for it here.
    """
    if not known:
        return []
    lengths = [prefix[0][0].shape[1] for prefix in known]
    news = [prompt[n:] for prompt, n in zip(prompts, lengths, strict=True)]
    before, after = max(lengths), max(1, *map(len, news))
    cache = DynamicCache()
    for layer in range(len(known[0])):
        keys, values = (
            torch.stack(
                [pad(prefix[layer][part], (0, 0, before - n, 0)) for prefix, n in zip(known, lengths, strict=True)]
            )
            for part in (0, 1)
        )
        cache.update(keys, values, layer)
    mask = torch.zeros(len(known), 1, after, before + after, dtype=policy.compute_dtype)
    mask[..., before:] = torch.full((after, after), -torch.inf).triu(1)
    for row, n in enumerate(lengths):
        mask[row, :, :, : before - n] = -torch.inf
    ids = torch.tensor([[*new, *[0] * (after - len(new))] for new in news])
    places = torch.tensor(lengths)[:, None] + torch.arange(after)
    policy.body(
        input_ids=to_device(ids, policy.device),
        attention_mask=to_device(mask, policy.device),
        position_ids=to_device(places, policy.device),
        past_key_values=cache,
        use_cache=True,
    )
    layers = _layers(cache, policy.compute_dtype)
    return [
        [(k[row, :, before - n : before + len(new)], v[row, :, before - n : before + len(new)]) for k, v in layers]
        for row, (n, new) in enumerate(zip(lengths, news, strict=True))
    ]


def _layers(cache: DynamicCache, dtype: torch.dtype) -> Prefix:
    """The keys and values of each layer, in the precision of a batch."""
    # Of a cache that has been used none is None, which its annotation allows.
    states: list[tuple[torch.Tensor, torch.Tensor]] = [(keys, values) for keys, values, *_ in cache]  # type: ignore
    return [(keys.to(dtype), values.to(dtype)) for keys, values in states]
