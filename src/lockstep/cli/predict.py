"""`lockstep predict`."""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.terminal import in_line, print
from lockstep.system.defaults import DEFAULT_BACKEND

if TYPE_CHECKING:
    from lockstep.cli.predict_forms import Form
    from lockstep.inference.named_images import NamedImages
    from lockstep.inference.prediction import Prediction, Predictor

    Keep = Callable[[Prediction], None]

_IMAGES = (
    "Image files, folders, quoted patterns ('*.jpg'), lists of paths (@names.txt), files of packed"
    " images, or - for standard input: an image, or paths."
)


def command(
    run: Annotated[str, typer.Argument(metavar="RUN", help=options.WEIGHTS, show_default=False)],
    images: Annotated[list[str] | None, typer.Argument(metavar="IMAGES", help=_IMAGES)] = None,
    source: Annotated[str | None, typer.Option("--run", hidden=True)] = None,
    top: Annotated[int, typer.Option(help="Classes to show for each image.", min=1)] = 5,
    checkpoint: options.Checkpoint = "newest",
    ema: options.Ema = False,
    model: options.Model = None,
    classes: options.Classes = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="table, csv, jsonl or json; by default that of --output's ending, or a table.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="The same as --format json: one list of all images.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option(help="Write to this file, completely or not at all.")
    ] = None,
    embeddings: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.npz",
            help="Write the features before the classifier, and the paths, to this file.",
        ),
    ] = None,
    explain: Annotated[
        Path | None,
        typer.Option(
            metavar="PNG|FOLDER",
            help=(
                "Draw what speaks for the likeliest class (Grad-CAM): a .png of one image, or a new"
                " folder."
            ),
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="Images in a batch.", min=1)] = 32,
    runtime: options.Runtime = None,
    backend: options.Backend = DEFAULT_BACKEND,
    assignments: options.SetForWeights = None,
    like: options.AsRecipe = None,
) -> None:
    """Show the likely classes of images and their probabilities.

    Exit code 1 if an image could not be read.
    """
    from lockstep import Predictor
    from lockstep.cli.predict_forms import chosen
    from lockstep.system.errors import LockstepError

    how = options.for_inference(assignments, backend, like)
    given = list(images or [])
    if source is not None:
        print("note: --run is not needed: lockstep predict RUN IMAGES...", file=sys.stderr)
        run, given = source, [run, *given]
    shown = chosen("json" if as_json and form is None else form, output)
    named = _named(given)
    how |= {
        "checkpoint": checkpoint,
        "ema": ema,
        "model": model,
        "classes": classes,
        "batch": batch,
    }
    _check_files(output, embeddings, explain, len(named))
    how |= {"features": embeddings is not None, "explain": explain is not None, "runtime": runtime}
    with ExitStack() as open_files:
        predictor = open_files.enter_context(
            Predictor(options.find_weights(run), listener=options.show_note, **how)
        )
        write = open_files.enter_context(_destination(output))
        keep = (
            [open_files.enter_context(_embeddings(embeddings, predictor.features))]
            if embeddings is not None
            else []
        )
        if explain is not None:
            keep.append(open_files.enter_context(_explanations(explain)))
        failed = _predicted(predictor, named, top, shown, write, keep)
    for path in (output, embeddings, explain):
        if path is not None and path.exists():
            print(
                f"wrote {path}: {len(named) - failed} images",
                file=sys.stdout if output is not None else sys.stderr,
            )
    if failed:
        raise LockstepError(f"{failed} of {len(named)} images could not be read")


def _named(arguments: list[str]) -> "NamedImages":
    """Return the images that arguments name. A note lists how many files of folders are left out."""
    from lockstep.inference.named_images import NamedImages
    from lockstep.system.errors import DataError

    named = NamedImages()
    for argument in arguments:
        named.add(argument, sys.stdin.buffer)
    if named.left_out:
        example = in_line(named.left_out[0])
        print(
            f"note: files of other kinds are left out: {len(named.left_out)}, such as {example}",
            file=sys.stderr,
        )
    if not len(named):
        raise DataError(
            "no images are named; expected lockstep predict RUN IMAGES: files, folders, 'patterns',"
            " @list or -"
        )
    return named


def _predicted(
    predictor: "Predictor",
    named: "NamedImages",
    top: int,
    form: "Form",
    write: Any,
    keep: "Sequence[Keep]",
) -> int:
    """Write the predictions of all images, give them to each of `keep`, and return how many could
    not be read."""
    from lockstep.cli.console import Reporter

    failed = 0
    with Reporter(to_stderr=True) as reporter:
        progress = reporter.progress("predicting")

        def on_error(name: str, reason: str) -> None:
            nonlocal failed
            failed += 1
            print(f"lockstep: {in_line(name)}: {in_line(reason)}", file=sys.stderr)

        write(form.begin())
        with closing(predictor.predict(named, top, on_error=on_error)) as predictions:
            for done, prediction in enumerate(predictions, start=1):
                write(form.row(prediction))
                for each in keep:
                    each(prediction)
                progress(done + failed, len(named))
        write(form.end())
    return failed


@contextmanager
def _embeddings(path: Path, features: int) -> "Iterator[Keep]":
    """Yield a function that adds a prediction to the file of embeddings."""
    from lockstep.inference.embeddings import write_embeddings

    with write_embeddings(path, features) as file:
        yield lambda prediction: file.add(str(prediction.path), prediction.features)  # type: ignore[arg-type]


def _check_files(
    output: Path | None, embeddings: Path | None, explain: Path | None, images: int
) -> None:
    """Raise `UserError` if a file cannot be written under its name, before anything is computed."""
    from lockstep.system.errors import UserError

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
def _explanations(path: Path) -> "Iterator[Keep]":
    """Yield a function that draws the explanation of a prediction: to the file `path` if it is a
    .png, or into a folder."""
    from lockstep.system.files import appearing_folder, replacing

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
def _destination(output: Path | None) -> Iterator[Any]:
    """Yield a function that writes text to a file, or to standard output so that a reader has it at
    once."""
    from lockstep.system.files import written_text

    if output is None:

        def write(text: str) -> None:
            print(text, end="")
            sys.stdout.flush()

        yield write
        return
    with written_text(output) as file:
        yield file.write
