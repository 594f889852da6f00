"""Exported ONNX models that Lockstep runs, and evaluates as they are, answer as ONNX Runtime alone
does for the same file.

Bare ones get normalised squares. Files whose outputs another program changed are refused.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.helper import make_function, make_node, make_opsetid, make_tensor_value_info
from onnxruntime.quantization import (
    CalibrationDataReader,
    QuantFormat,
    quantize_dynamic,
    quantize_static,
)
from PIL import Image

import lockstep
from lockstep.inference import onnx_model
from lockstep.inference.onnx_model import Form
from lockstep.inference.session import list_export_runtimes
from lockstep.models.quantisation import layers
from lockstep.recipes import Execution, Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import open_weights
from lockstep.weights.formats.onnx_photos import take_photos
from tests.backends.drawing import draw_images
from tests.inference.cases import CLASSES, MEAN, STD, open_session, random_tensors, save_tensors

SQUARES = np.random.default_rng(7).integers(0, 256, (3, 32, 32, 3), np.uint8)


def ask_onnx_runtime(file: Path, images: np.ndarray) -> list[np.ndarray]:
    """Return the outputs of a file for uint8 images [N, H, W, 3], or normalised for a bare one."""
    session = open_session(file)
    name = session.get_inputs()[0].name
    if name == "input":
        normalised = (images - np.array(MEAN)) / np.array(STD)
        images = normalised.transpose(0, 3, 1, 2).astype(np.float32)
    outputs: list[np.ndarray] = session.run(None, {name: images})
    return outputs


@pytest.fixture
def write(tiny_recipe: Recipe, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes `model.onnx` of random weights, and returns it. Squares stay as
    they are."""

    def write(
        form: Form, *, precision: str = "fp32", scale: float = 0, photos: bool = False
    ) -> Path:
        recipe = tiny_recipe.replace(mean=MEAN, std=STD, eval_resize=32, precision=precision)
        tensors = random_tensors(recipe, 1)
        tensors["fc.weight"] /= 50
        scales = dict.fromkeys(layers(recipe.spec), scale) if scale else None
        model = onnx_model.build_model(recipe, tensors, CLASSES, scales, form)
        folder = tmp_path / ("bare" if form.bare else "full")
        folder.mkdir()
        onnx.save(take_photos(model, recipe) if photos else model, folder / "model.onnx")
        return folder / "model.onnx"

    return write


@pytest.mark.parametrize(
    ("changes", "how"),
    [
        ({}, {}),
        ({"folded": True}, {}),
        ({"batch": 2}, {}),
        ({}, {"precision": "fp16"}),
        ({}, {"scale": 0.05}),
    ],
    ids=str,
)
def test_a_bare_model_answers_as_the_others(
    write: Callable[..., Path], changes: dict[str, Any], how: dict[str, Any]
) -> None:
    bare, full = (write(Form(bare=is_bare, **changes), **how) for is_bare in (True, False))
    batch = SQUARES[: changes.get("batch", 3)]
    [expected] = ask_onnx_runtime(bare, batch)
    for source in (bare, bare.parent):
        with lockstep.load(source) as predictor:
            logits = np.stack(list(predictor.logits(SQUARES)))
            predictions = list(predictor.predict(SQUARES, top=10))
        assert logits[: len(batch)] == pytest.approx(expected, abs=1e-6)
    for prediction, of_full in zip(
        predictions, list(lockstep.load(full).predict(SQUARES, top=10)), strict=True
    ):
        assert prediction.classes == of_full.classes
        assert prediction.probabilities == pytest.approx(of_full.probabilities, abs=1e-6)


def test_an_error_of_what_is_chosen_names_it_alone(write: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"^--ignore 'zzz' matches nothing"):
        lockstep.load(write(Form(bare=True)).parent, ignore=["zzz"])


@pytest.mark.parametrize("runtime", list_export_runtimes())
def test_a_bare_model_is_evaluated_as_the_others(
    runtime: str, write: Callable[..., Path], textures: Path
) -> None:
    bare, full = (
        lockstep.load(write(Form(bare=is_bare))).on(runtime).evaluate(textures).to_json()
        for is_bare in (True, False)
    )
    assert (bare["runtime"], bare["per_class"]) == (runtime, full["per_class"])
    assert bare["loss"] == pytest.approx(full["loss"], rel=1e-6)


def test_a_bare_model_that_was_quantised_after_training_is_evaluated(
    write: Callable[..., Path], textures: Path, tmp_path: Path
) -> None:
    weights = write(Form())
    int8 = lockstep.Int8(textures, images=8, tolerance=100)
    losses = []
    for is_bare in (True, False):
        folder = tmp_path / f"int8 {is_bare}"
        lockstep.load(weights).export(
            folder, to="onnx", precision=int8, bare=is_bare, compare=False
        )
        losses.append(lockstep.load(folder).evaluate(textures).to_json()["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)


def edit(file: Path, change: Callable[[Any], None]) -> None:
    model = onnx.load(file)
    change(model)
    onnx.save(model, file)


def find(model: Any, output: str) -> Any:
    return next(node for node in model.graph.node if output in node.output)


def insert(model: Any, value: str, operator: str, *constants: Any, **attributes: Any) -> None:
    """Change a value: a new node makes it of what it was before."""
    stored = {tensor.name for tensor in model.graph.initializer}
    names = [f"{value} {place}" for place in range(len(constants))]
    for name, constant in zip(names, constants, strict=True):
        if name not in stored:
            tensor = onnx.numpy_helper.from_array(np.array(constant), name)
            model.graph.initializer.append(tensor)
    maker = find(model, value)
    place = list(model.graph.node).index(maker) + 1
    maker.output[0] = f"{value} before {operator}"
    node = make_node(operator, [maker.output[0], *names], [value], **attributes)
    model.graph.node.insert(place, node)


def round_probabilities(model: Any, step: float, zero: int = 0) -> None:
    for operator in ("QuantizeLinear", "DequantizeLinear"):
        insert(model, "probabilities", operator, np.float32(step), np.uint8(zero))


def favour_the_last(model: Any) -> None:
    """Add a node between classifier and softmax. The classes are those of before."""
    favour = onnx.numpy_helper.from_array(np.float32([0] * 9 + [1e4]), "favour")
    model.graph.initializer.append(favour)
    softmax = find(model, "probabilities")
    softmax.input[0] = "favoured"
    place = list(model.graph.node).index(softmax)
    model.graph.node.insert(place, make_node("Add", ["logits", "favour"], ["favoured"]))


def set_attribute(model: Any, output: str, name: str, value: int) -> None:
    node = find(model, output)
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


def set_operator(model: Any, output: str, operator: str) -> None:
    find(model, output).op_type = operator


def rename_output(model: Any, name: str, other: str) -> None:
    find(model, name).output[0] = other
    next(value for value in model.graph.output if value.name == name).name = other


def add_output(model: Any) -> None:
    model.graph.output.append(make_tensor_value_info("features", 1, ["N", 16]))


def rename_input(model: Any) -> None:
    model.graph.input[0].name = model.graph.node[0].input[0] = "pixels"


def damage_metadata(model: Any) -> None:
    for entry in model.metadata_props:
        if entry.key == "lockstep_preprocessing":
            entry.value = '{"mean": [1, 2]}'


def use_sigmoid(model: Any) -> None:
    set_operator(model, "probabilities", "Sigmoid")
    del find(model, "probabilities").attribute[:]


def add_input(model: Any) -> None:
    model.graph.input.append(make_tensor_value_info("shift", 1, [1]))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32([0]), "shift"))


def define_softmax(model: Any) -> None:
    """Let a function of the file's own be called Softmax."""
    sigmoid = make_node("Sigmoid", ["x"], ["y"])
    imports = [make_opsetid("", 17)]
    model.functions.append(make_function("own", "Softmax", ["x"], ["y"], [sigmoid], imports))
    model.opset_import.append(make_opsetid("own", 1))
    softmax = find(model, "probabilities")
    softmax.domain = "own"
    del softmax.attribute[:]


TURN = np.arange(9, -1, -1)
Change = Callable[[Any], None]
CHANGES: dict[str, Change] = {
    "logits divided": lambda model: insert(model, "logits", "Div", np.float32(2)),
    "logits shifted": lambda model: insert(model, "logits", "Add", np.float32(range(10))),
    "logits in another order": lambda model: insert(model, "logits", "Gather", TURN, axis=1),
    "logits of one class shifted": favour_the_last,
    "probabilities in another order": lambda model: insert(
        model, "probabilities", "Gather", TURN, axis=1
    ),
    "probabilities divided": lambda model: insert(model, "probabilities", "Div", np.float32(2)),
    "probabilities shifted": lambda model: insert(model, "probabilities", "Add", np.float32(1)),
    "sigmoid after softmax": lambda model: insert(model, "probabilities", "Sigmoid"),
    "softmax twice": lambda model: insert(model, "probabilities", "Softmax", axis=1),
    "logarithms": lambda model: set_operator(model, "probabilities", "LogSoftmax"),
    "softmax over images": lambda model: set_attribute(model, "probabilities", "axis", 0),
    "coarse steps": lambda model: round_probabilities(model, 0.5),
    "limited probabilities": lambda model: round_probabilities(model, 0.001),
    "own softmax": define_softmax,
    "classes shifted": lambda model: insert(model, "classes", "Add", np.int64(1)),
    "smallest class": lambda model: set_operator(model, "classes", "ArgMin"),
    "last of equal classes": lambda model: set_attribute(model, "classes", "select_last_index", 1),
    "another name": lambda model: rename_output(model, "probabilities", "scores"),
    "no probabilities": lambda model: model.graph.output.pop(),
    "another output": add_output,
    "another input": add_input,
    "another name of the input": rename_input,
    "sigmoid in place of softmax": use_sigmoid,
    "damaged metadata": damage_metadata,
}
NAMED: dict[Change, str] = {
    rename_input: "it takes pixels, returns .*; expected `images`",
    use_sigmoid: "its probabilities come from Sigmoid of logits .*, expected Softmax",
    damage_metadata: "model.onnx cannot be evaluated as an export",
}
OF_BARE: dict[str, Change] = {
    "probabilities": lambda model: insert(model, "logits", "Softmax", axis=1),
    "another order": lambda model: insert(model, "logits", "Gather", TURN, axis=1),
    "another name": lambda model: rename_output(model, "logits", "scores"),
    "another output": add_output,
}


def turn_photos(model: Any) -> None:
    """Give the resize photos that are turned, by a node whose name is no other's."""
    for node in model.graph.node:
        node.input[:] = ["turned" if name == "images" else name for name in node.input]
    model.graph.node.insert(0, make_node("Transpose", ["images"], ["turned"], perm=[0, 2, 1, 3]))


def turn_squares(model: Any) -> None:
    """Turn squares by a node with a name such as those of the resize have."""
    insert(model, "squares", "Transpose", perm=[0, 2, 1, 3])
    find(model, "squares").name = "preprocessing/turn"


def skip_resize(model: Any) -> None:
    find(model, "float images").input[0] = "images"


def change_resize(model: Any) -> None:
    constant = next(
        value for value in model.graph.initializer if value.name.endswith("/constant 3")
    )
    value = onnx.numpy_helper.to_array(constant)
    constant.CopyFrom(onnx.numpy_helper.from_array(value + 1, constant.name))


def drop_names(model: Any) -> None:
    for node in model.graph.node:
        node.name = ""


OF_PHOTOS: list[Change] = [turn_photos, turn_squares, skip_resize, change_resize, drop_names]
CASES: list[Any] = [
    *(pytest.param({}, change, id=name) for name, change in CHANGES.items()),
    *(pytest.param({"bare": True}, change, id=f"bare {name}") for name, change in OF_BARE.items()),
    *(pytest.param({"photos": True}, change, id=change.__name__) for change in OF_PHOTOS),
]


@pytest.mark.parametrize(("how", "change"), CASES)
def test_what_another_program_changed_is_refused(
    write: Callable[..., Path], how: dict[str, Any], change: Change
) -> None:
    file = write(Form(bare="bare" in how), photos="photos" in how)
    edit(file, change)
    ask_onnx_runtime(file, SQUARES)  # it is a model
    expected = NAMED.get(change, r"cannot be evaluated as an export: its? .*; export")
    with pytest.raises(CheckpointError, match=expected):
        list(lockstep.load(file).predict(SQUARES))


def forget_size(model: Any) -> None:
    """Declare squares of any size, as earlier versions of Lockstep did."""
    for place, name in ((1, "H"), (2, "W")):
        model.graph.input[0].type.tensor_type.shape.dim[place].dim_param = name


@pytest.mark.parametrize(
    ("how", "change"),
    [
        ({}, lambda model: insert(model, "features", "Mul", np.float32(0.5))),
        ({}, lambda model: insert(model, "centred", "Neg")),
        ({}, lambda model: round_probabilities(model, 1 / 255)),
        ({}, forget_size),
        ({"photos": True}, lambda model: insert(model, "features", "Mul", np.float32(0.5))),
    ],
)
def test_what_is_changed_within_the_network_is_run(
    write: Callable[..., Path], how: dict[str, Any], change: Change
) -> None:
    file = write(Form(), **how)
    edit(file, change)
    assert_answers(file)


def test_a_dynamically_quantised_model_is_run(write: Callable[..., Path]) -> None:
    file = write(Form(), photos=True)
    quantize_dynamic(file, file)
    assert_answers(file)


def assert_answers(file: Path) -> None:
    """Check that predictions are the file's own, but for probabilities in 8 bits."""
    classes, probabilities = ask_onnx_runtime(file, SQUARES)
    for place, prediction in enumerate(list(lockstep.load(file).predict(SQUARES, top=10))):
        assert prediction.classes[0] == CLASSES[classes[place]]
        expected = -np.sort(-probabilities[place])
        assert prediction.probabilities == pytest.approx(expected, abs=0.5 / 255 + 1e-6)


ENGINES_OF_EXPORTS = list_export_runtimes()

REFERENCE = Execution(backend="reference", reference_dtype="float32")


@pytest.fixture
def weights(tiny_recipe: Recipe, tmp_path: Path) -> Path:
    recipe = tiny_recipe.replace(
        mean=MEAN, std=STD, eval_resize=40, antialias=True, exif_orientation=True
    )
    return save_tensors(tmp_path, recipe, random_tensors(recipe, 1))


@pytest.fixture
def exported(weights: Path, tmp_path: Path) -> Path:
    remarks = lockstep.load(weights).export(tmp_path / "model", to="onnx")["remarks"]
    assert [remark for remark in remarks if "PIL.ImageOps.exif_transpose" in remark]
    return tmp_path / "model"


@pytest.mark.parametrize("name", ENGINES_OF_EXPORTS)
def test_an_export_has_the_accuracy_of_its_weights(
    name: str, weights: Path, exported: Path, textures: Path
) -> None:
    expected = lockstep.load(weights).on(execution=REFERENCE).evaluate(textures).to_json()
    for source in (exported, exported / "model.onnx"):
        result = lockstep.load(source).on(name).evaluate(textures).to_json()
        assert (result["runtime"], result["source"]) == (name, str(exported / "model.onnx"))
        assert result["per_class"] == expected["per_class"]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_exports_turn_photos_as_weights_do(exported: Path, weights: Path, tmp_path: Path) -> None:
    exif = Image.Exif()
    pixels = draw_images(1, 60)[0, :45]
    exif[0x0112] = 6
    Image.fromarray(pixels).save(tmp_path / "stored.png", exif=exif)
    expected = lockstep.load(weights).on("reference").predict(np.rot90(pixels, -1))
    for source, where in ((exported, None), (weights, "reference")):
        prediction = lockstep.load(source).on(where).predict(tmp_path / "stored.png")
        assert prediction.classes == expected.classes
        assert prediction.probabilities == pytest.approx(expected.probabilities, abs=2e-6)


class Calibration(CalibrationDataReader):  # type: ignore[misc]
    """Sixteen images."""

    def __init__(self, side: int) -> None:
        self._left = [{"images": draw_images(16, side)}]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


@pytest.mark.parametrize("name", ENGINES_OF_EXPORTS)
def test_a_model_that_another_program_quantised_is_evaluated(
    name: str, weights: Path, exported: Path, textures: Path
) -> None:
    side = open_weights(weights).recipe.eval_crop
    file = exported / "model.onnx"
    quantize_static(file, file, Calibration(side), quant_format=QuantFormat.QDQ)
    result, expected = (
        lockstep.load(source).on(name).evaluate(textures).to_json()
        for source in (exported, weights)
    )
    assert result["loss"] != expected["loss"]
    assert result["loss"] == pytest.approx(expected["loss"], rel=0.1)


def round_logits(model: Any) -> None:
    """Round logits to multiples of 1000 by nodes that a reader of weights leaves out."""
    for name, constant in (("step", np.float32(1000)), ("zero", np.int8(0))):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(constant), name))
    rounding = {"QuantizeLinear": ("logits", "whole"), "DequantizeLinear": ("whole", "rounded")}
    for operator, (value, result) in rounding.items():
        node = onnx.helper.make_node(operator, [value, "step", "zero"], [result])
        model.graph.node.insert(len(model.graph.node) - 2, node)
    for node in list(model.graph.node)[-2:]:
        node.input[0] = "rounded"


def test_the_file_itself_is_run_by_default(exported: Path, weights: Path, textures: Path) -> None:
    of_weights = lockstep.load(weights).on(execution=REFERENCE).evaluate(textures).to_json()
    model = onnx.load(exported / "model.onnx")
    round_logits(model)
    onnx.save(model, exported / "model.onnx")
    result = lockstep.load(exported).evaluate(textures).to_json()
    assert result["runtime"] == "onnxruntime"
    assert result["loss"] == pytest.approx(np.log(10)), "all logits are 0"
    for where in ("native", None):
        result = lockstep.load(exported).on(where, execution=REFERENCE).evaluate(textures).to_json()
        assert result["loss"] == pytest.approx(of_weights["loss"], rel=1e-5)
