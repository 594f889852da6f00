"""`lockstep data`: inspect and check data sets, and write them in another storage format."""

import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lockstep.cli import options
from lockstep.cli.terminal import escape_line, print, print_json
from lockstep.system.defaults import DEFAULT_BACKEND
from lockstep.system.errors import DataError, UserError, nearest
from lockstep.system.text import format_count

if TYPE_CHECKING:
    from lockstep.data.checking import Report
    from lockstep.data.images import Quarantined
    from lockstep.data.index import Index
    from lockstep.models.architectures import ModelSpec
    from lockstep.recipes import Recipe
    from lockstep.runs.starting_weights import StartSource
    from lockstep.weights import WeightsChoice

    Choose = Callable[[], WeightsChoice]

app = typer.Typer(help="Index, inspect, check and convert data sets.", no_args_is_help=True)

Data = Annotated[
    Path, typer.Argument(help="A data set: training and validation images, or a folder of images.")
]
_SHOWN = 5
"""A table lists at most this many findings of a kind."""
_SHOWN_SUSPECTS = 20
_DRAWN_SUSPECTS = 60


@app.command("pack")
def pack(
    source: Annotated[Path, typer.Argument(help="The data set to read, in any form.")],
    target: Annotated[Path, typer.Argument(help="The folder to write to.")],
    format: Annotated[
        str, typer.Option(metavar="NAME", help="recordio, tfrecord, webdataset or folder.")
    ] = "webdataset",
    shards: Annotated[
        int, typer.Option(min=0, help="Files per split; 0: one for RecordIO, else by size.")
    ] = 0,
    workers: Annotated[int, typer.Option(min=0, help="Threads; 0: one per core.")] = 0,
    resize: Annotated[
        int, typer.Option(min=0, help="Reduce the shorter side to N pixels; 0: copy unchanged.")
    ] = 0,
    quality: Annotated[
        int, typer.Option(min=1, max=100, help="JPEG quality of reduced images, 1 to 100.")
    ] = 95,
    first_label: Annotated[
        int, typer.Option(min=0, help="Label of the first class in the source's files.")
    ] = 0,
    image: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column of images in a table or list.")
    ] = "",
    label: Annotated[
        str, typer.Option(metavar="COLUMN", help="Column of labels in a table or list.")
    ] = "",
    images: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder of a list's images (default: the list's)."),
    ] = None,
) -> None:
    """Write a data set in another storage format.

    SOURCE may also be Parquet, a save_to_disk folder, a list of images (CSV, JSON lines), or
    compressed tars and TFRecords; unusable images are left out and named (exit code 1).
    """
    from lockstep.cli.console import Reporter
    from lockstep.data.images import printable
    from lockstep.data.packing import Columns, Packing
    from lockstep.data.packing import pack as write

    packing = Packing(format, shards, resize, quality, first_label, workers)
    count_left_out = 0
    with Reporter() as reporter:

        def left_out(split: str, bad: "Quarantined") -> None:
            nonlocal count_left_out
            count_left_out += 1
            place = "/".join(filter(None, (split, bad.file)))
            reporter.say(f"left out: {escape_line(printable(place))}: {bad.reason}")

        progress = reporter.progress("packing")
        columns = Columns(image, label, images)
        counts = write(source, target, packing, progress, left_out, columns, reporter.say)
    for split, count in counts.items():
        folder = target / split if split == "test" else target
        print(f"{split}: {format_count(count, 'image')} in {folder}")
    if count_left_out:
        print(f"left out: {format_count(count_left_out, 'image')}, named above")
        raise typer.Exit(1)


@app.command("stage")
def stage(
    data: Data,
    to: Annotated[Path, typer.Option(metavar="FOLDER", help="Folder on a local disk.")],
) -> None:
    """Copy a data set and its index to a local disk.

    Copies only missing files; runs treat the copy as the same data set.
    """
    from lockstep.cli.console import Reporter
    from lockstep.data.staged_copy import stage

    with Reporter() as reporter:
        staged = stage(data, to, reporter.progress("copying"))
    print(
        f"{format_count(staged.files, 'file')} in {to}, {staged.copied} of them copied now:"
        f" {staged.copied_bytes / 1e9:.2f} GB"
    )


@app.command("index")
def index(data: Data) -> None:
    """Decode every image once and save what training needs to know.

    Replaces an existing index.
    """
    for split, index in _indexes(data, fresh=True):
        print(
            f"{split}: {_format_size(len(index), len(index.classes))},"
            f" {len(index.quarantined)} left out"
        )
        for bad in index.describe_quarantine():
            print(f"  left out: {escape_line(bad['file'])}: {bad['reason']}")


@app.command("info")
def info(data: Data, as_json: options.AsJson = False) -> None:
    """Print counts, classes, sizes and a histogram of the labels."""
    from lockstep.data.dataset_facts import facts

    splits = {split: facts(index) for split, index in _indexes(data, quiet=as_json)}
    if as_json:
        print_json(splits)
        return
    for split, about in splits.items():
        print(split)
        for name, value in _describe_facts(about):
            print(f"  {name:<18} {value}")


def _describe_facts(about: dict[str, Any]) -> list[tuple[str, str]]:
    sizes = about["shorter_side"]
    counts = about["images_by_class"]
    most = max(counts.values())
    least = min(counts.values())
    bar = max(most // 40, 1)
    shown = sorted(counts.items(), key=lambda pair: -pair[1])
    rows = [
        ("format", f"{about['format']}, {format_count(about['files'], 'file')}"),
        ("images", f"{about['images']}, {about['bytes'] / 1e6:,.1f} MB"),
        ("left out", str(about["quarantined"])),
        ("classes", f"{len(counts)}, {least} to {most} images each"),
        ("shorter side", f"{sizes['least']} to {sizes['most']} px, median {sizes['median']}"),
        ("digest", about["digest"][:16]),
    ]
    rows += [
        (escape_line(name)[:18], f"{count:>7} {'#' * (count // bar)}") for name, count in shown[:10]
    ]
    if len(shown) > 10:
        rows += [("...", f"{len(shown) - 10} more; --json lists all")]
    return rows


@app.command("check")
def check(
    context: typer.Context,
    data: Data,
    logits: Annotated[
        int, typer.Option(min=0, help="Outputs of the model; 0: one for each class in the data.")
    ] = 0,
    smallest: Annotated[
        int, typer.Option(min=1, help="Report images whose shorter side is below N pixels.")
    ] = 32,
    split: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Without val: share to hold out and compare with the rest (default: 0.3).",
        ),
    ] = None,
    quarantine: Annotated[
        bool,
        typer.Option(
            "--quarantine", help="List unusable images in quarantine.json: training skips them."
        ),
    ] = False,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RUN",
            help="Find wrong labels instead, with runs (such as --folds) on this data; repeatable.",
        ),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(metavar="FILE", help="With --labels: PNG of images with doubtful labels."),
    ] = Path("labels.png"),
    as_json: options.AsJson = False,
) -> None:
    """Read all images and look for problems that would spoil training.

    Exit code 1 if you should act on one.
    """
    from lockstep.cli.console import Reporter
    from lockstep.data.checking import KINDS, examine

    unused = ("logits", "smallest", "split", "quarantine") if labels else ("out",)
    for name in unused:
        source = context.get_parameter_source(name)
        if source is not None and source.name != "DEFAULT":
            when = "without" if labels else "with"
            raise typer.BadParameter(f"--{name} works only {when} --labels; leave it out")
    if labels:
        _check_labels(data, labels, out, as_json=as_json)
        return
    with Reporter(is_quiet=as_json) as reporter:
        progress = reporter.progress("checking")
        report = examine(
            data, logits=logits or None, smallest=smallest, share=split, progress=progress
        )
    written: list[Path] = []
    if quarantine:
        written = report.write_quarantine()
    if as_json:
        print_json(report.describe())
    else:
        for line in _report_lines(report):
            print(line)
        for path in written:
            print(f"wrote {path}: every loader leaves out the images in it")
    if not all(KINDS[kind].harmless for kind in report.count_kinds()):
        raise typer.Exit(1)


def _check_labels(data: Path, runs: list[str], out: Path, *, as_json: bool) -> None:
    """Show the images of a data set whose label is probably wrong, and draw the first of them."""
    from lockstep.cli.console import Reporter
    from lockstep.data.contact_sheet import write_sheet
    from lockstep.inference.label_errors import check_labels, draw_suspects
    from lockstep.models.accuracy_interval import format_accuracy
    from lockstep.runs.folder import suggest_folds

    with Reporter(to_stderr=True) as reporter:
        check = check_labels(data, runs, listener=reporter)
    suspects = check.suspects
    if as_json:
        rows = [suspect.describe() for suspect in suspects]
        counts = {"images": check.images, "judged": check.judged, "right": check.right}
        counts["trained"] = check.trained
        print_json(counts | {"suspects": rows})
    else:
        print(
            f"{check.judged} of {check.images} images were judged by runs that did not train on"
            f" them; doubtful: {format_count(len(suspects), 'label')}"
        )
        if check.trained:
            print(
                f"note: not judged: {format_count(check.trained, 'image')} that the weights these"
                " runs started from were trained on; to judge them too:"
                f" {suggest_folds(Path(runs[0]), data)}"
            )
        if check.odds > 1:
            accuracy = format_accuracy(100 * check.right / check.judged, check.judged)
            print(
                f"note: these runs have a top-1 of only {accuracy}, so they also doubt correct"
                f" labels. A label is listed if another class is over {check.odds:g} times as"
                " likely; look at every image, or train better runs first"
            )
        for suspect in suspects[:_SHOWN_SUSPECTS]:
            print(
                f"  {escape_line(suspect.place)}: {escape_line(suspect.label)}"
                f" {100 * suspect.label_probability:.1f} %, {escape_line(suspect.suggestion)}"
                f" {100 * suspect.suggestion_probability:.1f} %"
            )
        if len(suspects) > _SHOWN_SUSPECTS:
            print(f"  ... and {len(suspects) - _SHOWN_SUSPECTS} more; --json lists all")
    if suspects:
        write_sheet(draw_suspects(check, _DRAWN_SUSPECTS), out, "images whose label may be wrong")
        if not as_json:
            print(f"wrote {out}; look at the images before you change a label")
        raise typer.Exit(1)


def _format_size(images: int, classes: int) -> str:
    return f"{format_count(images, 'image')} of {format_count(classes, 'class')}"


def _report_lines(report: "Report") -> Iterator[str]:
    from lockstep.data.checking import KINDS
    from lockstep.data.images import printable

    for split in report.splits:
        left_out = f", {split.left_out} already left out" if split.left_out else ""
        megabytes = f"{split.total_bytes / 1e6:,.1f} MB"
        what = f"{_format_size(split.images, split.classes)}, {megabytes}{left_out}"
        yield f"{split.name or split.root} ({split.format or 'two formats'}): {what}"
    for kind, count in report.count_kinds().items():
        about = KINDS[kind]
        yield f"{about.severity:<8} {kind:<22} {count:>7}  {about.meaning}"
        findings = [finding for finding in report.findings if finding.kind == kind]
        for finding in findings[:_SHOWN]:
            where = "/".join(filter(None, (finding.split, finding.place)))
            if finding.name not in ("", finding.place):
                where += f" ({finding.name})"
            detail = escape_line(printable(finding.detail))
            yield f"         {escape_line(printable(where))}: {detail}"
        if len(findings) > _SHOWN:
            yield f"         ... and {len(findings) - _SHOWN} more; --json lists all"
        yield f"         -> {about.remedy}"
    if report.findings:
        yield format_count(len(report.findings), "finding")
    else:
        yield "nothing found"


@app.command("show")
def show(
    data: Data,
    recipe: options.RecipeOrNone = None,
    weights: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Show images as `train --weights SOURCE` prepares them.",
        ),
    ] = None,
    model: options.Model = None,
    ignore: options.Ignore = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="PNG or HTML page to write.")] = Path(
        "sheet.png"
    ),
    images: Annotated[int, typer.Option(min=1, max=1000, help="Show N images, at most 1000.")] = 32,
    split: Annotated[
        str, typer.Option(metavar="NAME", help="train or val, each as a run sees it.")
    ] = "train",
    epoch: Annotated[int, typer.Option(min=1, help="Epoch of the training, from 1.")] = 1,
    step: Annotated[int, typer.Option(min=1, help="First step to show, from 1.")] = 1,
    assignments: options.Set = None,
) -> None:
    """Draw a contact sheet of images as the model sees them.

    Images are cropped, flipped, resized and mixed as in a run.
    """
    from lockstep.data.contact_sheet import contact_sheet, write_sheet
    from lockstep.recipes.image_sizes import find_size

    changes, _ = options.read_fields(assignments)
    choose = None
    if weights is not None:
        choose = partial(options.choose_weights, weights, model=model, ignore=ignore)
    index, settled = _open_shown(data, recipe, choose, changes, split)
    sheet = contact_sheet(
        index, settled, images, evaluation=split == "val", epoch=epoch - 1, step=step - 1
    )
    size = settled.eval_crop if split == "val" else find_size(settled, epoch - 1)
    changed = ", with the fields of --set" if changes else ""
    caption = f"images of {size} px, as {recipe or settled.based_on} prepares them{changed}"
    write_sheet(sheet, out, caption)
    print(f"{out}: {caption}")


def _open_shown(
    data: Path, name: str | None, weights: "Choose | None", changes: dict[str, Any], split: str
) -> "tuple[Index, Recipe]":
    """Return the index of a split, and the recipe that `train` uses with these options. If the
    recipe has a validation share or a fold, the images are divided as in its runs."""
    from lockstep.data.split import arrange_classes, divide_index
    from lockstep.recipes import load_recipe, my_images
    from lockstep.runs.folder import read_classes

    recipe = source = None
    wanted = my_images.check_changes(changes)
    division = wanted.division
    if name is None or name in my_images.OWN_IMAGES:
        options.switch_environment(DEFAULT_BACKEND)  # before anything is read or printed
        source = _find_source(data, name, weights, wanted.model)
    elif weights is not None:
        raise UserError(
            f"the recipe {name:.100} decides how images are prepared, not the weights: leave out"
            " --weights or --recipe"
        )
    else:
        recipe = load_recipe(name).replace(**changes)
        division = recipe.division
    own = read_classes(Path(name or ""))
    order = (recipe or wanted).class_order
    indexes = {split: arrange_classes(index, order, own) for split, index in _indexes(data)}
    if division:
        whole = indexes.get("train") or indexes[""]
        indexes = dict(zip(("train", "val"), divide_index(whole, division), strict=True))
    named = split if split in indexes else ""
    if named not in indexes:
        raise DataError(f"{data} has no split {split}. {nearest(split, indexes)}")
    index = indexes[named]
    if recipe is None:
        recipe = _choose_recipe(name or "", source, indexes.get("train", index), changes)
    return index, recipe


def _find_source(
    data: Path, name: str | None, weights: "Choose | None", model: "str | ModelSpec"
) -> "StartSource | None":
    """Return the weights of `data show`, before images are read. Errors of the data come before a
    download."""
    from lockstep.data.sources import find_sources
    from lockstep.data.stores.mirror import find_folder
    from lockstep.runs.recipe_from_images import check_has_weights
    from lockstep.runs.starting_weights import StartSource

    find_sources(find_folder(data))
    source = None if weights is None else StartSource(weights(), model=model)
    check_has_weights(name, source)
    if source is not None:
        source.check_exists()
    return source


def _choose_recipe(
    name: str, source: "StartSource | None", training: "Index", changes: dict[str, Any]
) -> "Recipe":
    """Return the recipe that `train` chooses from the images, on PyTorch's device. Without PyTorch
    it is that of a CPU, and a note says so."""
    from contextlib import closing

    from lockstep import backends
    from lockstep.recipes import Execution
    from lockstep.runs.recipe_from_images import choose_from_images
    from lockstep.runs.recorder import Recorder

    how = Execution(backend=DEFAULT_BACKEND)
    if backends.FRAMEWORKS[how.backend].version() is None:
        print("note: PyTorch is not installed, so these are the sizes for a CPU", file=sys.stderr)
        how = Execution(backend="reference")
    with closing(backends.load(how.backend).world(how)) as world, Recorder(None) as recorder:
        return choose_from_images(name, source, training, changes, how, world, recorder, Path())


@app.command("sort-val")
def sort_val(
    folder: Annotated[Path, typer.Argument(help="Folder of validation images.")],
    labels: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help="File with a line per image: its name and class, or only the class in name order.",
        ),
    ],
) -> None:
    """Move the images of a flat folder into one folder for each class."""
    from lockstep.data.sorted_folders import sort_into_classes

    sorted_images = format_count(sort_into_classes(folder, labels), "image")
    print(f"{sorted_images} sorted into classes in {folder}")


def _indexes(data: Path, *, fresh: bool = False, quiet: bool = False) -> "list[tuple[str, Index]]":
    from lockstep.cli.console import Reporter
    from lockstep.data.index import open_index
    from lockstep.data.sources import find_sources
    from lockstep.data.split import note_skipped
    from lockstep.data.stores.mirror import find_folder

    indexes: list[tuple[str, Index]] = []
    folder = find_folder(data)
    with Reporter(is_quiet=quiet) as reporter:
        for split, source in find_sources(folder).items():
            classes = indexes[0][1].classes if indexes else None
            progress = reporter.progress(f"indexing {split}".strip())
            index = open_index(source, classes=classes, progress=progress, anew=fresh)
            indexes.append((split, index))
        for note in note_skipped(folder, [index for _, index in indexes]):
            reporter.say(f"note: {note}")
    return indexes
