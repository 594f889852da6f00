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
        source: A path or a name (docs/reference/weight-formats.md).
        checkpoint: "newest", "best" or a step; by default "best", or "newest" without evaluations.
        ema: Whether to use the moving average; by default if it is better in the best checkpoint.
        network: The network of a file that fits several: a name such as "resnet50-v1", or fields as
            YAML (docs/how-to/model.md).
        classes: Names, class 0 first, or a file that lists them; by default the stored ones.
        preprocessing: A recipe, or fields such as `{"image_size": 160}`; replaces the stored one.
        ignore: Patterns of tensor names to leave out, such as "criterion.*".
        unknown_below: The lowest probability, 0 to 1, of a known class; by default the stored one.
        require_signature: A public key or certificates (PEM), whose owner must have signed the
            files (docs/how-to/sign.md).

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
    choice = WeightsChoice(
        path, checkpoint, ema, network, preprocessing, tuple(ignore), classes, unknown_below
    )
    return Model(ModelSource(choice, require_signature))
