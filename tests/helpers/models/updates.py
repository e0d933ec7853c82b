"""Batches, gradients of an update, and the plain loops that they are compared with."""

import copy
import functools
import math

import torch
import torch.nn.functional as F

from factories import a_rollout
from policies import make_batch
from rlvr_cli.config.grpo import GrpoConfig
from rlvr_cli.models.policy import Policy
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.updates.update import train_update

LOSS_TYPES = list(LOSSES)
NORMALIZATIONS = [("token_mean", None), ("masked_mean", None), ("masked_normalize", 1.0), ("masked_normalize", 13.0)]
LENGTHS = [(2, 3), (1, 7), (4, 2), (3, 5)]
ROUNDING = 1e-5  # of a gradient times a factor: the model's normalization layers compute in float32


def rows_of(batch, rows, extra_width=0):
    """The batch with its rows reordered or chosen, and wider padding."""
    padded = {name: F.pad(tensor[rows], (0, extra_width), value=7) for name, tensor in batch.items()}
    padded["response_mask"][:, batch["response_mask"].shape[1] :] = False
    return padded


def plain_loss(model, batch, normalization, constant, temperature=1.0):
    """A loop over the rows of the whole batch: each row's loss is what the normalization's name says."""
    logits = model(batch["input_ids"]).logits / temperature
    losses = []  # one tensor of token losses per row
    for row, mask in enumerate(batch["response_mask"]):
        losses.append(F.cross_entropy(logits[row][mask], batch["labels"][row][mask], reduction="none"))
    if normalization == "token_mean":
        return torch.cat(losses).mean()
    if normalization == "masked_mean":
        return torch.stack([loss.mean() for loss in losses if len(loss)]).mean()
    return torch.stack([loss.sum() / constant for loss in losses]).mean()


def update_gradient(model, batch, *, compute_dtype="auto", **options):
    """The gradient that `train_update` hands to the optimizer, and its metrics; the model is left as it was."""
    model = copy.deepcopy(model)
    policy = Policy(model, compute_dtype=compute_dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.extend(p.grad.clone() for p in model.parameters()))
    metrics = train_update(policy, optimizer, batch, **{"learning_rate": 0.0, "max_grad_norm": math.inf, **options})
    return seen, metrics


def one_shot_gradient(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_same(left, right, tolerance=1e-10):
    for one, other in zip(left, right, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def norm_of(gradients):
    return math.sqrt(sum(float((g * g).sum()) for g in gradients))


def distance(gradients, others):
    """The norm of the difference, relative to the norm of the others."""
    return norm_of([one - other for one, other in zip(gradients, others, strict=True)]) / norm_of(others)


def bytes_of(model, optimizer):
    state = [*model.state_dict().values()]
    state += [value for entry in optimizer.state.values() for value in entry.values()]
    return [tensor.detach().numpy().tobytes() for tensor in state]


def make_rollouts(model, lengths, *, seed=0, temperature=1.0, spread=0.3):
    """A batch with all that `policy_gradient` may read, its log-probabilities near the model's own."""
    batch = make_batch(lengths, seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        every = (model(batch["input_ids"]).logits / temperature).log_softmax(-1)
    own = every.gather(-1, batch["labels"][..., None]).squeeze(-1)
    for name in ("old_log_probs", "sampled_log_probs", "reference_log_probs"):
        batch[name] = own + spread * torch.randn(own.shape, dtype=own.dtype, generator=generator)
    batch["advantages"] = torch.randn(len(own), 1, dtype=own.dtype, generator=generator)
    return batch


def make_rollout(prompt_ids, response_ids, logprobs, advantage):
    return a_rollout(prompt_ids=prompt_ids, response_ids=response_ids, sampled_logprobs=logprobs, advantage=advantage)


def objective_of(loss_type, *, kl_coef=0.0, kl_type="k3", importance_cap=None, importance_masked=False, **given):
    """The objective of `rlvr grpo`; options that are not given have their defaults. No weights per token for a loss per row."""
    loss, given = LOSSES[loss_type], vars(GrpoConfig()) | given
    bound = functools.partial(loss.function, **{name: given[name] for name in loss.options})
    return functools.partial(
        policy_gradient,
        loss=bound,
        kl_coef=kl_coef,
        kl_type=kl_type,
        importance_cap=None if loss.per_row else importance_cap,
        importance_masked=importance_masked,
    )


def update_options(loss_type, **keywords):
    return {"objective": objective_of(loss_type, **keywords), "micro_batch_size": 2}
