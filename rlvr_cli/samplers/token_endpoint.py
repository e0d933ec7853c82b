"""An endpoint that says which tokens it sampled: what goes on from a response, as an episode does, goes on from these.

Enters: requests, and the tokenizer of the endpoint's model. Leaves: completions with token ids and the text that these spell, or an
error that says what the endpoint lacks, after two requests of one token each.

vLLM gives token ids (`return_token_ids`) since 0.10.2, and SGLang since July 2026; most others give none.
"""

from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.stop_strings import as_every_engine, prompt_token_ids
from rlvr_cli.samplers.wrapper import SamplerWrapper
from rlvr_cli.types import Completion, JoinableSampler, MoreTurns, Request, SamplingParams

HINT = "vLLM gives token ids, and so do newer versions of SGLang. Or load the model here, with --engine."
PROBE = "What is 47 * 83?\n<think> It is 3,901: größer als 3.900. </think>"  # tokenizers differ in it


class TokenEndpoint(SamplerWrapper):
    """Sends prompts as token ids, and insists on those of the response. Text is never tokenized twice.

    Args:
        sampler: an `OpenAISampler` that asks for completions, not for chats.
        tokenizer: of the endpoint's model.
        model: whose tokenizer that is.
        context_length: what the endpoint takes, or the model's own, if it is known.

    Raises:
        RlvrError: the endpoint does not answer, takes no token ids, gives none, or has another tokenizer.
    """

    def __init__(
        self, sampler: JoinableSampler, tokenizer: Any, *, model: str, context_length: int | None = None
    ) -> None:
        super().__init__(sampler)
        self.context_length = context_length
        self._sampler = sampler
        self._tokenizer, self._model = tokenizer, model
        self._check_endpoint()

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, more: MoreTurns | None = None
    ) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they arrive.

        Args:
            more: requests that are sent as they come; they have the indices after those of `requests`.

        Raises:
            RlvrError: as `OpenAISampler.sample`, or an answer came without token ids.
        """
        prompts = prompt_token_ids(self._tokenizer, requests, vocab_size=None)
        exact = [replace(r, prompt_ids=tuple(ids)) for r, ids in zip(requests, prompts, strict=True)]
        completions = self._sampler.sample(exact, params, more=more)
        try:
            for completion in completions:
                if not completion.token_ids:
                    raise RlvrError("The endpoint gave a response without its token ids.", HINT)
                yield as_every_engine(completion, self._tokenizer, params)
        finally:
            completions.close()

    def _check_endpoint(self) -> None:
        text = Request(PROBE, (0,))
        (ids,) = prompt_token_ids(self._tokenizer, [text], vocab_size=len(self._tokenizer))
        if not self._probed(replace(text, prompt_ids=tuple(ids))).token_ids:
            raise RlvrError(
                "The endpoint does not say which tokens it sampled, and an episode goes on from these: its answer has no token_ids, "
                "though return_token_ids asks for them.",
                HINT,
            )
        theirs = self._probed(text).prompt_ids
        if theirs and theirs != tuple(ids):
            raise RlvrError(
                f"The endpoint's tokenizer is not that of --model {self._model}: it makes {len(theirs)} tokens of a text that has "
                f"{len(ids)} here, or others.",
                "Name the model whose files the endpoint has, under the name by which it serves it.",
            )

    def _probed(self, request: Request) -> Completion:
        """The answer of one token to a request."""
        try:
            (found,) = self._sampler.sample([request], SamplingParams(max_tokens=1, stop=()))
        except RlvrError as error:
            raise RlvrError(
                f"The endpoint did not answer a prompt of token ids, which episodes send. {error.problem}", HINT
            ) from error
        return found
