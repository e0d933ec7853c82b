"""Memory that processes of one machine share. It has no name: who has its descriptor can map it."""

import mmap
import os
import tempfile


class SharedMemory:
    """Memory that two processes map; it grows with what is written.

    Args:
        descriptor: of the memory, inherited from the process that made it; None: make it.

    Attributes:
        writes: how many times this process has written into it.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        self.writes = 0
        if descriptor is not None:
            self.descriptor = descriptor
        elif hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("rlvr-weights")
        else:  # not on Linux
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        self._map: mmap.mmap | None = None

    def grow(self, size: int) -> None:
        """Make it at least so many bytes."""
        if os.fstat(self.descriptor).st_size < size:
            os.ftruncate(self.descriptor, size)

    def mapped(self) -> mmap.mmap:
        """Its bytes; there must be some."""
        size = os.fstat(self.descriptor).st_size
        if self._map is None or len(self._map) != size:
            self._map = mmap.mmap(self.descriptor, size)
        return self._map

    def close(self) -> None:
        """Give this process's share of the memory back; closing twice is allowed."""
        self._map = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1
