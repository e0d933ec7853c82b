"""Encoded pairs: a batch has the reference's log-probabilities of its own pairs, and is made of these alone."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rlvr_cli.data.pairs import load_pairs
from rlvr_cli.data.prompts import PromptTemplate
from rlvr_cli.training.pairs import EncodedPairs


class Made(TorchDispatchMode):
    """Counts the tensors that operators make."""

    def __init__(self):
        super().__init__()
        self.tensors = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.tensors += len(result) if isinstance(result, tuple | list) else 1
        return result


@pytest.fixture
def encoded(tmp_path, tiny_tokenizer):
    """Encodes so many pairs of a response of 1 token and one of 2 or 3, in turn; log-probability i is i."""
    right, wrong = "1", ("1?", "1?1")
    assert [len(tiny_tokenizer(text).input_ids) for text in (right, *wrong)] == [1, 2, 3]

    def encode(count):
        rows = [{"prompt": "q", "chosen": right, "rejected": wrong[i % 2]} for i in range(count)]
        (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pairs = load_pairs(str(tmp_path / "p.jsonl"), PromptTemplate("t", ""), pairs_per_question=1, seed=0)
        trainer = SimpleNamespace(
            tokenizer=tiny_tokenizer,
            policy=SimpleNamespace(context_length=None, context_note=""),
            tensors={"reference_log_probs": torch.arange(7 * count // 2)},
        )
        return EncodedPairs(trainer, pairs, append_eos=False)

    return encode


def test_a_batch_has_the_reference_of_its_pairs_and_costs_the_same_however_many_there_are(encoded):
    made = []
    for count in (6, 300):
        pairs = encoded(count)
        with Made() as ours:
            batch = pairs.batch([5, 0, 3])
        found = batch["reference_log_probs"][batch["response_mask"]]
        assert found.tolist() == [17, 18, 19, 20, 0, 1, 2, 10, 11, 12, 13]
        made.append(ours.tensors)
    assert made[0] == made[1]
