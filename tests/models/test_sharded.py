"""A policy that is divided over ranks computes and learns what the whole one does; in float64 to 1e-10."""

import math
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from policies import VOCAB, WideRMSNorm, make_batch, make_policy
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.sharded import ShardedPolicy, check_shardable, empty
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.parallel.ranks import ALONE, Elsewhere, Ranks
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.update import train_update
from together import Together
from triton_on_cpu import mend_interpreter

LENGTHS = [(3, 5), (3, 2), (2, 7), (2, 0), (4, 4), (4, 6), (1, 1), (3, 3)]
pytestmark = pytest.mark.filterwarnings("ignore:The (logits|attention) of Gemma2")  # that it is slow
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request) -> int:
    return request.param


@pytest.fixture(scope="module")
def together(forked, ranks: int) -> Iterator[Together]:
    with Together(ranks) as together:
        yield together


def untied(model):
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() * 1.5)
    return model


def soft_capped():
    """A model whose logits are not a linear map of its hidden states."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCAB, hidden_size=8, intermediate_size=12, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=4, max_position_embeddings=64, initializer_range=0.5, final_logit_softcapping=2.0,
        sliding_window=64, pad_token_id=1, eos_token_id=0, bos_token_id=None, attn_implementation="eager",
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return Gemma2ForCausalLM(config).to(torch.float64).eval()


def with_ordinary_norms(model):
    for module in model.modules():
        if isinstance(module, WideRMSNorm):
            module.__class__ = Qwen2RMSNorm
    return model


MODELS = {
    "tied": lambda: make_policy(layers=2),
    "untied": lambda: untied(make_policy()),
    "soft-capped": soft_capped,
    "bfloat16": lambda: make_policy(torch.bfloat16, layers=2),
    "float32": lambda: make_policy(torch.float32, layers=2),
    "fused": lambda: with_ordinary_norms(make_policy(torch.float32, layers=2)),
}


def policy_of(ranks: Ranks, kind: str, compute_dtype: str = "auto"):
    """A policy, whole or, where there are several ranks, divided; and the whole one."""
    whole = Policy(MODELS[kind](), compute_dtype=compute_dtype)
    whole.kernels = "liger" if kind == "fused" else "torch"
    if ranks.size == 1:
        return whole, whole
    divided = ShardedPolicy(whole, ranks.mesh(CPU))
    empty(whole)
    return divided, whole


def a_batch(seed=0):
    batch = make_batch(LENGTHS, seed)
    generator = torch.Generator().manual_seed(seed)
    mask = batch["response_mask"]
    advantages = torch.randn((len(LENGTHS), 1), generator=generator, dtype=torch.float64)
    advantages[5] = 0
    old = torch.where(mask, -3 * torch.rand(mask.shape, generator=generator, dtype=torch.float64), 0)
    more = {"advantages": advantages, "old_log_probs": old, "sampled_log_probs": old, "reference_log_probs": old * 0.9}
    return batch | more | {"zero_advantage": advantages == 0}


GRPO_CLIP = partial(policy_gradient, loss=partial(LOSSES["grpo_clip"].function, cliprange=0.2), kl_coef=0.1)


def updated(ranks: Ranks, kind: str, batches, how, compute_dtype="auto", optimizer="adamw"):
    """Metrics of the updates, and the weights afterwards."""
    policy, whole = policy_of(ranks, kind, compute_dtype)
    if optimizer == "sgd":
        stepper: torch.optim.Optimizer = torch.optim.SGD(policy.trainable_parameters().values())
    else:
        offload = optimizer == "offloaded"
        kind_ = "adamw" if offload else optimizer
        stepper = make_optimizer(policy, learning_rate=1e-2, kind=kind_, offload=offload, weight_decay=0.1)
    metrics = [
        train_update(policy, stepper, batch, objective=GRPO_CLIP, learning_rate=1e-2, ranks=ranks, **how)
        for batch in batches
    ]
    if isinstance(policy, ShardedPolicy):
        assert all(parameter.isnan().all() for parameter in whole.model.parameters()), "the shell has weights"
        policy.gather(whole, keep=True)
    return metrics, {name: parameter.detach() for name, parameter in whole.model.named_parameters()}


def assert_same(together: Together, *case, rtol=1e-10, atol=1e-10):
    metrics, weights = updated(ALONE, *case)
    found = together.call(updated, *case)
    for _, theirs in found:
        assert theirs.keys() == weights.keys()
        for name in weights:
            assert theirs[name].dtype == weights[name].dtype
            torch.testing.assert_close(theirs[name], weights[name], rtol=rtol, atol=atol)
    # Where tokens are counted, ranks divide micro-batches evenly, which makes more of them.
    of_the_cut = ("update/micro_batches", "update/computed", "update/shared", "update/padding")
    left_out = ("update/seconds", *(of_the_cut if case[2].get("micro_batch_tokens") else ()))
    for ours, theirs in zip(metrics, found[0][0], strict=True):
        assert theirs.keys() == ours.keys()
        for name, value in ours.items():
            if name not in left_out:
                assert theirs[name] == pytest.approx(value, rel=10 * rtol, abs=10 * atol, nan_ok=True), name


@pytest.mark.parametrize(
    ("kind", "gradient_checkpointing"),
    [
        ("tied", False),
        ("soft-capped", True),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (("untied", False), ("untied", True), ("tied", True))
        ),
    ],
)
def test_updates_are_those_of_the_whole_policy(together: Together, kind: str, gradient_checkpointing: bool):
    how = {"micro_batch_size": 2, "gradient_checkpointing": gradient_checkpointing}
    assert_same(together, kind, [a_batch(0), a_batch(1)], how)


@given(
    seed=st.integers(0, 1000),
    size=st.integers(1, 9),
    tokens=st.sampled_from([None, 1, 20, 1000]),
    clip=st.sampled_from([math.inf, 0.01]),
    skip=st.booleans(),
)
@settings(max_examples=3)
def test_no_cut_changes_an_update(together: Together, seed, size, tokens, clip, skip):
    how = {"micro_batch_size": size, "micro_batch_tokens": tokens, "max_grad_norm": clip, "skip_zero_advantage": skip}
    assert_same(together, "tied", [a_batch(seed)], how)


def test_fewer_rows_than_ranks_and_none_with_an_advantage(together: Together):
    one = {name: tensor[:1] for name, tensor in a_batch().items()}
    none = a_batch() | {"advantages": torch.zeros(8, 1), "zero_advantage": torch.ones(8, 1, dtype=torch.bool)}
    assert_same(together, "tied", [one, none], {"micro_batch_size": 1})


@pytest.mark.parametrize("optimizer", ["adamw_kahan", "offloaded"])
def test_every_optimizer_steps_on_shards(together: Together, optimizer: str):
    """Kahan's moments are float32 in float64 too, so that rounding shows."""
    assert_same(
        together, "tied", [a_batch(0), a_batch(1)], {"micro_batch_size": 2}, "auto", optimizer, rtol=1e-6, atol=1e-6
    )


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_in_bfloat16_each_product_is_that_of_the_whole_policy(together: Together, kind: str):
    """Both round the same weights to the same numbers: sums differ by float32's rounding, and weights by their own precision's."""
    bound = 1e-5 if kind == "float32" else 2**-7
    assert_same(together, kind, [a_batch()], {"micro_batch_size": 1}, "bfloat16", "sgd", rtol=bound, atol=bound / 10)


def updated_by_kernels(ranks: Ranks, *case):
    """In Triton's interpreter. Each rank has to launch them."""
    from rlvr_cli.models.compute import fused_logits

    launched = []
    with pytest.MonkeyPatch.context() as patch:
        mend_interpreter(patch)
        own = fused_logits.logits_gradient
        patch.setattr(fused_logits, "logits_gradient", lambda *a, **k: launched.append(1) or own(*a, **k))
        found = updated(ranks, *case)
    assert launched
    return found


@pytest.mark.slow
def test_fused_kernels_compute_what_they_do_for_the_whole_policy(together: Together, ranks: int):
    """In bfloat16 the gradients of the whole one's weights are not rounded. What an update adds to each weight is compared.

    Two ranks compute in bfloat16, three in float32: the interpreter takes seconds for a layer.
    """
    pytest.importorskip("liger_kernel", reason="needs liger-kernel")
    compute_dtype = {2: "bfloat16", 3: "float32"}[ranks]
    batch = {name: tensor[:6] for name, tensor in a_batch().items()}
    case = [batch], {"micro_batch_size": 2}, compute_dtype, "sgd"
    before = {name: weight.detach() for name, weight in MODELS["fused"]().named_parameters()}

    def steps(weights):
        return {name: weight - before[name] for name, weight in weights.items()}

    plain = steps(updated(ALONE, "float32", *case)[1])
    whole = steps(updated_by_kernels(ALONE, "fused", *case)[1])
    least = 1e-3 * torch.stack([step.norm() for step in plain.values()]).norm()  # a bias of keys changes nothing
    for found in (whole, *(steps(weights) for _, weights in together.call(updated_by_kernels, "fused", *case))):
        for name, step in plain.items():
            bound = 1e-3 if compute_dtype == "float32" else 0.05
            assert (found[name] - step).norm() <= bound * step.norm() + least, name
            assert found[name].norm() > least or "k_proj.bias" in name


def scored(ranks: Ranks, kind: str, how):
    policy, _ = policy_of(ranks, kind)
    found = [compute_log_probs(policy, a_batch(), ranks=ranks, **how)]
    stepper = torch.optim.SGD(policy.trainable_parameters().values(), lr=0.1)
    train_update(policy, stepper, a_batch(1), objective=GRPO_CLIP, learning_rate=0.1, micro_batch_size=3, ranks=ranks)
    return [*found, compute_log_probs(policy, a_batch(), ranks=ranks, **how)]


@pytest.mark.parametrize("kind", ["tied", pytest.param("soft-capped", marks=pytest.mark.slow)])
def test_log_probs_before_and_after_an_update(together: Together, kind: str):
    for how in ({"micro_batch_size": 2}, {"micro_batch_size": 1, "micro_batch_tokens": 15}):
        alone = scored(ALONE, kind, how)
        for found in together.call(scored, kind, how):
            torch.testing.assert_close(found, alone, rtol=1e-10, atol=1e-10)


def scattered(ranks: Ranks):
    """What comes back of weights that only rank 0 has, and what others hold of them."""
    policy, whole = policy_of(ranks, "untied")
    if ranks.rank == 0:
        for number, parameter in enumerate(whole.model.parameters()):
            parameter.data = torch.arange(parameter.numel(), dtype=parameter.dtype).view(parameter.shape) + number
    policy.scatter(whole)
    held = sum(parameter.numel() for parameter in policy.trainable_parameters().values())
    empty(whole)
    policy.gather(whole, keep=ranks.rank != 1)
    return held, [parameter.detach() for parameter in whole.model.parameters()]


def test_weights_of_rank_0_are_divided_and_put_together(together: Together):
    found = together.call(scattered)
    assert sum(held for held, _ in found) == Policy(MODELS["untied"]()).num_parameters
    for rank, (_, weights) in enumerate(found):
        for number, tensor in enumerate(weights):
            wanted = torch.arange(tensor.numel(), dtype=tensor.dtype).view(tensor.shape) + number
            assert tensor.isnan().all() if rank == 1 else torch.equal(tensor, wanted)


def interrupted(ranks: Ranks):
    policy, whole = policy_of(ranks, "tied")
    stepper = make_optimizer(policy, learning_rate=1e-2)
    calls = iter(range(10))

    def check():
        if ranks.rank == 0 and next(calls) == 2:
            raise InterruptedError

    before = {name: shard.detach().clone() for name, shard in policy.trainable_parameters().items()}
    with pytest.raises(Elsewhere if ranks.rank else InterruptedError):
        train_update(policy, stepper, a_batch(), learning_rate=1e-2, micro_batch_size=1, check=check, ranks=ranks)
    unchanged = all(torch.equal(before[name], shard) for name, shard in policy.trainable_parameters().items())
    train_update(policy, stepper, a_batch(), learning_rate=1e-2, micro_batch_size=1, ranks=ranks)
    policy.gather(whole, keep=True)
    return unchanged, [parameter.detach() for parameter in whole.model.parameters()]


def uninterrupted(ranks: Ranks):
    policy, whole = policy_of(ranks, "tied")
    train_update(
        policy,
        make_optimizer(policy, learning_rate=1e-2),
        a_batch(),
        learning_rate=1e-2,
        micro_batch_size=1,
        ranks=ranks,
    )
    policy.gather(whole, keep=True)
    return [parameter.detach() for parameter in whole.model.parameters()]


def test_an_update_that_is_interrupted_on_one_rank_changes_nothing_on_any(together: Together):
    wanted = together.call(uninterrupted)[0]
    for unchanged, weights in together.call(interrupted):
        assert unchanged
        assert all(torch.equal(tensor, other) for tensor, other in zip(weights, wanted, strict=True))


def test_a_model_without_layers_is_refused():
    model = make_policy()
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(RlvrError, match="cannot be told apart"):
        check_shardable(Policy(model))
