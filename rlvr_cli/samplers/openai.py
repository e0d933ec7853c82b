"""Any OpenAI-compatible endpoint as a sampler: for evaluating models that run elsewhere.

Enters: requests. Leaves: completions in the order in which they arrive, from one HTTP request each. The API key is read
from the environment and sent to the endpoint only.

Nothing that an endpoint says is taken on trust: each answer is bounded in size and checked by itself (`openai_answer`), and an
odd one counts as a failed request of its own sample only.

Endpoints report the end of a response in different ways: most cut the stop string off and report "stop", as they do for
EOS. A grader that looks for `</answer>` needs the difference, so nothing is guessed:

- The endpoint is asked to keep the stop string (vLLM does), and its report of the match is used (`stop_reason` of vLLM,
  `matched_stop` of SGLang): a stop string that matched and was cut off is appended again.
- A thinking that a chat endpoint returns apart (`reasoning_content`, or `reasoning`) is put before the answer, in the tags
  of the prompt, so that graders and `rlvr sft` read it as any other response.
- If a response ends with "stop", without a stop string in its text or a report of the match, it is requested again
  without stop strings, and so are all later ones: responses run to EOS or to the limit, and are cut here after the
  first stop string. That costs tokens, and gives exactly the text that every other engine gives.
- A response that goes on after a stop string shows that the endpoint does not heed them; all are then cut here. Where it may
  have had to go on, within `min_tokens`, it is requested once more without that minimum, which decides.
"""

import asyncio
import json
import logging
import math
import queue
import re
import threading
import urllib.request
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from http.client import HTTPException
from typing import Any
from urllib.parse import urlsplit

from rlvr_cli.config.shared.addresses import KEY_ENV, PLACEHOLDER_KEY, check_address, endpoint_key
from rlvr_cli.data.prompts import with_thinking
from rlvr_cli.errors import QuestionsRefused, RlvrError
from rlvr_cli.process import stoppable
from rlvr_cli.samplers.open import EngineSettings
from rlvr_cli.samplers.openai_answer import Answer
from rlvr_cli.samplers.openai_client import EndpointClient, Refused, Unanswered, check_installed
from rlvr_cli.samplers.stop_strings import first_stop
from rlvr_cli.text import printable, storable
from rlvr_cli.types import Completion, MoreRequests, Request, Sampler, SamplingParams

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0

# The most bytes of an answer: for its frame, for each character of the prompt, which may come back as token ids, and for
# each token, with its id and its log-probability.
FRAME_BYTES, PROMPT_BYTES, TOKEN_BYTES = 2**20, 16, 2048

# What leaves the distribution as it is. What a request lacks of it, vLLM and SGLang take from the model's generation_config.json.
# -1 is all tokens in every version of both; 0 only in newer ones.
WHOLE_DISTRIBUTION = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}

# Fields that an endpoint may not support, and the consequence of leaving them out.
OPTIONAL_FIELDS = dict.fromkeys(WHOLE_DISTRIBUTION, "the model's own default may change what is sampled") | {
    "seed": "its samples cannot be reproduced",
    "min_tokens": "a response may end before --sampling-min-tokens",
    "logprobs": "there are no log-probabilities",
    "return_token_ids": "there are no token ids",
    "include_stop_str_in_output": "",  # no consequence: the stop string is restored here
    "top_p": "",  # left out only if it is 1
}


class TimedOut(RlvrError):
    """Samples took longer than they may, and nothing else failed."""


class _Word(Enum):
    """What is said to who waits for completions."""

    MORE = 0  # requests may have come
    OVER = 1  # no completion will


@dataclass(frozen=True, slots=True)
class _Item:
    """One sample to request."""

    request_index: int
    sample_index: int
    prompt: str | tuple[int, ...]  # text or token ids
    seed: int
    begun: int = 0  # see `types.Request`: the endpoint takes these tokens for the prompt
    max_tokens: int | None = None  # see `types.Request`
    called: str = ""  # in an error


class _StaysHere(urllib.request.HTTPRedirectHandler):
    """Follows no redirection: the key is for the endpoint only."""

    def redirect_request(self, *how: Any) -> None:
        return None


class OpenAISampler:
    """Samples from an endpoint.

    Args:
        model: the endpoint's name of the model.
        base_url: up to and including the version, such as http://localhost:8000/v1.
        endpoint: "completions" sends the prompt as it stands, for base models; "chat" sends it as one user message,
            and the endpoint wraps it in the model's chat template.
        api_key_env: the environment variable that holds the key. For an endpoint on this machine it may be unset
            (`PLACEHOLDER_KEY` is sent); for one elsewhere that needs no key, set it to anything.
        max_concurrency: the number of concurrent requests.
        timeout: seconds that one sample may take, waiting and retrying included.
        max_retries: tries after the first, see `EndpointClient`.
        processed_logprobs: it is a vLLM server that needs no key, takes all that we ask, and whose log-probabilities are of the
            distribution that it samples from, at any temperature: they are always requested, and no sample is requested alone at
            first.
        leaves_out: those of `OPTIONAL_FIELDS` that the caller has no use for.
        check: called whenever no completion has arrived for `CHECK_SECONDS`; an error that it raises ends the sampling.

    Attributes:
        seeding: "endpoint": each sample's seed is sent, folded to the 31 bits that all endpoints accept; the
            endpoint decides what it does with it. "none" once the endpoint has refused seeds. For run.json.
        notes: what this endpoint cannot do and what is done instead, one sentence each; grows while sampling.
        arrived: the answers to the last `sample` that had arrived and were not yielded when it was closed: they are paid for.

    Raises:
        RlvrError: aiohttp or the key is missing, or the address is invalid.
    """

    engine = "openai"
    context_length = None
    worked_seconds = None

    def __init__(
        self,
        model: str,
        *,
        base_url: str,
        endpoint: str = "completions",
        api_key_env: str = KEY_ENV,
        max_concurrency: int = 32,
        timeout: float = 600.0,
        max_retries: int | None = None,
        policy_version: int = 0,
        processed_logprobs: bool = False,
        leaves_out: frozenset[str] = frozenset(),
        check: Callable[[], None] = lambda: None,
    ) -> None:
        check_installed()
        if endpoint not in ("completions", "chat"):
            raise RlvrError(f"There is no endpoint {endpoint!r}.", "Choose completions or chat.")
        assert min(max_concurrency, timeout, (max_retries or 0) + 1) > 0, (max_concurrency, timeout, max_retries)
        check_address(base_url)
        self.model, self.base_url, self.endpoint, self.api_key_env = model, base_url, endpoint, api_key_env
        self.max_concurrency, self.timeout, self.max_retries = max_concurrency, timeout, max_retries
        self.policy_version = policy_version
        self._processed_logprobs = processed_logprobs
        self._check = check
        self.notes: tuple[str, ...] = ()
        self.arrived: tuple[Completion, ...] = ()
        self._refused = leaves_out  # of OPTIONAL_FIELDS
        self._length_field = "max_tokens"
        self._sends_stop = True
        self._heeds_stop = processed_logprobs  # whether it is known to; it may nevertheless not say so
        self._knows_endpoint = processed_logprobs
        self._listed: dict[str, Any] | None = None  # the endpoint's entry of the model; None: it has not been asked
        # Fields of every request, `WHOLE_DISTRIBUTION` or none; None: not decided.
        self._whole: dict[str, float] | None = WHOLE_DISTRIBUTION if processed_logprobs else None
        _ = self._key

    @property
    def _key(self) -> str:
        return PLACEHOLDER_KEY if self._processed_logprobs else endpoint_key(self.base_url, self.api_key_env)

    @property
    def seeding(self) -> str:
        return "none" if "seed" in self._refused else "endpoint"

    def served_context(self) -> int | None:
        """The most tokens of a prompt and its response that the endpoint says its model takes; None: it says nothing."""
        found = self._entry().get("max_model_len")
        return found if isinstance(found, int) and found > 0 else None

    def _fills_in(self) -> bool:
        """Whether what a request lacks may be taken from the model's files: vLLM does, and SGLang; their lists of models show it."""
        return self._entry().get("owned_by") == "vllm" or self.served_context() is not None

    def _entry(self) -> dict[str, Any]:
        """The entry of the model in the endpoint's list of models, asked for once; empty: there is none."""
        if self._listed is not None:
            return self._listed
        address, headers = f"{self.base_url.rstrip('/')}/models", {"Authorization": f"Bearer {self._key}"}
        found: dict[str, Any] = {}
        with (
            suppress(OSError, HTTPException, ValueError, RecursionError, AttributeError, KeyError, TypeError),
            stoppable(),
        ):
            asked = urllib.request.Request(address, headers=headers)
            with urllib.request.build_opener(_StaysHere).open(asked, timeout=CHECK_SECONDS) as response:
                listed = json.loads(response.read(FRAME_BYTES))["data"]
            found = next((one for one in listed if one.get("id") == self.model), {})
        self._listed = found
        return found

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, more: MoreRequests | None = None
    ) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they arrive.

        Until one is answered, samples are requested alone, to learn what the endpoint supports. Closing the generator cancels the
        requests in progress; what has arrived by then is in `arrived`.

        Log-probabilities are those of the endpoint. They are requested only at temperature 1 (or 0) and top_p 1: most
        endpoints compute them before temperature and top_p, so otherwise they would be of another distribution than the
        one sampled from.

        Args:
            more: requests that are sent as they come; they have the indices after those of `requests`.

        Raises:
            QuestionsRefused: some prompts were refused; raised after all other completions were yielded.
            RlvrError: some samples failed permanently in other ways; also raised after all others. If the failure
                concerns every sample (a refused key; as many in a row as are requested at once), no new ones are
                requested. Before the first request: token ids for a chat endpoint.
        """
        self.arrived = ()
        items, number = self._items(requests), len(requests)
        if not items:
            return
        if self._whole is None:
            self._whole = WHOLE_DISTRIBUTION if self._fills_in() else {}
        if not self._gets_logprobs(params):
            self._note(
                "No log-probabilities are stored: most endpoints compute them at temperature 1 and top-p 1, and this run samples at others."
            )
        outbox: queue.SimpleQueue[Completion | _Item | _Word | BaseException] = queue.SimpleQueue()
        coming: asyncio.Queue[_Item | None] = asyncio.Queue()
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._serve(coming, params, outbox))
        # In a separate thread, so that requests go on while the caller grades completions.
        thread = threading.Thread(target=_run_loop, args=(loop, task, outbox), name="rlvr-openai", daemon=True)
        thread.start()
        if more:
            more.notify(partial(outbox.put, _Word.MORE))
        open_items, ended = 0, False  # those that are neither answered nor failed

        def send(those: Iterable[_Item | None]) -> None:
            with suppress(RuntimeError):  # the loop has ended: why is in the outbox
                loop.call_soon_threadsafe(lambda: [coming.put_nowait(one) for one in those])

        try:
            while True:
                if more and not ended:
                    joining = more.take(wait=not items and not open_items)
                    items += self._items(joining, first=number)
                    number += len(joining)
                if items:
                    send(items)
                    open_items, items = open_items + len(items), []
                if not ended and not (
                    more and open_items
                ):  # then the loop ends by itself, also while the caller is busy
                    send([None])
                    ended = True
                try:
                    with stoppable():
                        found = outbox.get(timeout=CHECK_SECONDS)
                except queue.Empty:
                    self._check()
                    continue
                if found is _Word.OVER:
                    break
                if isinstance(found, BaseException):
                    raise found
                open_items -= isinstance(found, (Completion, _Item))
                if isinstance(found, Completion):
                    yield found
        finally:
            with suppress(RuntimeError):  # the loop has ended by itself
                loop.call_soon_threadsafe(task.cancel)
            thread.join()
            left = [outbox.get() for _ in range(outbox.qsize())]
            self.arrived = tuple(item for item in left if isinstance(item, Completion))

    def _items(self, requests: Sequence[Request], *, first: int = 0) -> list[_Item]:
        """Return the samples to request. Raises RlvrError, see `sample`.

        Args:
            first: the index of the first request.
        """
        items = []
        for i, request in enumerate(requests, start=first):
            called = f"Question {printable(request.name, keep='')}" if request.name else f"Prompt {i}"
            if request.prompt_ids is None and storable(request.prompt) != request.prompt:
                raise RlvrError(f"{called} is not valid Unicode: it has a lone surrogate.", "Repair the data set.")
            if request.prompt_ids is not None and self.endpoint == "chat":
                raise RlvrError(
                    f"{called} is token ids, but a chat endpoint accepts only text.",
                    "Use --endpoint completions.",
                )
            prompt = request.prompt if request.prompt_ids is None else request.prompt_ids
            rest = request.begun, request.max_tokens, called
            items += [_Item(i, j, prompt, seed, *rest) for j, seed in enumerate(request.seeds)]
        return items

    def load_weights(self, policy: Any, policy_version: int) -> None:
        """Raises RlvrError: the weights behind an endpoint cannot be changed from here."""
        raise RlvrError(
            "The weights behind an endpoint cannot be changed from here.",
            "Train with --engine transformers or vllm; an endpoint is for rlvr eval.",
        )

    def sleep(self) -> None:
        """Do nothing: the endpoint manages its own memory."""

    def close(self) -> None:
        """Do nothing: connections end with the call of `sample` that opened them."""

    async def _serve(
        self, coming: asyncio.Queue[_Item | None], params: SamplingParams, outbox: queue.SimpleQueue
    ) -> None:
        """Request every item that comes, until None does; put the completions, and the items that failed, into the outbox.

        At the end, raise RlvrError if some failed.
        """
        failures: list[tuple[_Item, Unanswered]] = []
        requested, skipped, failed_in_a_row, stopped = 0, 0, 0, False

        async def work(most: float = math.inf) -> None:
            nonlocal requested, skipped, failed_in_a_row, stopped
            while most > 0 and (item := await coming.get()):
                most -= 1
                if stopped:
                    skipped += 1
                    outbox.put(item)
                    continue
                requested += 1
                try:
                    outbox.put(await self._request_sample(client, item, params))
                    failed_in_a_row, self._knows_endpoint = 0, True
                except Unanswered as failure:
                    failures.append((item, failure))
                    failed_in_a_row += 1
                    stopped |= failure.concerns_all or failed_in_a_row >= max(8, self.max_concurrency)
                    outbox.put(item)
            if most > 0:
                coming.put_nowait(None)  # for the others

        async def end() -> None:
            await asyncio.gather(*workers, return_exceptions=True)
            await client.close()

        client = self.connect()
        workers: list[asyncio.Task[None]] = []
        try:
            if not self._knows_endpoint:
                await work(1)
            workers += [asyncio.create_task(work()) for _ in range(self.max_concurrency)]
            await asyncio.gather(*workers)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.shield(end())  # connections are closed, also when the caller stops meanwhile
        if failures:
            at, reached = urlsplit(self.base_url).netloc, self._knows_endpoint
            raise _failed(failures, of=requested + skipped, skipped=skipped, at=at, reached=reached)

    def connect(self) -> EndpointClient:
        """Return a client for `answer`, in a running event loop; to be closed."""
        how = {"timeout": self.timeout, "max_retries": self.max_retries, "reached": self._knows_endpoint}
        return EndpointClient(self.base_url, self._key, **how)

    async def answer(self, client: Any, prompt: str, params: SamplingParams, *, seed: int) -> Completion:
        """Answer one prompt, with all its retries, for who does their own scheduling.

        Args:
            client: of `connect`.

        Raises:
            Unanswered: it failed permanently.
        """
        return await self._request_sample(client, _Item(0, 0, prompt, seed), params)

    async def _request_sample(self, client: EndpointClient, item: _Item, params: SamplingParams) -> Completion:
        """Request one sample, with all its retries.

        Raises:
            Unanswered: the sample failed permanently.
        """
        deadline = asyncio.get_running_loop().time() + self.timeout
        path = "/completions" if self.endpoint == "completions" else "/chat/completions"
        most_bytes = FRAME_BYTES + PROMPT_BYTES * len(item.prompt) + TOKEN_BYTES * params.max_tokens
        refused = self._refused
        asked, doubtful = params, None
        while True:
            refused |= self._refused
            sends_stop, length_field = self._sends_stop and "stop" not in refused, self._length_field
            fields = self._fields(item, asked, refused)
            try:
                answer = await client.post(path, fields, deadline=deadline, most_bytes=most_bytes)
            except Refused as refusal:
                said = refusal.said if 400 <= refusal.status < 500 else ""
                if self.endpoint == "chat" and "max_completion_tokens" in said and length_field == "max_tokens":
                    self._length_field = "max_completion_tokens"
                    continue
                if new := {f for f in _may_lack(fields) if re.search(rf"\b{f}\b", said)}:
                    refused |= new
                    continue
                raise
            if isinstance(item.prompt, tuple) and answer.prompt_ids not in ((), item.prompt):
                raise Unanswered(
                    "the endpoint did not sample from the token ids that it was given.",
                    kind="refused",
                    concerns_all=True,
                )
            self._leave_out(refused - {"stop"})
            if "stop" in refused:
                self._cut_here_from_now_on("The endpoint does not take stop strings")
            if answer.thinking:
                self._note(
                    "The endpoint returns its thinking apart from the answer: it is stored before it, in <think> tags, as text."
                )
            if answer.text and not answer.num_tokens:
                self._note("The endpoint does not count tokens: responses are stored with a length of 0.")
            ignores_stop = sends_stop and self._ignores_stop(answer, params.stop, least=fields.get("min_tokens", 0))
            if ignores_stop is None:
                doubtful, asked = answer, replace(params, min_tokens=0)
                continue
            answer, doubtful, asked = doubtful or answer, None, params
            if ignores_stop:
                self._cut_here_from_now_on("The endpoint does not heed stop strings")
                sends_stop = False
            if answer.is_ambiguous(params.stop) and sends_stop and params.stop:
                self._cut_here_from_now_on("The endpoint does not say which stop string ended a response")
                continue
            return _completion(item, answer, params, cut_here=not sends_stop)

    def _ignores_stop(self, answer: Answer, stop: Sequence[str], *, least: int) -> bool | None:
        """Return whether an answer shows that the endpoint does not heed stop strings; None: it may have had to go on.

        Args:
            least: the `min_tokens` of the request.
        """
        self._heeds_stop |= answer.matched in stop
        protected = _protected(answer, least)
        found = first_stop(answer.text, stop, start=protected)
        if self._heeds_stop or found is None or found[1] == len(answer.text):
            return False
        return True if protected or not least else None

    def _fields(self, item: _Item, params: SamplingParams, refused: frozenset[str]) -> dict[str, Any]:
        """Return the fields of a request."""
        most = item.max_tokens or params.max_tokens
        fields: dict[str, Any] = {
            "model": self.model,
            self._length_field: most,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "seed": _fold(item.seed),
            "min_tokens": min(max(params.min_tokens - item.begun, 0), most),
            "return_token_ids": True,
            **(self._whole or {}),
        }
        chat = self.endpoint == "chat"
        if chat:
            fields["messages"] = [{"role": "user", "content": item.prompt}]
        else:
            fields["prompt"] = item.prompt
        if self._gets_logprobs(params):
            fields["logprobs"] = True if chat else 1
        if params.stop and self._sends_stop and "stop" not in refused:
            fields["stop"] = list(params.stop)
            fields["include_stop_str_in_output"] = True
        return {name: value for name, value in fields.items() if name not in refused & _may_lack(fields)}

    def _gets_logprobs(self, params: SamplingParams) -> bool:
        """Whether an endpoint's log-probabilities are of the distribution that is sampled from."""
        return self._processed_logprobs or (params.temperature in (0, 1) and params.top_p == 1)

    def _leave_out(self, refused: frozenset[str]) -> None:
        """Leave these fields out from now on: the request succeeded without them."""
        for name in sorted(refused - self._refused):
            if OPTIONAL_FIELDS[name]:
                self._note(f"The endpoint does not take {name}: {OPTIONAL_FIELDS[name]}.")
        self._refused |= refused

    def _cut_here_from_now_on(self, why: str) -> None:
        if self._sends_stop:
            self._sends_stop = False
            self._note(f"{why}: responses run to their end, which costs tokens, and are cut here.")

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes += (note,)
            logger.warning(note)


# --- completions ------------------------------------------------------------------------------------------------------


def _completion(item: _Item, answer: Answer, params: SamplingParams, *, cut_here: bool) -> Completion:
    # Stop strings and limits are those of the answer; of the thinking, if that is all there is.
    text, reason = answer.text or answer.thinking, None
    logprobs, token_ids, num_tokens = answer.logprobs, answer.token_ids, answer.num_tokens
    if cut_here and (found := first_stop(text, params.stop, start=_protected(answer, params.min_tokens))):
        reason, end = found
        text = text[:end]
        kept = _tokens_up_to(answer, end)
        if kept is None:  # the cut cannot be mapped to tokens: count all that were generated
            logprobs, token_ids = (), ()
        else:
            logprobs, token_ids, num_tokens = logprobs[:kept], token_ids[:kept], kept
    elif isinstance(answer.matched, str) and answer.finish != "length":
        reason = answer.matched
        text = text if text.endswith(reason) else text + reason
    elif answer.finish == "stop":
        reason = next((s for s in params.stop if text.endswith(s) and not answer.says_matched), "eos")
    elif answer.finish != "length":
        reason = answer.finish  # such as content_filter: the endpoint's own word
    if answer.thinking:
        assert isinstance(item.prompt, str), "a chat has text"
        thought = answer.thinking if answer.text else text
        text = with_thinking(item.prompt, thought, text if answer.text else None)
        logprobs, token_ids = (), ()  # they spell another text
    return Completion(
        request_index=item.request_index,
        sample_index=item.sample_index,
        text=text,
        prompt_ids=item.prompt if isinstance(item.prompt, tuple) else answer.prompt_ids,
        token_ids=token_ids,
        logprobs=logprobs,
        num_prompt_tokens=len(item.prompt) if isinstance(item.prompt, tuple) else answer.num_prompt_tokens,
        num_tokens=num_tokens,
        finish_reason="length" if reason is None else "stop",
        stop_reason=reason,
        mean_entropy=None,
    )


def _tokens_up_to(answer: Answer, end: int) -> int | None:
    """Return how many tokens the first `end` characters span; None if the tokens do not spell the text."""
    if not answer.tokens or not "".join(answer.tokens).startswith(answer.text):
        return None
    length = 0
    for count, token in enumerate(answer.tokens, start=1):
        length += len(token)
        if length >= end:
            return count
    return None


def _protected(answer: Answer, min_tokens: int) -> int:
    """Return in how many leading characters a stop string may not end; 0 if the endpoint does not return its tokens."""
    spelled = "".join(answer.tokens).startswith(answer.text)
    return len("".join(answer.tokens[:min_tokens])) if spelled else 0


# --- failures ---------------------------------------------------------------------------------------------------------


def _failed(
    failures: Sequence[tuple[_Item, Unanswered]], *, of: int, skipped: int, at: str, reached: bool
) -> RlvrError:
    """The error that samples failed.

    Args:
        of: the number of samples.
        skipped: so many of them were not requested.
        at: the endpoint's host.
        reached: whether it has answered any.
    """
    if not skipped:  # else the first one is the reason; answers come in any order
        failures = sorted(failures, key=lambda each: each[0].request_index)
    item, failure = failures[0]
    others = [*dict.fromkeys(each.called for each, _ in failures if each.called != item.called)]
    named = ", ".join(others[:5]) + (f" and {len(others) - 5} more" if len(others) > 5 else "")
    problem = (
        f"{len(failures)} of {of} samples failed at {at}"
        + (f", and {skipped} were not requested" if skipped else "")
        + f". {item.called}: {printable(failure.problem, keep='').rstrip('.')}."
        + (f" Also failed: {named}." if others else "")
    )
    if not skipped and all(each.kind == "refused" and not each.concerns_all for _, each in failures):
        what = (
            "leave out, or shorten, what is named"
            if reached
            else "correct what the endpoint refuses, or leave the questions out"
        )
        return QuestionsRefused(
            problem, f"It would be refused again: {what}, in a new run. Completed samples are kept."
        )
    rest = "Completed samples are kept: resume the run to request the rest"
    if all(each.kind == "timeout" for _, each in failures):
        return TimedOut(problem, f"{rest}, with a larger --request-timeout if they take longer.")
    return RlvrError(problem, f"{rest}.")


# --- small parts ------------------------------------------------------------------------------------------------------


def _may_lack(fields: dict[str, Any]) -> set[str]:
    """Return the fields of a request that can be left out: stop strings are then cut here, and a top_p of 1 is the default."""
    optional = (OPTIONAL_FIELDS.keys() | {"stop"}) & fields.keys()
    return optional if fields.get("top_p", 1) == 1 else optional - {"top_p"}


def _run_loop(loop: asyncio.AbstractEventLoop, task: asyncio.Task, outbox: queue.SimpleQueue) -> None:
    """Run the task to its end in this thread; put its error, if any, and then `_Word.OVER` into the outbox."""
    try:
        loop.run_until_complete(task)
    except asyncio.CancelledError:
        pass
    except BaseException as error:  # the caller's thread raises it
        outbox.put(error)
    finally:
        for left in asyncio.all_tasks(loop):  # such as the end of `_serve`, when the caller has stopped during it
            with suppress(Exception):
                loop.run_until_complete(left)
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
        outbox.put(_Word.OVER)


def _fold(seed: int) -> int:
    """Hash a seed of 63 bits to 31: some endpoints accept no more, and some proxies round above 53."""
    return (seed * 0x9E3779B97F4A7C15 % 2**64) >> 33


def open_engine(settings: EngineSettings) -> Sampler:
    """Connect to the endpoint. One that samples the turns of episodes must give token ids: see `TokenEndpoint`."""
    sampler = OpenAISampler(
        settings.model,
        base_url=settings.base_url,
        endpoint=settings.endpoint,
        api_key_env=settings.api_key_env,
        max_concurrency=settings.endpoint_concurrency,
        timeout=settings.request_timeout,
    )
    if not settings.episodes:
        return sampler
    from rlvr_cli.models.identity import model_path
    from rlvr_cli.models.pretrained import (  # here: endpoints do without transformers
        load_context_length,
        load_tokenizer,
    )
    from rlvr_cli.samplers.token_endpoint import TokenEndpoint

    try:
        tokenizer = load_tokenizer(model_path(settings.model))
    except RlvrError as error:
        hint = f"Episodes become tokens on this machine: serve the model under the name of its files. {error.hint}"
        raise RlvrError(error.problem, hint) from error
    context_length = sampler.served_context() or load_context_length(model_path(settings.model))
    return TokenEndpoint(sampler, tokenizer, model=settings.model, context_length=context_length)
