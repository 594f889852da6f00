"""What the suite needs of a framework itself: a module for each, with the same names in it.

FRAMEWORK       the module that Python imports; None: there is none LOGITS          dtype of the
logits of a loaded module ANY_SIZE        whether a loaded module with SAME padding takes images of
any size, and not only of the recipe's `eval_crop` ADVICE          a pattern of what the engine
advises where its framework finds no GPU REASON          what the framework says then, for the
memory of the host STEP            an engine's attribute that is called in every step BATCH
what the engine calls 16 images that do not fit into memory; MXNet does not know how many they were
images          float32 [N, H, W, 3], normalised, as a loaded module takes them array           what
a loaded module returns, as an array exhausted       a function to call instead of STEP: it fails as
the framework does when memory is short

and, except for the reference:

full            the same for the memory of a GPU FULL            what the framework says then
trained         names of the tensors of a loaded module that the framework trains gradients
gradients, by such a tensor, of the sum of the squares of a loaded module's logits set_gpus
make the framework find a number of GPUs loss_scale      the engine's loss scale stepped
weights of 1 after a step of plain descent at a rate of 0.5, by gradients multiplied by the loss
scale

and, where the framework has switches for TensorFloat-32 that are there without a GPU:

tensorfloat     the values of the switches
set_tensorfloat set the switches
"""

import importlib
from types import ModuleType

from lockstep.backends import Backend


def name_of(backend: Backend) -> str:
    """Return the name by which a backend is loaded."""
    return getattr(backend, "__name__", "").rpartition(".")[2]


def of(backend: Backend) -> ModuleType:
    """Return the module of this folder for a backend."""
    return importlib.import_module(f"tests.backends.native.{name_of(backend)}")
