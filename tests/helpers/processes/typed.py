"""`rlvr` as a shell finds it, without seconds of imports: what is typed is forked by `forks.Forks`.

Enters: a folder that is to be in PATH. Leaves: the executable `rlvr` in it, whose calls have the streams, folder and environment of the
shell, and its exit status.
"""

import json
import os
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CLIENT = """#!{python} -SE
import json, os, socket, sys
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
    server.connect("\\0{place}")
    call = json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode()
    socket.send_fds(server, [call], [0, 1, 2])
    status = int(server.recv(64))
sys.exit(status if status >= 0 else 128 - status)
"""


@contextmanager
def typed(popen: type[subprocess.Popen], folder: Path) -> Iterator[None]:
    """Answer the calls of `folder/rlvr`.

    Args:
        popen: `Forks.popen`.
    """
    place = f"rlvr-{uuid.uuid4()}"
    script = folder / "rlvr"
    script.write_text(CLIENT.format(python=sys.executable, place=place))
    script.chmod(0o755)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(f"\0{place}")
        server.listen()
        accepting = threading.Thread(target=_accept, args=(server, popen))
        accepting.start()
        try:
            yield
        finally:
            server.shutdown(socket.SHUT_RDWR)  # wakes the thread
            accepting.join()


def _accept(server: socket.socket, popen: type[subprocess.Popen]) -> None:
    while True:
        try:
            shell, _ = server.accept()
        except OSError:
            return
        threading.Thread(target=_run, args=(shell, popen), daemon=True).start()


def _run(shell: socket.socket, popen: type[subprocess.Popen]) -> None:
    with shell:
        text, streams, _, _ = socket.recv_fds(shell, 1 << 20, 3)
        arguments, cwd, environment = json.loads(text)
        process = popen(
            [sys.executable, "-m", "rlvr_cli", *arguments],
            cwd=cwd, env=environment, stdin=streams[0], stdout=streams[1], stderr=streams[2],
        )  # fmt: skip
        for stream in streams:
            os.close(stream)
        shell.send(str(process.wait()).encode())
