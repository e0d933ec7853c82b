"""Ten steps of off-policy GRPO in float64, as they were recorded: what makes the tool faster must not change them.

The built-in model samples, is graded and learns; every sampled token must be the recorded one, and every metric and the norm
of every final weight must agree to 1e-9, which leaves room for sums in another order and for nothing else.

After a change that is meant to change results: `python -m tests.test_golden` writes the recording anew.
"""

import functools
import hashlib
import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

from rlvr_cli.data.prompts import load_prompt
from rlvr_cli.data.synthetic import arithmetic
from rlvr_cli.graders.r1_zero import r1_zero_reward_fn
from rlvr_cli.models.load import load_policy
from rlvr_cli.models.policy import Policy
from rlvr_cli.models.tokens.tokenization import collate, pad_id_of
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.training.credit.advantages import group_advantages
from rlvr_cli.training.losses.objectives import policy_gradient
from rlvr_cli.training.losses.policy_gradient import LOSSES
from rlvr_cli.training.optimizers.optimizer import make_optimizer
from rlvr_cli.training.updates.scores import compute_log_probs
from rlvr_cli.training.updates.tensors import select_rows
from rlvr_cli.training.updates.update import train_update
from rlvr_cli.types import Request, SamplingParams

RECORDING = Path(__file__).parents[1] / "fixtures" / "golden.json"
MODEL = Path(__file__).parents[2] / "rlvr_cli" / "assets" / "tiny-math"
METRICS = (
    "loss/objective",
    "loss/nll",
    "policy/entropy",
    "policy/ratio_max",
    "policy/clip_fraction",
    "optimizer/grad_norm",
)


class WideRMSNorm(Qwen2RMSNorm):
    """In the precision of its input. That of transformers rounds float64 to float32, and 1e-16 may become 1e-7."""

    def forward(self, hidden_states):
        return F.rms_norm(hidden_states, self.weight.shape, self.weight, self.variance_epsilon)


def in_float64(model):
    for module in model.modules():
        if isinstance(module, Qwen2RMSNorm):
            module.__class__ = WideRMSNorm
    return model.double()


def objective(inputs):
    loss = functools.partial(LOSSES["grpo_clip"].function, cliprange=0.02, cliprange_high=None)
    return policy_gradient(inputs, loss=loss, kl_coef=0.05)


def trajectory(*, num_steps=10, until=10, questions=4, group_size=8):
    """Two updates per step, on halves of the batch; what was sampled and measured at each, and the weights at the end.

    Args:
        until: the steps of it that are made.
    """
    policy = load_policy(MODEL)
    model, tokenizer = in_float64(policy.model), policy.tokenizer
    reference = in_float64(load_policy(MODEL).model)
    sampler = TransformersSampler(Policy(model, tokenizer))
    optimizer = make_optimizer(model, learning_rate=3e-4)
    prompt, examples = load_prompt("r1_zero"), arithmetic(num_steps * questions, seed=7)
    params = SamplingParams(max_tokens=48, min_tokens=4, stop=("</answer>",))
    steps = []
    for step in range(until):
        asked = examples[step * questions : (step + 1) * questions]
        requests = [
            Request(prompt.fill(e.question), tuple(1_000 * (step * questions + i) + j for j in range(group_size)))
            for i, e in enumerate(asked)
        ]
        done = sorted(sampler.sample(requests, params), key=lambda c: (c.request_index, c.sample_index))
        rewards = [r1_zero_reward_fn(c.text, asked[c.request_index].ground_truth)["reward"] for c in done]
        batch = collate([c.prompt_ids for c in done], [c.token_ids for c in done], pad_id=pad_id_of(tokenizer))
        advantages = group_advantages(
            torch.tensor(rewards, dtype=torch.float64), group_size=group_size, advantage_eps=1e-6, normalize_by_std=True
        )
        how = {"micro_batch_size": 6, "temperature": 1.0}
        batch |= {"advantages": advantages[:, None], "reference_log_probs": compute_log_probs(reference, batch, **how)}
        batch |= {
            "old_log_probs": compute_log_probs(model, batch, **how),
            "sampled_log_probs": compute_log_probs(model, batch, **how),
        }
        half = len(done) // 2
        updates = [
            train_update(
                model,
                optimizer,
                select_rows(batch, rows),
                learning_rate=3e-4,
                objective=objective,
                normalization="masked_mean",
                **how,
            )
            for rows in (range(half), range(half, len(done)))
        ]
        sampler.load_weights(Policy(model), step + 1)
        ids = json.dumps([c.token_ids for c in done])
        steps.append(
            {
                "tokens": hashlib.sha256(ids.encode()).hexdigest(),
                "reward": sum(rewards),
                "updates": [{name: u[name] for name in METRICS if name in u} for u in updates],
            }
        )
    norms = {name: float(p.detach().norm()) for name, p in model.named_parameters()}
    return {"steps": steps, "weights": norms}


def assert_recorded(steps, recorded):
    for step, (ours, then) in enumerate(zip(steps, recorded, strict=True)):
        assert (ours["tokens"], ours["reward"]) == (then["tokens"], then["reward"]), step
        for update, expected in zip(ours["updates"], then["updates"], strict=True):
            assert update == pytest.approx(expected, rel=1e-9, abs=1e-12), step


def test_the_first_steps_of_a_trajectory_are_the_recorded_ones():
    recorded = json.loads(RECORDING.read_text(encoding="utf-8"))["steps"][:3]
    assert 0 < sum(s["reward"] for s in recorded) < 96  # something was learned from
    assert_recorded(trajectory(until=3)["steps"], recorded)


@pytest.mark.slow
def test_a_trajectory_is_the_recorded_one():
    recorded, now = json.loads(RECORDING.read_text(encoding="utf-8")), trajectory()
    assert len({s["tokens"] for s in recorded["steps"]}) == 10
    assert 0 < sum(s["reward"] for s in recorded["steps"]) < 320  # something was learned from
    assert_recorded(now["steps"], recorded["steps"])
    assert now["weights"] == pytest.approx(recorded["weights"], rel=1e-9)


if __name__ == "__main__":
    torch.set_num_threads(1)
    RECORDING.write_text(json.dumps(trajectory(), indent=1) + "\n", encoding="utf-8")
