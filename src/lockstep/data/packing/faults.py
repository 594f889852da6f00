"""Images that a pack leaves out because no reader would use them."""

import json
import os
import threading
from contextlib import suppress
from pathlib import Path

from lockstep.system.files import naming
from lockstep.system.regular_files import RECORDS, read_regular_text
from lockstep.system.strict_json import parsed


class Faults:
    """The numbers of a split's bad images, with the reasons, in a file of the target.

    A bad image is noted on the disk before the images after it are written: the number of written
    images tells a pack that resumes where it was interrupted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._reasons: dict[int, str] = {}

    def load(self) -> None:
        """Read what an earlier call of the same pack has noted."""
        with suppress(FileNotFoundError):
            for line in read_regular_text(self._path, RECORDS, errors="replace").split("\n"):
                with suppress(ValueError):  # an empty or incomplete line
                    number, reason = parsed(line)
                    self._reasons[number] = reason

    def reasons(self) -> dict[int, str]:
        """Return the reason for each bad image, by its number and in order."""
        with self._lock:
            return dict(sorted(self._reasons.items()))

    def find(self, number: int) -> str | None:
        """Return the reason for an image; None if it is not known to be bad."""
        return self._reasons.get(number)

    def add(self, number: int, reason: str) -> None:
        """Note a bad image. Any thread may call this."""
        with self._lock, naming(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(f"\n{json.dumps([number, reason], allow_nan=False)}")
            file.flush()
            os.fsync(file.fileno())
            self._reasons[number] = reason
