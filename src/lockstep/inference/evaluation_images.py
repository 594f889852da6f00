"""The images of an evaluation: found in a data set, and indexed by the classes of weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.data.index import Index, open_index, subset
from lockstep.data.sources import Source, find_source, find_split, holds_split
from lockstep.data.split import divide_index, note_skipped, whole_source
from lockstep.data.stores.mirror import find_folder
from lockstep.inference.label_matching import Matched, match_labels
from lockstep.recipes import Recipe
from lockstep.recipes.folds import Fold
from lockstep.runs.folder import holds_run, suggest_run
from lockstep.runs.recorder import Recorder
from lockstep.runs.resuming import find_last_data
from lockstep.system.errors import DataError
from lockstep.weights import Weights

if TYPE_CHECKING:
    from lockstep.inference.label_file import LabelFile


@dataclass(frozen=True)
class EvaluationImages:
    """The images of an evaluation, before they are indexed."""

    source: Source
    division: float | Fold
    """The share or the fold of them that is held out for validation; 0: all are evaluated."""
    is_own: bool
    """Whether they are those of the run, whose training has already reported what is left out."""
    advice: str = ""
    """The command that trains with images whose classes the weights do not know."""
    has_validation: bool = False
    """Whether the data set also has validation images, so that `--split 0` is refused."""

    def open_index(
        self, weights: Weights, recorder: Recorder, labels: "LabelFile | None" = None
    ) -> tuple[Matched, list[str]]:
        """Return the images to evaluate, and remarks on them and on the weights."""
        remarks = list(weights.remarks)
        progress = recorder.progress("indexing")
        if labels is None:
            matched = match_labels(self.source, weights, progress)
        else:
            matched = Matched(open_index(self.source, progress=progress), "", is_proven=True)
        index = matched.index
        if not self.is_own:
            remarks += note_skipped(self.source.root, [index])
        if matched.remark:
            remarks.append(matched.remark)
        if matched.left_out:
            remarks.append(f"{matched.left_out}; to train with them: {self.advice}")
            if not len(index):
                raise DataError(
                    f"{self.source.title} has no image of a class that the weights know;"
                    f" {remarks[-1]}"
                )
        if self.division:
            whole = len(index)
            # Bad images belong to no part, and are listed with each.
            index = replace(divide_index(index, self.division)[1], quarantined=index.quarantined)
            part: object = self.division
            if isinstance(part, float | int):
                part = f"the share of {part:g}"
            remark = f"evaluating {part} held out for validation, {len(index)} of {whole} images"
            if not self.has_validation:
                remark += "; --split 0 evaluates all"
            remarks.append(remark)
        if labels is not None:
            from lockstep.inference.label_file import answer_images

            samples, answers = answer_images(labels, matched.index, index, weights)
            remarks.append(answers.describe(labels.source, len(index)))
            index = subset(index, samples)
            index.rows["label"] = 0  # engines refuse labels that are not outputs; answers have them
            return replace(matched, index=index, answers=answers), remarks
        check_classes(index, self.source, weights.recipe.logits)
        return replace(matched, index=index), remarks


def find_evaluation_images(
    data: str | Path | None, recipe: Recipe, split: float | None, *, run: Path
) -> EvaluationImages:
    """Return the validation images of a data set, or a share or a fold of its images, or all.

    Without `data`, the images are those of a run (or of a checkpoint of one). In cross-validation
    these are the images of its fold, also if the data set has validation images.
    """
    is_own = data is None
    data = find_run_data(run) if data is None else data
    advice = suggest_run(run, data)
    data = find_folder(data)
    division = recipe.division if split is None else split
    if split is None:
        if holds_split(data, "val") and not (is_own and recipe.folds):
            return EvaluationImages(find_split(data, "val"), 0.0, is_own, advice)
        if not division:
            return EvaluationImages(find_source(data), 0.0, is_own, advice)
    has_validation = holds_split(data, "val")
    source = whole_source(data, division)
    return EvaluationImages(source, division, is_own, advice, has_validation)


def find_run_data(source: Path) -> Path:
    """Return the data set of a run, or of the run that a checkpoint belongs to. Raises `DataError`
    if it is unknown or gone."""
    is_checkpoint = source.resolve().parent.name == "checkpoints"
    run = source.resolve().parents[1] if is_checkpoint else source
    if not holds_run(run):
        raise DataError(
            f"{source} does not say which images it was trained on; add --data DATA, in Python"
            " data=DATA"
        )
    return find_last_data(run)


def check_classes(index: Index, source: Source, logits: int) -> None:
    """Raise `DataError` if images have more classes than a model has logits."""
    if len(index.classes) > logits:
        raise DataError(
            f"{source.title} has {len(index.classes)} classes, but the model has {logits} logits"
        )
