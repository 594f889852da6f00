"""Print safely: all output of the command line goes through here, so that no file name can control
the terminal.

Characters that a terminal obeys instead of showing them are written as escapes: control characters,
including those that start colours, titles and cursor moves, and marks that reverse the order of
letters. Ruff's T20 refuses Python's own `print`.
"""

import builtins
import json
import re
import select
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

_OBEYED = re.compile(
    "[\0-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline
    # writing directions, and characters without width
    "\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f"
    # line and paragraph separators, byte order mark, annotation marks
    "\u2028\u2029\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"  # surrogates, and tags
)


def escape_text(text: str) -> str:
    r"""Return a text of one or more lines with everything escaped that a terminal obeys.

    >>> print(escape_text("\x1b[31mred\u202egpj.exe"))
    \x1b[31mred\u202egpj.exe
    """
    return _OBEYED.sub(_escape, text)


def escape_line(text: str) -> str:
    r"""Return a text, such as a name, in one line: newlines and tabs are escaped too.

    >>> print(escape_line("a\nlockstep: all is well"))
    a\nlockstep: all is well
    """
    return escape_text(text).replace("\n", r"\n").replace("\t", r"\t")


def print(*values: object, end: str = "\n", file: TextIO | None = None) -> None:
    """Print like Python's `print`, with the text passed through `escape_text`."""
    builtins.print(escape_text(" ".join(map(str, values))), end=end, file=file or sys.stdout)


def format_json(value: Any, *, indent: int | None = None) -> str:
    """Return a value as JSON. What a terminal obeys becomes a JSON escape, so that it can be read
    back."""
    from lockstep.system.strict_json import to_json

    def escape(match: re.Match[str]) -> str:
        return json.dumps(match[0], allow_nan=False)[1:-1]

    return _OBEYED.sub(escape, to_json(value, indent=indent))


def format_number(value: float | None, form: str) -> str:
    """Return a number in a form such as ".2f", or a dash for None."""
    return "-" if value is None else format(value, form)


def print_json(value: Any) -> None:
    """Print a value as indented JSON."""
    builtins.print(format_json(value, indent=1))  # noqa: T201


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows of cells in columns that are as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        print("  ".join(cells).rstrip())


def is_reader_gone(file: TextIO) -> bool:
    """Return whether a file is a pipe that nobody reads any more."""
    watch = select.poll()
    try:
        watch.register(file, select.POLLOUT)
    except (ValueError, OSError):  # no file of the system
        return False
    return any(events & select.POLLERR for _, events in watch.poll(0))


def make_console(**options: Any) -> "Console":
    """Return a rich console that escapes texts, tables and bars in the same way. Rich's own colours
    and moves stay."""
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    class EscapingConsole(Console):
        def on_broken_pipe(self) -> None:
            self.quiet = True  # the command runs to its end without a reader

        def render_str(self, text: str, **how: Any) -> Text:
            return super().render_str(escape_text(text), **how)  # before it is laid out

        def render(
            self, renderable: RenderableType, options: ConsoleOptions | None = None
        ) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield (
                    segment if segment.control else segment._replace(text=escape_text(segment.text))
                )

    return EscapingConsole(highlight=False, **options)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 2**8:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 2**16 else f"\\U{code:08x}"


@contextmanager
def show_download(name: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show the progress of a download on stderr: a bar in a terminal, else a line when it begins.

    Yield a function that takes the bytes received and the total, None if it is unknown.
    """
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    screen = make_console(stderr=True)
    if screen.is_terminal:
        with Progress(*columns, TimeRemainingColumn(), console=screen, transient=True) as bar:
            task = bar.add_task(escape_line(name), total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    has_begun = False

    def report_begin(_: int, total: int | None) -> None:
        nonlocal has_begun
        if not has_begun:
            size = "" if total is None else f", {total / 1e6:,.1f} MB"
            print(f"downloading {escape_line(name)}{size}", file=sys.stderr)
        has_begun = True

    yield report_begin
