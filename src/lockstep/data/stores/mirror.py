"""A local folder that stands for a data set in an object store.

It has an empty file of the right length for every object that holds many images, and for every
class folder, and real copies of the small files that describe them. Everything that lists, indexes
and names the files of a data set thus works as on a disk. The time of such a file stands for the
object's ETag: an index is built again when an object changes.
"""

import fcntl
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Collection, Iterable
from dataclasses import asdict
from functools import lru_cache
from itertools import chain, count
from pathlib import Path
from threading import Lock

from lockstep.data import sources
from lockstep.data.stores.bundles import BundleReader, make_bundle, write_members
from lockstep.data.stores.objects import ObjectStore, StoredObject, hash_version
from lockstep.data.stores.transfer import Transfer, name_file
from lockstep.system.errors import DataError, as_path
from lockstep.system.files import replacing, user_cache, write_bytes, write_text
from lockstep.system.locks import hold_lock
from lockstep.system.regular_files import RECORDS, read_regular_text
from lockstep.system.strict_json import parsed

NOTE, _LISTING_LOCK, _PARTS = sources.STORE_FILES
_SPLITS = tuple(chain.from_iterable(sources.ALIASES.values()))
_LIMIT_BYTES = 20 * 10**9
_MOST_NAME_BYTES = 240
"""A file system allows 255; a file that is being written has a longer name."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def find_folder(data: str | Path) -> Path:
    """Return the folder of a data set: the path itself, or for the URL of an object store, or of
    files of a web server, the folder that stands for it, with the objects that are there now.

    Raises `DataError` if the store cannot be listed or holds no images.
    """
    path = as_path(data, "data")
    url = sources.find_url(data)
    return path if url is None else _open_folder(url)


@lru_cache(maxsize=32)  # a run sees the objects as they were when it began
def _open_folder(url: str) -> Path:
    from lockstep.data.stores.web import open_store  # needed by few

    store = open_store(url)
    items, classes = _sort_objects(store.list_objects())
    if not classes and not sources.group_by_format([item.name for item in items]):
        raise DataError(
            f"{url} holds no images; expected class folders of images (train/CLASS/NAME.jpg), or"
            " names that end in .tar, .tfrecord or .rec, or -00000-of-00001"
        )
    _check_names(url, [item.name for item in items], classes)
    folder = user_cache() / sources.STORES / hashlib.sha256(url.encode()).hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder / _LISTING_LOCK):
        _write_folder(folder, store, items, classes)
    return folder


def _sort_objects(
    listed: Iterable[StoredObject],
) -> tuple[list[StoredObject], dict[str, list[StoredObject]]]:
    """Return the objects that are files of a data set, and those in class folders by the names of
    the folders, both in the order of their names. Others are left out."""
    items = []
    classes: dict[str, list[StoredObject]] = {}
    for item in sorted(listed, key=lambda item: item.name):
        parts = item.name.split("/")
        if (
            any(not part or part.startswith(".") for part in parts)
            or parts[0] == sources.DALI_INDEXES
        ):
            continue
        depth = 2 if parts[0] in _SPLITS else 1
        if len(parts) > depth:
            # An empty object without an ending stands for a folder in some stores.
            if item.size or "." in parts[-1]:
                classes.setdefault("/".join(parts[:depth]), []).append(item)
        elif _is_small(parts[-1]) or sources.group_by_format([parts[-1]]):
            items.append(item)
    return items, classes


def _check_names(url: str, files: Iterable[str], folders: Collection[str]) -> None:
    """Raise `DataError` if a folder of this machine cannot have these names."""
    for name in chain(files, folders):
        if "\0" in name or any(len(part.encode()) > _MOST_NAME_BYTES for part in name.split("/")):
            raise DataError(
                f"{url} has {name!r:.300}, which cannot be the name of a file; expected at most"
                f" {_MOST_NAME_BYTES} bytes between slashes, none of them 0. Rename the object"
            )
    for name in files:
        if name in folders:
            raise DataError(
                f"{url}/{name} is an object, and there are objects in a folder of this name;"
                " expected one of them. Remove the other"
            )


def _is_small(name: str) -> bool:
    """Return whether a file describes others, and is copied."""
    return name in (sources.CLASSES, sources.LABELS, sources.QUARANTINE) or name.endswith(".lst")


def _write_folder(
    folder: Path,
    store: ObjectStore,
    items: list[StoredObject],
    classes: dict[str, list[StoredObject]],
) -> None:
    bundles = {name: make_bundle(name, objects) for name, objects in classes.items()}
    items = [*items, *bundles.values()]
    names = {item.name for item in items}
    for old in _read_items(folder):
        if old not in names:
            _remove(folder, old)
    # Before its files, so that those of a command that is killed are removed.
    about = {
        "url": store.url,
        "address": store.address,
        "objects": [asdict(item) for item in items],
    }
    write_text(folder / NOTE, json.dumps(about, allow_nan=False))
    for name, bundle in bundles.items():
        write_members(folder / name, bundle, classes[name])
    _write_files(folder, store, items)
    for name, bundle in bundles.items():  # by this time an index notices a change in it
        os.utime(folder / name, ns=(_make_time(bundle),) * 2)


def _remove(folder: Path, name: str) -> None:
    """Remove a file that stands for an object, and the folders in which nothing is left."""
    path = folder / name
    path.unlink(missing_ok=True)
    while path.parent != folder and path.parent.is_dir():
        path = path.parent
        if any(sources.list_visible(path)):
            break
        shutil.rmtree(path)


def _is_written(path: Path, item: StoredObject) -> bool:
    if not path.exists():
        return False
    status = path.stat()
    return (status.st_size, status.st_mtime_ns) == (item.size, _make_time(item))


def _write_files(folder: Path, store: ObjectStore, items: list[StoredObject]) -> None:
    for item in items:
        path = folder / item.name
        if _is_written(path, item):
            continue
        path.parent.mkdir(exist_ok=True)
        if _is_small(path.name):
            write_bytes(path, bytes(store.read_range(item, 0, item.size)) if item.size else b"")
        else:
            with replacing(path) as partial:
                partial.touch()
                os.truncate(partial, item.size)
        time = _make_time(item)
        os.utime(path, ns=(time, time))
        if path.stat().st_mtime_ns != time:
            raise DataError(
                f"{folder} is on a file system that rounds file times, which hides changed objects;"
                " set XDG_CACHE_HOME to a folder on another one"
            )


def _read_items(folder: Path) -> dict[str, StoredObject]:
    try:
        about = parsed(read_regular_text(folder / NOTE, RECORDS))
        return {fields["name"]: StoredObject(**fields) for fields in about["objects"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _make_time(item: StoredObject) -> int:
    """Return nanoseconds since 1970: the second of the object's time, and a fraction that stands
    for its ETag."""
    return int(item.modified) * 10**9 + hash_version(item.version)


class Mirror:
    """A folder that stands for a store, as this process reads it."""

    def __init__(self, folder: Path) -> None:
        about = parsed(read_regular_text(folder / NOTE, RECORDS))
        self._folder = folder
        self._items = _read_items(folder)
        from lockstep.data.stores.web import open_store

        store = BundleReader(open_store(about["address"]), folder, self._items.values())
        parts, self.lock = _claim_folder(folder, self._items)
        self.transfer = Transfer(store, self._items.values(), parts, _LIMIT_BYTES)

    def find_item(self, path: Path) -> StoredObject:
        """Return the object that a file of the folder stands for."""
        item = self._items.get(path.relative_to(self._folder).as_posix())
        if item is None:
            raise DataError(f"{path.name} has left the object store. Start again")
        return item

    @staticmethod
    def state(item: StoredObject) -> tuple[int, int]:
        """Return size and time of the file that stands for an object."""
        return item.size, _make_time(item)


def find_mirror(path: Path) -> Mirror | None:
    """Return the mirror that a file belongs to; None if it is a file with contents."""
    folder = sources.find_store_folder(path)
    if folder is None:
        return None
    with _OPENING:
        return _open_mirror(folder)


_OPENING = Lock()
"""Held while a mirror is opened: two threads would make two, each of which fetches."""
_open_mirror = lru_cache(maxsize=32)(Mirror)


def _claim_folder(mirror: Path, items: dict[str, StoredObject]) -> tuple[Path, int]:
    """Return a folder for fetched parts that no other process uses, without parts of objects that
    are gone or changed, and the descriptor of its lock. It is this process's until it ends."""
    # On a file system that machines share, a lock may hold on one of them only.
    machine = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
    for number in count():
        folder = mirror / _PARTS / f"{machine}-{number}"
        folder.mkdir(parents=True, exist_ok=True)
        if folder.resolve() != mirror.resolve() / _PARTS / folder.name:
            raise DataError(
                f"{folder} is behind a link; expected a folder, since files in it are removed."
                " Remove the link"
            )
        mode = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        lock = os.open(folder / "lock", mode, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            os.close(lock)
            if not isinstance(error, BlockingIOError):
                raise DataError(
                    f"{folder} cannot be locked: {error.strerror}; set XDG_CACHE_HOME to a folder"
                    " of a local disk"
                ) from None
    # After a crash of the machine the lists of blocks may name some that were not written.
    boot = _BOOT_ID.read_text().encode() if _BOOT_ID.exists() else os.urandom(16)
    same = os.pread(lock, 100, 0) == boot
    current = {name_file(item) for item in items.values()}
    for path in folder.iterdir():
        if path.name != "lock" and (not same or path.name.split(".")[0] not in current):
            path.unlink()
    os.truncate(lock, 0)
    os.pwrite(lock, boot, 0)
    return folder, lock
