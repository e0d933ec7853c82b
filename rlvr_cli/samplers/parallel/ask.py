"""One question to a vLLM server over HTTP, and what its answer says.

Enters: an address, and the body of a request. Leaves: the body of the answer, or an error that says what the server did.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.samplers.openai import FRAME_BYTES
from rlvr_cli.text import printable

HOW_TO_START = (
    "Start each with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs; for --lora-rank RANK also with "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 and --enable-lora --max-lora-rank RANK: see docs/engines.md."
)
HEALTH_SECONDS = 30.0  # in which a server must say that its engine lives
LOAD_SECONDS = 600.0  # in which a server must have loaded new weights
_NOT_NOW = (408, 429, 502, 503, 504)  # statuses of what passes


class NoAnswer(RlvrError):
    """A server is not there; the others may be."""


class NotNow(RlvrError):
    """A server, or what is in front of it, cannot answer at the moment."""


def odd_answer(url: str, what: str, *, hint: str = HOW_TO_START) -> RlvrError:
    return RlvrError(f"The server at {url} gave an odd answer: {printable(what, keep='')}.", hint)


def ask_server(
    method: str,
    url: str,
    body: dict[str, Any] | None,
    *,
    seconds: float = LOAD_SECONDS,
    limit: int = FRAME_BYTES,
    hint: str = HOW_TO_START,
) -> str:
    """Return the body of a server's answer.

    Args:
        seconds: in which it must answer.
        limit: the most bytes of an answer.
        hint: of the errors.

    Raises:
        NoAnswer: there is none.
        NotNow: a status says that there may be one later.
        RlvrError: another status than 200, or an answer without end.
    """
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        asked = urllib.request.Request(url, data=data, headers=headers, method=method)
        with urllib.request.urlopen(asked, timeout=seconds) as response:
            said = response.read(limit + 1)
    except urllib.error.HTTPError as error:
        why = " ".join(error.read(2000).decode(errors="replace").split())
        kind = NotNow if error.code in _NOT_NOW else RlvrError
        raise kind(f"{url} answered {error.code}: {printable(why, keep='')}", hint) from error
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"The server at {url} does not answer: {error}", hint) from error
    if len(said) > limit:
        raise odd_answer(url, f"more than {limit} bytes", hint=hint)
    return said.decode(errors="replace")


def note_of_weights(urls: Sequence[str]) -> str:
    """What to say of servers from which a model is asked that they were not given; empty: nobody can have given them another."""

    def takes_weights(url: str) -> bool:
        try:  # what takes POST alone does nothing, and says 405
            ask_server("GET", f"{url}/collective_rpc", None, seconds=HEALTH_SECONDS)
        except RlvrError as error:
            return isinstance(error.__cause__, urllib.error.HTTPError) and error.__cause__.code == 405
        return False

    if not (those := [url for url in urls if takes_weights(url)]):
        return ""
    return (
        f"{', '.join(those)} takes new weights: if a training run has used it since it was started, it answers with the weights of that run. "
        "Then start it again first."
    )
