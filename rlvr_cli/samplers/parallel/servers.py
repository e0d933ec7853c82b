"""vLLM servers that somebody started elsewhere, as one sampler: they divide the requests, and load the weights that train.

Enters: their addresses; then requests, and new weights of the policy. Leaves: completions in the order in which they arrive.

Each server is asked through `openai`. The samples of one that fails are asked again of the others, with the same seeds, and it is
left out from then on. New weights go by a directory that trainer and servers see; each server must show that it serves them. An
adapter goes the same way, under a name that no other version had, by which it is then asked for: it is never merged.
"""

import contextlib
import json
import os
import queue
import secrets
import tempfile
import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlvr_cli.config.shared.addresses import PLACEHOLDER_KEY, check_address
from rlvr_cli.errors import RlvrError
from rlvr_cli.models.compute.device import dtype_name
from rlvr_cli.models.identity import model_path
from rlvr_cli.models.pretrained import follow_umask, load_tokenizer, rust_errors_as_os_errors
from rlvr_cli.process import stoppable
from rlvr_cli.runs.storage.files import os_errors_as_user_errors
from rlvr_cli.samplers.open import EngineSettings
from rlvr_cli.samplers.openai import CHECK_SECONDS, WHOLE_DISTRIBUTION, OpenAISampler, TimedOut
from rlvr_cli.samplers.openai_answer import Unreadable, error_message, read_answer
from rlvr_cli.samplers.parallel.ask import (
    HEALTH_SECONDS,
    HOW_TO_START,
    LOAD_SECONDS,
    NoAnswer,
    ask_server,
    note_of_weights,
    odd_answer,
)
from rlvr_cli.samplers.parallel.several import OfAll, SeveralSamplers
from rlvr_cli.samplers.stop_strings import as_every_engine, continued, prompt_token_ids
from rlvr_cli.samplers.vllm import check_temperature
from rlvr_cli.samplers.weight_check import Probe, probe_prompts, take_probe, verify_weights
from rlvr_cli.text import printable
from rlvr_cli.types import Completion, MoreRequests, Request, SamplingParams

if TYPE_CHECKING:
    from rlvr_cli.models.policy import Policy

WHERE_TO_WRITE = "Free some space there, or name another directory, which the servers see too, with --weights-dir."
CONCURRENCY = 256  # requests that a server is asked at once: vLLM batches them
PROBE_PROMPTS, PROBE_LENGTH, PROBE_TOKENS = 4, 16, 8
MISSED = 2  # times in a row that it does not: then it is not waited for any longer
CLOSE_SECONDS = 5.0  # in which it must have forgotten an adapter
_COLD = 0.01  # a temperature at which nearly every token has log-probability 0 in the distribution sampled from


class ServersSampler(SeveralSamplers["_Server"]):
    """Samples from vLLM servers of one model.

    Args:
        urls: of each server, such as http://10.0.0.2:8000, without /v1.
        tokenizer: of the model.
        model: which one the servers must say that they serve; empty: any, since it gets new weights.
        takes_adapters: whether `load_weights` gets policies with an adapter, of which the servers have the base.
        weights_dir: where new weights are written for the servers; all of them must see it under this name. Empty: a folder
            for temporary files.
        timeout: seconds that one sample may take.

    Raises:
        RlvrError: an address is none, the openai package is missing, a server does not answer, serves another model, or gives
            log-probabilities before temperature.
    """

    engine = "vllm-servers"
    seeding = "per-request"

    def __init__(
        self,
        urls: Sequence[str],
        tokenizer: Any,
        *,
        model: str = "",
        takes_adapters: bool = False,
        weights_dir: str = "",
        timeout: float = 600.0,
    ) -> None:
        for url in urls:
            check_address(url, option="--sampler-urls")
        super().__init__({url: _Server(url, tokenizer, model=model, timeout=timeout) for url in urls})
        self._tokenizer, self._weights_dir = tokenizer, os.path.abspath(weights_dir) if weights_dir else None
        self._takes_adapters, self._adapter_folder = takes_adapters, contextlib.ExitStack()
        self._name = f"rlvr-{secrets.token_hex(4)}"  # of adapters: another run's may still be on the servers
        if model and (note := note_of_weights(urls)):
            self.note(note)
        self.policy_version = 0

    @property
    def context_length(self) -> int | None:
        """That of the server with the shortest, of those that say it."""
        return min(filter(None, (server.context_length for server in self.members.values())), default=None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which servers were left out, and why, and which may have other weights than those of the model."""
        return self.left_out

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, more: MoreRequests | None = None
    ) -> Generator[Completion]:
        """Answer every seed of every request; completions come in the order in which they arrive.

        Args:
            more: requests that are sent as they come; they have the indices after those of `requests`.

        Raises:
            QuestionsRefused: some questions were refused; raised after all other completions were yielded.
            RlvrError: no server is left, one that lives took longer than a sample may, or vLLM would change the temperature.
        """
        check_temperature(params)
        prompts = prompt_token_ids(self._tokenizer, requests, vocab_size=None)
        exact = [replace(r, prompt_ids=tuple(ids)) for r, ids in zip(requests, prompts, strict=True)]
        for url, server in list(self.members.items()):
            try:
                server.check_same()
            except RlvrError as error:
                self.leave_out(url, error)
        return super().sample(exact, params, more=more)

    def load_weights(self, policy: "Policy", policy_version: int) -> None:
        """Let every server load the weights of `policy`, and verify that it serves them.

        Raises:
            RlvrError: they cannot be written; a server cannot load them, or serves others.
        """
        with contextlib.ExitStack() as temporary:
            folder = self._written(policy, temporary)
            for url, server in list(self.members.items()):
                try:
                    if self._takes_adapters:
                        server.load_adapter(folder, name=f"{self._name}-{policy_version}")
                    else:
                        server.load(folder)
                    server.verify(policy, policy_version, served_version=self.policy_version)
                except RlvrError as error:
                    if not isinstance(error, NoAnswer) and server.lives():
                        raise
                    self.leave_out(url, error)
            if self._takes_adapters:  # a server may read the one that it serves again
                self._adapter_folder.close()
                self._adapter_folder = temporary.pop_all()
        self.policy_version = policy_version

    def _written(self, policy: "Policy", temporary: contextlib.ExitStack) -> str:
        """Write the weights, or the adapter, into a directory that `temporary` removes, and return its path. Raises RlvrError."""
        parent = self._weights_dir or tempfile.gettempdir()
        with os_errors_as_user_errors(Path(parent), hint=WHERE_TO_WRITE), rust_errors_as_os_errors():
            folder = temporary.enter_context(tempfile.TemporaryDirectory(prefix="rlvr-weights-", dir=parent))
            Path(folder).chmod(0o755)  # the servers may be another user's
            (policy.write_adapter if self._takes_adapters else partial(_write_weights, policy))(Path(folder))
            follow_umask(Path(folder))
        return folder

    def sleep(self) -> None:
        """Do nothing: the servers have memory of their own."""

    def close(self) -> None:
        """Let the servers forget the adapter; they go on."""
        for server in self.members.values():
            with contextlib.suppress(RlvrError):
                server.unload_adapter(seconds=CLOSE_SECONDS)
        self._adapter_folder.close()


def _write_weights(policy: "Policy", folder: Path) -> None:
    from safetensors.torch import save_file

    # With tied embeddings the output layer is saved under its own name too: see `vllm.VllmSampler.load_weights`.
    weights = {name: tensor.detach().cpu().clone() for name, tensor in policy.weights_for_engine().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(policy.config.to_dict(), default=str))


class _Server:
    """One server.

    Attributes:
        context_length: the most tokens that it takes and samples in a request; None if it does not say.

    Args:
        model: the name or the directory of the model that it must serve; empty: it serves one, whose weights it will get.

    Raises:
        RlvrError: it does not answer, serves another model, or gives log-probabilities before temperature.
    """

    def __init__(self, url: str, tokenizer: Any, *, model: str, timeout: float) -> None:
        self.url, self._tokenizer = url, tokenizer
        self._vocabulary = len(tokenizer)
        self._last_probe: Probe | None = None
        self._adapter = ""  # the name of the one that is served
        self._started = ""  # when its process was, before it loaded weights
        self._missed = 0
        self.context_length: int | None = None
        self._sampler = OpenAISampler(
            self._served(model),
            base_url=f"{url}/v1",
            max_concurrency=CONCURRENCY,
            timeout=timeout,
            max_retries=1,
            processed_logprobs=True,
            check=self._check_life,
        )
        self._check_logprobs()

    def _served(self, model: str) -> str:
        """Return the server's name of the model, by which it is asked."""
        said = None
        with contextlib.suppress(ValueError, RecursionError):
            said = json.loads(self._ask("/v1/models", method="GET"))
        listed = _field(said, self.url, "data", list)
        served = {_field(one, self.url, "id", str): (one.get("root"), one.get("max_model_len")) for one in listed}
        for name, (root, longest) in served.items():
            if (
                not model
                or model in (name, root)
                or (isinstance(root, str) and Path(root).resolve() == Path(model).resolve())
            ):
                self.context_length = longest if isinstance(longest, int) else None
                return name
        if not model:
            raise odd_answer(self.url, "no model")
        raise RlvrError(
            f"The server at {self.url} serves {printable(', '.join(served), keep='')}, and not {printable(model)}.",
            "Name the model with --model as the server does, or start it with the name: --served-model-name NAME.",
        )

    def sample(
        self, requests: Sequence[Request], params: SamplingParams, *, more: MoreRequests | None = None
    ) -> Generator[Completion]:
        """Answer every seed of every request, and of those that come; their `prompt_ids` are sampled from. Raises RlvrError."""
        completions = self._sampler.sample(requests, params, more=more and _AfterIdle(more, self.check_same))
        try:
            for completion in completions:
                self._check(completion)
                index = completion.request_index
                comes_later = index >= len(requests)  # a turn of an episode, which is a response of its own
                begun = 0 if comes_later else requests[index].begun
                rest = replace(params, min_tokens=max(params.min_tokens - begun, 0))
                completion = as_every_engine(completion, self._tokenizer, rest)
                yield continued(completion, self._tokenizer, params, begun=begun) if begun else completion
        except TimedOut as error:
            if not self.lives():
                raise
            raise OfAll(
                error.problem,
                "The server lives, and would have gone on: resume the run with a larger --request-timeout.",
            ) from error
        finally:
            completions.close()

    def _check(self, completion: Completion) -> None:
        """Raise RlvrError unless the server gave token ids, and a log-probability for each."""
        ids = completion.token_ids
        if not ids or len(ids) != len(completion.logprobs):
            raise odd_answer(
                self.url, f"a completion of {len(ids)} token ids and {len(completion.logprobs)} log-probabilities"
            )

    def load(self, folder: str) -> None:
        """Let the server load the weights in a directory. Raises RlvrError."""
        self._started = self._start()
        self._ask("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        self._ask("/reset_prefix_cache", {})

    def check_same(self) -> None:
        """Raise RlvrError if the server has been started again since it loaded weights: it has those that it was started with."""
        if self._started and self._start() not in ("", self._started):
            raise RlvrError(
                f"The server at {self.url} was started again, and has lost the weights of this run.",
                "Resume the run with --resume: its servers then get them again.",
            )

    def _start(self) -> str:
        """When the server's process was started, in its words; empty if it does not say, as with several processes. Raises NoAnswer."""
        try:
            said = self._ask("/metrics", method="GET", seconds=HEALTH_SECONDS)
        except NoAnswer:
            raise
        except RlvrError:
            return ""
        return next((line for line in said.splitlines() if line.startswith("process_start_time_seconds ")), "")

    def lives(self) -> bool:
        """Whether the server's engine does: when it has died, what answers for it goes on for a moment, and says 500 to everything."""
        try:
            ask_server("GET", f"{self.url}/health", None, seconds=HEALTH_SECONDS)
        except RlvrError:
            return False
        return True

    def _check_life(self) -> None:
        """Raise RlvrError if the server has not said `MISSED` times in a row that its engine lives."""
        self._missed = 0 if self.lives() else self._missed + 1
        if self._missed >= MISSED:
            raise NoAnswer(f"The server at {self.url} does not answer, nor say that its engine lives.", HOW_TO_START)

    def _ask(
        self, route: str, body: dict[str, Any] | None = None, *, method: str = "POST", seconds: float = LOAD_SECONDS
    ) -> str:
        """Return what the server answers, see `ask_server`; it is waited for while the server's engine lives.

        When the engine dies, vLLM leaves unanswered what it was asked to do, without an end.
        """
        answered: queue.SimpleQueue[str | RlvrError] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answered.put(ask_server(method, f"{self.url}{route}", body, seconds=seconds))
            except RlvrError as error:
                answered.put(error)

        threading.Thread(target=ask, daemon=True).start()
        while True:
            try:
                with stoppable():
                    said = answered.get(timeout=CHECK_SECONDS)
            except queue.Empty:
                self._check_life()
                continue
            if isinstance(said, RlvrError):
                raise said
            return said

    def load_adapter(self, folder: str, *, name: str) -> None:
        """Let the server load the adapter in a directory, and ask for it by this name from now on. Raises RlvrError."""
        try:
            self.unload_adapter()
        except NoAnswer:
            raise
        except RlvrError:  # it has been started again, and knows the adapter no more: loading decides
            pass
        self._ask("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})
        self._adapter = self._sampler.model = name

    def unload_adapter(self, *, seconds: float = LOAD_SECONDS) -> None:
        """Let the server forget the adapter that it serves, if it does. Raises RlvrError."""
        name, self._adapter = self._adapter, ""
        if name:
            self._ask("/v1/unload_lora_adapter", {"lora_name": name}, seconds=seconds)

    def verify(self, policy: "Policy", version: int, *, served_version: int) -> None:
        """Raise RlvrError if the server does not serve the weights of `policy`."""
        self._vocabulary = min(policy.vocabulary_size, len(self._tokenizer))
        probe = take_probe(policy, self._probe())
        other = ", which may be another run's, too: one run loads weights into a server at a time"
        verify_weights(
            probe,
            self._last_probe,
            # That of the servers is not known; on a GPU it is bfloat16.
            precisions=[dtype_name(policy.dtype), *["bfloat16"] * (policy.device.type == "cuda")],
            version=version,
            served_version=served_version,
            hint=f"This is {self.url}{'' if self._adapter else other}. {HOW_TO_START}",
        )
        self._last_probe = probe

    def _check_logprobs(self) -> None:
        """Raise RlvrError if the server's log-probabilities are not those of the distribution that it samples from."""
        greedy, cold = (
            [x for answer in self._probe(temperature=temperature) for x in answer.logprobs]
            for temperature in (0.0, _COLD)
        )
        mean, raw = sum(cold) / len(cold), sum(greedy) / len(greedy)
        if mean < raw / 2 < -0.05:
            raise RlvrError(
                f"The server {self.url} gives log-probabilities before temperature, not of the distribution that it samples from.",
                HOW_TO_START,
            )

    def _probe(self, *, temperature: float = 0.0) -> list[Completion]:
        """The server's answers to the probe's prompts, which do not end at EOS."""
        answers = []
        for number, ids in enumerate(probe_prompts(self._vocabulary, count=PROBE_PROMPTS, length=PROBE_LENGTH)):
            body = self._ask(
                "/v1/completions",
                {"model": self._sampler.model, "prompt": ids, "max_tokens": PROBE_TOKENS, "temperature": temperature,
                 "seed": 0, "ignore_eos": True, "logprobs": 0, "return_token_ids": True, **WHOLE_DISTRIBUTION},
            )  # fmt: skip
            try:
                said = read_answer(body, chat=False, key=PLACEHOLDER_KEY)
            except Unreadable as error:
                raise odd_answer(self.url, str(error)) from None
            completion = Completion(
                request_index=number, sample_index=0, text="", prompt_ids=tuple(ids), token_ids=said.token_ids,
                logprobs=said.logprobs, num_prompt_tokens=len(ids), num_tokens=len(said.token_ids), finish_reason="length",
                stop_reason=None, mean_entropy=None,
            )  # fmt: skip
            self._check(completion)
            if completion.num_tokens != PROBE_TOKENS:
                raise odd_answer(self.url, f"{completion.num_tokens} tokens, and {PROBE_TOKENS} were asked for")
            answers.append(completion)
        return answers


class _AfterIdle:
    """What a server is asked as it comes (`types.MoreRequests`); it is checked when it had nothing to do: no request would fail.

    Args:
        check: raises an error.
    """

    def __init__(self, more: MoreRequests, check: Callable[[], None]) -> None:
        self._more, self._check, self.notify = more, check, more.notify

    def take(self, *, wait: bool) -> Sequence[Request]:
        taken = self._more.take(wait=wait)
        if wait and taken:
            self._check()
        return taken


def _field(said: Any, url: str, name: str, kind: type) -> Any:
    """Return a field of what a server said. Raises RlvrError if it has none of this type."""
    value = said.get(name) if isinstance(said, dict) else None
    if not isinstance(value, kind):
        raise odd_answer(url, f"no {name} in {error_message(json.dumps(said))}")
    return value


def open_engine(settings: EngineSettings) -> ServersSampler:
    """Connect to the servers."""
    return ServersSampler(
        [url.strip().rstrip("/") for url in settings.sampler_urls.split(",")],
        load_tokenizer(model_path(settings.model)),
        model="" if settings.takes_weights else model_path(settings.model),
        takes_adapters=settings.lora_rank > 0,
        weights_dir=settings.weights_dir,
        timeout=settings.request_timeout,
    )
