"""`lockstep doctor`."""

import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.inference.runtimes import RuntimeRow
    from lockstep.system.machine import Arithmetic

from lockstep.cli.terminal import print
from lockstep.system.defaults import DEFAULT_BACKEND


def command() -> None:
    """Show what is installed here, and how to install the rest."""
    from lockstep import backends
    from lockstep.data.decoding import jpeg
    from lockstep.data.loading.dali import DISTRIBUTIONS, INSTALL
    from lockstep.inference.runtimes import RUNTIMES
    from lockstep.runs.environment import describe_environment
    from lockstep.system.errors import BackendError
    from lockstep.system.machine import arithmetic, gpu

    about = describe_environment(DEFAULT_BACKEND)
    print(f"lockstep   {about['lockstep']}, Python {about['python']}, NumPy {about['numpy']}")
    print(
        f"machine    {about['processor']}, {about['cores']} cores,"
        f" {about['memory_bytes'] / 2**30:.1f} GiB"
    )
    print(f"{'multiplies':<10} {multiplies(arithmetic())}")
    if (found_gpu := gpu()) is not None:
        print(f"{'gpu':<10} {found_gpu[0]}: {multiplies(found_gpu[1])}")
    for name, framework in backends.FRAMEWORKS.items():
        try:
            python = backends.find_interpreter(name)
        except BackendError as error:
            print(f"{name:<10} {error}")
            continue
        if framework.version() is not None:
            print(f"{name:<10} {found_here(name)}")
        else:
            print(
                f"{name:<10}"
                f" {_found_by(python, name) if python else f'missing; {framework.install}'}"
            )
    for name, row in RUNTIMES.items():
        print(f"{name:<10} {described(row)}")
    dali = backends.Framework(DISTRIBUTIONS, INSTALL)
    print(f"{'dali':<10} {dali.version() or f'missing; {dali.install}'}")
    print(f"{'memory':<10} lockstep find batch: the largest batch that fits")
    print(
        f"{'jpeg':<10}"
        f" {'compiled: windows of baseline JPEGs' if jpeg.is_there() else f'missing; {jpeg.MISSING}'}"
    )


def described(row: "RuntimeRow") -> str:
    """Return the version of a runtime and what it computes, or how to install it."""
    able = "; ".join(
        f"{device}: {', '.join(precisions)}" for device, precisions in row.precisions.items()
    )
    return f"missing; {row.install}" if row.is_missing() else f"{row.version()}, inference ({able})"


def multiplies(found: "Arithmetic") -> str:
    """Return which precisions a device multiplies in hardware and which to train in, for a person
    to read.

    >>> from lockstep.system.machine import parse_arithmetic
    >>> multiplies(parse_arithmetic("flags: avx2 fma", {}))
    'fp32 in hardware (AVX2); bf16, fp16 are emulated; train in fp32'
    """
    limit = f", limited by {found.limit}" if found.limit else ""
    emulated = (
        f"; {', '.join(found.emulated)} {'are' if len(found.emulated) > 1 else 'is'} emulated"
        if found.emulated
        else ""
    )
    extensions = ", ".join(found.extensions) or "no extension known"
    return (
        f"{', '.join(found.precisions)} in hardware ({extensions}{limit}){emulated}; train in"
        f" {found.pays}"
    )


def found_here(name: str) -> str:
    """Return the version and devices of an installed framework, or why it does not load."""
    from lockstep import backends
    from lockstep.system.errors import BackendError

    version = backends.FRAMEWORKS[name].version()
    try:
        return f"{version}: {'; '.join(backends.load(name).devices())}"
    except (ImportError, OSError, BackendError) as error:  # installed, but not for this machine
        return f"{version} does not load: {error}"


def _found_by(python: Path, name: str) -> str:
    """Return what `found_here` returns in a framework's own environment."""
    code = f"from lockstep.cli.doctor import found_here; print(found_here({name!r}))"
    try:
        done = subprocess.run(
            [python, "-P", "-c", code], capture_output=True, text=True, check=False
        )
    except OSError as error:
        return f"{python} cannot be run: {error.strerror}"
    said = (done.stderr if done.returncode else done.stdout).strip().splitlines()
    return f"{said[-1] if said else 'no answer'} ({python})"
