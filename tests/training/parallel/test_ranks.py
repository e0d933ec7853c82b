"""What trainers compute together is what one computes alone: gradients, log-probabilities, metrics; in float64 to 1e-10."""

import copy
import math
from collections.abc import Iterator
from datetime import timedelta
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from marks import slow
from policies import make_batch, make_policy
from rlvr_cli.models.adapter import AdaptedPolicy, add_adapter
from rlvr_cli.models.policy import Lora, Policy
from rlvr_cli.training.losses.objectives import negative_log_likelihood, policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.parallel import ranks as ranks_module
from rlvr_cli.training.parallel.ranks import ALONE, Elsewhere, RankLost, Ranks, bits, join, listen
from rlvr_cli.training.updates.micro_batches import micro_batches
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update
from together import Together

LENGTHS = [(3, 5), (3, 2), (2, 7), (2, 0), (4, 4), (4, 6), (1, 1), (3, 3)]
NORMALIZATIONS = [("token_mean", None), ("masked_mean", None), ("masked_normalize", 13.0)]


@pytest.fixture(scope="module")
def together(forked) -> Iterator[Together]:
    with Together(3) as together:
        yield together


def untied(model):
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    return model


def adapted(model):
    """A policy with an adapter; of a new one half the gradients are 0, so its second matrices are drawn."""
    add_adapter(model, Lora(rank=2, alpha=4, seed=0))
    policy = AdaptedPolicy(model, base="nowhere")
    draw = torch.Generator().manual_seed(1)
    for name, tensor in policy.weights().items():
        if ".lora_B." in name:
            tensor.copy_(torch.randn(tensor.shape, generator=draw, dtype=torch.float64) / 10)
    return policy


MODELS = {"tied": Policy, "untied": lambda model: Policy(untied(model)), "adapter": adapted}


def a_batch(*, seed=0):
    """Groups of two; one row without advantage, one without a response, two with tokens of an environment inside theirs."""
    batch = make_batch(LENGTHS, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = batch["response_mask"]
    mask[2, 3:5] = mask[4, 4:6] = False
    advantages = torch.randn((len(LENGTHS), 1), generator=generator, dtype=torch.float64)
    advantages[5] = 0
    old = torch.where(mask, -3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64), 0)
    return batch | {
        "advantages": advantages,
        "sampled_log_probs": old,
        "old_log_probs": old,
        "reference_log_probs": old * 0.9,
        "group": torch.arange(len(LENGTHS))[:, None] // 2,
        "zero_advantage": advantages == 0,
    }


def objective_of(loss_type):
    if loss_type == "sft":
        return negative_log_likelihood
    loss = LOSSES[loss_type]
    values = {"cliprange": 0.2, "clip_low": 0.2, "clip_high": 0.28}
    options = {name: values.get(name, 0.2) for name in loss.options}
    return partial(policy_gradient, loss=partial(loss.function, **options), kl_coef=0.1)


def updated(ranks: Ranks, loss_type: str, kind: str, batch, how):
    """The gradient of an update, its metrics and the weights after AdamW's step."""
    policy = MODELS[kind](make_policy())
    model = policy.model
    optimizer = make_optimizer(policy, learning_rate=1e-3)
    gradient = {}

    def see(*_):
        gradient.update({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})

    optimizer.register_step_pre_hook(see)
    metrics = train_update(
        policy, optimizer, batch, objective=objective_of(loss_type), learning_rate=1e-3, ranks=ranks, **how
    )
    return gradient, metrics, {name: p.detach() for name, p in model.named_parameters()}


def assert_same_update(together: Together, *case, of_one_process=None):
    alone, metrics, _ = updated(ALONE, *(of_one_process or case))
    found = together.call(updated, *case)
    for gradient, _, weights in found:
        assert gradient.keys() == alone.keys()
        for name in alone:
            torch.testing.assert_close(gradient[name], alone[name], rtol=1e-10, atol=1e-10)
        assert all(torch.equal(weights[name], found[0][2][name]) for name in weights), "the ranks' weights differ"
    assert found[0][1].keys() == metrics.keys()
    cuts = ("update/micro_batches", "update/computed", "update/shared", "update/padding") if of_one_process else ()
    for name, value in metrics.items():
        if not name.endswith("seconds") and name not in cuts:
            assert found[0][1][name] == pytest.approx(value, rel=1e-9, abs=1e-9, nan_ok=True), name


# By default each loss once, and each pair of a model and a normalization; `-m slow` has all.
OFTEN = [
    pytest.param(loss, [*MODELS][number % 3], NORMALIZATIONS[number // 3 : number // 3 + 1], id=f"{loss}-often")
    for number, loss in enumerate(["sft", *LOSSES])
]


@pytest.mark.parametrize(
    ("loss_type", "kind", "normalizations"),
    [
        *OFTEN,
        *(slow(loss, kind, NORMALIZATIONS) for loss in ("sft", *LOSSES) for kind in MODELS),
    ],
)
def test_every_loss_has_the_gradient_of_one_process(together: Together, loss_type: str, kind: str, normalizations):
    for normalization, constant in normalizations:
        how = {"micro_batch_size": 2, "normalization": normalization, "normalize_constant": constant}
        assert_same_update(together, loss_type, kind, a_batch(), how)


@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 9),
    tokens=st.sampled_from([None, 1, 20, 1000]),
    clip=st.sampled_from([math.inf, 0.01]),
    skip=st.booleans(),
)
@settings(max_examples=4)
def test_no_cut_changes_the_gradient(together: Together, seed, size, tokens, clip, skip):
    how = {"micro_batch_size": size, "micro_batch_tokens": tokens, "max_grad_norm": clip, "skip_zero_advantage": skip}
    case = ("grpo_clip", "tied", a_batch(seed=seed), how)
    assert_same_update(together, *case, of_one_process=case if tokens else None)  # ranks cut tokens anew


@pytest.mark.parametrize(
    ("loss_type", "size"),
    [
        ("reinforce_with_baseline", 3),
        ("gspo", 1),
        ("kimi", 1),
        *(slow(loss, size) for loss, size in (("reinforce_with_baseline", 1), ("gspo", 3), ("kimi", 3))),
    ],
)
def test_episodes_whose_turns_have_advantages_of_their_own(together: Together, loss_type: str, size: int):
    """On several ranks in many micro-batches as in one process in one."""
    batch = a_batch()
    mask = batch["response_mask"]
    turns = (mask.int().diff(dim=1, prepend=torch.zeros(len(mask), 1, dtype=torch.int32)) == 1).cumsum(dim=1)
    batch["advantages"] = torch.where(mask, batch["advantages"] * (turns - 1.5), 0.0)
    how = {"micro_batch_size": size, "normalization": "masked_mean"}
    case = (loss_type, "tied", batch, how)
    assert_same_update(together, *case, of_one_process=(*case[:3], how | {"micro_batch_size": 8}))


def test_a_batch_without_advantage_has_a_gradient_of_0_on_every_rank(together: Together):
    batch = a_batch()
    batch["advantages"] = torch.zeros_like(batch["advantages"])
    batch["zero_advantage"] = torch.ones_like(batch["zero_advantage"])
    assert_same_update(together, "reinforce_with_baseline", "tied", batch, {"micro_batch_size": 1})


def test_fewer_rows_than_ranks(together: Together):
    batch = {name: tensor[:1] for name, tensor in a_batch().items()}
    assert_same_update(together, "grpo_clip", "tied", batch, {"micro_batch_size": 4})


def bfloat16_gradient(ranks: Ranks, batch):
    model = make_policy(torch.bfloat16)
    gradient = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer.register_step_pre_hook(lambda *_: gradient.update({n: p.grad for n, p in model.named_parameters()}))
    train_update(model, optimizer, batch, learning_rate=0.0, micro_batch_size=1, max_grad_norm=math.inf, ranks=ranks)
    return gradient


def test_bfloat16_gradients_are_summed_in_float32(together: Together):
    """Each sum of several micro-batches is rounded once, at the end: on any number of ranks to the same bfloat16 number."""
    alone = bfloat16_gradient(ALONE, make_batch(LENGTHS))
    for gradient in together.call(bfloat16_gradient, make_batch(LENGTHS)):
        for name in alone:
            assert gradient[name].dtype == torch.bfloat16
            rounding = 2**-8 * alone[name].abs().clamp(min=1e-6)
            assert ((gradient[name] - alone[name]).abs() <= rounding).all(), name


def frozen_head_update(ranks: Ranks, batch):
    """An update of a model of which one layer norm gets no gradient: it must stay without one."""
    model = make_policy()
    unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    model.register_parameter("unused", unused)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    train_update(model, optimizer, batch, learning_rate=0.1, micro_batch_size=2, ranks=ranks)
    return unused.detach()


def test_a_parameter_without_a_gradient_is_not_touched(together: Together):
    for unused in together.call(frozen_head_update, make_batch(LENGTHS)):
        assert torch.equal(unused, torch.ones_like(unused))


def log_probs(ranks: Ranks, batch, how):
    return compute_log_probs(make_policy(), batch, ranks=ranks, **how)


def test_log_probs_are_those_of_one_process_to_the_last_bit(together: Together):
    """In the same micro-batches: those of tokens are smaller on several ranks."""
    batch, ranks = make_batch(LENGTHS), together.size

    def cuts(tokens, **how):
        return [rows.tolist() for rows, _, _ in micro_batches(batch, None, tokens=tokens, together=True, **how)]

    even = next(tokens for tokens in range(1, 16) if cuts(tokens) == cuts(15, ranks=ranks))
    for how, of_one in (({"micro_batch_size": 2}, {}), ({"micro_batch_tokens": 15}, {"micro_batch_tokens": even})):
        alone = log_probs(ALONE, batch, how | of_one)
        for scored in together.call(log_probs, batch, how):
            assert torch.equal(scored, alone)


def not_finite(ranks: Ranks, batch):
    model = make_policy()
    before = copy.deepcopy(model.state_dict())
    metrics = train_update(
        model, make_optimizer(model, learning_rate=0.1), batch, learning_rate=0.1, micro_batch_size=1, ranks=ranks,
        objective=partial(policy_gradient, loss=LOSSES["reinforce_with_baseline"].function),
    )  # fmt: skip
    return metrics.get("update/skipped"), all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_all_ranks_skip_an_update_that_is_not_finite_on_one(together: Together):
    batch = a_batch()
    batch["advantages"][2] = math.inf
    assert together.call(not_finite, batch) == [(1.0, True), *[(None, True)] * (together.size - 1)]


# The parts


def test_work_is_dealt_whole_and_evenly():
    costs = [9.0, 8, 7, 3, 3, 2, 2, 2]
    dealt = [Ranks(rank, 3).deal(costs) for rank in range(3)]
    assert sorted(number for own in dealt for number in own) == list(range(8))
    assert [sum(costs[n] for n in own) for own in dealt] == [13, 11, 12]
    assert ALONE.deal(costs) == list(range(8))
    assert Ranks(2, 3).deal([1.0]) == []


@given(pieces=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12), size=st.integers(1, 4))
def test_in_step_all_ranks_do_equally_many_of_each_kind(pieces, size):
    costs, kinds = [float(cost) for cost, _ in pieces], [kind for _, kind in pieces]
    dealt = [Ranks(rank, size).deal_in_step(costs, kinds) for rank in range(size)]
    assert sorted(number for own in dealt for number, is_own in own if is_own) == list(range(len(pieces)))
    assert len({tuple(kinds[number] for number, _ in own) for own in dealt}) == 1
    for turn in zip(*dealt, strict=True):  # nobody waits longer than for the next larger piece
        heaviest = max(costs[number] for number, is_own in turn if is_own)
        assert all(costs[number] <= heaviest for number, _ in turn)


def abandoned(ranks: Ranks):
    def check():
        if ranks.rank == 1:
            raise ValueError("here")

    try:
        ranks.agree(lambda: None)
        ranks.agree(check)
    except (ValueError, Elsewhere) as error:
        return type(error).__name__


def test_what_one_rank_abandons_all_abandon(together: Together):
    assert together.call(abandoned) == ["Elsewhere", "ValueError", "Elsewhere"]


def first_difference(ranks: Ranks, *, where: int | None = None):
    tensors = {name: torch.arange(4.0) for name in ("a", "b")}
    if ranks.rank == where:
        tensors["b"][2] = 2.0000002
    return ranks.first_difference(tensors)


def one_differs(ranks: Ranks):
    return first_difference(ranks, where=2)


def test_a_rank_with_other_bits_is_found(together: Together):
    assert together.call(first_difference) == [None] * 3
    assert together.call(one_differs) == [(2, "b"), None, None]


def parts(ranks: Ranks):
    mixed = [torch.full((2, 3), float(ranks.rank + 1)), torch.tensor(4), torch.full((5,), 2.0, dtype=torch.bfloat16)]
    ranks.sum(mixed)
    transposed = torch.arange(6.0).reshape(2, 3).t() * (ranks.rank + 1)
    ranks.broadcast_tensors([transposed])
    return (
        mixed,
        transposed,
        ranks.anywhere([ranks.rank == 1, False, True]),
        ranks.broadcast({"said": ranks.rank}),
        ranks.gather(ranks.rank * 10),
    )


def test_sums_broadcasts_and_gathers(together: Together):
    size = together.size
    for rank, (mixed, transposed, anywhere, said, gathered) in enumerate(together.call(parts)):
        assert torch.equal(mixed[0], torch.full((2, 3), size * (size + 1) / 2))
        assert mixed[1] == 4 * size
        assert torch.equal(mixed[2], torch.full((5,), 2.0 * size, dtype=torch.bfloat16))
        assert torch.equal(transposed, torch.arange(6.0).reshape(2, 3).t())
        assert anywhere == [True, False, True]
        assert said == {"said": 0}
        assert gathered == ([10 * r for r in range(size)] if rank == 0 else [])


def test_a_rank_that_does_not_come_is_lost(monkeypatch):
    store, _ = listen()
    monkeypatch.setattr(ranks_module, "WITHIN_AN_UPDATE", timedelta(seconds=0.2))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with pytest.raises(RankLost, match=r"(?i)timeout|timed out"):
        join(store, rank=0, size=2, device=torch.device("cpu"), loopback=True)


@given(st.integers(0, 5), st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64]))
def test_bits_change_with_each_number(place, dtype):
    tensor = torch.arange(1, 7).to(dtype).reshape(2, 3)
    other = tensor.clone()
    other.view(-1)[place] += 1
    assert bits({"a": tensor}) == bits({"a": tensor.clone()}) != bits({"a": other})
