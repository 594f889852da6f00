"""Shared code of the readers of other programs' checkpoints."""

from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.models.architectures import MODELS, STEM_KERNELS, Conv, ModelSpec, Tensor
from lockstep.models.state import State, check_fit
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.system.files import appearing
from lockstep.weights.formats import dtype_name, numbers, refuse_existing, refuse_many
from lockstep.weights.formats.account import refuse_leftover

FOURTH_CHANNEL = "the stem has a fourth input channel, which receives only zeros; it was left out"

COUNTERS = (
    "num_batches_tracked of every batch norm was added: PyTorch expects it; results are unchanged",
)
"""`Written.added` of files for PyTorch modules."""

_PADDINGS = {
    "same": "TensorFlow's SAME padding",
    "flax": "Flax's padding (SAME, but symmetric in 7x7 convolutions)",
}
Names = dict[str, str]
"""Maps canonical names to names in the file."""
Shape = tuple[int, ...]
Writers = dict[Path, Callable[[Path], object]]
"""New files, each with the function that writes it under the name it is given."""


@dataclass(frozen=True)
class Written:
    """What a writer of weights has written."""

    files: tuple[Path, ...]
    """All files."""
    arrays: tuple[Path, ...]
    """The files that hold arrays. The first makes the others readable: it names the whole for
    `open_weights`."""
    remarks: tuple[str, ...]
    """What the files do not hold, and notes on how to use them."""
    added: tuple[str, ...] = ()
    """What the files hold that no source has, with the reason, for the certificate."""


@dataclass(frozen=True)
class Matching:
    """A model that a file may hold."""

    model: str
    """Its name."""
    spec: ModelSpec
    names: Names
    logits: int
    problems: list[str]
    """Messages about what does not fit."""
    unexpected: list[str]
    """Names of tensors that the model does not have."""

    def map_tensors(self) -> dict[Tensor, str]:
        """Return the names in the file by the model's tensors."""
        return {tensor: self.names[tensor.name] for tensor in self.spec.list_tensors(self.logits)}


def match_model(
    model: tuple[str, ModelSpec],
    names: Names,
    shapes: Mapping[str, Shape],
    list_shapes: Callable[[Tensor], Sequence[Shape]],
) -> Matching:
    """Compare a model, its name and its spec, with these names to the shapes in a file.

    `list_shapes` returns the shapes that a tensor may have in the file, the usual one first.
    """
    bias = shapes.get(names["fc.bias"], ())
    logits = bias[0] if len(bias) == 1 else 0
    problems = []
    for tensor in model[1].list_tensors(logits):
        name = names[tensor.name]
        usual = list_shapes(tensor)
        if name not in shapes:
            problems.append(f"{name} is missing")
        elif shapes[name] not in usual and (logits or tensor.role != "fc_weight"):
            problems.append(f"{name} is {list(shapes[name])}, expected {list(usual[0])}")
    return Matching(*model, names, logits, problems, sorted(shapes.keys() - names.values()))


def choose_model(
    matchings: Iterable[Matching], path: Path | str, framework: str, stored: Collection[str]
) -> Matching:
    """Return a matching without problems. Raises `CheckpointError` that names the problems of the
    nearest model, unless several were tried and most tensors are missing."""
    refuse_many(path, len(stored))
    candidates = list(matchings)
    nearest = min(candidates, key=lambda matching: len(matching.problems + matching.unexpected))
    if nearest.problems:
        unexpected = [f"{name} is unexpected" for name in nearest.unexpected]
        problems = "; ".join([*nearest.problems, *unexpected][:3])
        comparison = ""
        missing = [problem for problem in nearest.problems if problem.endswith("is missing")]
        if len(candidates) == 1 or 2 * len(missing) <= len(nearest.names):
            comparison = f" The closest model, {nearest.model}, does not fit: {problems}."
        raise CheckpointError(
            f"{path} is not a complete ResNet as {framework} saves it.{comparison}"
            f" {describe_names(stored)}"
        )
    if nearest.unexpected:
        network = f"{framework}'s {nearest.model.removeprefix('the ')}"
        used = nearest.names.values()
        raise refuse_leftover(path, network, nearest.unexpected, used=used)
    return nearest


def describe_names(arrays: Collection[str]) -> str:
    """Return a sentence that says how many arrays a file has, and the first names of them."""
    if not arrays:
        return "It has no arrays."
    return f"The first of its {len(arrays)} arrays are {sorted(arrays)[:3]}."


def name_model(spec: ModelSpec) -> str | ModelSpec:
    """Return the name of a model; the spec itself if it has none."""
    for name, known in MODELS.items():
        if known == spec:
            return name
    return spec


def add_layer(
    table: Names, conv: Conv, kernel: str, norm: Mapping[str, str], scope: str = ""
) -> None:
    """Add the names of a convolution's kernel and of its batch norm's variables to a table.

    `norm` has the variables below the `scope` of the batch norm by canonical suffix.
    """
    table[f"{conv.name}.weight"] = kernel
    for suffix, leaf in norm.items():
        table[f"{conv.bn_name}.{suffix}"] = f"{scope}{leaf}"


def order_shortcuts_first(spec: ModelSpec) -> list[Conv]:
    """Return the convolutions in the order in which some programs create them: a block's shortcut
    before the others."""
    convs = [*spec.list_stem()]
    for block in spec.list_blocks():
        if block.shortcut is not None:
            convs.append(block.shortcut)
        convs += block.convs
    return convs


def is_stem(tensor: Tensor) -> bool:
    """Return whether a tensor is the kernel of the first convolution, whose input is the images."""
    return tensor.name in STEM_KERNELS


def check_floats(about: str, values: np.ndarray, shapes: Sequence[Shape] = ()) -> np.ndarray:
    """Return the numbers of an array of a file.

    Raises `CheckpointError` that begins with `about` unless they are floats, and the array has one
    of these shapes, if any; the first one is the usual one.
    """
    floats = numbers(values)
    if floats.dtype.kind == "f" and (not shapes or floats.shape in shapes):
        return floats
    expected = f"float32 {list(shapes[0])}" if shapes else "float32"
    raise CheckpointError(
        f"{about} is {dtype_name(values.dtype)} {list(values.shape)}, expected {expected}"
    )


def redirect_file(path: Path, into: Path | None) -> Path:
    """Return where to write a file for now: in the folder `into` under the same name, or at its
    path if that is None."""
    return path if into is None else into / path.name


def write_new(prefix: Path, files: Writers, *companions: Path, into: Path | None = None) -> None:
    """Write new files in this order, each with its function. After an error none of them exists.

    The last file must be the one that makes a checkpoint readable. A reader would take `companions`
    for a part of the checkpoint, so they must not exist either, whether or not they are written.
    With `into`, files are written to that folder, from which the caller moves them to these paths.
    Raises `CheckpointError`.
    """
    refuse_existing(*reversed(files), *companions)
    written: list[Path] = []
    try:
        redirect_file(prefix, into).parent.mkdir(parents=True, exist_ok=True)
        for path, write in files.items():
            place = redirect_file(path, into)
            with appearing(place) as partial:
                write(partial)
            written.append(place)
    except BaseException as error:
        for path in written:
            path.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"{prefix} cannot be written: {error}") from None
        raise


def describe_other_padding(recipe: Recipe) -> Iterable[str]:
    """Yield a remark if weights were trained with other padding than a symmetric one, which the
    modules that read them have."""
    if recipe.padding != "symmetric":
        yield f"these weights were trained with {_PADDINGS[recipe.padding]}"


def describe_omitted_parts(state: State) -> tuple[str, ...]:
    """Return a remark that names the parts of a state that a file of weights does not hold; none if
    there are none."""
    omitted = []
    if state.momentum:
        omitted.append("velocities")
    if state.ema:
        omitted.append("moving averages")
    if state.scaler:
        omitted.append("the loss scale")
    if state.step:
        omitted.append(f"step {state.step}")
    if not omitted:
        return ()
    return (f"left out, since the file holds only weights: {', '.join(omitted)}",)


def describe_missing_velocities(missing: list[str], slots: int, kind: str) -> Iterable[str]:
    """Yield a remark if velocities, which are called `kind`, are missing."""
    if len(missing) == slots:
        yield f"there are no velocities ({kind})"
    elif missing:
        yield (
            f"{len(missing)} of {slots} velocities are missing, such as {missing[0]}; the others"
            " were left out"
        )


def choose_velocities(
    slots: dict[Tensor, str], available: Container[str], kind: str, *, momentum: bool
) -> tuple[dict[Tensor, str], tuple[str, ...]]:
    """Return the velocities to read, all or none, and a remark if some (called `kind`) are missing.

    Without `momentum` there are neither.
    """
    if not momentum:
        return {}, ()
    missing = [slot for slot in slots.values() if slot not in available]
    if not missing:
        return slots, ()
    return {}, tuple(describe_missing_velocities(missing, len(slots), kind))


def find_converted(names: Iterable[str], arrays: Mapping[str, np.ndarray]) -> list[str]:
    """Return those of the names whose arrays, if a file has them, are not float32."""
    return [name for name in names if name in arrays and arrays[name].dtype != np.float32]


def describe_converted(names: Sequence[str], kind: str = "variables") -> Iterable[str]:
    """Yield a remark on arrays, called `kind`, that a file has in another type than float32."""
    if names:
        yield f"{len(names)} {kind}, such as {names[0]}, are not float32 and were converted to it"


def check_state(spec: ModelSpec, logits: int, state: State) -> list[Tensor]:
    """Return the tensors of a model. Raises `CheckpointError` if the state to write does not have
    exactly these."""
    expected = list(spec.list_tensors(logits))
    check_fit(map_shapes(expected), state.tensors, "weights")
    if state.momentum:
        trained = [tensor for tensor in expected if tensor.is_trained]
        check_fit(map_shapes(trained), state.momentum, "momentum")
    return expected


def map_shapes(expected: Iterable[Tensor]) -> dict[str, Shape]:
    """Return the shapes of tensors by name."""
    return {tensor.name: tensor.shape for tensor in expected}
