"""`WeightsChoice`: which weights of a source are meant, and how they are read."""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from lockstep.models.architectures import MODELS, ModelSpec, model_spec
from lockstep.weights.preprocessing import Preprocessing


@dataclass(frozen=True)
class WeightsChoice:
    """What a user chooses of weights, in one object for all commands and readers."""

    checkpoint: str | None = None
    """"newest", "best" or a step's number of a run. None: the best one, or the newest one of a run
    that was never evaluated."""
    ema: bool | None = None
    """Whether the moving average is used instead of the trained weights. None: whichever is better
    of a run's best checkpoint, else the trained weights."""
    model: str | ModelSpec | None = None
    """The network of a file. None: the one that the file describes, or whose tensors it has."""
    preprocessing: Preprocessing | None = None
    """How images are prepared. It takes precedence over what a file says."""
    ignore: tuple[str, ...] = ()
    """Patterns of names, such as `criterion.*`: tensors of a file that are left out."""

    def is_ignored(self, name: str) -> bool:
        """Return whether the user leaves out a tensor of this name."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignore)

    def list_models(self) -> dict[str, ModelSpec]:
        """Return the networks that a file may hold, by name: the chosen one alone, or all that have
        a name. A chosen one without a name is called "the described model".

        Raises `RecipeError` for an unknown name.
        """
        if self.model is None:
            return MODELS
        name = self.model if isinstance(self.model, str) else "the described model"
        return {name: model_spec(self.model)}


DEFAULT_CHOICE = WeightsChoice()
"""The choice of a user who chooses nothing."""
