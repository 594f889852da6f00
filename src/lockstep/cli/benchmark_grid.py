"""`lockstep benchmark train`, `inference` and `all`, and `cell`, which they start for each cell."""

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.cli.terminal import print, print_json
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lockstep.benchmark.cells import Cell
    from lockstep.runs.events import Event

COMMANDS = {
    "train": "Measure training steps and what limits their speed.",
    "inference": "Measure inference, from uint8 images to logits.",
    "all": "Measure training and inference, in one report.",
}
"""Every command with its help text. docs/reference/benchmark-figures.md explains how every figure
is computed."""

Ranks = Annotated[
    str,
    typer.Option("-n", metavar="1,2", help="Ranks: processes that compute together."),
]
Batches = Annotated[
    str, typer.Option("-b", metavar="1,2,4", help="Batch sizes: images per rank and step.")
]
Dtypes = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="fp32,bf16",
        help="fp32, tf32, bf16 and fp16; int8 with --runtime.",
    ),
]
Backends = Annotated[
    str, typer.Option("--backend", metavar="A,B", help="Frameworks; `lockstep doctor` lists them.")
]
Runtimes = Annotated[
    str,
    typer.Option(
        "--runtime",
        metavar="A,B",
        help="native (the frameworks) and runtimes of `lockstep doctor`.",
    ),
]
Models = Annotated[
    str, typer.Option("--model", metavar="A,B", help="Models, such as resnet50-v1.5,resnet50-v1.")
]
Compilers = Annotated[
    str,
    rare("--compile", metavar="off,on", help="torch.compile or XLA: auto, on and off."),
]
Layouts = Annotated[
    str,
    rare("--layout", metavar="nhwc,nchw", help="auto, nhwc and nchw; PyTorch supports all."),
]
Data = Annotated[
    str,
    typer.Option(metavar="PATH", help="Images in any format, or synthetic: one batch, reused."),
]
Iterations = Annotated[
    int,
    typer.Option("-i", help="Iterations per epoch: training steps or inference batches.", min=1),
]
Epochs = Annotated[int, rare("-e", help="Measured epochs.", min=1)]
Warmup = Annotated[int, rare("-w", help="Warm-up epochs before the measured ones.", min=0)]
Examples = Annotated[
    int | None,
    rare("--num-examples", help="Use N images of the data (default: all).", min=1),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "-o", metavar="FILE", help="Report (JSON); cells already in it are not measured again."
    ),
]
Compare = Annotated[
    Path | None,
    typer.Option("--compare", metavar="FILE", help="Another report to show next to this one."),
]
OnlyInference = Annotated[bool, rare("--only-inference", help="Do not measure training.")]


def measure(
    context: typer.Context,
    ranks: Ranks = "1",
    batches: Batches = "1,2,4,8,16,32,64,128,256",
    dtypes: Dtypes = "fp32",
    backends: Backends = DEFAULT_BACKEND,
    runtimes: Runtimes = "native",
    models: Models = "resnet50-v1.5",
    compilers: Compilers = "auto",
    layouts: Layouts = "auto",
    data: Data = "synthetic",
    iterations: Iterations = 100,
    epochs: Epochs = 1,
    warmup: Warmup = 1,
    num_examples: Examples = None,
    only_inference: OnlyInference = False,
    recipe: options.Recipe = "resnet50-paddle-90ep",
    assignments: options.Set = None,
    out: Out = None,
    compare: Compare = None,
    as_json: options.AsJson = False,
) -> None:
    """Measure a grid of cells. The name of the command says what is measured."""
    from lockstep.benchmark.cells import Plan, grid
    from lockstep.benchmark.failures import OK
    from lockstep.benchmark.grid import benchmark, find_entries
    from lockstep.benchmark.report_file import read_benchmark
    from lockstep.cli.benchmark_tables import describe_cell, show_report
    from lockstep.cli.console import Reporter
    from lockstep.recipes import parse_settings

    options.interrupt_on_signals()
    other = None if compare is None else read_benchmark(compare)
    changes, execution = parse_settings(assignments or [])
    plan = Plan(iterations, epochs, warmup, num_examples, recipe, changes, execution)
    cells = grid(
        _list_tasks(str(context.info_name), only_inference),
        ranks=parse_numbers(ranks, "-n"),
        batches=parse_numbers(batches, "-b"),
        dtypes=_split_words(dtypes),
        backends=_split_words(backends),
        runtimes=_split_words(runtimes),
        models=_split_words(models),
        compiles=_split_words(compilers),
        layouts=_split_words(layouts),
        data=data,
    )
    for message in _note_emulation(cells, execution):
        print(f"note: {message}", file=sys.stderr)
    command = shlex.join(["lockstep", *sys.argv[1:]])
    with Reporter(is_quiet=as_json) as reporter:

        def listener(event: "Event") -> None:
            if event["kind"] == "cell" and not as_json:
                reporter.say(describe_cell(event["cell"], kept=event["kept"]))
            else:
                reporter(event)

        report = benchmark(cells, plan, out=out, command=command, listener=listener)
    if as_json:
        print_json(report)
    else:
        show_report(report, other)
    if not any(entry["status"] == OK for entry in find_entries(report, cells)):
        raise typer.Exit(1)


def cell(folder: Path) -> None:
    """Measure the cell that a folder describes."""
    from lockstep.benchmark.cell_process import work

    raise typer.Exit(work(folder))


def _list_tasks(command: str, only_inference: bool) -> list[str]:
    tasks = ["train", "inference"] if command == "all" else [command]
    if only_inference and "train" in tasks:
        tasks.remove("train")
    if not tasks:
        raise UserError(
            "--only-inference leaves nothing to measure in `benchmark train`; use `benchmark"
            " inference`"
        )
    return tasks


def _note_emulation(cells: "Sequence[Cell]", execution: dict[str, Any]) -> list[str]:
    """Return a note for each precision of a backend that this processor emulates; none on a GPU."""
    from lockstep.backends.emulation import find_emulation
    from lockstep.system.machine import gpu

    on_gpu = execution.get("device") != "cpu" and gpu() is not None
    native = [cell for cell in cells if cell.computes == cell.backend]
    notes = []
    for backend, dtype in dict.fromkeys((cell.backend, cell.dtype) for cell in native):
        emulated = find_emulation(dtype, on_gpu=on_gpu, backend=backend)
        if emulated:
            notes.append(
                f"{backend}: {emulated}; use --dtype {emulated.instead}, which is not emulated"
            )
    return notes


def _split_words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def parse_numbers(text: str, option: str) -> list[int]:
    """Return the numbers of an option with comma-separated numbers. Raises `UserError` if it holds
    something else."""
    try:
        numbers = [int(word) for word in _split_words(text)]
    except ValueError:
        numbers = []
    if not numbers:
        raise UserError(f"{option} is {text!r}, expected comma-separated numbers, such as 1,2,4")
    return numbers
