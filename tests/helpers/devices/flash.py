"""The function of flash-attn that the package calls, as its documentation describes it, on any device and slowly."""

import importlib.machinery
import itertools
import sys
from types import ModuleType

import torch

HALF = (torch.float16, torch.bfloat16)


class _Shapes(torch.autograd.Function):
    """A kernel forwards and one backwards, which compute nothing and read nothing on the host."""

    @staticmethod
    def forward(ctx, q, k, v):
        ctx.save_for_backward(q, k, v)
        return torch.empty_like(q)

    @staticmethod
    def backward(ctx, grad):
        return tuple(torch.empty_like(states) for states in ctx.saved_tensors)


def install(monkeypatch, *, dtypes=HALF, wrong=False, error=None, compute=True):
    """Let `import flash_attn` find it; returns the list of (tokens, heads, rows) of its calls.

    Args:
        dtypes: those that it takes.
        wrong: it forgets that attention is causal.
        error: what it raises.
        compute: whether it computes; else `starts`, which the host would have to read, are not looked at.
    """
    calls = []

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0, softmax_scale=None, causal=False
    ):
        if error is not None:
            raise error
        if not q.dtype == k.dtype == v.dtype or q.dtype not in dtypes:
            raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        assert q.device == k.device == v.device == cu_seqlens_q.device
        assert q.dim() == k.dim() == 3
        assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
        if not compute:
            assert cu_seqlens_q is cu_seqlens_k
            assert (causal, dropout_p, max_seqlen_q) == (True, 0, max_seqlen_k)
            calls.append((len(q), q.shape[1], len(cu_seqlens_q) - 1))
            return _Shapes.apply(q, k, v)
        starts = cu_seqlens_q.tolist()
        assert starts == cu_seqlens_k.tolist()
        assert (starts[0], starts[-1]) == (0, len(q))
        lengths = [b - a for a, b in itertools.pairwise(starts)]
        assert max(lengths) <= max_seqlen_q == max_seqlen_k
        assert dropout_p == 0
        calls.append((len(q), q.shape[1], len(lengths)))
        scale = q.shape[2] ** -0.5 if softmax_scale is None else softmax_scale
        k, v = (states.repeat_interleave(q.shape[1] // k.shape[1], 1) for states in (k, v))
        outs = []
        for rows in zip(q.split(lengths), k.split(lengths), v.split(lengths), strict=True):
            queries, keys, values = (states.transpose(0, 1) for states in rows)  # (heads, tokens, head size)
            scores = (queries @ keys.transpose(1, 2)).to(q.dtype if q.dtype == torch.float64 else torch.float32) * scale
            if causal and not wrong:
                scores = scores + torch.full_like(scores, -torch.inf).triu(1)
            outs.append((scores.softmax(-1).to(q.dtype) @ values).transpose(0, 1))
        return torch.cat(outs)

    module = ModuleType("flash_attn")
    module.__spec__ = importlib.machinery.ModuleSpec("flash_attn", None)
    vars(module)["flash_attn_varlen_func"] = flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    return calls
