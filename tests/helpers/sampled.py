"""Completions of a sampler that are compared with those that another way gives."""

from collections.abc import Mapping

import pytest

from rlvr_cli.types import Completion

Completions = Mapping[tuple[int, int], Completion]  # by request and sample index


def assert_same(done: Completions, expected: Completions, *, compute_dtype: str = "float32") -> None:
    """Assert that they are equal up to rounding; in bfloat16, where sums of other lengths part many, that most tokens are."""
    assert done.keys() == expected.keys()
    if compute_dtype == "bfloat16":
        equal = [done[key].token_ids == expected[key].token_ids for key in expected]
        assert sum(equal) > len(equal) / 2
        return
    for key, completion in done.items():
        assert completion.token_ids == expected[key].token_ids
        assert completion.finish_reason == expected[key].finish_reason
        assert completion.logprobs == pytest.approx(expected[key].logprobs, abs=1e-4)
        assert completion.mean_entropy == pytest.approx(expected[key].mean_entropy, abs=1e-4)
