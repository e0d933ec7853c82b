"""An endpoint may say anything: no answer at hand is lost with an odd one, and nothing that was stored is paid for twice.

Each fault befalls one of `QUESTIONS` questions of `rlvr eval`, once or for good. The command ends without a traceback; what
was answered well is stored; when the endpoint is well again, `--resume` asks for the rest only.
"""

import gzip
import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from endpoint import Endpoint, Reply, completion, error, serving
from forks import Call, Done, Forks, processes_in
from rlvr_cli.models.identity import builtin_model_path
from rlvr_cli.runs.readers import read_rollouts, read_run

pytest.importorskip("aiohttp", reason="aiohttp is not installed")

QUESTIONS = 12
SOON = {"retry-after-ms": "1"}  # else seconds are waited between its tries
AT_ONCE = 8  # calls
DEEP = "[" * 200_000


def good(body: dict) -> Reply:
    return completion("4 </answer>", stop_reason="</answer>")


def without_seed(answer: Callable[[dict], Reply], body: dict) -> Reply:
    return error(400, "Unrecognized request argument supplied: seed") if "seed" in body else answer(body)


def with_usage(**usage: Any) -> Reply:
    return changed(lambda answer: answer["usage"].update(usage))


def with_choice(**fields: Any) -> Reply:
    return changed(lambda answer: answer["choices"][0].update(fields))


def changed(change: Callable[[dict], Any]) -> Reply:
    reply = good({})
    change(reply.body)
    return reply


def said(text: str) -> Reply:
    """A good answer in which the text, which may be no JSON, stands in place of the token count."""
    return Reply(json.dumps(with_usage(completion_tokens="HERE").body).replace('"HERE"', text))


def scores(tokens: Any, logprobs: Any) -> Reply:
    return with_choice(logprobs={"tokens": tokens, "token_logprobs": logprobs})


# What costs the sample: it is tried again, and fails in the end.
ODD: dict[str, Reply] = {
    "usage/text": with_usage(completion_tokens="5"),
    "usage/fraction": with_usage(completion_tokens=5.5),
    "usage/negative": with_usage(completion_tokens=-1),
    "usage/1e30": with_usage(completion_tokens=10**30),
    "usage/2**31": with_usage(completion_tokens=2**31),
    "usage/true": with_usage(completion_tokens=True),
    "usage/list": with_usage(completion_tokens=[]),
    "usage/object": with_usage(completion_tokens={}),
    "usage/prompt-text": with_usage(prompt_tokens="7"),
    "usage/prompt-negative": with_usage(prompt_tokens=-7),
    "usage/prompt-1e30": with_usage(prompt_tokens=10**30),
    "usage/is-text": changed(lambda answer: answer.update(usage="5")),
    "usage/is-list": changed(lambda answer: answer.update(usage=[5])),
    "usage/nan": said("NaN"),
    "usage/infinity": said("Infinity"),
    "usage/1e999": said("1e999"),
    "usage/5000-digits": said("9" * 5000),
    "usage/deep": said("[" * 900 + "]" * 900),
    "ids/text": with_choice(token_ids="abc"),
    "ids/texts": with_choice(token_ids=["1"]),
    "ids/2**40": with_choice(token_ids=[2**40]),
    "ids/1e30": with_choice(token_ids=[10**30]),
    "ids/negative": with_choice(token_ids=[-1]),
    "ids/fraction": with_choice(token_ids=[1.5]),
    "ids/null": with_choice(token_ids=[None]),
    "ids/nested": with_choice(token_ids=[[1]]),
    "ids/object": with_choice(token_ids={"a": 1}),
    "ids/true": with_choice(token_ids=[True]),
    "ids/prompt-texts": with_choice(prompt_token_ids=["x"]),
    "ids/prompt-number": changed(lambda answer: answer.update(prompt_token_ids=5)),
    "text/number": with_choice(text=5),
    "text/list": with_choice(text=["a"]),
    "text/object": with_choice(text={}),
    "text/true": with_choice(text=True),
    "logprobs/text": with_choice(logprobs="x"),
    "logprobs/list": with_choice(logprobs=[1]),
    "logprobs/tokens-number": scores(5, [-1.0]),
    "logprobs/tokens-numbers": scores([5], [-1.0]),
    "logprobs/texts": scores(["4"], ["a"]),
    "logprobs/nested": scores(["4"], [[-1.0]]),
    "logprobs/positive": scores(["4"], [5.0]),
    "logprobs/1e300": scores(["4"], [-1e300]),
    "logprobs/nan": scores(["4"], [float("nan")]),
    "logprobs/infinity": scores(["4"], [float("-inf")]),
    "finish/number": with_choice(finish_reason=5),
    "finish/list": with_choice(finish_reason=[]),
    "stop/list": with_choice(stop_reason=[]),
    "stop/object": with_choice(stop_reason={"a": 1}),
    "stop/fraction": with_choice(stop_reason=1.5),
    "choices/object": Reply({"choices": {}}),
    "choices/null": Reply({"choices": None}),
    "choices/empty": Reply({"choices": []}),
    "choices/nulls": Reply({"choices": [None]}),
    "choices/texts": Reply({"choices": ["x"]}),
    "body/empty": Reply(""),
    "body/null": Reply("null"),
    "body/number": Reply("5"),
    "body/text": Reply('"x"'),
    "body/list": Reply("[]"),
    "body/cut": Reply('{"choices": [{"te'),
    "body/html": Reply("<html>fine</html>"),
    "body/deep": Reply(DEEP),
    "body/deep-error": Reply(DEEP, 500),
    "body/bom": Reply("\ufeff" + json.dumps(good({}).body)),
    "body/latin-1": Reply('{"choices": [{"text": "é", "finish_reason": 5}]}'.encode("latin-1")),
    "body/zeros": Reply(b"\0" * 1000),
    "body/error": Reply({"error": {"message": "upstream"}}),
    "body/long": Reply(b" " * 5_000_000),
    "body/gzip-bomb": Reply(gzip.compress(b" " * 50_000_000, 1), headers={"content-encoding": "gzip"}),
    "body/no-gzip": Reply(b"plain", headers={"content-encoding": "gzip"}),
    "body/charset": Reply("<html>", headers={"content-type": "text/html; charset=nonsense"}),
    "http/nothing": Reply(status=0),
    "http/garbage": Reply(raw=b"\x16\x03\x01\0garbage\r\n\r\n"),
    "http/no-status": Reply(raw=b"HTTP/1.1 abc fine\r\n\r\n"),
    "http/999": Reply(raw=b"HTTP/1.1 999 What\r\ncontent-length: 0\r\n\r\n"),
    "http/cut": Reply(raw=b'HTTP/1.1 200 OK\r\ncontent-length: 500\r\n\r\n{"choices"'),
    "http/chunks": Reply(raw=b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"),
    "http/headers": Reply(raw=b"HTTP/1.1 200 OK\r\n" + b"a: " + b"b" * 500_000 + b"\r\n\r\n"),
    "http/loop": Reply("", 307, {"location": "/v1/completions"}),
    "http/elsewhere": Reply("", 302, {"location": "http://127.0.0.1:9/v1"}),
    "http/bad-location": Reply("", 307, {"location": "http://[::1"}),
    "http/204": Reply("", 204),
    **{f"status/{n}": Reply("busy", n) for n in (408, 409, 425, 429, 500, 501, 502, 503, 504, 520, 599)},
    **{f"status/{n}": Reply({"error": {"message": "no"}}, n) for n in (400, 413, 422)},
    "retry-after/nan": Reply("busy", 429, {"retry-after": "nan"}),
    "retry-after/negative": Reply("busy", 429, {"retry-after": "-1"}),
    "retry-after/huge": Reply("busy", 429, {"retry-after": "1e999"}),
    "retry-after/date": Reply("busy", 503, {"retry-after": "tomorrow"}),
}  # fmt: skip

# What a sample survives: some endpoints leave these out, or say them in their own way.
KEPT: dict[str, Reply] = {
    "text/null": with_choice(text=None),
    "text/surrogate": with_choice(text="\ud83d </answer>"),
    "text/controls": with_choice(text="\0\x1b[2J\u202e</answer>"),
    "text/300-kB": with_choice(text="x" * 300_000 + "</answer>"),
    "usage/null": changed(lambda answer: answer.update(usage=None)),
    "usage/counts-null": with_usage(completion_tokens=None, prompt_tokens=None),
    "logprobs/null": with_choice(logprobs=None),
    "logprobs/nulls": scores(["4"], [None]),
    "logprobs/one-too-few": scores(["4", "x"], [-1.0]),
    "logprobs/rounded": scores(["4"], [1e-7]),
    "logprobs/never": scores(["4"], [-9999.0]),
    "ids/null": with_choice(token_ids=None),
    "finish/null": with_choice(finish_reason=None),
    "finish/unknown": with_choice(finish_reason="\x1b]0;tired", stop_reason=None),
    "choices/two": changed(lambda answer: answer["choices"].append({"text": 5})),
    "body/utf-16": Reply(json.dumps(good({}).body).encode("utf-16"), headers={"content-type": "text/plain; charset=utf-16"}),
}  # fmt: skip
QUICK = (
    "usage/text", "usage/1e30", "ids/texts", "ids/2**40", "text/number", "logprobs/texts", "finish/list", "choices/nulls",
    "body/deep", "body/gzip-bomb", "body/html", "http/204",
)  # fmt: skip


class Stub:
    """An endpoint that gives good answers, but for the questions that faults have befallen.

    Attributes:
        paid: how often each question was answered well.
        odd: how many faults were sent.
    """

    def __init__(self, *faults: Reply, healthy: int) -> None:
        """The faults befall the questions that come after `healthy` ones, each as long as the stub is not `well`."""
        self.faults, self.healthy, self.well, self.odd = list(faults), healthy, False, 0
        self.victims: dict[str, Reply] = {}
        self.paid: Counter[str] = Counter()

    def __call__(self, body: dict) -> Reply:
        question = body["prompt"]
        if question not in self.victims and len(self.paid) >= self.healthy and len(self.victims) < len(self.faults):
            self.victims[question] = self.faults[len(self.victims)]
        if question in self.victims and not self.well:
            self.odd += 1
            fault = self.victims[question]
            return Reply(fault.body, fault.status, SOON | fault.headers, fault.wait, fault.raw)
        self.paid[question] += 1
        return good(body)


def begin(forks: Forks, endpoint: Endpoint, folder: Path, *more: object, questions: int = QUESTIONS) -> Call:
    folder.mkdir(exist_ok=True)
    arguments = ["--model", "m", "--base-url", endpoint.url, "--dataset", f"arithmetic:{questions}", *more]
    return forks.start("eval", *arguments, "--run", "r", cwd=folder)


def rows(folder: Path) -> int:
    keys = read_rollouts(folder / "runs/r").select(["example_id", "sample_index"]).to_pylist()
    assert len({tuple(key.values()) for key in keys}) == len(keys)
    return len(keys)


def complain(done: Done, stub: Stub, folder: Path, *, status: int, stored: int) -> Iterator[str]:
    """Yield what is wrong with how a call has ended."""
    if done.hung:
        yield "hung"
    if "Traceback" in done.said:
        yield done.said[-500:]
    if done.status != status:
        yield f"status {done.status}: {done.said[-300:]}"
    if (found := rows(folder)) != stored:
        yield f"{found} rows of {stored}"
    if stub.paid.total() != stored or set(stub.paid.values()) - {1}:
        yield f"paid for {stub.paid.total()} answers, for one {max(stub.paid.values())} times, with {stored} rows"
    if left := processes_in(folder):
        yield f"left behind: {left}"


def try_faults(forks: Forks, root: Path, faults: Sequence[tuple[str, Reply, bool]]) -> tuple[dict[str, list[str]], int]:
    """Let each (name, fault, costs the sample) befall a call, `AT_ONCE` calls at a time; what is wrong, and rows stored."""
    wrong: dict[str, list[str]] = {}
    stored = 0
    for first in range(0, len(faults), AT_ONCE):
        with ExitStack() as stack:
            under_way = []
            for number, (name, fault, costly) in enumerate(faults[first : first + AT_ONCE], start=first):
                stub = Stub(fault, healthy=number % 5)  # the first sample of all is requested alone
                endpoint = stack.enter_context(serving(stub))
                call = begin(forks, endpoint, root / str(number), "--request-timeout", "20")
                under_way.append((name, costly, stub, root / str(number), call))
            for name, costly, stub, folder, call in under_way:
                done = forks.wait(call)
                if not costly:
                    stub.paid.update(list(stub.victims))
                problems = list(complain(done, stub, folder, status=int(costly), stored=QUESTIONS - costly))
                if not stub.odd:
                    problems.append("the fault did not happen")
                if costly and not re.search(r"1 of \d+ samples failed at 127", done.err):
                    problems.append(f"no word of the failed sample: {done.err[-300:]}")
                wrong[name] = problems
                stub.well = True
            again = [forks.start("eval", "--resume", "r", cwd=case[3]) for case in under_way]
            for (name, _, stub, folder, _), call in zip(under_way, again, strict=True):
                wrong[name] += complain(forks.wait(call), stub, folder, status=0, stored=QUESTIONS)
                stored += rows(folder)
    return {name: problems for name, problems in wrong.items() if problems}, stored


def test_odd_answers_cost_their_own_rows_and_nothing_else(forks: Forks, tmp_path: Path):
    stub = Stub(*(ODD[name] for name in QUICK), healthy=2)
    with serving(stub) as endpoint:
        done = forks.wait(begin(forks, endpoint, tmp_path, questions=2 * QUESTIONS))
        assert list(complain(done, stub, tmp_path, status=1, stored=2 * QUESTIONS - len(QUICK))) == []
        assert f"{len(QUICK)} of {2 * QUESTIONS} samples failed at 127" in done.err
        assert len(stub.victims) == len(QUICK)
        stub.well = True
        done = forks.run("eval", "--resume", "r", cwd=tmp_path)
        assert list(complain(done, stub, tmp_path, status=0, stored=2 * QUESTIONS)) == []


@pytest.mark.full
def test_every_fault_of_an_endpoint(forks: Forks, tmp_path: Path, figures: dict):
    faults = [(name, ODD[name], True) for name in ODD] + [(f"kept {name}", KEPT[name], False) for name in KEPT]
    wrong, stored = try_faults(forks, tmp_path, faults)
    assert not wrong
    figures |= {
        "endpoint faults": len(faults),
        "tracebacks": 0,
        "answers lost": len(faults) * QUESTIONS - stored,
        "answers paid for twice": 0,
    }


@pytest.mark.parametrize("status", [401, *(pytest.param(n, marks=pytest.mark.full) for n in (403, 404))])
def test_a_refusal_that_concerns_all_ends_the_run_with_what_was_answered(forks: Forks, tmp_path: Path, status: int):
    stub = Stub(Reply({"error": {"message": "not you"}}, status), healthy=3)
    unseeded = {"seeding": "none", "notes": ["The endpoint does not take seed: its samples cannot be reproduced."]}
    with serving(lambda body: stub(body) if stub.well else without_seed(stub, body)) as endpoint:
        done = forks.wait(begin(forks, endpoint, tmp_path))
        assert list(complain(done, stub, tmp_path, status=1, stored=stub.paid.total())) == []
        assert "not you" in done.err
        assert read_run(tmp_path / "runs/r").metadata["sampler"].items() >= unseeded.items()
        stub.well = True
        done = forks.run("eval", "--resume", "r", cwd=tmp_path)
        assert list(complain(done, stub, tmp_path, status=0, stored=QUESTIONS)) == []
        assert read_run(tmp_path / "runs/r").metadata["sampler"].items() >= unseeded.items(), "the earlier rows stay so"


# One signal ends a call, whatever the endpoint does.

ENDLESS: dict[str, Reply] = {
    "hang": Reply(wait=3600),
    "slow-drip": Reply(json.dumps(good({}).body), drip=5.0),
    "slow-headers": Reply(raw=b"HTTP/1.1 200 OK\r\n", wait=3600),
    "busy": Reply("busy", 503, {"retry-after": "50"}),
    "big": Reply(b"[" + b" " * 50_000_000, drip=0.0),
}
WITHIN = 60.0  # seconds from a signal to the end, on a loaded machine; the figures say how long it was


def await_requests(forks: Forks, call: Call, endpoint: Endpoint, *, more_than: int) -> None:
    deadline = time.monotonic() + 30
    while len(endpoint.bodies) <= more_than and forks.status(call) is None and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)


def stopped_by(
    forks: Forks, root: Path, fault: Reply, *, number: signal.Signals, healthy: int
) -> tuple[list[str], float]:
    """Start a call whose endpoint gives some good answers, and then the fault for good; stop it by one signal."""
    root.mkdir(exist_ok=True)
    asked: set[str] = set()

    def answer(body: dict) -> Reply:
        if len(asked) < healthy:
            asked.add(body["prompt"])
            return good(body)
        return Reply(fault.body, fault.status, fault.headers, fault.wait, fault.raw, fault.drip)

    with serving(answer) as endpoint:
        call = begin(forks, endpoint, root, "--request-timeout", "3000")
        await_requests(forks, call, endpoint, more_than=healthy)
        sent = time.monotonic()
        forks.send(call, number)
        done = forks.wait(call, limit=30)
        seconds = time.monotonic() - sent
        problems = [] if done.status == 130 else [f"status {done.status}: {done.said[-500:]}"]
        problems += [f"{seconds:.1f} s"] * (seconds > WITHIN) + ["Traceback"] * ("Traceback" in done.said)
        problems += [] if "resume with: rlvr eval --resume" in done.err else ["no word of how to go on"]
        if read_run(root / "runs/r").metadata["status"] != "interrupted":
            problems.append("status of the run")
        if rows(root) != healthy:
            problems.append(f"{rows(root)} rows of {healthy}")
        problems += [f"left behind: {left}"] if (left := processes_in(root)) else []
    return problems, seconds


def test_one_signal_ends_a_wait_for_an_endpoint(forks: Forks, tmp_path: Path):
    problems, _ = stopped_by(forks, tmp_path, ENDLESS["hang"], number=signal.SIGTERM, healthy=4)
    assert not problems


def test_one_signal_ends_a_wait_for_a_teachers_server(forks: Forks, tmp_path: Path):
    command = (
        "distill --divergence sampled --dataset arithmetic:4 --rollout-batch-size 4 --group-size 1 --sampling-max-tokens 4 "
        "--n-distill-steps 1 --eval-every 0 --eval-examples 1 --run r"
    ).split()
    models = Reply({"data": [{"id": "t"}]})
    with serving(lambda body: Reply(wait=3600) if body else models, lists=True) as endpoint:
        url, teacher = endpoint.url.removesuffix("/v1"), builtin_model_path()
        call = forks.start(*command, "--teacher", teacher, "--teacher-url", url, cwd=tmp_path)
        await_requests(forks, call, endpoint, more_than=1)
        forks.send(call, signal.SIGINT)
        done = forks.wait(call, limit=10)
    assert (done.status, done.hung) == (130, False), done.said
    assert "resume with: rlvr distill --resume" in done.err


@pytest.mark.full
@pytest.mark.parametrize("healthy", [0, 5])
def test_one_signal_ends_every_wait_for_an_endpoint(forks: Forks, tmp_path: Path, figures: dict, healthy: int):
    wrong, longest = {}, 0.0
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
    bomb = Reply(gzip.compress(b" " * 200_000_000, 1), headers={"content-encoding": "gzip"})
    faults = {**ENDLESS, "gzip-bomb": bomb}  # made here: every worker imports this file
    for name, fault in faults.items():
        for number in numbers:
            problems, seconds = stopped_by(forks, tmp_path / f"{name}-{number}", fault, number=number, healthy=healthy)
            wrong |= {f"{name} {number.name}": problems} if problems else {}
            longest = max(longest, seconds)
    assert not wrong
    figures |= {
        f"signals to a waiting call ({healthy} answers stored)": len(faults) * len(numbers),
        "longest time to the end, s": round(longest, 1),
    }


def test_so_many_requests_are_under_way_at_a_time_as_were_asked_for(forks: Forks, tmp_path: Path):
    with serving(lambda body: Reply(good(body).body, wait=0.1)) as endpoint:
        forks.wait(begin(forks, endpoint, tmp_path, "--endpoint-concurrency", "2", questions=12))
        assert endpoint.most_under_way == 2


def test_a_sample_that_hangs_ends_at_the_request_timeout(forks: Forks, tmp_path: Path):
    stub = Stub(Reply(wait=3600), healthy=3)
    with serving(stub) as endpoint:
        done = forks.wait(begin(forks, endpoint, tmp_path, "--request-timeout", "0.5"))
        assert list(complain(done, stub, tmp_path, status=1, stored=QUESTIONS - 1)) == []
    assert "no answer within 0.5 s" in done.err


# An engine in a process of its own


@pytest.mark.full
def test_an_engine_process_killed_at_10_points(forks: Forks, tmp_path: Path, figures: dict):
    """The run ends with a message; what was stored stays, and going on gives the same rows and weights."""
    command = (
        "grpo --dataset arithmetic:64 --n-grpo-steps 5 --rollout-batch-size 16 --group-size 4 --train-batch-size 16 "
        "--gradient-accumulation-steps 2 --sampling-max-tokens 24 --learning-rate 2e-4 --eval-examples 8 "
        "--checkpoint-every 2 --async-steps 1"
    ).split()
    ended = lambda folder: (  # noqa: E731
        (folder / "runs/r/model/model.safetensors").read_bytes(),
        sorted(
            read_rollouts(folder / "runs/r", phase="train").drop_columns(["run_id", "sampled_at"]).to_pylist(), key=str
        ),
    )
    whole = tmp_path / "whole"
    whole.mkdir()
    done = forks.run(*command, "--run", "r", cwd=whole, limit=300)
    assert done.status == 0, done.err
    killed = 0
    for number in range(10):
        folder = tmp_path / str(number)
        folder.mkdir()
        call = forks.start(*command, "--run", "r", cwd=folder)
        wait = done.seconds * (number + 0.5) / 10.5
        time.sleep(wait)
        engines = [pid for pid, line in processes_in(folder).items() if "parallel.serve" in line]
        for pid in engines:
            os.kill(pid, signal.SIGKILL)
        cut = forks.wait(call, limit=300)
        killed += bool(engines)
        assert "Traceback" not in cut.err
        assert cut.status in (0, 1), cut.err
        if cut.status:
            assert "The sampling process ended with status -9" in cut.err or not engines
            assert forks.run("grpo", "--resume", "r", cwd=folder, limit=300).status == 0
        assert ended(folder) == ended(whole), number
        assert processes_in(folder) == {}
    assert killed >= 8
    figures |= {"engine processes killed": killed, "rows lost or doubled": 0, "runs with other weights": 0}
