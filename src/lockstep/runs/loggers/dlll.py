"""`DLLL` lines while a run trains, in a file (`lockstep.runs.dllogger_lines`).

The file always has the lines of the log, in its order, and every line is written at once. When a
run resumes, the lines of steps that are trained again are removed, and lines that are missing (of
steps that were trained without this logger) are added. Lines that are already in the file keep
their times.
"""

import time
from collections import defaultdict, deque
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from lockstep.recipes import Recipe
from lockstep.runs.dllogger_lines import PREFIX, Content, Form, format_line
from lockstep.runs.loggers import Logger, Opening, Outcome
from lockstep.system.errors import UserError
from lockstep.system.event_log import LogEvent, StartEvent
from lockstep.system.files import write_text
from lockstep.system.regular_files import RECORDS, read_regular_text
from lockstep.system.strict_json import parsed, to_json

_TIMES = {"timestamp", "datetime", "elapsedtime"}


class DlllFile(Logger):
    """Writes the lines of dllogger."""

    key = "dlll"

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._began = time.time()
        self._form: Form | None = None
        self._file: TextIO | None = None

    def entry(self, entry: LogEvent) -> None:
        """Write the lines of an entry."""
        if entry["kind"] == "start":
            self._begin(entry)
        elif self._form is not None:
            self._write(self._form.convert(entry))

    def close(self, outcome: Outcome) -> None:
        """Write the summary of a finished run, and close the file."""
        if self._file is None or self._form is None:
            return
        if outcome == "finished":
            self._write(self._form.summarise())
        self._file.close()

    def _begin(self, start: StartEvent) -> None:
        execution = start["environment"]["execution"]
        about = self._opening.about
        path = Path(execution["dlll_file"] or self._opening.folder / "dlll.json")
        self._form = Form(execution["backend"], start["steps_per_epoch"])
        parameters = {name: about[name] for name in Recipe.model_fields} | {"ranks": about["ranks"]}
        contents = self._form.describe(parameters)
        for entry in self._opening.log:
            contents += self._form.convert(entry)
        self._opening = replace(self._opening, log=())  # a long run has many entries
        there = _read_lines(path)
        lines = []
        for content in contents:
            same_lines = there[_remove_times(content)]
            lines.append(same_lines.popleft() if same_lines else self._format(content))
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, "".join(lines))
        self._file = path.open("a", encoding="utf-8", buffering=1)  # every line is written at once

    def _write(self, contents: list[Content]) -> None:
        if self._file is not None:
            self._file.writelines(map(self._format, contents))

    def _format(self, content: Content) -> str:
        return format_line(content, self._began, time.time() - self._began)


open_logger = DlllFile


def _read_lines(path: Path) -> dict[str, deque[str]]:
    """Return the lines of a file by what they say apart from their times. A truncated line is left
    out.

    Raises `UserError` if the file has other lines, so that no other file is ever replaced.
    """
    lines_by_content: dict[str, deque[str]] = defaultdict(deque)
    if not path.exists():
        return lines_by_content
    *lines, truncated = read_regular_text(path, RECORDS, errors="replace").split("\n")
    contents = [_parse_line(line) for line in lines]
    if None in contents or not PREFIX.startswith(truncated[: len(PREFIX)]):
        raise UserError(
            f"{path} has other lines than dllogger's; remove it, or give another --set"
            " dlll_file=FILE"
        )
    for line, content in zip(lines, contents, strict=True):
        lines_by_content[_remove_times(content or {})].append(f"{line}\n")
    return lines_by_content


def _parse_line(line: str) -> Content | None:
    """Return what a whole line says, with its times; None if it is not a line of dllogger."""
    try:
        content = parsed(line.removeprefix(PREFIX)) if line.startswith(PREFIX) else None
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def _remove_times(content: Content) -> str:
    # through JSON, so that a new line compares equal with one that was read
    values = parsed(to_json(content))
    return to_json({name: value for name, value in values.items() if name not in _TIMES})
