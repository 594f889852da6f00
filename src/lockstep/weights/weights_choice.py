"""`WeightsChoice`: which weights of a source are meant, and how they are read."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.models.architectures import EXAMPLE, MODELS, ModelSpec, model_spec
from lockstep.recipes import Recipe, parse_settings
from lockstep.system.errors import CheckpointError, UserError, as_path, nearest
from lockstep.weights.preprocessing import Preprocessing

if TYPE_CHECKING:
    from lockstep.weights.class_names import Classes

DESCRIBED = "the described model"
"""What messages call a network without a name."""


@dataclass(frozen=True)
class WeightsChoice:
    """What a user chooses of weights, in one object for all commands and readers.

    Fields are the arguments of `lockstep.load`; `model` is `network` or its description. Raises
    `CheckpointError` for an unknown network, `UserError` for a threshold that is not from 0 to 1.
    """

    source: str | Path = ""
    checkpoint: str | None = None
    ema: bool | None = None
    model: str | ModelSpec | None = None
    preprocessing: Preprocessing | None = None
    ignore: tuple[str, ...] = ()
    classes: "Classes | None" = None
    unknown_below: float | None = None

    def __post_init__(self) -> None:
        if self.unknown_below is not None and not 0 <= self.unknown_below <= 1:
            raise UserError(
                f"the threshold of unknown images is {self.unknown_below}; expected 0 to 1, such as"
                " 0.7"
            )
        if isinstance(self.model, str) and self.model not in MODELS:
            object.__setattr__(self, "model", _read_model(self.model))

    @property
    def is_default(self) -> bool:
        """Whether only a source is chosen. Only then can an exported program run as it is."""
        is_changed = self.ema or self.model or self.preprocessing or self.ignore
        return self.checkpoint in (None, "newest") and not is_changed

    def is_ignored(self, name: str) -> bool:
        """Return whether the user leaves out a part of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def list_models(self) -> dict[str, ModelSpec]:
        """Return the networks that a file may hold, by name: the chosen one alone, or all that have
        a name. A chosen one without a name is called `DESCRIBED`."""
        if self.model is None:
            return MODELS
        name = self.model if isinstance(self.model, str) else DESCRIBED
        return {name: model_spec(self.model)}


AnySource = str | Path | WeightsChoice
"""What names weights: `WeightsChoice.source`, or this and what else is chosen."""
DEFAULT_CHOICE = WeightsChoice()
"""The choice of a user who chooses nothing."""


def choose(source: AnySource, **settings: Any) -> WeightsChoice:
    """Return the choice of a source with these fields; None keeps a field."""
    choice = source
    if not isinstance(choice, WeightsChoice):
        as_path(choice, "weights")
        choice = WeightsChoice(choice)
    return replace(choice, **{name: v for name, v in settings.items() if v is not None})


def _read_model(text: str) -> str | ModelSpec:
    """Return the network that a description in YAML or JSON means, by its name if it has one.
    Raises `CheckpointError` with the nearest names for a text that is none."""
    fields = parse_settings([f"model={text}"])[0]
    if not isinstance(fields["model"], dict):
        example = EXAMPLE.removeprefix("model=")
        raise CheckpointError(
            f"there is no model {text!r:.100}. {nearest(text, MODELS)} Other ResNets are described"
            f" by their blocks, such as ResNet-26: --model {example!r}"
        )
    spec = Recipe.of(fields).spec
    return next((name for name, known in MODELS.items() if known == spec), spec)
