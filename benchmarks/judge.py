"""Grade many answers by a judge that takes 50 ms for each, 64 at a time, and compare with the floor of perfect concurrency.

    python benchmarks/judge.py [--answers 10000] [--milliseconds 50] [--concurrency 64]

The judge is a stub in a process of its own. Prints, in turns, how long it takes over bare connections, which is what machine and stub
allow, and with rlvr: the seconds, their ratio to the floor (answers / concurrency * milliseconds; the goal is at most 1.2), the CPU
milliseconds of this process for each answer, and the seconds that this process waited for a core that others were using (Linux).
"""

import argparse
import asyncio
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.judges.pool import JudgePool

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: stub\r\ncontent-length: %d\r\n\r\n"


def serve(ready: Any, seconds: float) -> None:
    """Answer every request after these seconds, over connections that stay open."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "Good.\n8"}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 3}}).encode()
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):  # the client has gone
            while True:
                await read_message(reader)
                await asyncio.sleep(seconds)
                writer.write(reply)
        writer.close()

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=512)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


async def read_message(reader: asyncio.StreamReader) -> bytes:
    """The body of an HTTP message that says its length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
    return await reader.readexactly(int(length.partition(b":")[2]))


async def ask_bare(port: int, answers: int, concurrency: int) -> None:
    """Ask without a library, over as many connections as are asked at a time."""
    left = iter(range(answers))

    async def work() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for i in left:
            body = json.dumps({"messages": [{"role": "user", "content": f"answer {i}"}]}).encode()
            writer.write(HEAD % len(body) + body)
            json.loads(await read_message(reader))
        writer.close()

    await asyncio.gather(*(work() for _ in range(concurrency)))


def waited() -> float:
    """Seconds that the threads of this process have waited for a core."""
    found = Path("/proc/self/task").glob("*/schedstat")
    return sum(int(path.read_text().split()[1]) for path in found) / 1e9


def report(what: str, work: Callable[[], Any], *, answers: int, floor: float) -> None:
    begun, used, idle = time.monotonic(), time.process_time(), waited()
    work()
    seconds, cpu, idle = time.monotonic() - begun, time.process_time() - used, waited() - idle
    print(
        f"{what}: {answers:,} answers in {seconds:.2f} s, {seconds / floor:.2f} of the floor of {floor:.2f} s; "
        f"{1000 * cpu / answers:.2f} ms of CPU an answer; {idle:.1f} s without a core"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    asked = parser.parse_args()
    ready = multiprocessing.Queue()
    stub = multiprocessing.Process(target=serve, args=(ready, asked.milliseconds / 1000), daemon=True)
    stub.start()
    port, floor = ready.get(), asked.answers / asked.concurrency * asked.milliseconds / 1000
    print(f"goal 1.2; load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")

    def grade(pool: JudgePool, turn: int) -> None:
        grades = pool.grade([(f"answer {turn} {i}", "") for i in range(asked.answers)])
        assert all(grade.reward is not None for grade in grades)

    with tempfile.TemporaryDirectory() as folder:
        rubric = Path(folder) / "rubric.md"
        rubric.write_text("scale: 1-10\nGrade this answer: {response}\n", encoding="utf-8")
        options = EvalConfig(
            grader=f"judge:{rubric}",
            judge_url=f"http://127.0.0.1:{port}/v1",
            judge_model="stub",
            judge_concurrency=asked.concurrency,
        )
        how = {"answers": asked.answers, "floor": floor}
        with JudgePool(options.grader, options) as pool:
            pool.grade([("warm", "")])
            for turn in range(asked.turns):
                report("bare", lambda: asyncio.run(ask_bare(port, asked.answers, asked.concurrency)), **how)
                report("rlvr", lambda turn=turn: grade(pool, turn), **how)
    stub.terminate()


if __name__ == "__main__":
    main()
