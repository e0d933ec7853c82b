"""Grade many answers by a judge that takes 50 ms for each, 64 at a time, and compare with the floor of perfect concurrency.

    python benchmarks/judge.py [--answers 10000] [--milliseconds 50] [--concurrency 64]

The judge is a stub in a process of its own. Prints the seconds, the floor (answers / concurrency * milliseconds), their ratio (the
goal is at most 1.2) and the CPU milliseconds of this process for each answer, which are the limit on a busy machine.
"""

import argparse
import asyncio
import json
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

from rlvr_cli.config.eval import EvalConfig
from rlvr_cli.judges.pool import JudgePool


def serve(ready: Any, seconds: float) -> None:
    """Answer every request after these seconds, over connections that stay open."""
    choice = {"index": 0, "message": {"role": "assistant", "content": "Good.\n8"}, "finish_reason": "stop"}
    body = json.dumps({"choices": [choice], "usage": {"prompt_tokens": 50, "completion_tokens": 3}}).encode()
    reply = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
            await asyncio.sleep(seconds)
            writer.write(reply)

    async def main() -> None:
        server = await asyncio.start_server(answer, "127.0.0.1", 0, backlog=512)
        ready.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(main())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=10_000)
    parser.add_argument("--milliseconds", type=float, default=50.0)
    parser.add_argument("--concurrency", type=int, default=64)
    asked = parser.parse_args()
    ready = multiprocessing.Queue()
    stub = multiprocessing.Process(target=serve, args=(ready, asked.milliseconds / 1000), daemon=True)
    stub.start()
    with tempfile.TemporaryDirectory() as folder:
        rubric = Path(folder) / "rubric.md"
        rubric.write_text("scale: 1-10\nGrade this answer: {response}\n", encoding="utf-8")
        options = EvalConfig(
            grader=f"judge:{rubric}",
            judge_url=f"http://127.0.0.1:{ready.get()}/v1",
            judge_model="stub",
            judge_concurrency=asked.concurrency,
        )
        with JudgePool(options.grader, options) as pool:
            pool.grade([("warm", "")])
            started, used = time.monotonic(), time.process_time()
            grades = pool.grade([(f"answer {i}", "") for i in range(asked.answers)])
            seconds, cpu = time.monotonic() - started, time.process_time() - used
    stub.terminate()
    assert all(grade.reward is not None for grade in grades)
    floor = asked.answers / asked.concurrency * asked.milliseconds / 1000
    print(f"{asked.answers:,} answers: {seconds:.2f} s, floor {floor:.2f} s, ratio {seconds / floor:.2f} (goal 1.2)")
    print(f"CPU of the client: {1000 * cpu / asked.answers:.2f} ms an answer")


if __name__ == "__main__":
    main()
