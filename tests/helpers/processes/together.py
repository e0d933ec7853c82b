"""Several ranks for tests: each is a process that keeps on calling what it is told to, with its `Ranks`.

`with Together(2) as together: together.call(function, ...)` returns what `function(ranks, ...)` returns on each rank. The
function must be importable. Run as a program this file is a rank.
"""

import importlib
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

import torch

from rlvr_cli.process import die_with_parent
from rlvr_cli.training.parallel.ranks import connect, join, listen


class Together:
    def __init__(self, size: int) -> None:
        self.size = size

    def __enter__(self) -> "Together":
        roots = [str(Path(__file__).parents[3]), *sys.path]
        listener = Listener(("127.0.0.1", 0), authkey=b"ranks")
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, roots)), "OMP_NUM_THREADS": "1"}
        port = str(listener.address[1])
        self._processes = [
            subprocess.Popen([sys.executable, "-m", "together", port, str(os.getpid())], env=environment)
            for _ in range(self.size)
        ]
        self._connections = [listener.accept() for _ in self._processes]
        listener.close()
        self._connections[0].send((0, self.size, ""))
        address = self._connections[0].recv()
        for rank, connection in enumerate(self._connections[1:], start=1):
            connection.send((rank, self.size, address))
        return self

    def call(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call `function(ranks, *arguments)` on every rank at the same time."""
        for connection in self._connections:
            connection.send_bytes(pickle.dumps((function.__module__, function.__name__, arguments)))
        answers = [pickle.loads(connection.recv_bytes()) for connection in self._connections]
        for worked, answer in answers:
            assert worked, answer
        return [answer for _, answer in answers]

    def __exit__(self, *_: object) -> None:
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.close()
            process.kill()
            process.wait()


def main(port: int, parent: int) -> None:
    die_with_parent(parent)
    torch.set_num_threads(1)
    connection = Client(("127.0.0.1", port), authkey=b"ranks")
    rank, size, address = connection.recv()
    if rank == 0:
        store, address = listen()
        connection.send(address)
    else:
        store = connect(address)
    ranks = join(store, rank=rank, size=size, device=torch.device("cpu"), loopback=True)
    while True:
        try:
            module, name, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            answer = True, getattr(importlib.import_module(module), name)(ranks, *arguments)
        except Exception:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
