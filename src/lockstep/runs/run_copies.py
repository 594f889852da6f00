"""A run's copy in an object store: written after each save while the run goes on, and fetched where
the run's folder is gone.

The copy has the files of the run's folder and its checkpoints. The `state.json` of a checkpoint is
written last and removed first: one without it is unfinished, and is not fetched.
"""

import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.data.stores.objects import ObjectStore, StoredObject, find_url, is_web
from lockstep.system.errors import DataError, RecipeError
from lockstep.system.locks import hold_lock
from lockstep.weights import checkpoint

FIELD = "checkpoint_store"
_CHECKPOINTS = "checkpoints"
_LAST = "state.json"
_NAME = re.compile(rf"[^./][^/]*|{_CHECKPOINTS}/step-[0-9]{{8,}}/[^./][^/]*")
"""The names of a copy: no hidden files, and of folders only the checkpoints."""
_WAIT_SEC = 120.0
"""A command that ends waits this long for the copy of its last checkpoint."""


class RunCopies:
    """Copies a run's folder in a thread of its own. Errors are kept for the run to report: they
    never stop it."""

    def __init__(self, url: str, folder: Path) -> None:
        """Raises `RecipeError`, `BackendError` or `DataError` if there is no such store."""
        self.url = url
        self._store = open_store(url)
        self._folder = folder
        self._changed = threading.Condition()
        self._is_wanted = False
        self._is_ending = False
        self._failure = ""
        self._thread = threading.Thread(target=self._follow, name="lockstep-copies", daemon=True)
        self._thread.start()

    def request(self) -> str:
        """Ask for a copy of the folder as it is now. Return why the last one failed; "" if it did
        not."""
        with self._changed:
            self._is_wanted = True
            self._changed.notify()
            failure = self._failure
            self._failure = ""
        return failure

    def end(self) -> str:
        """Make the last copy, and wait for it. Return why it failed, or ""."""
        self.request()
        with self._changed:
            self._is_ending = True
            self._changed.notify()
        self._thread.join(_WAIT_SEC)
        if self._thread.is_alive():
            return f"it was not complete after {_WAIT_SEC:.0f} s"
        return self._failure

    def _follow(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_wanted or self._is_ending)
                if not self._is_wanted:
                    return
                self._is_wanted = False
            try:
                copy_run(self._folder, self._store)
                failure = ""
            except Exception as error:  # whatever it is, the run goes on
                failure = str(error) or type(error).__name__
            with self._changed:
                self._failure = failure


@contextmanager
def keep_copies(
    url: str, folder: Path, warn: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Yield a function that asks for a copy of a run's folder. Make the last copy when the block
    ends, however it ends. Without a URL nothing is copied."""
    if not url:
        yield lambda: None
        return
    copies = RunCopies(url, folder)

    def report(failure: str) -> None:
        if failure:
            warn(f"the copy in {url} is not complete: {failure}. The run in {folder} is")

    try:
        yield lambda: report(copies.request())
    finally:
        report(copies.end())


def open_store(url: str) -> ObjectStore:
    """Return the store of a run's copy. Raises as `RunCopies` does."""
    address = find_url(url)
    if address is None or is_web(address):
        raise RecipeError(f"{FIELD} is {url!r}, expected an address such as s3://BUCKET/RUN")
    return ObjectStore(address)


def copy_run(folder: Path, store: ObjectStore) -> None:
    """Write the files of a run's folder, and the checkpoints that the store lacks; remove those
    that the folder no longer has. Raises `DataError` or `OSError`."""
    stored = {item.name for item in store.list_objects()}
    for file in sorted(folder.iterdir()):
        if file.is_file() and _NAME.fullmatch(file.name):
            store.write_file(file.name, file)
    steps = checkpoint.steps(folder / _CHECKPOINTS)
    for step in reversed(steps):
        path = checkpoint.checkpoint_path(folder / _CHECKPOINTS, step)
        prefix = f"{_CHECKPOINTS}/{path.name}"
        if f"{prefix}/{_LAST}" not in stored:
            _copy_checkpoint(path, prefix, store)
    kept = {checkpoint.checkpoint_path(Path(_CHECKPOINTS), step).as_posix() for step in steps}
    old = [name for name in stored if "/" in name and name.rpartition("/")[0] not in kept]
    store.delete(sorted(filter(_NAME.fullmatch, old), key=lambda name: not name.endswith(_LAST)))


def _copy_checkpoint(path: Path, prefix: str, store: ObjectStore) -> None:
    try:
        for file in sorted(path.iterdir(), key=lambda file: file.name == _LAST):
            store.write_file(f"{prefix}/{file.name}", file)
    except FileNotFoundError:
        if path.exists():  # otherwise the run has dropped it meanwhile
            raise


def fetch_run(url: str, folder: Path) -> int | None:
    """Fetch a run's copy if its newest checkpoint is newer than those in the folder. Return the
    step, or None.

    A process that is killed here leaves older checkpoints or none, and the next one fetches again.
    Raises `DataError` if the store cannot be read, `OSError` if the folder cannot be written to.
    """
    store = open_store(url)
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder / ".fetching.lock"):  # the ranks of a run do this at the same time
        items = {item.name: item for item in store.list_objects() if _NAME.fullmatch(item.name)}
        complete = {name.rpartition("/")[0] for name in items if name.endswith(f"/{_LAST}")}
        local = checkpoint.steps(folder / _CHECKPOINTS)
        newest = max((int(name.rpartition("-")[2]) for name in complete), default=-1)
        if newest <= max(local, default=-1):
            return None
        hidden = folder / ".fetched"
        shutil.rmtree(hidden, ignore_errors=True)
        try:
            for name, item in items.items():
                if "/" not in name or name.rpartition("/")[0] in complete:
                    _fetch(store, item, hidden / name)
            _give_names(hidden, folder)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)
    return newest


def _fetch(store: ObjectStore, item: StoredObject, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for data in store.read_pieces(item):
            file.write(data)


def _give_names(hidden: Path, folder: Path) -> None:
    """Move what was fetched to its place: first the files, then the checkpoints in their order."""
    for path in sorted(hidden.iterdir()):
        if path.is_file():
            path.replace(folder / path.name)
    (folder / _CHECKPOINTS).mkdir(exist_ok=True)
    for path in sorted((hidden / _CHECKPOINTS).iterdir()):
        target = folder / _CHECKPOINTS / path.name
        if not target.exists():
            path.rename(target)


def find_newer_copy(url: str, folder: Path) -> dict[str, str]:
    """Fetch a run's copy as `fetch_run` does. Return what was taken, as in `RunSettings.origins`.

    Raises `DataError` also where the folder cannot be written to.
    """
    try:
        step = fetch_run(url, folder) if url else None
    except OSError as error:
        raise DataError(f"the run in {url} cannot be fetched into {folder}: {error}") from None
    return {} if step is None else {"copy": f"the checkpoint of step {step} in {url}"}
