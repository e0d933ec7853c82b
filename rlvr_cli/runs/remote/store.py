"""An S3 bucket as a place for objects: the only file that knows the library. Credentials are the environment's alone.

Enters: an address, s3://BUCKET/PREFIX, keys below it, and bytes. Leaves: the same, or an RlvrError without any secret.

The library is obstore: one wheel of 6 MB, conditional puts, and of 100 files of 50 kB over loopback a sixth of the time of
pyarrow's file system (docs/runs.md). It tries failed requests again: see `RETRY`.
"""

import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple, TypeVar

from rlvr_cli.errors import RlvrError, missing_extra
from rlvr_cli.runs.storage.files import shown
from rlvr_cli.text import redacted

if TYPE_CHECKING:
    from obstore.store import RetryConfig

T = TypeVar("T")
SCHEME = "s3://"
_REFUSED = ("gs://", "az://", "abfs://", "abfss://")  # else they would be names of directories
LISTED_AGAIN = 2  # times
PART_BYTES = 2**23  # of a large file that is sent in parts
MOST_PARTS = 9000  # S3 takes 10,000
PARTS_AT_ONCE = 4  # of one file
RANGE_BYTES = 2**26  # of a large file that comes in ranges
ANSWERS = timedelta(seconds=30)  # that a request may take: a lease must be renewed also where one hangs
BYTES_COME = timedelta(minutes=10)  # and one for a file, a part or a range, on a slow line that others use too
RETRY: "RetryConfig" = {  # about 15 s of a store that is slow to answer, overloaded (503) or broken (500)
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=60),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=5), "base": 2},
}
_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_COMPONENT = re.compile(r"(?!\.\.?/?$)[A-Za-z0-9._=+-]{1,255}")
_SECRETS = ("AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID")


class Address(NamedTuple):
    """A place in a bucket."""

    bucket: str
    prefix: str  # without a slash at either end; "" for the whole bucket

    def __str__(self) -> str:
        return f"{SCHEME}{self.bucket}" + (f"/{self.prefix}" if self.prefix else "")

    def below(self, name: str) -> "Address":
        return Address(self.bucket, f"{self.prefix}/{name}".lstrip("/"))


class Changed(RlvrError):
    """An object is not the one that was to be replaced: another process has written it."""


def is_address(text: str) -> bool:
    """Whether a text names a place in object storage rather than a path, also one that `parsed_address` refuses."""
    return text.startswith((SCHEME, *_REFUSED))


def parsed_address(text: str) -> Address:
    """Read s3://BUCKET/PREFIX. Raises RlvrError, which does not repeat a user or password in it."""
    if text.startswith(_REFUSED):
        raise RlvrError(
            f"{shown(text)} is in a store of another kind: runs are written to and read from those that speak S3.",
            "Write s3://BUCKET/PREFIX, on Amazon's S3, MinIO, R2 or the like (AWS_ENDPOINT_URL); or copy runs with the store's own tool.",
        )
    bucket, _, prefix = text.removeprefix(SCHEME).rstrip("/").partition("/")
    names = prefix.split("/") if prefix else []
    if not is_address(text) or not _BUCKET.fullmatch(bucket) or not all(map(_COMPONENT.fullmatch, names)):
        safe = re.sub("://.*@", "://***@", text)
        raise RlvrError(
            f"{shown(safe)} is not an address in object storage.",
            "Write s3://BUCKET/PREFIX: a bucket of 3 to 63 small letters, digits, . and -, then letters, digits and . _ = + -. Keys and "
            "endpoint are taken from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_ENDPOINT_URL.",
        )
    return Address(bucket, prefix)


class Store:
    """The objects below an address; keys are relative to it."""

    _within = ""  # of the library's store, in which these objects are

    def __init__(self, address: Address) -> None:
        """Nothing is sent yet. Raises RlvrError if the library is not installed or its variables are not valid."""
        if find_spec("obstore") is None:
            raise missing_extra("obstore", "storage")
        from obstore.store import S3Store

        self.address = address
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
        # The address of the endpoint says whether requests may go unencrypted; only loopback and the like should.
        allowed: Any = {"allow_http": True} if endpoint.startswith("http://") else {}

        def opened(timeout: timedelta, retry: "RetryConfig") -> S3Store:
            return S3Store(
                address.bucket,
                prefix=address.prefix or None,
                client_options=allowed | {"timeout": timeout},
                retry_config=retry,
                checksum_algorithm="SHA256",
                **options,
            )

        with self._errors("open"):
            self._store = opened(ANSWERS, RETRY)
            self._files = opened(BYTES_COME, {**RETRY, "retry_timeout": BYTES_COME})

    def below(self, name: str) -> "Store":
        """Return the objects below a name, over the same connections."""
        store = copy(self)
        store.address, store._within = self.address.below(name), f"{self._within}{name}/"
        return store

    def put_file(self, key: str, content: "Path | bytes | IO[bytes] | Iterator[bytes]", *, size: int) -> None:
        """Put the content of a file, all or nothing; a large one in parts."""
        import obstore

        with self._errors("write", key):
            part = max(PART_BYTES, size // MOST_PARTS)
            obstore.put(self._files, self._within + key, content, chunk_size=part, max_concurrency=PARTS_AT_ONCE)

    def put(self, key: str, data: bytes, *, replaces: str | None) -> str:
        """Put an object if it is still the one with this tag; None: if there is none. Returns its tag.

        Raises:
            Changed: it is another one.
        """
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        with self._errors("write", key):
            try:
                mode: Any = "create" if replaces is None else {"e_tag": replaces}
                return obstore.put(self._store, self._within + key, data, mode=mode)["e_tag"] or ""
            except (AlreadyExistsError, PreconditionError) as error:
                found = self.read(key)  # an answer that was lost may have been a yes
                if found is None or found[0] != data:
                    raise Changed(
                        f"{self._place(key)} was written by another process meanwhile.", "Look at it, then try again."
                    ) from error
                return found[1]

    def age(self, key: str, *, own_clock: bool = False) -> float | None:
        """Return for how many seconds an object has been as it is; None if there is none.

        Args:
            own_clock: by this machine's clock. Otherwise an object is put, to learn the store's.
        """
        import obstore

        clock = f".clock.{os.urandom(8).hex()}"  # a key as of a version: if this process is killed, the next writer removes it
        with self._errors("read", key):
            try:
                written = obstore.head(self._store, self._within + key)["last_modified"]
            except FileNotFoundError:
                return None
            if own_clock:
                return (datetime.now(UTC) - written).total_seconds()
            obstore.put(self._store, self._within + clock, b"")
            now = obstore.head(self._store, self._within + clock)["last_modified"]
            obstore.delete(self._store, self._within + clock)
            return (now - written).total_seconds()

    def read(self, key: str, *, known: tuple[bytes, str] | None = None) -> tuple[bytes, str] | None:
        """Return an object and its tag; None if there is none.

        Args:
            known: what it was; returned, and not fetched again, if it still is.
        """
        import obstore
        from obstore.exceptions import NotModifiedError

        with self._errors("read", key):
            try:
                got = obstore.get(
                    self._store, self._within + key, options={"if_none_match": known[1]} if known else None
                )
                return bytes(got.bytes()), got.meta["e_tag"] or ""
            except NotModifiedError:
                return known
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None

    def stream(self, key: str, *, size: int) -> Iterator[bytes]:
        """Yield the bytes of an object in pieces. `size`: the bytes that it should have; many come in ranges."""
        import obstore

        at = 0
        with self._errors("read", key):
            while True:
                part: Any = {"range": (at, at + RANGE_BYTES)} if size > RANGE_BYTES else None
                got = obstore.get(self._files, self._within + key, options=part)
                for piece in got.stream(min_chunk_size=2**20):
                    at += len(piece)
                    yield bytes(piece)
                if part is None or at >= got.meta["size"]:
                    return

    def sizes(self) -> dict[str, int]:
        """Return key -> bytes of all objects."""
        import obstore

        def listed() -> dict[str, int]:
            found = (meta for some in obstore.list(self._store, prefix=self._within or None) for meta in some)
            return {meta["path"].removeprefix(self._within): meta["size"] for meta in found}

        return self._listed(listed)

    def folders(self) -> list[str]:
        """Return what keys begin with, up to their first slash."""
        import obstore

        def listed() -> list[str]:
            found = obstore.list_with_delimiter(self._store, prefix=self._within or None)["common_prefixes"]
            return sorted(name.rstrip("/").rpartition("/")[2] for name in found)

        return self._listed(listed)

    def _listed(self, listed: Callable[[], T]) -> T:
        """List, again if the answer was cut: that the library does not try again by itself."""
        from obstore.exceptions import GenericError

        with self._errors("list"):
            for _ in range(LISTED_AGAIN):
                with suppress(GenericError):
                    return listed()
            return listed()

    def delete(self, keys: Sequence[str]) -> None:
        import obstore

        if keys:
            with self._errors("delete", keys[0]):
                obstore.delete(self._store, [self._within + key for key in keys])

    def _place(self, key: str) -> str:
        return shown(f"{self.address}/{key}".rstrip("/"))

    @contextmanager
    def _errors(self, action: str, key: str = "") -> Iterator[None]:
        """Turn the library's errors into one that names the object, and says why in a word of ours: theirs quote requests."""
        from obstore.exceptions import BaseError

        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            why, hint = _reason(str(error), missing=isinstance(error, FileNotFoundError))
            # Not `from error`: a traceback or a log of the cause could show what was sent.
            raise RlvrError(f"Cannot {action} {self._place(key)}: {why}.", hint) from None


def _reason(text: str, *, missing: bool) -> tuple[str, str]:
    """Say what an error of the library means, and what to do."""
    if "NoSuchBucket" in text:
        return "there is no such bucket", "Make it first, or correct the address."
    if missing:
        return "there is no such object", "It may have been replaced meanwhile: try again."
    code = re.search(r"<Code>([A-Za-z]{1,60})</Code>", text)
    status = re.search(r"status code: (\d{3}[A-Za-z ]{0,40})", text)
    what = " ".join(filter(None, [status and status[1].strip(), code and code[1]]))
    if re.search("redirect without LOCATION|PermanentRedirect|AuthorizationHeaderMalformed", text):
        return "the bucket is in another region", "Set AWS_REGION to that of the bucket."
    if re.search(
        r"status code: 40[13]|ExpiredToken|InvalidToken|Unauthenticated|PermissionDenied|InvalidAccessKeyId|SignatureDoesNotMatch",
        text,
    ):
        return (
            f"it is refused ({what or 'no permission'})",
            "Look at AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_REGION and, of keys that expire, AWS_SESSION_TOKEN.",
        )
    if re.search(r"credential|169\.254\.169\.254|instance metadata", text, re.IGNORECASE):
        return (
            "there are no credentials",
            "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or run where a role gives them.",
        )
    if what:
        return f"the store answers {what}", "What is there stays valid: try again later."
    first = text.partition("\n")[0].rpartition(": ")[2][:120]
    for secret in filter(None, map(os.environ.get, _SECRETS)):
        first = first.replace(secret, "***")
    return f"no answer ({redacted(first)})", "Look at AWS_ENDPOINT_URL and the network, then try again."
