"""Using trained weights: `lockstep.load`, and what a model does."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lockstep.inference.model import Model
    from lockstep.weights import Classes, Preprocessing


def load(
    source: str | Path,
    *,
    checkpoint: str | None = None,
    ema: bool | None = None,
    network: str | None = None,
    classes: "Classes | None" = None,
    preprocessing: "Preprocessing | None" = None,
    ignore: Iterable[str] = (),
    unknown_below: float | None = None,
    require_signature: str | Path | None = None,
) -> "Model":
    """Load a model: a run, a checkpoint, an export, a file of another program or a published name.

    Args:
        source: A path, or a name such as "torchvision/resnet50.IMAGENET1K_V2"
            (docs/reference/weight-formats.md).
        checkpoint: "newest", "best" or a step's number of a run. By default the best one, or the
            newest one of a run that was never evaluated.
        ema: Whether to use the moving average instead of the trained weights. By default
            whichever is better in the best checkpoint.
        network: The network of a file that fits several, such as "resnet50-v1", or its fields as
            YAML (docs/how-to/model.md).
        classes: Names of the classes, class 0 first, or a file that lists them; by default those
            stored with the weights.
        preprocessing: How to prepare images: fields of a recipe such as `{"image_size": 160}`, or
            a recipe. It takes precedence over what the file says.
        ignore: Patterns of tensor names in a file, such as "criterion.*", to leave out.
        unknown_below: An image is unknown if its likeliest class is less probable than this, 0 to
            1; by default the threshold stored with the weights.
        require_signature: A public key or certificates (PEM). Only files that their owner signed
            are loaded (docs/how-to/sign.md).

    Returns:
        The model. Call `on` to choose where it computes.

    Raises:
        CheckpointError: There are no such weights, or some part of them is not understood.
        DataError: `classes` does not fit the weights.
        UserError: An argument is wrong.

    >>> import lockstep
    >>> lockstep.load("run").origin
    'Lockstep'
    """
    from lockstep.inference.model import Model
    from lockstep.inference.source import ModelSource
    from lockstep.weights import WeightsChoice
    from lockstep.weights.hub import locate_weights

    path = locate_weights(source)
    ignored = tuple(ignore)
    choice = WeightsChoice(
        path, checkpoint, ema, network, preprocessing, ignored, classes, unknown_below
    )
    return Model(ModelSource(choice, require_signature))
