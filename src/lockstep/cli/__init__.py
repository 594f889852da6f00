"""The command line: thin wrappers over the public functions, one file per command."""

import io
import os
import sys
from typing import Annotated, Any, TextIO

import typer

from lockstep.cli import (
    benchmark,
    convert,
    data,
    demo,
    doctor,
    evaluate,
    export,
    find,
    from_nvidia,
    launch,
    predict,
    recipes,
    report,
    runs,
    serve,
    sparsify,
    submit,
    train,
    verify,
    weights,
)
from lockstep.cli.hints import Command
from lockstep.cli.terminal import is_reader_gone, print
from lockstep.system import heartbeat
from lockstep.system.errors import LockstepError, UserError
from lockstep.system.ranks import follow_launcher, leave_exit_code
from lockstep.system.signals import repeat_lost_interrupts

# Click's exception class. Each version of Typer has it under another name.
_Misuse: Any = next(
    kind for kind in typer.BadParameter.__mro__ if kind.__name__ == "ClickException"
)

app = typer.Typer(
    name="lockstep",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
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


app.command("demo", cls=Command)(demo.command)
app.command("train", cls=Command)(train.command)
app.command("evaluate", cls=Command)(evaluate.command)
app.command("predict", cls=Command)(predict.command)
app.command("convert", cls=Command)(convert.command)
app.command("export", cls=Command)(export.command)
app.command("serve", cls=Command)(serve.command)
app.command("sparsify", cls=Command)(sparsify.command)
app.command("verify", cls=Command)(verify.command)
app.command("report", cls=Command)(report.command)
app.command("weights", cls=Command)(weights.command)
app.add_typer(recipes.app, name="recipes")
app.add_typer(runs.app, name="runs")
app.add_typer(data.app, name="data")
app.add_typer(benchmark.app, name="benchmark")
app.add_typer(find.app, name="find")
app.command("launch", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
    launch.command
)
app.add_typer(submit.app, name="submit")
app.command(
    "from-nvidia", context_settings={"allow_extra_args": True, "allow_interspersed_args": False}
)(from_nvidia.command)
app.command("doctor", cls=Command)(doctor.command)


def run() -> None:
    """Run the command line and exit. Exit codes: 0 done, 1 failed, 2 wrong use, 3 not finite, 75
    saved and stopped, 130 interrupted (see `lockstep.system.errors`)."""
    follow_launcher()
    heartbeat.begin()
    repeat_lost_interrupts()
    code = _run_command()
    leave_exit_code(code)
    sys.exit(code)


def _run_command() -> int:
    output = sys.stdout
    try:
        code = int(app(standalone_mode=False) or 0)
        sys.stdout.flush()
        return code
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


def _end_without_reader(error: BrokenPipeError, output: TextIO) -> int:
    """Return the exit code after a write to a closed pipe: 0 if it is the output, whose reader has
    what it wanted, such as `head`."""
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
    print(words.getvalue(), end="", file=sys.stderr)


def _complain(error: Exception | str) -> None:
    rank = os.environ.get("RANK", "0")
    prefix = "" if rank == "0" else f"[rank {rank}] "
    print(f"{prefix}lockstep: {error}", file=sys.stderr)
