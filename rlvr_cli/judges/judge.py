"""A judge: a model behind an OpenAI-compatible endpoint, asked many texts at once, and each text once.

Enters: texts. Leaves: its replies with what they cost. The endpoint's client, with its retries, its time limit and its care for keys,
is that of `samplers.openai`; it runs in a thread of its own, so that the caller samples meanwhile.
"""

import asyncio
import hashlib
import json
import math
import sys
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from rlvr_cli.config.shared.addresses import endpoint_key
from rlvr_cli.config.shared.prompt import JudgeOptions
from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.openai import OpenAISampler
from rlvr_cli.samplers.openai_client import EndpointClient, Unanswered
from rlvr_cli.text import printable, storable
from rlvr_cli.types import Completion, SamplingParams

T = TypeVar("T")
REMEMBERED_BYTES = 2**28  # of the replies that are kept, so that the same text is not asked again
_BESIDES_TEXT = 400  # bytes that a kept reply takes besides its text: its hash, its numbers, its place
_IN_A_ROW = 8  # failures after which a judge may be given up
_UNUSED = frozenset({"min_tokens", "logprobs", "return_token_ids"})  # fields of requests


@dataclass(frozen=True, slots=True)
class Reply:
    """What the judge said to a text."""

    text: str
    asked_sha256: str  # see `types.Judgement`
    prompt_tokens: int
    reply_tokens: int
    finish: str  # "stop", "length", or what the endpoint says besides, such as content_filter


class Heard(NamedTuple):
    """A reply, and whether it was known before: then nothing was paid for it."""

    reply: Reply
    cached: bool


class _Held(NamedTuple):
    """A failure that is held back, see `Judge._held_back`."""

    sent: int  # requests before it
    failure: Unanswered
    decided: "asyncio.Future[None]"


class Judge:
    """One model at one endpoint. May be used from several threads; nothing is connected before the first text.

    Args:
        options: which endpoint and model, and how it is asked.
        report: gets a sentence on what the endpoint cannot do, from any thread.

    Attributes:
        spent: requests that were answered, texts that were known, and the tokens of what was answered, by name.

    Raises:
        RlvrError: aiohttp or the key is missing, or the address is invalid.
    """

    def __init__(self, options: JudgeOptions, *, report: Callable[[str], None] = lambda sentence: None) -> None:
        endpoint_key(options.judge_url, options.judge_api_key_env, option="--judge-api-key-env")
        self.model = options.judge_model
        self._host = urlsplit(options.judge_url).netloc
        self._endpoint = OpenAISampler(
            options.judge_model,
            base_url=options.judge_url,
            endpoint=options.judge_endpoint,
            api_key_env=options.judge_api_key_env,
            timeout=options.judge_timeout,
            max_retries=options.judge_retries,
            leaves_out=_UNUSED,
        )
        self._params = SamplingParams(
            temperature=options.judge_temperature, max_tokens=options.judge_max_tokens, min_tokens=0, stop=()
        )
        self._seed, self._concurrency = options.judge_seed, options.judge_concurrency
        self._facts = {
            "model": options.judge_model,
            "endpoint": options.judge_endpoint,
            "temperature": options.judge_temperature,
            "max_tokens": options.judge_max_tokens,
            "seed": options.judge_seed,
        }
        self._report, self._told = report, 0
        self.spent = Counter[str]()
        self._known: OrderedDict[str, Reply] = OrderedDict()  # by what was asked; the last used ones are last
        self._bytes = 0
        self._asking: dict[str, asyncio.Task[Reply]] = {}
        self._failed_in_a_row = 0
        self._sent = 0  # requests so far
        self._held: list[_Held] = []
        self._given_up: RlvrError | None = None
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: EndpointClient | None = None
        self._turns: asyncio.Semaphore | None = None
        self._closed = False

    def sha256_of(self, text: str) -> str:
        """The SHA-256 (hex) of all that determines a reply: the text, the model, and how it is sampled."""
        return hashlib.sha256(json.dumps(self._facts | {"text": text}, sort_keys=True).encode()).hexdigest()

    def remember(self, replies: Iterable[Reply]) -> None:
        """Take replies to these for known, such as those that a run has stored."""
        with self._lock:
            for reply in replies:
                self._keep(reply)

    def begin(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Start what calls `hear` in the judge's thread. The future holds its result or its exception."""
        with self._lock:
            if self._closed:
                work.close()
                raise CancelledError
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(target=self._run, args=(self._loop,), name="rlvr-judge", daemon=True)
                self._thread.start()
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def hear(self, text: str) -> Heard:
        """Ask for the reply to a text, or return that to the same one. Only within `begin`.

        Raises:
            Unanswered: this text was not answered.
            RlvrError: the judge answers nothing: it refuses every request, or failed on as many in a row as are under way at a time.
        """
        asked = self.sha256_of(text)
        with self._lock:
            if (known := self._known.get(asked)) is not None:
                self._known.move_to_end(asked)
                self.spent["cached"] += 1
                return Heard(known, True)
        shared = self._asking.get(asked)
        if shared is None:
            task = asyncio.ensure_future(self._ask(storable(text), asked))
            self._asking[asked] = task
            task.add_done_callback(partial(self._asked, asked))
            return Heard(await asyncio.shield(task), False)  # others may wait for it, too
        reply = await asyncio.shield(shared)
        self.spent["cached"] += 1
        return Heard(reply, True)

    def _asked(self, asked: str, task: "asyncio.Task[Reply]") -> None:
        del self._asking[asked]
        if not task.cancelled():
            task.exception()  # who asked may not wait any more
        self._release_the_last()

    async def _ask(self, text: str, asked: str) -> Reply:
        try:
            number, completion = await self._answer(text)
        except Unanswered as failure:
            self._count_failure(failure)
            await self._held_back(failure)
            if self._given_up is not None:
                raise self._given_up from None
            raise
        self._release(before=number)
        self._failed_in_a_row = 0
        for note in self._endpoint.notes[self._told :]:
            self._report(f"the judge: {note}")
        self._told = len(self._endpoint.notes)
        reply = _reply(completion, asked)
        self.spent += Counter(asked=1, prompt_tokens=reply.prompt_tokens, reply_tokens=reply.reply_tokens)
        with self._lock:
            self._keep(reply)
        return reply

    async def _answer(self, text: str) -> tuple[int, Completion]:
        """Ask in turn. Returns the number of the request, too."""
        if self._turns is None:
            self._turns = asyncio.Semaphore(self._concurrency)
        async with self._turns:
            if self._closed:
                raise asyncio.CancelledError
            if self._given_up is not None:
                raise self._given_up
            if self._client is None:
                self._client = self._endpoint.connect()
            self._sent = number = self._sent + 1
            return number, await self._endpoint.answer(self._client, text, self._params, seed=self._seed)

    def _count_failure(self, failure: Unanswered) -> None:
        self._failed_in_a_row += 1
        most = max(_IN_A_ROW, self._concurrency)
        if self._given_up is None and (failure.concerns_all or self._failed_in_a_row >= most):
            self._give_up(
                "refuses every request" if failure.concerns_all else f"failed on {most} texts in a row", failure
            )

    def _give_up(self, what: str, failure: Unanswered) -> None:
        self._given_up = RlvrError(
            f"The judge {self.model} at {self._host} {what}: {printable(failure.problem, keep='')}",
            "What is graded is kept: correct it, and resume the run.",
        )
        self._release()

    async def _held_back(self, failure: Unanswered) -> None:
        """Hold a failure back until it is known whether it is its text's alone, or the judge is given up.

        It is its text's when the judge answers a later request, or `_release_the_last` says so.
        """
        if self._given_up is None:
            decided = asyncio.get_running_loop().create_future()
            self._held.append(_Held(self._sent, failure, decided))
            self._release_the_last()
            await decided

    def _release_the_last(self) -> None:
        """Decide on the failures if they are all that is asked: nothing will come that decides.

        The judge went down if it had answered and several of them are no refusals. One that never answered may fail on these texts
        alone: a run that is resumed for them has to end.
        """
        if len(self._held) != len(self._asking):
            return
        unanswered = [held.failure for held in self._held if held.failure.kind != "refused"]
        if len(unanswered) >= _IN_A_ROW and self.spent["asked"]:
            self._give_up(f"failed on the last {len(unanswered)} texts", unanswered[-1])
        else:
            self._release()

    def _release(self, *, before: float = math.inf) -> None:
        """Release the failures that were there when the request of this number was sent."""
        for held in self._held:
            if held.sent < before and not held.decided.done():  # done: canceled
                held.decided.set_result(None)
        self._held = [held for held in self._held if held.sent >= before]

    def _keep(self, reply: Reply) -> None:
        """Remember a reply, and forget the ones that were used the longest time ago when they are too many."""
        if reply.asked_sha256 not in self._known:
            self._known[reply.asked_sha256] = reply
            self._bytes += _size(reply)
        while self._bytes > REMEMBERED_BYTES:
            _, forgotten = self._known.popitem(last=False)
            self._bytes -= _size(forgotten)

    def close(self) -> None:
        """Cancel what is asked, and end the thread. May be called twice."""
        with self._lock:
            self._closed = True
            loop, self._loop = self._loop, None
        if loop is not None:
            assert self._thread is not None
            loop.call_soon_threadsafe(loop.stop)
            self._thread.join()

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """Serve in this thread until `close` stops the loop."""
        loop.run_forever()
        loop.run_until_complete(self._end())
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()

    async def _end(self) -> None:
        while tasks := asyncio.all_tasks() - {asyncio.current_task()}:
            for task in self._asking.values():
                task.cancel()  # who waits for it ends with it, and the client's tasks end by its own rules
            await asyncio.wait(tasks, timeout=0.1)
        if self._client is not None:
            with suppress(Exception):
                await self._client.close()
            await asyncio.sleep(0)  # its connections are closed in the next round of the loop


def _size(reply: Reply) -> int:
    """About how many bytes of memory a kept reply takes."""
    return sys.getsizeof(reply.text) + _BESIDES_TEXT


def _reply(completion: Completion, asked: str) -> Reply:
    finish = "length" if completion.finish_reason == "length" else completion.stop_reason or "stop"
    return Reply(
        completion.text,
        asked,
        completion.num_prompt_tokens,
        completion.num_tokens,
        "stop" if finish == "eos" else finish,
    )
