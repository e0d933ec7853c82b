"""Our losses and those of TRL on the same batches: value and gradient of each token's log-probability, in float64.

    pip install trl==1.16.0        # in an environment of its own; it is no dependency
    python benchmarks/trl_losses.py

TRL's `GRPOTrainer._compute_loss`, `DPOTrainer._compute_loss` and, for SimPO, `CPOTrainer.cpo_loss` of its experimental part are
called as they are, on objects that have the options they read and hand them our log-probabilities. Prints the largest
difference of each objective over random batches; the exit status is 1 if one exceeds 1e-5.
"""

import sys
from collections import defaultdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rlvr_cli.config.dpo import PreferenceLossType
from rlvr_cli.training.losses.inputs import LossInputs
from rlvr_cli.training.losses.normalization import loss_denominators
from rlvr_cli.training.losses.objectives import policy_gradient, reduced_loss
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.losses.preference import PREFERENCE_LOSSES, preference

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
# Ours: loss, beta, gamma. TRL's: the trainer, and its loss type.
PREFERENCE_CASES: dict[str, tuple[tuple[PreferenceLossType, float, float], str, str]] = {
    "DPO": (("dpo", 0.1, 0.0), "DPO", "sigmoid"),
    "DPO, per token": (("dpo_norm", 5.0, 0.0), "DPO", "sigmoid_norm"),
    "SimPO": (("simpo", 2.0, 1.0), "CPO", "simpo"),
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


def our_preference(
    batch: dict[str, Tensor], loss: PreferenceLossType, beta: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The value of our loss of pairs, rows 0 and 1, 2 and 3, ..., and its gradient."""
    log_probs = batch["new"].clone().requires_grad_()
    inputs = LossInputs(
        log_probs=log_probs,
        entropy=log_probs,
        response_mask=batch["mask"],
        old_log_probs=batch["old"],
        reference_log_probs=batch["reference"],
    )
    outputs = preference(inputs, loss=PREFERENCE_LOSSES[loss], beta=beta, gamma=gamma)
    value = outputs.loss.mean()
    return value.detach(), torch.autograd.grad(value, log_probs)[0]


def their_preference(
    batch: dict[str, Tensor], trainer: str, loss_type: str, beta: float, gamma: float
) -> tuple[Tensor, Tensor]:
    """The value of TRL's loss of the same pairs, and its gradient."""
    log_probs = batch["new"].clone().requires_grad_()
    mask = batch["mask"]
    turned = torch.cat([torch.arange(0, 8, 2), torch.arange(1, 8, 2)])  # chosen ones first
    own = (log_probs * mask)[turned]
    alone = SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x)
    if trainer == "CPO":
        from trl.experimental.cpo import CPOTrainer

        options = SimpleNamespace(
            accelerator=alone, alpha=0.0, beta=beta, label_smoothing=0.0, loss_type=loss_type, simpo_gamma=gamma
        )
        chosen, rejected = (own.sum(dim=1) / mask[turned].sum(dim=1)).chunk(2)
        value = CPOTrainer.cpo_loss(options, chosen, rejected)[0].mean()
        return value.detach(), torch.autograd.grad(value, log_probs)[0]
    from trl import DPOTrainer

    reference = (batch["reference"] * mask)[turned].sum(dim=1)
    zeros = torch.zeros_like(own)
    outputs = SimpleNamespace(
        log_probs=own, entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), log_sum_sq_probs=zeros
    )
    options = SimpleNamespace(
        _metrics={"train": defaultdict(list), "eval": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        accelerator=alone,
        aux_loss_enabled=False,
        beta=beta,
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        loss_types=[loss_type],
        loss_weights=[1.0],
        model=SimpleNamespace(training=True),
        precompute_ref_logps=True,
        use_weighting=False,
    )
    ids = torch.zeros(8, WIDTH + 1, dtype=torch.long)
    inputs = {
        "input_ids": ids,
        "attention_mask": ids,
        "completion_mask": torch.cat([ids[:, :1], mask[turned].long()], dim=1),
        "ref_chosen_logps": reference[:4],
        "ref_rejected_logps": reference[4:],
    }
    value = DPOTrainer._compute_loss(options, lambda **_: outputs, inputs, False)
    return value.detach(), torch.autograd.grad(value, log_probs)[0]


def main() -> int:
    worst = {}
    for name, (options, trainer, loss_type) in PREFERENCE_CASES.items():
        gaps = []
        for seed in range(50):
            batch = random_batch(seed)
            pairs = zip(
                our_preference(batch, *options), their_preference(batch, trainer, loss_type, *options[1:]), strict=True
            )
            gaps.append([float((one - other).abs().max()) for one, other in pairs])
        worst[name] = [max(column) for column in zip(*gaps, strict=True)]
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
