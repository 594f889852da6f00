"""Files of a data set at any offset, wherever their bytes are."""

import io
from pathlib import Path
from threading import Event

from lockstep.data.containers.places import MOST_BYTES, Budget, Places
from lockstep.data.stores.mirror import Mirror, find_mirror
from lockstep.data.stores.transfer import Part

_PIECE_BYTES = 2**22
"""A file that is read in order is fetched in pieces of this length, which take longer than the way
to a store and back."""


def open_pass(
    path: Path, stopped: Event | None = None, *, read_ahead: bool = False, in_order: bool = False
) -> Places:
    """Open a file for one pass over it, which has a budget and ends when `stopped` is set; see
    `open_places`."""
    file = open_places(path, read_ahead=read_ahead, in_order=in_order)
    file.budget = Budget(file.size, stopped)
    return file


def open_places(path: Path, *, read_ahead: bool = False, in_order: bool = False) -> Places:
    """Open a file of a data set. Use `in_order` if one thread then reads it in order, and
    `read_ahead` if it reads all of it so."""
    mirror = find_mirror(path)
    if mirror is None:
        return Places(path, read_ahead=read_ahead)
    return StoredPlaces(path, mirror, in_order=read_ahead or in_order)


class StoredPlaces(Places):
    """An object of a store, whose bytes are fetched when they are needed."""

    def __init__(self, path: Path, mirror: Mirror, *, in_order: bool = False) -> None:
        super().__init__(path)
        self.item = mirror.find_item(path)
        self.size = self.item.size  # another command may have listed a changed object since
        self.transfer = mirror.transfer
        self._in_order = in_order
        self._piece = b""
        self._piece_begin = 0

    def state(self) -> tuple[int, int]:
        """Return size and time as the object had them when this process listed it."""
        return Mirror.state(self.item)

    def check(self, offset: int, length: int) -> None:
        """Raise `ValueError` if a range is too long to be read. The file here is a hole."""
        if length > MOST_BYTES:
            super().check(offset, length)

    def _find_data(self, offset: int) -> int:
        return offset

    def _read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset`. Raises `ValueError` if the object ends before,
        `DataError` if it changed or cannot be read."""
        end = offset + length
        if end > self.size:
            raise ValueError(
                f"the file ends at byte {self.size}, expected {length} bytes from {offset}"
            )
        if not length:
            return b""
        if self._in_order:
            return self._read_in_order(offset, end)
        return self.transfer.read(Part(self.item, offset, end))

    def _read_in_order(self, offset: int, end: int) -> bytes:
        piece_end = self._piece_begin + len(self._piece)
        if not self._piece_begin <= offset <= end <= piece_end:
            # What a jump leaves out is fetched, too: an index decodes every image.
            begin = min(offset, piece_end)
            stop = min(max(end, begin + _PIECE_BYTES), self.size)
            self._piece = self.transfer.read(Part(self.item, begin, stop))
            self._piece_begin = begin
        return self._piece[offset - self._piece_begin : end - self._piece_begin]

    def read_into(self, memory: memoryview, offset: int) -> None:
        """Fill `memory` with bytes from `offset`."""
        memory[:] = self.read(offset, len(memory))


class PlacesStream(io.RawIOBase):
    """A file that is read in order, for libraries that take one."""

    def __init__(self, places: Places) -> None:
        self._places = places
        self._at = 0

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to an offset and return it."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._places.size}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the offset."""
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        """Read up to the buffer's length or the end of the file."""
        length = max(min(len(buffer), self._places.size - self._at), 0)
        buffer[:length] = self._places.read(self._at, length)
        self._at += length
        return length
