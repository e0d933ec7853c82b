"""A teacher behind a vLLM server: its log-probabilities of tokens that somebody else has sampled.

Enters: prompts and responses, as token ids. Leaves: the log-probability of each response token at temperature 1.
"""

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.process import stoppable
from rlvr_cli.samplers.openai import FRAME_BYTES, TOKEN_BYTES
from rlvr_cli.samplers.parallel.ask import NoAnswer, NotNow, ask_server, note_of_weights, odd_answer

logger = logging.getLogger(__name__)

CONCURRENCY = 64
SECONDS = 120.0  # for an answer; a response of 30,000 tokens takes seconds
PAUSES = (1.0, 5.0, 20.0)  # seconds before a server that did not answer, or said that it is busy, is asked again
HINT = "Start it with: vllm serve TEACHER, the model that --teacher names; then name its address, such as http://localhost:8000."


class ServedTeacher:
    """Asks one server. It samples a token after each response, which is thrown away.

    Args:
        url: such as http://10.0.0.2:8000, without /v1.
        model: the teacher as the server may name it; if the server serves only one model, its name does not matter.

    Attributes:
        context_length: the most tokens of a prompt and its response; None if the server does not say.

    Raises:
        RlvrError: the server does not answer, or serves other models.
    """

    def __init__(self, url: str, model: str) -> None:
        self.url = url.rstrip("/")
        said = self._asked("GET", "/v1/models", None)
        names = [one.get("id") for one in said.get("data") or [] if isinstance(one, dict)]
        if len(names) != 1 and model not in names:
            raise RlvrError(
                f"The server at {self.url} serves {', '.join(map(str, names)) or 'no model'}, and not {model}.", HINT
            )
        self._model = model if model in names else names[0]
        longest = next(one.get("max_model_len") for one in said["data"] if one.get("id") == self._model)
        known = isinstance(longest, int) and longest > 0
        self.context_length: int | None = longest - 1 if known else None  # a token more is sampled
        if note := note_of_weights([self.url]):
            logger.warning(note)

    def log_probs(
        self, rows: Sequence[tuple[Sequence[int], Sequence[int]]], *, progress: Callable[[], None] = lambda: None
    ) -> list[list[float]]:
        """Return the log-probability of each token of each response, nats.

        Args:
            rows: prompt and response ids.
            progress: called for each row that is done.

        Raises:
            RlvrError: the server does not answer, or without a log-probability of each token.
            Interrupted: a signal came; requests under way are left to themselves.
        """
        places: queue.SimpleQueue[int] = queue.SimpleQueue()
        answered: queue.SimpleQueue[tuple[int, list[float] | Exception]] = queue.SimpleQueue()
        ended = threading.Event()

        def ask() -> None:
            with contextlib.suppress(queue.Empty):
                while not ended.is_set():
                    place = places.get_nowait()
                    try:
                        answered.put((place, self._of_row(rows[place])))
                    except Exception as error:  # the other thread raises it
                        answered.put((place, error))

        for place in range(len(rows)):
            places.put(place)
        for _ in range(min(CONCURRENCY, len(rows))):
            threading.Thread(target=ask, daemon=True).start()  # a pool's would have to end before the process does
        found: dict[int, list[float]] = {}
        try:
            while len(found) < len(rows):
                with stoppable():
                    place, said = answered.get()
                if isinstance(said, Exception):
                    raise said
                found[place] = said
                progress()
        finally:
            ended.set()
        return [found[place] for place in range(len(rows))]

    def _of_row(self, row: tuple[Sequence[int], Sequence[int]]) -> list[float]:
        prompt, response = row
        ids = [*prompt, *response]
        if self.context_length is not None and len(ids) > self.context_length:
            raise RlvrError(
                f"A prompt and its response have {len(ids)} tokens, and the teacher's server at {self.url} takes {self.context_length}.",
                "Start it with a larger --max-model-len.",
            )
        body = {"model": self._model, "prompt": ids, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        choices = self._asked("POST", "/v1/completions", body).get("choices")
        found: Any = choices[0].get("prompt_logprobs") if choices and isinstance(choices[0], dict) else None
        if not isinstance(found, list) or len(found) != len(ids):
            raise odd_answer(self.url, f"no log-probabilities of the {len(ids)} tokens that it was given", hint=HINT)
        places = range(len(prompt), len(ids))
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return [float(found[place][str(ids[place])]["logprob"]) for place in places]
        raise odd_answer(self.url, "log-probabilities of other tokens than it was given", hint=HINT)

    def _asked(self, method: str, route: str, body: dict[str, Any] | None) -> dict[str, Any]:
        limit = FRAME_BYTES + TOKEN_BYTES * len((body or {}).get("prompt", ()))
        said = None
        for pause in (*PAUSES, None):
            try:
                said = json.loads(ask_server(method, self.url + route, body, seconds=SECONDS, limit=limit, hint=HINT))
                break
            except (ValueError, RecursionError):
                break
            except (NoAnswer, NotNow):
                if pause is None:
                    raise
                time.sleep(pause)
        if not isinstance(said, dict):
            raise odd_answer(self.url, "no JSON object", hint=HINT)
        return said
