"""Keep what XLA compiles between runs, in the user's cache."""

import hashlib
import stat
from contextlib import suppress
from pathlib import Path

import jax
import jaxlib.version

from lockstep.system.files import own_folder, user_cache
from lockstep.system.machine import arithmetic, processor

MOST_BYTES = 2**30
"""The approximate limit of the kept files: a step of a full model takes a few megabytes."""


def keep_compiled() -> None:
    """Let JAX keep what takes it more than a second to compile, unless the user has chosen a folder
    for it (JAX_COMPILATION_CACHE_DIR).

    What is kept is machine code. Only the user can access the folder, and every kind of processor
    has a separate one, because different machines may share a home.
    """
    if jax.config.jax_compilation_cache_dir is not None:
        return
    kind = repr((jaxlib.version.__version__, processor(), arithmetic()))
    folder = user_cache() / "jax" / hashlib.sha256(kind.encode()).hexdigest()[:16]
    # Without such a folder compiling takes longer, and nothing else.
    with suppress(OSError), own_folder(folder):
        jax.config.update("jax_compilation_cache_dir", str(folder))
        drop_oldest(folder, MOST_BYTES)


def drop_oldest(folder: Path, most_bytes: int) -> None:
    """Remove the files of a folder that were not used for the longest time until it has at most
    this many bytes. Other processes may do the same meanwhile."""
    files = []
    for file in folder.iterdir():
        with suppress(FileNotFoundError):
            status = file.lstat()
            if stat.S_ISREG(status.st_mode):
                files.append((file, status))
    files.sort(key=lambda entry: max(entry[1].st_atime, entry[1].st_mtime), reverse=True)
    size = 0
    for file, status in files:
        size += status.st_size
        if size > most_bytes:
            file.unlink(missing_ok=True)
