"""Files of a web server, which cannot list them: the address names them by a pattern."""

import ipaddress
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from lockstep.data.sources import ALIASES, CLASSES, QUARANTINE, group_by_format
from lockstep.data.stores.objects import (
    CONNECTIONS,
    NO_OBJECT,
    ObjectStore,
    StoredObject,
    is_web,
)
from lockstep.system.errors import DataError

EXAMPLE = "https://HOST/{train-{0000..0099},val-{00..09}}.tar"
MOST_FILES = 100_000
_RANGE = re.compile(r"([0-9]{1,18})\.\.([0-9]{1,18})")
_SPLITS = {word for words in ALIASES.values() for word in words}


def open_store(url: str) -> ObjectStore:
    """Return the store of a data set. Raises as `ObjectStore` does."""
    return WebFiles(url) if is_web(url) else ObjectStore(url)


class WebFiles(ObjectStore):
    """The files that a pattern names, and those next to them that describe them."""

    def __init__(self, address: str) -> None:
        """Raises as `ObjectStore` does, also if the pattern names other files than those of images.
        Nothing is requested."""
        base, pattern = split_address(address)
        super().__init__(base)
        self.address = address
        try:
            self._names = sorted({unquote(name) for name in expand_braces(pattern)})
        except RecursionError:
            message = f"{pattern:.200} has too many braces; expected an address such as {EXAMPLE}"
            raise DataError(message) from None
        for name in self._names:
            folder = PurePosixPath(name).parent.as_posix()
            if not group_by_format([name]) or folder not in (".", *_SPLITS):
                raise DataError(
                    f"{address} names {name}; expected names that end in .tar, .tfrecord or .rec,"
                    f" or -00000-of-00001, in one folder or in train/ and val/, such as {EXAMPLE}"
                )

    def list_objects(self) -> Iterator[StoredObject]:
        """Yield the files, by a request for the first byte of each. Raises `DataError` if one is
        missing, or if the server cannot send a part of a file or does not mark its versions."""
        with (
            ThreadPoolExecutor(CONNECTIONS) as pool,
            closing(pool.map(self._find_file, self._names)) as files,  # type: ignore[type-var]
        ):
            yield from files
        for name in self._name_descriptions():
            description = self._find_description(name)
            if description is not None:
                yield description

    def _find_file(self, name: str) -> StoredObject:
        import obstore

        try:
            answer = obstore.get(self._store, name, options={"range": (0, 1)})
        except (obstore.exceptions.BaseError, *NO_OBJECT) as error:
            raise self._explain(name, error) from None
        return self._describe(name, answer.meta)

    def _name_descriptions(self) -> list[str]:
        """Return the names of files that may be next to those with images and describe them."""
        names = set()
        for name in map(PurePosixPath, self._names):
            names |= {name.with_name(CLASSES), name.with_name(QUARANTINE), PurePosixPath(CLASSES)}
            if name.suffix == ".rec":
                names.add(name.with_suffix(".lst"))
        return sorted(map(str, names))

    def _find_description(self, name: str) -> StoredObject | None:
        """Return a file; None if it is not there, or not for everyone: some servers do not say
        which."""
        import obstore

        refusals = obstore.exceptions
        try:
            answer = obstore.get(self._store, name)
        except (
            FileNotFoundError,
            refusals.PermissionDeniedError,
            refusals.UnauthenticatedError,
        ):
            return None
        except (refusals.BaseError, *NO_OBJECT) as error:
            raise self._explain(name, error) from None
        if str(answer.attributes.get("Content-Type")).startswith("text/html"):
            return None  # a page that says that it is not there
        return self._describe(name, answer.meta)

    def _describe(self, name: str, meta: Any) -> StoredObject:
        version = self._find_version(meta)
        if not version:
            raise DataError(
                f"{self.url}/{name} has neither an ETag nor a Last-Modified; expected one of them,"
                " which shows that a file has changed. Use another server, or download the files"
            )
        return StoredObject(name, meta["size"], version, meta["last_modified"].timestamp())

    def _find_version(self, about: Any) -> str:
        modified = about["last_modified"]
        if about["e_tag"]:
            return str(about["e_tag"])
        return f"{modified.isoformat()} {about['size']}" if modified.timestamp() else ""

    def _require_version(self, item: StoredObject) -> dict[str, Any]:
        # Some servers refuse all conditions. The answer's version is compared in any case.
        return {}


def split_address(address: str) -> tuple[str, str]:
    """Return the URL of the folder that all files are in, and the pattern of their names in it.

    Raises `DataError` for an address that is not secure or not complete. One with a user, a
    password or a query is not printed.

    >>> split_address("https://host/images/train-{00..09}.tar")
    ('https://host/images', 'train-{00..09}.tar')
    """
    if "@" in address or "?" in address or "#" in address:
        raise DataError(
            "the address of a web server has @, ? or #; expected no user, password or query, such"
            f" as {EXAMPLE}: they would be written to the run's files. Use s3://, gs:// or az://"
            " with credentials in the environment for files that are not public"
        )
    base = address.partition("{")[0].rpartition("/")[0]
    try:
        parts = urlsplit(base)
    except ValueError:  # of an IPv6 address
        parts = urlsplit("")
    if not parts.hostname:
        raise DataError(
            f"{address} names no files of a server; expected an address such as {EXAMPLE}"
        )
    if parts.scheme != "https" and not _is_this_machine(parts.hostname):
        raise DataError(
            f"{address} would be read without encryption; expected https://. http:// is only for"
            " servers of this machine"
        )
    return base, address[len(base) + 1 :]


def _is_this_machine(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def expand_braces(pattern: str) -> list[str]:
    """Return the names that a pattern stands for, as a shell and WebDataset expand it.

    Raises `DataError` for braces that are neither a range nor a list, and for more than
    `MOST_FILES` names.

    >>> expand_braces("{train-{08..10},val}.tar")
    ['train-08.tar', 'train-09.tar', 'train-10.tar', 'val.tar']
    """
    begin = pattern.find("{")
    if begin < 0:
        return [pattern]
    commas, end = _find_parts(pattern, begin)
    inner = pattern[begin + 1 : end]
    numbers = _RANGE.fullmatch(inner)
    middles: list[str] = []
    if numbers is not None:
        middles = _count(numbers[1], numbers[2])
    elif commas:
        for first, last in zip([begin, *commas], [*commas, end], strict=True):
            middles += expand_braces(pattern[first + 1 : last])
            _limit(pattern, len(middles))
    if not middles:
        raise _explain_braces(f"{{{inner}}}")
    ends = expand_braces(pattern[end + 1 :])
    _limit(pattern, len(middles) * len(ends))
    return [pattern[:begin] + middle + end for middle in middles for end in ends]


def _find_parts(pattern: str, begin: int) -> tuple[list[int], int]:
    """Return where the commas are that belong to the brace at `begin`, and where it is closed."""
    depth = 0
    commas: list[int] = []
    for place in range(begin, len(pattern)):
        character = pattern[place]
        depth += (character == "{") - (character == "}")
        if not depth:
            return commas, place
        if depth == 1 and character == ",":
            commas.append(place)
    raise _explain_braces(pattern[begin:])


def _count(first: str, last: str) -> list[str]:
    """Return the numbers of a range, with zeros in front if one of its ends has them."""
    _limit(f"{{{first}..{last}}}", int(last) - int(first) + 1)
    is_padded = any(len(end) > 1 and end.startswith("0") for end in (first, last))
    width = max(len(first), len(last)) if is_padded else 0
    return [str(number).zfill(width) for number in range(int(first), int(last) + 1)]


def _limit(pattern: str, files: int) -> None:
    if files > MOST_FILES:
        raise DataError(f"{pattern:.200} names more than {MOST_FILES} files; use larger ones")


def _explain_braces(text: str) -> DataError:
    return DataError(
        f"{text:.200} in the address is no pattern; expected {{0000..0099}} or {{one,other}}, such"
        f" as {EXAMPLE}"
    )
