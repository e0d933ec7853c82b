"""The prompt that a question is put into, and how the responses are graded."""

from dataclasses import dataclass
from typing import Literal

from rlvr_cli.config.parsing.options import LONGEST, FileFunction, flag, knob
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import ChatThinking, FormatRule

GraderName = Literal[  # modules of graders/
    "r1_zero", "question_only", "math_verify", "gsm8k", "countdown", "python", "reasoning_gym", "multiple_choice"
]  # fmt: skip
GraderChoice = Literal["", GraderName]  # "" where it is not given
FORMAT_RULE = "Format rule of the graders with tags: literal requires exactly '</think> <answer>', lenient allows any white space between."


@dataclass(frozen=True)
class PromptOptions:
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
    grader: GraderChoice | FileFunction = knob(
        "", "Grader, or a function of your own. Default: chosen by dataset and prompt.", group="Grading", common=True
    )
    format_rule: FormatRule = knob("literal", FORMAT_RULE, group="Grading")
    grader_timeout: float = knob(
        5.0, "Time limit per grade in seconds; the worker is then killed.", group="Grading", above=0, at_most=LONGEST
    )
    grader_workers: int = knob(2, "Number of grading processes.", group="Grading", free_on_resume=True, at_least=1)


def check_prompt(config: PromptOptions) -> None:
    given = {"chat_thinking": config.chat_thinking != "auto", "chat_system": bool(config.chat_system)}
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None and not config.chat:
        raise RlvrError(f"{flag(name)} needs --chat.", "Add --chat, or leave it out.")
