"""A worker's host on a node of a cluster, without a cluster: it ends with the command that asked for it, and its worker with it."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import working
from living import alive
from rlvr_cli.parallel.host import handed_on

HOST = """
import json, sys, time
from rlvr_cli.parallel.host import Host
started = {"name": "worker", "entry": "working:answer", "arguments": {"greeting": "hello"}, "title": "It", "hint": ""}
host = Host(folder=".", variables={}, weights=False, started=started, command=("127.0.0.1", int(sys.argv[1])))
print(json.dumps([json.loads(message) for message in host.receive()] + [host.pid()]), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("begun", [True, False])
def test_it_ends_with_the_command_and_so_does_its_worker(begun: bool):
    """Also when the command has ended before the host could reach it."""
    with socket.create_server(("127.0.0.1", 0)) as command:
        port = command.getsockname()[1]
        if not begun:
            command.close()
        path = os.pathsep.join((str(Path(working.__file__).parent), *sys.path))
        host = subprocess.Popen(
            [sys.executable, "-c", HOST, str(port)],
            stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
        )  # fmt: skip
        try:
            assert host.stdout is not None
            if begun:
                (greeting, by), pid = json.loads(host.stdout.readline())
                assert (greeting, by) == ("hello", pid)
                time.sleep(0.2)
                assert host.poll() is None
                assert alive(pid)
                command.close()
            assert host.wait(timeout=60) == 1
            assert not begun or not alive(pid)
            host.stdout.close()
        finally:
            host.kill()
            host.wait()


def test_a_worker_on_another_node_has_the_variables_of_the_command_that_do_not_name_its_node():
    kept = [
        "PYTHONPATH", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "PYTORCH_CUDA_ALLOC_CONF", "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "VLLM_ATTENTION_BACKEND", "MALLOC_ARENA_MAX",
    ]  # fmt: skip
    of_the_node = ["PATH", "HOME", "CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", "VLLM_PORT"]
    assert [*handed_on(dict.fromkeys(of_the_node + kept, "1"))] == kept
