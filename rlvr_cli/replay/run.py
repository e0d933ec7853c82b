"""Replay a run: the same updates from the same first weights, by a plain loop, and what differs from what the run logged.

Row by row and without padding, the whole model computes all logits of one response; losses and sums are float64; torch's AdamW,
or the 8-bit one of bitsandbytes, moves the weights. Nothing here is shared with the room `training`, which stands below and so cannot be imported.

Enters: a run directory. Leaves: a `Replay`.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.bitsandbytes import import_bitsandbytes
from rlvr_cli.models.directory import holds_model
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.load import load_frozen, load_policy
from rlvr_cli.models.policy import Lora, Policy, distinct_tensors
from rlvr_cli.replay import formulas
from rlvr_cli.replay.sampling import broken_rule, log_prob_gaps, sampled_log_probs
from rlvr_cli.replay.stored import Batch, Response, StoredRun, batches, rows_of, sampling_params, with_rates

TOLERANCE = (
    1e-6  # of objective and gradient norm: absolute below 1, relative above; of the weights: relative to their norm
)
GAP = 1e-4  # nats, of a sampled token's log-probability
ROUNDED_GAP = 5e-2  # the same in half precision, in which products of other shapes differ by as much as 0.01
ROUNDING = 10  # what rounding alone moves a replay by, times this, is no difference
NUDGES = 5  # replays with other rounding, of which the farthest counts


@dataclass(frozen=True)
class Update:
    """One update, as logged and as replayed. Objective and norm are None if it had no token to train on."""

    number: int
    logged_objective: float | None
    objective: float | None
    logged_norm: float | None
    norm: float | None
    difference: (
        float  # the largest, of both, of the learning rate and of counts; infinite where only one side has a number
    )
    allowed: float = TOLERANCE


@dataclass(frozen=True)
class Replay:
    """What a replay found."""

    updates: list[Update]
    logged: int  # updates that the run made
    weights: dict[str, float] = field(default_factory=dict)  # what was compared -> norm of the difference / norm
    allowed_weights: float = TOLERANCE
    gaps: list[float] = field(
        default_factory=list
    )  # by policy version, the largest of its sampled log-probabilities, nats
    allowed_gap: float = GAP
    rounded_gaps: dict[int, float] = field(
        default_factory=dict
    )  # policy version -> nats that rounding may move them by
    rows: int = 0  # rollouts whose log-probabilities were compared
    broken: list[str] = field(default_factory=list)  # sentences about rollouts that do not obey the options

    @property
    def difference(self) -> float:
        """The largest difference of an objective, gradient norm or learning rate."""
        return max((u.difference for u in self.updates), default=0.0)

    @property
    def problems(self) -> list[str]:
        """What the stored rollouts and options do not give, one sentence each; empty if they give everything."""
        found = [
            f"update {u.number} differs by {u.difference:.2g}: objective {_text(u.logged_objective)} logged, "
            f"{_text(u.objective)} replayed; gradient norm {_text(u.logged_norm)} logged, {_text(u.norm)} replayed"
            for u in self.updates
            if not u.difference <= u.allowed
        ]
        found += [
            f"the weights of {name} differ by {difference:.2g} of their norm"
            for name, difference in self.weights.items()
            if not difference <= self.allowed_weights
        ]
        # The policy of version v is as exact as update v, which it makes; the last one as the update before it.
        exact = [u.allowed / TOLERANCE for u in self.updates] or [1.0]
        found += [
            f"a log-probability of a token that policy {version} sampled differs by {gap:.2g} nats from its weights and options"
            for version, gap in enumerate(self.gaps)
            if not gap
            <= max(self.allowed_gap * exact[min(version, len(exact) - 1)], self.rounded_gaps.get(version, 0.0))
        ]
        return found + self.broken

    @property
    def verdict(self) -> str:
        """One sentence, if there are no problems."""
        made = f" of its first {len(self.updates)} updates" if len(self.updates) < self.logged else ""
        what = [
            "the logged objective" if self.updates else "",
            "gradient norm" if self.updates else "",
            "weights" if self.weights else "",
        ]
        if not any(what):
            return f"the stored rollouts have the log-probabilities of their weights and options, to {max(self.gaps, default=0.0):.0e} nats"
        said = ", ".join(filter(None, what))
        exact = next((u.number for u in self.updates if u.allowed > TOLERANCE), None)
        if exact is None and self.allowed_weights == TOLERANCE:
            return f"the stored rollouts and options give {' and '.join(said.rsplit(', ', 1))}{made} to 1e-6"
        since = f"update {exact}" if exact is not None else "the last update"
        return (
            f"the stored rollouts and options give {' and '.join(said.rsplit(', ', 1))}{made} to 1e-6 before {since}, and from there on to "
            f"rounding, which moves a replay by up to {max([u.allowed for u in self.updates] + [self.allowed_weights]) / ROUNDING:.1g}"
        )


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.8g}"


def replay_run(run: StoredRun, *, most: int | None, advance: Callable[[int], None] = lambda _: None) -> Replay:
    """Replay the first `most` updates of a run (None: all that it logged), and check the rollouts that their policies sampled.

    AdamW turns the rounding errors of a vanishing gradient into steps of the size of the learning rate, and bfloat16 rounds
    coarsely. So a replay that differs is made once more, with weights that are nudged in their last bit for each response: the
    distance of these two replays is what rounding does, and only differences of more than ten times that count. By chance a
    nudged replay may stay nearer than another, so before a difference counts, several are made.

    Args:
        advance: called with 1 after each update.

    Raises:
        RlvrError: the run cannot be replayed, or a file is damaged.
    """
    wanted = len(run.logged) if most is None else min(most, len(run.logged))
    kept: dict[str, dict[str, Tensor]] = {}  # the replayed weights that were compared
    replay = _replay(run, wanted=wanted, advance=advance, kept=kept)
    if not replay.problems:
        return replay
    for seed in range(NUDGES):
        replay = allowing(replay, _replay(run, wanted=wanted, nudged_from=kept, seed=seed))
        if not replay.problems:
            break
    return replay


def allowing(replay: Replay, twin: Replay) -> Replay:
    """The replay, allowed to differ from the run by what lies between it and a nudged one, or by what it was allowed before."""
    updates, moved = [], 0.0
    for update, other in zip(replay.updates, twin.updates, strict=True):
        pairs = ((update.objective, other.objective), (update.norm, other.norm))
        moved = max(moved, *(_difference(*pair) for pair in pairs))
        updates.append(replace(update, allowed=max(update.allowed, ROUNDING * moved)))
    allowed_weights = max(replay.allowed_weights, ROUNDING * max(twin.weights.values(), default=0.0))
    gaps = {v: max(replay.rounded_gaps.get(v, 0.0), ROUNDING * gap) for v, gap in enumerate(twin.gaps)}
    return replace(replay, updates=updates, allowed_weights=allowed_weights, rounded_gaps=gaps)


def _replay(
    run: StoredRun,
    *,
    wanted: int,
    advance: Callable[[int], None] = lambda _: None,
    kept: dict[str, dict[str, Tensor]] | None = None,
    nudged_from: dict[str, dict[str, Tensor]] | None = None,
    seed: int = 0,
) -> Replay:
    """Replay a run once.

    Args:
        kept: the weights that are compared with those of the run, and log-probabilities of rollouts, are put here.
        nudged_from: what an earlier replay has kept: nudge the weights for each response, and compare with these, not with the run.
        seed: of the nudges.
    """
    policy = load_policy(
        model_path(run.options["model"]),
        dtype=_param_dtype(run),
        compute_dtype=run.compute_dtype,
        device=run.options["device"],
        lora=_trained_adapter(run),
    )
    if policy.extra_weights():
        raise RlvrError("A policy with a critic cannot be replayed.", "Leave --replay out.")
    updates: list[Update] = []
    weights: dict[str, float] = {}
    gaps: list[float] = []
    rows, broken = 0, _wrong_versions(run)
    nudges = None if nudged_from is None else torch.Generator().manual_seed(seed)

    def look_at_rollouts() -> None:
        nonlocal rows
        found = list(_rollouts_of_version(run, policy, len(updates)))
        own = {str(place): one.log_probs for place, one in enumerate(found)}
        name = f"rollouts of policy {len(updates)}"
        if nudged_from is not None:
            earlier = nudged_from.get(name, own)
            gaps.append(max((float((own[i] - earlier[i]).abs().max()) for i in own if len(own[i])), default=0.0))
            return
        if kept is not None:
            kept[name] = own
        gaps.append(max((one.gap for one in found), default=0.0))
        broken.extend(one.rule for one in found if one.rule)
        rows += sum(one.begins for one in found)

    def look_at_weights() -> None:
        if nudged_from is not None:
            earlier = nudged_from.get(str(len(updates)))
            if earlier:
                weights[str(len(updates))] = weight_difference(earlier, policy.weights())
            return
        names = {f"checkpoint {len(updates)}": run.path / "checkpoints" / f"step-{len(updates):06d}" / "model"}
        if len(updates) == len(run.logged):
            names["the final model"] = run.path / "model"
        for name, folder in names.items():
            if holds_model(folder):
                stored = load_policy(folder, dtype=_param_dtype(run), device="cpu")
                weights[name] = weight_difference(distinct_tensors(stored.weights()), policy.weights())
                if kept is not None:
                    ours = distinct_tensors(policy.weights())
                    kept[str(len(updates))] = {n: w.detach().cpu().clone() for n, w in ours.items()}

    for update in _replayed(run, policy, wanted=wanted, before_update=look_at_rollouts, nudges=nudges):
        updates.append(update)
        look_at_weights()
        advance(1)
    look_at_rollouts()
    allowed = ROUNDED_GAP if policy.compute_dtype.itemsize < 4 else GAP
    return Replay(updates, len(run.logged), weights, gaps=gaps, allowed_gap=allowed, rows=rows, broken=broken)


@contextmanager
def _nudged(policy: Policy, nudges: torch.Generator) -> Iterator[None]:
    """A block in which each weight is larger or smaller by the last bit of the precision that the policy computes in.

    What a response adds to the gradient then moves as by rounding: by the size of the terms that it sums, not of their sum,
    which can be far smaller, within a response and over the responses of a batch.
    """
    weights = distinct_tensors(policy.weights()).values()
    kept = [weight.detach().clone() for weight in weights]
    last_bit = torch.finfo(policy.compute_dtype).eps
    with torch.no_grad():
        for weight in weights:
            signs = torch.randint(0, 2, weight.shape, generator=nudges, dtype=torch.int8) * 2 - 1
            weight.mul_(1 + last_bit * signs.to(weight))
    yield
    with torch.no_grad():
        for weight, before in zip(weights, kept, strict=True):
            weight.copy_(before)


def _trained_adapter(run: StoredRun) -> Lora | None:
    own = run.options
    return Lora(own["lora_rank"], own["lora_alpha"], own["seed"]) if own.get("lora_rank") else None


def _param_dtype(run: StoredRun) -> str:
    return run.options.get("param_dtype", "float32")


def _replayed(
    run: StoredRun, policy: Policy, *, wanted: int, before_update: Callable[[], None], nudges: torch.Generator | None
) -> Iterator[Update]:
    """Make the updates, and yield each after the weights have moved; `nudges` as in `_update`."""
    if not wanted:
        return
    own = run.options
    make: Any = partial(torch.optim.AdamW, foreach=False, fused=False)
    if own.get("optimizer") == "adamw_8bit":
        make = import_bitsandbytes().optim.AdamW8bit
    optimizer = make(
        policy.trainable_parameters().values(),
        lr=own["learning_rate"],
        betas=(own["adam_beta1"], own["adam_beta2"]),
        weight_decay=own["weight_decay"],
    )
    reference = policy.reference() if own.get("kl_coef") else None
    teacher = None
    if run.command == "distill":
        teacher = load_frozen(
            model_path(own["teacher"]),
            dtype=_param_dtype(run),
            compute_dtype=run.compute_dtype,
            device=str(policy.device),
        )
    number = 0
    for batch, rates in with_rates(run, batches(run, policy.tokenizer)):
        known = _log_probs_before(run, policy, batch, reference)
        for rows, rate in zip(batch.updates, rates, strict=True):
            before_update()
            objective, norm = _update(
                run,
                policy,
                optimizer,
                [batch.responses[i] for i in rows],
                [known[i] for i in rows],
                rate,
                teacher=teacher,
                nudges=nudges,
                logged_norm=run.logged[number].get("optimizer/grad_norm"),
            )
            tokens = sum(sum(batch.responses[i].learned) for i in rows)
            yield _compared(number, run.logged[number], objective=objective, norm=norm, rate=rate, tokens=tokens)
            number += 1
            if number == wanted:
                return


Known = tuple[Tensor | None, Tensor | None]  # a response's log-probabilities: of the old policy, of the reference


def _log_probs_before(run: StoredRun, policy: Policy, batch: Batch, reference: Policy | None) -> list[Known]:
    """Each response's log-probabilities before the first update on its batch, where the loss needs them."""
    off_policy = run.command == "grpo" and len(batch.updates) > 1
    with torch.no_grad():
        return [
            (
                log_probs(policy, response, temperature=_temperature(run)) if off_policy else None,
                log_probs(reference, response, temperature=_temperature(run)) if reference is not None else None,
            )
            for response in batch.responses
        ]


def _temperature(run: StoredRun) -> float:
    """What divides the logits of the policy that is trained: in reinforcement the sampling temperature, else 1."""
    return run.options["sampling_temperature"] if run.command in ("grpo", "distill") else 1.0


def _update(
    run: StoredRun,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    responses: list[Response],
    known: list[Known],
    rate: float,
    *,
    teacher: Policy | None,
    nudges: torch.Generator | None,
    logged_norm: float | None,
) -> tuple[float | None, float | None]:
    """One update. Returns objective and gradient norm; None and None if there is no token to train on.

    Args:
        nudges: move what each response adds as its rounding may, and a ratio at the border of the clip range to its other side.
        logged_norm: of a nudged update. Earlier versions of rlvr took PyTorch's norm, which on a CPU is too small by 1e-5 for
            a million gradients; whichever of the two is nearer is the run's.
    """
    own = run.options
    counts = [sum(response.learned) for response in responses]
    if not any(counts):
        return None, None
    optimizer.zero_grad()
    objective = 0.0
    for response, divisor, before in zip(responses, _divisors(run, counts), known, strict=True):
        if not any(response.learned):
            continue
        with nullcontext() if nudges is None else _nudged(policy, nudges):
            loss = _loss(run, policy, response, before, teacher=teacher, nudged=nudges is not None) / divisor
            loss.backward()
        objective += float(loss.detach())
    gradients = [p.grad for p in policy.trainable_parameters().values() if p.grad is not None]
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
    if nudges is not None and logged_norm is not None:
        norm = min(norm, float(torch.nn.utils.get_total_norm(gradients)), key=lambda own: abs(own - logged_norm))
    if math.isfinite(objective) and math.isfinite(norm):
        for gradient in gradients:
            gradient.mul_(min(1.0, own["max_grad_norm"] / (norm + 1e-6)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
    return objective, norm


def _divisors(run: StoredRun, counts: list[int]) -> list[float]:
    """What the loss of each response is divided by. `counts` are of tokens that are learned from."""
    own = run.options
    normalization, constant = "token_mean", 1.0  # of expert iteration and distillation
    if run.command == "grpo" and own["loss_type"] == "kimi":  # a mean over responses
        normalization = "rows"
    elif run.command not in ("ei", "distill"):
        normalization = own["length_normalization"]
        constant = own["normalize_constant"] or own["sampling_max_tokens"]
    share = len(counts) / own["train_batch_size"] if own.get("partial_rollout_tokens") else 1.0
    return [d / share for d in formulas.divisors(counts, normalization=normalization, constant=constant)]


def _loss(
    run: StoredRun, policy: Policy, response: Response, known: Known, *, teacher: Policy | None, nudged: bool
) -> Tensor:
    """The loss of one response, summed over the tokens that are learned from."""
    old, reference = known
    learned = torch.tensor(response.learned, device=policy.device)
    advantage = torch.tensor(response.advantages, dtype=torch.float64, device=policy.device)
    logits = scaled_logits(policy, response, temperature=_temperature(run))
    if nudged:  # see token_log_probs
        logits = logits.float()
    new = token_log_probs(logits, response)
    losses = -new
    if teacher is not None:
        with torch.no_grad():
            of_teacher = scaled_logits(teacher, response, temperature=_temperature(run))
        tokens = torch.tensor([*response.tokens], device=logits.device)
        losses = formulas.distillation_loss(logits, of_teacher, tokens, run.options, advantage=advantage)
    if run.command == "grpo":
        losses = formulas.policy_gradient_loss(
            new,
            run.options,
            learned=learned,
            advantage=advantage,
            old=new.detach() if old is None else old,
            sampled=torch.tensor(response.sampled, dtype=torch.float64, device=policy.device),
            reference=reference,
            nudged=nudged,
        )
    return losses[learned].sum()


def _compared(
    number: int, logged: dict[str, float], *, objective: float | None, norm: float | None, rate: float, tokens: int
) -> Update:
    skipped = objective is None or norm is None or not (math.isfinite(objective) and math.isfinite(norm))
    pairs = [
        (logged.get("loss/objective"), objective),
        (logged.get("optimizer/grad_norm"), norm),
        (logged.get("optimizer/learning_rate"), None if objective is None else rate),
        (logged.get("update/skipped"), float(skipped)),
        (logged.get("update/tokens"), float(tokens)),
    ]
    difference = max(_difference(*pair) for pair in pairs)
    return Update(number, pairs[0][0], objective, pairs[1][0], norm, difference)


def _difference(logged: float | None, replayed: float | None) -> float:
    """The absolute difference of numbers below 1, and the relative one of larger ones; 0 for two that are equal, nan included."""
    if logged is None or replayed is None:
        return 0.0 if logged is replayed else math.inf
    if logged == replayed or (math.isnan(logged) and math.isnan(replayed)):
        return 0.0
    difference = abs(logged - replayed) / max(abs(logged), 1.0)
    return difference if math.isfinite(difference) else math.inf


def log_probs(policy: Policy, response: Response, *, temperature: float) -> Tensor:
    """(tokens,) float64, nats: the log-probability of each token of a response, from all logits of its row alone."""
    return token_log_probs(scaled_logits(policy, response, temperature=temperature), response)


def scaled_logits(policy: Policy, response: Response, *, temperature: float) -> Tensor:
    """(tokens, vocab) float64: the logits of each token of a response, over the temperature."""
    return row_logits(policy, [*response.prompt], [*response.tokens]) / temperature


def token_log_probs(scaled: Tensor, response: Response) -> Tensor:
    """(tokens,): the log-probability of each token of a response, of its logits.

    The normalizer is a number of their precision, as in training: in float32, one near 20 has the last bit 2e-6. So has then p, and
    1 - p of a token that is nearly certain, by the same sign wherever the same token is so.
    """
    tokens = torch.tensor([*response.tokens], dtype=torch.long, device=scaled.device)
    picked = scaled[torch.arange(len(tokens), device=scaled.device), tokens]
    return picked - torch.logsumexp(scaled, dim=-1)


def row_logits(policy: Policy, prompt: list[int], tokens: list[int]) -> Tensor:
    """(tokens, vocab) float64: the logits that each token of a response was drawn from."""
    ids = torch.tensor([prompt + tokens], device=policy.device)[:, :-1]
    head = policy.head()
    if head is None or policy.compute_dtype == torch.float32:
        with policy.autocast():
            return policy.forward(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 :].double()
    with policy.autocast():  # in half precision, logits would be rounded: near 20, bfloat16 numbers are 0.125 apart
        hidden = policy.body(input_ids=ids, use_cache=False).last_hidden_state[0, len(prompt) - 1 :]
    logits = hidden.to(policy.compute_dtype).double() @ head.weight.to(policy.compute_dtype).double().T
    return logits if head.bias is None else logits + head.bias.double()


def _wrong_versions(run: StoredRun) -> list[str]:
    """Sentences about rollouts that another policy sampled than the options say."""
    wrong = []
    trained = sorted({step for found in run.steps.values() for phase, step in found if phase == "train"})
    before = dict(zip(trained, [0, *trained], strict=False)) if run.options.get("async_steps") else {}
    for version, found in sorted(run.steps.items()):
        for phase, step in found:
            due = before.get(step, step) if phase == "train" else step
            goes_on = phase == "train" and bool(run.options.get("partial_rollout_tokens"))
            if version != due and not (goes_on and version < step):
                wrong.append(f"policy {version} sampled {phase} rollouts of step {step}, and policy {due} should have")
    return wrong


class _Looked(NamedTuple):
    """What is seen of a rollout with tokens that a version of the policy sampled."""

    gap: float  # the largest of one of them, nats
    rule: str | None  # that the rollout breaks
    begins: bool  # whether they are its first
    log_probs: Tensor  # of them at the temperature, (tokens,), nats


def _rollouts_of_version(run: StoredRun, policy: Policy, version: int) -> Iterator[_Looked]:
    """Look at each rollout with tokens that this version of the policy sampled."""
    for phase, step in run.steps.get(version, []):
        params = sampling_params(run, phase)
        for row in rows_of(run, phase, step):
            if version not in (row.policy_version, *(row.token_versions or ())):
                continue
            begins = row.policy_version == version
            rule = broken_rule(row, params, thinking_budget=int(run.options.get("thinking_budget") or 0))
            where = f"the {phase} rollout {row.example_id}/{row.sample_index} of step {step}"
            with torch.no_grad():
                logits = row_logits(policy, [*row.prompt_ids], [*row.response_ids])
                own = sampled_log_probs(row, params, logits=logits)
                gaps = log_prob_gaps(row, params, logits=logits, ends=policy.eos_token_ids)
            if row.token_versions is not None:
                of_this = torch.tensor(row.token_versions, device=gaps.device) == version
                gaps, own = gaps[of_this], own[of_this]
            gap = float(gaps.max()) if len(gaps) else 0.0
            yield _Looked(gap, f"{where} {rule}" if rule and begins else None, begins, own)


def weight_difference(weights: Mapping[str, Tensor], replayed: Mapping[str, Tensor]) -> float:
    """The norm of the difference of all weights, relative to their norm."""
    apart = sum(
        float((w.double() - replayed[name].to(w.device).double()).square().sum()) for name, w in weights.items()
    )
    return math.sqrt(apart / sum(float(w.double().square().sum()) for w in weights.values()))
