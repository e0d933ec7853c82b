"""The one writer of a run in object storage: an object that names it, renewed while it lives, taken by conditional puts.

Enters: the store of a run. Leaves: a `Lease`, or an RlvrError that says who has it, and when it will be free.

Whether a lease is still alive is a question of the store's clock, never of two machines' clocks. What a writer commits is guarded a second
time: each state of the index names the lease that wrote it, and replaces the state that the writer knows. So a writer that slept
through the loss of its lease writes nothing more.
"""

import json
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlvr_cli.errors import RlvrError
from rlvr_cli.runs.remote.index import INDEX, LEASE, Index, index_bytes, parsed_index
from rlvr_cli.runs.remote.store import Changed, Store
from rlvr_cli.runs.storage.files import shown, utc_now

RENEWED_EVERY = 10.0  # seconds
FREE_AFTER = 60.0  # seconds without a sign of life
FENCE_TRIES = 5


class Held(RlvrError):
    """Another process has the lease."""


class Lease:
    """The right to write a run, until it is released or lost."""

    def __init__(self, store: Store, data: bytes) -> None:
        """Use `acquire`, or in a child process the parent's `data`."""
        self.store, self.data = store, data

    @classmethod
    def acquire(cls, store: Store) -> "Lease":
        """Take the lease of a run. Raises Held if another process has it, RlvrError if the store fails."""
        found = check_free(store)
        own = {"id": os.urandom(16).hex(), "pid": os.getpid(), "host": os.uname().nodename, "since": utc_now()}
        data = json.dumps(own | {"machine": _machine()}).encode()
        try:
            store.put(LEASE, data, replaces=found[1] if found else None)
        except Changed:
            raise Held(
                f"{store.address} was taken by another writer at the same moment.", "Try again: it is named then."
            ) from None
        return cls(store, data)

    @property
    def id(self) -> str:
        return json.loads(self.data)["id"]

    def renew(self) -> None:
        """Give a sign of life. Raises Changed if another process has the lease, RlvrError if the store fails."""
        found = self.store.read(LEASE)
        if found is None or found[0] != self.data:
            raise lost(self.store)
        try:
            self.store.put(LEASE, self.data, replaces=found[1])
        except Changed:
            raise lost(self.store) from None

    def fence(self) -> Index | None:
        """Make the index this lease's, so that no earlier writer can replace it any more. Returns it; None if there is none."""
        for _ in range(FENCE_TRIES):
            found = self.store.read(INDEX)
            if found is None:
                return None
            index = replace(parsed_index(found[0], where=f"{self.store.address}/{INDEX}"), lease=self.id)
            try:
                self.store.put(INDEX, index_bytes(index), replaces=found[1])
            except Changed:
                continue
            return index
        raise RlvrError(f"Another process keeps writing {self.store.address}.", "Stop it, then try again.")

    def release(self) -> None:
        """Let others have it. Raises RlvrError."""
        found = self.store.read(LEASE)
        if found is not None and found[0] == self.data:
            self.store.delete([LEASE])


def renewing(lease: Lease, is_lost: Callable[[Changed], None]) -> threading.Event:
    """Give signs of life, in a thread, until the event that is returned is set, or another process has the lease: see `is_lost`."""
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(RENEWED_EVERY):
            try:
                lease.renew()
            except Changed as error:
                return is_lost(error)
            except RlvrError:
                continue  # the store fails: the upload says so

    threading.Thread(target=renew, daemon=True).start()
    return ended


def check_free(store: Store) -> tuple[bytes, str] | None:
    """Raise Held if a living process has the lease of a run, RlvrError if the store fails. Returns a lease that has ended."""
    found = store.read(LEASE)
    if found is not None and (holder := _living(store, found[0])):
        raise Held(
            f"{store.address} is being written by process {holder['pid']} on {shown(str(holder['host']))} since "
            f"{shown(str(holder['since']))}; its last sign of life was {holder['silent']:.0f} s ago.",
            f"Wait until it ends, or stop it. If that machine is gone, the same command takes the run over {FREE_AFTER:.0f} s after "
            "that sign. The run can be read in the meantime.",
        )
    return found


def lost(store: Store) -> Changed:
    """The error for a writer whose lease another process has."""
    holder = holder_in(store)
    who = f"process {holder['pid']} on {shown(str(holder['host']))}" if holder else "another process"
    return Changed(
        f"{store.address} was taken over by {who}: this process had given no sign of life for {FREE_AFTER:.0f} s.",
        "That one goes on with what was uploaded. Stop it first if this one is to go on.",
    )


def holder_in(store: Store) -> dict[str, Any] | None:
    """Return who writes a run, for those who read it: nothing is written, so that this machine's clock must do. Raises RlvrError."""
    found = store.read(LEASE)
    return None if found is None else _living(store, found[0], reads=True)


def _living(store: Store, data: bytes, *, reads: bool = False) -> dict[str, Any] | None:
    """Return who a lease is of, unless it has ended."""
    try:
        record = json.loads(data)
        holder = {"pid": int(record["pid"]), "host": str(record["host"]), "since": str(record["since"])}
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if holder["host"] == os.uname().nodename and _is_here(record) and not Path(f"/proc/{holder['pid']}").exists():
        return None
    silent = store.age(LEASE, own_clock=reads)
    return None if silent is None or silent > FREE_AFTER else holder | {"silent": silent}


def _is_here(record: dict[str, Any]) -> bool:
    """Whether the process of a lease would be seen in /proc. That of an earlier version may be in another container of this host's name."""
    return record.get("machine") == _machine() != ""


def _machine() -> str:
    """Return what this process shares with all that it sees in /proc: the boot, and the namespace of their numbers; "" if unknown."""
    with suppress(OSError):
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    return ""
