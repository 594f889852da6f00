"""The file of a campaign, `campaign.json`: what was measured on which machine, with which versions.

    {"form": 1,
     "machines": {ID: {...}},
     "results": [{"part": ..., "settings": {...}, "machine": ID, "status": ..., "rows": [...]}]}

A machine's ID is a digest of device, versions and sources, so a result belongs to exactly these.
The file is rewritten after every part, completely or not at all.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.system.files import write_json

FILE = "campaign.json"
FORM = 1
OK = "ok"
FAILED = "failed"
MISSING = "missing"
STOPPED = "stopped"
"""A part is `stopped` if the campaign's minutes were over before it was done. Its rows so far are
kept."""
DONE = (OK, MISSING)
Row = dict[str, Any]


@dataclass
class Results:
    """All results of a file."""

    path: Path
    machines: dict[str, dict[str, Any]] = field(default_factory=dict)
    results: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def open(cls, path: Path) -> "Results":
        """Return the results in a file; none if there is no file. Raises `ValueError` if it is of
        another kind."""
        if not path.exists():
            return cls(path)
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found["form"] != FORM:
                raise ValueError(f"form {found['form']}")
            return cls(path, dict(found["machines"]), list(found["results"]))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is not a campaign's file of form {FORM} ({error}); move it away"
            ) from None

    def write(self) -> None:
        """Rewrite the file. A reader never sees a part of it."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_json(self.path, {"form": FORM, "machines": self.machines, "results": self.results})

    def add_machine(self, about: Mapping[str, Any]) -> str:
        """Remember a machine and return its ID."""
        identity = digest(about)
        self.machines.setdefault(identity, dict(about))
        return identity

    def find(self, part: str, settings: Mapping[str, Any], machine: str) -> dict[str, Any] | None:
        """Return the result of a part with these settings on this machine, if there is one."""
        for result in self.results:
            if (result["part"], result["machine"]) == (part, machine) and result[
                "settings"
            ] == dict(settings):
                return result
        return None

    def put(self, result: dict[str, Any]) -> None:
        """Add a result in place of an earlier one of the same part, settings and machine, and write
        the file."""
        before = self.find(result["part"], result["settings"], result["machine"])
        if before is not None:
            result["attempts"] = before.get("attempts", 1) + 1
            self.results[self.results.index(before)] = result
        else:
            self.results.append({"attempts": 1} | result)
        self.write()


def digest(value: Any) -> str:
    """Return 12 letters that stand for plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, allow_nan=False).encode()).hexdigest()[
        :12
    ]


def digest_of_sources(folder: Path) -> str:
    """Return 12 letters that stand for the Python files of a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def read_rows(path: Path) -> list[Row]:
    """Return the rows that a part has written, one JSON object a line. A line that was cut off by a
    kill is left out."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]
