"""Names that users try for an option (abbreviations, other libraries' names); errors suggest the option instead.

Enters: a word and the known options. Leaves: the options that it may mean.
"""

from collections.abc import Collection

from rlvr_cli.config.options import nearest

SYNONYMS = {
    "lr": ("learning_rate",),
    "schedule": ("lr_schedule",),
    "scheduler": ("lr_schedule",),
    "lr_scheduler": ("lr_schedule",),
    "lr_scheduler_type": ("lr_schedule",),
    "warmup": ("warmup_steps",),
    "wd": ("weight_decay",),
    "clip_grad": ("max_grad_norm",),
    "grad_clip": ("max_grad_norm",),
    "bs": ("train_batch_size", "rollout_batch_size", "max_batch_size"),
    "batch_size": ("train_batch_size", "rollout_batch_size", "max_batch_size"),
    "per_device_train_batch_size": ("micro_batch_size", "gradient_accumulation_steps"),
    "grad_accum": ("gradient_accumulation_steps", "micro_batch_size"),
    "epochs": ("sft_epochs", "epochs_per_rollout_batch"),
    "num_epochs": ("sft_epochs", "epochs_per_rollout_batch"),
    "num_train_epochs": ("sft_epochs", "epochs_per_rollout_batch"),
    "num_iterations": ("epochs_per_rollout_batch",),
    "steps": ("n_grpo_steps", "n_ei_steps", "n_sft_steps", "step"),
    "num_steps": ("n_grpo_steps", "n_ei_steps", "n_sft_steps"),
    "max_steps": ("n_grpo_steps", "n_ei_steps", "n_sft_steps"),
    "n": ("num_samples", "group_size", "num_examples", "limit"),
    "k": ("num_samples", "group_size"),
    "g": ("group_size",),
    "num_generations": ("group_size", "num_samples"),
    "num_rollouts": ("group_size", "num_samples"),
    "samples": ("num_samples", "group_size"),
    "temp": ("sampling_temperature",),
    "temperature": ("sampling_temperature",),
    "top_p": ("sampling_top_p",),
    "max_tokens": ("sampling_max_tokens",),
    "max_length": ("sampling_max_tokens",),
    "max_new_tokens": ("sampling_max_tokens",),
    "max_completion_length": ("sampling_max_tokens",),
    "min_tokens": ("sampling_min_tokens",),
    "loss": ("loss_type",),
    "beta": ("kl_coef",),
    "kl": ("kl_coef",),
    "clip": ("cliprange",),
    "clip_range": ("cliprange",),
    "epsilon": ("cliprange",),
    "epsilon_high": ("cliprange_high",),
    "std_normalization": ("use_std_normalization",),
    "data": ("dataset",),
    "train_dataset": ("dataset",),
    "val_dataset": ("eval_dataset",),
    "test_dataset": ("eval_dataset",),
    "max_examples": ("limit", "num_examples"),
    "max_samples": ("limit", "num_examples"),
    "model_name": ("model",),
    "checkpoint": ("model", "resume"),
    "backend": ("engine",),
    "api_base": ("base_url",),
    "reward": ("grader",),
    "reward_fn": ("grader",),
    "verifier": ("grader",),
    "template": ("prompt",),
    "workers": ("grader_workers",),
    "name": ("run",),
    "run_name": ("run", "name"),
    "output": ("out", "run"),
    "output_dir": ("run", "out"),
    "continue": ("resume",),
    "resume_from": ("resume",),
    "resume_from_checkpoint": ("resume",),
    "time": ("time_limit",),
    "max_time": ("time_limit",),
    "timeout": ("request_timeout", "time_limit", "timeout_seconds", "grader_timeout"),
    "save_every": ("checkpoint_every",),
    "save_steps": ("checkpoint_every",),
    "eval_steps": ("eval_every",),
    "plan": ("dry_run",),
}


def suggested_options(word: str, known: Collection[str]) -> list[str]:
    """Return the options (field names) that a word may mean: its synonyms, else the most similar name."""
    word = word.lstrip("-").replace("-", "_").lower()
    return [name for name in SYNONYMS.get(word, ()) if name in known] or nearest(word, known)
