"""Thinking-mode fusion (Qwen3, section 4.3): each example in two forms, one that thinks when asked to, and one that does not.

Enters: a question and a response that thinks. Leaves: two questions, each with its response.
"""

from collections.abc import Iterator

BEGIN, END = "<think>", "</think>"


def fused_forms(question: str, response: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, question and response of both forms; nothing for a response without thinking or without an answer.

    The question gets the flag `/think` or `/no_think`. The block of thinking stays where there is none, as an empty one.
    """
    thinking, _, answer = response.lstrip().removeprefix(BEGIN).partition(END)
    thinking, answer = thinking.strip(), answer.strip()
    if thinking and answer:
        yield "think", f"{question} /think", f"{BEGIN}\n{thinking}\n{END}\n\n{answer}"
        yield "no_think", f"{question} /no_think", f"{BEGIN}\n\n{END}\n\n{answer}"
