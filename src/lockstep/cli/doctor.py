"""`lockstep doctor`."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.system.errors import BackendError
from lockstep.system.machine import Arithmetic

if TYPE_CHECKING:
    from lockstep.inference.runtimes import RuntimeRow

from lockstep.cli.terminal import escape_line, print
from lockstep.system.defaults import DEFAULT_BACKEND


def command(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Runs to check for missed images.")
    ] = None,
) -> None:
    """Show what is installed here, and how to get the rest.

    With RUNS, lists the images that a run left out because a read failed, and counts images in the
    data set that the run did not have. Exit code 1 if there are any.
    """
    if runs:
        _examine(runs)
    else:
        _show_installed()


def _examine(runs: list[Path]) -> None:
    """Print the images that runs lost."""
    from lockstep.data.images import printable
    from lockstep.runs.lost_images import list_lost_images

    is_whole = True
    for run in runs:
        lines = list_lost_images(run)
        is_whole = is_whole and not lines
        print(f"{run}: {'images are missing; train again' if lines else 'no image was lost'}")
        for line in lines:
            print(f"  {escape_line(printable(line))}")
    if not is_whole:
        raise typer.Exit(1)


def _show_installed() -> None:
    from lockstep import backends
    from lockstep.data.decoding import jpeg
    from lockstep.data.loading.dali import DISTRIBUTIONS, INSTALL
    from lockstep.inference.runtimes import RUNTIMES
    from lockstep.runs.environment import describe_environment
    from lockstep.system.machine import arithmetic, gpu

    about = describe_environment(DEFAULT_BACKEND)
    memory = about["memory_bytes"] / 2**30
    print(f"lockstep   {about['lockstep']}, Python {about['python']}, NumPy {about['numpy']}")
    print(f"machine    {about['processor']}, {about['cores']} cores, {memory:.1f} GiB")
    print(f"{'multiplies':<10} {describe_arithmetic(arithmetic())}")
    device = gpu()
    if device is not None:
        print(f"{'gpu':<10} {device[0]}: {describe_arithmetic(device[1])}")
    for name in backends.FRAMEWORKS:
        print(f"{name:<10} {_describe_backend(name)}")
    for name, row in RUNTIMES.items():
        print(f"{name:<10} {describe_runtime(row)}")
    dali = backends.Framework(DISTRIBUTIONS, INSTALL)
    print(f"{'dali':<10} {dali.version() or f'missing; {dali.install}'}")
    print(f"{'memory':<10} lockstep find batch: the largest batch that fits")
    decoder = f"missing; {jpeg.MISSING}"
    if jpeg.is_there():
        decoder = "compiled: windows of baseline JPEGs"
    print(f"{'jpeg':<10} {decoder}")


def _describe_backend(name: str) -> str:
    """Return where a framework is and what it computes on, or how to install it."""
    from lockstep import backends

    framework = backends.FRAMEWORKS[name]
    try:
        python = backends.find_interpreter(name)
    except BackendError as error:
        return str(error)
    if framework.version() is not None:
        return describe_framework(name)
    return f"missing; {framework.install}" if python is None else _ask_python(python, name)


def describe_runtime(row: "RuntimeRow") -> str:
    """Return the version of a runtime and what it computes, or how to install it."""
    if row.is_missing():
        return f"missing; {row.install}"
    devices = [f"{device}: {', '.join(names)}" for device, names in row.precisions.items()]
    return f"{row.version()}, inference ({'; '.join(devices)})"


def describe_arithmetic(arithmetic: Arithmetic) -> str:
    """Return which precisions a device multiplies in hardware and which to train in, for a person
    to read.

    >>> from lockstep.system.machine import parse_arithmetic
    >>> describe_arithmetic(parse_arithmetic("flags: avx2 fma", {}))
    'fp32 in hardware (AVX2); bf16, fp16 are emulated; train in fp32'
    """
    extensions = ", ".join(arithmetic.extensions) or "no extension known"
    if arithmetic.limit:
        extensions += f", limited by {arithmetic.limit}"
    text = f"{', '.join(arithmetic.precisions)} in hardware ({extensions})"
    if arithmetic.emulated:
        verb = "are" if len(arithmetic.emulated) > 1 else "is"
        text += f"; {', '.join(arithmetic.emulated)} {verb} emulated"
    return f"{text}; train in {arithmetic.pays}"


def describe_framework(name: str) -> str:
    """Return the version and devices of an installed framework, or why it does not load."""
    from lockstep import backends

    version = backends.FRAMEWORKS[name].version()
    try:
        return f"{version}: {'; '.join(backends.load(name).devices())}"
    except (ImportError, OSError, BackendError) as error:  # installed, but not for this machine
        return f"{version} does not load: {error}"


def _ask_python(python: Path, name: str) -> str:
    """Return what `describe_framework` returns in a framework's own environment."""
    code = (
        f"from lockstep.cli.doctor import describe_framework; print(describe_framework({name!r}))"
    )
    try:
        done = subprocess.run(
            [python, "-P", "-c", code], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{python} cannot be run: {error.strerror}"
    answer = done.stderr if done.returncode else done.stdout
    lines = answer.strip().splitlines() or ["no answer"]
    return f"{lines[-1]} ({python})"
