"""Lockstep: ResNet-50 v1.5 and ResNeXt101-32x4d, one recipe, five frameworks, the same numbers.

The public API is what `__all__` lists; everything else may change. Importing this module loads no
framework.
"""

# No imports here: `python -m lockstep` could take a module of the same name from the current folder
# (see __main__.py).
TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from lockstep.data.packing.python_samples import pack
    from lockstep.data.textures import draw_data_set
    from lockstep.inference import load
    from lockstep.inference.evaluation_result import Evaluation
    from lockstep.inference.int8 import Int8
    from lockstep.inference.model import Model
    from lockstep.inference.prediction import Prediction
    from lockstep.recipes import Execution, Recipe, load_recipe
    from lockstep.recipes.augmentation import Augmentation
    from lockstep.recipes.schedule import learning_rates
    from lockstep.reporting import report
    from lockstep.runs.events import Event
    from lockstep.runs.reading import Run, read_run
    from lockstep.runs.train import train
    from lockstep.system.errors import LockstepError, UserError
    from lockstep.verification import verify
    from lockstep.weights.signature import sign, verify_signature

__all__ = [
    "Augmentation",
    "Evaluation",
    "Event",
    "Execution",
    "Int8",
    "LockstepError",
    "Model",
    "Prediction",
    "Recipe",
    "Run",
    "UserError",
    "draw_data_set",
    "learning_rates",
    "load",
    "load_recipe",
    "pack",
    "read_run",
    "report",
    "sign",
    "train",
    "verify",
    "verify_signature",
]

_HOME = {
    "Augmentation": "recipes.augmentation",
    "Evaluation": "inference.evaluation_result",
    "Event": "runs.events",
    "Execution": "recipes",
    "Int8": "inference.int8",
    "LockstepError": "system.errors",
    "Model": "inference.model",
    "Prediction": "inference.prediction",
    "Recipe": "recipes",
    "Run": "runs.reading",
    "UserError": "system.errors",
    "draw_data_set": "data.textures",
    "learning_rates": "recipes.schedule",
    "load": "inference",
    "load_recipe": "recipes",
    "pack": "data.packing.python_samples",
    "read_run": "runs.reading",
    "report": "reporting",
    "sign": "weights.signature",
    "train": "runs.train",
    "verify": "verification",
    "verify_signature": "weights.signature",
}


def __getattr__(name: str) -> "Any":
    """Import a public name on first use, so that the command line starts fast."""
    if name == "__version__":
        from lockstep.system.version import version

        return version()
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"lockstep.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
