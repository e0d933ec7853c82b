"""The prompt that a question is put into, and how the responses are graded."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from rlvr_cli.config.parsing.options import (
    JUDGE,
    JUDGE_FORM,
    LONGEST,
    FileFunction,
    JudgeFile,
    check_effects,
    flag,
    knob,
)
from rlvr_cli.config.shared.addresses import KEY_ENV, check_address, check_key_name
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import WITH_FORMAT_RULE, ChatThinking, FormatRule, GraderName

GraderChoice = Literal["", GraderName]  # "" where it is not given
FORMAT_RULE = "Format rule of the graders with tags: literal requires exactly '</think> <answer>', lenient allows any white space between."


@dataclass(frozen=True)
class JudgeOptions:
    """Another model, behind an OpenAI-compatible endpoint, that grades what no rule can."""

    judge_url: str = knob(
        "",
        "With a judge: address of its OpenAI-compatible endpoint, such as http://localhost:8000/v1.",
        group="Grading",
        free_on_resume=True,
    )
    judge_model: str = knob("", "With a judge: the endpoint's name of the model.", group="Grading")
    judge_endpoint: Literal["chat", "completions"] = knob(
        "chat", "With a judge: the endpoint's API; completions sends the rubric as it stands.", group="Grading"
    )
    judge_api_key_env: str = knob(
        KEY_ENV,
        "With a judge: environment variable with its endpoint's API key.",
        group="Grading",
        free_on_resume=True,
    )
    judge_temperature: float = knob(
        0.0, "With a judge: the temperature of its replies.", group="Grading", at_least=0, at_most=2
    )
    judge_max_tokens: int = knob(
        1024, "With a judge: the most tokens of a reply; one that is cut off has no score.", group="Grading", at_least=1
    )
    judge_seed: int = knob(0, "With a judge: the seed that is sent with each request.", group="Grading", at_least=0)
    judge_concurrency: int = knob(
        64, "With a judge: requests under way at a time.", group="Grading", free_on_resume=True, at_least=1
    )
    judge_timeout: float = knob(
        120.0,
        "With a judge: seconds that one grade may take, waiting and retries included.",
        group="Grading",
        free_on_resume=True,
        above=0,
        at_most=LONGEST,
    )
    judge_retries: int = knob(
        6,
        "With a judge: tries after the first, of what may succeed later: busy, broken, unreadable.",
        group="Grading",
        free_on_resume=True,
        at_least=0,
    )


@dataclass(frozen=True)
class PromptOptions(JudgeOptions):
    prompt: str = knob(
        "r1_zero",
        "Prompt template: r1_zero, question_only, alpaca, or a file that contains {question}.",
        group="Data",
        common=True,
        completes="prompt",
    )
    chat: bool = knob(
        False, "Send the prompt as the user's message, in the model's own chat template.", group="Data", common=True
    )
    chat_thinking: ChatThinking = knob(
        "auto",
        "With --chat: the chat template's switch for thinking (Qwen3 has one). auto: as the template has it.",
        group="Data",
    )
    chat_system: str = knob("", "With --chat: the system message. Empty: none but the template's own.", group="Data")
    grader: GraderChoice | FileFunction | JudgeFile = knob(
        "",
        "Grader, a function of your own, or another model with a rubric. Default: chosen by dataset and prompt.",
        group="Grading",
        common=True,
    )
    format_rule: FormatRule = knob("literal", FORMAT_RULE, group="Grading")
    grader_timeout: float = knob(
        5.0, "Time limit per grade in seconds; the worker is then killed.", group="Grading", above=0, at_most=LONGEST
    )
    grader_workers: int = knob(2, "Number of grading processes.", group="Grading", free_on_resume=True, at_least=1)


@dataclass(frozen=True)
class ShotOptions(PromptOptions):
    shots: int = knob(
        0,
        "Few-shot: so many questions with their responses before each question, never itself. Of mmlu: the first of its subject's dev file; "
        "else the first of the training split, which needs traces: responses or worked solutions.",
        group="Data",
        at_least=0,
    )
    shots_dataset: str = knob(
        "",
        "With --shots: traces to take them from, as a dataset or file of {prompt, response}. Empty: another split of the questions' dataset.",
        group="Data",
        completes="dataset",
    )


def check_shots(config: ShotOptions, *, plays: bool) -> None:
    """Raise RlvrError for what cannot go with --shots; `plays`: an environment or a tool answers the policy."""
    if config.shots_dataset and not config.shots:
        raise RlvrError("--shots-dataset needs --shots.", "Add --shots 5, or leave it out.")
    if config.shots and plays:
        raise RlvrError(
            "--shots and episodes exclude each other: a shot is one response, without what an environment or a tool said in between.",
            "Leave --shots out, or --environment and --tool.",
        )


def check_prompt(config: PromptOptions) -> None:
    given = {"chat_thinking": config.chat_thinking != "auto", "chat_system": bool(config.chat_system)}
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None and not config.chat:
        raise RlvrError(f"{flag(name)} needs --chat.", "Add --chat, or leave it out.")
    check_judge(config, graders=(config.grader,))
    check_format_rule(config, config.grader)


def check_format_rule(config: Any, grader: str) -> None:
    """Raise NoEffect if the command line has a --format-rule for a grader without one; "" is chosen later."""
    has_effect = config.format_rule == "literal" or grader in ("", *WITH_FORMAT_RULE)
    check_effects(config, {"format_rule": (has_effect, f"a grader that has one: {', '.join(WITH_FORMAT_RULE)}")})


def is_judge(grader: str) -> bool:
    """Whether a --grader is a judge: a model with a rubric."""
    return grader.startswith(JUDGE)


def check_judge(config: Any, *, graders: Sequence[str]) -> None:
    """Raise RlvrError unless the options of a judge are whole, or none of them is given without one.

    Args:
        config: with the `JudgeOptions`, and where each value came from.
        graders: what may name a judge.
    """
    grader = next(filter(is_judge, graders), None)
    if grader is None:
        given = next((f.name for f in fields(JudgeOptions) if getattr(config, f.name) != f.default), None)
        if given is not None:
            raise RlvrError(f"{flag(given)} needs a judge.", f"Add --grader {JUDGE_FORM}, or leave it out.")
        return
    if grader == JUDGE:
        raise RlvrError(f"--grader {JUDGE} names no rubric.", f"Write --grader {JUDGE_FORM}, the file of its prompt.")
    check_judge_endpoint(config)


def check_judge_endpoint(config: Any) -> None:
    """Raise RlvrError unless the `JudgeOptions` of a config name an endpoint and its model."""
    for name, example in (("judge_url", "http://localhost:8000/v1"), ("judge_model", "NAME")):
        if not getattr(config, name).strip():
            raise RlvrError(f"A judge needs {flag(name)}.", f"Add {flag(name)} {example}")
    check_address(config.judge_url, option="--judge-url")
    check_key_name(config.judge_api_key_env, option="--judge-api-key-env")
    if config.sources.get("judge_api_key_env") == "resumed run" and config.judge_api_key_env != KEY_ENV:
        # As for --api-key-env: a run directory may come from someone else.
        raise RlvrError(
            f"The run was started with the judge's key in {config.judge_api_key_env}, and a run does not choose what is sent.",
            f"To send it to {config.judge_url} again: --resume RUN --judge-api-key-env {config.judge_api_key_env}",
        )
