"""Programs that try to leave the sandbox, to stop or deceive the verifier, or to outlive their run.

A program that gets what it wants says so: its points are the text ESCAPED. `{folder}` is a directory with a file `secret.txt`, `{parent}` the
process that runs the sandbox, `{port}` a port on this machine that somebody listens on.
"""

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest

HARMLESS = {"no_points", "bad_points", "exception"}
LATE = {"timeout", "cpu"}

# Does the lines of ATTEMPT; the answer says whether they raised.
ATTEMPT = """
try:
{attempt}
    points = "ESCAPED"
except (OSError, ValueError) as error:
    points = str(error)
"""


def attempt(lines: str) -> str:
    return ATTEMPT.replace("{attempt}", "\n".join(f"    {line}" for line in dedent(lines).strip().splitlines()))


def libc(call: str) -> str:
    """A system call by ctypes, which is an escape if it does not fail."""
    return f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
points = "ESCAPED" if {call} != -1 else "errno " + str(ctypes.get_errno())
"""


PROGRAMS: dict[str, tuple[str, set[str]]] = {
    # that do not end
    "loop": ("while True: pass", LATE),
    "sleep": ("import time; time.sleep(3600)", LATE),
    "ignores all signals": (
        "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile True: pass",
        LATE,
    ),
    "blocks all signals": (
        "import signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, range(1, 65))\ntime.sleep(3600)",
        LATE,
    ),
    "catches everything": ("while True:\n    try:\n        while True: pass\n    except BaseException: pass", LATE),
    "regular expression": ("import re; re.match('(a+)+b', 'a' * 64)", LATE),
    "big power": ("points = 3 ** (10 ** 9)", LATE | {"memory"}),
    "endless at the end": ("import atexit, time\natexit.register(time.sleep, 3600)\npoints = []", {"bad_points"}),
    "endless thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(3600,)).start()\npoints = []",
        {"bad_points"},
    ),
    "closes its pipes and sleeps": ("import os, time\nos.closerange(1, 250)\ntime.sleep(3600)", LATE | {"no_points"}),
    "stops itself": ("import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", LATE),
    # that take too much
    "memory": ("x = bytearray(1 << 40)", {"memory"}),
    "memory by and by": ("x = []\nwhile True: x.append(bytearray(1 << 20))", {"memory"}),
    "memory in small objects": ("x = []\nwhile True: x.append([x])", {"memory", *LATE}),
    "memory of a big int": ("x = 1 << (1 << 40)", {"memory", "exception"}),
    "memory by mmap": ("import mmap\npoints = [mmap.mmap(-1, 1 << 30) for _ in range(64)]", {"memory", "exception"}),
    "output flood": ("while True: print('x' * 1_000_000)", {"output_too_large", *LATE}),
    "answer flood": (
        "import os\nfor fd in range(3, 250):\n    try:\n        while True: os.write(fd, b'1' * 65536)\n    except OSError: pass",
        {"output_too_large", "no_points"},
    ),
    "threads": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()",
        {"exception", "memory", *LATE},
    ),
    "open files": ("import os\nwhile True: os.dup(0)", {"exception"}),
    "many points": ("points = [[i] * 11 for i in range(300_000)]", {"output_too_large"}),
    "recursion": ("def f(): return f()\nf()", {"exception"}),
    "recursion without a limit": (
        "import sys\nsys.setrecursionlimit(1 << 30)\ndef f(x): return f([x])\nf(0)",
        {"exception", "memory", *LATE},
    ),
    "nested": ("points = []\nfor _ in range(100_000): points = [points]", {"bad_points"}),
    "endless generator": ("import itertools\npoints = itertools.count()", {"bad_points"}),
    "circular": ("points = []\npoints.append(points)", {"bad_points"}),
    # that start something
    "fork": ("import os\nif os.fork() == 0: os.setsid()\npoints = 'ESCAPED'", {"exception"}),
    "fork bomb": ("import os\nwhile True: os.fork()", {"exception"}),
    "vfork": (libc("libc.vfork()"), {"bad_points"}),
    "clone3": (libc("libc.syscall(435, ctypes.create_string_buffer(88), 88)"), {"bad_points"}),
    "subprocess": ("import subprocess\nsubprocess.Popen(['sleep', '3600'])\npoints = 'ESCAPED'", {"exception"}),
    "system": ("import os\npoints = 'ESCAPED' if os.system('true') == 0 else []", {"bad_points"}),
    "exec": ("import os\nos.execv('/bin/sh', ['sh', '-c', 'sleep 3600'])", {"exception"}),
    "multiprocessing": (
        "import multiprocessing, time\nmultiprocessing.Process(target=time.sleep, args=(3600,)).start()\npoints = 'ESCAPED'",
        {"exception", "no_points"},
    ),
    "session of its own": (attempt("import os\nos.setsid()"), {"bad_points"}),
    "group of its own": (attempt("import os\nos.setpgid(0, 0)"), {"bad_points"}),
    "outlives its parent": (libc("libc.prctl(1, 0, 0, 0, 0)"), {"bad_points"}),
    "other user": (attempt("import os\nos.setuid(1)"), {"bad_points"}),
    "more memory": (
        attempt("import resource\nresource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)"),
        {"bad_points"},
    ),
    "new namespace": (libc("libc.unshare(0x10000000)"), {"bad_points"}),
    "io_uring": (libc("libc.syscall(425, 8, ctypes.create_string_buffer(120))"), {"bad_points"}),
    "call of another architecture": (libc("libc.syscall(0x40000000 + 39)"), {"bad_points"}),
    # that write
    "write to a file": (attempt("open('{folder}/new.txt', 'w').write('x')"), {"bad_points"}),
    "write over a file": (attempt("open('{folder}/secret.txt', 'r+').write('x')"), {"bad_points"}),
    "write where it is": (attempt("open('new.txt', 'w').write('x')"), {"bad_points"}),
    "write to /tmp": (attempt("open('/tmp/rlvr-escaped', 'w').write('x')"), {"bad_points"}),
    "write beside the libraries": (
        attempt("import json, os\nopen(os.path.dirname(json.__file__) + '/escaped.py', 'w').write('x')"),
        {"bad_points"},
    ),
    "temporary file": ("import tempfile\ntempfile.NamedTemporaryFile()\npoints = 'ESCAPED'", {"exception"}),
    "file without a name": (attempt("import os\nos.open('{folder}', os.O_TMPFILE | os.O_RDWR)"), {"bad_points"}),
    "many files": (attempt("for i in range(10_000): open(f'{folder}/{i}', 'w')"), {"bad_points"}),
    "directory": (attempt("import os\nos.mkdir('{folder}/new')"), {"bad_points"}),
    "delete": (attempt("import os\nos.unlink('{folder}/secret.txt')"), {"bad_points"}),
    "rename": (attempt("import os\nos.rename('{folder}/secret.txt', '{folder}/new.txt')"), {"bad_points"}),
    "symbolic link": (attempt("import os\nos.symlink('/etc/passwd', '{folder}/new')"), {"bad_points"}),
    "hard link": (attempt("import os\nos.link('{folder}/secret.txt', '{folder}/new')"), {"bad_points"}),
    "truncate": (attempt("import os\nos.truncate('{folder}/secret.txt', 0)"), {"bad_points"}),
    "mode": (attempt("import os\nos.chmod('{folder}/secret.txt', 0)"), {"bad_points"}),
    "mode by a new call": (libc("libc.syscall(452, -100, b'{folder}/secret.txt', 0, 0)"), {"bad_points"}),
    "owner": (attempt("import os\nos.chown('{folder}/secret.txt', 1, 1)"), {"bad_points"}),
    "times": (attempt("import os\nos.utime('{folder}/secret.txt', (1, 1))"), {"bad_points"}),
    "attribute": (attempt("import os\nos.setxattr('{folder}/secret.txt', 'user.x', b'x')"), {"bad_points"}),
    "shared memory": (
        attempt("from multiprocessing.shared_memory import SharedMemory\nSharedMemory('rlvr-escaped', create=True, size=9)"),
        {"bad_points"},
    ),
    "system V memory": (libc("libc.shmget(0x5EC4E7, 4096, 0o1600)"), {"bad_points"}),
    "file in memory": (attempt("import os\nos.memfd_create('x')"), {"bad_points"}),
    # that read or speak
    "read a secret": (attempt("open('{folder}/secret.txt').read()"), {"bad_points"}),
    "read passwords": (attempt("open('/etc/passwd').read()"), {"bad_points"}),
    "list a directory": (attempt("import os\nos.listdir('{folder}')"), {"bad_points"}),
    "read another's environment": (attempt("open('/proc/{parent}/environ', 'rb').read()"), {"bad_points"}),
    "read another's memory": (attempt("open('/proc/{parent}/mem', 'rb')"), {"bad_points"}),
    "read its environment": (
        "import os\npoints = 'ESCAPED' if any('CANARY' in k + v for k, v in os.environ.items()) else []",
        {"bad_points"},
    ),
    "read another's memory by a call": (
        libc("libc.process_vm_readv({parent}, ctypes.create_string_buffer(16), 1, ctypes.create_string_buffer(16), 1, 0)"),
        {"bad_points"},
    ),
    "trace another": (libc("libc.ptrace(16, {parent}, 0, 0)"), {"bad_points"}),
    "connect": (
        attempt("import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)"),
        {"bad_points", "exception"},
    ),
    "datagram": (
        attempt("import socket\nsocket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', {port}))"),
        {"bad_points"},
    ),
    "local socket": (attempt("import socket\nsocket.socket(socket.AF_UNIX)"), {"bad_points"}),
    # It could send to any datagram socket that has a path, such as that of the system's log.
    "name of a socket": (attempt("import socket\na, b = socket.socketpair()\na.bind('\\0rlvr-taken')"), {"bad_points"}),
    "pair of datagrams": (attempt("import socket\nsocket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)"), {"bad_points"}),
    "raw terminal": (attempt("open('/dev/tty', 'w')"), {"bad_points"}),
    # that harm others
    "kill the parent": (attempt("import os\nos.kill({parent}, 9)"), {"bad_points"}),
    "stop the parent": (attempt("import os\nos.kill({parent}, 19)"), {"bad_points"}),
    "kill all": (attempt("import os\nos.kill(-1, 9)"), {"bad_points"}),
    "kill by thread": (libc("libc.syscall(200, {parent}, 9)"), {"bad_points"}),
    "signal of a pipe": (attempt("import fcntl, os\nfcntl.fcntl(os.pipe()[0], 8, {parent})"), {"bad_points"}),  # F_SETOWN
    "signal of a socket": (  # FIOSETOWN
        attempt("import fcntl, socket, struct\na, b = socket.socketpair()\nfcntl.ioctl(a, 0x8901, struct.pack('i', {parent}))"),
        {"bad_points"},
    ),
    "lease": (attempt("import fcntl, json\nfcntl.fcntl(open(json.__file__), 1024, 0)"), {"bad_points"}),
    "system V memory of others": (libc("libc.shmctl(0, 3, ctypes.create_string_buffer(256))"), {"bad_points"}),
    "system V queues of others": (libc("libc.msgctl(0, 3, ctypes.create_string_buffer(256))"), {"bad_points"}),
    "system V semaphores of others": (libc("libc.semctl(0, 0, 3, ctypes.create_string_buffer(256))"), {"bad_points"}),
    "signal in a queue": (libc("libc.sigqueue({parent}, 9, 0)"), {"bad_points"}),
    "priority": (attempt("import os\nos.nice(-5)"), {"bad_points"}),
    "clock": (attempt("import time\ntime.clock_settime(time.CLOCK_REALTIME, 1)"), {"bad_points"}),
    "host's name": (attempt("import socket\nsocket.sethostname('escaped')"), {"bad_points"}),
    "root directory": (attempt("import os\nos.chroot('{folder}')"), {"bad_points"}),
    # that end early, or say what is not so
    "exit": ("import sys\npoints = [[2] * 11, [-2] * 11]\nsys.exit(0)", {"no_points"}),
    "hard exit": ("import os\npoints = [[2] * 11, [-2] * 11]\nos._exit(0)", {"no_points"}),
    "segmentation fault": ("import ctypes\nctypes.string_at(0)", {"exception"}),
    "abort": ("import os\nos.abort()", {"exception"}),
    "odd signal": ("import os\nos.kill(os.getpid(), 40)", {"exception"}),
    "replaces json": ("import json\njson.dumps = lambda *a, **k: '[[1]]'\npoints = [[0] * 11] * 2", {"invalid_condition"}),
    "replaces the exit": (
        "import os, sys\nos._exit = lambda status: None\nsys.stdout = None\npoints = [[0] * 11] * 2",
        {"invalid_condition"},
    ),
    "answers itself": (
        "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b'{{\"status\": \"valid\", \"num_points\": 9999}}\\n')\n"
        "    except OSError: pass",
        {"bad_points"},
    ),
    "answers with a category": (
        "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, b'{{\"status\": \"timeout\", \"message\": \"x\"}}\\n')\n"
        "    except OSError: pass",
        {"bad_points"},
    ),
    "answers with bytes": (
        "import os\nfor fd in range(3, 1024):\n    try: os.write(fd, bytes(range(256)) + b'\\n')\n    except OSError: pass",
        {"bad_points"},
    ),
    "a text that raises": (
        "class E(Exception):\n    def __str__(self): raise self\nraise E",
        {"exception"},
    ),
    "a long text": ("raise ValueError('x' * 10_000_000)", {"exception"}),
    "surrogates": ("print('out')\nraise ValueError('\\ud800' * 3000 + chr(0))", {"exception"}),
    "no Python": ("points = [", {"exception"}),
    "a NUL": ("points = 1\0", {"exception"}),
    # whose points are none
    "nan": ("points = [[float('nan')] * 11] * 2", {"bad_points"}),
    "infinity": ("points = [[float('inf')] * 11] * 2", {"bad_points"}),
    "floats": ("points = [[1.0] * 11, [-1.0] * 11]", {"bad_points"}),
    "bools": ("points = [[True] + [False] * 10, [False, True] + [False] * 9]", {"bad_points"}),
    "equal": ("points = [[2] * 11] * 2", {"invalid_condition"}),
    "zero": ("points = [[2] * 11, [0] * 11]", {"invalid_condition"}),
    "huge ints": ("points = [[1 << 4000] * 11, [-1 << 4000] * 11]", {"bad_points"}),
    "ints of many digits": ("points = [[1 << 40_000] * 11, [2] * 11]", {"bad_points"}),
    "overflow": (
        "import itertools\npoints = []\nfor t in itertools.product(range(3), repeat=5):\n    q = sum(x * x for x in t)\n"
        "    a, b = [-q, *(2 * x for x in t), 0, 0, 0, 0, -1], [1, *t, 0, 0, 0, 0, q]\n"
        "    points.append([(x << 32) + y for x, y in zip(a, b)])",
        {"invalid_condition"},
    ),
    "empty": ("points = []", {"bad_points"}),
    "none": ("points = None", {"bad_points"}),
    "a generator": ("points = ([i] * 11 for i in range(2))", {"bad_points"}),
    "a dict": ("points = {{'a': 1}}", {"bad_points"}),
    "another dimension": ("points = [[2] * 24, [-2] * 24]", {"bad_points"}),
    "ragged": ("points = [[2] * 11, [-2] * 10]", {"bad_points"}),
    "text": ("points = ['é' * 11, '\\ud800' * 11]", {"bad_points"}),
    "ints that compare as they like": (
        "class I(int):\n    def __eq__(self, other): return False\n    __lt__ = __gt__ = __eq__\n    __hash__ = int.__hash__\n"
        "points = [[I(1)] * 11] * 2",
        {"invalid_condition"},
    ),
    "an array that lies": (
        "import numpy as np\nclass A(np.ndarray):\n    def tolist(self): return (x for x in ())\n"
        "points = np.zeros((2, 11), int).view(A)",
        {"bad_points", *LATE},
    ),
    "nothing": ("x = 1", {"no_points"}),
}  # fmt: skip


def hostile(name: str, *, folder: str, parent: int, port: int) -> str:
    """The text of a program, with its targets."""
    source = PROGRAMS[name][0]
    for key, value in {"folder": folder, "parent": parent, "port": port}.items():
        source = source.replace(f"{{{key}}}", str(value))
    return source.replace("{{", "{").replace("}}", "}")


@contextmanager
def a_target(folder: Path) -> Iterator[dict]:
    """A directory with a secret, and a port that somebody listens on; both are looked at afterwards."""
    secret = folder / "secret.txt"
    secret.write_text("CANARY")
    before = state_of(folder)
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams,
    ):
        port = server.getsockname()[1]
        datagrams.bind(("127.0.0.1", port))
        yield {"folder": str(folder), "parent": os.getpid(), "port": port}
        for listening in (server, datagrams):
            listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            server.accept()
        with pytest.raises(BlockingIOError):
            datagrams.recv(1)
    assert state_of(folder) == before
    assert not Path("/tmp/rlvr-escaped").exists()
    assert not Path("/dev/shm/rlvr-escaped").exists()
    assert str(0x5EC4E7) not in Path("/proc/sysvipc/shm").read_text()


def state_of(folder: Path) -> list[object]:
    found: list[object] = []
    for path in sorted([folder, *folder.rglob("*")]):
        status = path.lstat()
        content = path.read_bytes() if stat.S_ISREG(status.st_mode) else None
        attributes = os.listxattr(path) if hasattr(os, "listxattr") else None
        found.append(
            (path.name, content, attributes, status.st_mode, status.st_uid, status.st_mtime_ns, status.st_nlink)
        )
    return found


def descendants(root: int) -> set[int]:
    """The processes below one, zombies left out."""
    children: dict[int, list[int]] = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, parent = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[:2]
        except OSError:  # it has ended meanwhile
            continue
        if state != "Z":
            children.setdefault(int(parent), []).append(int(pid))
    found = [root]
    for pid in found:
        found += children.get(pid, [])
    return set(found[1:])
