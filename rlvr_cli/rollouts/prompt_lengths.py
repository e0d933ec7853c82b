"""Before the first sample: whether each prompt leaves room in the context for its response.

Enters: questions, their template, a tokenizer and the context. Leaves: nothing, or an RlvrError that names a question.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

from rlvr_cli.data.prompts import PLACEHOLDER, SUBJECT, PromptTemplate, prompt_of
from rlvr_cli.errors import RlvrError
from rlvr_cli.types import Example

_TOKENIZED = 256  # prompts at once
_ADDED = 8  # more tokens than a tokenizer puts around a text: special ones, and a space


def check_prompts(
    examples: Iterable[Example],
    template: PromptTemplate,
    tokenizer: Callable[[], Any],
    *,
    max_tokens: int,
    context: float,
    note: str = "",
    options: Sequence[str],
) -> None:
    """Raise RlvrError if a prompt and the longest response to it exceed the context.

    Args:
        tokenizer: returns that of the model; called only if a prompt may be too long.
        max_tokens: of a response.
        context: the most tokens of a prompt and its response; infinite if there is no limit.
        note: why the context is that short, after a space; or empty.
        options: those that make responses shorter.
    """
    for problem, _ in long_prompts(examples, template, tokenizer, max_tokens=max_tokens, context=context):
        raise RlvrError(
            f"{problem}, and the context holds {context}{note}.",
            f"Remove it from the dataset, or allow only shorter responses: {' or '.join(options)}.",
        )


def long_prompts(
    examples: Iterable[Example],
    template: PromptTemplate,
    tokenizer: Callable[[], Any],
    *,
    max_tokens: int,
    context: float,
) -> Iterator[tuple[str, int]]:
    """Iterate over the prompts that, with the longest response, exceed a context: what is to be said of each, and the tokens of both.

    Only prompts that may be too long are tokenized, some at a time, so that a million questions take little time and memory.

    Args:
        tokenizer, max_tokens, context: see `check_prompts`.
    """
    bound = bound_of(template)
    long = (example for example in examples if bound(example) + max_tokens > context)
    while some := list(islice(long, _TOKENIZED)):
        for example, length in zip(some, _lengths(tokenizer(), [prompt_of(e, template) for e in some]), strict=True):
            if (both := length + max_tokens) > context:
                yield (
                    f"Question {example.id} has a prompt of {length} tokens; with {max_tokens} for the response that is {both}",
                    both,
                )


def bound_of(template: PromptTemplate) -> Callable[[Example], int]:
    """Return what bounds the tokens of an example's prompt, mostly without making it: that would take most of the time."""
    fixed, places = most_tokens(template.text), template.text.count(PLACEHOLDER)

    def bound(example: Example) -> int:
        if example.prompt is not None or SUBJECT in template.text:
            return most_tokens(prompt_of(example, template))
        return fixed + places * most_tokens(example.question)

    return bound


def most_tokens(prompt: str) -> int:
    """A bound on the tokens of a prompt, without tokenizing it: each has at least a byte, and NFC makes at most three of one."""
    return _ADDED + (len(prompt) if prompt.isascii() else 3 * len(prompt.encode(errors="replace")))


def _lengths(tokenizer: Any, prompts: Sequence[str]) -> list[int]:
    """The tokens of each prompt. One that is not valid Unicode, which no tokenizer takes, is refused where it is sampled."""
    from rlvr_cli.models.tokens.tokenization import encode_prompts  # here: endpoints do without torch

    valid = [prompt.encode(errors="replace").decode() for prompt in prompts]
    return [len(ids) for ids in encode_prompts(tokenizer, valid)]
