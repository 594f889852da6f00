"""`lockstep evaluate`."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.cli.terminal import escape_line, print, print_json
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.ranks import is_leading
from lockstep.system.text import list_first

if TYPE_CHECKING:
    from lockstep.inference.runtimes.scores import Speed
    from lockstep.runs.events import Event
    from lockstep.weights.calibration import Threshold

Data = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="Images in any format (default: the run's validation set)."),
]
Labels = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", help="Correct labels of a test set such as ReaL (docs/how-to/test-sets.md)."
    ),
]
Split = Annotated[
    float | None,
    rare(
        metavar="SHARE",
        help="Share to evaluate if there is no validation set (default: the run's; 0: all).",
    ),
]
Calibrate = Annotated[
    bool,
    typer.Option(
        "--calibrate", help="Fit and store a temperature, which calibrates probabilities."
    ),
]
PrecisionAt = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE", help="Store the threshold above which this share is right, such as 0.99."
    ),
]
Runtime = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help=(
            "native (default), auto (the fastest), a runtime of `lockstep doctor` (default for an"
            " ONNX export), or program (runs an export's own code: trust its author)."
        ),
    ),
]


def command(
    source: options.WeightsArgument,
    data: Data = None,
    labels: Labels = None,
    checkpoint: options.Checkpoint = None,
    ema: options.Ema = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
    classes: options.Classes = None,
    split: Split = None,
    batch: options.Batch = 32,
    calibrate: Calibrate = False,
    precision_at: PrecisionAt = None,
    as_json: options.AsJson = False,
    runtime: Runtime = None,
    backend: options.Backend = DEFAULT_BACKEND,
    loader: options.Loader = None,
    distributed: options.Distributed = None,
    assignments: options.SetForWeights = None,
    like: options.AsRecipe = None,
    require_signature: options.RequireSignature = None,
) -> None:
    """Evaluate weights or an exported model, each image once.

    Example: lockstep evaluate run --data photos
    """
    from lockstep.cli.console import Reporter

    settings, preprocessing = options.read_inference_options(
        assignments, backend, like, loader=loader, distributed=distributed
    )
    chosen: dict[str, Any] = {"checkpoint": checkpoint, "ema": ema, "classes": classes}
    with Reporter() as reporter:

        def listener(event: "Event") -> None:
            options.show_note(event)
            if not as_json:
                reporter(event)
            elif event["kind"] == "warning":
                print(f"warning: {event['message']}", file=sys.stderr)

        chosen |= {"preprocessing": preprocessing, "require_signature": require_signature}
        loaded = options.load_model(source, model, ignore, **chosen)
        loaded = loaded.on(runtime, batch=batch, listener=listener, **settings)
        evaluation = loaded.evaluate(
            data, labels=labels, split=split, calibrate=calibrate, precision_at=precision_at
        )
    if not is_leading():
        return
    if as_json:
        print_json(evaluation.to_json())
    else:
        _show(evaluation.to_json())


def _show(result: dict[str, Any]) -> None:
    from lockstep.models.class_metrics import FEW_IMAGES, find_small_classes
    from lockstep.models.metrics import describe_metrics
    from lockstep.recipes.published_accuracies import describe_comparison
    from lockstep.weights.calibration import describe_fit

    print(f"{result['source']} on {result['data']}")
    _show_sets(result)
    for title, value in describe_metrics(result, len(result["classes"])):
        print(f"  {title:<7} {value}")
    print(f"  speed   {describe_speed(result['speed'], result['runtime'])}")
    for name, text in describe_comparison(result["published"]):
        print(f"  {name} {text}")
    if "calibration" in result:
        fit = result["calibration"]
        stays = ""
        if fit is None and result["temperature"] != 1:
            stays = f"; the stored temperature {result['temperature']:.3g} is kept"
        print(f"  stored  {describe_fit(fit, result['calibration_reason'])}{stays}")
    if result.get("threshold") is not None:
        print(f"  stored  {describe_threshold(result['threshold'])}")
    for remark in result["remarks"]:
        print(f"  note: {escape_line(remark)}")
    small = [result["classes"][number] for number in find_small_classes(result["per_class"])]
    if small:
        names = escape_line(list_first(small, 5))
        print(f"  note: classes with fewer than {FEW_IMAGES} images have rough figures: {names}")
    data = result["data"]
    root = f"{data}/" if Path(data).is_dir() else ""  # other files are named by their own path
    for bad in result["quarantined"]:
        print(f"  left out: {escape_line(root + bad['file'])}: {bad['reason']}")


def _show_sets(result: dict[str, Any]) -> None:
    """Print a line for each group of the data sets in a folder: their top-1, their mean, and the
    error in percent of AlexNet's for a corruption of ImageNet-C."""
    from lockstep.inference.evaluation_sets import group_sets
    from lockstep.models.metrics import METRICS

    groups = group_sets(result.get("sets", {}))
    errors = result.get("corruption_errors", {})
    width = max(map(len, [*groups, "top-1, %"]))
    columns = set(map(tuple, groups.values()))
    if len(columns) == 1 and "" not in groups:
        names = " ".join(f"{escape_line(name):>6}" for name in columns.pop())
        print(f"  {'top-1, %':<{width}} {names}")
    for group, sets in groups.items():
        if not group:
            for name, part in sets.items():
                print(f"  {escape_line(name)}  top-1 {METRICS['top1'].describe(part)}")
            continue
        values = [part["top1_percent"] for part in sets.values()]
        cells = " ".join(f"{value:6.2f}" for value in values)
        line = f"  {escape_line(group):<{width}} {cells}  mean {sum(values) / len(values):6.2f}"
        error = errors.get(group.rpartition("/")[2])
        print(line if error is None else f"{line}  CE {error:6.2f}")
    if groups:
        print(f"  means over {len(result['sets'])} data sets:")
    if errors:
        print(f"  mCE     {errors['mean']:.2f} % of AlexNet's errors")


def describe_threshold(threshold: "Threshold") -> str:
    """Return a chosen threshold for a person to read."""
    low, high = threshold["precision_interval_percent"]
    if not threshold["unknown_below"]:
        return (
            "no threshold is needed: all images are answered, and"
            f" {threshold['precision_percent']:.2f} % ({low:.1f} to {high:.1f}) of"
            f" {threshold['answered']} are right"
        )
    return (
        f"unknown below {100 * threshold['unknown_below']:.2f} %:"
        f" {threshold['precision_percent']:.2f} % ({low:.1f} to {high:.1f}) of the"
        f" {threshold['answered']} answered images are right, and"
        f" {threshold['answered_percent']:.1f} % are answered"
    )


def describe_speed(speed: "Speed", runtime: str) -> str:
    """Return how fast an evaluation was, for a person to read.

    >>> describe_speed({"images_per_sec": 93.2, "batch_images": 32, "latency_ms": None}, "native")
    '93.2 images/s with decoding; native, batch 32'
    """
    text = (
        f"{speed['images_per_sec']:.1f} images/s with decoding; {runtime}, batch"
        f" {speed['batch_images']}"
    )
    latency = speed["latency_ms"]
    if latency is None:
        return text
    if latency["p95"] == latency["p100"]:  # fewer than 20 batches
        return f"{text}: mean {latency['mean']:.1f} ms"
    return f"{text}: {', '.join(f'{name} {ms:.1f}' for name, ms in latency.items())} ms"
