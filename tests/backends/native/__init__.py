"""What the suite needs of a framework itself: a module for each, with the same names in it.

| name | what it is |
|---|---|
| COMPILE | whether engines are compiled if a test does not choose: where a graph is built quickly |
| COUNTED | whether engines are compiled whose convolutions are counted |
| COMPILES_QUICKLY | whether compiling a tiny model takes a second at most |
| LOGITS | dtype of the logits of a loaded module |
| ANY_SIZE | whether a loaded module with SAME padding takes images of any size |
| BORROWS | whether the engine borrows the memory of lent images on a CPU |
| REASON | what the framework reports if the host lacks memory |
| STEP | an engine's attribute that is called in every step |
| BATCH | the message's words for 16 images that do not fit into memory |
| find_obstacle | why the engine cannot compute in a precision on this processor; None if it can |
| images | float32 [N, H, W, 3], normalised, as a loaded module takes them |
| array | what a loaded module returns, as an array |
| exhaust_host | to call instead of STEP: fails as the framework does if the host lacks memory |
| step_in_groups | weights after the framework's own optimizer with Nesterov's momentum, by rates |
| count_differentiated_convolutions | how many convolutions a step computes backwards |

If the backend's row has a module:

| name | what it is |
|---|---|
| ADVICE | a pattern of the advice where the framework finds no GPU |
| FULL | what the framework reports if a GPU lacks memory |
| WEIGHTS | a target of `lockstep convert` in a format of the framework, a file, and its parts |
| LAST_RANK | variables of the last rank in `test_starting` |
| exhaust_gpu | to call instead of STEP: fails as the framework does if a GPU lacks memory |
| find_trained | names of the tensors of a loaded module that the framework trains |
| gradients | by such a tensor: gradients of the sum of the squares of a loaded module's logits |
| set_gpus | makes the framework find a number of GPUs |
| loss_scale | the engine's loss scale |
| OPTIMIZERS | the optimizers with second moments that the framework has, by the names of recipes |
| take_own_steps | a decayed weight after steps of such an optimizer |
| take_step | weights of 1 after a step of plain descent at a rate of 0.5, by scaled gradients |

If the framework has switches for TensorFloat-32 without a GPU: `tensorfloat` returns them and
`set_tensorfloat` sets them.
"""

import importlib
from types import ModuleType


def find(name: str) -> ModuleType:
    """Return the module of this folder for a backend."""
    return importlib.import_module(f"tests.backends.native.{name}")
