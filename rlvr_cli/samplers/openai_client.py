"""A POST to an OpenAI-compatible endpoint, tried again where that may help: over connections that stay open, and cheap, since there are many.

Enters: the path and the fields of a request. Leaves: an `Answer`, or why there is none, without the key.

How often and how long is waited is as the openai package does it: an endpoint says so itself (``Retry-After``, ``x-should-retry``), else
each time twice as long as before.
"""

import asyncio
import importlib
import importlib.util
import json
import logging
import math
import random
import time
from collections.abc import Mapping
from contextlib import suppress
from email.utils import mktime_tz, parsedate_tz
from itertools import count
from typing import Any, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from rlvr_cli.config.shared.addresses import PLACEHOLDER_KEY
from rlvr_cli.errors import missing_extra
from rlvr_cli.samplers.openai_answer import Answer, Unreadable, error_message, hide_key, read_answer
from rlvr_cli.text import is_secret, printable

logger = logging.getLogger(__name__)

PER_REQUEST_STATUSES = {400, 413, 422}  # statuses that concern one request and not the next
RETRIES = 6  # of what may be wrong for good: answers that cannot be read, which are paid for, an address that never answered, and these:
_MAY_STAY = (500, 501)  # of some servers the status of a prompt or a field that they never take
FIRST_WAIT, LONGEST_WAIT = 0.5, 8.0  # seconds between two tries, where the endpoint does not say
LONGEST_ASKED_WAIT = 120.0  # of an endpoint that asks for more, no other try is made


class Unanswered(Exception):
    """A request that failed permanently; `concerns_all` if every other one would fail in the same way.

    Attributes:
        kind: "timeout"; "refused", by a status that no retry changes; or "unavailable": no connection, or after all retries an error or
            an answer that cannot be read.
    """

    def __init__(
        self, problem: str, *, kind: Literal["timeout", "refused", "unavailable"], concerns_all: bool = False
    ) -> None:
        super().__init__(problem)
        self.problem, self.kind, self.concerns_all = problem, kind, concerns_all


class Refused(Unanswered):
    """A request that the endpoint refused, with this HTTP status and message."""

    def __init__(self, problem: str, *, status: int, said: str) -> None:
        super().__init__(problem, kind="refused", concerns_all=status not in PER_REQUEST_STATUSES)
        self.status, self.said = status, said


class _Trouble(Exception):
    """What went wrong with one try; `refused` if the endpoint has refused it, `passes` if time alone may help."""

    def __init__(
        self, said: str, *, headers: Mapping[str, str], again: bool, passes: bool, refused: Refused | None = None
    ) -> None:
        super().__init__(said)
        self.said, self.headers, self.again, self.passes, self.refused = said, headers, again, passes, refused


class EndpointClient:
    """The connections to one endpoint, made in a running event loop; to be closed.

    Args:
        base_url: up to and including the version.
        key: sent to this endpoint only, and hidden in what it says.
        timeout: seconds that a request may take, with waiting and all tries.
        max_retries: tries after the first: on 408, 409, 429, 5xx, broken connections and unreadable answers. None: `RETRIES` of
            500, 501, unreadable answers, and connections to an endpoint that has never answered; of the others as many as time allows.
        reached: whether the endpoint has answered before.

    Raises:
        RlvrError: the aiohttp package is missing.
    """

    def __init__(
        self, base_url: str, key: str, *, timeout: float, max_retries: int | None, reached: bool = False
    ) -> None:
        check_installed()
        aiohttp: Any = importlib.import_module("aiohttp")
        self._url, self._key = base_url.rstrip("/"), key
        self._timeout, self._max_retries = timeout, max_retries
        self._reached, self._told = reached, False
        # What may come out of a connection instead of a response.
        self._broken = (aiohttp.ClientError, aiohttp.http_exceptions.HttpProcessingError, OSError, ValueError)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),  # who asks limits the requests
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"authorization": f"Bearer {key}", "content-type": "application/json"},
            proxy=_proxy_to(base_url),
            timeout=aiohttp.ClientTimeout(),  # `post` has its own
        )

    async def post(self, path: str, fields: Mapping[str, Any], *, deadline: float, most_bytes: int) -> Answer:
        """Send a request until it is answered.

        Args:
            path: below the base URL; of a chat it ends with /chat/completions.
            deadline: of the event loop's clock.
            most_bytes: of an answer.

        Raises:
            Refused: the endpoint refuses it.
            Unanswered: the deadline has come, or all tries failed.
        """
        data, last = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode(), ""
        try:
            async with asyncio.timeout_at(deadline):
                for tries in count(1):
                    try:
                        return await self._try(path, data, most_bytes=most_bytes)
                    except _Trouble as trouble:
                        last = trouble.said
                        logger.debug("try %d: %s", tries, last)
                        wait = _seconds_to_wait(trouble.headers, tries)
                        if tries > self._retries(trouble) or wait is None or not trouble.again:
                            tried = f"tried {tries} time{'s' if tries > 1 else ''}"
                            raise trouble.refused or Unanswered(f"{last} ({tried})", kind="unavailable") from None
                        self._tell(last, tries)
                    await asyncio.sleep(wait)
        except TimeoutError:
            last = f"; the last try: {last}" if last else "."
            raise Unanswered(f"no answer within {self._timeout:g} s{last}", kind="timeout") from None
        raise AssertionError("unreachable")

    def _retries(self, trouble: _Trouble) -> float:
        """How many tries there are after the first."""
        if self._max_retries is not None:
            return self._max_retries
        return math.inf if trouble.passes else RETRIES

    def _tell(self, said: str, tries: int) -> None:
        """Say once why nothing comes."""
        if tries > RETRIES and not self._told:
            self._told = True
            logger.warning(
                f"The endpoint is asked again, each time for {self._timeout:g} s at most. It says: {printable(said, keep='')}"
            )

    async def _try(self, path: str, data: bytes, *, most_bytes: int) -> Answer:
        """Send a request once. Raises _Trouble."""
        try:
            async with self._session.post(self._url + path, data=data) as response:
                self._reached = True
                body = bytearray()  # decompressed
                async for piece in response.content.iter_any():
                    body += piece
                    if len(body) > most_bytes:
                        response.close()
                        break
        except self._broken as error:
            said = f"Connection error. ({type(error).__name__})"
            raise _Trouble(said, headers={}, again=True, passes=self._reached) from None
        text, status, headers = _decoded(bytes(body[:most_bytes]), response.charset), response.status, response.headers
        if 200 <= status < 300:
            try:
                if len(body) > most_bytes:
                    raise Unreadable(f"the answer is longer than {most_bytes:,} bytes")
                hidden = self._key if is_secret(self._key) else PLACEHOLDER_KEY
                return read_answer(text, chat=path.endswith("/chat/completions"), key=hidden)
            except Unreadable as error:
                said = hide_key(str(error), self._key)
                raise _Trouble(said, headers=headers, again=True, passes=False) from None
        said = error_message(text)
        problem = hide_key(f"{status} {said}", self._key)
        transient = _is_transient(status, said)
        refused = None if transient else Refused(problem, status=status, said=said)
        asked = headers.get("x-should-retry")
        again = transient and asked != "false"
        raise _Trouble(problem, headers=headers, again=again, passes=status not in _MAY_STAY, refused=refused)

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()


def check_installed() -> None:
    """Raise RlvrError if the package that this needs is missing."""
    if importlib.util.find_spec("aiohttp") is None:
        raise missing_extra("aiohttp", "openai")


def _decoded(body: bytes, charset: str | None) -> str:
    try:
        return body.decode(charset or "utf-8", "replace")
    except LookupError:  # it names an encoding that there is none
        return body.decode("utf-8", "replace")


def _is_transient(status: int, said: str) -> bool:
    """Return whether a retry may succeed; it cannot when a quota is spent."""
    return status in (408, 409) or status >= 500 or (status == 429 and "insufficient_quota" not in said)


def _seconds_to_wait(headers: Mapping[str, str], tries: int) -> float | None:
    """Return for how long to wait after so many tries; None where the endpoint asks for too long."""
    asked = _asked_wait(headers)
    if asked > LONGEST_ASKED_WAIT:
        return None
    return asked if asked > 0 else min(FIRST_WAIT * 2.0 ** (tries - 1), LONGEST_WAIT) * random.uniform(0.75, 1)


def _asked_wait(headers: Mapping[str, str]) -> float:
    """The seconds that an endpoint asks to wait: ``Retry-After-Ms``, or ``Retry-After`` in seconds or as a date; 0 if it says none."""
    for name, unit in (("retry-after-ms", 1000), ("retry-after", 1)):
        with suppress(KeyError, ValueError):
            seconds = float(headers[name]) / unit
            return 0.0 if math.isnan(seconds) else seconds
    with suppress(TypeError, ValueError, OverflowError):
        return mktime_tz(parsedate_tz(headers.get("retry-after", ""))) - time.time()  # pyright: ignore[reportArgumentType]
    return 0.0


def _proxy_to(url: str) -> str | None:
    """The proxy that the environment names for an address."""
    parts, proxies = urlsplit(url), getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.hostname or ""):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
