"""`lockstep predict`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.command import rare
from lockstep.cli.terminal import escape_line, print
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import DataError, LockstepError, UserError
from lockstep.system.files import appearing_folder, replacing, written_text
from lockstep.system.text import format_count

if TYPE_CHECKING:
    from lockstep.cli.predict_forms import Form as OutputForm
    from lockstep.inference.named_images import NamedImages
    from lockstep.inference.prediction import Prediction

    Keep = Callable[[Prediction], None]

Top = Annotated[int, typer.Option(help="Show this many classes per image.", min=1)]
Form = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help="table, csv, jsonl or json (default: --output's ending, or table).",
    ),
]
AsJson = Annotated[bool, rare("--json", help="The same as --format json.")]
Output = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Write to this file, completely or not at all.")
]
Embeddings = Annotated[
    Path | None,
    rare(metavar="FILE.npz", help="Write features; --format or --output adds predictions."),
]
Explain = Annotated[
    Path | None,
    typer.Option(
        metavar="PNG|FOLDER",
        help="Draw Grad-CAM of the top class: a .png of one image, or a new folder.",
    ),
]


def command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help=f"{options.WEIGHTS}.", show_default=False)
    ],
    images: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="IMAGES",
            help="Files, folders, '*.jpg', lists (@names.txt), packed images, or - for stdin.",
        ),
    ] = None,
    source: Annotated[str | None, typer.Option("--run", hidden=True)] = None,
    top: Top = 5,
    checkpoint: options.Checkpoint = None,
    ema: options.Ema = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
    classes: options.Classes = None,
    unknown_below: options.UnknownBelow = None,
    form: Form = None,
    as_json: AsJson = False,
    output: Output = None,
    embeddings: Embeddings = None,
    explain: Explain = None,
    batch: options.Batch = 32,
    runtime: options.Runtime = None,
    backend: options.Backend = DEFAULT_BACKEND,
    assignments: options.SetForWeights = None,
    like: options.AsRecipe = None,
    require_signature: options.RequireSignature = None,
) -> None:
    """Show likely classes of images and their probabilities.

    Example: lockstep predict run photo.jpg photos/
    """
    from lockstep.cli.predict_forms import choose_form
    from lockstep.inference.runtimes import start_import
    from lockstep.weights.recognition import check_exists

    settings, preprocessing = options.read_inference_options(assignments, backend, like)
    names = list(images or [])
    if source is not None:
        print("note: --run is not needed: lockstep predict RUN IMAGES...", file=sys.stderr)
        names.insert(0, run)
        run = source
    writer = choose_form("json" if as_json and form is None else form, output)
    is_printed = embeddings is None or output is not None or form is not None or as_json
    named = _list_images(names)
    _check_files(output, embeddings, explain, len(named))
    weights = options.find_weights(run)
    check_exists(weights)
    _refuse_missing(named)
    chosen: dict[str, Any] = {"checkpoint": checkpoint, "ema": ema, "classes": classes}
    chosen |= {"unknown_below": unknown_below, "preprocessing": preprocessing}
    chosen["require_signature"] = require_signature
    extras: dict[str, Any] = {"features": embeddings is not None, "explain": explain is not None}
    start_import(runtime or "", settings["execution"])  # while weights are read, on another core
    with ExitStack() as stack:
        loaded = options.load_model(str(weights), model, ignore, **chosen)
        loaded = loaded.on(runtime, batch=batch, listener=options.show_note, **settings)
        stack.enter_context(loaded)
        writer.unknown_below = loaded.unknown_below
        write = stack.enter_context(_open_output(output, is_printed))
        keepers = []
        if embeddings is not None:
            keepers.append(stack.enter_context(_keep_embeddings(embeddings, loaded.features)))
        if explain is not None:
            keepers.append(stack.enter_context(_keep_explanations(explain)))
        predict = partial(loaded.predict, named, top=top, **extras)
        failed = _predict_all(predict, named, writer, write, keepers)
    for path in (output, embeddings, explain):
        if path is not None and path.exists():
            file = sys.stderr if output is None and is_printed else sys.stdout
            features = f" of {loaded.features} features" if path == embeddings else ""
            count = format_count(len(named) - failed, "image")
            print(f"wrote {path}: {count}{features}", file=file)
    if failed:
        raise LockstepError(f"{failed} of {format_count(len(named), 'image')} could not be read")


def _list_images(arguments: list[str]) -> "NamedImages":
    """Return the images that arguments name. A note counts files of folders that are left out."""
    from lockstep.inference.named_images import NamedImages

    named = NamedImages()
    for argument in arguments:
        named.add(argument, sys.stdin.buffer)
    if named.left_out:
        files = format_count(len(named.left_out), "file")
        example = escape_line(named.left_out[0])
        print(f"note: left out {files} of other kinds, such as {example}", file=sys.stderr)
    if not len(named):
        raise DataError(
            "no images are named; expected lockstep predict RUN IMAGES: files, folders, 'patterns',"
            " @list or -"
        )
    return named


def _refuse_missing(named: "NamedImages") -> None:
    """Raise `LockstepError` if none of the images exists, before a framework is imported."""
    if not named.are_missing():
        return
    for name in named:
        print(f"lockstep: {escape_line(str(name))}: No such file or directory", file=sys.stderr)
    raise LockstepError(f"{len(named)} of {format_count(len(named), 'image')} could not be read")


def _predict_all(
    predict: "Callable[..., Any]",
    named: "NamedImages",
    form: "OutputForm",
    write: Any,
    keepers: "Sequence[Keep]",
) -> int:
    """Write the predictions of all images, give them to all `keepers`, and return how many could
    not be read."""
    failed = 0
    with ExitStack() as stack:
        progress = None
        if len(named) > 1:
            from lockstep.cli.console import Reporter

            progress = stack.enter_context(Reporter(to_stderr=True)).progress("predicting")

        def report_error(name: str, reason: str) -> None:
            nonlocal failed
            failed += 1
            print(f"lockstep: {escape_line(name)}: {escape_line(reason)}", file=sys.stderr)

        write(form.begin())
        with closing(predict(on_error=report_error)) as predictions:
            for done, prediction in enumerate(predictions, start=1):
                write(form.row(prediction))
                for keep in keepers:
                    keep(prediction)
                if progress is not None:
                    progress(done + failed, len(named))
        write(form.end())
    return failed


@contextmanager
def _keep_embeddings(path: Path, features: int) -> "Iterator[Keep]":
    """Yield a function that adds a prediction to the file of embeddings."""
    from lockstep.inference.embeddings import write_embeddings

    with write_embeddings(path, features) as file:

        def keep(prediction: "Prediction") -> None:
            assert prediction.features is not None
            file.add(str(prediction.path), prediction.features)

        yield keep


def _check_files(
    output: Path | None, embeddings: Path | None, explain: Path | None, images: int
) -> None:
    """Raise `UserError` if a file cannot be written under its name, before anything is computed."""
    for path in (output, embeddings):
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a folder; name a file to write")
    if explain is None:
        return
    if explain.suffix.lower() != ".png" and explain.exists():
        raise UserError(
            f"--explain {explain} already exists; name a new folder, or a .png for one image"
        )
    if explain.suffix.lower() == ".png" and images > 1:
        raise UserError(
            f"--explain {explain} is one picture, but there are {images} images; name a new folder"
        )


@contextmanager
def _keep_explanations(path: Path) -> "Iterator[Keep]":
    """Yield a function that draws the explanation of a prediction: to the file `path` if it is a
    .png, or into a folder."""
    if path.suffix.lower() == ".png":

        def draw(prediction: "Prediction") -> None:
            with replacing(path) as partial:
                _save(prediction, partial)

        yield draw
        return
    with appearing_folder(path) as folder:
        folder.mkdir()
        numbers = count()

        def draw_next(prediction: "Prediction") -> None:
            stem = prediction.path.stem[:50] if prediction.path is not None else ""
            _save(prediction, folder / f"{next(numbers):06d}-{stem}.png")

        yield draw_next


def _save(prediction: "Prediction", path: Path) -> None:
    from PIL import Image

    assert prediction.explanation is not None
    Image.fromarray(prediction.explanation).save(path, "PNG")


@contextmanager
def _open_output(output: Path | None, is_printed: bool) -> Iterator[Any]:
    """Yield a function that writes text to a file, to standard output without delay, or nowhere."""
    if output is None:

        def write(text: str) -> None:
            if is_printed:
                print(text, end="")
                sys.stdout.flush()

        yield write
        return
    with written_text(output) as file:
        yield file.write
