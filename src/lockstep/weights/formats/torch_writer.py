"""Write PyTorch's files, without PyTorch: a state_dict with torchvision's names, and checkpoints
for NVIDIA's code.

The files hold only tensors and plain values, so `torch.load(path, weights_only=True)` reads them.
`torch_models` describes names and optimizer.

NVIDIA's code needs two kinds of files. `main.py --resume` takes a checkpoint. `classify.py
--pretrained-from-file` and `main.py --pretrained-from-file` take a state_dict alone, as its
checkpoint2model.py makes it. Both are written.

Source: NVIDIA DeepLearningExamples, PyTorch/Classification/ConvNets: main.py, training.py,
checkpoint2model.py.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.models.architectures import Tensor
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import common, torch_file
from lockstep.weights.formats.torch_models import to_nvidia_name
from lockstep.weights.formats.training_scripts import split_nvidia_groups

_ENDINGS = (".pth.tar", ".pth", ".pt", ".bin")
_OF_NVIDIA = ("resnet50", "resnext101-32x4d", "se-resnext101-32x4d")
_LOGITS = 1000
_EPSILON = 1e-5


def write_torchvision(
    target: Path, recipe: Recipe, state: State, into: Path | None = None
) -> common.Written:
    """Write a state_dict with torchvision's names, in its order; return the file and remarks on it.

    A module of torchvision's or timm's class takes it with `strict=True`. `num_batches_tracked` is
    0. `into` is as in `write_new`. Raises `CheckpointError` if the target exists, has another
    ending than PyTorch's, or the state does not fit.
    """
    _check_name(target)
    expected = common.check_state(recipe.spec, recipe.logits, state)
    tensors = build_state_dict(expected, state.tensors)
    common.write_new(target, {target: partial(torch_file.save, value=tensors)}, into=into)
    remarks = (
        *describe_model(recipe, "torchvision's class"),
        *common.describe_omitted_parts(state),
    )
    return common.Written((target,), (target,), remarks, common.COUNTERS)


def write_nvidia_pytorch(
    target: Path, recipe: Recipe, state: State, into: Path | None = None, *, epochs: int = 0
) -> common.Written:
    """Write a checkpoint for `main.py --resume` of NVIDIA's code, and its weights; return both
    files and remarks on them.

    The weights, for `--pretrained-from-file`, are a file next to the target: `x.weights.pth.tar`
    for `x.pth.tar`. `epochs` is the number of epochs done, where the code resumes. `into` is as in
    `write_new`. Raises `CheckpointError` if a file exists, the target has another ending than
    PyTorch's, or the state does not fit.
    """
    ending = _check_name(target)
    weights = target.with_name(f"{target.name.removesuffix(ending)}.weights{ending}")
    expected = common.check_state(recipe.spec, recipe.logits, state)
    blocks = [tensor.name.split(".")[:2] for tensor in expected]
    # NVIDIA's modules have squeeze-and-excitation after the shortcut of its block.
    expected.sort(key=lambda t: (blocks.index(t.name.split(".")[:2]), ".se." in t.name))
    tensors = build_state_dict(expected, state.tensors, to_nvidia_name)
    checkpoint: dict[str, Any] = {
        "epoch": epochs,
        "arch": recipe.model if isinstance(recipe.model, str) else "",
        "best_prec1": 0.0,
        "state_dict": tensors,
        "optimizer": _build_optimizer(recipe, expected, state.momentum),
    }
    if state.ema:
        checkpoint["state_dict_ema"] = build_state_dict(expected, state.ema, to_nvidia_name)
    files: common.Writers = {
        weights: partial(torch_file.save, value=tensors),
        target: partial(torch_file.save, value=checkpoint),
    }
    common.write_new(target, files, into=into)
    both = (target, weights)
    remarks = tuple(_describe_checkpoint(target, weights, recipe, state, epochs))
    return common.Written(both, both, remarks, common.COUNTERS)


def _check_name(target: Path) -> str:
    """Return the ending of a file's name. Raises `CheckpointError` unless it is PyTorch's."""
    for ending in _ENDINGS:
        if target.name.endswith(ending):
            return ending
    raise CheckpointError(f"{target}: expected a name that ends in {', '.join(_ENDINGS)}")


def build_state_dict(
    expected: Iterable[Tensor],
    values: Mapping[str, np.ndarray],
    rename: Callable[[str], str] = str,
    step: int = 0,
) -> OrderedDict[str, Any]:
    """Return tensors in PyTorch's order: those of a module as they were created, with the counter
    of each batch norm, which is `step`."""
    tensors: OrderedDict[str, Any] = OrderedDict()
    for tensor in expected:
        name = rename(tensor.name)
        tensors[name] = values[tensor.name]
        if tensor.role == "bn_var":
            counter = name.replace("running_var", "num_batches_tracked")
            tensors[counter] = np.array(step, np.int64)
    return tensors


def _build_optimizer(
    recipe: Recipe, expected: list[Tensor], momentum: Mapping[str, np.ndarray]
) -> dict[str, Any]:
    """Return the state of torch.optim.SGD with NVIDIA's two groups. The code sets the learning rate
    at every step."""
    order = split_nvidia_groups([tensor for tensor in expected if tensor.is_trained])
    names = [name for name in chain(*order) if name in momentum]
    shared: dict[str, Any] = {"lr": recipe.lr, "momentum": recipe.momentum, "dampening": 0}
    shared |= {"weight_decay": 0.0, "nesterov": recipe.nesterov, "maximize": False}
    shared |= {"foreach": None, "differentiable": False, "params": list(range(len(order[0])))}
    others = list(range(len(order[0]), len(order[0]) + len(order[1])))
    return {
        "state": {slot: {"momentum_buffer": momentum[name]} for slot, name in enumerate(names)},
        "param_groups": [shared, shared | {"weight_decay": recipe.weight_decay, "params": others}],
    }


def describe_model(recipe: Recipe, module: str) -> Iterator[str]:
    """Yield what a state_dict cannot say about a model, for the module that will take it."""
    spec = recipe.spec
    if spec.block == "bottleneck" and spec.stride_in == "1x1":
        yield f"this is a v1 model, with the stride in the 1x1; {module} has it in the 3x3"
    is_torchvisions = module.startswith("torchvision")
    if spec.parts and is_torchvisions:
        yield f"torchvision has no class with {', '.join(spec.parts)}; the names are timm's"
    for remark in common.describe_other_padding(recipe):
        yield f"{remark}; {module} pads symmetrically"
    if recipe.bn_epsilon != _EPSILON:
        epsilon = f"{recipe.bn_epsilon:g} to the variance"
        yield f"batch norm adds {epsilon}; {module} adds {_EPSILON:g} by default"
    if spec.groups > 1 and spec.widths[0] * spec.expansion == 256 and is_torchvisions:
        sizes = f"groups={spec.groups}, width_per_group={spec.widths[0] // spec.groups}"
        arguments = f"Bottleneck, {list(spec.layers)}, {sizes}, num_classes={recipe.logits}"
        yield f"torchvision's class needs ResNet({arguments})"


def _describe_checkpoint(
    target: Path, weights: Path, recipe: Recipe, state: State, epochs: int
) -> Iterator[str]:
    yield f"{target.name} is for --resume on one GPU; on several, names need the prefix module."
    yield f"{weights.name} is for --pretrained-from-file"
    step = f"; step {state.step} is not" if state.step else ""
    yield f"epoch {epochs} is stored, at which --resume begins{step}"
    if recipe.model not in _OF_NVIDIA:
        yield f"NVIDIA's code has only the models {', '.join(_OF_NVIDIA)}, not this one"
    yield from describe_model(recipe, "NVIDIA's model")
    if recipe.logits != _LOGITS:
        outputs = f"{_LOGITS} outputs; these weights have {recipe.logits}"
        yield f"NVIDIA's model has {outputs}: --num_classes"
    if not state.momentum:
        yield "no velocities were written: after --resume they begin at 0"
    if state.scaler:
        yield "the loss scale was left out: NVIDIA's code does not store it"
    if state.ema:
        yield "the moving averages are in state_dict_ema"
