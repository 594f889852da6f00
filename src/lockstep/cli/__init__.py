"""The command line: thin wrappers over the public functions, one file per command."""

import io
import os
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, TextIO

import typer

from lockstep.cli.command import Command, Group, needs_help_all, shows_all
from lockstep.cli.terminal import is_reader_gone, print
from lockstep.system import heartbeat
from lockstep.system.errors import EXIT_INTERRUPTED, LockstepError, UserError
from lockstep.system.ranks import follow_launcher, leave_exit_code
from lockstep.system.registry import Row, make_table
from lockstep.system.signals import repeat_lost_interrupts

# Click's exception class, whose module depends on Typer's version.
_Misuse: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

_PASSES_ON = {
    "launch": {"allow_extra_args": True, "ignore_unknown_options": True},
    "from-nvidia": {"allow_extra_args": True, "allow_interspersed_args": False},
}
"""Parser settings of commands that pass options on to other commands."""
COMMANDS = make_table(
    __name__,
    "demo",
    "train",
    "evaluate",
    "predict",
    "convert",
    "export",
    "check",
    "sign",
    "verify-signature",
    "push",
    "serve",
    "sparsify",
    "verify",
    "report",
    "weights",
    "launch",
    "from-nvidia",
    "doctor",
    "recipes",
    "runs",
    "data",
    "benchmark",
    "find",
    "submit",
)
"""In the order of the help. Each module has a function `command` or a group `app`."""
_RARE = ("sign", "verify-signature", "push", "sparsify", "from-nvidia", "runs", "submit")
"""Commands that `lockstep --help` names in its last line only."""


class _Commands(Mapping[str, Any]):
    """Typer's commands by name, each made when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        return _load_command(COMMANDS[name])

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


@cache
def _load_command(row: Row) -> Any:
    module = row.load()
    one = typer.Typer(rich_markup_mode=None)
    if hasattr(module, "app"):
        for command in module.app.registered_commands:
            command.cls = Command
        one.add_typer(module.app, name=row.name, cls=Group)
    else:
        settings = _PASSES_ON.get(row.name)
        one.command(row.name, cls=Command, context_settings=settings)(module.command)
    return typer.main.get_group(one).commands[row.name]


class _Group(Group):
    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def list_rare(self) -> list[Any]:
        return [option for option in self.params if "completion" in option.name]

    def describe_rare(self) -> str:
        return f"shell completion and {len(_RARE)} more commands: {', '.join(_RARE)}"

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        names = COMMANDS if shows_all(ctx) else filter(lambda name: name not in _RARE, COMMANDS)
        rows = [(name, self.commands[name].get_short_help_str(limit=80)) for name in names]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


app = typer.Typer(
    name="lockstep",
    cls=_Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from lockstep.system.version import version

        print(f"lockstep {version()}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """ResNet-50 v1.5 and ResNeXt101-32x4d: one recipe, five frameworks, the same numbers."""


def run() -> None:
    """Run the command line and exit. Exit codes: 0 done, 1 failed, 2 wrong use, 3 not finite, 75
    saved and stopped, 130 interrupted (see `lockstep.system.errors`)."""
    follow_launcher()
    heartbeat.begin()
    repeat_lost_interrupts()
    try:
        code = _run_command()
    except KeyboardInterrupt:  # a second one while the command ends
        code = _explain_interrupt()
    leave_exit_code(code)
    sys.exit(code)


def _run_command() -> int:
    output = sys.stdout
    try:
        code = int(app(standalone_mode=False) or 0)
        sys.stdout.flush()
        return _explain_interrupt() if code == EXIT_INTERRUPTED else code
    except _Misuse as error:
        _explain(error)
        return int(error.exit_code)
    except LockstepError as error:
        _complain(error)
        return error.exit_code
    except BrokenPipeError as error:
        return _end_without_reader(error, output)
    except MemoryError as error:
        reason = f": {error}" if str(error) else ""
        _complain(
            f"not enough memory{reason}. Use a smaller batch, image or model, or fewer threads"
        )
        return 1
    except OSError as error:
        # A full disk, missing permissions: the system's message names file and reason.
        _complain(error)
        return UserError.exit_code
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # Typer's answer to it
            return _end_without_reader(stop.__context__, output)
        return stop.code if isinstance(stop.code, int) else 0


def _explain_interrupt() -> int:
    """Print how to resume training after Ctrl-C, and return the exit code."""
    if sys.argv[1:2] == ["train"]:
        _complain("interrupted; the same command resumes from the newest checkpoint")
    return EXIT_INTERRUPTED


def _end_without_reader(error: BrokenPipeError, output: TextIO) -> int:
    """Return the exit code after a write to a closed pipe: 0 if the reader of
    standard output, such as `head`, has what it wanted."""
    if not is_reader_gone(output):
        _complain(error)  # a connection
        return UserError.exit_code
    # For the interpreter's own flush at exit.
    sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115
    return 0


def _explain(misuse: Any) -> None:
    """Print the usage and the error, or the help of a command that was given no arguments."""
    words = io.StringIO()
    misuse.show(file=words)
    text = words.getvalue()
    if needs_help_all(misuse):
        text = text.replace(" -h' for help", " --help-all' for help", 1)
    print(text, end="", file=sys.stderr)


def _complain(error: Exception | str) -> None:
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    print(f"{prefix}lockstep: {error}", file=sys.stderr)
