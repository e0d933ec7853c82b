"""What a training command will do: batches, the objective as a formula, memory."""

import math
from collections.abc import Mapping
from typing import Any

from rlvr_cli.config.distill import DistillConfig
from rlvr_cli.config.dpo import DpoConfig
from rlvr_cli.config.ei import EiConfig
from rlvr_cli.config.grpo import GrpoConfig, overlong_buffer
from rlvr_cli.config.ppo import PpoConfig
from rlvr_cli.config.sft import SftConfig
from rlvr_cli.config.shared.optimization import rounds_beta2_away
from rlvr_cli.config.shared.training import TrainingConfig
from rlvr_cli.models.directory import adapter_settings
from rlvr_cli.models.identity import model_line, model_path, model_shape
from rlvr_cli.process import memory_limit
from rlvr_cli.rollouts.inputs import chat_line, rewards_line, shots_line
from rlvr_cli.samplers.episodes.open import episodes_line
from rlvr_cli.terminal import console
from rlvr_cli.training.losses.distillation import DIVERGENCES
from rlvr_cli.training.losses.policy_gradient import KL_TYPES, Loss
from rlvr_cli.training.losses.preference import PREFERENCE_LOSSES
from rlvr_cli.training.parallel.placement import placement_line
from rlvr_cli.training.planning.memory import (
    MemoryPlan,
    adapter_parameters,
    check_memory,
    gpus_line,
    host_note,
    memory_lines,
)
from rlvr_cli.training.planning.notes import NO_EVALUATION, ROUNDED_BETA2, shared_notes, warmup_notes
from rlvr_cli.training.question_order import LEAST_PRIORITY
from rlvr_cli.training.session import Inputs
from rlvr_cli.training.traces import Sequences
from rlvr_cli.types import SamplingParams


def print_plan(lines: Mapping[str, str], config: TrainingConfig, inputs: Inputs, *, most_updates: int) -> None:
    """Print the plan, the devices and their memory; with --dry-run also which GPUs the run fits.

    Args:
        most_updates: of the run; it may make fewer.

    Raises:
        RlvrError: the run cannot fit its device, or on a CPU this machine's memory.
    """
    engine, shape, rows = inputs.engine.name, model_shape(model_path(config.model)), config.micro_batch_rows
    if playing := episodes_line(config):
        lines = {**lines, "episodes": playing}
    if config.lora_rank:
        lines = {**lines, "adapter": adapter_line(config, shape)}
    more = {
        "micro-batches": micro_batches_line(config, inputs.memory),
        "precision": f"{_precision(config)}; computes in {_computes_in(config, inputs)}",
        "devices": placement_line(inputs.placement, engine=engine),
    }
    more |= memory_lines(inputs.memory, inputs.placement, engine=engine)
    if config.dry_run and shape:
        more["GPUs"] = gpus_line(config, shape, engine=engine, rows=rows)
    for name, value in {**lines, **more}.items():
        console.say(f"{name:<14} {value}")
    notes = [NO_EVALUATION] if not inputs.facts["eval_dataset"] else []
    notes += [ROUNDED_BETA2] if rounds_beta2_away(config) else []  # a resumed run's
    notes += shared_notes(config, samples=bool(inputs.questions))
    notes += warmup_notes(config, most_updates=most_updates)
    of_host = host_note(inputs.memory, memory_limit(), dry_run=config.dry_run)
    for note in (*notes, check_memory(inputs.memory, config, shape, engine=engine, rows=rows), of_host):
        if note:
            console.say(f"note: {note}")


def micro_batches_line(config: TrainingConfig, memory: MemoryPlan) -> str:
    """The micro-batches on one line of the plan; what was asked for also with what it costs beside auto."""
    rows, tokens, fitting = config.micro_batch_rows, memory.micro_batch_tokens, memory.tokens_that_fit
    line = f"{rows} response{'s' * (rows != 1)}" if tokens is None else f"up to {tokens:,} tokens"
    if not memory.largest or memory.largest == fitting:
        return line
    auto, fitted = "--micro-batch-tokens auto", f"({fitting:,} tokens), for the same result"
    longest = f" of up to {memory.largest:,} tokens" if tokens is None else ""
    if memory.largest < fitting:
        return f"{line}{longest}: about {fitting / memory.largest:.2g} times the passes that {auto} makes {fitted}"
    return f"{line}{longest}: about {memory.largest / fitting:.2g} times the activations that {auto} keeps {fitted}"


def adapter_line(config: TrainingConfig, shape: Mapping[str, int] | None) -> str:
    """The LoRA adapter on one line of the plan."""
    layers, share = "all linear layers but the head", ""
    if shape:
        about = ""
        if not shape["dense_layers"]:
            layers, about = "the attention, and on MLPs whose names no expert has", "about "
        trained = adapter_parameters(shape, config.lora_rank)
        share = f": {about}{trained:,} parameters, {trained / shape['parameters']:.1%} of the model's"
    return (
        f"LoRA of rank {config.lora_rank}, alpha {config.lora_alpha}, on {layers}{share}; "
        "its learning rate is usually about 10 times that of full fine-tuning"
    )


def sft_plan(
    config: SftConfig, facts: Mapping[str, Any], sequences: Sequences, *, traces: int, num_updates: int
) -> dict[str, str]:
    """The plan of `rlvr sft`, line by line."""
    examples, count = facts["dataset"]["rows"], len(sequences.rows)
    batch, unit = min(config.train_batch_size, count), "sequences" if config.packing else "examples"
    kept = ", correct ones only" if config.correct_only else ""
    return {
        "model": model_line(facts["model"]),
        "examples": f"{examples} of {traces} traces of {facts['dataset']['name']}{kept}",
        **_prompt(config, facts),
        **({"packing": packing_line(config, sequences)} if config.packing else {}),
        "updates": f"{num_updates} of {batch} {unit}; {num_updates / math.ceil(count / config.train_batch_size):g} epochs",
        "objective": sft_objective(config.length_normalization, config.normalize_constant)
        + (", prompts included" if config.loss_on_prompts else ""),
        **_common(config, facts),
    }


def packing_line(config: SftConfig, sequences: Sequences) -> str:
    """How examples are packed, on one line of the plan."""
    count, length = len(sequences.rows), config.packing_length
    packed = f"{count} sequences of {length} tokens"
    if config.packing_attend_across:
        return f"{packed}, cut from all examples without gaps: attention crosses from one example into the next"
    return f"{packed}, {sequences.num_tokens / (count * length):.1%} full; attention stays within an example"


def dpo_plan(config: DpoConfig, facts: Mapping[str, Any], *, num_updates: int) -> dict[str, str]:
    """The plan of `rlvr dpo`, line by line."""
    pairs = facts["dataset"]["rows"]
    batch = min(config.train_batch_size, pairs)
    reference = "the first policy; its log-probabilities are computed once, before training"
    return {
        "model": model_line(facts["model"]),
        "pairs": f"{pairs} of {facts['dataset']['name']}",
        **_prompt(config, facts),
        "updates": f"{num_updates} of {batch} pairs; {config.dpo_epochs} epochs",
        "objective": preference_objective(config),
        **({"reference": reference} if config.loss_type != "simpo" else {}),
        **_common(config, facts),
    }


def online_dpo_plan(config: DpoConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """The plan of `rlvr dpo --n-dpo-steps`, line by line."""
    return {
        "model": model_line(facts["model"]),
        "questions": f"{facts['dataset']['rows']} of {facts['dataset']['name']}, {rewards_line(facts)}",
        **_prompt(config, facts),
        "rounds": f"{config.n_dpo_steps}, each of {config.n_prompts_per_rollout_batch} questions x {config.group_size} samples, "
        f"at most {config.pairs_per_question} pairs of a question",
        "updates": f"{config.dpo_epochs} epochs over a round's pairs, {config.train_batch_size} an update",
        "objective": preference_objective(config),
        **({"reference": _kept_reference(config)} if config.keeps_reference else {}),
        "sampling": _sampling(config),
        "engine": facts["engine"],
        **_common(config, facts),
    }


def _kept_reference(config: DpoConfig) -> str:
    """What the first policy is, which stays in memory."""
    if not config.lora_rank:
        return "the first policy"
    goes_on = adapter_settings(model_path(config.model)) is not None
    return "with the first weights of the adapter" if goes_on else "without the adapter"


def ei_plan(config: EiConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """The plan of `rlvr ei`, line by line."""
    return {
        "model": model_line(facts["model"]),
        "questions": f"{facts['dataset']['rows']} of {facts['dataset']['name']}, {rewards_line(facts)}",
        **_prompt(config, facts),
        "rounds": f"{config.n_ei_steps}, each of {config.ei_batch_size} questions x {config.group_size} samples",
        "updates": f"{config.sft_epochs} epochs over a round's distinct correct responses, {config.train_batch_size} an update",
        "objective": sft_objective("token_mean", 1.0),
        "sampling": _sampling(config),
        "engine": facts["engine"],
        **_common(config, facts, unit="rounds"),
    }


def grpo_plan(config: GrpoConfig, facts: Mapping[str, Any], *, loss: Loss) -> dict[str, str]:
    """The plan of `rlvr grpo`, line by line."""
    buffer = overlong_buffer(config.overlong_buffer, max_tokens=config.sampling_max_tokens)
    updates = config.updates_per_rollout_batch
    policy = (
        "on-policy"
        if config.on_policy
        else f"off-policy: old log-probabilities are computed once per batch, {updates} updates use them"
    )
    if config.async_steps:
        policy = f"rollouts one batch behind, sampled in a second process meanwhile; else {policy}"
    if config.partial_rollout_tokens:
        policy = f"old log-probabilities are the trainer's, also of tokens that earlier policies sampled; else {policy}"
    order = {
        "shuffled": "",
        "file": "; questions in the order of the dataset",
        "prioritized": f"; questions drawn by max(1 - success rate, {LEAST_PRIORITY:g})",
    }[config.question_order]
    rounds = (
        f"; up to {config.max_sampling_rounds} rounds until every group has a signal" if config.dynamic_sampling else ""
    )
    partial_rollouts = (
        f"each response goes on by up to {config.partial_rollout_tokens} of its {config.sampling_max_tokens} tokens a batch, and a question is "
        "trained on once all its responses have ended; an update of fewer responses counts for less, by their share"
    )
    return {
        "model": model_line(facts["model"]),
        "questions": f"{facts['dataset']['rows']} of {facts['dataset']['name']}, {rewards_line(facts)}",
        **_prompt(config, facts),
        "rollouts": f"{config.n_grpo_steps} batches of {config.n_prompts_per_rollout_batch} questions x {config.group_size} samples{rounds}{order}",
        **({"partial rollouts": partial_rollouts} if config.partial_rollout_tokens else {}),
        "updates": f"{updates} per batch ({config.epochs_per_rollout_batch} epochs, {config.train_batch_size} responses each), "
        f"{config.n_grpo_steps * updates} in all; {policy}",
        **({"shaped reward": shaped_reward_formula(config)} if config.shapes_rewards else {}),
        "advantage": advantage_formula(config, loss),
        "objective": grpo_objective(config, loss),
        **kl_line(config),
        "overlong": {"none": "as graded", "mask": "no loss on responses cut at the limit"}.get(
            config.overlong, f"soft penalty over the last {buffer} tokens"
        ),
        "sampling": _sampling(config),
        "engine": facts["engine"],
        **_common(config, facts),
    }


def ppo_plan(config: PpoConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """The plan of `rlvr ppo`, line by line."""
    updates = config.updates_per_rollout_batch
    alone = (
        f"; it learns alone on the first {config.critic_warmup_steps} rollout batches"
        if config.critic_warmup_steps
        else ""
    )
    critic = {
        "own": "a model of its own with the policy's first weights, and a linear head that is 0 at first",
        "shared": "a linear head on the policy's model, 0 at first",
    }[config.critic]
    return {
        "model": model_line(facts["model"]),
        "questions": f"{facts['dataset']['rows']} of {facts['dataset']['name']}, {rewards_line(facts)}",
        **_prompt(config, facts),
        "rollouts": f"{config.n_ppo_steps} batches of {config.n_prompts_per_rollout_batch} questions x {config.group_size} samples",
        "updates": f"{updates} per batch ({config.epochs_per_rollout_batch} epochs, {config.train_batch_size} responses each), "
        f"{config.n_ppo_steps * updates} in all; old log-probabilities and values are computed once per batch",
        "critic": f"{critic}; learning rate {config.critic_learning_rate:g}{alone}",
        **ppo_formulas(config),
        **ppo_kl_line(config),
        "overlong": "as graded: a response cut at the limit ends there, and no value follows its last token",
        "sampling": _sampling(config),
        "engine": facts["engine"],
        **_common(config, facts),
    }


def distill_plan(config: DistillConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    """The plan of `rlvr distill`, line by line."""
    questions = config.rollout_batch_size // config.group_size
    return {
        "model": model_line(facts["model"]),
        "teacher": facts["teacher"]["name"] + (f", on {config.teacher_url}" if config.teacher_url else ""),
        "questions": f"{facts['dataset']['rows']} of {facts['dataset']['name']}, {rewards_line(facts)}",
        **_prompt(config, facts),
        "rollouts": f"{config.n_distill_steps} batches of {questions} questions x {config.group_size} samples",
        "updates": f"{config.n_distill_steps} of {config.rollout_batch_size} responses, one per batch: on-policy",
        "objective": distill_objective(config),
        "sampling": _sampling(config),
        "engine": facts["engine"],
        **_common(config, facts),
    }


def distill_objective(config: DistillConfig) -> str:
    """The loss of `rlvr distill`, as a formula."""
    loss = DIVERGENCES[config.divergence]
    sign, term = ("-", loss.formula[1:]) if loss.formula.startswith("-") else ("", loss.formula)
    where = loss.where
    if config.task_reward:
        term = f"[{term} {'+' if sign else '-'} {config.task_reward:g} rho_i,t R_i]"
        where += f", R_i = (r_i - mean(r)) / (std(r) + 1e-06) of the group{', rho = p/p_old' * loss.full}"
    return (
        f"{sign}(1/T) sum_i,t {term};  {where}, both at temperature {config.sampling_temperature:g}, T the response tokens of the "
        "update"
    )


def sft_objective(length_normalization: str, constant: float) -> str:
    """The loss of supervised fine-tuning, as a formula."""
    match length_normalization:
        case "token_mean":
            return "-(1/T) sum_t log p(o_t | q, o_<t), T the response tokens of the update"
        case "masked_mean":
            return "-(1/B) sum_i (1/|o_i|) sum_t log p(o_i,t | q_i, o_i,<t), B examples an update"
    return f"-(1/(B*{constant:g})) sum_i sum_t log p(o_i,t | q_i, o_i,<t), B examples an update"


def preference_objective(config: DpoConfig) -> str:
    """The loss of `rlvr dpo`, as a formula."""
    loss = PREFERENCE_LOSSES.get(config.loss_type)
    if loss is None:
        return f"(1/B) sum {config.loss_type}, B pairs an update"
    gamma = f"{config.target_margin:g}" if config.target_margin else ""
    nll = f"{config.nll_coef:g}" if config.nll_coef else ""
    formula = loss.formula(beta=f"{config.scale:g}", gamma=gamma, nll=nll)
    summed = f"(1/B) sum [{formula}]" if nll else f"-(1/B) sum {formula[1:]}"
    return f"{summed};  h = {loss.score} of the chosen (w) and the rejected (l) response of a pair, B pairs an update"


def shaped_reward_formula(config: GrpoConfig) -> str:
    """The shaped reward of response i, as a formula."""
    terms = []
    if config.format_weight:
        terms.append(f"{config.format_weight:g} format_i")
    if config.length_reward:
        after = f" from batch {config.length_reward_after} on" if config.length_reward_after else ""
        terms.append(f"{config.length_reward:g} (1/2 - (|o_i| - min)/(max - min), at most 0 if wrong){after}")
    if config.language_reward:
        terms.append(f"{config.language_reward:g} (share of words in {config.language}, by {config.language_detector})")
    penalty = ""
    if config.overlong == "soft_punish":
        buffer = overlong_buffer(config.overlong_buffer, max_tokens=config.sampling_max_tokens)
        penalty = f" - min(max((|o_i| - {config.sampling_max_tokens - buffer})/{buffer}, 0), 1)"
    return f"R_i = {' + '.join(['r_i', *terms])}{penalty}"


def advantage_formula(config: GrpoConfig, loss: Loss) -> str:
    """The advantage of response i of a group, as a formula."""
    reward = "R" if config.shapes_rewards else "r"
    if loss.raw_rewards:
        return f"A_i = {reward}_i"
    if config.credit == "turn":
        divided = f"({{}}) / (std(G_k) + {config.advantage_eps:g})" if config.std_over == "group" else "{}"
        last = "r_i with R_i - r_i added to that of the last turn" if config.shapes_rewards else "r_i"
        return (
            f"A_i = {divided.format('G_i,k - mean(G_k)')} at the tokens of turn k, G_i,k the sum of the rewards {last} from turn k on, over the "
            "episodes of the group with a turn k; 0 where all G_k are equal"
        )
    centered = f"{reward}_i - mean({reward})"
    match config.std_over:
        case "none":
            return f"A_i = {centered}"
        case "batch":
            return f"A_i = ({centered}) / (std of {centered} over the batch + {config.advantage_eps:g})"
    return f"A_i = ({centered}) / (std({reward}) + {config.advantage_eps:g}); 0 where all {reward} are equal"


def kl_line(config: GrpoConfig) -> dict[str, str]:
    """The line of the plan that says what the KL penalty descends; none without one."""
    if not config.kl_coef:
        return {}
    kind = KL_TYPES[config.kl_type]
    return {"KL penalty": f"{kind.name} = {kind.formula}; its gradient descends {kind.descends}"}


def grpo_objective(config: GrpoConfig, loss: Loss) -> str:
    """The loss of `rlvr grpo`, as a formula."""
    formula = loss.formula(**{name: getattr(config, name) for name in loss.options})
    sign, term = ("-", formula[1:]) if formula.startswith("-") else ("", formula)
    if config.importance_truncation is not None:
        term = f"{importance_formula(config)} {term}"
    if config.kl_coef:
        mean = "mean_t " if loss.per_row else ""
        term = f"[{term} {'-' if sign else '+'} {config.kl_coef:g} {mean}{KL_TYPES[config.kl_type].name}]"
    divides_by_uncut = config.overlong == "mask" and (loss.per_row or config.length_normalization == "masked_mean")
    size = "B" if divides_by_uncut else config.train_batch_size
    scale = {
        "masked_mean": f"(1/{size}) sum_i (1/|o_i|) sum_t",
        "masked_normalize": f"(1/({size}*{config.masked_normalize_constant or 0:g})) sum_i sum_t",
        "token_mean": "(1/T) sum_i,t",
    }[config.length_normalization]
    terms = ["log p at temperature " + f"{config.sampling_temperature:g}", loss.where]
    if config.importance_truncation is not None:
        terms.append("c = p_trainer/p_sampler")
    if config.overlong == "mask":
        terms.append("responses cut at the limit left out")
    if divides_by_uncut:
        terms.append("B the responses of the update that were not cut")
    if config.length_normalization == "token_mean" and not loss.per_row:
        terms.append("T the response tokens of the update")
    return f"{sign}{f'(1/{size}) sum_i' if loss.per_row else scale} {term};  {', '.join(filter(None, terms))}"


def ppo_formulas(config: PpoConfig) -> dict[str, str]:
    """What `rlvr ppo` makes of a reward, and the loss that it minimizes, as formulas by name."""
    penalty, in_loss = "", ""
    if config.kl_coef and config.kl_in == "reward":
        kl = "max(log p_old - log p_ref, 0)" if config.kl_clamp else "(log p_old - log p_ref)"
        penalty = f" - {config.kl_coef:g} {kl}_i,t"
    elif config.kl_coef:
        in_loss = f" + {config.kl_coef:g} {KL_TYPES['k3'].name}"
    gamma = "" if config.gamma == 1 else f"{config.gamma:g} "
    discount = "" if config.gamma * config.gae_lambda == 1 else f"{config.gamma * config.gae_lambda:g} "
    advantage = f"A_i,t = d_i,t + {discount}A_i,t+1, d_i,t = r_i,t + {gamma}V_i,t+1 - V_i,t, 0 after the last token"
    if config.whiten_advantages:
        advantage += "; then (A - mean) / std over the tokens of the batch"
    value = f"{config.vf_coef / 2:g} (V_i,t - R_i,t)^2"
    if c := config.vf_cliprange:
        value = f"{config.vf_coef / 2:g} max((V - R)^2, (V_old + clip(V - V_old, -{c:g}, {c:g}) - R)^2)_i,t"
    policy = f"-min(rho_i,t A_i,t, clip(rho_i,t, 1-{config.cliprange:g}, 1+{config.cliprange:g}) A_i,t)"
    return {
        "reward": f"r_i,t = [t is the last token] r_i{penalty}",
        "advantage": advantage,
        "return": f"R_i,t = A_i,t + V_i,t{', with A before it is whitened' if config.whiten_advantages else ''}",
        "objective": f"(1/T) sum_i,t [{policy} + {value}{in_loss}];  rho = p/p_old, log p at temperature "
        f"{config.sampling_temperature:g}, T the response tokens of the update",
    }


def ppo_kl_line(config: PpoConfig) -> dict[str, str]:
    """The line of the plan that says what the KL penalty of `rlvr ppo` descends; none without one."""
    if not config.kl_coef:
        return {}
    if config.kl_in == "loss":
        kind = KL_TYPES["k3"]
        return {"KL penalty": f"{kind.name} = {kind.formula}; its gradient descends {kind.descends}"}
    clamped = "; clamped, the estimate is too large" if config.kl_clamp else ""
    return {"KL penalty": f"in the reward: its gradient descends KL(p || p_ref) of whole responses{clamped}"}


def importance_formula(config: GrpoConfig) -> str:
    """The weight of a token's loss, of the ratio c."""
    floor, cap = config.importance_floor, config.importance_cap
    if config.importance_correction == "masked":
        return f"c [{floor:g} <= c <= {cap:g}]"
    return f"min(max(c, {floor:g}), {cap:g})" if floor else f"min(c, {cap:g})"


def _precision(config: TrainingConfig) -> str:
    weights = f"{config.param_dtype} weights" + (", float32 adapter" if config.lora_rank else "")
    if config.offload_optimizer:
        return (
            f"{weights}, on the host float32 {'moments' if config.param_dtype == 'float32' else 'weights and moments'}"
        )
    return f"{weights}, moments of 8 bits" if config.optimizer == "adamw_8bit" else f"{weights} and optimizer state"


def _computes_in(config: TrainingConfig, inputs: Inputs) -> str:
    """The precision of matrix products, and why, where a CPU has another one than that of the weights without being asked."""
    chosen = (config.compute_dtype, inputs.placement.trainer) == ("auto", "cpu")
    why = "as when it began" if config.resume else "faster on this processor (--compute-dtype float32 rounds less)"
    return inputs.compute_dtype + f": {why}" * (chosen and inputs.compute_dtype != config.param_dtype)


def _prompt(config: TrainingConfig, facts: Mapping[str, Any]) -> dict[str, str]:
    shots = (facts["dataset"] or {}).get("shots")
    return ({"shots": shots_line(shots)} if shots else {}) | (
        {"prompt": chat_line(facts["prompt"])} if config.chat else {}
    )


def _sampling(config: TrainingConfig) -> str:
    train, held_out = config.sampling_params, config.eval_sampling_params

    def line(p: SamplingParams) -> str:
        return f"temperature {p.temperature:g}, top-p {p.top_p:g}, {p.min_tokens}-{p.max_tokens} tokens"

    episodes = ""
    if config.plays_episodes:
        most = config.longest_response(train.max_tokens)
        title = " ".join(filter(None, (config.environment, *config.tool)))
        episodes = f"; episodes of up to {config.max_turns} turns and {most:,} tokens with {title}"
    return line(train) + (f"; evaluations: {line(held_out)}" if held_out != train else "") + episodes


def _evaluation(config: TrainingConfig, questions: Mapping[str, Any], unit: str) -> str:
    """How many questions each evaluation asks, and when: --eval-every counts `unit`."""
    asked = min(questions["rows"], config.eval_examples)
    last = min(questions["rows"], config.final_eval_examples or config.eval_examples)
    if unit == "rounds" and not (config.eval_every or config.time_limit):
        return f"{last} questions of {questions['name']}, after"
    every = f", every {config.eval_every} {unit}" if config.eval_every else ""
    when = f"before, after{every}" if last == asked else f"before{every}; {last:,} after"
    return f"{asked} questions of {questions['name']}, {when}"


def _common(config: TrainingConfig, facts: Mapping[str, Any], *, unit: str = "updates") -> dict[str, str]:
    questions = facts["eval_dataset"]
    apart = f", {config.checkpoint_minutes:g} minutes apart at least" if config.checkpoint_minutes else ""
    if config.checkpoint_minutes is None:
        apart = ", fewer where they would take more than a twentieth of the time"
    save = (
        f"every {config.checkpoint_every} updates{apart}, the last two kept"
        if config.checkpoint_every
        else "only when interrupted"
    )
    return {
        "learning rate": f"{config.learning_rate:g}: {config.warmup_steps} updates of warm-up, then {config.lr_schedule}",
        "evaluation": _evaluation(config, questions, unit) if questions else "none: name questions with --eval-dataset",
        "checkpoints": save,
        **({"time limit": f"{config.time_limit}, the last evaluation included"} if config.time_limit else {}),
    }
