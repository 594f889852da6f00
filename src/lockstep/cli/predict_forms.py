"""The forms in which `lockstep predict` writes predictions."""

import csv
import io
from pathlib import Path

from lockstep.cli.terminal import escape_line, format_json
from lockstep.inference.named_images import STDIN
from lockstep.inference.prediction import Prediction
from lockstep.system.errors import UserError, nearest
from lockstep.weights.class_names import describe_class


class Form:
    """Formats predictions, one after the other."""

    unknown_below = 0.0
    """The threshold below which images are unknown; 0 leaves unknown images out of the text."""

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
        lines = [escape_line(str(prediction.path))]
        if prediction.is_unknown:
            lines.append(f"  unknown: no class has {100 * self.unknown_below:.2f} % or more")
        for name, share in zip(prediction.classes, prediction.probabilities, strict=True):
            lines.append(f"  {100 * share:6.2f} %  {escape_line(describe_class(name))}")
        return "\n".join([*lines, ""])


class Csv(Form):
    """A line for each class of each image; rank 1 is the top class. The last column exists only if
    images can be unknown."""

    def begin(self) -> str:
        """Return the header."""
        unknown = ("unknown",) if self.unknown_below else ()
        return _format_csv("path", "rank", "class", "probability", *unknown)

    def row(self, prediction: Prediction) -> str:
        """Return the lines of a prediction."""
        path = _escape_path(str(prediction.path))
        lines = ""
        unknown = (str(prediction.is_unknown).lower(),) if self.unknown_below else ()
        shares = zip(prediction.classes, prediction.probabilities, strict=True)
        for rank, (name, share) in enumerate(shares, start=1):
            lines += _format_csv(path, rank, _escape_name(name), f"{share:.6f}", *unknown)
        return lines


_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n")
"""A spreadsheet evaluates a cell that begins with one of these, even if it is quoted: a file's name
could run a command."""


def _escape_path(path: str) -> str:
    """Return a path that no spreadsheet evaluates, and that still names the file. Only relative
    paths may need a change."""
    return f"./{path}" if path.startswith(_FORMULAS) and path != STDIN else path


def _escape_name(name: str) -> str:
    """Return a name; if a spreadsheet would evaluate it, with an apostrophe in front, which marks
    text there."""
    return f"'{name}" if name.startswith(_FORMULAS) else name


def _format_csv(*values: object) -> str:
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow(values)
    return file.getvalue()


class JsonLines(Form):
    """A JSON object on a line for each image."""

    def row(self, prediction: Prediction) -> str:
        """Return the line of a prediction."""
        return format_json(_list_fields(prediction, self.unknown_below)) + "\n"


class Json(Form):
    """A JSON list with an object for each image. It is written at the end."""

    def __init__(self) -> None:
        self._rows: list[dict[str, object]] = []

    def row(self, prediction: Prediction) -> str:
        """Keep a prediction."""
        self._rows.append(_list_fields(prediction, self.unknown_below))
        return ""

    def end(self) -> str:
        """Return the list."""
        return format_json(self._rows, indent=1) + "\n"


def _list_fields(prediction: Prediction, unknown_below: float) -> dict[str, object]:
    fields: dict[str, object] = {
        "path": str(prediction.path),
        "classes": prediction.classes,
        "probabilities": [round(share, 6) for share in prediction.probabilities],
    }
    return fields | {"unknown": prediction.is_unknown} if unknown_below else fields


FORMS: dict[str, type[Form]] = {"table": Table, "csv": Csv, "jsonl": JsonLines, "json": Json}


def choose_form(name: str | None, output: Path | None) -> Form:
    """Return the form called `name`, else the one that `output` ends in, else a table. Raises
    `UserError` for an unknown name."""
    if name is None:
        ending = output.suffix.removeprefix(".").lower() if output is not None else ""
        return FORMS.get(ending, Table)()
    if name not in FORMS:
        raise UserError(f"there is no format {name!r}. {nearest(name, FORMS)}")
    return FORMS[name]()
