"""Everything the command line prints goes through here, so that no name of a file can command the terminal.

What a terminal would obey instead of show is written as its escape: control characters, among them those that begin colours,
titles and moves of the cursor, and marks that turn the order of letters around. Ruff's T20 refuses Python's own `print`.
"""

import builtins
import json
import re
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_OBEYED = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters but the tab and the end of a line
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"  # directions of writing, and what has no width
    "\u2028\u2029\ufeff\ufff9-\ufffb"  # ends of lines and paragraphs, marks of bytes and of notes
    "\ud800-\udfff\U000e0000-\U000e007f]"  # halves of characters, and tags
)


def shown(text: str) -> str:
    r"""Return a text of lines in which nothing is left that a terminal obeys.

    >>> print(shown("\x1b[31mred\u202egpj.exe"))
    \x1b[31mred\u202egpj.exe
    """
    return _OBEYED.sub(_escaped, text)


def in_line(text: str) -> str:
    r"""Return a text, such as a name, without ends of lines either.

    >>> print(in_line("a\nlockstep: all is well"))
    a\nlockstep: all is well
    """
    return shown(text).replace("\n", r"\n").replace("\t", r"\t")


def print(*values: object, end: str = "\n", file: TextIO | None = None) -> None:
    """Print as Python's `print` does what `shown` leaves of it."""
    builtins.print(shown(" ".join(map(str, values))), end=end, file=file or sys.stdout)


def print_json(value: Any) -> None:
    """Print a value as indented JSON; what a terminal obeys is escaped as JSON does, so that it can be read back."""
    from lockstep.system.strict_json import to_json

    text = to_json(value, indent=1)
    builtins.print(_OBEYED.sub(lambda found: json.dumps(found[0], allow_nan=False)[1:-1], text))  # noqa: T201


def console(**options: Any) -> "Console":
    """Return a console of rich's whose texts, tables and bars are shown so, too; its own colours and moves stay."""
    from collections.abc import Iterable

    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class Shown(Console):
        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(shown(text), **how)  # before it is laid out

        def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=shown(segment.text))

    return Shown(highlight=False, **options)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 2**8 else f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"
