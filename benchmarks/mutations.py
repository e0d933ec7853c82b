"""Faults put into the code one by one, and the tests that find them: a test that cannot fail shows up here as a survivor.

    python benchmarks/mutations.py                  # all; about half an hour on two cores
    python benchmarks/mutations.py --only cliprange # those whose name, file or options match
    python benchmarks/mutations.py --default-only   # without the slow ones among their tests: 95 % are to be killed

Each mutation replaces a text that occurs once in a file, in a copy of the package, and runs the named tests there. Most are
faults of wiring: an option that is read and then lost, or used in the wrong place. At least one stands for each option that
reaches training, sampling or evaluation. Prints a table, killed by or survived; the exit status is 1 if one survives without
an explanation, cannot be applied, or breaks the import. Those of reasoning-gym need its extra, those of
object storage `storage-test`, those of verifiers `verifiers`. Torch and transformers are imported once and shared by fork.
"""

# ruff: noqa: E501  (a table of cases)

import argparse
import compileall
import contextlib
import importlib
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import Queue

ROOT = Path(__file__).parents[1]
PACKAGE = "rlvr_cli"
SECONDS = 600  # per mutation; a test that hangs has noticed something

# Options of sft, ei, grpo and eval that change no number of a run here, and why.
WITHOUT_EFFECT = dict.fromkeys(
    ("run", "runs_dir", "config", "preset", "format", "resume", "dry_run"), "names and output"
) | {
    "check_dataset": "samples nothing",
    "base_url": "an endpoint's; tests/samplers/test_openai.py",
    "endpoint": "an endpoint's; tests/samplers/test_openai.py",
    "endpoint_concurrency": "an endpoint's; tests/reliability/test_endpoints.py",
    "api_key_env": "an endpoint's; tests/samplers/test_openai.py",
    "device": "needs a second device",
    "dtype": "of vLLM; needs it installed",
    "max_model_len": "of vLLM; needs it installed",
    "gpu_memory_utilization": "of vLLM; needs it installed",
    "cuda_graphs": "needs a CUDA device",
    "sampler_urls": "where vLLM is; tests/samplers/parallel/test_servers.py",
    "weights_dir": "where vLLM is; tests/samplers/parallel/test_servers.py",
    "cluster": "needs Ray; tests/parallel/test_cluster.py",
    "environment_workers": "how many processes",
}


@dataclass(frozen=True)
class Mutation:
    """A fault.

    Attributes:
        name: what is wrong, in a few words.
        file: below rlvr_cli/.
        old, new: the text, which occurs once in the file, and what replaces it.
        tests: arguments of pytest, separated by spaces; `-k` may be one of them.
        options: the options that it ignores or misplaces: `option`, or `command.option` where only one command's is.
        explained: why no test can find it; empty if one must.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    options: tuple[str, ...] = ()
    explained: str = ""


def replays(*cases: str) -> str:
    """The runs of tests/replay/test_wiring.py with these names."""
    test = "tests/replay/test_wiring.py::test_a_run_is_what_its_options_and_rollouts_give"
    return " ".join(f"{test}[{case}]" for case in cases)


def preferences(*cases: str) -> str:
    """The runs of tests/commands/test_dpo.py with these names."""
    return " ".join(
        f"tests/commands/test_dpo.py::test_a_run_is_what_its_options_and_pairs_give[{case}]" for case in cases
    )


def actor_critics(*cases: str) -> str:
    """The runs of tests/commands/test_ppo.py with these names."""
    test = "tests/commands/test_ppo.py::test_a_run_is_what_its_options_and_rollouts_give"
    return " ".join(f"{test}[{case}]" for case in cases)


def mutations_of(file: str, *rows: tuple[str, str, str, str] | tuple[str, str, str, str, str]) -> list[Mutation]:
    """Rows of (name, old, new, tests) and, for a wiring, the options, separated by spaces."""
    return [Mutation(row[0], file, *row[1:4], tuple((*row, "")[4].split())) for row in rows]


ON_POLICY = "tests/commands/test_dpo.py -k own_pairs"
FAILING = "tests/commands/test_rewards.py -k share_that_may_fail"
DISCOVER = "tests/commands/test_discover.py -k"
PLACES = "tests/parallel/test_places.py -k"
NODES = "tests/training/planning/test_nodes.py"
SPLITS = "tests/commands/across/test_micro_batches.py -k"
BUDGETS = "tests/commands/test_end_to_end.py -k each_thinking_budget"
EVALUATED = "tests/replay/test_wiring.py::test_an_evaluation_is_what_its_options_give"
LOSSES = "tests/training/losses/test_losses.py"
WORKED = "tests/training/losses/test_worked_numbers.py"
SHARED = "tests/samplers/embedded/test_shared.py"
JOINING = "tests/samplers/embedded/test_joining.py"
DECODE_STEP = "tests/samplers/embedded/test_decode_step.py"
ROWS = "tests/samplers/embedded/test_cache.py"
SHAPING = "tests/training/credit/test_shaping.py"
LANGUAGE = "tests/graders/test_language.py"
UPDATE = " ".join(f"tests/training/updates/test_{part}.py" for part in ("update", "policy_gradient", "scores"))
ON_CUDA, SAMPLED_ON_CUDA = (
    "tests/training/updates/test_update_on_cuda.py",
    "tests/samplers/embedded/test_sampling_on_cuda.py",
)
PREFERENCE = "tests/training/losses/test_preference.py"
GAE = "tests/training/credit/test_gae.py"
PPO_UPDATE = "tests/training/losses/test_value.py"
DISTILLATION = "tests/training/losses/test_distillation.py"
GRPO = "tests/commands/test_grpo.py"
GRPO_OPTIONS = "tests/commands/test_grpo_options.py"
ENGINE = "tests/samplers/embedded/test_engine.py"
DRAW = "tests/samplers/embedded/test_draw.py"
PARTIAL = "tests/commands/test_partial_rollouts.py"
UNIT_PARTIAL = "tests/rollouts/test_partial.py"
RESUME_PARTIAL = "tests/training/test_resume.py"
IN_BFLOAT16 = "tests/replay/test_wiring.py -k in_bfloat16"

WIRING = [
    *mutations_of(
        "config/shared/sampling.py",
        ("temperature of 1 whatever is asked", "temperature=self.sampling_temperature,", "temperature=1.0,", replays("grpo-on-policy"), "sampling_temperature"),
        ("no nucleus", "top_p=self.sampling_top_p,", "top_p=1.0,", replays("grpo-dynamic"), "sampling_top_p"),
        ("12 tokens whatever is asked", "max_tokens=self.sampling_max_tokens,", "max_tokens=12,", replays("ei-once"), "sampling_max_tokens"),
        ("4 tokens at least whatever is asked", "min_tokens=self.sampling_min_tokens,", "min_tokens=4,", replays("grpo-no baseline"), "sampling_min_tokens"),
        ("one stop string whatever is asked", "stop=tuple(s for s in self.stop if s),", 'stop=("e",),', replays("ei-once"), "stop"),
    ),
    *mutations_of(
        "config/shared/evaluation.py",
        ("evaluations at training's temperature", '"temperature": self.eval_temperature,', '"temperature": None,', replays("grpo-on-policy"), "eval_temperature"),
        ("evaluations with training's nucleus", '"top_p": self.eval_top_p,', '"top_p": None,', replays("grpo-clip"), "eval_top_p"),
        ("evaluations with training's maximum", '"max_tokens": self.eval_max_tokens,', '"max_tokens": None,', replays("grpo-on-policy"), "eval_max_tokens"),
        ("evaluations with training's minimum", '"min_tokens": self.eval_min_tokens,', '"min_tokens": None,', replays("grpo-clip"), "eval_min_tokens"),
        ("an evaluation at temperature 0 takes training's", "if v is not None}", "if v}", replays("grpo-on-policy"), "eval_temperature"),
    ),
    *mutations_of(
        "config/grpo.py",
        ("a clip range that the loss does not use is taken", 'clips, corrects = self.loss_type in ("grpo_clip", "gspo"),', "clips, corrects = True,", "tests/commands/test_grpo_options.py -k of_other_losses"),
        ("micro-batches of the whole batch", "else self.train_batch_size // steps", "else self.train_batch_size", replays("grpo-on-policy"), "gradient_accumulation_steps"),
        ("questions of a fixed batch", "return self.rollout_batch_size // self.group_size", "return 32 // self.group_size", replays("grpo-no baseline"), "rollout_batch_size"),
        ("importance weights are never asked for", 'wanted = self.importance_correction in ("truncated", "masked") or (', "wanted = False or (", replays("grpo-weighted"), "importance_correction"),
        ("no importance weights with --async-steps", 'self.importance_correction == "auto" and self.lags', "False", "tests/config/test_config.py -k importance", "importance_correction"),
        ("importance weights with --async-steps though none are asked for", 'self.importance_correction == "auto" and self.lags', "self.lags", "tests/config/test_config.py -k importance", "importance_correction"),
        ("a cap of 2 whatever is asked", "return self.importance_cap if wanted", "return 2.0 if wanted", replays("grpo-weighted"), "importance_cap"),
        ("masked_normalize by the longest response always", "return self.normalize_constant or float(self.sampling_max_tokens)", "return float(self.sampling_max_tokens)", replays("grpo-dynamic"), "grpo.normalize_constant"),
        ("masked_normalize by 1 without a constant", "or float(self.sampling_max_tokens)", "or 1.0", replays("grpo-weighted"), "grpo.normalize_constant"),
        ("the buffer is always a fifth", "return given or max(max_tokens // 5, 1)", "return max(max_tokens // 5, 1)", replays("grpo-clip"), "overlong_buffer"),
        ("updates are counted without epochs", "return self.epochs_per_rollout_batch * self.rollout_batch_size // self.train_batch_size", "return self.rollout_batch_size // self.train_batch_size", replays("grpo-clip"), "epochs_per_rollout_batch"),
    ),
    *mutations_of(
        "commands/grpo.py",
        ("always divided by the deviation", 'normalize_by_std=config.std_over == "group",', "normalize_by_std=True,", replays("grpo-on-policy"), "use_std_normalization"),
        ("never divided by the deviation", 'normalize_by_std=config.std_over == "group",', "normalize_by_std=False,", replays("grpo-clip"), "std_normalization"),
        ("never divided by the batch's deviation", 'if config.std_over == "batch" and not', "if False and not", replays("grpo-gspo"), "std_normalization"),
        ("raw rewards are divided by the batch's deviation", 'if config.std_over == "batch" and not loss.raw_rewards:', 'if config.std_over == "batch":', f"{GRPO} -k raw_rewards_stay", "std_normalization"),
        ("the batch's deviation has no eps", "divided = batch_normalized(centered, advantage_eps=config.advantage_eps)", "divided = batch_normalized(centered)", replays("grpo-gspo"), "advantage_eps"),
        ("rewards are not shaped", "shaped = sum(terms.values(), rewards_of(rollouts))", "shaped = rewards_of(rollouts)", replays("grpo-cispo"), "format_weight length_reward language_reward"),
        ("terms have no columns", '"advantage": advantages, **terms}', '"advantage": advantages}', f"{GRPO} -k each_term_has_a_column", "format_weight"),
        ("a missing detector is found too late", "check_detector(config.language_detector)", "pass", f"{GRPO_OPTIONS} -k missing_language", "language_detector"),
        ("an eps of 1e-6 whatever is asked", "advantage_eps=config.advantage_eps,", "advantage_eps=1e-6,", replays("grpo-clip"), "advantage_eps"),
        ("one normalization whatever is asked", "normalization=config.length_normalization,\n                    normalize_constant=config.masked_normalize_constant,", 'normalization="masked_mean",', replays("grpo-clip"), "grpo.length_normalization"),
        ("the constant of masked_normalize is 1", "normalize_constant=config.masked_normalize_constant,", 'normalize_constant=1.0 if config.length_normalization == "masked_normalize" else None,', replays("grpo-dynamic"), "grpo.normalize_constant"),
        ("updates at temperature 1", "temperature=config.sampling_temperature,\n                )", "temperature=1.0,\n                )", replays("grpo-on-policy"), "sampling_temperature"),
        ("old and reference log-probabilities at temperature 1", "temperature = config.sampling_temperature\n", "temperature = 1.0\n", replays("grpo-clip"), "sampling_temperature"),
        ("minibatches of one size whatever is asked", "batch_size=config.train_batch_size,", "batch_size=16,", replays("grpo-clip"), "grpo.train_batch_size"),
        ("one epoch whatever is asked", "epochs=config.epochs_per_rollout_batch", "epochs=1", replays("grpo-clip"), "grpo.epochs_per_rollout_batch"),
        ("two steps whatever is asked", "num_steps=config.n_grpo_steps", "num_steps=2", replays("grpo-on-policy"), "n_grpo_steps"),
        ("groups of one size whatever is asked", "group_size=config.group_size,\n            order", "group_size=4,\n            order", replays("grpo-dynamic"), "grpo.group_size"),
        ("advantages over groups of another size", "group_size=config.group_size,\n        advantage_eps", "group_size=8,\n        advantage_eps", replays("grpo-clip"), "grpo.group_size"),
        ("responses that were cut are trained on", 'if config.overlong == "mask":', "if False:", replays("grpo-weighted"), "overlong"),
                ("the mask is inverted", 'r.finish_reason != "length"', 'r.finish_reason == "length"', replays("grpo-weighted"), "overlong"),
        ("no old log-probabilities", "if loop.num_updates > 1:", "if False:", replays("grpo-clip")),
        ("raw rewards become advantages", "advantages = shaped if loss.raw_rewards else", "advantages = shaped if False else", replays("grpo-no baseline"), "loss_type"),
    ),
    *mutations_of(
        "training/losses/chosen.py",
        ("one loss type whatever is asked", "loss = LOSSES.get(config.loss_type)", 'loss = LOSSES.get("reinforce_with_baseline")', replays("grpo-weighted"), "loss_type"),
        ("the KL penalty is k3 whatever is asked", "kl_type=config.kl_type,", "", replays("grpo-gspo"), "kl_type"),
        ("no floor of importance weights", "importance_floor=config.importance_floor,", "", replays("grpo-masked"), "importance_floor"),
        ("importance weights are truncated always", 'importance_masked=config.importance_correction == "masked",', "", replays("grpo-masked"), "importance_correction"),
        ("the mismatch has the tokens before the minimum", "min_tokens=config.sampling_min_tokens,", "", "tests/replay/test_wiring.py -k mismatch_leaves"),
        ("cispo's cap is 5", "getattr(config, name) for name in loss.options", '(5.0 if name == "cispo_cap" else getattr(config, name)) for name in loss.options', replays("grpo-cispo"), "cispo_cap"),
        ("kimi's tau is 0.1", "getattr(config, name) for name in loss.options", '(0.1 if name == "kimi_tau" else getattr(config, name)) for name in loss.options', replays("grpo-kimi"), "kimi_tau"),
        ("cliprange is not passed on", "getattr(config, name) for name in loss.options", '(0.2 if name == "cliprange" else getattr(config, name)) for name in loss.options', replays("grpo-weighted"), "cliprange"),
        ("cliprange_high is not passed on", "getattr(config, name) for name in loss.options", '(None if name == "cliprange_high" else getattr(config, name)) for name in loss.options', replays("grpo-clip"), "cliprange_high"),
        ("no KL penalty", "kl_coef=config.kl_coef,\n        kl_type", "kl_coef=0.0,\n        kl_type", replays("grpo-clip"), "kl_coef"),
        ("importance weights are not passed on", "importance_cap=config.importance_truncation,", "importance_cap=None,", replays("grpo-weighted"), "importance_correction importance_cap"),
        ("one beta for all (dpo)", "beta=config.scale,", "beta=0.1,", preferences("norm"), "dpo.beta dpo.loss_type"),
        ("gamma is lost", "gamma=config.target_margin", "gamma=0.0", preferences("simpo"), "dpo.gamma"),
        ("the likelihood of the chosen one is lost", "nll_coef=config.nll_coef", "nll_coef=0.0", preferences("nll"), "dpo.nll_coef"),
        ('plain dpo whatever is asked', 'loss = PREFERENCE_LOSSES.get(config.loss_type)', 'loss = PREFERENCE_LOSSES["dpo"]', preferences("norm"), 'dpo.loss_type'),
    ),
    *mutations_of(
        "training/loop.py",
        ("every batch is the first", "Place(self.number, self.step, self._asked))", "Place(0, self.step, self._asked))", replays("grpo-gspo"), "length_reward_after"),
        ("minibatches of seed 0", "seed = self._trainer.config.seed", "seed = 0", replays("grpo-clip"), "seed"),
        ("the same shuffle in each step", "seed=seed, number=self.number)", "seed=seed, number=0)", replays("grpo-clip"), "seed"),
        ("old log-probabilities of the first minibatch only", "for rows in self._first_epoch:", "for rows in self._first_epoch[:1]:", replays("grpo-clip")),
        ("each round is shuffled alike", "seed=seed, number=self.number)", "seed=seed, number=0)", replays("ei-twice"), "seed"),
        ("experts shuffled with seed 0", "seed = self._trainer.config.seed", "seed = 0", replays("ei-twice"), "seed"),
        ("evaluations of every round (ei)", "self.number % config.eval_every == 0", "self.number % 1 == 0", replays("ei-once"), "ei.eval_every"),
        ("each round in the order of the first", "seed=seed, number=self.number)", "seed=seed, number=0)", ON_POLICY),
        ("rollouts shuffled with seed 0 (ppo)", "seed = self._trainer.config.seed", "seed = 0", actor_critics("discounted"), "seed"),
        ("each rollout batch is shuffled alike (ppo)", "seed=seed, number=self.number)", "seed=seed, number=0)", actor_critics("discounted"), "seed"),
        ("old scores are computed again after a resume", "if not self._kept:", "if True:", "tests/training/test_resume.py -k ppo"),
        ("old values are those of an update", "tensors={} if last else self._kept", "tensors={}", "tests/training/test_resume.py -k ppo"),
    ),
    *mutations_of(
        "training/checks.py",
        ("the clip range is looked at again and again", 'if note or batch["advantages"].any():', "if False:", f"{GRPO} -k looked_at_once"),
        ("the clip range is judged where nothing can be cut", 'if note or batch["advantages"].any():', "if True:", f"{GRPO} -k something_has_an_advantage"),
        ("no note on the clip range", "if note := self._clip_note(update):", "if note := None:", f"{GRPO} -k looked_at_once"),
    ),
    *mutations_of(
        "commands/sources/dynamic.py",
        ("every group is kept", "if signal[number // size]]", "if True]", replays("grpo-dynamic"), "dynamic_sampling"),
        ("rounds without end", "rounds < self._max_rounds", "rounds < 99", f"{GRPO} -k gives_up", "max_sampling_rounds"),
    ),
    *mutations_of(
        "commands/sources/ahead.py",
        ("no snapshot for the next batch", "trainer.weights.snapshot_policy(trainer.updates)", "pass", replays("grpo-ahead"), "async_steps"),
    ),
    *mutations_of(
        "commands/sources/partial.py",
        ("more and more questions are in flight", "sampling.num_questions - len(begun)", "sampling.num_questions", f"{PARTIAL} -k segments_say", "partial_rollout_tokens"),
        ("a question in flight is asked again", "exclude=begun", "exclude=[]", f"{PARTIAL} -k small_dataset", "partial_rollout_tokens"),
        ("a resumed run begins anew", "self._flight = stored_in_flight(", "self._flight = {} and stored_in_flight(", f"{RESUME_PARTIAL} -k between_segments", "partial_rollout_tokens"),
        ("rollouts are those of the step that they end in", "own = [with_origin(r, ended[storable(r.example_id)][r.sample_index]) for r in rollouts]", "own = list(rollouts)", f"{PARTIAL} -k segments_say", "partial_rollout_tokens"),
        ("a run out of time is told to take more steps", 'if trainer.cursor.get("steps", 0) < self._num_steps:', "if False:", f"{PARTIAL} -k say_what"),
        ("a cosine is told to take more steps", 'elif trainer.config.lr_schedule == "constant":', "else:", f"{PARTIAL} -k by_batches"),
        ("the tokens of a step are those trained on", "stats=replace(cost, grading_seconds=grading)", 'stats=stored_stats(run, phase="train", step=place.step)', f"{PARTIAL} -k say_what", "partial_rollout_tokens"),
    ),
    *mutations_of(
        "commands/sources/sampling.py",
        ("questions of seed 0 (ei)", "seed=trainer.config.seed, before", "seed=0, before", replays("ei-twice"), "seed"),
        ("questions of seed 0 (ppo)", "seed=trainer.config.seed, before", "seed=0, before", actor_critics("discounted"), "seed"),
        ("a tenth of a batch's grades may fail whatever is asked", "at_most=trainer.config.max_grade_errors", "at_most=0.1", FAILING, "max_grade_errors"),
        ("no grade of a batch may stop a run", 'if not any(phase == "train"', 'if False and not any(phase == "train"', FAILING, "max_grade_errors"),
        ("no grade may stop a run whose first batches are empty", 'phase == "train" and step < place.step', 'phase == "train"', "tests/commands/test_partial_rollouts.py -k grader_that_fails", "max_grade_errors"),
        ("samples of seed 0", "seed=trainer.config.seed,\n            stop", "seed=0,\n            stop", replays("grpo-clip"), "seed"),
        ("training samples as evaluations do", "params=trainer.config.sampling_params,", "params=trainer.config.eval_sampling_params,", replays("grpo-on-policy"), "sampling_temperature"),
    ),
    *mutations_of(
        "data/order.py",
        ("each epoch of pairs in the same order", "epoch=number * epochs + epoch)", "epoch=number * epochs)", preferences("dpo"), "seed"),
    ),
    *mutations_of(
        "training/pairs.py",
        ("EOS is always appended (dpo)", "append_eos=append_eos, end", "append_eos=True, end", preferences("norm"), "dpo.append_eos"),
        ("EOS is appended to sampled ids", "end_sampled=False", "end_sampled=True", preferences("defaults"), "dpo.append_eos"),
        ("chosen and rejected change places", "for row in (2 * pair, 2 * pair + 1)]", "for row in (2 * pair + 1, 2 * pair)]", preferences("defaults")),
        ('the reference is computed again after a resume', "for name in (_REFERENCE,) if name in trainer.tensors}", "for name in ()}", "tests/training/test_resume.py -k dpo"),
        ("the reference of other pairs", "pair + 1]] for pair in pairs]", "pair + 1]] for pair in sorted(pairs)]", preferences("dpo")),
        ("each batch cuts the reference of all pairs", "of_all[self._starts[pair] : self._starts[pair + 1]] for", "of_all.split(self._lengths)[pair] for", "tests/training/test_pairs.py"),
    ),
    *mutations_of(
        "training/saving.py",
        ("no merged model", 'folder == "model-merged" and not self._config.lora_merge', 'folder == "model-merged"', "tests/commands/across/test_lora.py -k learns_from_traces", "lora_merge"),
        ("a merged model always", 'folder == "model-merged" and not self._config.lora_merge', "False", "tests/commands/across/test_lora.py -k without_lora_merge", "lora_merge"),
        ("no checkpoint but the last", "return bool(every) and updates", "return False and updates", "tests/replay/test_wiring.py -k checkpoints", "checkpoint_every"),
        ("checkpoints without a pause", "apart = 60 * minutes if", "apart = 0.0 if", "tests/replay/test_wiring.py -k checkpoints", "checkpoint_minutes"),
        ("long checkpoints without a pause", "20 * self.seconds if", "0 * self.seconds if", "tests/training/test_resume.py -k long_time"),
    ),
    *mutations_of(
        "training/credit/shaping.py",
        ("overlong responses are not punished", 'if config.overlong == "soft_punish":', "if False:", replays("grpo-dynamic"), "overlong"),
        ("the buffer is not passed on", "overlong_buffer(config.overlong_buffer, max_tokens=limit)", "overlong_buffer(None, max_tokens=limit)", replays("grpo-clip"), "overlong_buffer"),
        ("the format weighs 1", "config.format_weight * torch", "1.0 * torch", replays("grpo-cispo"), "format_weight"),
        ("the length reward weighs 1", "weight = config.length_reward if", "weight = 1.0 if", replays("grpo-gspo"), "length_reward"),
        ("the length reward counts at once", "if number >= config.length_reward_after", "if True", replays("grpo-gspo"), "length_reward_after"),
        ("lengths are compared over the batch", "length_rewards(lengths, correct, group_size=config.group_size)", "length_rewards(lengths, correct, group_size=len(lengths))", f"{GRPO} -k each_term_has_a_column", "length_reward"),
        ("the language reward weighs 1", "config.language_reward * torch", "1.0 * torch", SHAPING, "language_reward"),
        ("English whatever is asked", "language_share(_spoken(r), config.language,", 'language_share(r.response, "en",', SHAPING, "language"),
        ("scripts whatever is asked", ", detector=config.language_detector)", ")", f"{SHAPING} -k detector", "language_detector"),
    ),
    *mutations_of(
        "rollouts/partial.py",
        ("a response gets all its tokens in one step", "replace(params, max_tokens=tokens)", "params", f"{PARTIAL} -k segments_say", "partial_rollout_tokens"),
        ("every step draws with the seeds of the first", '{"phase": "train", "step": step, "example_id"', '{"phase": "train", "step": 0, "example_id"', f"{PARTIAL} -k segments_say", "partial_rollout_tokens"),
        ("the engine does not know what has begun", '"begun": len(ids)', '"begun": 0', f"{PARTIAL} -k border", "partial_rollout_tokens"),
        ("the engine does not know what new prompts begin with", "name=example.id, common_prefix=common)", "name=example.id)", "tests/rollouts/test_partial.py -k begin_alike"),
        ("the engine does not know what the prompts of what goes on begin with", ', "common_prefix": common}', "}", "tests/rollouts/test_partial.py -k begin_alike"),
        ("a response goes on beyond its length", "request.begun + completion.num_tokens < max_tokens", "True", f"{PARTIAL} -k segments_say", "sampling_max_tokens"),
        ("a response ends with its first segment", 'completion.finish_reason == "length" and', "False and", f"{PARTIAL} -k segments_say"),
        ("responses that have ended go on", "if segments[-1].finish_reason is None:", "if True:", f"{PARTIAL} -k segments_say"),
        ("the newest policy sampled all of it", "policy_version=first.policy_version,", "policy_version=last.policy_version,", UNIT_PARTIAL),
        ("the versions of the tokens are lost", "token_versions=versions if versions[-1] != versions[0] else None,", "token_versions=None,", UNIT_PARTIAL),
        ("groups that have ended are in flight", "if not has_ended(group)\n        }", "}", UNIT_PARTIAL),
        ("a group ends with its first response", "return all(segments and", "return any(segments and", UNIT_PARTIAL),
        ("a resumed run looks one step too short back", "(max_tokens // tokens - 1)", "(max_tokens // tokens - 2)", UNIT_PARTIAL),
        ("a resumed run looks back beyond its step", "if step < before]", "]", UNIT_PARTIAL),
        ("segments are sampled again", "if stored := run.segments(step):", "if stored := []:", f"{RESUME_PARTIAL} -k between_segments"),
        ("entropies are averaged over segments", "sum(mean * count for mean, count in known) / len(tokens)", "sum(mean for mean, count in known) / len(known)", UNIT_PARTIAL),
    ),
    *mutations_of(
        "commands/grpo.py",
        ("staleness counts as a gap of the sampler", 'batch["stale"] =', "_ =", f"{PARTIAL} -k say_what", "partial_rollout_tokens"),
    ),
    Mutation("ppo: the mismatch has the tokens before the minimum", "commands/ppo.py", "min_tokens=config.sampling_min_tokens,", "", "tests/commands/test_ppo.py -k mismatch_leaves"),
    Mutation("distill: the mismatch has the tokens before the minimum", "commands/distill.py", "min_tokens=config.sampling_min_tokens,", "", "tests/replay/test_wiring.py -k mismatch_leaves"),
    Mutation("a batch of few groups counts as a whole one", "commands/grpo.py", "share=len(rows) / config.train_batch_size if", "share=1.0 if", "tests/replay/test_wiring.py -k partial", ("partial_rollout_tokens",)),
    Mutation("the share of an update is not used", "training/updates/update.py", "denominators=denominators / settings.share,", "denominators=denominators,", f"{UPDATE} -k share"),
    Mutation("the share of an update is not used for a loss per row", "training/updates/update.py", "for cut in cuts) / settings.share", "for cut in cuts)", f"{UPDATE} -k share"),
    Mutation("fresh tokens are the stale ones", "training/updates/tensors.py", "version != r.step for", "version == r.step for", f"{PARTIAL} -k say_what", ("partial_rollout_tokens",)),
    Mutation("no importance weights for partial rollouts", "config/grpo.py", "return bool(self.async_steps or self.partial_rollout_tokens)", "return bool(self.async_steps)", "tests/config/test_config.py -k importance", ("importance_correction",)),
    Mutation("a continuation may end at once", "samplers/embedded/batch.py", "barred(age + self.begun[:rows] < params.min_tokens)", "barred(age + 99 < params.min_tokens)", "tests/samplers/embedded/test_engine.py -k begun"),
    Mutation("a continuation has a minimum of its own", "samplers/embedded/batch.py", "barred(age + self.begun[:rows] < params.min_tokens)", "barred(age < params.min_tokens)", "tests/samplers/embedded/test_engine.py -k begun"),
    Mutation("a continuation's stop strings begin in it", "samplers/embedded/batch.py", "response = [*beginning, *tokens]", "response = tokens", "tests/samplers/embedded/test_engine.py -k begun"),
    Mutation("a row that moves forgets what it began with", "samplers/embedded/batch.py", "self.born, self.begun, self.most)", "self.born, self.most)", "tests/samplers/embedded/test_engine.py -k begun"),
    *mutations_of(
        "samplers/stop_strings.py",
        ("a stop string across the border is not seen", "if found is not None and found[1] - len(found[0]) < len(response_text(tokenizer, before)):", "if False:", "tests/samplers/test_stop_strings.py -k two_parts"),
        ("the minimum is of the continuation", "(*before, *completion.token_ids)[: params.min_tokens]", "completion.token_ids[: params.min_tokens]", "tests/samplers/test_stop_strings.py -k two_parts"),
        ("what follows the stop string is kept", "token_ids=completion.token_ids[:end],", "token_ids=completion.token_ids,", "tests/samplers/test_stop_strings.py -k two_parts"),
    ),
    Mutation("of servers, a stop string across the border is not seen", "samplers/parallel/servers.py", "if begun else completion", "if False else completion", "tests/samplers/parallel/test_servers.py -k has_begun"),
    Mutation("of servers, a continuation has a minimum of its own", "samplers/openai.py", "max(params.min_tokens - item.begun, 0)", "params.min_tokens", "tests/samplers/parallel/test_servers.py -k has_begun"),
    Mutation("seeds of responses that began earlier count as wrong", "runs/check.py", 'steps = table["policy_version"].to_pylist() if begun else', "steps =", f"{PARTIAL} -k segments_say"),
    Mutation("what is left of a run that was killed as it was made stays", "runs/run_dir.py", "        remove_unmade(root)\n", "", "tests/runs/test_damage.py -k as_they_were_made"),
    Mutation("a run is removed whose process has yet to take the lock", "runs/recovery.py", "> _LEFT_SECONDS", "> 0", "tests/runs/test_damage.py -k as_they_were_made"),
    Mutation("a run that was killed before it had its lock stays", "runs/recovery.py", "> _LEFT_SECONDS", "> 1e12", "tests/runs/test_damage.py -k as_they_were_made"),
    Mutation("a run that is being made is removed", "runs/recovery.py", "not is_locked(directory) and ", "", "tests/runs/test_damage.py -k as_they_were_made"),
    Mutation("a run that is given back is removed", "runs/recovery.py", " and names_a_holder()\n", "\n", "tests/runs/test_damage.py -k gives_a_directory_back"),
    Mutation("a run whose lock is not taken yet is removed", "runs/recovery.py", "st_size > 0\n", "st_size >= 0\n", "tests/runs/test_damage.py -k as_they_were_made"),
    Mutation("lost metrics at the beginning are no news", "runs/check.py", "        pending += _lost_metrics(path, metrics, metadata)\n", "", "tests/commands/store/test_check.py -k started_over"),
    Mutation("unlisted parts are adopted folder by folder", "runs/recovery.py", "listed), key=_commit_order)", "listed), key=str)", "tests/runs/test_run_dir.py -k order_of_their_commits"),
    Mutation("a step without a group that ended is an alarm", "analysis/statistics/alarms.py", "if value and step not in going_on]", "if value]", f"{PARTIAL} -k say_what"),
    Mutation("questions sampled ahead are others", "commands/sources/ahead.py", "start=place.asked)", "start=place.asked + 1)", f"{GRPO} -k lags_one_batch", ("async_steps",), "what was sampled ahead and is not asked for is dropped and sampled again: only time is lost"),
    *mutations_of(
        "training/question_order.py",
        ("questions of seed 0", "seed, order = self._seed,", "seed, order = 0,", replays("grpo-clip"), "seed"),
        ("shuffled whatever is asked (file)", 'seed=None if order == "file" else seed', "seed=seed", replays("grpo-gspo"), "question_order"),
        ("shuffled whatever is asked (prioritized)", 'if order == "prioritized":\n            drawn', "if False:\n            drawn", replays("grpo-cispo"), "question_order"),
        ("rollouts of later batches count", "if step < before", "if True", "tests/training/test_question_order.py"),
        ("no floor of priorities", ", LEAST_PRIORITY)", ", 1e-12)", "tests/training/test_question_order.py"),
        ("solved questions first", "1 - self._right[name] / self._asked[name]", "self._right[name] / self._asked[name]", replays("grpo-cispo")),
    ),
    *mutations_of(
        "training/session.py",
        ("a run is made shorter than it is", "    if done > total:", "    if False:", f"{GRPO} -k made_shorter"),
        ("a step that has begun does not count", ' + bool(cursor.get("updates_of_batch"))', "", f"{GRPO} -k made_shorter"),
        ("a resumed run computes in what suits this machine", "    if config.resume:\n        began", "    if False:\n        began", "tests/training/test_session.py -k began_with", "compute_dtype"),
        ("a run from a GPU goes on in its precision on any CPU", 'if began.get("device", "cpu") == "cpu":', "if True:", "tests/training/test_session.py -k elsewhere", "compute_dtype"),
        ("the trainer chooses a precision of its own", "replace(config, compute_dtype=inputs.compute_dtype),", "config,", "tests/training/test_session.py -k began_with", "compute_dtype"),
        ("a CPU never computes in bfloat16 by itself", 'config = replace(config, compute_dtype="bfloat16")', "pass", "tests/training/test_session.py -k large_model", "compute_dtype"),
        ("float32 that was asked for is bfloat16", '!= ("auto", "float32", "cpu")', '== ("bfloat16", "float32", "cpu")', "tests/training/test_session.py -k large_model", "compute_dtype"),
        ("vLLM samples in float32 for a trainer in bfloat16", "    if engine_kind(engine).share is None:\n        return False\n", "", "tests/training/test_session.py -k large_model", "compute_dtype"),
        ("steps of batches that vary are not planned", "if num_updates and not config.batches_vary else", "if num_updates else", f"{PARTIAL} -k say_what"),
        ("no tracker follows a training run", "trackers.start(run)", "pass", "tests/trackers/test_trackers.py -k goes_on", "track"),
        ("another project", "project=config.track_project)", 'project="")', "tests/trackers/test_trackers.py -k goes_on", "track_project"),
    ),
    *mutations_of(
        "commands/eval.py",
        ("no tracker follows an evaluation", "trackers.start(run)", "pass", "tests/trackers/test_trackers.py -k eval_is", "eval.track"),
        ("another project of evaluations", "project=config.track_project)", 'project="")', "tests/trackers/test_trackers.py -k eval_is", "eval.track_project"),
    ),
    *mutations_of(
        "trackers/rows.py",
        ("what is not complete is sent", "if row.rank < begins[-1].rank", "if row.rank <= begins[-1].rank", "tests/trackers/test_trackers.py -k complete"),
        ("the manifest is read for each row", "    @cached_property\n", "    @property\n", "tests/trackers/test_trackers.py -k same_questions"),
        ("the last batch of a failed run is sent as it is", "not in ENDED:", "not in (*ENDED, 'failed'):", "tests/trackers/test_trackers.py -k failed_waits"),
        ("updates come before evaluations", '(self.axis == "train")', '(self.axis == "eval")', "tests/trackers/test_trackers.py -k complete"),
    ),
    Mutation("a run is uploaded before its trackers have ended", "trackers/children.py", "        run.at_end(self.end)\n", "", "tests/trackers/test_trackers.py -k status_is_written"),
    Mutation("W&B is never sent what it has not received", "trackers/wandb_run.py", "Sent(self._run.starting_step - 1)", 'Recorded(info, "wandb", project=project, place=str)', "tests/trackers/test_trackers.py -k not_received"),
    Mutation("what one place has counts for all", "trackers/sent.py", "super().__init__(self._ranks.get(self._place, -1))", "super().__init__(max(self._ranks.values(), default=-1))", "tests/trackers/test_trackers.py -k each_place"),
    *mutations_of(
        "trackers/trackio_run.py",
        ("two runs of one name become one", "if found is not None and not is_own:", "if False:", "tests/trackers/test_trackers.py -k stay_apart"),
        ("what is no longer there counts as sent", "if found is None and _is_local():", "if False:", "tests/trackers/test_trackers.py -k stay_apart"),
    ),
    Mutation("a folder of --out goes on with another run", "commands/store/export.py", "        check_folder(out, info)", "        pass", "tests/trackers/test_trackers.py -k of_one_run"),
    Mutation("a table of another run stays", "trackers/csv_tables.py", "file.unlink(missing_ok=True)", "pass", "tests/trackers/test_trackers.py -k of_one_run"),
    Mutation("a folder of --out does not say whose it is", "trackers/open.py", "            atomic_write(out / OF_RUN, _identity(info).encode())", "            pass", "tests/trackers/test_trackers.py -k of_one_run"),
    Mutation("a damaged tokenizer is found when the run is there", "models/identity.py", "    _check_tokenizer(directory)\n", "", "tests/commands/test_end_to_end.py -k damaged_model"),
    Mutation("a folder of --out is not looked at again", "trackers/open.py", "            check_folder(out, info)", "            pass", "tests/trackers/test_trackers.py -k one_folder"),
    Mutation("each tracker has its own lock of a folder of --out", "trackers/open.py", 'out / ".lock"', 'out / f".{name}.lock"', "tests/trackers/test_trackers.py -k one_folder"),
    Mutation("what was sent is sent again", "trackers/sent.py", "if row.rank > self._rank]", "if True]", "tests/trackers/test_trackers.py -k goes_on"),
    Mutation("rollouts do not count in priorities", "commands/sources/sampling.py", "self.order.count(sampled)", "pass", replays("grpo-cispo"), ("question_order",)),
    Mutation("every draw is the first", "commands/sources/plain.py", "number=place.number,", "number=0,", replays("grpo-cispo"), ("question_order",)),
    Mutation("every draw of a batch with signals is the first", "commands/sources/dynamic.py", "sampling.order.draw(lacking, number=place.number,", "sampling.order.draw(lacking, number=0,", replays("grpo-masked"), ("question_order",)),
    *mutations_of(
        "commands/ei.py",
        ("five rounds whatever is asked", "steps = config.n_ei_steps", "steps = 2", replays("ei-once"), "n_ei_steps"),
        ("four questions whatever is asked", "num_questions=config.ei_batch_size", "num_questions=4", replays("ei-once"), "ei_batch_size"),
        ("four samples whatever is asked", "group_size=config.group_size", "group_size=4", replays("ei-once"), "ei.group_size"),
        ("one epoch of fine-tuning", "epochs=config.sft_epochs", "epochs=1", replays("ei-twice"), "ei.sft_epochs"),
        ("batches of 5", "batch_size=config.train_batch_size,", "batch_size=5,", replays("ei-twice"), "ei.train_batch_size"),
        ("wrong responses are experts too", "r.reward > 0.5]", "r.reward >= 0.0]", replays("ei-once")),
        ("experts are trained on once for each copy", "distinct = list({(r.prompt_ids, r.response_ids): r for r in correct}.values())", "distinct = correct + correct[:1]", replays("ei-once")),
    ),
    *mutations_of(
        "commands/distill.py",
        ("one divergence whatever is asked", "divergence=config.divergence, task", 'divergence="reverse_kl", task', replays("distill-sampled"), "divergence"),
        ("the task's reward is not used", "task_reward=config.task_reward)", "task_reward=0.0)", replays("distill-reverse"), "task_reward"),
        ("no advantages are made", "if not config.task_reward:", "if True:", replays("distill-reverse"), "task_reward"),
        ("advantages over other groups", "group_advantages(rewards_of(rollouts), group_size=config.group_size)", "group_advantages(rewards_of(rollouts), group_size=4)", replays("distill-sampled"), "distill.group_size"),
        ("four samples whatever is asked (distill)", "group_size=config.group_size,\n            credit", "group_size=4,\n            credit", replays("distill-sampled"), "distill.group_size"),
        ("16 responses whatever is asked", "num_questions=num_questions,", "num_questions=16 // config.group_size,", replays("distill-sampled"), "rollout_batch_size"),
        ("two steps whatever is asked (distill)", "num_steps=config.n_distill_steps", "num_steps=2", replays("distill-reverse"), "n_distill_steps"),
        ("a schedule of another length", "num_updates=config.n_distill_steps)", "num_updates=200)", replays("distill-sampled"), "n_distill_steps"),
        ("updates at temperature 1 (distill)", "temperature=config.sampling_temperature,\n            )", "temperature=1.0,\n            )", replays("distill-reverse"), "sampling_temperature"),
        ("the teacher at temperature 1", 'of="teacher", temperature=config.sampling_temperature', 'of="teacher", temperature=1.0', replays("distill-sampled"), "sampling_temperature"),
        ("the teacher of sampled is the student", 'of="teacher"', 'of="policy"', replays("distill-sampled")),
        ("any teacher will do", "check_teacher(model_path(config.teacher), student=model_path(config.model))", "pass", "tests/commands/test_distill.py -k another_vocabulary", "teacher"),
        ("the teacher is not recorded", 'facts = model_facts(config.teacher, fetch=not config.dry_run)', 'facts = {"name": config.teacher}', "tests/commands/test_distill.py -k another_teacher", "teacher"),
        ("any token will do", "(largest := int(batch[\"labels\"].max())) >= teacher.vocabulary_size", "(largest := int(batch[\"labels\"].max())) < 0", "tests/commands/test_distill.py -k lacks"),
    ),
    *mutations_of(
        "commands/sft.py",
        ("EOS is never appended", "append_eos=config.append_eos,\n", "append_eos=False,\n", replays("sft-text"), "append_eos"),
        ("EOS is always appended", "append_eos=config.append_eos,\n", "append_eos=True,\n", replays("sft-means"), "append_eos"),
        ("EOS after another token that ends responses", "        other_ends=other_ends,\n", "        other_ends=(),\n", "tests/commands/test_sft.py -k another_token_ended"),
        ("EOS where a chat template ends turns otherwise (sft)", "        end=end_of_turn(config),\n", "", "tests/commands/across/test_chat.py -k responses_end"),
        ("one epoch (sft)", "config.n_sft_steps or config.sft_epochs * math", "config.n_sft_steps or 1 * math", replays("sft-text"), "sft.sft_epochs"),
        ("as many updates as the epochs need", "num_updates = config.n_sft_steps or config.sft_epochs", "num_updates = config.sft_epochs", replays("sft-means"), "n_sft_steps"),
        ("batches of 4", "batch_size=config.train_batch_size, seed", "batch_size=4, seed", replays("sft-means"), "sft.train_batch_size"),
        ("traces shuffled with seed 0", "batch_size=config.train_batch_size, seed=config.seed,", "batch_size=config.train_batch_size, seed=0,", replays("sft-text"), "seed"),
        ("each epoch in the same order", "seed=config.seed, epoch=epoch)", "seed=config.seed, epoch=0)", replays("sft-text"), "seed"),
        ("one normalization (sft)", "normalization=config.length_normalization,\n", 'normalization="token_mean" if config.length_normalization == "masked_mean" else config.length_normalization,\n', replays("sft-means"), "sft.length_normalization"),
        ("masked_normalize divides by 1", "constant = config.normalize_constant if", "constant = 1.0 if", replays("sft-sums"), "sft.normalize_constant"),
        ("tokens of others are trained on", "response_masks=[masks[i] for i in rows],", "", "tests/commands/test_sft.py -k did_not_write"),
    ),
    *mutations_of(
        "training/read_traces.py",
        ("wrong traces are trained on too", "if config.correct_only:", "if False:", replays("sft-correct"), "correct_only"),
        ("every trace is chosen", "choose_examples(examples, config.num_examples, order=order)", 'choose_examples(examples, "all", order=order)', replays("sft-means"), "num_examples"),
        ("traces are chosen with another seed", "epoch_order(len(examples), seed=config.seed, epoch=-1)", "epoch_order(len(examples), seed=config.seed + 1, epoch=-1)", replays("sft-means"), "seed num_examples"),
        ("a run goes on with other ends than it began with", 'return began_with(config).get("other_ends", [])', "pass", "tests/commands/test_sft.py -k another_token_ended"),
        ("a run goes on with another end than it began with", 'return began_with(config).get("end_of_turn")', "pass", "tests/commands/across/test_chat.py -k responses_end"),
        ("a run goes on with another thinking than it began with", 'return bool(config.resume) and "thinking', 'return False and "thinking', "tests/commands/test_sft.py -k thinking_that_it"),
        ("that thinking is opened once is not recorded", "        **recorded_opening(traces),\n", "", "tests/commands/test_sft.py -k thinking_that_it"),
        ("the end of traces is not recorded", "        **recorded_end(config),\n", "", "tests/commands/across/test_chat.py -k responses_end"),
        ("a run has the splits of a dataset", 'if traces.rewards is not None and "split" in', 'if False and "split" in', "tests/commands/test_sft.py -k it_rewarded"),
        ("what a run has rewarded is graded again", "if traces.rewards is not None and chooses_by_reward(config, traces):", "if False:", "tests/commands/test_sft.py -k it_rewarded"),
        ("a run goes on with more conversations than it began with", 'return began_with(config).get("told_apart_by") if config.resume else BY_TURNS', "return BY_TURNS", "tests/commands/across/test_chat_episodes.py -k other_messages"),
        ("a run goes on with other traces than it began with", "return not config.resume or began", "return True or began", "tests/commands/test_sft.py -k it_rewarded"),
    ),
    *mutations_of(
        "commands/dpo.py",
        ("one epoch (dpo)", "epochs=config.dpo_epochs, seed", "epochs=1, seed", preferences("dpo"), "dpo.dpo_epochs"),
        ("EOS where a chat template ends turns otherwise (dpo)", ", end=end_of_turn(config))", ")", "tests/commands/across/test_chat.py -k responses_end"),
        ("pairs go on with another thinking than they began with", "opened_twice=opened_twice(config),", "", "tests/commands/test_dpo.py -k thinking_that_it"),
        ("that thinking of pairs is opened once is not recorded", " | recorded_opening(pairs)", "", "tests/commands/test_dpo.py -k thinking_that_it"),
        ("the end of pairs is not recorded", "recorded_end(config) | ", "", "tests/commands/across/test_chat.py -k responses_end"),
        ("batches of 4 pairs", "batch_size=config.train_batch_size, epochs=config.dpo_epochs, seed", "batch_size=4, epochs=config.dpo_epochs, seed", preferences("norm"), "dpo.train_batch_size"),
        ("pairs shuffled with seed 0", "seed=config.seed, number=0", "seed=0, number=0", preferences("dpo"), "seed"),
        ('the reference is not kept', "tensors=encoded.kept,", "", "tests/commands/test_dpo.py -k every_checkpoint"),
        ("pairs per question are lost", "pairs_per_question=config.pairs_per_question,", "pairs_per_question=4,", "tests/commands/test_dpo.py -k better_policy", "dpo.pairs_per_question"),
        ("bad pairs are never skipped", "skip_bad_lines=config.skip_bad_lines,", "skip_bad_lines=False,", "tests/commands/test_dpo.py -k rows_are_read", "dpo.skip_bad_lines"),
        ("a round has always four samples of a question", "group_size=config.group_size)\n        train", "group_size=4)\n        train", ON_POLICY, "dpo.group_size"),
        ("one round", "num_steps=config.n_dpo_steps", "num_steps=1", ON_POLICY, "n_dpo_steps"),
        ("pairs of cut responses", 'r.finish_reason != "length" and', "", ON_POLICY),
        ("pairs of different prompts", "groups[r.prompt].append", "groups[r.example_id].append", "tests/commands/test_dpo.py -k same_prompt"),
        ("the reference is the policy", 'of="reference", temperature=temperature', 'of="policy", temperature=temperature', ON_POLICY),
        ("options have no effect on pairs", "check_effects_on_pairs(config, field_is_shared=field_is_shared)", "pass", "tests/commands/test_dpo.py -k without_effect"),
        ('the question of a pair has the usual field', 'question_field=config.question_field,', 'question_field="",', "tests/commands/test_dpo.py -k rows_are_read", 'dpo.question_field'),
    ),
    *mutations_of(
        "commands/ppo.py",
        ("two rollout batches whatever is asked", "num_steps=config.n_ppo_steps", "num_steps=2", actor_critics("clamp"), "ppo.n_ppo_steps"),
        ("four samples whatever is asked (ppo)", "group_size=config.group_size", "group_size=4", actor_critics("shared"), "ppo.group_size"),
        ("batches of 8 (ppo)", "batch_size=config.train_batch_size,", "batch_size=8,", actor_critics("shared"), "ppo.train_batch_size"),
        ("one epoch whatever is asked (ppo)", "epochs=config.epochs_per_rollout_batch", "epochs=1", actor_critics("discounted"), "ppo.epochs_per_rollout_batch"),
        ("the temperature of updates is 1 (ppo)", "temperature=config.sampling_temperature,\n                )", "temperature=1.0,\n                )", actor_critics("kl"), "sampling_temperature"),
        ("the temperature of old scores is 1 (ppo)", "temperature = config.sampling_temperature\n", "temperature = 1.0\n", actor_critics("kl"), "sampling_temperature"),
        ("one clip range for all (ppo)", "cliprange=config.cliprange,", "cliprange=0.2,", actor_critics("shared"), "ppo.cliprange"),
        ("the value loss has weight 1", "vf_coef=config.vf_coef,", "vf_coef=1.0,", actor_critics("discounted"), "ppo.vf_coef"),
        ("values are never clipped", "vf_cliprange=config.vf_cliprange,", "vf_cliprange=0.0,", actor_critics("kl"), "ppo.vf_cliprange"),
        ("the KL penalty is in the loss, too", 'config.kl_coef if config.kl_in == "loss" else 0.0', "config.kl_coef", actor_critics("kl"), "ppo.kl_in ppo.kl_coef"),
        ("the KL penalty is never in the loss", 'config.kl_coef if config.kl_in == "loss" else 0.0', "0.0", actor_critics("kl-in-loss"), "ppo.kl_in ppo.kl_coef"),
        ("the KL penalty is in the reward, too", 'if config.kl_coef and config.kl_in == "reward":', "if config.kl_coef:", actor_critics("kl-in-loss"), "ppo.kl_in"),
        ("the KL penalty is never clamped", "clamp=config.kl_clamp)", "clamp=False)", actor_critics("clamp"), "ppo.kl_clamp"),
        ("the KL penalty is always clamped", "clamp=config.kl_clamp)", "clamp=True)", actor_critics("kl"), "ppo.kl_clamp"),
        ("the reference is the policy (ppo)", 'of="reference", ', "", actor_critics("kl"), "ppo.kl_coef"),
        ("no discount", "gamma=config.gamma,", "gamma=1.0,", actor_critics("discounted"), "ppo.gamma"),
        ("lambda is 1", "gae_lambda=config.gae_lambda", "gae_lambda=1.0", actor_critics("discounted"), "ppo.gae_lambda"),
        ("always whitened", "if config.whiten_advantages else found.advantages", "if True else found.advantages", actor_critics("kl"), "ppo.whiten_advantages"),
        ("the critic never learns alone", "critic_alone=loop.number < config.critic_warmup_steps", "critic_alone=False", actor_critics("clamp"), "ppo.critic_warmup_steps"),
        ("whitened returns", '"returns": found.returns.to', '"returns": (advantages + values).to', actor_critics("discounted")),
    ),
    *mutations_of(
        "training/session.py",
    ),
    *mutations_of(
        "training/credit/gae.py",
        ("whitened over padding, too", "    found = advantages[mask]\n", "    found = advantages.masked_fill(~mask, 0).flatten()\n    mask = torch.ones_like(mask)\n", GAE),
        ("whitened with ddof 0", "found.std(correction=1)", "found.std(correction=0)", GAE),
        ("one token is whitened", "if len(found) >= 2:", "if len(found) >= 1:", GAE),
        ("a value of padding follows the last token", "next_value = torch.where(mask[:, t], values[:, t], next_value)", "next_value = values[:, t]", GAE),
        ("the last token's own value follows it", "next_value = next_advantage = rewards.new_zeros(len(rewards))", "next_advantage = rewards.new_zeros(len(rewards))\n    next_value = values.gather(1, (mask.cumsum(1) * mask).argmax(1, keepdim=True))[:, 0]", GAE),
        ("gaps are steps", "delta + gamma * gae_lambda * next_advantage, next_advantage)", "delta + gamma * gae_lambda * next_advantage, gamma * gae_lambda * next_advantage)", GAE),
        ("lambda discounts values, too", "gamma * next_value", "gamma * gae_lambda * next_value", GAE),
        ("the reward is at the last column", "last = mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)", "last = torch.zeros_like(mask)\n    last[:, -1] = True", GAE),
        ("the KL penalty is a bonus", "of_tokens - kl_coef", "of_tokens + kl_coef", GAE),
        ("the other direction of the KL", "kl = log_probs - reference_log_probs", "kl = reference_log_probs - log_probs", GAE),
        ("explained variance of equal returns", "< SMALLEST_VARIANCE", "< 0", GAE),
    ),
    *mutations_of(
        "training/losses/value.py",
        ("the smaller of the two errors of a value", "torch.maximum(error, clipped)", "torch.minimum(error, clipped)", PPO_UPDATE),
        ("values are clipped about the return", "near = old_values + (values - old_values)", "near = returns + (values - returns)", PPO_UPDATE),
        ("values may only rise", ".clamp(-cliprange, cliprange)", ".clamp(0, cliprange)", PPO_UPDATE),
        ("values may fall without a limit", ".clamp(-cliprange, cliprange)", ".clamp(max=cliprange)", PPO_UPDATE),
        ("the whole square", "torch.maximum(error, clipped) / 2", "torch.maximum(error, clipped)", PPO_UPDATE),
        ("values outside the mask count", "tensor.masked_fill(outside, 0) for tensor", "tensor for tensor", PPO_UPDATE),
        ("the policy learns with a critic that is alone", "if critic_alone:", "if False:", PPO_UPDATE),
    ),
    *mutations_of(
        "training/losses/preference.py",
        ("the sum in place of the mean over a pair's rows", "        loss.repeat_interleave(2),", "        loss.repeat_interleave(2) * 2,", PREFERENCE),
        ("dpo_norm sums", "per_token=loss.per_token", "per_token=False", PREFERENCE),
        ("dpo is divided by the length", "per_token=loss.per_token", "per_token=True", PREFERENCE),
        ("no reference", "    if loss.with_reference:", "    if False:", PREFERENCE),
        ("the rejected response is chosen", "beta * (chosen - rejected)", "beta * (rejected - chosen)", PREFERENCE),
        ("gamma times beta", "margin - gamma)", "margin - beta * gamma)", PREFERENCE),
        ("gamma is not asked for", "margin - gamma)", "margin)", PREFERENCE),
        ("the likelihood of the rejected one", "per_token=True)[::2]", "per_token=True)[1::2]", PREFERENCE),
        ("the likelihood summed over tokens", "nll = -of_rows(inputs.log_probs, per_token=True)", "nll = -of_rows(inputs.log_probs, per_token=False)", PREFERENCE),
        ("tokens outside the responses count", "values.masked_fill(~inputs.response_mask, 0).sum(dim=1)", "values.sum(dim=1)", PREFERENCE),
        ("a margin of 0 is right", "(margin > 0)", "(margin >= 0)", PREFERENCE),
    ),
    *mutations_of(
        "commands/store/filtering/rows.py",
        ("a formatted prompt is written as a question", 'if "prompt" in row and is_prompt(dataset.question_field):', "if False:", "tests/commands/store/test_filter.py -k responses_of_a_dataset"),
        ("each tool in Parquet has the parameters of all", 'out.endswith(".parquet") and any(', "False and any(", "tests/commands/store/test_filter.py -k sft_reads"),
        ("a pair has the next response", "in enumerate(zip(items, responses, strict=True)):", "in enumerate(zip(items, responses, strict=True), 1):", "tests/commands/store/test_filter.py -k pairs"),
        ("pairs depend on the order of commits", "in sorted(members)]", "in members]", "tests/commands/store/test_filter.py -k order_of_commits"),
        ("equal forms are two rows", "if digest not in taken:", "if True:", "tests/commands/store/test_filter.py -k fused"),
        ("a form without its question", 'json.dumps([row["question"], row["response"]])', 'json.dumps([row["response"]])', "tests/commands/store/test_filter.py -k fused"),
    ),
    *mutations_of(
        "data/pairs.py",
        ("wrong before right", "(right[place % len(right)], wrong[", "(wrong[place % len(wrong)], right[", "tests/data/test_pairs.py -k different"),
        ("a failed grade is wrong", 'with_wrong = {r["response"]: r for r in rows if r["reward"] is not None and r["reward"] <= 0.5}', 'with_wrong = {r["response"]: r for r in rows if not (r["reward"] or 0) > 0.5}', "tests/data/test_pairs.py -k different"),
        ("a response is better than itself", "for response, r in with_right.items() if response not in with_wrong]", "for r in with_right.values()]", "tests/data/test_pairs.py -k seed_chooses"),
        ("as many pairs as there are", "range(min(count, len(right) * len(wrong)))", "range(len(right) * len(wrong))", "tests/commands/store/test_filter.py -k pairs", "dpo.pairs_per_question"),
        ("pairs of seed 0", "f\"pairs {seed} {rows[0]['prompt']}\"", "f\"pairs 0 {rows[0]['prompt']}\"", "tests/data/test_pairs.py -k seed"),
        ("the field of evaluation questions is that of a run's pairs", 'name, question_field = path.name, ""', "name = path.name", "tests/data/test_pairs.py -k training_rollouts"),
        ("the questions of a run's pairs are unknown", "known = {} if question is None else", "known = {} if True else", "tests/data/test_pairs.py -k warned_of"),
        ("the questions of pairs in a file are unknown", 'row.values.get("question") if formatted', '"" if formatted', "tests/data/test_pairs.py -k warned_of"),
        ("an episode that was cut off is in a pair", "if not was_cut(r) and", "if r['finish_reason'] != 'length' and", "tests/commands/store/test_filter.py -k cut_off"),
        ("the same pairs again", "(place + place // turn)", "place", "tests/data/test_pairs.py -k different"),
        ("of a run, all tokens are read to choose pairs", '"response_mask", "episode"]', '"response_mask", "episode", "response_ids"]', "tests/data/test_pairs.py -k alone_are"),
        ("a pair of a run has another response's tokens", "part.take(indices)", "part.slice(0, len(indices))", "tests/data/test_pairs.py -k at_once"),
    ),
    *mutations_of(
        "training/traces.py",
        ("sampled ids are tokenized again", "if known and _is_spelled(", "if False and _is_spelled(", "tests/commands/test_sft.py -k sampled_ids", "sft.dataset"),
    ),
    *mutations_of(
        "commands/eval.py",
        ("an evaluation with default sampling", "params=config.sampling_params,", "params=type(config)().sampling_params,", EVALUATED, "eval.sampling_temperature"),
        ("one sample per question", "num_samples=config.num_samples,\n                    grader", "num_samples=1,\n                    grader", EVALUATED, "num_samples"),
        ("an evaluation of seed 0", "seed=config.seed,", "seed=0,", EVALUATED, "eval.seed"),
        ("an evaluation of every question", "limit=config.limit,", "limit=None,", EVALUATED, "limit"),
        ("every dataset is the first", "shared.datasets[config.dataset]", "next(iter(shared.datasets.values()))", "tests/commands/test_end_to_end.py -k each_dataset", "eval.dataset"),
    ),
    *mutations_of(
        "commands/evaluation/answering.py",
        ("a budget that cuts nothing", "    if config.thinking_budget:\n", "    if False:\n", BUDGETS, "thinking_budget"),
        ("a stop sentence of ours always", "if config.stop_thinking:", "if False:", BUDGETS, "stop_thinking"),
    ),
    *mutations_of(
        "samplers/thinking_budget.py",
        ("a response's tokens within the budget are for the answer", "left = params.max_tokens - budget - len(ending)", "left = params.max_tokens", "tests/samplers/test_thinking_budget.py"),
        ("the answer repeats the thinking's draws", '(seed_of_part(requests[c.request_index].seeds[c.sample_index], "answer"),)', "(0,)", "tests/samplers/test_thinking_budget.py -k different"),
        ("a thought that has ended is ended again", "return () if END in thinking.text else", "return", "tests/samplers/test_thinking_budget.py -k unseen"),
        ("the stop sentence is the policy's", "*[False] * len(ending)", "*[True] * len(ending)", "tests/samplers/test_thinking_budget.py"),
        ("a question that may not think loses its group", "_collecting(refused, self._think(requests, params))", "self._think(requests, params)", "tests/samplers/test_thinking_budget.py -k are_refused"),
        ("a thought that may not go on loses its group", "_collecting(refused, self._sampler.sample(continued, answer))", "self._sampler.sample(continued, answer)", "tests/samplers/test_thinking_budget.py -k are_refused"),
    ),
    *mutations_of(
        "training/trainer.py",
        ("evaluations sample like training", "params=config.eval_sampling_params,", "params=config.sampling_params,", replays("grpo-on-policy"), "eval_temperature eval_max_tokens eval_top_p eval_min_tokens"),
        ("a learning rate of 1e-4 whatever is asked", "peak=self.config.learning_rate,", "peak=1e-4,", replays("ei-twice"), "learning_rate"),
        ("no warm-up", "warmup_steps=self.config.warmup_steps,", "warmup_steps=0,", replays("grpo-clip"), "warmup_steps"),
        ("a constant schedule", "schedule=self.config.lr_schedule,", 'schedule="constant",', replays("grpo-clip"), "lr_schedule"),
        ("the schedule is one update too long", "num_steps=self.num_updates,", "num_steps=self.num_updates + 1,", replays("grpo-clip"), "lr_schedule"),
        ("the schedule is one update ahead", "step,\n            peak", "step + 1,\n            peak", replays("grpo-clip"), "lr_schedule warmup_steps"),
        ("micro-batches count rows always", '"micro_batch_tokens": self._tokens}', '"micro_batch_tokens": None}', "tests/replay/test_wiring.py -k saves_memory", "micro_batch_tokens"),
        ("micro-batches of 8 rows, whatever is asked", '"micro_batch_size": self.config.micro_batch_rows,', '"micro_batch_size": 8,', f"{SPLITS} asked_for", "sft.micro_batch_size ei.micro_batch_size distill.micro_batch_size ppo.micro_batch_size dpo.micro_batch_size"),
        ("activations are kept always", "gradient_checkpointing=self.config.gradient_checkpointing,", "", "tests/replay/test_wiring.py -k saves_memory", "gradient_checkpointing"),
        ("gradients are clipped to 1", "max_grad_norm=self.config.max_grad_norm,", "max_grad_norm=1.0,", replays("grpo-on-policy"), "max_grad_norm"),
        ("skipped updates never stop a run", ">= self.config.max_skipped_updates", ">= 10**9", "tests/training/test_resume.py -k not_finite_end_the_run", "max_skipped_updates"),
        ("a run that diverged goes on", 'if why and self.config.stop_when == "diverged"', "if False", "tests/training/test_resume.py -k run_that_diverges", "stop_when"),
        ("what an interrupted run measured is forgotten", "self.divergence.add(phase, step, values)", "pass", "tests/training/test_resume.py -k run_that_diverges", "stop_when"),
        ("no time limit", "            config.time_limit_seconds,", "            float('inf'),", f"{GRPO} -k out_of_time", "time_limit"),
        ("a resumed run forgets how many updates a step has", 'most_updates=measured.get("most_updates", 0)', "most_updates=0", f"{GRPO} -k needs_time"),
        ("a resumed run forgets how long a checkpoint takes", 'seconds=measured.get("checkpoint_seconds", 0.0)', "seconds=0.0", f"{GRPO} -k needs_time"),
        ("what is saved in the end takes no time", "seconds_besides=evaluations + saving", "seconds_besides=evaluations", f"{GRPO} -k needs_time"),
        ("the last evaluation is of an earlier policy", "self.sync_weights(self.updates)  # before", "pass  # before", replays("grpo-ahead"), "async_steps"),
    ),
    *mutations_of(
        "training/parallel/replica.py",
        ("AdamW's first beta is 0.9", "betas=(config.adam_beta1,", "betas=(0.9,", replays("grpo-clip"), "adam_beta1"),
        ("AdamW's second beta is 0.95", "config.adam_beta2),", "0.95),", replays("grpo-clip"), "adam_beta2"),
        ("no adapter", "lora=trained_adapter(config),", "", replays("grpo-adapter"), "lora_rank"),
        ("an optimizer that is never offloaded", "offload=config.offload_optimizer,", "", "tests/replay/test_wiring.py -k on_the_host", "offload_optimizer"),
        ("plain AdamW always", "kind=config.optimizer,", "", "tests/replay/test_wiring.py -k kahan", "optimizer"),
        ("no weight decay", "weight_decay=config.weight_decay,", "weight_decay=0.0,", replays("grpo-on-policy"), "weight_decay"),
        ("weights in float32 whatever is asked", "dtype=config.param_dtype,", 'dtype="float32",', "tests/replay/test_wiring.py -k bfloat16", "param_dtype"),
        ("a precision that is lost", "compute_dtype=config.compute_dtype,", "", IN_BFLOAT16, "compute_dtype"),
        ("the built-in model always", "model_path(config.model),", 'model_path(""),', replays("ei-once"), "sft.model dpo.model ei.model grpo.model ppo.model distill.model"),
        ("the teacher is the student", "model_path(own.loaded_teacher)", "model_path(own.model)", replays("distill-reverse"), "teacher"),
        ("the divergence is always the reverse one", 'reverse=self.config.divergence == "reverse_kl"', "reverse=True", replays("distill-forward"), "divergence"),
        ("the teacher is in float32 always", "dtype=own.param_dtype", 'dtype="float32"', "tests/commands/test_distill.py -k precision", "param_dtype"),
        ("the teacher computes in another precision", "compute_dtype=own.compute_dtype", 'compute_dtype="auto"', "tests/commands/test_distill.py -k precision", "compute_dtype"),
        ("each trainer takes all cores", "processes=self.ranks.size", "processes=1", "tests/training/parallel/test_weight_sync.py -k divide_the_cores"),
        ("the reference is the policy itself", "self._own_reference() if", "self._trained if", replays("grpo-clip"), "kl_coef"),
        ("one learning rate for both", "critic_learning_rate=config.critic_learning_rate or None,", "critic_learning_rate=None,", actor_critics("shared"), "ppo.critic_learning_rate"),
        ("every critic has a body of its own", 'own_body=config.critic == "own"', "own_body=True", actor_critics("shared"), "ppo.critic"),
        ("no critic has a body of its own", 'own_body=config.critic == "own"', "own_body=False", actor_critics("discounted"), "ppo.critic"),
        ("the second trainer starts from other moments", "load_state(self.optimizer, state)", "pass", "tests/training/parallel/test_trainers.py -k backward", "trainers"),
        ("a follower plays no episodes", "self._sampler = played(engine, self.config, self.policy.tokenizer, pool, trains=True)", "self._sampler = engine", "tests/commands/across/test_episodes.py -k environments_of_their_own"),
        ("a follower's engine keeps its memory", "sleep_mode=sleep_mode)", "sleep_mode=False)", "tests/training/parallel/test_weight_sync.py -k follower"),
        ("a follower's engine never sleeps", "self._sampler.sleep()", "pass", "tests/training/parallel/test_weight_sync.py -k follower"),
    ),
    *mutations_of(
        "training/parallel/sharded_replica.py",
        ("copies whatever is asked", "(ShardedReplica if config.fsdp else Replica)", "Replica", "tests/training/parallel/test_sharded_replica.py -k shard", "fsdp"),
    ),
    *mutations_of(
        "runs/provenance.py",
        ("nobody looks for progress", "minutes=config.stall_minutes", "minutes=0.0", "tests/training/parallel/test_trainers.py -k is_stopped", "stall_minutes"),
    ),
    *mutations_of(
        "runs/activity.py",
        ("the file keeps an earlier phase", "        self._note()\n\n    def _note", "        pass\n\n    def _note", "tests/runs/test_activity.py"),
        ("progress is not seen", "            if self._moved != moved:", "            if False:", "tests/runs/test_activity.py"),
    ),
    *mutations_of(
        "training/parallel/sharded_replica.py",
        ("the reference is loaded beside the whole policy", "= self._own_part(self.policy)", "= self._own_part(self.policy.reference())", "tests/training/parallel/test_sharded_replica.py -k one_whole", "kl_coef"),
        ("the reference moves with the policy", "return reference", "return self._trained", "tests/training/parallel/test_sharded_replica.py -k reference_stays", "kl_coef"),
    ),
    *mutations_of(
        "models/sharded.py",
        ("the mean over the ranks", "module.set_gradient_divide_factor(1.0)", "pass", "tests/models/test_sharded.py -k every_optimizer"),
        ("norms in half precision", "MixedPrecisionPolicy(None, wide", "MixedPrecisionPolicy(multiplied_in, wide", "tests/models/test_sharded.py -k bfloat16"),
    ),
    *mutations_of(
        "training/parallel/placement.py",
        ("one trainer whatever is asked", "if trainers > 1 or samplers > 1:", "if False:", "tests/training/parallel/test_trainers.py -k same_bytes", "trainers"),
    ),
    Mutation("why trainers cannot connect is not said", "training/parallel/follow.py", 'method, ranks = "connecting", ALONE', 'method, ranks = "", ALONE', "tests/training/parallel/test_trainers.py -k cannot_connect"),
    *mutations_of(
        "training/parallel/ranks.py",
        ("gradients of one rank", "self._wait(dist.all_reduce(flat, async_op=not flat.is_cuda))", "pass", "tests/training/parallel/test_ranks.py -k every_loss"),
        ("a rank lost while they connect is a traceback", "    with losses_within():\n        dist.init_process_group(", "    if True:\n        dist.init_process_group(", "tests/training/parallel/test_ranks.py -k not_come"),
        ("no signal is heard while other trainers are waited for", "while not work.is_completed():", "while False:", "tests/training/parallel/test_trainers.py -k ctrl_c_is_heard"),
        ("the first rank does everything", "if least == self.rank:", "if self.rank == 0:", "tests/training/parallel/test_ranks.py -k dealt"),
    ),
    *mutations_of(
        "training/evaluation.py",
        ("an evaluation that is due takes no time", "due = int(evaluates or 0)", "due = 0", "tests/training/test_evaluation.py -k that_are_due"),
        ("of the evaluations of a step one takes time", "due = ahead // every - (updates - 1) // every", "due = int(ahead // every > (updates - 1) // every)", "tests/training/test_evaluation.py -k that_are_due"),
        ("a resumed run forgets how long evaluations take", "each = seconds / new if new == len(examples) else self._stored_seconds_per_question(updates)", "each = seconds / new if new == len(examples) else 0.0", "tests/training/test_evaluation.py -k knows_how_long"),
        ("no grade of an evaluation may stop a run", "        if not updates:\n", "        if False:\n", FAILING, "max_grade_errors"),
        ("no evaluation between first and last", "return updates == 0 or bool(every and updates % every == 0)", "return updates == 0", replays("grpo-on-policy"), "grpo.eval_every sft.eval_every dpo.eval_every ppo.eval_every distill.eval_every"),
        ("1,024 evaluation questions", "return min(final or self.config.eval_examples,", "return min(final or 1024,", replays("grpo-on-policy"), "eval_examples"),
        ("the last evaluation is as the others", "final = self.config.final_eval_examples if last else None", "final = None", replays("grpo-on-policy"), "final_eval_examples"),
        ("every evaluation is as the last", "final = self.config.final_eval_examples if last else None", "final = self.config.final_eval_examples", replays("grpo-on-policy"), "final_eval_examples"),
        ("evaluations of seed 0", "seed=self.config.seed,", "seed=0,", replays("sft-text"), "seed"),
    ),
    *mutations_of(
        "training/session.py",
        ("no evaluation questions but the dataset's own", "spec = config.eval_dataset or ", "spec = ", replays("ei-once"), "eval_dataset"),
        ("too few evaluation questions are read", "limit = max(config.eval_examples, config.final_eval_examples or 0)", "limit = config.eval_examples", replays("grpo-on-policy"), "final_eval_examples"),
        ("an environment's answers must fit the context before training", "of_response, names = config.must_fit,", "of_response, names = config.longest_response,", "tests/commands/across/test_chat_episodes.py -k policys_tokens_and_replays"),
        ("an environment's prompts are taken for the dataset's", "environment.begins and sampled <= scored", "False", "tests/commands/across/test_episodes.py -k always_fails"),
        ("a teacher with a short context reads long episodes", "if scored < sampled:", "if False:", "tests/commands/test_distill.py -k context_of_the_teacher"),
        ("bad lines stop the evaluation's questions", '"skip_bad_lines": config.skip_bad_lines,', '"skip_bad_lines": False,', "tests/replay/test_wiring.py -k questions_are_read", "skip_bad_lines"),
        ("fields of the evaluation's questions are guessed", '"question_field": None if named else config.question_field,', '"question_field": None,', "tests/replay/test_wiring.py -k questions_are_read", "question_field"),
    ),
    *mutations_of(
        "rollouts/inputs.py",
        ("the prompt template is r1_zero always", "template = load_prompt(config.prompt)", 'template = load_prompt("r1_zero")', "tests/replay/test_wiring.py -k questions_are_read", "prompt"),
        ("no chat template", "if not config.chat:", "if True:", "tests/commands/across/test_chat.py -k sends", "chat"),
        ("thinking as the chat template likes", "thinking=config.chat_thinking,", "", "tests/commands/across/test_chat.py -k sends", "chat_thinking"),
        ("no system message", ", system=config.chat_system, tools", ", tools", "tests/commands/across/test_chat.py -k sends", "chat_system"),
        ("the built-in dataset always", "config.dataset,\n        split", '"arithmetic",\n        split', replays("ei-once"), "dataset"),
        ("the default split always", "split=config.split,", 'split="",', "tests/replay/test_wiring.py -k questions_are_read", "split"),
        ("the question's field is guessed", "question_field=config.question_field,", 'question_field="",', "tests/replay/test_wiring.py -k questions_are_read", "question_field"),
        ("the answer's field is guessed", "answer_field=config.answer_field,", 'answer_field="",', "tests/replay/test_wiring.py -k questions_are_read", "answer_field"),
        ("bad lines stop the run", "skip_bad_lines=config.skip_bad_lines,", "skip_bad_lines=False,", "tests/replay/test_wiring.py -k questions_are_read", "skip_bad_lines"),
    ),
    *mutations_of(
        "rollouts/grading.py",
        ("the dataset's grader always", "choose_grader(config.grader,", 'choose_grader("",', "tests/replay/test_wiring.py -k grader_has_its_options", "grader"),
        ("the literal format always", "format_rule=config.format_rule,", 'format_rule="literal",', "tests/replay/test_wiring.py -k grader_has_its_options", "format_rule"),
        ("two grading processes always", "workers=workers or config.grader_workers,", "workers=2,", "tests/replay/test_wiring.py -k grader_has_its_options", "grader_workers"),
        ("five seconds for a grade always", "timeout=config.grader_timeout,", "timeout=5.0,", "tests/replay/test_wiring.py -k grader_has_its_options", "grader_timeout"),
    ),
    *mutations_of(
        "samplers/open.py",
        ("settings of an engine are lost", "if hasattr(config, f.name)]", "if False]", EVALUATED, "eval.model"),
        ("one process of an evaluation whatever is asked", "if len(devices) < 2:", "if True:", "tests/samplers/parallel/test_processes.py -k evaluation", "eval.samplers"),
        ("one engine whatever is asked", 'elif engine != "auto":', "elif False:", "tests/samplers/test_open.py", "engine"),
    ),
    *mutations_of(
        "samplers/embedded/open.py",
        ("rows at once are chosen always", "max_batch_size=settings.max_batch_size,", "max_batch_size=None,", "tests/replay/test_wiring.py -k rows_at_once", "max_batch_size"),
    ),
    *mutations_of(
        "parallel/worker.py",
        ("children of a worker outlive it", "os.killpg(self.pid, signal.SIGKILL)", "self._process.kill()", "tests/parallel/test_worker.py -k its_children"),
        ("a worker sees all devices", 'if device.startswith("cuda:"):', "if False:", "tests/parallel/test_worker.py -k its_own_device"),
    ),
    *mutations_of(
        "parallel/places.py",
        ("all go to the first node", "max(left, key=lambda name: left[name])", "nodes[0].name", f"{PLACES} most_are_left"),
        ("nodes give more than they have", "if left[node] < 1:", "if False:", f"{PLACES} too_little"),
        ("runs of a sweep are called samplers", "{\"trainer\": trainers, called: samplers}", "{\"trainer\": trainers, \"sampler\": samplers}", "tests/sweeps/test_slots.py"),
        ("the first trainer is anywhere", "if number == 0 and trainers:", "if False:", f"{PLACES} too_little"),
        ("a GPU's number elsewhere is its number here", 'return "cuda:0" if node and device.startswith("cuda") else device', "return device", f"{PLACES} own_gpu"),
    ),
    *mutations_of(
        "training/parallel/placement.py",
        ("trainers of other nodes look for the first on theirs", "return self.nodes[0].address if any(map(node_of, self.trainers)) else LOOPBACK", "return LOOPBACK", f"{PLACES} on_one_line"),
    ),
    *mutations_of(
        "parallel/child.py",
        ("a worker outlives its parent", "    die_with_parent(parent)\n", "", "tests/parallel/test_worker.py -k dies_with"),
        ("a signal to stop ends a worker", "signal.SIG_IGN", "signal.SIG_DFL", "tests/parallel/test_worker.py -k signals_to_stop"),
    ),
    *mutations_of(
        "training/parallel/weight_sync.py",
        ("async: the sampler gets current weights, not lagging ones", "with self.snapshot.loaded_into(self.policy):\n                self.sampler.load_weights(self.policy, self.snapshot.version)", "self.sampler.load_weights(self.policy, self.snapshot.version)", replays("grpo-ahead"), "async_steps"),
        ("async: the lagging snapshot is an alias", 't.detach().to("cpu", copy=True)', "t.detach().cpu()", "tests/training/parallel/test_weight_sync.py", "async_steps"),
        ("async: the policy keeps the lagging weights", "policy.load_weights(kept)", "pass", "tests/training/parallel/test_weight_sync.py", "async_steps"),
        ("async: the process computes in the precision of the weights", '"compute_dtype": config.compute_dtype', '"compute_dtype": config.param_dtype', IN_BFLOAT16, "compute_dtype"),
        ("async: the engine is the trainer's", "if config.async_steps:", "if False:", replays("grpo-ahead"), "async_steps"),
        ("one process of the engine whatever is asked", "elif config.samplers > 1:", "elif False:", "tests/samplers/parallel/test_processes.py -k evaluates_with_processes", "sft.samplers ei.samplers grpo.samplers dpo.samplers ppo.samplers distill.samplers"),
        ("a version is loaded once for all", "if self._synced != self._state(version):", "if self._synced is None:", replays("ei-once")),
    ),
    Mutation("all questions are held in memory", "data/examples.py", "list if self.traces else partial(spilled, record=Example)", "list", "tests/data/test_datasets.py -k few_are_in_memory"),
    Mutation("the keys of all questions are held in memory", "runs/storage/keys.py", "held: KeyBits = SpillingDict()", "held: KeyBits = {}", "tests/runs/test_run_dir.py -k committed_keys"),
    Mutation("a step's entries are looked for among all", "runs/manifest.py", "if phase is not None and step is not None:", "if False:", "tests/runs/test_run_dir.py tests/runs/test_grades.py -k takes"),
    Mutation("an evaluation reads the manifest again", "runs/run_dir.py", "entries = self._entries.of(ROLLOUTS, phase, step)", "entries, _ = read_manifest(self.path)", "tests/rollouts/test_collect.py -k logs_the_averages"),
    Mutation("the keys of all steps are held", "runs/storage/keys.py", "if other[:3] != group[:3]}", "}", "tests/runs/test_run_dir.py -k keys_of_one_step"),
    Mutation("a run that was moved is written on", "runs/run_dir.py", "if not self._manifest.is_in_place:", "if False:", "tests/runs/test_damage.py -k moved_while"),
    Mutation("a run that was moved writes into the one that has its place", "runs/run_dir.py", "if not self._manifest.is_in_place:", "if not os.path.lexists(self.path):", "tests/runs/test_damage.py -k that_has_its_place"),
    Mutation("a run that was moved says its end in the one that has its place", "runs/run_dir.py", "        self.assert_in_place()\n        data = metadata_bytes", "        data = metadata_bytes", "tests/runs/test_damage.py -k that_has_its_place"),
    Mutation("a run that was moved frees the space of the one that has its place", "runs/run_dir.py", "            if self._manifest.is_in_place:\n", "            if True:\n", "tests/runs/test_damage.py -k that_has_its_place"),
    Mutation("the homework of a moved search is another's", "commands/discover.py", "            run.assert_in_place()\n", "", "tests/commands/test_discover.py -k has_its_place"),
    Mutation("a checkpoint is saved in the run that has the place of a moved one", "training/saving.py", "        self._run.assert_in_place()  # a", "        # a", "tests/training/test_saving.py"),
    Mutation("metrics that may be in place are not announced", "runs/commits.py", "            if self._manifest.is_in_place:\n", "            if True:\n", "tests/runs/test_damage.py -k moved_while"),
    Mutation("lines follow an announcement that is not settled", "runs/commits.py", "        if self.unsettled:\n", "        if False:\n", "tests/runs/test_damage.py -k moved_while"),
    Mutation("part numbers are not counted on", "runs/run_dir.py", "self._next_parts[folder, slug, phase, step] = number + 1", "pass", "tests/runs/test_run_dir.py -k committed_keys"),
    Mutation("a summary does not spill", "analysis/queries/database.py", "timeout_seconds=timeout_seconds, spills=True) as database", "timeout_seconds=timeout_seconds) as database", "tests/analysis/test_summary.py -k little_memory"),
    Mutation("waiting for a busy processor ends a query", "process.py", "time.process_time if computing else time.monotonic", "time.monotonic", "tests/test_process.py -k no_waiting"),
    Mutation("what a failed call holds fills its process", "process.py", "one.__traceback__ = None", "pass", "tests/environments/test_tools.py -k earlier"),
    Mutation("what was spilled stays when a query is given up", "process.py", "shutil.rmtree(folder, ignore_errors=True)", "pass", "tests/test_process.py -k given_up"),
    *mutations_of(
        "analysis/queries/database.py",
        ("the footers of all parts are read", "differ=len(known) > 1 or None in known", "differ=True", "tests/analysis/queries/test_database.py -k asked_for"),
        ("parts of older versions have all columns", "differ=len(known) > 1 or None in known", "differ=False", "tests/analysis/queries/test_database.py -k columns"),
        ("the footers of many parts are kept", "len(parts) <= CACHED_FILES", "True", "tests/analysis/queries/test_database.py -k footers"),
        ("a small query has several threads", "rows <= ONE_THREAD", "False", "tests/analysis/queries/test_database.py -k one_thread"),
        ("metrics count as rows", " if entry.folder),", "),", "tests/analysis/queries/test_database.py -k one_thread"),
        ("parts of any one version have the columns of the current one", "known == {SCHEMA_VERSION}", "len(known) == 1", "tests/analysis/queries/test_database.py -k older_version_alone"),
        ("every query may fill the disk", '"temp_directory": spill,', '"temp_directory": "/tmp/rlvr-spill",', "tests/analysis/queries/test_database.py -k our_own"),
    ),
    *mutations_of(
        "rollouts/collect.py",
        ("a question that is refused keeps the others from being asked", "refused.append(error)", "raise", "tests/rollouts/test_collect.py -k endpoint_refuses"),
        ("an evaluation without some questions ends as if whole", "    if refused:\n", "    if False:\n", "tests/rollouts/test_collect.py -k endpoint_refuses"),
        ("all samples of a question are asked for at once", "(*range(ASKED_ROWS, num_samples, ASKED_ROWS), num_samples)", "(num_samples,)", "tests/rollouts/test_collect.py -k samples_in_slices"),
        ("advantages are not stored", "graded = list(credit(graded))", "graded = list(graded)", replays("grpo-on-policy")),
        ("the wrong policy version is stored", "policy_version=self.sampler.policy_version,", "policy_version=self.sampler.policy_version + 1,", replays("ei-once")),
        ("rows are stored in the order in which they finish", "graded = sorted(collector.graded, key=lambda r: (place[r.example_id], r.sample_index))", "graded = collector.graded", replays("grpo-clip", "grpo-no baseline")),
    ),
    *mutations_of(
        "rollouts/requests.py",
        ("the seeds of steps are the same", r"{seed}\0{phase}\0{step}\0", r"{seed}\0{phase}\0", replays("grpo-on-policy")),
        ("evaluation and training share seeds", r"{seed}\0{phase}\0{step}", r"{seed}\0{step}", replays("sft-text")),
    ),
]  # fmt: skip

MATHEMATICS = [
    *mutations_of(
        "training/losses/policy_gradient.py",
        ("the sign of the policy gradient", "return -raw_rewards_or_advantages * policy_log_probs", "return raw_rewards_or_advantages * policy_log_probs", f"{LOSSES} -k worked_by_hand"),
        ("the sides of the clip are swapped", "ratio.clamp(1 - low, 1 + high)", "ratio.clamp(1 - high, 1 + low)", f"{LOSSES} -k worked_by_hand"),
        ("clip: the larger term", "return -torch.minimum(unclipped, limited)", "return -torch.maximum(unclipped, limited)", f"{LOSSES} -k worked_by_hand"),
        ("clip: the upper range is the lower one", "high = cliprange if cliprange_high is None else cliprange_high\n    return", "high = cliprange\n    return", f"{LOSSES} -k worked_by_hand"),
        ("a gradient flows through the old policy", "_difference(policy_log_probs, old_log_probs.detach())", "_difference(policy_log_probs, old_log_probs)", f"{LOSSES} -k old_policy"),
        ("the ratio is inverted", "_difference(policy_log_probs, old_log_probs.detach())", "_difference(old_log_probs.detach(), policy_log_probs)", f"{LOSSES} -k worked_by_hand"),
        ("k3 in the wrong direction", "_difference(reference_log_probs.detach(), policy_log_probs)", "_difference(policy_log_probs, reference_log_probs.detach())", f"{LOSSES} -k kl_penalty"),
        ("k2 for k3", "return torch.expm1(difference) - difference", "return difference.square() / 2", f"{LOSSES} -k kl_penalty"),
        ("the importance weight is inverted", "_difference(trainer_log_probs, sampled_log_probs)", "_difference(sampled_log_probs, trainer_log_probs)", f"{LOSSES} -k importance"),
        ("no cap on importance weights", "return ratio.clamp(min=floor, max=cap)", "return ratio.clamp(min=floor)", f"{LOSSES} -k importance"),
        ("no floor of the ratio", "return ratio.clamp(min=floor, max=cap)", "return ratio.clamp(max=cap)", f"{WORKED} -k corrections"),
        ("masked weights above the cap stay", "(ratio < floor) | (ratio > cap)", "ratio < floor", f"{WORKED} -k corrections"),
        ("masked weights below the floor stay", "(ratio < floor) | (ratio > cap)", "ratio > cap", f"{WORKED} -k corrections"),
        ("gspo: the sum for the mean", "/ response_mask.sum(dim=1, keepdim=True).clamp(min=1)", "", f"{WORKED} -k gspo"),
        ("gspo: the mean over the padding too", "/ response_mask.sum(dim=1, keepdim=True).clamp(min=1)", "/ response_mask.shape[1]", f"{WORKED} -k gspo"),
        ("gspo: each token has its own ratio", "mean.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp() * (new - new.detach()).exp()", "(new - old_log_probs.detach()).exp()", f"{WORKED} -k gspo"),
        ("gspo: no gradient", "* (new - new.detach()).exp()", "+ 0 * new", f"{WORKED} -k gspo"),
        ("gspo: values outside the response count", "log_ratio = (new - old_log_probs).detach().masked_fill(~response_mask, 0)", "log_ratio = (new - old_log_probs).detach()", f"{WORKED} -k reads_nothing_outside"),
        ("gspo: the default range is grpo_clip's", "default=GSPO_CLIP_RANGE)\n    tensors", "default=CLIP_RANGE)\n    tensors", f"{WORKED} -k gspo"),
        ("gspo: any normalization", 'length_normalization="masked_mean",', "", f"{GRPO_OPTIONS} -k says_the_objective"),
        ("cispo: no cap", "weights = ratio.clamp(max=cap)", "weights = ratio", f"{WORKED} -k cispo"),
        ("cispo: the cap is above 1", "weights = ratio.clamp(max=cap)", "weights = ratio.clamp(max=1 + cap)", f"{WORKED} -k cispo"),
        ("cispo: tokens above the cap have no gradient", "return -weights * advantages * policy_log_probs", "return -weights * (ratio <= cap) * advantages * policy_log_probs", f"{WORKED} -k cispo"),
        ("cispo: a gradient through the ratio", "ratio = _ratio(policy_log_probs, old_log_probs).detach()", "ratio = _ratio(policy_log_probs, old_log_probs)", f"{WORKED} -k cispo"),
        ("kimi: the sign of the square", "return -(weighted - tau / 2 * drift**2)", "return -(weighted + tau / 2 * drift**2)", f"{WORKED} -k kimi"),
        ("kimi: tau for half of it", "tau / 2 * drift**2", "tau * drift**2", f"{WORKED} -k kimi"),
        ("kimi: the square of each token", "(policy_log_probs - old_log_probs.detach()).masked_fill(~response_mask, 0).sum(dim=1)", "((policy_log_probs - old_log_probs.detach()) ** 2).masked_fill(~response_mask, 0).sum(dim=1).sqrt()", f"{WORKED} -k kimi"),
        ("kimi: values outside the response count", "(advantages * policy_log_probs).masked_fill(~response_mask, 0)", "(advantages * policy_log_probs)", f"{WORKED} -k reads_nothing_outside"),
        ("kimi: rows without an advantage are skipped", "per_row=True,\n        uses_ratio=True,", "per_row=True,\n        uses_ratio=True,\n        skip_zero_advantage=True,", "tests/training/losses/test_objectives.py -k what_its_line_says"),
        ("k2 without its half", "** 2 / 2", "** 2", f"{WORKED} -k kl"),
        ("the unbiased penalty has no ratio", "return _ratio(log_probs, old_log_probs) * kl_penalty", "return kl_penalty", f"{WORKED} -k kl"),
        ("no_baseline has advantages", "raw_rewards=True,", "raw_rewards=False,", f"{replays('grpo-no baseline')}"),
    ),
    *mutations_of(
        "training/losses/normalization.py",
        ("masked_mean divides by all rows", "(tokens > 0).sum().clamp(min=1)", "len(tokens)", f"{LOSSES} -k denominators"),
        ("token_mean divides by the rows", "return tokens.sum().clamp(min=1).expand_as(tokens)", "return torch.full_like(tokens, len(tokens))", f"{LOSSES} -k denominators"),
        ("masked_normalize forgets the rows", "normalize_constant * len(tokens))", "normalize_constant)", f"{LOSSES} -k denominators"),
        ("masked sums multiply by the mask", "return tensor.masked_fill(~mask.bool(), 0).sum(dim=dim)", "return (tensor * mask.bool()).sum(dim=dim)", f"{LOSSES} -k masked"),
    ),
    *mutations_of(
        "training/credit/shaping.py",
        ("wrong responses are paid for being short", "torch.where(right, rewards, rewards.clamp(max=0))", "rewards", SHAPING),
        ("length: groups without a right response are paid", "(longest == shortest) | ~right.any(dim=1, keepdim=True)", "longest == shortest", SHAPING),
        ("length: longer is better", "0.5 - (tokens - shortest)", "0.5 - (longest - tokens)", SHAPING),
    ),
    *mutations_of(
        "graders/language.py",
        ("the answer counts", 'response.partition("</think>")[0]', "response", LANGUAGE),
        ("formulas count", "parts[::2] if len(parts) % 2 else [*parts[::2], parts[-1]]", "parts", LANGUAGE),
        ("what follows an open formula is hidden", "else [*parts[::2], parts[-1]]", "else parts[::2]", LANGUAGE),
        ("Han is written with spaces", "if script in _WITHOUT_SPACES:", "if False:", LANGUAGE),
        ("variables are words", "elif length > 1 or script not in _VARIABLES:", "else:", LANGUAGE),
        ("no words: a share of 0", "if total else 1.0", "if total else 0.0", LANGUAGE),
        ("a mark ends a word", 'if found == "mark":', "if False:", LANGUAGE),
        ("every Latin language is the one", "_identifier().classify(sentence)[0] != language", "False", LANGUAGE),
    ),
    *mutations_of(
        "training/losses/objectives.py",
        ("values outside the mask reach the loss", "inputs = _without_values_outside(inputs)", "", WORKED),
        ("the KL penalty is always k3", "kl = KL_TYPES[kl_type].function", 'kl = KL_TYPES["k3"].function', f"{WORKED} -k kl"),
        ("the loss's KL is reported", 'statistics["kl"] = kl_penalty(inputs.log_probs.detach(), inputs.reference_log_probs)', 'statistics["kl"] = kl.detach()', f"{WORKED} -k kl"),
        ("masked weights are truncated", "masked=importance_masked", "masked=False", f"{WORKED} -k masked_tokens"),
        ("the KL penalty is not in the loss", "value = value + kl_coef * (", "value = value + 0 * kl_coef * (", replays("grpo-clip")),
        ("importance weights are only measured", "value = weights * value", "pass", replays("grpo-weighted")),
        ("importance weights on the KL penalty too", "value = weights * value", "value = weights * value\n        kl_coef = kl_coef * float(weights.mean())", f"{UPDATE} -k no_cut_order_or_padding_changes_a_policy_gradient"),
    ),
    *mutations_of(
        "training/credit/advantages.py",
        ("ddof 0", "keepdim=True, correction=1) + advantage_eps", "keepdim=True, correction=0) + advantage_eps", "tests/training/credit/test_advantages.py"),
        ("eps is a floor", "/ (groups.std(dim=1, keepdim=True, correction=1) + advantage_eps)", "/ groups.std(dim=1, keepdim=True, correction=1).clamp(min=advantage_eps)", "tests/training/credit/test_advantages.py"),
        ("no mean is subtracted", "advantages = groups - groups.mean(dim=1, keepdim=True)", "advantages = groups - 0", "tests/training/credit/test_advantages.py"),
        ("the mean is the batch's", "groups.mean(dim=1, keepdim=True)", "groups.mean()", "tests/training/credit/test_advantages.py"),
        ("equal rewards keep a rounding error", "return advantages.masked_fill(~signal[:, None], 0.0).flatten()", "return advantages.flatten()", "tests/training/credit/test_advantages.py"),
        ("over the batch: ddof 0", "(advantages.std(correction=1) + advantage_eps)", "(advantages.std(correction=0) + advantage_eps)", "tests/training/credit/test_advantages.py"),
        ("over the batch: no eps", "(advantages.std(correction=1) + advantage_eps)", "advantages.std(correction=1)", "tests/training/credit/test_advantages.py"),
        ("the penalty grows from another length", "(max_tokens - buffer)\n", "max_tokens\n", "tests/training/credit/test_advantages.py"),
    ),
    *mutations_of(
        "training/updates/update.py",
        ("non-finite updates are made", "if sums.are_finite:", "if True:", f"{UPDATE} -k non_finite"),
        ("log-probabilities at temperature 1 in the update", "temperature=settings.temperature,", "temperature=1.0,", replays("grpo-on-policy")),
        ("denominators per micro-batch", "to_device(update.denominators[cut.rows], policy.device)", "loss_denominators(micro['response_mask'], normalization=settings.normalization, normalize_constant=settings.normalize_constant)", f"{UPDATE} -k no_cut_order_or_padding_changes_the_gradient"),
        ("an update in the precision of the weights", "torch.set_grad_enabled(learning), policy.autocast(), ExitStack()", "torch.set_grad_enabled(learning), ExitStack()", IN_BFLOAT16, "compute_dtype"),
        ("the policy's learning rate for the critic", "settings.learning_rate * group.get(RATE, 1.0)", "settings.learning_rate", PPO_UPDATE),
        ("the learning rate is the optimizer's own", 'group["lr"] = update.settings.learning_rate * group.get(RATE, 1.0)', "pass", replays("grpo-clip")),
    ),
    *mutations_of(
        "training/updates/scores.py",
        ("score() at temperature 1", "temperature=temperature,", "temperature=1.0,", f"{UPDATE} -k score_is_the_log_softmax"),
        ("scores in the precision of the weights", "torch.no_grad(), policy.autocast():", "torch.no_grad():", f"{UPDATE} -k own_scores", "compute_dtype"),
    ),
    *mutations_of(
        "training/updates/tensors.py",
        ("every row is as if it had no advantage", "zero = (batch[\"advantages\"] == 0)", "zero = (batch[\"advantages\"] < 9)", replays("grpo-on-policy")),
    ),
    *mutations_of(
        "training/optimizers/gradients.py",
        ("no clipping", "clip_grads_with_norm_(group, max_norm, norm)", "clip_grads_with_norm_(group, float('inf'), norm)", f"{UPDATE} -k clipped_to_the_norm"),
        ("policy and critic are clipped together", "norms = [self._norm(group) for group in self._groups]", "norms = [self._norm(self._parameters) for group in self._groups]", PPO_UPDATE),
        ("gradients of bfloat16 weights are summed in bfloat16", "if p.dtype.itemsize < 4 and", "if False and", f"{UPDATE} -k summed_in_float32", "param_dtype"),
        ("the norm that PyTorch adds up one after the other", "get_total_norm(rows)", "get_total_norm(gradients)", "tests/training/optimizers/test_gradients.py"),
        ("the norm of a shard", "self._ranks.sum([square])", "pass", "tests/models/test_sharded.py -k no_cut"),
    ),
    *mutations_of(
        "training/optimizers/offload.py",
        ("weights on the host that are rounded", "wide = torch.promote_types(parameter.dtype, torch.float32)", "wide = parameter.dtype", "tests/training/optimizers/test_offload.py -k rounded", "offload_optimizer"),
        ("weights on the host that start at 0", 'if "weight" in state:\n                state', 'if False:\n                state', "tests/training/optimizers/test_offload.py -k rounded", "offload_optimizer"),
        ("state on the device", "device=_HOST))", "device=None))", "tests/training/optimizers/test_offload.py -k on_a_cuda_device", "offload_optimizer"),
    ),
    *mutations_of(
        "training/optimizers/optimizer_state.py",
        ("state that stays where it was saved", "optimizer.state.clear()\n    for", "for", "tests/training/test_checkpoints.py -k made_no_step_yet"),
        ("the state on the host is moved to the device", "tensor.to(slots[name].device, non", "tensor.to(parameter.device, non", "tests/training/optimizers/test_offload.py -k on_a_cuda_device", "offload_optimizer"),
    ),
    *mutations_of(
        "config/shared/training.py",
        ("a pair counts as one row", "else self.units_asked * self.rows_of_unit", "else self.units_asked", f"{SPLITS} asked_for", "dpo.micro_batch_size"),
    ),
    *mutations_of(
        "training/updates/micro_batches.py",
        ("ranks wait for one with a larger micro-batch", "if tokens is not None and ranks > 1:", "if False:", "tests/training/losses/test_objectives.py -k none_waits"),
        ("ranks divide fewer micro-batches than they have", "math.ceil(len(found) / ranks) * ranks", "len(found)", "tests/training/losses/test_objectives.py -k none_waits"),
    ),
    *mutations_of(
        "training/planning/plan.py",
        ("the reference of an adapter that goes on is said to be its base", 'if goes_on else "without the adapter"', 'if not goes_on else "without the adapter"', "tests/commands/test_dpo.py -k on_from_an_adapter"),
        ("no plan has the notes that all have", "notes += shared_notes(config, samples=bool(inputs.questions))", "pass", "tests/commands/test_sft.py -k every_plan_notes"),
        ("a smaller split is said to keep more", "if memory.largest < fitting:", "if memory.largest > fitting:", "tests/training/planning/test_memory.py -k asked_for_costs"),
        ("a container has the memory of its machine", "host_note(inputs.memory, memory_limit(), dry", "host_note(inputs.memory, 2**60, dry", "tests/commands/test_grpo_options.py -k container"),
        ("a plan for another machine is refused here", "dry_run=config.dry_run)", "dry_run=False)", "tests/commands/test_grpo_options.py -k container"),
    ),
    *mutations_of(
        "commands/quickstart.py",
        ("a quickstart begins anew", "(title, left_of(command, runs))", "(title, command)", "tests/models/test_tiny.py -k goes_on_where"),
        ("a quickstart goes on with another one's runs", '[1:] != words:', '[1:] != words and False:', "tests/models/test_tiny.py -k goes_on_where"),
    ),
    Mutation("a start that failed is never made", "models/tiny.py", "with _begun(path, metadata) or RunDir", "with RunDir", "tests/models/test_tiny.py -k model_of_a_run"),
    Mutation("the command that resumes a run has two words for a path", "runs/provenance.py", "--resume {typed(run.place)}", "--resume {run.place}", "tests/runs/test_provenance.py -k command_that_it_names"),
    *mutations_of(
        "training/planning/memory.py",
        ("nothing is counted where nothing is said", "if tokens is None and (rows is None or config.packed_length):", "if tokens is None and config.packed_length:", f"{SPLITS} nothing_is_said", "micro_batch_tokens"),
        ("a CPU gets the micro-batches of a GPU", "return max(TOKENS, unit)", "return max(MOST_TOKENS, unit)", f"{SPLITS} nothing_is_said", "micro_batch_tokens"),
        ("micro-batches of rows are planned as auto's", "largest = (rows or 0) * row if tokens is None", "largest = that_fit if tokens is None", "tests/training/planning/test_memory.py -k asked_for_costs"),
        ("8-bit moments are planned as AdamW's", "return 2 + 2 * 4 / 256 +", "return 8 +", "tests/training/planning/test_memory.py -k terms_by_hand", "optimizer"),
        ("an adapter is not proposed", '    {"param_dtype": "bfloat16", "optimizer": "adamw", "lora_rank": 32},\n', "", "tests/training/planning/test_memory.py -k dry_run_says", "lora_rank"),
        ("each trainer on a CPU has samplers of its own", 'if placement.trainer != "cpu":\n        held |=', "if True:\n        held |=", "tests/training/planning/test_memory.py -k exists_once", "samplers"),
        ("what is on the host is planned on the device", "if not config.offload_optimizer:\n        held", "if True:\n        held", "tests/training/planning/test_memory.py -k not_on_the_device", "offload_optimizer"),
    ),
    *mutations_of(
        "training/optimizers/adamw_8bit.py",
        ("steps that bfloat16 rounds away are lost", "lost.copy_(wide.sub_(weight))", "pass", "tests/training/optimizers/test_adamw_8bit.py -k no_small_step", "optimizer"),
        ("moments of 32 bits always", "small = count < SMALLEST", "small = True", "tests/training/optimizers/test_adamw_8bit.py -k bitsandbytes", "optimizer"),
        ("each chunk has the first one's scales", "sizes = {key: _CHUNK // _BLOCK if key", "sizes = {key: _CHUNK if key", "tests/training/optimizers/test_adamw_8bit.py -k no_small_step", "optimizer"),
    ),
    *mutations_of(
        "models/policy.py",
        ("an adapter of rank 1 always", "Lora(options.lora_rank, options", "Lora(1, options", replays("grpo-adapter"), "lora_rank"),
        ("an adapter's alpha is 32 always", "options.lora_alpha, options.seed)", "32, options.seed)", replays("grpo-adapter"), "lora_alpha"),
        ("an adapter's seed is 0 always", "options.lora_alpha, options.seed)", "options.lora_alpha, 0)", replays("grpo-adapter"), "seed"),
    ),
    *mutations_of(
        "models/load.py",
        ("the critic's body has no adapter", "device=there, lora=lora", "device=there", "tests/commands/test_ppo.py -k adapter"),
        ("a reference in the precision of the weights", "compute_dtype=compute_dtype, device=there", "device=there", IN_BFLOAT16, "compute_dtype"),
    ),
    *mutations_of(
        "models/adapter.py",
        ("the reference has the adapter", "self._use_adapter(bool(initial))", "self._use_adapter(True)", "tests/models/test_adapter.py -k reference_is_the_base"),
        ("the reference of an adapter that goes on is its base", "self._use_adapter(bool(initial))", "self._use_adapter(False)", "tests/models/test_adapter.py -k reference_of_an_adapter"),
        ("the decode step's adapter without its scaling", "layer.lora_B[_NAME].weight.detach() * layer.scaling[_NAME]", "layer.lora_B[_NAME].weight.detach()", "tests/models/test_adapter.py -k alpha_over_rank"),
        ("what is added to transposed weights is not", "LowRank(up.T, down.T) if layer.fan_in_fan_out else ", "", "tests/models/test_adapter.py -k transposed"),
        ("a policy of half-precision weights multiplies its adapter in float32", "cast = enabled and self.compute_dtype.itemsize < 4", "cast = enabled and self.compute_dtype != self.dtype", "tests/models/test_adapter.py -k multiplied_in"),
        ("layers that are computed again cast their inputs", ", again=self._own_casts", "", "tests/models/test_adapter.py -k inputs_of_adapted", "lora_rank"),
        ("peft chooses the layers of an adapter", "target_modules=_linear_layers(model)", 'target_modules="all-linear"', "tests/models/test_adapter.py -k mixture"),
        ("an adapter is on layers that peft takes for experts", "return sorted(read_by_peft.target_modules)", "return sorted(names)", "tests/models/test_adapter.py -k mixture"),
        ("routers that are linear layers by class get an adapter", "return type(module) in (nn.Linear, Conv1D)", "return isinstance(module, (nn.Linear, Conv1D))", "tests/models/test_adapter.py -k nearly_linear"),
        ("Falcon gets no adapter", ' or type(module).__name__ == "FalconLinear"', "", "tests/models/test_adapter.py -k nearly_linear"),
        ("an adapter's files differ from process to process", "config.target_modules = sorted(config.target_modules)", "config.target_modules = list(config.target_modules)", "tests/models/test_adapter.py -k save_and_load"),
    ),
    *mutations_of(
        "training/optimizers/optimizer.py",
        ("moments of the weights' precision always", '"adamw_8bit": AdamW8bit', '"adamw_8bit": AdamWKahan', "tests/replay/test_wiring.py -k 8_bits", "optimizer"),
        ("warm-up is off by one", "return peak * (warmed + 1) / warmup_steps", "return peak * warmed / warmup_steps", "tests/training/optimizers/test_optimizer.py"),
        ("the cosine falls to 0", "(0.1 + 0.9 * 0.5 *", "(0.0 + 1.0 * 0.5 *", "tests/training/optimizers/test_optimizer.py"),
        ("the cosine starts before warm-up ends", "(step - warmup_steps) / max(num_steps", "step / max(num_steps", "tests/training/optimizers/test_optimizer.py"),
    ),
    *mutations_of(
        "models/compute/device.py",
        ("operands that are not rounded", "rounded = tensor.to(dtype)", "rounded = tensor", "tests/models/test_log_probs.py -k under_autocast", "compute_dtype"),
        ("bfloat16 on any CPU", "return multiplies and torch", "return torch", "tests/training/test_session.py -k is_faster", "compute_dtype"),
        ("bfloat16 for a small model", "parameters >= _LEAST_IN_BFLOAT16", "True", "tests/training/test_session.py -k is_faster", "compute_dtype"),
        ("bfloat16 only on CUDA", 'device.type == "cuda" and weights == torch.float32', "False", "tests/models/test_policy.py -k precision_of_matrix", "compute_dtype"),
    ),
    *mutations_of(
        "models/compute/rounded.py",
        ("gradients of one micro-batch only", "add_product(ctx.weight.grad, a, b)", "ctx.weight.grad = product(a, b)", "tests/models/compute/test_rounded.py -k nearer"),
        ("gradients that are rounded after all", "ctx.weight.grad = product(a, b)", "ctx.weight.grad = product(a, b).bfloat16().float()", "tests/models/compute/test_rounded.py -k nearer"),
        ("a rounded layer without a gradient of its bias", "rows.sum(0) if of_bias else None", "None", "tests/models/compute/test_rounded.py -k nearer"),
        ("a layer that keeps adding gradients", 'vars(layer).pop("forward", None)', "pass", "tests/models/compute/test_rounded.py -k nearer"),
    ),
    *mutations_of(
        "models/compute/fused_logits.py",
        ("blocks of columns are not weighed", "p, kept = tl.exp(x - higher), tl.exp(top - higher)", "p, kept = tl.exp(x - higher), 1.0", "tests/models/compute/test_fused_logits.py -k float64", "fused_kernels"),
        ("the entropy forgets that the maximum moved", "(weighted + (top - higher) * total)", "weighted", "tests/models/compute/test_fused_logits.py -k float64", "fused_kernels"),
        ("columns behind the last one count", 'other=-float("inf")', "other=0.0", "tests/models/compute/test_fused_logits.py -k float64", "fused_kernels"),
        ("a label of another chunk counts in this one", "torch.where(label[0], label[1][:, 0], -1)", "label[1][:, 0]", "tests/models/compute/test_fused_logits.py -k float64", "fused_kernels"),
        ("the gradient of entropies is left out", "WITH_ENTROPY=toward.entropies is not None", "WITH_ENTROPY=False", "tests/models/compute/test_fused_logits.py -k float64", "fused_kernels"),
    ),
    *mutations_of(
        "models/compute/liger.py",
        ("kernels for logits are not tried", " or _difference_of_logits(model.device)", "", "tests/models/compute/test_fused_logits.py -k something_else", "fused_kernels"),
        ("sums of products are not tried", " or _difference_of_sums(model.device)", "", "tests/models/compute/test_liger.py -k cannot_be_added", "fused_kernels"),
        ("an error of Triton stops the run", "except Exception as error:  # of Triton", "except RuntimeError as error:  # of Triton", "tests/models/compute/test_fused_logits.py -k compile", "fused_kernels"),
        ("every norm rounds its output", "if before_products else out", "if True else out", "tests/models/compute/test_liger.py -k once_for_the_products", "fused_kernels"),
        ("no norm rounds its output", "if before_products else out", "if False else out", "tests/models/compute/test_liger.py -k once_for_the_products", "fused_kernels"),
    ),
    *mutations_of(
        "models/log_probs.py",
        ("the gradient of a head is that of the first micro-batch", "                if known_grad is not None:", "                if False:", "tests/models/compute/test_liger.py -k tied", "fused_kernels"),
        ("a chunk of a head's gradient goes to the first one", "known_grad[chunk], grad.T", "known_grad[: chunk.stop - chunk.start], grad.T", "tests/models/compute/test_fused_logits.py -k added_to", "fused_kernels"),
    ),
    Mutation("a divided policy computes without fused kernels", "models/sharded.py", "self.kernels = whole.kernels", "pass", "tests/models/test_sharded.py -k fused", ("fused_kernels",)),
    *mutations_of(
        "models/policy.py",
        ("kernels are tried on another device", "with self.on_its_device():  # Triton", "with contextlib.nullcontext():  # Triton", f"{ON_CUDA} -k each_option", "fused_kernels"),
        ("gradients of weights are rounded with fused kernels too", 'unrounded_gradients=self.kernels == "liger"', "unrounded_gradients=False", "tests/models/compute/test_liger.py -k no_gradient_of_a_weight", "fused_kernels"),
        ("fused logits outside the block", "            self._fused = False", "            pass", "tests/models/compute/test_fused_logits.py -k only_within", "fused_kernels"),
    ),
    *mutations_of(
        "models/compute/prefixes.py",
        ("attention of operands that are not rounded", "as_operand(states, dtype)", "states", "tests/models/compute/test_prefixes.py -k bfloat16", "compute_dtype"),
    ),
    *mutations_of(
        "discovery/search.py",
        ("a round sees its own attempts", "[k for k in known if k.round < round]", "known", f"{DISCOVER} made_longer"),
        ("a response is not stored when it arrives", "to_do.run.commit_segments(round, [segment], phase=PHASE)", "pass", f"{DISCOVER} every_attempt"),
        ("responses that are stored are asked for again", "if segment.sample_index in slots:", "if False:", f"{DISCOVER} not_bought_again"),
        ("a target that is not looked at", "best.score >= settings.target", "False", f"{DISCOVER} climbs_by", "target"),
        ("tokens that are not counted", "sum(k.tokens for k in known) >= settings.max_tokens", "False", f"{DISCOVER} tokens_are_spent", "max_tokens"),
        ("a verifier that fails on everything is asked on", "if len(asked) > 1 and all(", "if False and all(", f"{DISCOVER} stops_after"),
        ("tokens that nobody counts", "and not all(k.counted for k in known)", "and False", f"{DISCOVER} counts_no_tokens", "max_tokens"),
        ("the last round is whole", "max(0, min(self.num_samples, left))", "self.num_samples if left > 0 else 0", f"{DISCOVER} made_longer", "max_attempts"),
        ("each slot goes through all attempts", "            standing,\n", "            standing_of(known),\n", "tests/discovery/test_strategies.py -k however_many_slots"),
        ("islands that all are one", "islands=settings.islands,", "islands=1,", f"{DISCOVER} each_strategy", "islands"),
        ("a prompt with one parent", "parents=settings.parents,", "parents=1,", f"{DISCOVER} each_strategy", "parents"),
        ("best-of-n that refines", "strategy=settings.strategy,", 'strategy="refine",', f"{DISCOVER} each_strategy", "strategy"),
    ),
    *mutations_of(
        "discovery/attempts.py",
        ("a program is run again", "if same is not None and same.reward", "if False and same.reward", f"{DISCOVER} every_attempt"),
        ("a timeout is taken over", 'CHANGING = {"timeout", "cpu", "memory"}', "CHANGING = set()", f"{DISCOVER} out_of_time"),
    ),
    *mutations_of(
        "discovery/strategies.py",
        ("the program to start from is forgotten", "[*own, *competing]", "[*own]", "tests/discovery/test_strategies.py -k competes_on_each_island"),
        ("the best eight alone are drawn", "_IN_REACH = 64", "_IN_REACH = 8", "tests/discovery/test_strategies.py -k by_their_definition"),
        ("islands without slots", "if num_samples < islands else", "if False else", "tests/discovery/test_strategies.py -k go_round_them", "islands"),
        ("any program is called the best", "and parent.score >= best else", "else", "tests/discovery/test_strategies.py -k called_the_best"),
        ("errors do not go back", "\\n{failed.error}\\n", "\\nsomething\\n", f"{DISCOVER} word_for_word"),
        ("the last of the best", "key=lambda k: (k.score, -k.number)", "key=lambda k: (-k.score, k.number)", "tests/discovery/test_strategies.py -k islands"),
    ),
    *mutations_of(
        "commands/discovering/proposer.py",
        ("prompts that no context holds", "return len(ids) <= room", "return True", f"{DISCOVER} models_context"),
        ("an endpoint's context is not known", "tokens + config.sampling_max_tokens <= context", "True", f"{DISCOVER} does_not_take"),
    ),
    *mutations_of(
        "commands/discover.py",
        ("programs have all the memory", "memory_bytes=int(config.program_memory_gb * 2**30)", "memory_bytes=2**31", f"{DISCOVER} memory", "program_memory_gb"),
        ("programs have all the time", "seconds=config.program_timeout, memory", "seconds=60.0, memory", f"{DISCOVER} out_of_time", "program_timeout"),
        ("the task's own program starts", "start=config.start,", 'start="",', f"{DISCOVER} ones_own", "start"),
        ("always eleven dimensions", "            dim=config.dim,\n            start", "            dim=11,\n            start", f"{DISCOVER} small_dimension", "dim"),
    ),
    *mutations_of(
        "samplers/parallel/processes.py",
        ("a process that is started again keeps its first weights", "if self._sent is not None:", "if False:", "tests/samplers/parallel/test_processes.py -k died_meanwhile"),
        ("a process that died is gone for good", "self._started_again[name] = self._start(name)", "pass", "tests/samplers/parallel/test_processes.py -k died_meanwhile"),
    ),
    *mutations_of(
        "training/parallel/trainers.py",
        ("what a follower fails of is said in place of this one's error", "with suppress(RlvrError):", "with suppress(KeyError):", "tests/training/parallel/test_weight_sync.py -k failed_too"),
        ("one Ctrl-C does not end the wait for trainers that sample", "if self.given_up:", "if False:", "tests/training/parallel/test_trainers.py -k ctrl_c_is_heard"),
        ("followers are not told to give memory back", '"sleep_mode": self._sleep_mode', '"sleep_mode": False', "tests/training/parallel/test_weight_sync.py -k follower"),
    ),
    Mutation("a signal does not end the wait for a teacher's server", "samplers/served_teacher.py", "with stoppable():", "with contextlib.nullcontext():", "tests/reliability/test_endpoints.py -k teachers_server"),
    Mutation("answers of a teacher's server stand in the order in which they came", "samplers/served_teacher.py", "[found[place] for place in range(len(rows))]", "[*found.values()]", "tests/samplers/test_served_teacher.py -k keeps_its_place"),
    Mutation("an evaluation's sampler is not recorded", "commands/eval.py", "with sampler_recorded(sampler(), run, reason=engine.reason):", "with ExitStack():", "tests/reliability/test_endpoints.py -k refusal_that_concerns_all"),
    Mutation("a search is made shorter than it is", "commands/discovering/start.py", "if done > config.rounds:", "if False:", f"{DISCOVER} made_longer", ("rounds",)),
    Mutation("a search's sampler is not recorded", "commands/discover.py", ", sampler_recorded(proposer, opened, reason=engine.reason):", ":", "tests/commands/test_discover.py -k model_climbs"),
    Mutation("a training run's sampler is not recorded", "training/session.py", "sampler_recorded(trainer.sampler, run, reason=inputs.engine.reason) if samples else nullcontext()", "nullcontext()", "tests/samplers/parallel/test_servers.py -k grpo_trains_on_what_servers_sample"),
    *mutations_of(
        "samplers/open.py",
        ("what a sampler learns of its endpoint is not recorded", "        raise\n    record()\n", "        raise\n", "tests/commands/test_discover.py -k model_climbs"),
        ("what a sampler learned before an error is not recorded", "        with suppress(RlvrError):  # what ended the block is said\n            record()\n", "", "tests/reliability/test_endpoints.py -k refusal_that_concerns_all"),
        ("a run that goes on loses its notes", '[*stored.get("notes", ()), *sampler.notes]', "sampler.notes", "tests/reliability/test_endpoints.py -k refusal_that_concerns_all"),
        ("a run that goes on forgets that it had no seeds", '"none" if stored.get("seeding") == "none" else sampler.seeding', "sampler.seeding", "tests/reliability/test_endpoints.py -k refusal_that_concerns_all"),
    ),
    Mutation("the space for weights that lag is not asked for", "training/trainer.py", "lagging=bool(config.async_steps)", "lagging=False", "tests/commands/test_grpo.py -k outlives", ("async_steps",)),
    Mutation("training starts over without a word", "training/trainer.py", "not notices and self._was_trained()", "False", "tests/training/test_resume.py -k between_two_updates"),
    Mutation("a new run is said to start over", "training/trainer.py", "not notices and self._was_trained()", "not notices", "tests/training/test_resume.py -k between_two_updates"),
    Mutation("a checkpoint does not say whose it is", "training/saving.py", '"run_created_at": self._run.metadata["created_at"], ', "", "tests/training/test_resume.py -k without_an_intact"),
    Mutation("a checkpoint of another run is used", "training/checkpoints.py", "and owner != own:", "and False:", "tests/training/test_checkpoints.py -k another_run_is_not"),
    Mutation("another user cannot read a checkpoint", "training/checkpoints.py", "    follow_umask(path.parent)\n", "", "tests/training/test_checkpoints.py -k a_damaged_file_is_named"),
    Mutation("another user cannot read a saved model", "models/pretrained.py", "        follow_umask(fresh)\n", "", "tests/models/test_policy.py -k inverse"),
    *mutations_of(
        "samplers/parallel/servers.py",
        ("a server whose engine died ends the run", "and server.lives():", "and True:", "tests/samplers/parallel/test_servers.py -k engine_is_gone"),
        ("a server is asked for the base, not the adapter", "self._adapter = self._sampler.model = name", "self._adapter = name", "tests/samplers/parallel/test_servers.py -k under_a_name"),
        ("servers sample at another temperature", "        check_temperature(params)\n", "", "tests/samplers/parallel/test_servers.py -k would_change"),
        ("what is probed is penalized", ', **WHOLE_DISTRIBUTION},', "},", "tests/samplers/parallel/test_servers.py -k whatever_the_models_files"),
        ("a slow response drops a server that lives", "            if not self.lives():\n                raise\n            raise OfAll", "            raise\n            raise OfAll", "tests/samplers/parallel/test_servers.py -k slow_response"),
        ("training waits ten minutes for a server's response", "timeout=settings.request_timeout,", "", "tests/samplers/parallel/test_servers.py -k training_waits", "request_timeout"),
        ("an id that only the model has ends a run", "requests, vocab_size=None)", "requests, vocab_size=len(self._tokenizer))", "tests/samplers/parallel/test_servers.py -k only_the_model_has"),
        ("a server that hangs is waited for", "if self._missed >= MISSED:", "if False:", "tests/samplers/parallel/test_servers.py -k hangs_is_left_out"),
        ("old keys and values stay on a server", '        self._ask("/reset_prefix_cache", {})\n', "", "tests/samplers/parallel/test_servers.py -k hangs_when_weights"),
        ("a server is given up at once", "self._missed = 0 if self.lives() else self._missed + 1", "self._missed += 1", "tests/samplers/parallel/test_servers.py -k takes_its_time"),
        ("another user's server cannot read the weights", "            follow_umask(Path(folder))\n", "", "tests/samplers/parallel/test_servers.py -k proven"),
        ("a full disk of weights is told without the option", ", hint=WHERE_TO_WRITE", "", "tests/samplers/parallel/test_servers.py -k no_space"),
        ("adapters stay on the servers", "            self.unload_adapter()\n", "            pass\n", "tests/samplers/parallel/test_servers.py -k under_a_name"),
        ("an evaluation of a training run's weights is not noted", "if model and (note := note_of_weights(urls)):", "if False and (note := \"\"):", "tests/samplers/parallel/test_servers.py -k noted"),
        ("servers that get weights are noted", "if model and (note :=", "if (note :=", "tests/samplers/parallel/test_servers.py -k noted"),
        ("a server that was started again is asked for the new version", "server.check_same()", "pass", "tests/samplers/parallel/test_servers.py -k after_it_got_weights"),
        ("a server that was started again between two turns is asked on", "more=more and _AfterIdle(more, self.check_same)", "more=more", "tests/samplers/parallel/test_servers.py -k between_two_turns"),
        ("a server that was started again ends a run with an adapter", "except RlvrError:  # it has been started again", "except NoAnswer:  # it has been started again", "tests/samplers/parallel/test_servers.py -k gets_the_next"),
    ),
    *mutations_of(
        "samplers/served_teacher.py",
        ("a teacher with a training run's weights is not noted", "            logger.warning(note)\n", "            pass\n", "tests/samplers/parallel/test_servers.py -k noted"),
        ("the prompt's last tokens are scored", "range(len(prompt), len(ids))", "range(len(prompt) - 1, len(ids) - 1)", "tests/samplers/test_served_teacher.py"),
        ("a teacher that is busy ends the run", "except (NoAnswer, NotNow):", "except NoAnswer:", "tests/samplers/test_served_teacher.py -k asked_again"),
    ),
    *mutations_of(
        "commands/distill.py",
        ("a teacher's server may take less than the longest response", "    if not problem:\n        return", "    if True:\n        return", "tests/commands/test_distill.py -k teachers_server"),
        ("a teacher on a server is loaded here", "if config.teacher_url else None", "if False else None", "tests/commands/test_distill.py -k teaches_the_same", "teacher_url"),
    ),
    *mutations_of(
        "samplers/parallel/several.py",
        ("who meets what all would meet is left out", " and not isinstance(item, OfAll)", "", "tests/samplers/parallel/test_several.py -k all_would_meet"),
        ("the samples of one that fails are lost", "while missing:", "if missing:", "tests/samplers/parallel/test_several.py"),
        ("what one leaves waits until the others have done all else", "if more:  # at once", "if False:  # at once", "tests/samplers/parallel/test_several.py -k while_they_work"),
        ("what comes goes to whoever has least to do", "own if own in working else min", "min", "tests/samplers/parallel/test_several.py -k who_gave_it"),
        ("what comes and is lost with a member is forgotten", "missing |= {(len(asked), j)", "missing & {(len(asked), j)", "tests/samplers/parallel/test_several.py -k of_what_comes"),
        ("what comes has the indices of a member", "request_index=i, sample_index=samples[", "request_index=completion.request_index, sample_index=samples[", "tests/samplers/parallel/test_several.py -k who_gave_it"),
        ("who refuses a question is left out", "if isinstance(item, QuestionsRefused):", "if False:", "tests/samplers/parallel/test_several.py -k one_refuses"),
        ("what was not taken counts as refused", "self.places[: self._taken]", "self.places", "tests/samplers/parallel/test_several.py -k have_been_refused"),
        ("what comes after all have refused something is forgotten", "if more and not missing else ()", "if False else ()", "tests/samplers/parallel/test_several.py -k have_been_refused"),
        ("what has come is seen when something else has", "more.notify(lambda: found.put(None))", "pass", "tests/samplers/parallel/test_several.py -k seen_at_once"),
    ),
    *mutations_of(
        "samplers/parallel/serve.py",
        ("the process's policy computes in the precision of its weights", "compute_dtype=compute_dtype, ", "", IN_BFLOAT16, "compute_dtype"),
    ),
    *mutations_of(
        "samplers/embedded/engine.py",
        ("the sampler computes in the precision of the weights", "torch.inference_mode(), policy.autocast():", "torch.inference_mode():", IN_BFLOAT16, "compute_dtype"),
    ),
    *mutations_of(
        "samplers/embedded/decode_step.py",
        ("logits are rounded to bfloat16", "self._head.weight.T).float()", "self._head.weight.T).to(self._dtype).float()", f"{ENGINE} -k sampler_and_trainer_agree", "compute_dtype"),
        ("a step that is kept has the old adapter", "place.copy_(matrix)", "pass", "tests/models/test_adapter.py -k that_is_kept"),
    ),
    *mutations_of(
        "models/tokens/tokenization.py",
        ("the mask drops the first response token", "(place[1:] >= start)", "(place[1:] > start)", "tests/models/test_log_probs.py -k collate"),
        ("the mask takes in a padding token", "(place[1:] < end)", "(place[1:] <= end)", "tests/models/test_log_probs.py -k collate"),
        ("a prompt ends with the tokenizer's EOS", "around[: around.index(_A_TEXT)]", "[i for i in around if i != _A_TEXT]", "tests/models/test_log_probs.py -k tokenizers_eos"),
        ("EOS twice", "ids if ids[-1:] in ([eos], [end]) else [*ids, end]", "[*ids, end]", "tests/models/test_log_probs.py -k eos_is_appended"),
    ),
    *mutations_of(
        "training/losses/distillation.py",
        ("the sign of the sampled advantage", "inputs.old_log_probs.detach() - inputs.teacher_log_probs", "inputs.teacher_log_probs - inputs.old_log_probs.detach()", DISTILLATION),
        ("a gradient through the advantage", "found = inputs.old_log_probs.detach() - ", "found = inputs.log_probs - ", DISTILLATION),
        ("the sampled loss has no gradient", "loss = ratio * found", "loss = found + 0 * inputs.log_probs", DISTILLATION),
        ("the task's reward is subtracted", "loss = loss - task_reward", "loss = loss + task_reward", DISTILLATION),
    ),
    *mutations_of(
        "samplers/openai_client.py",
        ("an endpoint that is busy is given up before its time", "return math.inf if trouble.passes else RETRIES", "return RETRIES", "tests/samplers/test_openai.py -k what_passes"),
        ("what is wrong for good is tried on and on", "return math.inf if trouble.passes else RETRIES", "return math.inf", "tests/samplers/test_openai.py -k wrong_for_good"),
        ("what is busy is not asked again", "again = transient and", "again = False and", "tests/samplers/test_openai.py -k transient"),
        ("an endpoint that says no is asked again", 'transient and asked != "false"', "transient", "tests/samplers/test_openai.py -k no_retry_will_help"),
        ("an hour is waited for", "if asked > LONGEST_ASKED_WAIT:", "if False:", "tests/samplers/test_openai.py -k too_long"),
        ("every wait is the first one", "FIRST_WAIT * 2.0 ** (tries - 1)", "FIRST_WAIT", "tests/samplers/test_openai.py -k waits_by_hand"),
        ("the endpoint's wait is not read", "return asked if asked > 0 else", "return", "tests/samplers/test_openai.py -k waits_by_hand"),
        ("no proxy is used", "proxy=_proxy_to(base_url),", "", "tests/samplers/test_openai.py -k proxy"),
        ("a proxy is used for all", "or proxy_bypass(parts.hostname or \"\")", "", "tests/samplers/test_openai.py -k proxy"),
        ("the time limit is not kept", "asyncio.timeout_at(deadline)", "asyncio.timeout_at(deadline + 3)", "tests/samplers/test_openai.py -k hangs_meets"),
        ("an error repeats the key", 'problem = hide_key(f"{status} {said}", self._key)', 'problem = f"{status} {said}"', "tests/samplers/test_openai.py -k key_appears_nowhere"),
    ),
    Mutation("a temperature of evaluations may be no float32", "config/shared/evaluation.py", 'check_temperature(config, "eval_temperature")', "pass", "tests/config/test_config.py -k temperature_is_0"),
    *mutations_of(
        "config/shared/endpoint.py",
        ("an option of an endpoint is taken without one", "(bool(config.base_url), \"--base-url\")", "(True, \"\")", "tests/config/test_config.py -k another_place"),
        ("an option of a model on this machine is taken without one", "check_samples_here(config, where=\"--base-url\")", "pass", "tests/config/test_config.py -k another_place"),
    ),
    Mutation("an option of the transformers engine is taken with vLLM", "config/shared/engine.py", '(config.engine != "vllm",', "(True,", "tests/config/test_config.py -k another_engine"),
    Mutation("an option of vLLM is taken with the transformers engine", "config/shared/engine.py", '(config.engine != "transformers",', "(True,", "tests/config/test_config.py -k another_engine"),
    Mutation("the precision of vLLM is taken in training without it", "config/shared/engine.py", '        of_vllm.append("dtype")', "        pass", "tests/config/test_config.py -k another_engine"),
    Mutation("an option of a model on this machine is taken with servers", "config/shared/engine.py", 'check_samples_here(config, where="--sampler-urls")', "pass", "tests/samplers/parallel/test_servers.py -k that_cannot_be"),
    *mutations_of(
        "samplers/openai_answer.py",
        ("a response that was broken off counts as whole", "if finish in _BROKEN_OFF:", "if False:", "tests/samplers/parallel/test_servers.py -k odd_completions"),
        ("a whole float is no count", "_value(usage, name, int, float)", "_value(usage, name, int)", "tests/samplers/test_openai.py -k whole_float"),
    ),
    *mutations_of(
        "samplers/openai.py",
        ("a question that is refused has no name", "if request.name else f\"Prompt {i}\"", "if False else f\"Prompt {i}\"", "tests/samplers/test_openai.py -k yielded_before"),
        ("an endpoint that refuses all is asked on", "if not skipped and all(", "if all(", "tests/samplers/test_openai.py -k nothing_ever"),
        ("a refusal of all is taken for one of a question", "and not each.concerns_all for", "for", "tests/samplers/test_openai.py -k token_ids_of_a_request"),
        ("log-probabilities that are not asked for are not noted", "if not self._gets_logprobs(params):", "if False:", "tests/samplers/test_openai.py -k distribution_sampled_from"),
        ("an endpoint that heeds no stop strings is asked on", "            if ignores_stop:\n", "            if False:\n", "tests/samplers/test_openai.py -k heed"),
        ("a stop string within the minimum must end a response", "return True if protected or not least else None", "return True", "tests/samplers/test_openai.py -k heed"),
        ("the answer that was asked for without a minimum is kept", "doubtful or answer, None, params", "answer, None, params", "tests/samplers/test_openai.py -k heed"),
        ("what comes is seen when something has been answered", "more.notify(partial(outbox.put, _Word.MORE))", "pass", "tests/samplers/test_openai.py -k requests_that_come"),
        ("what comes has the indices of the first", "self._items(joining, first=number)", "self._items(joining)", "tests/samplers/test_openai.py -k requests_that_come"),
        ("the call ends at the last answer", "if more and not ended:", "if more and open_items:", "tests/samplers/test_openai.py -k fails_is_said"),
        ("what comes after a failure of all is requested", "                if stopped:\n", "                if False:\n", "tests/samplers/test_openai.py -k concerns_all_what_comes"),
        ("an endpoint is asked 32 things at a time", "max_concurrency=settings.endpoint_concurrency,", "", "tests/reliability/test_endpoints.py -k so_many_requests"),
        ("a model that gives no logprobs is of no use", "if 400 <= refusal.status < 500 else", "if refusal.status in (400, 422) else", "tests/samplers/test_openai.py -k neither_logprobs"),
        ("a model that takes no stop strings is of no use", '(OPTIONAL_FIELDS.keys() | {"stop"})', "OPTIONAL_FIELDS.keys()", "tests/samplers/test_openai.py -k neither_logprobs"),
        ("a model's own top_k applies", "            **(self._whole or {}),\n", "", "tests/samplers/test_openai.py -k defaults"),
        ("every endpoint is asked for what OpenAI refuses", "if self._fills_in() else {}", "", "tests/samplers/test_openai.py -k defaults"),
        ("the thinking is lost", "    if answer.thinking:\n        assert", "    if False:\n        assert", "tests/samplers/test_openai.py -k thinking"),
        ("a thinking without an end is closed", "text if answer.text else None)", "text)", "tests/samplers/test_openai.py -k thinking"),
        ("ids that spell another text are kept", "logprobs, token_ids = (), ()  # they", "pass  # they", "tests/samplers/test_openai.py -k thinking"),
    ),
    Mutation("an environment's prompts are the dataset's", "rollouts/collect.py", "completion.prompt not in (None, request.prompt) if", "False if", "tests/commands/across/test_episodes.py -k tells_no_question"),
    Mutation("an environment's prompt is a question", "data/prompts.py", 'return None if row["own_prompt"] else', "return", "tests/commands/across/test_episodes.py -k tells_no_question"),
    *mutations_of(
        "analysis/queries/selection.py",
        ("a question's other prompt does not count", "counts[question.same][1] += question.right", "counts[question.same][1] = question.right", "tests/commands/store/test_filter.py -k two_prompts"),
        ("what was right with another prompt is wrong", "of in matches, right=of in right)", "of in matches, right=key in {i.question for i in matching if i.right})", "tests/commands/store/test_filter.py -k two_prompts"),
        ("the first duplicate stays, whatever is asked for", "key=lambda i: not s.takes(i, questions[i.question])", "key=lambda i: False", "tests/commands/store/test_filter.py -k duplicates_one"),
        ("a response is paired with its duplicate", "stay = {item.key for same, item in one.items() if same not in both_ways}", "stay = {item.key for item in one.values()}", "tests/commands/store/test_filter.py -k different_truths"),
        ("of duplicates one without a grade hides one with it", "item.graded or not self.for_pairs", "True", "tests/commands/store/test_filter.py -k different_truths"),
        ("the copy of a question that is too hard stays alone", "(not self.by_difficulty or self.is_as_hard(question))", "True", "tests/commands/store/test_filter.py -k duplicates_one"),
        ("each prompt has responses of its own", "groups[questions[item.question].identity]", "groups[item.question]", "tests/commands/store/test_filter.py -k two_prompts"),
        ("different truths are one question", "md5(concat(prompt, md5(ground_truth)))", "md5(prompt)", "tests/commands/store/test_filter.py -k different_truths"),
        ("the answer's code counts", 'thinking = response.partition("</think>")[0]', "thinking = response", "tests/commands/store/test_filter.py -k thinking"),
        ("some of another language is allowed always", "language_share(response, self.language) < self.min_share", "language_share(response, self.language) < 0.8", "tests/commands/store/test_filter.py -k thinking"),
        ("filter writes an environment's prompts as questions", "of = StoredPrompts() if own else prompts[run_id]", "of = prompts[run_id]", "tests/commands/store/test_filter.py -k prompts_of_an_environment"),
        ("prompts that were drawn are questions in older runs", "count(episode) > 0 AND count(*)", "false AND count(*)", "tests/commands/store/test_filter.py -k prompts_of_an_environment"),
        ("filter writes episodes that were cut off", "coalesce(episode.ended_by NOT IN {CUT_OFF}, true)", "true", "tests/commands/store/test_filter.py -k cut_off"),
        ("lines are paragraphs", 're.compile(r"\\n\\s*\\n")', 're.compile(r"\\n")', "tests/commands/store/test_filter.py -k thinking"),
    ),
    *mutations_of(
        "models/divergence.py",
        ("the other divergence", "            if not reverse:", "            if reverse:", "tests/models/test_divergence.py -k worked"),
        ("the other gradient", "if reverse else p.exp() - q.exp()", "if not reverse else p.exp() - q.exp()", "tests/models/test_divergence.py -k worked"),
        ("chunks without their shares", "(within + log_here[0] - log_here[1])", "within", "tests/models/test_divergence.py -k chunk_size"),
        ("the gradient forgets the temperature (divergence)", "grad_divergence / temperature", "grad_divergence", "tests/models/test_divergence.py -k chunk_size"),
        ("the gradient forgets the divergence", "(p - q - divergence[:, None])", "(p - q)", "tests/models/test_divergence.py -k worked"),
        ("padding rows of an embedding count", "size = min(own.size, self.source.size)", "size = own.size", "tests/models/test_divergence.py -k chunk_size"),
        ("tokenizers of the same size are the same", "if own.get_vocab() != others.get_vocab():", "if len(own.get_vocab()) != len(others.get_vocab()):", "tests/models/test_divergence.py -k same_size"),
        ("any end of a response will do", "if ends != of_teacher:", "if False:", "tests/models/test_divergence.py -k another_end"),
    ),
    *mutations_of(
        "models/log_probs.py",
        ("the backward pass forgets the temperature", "grad_log_probs / temperature", "grad_log_probs", "tests/models/test_log_probs.py -k chunked"),
        ("entropy without the shares of the chunks", "log_before.exp() * (entropy - log_before)", "log_before.exp() * entropy", "tests/models/test_log_probs.py -k no_chunk_size"),
    ),
    *mutations_of(
        "samplers/embedded/draw.py",
        ("the nucleus drops the token that crosses top_p", "before < top_p)", "before + ordered < top_p)", f"{DRAW} -k nucleus"),
        ("log-probabilities of a nucleus are not normalized", "logprobs = logprobs - p.sum(-1, dtype=torch.float64).log().float()", "pass", f"{DRAW} -k draw_by_hand"),
        ("log-probabilities with the barred tokens", "logp = logits.log_softmax(-1)\n        p = logp.exp()", "p = logits.log_softmax(-1).exp()", replays("grpo-on-policy")),
        ("greedy at the nucleus", "if temperature == 0:", "if temperature < 0:", replays("grpo-on-policy")),
    ),
    *mutations_of(
        "samplers/embedded/batch.py",
        ("EOS is barred one token too long", "self.begun[:rows] < params.min_tokens)", "self.begun[:rows] <= params.min_tokens)", replays("grpo-no baseline")),
        ("responses are one token short", "self.most[:rows] - age - 1)", "self.most[:rows] - age - 2)", f"{ENGINE} -k finish_reasons"),
        ("the draw does not depend on the position", "uniforms(self.seed[:rows], age)", "uniforms(self.seed[:rows], age * 0)", f"{ENGINE} -k inverse_cdf_of_the_seeds"),
    ),
    *mutations_of(
        "data/order.py",
        ("the same order in every epoch", 'f"{seed}/{epoch}/{index}"', 'f"{seed}/{index}"', "tests/data/test_order.py"),
        ("a pass over a batch puts the dataset's order out", "    order = epoch_order(len(examples)", "    order = _order_of_dataset(len(examples)", "tests/data/test_order.py -k not_made_again"),
        ("the last batch is dropped", "range(0, len(order), batch_size)", "range(0, len(order) - batch_size + 1, batch_size)", "tests/data/test_order.py"),
        ("the same shuffle in each epoch of a rollout batch", "epoch=number * epochs + epoch)", "epoch=number * epochs)", replays("grpo-clip")),
    ),
    *mutations_of(
        "analysis/statistics/estimators.py",
        ("as many of many samples are left after each", "np.maximum(left - k, 0) / left)", "np.maximum(left - k, 0) / n)", "tests/analysis/statistics/test_estimators.py -k best_at_k"),
        ("as many samples are left after each", "max(n - k - i, 0) / (n - i) for", "max(n - k - i, 0) / n for", "tests/analysis/statistics/test_estimators.py -k best_at_k"),
        ("pass@k is off by one", "range(n - c + 1, n + 1)", "range(n - c + 2, n + 2)", "tests/analysis/statistics/test_estimators.py -k pass_at_k"),
        ("a drawn majority of ties", "(unbeaten / (1 + (rivals == votes[:, None]).sum(axis=1))).sum()", "unbeaten.sum()", "tests/analysis/statistics/test_estimators.py -k drawn"),
        ("a majority of ties", "(draws * (1 + ties))", "draws", "tests/analysis/statistics/test_estimators.py -k majority"),
        ("McNemar's test has one side", "return min(1.0, 2 * math.fsum(", "return min(1.0, math.fsum(", "tests/analysis/statistics/test_estimators.py -k mcnemar"),
    ),
    *mutations_of(
        "analysis/pictures/figures.py",
        ("a missing value takes its neighbors away", "around = [v for v in values[i - reach : i + reach + 1] if math.isfinite(v)]", "around = values[i - reach : i + reach + 1]", "tests/analysis/pictures/test_figures.py -k neighbors_of_a_missing"),
        ("updates whatever --x says", 'value, asked = row[self.columns.x], self.wishes.x', 'value, asked = row[self.columns.x], "updates"', "tests/analysis/pictures/test_figures.py -k test_x"),
        ("seeds are not averaged over the same steps", "if len({p.arm for p in here}) == 1 and len(asked) > 1 and len(here) < len(asked):", "if False:", "tests/analysis/pictures/test_figures.py -k mean_of_its_seeds"),
        ("a kind that a seed lacks is no bar", "self.rows += [row for arm in arms for row in self._absent(arm)]", "pass", "tests/analysis/pictures/test_figures.py -k lacks_counts_as_0"),
        ("a panel a run, also of an arm", 'self.firsts.get(row[c], row[c]) if c == "run_id" else row[c]', "row[c]", "tests/analysis/pictures/test_figures.py -k a_panel_an_arm"),
        ("a line of some seeds ends the picture", "if self._merged(of_line, column, smooth=1):", "if True:", "tests/analysis/pictures/test_figures.py -k only_some_seeds"),
        ("an arm has the interval of one seed", "if len(here) == 1 else seed_interval([p.y for p in here])", "", "tests/analysis/pictures/test_figures.py -k mean_of_its_seeds"),
        ("runs in the order of the alphabet", "ordered = self._labels_of_runs(series) if self.by_run else tuple(series)", "ordered = tuple(sorted(series))", "tests/analysis/pictures/test_figures.py -k order_asked"),
        ("what is no run has no label", "tuple(dict.fromkeys((*arms, *series)))", "tuple(arms)", "tests/analysis/pictures/test_figures.py -k behind_the_runs"),
        ("what is no run is of the first arm", "else self.arm_of.get(run)", "else self.arm_of.get(run, 0)", "tests/analysis/pictures/test_figures.py -k of_no_run"),
        ("what has an interval is smoothed", "is_whole = self.columns.bars or not joined or (self._has_interval(points, column) and not are_two)", "is_whole = not joined", "tests/analysis/pictures/test_figures.py -k not_smoothed"),
        ("--log has no effect", "axis in wishes.log or axis in self.plot.get", "axis in self.plot.get", "tests/commands/store/test_analyze_pictures.py -k logarithmic"),
    ),
    *mutations_of(
        "analysis/statistics/progress.py",
        ("rounds of seeds are told apart by their updates", "return (number, step - starts[number]) if number >= 0 else (step, 0)", "return step, 0", "tests/analysis/pictures/test_figures.py -k in_common"),
        ("a run that ended early has other rounds", "fewest -= 1", "pass", "tests/analysis/pictures/test_figures.py -k rounds_pair"),
    ),
    *mutations_of(
        "training/divergence.py",
        ("one bad evaluation is a divergence", ">= EVALUATIONS", ">= 1", "tests/training/test_divergence.py", "stop_when"),
        ("low rewards by chance are a divergence", "max(best / 2, ERRORS * noise)", "best / 2", "tests/training/test_divergence.py", "stop_when"),
        ("a spike is a divergence", "self._rows.get(name, 0) + 1 if passed else 0", "self._rows.get(name, 0) + passed", "tests/training/test_divergence.py", "stop_when"),
        ("what was read is read again", "if updates >= self._read and kept:", "if kept:", "tests/training/test_divergence.py", "stop_when"),
        ("norms of 0 count", "if 0 < norm < math.inf:", "if norm < math.inf:", "tests/training/test_divergence.py", "stop_when"),
    ),
    *mutations_of(
        "analysis/statistics/sweep_table.py",
        ("each arm counts alone", "holm([comparison.p for comparison in found.values()])", "[comparison.p for comparison in found.values()]", "tests/analysis/statistics/test_sweep_table.py"),
        ("decided before the correction", "found.decided and p_holm < 0.05", "found.decided", "tests/analysis/statistics/test_sweep_table.py"),
        ("worse arms are better", '"better" if c.difference > 0 else "worse"', '"better"', "tests/analysis/statistics/test_sweep_table.py"),
        ("what limits a comparison of arms is not said", "*notes_of(found, baseline=baseline, command=command)] if", "] if", "tests/commands/test_results.py -k limits"),
        ("evaluations are told of training with another seed", 'if command != "eval" or note', "if True or note", "tests/commands/test_results.py -k limits"),
        ("arms without a baseline are passed over in silence", "    if baseline and baseline not in arms:", "    if baseline not in arms:\n        return {}, []\n    if False:", "tests/commands/test_results.py -k limits"),
        ("an accuracy has an interval where all rewards are 0 or 1", ", of_any_reward=True)", ")", "tests/analysis/statistics/test_sweep_table.py -k in_common"),
        ("an evaluation took no tokens", " OR command = 'eval'", "", "tests/analysis/statistics/test_sweep_table.py -k tokens"),
        ("the best accuracy has the interval of the last one", "intervals.get((number, at[0]), (None, None))", "intervals.get((number, None), (None, None))", "tests/analysis/statistics/test_sweep_table.py -k updates_differ"),
        ("a divergence is passed over", 'if info.metadata["status"] == "diverged"]', "if False]", "tests/analysis/statistics/test_sweep_table.py"),
    ),
    *mutations_of(
        "analysis/statistics/objective.py",
        ("the loser is told as the winner", "least, most = changed[0], changed[-1]", "most, least = changed[0], changed[-1]", "tests/analysis/statistics/test_objective.py"),
    ),
    Mutation("commands of a sweep are cut", "sweeps/printed.py", "output=output, whole=True)", "output=output)", "tests/commands/test_sweep.py -k printed_instead"),
    Mutation("what differs is cut in a pipe", "commands/store/runs.py", "output=config.format, whole=True)", "output=config.format)", "tests/commands/store/test_runs.py -k rarest_values"),
    *mutations_of(
        "sweeps/arms.py",
        ("--vary adds no option", 'content["grid"][option] = values', "pass", "tests/sweeps/test_experiment.py -k command_line_changes"),
        ("--vary loses the baseline", 'if name.startswith(f"{named}_")', "if False", "tests/sweeps/test_experiment.py -k baseline_stays"),
        ("--vary takes another arm for the baseline", " and not name.startswith(tuple(longer))", "", "tests/sweeps/test_experiment.py -k begins_with"),
    ),
    *mutations_of(
        "sweeps/experiment.py",
        ("arms have options without effect", "del given[error.option]", "return given", "tests/sweeps/test_experiment.py -k do_without"),
        ("options of a stage come before the command line", "if key not in given", "if True", "tests/sweeps/test_experiment.py -k next_stage"),
        ("a stage is no longer than the one before", "(arm, stage.longer * count)", "(arm, count)", "tests/sweeps/test_experiment.py -k next_stage"),
        ("arms with steps of their own stay short", "if steps in arm or count != shared else arm", "if False else arm", "tests/sweeps/test_experiment.py -k of_their_own_grow"),
        ("the worst arms go on", "key=lambda name: -reached[name]", "key=lambda name: reached[name]", "tests/sweeps/test_experiment.py -k next_stage"),
        ("the baseline stays behind", " or name == experiment.baseline]", "]", "tests/sweeps/test_experiment.py -k next_stage"),
        ("a stage sets what varies", "    _check_stage_options(found, where=str(path))\n", "", "tests/sweeps/test_experiment.py -k cannot_vary"),
        ("the experiment comes before a --config file", "if option not in in_file} | given", "} | given", "tests/sweeps/test_experiment.py -k config_file"),
        ("a stage comes before --vary", "given={*in_file, *given, *varied}", "given={*in_file, *given}", "tests/sweeps/test_experiment.py -k can_vary"),
        ("a stage comes before a --config file", "given={*in_file, *given, *varied}", "given={*given, *varied}", "tests/sweeps/test_experiment.py -k config_file"),
        ("--seeds are lost", "chosen = list(seeds) or content", "chosen = content", "tests/sweeps/test_experiment.py -k command_line_changes"),
        ("all seeds of an arm come first", "for seed in experiment.seeds for arm in arms]\n", "for arm in arms for seed in experiment.seeds]\n", "tests/sweeps/test_experiment.py -k all_arms_of_the_first_seed"),
        ("a run of a sweep is several runs", "            _check_makes_one_run(config)\n", "", "tests/sweeps/test_experiment.py -k several_runs"),
        ("options of the command line are lost", "if option not in in_file} | given", "if option not in in_file}", "tests/sweeps/test_experiment.py -k command_line_changes"),
    ),
    Mutation("a time limit does not end what is probed", "sweeps/printed.py", "seconds, ends = min(pace.run, limit)", "seconds, ends = pace.run", "tests/sweeps/test_probe.py -k few_updates"),
    *mutations_of(
        "sweeps/probe.py",
        ("evaluations are free", "+ (self.evaluations - 1 + self.last) * self.evaluation\n", "\n", "tests/sweeps/test_probe.py -k by_hand"),
        ("what is probed is sent to a tracker", ', "track": ()}', "}", "tests/sweeps/test_probe.py -k sees_its_gpu"),
        ("a probe sees all GPUs", '{"CUDA_VISIBLE_DEVICES": visible} if visible', "{} if visible", "tests/sweeps/test_probe.py -k sees_its_gpu"),
        ("a run of few updates is never measured", "1 if is_whole else UPDATES", "UPDATES", "tests/sweeps/test_probe.py -k few_updates"),
        ("an update is a step", "if stepped else 1\n    planned", "if False else 1\n    planned", "tests/sweeps/test_probe.py -k by_hand"),
        ("--eval-every counts steps where batches vary", 'planned.get("updates", steps)', "steps", "tests/sweeps/test_probe.py -k by_hand"),
    ),
    *mutations_of(
        "training/planning/nodes.py",
        ("a node may have another PyTorch", "if name in MUST_FIT else", "if name == \"rlvr-cli\" else", NODES),
        ("a node may have another model", "if facts[\"model\"] != here[\"model\"] and", "if False and", NODES),
        ("a node that cannot write is fine", "errors[\"runs directory\"] = error.problem, error.hint", "pass", NODES),
        ("nobody looks for the same file system", "if not facts[\"runs_seen\"] and", "if False and", NODES),
    ),
    Mutation("samplers divide the cores of the machine", "parallel/start.py", "return available_cores()", "return __import__('os').cpu_count() or 1", "tests/parallel/test_start.py"),
    *mutations_of(
        "sweeps/slots.py",
        ("all runs of a sweep see all GPUs", "[Slot(visible=device) for device in devices] or ", "", "tests/sweeps/test_slots.py"),
        ("a run of several processes has one place", "if _wants_several(config) or config.cluster:", "if config.cluster:", "tests/sweeps/test_slots.py"),
        ("runs here share a server", "    check_servers(configs, at_once=len(devices) or jobs)\n", "", "tests/sweeps/test_slots.py -k in_turn"),
        ("runs on a cluster share a server", "    check_servers(configs, at_once=jobs)\n", "", "tests/sweeps/test_slots.py -k in_turn"),
        ("a run of several trainers gets one GPU", 'if c.device != "cpu" and _needs_several_gpus(c)', "if False", "tests/sweeps/test_slots.py -k one_each"),
    ),
    Mutation("an array job starts all its runs at once", "sweeps/emitted.py", "if at_once > 1 else ''", "if False else ''", "tests/commands/test_sweep.py -k printed_instead"),
    *mutations_of(
        "sweeps/emitted.py",
        ("tasks of SLURM share a server", "check_servers(left, at_once=at_once if at_once > 1 else len(left)", "(lambda *_, **__: None)(left, at_once=0", "tests/commands/test_sweep.py -k give_no_server"),
        ("an array job of any number makes one run at a time", "else len(left)", "else 1", "tests/commands/test_sweep.py -k give_no_server"),
        ("tasks that have ended share a server", " if status_of(folder / job.name, job) not in ENDED]", "]", "tests/commands/test_sweep.py -k give_no_server"),
    ),
    Mutation("a task of an array job has one GPU", "sweeps/emitted.py", "max(gpus_of(job.config) for job in jobs)", "1", "tests/commands/test_sweep.py -k printed_instead"),
    *mutations_of(
        "sweeps/stage.py",
        ("arms that cannot be compared are trained", "if compares and all(self.status_of(job) ==", "if False and all(self.status_of(job) ==", "tests/sweeps/test_stage.py"),
        ("a sweep is put into a run", "if (folder / RUN_FILE).exists():", "if False:", "tests/sweeps/test_stage.py -k is_a_run"),
        ("a sweep that has begun without evaluations is lost", "if compares and all(self.status_of(job) ==", "if True or all(self.status_of(job) ==", "tests/sweeps/test_stage.py"),
    ),
    Mutation("compare of two arms does not say what limits it", "commands/store/analyzing/compared.py", '[of_two.verdict, *notes_of({"B": of_two}, baseline="A")]', "[of_two.verdict]", "tests/commands/store/test_analyze.py -k left_out"),
    Mutation("the page of two runs does not say what limits them", "analysis/live/pages.py", ', *notes_of({"B": found}, baseline="A"))', ",)", "tests/analysis/live/test_server.py -k limits_a"),
    Mutation("evaluations of a sweep are told of training", "commands/sweep.py", ", command=experiment.command), *others", "), *others", "tests/commands/test_results.py -k limits"),
    Mutation("runs that have ended use servers", "commands/sweep.py", "for job in sweep.jobs if sweep.status_of(job) not in ENDED]", "for job in sweep.jobs]", "tests/commands/test_sweep.py -k give_no_server"),
    Mutation("the best of arms without evaluations are the baseline", "commands/sweep.py", "        sweep.check_evaluated()\n", "", "tests/sweeps/test_stage.py"),
    Mutation("runs without evaluations have no report", "analysis/statistics/sweep_table.py", "        except RlvrError as error:\n            others", "        except KeyError as error:\n            others", "tests/commands/test_results.py -k never_evaluated"),
    *mutations_of(
        "sweeps/continued.py",
        ("other options go on with other runs", "            raise _other(where, flag(name), before, now)\n", "            continue\n", "tests/sweeps/test_continued.py -k another_run"),
        ("a schedule is made longer", 'if schedule not in (None, "constant"):', "if False:", "tests/sweeps/test_continued.py -k schedule_of"),
        ("a longer run is cut", "now < before:", "False:", "tests/sweeps/test_schedule.py -k longer"),
        ("defaults of another version are other options", "return {before, config.sources.get(name)} <= taken", "return False", "tests/sweeps/test_continued.py -k default_of_another"),
        ("a model that was moved is another one", "return known is not None and _sha256(model) == known", "return False", "tests/sweeps/test_continued.py -k another_place"),
        ("a run goes on with files that are elsewhere", 'began_in = "" if goes_on else _began_in(', "began_in = _began_in(", "tests/sweeps/test_continued.py -k another_path"),
        ("a run beside the sweep is where it was", 'option.metadata["completes"] == "source" and before == beside', "False", "tests/sweeps/test_continued.py -k beside"),
    ),
    Mutation("a run that has just begun goes on after Ctrl-C", "sweeps/job.py", "if connection.poll(0):", "if False:", "tests/sweeps/test_job.py -k asked_to_end"),
    *mutations_of(
        "sweeps/schedule.py",
        ("a run that is held is asked for all the time", "if self.waiting or self.running:  #", "if self.running:  #", "tests/sweeps/test_schedule.py -k node_has_gone"),
        ("a run that hears no signal is waited for", "one.worker.send(STOPPED)", "pass", "tests/sweeps/test_job.py -k does_not_wait"),
        ("a finished run is not made longer", 'return "short" if is_longer and status == "finished" else status', "return status", "tests/sweeps/test_schedule.py -k longer"),
        ("a sweep goes on without the lease", "words = here if state != job.there else", "words = here if True else", "tests/runs/remote/test_work.py -k leaves_alone"),
        ("the error of an attempt before is told again", "[after:][-4000:]", "[-4000:]", "tests/sweeps/test_schedule.py -k attempt_before"),
        ("a killed machine has its runs for ever", "(source_of(run) is not None or is_locked(run)) and", "", "tests/sweeps/test_schedule.py -k another_machine"),
        ("runs do not see their own GPU", '"visible": slot.visible,', '"visible": "",', "tests/commands/test_sweep.py -k run_that_fails"),
        ("a diverged run is repeated", 'if (status := metadata["status"]) in ENDED:', 'if (status := metadata["status"]) == "finished":', "tests/sweeps/test_schedule.py -k diverged"),
    ),
    *mutations_of(
        "commands/store/analyzing/asked.py",
        ("--loss-type is lost", "**{name: getattr(config, name) for name in OBJECTIVE},", "**dict.fromkeys(OBJECTIVE),", "tests/commands/store/test_analyze.py -k another_objective"),
    ),
    *mutations_of(
        "commands/store/analyzing/picture.py",
        ("of two columns with one name the last is drawn twice", "columns=tuple(tables.unique(result.columns))", "columns=result.columns", "tests/commands/store/test_analyze_pictures.py -k two_columns"),
        ("--x is lost", "x=config.x,", "", "tests/commands/store/test_analyze_pictures.py -k options_of_a_picture"),
        ("--panels is lost", "panels=tuple(name for text in config.panels for name in text.split(\",\") if name),", "", "tests/commands/store/test_analyze_pictures.py -k panels_of_a_picture"),
        ("--smooth is lost", "smooth=config.smooth,", "", "tests/commands/store/test_analyze_pictures.py -k options_of_a_picture"),
        ("--title is lost", "title=config.title,", "", "tests/commands/store/test_analyze_pictures.py -k options_of_a_picture"),
    ),
    Mutation("a replay is a second document", "commands/store/check.py", "if problems or not config.replay:", "if True:", "tests/replay/test_replay.py -k one_document"),
    Mutation("a run whose accuracy takes too long is broken", "analysis/queries/run_list.py", "except LimitReached as error:", "except ZeroDivisionError as error:", "tests/commands/store/test_runs.py -k cannot_be_counted"),
    Mutation("a large group has the rewards of a part", "analysis/live/rollouts.py", 'row["reward"] > 0.5 for row in rows)', 'row["reward"] > 0.5 for row in kept)', "tests/analysis/live/test_server.py -k large_group"),
    *mutations_of(
        "analysis/pictures/picture.py",
        ("the axis of shares is always from 0", "(0.0 if low < high / 2 else min(low, (1 - LEAST_SPAN) * high)), high", "0.0, high", "tests/analysis/pictures/test_picture.py -k differ_little"),
        ("an axis exaggerates noise", "min(low, (1 - LEAST_SPAN) * high)", "low", "tests/analysis/pictures/test_picture.py -k differ_little"),
        ("a color for each panel's line", "number = line.series if len(self.series) > 1 else line.variant", "number = line.series + line.variant", "tests/analysis/pictures/test_picture.py -k one_color"),
        ("a logarithmic axis has no ticks", "sorted(between) if len(between) >= 2 else (low, high)", "ticks", "tests/analysis/pictures/test_picture.py -k without_powers_of_ten"),
    ),
    *mutations_of(
        "analysis/statistics/at_k.py",
        ("rounding makes a question rare", "round(best_at_k(question.rewards, self.k), 12)", "best_at_k(question.rewards, self.k)", "tests/analysis/statistics/test_at_k.py -k rounding"),
        ("the ks are not those asked for", "for k in set(ks) or _usual_ks", "for k in _usual_ks", "tests/analysis/statistics/test_at_k.py -k asked_for"),
        ("the first samples of a question are all", "while part := list(islice(", "if part := list(islice(", "tests/analysis/statistics/test_at_k.py -k at_a_time"),
        ("the first questions are all", "            batch, samples = Counter[Question](), 0\n    if batch:", "            return\n    if batch:", "tests/analysis/statistics/test_at_k.py -k at_a_time"),
        ("equal questions count once", "self._voted[round(vote, 12)] += times", "self._voted[round(vote, 12)] += 1", "tests/analysis/statistics/test_at_k.py -k over_questions"),
        ("tied samples count once", "[sum(of_tied) / len(of_tied)] * len(of_tied)", "[sum(of_tied) / len(of_tied)]", "tests/analysis/statistics/test_at_k.py"),
        ("samples without an answer vote", "del wrong[None]", "pass", "tests/analysis/statistics/test_at_k.py -k no_vote"),
    ),
]  # fmt: skip

TOKEN_ENDPOINT = "tests/samplers/test_token_endpoint.py -k"
PLAYED = "tests/samplers/episodes/test_sampler.py -k"
IN_A_RUN = "tests/commands/across/test_episodes.py -k"
TURNS = "tests/training/credit/test_turns.py"
ENVIRONMENT_TOKENS = "tests/training/losses/test_environment_tokens.py"
REPEATED = "tests/environments/test_repeat.py"
CONVERSATION = "tests/analysis/report/test_report.py -k is_a_conversation"
CHAT_TURNS = "tests/samplers/episodes/test_turns.py -k"
NEXT_TURN = "tests/models/tokens/test_next_turn.py -k"
IN_A_CHAT = "tests/commands/across/test_chat_episodes.py -k"
REPLAYED = "tests/replay/test_replay.py -k"
MEASURED = "tests/commands/across/test_measured.py"
ROUNDED = "tests/replay/test_rounding.py -k"
EPISODES = [
    Mutation("a replay in bfloat16 is to be as exact as one in float32", "replay/run.py", "ROUNDED_GAP if", "GAP if", "tests/training/test_session.py -k without_a_signal"),
    Mutation("only the last nudged replay counts", "replay/run.py", "max(update.allowed, ROUNDING * moved)", "max(TOLERANCE, ROUNDING * moved)", f"{REPLAYED} farthest"),
    Mutation("rounding moves no log-probability", "replay/run.py", "allowed_weights=allowed_weights, rounded_gaps=gaps)", "allowed_weights=allowed_weights)", f"{ROUNDED} move_the_gradients"),
    Mutation("the first replay forgets its log-probabilities", "replay/run.py", "kept[name] = own", "pass", f"{ROUNDED} move_the_gradients"),
    Mutation("all nudged replays are one", "replay/run.py", "torch.Generator().manual_seed(seed)", "torch.Generator().manual_seed(0)", f"{REPLAYED} nudged_replays_differ"),
    Mutation("a nudge is not taken back", "replay/run.py", "weight.copy_(before)", "pass", f"{ROUNDED} taken_back"),
    Mutation("all weights are nudged up", "replay/run.py", "weight.mul_(1 + last_bit * signs.to(weight))", "weight.mul_(1 + last_bit)", f"{ROUNDED} taken_back"),
    Mutation("nudged replays have the softmax of float64", "replay/run.py", "logits = logits.float()", "pass", f"{ROUNDED} gradients_that_rounding_moves"),
    Mutation("nudged replays do not round the normalizer as training does", "replay/run.py", "return picked - torch.logsumexp(scaled, dim=-1)", "return picked - torch.logsumexp(scaled.double(), dim=-1)", f"{ROUNDED} gradients_that_rounding_moves"),
    Mutation("what a turn measured is forgotten by the next", "samplers/episodes/playing.py", "self.measured |= reply.measured or {}", "self.measured = dict(reply.measured or {})", MEASURED),
    Mutation("the page does not say what gives the rewards", "analysis/report/build.py", '"updates", "facts", "sampler")', '"updates", "sampler")', "tests/commands/across/test_episodes.py -k gives_the_rewards"),
    Mutation("a round under a time limit is not evaluated", "training/loop.py", "is_unknown = bool(config.time_limit and", "is_unknown = bool(False and", "tests/commands/test_grpo.py -k how_long_an_evaluation_takes"),
    Mutation("sentences know only the rows shown", "commands/store/analyze.py", " or query.name in SENTENCES", "", "tests/commands/store/test_analyze.py -k objective_in_words"),
    *mutations_of(
        "analysis/queries/sql/objective.sql",
        ("kimi divides by the length", "WHEN loss_type = 'kimi' THEN 1", "", "tests/analysis/queries/test_sql.py -k kimi_divides"),
        ("gspo divides by what the run divides by", "if(loss_type = 'gspo', 'masked_mean', coalesce(wanted_length, own_length))", "coalesce(wanted_length, own_length)", "tests/analysis/queries/test_sql.py -k kimi_divides"),
        ("a length without effect is taken", "WHEN loss_type = 'kimi' AND wanted_length IS NOT NULL", "WHEN false", "tests/analysis/queries/test_sql.py -k choice_of_an_objective"),
        ("cut responses count in the mean length", "tokens > 0 AND NOT is_masked", "tokens > 0", "tests/analysis/queries/test_sql.py -k weights_of_an_objective"),
        ("responses without a token count in the mean length", "tokens > 0 AND NOT is_masked", "NOT is_masked", "tests/analysis/queries/test_sql.py -k weights_of_an_objective"),
    ),
    Mutation("groups that were dropped are pushed", "analysis/queries/sql/objective.sql", "NOT coalesce((config ->> 'dynamic_sampling')::BOOLEAN, false)", "true", "tests/analysis/queries/test_sql.py -k dropped_are_not_pushed"),
    Mutation("groups compare whole rewards, whatever the credit", "analysis/queries/sql/groups.sql", "least < most OR differing.run_id IS NOT NULL AS", "least < most AS", "tests/analysis/queries/test_sql.py -k groups_of_dynamic"),
    Mutation("the advantages of dropped groups count", "analysis/queries/sql/groups.sql", "sum(advantage) FILTER (has_signal OR NOT drops)", "sum(advantage)", "tests/analysis/queries/test_sql.py -k groups_of_dynamic"),
    Mutation("environments that failed are no episodes", "analysis/queries/sql/turns.sql", "avg(coalesce(reward, 0)) AS reward", "avg(reward) AS reward", "tests/analysis/queries/test_sql.py -k environment_that_failed"),
    Mutation("a response ends for good after what the environment said", "training/traces.py", " or not (mask or [True])[-1]", "", "tests/commands/test_sft.py -k stays_marked"),
    Mutation("turns end for good after what the environment said", "training/traces.py", "mask[-1:] == [True] and ", "", "tests/commands/test_sft.py -k stays_marked"),
    Mutation("the language is that of tools, too", "training/credit/shaping.py", "language_share(_spoken(r),", "language_share(r.response,", f"{SHAPING} -k policys_turns"),
    Mutation("a built-in tool takes the place of the user's", "environments/open.py", "Counter([*built_in, *(", "Counter([*(", "tests/environments/test_tools.py -k built_in_one"),
    Mutation("a chat template may leave an answer out", "models/tokens/next_turn.py", "            self._check_heard(messages)\n", "", "tests/models/tokens/test_next_turn.py -k leaves_out"),
    Mutation("the context of servers is the longest", "samplers/parallel/servers.py", "min(filter(None, (server.context_length", "max(filter(None, (server.context_length", "tests/samplers/parallel/test_servers.py -k shortest"),
    Mutation("turns that end within a token are another tokenizer's", "training/traces.py", "for ends in (whole, sampled.ends) if ends", "for ends in (whole,)", "tests/commands/test_sft.py -k ends_within_a_token"),
    Mutation("what was measured is not stored", "rollouts/collect.py", "measured=completion.measured,", "", MEASURED),
    Mutation("processes lose what was measured", "samplers/parallel/process.py", "tuple(Measured(*each) for each in measured) if measured is not None else None", "None", MEASURED),
    Mutation("runs that were not reached are graded as before", "commands/store/grade.py", "command(later, again=True)", "command(later)", "tests/commands/store/test_grade.py -k again"),
    Mutation("a second failure of one grade among others is an error", "commands/store/grade.py", "return failed + left if left or not done else 0", "return failed + left", "tests/commands/store/test_grade.py -k tried_once_more"),
    Mutation("a judge is not asked again for what failed", "commands/store/grade.py", "if failed or left:", "if left:", "tests/commands/across/test_judge.py -k gave_no_grade"),
    Mutation("a grade that failed is a verdict of graders", "analysis/queries/sql/graders.sql", "reward > 0.5 AND NOT isnan(reward) AS ok", "coalesce(reward > 0.5, false) AS ok", "tests/commands/store/test_grade.py -k query_graders"),
    Mutation("a format rule without effect is taken", "config/shared/prompt.py", "    check_format_rule(config, config.grader)\n", "", "tests/test_cli.py -k format-rule"),
    Mutation("rlvr grade takes a format rule without effect", "config/store/grade.py", "        check_format_rule(self, self.grader or self.check)\n", "", "tests/test_cli.py -k format-rule"),
    Mutation("the next command has a format rule without effect", "commands/store/filter.py", '"--grader" not in words or grader in WITH_FORMAT_RULE', "True", "tests/commands/store/test_filter.py -k names_a_grader"),
    Mutation("phases that were not reached are graded as before", "commands/store/grade.py", 'if p in begun else {"again": True}', 'if True else {"again": True}', "tests/commands/store/test_grade.py -k again"),
    Mutation("an interrupted evaluation of several runs starts over", "commands/evaluation/several_runs.py", ' | {"run": config.run}', "", "tests/commands/test_end_to_end.py -k interrupted"),
    Mutation("runs that do not fit a page are left out unsaid", "analysis/live/server.py", "[MAX_RUNS:])", "[:0])", "tests/analysis/live/test_server.py -k do_not_fit"),
    Mutation("a tie is a loss", "analysis/summary.py", ', COMPARISON: "a comparison with wins and ties"}', "}", "tests/commands/store/test_runs.py tests/commands/test_pairwise.py -k wins"),
    Mutation("a label is of every step", "analysis/statistics/judge_agreement.py", "if (run, step) != (other, at) and", "if False and", "tests/analysis/statistics/test_judge_agreement.py -k of_one_response"),
    Mutation("rollouts of verifiers go on when their episode has ended", "environments/worker.py", "            give_up()\n", "            pass\n", "tests/environments/test_pool.py -k has_ended_is_given_up"),
    Mutation("rubrics of verifiers lose what they measure", "environments/verifiers.py", 'output.get("metrics") or {}', "{}", "tests/environments/test_verifiers.py"),
    *mutations_of(
        "environments/worker.py",
        ("what is infinite is stored as measured", "or not isinstance(value, SupportsFloat) or not math.isfinite(float(value)):", "or not isinstance(value, SupportsFloat):", MEASURED),
        ("a string is taken for its letters' stop strings", "if isinstance(stop, str) or not all(", "if not all(", "tests/environments/test_pool.py -k no_environment"),
        ("a class without an answer starts", 'for name in ("begin", "answer"):', 'for name in ("begin",):', "tests/environments/test_pool.py -k no_environment"),
    ),
    Mutation("an environment that is ended has crashed", "environments/pool.py", "if self._closing or error in", "if error in", "tests/environments/test_pool.py -k when_it_is_closed"),
    Mutation("tools of one name are the last of them", "environments/open.py", "> 1:", "> 2:", "tests/environments/test_tools.py -k does_not_exist"),
    Mutation("an episode that was cut off is as good as its reward", "rollouts/grading.py", "if kind in UNFINISHED_KINDS or unplayed:", "if kind in UNFINISHED_KINDS:", "tests/rollouts/test_grading.py"),
    *mutations_of(
        "samplers/episodes/turns.py",
        ("a marker in the environment's text is a special token", "split_special_tokens=True", "split_special_tokens=False", f"{PLAYED} as_it_was_sampled"),
        ("several answers are one message", "return [Piece(one.role, i, response_text(tokenizer, i)) for one, i in zip(said, pieces, strict=True)]", "return [Piece(said[0].role, sum(pieces, []), response_text(tokenizer, sum(pieces, [])))]", f"{CHAT_TURNS} in_their_order"),
        ("all turns so far are taken for the last", "turn = len(completion.token_ids)", "turn = 0", f"{CHAT_TURNS} gets_its_end"),
        ("the environment speaks in a role of its own", '"user" if said.role == ENVIRONMENT else said.role', "said.role", f"{CHAT_TURNS} answers_as_the_user"),
        ("a chat model's stop string is passed over", "return completion.text if _calls(completion, self._stop) else None\n        if completion", "return completion.text\n        if completion", f"{CHAT_TURNS} gets_its_end"),
        ("the messages of an environment are not hidden", "return text, tuple(ids)", "return text, None", f"{CHAT_TURNS} answers_as_the_user"),
        ("the model is not told the switch for thinking", "thinking=thinking, system=system, tools=json", "system=system, tools=json", f"{IN_A_CHAT} switches_reach", "chat_thinking"),
        ("the environment's messages have no system message", "thinking=thinking, system=system, tools=json", "thinking=thinking, tools=json", f"{IN_A_CHAT} switches_reach", "chat_system"),
        ("a grader judges what verifiers rewards", "not spec.of_verifiers and not (", "not (", "tests/rollouts/test_inputs.py -k need_no_answers"),
        ("a run of verifiers that was begun with a grader does not go on", ' and config.sources.get("grader") != "resumed run"', "", "tests/rollouts/test_inputs.py -k need_no_answers"),
        ("tools are lost", "EnvironmentSpec(config.environment, config.tool, config.chat)", "EnvironmentSpec(config.environment, (), config.chat)", f"{IN_A_RUN} limits_of_episodes", "tool environment"),
        ("what ends a response is not known", "ends=ends,", "ends=[tokenizer.eos_token_id],", f"{IN_A_CHAT} switches_reach"),
    ),
    *mutations_of(
        "models/tokens/next_turn.py",
        ("renderers reads calls whose form is known", "if self._read is not None:", "if self._renderer is None:", f"{NEXT_TURN} with_renderers_as_without"),
        ("a thinking that the prompt began has not begun", 'thinks=begun.rstrip().endswith("<think>")', "thinks=False", f"{NEXT_TURN} prompt_began"),
        ("a role of a prompt that the template leaves out goes unseen", "            self._check_shown(messages)\n", "", f"{CHAT_TURNS} cannot_begin"),
        ("markers in a message are special tokens", '{"content": self.markers.hide(message["content"])}', '{"content": message["content"]}', f"{NEXT_TURN} markers_in_a_text"),
        ("what an assistant's text has behind an end marker is lost", "self.markers.hide(said, only=self._ends)", "said", f"{NEXT_TURN} end_marker"),
        ("a call ends at an end marker in its arguments", "lambda text: self.markers.hide(text, only=self._ends)", "lambda text: text", f"{NEXT_TURN} end_marker"),
        ("calls of tools that nobody was told of cannot be written", "if not self.chat.tools:  # a given", "if False:  # a given", f"{NEXT_TURN} may_lack_ids"),
        ("calls of a given conversation lack ids", "messages = with_call_ids(messages)", "messages = list(messages)", f"{NEXT_TURN} may_lack_ids"),
        ("a turn begins with what the tokenizer puts before texts", "self.markers.ids_behind(begun, turn", "self.markers.ids(turn", f"{NEXT_TURN} space_before"),
        ("the end of a turn comes twice", "own = self._ids_after(hidden)[ended:]", "own = self._ids_after(hidden)", f"{NEXT_TURN} conversation_is_that"),
        ("the end of a turn is missing where a stop string ended it", "any(i in self._end_ids for i in response_ids[-1:])", "True", f"{CHAT_TURNS} gets_its_end"),
        ("the frame of a given conversation is trained on", "mask += [False] * len(said)", "mask += [True] * len(said)", f"{NEXT_TURN} masked_in"),
        ("what is called in a thinking is called", 'text = spoken(text, thinks=begun.rstrip().endswith("<think>"))', "pass", f"{CHAT_TURNS} in_their_order"),
        ("a template that makes markers of a text goes unseen", "if self.markers.in_order(text) != self._frames[key]:", "if False:", f"{NEXT_TURN} half_the_templates"),
        ("a template that changes what came before goes unseen", "if not long.startswith(short) or", "if", f"{NEXT_TURN} cannot_go_on"),
        ("a template that changes with the turn goes unseen", "if self.chat.render(later).rpartition", "if False and self.chat.render(later).rpartition", f"{NEXT_TURN} cannot_go_on"),
        ("a template that leaves an answer out goes unseen", "if self._after(messages).count(content) != sum(", "if False and sum(", f"{NEXT_TURN} cannot_go_on"),
    ),
    *mutations_of(
        "models/tokens/markers.py",
        ("only special tokens are markers", "if text in special or (text in source and len(text) > 2)}", "if text in special}", f"{NEXT_TURN} no_special_tokens"),
        ("every added token is a marker", "(text in source and len(text) > 2)", "True", f"{NEXT_TURN} stay_single"),
        ("a sign that the template writes is a marker", " and len(text) > 2", "", f"{NEXT_TURN} stay_single"),
        ("a prompt of messages has no BOS", "return ids if ids[: len(front)] == front else [*front, *ids]", "return ids", f"{NEXT_TURN} begins_as_every_text"),
    ),
    *mutations_of(
        "models/tokens/chat.py",
        ("the chat template is not told of the tools", '"tools": list(tools) or None}', '"tools": None}', f"{NEXT_TURN} answers_of_tools"),
        ("a template that knows no tools goes unseen", "    chat.check_tools()\n    (ids", "    (ids", f"{IN_A_CHAT} said_before"),
    ),
    *mutations_of(
        "models/tokens/calls.py",
        ("a call is nested without end", "    if is_too_deep(value):\n", "    if False:\n", f"{NEXT_TURN} are_read"),
        ("a call that is not closed counts", '_call(body) if closed else _unread("there is no </tool_call>")', "_call(body)", f"{NEXT_TURN} are_read"),
    ),
    *mutations_of(
        "environments/tools.py",
        ("a process that earlier calls have filled is kept", "if memory_was_filled(problem):", "if False:", "tests/environments/test_tools.py -k earlier"),
        ("a call gets the result of another one", "for call in json.loads(turn):", "for call in json.loads(turn)[::-1]:", f"{CHAT_TURNS} in_their_order"),
        ("a chat model's tool has the name of its function", '    schema["function"]["name"] = name\n', "", f"{CHAT_TURNS} in_their_order"),
    ),
    Mutation("rows of the hub have the fields of other rows", "data/datasets.py", ", nulls_fill=True", "", "tests/data/test_datasets.py -k any_dataset_of_the_hub"),
    Mutation("rows of Parquet have the fields of other rows", "data/files.py", ", nulls_fill=True", "", "tests/data/test_conversations.py -k other_rows"),
    *mutations_of(
        "data/conversations.py",
        ("fields of other rows are in a conversation", "    if row.nulls_fill:\n", "    if False:\n", "tests/data/test_conversations.py -k other_rows"),
        ("numbers in a call are texts", "return json.loads(text) if", "return str(text) if", f"{IN_A_CHAT} as_it_is_written"),
    ),
    *mutations_of(
        "data/traces.py",
        ("evaluations of a run are learned by heart", "        phase=phase,\n", "", "tests/data/test_traces.py -k evaluations_are_no"),
        ("the questions of a run are unknown", 'prompts.question_of(r) or ""', '""', "tests/data/test_traces.py -k evaluations_are_no"),
        ("a run that has evaluations alone is traces", "if phases and phase not in phases:", "if False:", "tests/data/test_traces.py -k evaluations_alone"),
        ("episodes that were cut off are traces", 'row["episode"]["ended_by"] in CUT_OFF', "False", "tests/data/test_traces.py -k were_cut_off"),
        ("who says what may change before a run goes on", "_fingerprint(dataset) if told_apart_by == BY_TURNS else dataset.fingerprint,", "dataset.fingerprint,", "tests/data/test_traces.py -k who_says_what"),
        ("a conversation is graded as a whole", 'return example.conversation.messages[-1]["content"]', "return None", f"{IN_A_CHAT} as_it_is_written"),
    ),
    *mutations_of(
        "rollouts/inputs.py",
        ("the prompt does not tell the model of its tools", "tools = told_tools(config) if isinstance(config, EpisodeOptions) else []", "tools = []", f"{IN_A_CHAT} policys_tokens"),
    ),
    *mutations_of(
        "samplers/episodes/sampler.py",
        ("what was sampled is tokenized again", "prompt_ids=playing.prompt_ids + playing.ids,", "prompt_ids=tuple(self._player.tokenizer.encode(self._player.tokenizer.decode(playing.prompt_ids + playing.ids), add_special_tokens=False)),", f"{CHAT_TURNS} never_tokenized_again"),
        ("thinking is left out of the next turn", "prompt_ids=playing.prompt_ids + playing.ids,", 'prompt_ids=tuple(self._player.tokenizer.encode(__import__("re").sub("(?s)<think>.*?</think>", "", self._player.tokenizer.decode(playing.prompt_ids + playing.ids)), add_special_tokens=False)),', f"{CHAT_TURNS} in_their_order"),
        ("a failure takes the episodes that have ended with it", "            yield from table.ended()\n            raise\n", "            raise\n", f"{PLAYED} outlast"),
        ("Ctrl-C takes the episodes that have ended with it", "self.arrived = tuple(table.ended())", "pass", f"{PLAYED} outlast"),
        ("a prompt that the chat template cannot show is no reason to fail", "                self._refuse(playing, str(problem))\n                continue\n", "                raise\n", f"{CHAT_TURNS} cannot_begin"),
        ("nobody is told of a prompt that leaves no room", 'self._player.pool.say_failed("ValueError", detail)', "pass", f"{PLAYED} leaves_no_room"),
        ("a dataset's prompt that leaves no room is the environment's", "if answer.prompt is not None and (detail :=", "if (detail :=", f"{PLAYED} leaves_no_room"),
        ("nobody is told that the environment has answered", "        self._notify()\n", "", f"{PLAYED} who_waits"),
        ("the environment's answer is asked of another episode", "pool.answer(playing.example, playing.seed, playing.asked)", "pool.answer(playing.example, 0, playing.asked)", f"{PLAYED} as_it_was_sampled"),
        ("later turns repeat the draws of the first", '(seed_of_part(playing.seed, f"turn {len(playing.asked)}"),)', "(playing.seed,)", f"{PLAYED} do_not_repeat"),
        ("each turn has all of the policy's tokens", "self._params.max_tokens - playing.num_policy_tokens", "self._params.max_tokens", f"{PLAYED} limits_end"),
        ("episodes that are played again are not compared", "            table.check()\n", "", f"{IN_A_RUN} no_function"),
        ("the environment's text is longer than the episode", "if len(piece.ids) <= room:", "if True:", f"{PLAYED} limits_end"),
        ("an episode goes on beyond the context", "if self._context is None:", "if True:", f"{PLAYED} context_ends"),
        ("an episode leaves its environment behind", 'if by != "environment":', "if False:", f"{PLAYED} outlives"),
        ("a call that is closed leaves environments behind", "            if not playing.over:\n", "            if False:\n", f"{PLAYED} outlives"),
        ("answers that are forged in a last turn are not counted", "completion.text.count(marker) if marker else 0", "0", f"{PLAYED} forges"),
        ("an episode has turns without end", "if len(playing.asked) == self._player.max_turns:", "if False:", f"{PLAYED} limits_end"),
        ("a text that was cut is shown whole", "yield Piece(piece.role, ids, response_text(self._player.tokenizer, ids))", "yield Piece(piece.role, ids, piece.text)", f"{PLAYED} limits_end"),
    ),
    *mutations_of(
        "samplers/episodes/playing.py",
        ("one failed call of several is not counted", "* (said.error is not None)", "* (reply.error is not None)", f"{CHAT_TURNS} in_their_order"),
        ("the environment's tokens are trained on", "self.mask += (logprobs is not None,) * len(ids)", "self.mask += (True,) * len(ids)", f"{PLAYED} as_it_was_sampled"),
        ("the grader reads what the environment said last", "graded_to=ends[last_own],", "graded_to=ends[-1],", f"{PLAYED} reads_the_last_turn"),
        ("failed calls are of no turn", "self.failed_turns += (len(self.spoken) - 1,)", "self.failed_turns += (7,)", f"{PLAYED} however_a_policy"),
        ("forged answers are of no turn", "self.forged_turns += (len(self.spoken) - 1,)", "self.forged_turns += (7,)", f"{PLAYED} however_a_policy"),
        ("a turn ends in the text where its tokens do", "ends = tuple(accumulate(map(len, self.texts)))", "ends = tuple(turn.end for turn in self.turns)", f"{PLAYED} whatever_a_tool"),
        ("the turns' log-probabilities are of other tokens", "self.logprobs if scored else ()", "self.logprobs", f"{PLAYED} has_none"),
        ("a reward of turns that is low has no kind", '"low_reward")', "None)", f"{IN_A_RUN} gives_the_rewards"),
        ("rewards of turns are the grader's to give", "if grade is None and gives_rewards:", "if False:", f"{PLAYED} gives_the_reward"),
    ),
    Mutation("the report's list has the environment's tokens, too", "analysis/report/rollouts.py", 'if row.get("episode"):', "if False:", CONVERSATION),
    Mutation("the live list has the environment's tokens, too", "analysis/live/rollouts.py", '"policy_tokens(episode, num_response_tokens) AS num_response_tokens"', '"num_response_tokens"', "tests/analysis/live/test_server.py -k its_policy_wrote"),
    Mutation("an environment that failed is a grader's alarm", "analysis/statistics/alarms.py", 'if "episodes/turns" in training.curves else ""', 'if False else ""', "tests/analysis/statistics/test_alarms.py -k each_alarm"),
    Mutation("the page does not show what was measured", "analysis/report/rollouts.py", 'for each in row["measured"] or ()', "for each in ()", CONVERSATION),
    *mutations_of(
        "samplers/token_endpoint.py",
        ("an endpoint without token ids is asked on", "tuple(ids))).token_ids:", "tuple(ids))).text:", f"{TOKEN_ENDPOINT} lacks_something"),
        ("an endpoint may have another tokenizer", "if theirs and theirs != tuple(ids):", "if False:", f"{TOKEN_ENDPOINT} lacks_something"),
        ("an endpoint gets text", "replace(r, prompt_ids=tuple(ids)) for r, ids", "r for r, ids", f"{TOKEN_ENDPOINT} text_is_that"),
        ("an answer without token ids is a turn", "if not completion.token_ids:", "if False:", f"{TOKEN_ENDPOINT} text_is_that"),
        ("an endpoint's text is its own", "yield as_every_engine(completion, self._tokenizer, params)", "yield completion", f"{TOKEN_ENDPOINT} text_is_that"),
    ),
    Mutation("what comes for an endpoint waits for all others", "samplers/token_endpoint.py", "params, more=more)", "params)", "tests/samplers/test_token_endpoint.py -k that_come"),
    Mutation("what comes for servers waits for all others", "samplers/parallel/servers.py", "params, more=more and _AfterIdle(more, self.check_same))", "params)", "tests/samplers/parallel/test_servers.py -k asked_alone"),
    Mutation("an endpoint that samples turns need not give token ids", "samplers/openai.py", "if not settings.episodes:", "if True:", "tests/commands/across/test_episodes_on_vllm.py -k at_an_endpoint"),
    Mutation("each call asks an endpoint alone first", "samplers/openai.py", "failed_in_a_row, self._knows_endpoint = 0, True", "failed_in_a_row = 0", "tests/samplers/test_openai.py -k once_it_has_answered"),
    Mutation("prompts are not checked before the first sample", "commands/eval.py", "for each in shared.datasets.values():", "for each in ():", "tests/commands/test_end_to_end.py -k does_not_fit"),
    Mutation("the bound on a prompt's tokens is too low for some", "rollouts/prompt_lengths.py", "3 * len(prompt.encode", "len(prompt.encode", "tests/rollouts/test_prompt_lengths.py -k bound"),
    Mutation("the bound leaves out the template", "rollouts/prompt_lengths.py", "return fixed + places", "return places", "tests/rollouts/test_prompt_lengths.py -k bound"),
    Mutation("passes for a run of so many updates have no effect", "config/sft.py", 'if self.n_sft_steps and self.sources.get("sft_epochs") == "flag":', 'if self.n_sft_steps and self.sources.get("sft_epochs") == "flag" and not self.resume:', "tests/commands/test_sft.py -k so_many_updates"),
    Mutation("a chat model has no endpoint for its episodes", "config/eval.py", "chat=self.chat and not self.plays_episodes", "chat=self.chat", "tests/config/test_config.py -k would_do_nothing"),
    Mutation("messages are sent where ids must be", "config/shared/episodes.py", 'if getattr(config, "base_url", "") and getattr(config, "endpoint", "") == "chat":', "if False:", f"{IN_A_RUN} cannot_go_together"),
    *mutations_of(
        "samplers/episodes/open.py",
        ("8 turns whatever is asked", "max_turns=config.max_turns", "max_turns=8", f"{IN_A_RUN} grades_the_last", "max_turns"),
        ("no limit of an episode's tokens", "longest=config.longest_response", "longest=lambda tokens: 2 * tokens", f"{IN_A_RUN} limits_of_episodes", "max_episode_tokens"),
        ("10 seconds a turn whatever is asked", "timeout=config.turn_timeout", "timeout=10.0", f"{IN_A_RUN} limits_of_episodes", "turn_timeout"),
    ),
    *mutations_of(
        "environments/slot.py",
        ("environments of episodes that have ended are kept", '[["ended", ended]] if ended else []', "[]", "tests/environments/test_pool.py -k given_up"),
        ("an episode is played again in the time of a turn", 'if one.kind != "answer" or one.seed in self._known or not self.facts["begins"]:', "if True:", "tests/environments/test_pool.py -k all_its_turns"),
        ("each turn has the time of those before it", 'if one.kind != "answer" or one.seed in self._known or not self.facts["begins"]:', 'if one.kind != "answer":', "tests/environments/test_pool.py -k all_its_turns"),
        ("a constructor may take two minutes", "said = lines.receive(within=seconds)", "said = lines.receive(within=START_SECONDS)", "tests/environments/test_pool.py -k constructor_that_hangs", "turn_timeout"),
        ("whoever is asked when a process dies has crashed it", "                if not self._answers:\n", "                if True:\n", "tests/environments/test_pool.py -k at_once"),
        ("what takes long is asked together", "return min(_MOST_QUESTIONS, int(_MESSAGE_SECONDS / max(pace, 1e-9)))", "return _MOST_QUESTIONS", "tests/environments/test_pool.py -k take_a_moment"),
        ("questions are asked one by one", "return min(_MOST_QUESTIONS, int(_MESSAGE_SECONDS / max(pace, 1e-9)))", "return 1", "tests/environments/test_pool.py -k take_a_moment"),
        ("a pace is that of all kinds", "self._pace.get(kind, _MESSAGE_SECONDS)", "min(self._pace.values(), default=_MESSAGE_SECONDS)", "tests/environments/test_pool.py -k take_a_moment"),
        ("a process that lies ends the run", "OSError, EOFError, ValueError)", "OSError, EOFError)", "tests/environments/test_pool.py -k own_episode"),
        ("an answer that is none ends the run", "except (AttributeError, KeyError, OverflowError, TypeError) as error:", "except AttributeError as error:", "tests/environments/test_pool.py -k own_episode"),
        ("a reply that is none ends the run", "except (AttributeError, KeyError, OverflowError, TypeError) as error:", "except (AttributeError, KeyError, OverflowError) as error:", "tests/environments/test_pool.py -k own_episode"),
        ("a process that has ended ends the run", "OSError, EOFError,", "OSError,", "tests/environments/test_pool.py -k own_episode"),
        ("a process that is started while the pool is closed is waited for", "self.interrupt()  # again", "pass  # again", "tests/environments/test_pool.py -k closed_at_once"),
        ("a turn that is given up took no time", '"seconds": time.monotonic() - self._since}', '"seconds": 0.0}', "tests/environments/test_pool.py -k at_once"),
        ("a message that is not read is waited for without end", "lines.send(message, within=waiting[0].timeout)", "lines.send(message, within=60)", "tests/environments/test_pool.py -k is_not_read", "turn_timeout"),
        ("what no process has been asked is waited for when the pool is closed", "while not self._asked.empty():", "while False:", "tests/environments/test_pool.py -k no_failure"),
        ("a time that is no number ends all answers", "if not 0 <= seconds <= _LONGEST:", "if False:", "tests/environments/test_pool.py -k own_episode"),
        ("a report that fails costs the process", "        except OSError as error:\n            failed, over = error, False\n", "", "tests/environments/test_pool.py -k report_that_fails"),
        ("whoever asked never hears of a report that fails", "one.future.set_exception(failed) if failed else one", "one", "tests/environments/test_pool.py -k report_that_fails"),
        ("what is canceled is asked all the same", "for one in [one for one in waiting if one.future.cancelled()]:", "for one in []:", "tests/environments/test_pool.py -k is_canceled"),
    ),
    Mutation("a script can read how long the right outputs are", "graders/python.py", "-(-2 * right // _ANSWER_STEP) * _ANSWER_STEP", "2 * right", "tests/graders/test_python.py -k cannot_tell"),
    Mutation("a dataset that is a script ends with a traceback", "data/datasets.py", "ImportError, RuntimeError, DatasetsError)", "DatasetsError)", "tests/data/test_datasets.py -k is_a_script"),
    Mutation("an evaluation stops at special tokens in vain", "commands/eval.py", "    check_stops(config, config.model)\n", "", "tests/rollouts/test_inputs.py -k refuse_it"),
    Mutation("a search stops at special tokens in vain", "commands/discover.py", "        check_stops(config, config.model)\n", "        pass\n", "tests/rollouts/test_inputs.py -k refuse_it"),
    Mutation("training stops at special tokens in vain", "training/session.py", "    check_stops(config, config.model)\n    return Inputs(\n", "    return Inputs(\n", "tests/rollouts/test_inputs.py -k refuse_it"),
    Mutation("the evaluations of fine-tuning stop at special tokens in vain", "training/session.py", "    if eval_dataset is not None:\n        check_stops(config, config.model)\n", "", "tests/rollouts/test_inputs.py -k refuse_it"),
    Mutation("a token that ends responses is refused as a stop string", "rollouts/inputs.py", "and number not in load_end_tokens(path, tokenizer)", "", "tests/rollouts/test_inputs.py -k special_token_is_refused"),
    Mutation("statements of tests run again for each assertion", "graders/python.py", "        others = []\n", "", "tests/graders/test_python.py -k in_their_order"),
    Mutation("pools of threads stay ended for the next run", "sandbox/unit_tests.py", "pools._shutdown = False", "pass", "tests/graders/test_python.py -k interpreter_would"),
    Mutation("a top_p that was refused is looked for", "samplers/openai.py", 'fields.get("top_p", 1) == 1', 'fields["top_p"] == 1', "tests/samplers/test_openai.py -k any_order"),
    Mutation("what a script prints at its exit is lost", "sandbox/unit_tests.py", "    atexit._run_exitfuncs()\n", "", "tests/graders/test_python.py -k standard_output_counts"),
    Mutation("a script's runs keep each other's memory", "sandbox/unit_tests.py", "gc.collect()", "pass", "tests/graders/test_python.py -k each_others_memory"),
    Mutation("a script that ends with exit(0) has failed", "sandbox/child.py", "if error.code in (None, 0)", "if False", "tests/environments/test_tools.py -k runs_as_a_script"),
    Mutation("long right outputs are too large", "graders/python.py", "DEFAULT_LIMITS.output_bytes + -(-2 * right", "DEFAULT_LIMITS.output_bytes + 0 * (-2 * right", "tests/graders/test_python.py -k may_be_long_together"),
    Mutation("a program whose time is a year ends the run", "sandbox/run.py", "selector.select(min(left, LONGEST_WAIT))", "selector.select(left)", "tests/sandbox/test_run.py -k year"),
    *mutations_of(
        "parallel/worker.py",
        ("a wait of a year ends the run", "self.connection.poll(min(within, LONGEST_WAIT))", "self.connection.poll(within)", "tests/parallel/test_worker.py -k looks_again"),
        ("the time of a message ends with the longest wait", "            if within <= 0:\n", "            if True:\n", "tests/parallel/test_worker.py -k looks_again"),
    ),
    *mutations_of(
        "parallel/lines.py",
        ("a line that breaks off is waited for without end", "if not self._whole and time.monotonic() >= ends:", "if not self._whole and time.monotonic() >= ends + 9:", "tests/parallel/test_lines.py -k drips"),
        ("a turn of a year ends the run", "1000 * min(max(0.0, ends - time.monotonic()), LONGEST_WAIT)", "1000 * max(0.0, ends - time.monotonic())", "tests/environments/test_pool.py -k year"),
        ("the time of a line ends with the longest wait", "if not self._whole and time.monotonic() >= ends:", "if not self._whole:", "tests/parallel/test_lines.py -k looks_again"),
        ("a message may take a year", "self._socket.settimeout(min(within, LONGEST_WAIT))", "self._socket.settimeout(within)", "tests/parallel/test_lines.py -k not_read"),
        ("a line may be as long as it likes", "if len(self._begun) > MOST_BYTES:", "if False:", "tests/parallel/test_lines.py -k without_end"),
        ("lines that follow soon are not waited for", "if several:", "if False:", "tests/parallel/test_lines.py -k come_soon"),
        ("lines are waited for that nobody expects", "if several:", "if True:", "tests/parallel/test_lines.py -k come_soon"),
        ("each part of a line is waited for", "                    several = False\n", "", "tests/parallel/test_lines.py -k waited_for_once"),
        ("what has begun of a line is forgotten", "*lines, self._begun = self._begun", "*lines, _ = self._begun", "tests/parallel/test_lines.py"),
        ("messages have no number", "number != self._number or", "", "tests/environments/test_pool.py -k said_twice"),
        ("what is no object is a message", "or not isinstance(message, dict)", "", "tests/parallel/test_lines.py -k refused"),
    ),
    Mutation("rewards that nobody counts are not said", "environments/pool.py", 'if reply.reward is not None and not slot.facts["gives_rewards"]:', "if False:", "tests/environments/test_pool.py -k nobody_counts"),
    *mutations_of(
        "process.py",
        ("a process may have more memory than is allowed", "else min(memory_bytes, hard)", "else memory_bytes", "tests/environments/test_pool.py -k less_memory"),
        ("what a command leaves is never collected", "        gc.collect()\n", "        pass\n", "tests/test_process.py -k leaves_is_collected"),
        ("what is imported is collected", "        gc.freeze()\n", "", "tests/test_process.py -k never_collected"),
        ("a guard that is ended at once leaves what it guards", "suppress(ProcessLookupError):  # it has no", "suppress(PermissionError):  # it has no", "tests/test_process.py -k ended_at_once"),
        ("an import within another ends the pause", "    if not gc.isenabled():\n        yield\n        return\n", "", "tests/test_process.py -k never_collected"),
        ("Triton complains at the end", "        gc.unfreeze()", "        pass", "tests/test_process.py -k never_collected"),
        ("freed memory goes back to the system", "        set_option(_M_TRIM_THRESHOLD, 1 << 30)\n", "", "tests/test_process.py -k unless_the_environment"),
        ("large blocks are the system's", "        set_option(_M_MMAP_THRESHOLD, 32 << 20)  # the most that it takes\n", "", "tests/test_process.py -k unless_the_environment"),
        ("what the environment says of freed memory is ignored", 'any(name.startswith("MALLOC_") for name in os.environ)', "False", "tests/test_process.py -k unless_the_environment"),
    ),
    Mutation("what a worker imports is collected", "parallel/child.py", "    with importing():\n        function = resolve_name(entry)", "    function = resolve_name(entry)", "tests/parallel/test_worker.py -k never_collected"),
    Mutation("what an engine imports is collected", "samplers/open.py", " in sys.modules else importing():", " in sys.modules else nullcontext():", "tests/test_process.py -k never_collected"),
    Mutation("what is interrupted beside a thread leaves its temporary folders", "cli.py", "process.leave(130)", "os._exit(130)", "tests/test_process.py -k beside_a_thread"),
    Mutation("what a command imports is collected", "cli.py", "process.left_on_interrupt(), process.importing():", "process.left_on_interrupt():", "tests/test_process.py -k never_collected"),
    Mutation("with a model on the CPU freed memory goes back to the system", "models/load.py", "        keep_freed_memory()\n", "        pass\n", "tests/models/test_policy.py -k is_freed"),
    *mutations_of(
        "samplers/parallel/serve.py",
        ("a process that samples for training takes it for an evaluation", "pool, trains=takes_weights)", "pool, trains=False)", f"{IN_A_RUN} samples_for_training_refuses"),
    ),
    *mutations_of(
        "rollouts/inputs.py",
        ("a grader is named that judges nothing", 'facts["grader"] == ENVIRONMENT', "False", f"{IN_A_RUN} a_plan_says"),
        ("answers are needed that nobody reads", "needs_answers=needs_answers(config),", "", f"{IN_A_RUN} an_answer_is_needed"),
    ),
    *mutations_of(
        "runs/provenance.py",
        ("a file of an environment that has changed has no name", 'files = now.get("files")', "files = None", f"{IN_A_RUN} that_has_changed"),
    ),
    *mutations_of(
        "analysis/statistics/at_k.py",
        ("a majority of no answers", "self._mean(self._voted) if self.answered else None", "self._mean(self._voted)", "tests/analysis/statistics/test_at_k.py -k no_majority"),
    ),
    *mutations_of(
        "environments/worker.py",
        ("the copy of a process that forks answers too", "if os.getpid() != process:", "if False:", "tests/environments/test_pool.py -k said_twice"),
        ("an answer takes no time", '"seconds": time.monotonic() - began}', '"seconds": 0.0}', "tests/environments/test_pool.py -k at_once"),
        ("a process that earlier episodes have filled is kept", 'said.pop("is_filled", False) and answered:', "said.pop('is_filled', False) and False:", "tests/environments/test_pool.py -k earlier"),
        ("tools are asked again", "answered = 0 if _keeps_a_state(environment) else len(turns) - 1", "answered = 0", "tests/environments/test_tools.py -k asked_again"),
        ("a reward that float32 does not hold is one", "not abs(reward) < _INFINITE:", "not abs(reward) < math.inf:", "tests/environments/test_pool.py -k no_reply_costs"),
        ("an object is a prompt of text", "    if isinstance(prompt, Mapping):\n", "    if False:\n", f"{PLAYED} prompt_that_cannot"),
        ("an environment without a prompt ends the run", "if not (prompt or (chat and isinstance(prompt, str))):", "if False:", f"{PLAYED} prompt_that_cannot"),
        ("what answers a call ends an episode without a word", "if any(call.done or", "if False and any(call.done or", "tests/environments/test_pool.py -k own_episode"),
        ("an episode that failed is not given up", "            _give_up(environment)\n            raise\n        if", "            raise\n        if", "tests/environments/test_pool.py -k has_ended_is_given_up"),
        ("an environment whose prompt is refused is not given up", "            _give_up(environment)\n            raise\n        self", "            raise\n        self", "tests/environments/test_pool.py -k has_ended_is_given_up"),
        ("forged answers are not counted", "turns[-1].count(marker) if marker else 0", "0", "tests/environments/test_pool.py -k keeps_its_state"),
        ("an episode that was lost begins at its last turn", "for turn in turns[answered:-1]:", "for turn in ():", "tests/environments/test_pool.py -k keeps_its_state"),
    ),
    *mutations_of(
        "training/credit/turns.py",
        ("rewards of turns are summed up to a turn", "rewards[turn:]", "rewards[: turn + 1]", f"{TURNS} -k from_a_turn_on"),
        ("turns are compared with first turns", "returns[i][turn] for i in reached", "returns[i][0] for i in reached", f"{TURNS} -k same_number"),
        ("turns are compared with those of other groups", "range(first, first + size)", "range(first // size, len(returns), len(returns) // size)", f"{TURNS} -k do_not_mix"),
        ("a grader's reward is lost among turns", "rollout.grader == ENVIRONMENT and ", "", f"{TURNS} -k graders_reward"),
        ("rewards of turns count where grading failed", "    if rollout.reward is not None:", "    if True:", f"{TURNS} -k graders_reward"),
        ("rewards of turns are those before they were stored", "torch.tensor(given, dtype=torch.float32)", "torch.tensor(given, dtype=torch.float64)", f"{TURNS} -k same_bytes"),
        ("terms of the shaped reward are lost", "terms=[t or 0.0 for t in own]", "terms=()", f"{TURNS} -k comes_with_the_last"),
        ("the advantage of an episode is the mean over its turns", "(turn.end - turn.start) * advantage", "rollout.num_policy_tokens / len(advantages) * advantage", f"{TURNS} -k each_token"),
    ),
    *mutations_of(
        "training/updates/tensors.py",
        ("the environment's tokens have an advantage", "    return torch.zeros(mask.shape).masked_scatter(mask, flat)", "    return torch.ones(mask.shape).masked_scatter(mask, flat)", f"{TURNS} -k each_token"),
        ("a turn has the advantage of another", "zip(r.policy_turns, r.turn_advantages or (), strict=True)", "zip(r.policy_turns, (r.turn_advantages or ())[::-1], strict=True)", f"{TURNS} -k each_token"),
    ),
    *mutations_of(
        "models/tokens/tokenization.py",
        ("who wrote a token is said of the next one", "[True] * len(response) if row is None else row for", "[True] * len(response) if row is None else (*row[1:], row[0]) for", f"{ENVIRONMENT_TOKENS} -k gradient"),
    ),
    *mutations_of(
        "training/losses/objectives.py",
        ("later turns begin as if they could end", ".masked_fill(mask, 0).cummax", ".masked_fill(mask, 0).mul(0).cummax", f"{ENVIRONMENT_TOKENS} -k first_tokens"),
    ),
    *mutations_of(
        "training/losses/chosen.py",
        ("a loss of one's own is tried with advantages of responses", 'per_token=config.credit == "turn"', "per_token=False", f"{TURNS} -k of_ones_own"),
        ("a loss of one's own is tried without stale tokens", "with_stale=config.partial_rollout_tokens > 0,", "", "tests/training/losses/test_custom.py -k stale"),
        ("turns without a baseline", 'if config.credit == "turn" and loss.raw_rewards:', "if False:", f"{TURNS} -k without_a_baseline"),
    ),
    *mutations_of(
        "training/credit/groups.py",
        ("groups whose turns differ have no signal", "    if not by_turn:\n", "    if True:\n", f"{TURNS} -k equal_sums"),
    ),
    *mutations_of(
        "commands/grpo.py",
        ("turns have no advantage of their own", ' if config.credit == "turn" else credited', " if False else credited", f"{TURNS} -k each_token", "credit"),
        ("the signal is of episodes", 'by_turn=config.credit == "turn",', "by_turn=False,", f"{IN_A_RUN} credit_of_turns_trains"),
    ),
    *mutations_of(
        "commands/sources/__init__.py",
        ("groups whose turns differ are dropped", 'by_turn=config.credit == "turn"', "by_turn=False", f"{IN_A_RUN} credit_of_turns_trains"),
    ),
    *mutations_of(
        "commands/distill.py",
        ("the teacher's verdict on the environment is kept", "r.response_mask or repeat(True)", "repeat(True)", "tests/commands/test_distill.py -k on_a_server"),
    ),
    *mutations_of(
        "rollouts/collect.py",
        ("the environment's tokens are counted as sampled", "SamplingStats(sum(r.num_policy_tokens for r in rollouts)", "SamplingStats(sum(r.num_response_tokens for r in rollouts)", "tests/rollouts/test_collect.py -k environment_wrote"),
        ("which call failed is lost", "completion.turn_facts and completion.turn_facts._asdict()", "None", "tests/rollouts/test_collect.py -k since_a_call_failed"),
        ("a grader gets the dataset's prompt", "prompt_given(c, self.requests[c.request_index])", "self.requests[c.request_index].prompt", "tests/rollouts/test_collect.py -k ask_for"),
    ),
    *mutations_of(
        "replay/stored.py",
        ("a replay opens thinking once in each run", '"opened_twice": "thinking_opened" not in recorded', '"opened_twice": False', "tests/commands/test_sft.py -k thinking_that_it"),
        ("a replay ends responses with EOS in any chat template", "end = eos if end is None else end", "end = eos", "tests/commands/across/test_chat.py -k responses_end"),
        ("a replay takes a conversation for its text", "if e.conversation is None", "if True", "tests/commands/across/test_chat_episodes.py -k assistants_tokens_alone"),
        ("a replay runs a user's tools", "(spec.tools or spec.of_verifiers)", "False", "tests/commands/across/test_chat_episodes.py -k assistants_tokens_alone"),
        ("a replay learns what a tool said", 'learned += [role == "policy"] * (', "learned += [True] * (", "tests/replay/test_replay.py -k of_turns_has"),
        ("a replay knows no turns that end within a token", "len(response))], ids.ends)", "len(response))],)", "tests/replay/test_replay.py -k of_turns_has"),
        ("a replay reads the manifest for each batch", "    @cached_property\n", "    @property\n", "tests/replay/test_replay.py -k manifest_once"),
        ("a replay takes lengths of whole responses", "sum(r.response_mask or [True] * len(r.response_ids))", "len(r.response_ids)", f"{IN_A_RUN} credit_of_turns_trains"),
        ("a replay takes the reward for that of the first turn", "[0.0] * (num_turns - 1) + [reward]", "[reward] + [0.0] * (num_turns - 1)", "tests/replay/test_replay.py -k turns_of_episodes"),
    ),
    Mutation("a later grade does not know which call failed", "rollouts/regrade.py", 'turn_facts=row["turn_facts"],', "", "tests/rollouts/test_collect.py -k since_a_call_failed"),
    Mutation("the template of a prompt counts as its question", "commands/store/filtering/sources.py", "identity=normalized(text))", "identity=normalized(e.question))", "tests/commands/store/test_filter.py -k formatted_prompts"),
    Mutation("words of an unknown template are the question's", "commands/store/filtering/contamination.py", "    if unknown:\n", "    if False:\n", "tests/commands/store/test_filter.py -k unknown_template"),
    Mutation("duplicates hide that a response was graded both ways", "commands/store/filtering/sources.py", 'for_pairs=config.emit == "pairs",', "for_pairs=False,", "tests/commands/store/test_filter.py -k different_truths"),
    Mutation("a warm-up is longer than the run without a word", "training/planning/plan.py", "    notes += warmup_notes(config, most_updates=most_updates)\n", "", "tests/commands/across/test_traps.py -k warm_up"),
    Mutation("the passes of expert iteration make no updates", "commands/ei.py", "most_updates = config.n_ei_steps * updates_per_round", "most_updates = config.n_ei_steps", "tests/commands/across/test_traps.py -k warm_up"),
    Mutation("the pairs of a round make no updates", "commands/dpo.py", "most_updates = config.n_dpo_steps * updates_per_round", "most_updates = config.n_dpo_steps", "tests/commands/across/test_traps.py -k warm_up"),
    Mutation("filter loses worked solutions and turns", "commands/store/filtering/sources.py", "            keeps_traces=True,\n", "", "tests/commands/store/test_filter.py -k sft_reads"),
    Mutation("an answer hides the worked solutions of later rows", "data/examples.py", 'else ("solution", *ANSWER_FIELDS)', 'else (self.found_answer_field or "solution",)', "tests/commands/store/test_filter.py -k sft_reads"),
    Mutation("an answer that is named hides the worked solutions", "data/examples.py", '(self.answer_field, "solution") if', "(self.answer_field,) if", "tests/commands/store/test_filter.py -k is_trained_on_without"),
    Mutation("a null response leaves its prompt unformatted", "data/examples.py", "(first_field(RESPONSE_FIELDS, row.keys) or response_field) is not None", "response_field is not None", "tests/data/test_datasets.py -k handouts_sft"),
    Mutation("a bare prompt is written as one that is formatted", "data/examples.py", 'if (prompt := self.own_prompt(row)) else', 'if (prompt := text_of(row, "prompt")) else', "tests/commands/store/test_filter.py -k is_trained_on_without"),
    Mutation("a bare prompt is read as one that is formatted", "data/examples.py", 'None if self.prompt_is_question else first_field(["prompt"], row.keys)', 'first_field(["prompt"], row.keys)', "tests/data/test_datasets.py -k beside_a_formatted"),
    Mutation("turns of generated data are one text", "commands/store/filtering/rows.py", "if e.turns:", "if False:", "tests/commands/store/test_filter.py -k is_trained_on_without"),
    Mutation("the texts of turns end elsewhere", "commands/store/filtering/rows.py", 'pairwise([0, *row["turn_facts"]["ends"]])', 'pairwise([0, *(e - 1 for e in row["turn_facts"]["ends"])])', "tests/commands/store/test_filter.py -k as_from_the_run"),
    Mutation("episodes are no rows of a file", "commands/store/filtering/sources.py", 'in_turns=config.emit == "traces"', "in_turns=False", "tests/commands/store/test_filter.py -k as_from_the_run"),
    Mutation("a copy of a dataset has no ids of turns", "data/examples.py", "                if ids:\n", "                if False:\n", "tests/commands/store/test_filter.py -k as_from_the_run"),
    Mutation("ids of turns are not read", "data/examples.py", "if turns is not None and ids:", "if False:", "tests/commands/store/test_filter.py -k as_from_the_run"),
    Mutation("all ids of turns are the policy's", "data/examples.py", 'mask = [role == "policy" for', "mask = [True for", "tests/commands/store/test_filter.py -k as_from_the_run"),
    Mutation("turns with ids end where their ids do", "data/examples.py", "return SampledIds(prompt, [i for own in ids for i in own], mask, [*ends])", "return SampledIds(prompt, [i for own in ids for i in own], mask)", "tests/commands/store/test_filter.py -k as_from_the_run"),
    Mutation("some turns may have no ids", "data/examples.py", "if not prompt or not all(ids):", "if not prompt:", "tests/commands/store/test_filter.py -k ids_of_turns"),
    Mutation("other ids of turns are the same traces", "data/traces.py", "ids = [dataset.sampled[e.id]] if e.id in dataset.sampled else []", "ids = []", "tests/commands/store/test_filter.py -k ids_of_turns"),
    Mutation("ids that do not spell their turns are tokenized again", "training/traces.py", "if example.turns is not None and mask is None:", "if example.turns is not None:", "tests/commands/store/test_filter.py -k ids_of_turns"),
    Mutation("bad lines stop a filter", "commands/store/filtering/sources.py", "skip_bad_lines=config.skip_bad_lines,", "skip_bad_lines=False,", "tests/commands/store/test_filter.py -k bad_lines"),
    Mutation("bad lines of held-out questions stop a filter", "commands/store/filter.py", "skip_bad_lines=config.skip_bad_lines,", "skip_bad_lines=False,", "tests/commands/store/test_filter.py -k bad_lines"),
    Mutation("filter holds all rows that it writes", "commands/store/filter.py", "for row in rows_of(items))", "for row in [*rows_of(items)])", "tests/commands/store/test_filter.py -k not_held"),
    Mutation("a Parquet file's rows are all held", "runs/storage/parquet.py", "islice(records, rows_at_once)", "islice(records, None)", "tests/runs/storage/test_parquet.py"),
    Mutation("a column has the type of the first rows", "runs/storage/parquet.py", "pa.unify_schemas(schemas, ", "pa.unify_schemas(schemas[:1], ", "tests/runs/storage/test_parquet.py"),
    Mutation("a commit goes through the metrics of all steps", "runs/storage/parquet.py", 'np.isin(earlier["step"].to_numpy(), [*rows])', "np.ones(earlier.num_rows)", "tests/runs/storage/test_parquet.py"),
    Mutation("too many notes of intact files are all forgotten", "runs/storage/sums.py", "_newest(file, max(MAX_BYTES // 2 - len(text), 0)) + text, os.O_TRUNC", "text, os.O_TRUNC", "tests/reliability/test_corruption.py -k newest_notes"),
    Mutation("texts have bounds", "runs/storage/parquet.py", "f.name == \"phase\" or", "pa.types.is_string(f.type) or", "tests/runs/storage/test_parquet.py"),
    Mutation("columns without a value are compressed", "runs/storage/parquet.py", "for name in filled if", "for name in schema.names if", "tests/runs/storage/test_parquet.py"),
    Mutation("the least likely sample is the best", "analysis/queries/sql/at_k.sql", "logprob DESC NULLS LAST", "logprob NULLS LAST", "tests/analysis/statistics/test_at_k.py"),
    *mutations_of(
        "analysis/queries/sql/at_k.sql",
        ("a vote for a number is one for its spelling", "WHEN length(answer) <= 15 AND", "WHEN false AND", "tests/analysis/statistics/test_at_k.py -k spelling"),
        ("white space splits votes", r" \B|\B ", r"$^", "tests/analysis/statistics/test_at_k.py -k spelling"),
        ("white space between digits is dropped from votes", r" \B|\B ", r" ", "tests/analysis/statistics/test_at_k.py -k differ"),
    ),
    Mutation("ties are graded as wrong answers", "commands/store/grade.py", "answered(list(map(read_run, named.runs or [latest_run(config.runs_dir)])))", "list(map(read_run, named.runs or [latest_run(config.runs_dir)]))", "tests/commands/store/test_grade.py -k wins_and_scores"),
    Mutation("a batch without signal counts as none", "commands/sources/sampling.py", 'any(phase == "train" and', 'any(False and', "tests/commands/test_grpo.py -k without_signal_is"),
    Mutation("a refused question ends all evaluations", "commands/eval.py", "refused.append(error)", "raise", "tests/commands/test_end_to_end.py -k refuses_keeps"),
    Mutation("a question has pairs of each prompt", "commands/dpo.py", "pairs[: config.pairs_per_question]", "pairs", "tests/commands/test_dpo.py -k prompt"),
    Mutation("a damaged state.json says how long a run is", "training/checkpoints.py", "if not whole or {name: type(value)", "if {name: type(value)", "tests/training/test_checkpoints.py -k newest_position"),
    Mutation("an option without effect is another one", "sweeps/continued.py", "return error.option == name", "return False", "tests/sweeps/test_continued.py -k without_effect"),
    Mutation("files with equal ids have prompts of an environment", "analysis/queries/selection.py", "PARTITION BY run_id, min(phase), min(example_id), min(ground_truth)", "PARTITION BY run_id, min(example_id)", "tests/commands/store/test_filter.py -k one_id"),
    Mutation("a notebook counts ties as wrong", "notebook.py", "with_accuracy(infos, query) if query in OF_ANSWERS else infos", "infos", "tests/commands/store/test_analyze.py -k have_no_accuracy"),
    Mutation("ties are a held-out reward", "analysis/queries/sql/curves.sql", "IN ('discover', 'pairwise')", "= 'discover'", "tests/commands/store/test_analyze.py -k have_no_accuracy"),
    Mutation("graders differ in silence", "analysis/statistics/comparison.py", "*_grader_notes(answers, shared),", "", "tests/analysis/statistics/test_comparison.py -k another_grader"),
    Mutation("three questions detect everything", "analysis/statistics/comparison.py", "if promises and enough else", "if promises else", "tests/analysis/statistics/test_comparison.py -k says_why"),
    Mutation("no word on why nothing is decided", "analysis/statistics/sweep_table.py", "least = c.too_few or NOT_PROMISED", "least = NOT_PROMISED", "tests/analysis/statistics/test_comparison.py -k says_why"),
    Mutation("a notebook ignores the directory of runs of the environment", "notebook.py", 'environment_values().get("runs_dir", "runs") if runs_dir is None', '"runs" if runs_dir is None', "tests/test_notebook.py -k of_the_environment"),
    Mutation("a text is taken letter by letter in a notebook", "notebook.py", "flags = {**given, ", "flags = {**self.options, ", "tests/test_notebook.py -k text_is_one_value"),
    Mutation("a notebook takes runs of one name for one", "notebook.py", "return read_runs(self.paths)", "return [read_runs([path])[0] for path in self.paths]", "tests/test_notebook.py -k several_runs"),
    *(
        Mutation(f"runs of one name are one: {file}, {text.strip()[:30]}", file, text, fault, f"tests/{tests}")
        for file, text, fault, tests in (
            ("runs/several.py", "info.id for info in infos}) == len(infos)", "info.path for info in infos}) == len(infos)", "runs/test_several.py"),
            ("analysis/queries/database.py", "        if are_renamed:", "        if False:", "analysis/queries/test_database.py -k one_name"),
            ("analysis/queries/run_list.py", "zip(paths, telling_names(paths), strict=True)", "((path, path.name) for path in paths)", "commands/store/test_runs.py -k one_name"),
            ("analysis/live/rollouts.py", "key = tuple((info.id, info.path,", "key = tuple((info.path,", "analysis/live/test_server.py -k lent_again"),
            ("analysis/live/server.py", "dict(zip(telling_names(runs), runs, strict=True))", "{path.name: path for path in runs}", "analysis/live/test_server.py -k one_name"),
            ("analysis/live/server.py", "infos = read_named(library.chosen(request.query_params))", "infos = [read_named({path.name: path})[0] for path in library.chosen(request.query_params).values()]", "analysis/live/test_server.py -k one_name"),
            ("analysis/live/pages.py", "infos = read_named(paths)", "infos = [read_named({path.name: path})[0] for path in paths.values()]", "analysis/live/test_server.py -k one_name"),
            ("runs/several.py", "[replace(read_run(path), id=name) for", "[read_run(path) for", "analysis/live/test_server.py -k copy_of"),
            ("analysis/report/build.py", "infos = read_here(runs)", "infos = [read_here([path])[0] for path in runs]", "analysis/report/test_report.py -k one_name"),
            ("analysis/statistics/pairwise.py", "        return [str(name) for name in typed]", "        pass", "commands/test_pairwise.py -k one_name"),
            ("commands/store/analyzing/asked.py", "    infos = read(paths)", "    infos = [read([path])[0] for path in paths]", "commands/store/test_analyze.py -k one_name"),
            ("commands/store/analyzing/compared.py", ", read=read_here)", ")", "commands/store/test_analyze.py -k one_name"),
            ("runs/several.py", "zip(telling_names(distinct), distinct,", "zip((path.name for path in distinct), distinct,", "commands/store/test_analyze.py -k one_name"),
            ("commands/store/filtering/sources.py", "infos = read_runs(named.runs)", "infos = [read_runs([path])[0] for path in named.runs]", "commands/store/test_filter.py -k several_runs"),
            ("commands/store/grade.py", "zip(telling_names(paths), changes.values(), strict=True)", "((path.name, its) for path, its in changes.items())", "commands/store/test_grade.py -k several_runs"),
        )
    ),
    Mutation("a run of a sweep has no name", "runs/readers.py", 'return not {"", ".", ".."} & set(name.split("/"))', 'return "/" not in name', "tests/commands/store/test_runs.py -k sweeps"),
    Mutation("a run of a sweep is found once, and then no more", "runs/provenance.py", "resume=place if is_address(place) else os.path.join(os.curdir, place))", "resume=config.resume)", "tests/runs/test_provenance.py -k sweep"),
    Mutation("a run that was moved is continued in its old place", "runs/provenance.py", "os.path.join(os.curdir, place))", "place)", "tests/runs/test_provenance.py -k moved"),
    Mutation("a link to a run is another run", "runs/readers.py", "sorted({path.resolve(): path for path in found}.values())", "sorted(found)", "tests/commands/store/test_runs.py -k and_once"),
    Mutation("a link hides the run", "runs/readers.py", "key=Path.is_symlink, reverse=True)", "key=Path.is_symlink)", "tests/commands/store/test_runs.py -k and_once"),
    Mutation("sums are decimals in a notebook", "notebook.py", "*map(_plain, table.columns)", "*table.columns", "tests/test_notebook.py -k numbers_are_plain"),
    Mutation("differences of times are intervals in a notebook", "notebook.py", "if str(column.type) == INTERVAL:", "if False:", "tests/test_notebook.py -k are_durations"),
    Mutation("months are durations in a notebook", "notebook.py", "any(value.months for", "any(False for", "tests/test_notebook.py -k are_durations"),
    Mutation("queries of users take counts only", "commands/store/analyzing/asked.py", "value is None or query.name not in named_queries()", "value is None", "tests/test_notebook.py -k own_query"),
    Mutation("a parameter takes what its option refuses", "commands/store/analyzing/asked.py", "        resolve(AnalyzeConfig, flags=flags, command=\"analyze\")\n", "        del flags\n", "tests/test_notebook.py -k cannot_be"),
    Mutation("pictures in threads take the streams away", "notebook.py", "with DRAWING, ", "with ", "tests/test_notebook.py -k in_threads"),
    Mutation("of two columns of one name one is lost", "notebook.py", ".rename_columns(tables.unique(table.column_names))", "", "tests/test_notebook.py -k one_name"),
    Mutation("the baseline has one accuracy for all", "analysis/statistics/sweep_table.py", "of_both = (c.a.accuracy, c", "of_both = (next(iter(found.values())).a.accuracy, c", "tests/commands/store/test_analyze.py -k other_questions"),
    Mutation("a constant without effect is taken", "analysis/queries/sql/objective.sql", "WHEN $normalize_constant IS NOT NULL AND NOT own", "WHEN false", "tests/commands/store/test_analyze.py -k objective_in_words"),
    Mutation("a rule beside labels is passed over", "commands/store/analyzing/compared.py", 'if config.labels and parameters["rule"]:', "if False:", "tests/analysis/statistics/test_judge_agreement.py -k says_what_to_do"),
    Mutation("queries of users use the disk", "commands/store/analyze.py", 'spills=query.name == "at_k"', "spills=True", "tests/commands/store/test_analyze.py -k uses_the_disk"),
    Mutation("at_k does not use the disk", "commands/store/analyze.py", 'spills=query.name == "at_k"', "spills=False", "tests/commands/store/test_analyze.py -k uses_the_disk"),
    Mutation("all rollouts of a run are read when it ends", "analysis/run_end.py", "if not info.grades:", "if False:", "tests/analysis/test_run_end.py -k evaluation_alone"),
    Mutation("when a run ends, a judge's part is not told", "analysis/run_end.py", "if not info.grades:", "if True:", "tests/analysis/statistics/test_alarms.py -k parts_from_a_rule"),
    Mutation("alarms are told again with more memory", "analysis/run_end.py", "            are_told = True\n", "", "tests/analysis/test_run_end.py -k told_once"),
    *mutations_of(
        "analysis/statistics/alarms.py",
        ("curves are those of another run", "_found(info, curves[info.id], ", "_found(info, next(iter(curves.values())), ", "tests/analysis/statistics/test_alarms.py -k its_own"),
        ("verdicts are those of another run", ", disagreement[info.id])", ", next(iter(disagreement.values())))", "tests/analysis/statistics/test_alarms.py -k its_own"),
        ("the alarms of each run are asked for by themselves", "        if len(batch) > 1:", "        if False:", "tests/analysis/statistics/test_alarms.py -k its_own"),
        ("the metrics of all runs are in memory at once", "        if not batches or rows > room:", "        if not batches:", "tests/analysis/statistics/test_alarms.py -k its_own"),
        ("an infinite metric is part of a trend", "if math.isfinite(curve[step])]", "if curve[step] == curve[step]]", "tests/analysis/statistics/test_alarms.py -k infinite"),
    ),
    Mutation("all rollouts are read through a database of their own", "analysis/report/rollouts.py", "nullcontext(whole) if is_whole else", "nullcontext(whole) if False else", "tests/analysis/report/test_report.py -k one_for_each_summary"),
    Mutation("a summary has no more memory than what may spill", "analysis/queries/database.py", "except MemoryNeeded:", "except KeyError:", "tests/analysis/test_summary.py -k cannot_be_spilled"),
    Mutation("what may spill has many threads", "analysis/queries/database.py", '"1" if spill or rows', '"1" if rows', "tests/analysis/queries/test_database.py -k spill"),
    Mutation("sorting many rows has the memory of few", "analysis/queries/database.py", "max(1, rows / 1e6) ** 0.5", "1", "tests/analysis/queries/test_database.py -k spill"),
    Mutation("categories add up fractions", "analysis/queries/sql/categories.sql", "sum(hits * hits) AS", "sum(hits * (hits / 3)) * 3 AS", "tests/analysis/queries/test_sql.py -k same_bits"),
    *mutations_of(
        "analysis/queries/database.py",
        ("lengths are of what the environment said, too", "coalesce(struct_extract(episode, 'num_policy_tokens'), tokens)", "tokens", "tests/analysis/queries/test_sql.py -k length_of_an_episode"),
    ),
    *mutations_of(
        "analysis/statistics/grade_changes.py",
        ("what an environment said is punished", "policy_tokens(episode, num_response_tokens) AS tokens", "num_response_tokens AS tokens", "tests/commands/store/test_grade.py -k not_punished"),
    ),
    *mutations_of(
        "environments/repeat.py",
        ("prompts are not compared", "if said.prompt != again.prompt:", "if False:", REPEATED),
        ("texts alone are compared", "asdict(first).items():", '[("text", first.text)]:', REPEATED),
        ("what a program prints is the environment's doing", 'if self._pool.spec.name == "python" and "python" in roles:', "if False:", REPEATED),
        ("rewards that are nearly equal are shown as equal", "range(6, 18)", "range(6, 7)", f"{REPEATED} -k as_few_digits"),
        ("an episode that was not compared counts", "self._pool.unrepeated += len(self._pending)", "pass", REPEATED),
    ),
    *mutations_of("environments/pool.py", ("all calls of a turn have the time of one", "calls = self._num_calls(turns[-1]) if turns else 0", "calls = 0", "tests/environments/test_pool.py -k each_call"), ("the same process plays again", "(seed + 1) % len(self._slots)", "seed % len(self._slots)", REPEATED)),
    *mutations_of("training/trainer.py", ("a run trains in an environment that is no function", "trains=True", "trains=False", f"{IN_A_RUN} no_function")),
    *mutations_of("commands/evaluation/answering.py", ("an evaluation is refused for its environment", "trains=False", "trains=True", f"{IN_A_RUN} no_function")),
    *mutations_of("environments/python.py", ("what is cut of a program's output is not said", "if execution.num_printed > OUTPUT_BYTES:", "if False:", "tests/environments/test_tools.py -k prints_much")),
    *mutations_of(
        "rollouts/grading.py",
        ("a format that is wrong is a missing call", "if episode and kind in WRONG_KINDS:", "if episode and kind:", "tests/rollouts/test_grading.py"),
        ("an answer that filled an episode was never asked for", 'or facts["ends"][-1] > episode["graded_to"]', "", "tests/rollouts/test_grading.py"),
        ("any failed call is the last", "turn >= last for", "turn >= 0 for", "tests/rollouts/test_grading.py"),
        ("an environment that always failed is a grader that failed", "    if worst.failure_kind == ENVIRONMENT_ERROR:", "    if False:", f"{IN_A_RUN} always_fails"),
        ("an environment that failed is a grader that failed", "return ENVIRONMENT_ERROR", "return None", f"{IN_A_RUN} limits_of_episodes"),
    ),
    *mutations_of(
        "rollouts/metrics.py",
        ("episodes have no metrics", "(values | episode_values(row)).items()", "values.items()", f"{IN_A_RUN} has_their_metrics"),
        ("the environment's share is the policy's", 'said / max(', 'episode["num_policy_tokens"] / max(', "tests/rollouts/test_metrics.py"),
    ),
    *mutations_of("analysis/report/build.py", ("the curve of turns is that of evaluations", '"turns": ("train", ', '"turns": ("eval", ', f"{IN_A_RUN} its_report")),
    Mutation("the page does not say what a judge said", "analysis/report/rollouts.py", 'judgement = row["judgement"] and {', 'judgement = None and {', "tests/analysis/report/test_report.py -k judge_said"),
    *mutations_of(
        "analysis/report/episodes.py",
        ("the page counts a turn's characters as Python does", "texts = [units(text[start:end])", "texts = [len(text[start:end])", CONVERSATION),
        ("the page marks no failed call", '(own in facts["failed"])', "0", CONVERSATION),
        ("the page marks no forged answer", '(own in facts["forged"])', "0", CONVERSATION),
        ("an episode that does not fit its turns stops the page", "if turns and facts and len(facts[\"ends\"]) == len(turns):", "if turns and facts:", "tests/analysis/report/test_report.py -k does_not_fit_its_turns"),
    ),
    *mutations_of(
        "rollouts/regrade.py",
        ("a grade that failed is taken for one", "failed=failed, left=left", "failed=0, left=left", "tests/commands/store/test_grade.py -k failed"),
        ("an interrupted --again keeps the grades before it", "if not before.failed or before.grader_sha256", "if before.grader_sha256", "tests/runs/test_grades.py -k planning_tells"),
        ("an interrupted --again of failed grades is not known", "            on_all[p] = first[p]  #", "            pass  #", "tests/commands/store/test_grade.py -k had_all_failed"),
        ("the failed grade of another file is one that was tried again", "on_all[p].number <= attempt.number < first", "attempt.number < first", "tests/runs/test_grades.py -k planning_tells"),
        ("grades of an earlier file are kept", "if not before.failed or before.grader_sha256 != attempt.grader_sha256:", "if not before.failed:", "tests/runs/test_grades.py -k planning_tells"),
        ("what is done when a judge is given up is lost", "except (Interrupted, RlvrError):", "except Interrupted:", "tests/rollouts/test_regrade.py"),
        ("a stop loses the batches that are done", "            if grades.done() and grades.exception() is None:\n                yield", "            if False:\n                yield", "tests/rollouts/test_regrade.py"),
        ("what has a grade is tried again", "elif last.failed:", "else:", "tests/commands/store/test_grade.py -k tried_once_more"),
        ("the environment's text is graded again", 'row["response"][episode["graded_from"] : episode["graded_to"]]', 'row["response"]', f"{IN_A_RUN} grading_again"),
    ),
    *mutations_of(
        "training/traces.py",
        ("a conversation that cannot be written has no name", 'f"Trace {name}: {error.problem}"', "error.problem", "tests/training/test_traces.py"),
        ("all traces are tokenized at once", "_AT_ONCE = 100", "_AT_ONCE = 10**9", "tests/commands/test_sft.py -k four_bytes"),
        ("what a tool said is trained on", 'mask += [role == "policy"] * len(own)', "mask += [True] * len(own)", f"{IN_A_RUN} traces_with_turns"),
    ),
    *mutations_of(
        "replay/sampling.py",
        ("the minimum is of the whole episode", "if row.episode is None or row.turns is None:", "if True:", f"{IN_A_RUN} replays"),
    ),
]  # fmt: skip

GYM = "tests/data/test_reasoning_gym.py -k"
GYM_GRADER = "tests/graders/test_reasoning_gym.py -k"
REASONING_GYM = [
    *mutations_of(
        "graders/reasoning_gym.py",
        ("an answer that a scorer cannot read is a failed grade", '        scorer.score_answer(entry["answer"] or "", entry)', "        raise", f"{GYM_GRADER} as_the_package"),
        ("tuples of an entry become lists", '{"__tuple__": [_written(item) for item in value]}', "[_written(item) for item in value]", f"{GYM_GRADER} after_it_was_stored"),
        ("the options of a family are not stored", '"config": dict(config), "entry"', '"config": {}, "entry"', f"{GYM_GRADER} after_it_was_stored"),
        ("an answer calls any function", "isinstance(function, ast.Name) and function.id in _FUNCTIONS and not keywords", "not keywords", f"{GYM_GRADER} may_be_evaluated"),
        ("a list that calls a function is evaluated", "all(isinstance(node, _LIST_NODES) for node in nodes)", "True", f"{GYM_GRADER} may_be_evaluated"),
        ("a formula that Python cannot read is evaluated", "return family in EVALUATED_LISTS  #", "return True  #", f"{GYM_GRADER} may_be_evaluated"),
    ),
    *mutations_of(
        "data/reasoning_gym.py",
        ("evaluations have the size of training", 'if not pair.startswith("size=")', "if True", f"{GYM} their_own_size"),
        ("the seed of a specification is lost", 'config.pop("seed", seed)', "seed", f"{GYM} options_of_any_kind"),
        ("the limit is not the size", "limit or SIZE", "SIZE", f"{GYM} options_of_any_kind"),
        ("families in a mixture are not checked", '        _check_parts(spec.config.get("datasets"))\n', "        pass\n", f"{GYM} has_its_options"),
    ),
    *mutations_of(
        "config/shared/questions.py",
        ("options of a family begin another dataset", "if of_family and", "if False and", f"{GYM} begin_another_dataset"),
        ("a comma in a list ends an option", 'character == "," and depth <= 0', 'character == ","', f"{GYM} options_of_any_kind"),
    ),
    *mutations_of(
        "environments/open.py",
        ("a policy is told of tools of verifiers that came later", "VerifiersEnvironment(loaded, loop, schemas)", "VerifiersEnvironment(loaded, loop, schemas_of(loaded))", "tests/environments/test_verifiers.py -k not_told_of"),
        ("an environment of verifiers may change within a run", "digests = verifiers.digests(self.name)", "pass", "tests/environments/test_tools.py -k module_of_a"),
        ("a family of reasoning-gym is no dataset", "elif spec.name.startswith(REASONING_GYM):", "elif False:", "tests/environments/test_tools.py -k family"),
    ),
]  # fmt: skip

RUBRIC = "tests/environments/test_verifiers.py -k"
VERIFIERS = [
    *mutations_of(
        "environments/verifiers.py",
        ("the calls of a turn are lost", "tool_calls=calls or None", "tool_calls=None", f"{RUBRIC} answers_its_calls"),
        ("an environment draws without the seed", 'random.seed(f"{self._seed} {self._turns}")', "random.seed()", f"{RUBRIC} side_by_side"),
        ("the system prompt is lost", "if system_prompt else []", "if False else []", f"{RUBRIC} of_another_dataset"),
        ("what an unknown tool says is the tool's", "if names[call] not in _names_of(self.schemas):", "if False:", f"{RUBRIC} answers_its_calls"),
        ("a policy is not told of the tools of a row", "if _schemas(tools) != self._tools:", "if False:", f"{RUBRIC} not_told_of"),
        ("a reward function that raised is passed over", "if self._caught.rewards:", "if False:", f"{RUBRIC} that_raises"),
    ),
    *mutations_of(
        "data/packages/verifiers.py",
        ("the arguments of an environment are lost", "load_environment(name, **arguments)", "load_environment(name)", f"{RUBRIC} environments_rows"),
        ("a version of verifiers without such environments is loaded", 'if not found.startswith(f"{PLAYED}."):', "if False:", f"{RUBRIC} without_such_environments"),
        ("an environment counts the time in which the policy samples", "one.timeout_seconds = None", "pass", f"{RUBRIC} own_does_not_count"),
        ("environments of a group keep their time limits", "members = members_of(environment)", "members = [environment]", f"{RUBRIC} own_does_not_count"),
        ("reward functions of a group of rubrics may raise", 'for member in getattr(rubric, "rubrics", ())', "for member in ()", f"{RUBRIC} that_raises"),
        ("what is no number is a reward", "            float(value)\n", "", f"{RUBRIC} that_raises"),
        ("failed calls of tools count as others", "one.error_formatter = _telling(one.error_formatter)", "pass", f"{RUBRIC} answers_its_calls"),
        ("environments of a group may have other tools", "if any((one.tool_defs or [])", "if False and any((one.tool_defs or [])", f"{RUBRIC} cannot_be_loaded"),
        ("an environment that scores nothing is played", "if not one.score_rollouts:", "if False:", f"{RUBRIC} cannot_be_loaded"),
        ("the size of a specification is lost", "min(filter(None, (wanted.size, limit)), default=None)", "limit", f"{RUBRIC} environments_rows"),
        ("evaluations have training questions", "table = environment.get_eval_dataset()", "table = environment.get_dataset()", f"{RUBRIC} environments_rows"),
    ),
    *mutations_of(
        "config/shared/episodes.py",
        ("questions of verifiers are graded without it", "if any(VERIFIERS in name for name in asked) and", "if False and", f"{RUBRIC} without_their_environment"),
        ("questions of verifiers for evaluations are graded without it", '("dataset", "eval_dataset"))', '("dataset",))', f"{RUBRIC} without_their_environment"),
    ),
]  # fmt: skip

SERVED = "tests/analysis/live/test_server.py -k "
EMULATED = [  # waits, precisions and shapes on a CUDA device; no number changes
    *mutations_of(
        "training/updates/scores.py",
        ("the host waits for scores and for values", "to_host([tensor for tensors in found.values() for tensor in tensors])", "[t for tensors in found.values() for t in to_host(tensors)]", f"{ON_CUDA} -k scores"),
    ),
    *mutations_of(
        "training/updates/micro_batches.py",
        ("the fused kernels are not used in updates", "            computing.enter_context(network.fused_kernels())\n", "", f"{ON_CUDA} -k each_option"),
    ),
    *mutations_of(
        "training/optimizers/adamw_8bit.py",
        ("tables go to the device in every step", "if device not in self._shares:", "if True:", f"{ON_CUDA} -k each_option"),
        ("the part that was rounded away has 32 bits", '{"compensation": slot_like(parameter)}', '{"compensation": slot_like(parameter, dtype=torch.float32)}', f"{ON_CUDA} -k each_option"),
    ),
    *mutations_of(
        "training/optimizers/adamw_kahan.py",
        ("the number of steps is read from the device", 'float(state["step"])', 'float(state["step"].to(parameter.device))', f"{ON_CUDA} -k each_option"),
        ("moments have 32 bits", "dict.fromkeys(kept, slot_like(parameter))", "dict.fromkeys(kept, slot_like(parameter, dtype=torch.float32))", f"{ON_CUDA} -k each_option"),
    ),
    *mutations_of(
        "training/optimizers/offload.py",
        ("the host waits for weights on their way back", "parameter.copy_(rounded, non_blocking=True)", "parameter.copy_(rounded)", f"{ON_CUDA} -k each_option"),
        ("weights go back from memory that is not pinned", "pin_memory=tensor.is_cuda", "pin_memory=False", f"{ON_CUDA} -k each_option"),
    ),
    *mutations_of(
        "models/adapter.py",
        ("the adapter of a bfloat16 model computes in float32", "cast = enabled and self.compute_dtype.itemsize < 4", "cast = enabled and self.compute_dtype != self.dtype", f"{ON_CUDA} -k each_option"),
    ),
    *mutations_of(
        "models/log_probs.py",
        ("products in half precision have any number of rows", "rows_multiple(policy.compute_dtype, policy.device)", "1", f"{UPDATE} -k full_blocks"),
        ("rows are not packed", '"packed": policy.packs_rows', '"packed": False', f"{ON_CUDA} -k each_option"),
    ),
    *mutations_of(
        "samplers/embedded/engine.py",
        ("graphs are recorded again in every call", "not spare.step.refresh(self._policy)", "True", f"{SAMPLED_ON_CUDA} -k next_call"),
        ("long prompts are copied", "if saved >= _SHARED_TOKENS * len(questions):", "if False:", f"{SHARED} -k holds_shared"),
        ("what was taken out waits for rows that wait", "if ready or upcoming or batch.parked.lacks_rows:", "if ready or upcoming:", f"{JOINING} -k rows_that_wait"),
        ("free rows wait until a fifth is free", "_REFILL_BELOW if policy.device.type", "_REFILL_BELOW_ELSEWHERE if policy.device.type", f"{ENGINE} -k twentieth"),
        ("short prompts are not copied", "if saved >= _SHARED_TOKENS * len(questions):", "if True:", f"{SHARED} -k are_copied"),
        ("prompts that rows share take no memory", "_PADDED_SHARE * cache * max(", "0 * cache * max(", f"{SHARED} -k holds_shared"),
        ("prompts come beyond the memory", "batch.live and batch.cache.shared_bytes >= shared_bytes", "False", f"{SHARED} -k memory_is_full"),
        ("all prompts are padded to the longest", "if rows * length - known > padding:", "if False:", f"{ENGINE} -k padded_to_the_longest"),
        ("prompts that begin otherwise are computed together", " and upcoming[0].common == common", "", f"{ENGINE} -k computed_whole"),
        ("copies of what prompts begin with take no memory", "max(rows * length, rows * (len(common) + length) // _HELD_BY_COMMON)", "rows * length", f"{ENGINE} -k no_more_memory"),
    ),
    *mutations_of(
        "samplers/parallel/process.py",
        ("a sampling process gets no examples to play with", "asdict(request if self.plays_episodes else replace(request, example=None))", "asdict(replace(request, example=None))", MEASURED),
    ),
    Mutation("sampling processes play no episodes", "samplers/parallel/serve.py", "    if not episodes:\n", "    if True:\n", MEASURED),
    *mutations_of(
        "samplers/embedded/attention.py",
        ("a block has the mask of the first rows", "mask[rows.start // heads : rows.stop // heads, :, columns]", "mask[: (rows.stop - rows.start) // heads, :, columns]", f"{SHARED} -k in_blocks"),
        ("blocks of half precision are not read as operands", "as_operand(keys[rows, columns], keys.dtype).transpose", "keys[rows, columns].transpose", f"{ROWS} -k same_tokens"),
    ),
    *mutations_of(
        "samplers/embedded/shared.py",
        ("parts of attention weigh the same", "torch.sigmoid(other.log_sum - one.log_sum)", "torch.full_like(one.log_sum, 0.5)", SHARED),
        ("a row reads the prompt of another question", "prefix.rows] = own.", "prefix.rows] = places_of[index - 1, :, : len(prefix.rows)].", SHARED),
        ("prompts that are kept are the first ones", "torch.tensor(kept, device", "torch.arange(len(kept), device", SHARED),
        ("a row without a prompt reads another's", "log_sum.masked_fill_(self._lacking, -torch.inf)", "pass", SHARED),
        ("padding of prompts is read", "row[:, length:] = -torch.inf", "row[:, length:] = 0", SHARED),
    ),
    *mutations_of(
        "samplers/embedded/prefill.py",
        ("a turn's new tokens have the places of the old ones", "(tokens, known[of] + nth,", "(tokens, nth,", f"{DECODE_STEP} -k several_tokens"),
        ("what a token attends to goes to another", "-1).index_select(0, self.back)", "-1)[: len(self.back)]", f"{DECODE_STEP} -k several_tokens"),
        ("new tokens see those after them", "since[:, None, None] > np.arange(most)[:, None]", "since[:, None, None] >= most + 0 * np.arange(most)[:, None]", f"{DECODE_STEP} -k several_tokens"),
        ("new tokens see what others wrote into their row", " < end[:, None]), -1, most)", " < column), -1, most)", f"{DECODE_STEP} -k several_tokens"),
        ("new tokens overwrite the first ones of their row", "start[of] - 1 - (nth - gap[of])", "start[of] - (nth - gap[of])", f"{DECODE_STEP} -k several_tokens"),
        ("what was written while a row waited is visible", "later=added(since == most)", "later=added(since > most)", f"{DECODE_STEP} -k several_tokens"),
    ),
    *mutations_of(
        "samplers/embedded/decode_step.py",
        ("a row asks another's keys", "slots[:, :, seen].index_select(0, rows)", "slots[:, :, seen].index_select(0, rows.sort().values)", f"{DECODE_STEP} -k several_tokens"),
        ("a prompt's tokens see those after them", "-torch.inf).triu(before + 1)", "-torch.inf).triu(most)", f"{DECODE_STEP} -k prefill_gives"),
        ("prompts are placed as if nothing came before them", "known=np.full(len(prompts), before)", "known=np.full(len(prompts), 0)", f"{DECODE_STEP} -k prefill_gives"),
        ("padding counts to a prompt", "ends = [before + len(prompt) for", "ends = [before + most for", f"{DECODE_STEP} -k prefill_gives"),
        ("a CPU rounds attention's weights", "(as_operand(states, keys.dtype) for states in (query, keys, values))\n        flash", "(states.to(keys.dtype) for states in (query, keys, values))\n        flash", f"{ENGINE} -k agree_in_the_precision"),
        ("masked attention on CUDA reads keys for several heads", "grouped = flash or", "grouped = True or", "tests/samplers/embedded/test_sampling_on_cuda.py -k no_scores"),
    ),
    *mutations_of(
        "samplers/embedded/cache.py",
        ("a row that goes on sees the columns in which it waited", "if any(news) or spare.any():", "if any(news):", "tests/samplers/embedded/test_joining.py -k go_on_in_its_columns"),
        ("what prompts begin with is computed for each call", "if common not in self._common:", "if True:", f"{ENGINE} -k computed_once"),
    ),
    Mutation("the engine does not know what the prompts of episodes begin with", "samplers/episodes/sampler.py", ', "common_prefix": request.common_prefix}', "}", "tests/samplers/episodes/test_sampler.py -k told_what"),
    *mutations_of(
        "rollouts/requests.py",
        ("what is stored does not count to what prompts have in common", "common = common_prefix(prompts)", "common = common_prefix([p for e, p in zip(examples, prompts, strict=True) if run.missing_indices(phase, step, e.id, num_samples=num_samples)])", "tests/rollouts/test_requests.py"),
    ),
    *mutations_of(
        "samplers/embedded/questions.py",
        ("the last token of a template counts, which the question may change", "tuple(ids[:-1]) for text", "tuple(ids) for text", f"{ENGINE} -k computed_once"),
        ("a prompt is taken to begin as its template says", " and (*ids[: len(common)],) == common", "", f"{ENGINE} -k computed_whole"),
        ("short templates get a pass of their own", "if len(common) >= COMMON_TOKENS and", "if common and", f"{ENGINE} -k computed_whole"),
        ("what follows a row that has moved goes on in another", "{key: moved.get(row, row) for", "{key: row for", JOINING),
        ("rows wait for what never comes", " or not awaits(key)]", "]", JOINING),
        ("what is taken out waits for what never comes", "prefix in self._out.items() if awaits(key)}", "prefix in self._out.items()}", JOINING),
        ("a row without room is kept", "                self._cache.release([row])\n        self.coming = later", "                pass\n        self.coming = later", JOINING),
        ("what is taken out takes all the memory", " and known <= room", "", JOINING),
        ("a row whose question has come is taken out", " and key not in wanted", "", JOINING),
        ("what was taken out gets a row that is not free", "return not (passes and self._cache.free)", "return not passes", JOINING),
        ("a row whose newest token is known waits for a pass", "return not passes and self._cache.known(row) < num_prompt_tokens - 1", "return not passes", f"{JOINING} -k without_a_pass"),
        ("a row does not wait for the step that reads its newest token", "            return steps\n", "            return False\n", f"{JOINING} -k without_a_pass"),
        ("a question that has no row is forgotten", "                later.append(question)\n", "", JOINING),
    ),
    *mutations_of(
        "samplers/embedded/cache.py",
        ("a row that moves leaves its prompt behind", "prefix.rows = [moved.get(row, row) for row in prefix.rows]", "pass", f"{SHARED} -k tokens_of_copies"),
        ("a row that moves has another's prompt", "self._shared[moved.get(row, row)] = prefix", "self._shared[row] = prefix", f"{SHARED} -k tokens_of_copies"),
        ("rows are never ordered", "return self._wasted > _ORDER_COST * self._needed", "return False", f"{ROWS} -k fewer_columns"),
        ("what an order would waste is credit", "self._waste = max(0, read - self._needed)", "self._waste = read - self._needed", f"{ROWS} -k counted"),
        ("what free rows read is needed", "np.sort(start[used])", "np.sort(first)", f"{ROWS} -k counted"),
        ("rows of fixed shapes are ordered", "self._step is not None and self._fixed_step is None and", "self._step is not None and", f"{ROWS} -k counted"),
        ("rows are ordered at each step", "            self._wasted = 0\n", "            pass\n", f"{ROWS} -k fewer_columns"),
        ("what is wasted is counted once", "self._wasted += self._waste", "self._wasted = self._waste", f"{ROWS} -k fewer_columns"),
        ("moved keys begin where the window does not", "int(self._start[of[b]].min())", "int(self._start[of[b]].max())", f"{ROWS} -k ordered"),
        ("a block begins where its first row does", "low = min(low, lows[i])", "low = lows[i]", f"{ROWS} -k read_fast"),
        ("another block costs nothing", "best[i][0] + each + (borders", "best[i][0] + (borders", f"{ROWS} -k read_fast"),
        ("a row that stands beyond the last place stays there", " & (orders < len(rows))", "", f"{ROWS} -k similar_length"),
        ("the longest rows come first, whoever has to move for it", "home.sum(1).argmax()", "0", f"{ROWS} -k stay_where"),
        ("what waited with gaps is taken out with them", "if self._gaps[row]:", "if False:", JOINING),
        ("free rows run out of positions", "self._changed = self._freed = True", "self._changed = True", f"{ROWS} -k first_position"),
        ("all rows move", "home = (orders // _BLOCK == places // _BLOCK)", "home = (orders < 0)", f"{ROWS} -k similar_length"),
        ("a row has the place of its own tokens alone", "self.positions[at] = len(prompt_ids) - 1", "self.positions[at] = length", f"{SHARED} -k tokens_of_copies"),
        ("what was written while a row waited is taken out with it", "int(self._end[row]))", "self.window.column)", JOINING),
        ("what a row waited for counts as its tokens", "self._gaps[rows] += spare.clip(0)", "pass", JOINING),
        ("what a step read of a row that waits is not kept", "self._end[self._unread] = w.column", "pass", f"{JOINING} -k without_a_pass"),
        ("what a row waited for counts as read", "        self._unread[:] = False\n", "        pass\n", JOINING),
        ("a newest token that nothing follows is read twice", "self._end[rows] -= known == lengths", "pass", f"{DECODE_STEP} -k several_tokens"),
        ("what a step reads of a row that waits is placed at 0", "~(self.alive | self._unread)[: w.rows", "~self.alive[: w.rows", f"{JOINING} -k without_a_pass"),
        ("a row goes on without room for it", "+ tokens < self.columns)", "+ tokens < 10**9)", JOINING),
        ("a row begins where it began before", "self._start[rows] += spare.clip(max=0)", "pass", JOINING),
        ("no room is made before a row", "if lacking > w.low:", "if False:", JOINING),
        ("a row that waits is given to others", "rows = np.flatnonzero(~self.used)[:most]", "rows = np.flatnonzero(~self.alive)[:most]", JOINING),
        ("a row that waits is lost when columns move", "for array in (self._start, self._end):", "for array in (self._start,):", JOINING),
        ("the mask is in float32", "-torch.inf, dtype=keys.dtype, device=self.device)", "-torch.inf, device=self.device)", f"{SAMPLED_ON_CUDA} -k next_call"),
    ),
]  # fmt: skip

VIEW = [
    *mutations_of(
        "analysis/report/build.py",
        ("a page without a summary does not say so", 'left_out.append(LeftOut(section, f"{lacking} left out. {error.problem}", command if has_more else ""))', "pass", f"{SERVED}lacks_what_takes_too_long"),
        ("a page names the summary of another step", 'f"--phase {phase} --step {step}"', '""', f"{SERVED}lacks_what_takes_too_long"),
        ("a page has nothing where a query takes too long", "except (LimitReached, TooMany, NothingShared) as error:", "except (TooMany, NothingShared) as error:", f"{SERVED}lacks_what_takes_too_long"),
    ),
    *mutations_of(
        "analysis/live/server.py",
        ("any cookie opens the view", 'if self._is_token(request.cookies.get(self._cookie, "")):', "if True:", f"{SERVED}without_the_token"),
        ("any token becomes a cookie", "if not self._is_token(token):", "if False:", f"{SERVED}another_token"),
        ("any Host is this machine's", 'if not self._is_ours(Headers(scope=scope).get("host", "")):', "if False:", f"{SERVED}not_this_machines"),
        ("a signal ends the answer and not the server", "server.should_exit = True", "raise KeyboardInterrupt", f"{SERVED}middle_of_an_answer"),
        ("the view waits for answers that it gave up", "            process.leave(0)\n", "            pass\n", f"{SERVED}second_ctrl"),
        ("answers that are given up are tracebacks", "return not server.should_exit\n", "return True\n", f"{SERVED}second_ctrl"),
        ("a second Ctrl-C is a traceback", "in (signal.SIGINT, signal.SIGTERM,", "in (signal.SIGTERM,", f"{SERVED}second_ctrl"),
        ("the view ends the script that it is called in", "if are_given_up and has_process:", "if are_given_up:", f"{SERVED}middle_of_an_answer"),
        ("after the view Ctrl-C has no effect in a script", "            signal.signal(number, handler)\n", "            pass\n", f"{SERVED}middle_of_an_answer"),
        ("after the view other servers of a script log no errors", "        log.removeFilter(is_said)\n", "", f"{SERVED}middle_of_an_answer"),
        ("the view takes every method", 'if request.method not in ("GET", "HEAD"):', "if False:", f"{SERVED}only_reads"),
        ("a page of the view stays as it was first made", "if kept is None or kept[0] != state:", "if kept is None:", f"{SERVED}not_sent_again"),
        ("each sign of life has the view ask for rollouts", "state=state, committed=committed)", "state=state, committed=state)", f"{SERVED}not_sent_again"),
        ("an empty view does not see that folders have runs", "pages.page_state(committed, doing, below)", 'pages.page_state(committed, doing, "")', f"{SERVED}that_ends_changes"),
        ("an empty view names no runs of folders", 'below = "" if paths else library.below()', 'below = ""', f"{SERVED}that_ends_changes"),
        ("any directory is a run of the view", "if name not in paths:", "if False:", f"{SERVED}only_runs_of_the_directory"),
        ("a query goes on for a client that is gone", "if await request.is_disconnected():", "if False:", f"{SERVED}nobody_waits"),
        ("a page asks again for what took too long", ", LimitReached: 504}", "}", f"{SERVED}takes_too_long"),
        ("a page asks again for what is refused", ", rollouts.Refused: 400,", ",", f"{SERVED}bad_request"),
        ("a page does not ask again for a part that was missing", "if isinstance(error, kind)), 503)", "if isinstance(error, kind)), 400)", f"{SERVED}broken_run_has"),
    ),
    Mutation("the database of a search is not known where it is stopped", "analysis/live/rollouts.py", "            with ASKER.get().asking(database):\n", "            if True:\n", f"{SERVED}nobody_waits"),
    Mutation("the list of the view reads all runs each time", "analysis/live/server.py", "pages.run_rows(paths, known), render", "pages.run_rows(paths), render", f"{SERVED}that_have_changed"),
    *mutations_of(
        "analysis/queries/run_list.py",
        ("a step without a group that ended is not done", "entry.folder in (ROLLOUTS, SEGMENTS)", "entry.folder == ROLLOUTS", "tests/commands/store/test_runs.py -k progress"),
        ("a run that has changed is shown as it was", " and last[path][0] == states[path]}", "}", f"{SERVED}that_have_changed"),
        ("a run that was broken is so for ever", "if one.row[\"problem\"] is None}", "}", f"{SERVED}that_have_changed"),
        ("runs that are gone stay in memory", "        self._known = {path:", "        self._known |= {path:", f"{SERVED}that_have_changed"),
    ),
    Mutation("the view has a verdict on wins and scores", "analysis/live/pages.py", "        check_accuracy([a, b])\n", "", f"{SERVED}without_an_accuracy"),
    *mutations_of(
        "analysis/live/rollouts.py",
        ("a long search is cut", "if len(words) > MAX_WORDS:", "if False:", "tests/analysis/live/test_server.py -k bad_request"),
        ("filters of the view find equal values only, and NULL none", "IS NOT DISTINCT FROM", "=", f"{SERVED}filters_are_sql"),
        ("all parts are read for what can be filtered by", "if sha256 not in seen]:", "]:", f"{SERVED}kinds_are"),
        ("a run has the kinds of another that had its name", "if not seen <= {*parts.values()}:", "if False:", f"{SERVED}kinds_are"),
        ("kinds of earlier parts are forgotten", "kinds = kinds | {*database", "kinds = {*database", f"{SERVED}kinds_are"),
        ("a part that was damaged is not named", "                check_parts(runs)  # DuckDB names no file\n", "                pass\n", f"{SERVED}damaged_between"),
        ("NULLs change sides from page to page", 'nulls = "FIRST" if is_reversed else "LAST"', 'nulls = "LAST"', f"{SERVED}pages_follow"),
        ("a database of one step is lent for all", "info.fingerprint, tuple(info.parts))", "info.fingerprint)", f"{SERVED}leaves_the_others"),
        ("each page of the view's list reads all parts", "if not any(asked.get(name) for name in _OF_ROWS):", "if False:", f"{SERVED}their_own_parts"),
        ("each page of the view's list begins with a part", "asked, first - before)[1]", "asked, 0)[1]", f"{SERVED}their_own_parts"),
        ("the view's search minds the case", "lower($words)", "$words", f"{SERVED}filters_are_sql"),
    ),
]  # fmt: skip

COPIES = "tests/runs/remote/test_copies.py::test_"
VIEWS = "tests/runs/remote/test_views.py::test_"
BEHIND = "tests/runs/remote/test_behind.py::test_"
STORAGE = [
    *mutations_of(
        "runs/remote/views.py",
        ("a check reads the cache", "self._take(path, fresh=True)", "self._take(path, fresh=False)", f"{VIEWS}check_verifies_what_is_in_the_store_and_not_what_is_in_the_cache"),
        ("all files are fetched at once", "run.fetch([MANIFEST, RUN_FILE])", "run.fetch(index.files)", f"{VIEWS}a_query_has_the_answer_of_the_local_run"),
        ("a run is never opened anew", "if time.monotonic() - at >= seconds:", "if False:", f"{VIEWS}a_run_stays_as_it_was_opened_until_one_looks_again"),
        ("old states of a run stay", "for old in states[:-KEPT]:", "for old in []:", f"{VIEWS}a_run_stays_as_it_was_opened_until_one_looks_again"),
        ("the index of old states stays in memory", "            forget_source(old)", "            source_of(old)", f"{VIEWS}a_run_stays_as_it_was_opened_until_one_looks_again"),
        ("a broken index hides all runs", "    if problems and not found:", "    if problems:", f"{VIEWS}one_broken_index_does_not_hide_the_others"),
    ),
    *mutations_of(
        "runs/remote/follow.py",
        ("what others have put there is removed", "key not in named and is_version(key)", "key not in named", f"{BEHIND}what_others_have_put_there_stays"),
        ("an upload removes the runs below its name", " and not key.startswith(others)]", "]", f"{BEHIND}a_run_leaves_the_runs_below_its_name_alone"),
        ("what was uploaded is not read back", "if received(self._store.stream(key, size=file.bytes)) != file:", "if False:", f"{BEHIND}faults_of_the_store_cost_nothing_but_time[flip]"),
        ("a file that has grown is sent as it is", "first_bytes(file, seen.file.bytes)", "file", f"{BEHIND}large_files_are_uploaded_while_they_grow"),
        ("a file that was replaced ends the upload", "            if os.fstat(file.fileno()).st_ino == seen.state[0]:", "            if True:", f"{BEHIND}large_files_are_uploaded_while_they_grow"),
        ("a small file takes three requests", 'b"".join(pieces) if small else pieces', "pieces", f"{BEHIND}a_run_is_in_the_store_while_it_is_written"),
        ("what was sent is held in memory", "seen._replace(data=None) for", "seen for", f"{BEHIND}large_files_are_uploaded_while_they_grow"),
        ("rows wait for checkpoints", "        if whole:\n            self._upload_checkpoints()", "        if True:\n            self._upload_checkpoints()", f"{BEHIND}rows_do_not_wait_for_a_checkpoint"),
        ("the last checkpoints are left out", "chosen = taken.checkpoints if whole else", "chosen = [] if whole else", f"{BEHIND}rows_do_not_wait_for_a_checkpoint"),
        ("old versions stay after an upload", "        self._store.delete(sorted(gone", "        sorted(sorted(gone", f"{BEHIND}a_run_is_in_the_store_while_it_is_written"),
        ("an upload overwrites what another writer has put", "index_bytes(index), replaces=self._tag)", "index_bytes(index), replaces=(self._store.read(INDEX) or (b'', None))[1])", f"{BEHIND}a_writer_that_slept_is_stopped_and_overwrites_nothing"),
        ("the lease outlives the run", "        lease.release()\n", "        pass\n", f"{BEHIND}a_run_is_in_the_store_while_it_is_written"),
        ("a long upload is given up at its first failure", "            if uploader is not None and uploader.arrived > arrived:", "            if False:", f"{BEHIND}an_upload_at_the_end_may_take_long_and_fail_in_between"),
        ("an error that is not the store's ends the upload", "        except Exception as error:  # whatever", "        except RlvrError as error:  # whatever", f"{BEHIND}an_upload_process_that_is_killed_or_meets_an_error_goes_on[enospc]"),
        ("an error of the thread for checkpoints is lost", "        except Exception as error:  # `sync`", "        except RlvrError as error:  # `sync`", f"{BEHIND}an_error_of_the_thread_for_checkpoints_is_raised_by_the_next_look"),
        ("a failing store ends the upload", "            if time.monotonic() > deadline:", "            if True:", f"{BEHIND}faults_of_the_store_cost_nothing_but_time[flip]"),
    ),
    Mutation("all parts are held in memory", "runs/remote/snapshot.py", 'path.split("/")[0] not in FOLDERS', "True", "tests/runs/remote/test_snapshot.py -k parts_are"),
    Mutation("a file that grows is never taken", "runs/remote/snapshot.py", "and new[1] > old[1] > IN_MEMORY", "and new[1] == old[1]", "tests/runs/remote/test_snapshot.py -k grows"),
    *mutations_of(
        "runs/remote/lease.py",
        ("a lost race for a lease is an error of its own kind", "            raise Held(\n                f\"{store.address} was taken", "            raise RlvrError(\n                f\"{store.address} was taken", f"{BEHIND}runs_without_a_name_that_start_in_one_minute_are_counted"),
        ("a second writer is let in", "if found is not None and (holder := _living(store, found[0])):", "if False and (holder := {}):", f"{BEHIND}a_second_writer_is_refused_and_told_of_the_first"),
        ("a dead process keeps its run", 'if holder["host"] == os.uname().nodename and', "if False and", f"{BEHIND}a_dead_process_of_this_machine_holds_nothing"),
        ("a process of another container is taken for dead", 'return record.get("machine") == _machine() != ""', "return True", f"{BEHIND}a_process_that_cannot_be_seen_from_here_is_not_taken_for_dead"),
        ("all who ask at once get the lease", "replaces=found[1] if found else None)\n        except", "replaces=found[1] if found else (store.read(LEASE) or ('', None))[1])\n        except", f"{BEHIND}of_two_that_take_it_at_once_one_has_it"),
    ),
    *mutations_of(
        "runs/remote/behind.py",
        ("the lease is not renewed while a run is fetched", "self._renewing = renewing(lease, self._is_lost)", "self._renewing = threading.Event()", f"{BEHIND}the_lease_is_renewed_while_a_run_is_fetched"),
        ("a run may begin above others", "if below := runs_below(store.sizes()):", "if below := []:", f"{BEHIND}a_run_leaves_the_runs_below_its_name_alone"),
        ("a killed upload is not started again", "            if left:\n", "            if False:\n", f"{BEHIND}an_upload_process_that_is_killed_or_meets_an_error_goes_on[kill]"),
        ("an upload that ends by itself is not started again", "status in (0, LOST) or (status == GIVEN_UP and self._problem):", "status in (0, 1, LOST, GIVEN_UP):", f"{BEHIND}an_upload_process_that_cannot_run_is_told_and_the_run_keeps_its_place"),
        ("a run without an upload loses its lease", "            self._renewing = renewing(self._lease, self._is_lost)\n            console", "            console", f"{BEHIND}an_upload_process_that_cannot_run_is_told_and_the_run_keeps_its_place"),
        ("an upload that is stopped starts again", "            if self._stopped or status", "            if status", f"{BEHIND}ctrl_c_in_the_final_wait_ends_the_upload_and_says_where_the_run_is"),
        ("the lease is renewed after the end", "        finally:\n            self._renewing.set()", "        finally:\n            pass", f"{BEHIND}an_upload_process_that_cannot_run_is_told_and_the_run_keeps_its_place"),
        ("a run that did not arrive ends as if it had", "        if self._problem:\n            raise", "        if False:\n            raise", f"{BEHIND}a_store_that_stays_broken_never_stops_the_run_and_export_goes_on"),
    ),
    *mutations_of(
        "runs/remote/cache.py",
        ("the cache grows for ever", "if total <= self._most or", "if True or", f"{VIEWS}the_cache_has_a_bound"),
        ("what was just opened is removed", "opened > time.time() - IN_USE_SECONDS", "opened > time.time()", f"{VIEWS}the_cache_has_a_bound"),
        ("a view removes what other commands read", "return self._own.get(run) == run.parent.stat().st_mtime_ns", "return True", f"{VIEWS}a_state_that_another_command_may_read_stays"),
        ("files of removed states stay in the cache", "        if total > self._most:\n            total = self._without(unused)", "        if False:\n            total = self._without(unused)", f"{VIEWS}files_of_states_that_a_view_has_removed_leave_the_cache_first"),
        ("the cache keeps what has another sum", "            if wanted in (None, found):", "            if True:", f"{VIEWS}check_verifies_what_is_in_the_store_and_not_what_is_in_the_cache"),
        ("nothing is found in the cache", "while fresh or not self._linked(kept, target, size=file.bytes):", "while fresh or not kept.unlink(missing_ok=True) and not self._linked(kept, target, size=file.bytes):", f"{VIEWS}without_links_the_cache_has_copies"),
    ),
    *mutations_of(
        "runs/readers.py",
        ("a slash at the end of a store is in its addresses", 'f"{str(root).rstrip(\'/\')}/{name}"', 'f"{root}/{name}"', f"{VIEWS}names_patterns_and_the_latest"),
        ("a part that the copy lacks is not missed", "        if size is None:", "        if size is None and not (size := entry.bytes):", f"{VIEWS}a_part_that_the_index_lacks_is_a_problem"),
    ),
    *mutations_of(
        "runs/storage/sources.py",
        ("messages name files of the cache", "        if source := _sources.get(folder):", "        if False:", f"{VIEWS}a_query_has_the_answer_of_the_local_run"),
    ),
    *mutations_of(
        "runs/remote/copies.py",
        ("a run that has gone on elsewhere is fetched whole", "if old.exists() and not _differs(old, path, file)]", "if False]", f"{COPIES}of_a_run_that_has_gone_on_elsewhere_only_what_is_new_is_fetched"),
        ("a directory here that is older is gone on with", "            check_continues(index, here, place=place)\n", "            return target\n", f"{BEHIND}a_run_goes_on_in_an_empty_folder_and_comes_back"),
        ("what was sent is not read back", "if received(store.stream(key, size=file.bytes)) != file:", "if False:", f"{COPIES}what_did_not_arrive_as_it_was_sent_is_noticed"),
        ("a damaged object is fetched", "        if found != files[path]:", "        if False:", f"{COPIES}a_damaged_copy_is_not_fetched"),
        ("an older state of a run replaces its copy", "if lost or index.wall_seconds < before.wall_seconds:", "if False:", f"{COPIES}a_run_goes_on_elsewhere_and_comes_back"),
        ("another run replaces a copy", "if (index.run_id, index.created_at) != (before.run_id, before.created_at):", "if False:", f"{COPIES}a_run_goes_on_elsewhere_and_comes_back"),
        ("old versions stay in the store", "        store.delete(sorted(known", "        sorted(sorted(known", f"{COPIES}the_index_comes_last_and_old_versions_go"),
        ("everything is sent again", "missing = [path for path in fresh if", "missing = [path for path in index.keys if True or", f"{COPIES}a_run_comes_back_as_it_was_and_nothing_is_sent_twice"),
        ("a damaged part is copied", "if entry.path != METRICS and index.files", "if False and index.files", f"{COPIES}bad_input_is_an_error"),
        ("a fetched run appears before it is whole", "root / name, _unfinished(root, place)", "root / name, root / name", f"{COPIES}a_killed_fetch_goes_on"),
    ),
    *mutations_of(
        "runs/remote/index.py",
        ("an index leads out of the run", 'part not in ("", ".", "..")', "part", f"{COPIES}an_index_cannot_lead_out_of_the_run"),
        ("a file keeps its key when it changes", "{pure.stem}.{sha256[:16]}{pure.suffix}", "{pure.stem}.{len(sha256)}{pure.suffix}", f"{COPIES}a_store_that_stays_broken_leaves_the_earlier_copy"),
    ),
    *mutations_of(
        "runs/remote/store.py",
        ("a mistyped address shows its password", "{shown(safe)} is not", "{shown(text)} is not", f"{COPIES}secrets_are_sent_nowhere_and_written_nowhere"),
        ("the second of two writers replaces the index", 'mode: Any = "create" if replaces is None else {"e_tag": replaces}', 'mode = "overwrite"', f"{COPIES}the_second_of_two_writers_is_refused"),
        ("large files have no more time than others", "opened(BYTES_COME, {**RETRY", "opened(ANSWERS, {**RETRY", f"{COPIES}a_large_file_comes_in_ranges_each_with_its_own_time"),
        ("large files come by one request", "if size > RANGE_BYTES else None", "if False else None", f"{COPIES}a_large_file_comes_in_ranges_each_with_its_own_time"),
        ("a bucket in another region has no answer", "redirect without LOCATION|", "", f"{COPIES}an_error_says_what_the_store_means"),
        ("a lost answer counts as another writer", "if found is None or found[0] != data:", "if True:", f"{COPIES}faults_of_the_store_cost_nothing_but_time"),
    ),
]  # fmt: skip

HANDOUT = "tests/test_handout.py -k "
CHOICES = "tests/graders/test_multiple_choice.py"
NOTATION = "tests/graders/answers/test_equivalence.py -k notation"
MULTIPLE_CHOICE = "tests/data/test_mmlu.py"
SHOTS = "tests/rollouts/test_shots.py"
SUPPLEMENT = [
    *mutations_of(
        "handout.py",
        ("packed documents have no EOS", "torch.tensor([*encoded[i], eos])", "torch.tensor(encoded[i])", f"{HANDOUT}packed_examples"),
        ("packed documents are never shuffled", "torch.randperm(len(texts)).tolist() if shuffle", "range(len(texts)) if shuffle", f"{HANDOUT}shuffling_moves"),
        ("batches are never shuffled", "shuffle=shuffle)", "shuffle=False)", f"{HANDOUT}one_epoch"),
        ("the first answer of several counts", "letters[-1] if letters", "letters[0] if letters", f"{HANDOUT}parse_mmlu"),
        ("numbers keep their commas", 'number.replace(",", "").replace', "number.replace", f"{HANDOUT}parse_gsm8k"),
        ("the pair's responses have no EOS", "tokenizer, append_eos=True)", "tokenizer)", f"{HANDOUT}unconditional"),
        ("failed grades of the handout are silent", "    if failed:\n", "    if False:\n", f"{HANDOUT}failed_grades"),
        ("only whole dictionaries are rewards of the handout", "grade_of(reward_fn(response, truth))", 'grade_of({**reward_fn(response, truth)})', f"{HANDOUT}grader_may"),
        ("the pair has no reference", "(scores(lm) - reference).unbind()", "scores(lm).unbind()", f"{HANDOUT}unconditional"),
    ),
    *mutations_of(
        "graders/multiple_choice.py",
        ("the first letter of several is graded", "if letters[-1] == right:", "if letters[0] == right:", CHOICES),
        ("an option inside of another is named, too", "and not any(own < other for other in found)", "", CHOICES),
        ("any option in words counts as the right one", "said == [LETTERS.index(right)]", "said", CHOICES),
    ),
    *mutations_of(
        "graders/answers/reading/sentences.py",
        ("a check after the answer replaces it", "key=lambda sentence: _CHECK.match(sentence) is not None", "key=lambda _: 0", NOTATION),
        ("a conclusion after a reason is cut", ",|\\b(?:so|", "\\b(?:so|", NOTATION),
        ("a reason after the answer replaces it", "tokens_of(_without_reason(sentence))", "tokens_of(sentence)", NOTATION),
        ("the value of a condition is the answer", "            return _stated_by(shorter)\n", "            pass\n", NOTATION),
        ("a denied equation states its value", "if node is not None and not denied:", "if node is not None:", NOTATION),
        ("what checks an answer is one that says it", "\\s*:(?!.*\\banswer\\b)", "", NOTATION),
    ),
    *mutations_of(
        "graders/answers/reading/reader.py",
        ("cm^{2} is no unit", 'in (["^", "{", "2", "}"], ["^", "{", "3", "}"]):', "in ():", NOTATION),
        ("a quantity with a power is a unit", ' or before.kind == "num"\n', " or True\n", NOTATION),
    ),
    Mutation("equations on lines of their own are one chain", "graders/answers/reading/readings.py", "tokens_of(_with_separators(text))", "tokens_of(text)", NOTATION),
    Mutation("cm^{2} is cm^{3}", "graders/answers/units.py", r're.sub(r"\^\s*", "^", ', r're.sub(r"\^ ", "^", ', NOTATION),
    Mutation("dates and scores are computed", "graders/answers/equivalence.py", "if in_order is not None:", "if False:", NOTATION),
    Mutation("values may be in another order than their names", "graders/answers/equivalence.py", "_same_ordered if values_by_name else", "_same_unordered if values_by_name else", NOTATION),
    Mutation("any two close numbers are one approximation", "graders/answers/equivalence.py", " and difference < _precision(exact, rounded, are_complex=are_complex)", "", NOTATION),
    *mutations_of(
        "graders/answers/choices.py",
        ("quotes hide a letter", "(?:{_QUOTED}|", "(?:", f"{CHOICES} -k marks_around"),
        ("the first letter of a quoted text is an answer", r"|(?<!{_QUOTE}.)(?!", "|(?!", f"{CHOICES} -k inside_of_a_word"),
        ("letters without an option count", "LETTERS[: len(options)]", "LETTERS", f"{HANDOUT}parse_mmlu"),
        ("the thinking chooses", "answer = after_thinking(response)", "answer = response", f"{CHOICES} -k not_the_thinking"),
        ("a box with a text leaves the choice to other words", "_with_text(text, options) or letters", "letters", f"{CHOICES} -k not_the_thinking"),
        ("a box has nothing but the letter", "return match[1] if match and not _ANOTHER.search(declared, match.end()) else None", "return None", f"{CHOICES} -k hold_the_options_text"),
        ("an option that is merely named counts as much as the right one", "|{_CORRECT})(?!", ")(?!", f"{CHOICES} -k test_grades"),
        ("the worst option is an answer", "|my|correct|", "|my|correct|worst|", f"{CHOICES} -k test_grades"),
        ("names of a program are options", r"choice))(?![_\[])", "choice))", f"{CHOICES} -k inside_of_a_word"),
    ),
    *mutations_of(
        "data/mmlu.py",
        ("subjects of MMLU do not take turns", "itertools.zip_longest(*([*_of_subject(path, split)] for path in files))", "([row] for path in files for row in _of_subject(path, split))", MULTIPLE_CHOICE),
        ("the subject keeps the split's name", 'path.stem.removesuffix(f"_{split}")', "path.stem", MULTIPLE_CHOICE),
    ),
    Mutation("questions of several kinds are trained on", "rollouts/inputs.py", "    check_of_one_kind(config, dataset.name, dataset.mixed)\n", "", "tests/rollouts/test_inputs.py -k several_kinds"),
    Mutation("questions of several kinds are evaluated", "training/session.py", "    check_of_one_kind(config, questions.name, questions.mixed)\n", "", "tests/rollouts/test_inputs.py -k several_kinds"),
    Mutation("traces of several kinds are graded", "training/read_traces.py", "        check_of_one_kind(config, traces.name, traces.mixed)\n", "", "tests/rollouts/test_inputs.py -k several_kinds"),
    Mutation("traces of several kinds are of one", "data/traces.py", "            mixed=dataset.mixed,\n", "", "tests/rollouts/test_inputs.py -k several_kinds"),
    Mutation("formatted traces are other questions", "data/prompts.py", "(question_within(text, template) or text)", "text", f"{SHOTS} -k formatted"),
    *mutations_of(
        "training/session.py",
        ("a training question in the run's template is another one", "warn_of_shared_questions(dataset.examples, eval_dataset, template)", "warn_of_shared_questions(dataset.examples, eval_dataset)", "tests/commands/across/test_traps.py -k questions_is_said"),
        ("a trace in the run's template is another question", "warn_of_shared_questions(examples, eval_dataset, template)", "warn_of_shared_questions(examples, eval_dataset)", "tests/commands/across/test_traps.py -k questions_is_said"),
    ),
    *mutations_of(
        "data/examples.py",
        ("an option's place counts from 1", "answer == str(place)]", "answer == str(place + 1)]", MULTIPLE_CHOICE),
        ("a number is the text of an option", "        with_text = []", "        pass", f"{MULTIPLE_CHOICE} -k place_among_texts"),
        ("the first of two options that an answer names is right", "if len(named) == 1:", "if named:", f"{MULTIPLE_CHOICE} -k names_two"),
        ("padding of options is an option", "options and options[-1] is None:", "False:", f"{MULTIPLE_CHOICE} -k padding"),
        ("options are not shown", "[self.question(row, question_field), *lines]", "[self.question(row, question_field)]", MULTIPLE_CHOICE),
        ("a wall in a unit test begins the answer", "(_is_tests(text) or _is_json(text))", "False", "tests/data/test_datasets.py -k inside_of_unit_tests"),
        ("multiple choice has no grader of its own", ', "multiple_choice": "multiple choice"}', "}", MULTIPLE_CHOICE),
    ),
    Mutation("subjects are not told apart", "analysis/queries/sql/subjects.sql", "'$.subject')", "'$.options')", "tests/analysis/queries/test_sql.py -k by_subject"),
    Mutation("a packed example lacks its last label", "models/tokens/packing.py", "max(len(self._ids) - 1, 0)", "len(self._ids)", f"{HANDOUT}last_example"),
    *mutations_of(
        "commands/sft.py",
        ("examples are not packed", "    if config.packing:", "    if False:", replays("sft-packed"), "sft.packing"),
        ("attention never crosses", "    if config.packing_attend_across:", "    if False:", replays("sft-across"), "sft.packing_attend_across"),
        ("whole examples in sequences of 512", "pack_whole(examples, *encoded, length=config.packing_length,", "pack_whole(examples, *encoded, length=512,", replays("sft-packed"), "sft.packing_length"),
        ("joined examples in sequences of 10", "pack_across(*encoded, length=config.packing_length,", "pack_across(*encoded, length=10,", replays("sft-across"), "sft.packing_length"),
        ("prompts are not learned", "if config.loss_on_prompts:", "if False:", "tests/commands/test_sft.py -k loss_on_prompts", "sft.loss_on_prompts"),
        ("the first token of joined examples is not learned", "keep=0 if config.packing_attend_across else 1", "keep=1", "tests/commands/test_sft.py -k loss_on_prompts"),
        ("sequences longer than the context", "elif config.packing_length > own:", "elif False:", "tests/commands/test_sft.py -k fits_the_context"),
    ),
    *mutations_of(
        "training/traces.py",
        ("prompts are learned when they are joined", "[False] * len(prompts[i])", "[True] * len(prompts[i])", "tests/models/tokens/test_packing.py"),
        ("examples are packed in the order of the file", "return epoch_order(count, seed=seed, epoch=-2)", "return tuple(range(count))", replays("sft-packed")),
        ("a trace longer than a sequence is packed", "if lengths[longest] > length:", "if False:", "tests/models/tokens/test_packing.py -k refused_by_name"),
    ),
    *mutations_of(
        "models/tokens/packing.py",
        ("each example where most room is left", "place = bisect_left(rooms, lengths[document])", "place = len(rooms) - 1 if rooms and rooms[-1] >= lengths[document] else len(rooms)", "tests/models/tokens/test_packing.py -k least_room"),
        ("joined sequences share no token", "slice(start, start + seq_length + 1)", "slice(start, start + seq_length)", "tests/models/tokens/test_packing.py -k without_gaps"),
    ),
    *mutations_of(
        "rollouts/shots.py",
        ("a question among its own shots", "if question != own]", "]", f"{SHOTS} -k never_among", "shots"),
        ("traces in the template of the run are other questions", "compared_text(example, template.text), _shot", "compared_text(example), _shot", f"{SHOTS} -k formatted", "shots_dataset"),
        ("the run's own template is not known to its shots", "traces, by_subject, template.text)", 'traces, by_subject, "")', f"{SHOTS} -k formatted", "shots_dataset"),
        ("one shot fewer than asked for", "for shot in others[: self.count])", "for shot in others[: self.count - 1])", SHOTS, "shots"),
        ("shots of any subject", 'by_subject = source.startswith(MMLU)', 'by_subject = False', SHOTS),
        ("shots of the evaluation split", 'split="dev" if by_subject else None,', 'split="test" if by_subject else None,', SHOTS),
        ("shots of the questions' dataset whatever is asked", "source, template = config.shots_dataset or spec,", "source, template = spec,", SHOTS, "shots_dataset"),
        ("shots are not recorded", "shots=shots.facts,", "shots=None,", SHOTS),
        ("bad lines of the shots stop the run", '{"skip_bad_lines": reading["skip_bad_lines"]} if', "{} if", f"{SHOTS} -k bad_lines", "skip_bad_lines"),
        ("several traces of one question leave too few shots", "while limit and found.rows == limit and", "while False and", f"{SHOTS} -k several_traces", "shots"),
        ("a shot without its response", 'return f"{prompt}{response}".rstrip()', 'return f"{prompt}".rstrip()', SHOTS),
    ),
    Mutation("a judge's questions need answers", "rollouts/inputs.py", "if isinstance(config, PromptOptions) and is_judge(config.grader):", "if False:", "tests/rollouts/test_inputs.py"),
    Mutation("the subject is not named", "data/prompts.py", "subject_of(example.ground_truth) if SUBJECT in template.text", '"" if SUBJECT in template.text', f"{SHOTS} -k name_the_subject"),
    Mutation("training has no shots", "training/session.py", 'load_questions(config, purpose="train", template=template)', 'load_questions(config, purpose="train")', f"{SHOTS} -k step_of_training"),
    Mutation("evaluations of a training run have no shots", "training/session.py", "    eval_dataset = load_eval_dataset(config, template)\n    warn_of_shared_questions(dataset", "    eval_dataset = load_eval_dataset(config)\n    warn_of_shared_questions(dataset", f"{SHOTS} -k step_of_training"),
    Mutation("shots before the chat begins", "models/tokens/chat.py", "start=max(rendered.text.find(template.text.strip()), 0))", "start=0)", f"{SHOTS} -k in_a_chat"),
    Mutation("packed micro-batches count rows", "training/planning/memory.py", "if tokens is None and (rows is None or config.packed_length):", "if tokens is None and rows is None:", "tests/commands/test_sft.py -k packing_changes"),
    Mutation("a misspelt tracker in a file is taken", "config/parsing/options.py", "for one in value if value_type(option).repeatable else (value,):", "for one in () if value_type(option).repeatable else (value,):", "tests/config/test_config.py -k choices_are_checked"),
    Mutation("of an option given twice the last counts", "config/parsing/sources.py", "        if name in named:\n", "        if False:\n", "tests/config/test_config.py -k bad_config_files"),
    *mutations_of(
        "config/parsing/sources.py",
        ("a file's paths stay in a directory called ~", "_at_home(config_type, {**from_environment, **from_preset, **from_file, **flags})", "{**from_environment, **from_preset, **from_file, **_at_home(config_type, flags)}", "tests/config/test_config.py -k home_directory"),
        ("a text that is no path is taken for one", "if is_path(option)}", "}", "tests/config/test_config.py -k home_directory"),
        ("--config is not found below the home directory", 'file = at_home(flags.get("config"))', 'file = flags.get("config")', "tests/config/test_config.py -k home_directory"),
    ),
    Mutation("a preset's clip range is taken for every loss", "config/parsing/sources.py", 'if option.metadata["goes_with"] in replaced:', "if False:", "tests/config/test_config.py -k preset_sets_for_its_loss"),
    Mutation("pieces of examples count as examples", "config/sft.py", 'config.length_normalization != "token_mean"', "False", "tests/commands/test_sft.py -k cannot_be"),
]  # fmt: skip

JUDGED = "tests/judges/test_pool.py -k"
IN_PAIRS = "tests/commands/test_pairwise.py -k"
AGREEMENT = "tests/analysis/statistics/test_judge_agreement.py -k"
RUBRICS = "tests/judges/test_rubric.py -k"
BY_JUDGE = "tests/commands/across/test_judge.py -k"
JUDGES = [
    *mutations_of(
        "judges/judge.py",
        ("the judge is another model", "            options.judge_model,\n            base", "            \"gpt\",\n            base", f"{JUDGED} every_option", "judge_model"),
        ("the judge is at another address", "base_url=options.judge_url,", 'base_url="http://127.0.0.1:9/v1",', f"{JUDGED} every_option", "judge_url"),
        ("the judge is always asked as a chat", "endpoint=options.judge_endpoint,", 'endpoint="chat",', f"{JUDGED} every_option", "judge_endpoint"),
        ("the judge gets the sampler's key", "api_key_env=options.judge_api_key_env,", "", f"{JUDGED} every_option", "judge_api_key_env"),
        ("the judge's time limit is not its own", "timeout=options.judge_timeout,", "", f"{JUDGED} hangs", "judge_timeout"),
        ("the judge is tried as often as any endpoint", "max_retries=options.judge_retries,", "", f"{JUDGED} broken", "judge_retries"),
        ("the judge's replies are sampled as responses are", "temperature=options.judge_temperature, max", "max", f"{JUDGED} every_option", "judge_temperature"),
        ("the judge's replies have any length", "max_tokens=options.judge_max_tokens, min", "min", f"{JUDGED} every_option", "judge_max_tokens"),
        ("the judge's seed is lost", "options.judge_seed, options.judge_concurrency", "0, options.judge_concurrency", f"{JUDGED} whole_reply", "judge_seed"),
        ("the judge is asked everything at once", "asyncio.Semaphore(self._concurrency)", "asyncio.Semaphore(1000)", f"{JUDGED} as_many_as_allowed", "judge_concurrency"),
        ("the same text is asked again", "            self._known[reply.asked_sha256] = reply\n", "", f"{JUDGED} asked_once"),
        ("the same text is asked twice at a time", "            self._asking[asked] = task\n            task.add_done_callback(partial(self._asked, asked))\n", "", f"{JUDGED} asked_once"),
        ("of the replies that are kept, the characters alone count", "return sys.getsizeof(reply.text) + _BESIDES_TEXT", "return len(reply.text)", f"{JUDGED} short_replies"),
        ("a judge's replies do not depend on its temperature", '            "temperature": options.judge_temperature,\n', "", f"{BY_JUDGE} known_to_the_next"),
        ("a refused key is asked for every text", "failure.concerns_all or self._failed_in_a_row >= most", "self._failed_in_a_row >= most", f"{JUDGED} refuses_everything"),
        ("an outage's first failures are grades", "            await self._held_back(failure)\n", "", f"{JUDGED} of_an_outage"),
        ("a late reply of before an outage makes its failures grades", "self._release(before=number)", "self._release()", f"{JUDGED} of_an_outage"),
        ("what is under way when a judge is given up is a failed grade", "            if self._given_up is not None:\n                raise self._given_up from None\n", "            if failure.concerns_all and self._given_up:\n                raise self._given_up from None\n", f"{JUDGED} of_an_outage"),
        ("an outage on the last texts is their grade", "_IN_A_ROW and self.spent", "_IN_A_ROW and False and self.spent", f"{JUDGED} last_texts"),
        ("what the last texts are at fault for gives the judge up", "if held.failure.kind != \"refused\"]", "]", f"{JUDGED} last_texts"),
        ("a run cannot end whose last texts fail by themselves", '_IN_A_ROW and self.spent["asked"]:', "_IN_A_ROW:", f"{JUDGED} last_texts"),
        ("failures that wait count again after an answer", "        self._release(before=number)\n        self._failed_in_a_row = 0\n", "        self._release(before=number)\n        self._failed_in_a_row = len(self._held)\n", f"{JUDGED} wait_do_not"),
        ("a judge that is down grades on", "or self._failed_in_a_row >= most", "", f"{JUDGED} is_down"),
    ),
    *mutations_of(
        "judges/pool.py",
        ("a reply without a score is a reward of 0", "            return self._failure(problem.kind, problem.problem, judgement)\n", "            return Grade(None, None, 0.0, judgement=judgement)\n", f"{JUDGED} at_fault"),
        ("a reply that was cut off has a score", 'if reply.finish == "length":', "if False:", f"{JUDGED} at_fault"),
        ("a filtered reply has a score", "if reply.finish not in ENDS:", "if False:", f"{JUDGED} at_fault"),
        ("the judge is shown the whole prompt", 'example.get("question") or example.get("prompt")', 'example.get("prompt")', f"{JUDGED} whole_reply"),
        ("a stop gives up answers of a judge that are paid for", "    batch_size = 1  #", "    batch_size = 128  #", "tests/rollouts/test_regrade.py tests/commands/test_pairwise.py -k a_stop_keeps"),
        ("what a run has stored is asked again", "            self._judge.remember(stored_replies(run))\n", "", f"{JUDGED} has_stored"),
        ("a changed rubric is the same grader", 'f"{self.rubric.sha256} {self._judge', 'f"{self._judge', f"{BY_JUDGE} known_to_the_next"),
        ("the rubric is not in run.json", ', "rubric": self.rubric.facts', "", f"{BY_JUDGE} changed_rubric"),
    ),
    Mutation("a compressed file has another name", "data/files.py", "return path.name[: len(path.name) - len(suffix_of(path))]", "return path.stem", "tests/data/test_files.py -k split"),
    Mutation("a compressed file is read as it stands", "data/files.py", 'return gzip.open(path) if path.suffix.lower() == ".gz" else path.open', "return path.open", "tests/data/test_files.py -k same_examples"),
    Mutation("eval does not know of pairs", "cli.py", 'if name == "eval" and PAIRWISE in rest:', "if False:", "tests/commands/test_pairwise.py -k eval_pairwise"),
    *mutations_of(
        "judges/rubric.py",
        ("the best score is the worst", "(value - first) / (last - first)", "(last - value) / (last - first)", RUBRICS + " last_line"),
        ("a judge's thinking is its answer", ".rpartition(_END_OF_THINKING)", ".rpartition(chr(0))", f"{JUDGED} thinks_apart"),
        ("marks below a score are the score", "if not _MARKS_ALONE.fullmatch(line) or", "if line.strip() or", RUBRICS + " last_line"),
        ("a word of marks is no score", " or _plain(line) in self.words", "", RUBRICS + " last_line"),
        ("a rubric of pairs does not say its rewards itself", "return scale if stated else Scale", "return Scale", RUBRICS + " rewards_of_a_pair"),
        ("the first line is the score", "_bare(lines[-1])", "_bare(lines[0])", RUBRICS + " last_line"),
        ("a scale's words keep their marks", "words = [_plain(part.partition(\"=\")[0]) for part in parts]", "words = [part.partition(\"=\")[0].strip().lower() for part in parts]", RUBRICS + " last_line"),
        ("half is five", '_AROUND.replace(".", "").replace(",", "")', "_AROUND", RUBRICS + " last_line"),
        ("one in a list is minus one", "(?![\\d.])", "", RUBRICS + " no_score"),
        ("a score outside of the scale counts", "if not min(first, last) <= value <= max(first, last):", "if False:", RUBRICS + " no_score"),
        ("a response may hold placeholders", "_PLACEHOLDER.sub(lambda m: m[0] if m[1] not in values else _given(values[m[1]]), self.prompt)", "_PLACEHOLDER.sub(lambda m: m[0] if m[1] not in values else _given(values[m[1]]), _PLACEHOLDER.sub(lambda m: m[0] if m[1] not in values else _given(values[m[1]]), self.prompt))", RUBRICS + " no_placeholder"),
    ),
    *mutations_of(
        "analysis/statistics/judge_agreement.py",
        ("a rule grades nothing where it has graded anything", "(missing := [row for row in rows if row[\"rule\"] is None])", "all(row[\"rule\"] is None for row in rows) and (missing := rows)", f"{AGREEMENT} only_rows"),
        ("a judge's failure is a verdict", "if pair.judge is not None and pair.other is not None]", "]", f"{AGREEMENT} hand_counts"),
        ("kappa has the interval of the accuracy", "max((accuracy.low - chance) / (1 - chance), -1.0)", "max(accuracy.low, -1.0)", f"{AGREEMENT} hand_counts"),
        ("a label of one sample counts for all", "labels.get((place[2], place[3]), labels.get((place[2], None)))", "next((v for (e, _), v in labels.items() if e == place[2]), None)", f"{AGREEMENT} labels"),
        ("of two labels of a response the first counts", "if labels.setdefault(of, label) != label:", "if labels.setdefault(of, label) is None:", f"{AGREEMENT} labels"),
        ("a label of a question is of no response", "known = {*places, *((example, None) for example, _ in places)}", "known = {*places}", f"{AGREEMENT} fit_no_response"),
        ("labels that fit no response are no error", "if len(left_out) == len(labels):", "if False:", f"{AGREEMENT} fit_no_response"),
    ),
    *mutations_of(
        "rollouts/comparisons.py",
        ("both orders show the same", "enumerate(((a, b), (b, a)))", "enumerate(((a, b), (a, b)))", f"{IN_PAIRS} both_orders"),
        ("who is shown first wins for A", "if grade.reward is None or not comparison.swapped else 1 - grade.reward", "", f"{IN_PAIRS} both_orders"),
        ("the same id may be another question", 'if len(known) > 1 or a[', 'if a[', f"{IN_PAIRS} another_question"),
        ("ten comes before two", "second.keys(), key=_place)", "second.keys())", f"{IN_PAIRS} counterpart"),
        ("what has no counterpart is left out in silence", "f\"note: {' and '.join(alone)} {note}\" if alone else \"\"", '""', f"{IN_PAIRS} counterpart"),
        ("what was compared is compared again", 'if ("eval", 0, c.example_id, c.sample_index) not in committed', "", f"{IN_PAIRS} not_answered"),
    ),
    Mutation("a comparison without an answer is lost for good", "commands/pairwise.py", "if grade.judgement is not None]", "]", f"{IN_PAIRS} not_answered"),
    *mutations_of(
        "analysis/statistics/pairwise.py",
        ("what the judge did not answer is not counted", "max(_planned(run), len(pairs))", "len(pairs)", f"{IN_PAIRS} not_answered"),
        ("an order counts alone", "if len(two) == ORDERS}", "}", f"{IN_PAIRS} both_orders"),
        ("ties count for what stands first", "if reward != 0.5:", "if True:", f"{IN_PAIRS} both_orders"),
        ("pairs of one question count alone", "decided[example].append", "decided[str(len(decided))].append", f"{IN_PAIRS} independent"),
    ),
    Mutation("labels that fit no response are left out in silence", "commands/store/analyzing/compared.py", "        console.say(note)", "        pass", f"{AGREEMENT} fit_no_response"),
    Mutation("a later grade does not replace the first", "analysis/queries/sql/judge_agreement.sql", "ANTI JOIN grades USING (run_id, phase, step, example_id, sample_index, grader)", "", f"{AGREEMENT} later_counts"),
    Mutation("a grader is tried on the responses that ended first", "rollouts/trial_grades.py", "request_seed(0, **key), place", "0, place", "tests/rollouts/test_trial_grades.py -k drawn_from_all"),
    Mutation("unit tests are read as mathematics in silence", "rollouts/inputs.py", "    if _wants_python(config, dataset):", "    if False:", "tests/rollouts/test_inputs.py -k truths_are_unit_tests"),
    Mutation("unit tests that tell no program are condemned", "commands/evaluation/dataset_check.py", "if not has_unknown_answer(grader, e.ground_truth)", "if True", "tests/commands/test_end_to_end.py -k tell_no_program"),
    Mutation("a program of python may take a turn's time", "config/shared/episodes.py", "if is_new and config.environment", "if False and config.environment", "tests/commands/across/test_episodes.py -k more_time_than"),
    Mutation("an old run with short turns does not go on", "config/shared/episodes.py", "if is_new and config.environment", "if config.environment", "tests/commands/across/test_episodes.py -k more_time_than"),
    Mutation("a list of inputs and outputs is no answer", "data/examples.py", "answer = _answer_of(row, answer_field)", "answer = text_of(row, answer_field)", "tests/data/test_datasets.py -k list_of_inputs"),
    Mutation("the file's order is lost in the next command", "commands/store/filter.py", 'if config.order != "source":', "if False:", "tests/commands/store/test_filter.py -k in_the_order_of_the_file"),
    Mutation("the next command has no environment", "commands/store/filtering/sources.py", '("environment", "tool", "max_turns", "max_episode_tokens", "turn_timeout")', "()", "tests/commands/store/test_filter.py -k in_the_order_of_the_file"),
    Mutation("a failed grade has no kind to ask for", "analysis/queries/database.py", "coalesce(kind, 'grade_error: ' || error, 'unknown') END", "kind END", "tests/commands/store/test_analyze.py tests/analysis/queries/test_sql.py -k kind"),
    Mutation("a rewarded response is asked for as a failure", "analysis/queries/database.py", "CASE WHEN (reward > 0.5 AND NOT isnan(reward)) IS NOT TRUE THEN coalesce(kind", "CASE WHEN true THEN coalesce(kind", "tests/analysis/queries/test_sql.py tests/analysis/test_summary.py"),
    Mutation("bfloat16 is noted in some plans alone", "training/planning/plan.py", "    notes += shared_notes(config, samples=bool(inputs.questions))\n", "", "tests/commands/test_sft.py -k every_plan"),
    Mutation("each file's rows are questions", "data/files.py", "such as {like}", "such as {QUESTION}", "tests/discovery/test_proposers.py"),
    Mutation("the judge is compared with any rule", "analysis/queries/sql/judge_agreement.sql", "ELSE grader = $rule END", "ELSE true END", f"{AGREEMENT} only_one"),
    Mutation("a failed grade counts as a disagreement", "analysis/statistics/alarms.py", " AND grades.reward IS NOT NULL AND rollouts.reward IS NOT NULL", "", "tests/analysis/statistics/test_alarms.py -k fails_is_no_disagreement"),
    Mutation("what was known is paid for", "rollouts/metrics.py", 'paid = not judgement["cached"]', "paid = True", f"{JUDGED} asked_once"),
    Mutation("a run chooses the judge's key", "config/shared/prompt.py", '.get("judge_api_key_env") == "resumed run"', '.get("judge_api_key_env") == "never"', f"{BY_JUDGE} which_key"),
    Mutation("a shot is the question", "data/prompts.py", "at=fitting[-1]) if known", "at=fitting[0]) if known", "tests/rollouts/test_shots.py -k question_of_a_stored"),
    Mutation("a guess is the question", "data/prompts.py", "else len(fitting) in (1, self.shots, self._num_places(prompt, message))", "else bool(fitting)", "tests/rollouts/test_shots.py -k several_places"),
    Mutation("a question is not found in its prompt", "text.py", "return inside if holes", "return None if holes", f"{BY_JUDGE} known_to_the_next"),
]  # fmt: skip

ON_TWO_NODES = "tests/parallel/test_cluster.py -k"
WORK = "tests/runs/remote/test_work.py -k"
CLUSTER = [
    *mutations_of(
        "parallel/cluster.py",
        ("weights are sent to one node", "if memory is not None and memory.writes != self._shared:", 'if memory is not None and memory.writes != self._shared and not (self._shared and "n2 (" in self._title):', f"{ON_TWO_NODES} bytes_of_one_machine"),
        ("all samplers get the first weights", "self._content[1] != memory.writes:", "False:", f"{ON_TWO_NODES} bytes_of_one_machine"),
        ("a worker has no GPU of its own", '"num_gpus": int(on_gpu),', '"num_gpus": 0,', f"{ON_TWO_NODES} sees_the_gpu"),
        ("all workers are on one node", 'placement_group_bundle_index=self._bundles.index(node_of(place) or "")', "placement_group_bundle_index=0", f"{ON_TWO_NODES} sees_the_gpu"),
        ("a node that died is not told from a worker that did", "kind = NodeLost if self._lost else RlvrError", "kind = RlvrError", f"{ON_TWO_NODES} of_which_a_node_dies"),
        ("a thread of the cluster's never rests", "inside.threads_stopped.set()", "pass", f"{ON_TWO_NODES} node_that_dies_costs"),
        ("the command's environment stays on its node", "variables=kept", "variables={}", f"{ON_TWO_NODES} a_sampler_that_dies"),
        ("a cluster that is not there is waited for", "socket.create_connection((host, int(port)), timeout=_START_SECONDS / 6).close()", "pass", f"{ON_TWO_NODES} goes_wrong"),
    ),
    *mutations_of(
        "parallel/host.py",
        ("a node's address goes to others", ' and not (name.startswith("VLLM_") and name.endswith(_OF_A_NODE))', "", "tests/parallel/test_host.py -k of_the_command"),
        ("a host outlives its command", "with suppress(OSError):\n                life.recv(1)", "with suppress(OSError):\n                threading.Event().wait()", "tests/parallel/test_host.py"),
        ("a host that comes too late stays", "except ConnectionRefusedError:", "except ConnectionAbortedError:", "tests/parallel/test_host.py"),
        ("weights that came stay with the host", "self._memory.mapped()[: content.nbytes] = memoryview(content)", "pass", f"{ON_TWO_NODES} bytes_of_one_machine"),
        ("messages that came together are lost but for the first", "                message = self._said.get_nowait()\n", "                self._said.get_nowait()\n                break\n", f"{ON_TWO_NODES} a_sampler_that_dies"),
        ("a worker's last words are lost", 'return status, "\\n".join(text.splitlines()[-_LINES:])', 'return status, ""', f"{ON_TWO_NODES} last_words"),
    ),
    *mutations_of(
        "runs/remote/work.py",
        ("a run that was uploaded is said not to have been", "    if _mark(run).exists() and not is_locked(run):", "    if False:", f"{WORK} name_whose"),
        ("a run that is written is said to be a leftover", "    if _mark(run).exists() and not is_locked(run):", "    if _mark(run).exists():", f"{WORK} name_whose"),
        ("what was uploaded stays for ever", "if total <= most or", "if True or", f"{WORK} exceed_the_bound"),
        ("what was just uploaded is removed", "ended > time.time() - IN_USE_SECONDS", "ended > time.time()", f"{WORK} exceed_the_bound"),
        ("a run that a process has is removed", "if not is_locked(path) and not is_locked(path.parent):", "if True:", f"{WORK} exceed_the_bound"),
        ("a run that goes on can be removed", "    _mark(run).unlink(missing_ok=True)", "    pass", f"{WORK} goes_on"),
        ("a sweep is made again on another machine", "        look_again(seconds=0)\n", "        return {}\n", f"{WORK} a_sweep_is"),
        ("a run that is being written is fetched", 'if read_metadata(view)["status"] not in ENDED:', "if False:", f"{WORK} leaves_alone"),
        ("a copy that has fallen behind stays", "        if not is_as_there():\n", "        if not run.exists():\n", f"{WORK} fallen_behind"),
        ("what could not be sent is forgotten", "            self._unsent.append(name)\n", "", f"{WORK} a_sweep_is"),
    ),
    Mutation("a teacher in object storage is looked for on this machine", "training/parallel/replica.py", "model_path(own.loaded_teacher)", "own.loaded_teacher", f"{WORK} teacher_is_that"),
    Mutation("a Doge without experts is a mixture", "models/identity.py", 'getattr(config, "is_moe", True)', "True", "tests/models/test_policy.py -k other_names"),
    Mutation("each MLP has a gate", "models/identity.py", 'int(any("gate" in name for name in shapes))', "1", "tests/models/test_policy.py -k other_names"),
    Mutation("stored masks count as parameters", "models/identity.py", " if shape[:2] != [1, 1]", "", "tests/models/test_policy.py -k other_names"),
    Mutation("a second copy of weights counts", "models/identity.py", "for path in weight_files(directory):", 'for path in directory.glob("*.safetensors"):', "tests/models/test_policy.py -k identity"),
    Mutation("a model without PyTorch's attention is not loaded", "models/pretrained.py", "len(attentions) == 1 or", "True or", "tests/models/test_policy.py -k without_pytorchs"),
    Mutation("the embedded engine leaves out attention sinks", "samplers/embedded/attention.py", 'raise NotImplementedError("attention sinks")', "pass", "tests/samplers/embedded/test_engine.py -k sinks"),
    Mutation("a quantized model is trained", "training/session.py", "    check_unquantized(model_path(config.model))\n", "", "tests/training/test_session.py -k quantized"),
    Mutation("a quantized model gets an evaluation", "commands/eval.py", "    check_model(engine.name, config.model)\n", "", "tests/training/test_session.py -k quantized"),
    Mutation("a quantized model proposes", "commands/discover.py", "        check_model(engine.name, config.model)\n", "", "tests/training/test_session.py -k quantized"),
    Mutation("a quantized model teaches", "commands/distill.py", "    check_unquantized(model_path(config.teacher))\n", "", "tests/training/test_session.py -k quantized"),
    Mutation("a model with a damaged generation config is loaded", "models/pretrained.py", "    _check_generation_config(name, directory)\n    with quiet():\n        try:\n            model", "    with quiet():\n        try:\n            model", "tests/models/test_policy.py -k generation_config_is_not"),
    Mutation("a damaged generation config ends no responses", "models/pretrained.py", "    _check_generation_config(name, directory)\n    with quiet():\n        try:\n            found", "    with quiet():\n        try:\n            found", "tests/models/test_policy.py -k generation_config_is_not"),
    Mutation("an encoder is loaded", "models/pretrained.py", "if _is_encoder(model.config):", "if False:", "tests/models/test_policy.py -k an_encoder"),
    Mutation("an XLM that is an encoder is loaded", "models/pretrained.py", 'getattr(config, "causal", None)', "None", "tests/models/test_policy.py -k an_encoder"),
    Mutation("a quantized model is loaded", "models/pretrained.py", "    check_unquantized(path_or_id)\n", "", "tests/models/test_policy.py -k quantized"),
    Mutation("a model whose text model is quantized is loaded", "models/directory.py", 'config.get("text_config")', "None", "tests/models/test_policy.py -k quantized"),
    Mutation("a model's facts name the cache", "models/identity.py", "    if is_address(model):\n        identity", "    if False:\n        identity", f"{WORK} that_of_a_run"),
    Mutation("other stores are taken for directories", "runs/remote/store.py", "text.startswith((SCHEME, *_REFUSED))", "text.startswith(SCHEME)", f"{WORK} another_kind"),
]  # fmt: skip

MUTATIONS = [
    *STORAGE,
    *WIRING,
    *MATHEMATICS,
    *EMULATED,
    *EPISODES,
    *REASONING_GYM,
    *VERIFIERS,
    *VIEW,
    *SUPPLEMENT,
    *JUDGES,
    *CLUSTER,
]


def applied(mutation: Mutation, source: str) -> str:
    """The source with the fault. Raises ValueError unless the text to replace occurs exactly once."""
    found = source.count(mutation.old)
    if found != 1:
        raise ValueError(f"{mutation.name}: its text occurs {found} times in {mutation.file}")
    return source.replace(mutation.old, mutation.new)


def _copy(folder: Path) -> Path:
    """A copy of the repository in which mutations are made; its bytecode is written once, and never again."""
    for name in (PACKAGE, "datasets", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    compileall.compile_dir(folder / PACKAGE, quiet=2)
    return folder


def _pytest(copy: Path, tests: list[str], *, marks: str) -> tuple[int, str]:
    """Run tests in a forked interpreter that has the libraries, but nothing of rlvr. Returns its exit status and output.

    Args:
        marks: which of the tests, as pytest's `-m` says it.
    """
    log = copy / "mutation.log"
    pid = os.fork()
    if pid == 0:
        status = 3
        try:
            os.setsid()
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.chdir(copy)
            os.environ |= {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
            sys.dont_write_bytecode = True
            sys.path[:0] = [str(copy)]
            import pytest

            options = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line", "-rfE", "-m", marks]
            options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # libraries that were imported before pytest
            status = int(pytest.main([*options, "--basetemp", str(copy / "mutation-tmp"), *tests]))
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    status, ends = None, time.monotonic() + SECONDS
    while status is None and time.monotonic() < ends:
        done, code = os.waitpid(pid, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else None
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # what the tests left behind, and a test that hangs
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
    return (124 if status is None else status), log.read_text(encoding="utf-8", errors="replace")


def _outcome(mutation: Mutation, copy: Path, *, marks: str) -> tuple[bool, str]:
    """Whether a mutation is as it should be, and what became of it."""
    path = copy / PACKAGE / mutation.file
    source = path.read_text(encoding="utf-8")
    try:
        path.write_text(applied(mutation, source), encoding="utf-8")
    except ValueError as error:
        return False, f"**not applied**: {error}"
    for stale in path.parent.glob(f"__pycache__/{path.stem}.*"):
        stale.unlink()
    try:
        status, output = _pytest(copy, _arguments(mutation.tests), marks=marks)
    finally:
        path.write_text(source, encoding="utf-8")
    killers = re.findall(r"^(?:FAILED|ERROR) (\S+?::.+?)(?: - .*)?$", output, re.MULTILINE)
    if status == 1 and killers:
        return True, f"killed by {killers[0]}"
    if status == 124:
        return True, f"killed by a test that hangs for {SECONDS} s"
    if status in (0, 5):  # 5: all its tests are slow
        return bool(mutation.explained), f"survived: {mutation.explained}" if mutation.explained else "**survived**"
    return False, f"**no result**: pytest ended with {status}: {output.strip()[-300:]}"


def _arguments(tests: str) -> list[str]:
    """Split the arguments; a space may stand inside the brackets of a test's name."""
    return re.findall(r"[^\s\[]+(?:\[[^\]]*\])?", tests)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", default="", help="a regular expression: only mutations whose name, file or options it finds"
    )
    parser.add_argument("--workers", type=int, default=2, help="how many run at a time")
    parser.add_argument(
        "--without-baseline", action="store_true", help="do not run the tests on the unchanged code first"
    )
    parser.add_argument("--default-only", action="store_true", help="run no slow tests")
    arguments = parser.parse_args()
    marks = "not slow and not full" if arguments.default_only else "not full"
    chosen = [m for m in MUTATIONS if re.search(arguments.only, f"{m.name} {m.file} {' '.join(m.options)}")]
    if not list(Path("/dev").glob("nvidia[0-9]*")):
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before triton is imported, as in tests/conftest.py
    for name in ("duckdb", "torch", "transformers.models.qwen2.modeling_qwen2"):  # the forked interpreters share them
        importlib.import_module(name)
    sys.modules["torch"].set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copies: Queue[Path] = Queue()
        for number in range(arguments.workers):
            copies.put(_copy(Path(folder, str(number))))

        def run(mutation: Mutation | None) -> tuple[bool, str, float]:
            copy, started = copies.get(), time.monotonic()
            try:
                if mutation is None:
                    every = dict.fromkeys(a for m in chosen for a in _arguments(m.tests) if a.startswith("tests/"))
                    files = {a for a in every if "::" not in a}
                    named = [a for a in every if a in files or a.partition("::")[0] not in files]
                    status, output = _pytest(copy, named, marks=marks)
                    return status == 0, output, time.monotonic() - started
                good, outcome = _outcome(mutation, copy, marks=marks)
                print(f"{time.monotonic() - started:5.0f} s  {mutation.name}: {outcome}", file=sys.stderr, flush=True)
                return good, outcome, time.monotonic() - started
            finally:
                copies.put(copy)

        # No ThreadPoolExecutor: Python joins its threads at exit, and in a process that is forked from one it would join itself.
        with ThreadPool(arguments.workers) as pool:
            if not arguments.without_baseline:
                good, output, _ = pool.apply(
                    run, (None,)
                )  # as the mutations: what fails there is not killed by the tests
                if not good:
                    print(f"The tests fail on the unchanged code:\n{output[-3000:]}", file=sys.stderr)
                    return 1
            results = pool.map(run, chosen, chunksize=1)
    print("| mutation | file | outcome |\n|---|---|---|")
    for mutation, (_, outcome, _) in zip(chosen, results, strict=True):
        print(f"| {mutation.name} | {mutation.file} | {outcome.replace('|', chr(92) + '|')} |")
    bad = sum(not good for good, _, _ in results)
    print(
        f"\n{len(chosen)} mutations: {sum(o.startswith('killed') for _, o, _ in results)} killed, {bad} not as they should be"
    )
    return 1 if bad > (len(chosen) // 20 if arguments.default_only else 0) else 0


if __name__ == "__main__":
    sys.exit(main())
