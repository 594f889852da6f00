"""Objects of a store: their list, and ranges of their bytes, by the library obstore."""

import hashlib
import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from lockstep.system.errors import BackendError, DataError
from lockstep.system.regular_files import ANY_SIZE, open_regular

INSTALL = "pip install obstore==0.12.1"
_RETRY: Any = {"max_retries": 8, "retry_timeout": timedelta(minutes=2)}
"""A store that answers 503 or nothing is asked again within these limits."""
_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
"""Environment variables with the address of a store that is not its company's own."""
NO_OBJECT = (OSError, ValueError)
"""What obstore raises besides its own errors, such as FileNotFoundError for an object."""
CONNECTIONS = 32
"""Requests at a time. With 100 KB each and 20 ms to the store this is 1 Gbit/s."""
_ANSWERS = 4
"""Number of tries if an answer ends too early."""
_PIECE_BYTES = 16 * 2**20
"""Whole objects are read in pieces of this many bytes."""
_CONNECT_SEC = 10
_SILENT_SEC = 60
"""A request is made again after this time without a byte of an answer."""
_REQUEST_SEC = 600
"""The longest time of a request. With 32 of 8 MB at a time, it takes 3.6 Mbit/s."""
_CAUSE = re.compile(
    r'TimedOut|InvalidCertificate|(?<=<Code>)\w+|(?<=message: ")[^"]+|(?<=error: ")[^"]+'
)
_CAUSES = {"TimedOut": "time-out", "InvalidCertificate": "its certificate is not trusted"}
"""What the library calls a cause, and what messages call it."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """An object as a store lists it."""

    name: str
    """Relative to the store's URL."""
    size: int
    """Length in bytes."""
    version: str
    """Its ETag, which changes with the bytes."""
    modified: float
    """When it was written, in seconds since 1970."""


def hash_version(version: str) -> int:
    """Return nanoseconds, less than a second, that stand for an object's version in the time of a
    file."""
    return int.from_bytes(hashlib.sha256(version.encode()).digest()[:8], "big") % 10**9


class RangeReader(Protocol):
    """Reads ranges of objects."""

    def read_range(self, item: StoredObject, begin: int, end: int) -> memoryview:
        """See `ObjectStore.read_range`."""


def is_web(url: str) -> bool:
    """Return whether a URL is that of files of a web server."""
    return url.startswith(("https://", "http://"))


class ObjectStore:
    """The objects below a URL. The library finds the credentials as its documentation says; they
    are not stored or printed here."""

    def __init__(self, url: str) -> None:
        """Raises `BackendError` if the library is missing, `DataError` if it refuses the URL."""
        self.url = url
        self.address = url
        """How commands name the data set."""
        self._store = connect(url)

    def list_objects(self) -> Iterator[StoredObject]:
        """Yield all objects. Raises `DataError` if the store refuses or does not answer."""
        import obstore

        try:
            for page in obstore.list(self._store, chunk_size=1000):
                for about in page:
                    version = self._find_version(about)
                    if not version:
                        raise DataError(
                            f"{self.url}/{about['path']} has no ETag; expected a store with ETags,"
                            " which show that an object has changed"
                        )
                    modified = about["last_modified"].timestamp()
                    yield StoredObject(about["path"], about["size"], version, modified)
        except (obstore.exceptions.BaseError, *NO_OBJECT) as error:
            raise self._explain("", error) from None

    def read_range(self, item: StoredObject, begin: int, end: int) -> memoryview:
        """Return bytes `begin` to `end` of an object.

        Raises `DataError` if it has changed since it was listed, is missing, is shorter, or if the
        store refuses or does not answer for two minutes.
        """
        import obstore

        wanted = self._require_version(item)
        if (begin, end) != (0, item.size):  # some servers send all bytes as no range
            wanted["range"] = (begin, end)
        try:
            data = self._receive(item, wanted)
        except obstore.exceptions.PreconditionError:
            raise self._explain_change(item) from None
        except (obstore.exceptions.BaseError, *NO_OBJECT) as error:
            raise self._explain(item.name, error) from None
        if len(data) != end - begin:
            raise DataError(
                f"{self.url}/{item.name}: the store sent {len(data)} bytes, expected"
                f" {end - begin} from byte {begin}. Try again"
            )
        return memoryview(data)

    def read_pieces(self, item: StoredObject) -> Iterator[memoryview]:
        """Yield an object's bytes in pieces. Raises as `read_range` does."""
        for begin in range(0, item.size, _PIECE_BYTES):
            yield self.read_range(item, begin, min(begin + _PIECE_BYTES, item.size))

    def write_file(self, name: str, file: Path, *, is_new: bool = False) -> None:
        """Write a file as an object, which appears as a whole; with `is_new`, only where there is
        no object of this name, if the store can tell. Raises `DataError` if the store refuses or
        does not answer, `FileNotFoundError` if there is no file."""
        import obstore

        mode: Any = "create" if is_new else "overwrite"
        with open_regular(file, ANY_SIZE) as content:
            try:
                obstore.put(self._store, name, content, mode=mode)
            except obstore.exceptions.AlreadyExistsError:
                return
            except (obstore.exceptions.BaseError, *NO_OBJECT) as error:
                raise self._explain(name, error, "written") from None

    def delete(self, names: list[str]) -> None:
        """Remove objects in this order. Raises `DataError` if the store refuses or does not
        answer."""
        import obstore

        for name in names:
            try:
                obstore.delete(self._store, name)
            except (obstore.exceptions.BaseError, *NO_OBJECT) as error:
                raise self._explain(name, error, "removed") from None

    def _receive(self, item: StoredObject, wanted: Any) -> Any:
        """Return an answer's bytes. The library repeats requests, but continues an answer that
        ended too early only if it has an ETag."""
        import obstore

        end = time.monotonic() + _RETRY["retry_timeout"].total_seconds()
        for number in count(1):
            answer = obstore.get(self._store, item.name, options=wanted)
            if self._find_version(answer.meta) != item.version:  # some servers ignore if_match
                break
            try:
                return answer.bytes()
            except obstore.exceptions.GenericError:
                # With an ETag, once more: the object may have changed.
                if number == (2 if answer.meta["e_tag"] else _ANSWERS) or time.monotonic() > end:
                    raise
        raise self._explain_change(item)

    def _find_version(self, about: Any) -> str:
        """Return the ETag without quotation marks, which some servers leave out in lists."""
        return str(about["e_tag"] or "").strip('"')

    def _require_version(self, item: StoredObject) -> dict[str, Any]:
        """Return the options of a request that is refused if the object has changed. No server
        takes a weak ETag as a condition; the answer's is compared in any case."""
        is_weak = item.version.startswith("W/")
        return {} if is_weak else {"if_match": f'"{item.version}"'}

    def _explain_change(self, item: StoredObject) -> DataError:
        return DataError(
            f"{self.url}/{item.name} was written again after it was listed; expected the same"
            " object. Put it back, or start again to index the new one"
        )

    def _explain(self, name: str, error: Exception, action: str = "read") -> DataError:
        import obstore

        place = f"{self.url}{'/' if name else ''}{name}"
        if isinstance(error, obstore.exceptions.NotSupportedError):
            return DataError(
                f"{place}: the server does not send parts of a file; expected one that answers"
                " Range requests with status 206. Use another server, or download the files"
            )
        reason = _find_reason(error)
        advice = "Check the address, the credentials and the network"
        if "object with invalid path" in reason:
            advice = "Names cannot contain //, ., .. or control characters. Rename it"
        return DataError(f"{place} cannot be {action}: {reason}. {advice}")


def _find_reason(error: Exception) -> str:
    """Return the first line of what the library says, and the cause, which is in a later one."""
    text = str(error).strip() or type(error).__name__
    line = re.sub(r":? *<\?xml.*", "", text.splitlines()[0])
    causes = _CAUSE.findall(text)
    cause = f" ({_CAUSES.get(causes[-1], causes[-1]):.100})" if causes else ""
    return f"{line:.300}{cause}"


def may_be_plain(url: str) -> bool:
    """Return whether a store is asked without TLS, which the library would refuse: only at an
    address that the user gave. A redirect from https:// to http:// is not followed."""
    if is_web(url):
        return url.startswith("http://")
    return any(os.environ.get(name, "").startswith("http://") for name in _ENDPOINTS)


@lru_cache(maxsize=8)
def connect(url: str) -> Any:
    """Return the library's store. Raises as `ObjectStore` does."""
    if "@" in url or "?" in url or "#" in url:  # it is not printed: it may have a password
        raise DataError(
            "the address of an object store has @, ? or #; expected s3://BUCKET/PREFIX. Credentials"
            " come from the environment"
        )
    try:
        from obstore.store import HTTPStore, from_url
    except ImportError:
        raise BackendError(f"data in an object store needs obstore: {INSTALL}") from None
    client: Any = {
        "connect_timeout": timedelta(seconds=_CONNECT_SEC),
        "read_timeout": timedelta(seconds=_SILENT_SEC),
        "timeout": timedelta(seconds=_REQUEST_SEC),
        "allow_http": may_be_plain(url),
    }
    # `from_url` takes some companies' https:// addresses for those of stores with credentials.
    make_store = HTTPStore.from_url if is_web(url) else from_url
    try:
        return make_store(url, retry_config=_RETRY, client_options=client)
    except Exception as error:  # the library has several kinds for a wrong URL
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise DataError(f"{url} is not an object store that can be used: {reason:.300}") from None
