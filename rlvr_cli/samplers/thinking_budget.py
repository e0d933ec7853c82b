"""A thinking budget: thinking that has not ended after so many tokens is ended for it, and the answer sampled (Qwen3, section 4.3).

Enters: a sampler, and its requests. Leaves: completions in two parts, the thinking and what follows `</think>`. The second
part is sampled from the token ids of the first as they are: decoded and tokenized again, they would be others.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from rlvr_cli.errors import QuestionsRefused, RlvrError
from rlvr_cli.samplers.stop_strings import prompt_token_ids, response_text
from rlvr_cli.samplers.wrapper import SamplerWrapper, mean_entropy, seed_of_part
from rlvr_cli.types import Completion, Request, Sampler, SamplingParams, Turn

END = "</think>"
GROUP = 512  # rows that think before their answers are sampled: what a kill loses
SENTENCE = "Considering the limited time by the user, I have to give the solution based on the thinking directly now."


def token_ids(tokenizer: Any, stop_thinking: str) -> list[int]:
    """The tokens that end a thinking."""
    return tokenizer(stop_thinking, add_special_tokens=False)["input_ids"]


def tokens_left(params: SamplingParams, *, budget: int, ending: Sequence[int]) -> int:
    """Tokens that a thinking budget and the tokens that end the thinking leave for the answer. Raises RlvrError if there are none."""
    left = params.max_tokens - budget - len(ending)
    if left < 1:
        other = "lower --thinking-budget" if params.max_tokens > len(ending) else "give a shorter --stop-thinking"
        raise RlvrError(
            f"A response has up to {params.max_tokens} tokens: {budget} of thinking and the {len(ending)} that end it "
            "leave none for the answer.",
            f"Raise --sampling-max-tokens, or {other}.",
        )
    return left


class BudgetedSampler(SamplerWrapper):
    """Samples from another sampler, within a thinking budget.

    All that comes before the first `</think>` is thinking. `max_tokens` bounds a response, with what is put into it: what the budget
    and the ending leave is for the answer. The tokens that end a thinking are the environment's: they are marked so in
    `response_mask` and `turns`.

    Args:
        sampler: reports token ids.
        tokenizer: of the sampler's model.
        budget: tokens of thinking, from 0; below `max_tokens`.
        stop_thinking: follows thinking that has not ended; contains `</think>`.
    """

    def __init__(self, sampler: Sampler, tokenizer: Any, *, budget: int, stop_thinking: str) -> None:
        super().__init__(sampler)
        self._tokenizer, self._budget = tokenizer, budget
        self._ending = token_ids(tokenizer, stop_thinking)

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request: group after group, first those that end while thinking, then the others as they finish.

        Raises:
            QuestionsRefused: some questions were refused; raised after all other completions were yielded.
            RlvrError: no tokens are left for the answer, or what the sampler raises; before anything is sampled, if a prompt is
                too long for `max_tokens`.
        """
        left = tokens_left(params, budget=self._budget, ending=self._ending)
        for _ in self._sampler.sample([replace(request, seeds=()) for request in requests], params):
            pass  # nothing is asked for: the sampler checks the prompts
        size = max(GROUP // max((len(request.seeds) for request in requests), default=1), 1)
        refused: list[QuestionsRefused] = []
        for start in range(0, len(requests), size):
            for completion in self._of_group(requests[start : start + size], params, left=left, refused=refused):
                yield replace(completion, request_index=start + completion.request_index)
        if refused:
            raise QuestionsRefused.joined(refused)

    def _of_group(
        self, requests: Sequence[Request], params: SamplingParams, *, left: int, refused: list[QuestionsRefused]
    ) -> Generator[Completion]:
        """Answer every seed of these requests; what is refused is added to `refused`."""
        begun: list[Completion] = []
        for completion in _collecting(refused, self._think(requests, params)):
            if completion.finish_reason == "stop" and (completion.stop_reason != END or END in params.stop):
                yield completion
            else:
                begun.append(completion)
        prefixes = [self._prefix(completion) for completion in begun]
        continued = [
            Request(
                requests[c.request_index].prompt,
                (seed_of_part(requests[c.request_index].seeds[c.sample_index], "answer"),),
                name=requests[c.request_index].name,
                prompt_ids=c.prompt_ids + c.token_ids + ending,
            )
            for c, ending in zip(begun, prefixes, strict=True)
        ]
        fewest = max(params.min_tokens - self._budget, 0)
        answer = replace(params, max_tokens=left, min_tokens=min(fewest, left))
        for completion in _collecting(refused, self._sampler.sample(continued, answer)) if continued else ():
            index = completion.request_index
            yield self._joined(begun[index], prefixes[index], completion, stop=params.stop)

    def _think(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Sample until thinking ends, or the budget does."""
        if self._budget:
            stop = (*params.stop, *([] if END in params.stop else [END]))
            fewest = min(params.min_tokens, self._budget)
            yield from self._sampler.sample(
                requests, replace(params, max_tokens=self._budget, min_tokens=fewest, stop=stop)
            )
            return
        prompts = prompt_token_ids(self._tokenizer, requests, vocab_size=len(self._tokenizer))
        for index, (request, ids) in enumerate(zip(requests, prompts, strict=True)):
            nothing = Completion(index, 0, "", tuple(ids), (), (), len(ids), 0, "length", None, None)
            yield from (replace(nothing, sample_index=sample) for sample in range(len(request.seeds)))

    def _prefix(self, thinking: Completion) -> tuple[int, ...]:
        """The tokens that end this thinking; none if it has ended."""
        # Also before the budget's end: a `</think>` among the first `min_tokens` tokens does not stop the sampler.
        return () if END in thinking.text else tuple(self._ending)

    def _joined(
        self, thinking: Completion, ending: tuple[int, ...], answer: Completion, *, stop: Sequence[str]
    ) -> Completion:
        """Both parts as one response."""
        ids = thinking.token_ids + ending + answer.token_ids
        text = response_text(self._tokenizer, ids)
        if answer.stop_reason in stop:  # what its last token holds after the stop string
            text = text[: len(text) - len(response_text(self._tokenizer, answer.token_ids)) + len(answer.text)]
        first, second = len(thinking.token_ids), len(answer.token_ids)
        start = first + len(ending)
        turns = (Turn("policy", 0, first), Turn("environment", first, start), Turn("policy", start, start + second))
        mask = (*[True] * first, *[False] * len(ending), *[True] * second)
        return replace(
            answer,
            request_index=thinking.request_index,
            sample_index=thinking.sample_index,
            text=text,
            prompt_ids=thinking.prompt_ids,
            token_ids=ids,
            logprobs=thinking.logprobs + (0.0,) * len(ending) + answer.logprobs,
            num_prompt_tokens=thinking.num_prompt_tokens,
            num_tokens=len(ids),
            mean_entropy=mean_entropy((thinking, answer)),
            response_mask=mask if ending else None,
            turns=tuple(turn for turn in turns if turn.start < turn.end) if ending else None,
        )


def _collecting(refused: list[QuestionsRefused], completions: Generator[Completion]) -> Generator[Completion]:
    """Yield these completions; the error that questions were refused, which comes after them, is added to `refused`."""
    try:
        yield from completions
    except QuestionsRefused as error:
        refused.append(error)
