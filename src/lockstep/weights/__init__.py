"""Weights on disk: checkpoints, other programs' files, conversion, pruning.

`open_weights` opens weights of any origin; other packages need nothing else to read them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.weights.class_names import Classes
    from lockstep.weights.hub import locate_weights
    from lockstep.weights.opened_weights import LOCKSTEP, Weights
    from lockstep.weights.opening import open_weights
    from lockstep.weights.preprocessing import Preprocessing
    from lockstep.weights.weights_choice import AnySource, WeightsChoice, choose

__all__ = [
    "LOCKSTEP",
    "AnySource",
    "Classes",
    "Preprocessing",
    "Weights",
    "WeightsChoice",
    "choose",
    "locate_weights",
    "open_weights",
]

_HOME = {
    "LOCKSTEP": "opened_weights",
    "AnySource": "weights_choice",
    "Classes": "class_names",
    "Preprocessing": "preprocessing",
    "Weights": "opened_weights",
    "WeightsChoice": "weights_choice",
    "choose": "weights_choice",
    "locate_weights": "hub",
    "open_weights": "opening",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: processes that read one file need no other formats."""
    if name not in _HOME:
        raise AttributeError(f"module 'lockstep.weights' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f"lockstep.weights.{_HOME[name]}"), name)
