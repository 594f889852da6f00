"""`lockstep evaluate`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lockstep.cli import options
from lockstep.cli.terminal import in_line, print, print_json
from lockstep.system.defaults import DEFAULT_BACKEND

if TYPE_CHECKING:
    from lockstep.inference.runtimes.scoring import Speed


def command(
    source: options.WeightsArgument,
    data: Annotated[
        Path, typer.Option(help="Validation images in any storage format, or a folder of images.")
    ],
    checkpoint: options.Checkpoint = "newest",
    ema: options.Ema = False,
    model: options.Model = None,
    classes: options.Classes = None,
    split: Annotated[
        float | None,
        typer.Option(
            help=(
                "Share of the images to evaluate if the data has no validation part; by default the"
                " run's. 0: all."
            )
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images in a batch on each rank.", min=1)] = 32,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the whole result as JSON.")
    ] = False,
    runtime: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=(
                "What infers: native (the framework; the default), auto (the fastest installed),"
                " program (an export's own "
                "runtime; it can run code, so trust its writer), or see `lockstep doctor`."
            ),
        ),
    ] = None,
    backend: options.Backend = DEFAULT_BACKEND,
    loader: options.Loader = None,
    distributed: options.Distributed = None,
    assignments: options.SetForWeights = None,
    like: options.AsRecipe = None,
) -> None:
    """Evaluate weights or an exported model, each image once."""
    from lockstep import evaluate
    from lockstep.cli.console import Reporter
    from lockstep.models.metrics import format_loss, is_top5_informative
    from lockstep.recipes.published_accuracies import describe_comparison
    from lockstep.runs.events import Event
    from lockstep.system.ranks import is_leading

    how = options.for_inference(
        assignments, backend, like, loader=loader, distributed=distributed
    ) | {"runtime": runtime}
    with Reporter() as reporter:

        def listener(event: Event) -> None:
            options.show_note(event)
            if not as_json:
                reporter(event)

        how |= {
            "model": model,
            "classes": classes,
            "split": split,
            "batch": batch,
            "listener": listener,
        }
        result = evaluate(source, data, checkpoint=checkpoint, ema=ema, **how)
    if not is_leading():
        return
    if as_json:
        print_json(result)
        return
    print(f"{result['source']} on {result['data']}")
    print(f"  top-1   {result['top1_percent']:.2f} % of {result['images']} images")
    if is_top5_informative(len(result["classes"])):
        print(f"  top-5   {result['top5_percent']:.2f} %")
    print(f"  loss    {format_loss(result['loss'])}")
    print(f"  speed   {speed(result['speed'], result['runtime'])}")
    for name, text in describe_comparison(result["published"]):
        print(f"  {name} {text}")
    for remark in result["remarks"]:
        print(f"  note: {in_line(remark)}")
    for bad in result["quarantined"]:
        print(f"  left out: {in_line(bad['file'])}: {bad['reason']}")


def speed(found: "Speed", runtime: str) -> str:
    """Return how fast an evaluation was, for a person to read.

    >>> speed({"images_per_sec": 93.26, "batch_images": 32, "latency_ms": {"p50": 301.23, "p99": 342.0}}, "openvino")
    '93.3 images/s with decoding; openvino, batch 32: p50 301.2, p99 342.0 ms'
    """
    latency = found["latency_ms"]
    times = (
        ""
        if latency is None
        else ": " + ", ".join(f"{name} {value:.1f}" for name, value in latency.items()) + " ms"
    )
    return (
        f"{found['images_per_sec']:.1f} images/s with decoding; {runtime}, batch"
        f" {found['batch_images']}{times}"
    )
