"""vLLM servers that somebody started elsewhere, as one sampler: they divide the requests, and load the weights that train.

Enters: their addresses; then requests, and new weights of the policy. Leaves: completions in the order in which they arrive.

Each server is asked through `openai`. The samples of one that fails are asked again of the others, with the same seeds, and it is
left out from then on. New weights go by a directory that trainer and servers see; each server must show that it serves them.
"""

import contextlib
import http.client
import json
import logging
import queue
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_cli.config.endpoint import check_address
from rlvr_cli.errors import RlvrError
from rlvr_cli.process import stoppable
from rlvr_cli.samplers.openai import OpenAISampler
from rlvr_cli.samplers.stop_strings import first_stop, prompt_token_ids, response_text
from rlvr_cli.samplers.weight_check import Probe, probe_prompts, take_probe, verify_weights
from rlvr_cli.text import printable
from rlvr_cli.types import Completion, Request, SamplingParams

if TYPE_CHECKING:
    from rlvr_cli.models.policy import Policy

logger = logging.getLogger(__name__)

HOW_TO_START = (
    "Start each with VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --logprobs-mode processed_logprobs, see docs/engines.md."
)
CONCURRENCY = 256  # requests that a server is asked at once: vLLM batches them
PROBE_PROMPTS, PROBE_TOKENS = 4, 8
LOAD_SECONDS = 600.0  # in which a server must have loaded new weights
_COLD = 0.01  # a temperature at which nearly every token has log-probability 0 in the distribution sampled from


class _NoAnswer(RlvrError):
    """A server is not there; the others may be."""


class ServersSampler:
    """Samples from vLLM servers of one model.

    Args:
        urls: of each server, such as http://10.0.0.2:8000, without /v1.
        tokenizer: of the model.
        weights_dir: where new weights are written for the servers; all of them must see it under this name. Empty: a folder
            for temporary files.
        timeout: seconds that one sample may take.

    Attributes:
        notes: which servers were left out, and why.

    Raises:
        RlvrError: an address is none, the openai package is missing, or no server answers.
    """

    engine = "vllm-servers"
    seeding = "per-request"
    worked_seconds = None
    arrived = ()

    def __init__(self, urls: Sequence[str], tokenizer: Any, *, weights_dir: str = "", timeout: float = 600.0) -> None:
        self._tokenizer, self._weights_dir, self._timeout = tokenizer, weights_dir, timeout
        self.policy_version = 0
        self.notes: tuple[str, ...] = ()
        self._probes: dict[str, Probe] = {}
        self._servers: dict[str, OpenAISampler] = {}
        for url in urls:
            check_address(url, option="--sampler-urls")
            said = _get(f"{url}/v1/models")
            self._servers[url] = OpenAISampler(
                said["data"][0]["id"],
                base_url=f"{url}/v1",
                max_concurrency=CONCURRENCY,
                timeout=timeout,
                max_retries=1,
                processed_logprobs=True,
            )

    def sample(self, requests: Sequence[Request], params: SamplingParams) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they arrive.

        Raises:
            RlvrError: no server is left, or one refused the requests.
        """
        vocabulary = len(self._tokenizer)
        prompts = prompt_token_ids(self._tokenizer, requests, vocab_size=vocabulary)
        requests = [replace(r, prompt_ids=tuple(ids)) for r, ids in zip(requests, prompts, strict=True)]
        missing = {(i, j) for i, request in enumerate(requests) for j in range(len(request.seeds))}
        while missing:
            alive = list(self._servers)
            by_request: dict[int, list[int]] = {}
            for i, j in sorted(missing):
                by_request.setdefault(i, []).append(j)
            places = [*by_request.items()]
            shares = {url: places[number :: len(alive)] for number, url in enumerate(alive)}
            for completion in self._answers(shares, requests, params):
                missing.remove((completion.request_index, completion.sample_index))
                yield self._as_everywhere(completion, params)

    def _answers(
        self, shares: dict[str, list[tuple[int, list[int]]]], requests: Sequence[Request], params: SamplingParams
    ) -> Iterator[Completion]:
        """Ask each server for its share, (request, samples) each. A server that fails is left out; the last one raises."""
        found: queue.SimpleQueue[Completion | tuple[str, Exception | None]] = queue.SimpleQueue()
        closing = threading.Event()

        def ask(url: str, share: list[tuple[int, list[int]]]) -> None:
            asked = [replace(requests[i], seeds=tuple(requests[i].seeds[j] for j in samples)) for i, samples in share]
            error = None
            try:
                completions = self._servers[url].sample(asked, params)
                for completion in completions:
                    i, samples = share[completion.request_index]
                    found.put(replace(completion, request_index=i, sample_index=samples[completion.sample_index]))
                    if closing.is_set():
                        break
                completions.close()
            except Exception as problem:  # the other thread raises it
                error = problem
            found.put((url, error))

        threads = [threading.Thread(target=ask, args=item, daemon=True) for item in shares.items() if item[1]]
        for thread in threads:
            thread.start()
        working = len(threads)
        try:
            while working:
                with stoppable():
                    item = found.get()
                if isinstance(item, Completion):
                    yield item
                    continue
                working -= 1
                url, error = item
                if error is not None:
                    if len(self._servers) == 1 or not isinstance(error, RlvrError):
                        raise error
                    self._leave_out(url, error.problem)
        finally:
            closing.set()

    def _leave_out(self, url: str, why: str) -> None:
        del self._servers[url]
        note = f"The server {url} is left out: {why}"
        self.notes += (note,)
        logger.warning(note)

    def _as_everywhere(self, completion: Completion, params: SamplingParams) -> Completion:
        """Give a completion the text that every engine gives: its ids decoded, up to the stop string."""
        text, reason = response_text(self._tokenizer, completion.token_ids), completion.stop_reason
        if reason in params.stop:
            protected = response_text(self._tokenizer, completion.token_ids[: params.min_tokens])
            found = first_stop(text, params.stop, start=len(protected) if params.min_tokens else 0)
            if found is not None:
                reason, end = found
                text = text[:end]
        return replace(completion, text=text, stop_reason=reason, num_tokens=len(completion.token_ids))

    def load_weights(self, policy: "Policy", policy_version: int) -> None:
        """Let every server load the weights of `policy`, and verify that it serves them.

        Raises:
            RlvrError: a server cannot load them, or serves others.
        """
        from safetensors.torch import save_file

        with tempfile.TemporaryDirectory(prefix="rlvr-weights-", dir=self._weights_dir or None) as folder:
            Path(folder).chmod(0o755)  # the servers may be another user's
            # With tied embeddings the output layer is saved under its own name too: see `vllm.VllmSampler.load_weights`.
            weights = {name: tensor.detach().cpu().clone() for name, tensor in policy.weights_for_engine().items()}
            save_file(weights, Path(folder) / "model.safetensors", metadata={"format": "pt"})
            del weights
            (Path(folder) / "config.json").write_text(json.dumps(policy.config.to_dict(), default=str))
            for url in list(self._servers):
                try:
                    _post(f"{url}/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
                    _post(f"{url}/reset_prefix_cache", {})
                except _NoAnswer as error:
                    if len(self._servers) == 1:
                        raise
                    self._leave_out(url, error.problem)
        for url, server in self._servers.items():
            probe = take_probe(policy, self._probe(url, server, policy))
            verify_weights(
                probe,
                self._probes.get(url),
                # That of the servers is not known; on a GPU it is bfloat16.
                precisions=[str(policy.dtype).removeprefix("torch."), *["bfloat16"] * (policy.device.type == "cuda")],
                version=policy_version,
                served_version=self.policy_version,
                hint=f"This is {url}. {HOW_TO_START}",
            )
            if url not in self._probes:
                self._check_logprobs(url, server, policy, probe)
            self._probes[url] = probe
        self.policy_version = policy_version

    def _probe(
        self, url: str, server: OpenAISampler, policy: "Policy", *, temperature: float = 0.0
    ) -> list[Completion]:
        """The server's answers to the probe's prompts, which do not end at EOS."""
        length = 16
        prompts = probe_prompts(policy, self._tokenizer, count=PROBE_PROMPTS, length=length)
        answers = []
        for number, ids in enumerate(prompts):
            said = _post(
                f"{url}/v1/completions",
                {"model": server.model, "prompt": ids, "max_tokens": PROBE_TOKENS, "temperature": temperature, "seed": 0,
                 "ignore_eos": True, "logprobs": 0, "return_token_ids": True},
            )["choices"][0]  # fmt: skip
            answers.append(
                Completion(
                    request_index=number, sample_index=0, text="", prompt_ids=tuple(ids),
                    token_ids=tuple(said["token_ids"]), logprobs=tuple(said["logprobs"]["token_logprobs"]),
                    num_prompt_tokens=length, num_tokens=PROBE_TOKENS, finish_reason="length", stop_reason=None,
                    mean_entropy=None,
                )
            )  # fmt: skip
        return answers

    def _check_logprobs(self, url: str, server: OpenAISampler, policy: "Policy", greedy: Probe) -> None:
        """Raise RlvrError if the server's log-probabilities are not those of the distribution that it samples from."""
        cold = [x for answer in self._probe(url, server, policy, temperature=_COLD) for x in answer.logprobs]
        mean, raw = sum(cold) / len(cold), sum(greedy.engine_logprobs) / len(greedy.engine_logprobs)
        if mean < raw / 2 < -0.05:
            raise RlvrError(
                f"The server {url} gives log-probabilities before temperature, not of the distribution that it samples from.",
                HOW_TO_START,
            )

    def sleep(self) -> None:
        """Do nothing: the servers have memory of their own."""

    def close(self) -> None:
        """Do nothing: the servers go on."""


def _get(url: str) -> Any:
    return _answer("GET", url, None)


def _post(url: str, body: dict[str, Any]) -> Any:
    return _answer("POST", url, body)


def _answer(method: str, url: str, body: dict[str, Any] | None) -> Any:
    """Return a server's answer. Raises RlvrError if there is none, or another status than 200."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    try:
        asked = urllib.request.Request(url, data=data, headers=headers, method=method)
        with urllib.request.urlopen(asked, timeout=LOAD_SECONDS) as response:
            said = response.read()
    except urllib.error.HTTPError as error:
        why = " ".join(error.read(2000).decode(errors="replace").split())
        raise RlvrError(f"{url} answered {error.code}: {printable(why, keep='')}", HOW_TO_START) from error
    except (OSError, http.client.HTTPException) as error:
        raise _NoAnswer(f"The server at {url} does not answer: {error}", HOW_TO_START) from error
    with contextlib.suppress(ValueError):
        return json.loads(said)
    return None
