"""vLLM servers, real ones and what answers as they do: the same routes, over the embedded engine and a model of its own. It can also be at fault."""

import copy
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from endpoint import Reply, error, serving
from forked import VLLM_SERVER
from forks import Forks
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.models.load import load_policy
from rlvr_cli.samplers.embedded.engine import TransformersSampler
from rlvr_cli.types import Request, SamplingParams


@dataclass
class StandIn:
    """Attributes may be set at any time.

    Attributes:
        raw_logprobs: give log-probabilities before temperature.
        stale: say that new weights or adapters are loaded, and keep the old ones.
        takes_adapters, takes_weights: whether it was started so that it does.
        dies_after: completions after which it does not answer; None: never.
        engine_died: answer as when the engine behind it has died.
        hangs: do not answer at all, until the test has ended.
        hangs_from: the path from whose next request on it hangs.
        slow: seconds that a response takes; a probe's takes none.
        context: the most tokens that it says to take.
        odd: what it answers on a path instead; `odd_after` completions.
        loads: the folders of weights and adapters that it was to load.
        modes: those of the files in them.
    """

    url: str
    raw_logprobs: bool = False
    context: int | None = None
    slow: float = 0.0
    stale: bool = False
    takes_adapters: bool = True
    takes_weights: bool = True
    dies_after: int | None = None
    engine_died: bool = False
    hangs: bool = False
    hangs_from: str | None = None
    ended: threading.Event = field(default_factory=threading.Event)
    odd: dict[str, Any] = field(default_factory=dict)
    odd_after: int = 0
    answered: int = 0
    loads: list[str] = field(default_factory=list)
    modes: set[int] = field(default_factory=set)
    adapters: dict[str, Any] = field(default_factory=dict)
    most_adapters: int = 0
    endpoint: Any = None
    restart: Any = None  # a function: be as at the start, weights included


_answers: dict[tuple, dict] = {}  # of the weights at the start, by what is asked: most tests ask the same


@contextmanager
def vllm_servers(model: Path, count: int) -> Iterator[list[StandIn]]:
    with ExitStack() as stack:
        yield [stack.enter_context(_one(model)) for _ in range(count)]


@contextmanager
def _one(model: Path) -> Iterator[StandIn]:
    base = load_policy(model, device="cpu")
    served = dict.fromkeys(("the-model", str(model)), (base, TransformersSampler(base)))
    lock = threading.Lock()

    def note_load(folder: Path) -> None:
        server.loads.append(str(folder))
        server.modes |= {path.stat().st_mode for path in folder.glob("*")}

    def load_adapter(name: str, folder: str) -> Reply:
        if name in server.adapters:
            return error(400, f"The lora adapter '{name}' has already been loaded.")
        note_load(Path(folder))
        adapted = load_policy(folder, device="cpu")
        server.adapters[name] = (
            (base, served["the-model"][1]) if server.stale else (adapted, TransformersSampler(adapted))
        )
        server.most_adapters = max(server.most_adapters, len(server.adapters))
        return Reply(f"Success: LoRA adapter '{name}' added successfully.")

    def completion(body: dict) -> Reply:
        if body["model"] not in served | server.adapters:
            return error(404, f"The model `{body['model']}` does not exist.")
        server.answered += 1
        wait = 0.0 if body.get("ignore_eos") else server.slow
        if body["model"] in server.adapters or server.loads:
            return Reply(computed(body), wait=wait)
        key = str(model), server.raw_logprobs, repr(sorted(body.items()))
        if key not in _answers:
            _answers[key] = computed(body)
        return Reply(copy.deepcopy(_answers[key]), wait=wait)

    def computed(body: dict) -> dict:
        policy, engine = (served | server.adapters)[body["model"]]
        most = body["max_tokens"]
        least = most if body.get("ignore_eos") else body.get("min_tokens", 0)
        params = SamplingParams(
            temperature=body["temperature"], top_p=body.get("top_p", 1.0), max_tokens=most, min_tokens=least,
            stop=tuple(body.get("stop", ())),
        )  # fmt: skip
        text = isinstance(body["prompt"], str)
        ids = None if text else tuple(body["prompt"])
        asked = Request(body["prompt"] if text else "", (body.get("seed", 0),), prompt_ids=ids)
        (found,) = engine.sample([asked], params)
        logprobs = list(found.logprobs)
        # The engine bars EOS where it may not end; vLLM, which goes on after it, does not.
        if server.raw_logprobs or (body.get("ignore_eos") and not params.temperature):
            ids = torch.tensor([found.prompt_ids + found.token_ids])
            with torch.inference_mode():
                logits = policy.forward(input_ids=ids).logits[0, len(found.prompt_ids) - 1 : -1]
            scores = logits.log_softmax(-1)
            logprobs = scores.gather(-1, ids[0, len(found.prompt_ids) :, None]).flatten().tolist()
        of_prompt = None
        if "prompt_logprobs" in body:
            with torch.inference_mode():
                scores = policy.forward(input_ids=torch.tensor([body["prompt"]])).logits[0].log_softmax(-1)
            pairs = enumerate(body["prompt"][1:])
            of_prompt = [None, *({str(i): {"logprob": float(scores[at, i]), "rank": 1}} for at, i in pairs)]
        choice = {
            "prompt_logprobs": of_prompt, "index": 0, "text": found.text, "finish_reason": found.finish_reason,
            "stop_reason": None if found.stop_reason == "eos" else found.stop_reason,
            "token_ids": list(found.token_ids), "prompt_token_ids": list(found.prompt_ids),
            "logprobs": {"tokens": [""] * len(logprobs), "token_logprobs": logprobs} if "logprobs" in body else None,
        }  # fmt: skip
        usage = {"prompt_tokens": 1, "completion_tokens": len(logprobs)}
        return {"choices": [choice], "usage": usage}

    def answer(body: dict) -> Reply:
        server.hangs |= endpoint.paths[-1] == server.hangs_from
        if server.hangs:
            server.ended.wait()
            return Reply(status=0)
        with lock:
            path = endpoint.paths[-1]
            if server.dies_after is not None and server.answered >= server.dies_after:
                return Reply(status=0)
            if server.engine_died:
                return error(503 if path == "/health" else 500, "EngineCore encountered an issue.")
            if path == "/health":
                return Reply("")
            if path in server.odd and server.answered >= server.odd_after:
                return Reply(server.odd[path])
            if path == "/metrics":
                return Reply(
                    f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds 1.7{starts:03}e+09\n"
                )
            if path == "/v1/models":
                return Reply({"data": [{"id": "the-model", "root": str(model), "max_model_len": server.context}]})
            if path == "/collective_rpc":
                if not body or not server.takes_weights:
                    return error(405 if server.takes_weights else 404, "Method Not Allowed or Not Found")
                folder = Path(body["kwargs"]["weights_path"])
                note_load(folder)
                if not folder.is_dir():
                    return error(500, f"no such directory: {folder}")
                if not server.stale:
                    base.load_weights(load_file(folder / "model.safetensors"))
                    engine = served["the-model"][1]
                    engine.load_weights(base, engine.policy_version + 1)
                return Reply({"results": [None]})
            if path.endswith("_lora_adapter") and not server.takes_adapters:
                return error(404, "Not Found")
            if path == "/v1/load_lora_adapter":
                return load_adapter(body["lora_name"], body["lora_path"])
            if path == "/v1/unload_lora_adapter":
                known = server.adapters.pop(body["lora_name"], None)
                return error(404, "no such adapter") if known is None else Reply("Success")
            if path == "/reset_prefix_cache":
                return Reply("")
            return completion(body)

    first = {name: tensor.clone() for name, tensor in base.weights_for_engine().items()}

    starts = 0

    def restart() -> None:
        nonlocal starts
        starts += 1
        server.ended.set()
        if server.loads:
            base.load_weights(first)
            engine = served["the-model"][1]
            engine.load_weights(base, engine.policy_version + 1)
        for noted in (endpoint.bodies, endpoint.paths, endpoint.keys):
            noted.clear()
        vars(server).update(vars(StandIn(server.url, endpoint=endpoint, restart=restart)))

    with serving(answer, lists=True) as endpoint:
        server = StandIn(endpoint.url.removesuffix("/v1"), endpoint=endpoint, restart=restart)
        try:
            yield server
        finally:
            server.ended.set()


# vLLM itself


CACHE = 2**28  # bytes, which are filled with zeros at the start: 1,000 responses of 256 tokens
Real = tuple[str, subprocess.Popen]  # its address, and the process to end


@contextmanager
def real_servers(forks: Forks, folder: Path) -> Iterator[Callable[..., list[Real]]]:
    """Starts this many servers of the built-in model with these flags, and waits until they answer: some seconds.

    They are forks, and so are the engine and its worker behind each of them, processes of their own. Their logs are in the folder.
    """
    started: list[Real] = []
    environment = os.environ | {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip

    def start(count: int, *flags: str) -> list[Real]:
        for _ in range(count):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            command = shlex.split(
                f"-m {VLLM_SERVER} --host 127.0.0.1 --port {port} --dtype float32 --enforce-eager "
                "--logprobs-mode processed_logprobs --no-enable-chunked-prefill --max-model-len 256 "
                f"--kv-cache-memory-bytes {CACHE}"
            )
            with (folder / f"{len(started)}.log").open("w") as log:
                process = forks.popen(
                    [sys.executable, *command, *flags, "--model", str(builtin_model_path())],
                    env=environment, stdout=log, stderr=log, start_new_session=True,
                )  # fmt: skip
            started.append((f"http://127.0.0.1:{port}", process))
        until = time.monotonic() + 600  # on a busy machine
        for number in range(len(started) - count, len(started)):
            url, process = started[number]
            while True:
                assert process.poll() is None, (folder / f"{number}.log").read_text()[-2000:]
                with suppress(OSError):
                    urllib.request.urlopen(f"{url}/health", timeout=5)
                    break
                assert time.monotonic() < until, "a server does not answer"
                time.sleep(0.5)
        return started[-count:]

    try:
        yield start
    finally:
        for server in started:
            kill(server)


def kill(server: Real) -> None:
    with suppress(ProcessLookupError):
        os.killpg(server[1].pid, signal.SIGKILL)
    server[1].wait()
