"""Our losses and those of TRL on the same batches: value and gradient of each token's log-probability, in float64.

    pip install trl==1.16.0        # in an environment of its own; it is no dependency
    python benchmarks/trl_losses.py

TRL's `GRPOTrainer._compute_loss` is called as it is, on an object that has the options it reads and hands it our
log-probabilities. Prints the largest difference of each objective over random batches; the exit status is 1 if one exceeds 1e-5.
"""

import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlvr_cli.training.losses.inputs import LossInputs
from rlvr_cli.training.losses.normalization import loss_denominators
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.objectives import policy_gradient, reduced_loss

TOLERANCE = 1e-5
KL = {"kl_coef": 0.1}
# Ours: loss, its options, normalization, and more of the objective. TRL's: loss type, level of the ratio, ranges, and more.
CASES: dict[str, tuple[tuple[str, dict[str, Any], str, dict[str, Any]], dict[str, Any]]] = {
    "GRPO": (("grpo_clip", {"cliprange": 0.2}, "masked_mean", {}), {"loss_type": "grpo"}),
    "DAPO": (
        ("grpo_clip", {"cliprange": 0.2, "cliprange_high": 0.28}, "token_mean", {}),
        {"loss_type": "dapo", "epsilon_high": 0.28},
    ),
    "Dr. GRPO": (("grpo_clip", {"cliprange": 0.2}, "masked_normalize", {}), {"loss_type": "dr_grpo"}),
    "GSPO": (
        ("gspo", {}, "masked_mean", {}),
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4},
    ),
    "GSPO, a wide range": (
        ("gspo", {"cliprange": 0.1}, "masked_mean", {}),
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.1},
    ),
    "CISPO": (("cispo", {"cispo_cap": 5.0}, "token_mean", {}), {"loss_type": "cispo", "epsilon_high": 5.0}),
    "CISPO, a low cap": (("cispo", {"cispo_cap": 1.2}, "token_mean", {}), {"loss_type": "cispo", "epsilon_high": 1.2}),
    "k3": (("grpo_clip", {"cliprange": 0.2}, "token_mean", KL), {"loss_type": "dapo", "beta": 0.1}),
    "ratio x k3": (
        ("grpo_clip", {"cliprange": 0.2}, "token_mean", KL | {"kl_type": "unbiased"}),
        {"loss_type": "dapo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
}
WIDTH = 12


def random_batch(seed: int) -> dict[str, Tensor]:
    """Eight responses of different lengths; their old log-probabilities are near the new ones."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, WIDTH + 1, (8, 1), generator=generator)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)

    new = -noise(1.0).abs()
    return {
        "mask": torch.arange(WIDTH) < lengths,
        "new": new,
        "old": new + noise(0.2),
        "reference": new + noise(0.5),
        "advantages": torch.randn(8, generator=generator, dtype=torch.float64),
    }


def ours(
    batch: dict[str, Tensor], loss: str, options: dict[str, Any], normalization: Any, more: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """The value of our objective, and its gradient."""
    log_probs = batch["new"].clone().requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs,
        entropy=log_probs,
        response_mask=batch["mask"],
        old_log_probs=batch["old"],
        advantages=batch["advantages"][:, None],
        sampled_log_probs=batch["old"],
        reference_log_probs=batch["reference"],
    )
    outputs = policy_gradient(inputs, loss=partial(LOSSES[loss].function, **options), **more)
    constant = float(WIDTH) if normalization == "masked_normalize" else None
    denominators = loss_denominators(batch["mask"], normalization=normalization, normalize_constant=constant)
    value = reduced_loss(outputs.loss, batch["mask"], denominators=denominators, num_rows=8)
    return value.detach(), torch.autograd.grad(value, log_probs)[0]


def theirs(batch: dict[str, Tensor], *, loss_type: str, level: str = "token", **given: Any) -> tuple[Tensor, Tensor]:
    """The value of TRL's loss, and its gradient."""
    from trl import GRPOTrainer

    log_probs = batch["new"].clone().requires_grad_()
    mask = batch["mask"].long()
    alone = SimpleNamespace(
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
        num_processes=1,
        sync_gradients=True,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (log_probs, torch.zeros_like(log_probs), None),
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _entropy_bonus_enabled=False,
        accelerator=alone,
        args=SimpleNamespace(
            delta=None, use_bias_correction_kl=given.get("use_bias_correction_kl", False), steps_per_generation=1
        ),
        aux_loss_enabled=False,
        beta=given.get("beta", 0.0),
        current_gradient_accumulation_steps=1,
        epsilon_high=given.get("epsilon_high", 0.2),
        epsilon_low=given.get("epsilon_low", 0.2),
        importance_sampling_level=level,
        loss_type=loss_type,
        max_completion_length=WIDTH,
        model=SimpleNamespace(training=True),
        off_policy_mask_threshold=None,
        top_entropy_quantile=1.0,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
    )
    ids = torch.zeros_like(mask)
    inputs = {
        **dict.fromkeys(("prompt_ids", "prompt_mask"), ids[:, :1]),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old"],
        "ref_per_token_logps": batch["reference"],
        "num_items_in_batch": mask.sum(),
    }
    value = GRPOTrainer._compute_loss(trainer, None, inputs)
    return value.detach(), torch.autograd.grad(value, log_probs)[0]


def main() -> int:
    worst = {}
    for name, (our_options, their_options) in CASES.items():
        gaps = []
        for seed in range(50):
            batch = random_batch(seed)
            pairs = zip(ours(batch, *our_options), theirs(batch, **their_options), strict=True)
            gaps.append([float((one - other).abs().max()) for one, other in pairs])
        worst[name] = [max(column) for column in zip(*gaps, strict=True)]
    print("| objective | value | gradient |\n|---|---|---|")
    for name, (value, gradient) in worst.items():
        print(f"| {name} | {value:.1e} | {gradient:.1e} |")
    return int(max(max(pair) for pair in worst.values()) > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
