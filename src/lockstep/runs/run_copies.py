"""A run's copy in an object store: written after each save while the run continues, and fetched
where the run's folder is gone.

The copy has the files of the run's folder and its checkpoints. The `state.json` of a checkpoint is
written last and removed first: one without it is unfinished, and is not fetched.

A store belongs to one run: the id in its `run.json` says to which. Before anything is written on
either side, the ids and the checkpoints are compared: the newer of folder and copy must continue
the other one.
"""

import re
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from lockstep.data.sources import find_url
from lockstep.data.stores.objects import ObjectStore, StoredObject, is_web
from lockstep.system.errors import CheckpointError, DataError, RecipeError
from lockstep.system.files import staging
from lockstep.system.locks import hold_lock
from lockstep.system.regular_files import TEXT
from lockstep.system.strict_json import parsed
from lockstep.weights import checkpoint
from lockstep.weights.run_identity import (
    FILE,
    RunIdentity,
    list_digests,
    name_place,
    parse_identity,
    read_identity,
)

T = TypeVar("T")

FIELD = "checkpoint_store"
_CHECKPOINTS = "checkpoints"
_LAST = "state.json"
_NAME = re.compile(rf"[^./][^/]*|{_CHECKPOINTS}/step-([0-9]{{8}}|[1-9][0-9]{{8,14}})/[^./][^/]*")
"""The names of a copy: no hidden files, and of folders only the checkpoints."""
_WAIT_SEC = 120.0
"""A command that ends waits this long for the copy of its last checkpoint."""


class _CopyThread(threading.Thread):
    """Copies a run's folder on request. Errors are kept for the run to report: they
    never stop it."""

    def __init__(self, folder: Path, store: ObjectStore) -> None:
        super().__init__(name="lockstep-copies", daemon=True)
        self._folder = folder
        self._store = store
        self.wanted = threading.Event()
        self.is_ending = False
        self.failures: deque[str] = deque(maxlen=1)
        """Why the last copy failed; empty if it did not."""

    def run(self) -> None:
        """Make copies, up to the first one that begins when the run is ending."""
        is_last = False
        while not is_last:
            self.wanted.wait()
            self.wanted.clear()
            is_last = self.is_ending
            try:
                copy_run(self._folder, self._store)
                self.failures.clear()
            except Exception as error:  # whatever it is, the run continues
                self.failures.append(str(error) or type(error).__name__)


@contextmanager
def keep_copies(
    url: str, folder: Path, warn: Callable[[str], None], note: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Yield a function that asks for a copy of a run's folder, which a thread makes. Make the last
    copy when the block ends, however it ends.

    Raises `RecipeError`, `BackendError` or `DataError` if there is no such store, `CheckpointError`
    if it has the copy of another run.
    """
    store = open_store(url)
    with suppress(DataError):  # a lost store does not stop a run: the first copy says so
        beginning = _claim(store, folder)
        if beginning:
            note(beginning)
    thread = _CopyThread(folder, store)
    thread.start()

    def report() -> None:
        try:
            failure = thread.failures.pop()
        except IndexError:
            return
        warn(f"the copy in {url} is not complete: {failure}. The run in {folder} is complete")

    def request() -> None:
        thread.wanted.set()
        report()

    try:
        yield request
    finally:
        thread.is_ending = True
        thread.wanted.set()
        thread.join(_WAIT_SEC)
        if thread.is_alive():
            thread.failures.append(f"it was not complete after {_WAIT_SEC:.0f} s")
        report()


def open_store(url: str) -> ObjectStore:
    """Return the store of a run's copy. Raises as `keep_copies` does."""
    address = find_url(url)
    if address is None or is_web(address):
        raise RecipeError(f"{FIELD} is {url!r}, expected an address such as s3://BUCKET/RUN")
    return ObjectStore(address)


@dataclass(frozen=True)
class _Copy:
    """A run's copy in a store."""

    url: str
    items: Mapping[str, StoredObject]
    identity: RunIdentity | None
    """None if it is empty, or if a version without ids wrote it."""
    history: Mapping[int, str]
    """The digests of the checkpoints that were saved, by step."""
    steps: tuple[int, ...]
    """The steps of its complete checkpoints, in ascending order."""

    @property
    def newest(self) -> int:
        """The step of its newest complete checkpoint; -1 without one."""
        return max(self.steps, default=-1)

    def refuse(self, folder: Path, reason: str) -> CheckpointError:
        """Return the error that the folder and the copy do not belong together."""
        return CheckpointError(
            f"{self.url} holds a copy of a different run, not of {folder}: {reason}. Nothing was"
            f" changed. Give each run a separate address: --set {FIELD}=..."
        )


def _read_copy(store: ObjectStore) -> _Copy:
    """Return the copy in a store. Raises `DataError`."""
    items = {item.name: item for item in store.list_objects() if _NAME.fullmatch(item.name)}
    complete = [name.split("/")[1] for name in items if name.endswith(f"/{_LAST}")]
    steps = sorted(int(name.removeprefix("step-")) for name in complete)
    identity = _read(store, items[FILE], parse_identity) if FILE in items else None
    history = {} if identity is None else {**identity.history}
    for name in complete:
        step = int(name.removeprefix("step-"))
        if step not in history:
            state = items[f"{_CHECKPOINTS}/{name}/{_LAST}"]
            history[step] = _read(store, state, lambda data: str(parsed(data)["own_sha256"]))
    return _Copy(store.url, items, identity, history, tuple(steps))


def _read(store: ObjectStore, item: StoredObject, parse: Callable[[bytes], T]) -> T:
    """Return what `parse` makes of a small object. Raises `DataError`."""
    try:
        if item.size > TEXT.most_bytes:
            raise ValueError(f"it has {item.size:,} bytes")
        return parse(b"".join(store.read_pieces(item)))
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(
            f"{store.url}/{item.name} is damaged: {error}; restore it, or remove the copy"
        ) from None


def _check_owner(copy: _Copy, folder: Path) -> bool:
    """Return whether the copy is newer than the run in a folder. Raises `CheckpointError` if the
    copy is another run's, or if neither continues the other."""
    own = read_identity(folder)
    if own is not None and copy.identity is not None and copy.identity.id != own.id:
        raise copy.refuse(folder, f"the copy is of {copy.identity.id}, the folder of {own.id}")
    history = list_digests(folder) if own is None else own.history
    newest = max(checkpoint.steps(folder / _CHECKPOINTS), default=-1)
    older = min(newest, copy.newest)
    if older >= 0 and (older not in history or history[older] != copy.history.get(older)):
        raise copy.refuse(
            folder, f"their checkpoints of step {older} differ, as if both trained on after a copy"
        )
    return copy.newest > newest


def _claim(store: ObjectStore, folder: Path) -> str:
    """Note in a store to which run it belongs, and return a note for the user if it has a copy
    without an id. Raises `CheckpointError` if it belongs to another run."""
    copy = _read_copy(store)
    _check_owner(copy, folder)
    if copy.identity is not None:
        return ""
    store.write_file(FILE, folder / FILE, is_new=True)
    _check_owner(_read_copy(store), folder)  # another run may have been first
    return f"the copy in {store.url} did not have an id: it gets this run's" if copy.steps else ""


def copy_run(folder: Path, store: ObjectStore) -> None:
    """Write the files of a run's folder, and the checkpoints that the store lacks; remove those
    that the folder no longer has. Raises `DataError` or `OSError`, and `CheckpointError` if the
    store belongs to another run, or if the run does not continue its newest checkpoint."""
    copy = _read_copy(store)
    if _check_owner(copy, folder):
        raise copy.refuse(folder, f"the copy is already at step {copy.newest}")
    stored = copy.items.keys()
    for file in _list_files(folder):
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


def _list_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are copied: no links, which a stranger may have planted."""
    files = [file for file in folder.iterdir() if file.is_file() and not file.is_symlink()]
    return sorted(file for file in files if _NAME.fullmatch(file.name))


def _copy_checkpoint(path: Path, prefix: str, store: ObjectStore) -> None:
    try:
        for file in sorted(_list_files(path), key=lambda file: file.name == _LAST):
            store.write_file(f"{prefix}/{file.name}", file)
    except FileNotFoundError:
        if path.exists():  # otherwise the run has dropped it meanwhile
            raise


def fetch_run(
    url: str, folder: Path, check: Callable[[Path], None], is_trusted: bool
) -> int | None:
    """Fetch a run's copy if its newest checkpoint is newer than those in the folder. Return the
    step, or None.

    The copy is verified with `check` before it is moved; a process that is killed leaves older
    checkpoints or none. With `is_trusted`, a new folder may have another name than the copied one.
    Raises `CheckpointError` if the copy is another run's, `DataError` if it is damaged or cannot be
    read, `OSError` if the folder cannot be written to.
    """
    store = open_store(url)
    if not _is_wanted(_read_copy(store), folder, is_trusted):
        return None
    folder.mkdir(parents=True, exist_ok=True)
    with hold_lock(folder / ".fetching.lock"):  # the ranks of a run do this at the same time
        copy = _read_copy(store)
        if not _is_wanted(copy, folder, is_trusted):
            return None
        with staging(folder / "fetched") as hidden:  # refuses a link in its place
            for name, item in copy.items.items():
                if "/" not in name or f"{name.rpartition('/')[0]}/{_LAST}" in copy.items:
                    (hidden / name).parent.mkdir(parents=True, exist_ok=True)
                    with (hidden / name).open("wb") as file:
                        file.writelines(store.read_pieces(item))
            for step in copy.steps:
                path = checkpoint.checkpoint_path(hidden / _CHECKPOINTS, step)
                if not checkpoint.is_intact(path):
                    raise DataError(
                        f"{url}: the checkpoint of step {step} is damaged; remove it from the store"
                    )
            read_identity(hidden)  # refuses checkpoints of two runs
            check(hidden)
            _give_names(hidden, folder)
    return copy.newest if copy.steps else None


def _is_wanted(copy: _Copy, folder: Path, is_trusted: bool) -> bool:
    """Return whether a copy is newer than the run in a folder. Raises `CheckpointError` if it is
    another run's. A new run is the copied one if its folder has the same name."""
    is_newer = _check_owner(copy, folder)
    owner = copy.identity
    is_new = not (folder / FILE).exists() and not checkpoint.steps(folder / _CHECKPOINTS)
    if owner is None or not is_new:
        return is_newer
    if is_trusted or owner.out == name_place(folder):
        return True  # also without checkpoints: the folder takes the copy's id
    raise copy.refuse(
        folder,
        f"the copy is of run {owner.id} in {owner.out:.200}; to fetch that run into this folder,"
        " add --trust-run",
    )


def _give_names(hidden: Path, folder: Path) -> None:
    """Move what was fetched to its place: first the files, that of its id before all others, then
    the checkpoints in their order."""
    (hidden / _CHECKPOINTS).mkdir(exist_ok=True)
    for path in sorted(hidden.iterdir(), key=lambda path: path.name != FILE):
        if path.is_file():
            path.replace(folder / path.name)
    (folder / _CHECKPOINTS).mkdir(exist_ok=True)
    for path in sorted((hidden / _CHECKPOINTS).iterdir()):
        target = folder / _CHECKPOINTS / path.name
        if not target.exists():
            path.rename(target)
