"""The forms in which `lockstep predict` writes predictions."""

import csv
import io
from pathlib import Path

from lockstep.cli.terminal import as_json, in_line
from lockstep.inference.named_images import STDIN
from lockstep.inference.prediction import Prediction
from lockstep.system.errors import UserError, nearest
from lockstep.weights.class_names import describe_class


class Form:
    """Makes text of predictions, one after the other."""

    def begin(self) -> str:
        """Return the text before all predictions."""
        return ""

    def row(self, prediction: Prediction) -> str:
        """Return the text of a prediction."""
        raise NotImplementedError

    def end(self) -> str:
        """Return the text after all predictions."""
        return ""


class Table(Form):
    """A line with the path, and a line for each class."""

    def row(self, prediction: Prediction) -> str:
        """Return the lines of a prediction."""
        found = zip(prediction.classes, prediction.probabilities, strict=True)
        lines = [
            f"  {100 * probability:6.2f} %  {in_line(describe_class(name))}"
            for name, probability in found
        ]
        return "\n".join([in_line(str(prediction.path)), *lines, ""])


class Csv(Form):
    """A line for each class of each image; rank 1 is the likeliest class."""

    def begin(self) -> str:
        """Return the header."""
        return _csv_line("path", "rank", "class", "probability")

    def row(self, prediction: Prediction) -> str:
        """Return the lines of a prediction."""
        found = enumerate(zip(prediction.classes, prediction.probabilities, strict=True), start=1)
        path = _path_cell(str(prediction.path))
        return "".join(
            _csv_line(path, rank, _name_cell(name), f"{share:.6f}") for rank, (name, share) in found
        )


_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet computes a cell that begins so, also a quoted one: the name of a file could run a
command there."""


def _path_cell(path: str) -> str:
    """Return a path that no spreadsheet computes, and that still names the file. Only relative
    paths can need a change."""
    return f"./{path}" if path.startswith(_FORMULAS) and path != STDIN else path


def _name_cell(name: str) -> str:
    """Return a name behind an apostrophe, which spreadsheets take for the mark of a text, if they
    would compute it."""
    return f"'{name}" if name.startswith(_FORMULAS) else name


def _csv_line(*values: object) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(values)
    return file.getvalue()


class JsonLines(Form):
    """A JSON object on a line for each image."""

    def row(self, prediction: Prediction) -> str:
        """Return the line of a prediction."""
        return as_json(_fields(prediction)) + "\n"


class Json(Form):
    """A JSON list with an object for each image. It is written at the end."""

    def __init__(self) -> None:
        self._rows: list[dict[str, object]] = []

    def row(self, prediction: Prediction) -> str:
        """Keep a prediction."""
        self._rows.append(_fields(prediction))
        return ""

    def end(self) -> str:
        """Return the list."""
        return as_json(self._rows, indent=1) + "\n"


def _fields(prediction: Prediction) -> dict[str, object]:
    probabilities = [round(share, 6) for share in prediction.probabilities]
    return {
        "path": str(prediction.path),
        "classes": prediction.classes,
        "probabilities": probabilities,
    }


FORMS: dict[str, type[Form]] = {"table": Table, "csv": Csv, "jsonl": JsonLines, "json": Json}


def chosen(name: str | None, output: Path | None) -> Form:
    """Return the form of a name, or without one that of the ending of `output`; otherwise a table.
    Raises `UserError`."""
    if name is None:
        ending = output.suffix.removeprefix(".").lower() if output is not None else ""
        return FORMS.get(ending, Table)()
    if name not in FORMS:
        raise UserError(f"there is no format {name!r}. {nearest(name, FORMS)}")
    return FORMS[name]()
