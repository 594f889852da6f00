"""The card of a model, `README.md`: what is known about it, for people and for Hugging Face's hub.

Every figure comes from the files of a run and its weights; missing ones are listed as not known.
Names that anybody may have chosen are escaped, and paths of this machine are left out.
"""

import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from textwrap import indent
from typing import Any

import yaml

from lockstep.models.accuracy_interval import format_accuracy, wilson
from lockstep.models.class_metrics import ClassCounts
from lockstep.models.metrics import list_metrics
from lockstep.runs.reading import Run, read_run
from lockstep.runs.starting_weights import read_start
from lockstep.system.errors import CheckpointError, LockstepError
from lockstep.system.event_log import compute_seconds
from lockstep.system.files import write_text
from lockstep.system.text import list_first
from lockstep.system.version import version
from lockstep.weights import Weights, checkpoint
from lockstep.weights.fingerprints import hash_files
from lockstep.weights.preprocessing import read_evaluation
from lockstep.weights.run_identity import read_identity

_HALF = 10
"""Of more than twice this many classes, only this many of the worst and of the best are listed."""
_MACHINE = ("ranks", "device", "processor", "cores", "system", "lockstep", "python", "numpy")
"""What `environment.json` says of a machine. The version of the backend follows."""
_MARKUP = re.compile(r"[\\`*#\[\]<>|~&$@!]|(?<![^\W_])_|_(?![^\W_])|:(?!\d)|(?<!\d)\.|\.(?!\d)")
"""What Markdown may read as more than a letter, such as a link or a cell of a table."""
_FORMULA = {"\\": "&#92;", "$": "&#36;"}
"""What begins a formula on the hub, also after a backslash."""
Rows = dict[str, object]


@dataclass
class _Origin:
    """What the files around weights say about them. Digests are of an index of images, or ""."""

    missing: str = "the weights are not in a run's folder"
    run: Run | None = None
    training: str = ""
    validation: str = ""
    event: Any = None
    """The `EvaluateEvent` of the weights, if the run evaluated them as they are."""
    hits: int = 0
    counts: ClassCounts | None = None
    """The same by class, if the run has kept it."""


def write_card(
    folder: Path, weights: Weights, form: str, compared: Any = None, *, is_requantised: bool = False
) -> list[str]:
    """Write the card of weights into their new folder, and return the names of its files.

    The weights have scales only if these are written, too. `form` is the format, such as "timm",
    and `compared` the certificate of the conversion or the comparison of the export. With
    `is_requantised`, the run's evaluation is left out, because it computed without quantisation.
    """
    origin = _find_origin(weights)
    if is_requantised:
        origin.event = None
    name = _clean(folder.name) or "model"
    head = _describe_for_hub(name, weights, form, origin)
    front = yaml.safe_dump(head, sort_keys=False, allow_unicode=True, width=math.inf)
    about: Rows = {"network": weights.recipe.fields()["model"], "outputs": weights.recipe.logits}
    about["classes"] = list_first(weights.classes, 2 * _HALF)
    blocks = [
        f"---\n{front}---",
        f"# {_escape(name)}",
        f"An image classifier in {form} format. Lockstep {version()} wrote this card: every"
        " figure comes from the files of the training run. Missing ones are listed as not known.",
        _make_table("what", "value", about),
        "## Accuracy",
        *_describe_accuracy(weights, origin),
        "## Preprocessing",
        _make_table("field", "value", weights.describe_preprocessing()),
        "## Training",
        *_describe_training(origin),
        "## Lineage",
        _make_table("from", "value", _list_lineage(weights, origin, compared)),
        "## Licence",
        "Not known. The data set's name on the Hub is not known either. To state them, add lines"
        " such as `license: apache-2.0` and `datasets: [OWNER/NAME]` after the first line.",
    ]
    if origin.run is not None:
        blocks += ["## Recipe", indent(origin.run.recipe.format_yaml().rstrip(), "    ")]
    write_text(folder / "README.md", "\n\n".join(blocks) + "\n")
    return ["README.md"]


def _find_origin(weights: Weights) -> _Origin:
    file = weights.checkpoint_file
    if file is None:
        return _Origin()
    origin = _Origin("the folder of the run is missing or damaged")
    try:
        digests = [*checkpoint.read_data_digest(file.parent).split(), "", ""]
        origin.training = digests[0]
        origin.validation = digests[1].strip("-")
        read_identity(file.parent.parent.parent)  # refuses a checkpoint of another run
        run = origin.run = read_run(file.parent.parent.parent)
    except LockstepError:
        return origin
    origin.missing = "the run did not evaluate the model as written here"
    own = (weights.recipe.spec, read_evaluation(weights.recipe), bool(weights.scales))
    quantises = run.recipe.quantisation != "none"
    if own != (run.recipe.spec, read_evaluation(run.recipe), quantises):
        return origin
    kind = "ema" if file.name.startswith("ema") else "trained"
    for event in run.evaluations:
        folder = checkpoint.checkpoint_path(file.parent.parent, event["step"])
        if (folder, event["weights"]) == (file.parent, kind):
            origin.event = event
            origin.hits = round(event["top1_percent"] * event["images"] / 100)
            origin.counts = None
            results = run.find_results(event["step"], kind)
            if results is not None and results.digest == origin.validation:
                origin.counts = results.scores[kind].per_class(weights.recipe.logits)
    return origin


def _describe_for_hub(name: str, weights: Weights, form: str, origin: _Origin) -> dict[str, Any]:
    """Return what the hub reads: accuracies only with the digest of their images."""
    task = "image-classification"
    tags = [task, "lockstep"]
    if isinstance(weights.recipe.model, str):
        tags.append(weights.recipe.model)
    head = {"library_name": form, "pipeline_tag": task, "tags": tags}
    if origin.event is None or not origin.validation:
        return head
    images = origin.event["images"]
    interval = list(wilson(origin.hits, images))
    metric = {"type": "accuracy", "name": "Top-1 accuracy", "value": origin.hits / images}
    dataset = {"type": "imagefolder", "name": "Validation images", "split": "validation"}
    result = {
        "task": {"type": task},
        "dataset": dataset | {"args": {"digest": _clean(origin.validation), "images": images}},
        "metrics": [metric | {"args": {"interval_95_percent": interval}}],
    }
    return head | {"metrics": ["accuracy"], "model-index": [{"name": name, "results": [result]}]}


def _describe_accuracy(weights: Weights, origin: _Origin) -> Iterator[str]:
    """Yield the run's evaluation of the weights, and that of all classes, or the worst and best."""
    if origin.event is None or origin.run is None:
        yield f"Not known: {origin.missing}."
        return
    images = origin.event["images"]
    rows: Rows = {}
    for metric in list_metrics(origin.event, weights.recipe.logits):
        rows[metric.title] = metric.format(origin.event[metric.key])
    rows["top-1"] = _format_hits(origin.hits, images)
    rows["digest of the validation images"] = origin.validation
    rows["computed in"] = origin.run.recipe.evaluation_recipe().precision
    rows["after step"] = origin.event["step"]
    yield _make_table("metric", "value", rows)
    yield "Brackets show 95 % intervals. Figures of the best checkpoint are slightly optimistic."
    if origin.counts is None:
        yield "Accuracy by class is not known: the run did not store it for these weights."
        return
    ranked = []
    for label, images in enumerate(origin.counts["images"]):
        if images:
            ranked.append((origin.counts["top1"][label] / images, label))
    if len(ranked) > 2 * _HALF:
        yield f"The {_HALF} worst and {_HALF} best of {len(ranked):,}; `lockstep report` shows all:"
        ranked.sort()
        ranked = [*ranked[:_HALF], *ranked[-_HALF:]]
    rows = {}
    for _, label in ranked:
        name = " ".join([str(label), *weights.classes[label : label + 1]])
        rows[name] = _format_hits(origin.counts["top1"][label], origin.counts["images"][label])
    yield _make_table("class", "top-1", rows)


def _format_hits(hits: int, images: int) -> str:
    low, high = wilson(hits, images)
    text = format_accuracy(100 * hits / images, images, [100 * low, 100 * high])
    return f"{text}, {hits:,} of {images:,}"


def _describe_training(origin: _Origin) -> Iterator[str]:
    """Yield what was trained, how long, on what and with which images."""
    run = origin.run
    if run is None:
        yield f"Not known: {origin.missing}."
        return
    seconds = sum(map(compute_seconds, run.training))
    environment: Any = run.environment
    names = filter(environment.__contains__, (*_MACHINE, run.backend))
    machine = ", ".join(f"{name} {environment[name]}" for name in names)
    rows: Rows = {
        "recipe": run.recipe_name or "without a name",
        "steps": f"{run.step} of {run.steps}",
        "training time (h:mm:ss)": str(timedelta(seconds=round(seconds))),
        "machine (last process)": machine,
    }
    for name, part in {"training images": "train", "validation images": "val"}.items():
        rows[name] = None
        with suppress(KeyError):
            bad = len(environment[part]["quarantined"])
            rows[name] = f"{environment[part]['images']:,} (damaged and left out: {bad:,})"
    yield _make_table("what", "value", rows)


def _list_lineage(weights: Weights, origin: _Origin, compared: Any) -> Rows:
    """Return what the weights come from, by digest, and how they were compared with it."""
    rows: Rows = {}
    file = weights.checkpoint_file
    if file is None:
        for name, digest in hash_files(weights.source).items():
            rows[f"{name}, of {weights.origin}"] = f"SHA-256 {digest}"
    else:
        rows[f"{file.parent.name}/{file.name}"] = f"SHA-256 {checkpoint.read_digest(file)}"
    rows["digest of the training images"] = origin.training
    rows["starting weights"] = None
    if origin.run is not None:
        identity = read_identity(origin.run.folder)
        rows["run"] = None if identity is None else identity.id
        start = f"random, seed {origin.run.recipe.seed}"
        if (origin.run.folder / "start.json").exists():
            start = ""
            with suppress(CheckpointError):
                about = read_start(origin.run.folder)
                start = f"{about.get('weights')}, SHA-256 of its tensors {about['weights_sha256']}"
        rows["starting weights"] = start
    if compared is not None:
        rows["compared with the source"] = (
            f"logits differ by at most {compared['largest_difference']:.1g} of the largest logit"
            f" (bound {compared['bound']:g}) on {compared['images']} drawn images"
        )
    return rows


def _make_table(left: str, right: str, rows: Mapping[str, object]) -> str:
    """Return a table in Markdown. None and "" are shown as "not known"."""
    lines = [f"| {left} | {right} |", "|---|---|"]
    for name, value in rows.items():
        text = "not known" if value in (None, "") else str(value)
        lines.append(f"| {_escape(name)} | {_escape(text)} |")
    return "\n".join(lines)


def _escape(text: str) -> str:
    """Return a text in one line that Markdown shows as it is."""
    return _MARKUP.sub(lambda mark: _FORMULA.get(mark[0], f"\\{mark[0]}"), _clean(text))


def _clean(text: str) -> str:
    """Return a text in one line, at most 1,000 letters, without those that nobody can see."""
    letters = " ".join(text.split())[:1000]
    # Emoji are made with the joiner, which is not printable.
    return "".join(filter(lambda letter: letter.isprintable() or letter == "\u200d", letters))
