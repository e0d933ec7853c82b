"""How much of the memory that a process writes comes from the system, rather than from what it has freed; and a limit on it."""

import ctypes
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGE = 4096


def from_the_system(rounds: int = 10, size: int = 8 << 20) -> float:
    """Allocate four blocks, write and free them, again and again; return the share of their pages that were new."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.memset.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(rounds):
        blocks = [libc.malloc(size) for _ in range(4)]
        for block in blocks:
            libc.memset(block, 1, size)
        for block in blocks:
            libc.free(block)
    return (resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (rounds * 4 * size / PAGE)


@contextmanager
def limited_memory(more: int) -> Iterator[None]:
    """Refuse this process more than so many bytes beside those that it has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (held + more, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
