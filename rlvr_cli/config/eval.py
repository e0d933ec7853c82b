"""The options of `rlvr eval`."""

import os
import re
from dataclasses import dataclass

from rlvr_cli.config.parsing.options import check_values, knob
from rlvr_cli.config.parsing.sources import is_partial
from rlvr_cli.config.shared.endpoint import EndpointOptions, check_endpoint
from rlvr_cli.config.shared.engine import check_engine, check_servers
from rlvr_cli.config.shared.episodes import EpisodeOptions, check_episodes
from rlvr_cli.config.shared.prompt import ShotOptions, check_prompt, check_shots
from rlvr_cli.config.shared.questions import QuestionOptions, split_datasets
from rlvr_cli.config.shared.run import RunOptions
from rlvr_cli.config.shared.sampling import check_sampling
from rlvr_cli.errors import RlvrError


@dataclass(frozen=True)
class EvalConfig(EndpointOptions, RunOptions, EpisodeOptions, ShotOptions, QuestionOptions):
    """Evaluate a model: sample, grade and store responses, then report accuracy with confidence intervals.

    Examples:
        rlvr eval --model Qwen/Qwen2.5-Math-1.5B --dataset gsm8k --limit 256 --run zero-shot
        rlvr eval --model runs/q0-grpo/model --dataset arithmetic:256 --dataset countdown --num-samples 16
        rlvr eval --model Qwen/Qwen3-1.7B --chat --prompt question_only --thinking-budget 256,1024,4096 --sampling-max-tokens 8192
    """

    dataset: str = knob(
        "arithmetic",
        "arithmetic, countdown, multiplication (or NAME:SIZE[:SEED] to generate), gsm8k, math, a .jsonl/.json/.csv/.parquet file, "
        "mmlu:FOLDER, hf:ORG/NAME, reasoning-gym:FAMILY[,KEY=VALUE...], or verifiers:ID[,KEY=VALUE...]. "
        "Several, by commas or repeated: a run for each, RUN-gsm8k and so on.",
        group="Data",
        common=True,
        completes="dataset",
        joined_by=",",
    )
    limit: int | None = knob(None, "Use the first N questions, of each dataset.", group="Data", common=True, at_least=1)
    check_dataset: bool = knob(
        False, "Without a model: only grade every ground truth against itself and list those that the grader cannot read.", group="Data", common=True
    )  # fmt: skip
    num_samples: int = knob(
        1,
        "Samples per question; more than one adds pass@k, best@k and majority@k.",
        group="Sampling",
        common=True,
        at_least=1,
    )
    thinking_budget: str = knob(
        "",
        "Tokens after which thinking is ended and the answer sampled. Several, as in 128,512,2048: a run for each, RUN-128 and so on.",
        group="Sampling",
        common=True,
    )
    stop_thinking: str = knob(
        "",
        "With --thinking-budget: what follows thinking that has not ended. Empty: Qwen3's sentence, </think>, and <answer> if the prompt has one.",
        group="Sampling",
    )
    resume: str = knob(
        "",
        "Resume this run (name or directory): only missing samples are generated.",
        group="Run",
        common=True,
        completes="run of the command",
        free_on_resume=True,
    )

    dry_run: bool = knob(
        False, "Print the plan with the first prompt, and stop.", group="Run", common=True, free_on_resume=True
    )

    def __post_init__(self) -> None:
        if is_partial(self):
            return
        check_values(self)
        check_endpoint(self, chat=self.chat and not self.plays_episodes)  # whose tokens an endpoint gets
        check_prompt(self)
        check_sampling(self)
        check_episodes(self)
        check_shots(self, plays=bool(self.environment or self.tool))
        check_engine(self)
        check_servers(self)
        self._check_thinking()
        self._check_datasets()
        if self.check_dataset and self.dry_run:
            raise RlvrError(
                "--dry-run has no effect with --check-dataset: nothing is sampled.", "Leave one of them out."
            )

    @property
    def thinking_budgets(self) -> tuple[int, ...]:
        """The budgets of --thinking-budget, tokens; none without it."""
        return tuple(int(budget) for budget in self.thinking_budget.split(",") if budget)

    @property
    def datasets(self) -> tuple[str, ...]:
        """The datasets of --dataset; a file whose own name has a comma is one."""
        if "," not in self.dataset or os.path.exists(self.dataset):
            return (self.dataset,)
        return split_datasets(self.dataset)

    def _check_datasets(self) -> None:
        several = self.datasets
        if len(several) == 1:
            return
        if "" in several or len(set(several)) < len(several):
            what = "an empty name" if "" in several else "a dataset twice"
            raise RlvrError(f"--dataset {self.dataset} has {what}.", "Name each dataset once: --dataset gsm8k,math")
        if self.resume:
            raise RlvrError(
                "--resume goes on with one run, and --dataset names several.",
                "Give the same command with the same --run again: it goes on with those that are there.",
            )

    def _check_thinking(self) -> None:
        if self.stop_thinking and not self.thinking_budget:
            raise RlvrError("--stop-thinking has no effect without --thinking-budget.", "Add it, or leave both out.")
        if self.stop_thinking and "</think>" not in self.stop_thinking:
            raise RlvrError("--stop-thinking does not end the thinking.", "Put </think> into it.")
        if not self.thinking_budget:
            return
        if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", self.thinking_budget):
            raise RlvrError(
                f"--thinking-budget {self.thinking_budget!r} is not a number of tokens.",
                "Give one number, or several with commas: --thinking-budget 128,512,2048",
            )
        budgets = self.thinking_budgets
        if len(set(budgets)) < len(budgets):
            raise RlvrError(f"--thinking-budget {self.thinking_budget} has a budget twice.", "Leave one of them out.")
        if max(budgets) >= self.sampling_max_tokens:
            raise RlvrError(
                f"--thinking-budget {max(budgets)} leaves no tokens for the answer: a response has up to {self.sampling_max_tokens}.",
                "Raise --sampling-max-tokens: what is above the budget is for the answer.",
            )
        if self.base_url:
            raise RlvrError(
                "--thinking-budget goes on from token ids, which an endpoint is not asked for.",
                "Load the model here (--engine vllm), or name vLLM servers with --sampler-urls.",
            )
        if self.chat and self.chat_thinking == "off":
            raise RlvrError("--thinking-budget and --chat-thinking off exclude each other.", "Leave one of them out.")
        if self.resume and len(budgets) > 1:
            raise RlvrError(
                "--resume goes on with one run, and --thinking-budget names several.",
                "Give the same command with the same --run again: it goes on with those that are there.",
            )
