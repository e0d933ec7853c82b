"""Documents packed into sequences, whole where they fit best or without gaps; packed traces, and what an update on them computes."""

from array import array

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from policies import VOCAB, make_policy
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.tokens.packing import PackedDataset, best_fit, without_gaps
from rlvr_cli.models.tokens.tokenization import collate
from rlvr_cli.replay import formulas
from rlvr_cli.training.traces import pack_across, pack_whole
from rlvr_cli.types import Example
from updates import NORMALIZATIONS, assert_same, one_shot_gradient, plain_loss, update_gradient


def test_each_document_goes_where_it_leaves_the_least_room():
    #          0  1  2  3  4  5
    lengths = [3, 7, 5, 2, 6, 2]
    # 7 -> a, which has 3 left; 6 -> b, 4 left; 5 -> c, 5 left; 3 -> a, nothing left; 2 -> b, twice
    assert best_fit(lengths, capacity=10, order=range(6)) == [[1, 0], [4, 3, 5], [2]]
    assert best_fit(lengths, capacity=10, order=[5, 3, 0, 1, 2, 4]) == [[1, 0], [4, 5, 3], [2]]


@given(st.integers(1, 12), st.data())
def test_whole_documents_fill_few_sequences(capacity, data):
    lengths = data.draw(st.lists(st.integers(1, capacity), max_size=40))
    order = data.draw(st.permutations(range(len(lengths))))
    sequences = best_fit(lengths, capacity=capacity, order=order)
    assert sorted(document for sequence in sequences for document in sequence) == list(range(len(lengths)))
    filled = [sum(lengths[document] for document in sequence) for sequence in sequences]
    assert all(tokens <= capacity for tokens in filled)
    assert sum(2 * tokens <= capacity for tokens in filled) <= 1, "two half empty sequences would be one"
    assert sequences == formulas.packed(lengths, capacity=capacity, order=order)


@given(st.lists(st.lists(st.integers(0, 9), max_size=7), max_size=8), st.integers(1, 5))
def test_sequences_without_gaps_are_those_of_the_packed_dataset(documents, seq_length):
    masks = [[token % 2 == 0 for token in document] for document in documents]
    ids, learned = without_gaps(documents, masks, seq_length=seq_length)
    expected = PackedDataset([torch.tensor(document, dtype=torch.int64) for document in documents], seq_length)
    assert [sequence[:-1].tolist() for sequence in ids] == [item["input_ids"].tolist() for item in expected]
    assert [sequence[1:].tolist() for sequence in ids] == [item["labels"].tolist() for item in expected]
    assert learned == [[token % 2 == 0 for token in sequence] for sequence in ids]


def test_a_mask_has_one_entry_per_token():
    with pytest.raises(AssertionError, match="one entry per token"):
        without_gaps([[1, 2]], [[True]], seq_length=1)


# Traces, packed and in an update


@pytest.fixture(scope="module")
def policy():
    return make_policy(layers=2)


def make_traces(lengths, seed=0):
    """Prompts, responses and masks, as of `encode_traces`; the first response is learned in part."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(3, VOCAB, (sum(pair),), generator=generator).tolist() for pair in lengths]
    prompts = [array("i", row[:prompt]) for row, (prompt, _) in zip(ids, lengths, strict=True)]
    responses = [array("i", row[prompt:]) for row, (prompt, _) in zip(ids, lengths, strict=True)]
    masks = [[place % 2 == 0 for place in range(len(responses[0]))], *[None] * (len(lengths) - 1)]
    return prompts, responses, masks


def batch_of(sequences, numbers):
    rows = [row for number in numbers for row in sequences.rows[number]]
    return collate(
        [sequences.prompts[row] for row in rows],
        [sequences.responses[row] for row in rows],
        pad_id=0,
        response_masks=[sequences.masks[row] for row in rows],
    )


LENGTHS = [(2, 3), (1, 7), (4, 2), (3, 5), (2, 1), (1, 1), (3, 3)]


@pytest.mark.parametrize(("normalization", "constant"), NORMALIZATIONS)
def test_packed_examples_have_the_gradient_that_they_have_alone(policy, normalization, constant):
    """Each example goes through the whole model in a row of its own: no other example is there to be seen."""
    examples = [Example(str(number), "", "") for number in range(len(LENGTHS))]
    encoded = make_traces(LENGTHS)
    sequences = pack_whole(examples, *encoded, length=14, seed=0)
    assert max(map(len, sequences.rows)) > 1
    numbers = range(len(sequences.rows) - 1)
    batch = batch_of(sequences, numbers)
    gradient, metrics = update_gradient(
        policy,
        batch,
        micro_batch_size=1,
        micro_batch_tokens=14,
        normalization=normalization,
        normalize_constant=constant,
    )
    rows = [row for number in numbers for row in sequences.rows[number]]
    learned = [sum(encoded[2][row] or [True] * len(encoded[1][row])) for row in rows]
    divisors = {
        "token_mean": [sum(learned)] * len(rows),
        "masked_mean": [count * len(rows) for count in learned],
        "masked_normalize": [(constant or 0) * len(rows)] * len(rows),
    }[normalization]
    loss = torch.zeros((), dtype=torch.float64)
    for row, divisor in zip(rows, divisors, strict=True):
        prompt, response = encoded[0][row], encoded[1][row]
        ids, mask = torch.tensor([[*prompt, *response]]), torch.tensor(encoded[2][row] or [True] * len(response))
        log_probs = policy(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        loss = loss - log_probs[torch.arange(len(response)), ids[0, len(prompt) :]][mask].sum() / divisor
    assert_same(gradient, one_shot_gradient(policy, loss), tolerance=1e-10)
    assert metrics["loss/objective"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["update/computed"] <= sum(len(encoded[0][row]) + len(encoded[1][row]) - 1 for row in rows)
    assert metrics["update/padding"] == 0


def test_examples_joined_without_gaps_attend_to_those_before(policy):
    """The loss of the course on the same sequences, on the tokens of responses."""
    encoded = make_traces(LENGTHS)
    sequences = pack_across(*encoded, length=12, seed=0)
    total = sum(map(sum, LENGTHS))
    assert len(sequences.rows) == (total - 1) // 12 == 3
    batch = batch_of(sequences, range(3))
    assert batch["input_ids"].shape == (3, 12)
    assert torch.equal(batch["input_ids"][1:, 0], batch["labels"][:-1, -1])
    learned = sum(len(response) for response in encoded[1]) - len(encoded[1][0]) // 2
    left_out = total - 1 - 3 * 12
    assert learned - left_out <= int(batch["response_mask"].sum()) <= learned
    gradient, metrics = update_gradient(
        policy, batch, micro_batch_size=1, micro_batch_tokens=12, normalization="token_mean"
    )
    labels = batch["labels"].masked_fill(~batch["response_mask"], -100)
    loss = F.cross_entropy(policy(batch["input_ids"]).logits.flatten(0, 1), labels.flatten())
    assert_same(gradient, one_shot_gradient(policy, loss), tolerance=1e-10)
    assert metrics["loss/objective"] == pytest.approx(loss.item(), rel=1e-12)
    assert metrics["update/micro_batches"] == 3
    alone = plain_loss(policy, collate(*encoded[:2], pad_id=0, response_masks=encoded[2]), "token_mean", None)
    assert abs(alone.item() - loss.item()) > 1e-4, "attention crosses"


def test_what_is_learned_follows_its_tokens():
    prompts, responses = ([array("i", ids) for ids in of_all] for of_all in ([[1, 2], [5]], [[3, 4], [6]]))
    masks = [[False, True], None]
    sequences = pack_across(prompts, responses, masks, length=2, seed=0)
    joined = [*prompts[1], *responses[1], *prompts[0], *responses[0]]
    if sequences.prompts[0].tolist() == [1]:
        joined = [*prompts[0], *responses[0], *prompts[1], *responses[1]]
    known = {1: False, 2: False, 3: False, 4: True, 5: False, 6: True}
    assert [*zip(sequences.prompts, sequences.responses, strict=True)] == [
        (array("i", joined[:1]), array("i", joined[1:3])),
        (array("i", joined[2:3]), array("i", joined[3:5])),
    ]
    assert sequences.masks == [[known[token] for token in response] for response in sequences.responses]
    assert sequences.rows == [[0], [1]]


def test_examples_are_joined_in_an_order_of_the_seed():
    encoded = make_traces([(1, 1)] * 8)
    joined = {tuple(pack_across(*encoded, length=15, seed=seed).responses[0]) for seed in range(3)}
    assert len(joined) == 3


def test_examples_that_cannot_be_packed_are_refused_by_name():
    examples = [Example("short", "", ""), Example("long", "", "")]
    masks: list[list[bool] | None] = [None, None]
    encoded = [array("i", [1]), array("i", [1, 2])], [array("i", [3]), array("i", [3, 4])], masks
    assert pack_whole(examples, *encoded, length=4, seed=0).num_tokens == 6
    with pytest.raises(RlvrError, match="Trace long has 4 tokens, and a packed sequence has 3") as refused:
        pack_whole(examples, *encoded, length=3, seed=0)
    assert "--packing-length 4 or more" in refused.value.hint
    assert len(pack_across(*encoded, length=5, seed=0).rows) == 1
    with pytest.raises(RlvrError, match="2 traces have 6 tokens, too few for a packed sequence of 6"):
        pack_across(*encoded, length=6, seed=0)
