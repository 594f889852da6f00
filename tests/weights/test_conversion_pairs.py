"""From every format to every format a state is the same, bit for bit or with the fold that is
stated.

The source is a checkpoint with velocities, moving averages and a step, of a narrow ResNet-50: v1.5,
or v1 for Keras.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lockstep.models.architectures import MODELS, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights, checkpoint, open_weights
from lockstep.weights.fingerprints import compute_fingerprints
from lockstep.weights.formats import keras_process
from lockstep.weights.target_formats import TARGETS
from tests.weights.formats.cases import bits, state_of
from tests.weights.small_models import (
    Arrays,
    converted,
    keras_recipe,
    plain_state,
    recipe_of,
    use_narrow_models,
)

NAMES = {
    **{"safetensors": "a.safetensors", "torchvision": "a.pth", "timm": "folder"},
    **{"keras": "a.weights.h5", "nvidia-pytorch": "a.pth.tar", "nvidia-tensorflow": "model.ckpt-7"},
    **{"nvidia-paddle": "2/resnet_50_paddle", "nvidia-mxnet": "model-0003.params"},
    **{"flax": "a.msgpack", "torchax": "a.npz", "transformers": "network"},
}
NVIDIAS = [name for name in TARGETS if name.startswith("nvidia-")]
ONLY_V1 = "keras"
ONLY_V1_5 = "timm"
REFUSED = {
    (ONLY_V1, ONLY_V1_5): "timm has no model resnet50-v1",
    (ONLY_V1_5, ONLY_V1): r"keras\.applications has no resnet50",
    (
        "nvidia-tensorflow",
        ONLY_V1,
    ): r"keras\.applications pads symmetrically; these weights have the padding same",
    (
        "flax",
        ONLY_V1,
    ): r"keras\.applications pads symmetrically; these weights have the padding flax",
}
PAIRS = [(a, b) for a in TARGETS for b in TARGETS if (a, b) not in REFUSED]


@pytest.fixture(scope="module", autouse=True)
def narrow() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        use_narrow_models(patch)
        patch.setattr(keras_process, "check", lambda path: None)
        yield


def recipe_for(*formats: str) -> Recipe:
    return keras_recipe() if ONLY_V1 in formats else recipe_of()


def whole_state(recipe: Recipe) -> State:
    tensors = plain_state(recipe).tensors
    return State(
        21, tensors, state_of(recipe).momentum, {name: value + 1 for name, value in tensors.items()}
    )


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    """The source in every format, by format and model. Tests must only read it."""
    folder = tmp_path_factory.mktemp("first")
    values = {}
    for recipe in (recipe_of(), keras_recipe()):
        model = str(recipe.model)
        about = {"recipe": recipe.fields(), "classes": []}
        run = checkpoint.save(
            folder / model / "checkpoints", whole_state(recipe), data_digest="", about=about
        )
        for name in TARGETS:
            if name != {"resnet50": ONLY_V1, "resnet50-v1": ONLY_V1_5}[model]:
                target = folder / model / name / NAMES[name]
                converted(run, target, to=name)
                values[name, model] = target
    return values


def fold_for_keras(values: Arrays, source: Weights) -> Arrays:
    """Return what Keras' file needs: the stem without std, and scales for its epsilon 1.001e-5; in
    float64."""
    exact = {name: value.astype(np.float64) for name, value in values.items()}
    exact["conv1.weight"] = exact["conv1.weight"] / np.array(source.recipe.std).reshape(1, 3, 1, 1)
    for name in values:
        if name.endswith("running_var"):
            scale = name.replace("running_var", "weight")
            exact[scale] = exact[scale] * np.sqrt(
                (exact[name] + 1.001e-5) / (exact[name] + source.recipe.bn_epsilon)
            )
    return exact


@pytest.mark.parametrize(("a", "b"), PAIRS, ids=[f"{a} to {b}" for a, b in PAIRS])
def test_a_state_is_the_same_in_two_formats(
    a: str, b: str, first: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    recipe = recipe_for(a, b)
    model = str(recipe.model)
    expected = whole_state(recipe)
    result = converted(first[a, model], tmp_path / NAMES[b], to=b, network=model)
    copy = open_weights(tmp_path / NAMES[b], momentum=True, model=model)
    assert (copy.recipe.model, copy.recipe.logits) == (model, 5)
    if b == ONLY_V1:
        source = open_weights(first[a, model], model=model)
        for name, value in fold_for_keras(expected.tensors, source).items():
            np.testing.assert_allclose(copy.tensors[name], value, rtol=1e-6, err_msg=name)
        remarks = " ".join(result["remarks"])
        assert ("were changed for Keras' epsilon" in remarks) == (
            source.recipe.bn_epsilon != 1.001e-5
        )
        assert ("std is in its kernel" in remarks) == (source.recipe.std != (1.0, 1.0, 1.0))
    else:
        assert bits(copy.tensors) == bits(expected.tensors)
    carried = expected.momentum if {a, b} <= set(NVIDIAS) else {}
    assert bits(copy.state.momentum) == bits(carried)
    assert bits(copy.state.ema) == bits(expected.ema if {a, b} == {"nvidia-pytorch"} else {})


ENDINGS = dict.fromkeys(("timm", "transformers"), "/model.safetensors")
ENDINGS |= {"nvidia-tensorflow": ".index", "nvidia-paddle": ".pdparams"}


@pytest.mark.parametrize("name", TARGETS)
def test_a_certificate_compares_what_a_format_stores(
    name: str, first: dict[tuple[str, str], Path]
) -> None:
    recipe = recipe_for(name)
    path = Path(f"{first[name, str(recipe.model)]}{ENDINGS.get(name, '')}")
    [bias] = compute_fingerprints([plain_state(recipe).tensors["fc.bias"]]).values()
    assert bias in compute_fingerprints(TARGETS[name].read_arrays(path)).values()


HELD = {
    "resnext101-32x4d": [name for name in TARGETS if name not in (ONLY_V1, "transformers")],
    "se-resnext101-32x4d": [
        *("safetensors", "torchvision", "nvidia-pytorch", "nvidia-tensorflow", "torchax")
    ],
    "seresnext26d-32x4d": ["safetensors", "torchvision", "timm", "torchax"],
}
"""The formats that can hold a model."""


@pytest.mark.parametrize("model", HELD)
def test_a_model_is_the_same_from_format_to_format_or_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(MODELS, model, replace(narrow_model(MODELS[model]), layers=(1, 1, 1, 1)))
    assert MODELS[model].groups > 1
    expected = plain_state(recipe_of(model)).tensors
    first = source = tmp_path / "first.safetensors"  # its metadata name the model
    checkpoint.write_weights(source, expected, {"recipe": recipe_of(model).fields(), "classes": []})
    for to in TARGETS:
        if to not in HELD[model]:
            refusal = r"has no (place for|model|resnext)|cannot be this network: groups"
            with pytest.raises(CheckpointError, match=refusal):
                converted(first, tmp_path / to / NAMES[to], to=to)
            continue
        converted(source, tmp_path / to / NAMES[to], to=to)
        source = tmp_path / to / NAMES[to]
        weights = open_weights(source)
        assert (weights.recipe.model, bits(weights.tensors)) == (model, bits(expected)), to


@pytest.mark.parametrize(("a", "b"), REFUSED)
def test_what_a_format_cannot_hold_is_refused(
    a: str, b: str, first: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    model = "resnet50" if a == ONLY_V1_5 else "resnet50-v1"
    with pytest.raises(CheckpointError, match=REFUSED[a, b]):
        converted(first[a, model], tmp_path / NAMES[b], to=b, network=model)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("b", ["safetensors", "torchvision", "timm", "keras"])
def test_velocities_that_a_format_has_no_place_for_are_remarked_upon(
    b: str, first: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    model = str(recipe_for(b).model)
    result = converted(first["nvidia-pytorch", model], tmp_path / NAMES[b], to=b, network=model)
    for words in ("velocities", "moving averages"):
        assert any(words in remark and "left out" in remark for remark in result["remarks"]), words


@pytest.mark.parametrize(
    ("a", "b", "differs"),
    [
        (
            "nvidia-mxnet",
            "torchvision",
            "mean [123.68, 116.779, 103.939], not [123.675, 116.28, 103.53]",
        ),
        ("keras", "torchvision", "std [1.0, 1.0, 1.0], not [58.395, 57.12, 57.375]"),
        ("keras", "nvidia-paddle", "std [1.0, 1.0, 1.0], not [58.395, 57.12, 57.375]"),
        ("torchvision", "nvidia-tensorflow", "antialias True, not False"),
    ],
)
def test_a_preprocessing_that_a_format_cannot_say_is_remarked_upon(
    a: str, b: str, differs: str, first: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    model = str(recipe_for(a, b).model)
    remarks = converted(first[a, model], tmp_path / NAMES[b], to=b, network=model)["remarks"]
    [remark] = [
        remark
        for remark in remarks
        if remark.startswith(f"{b} does not say how images are prepared")
    ]
    assert differs in remark


@pytest.mark.parametrize("to", NVIDIAS)
def test_weights_between_a_format_and_itself_need_no_other_preprocessing(
    to: str, first: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    remarks = converted(first[to, "resnet50"], tmp_path / NAMES[to], to=to)["remarks"]
    assert not any("how images are prepared" in remark for remark in remarks)


@pytest.mark.parametrize(
    ("to", "epochs"), [("nvidia-pytorch", 3), ("nvidia-paddle", 3), ("nvidia-mxnet", 3)]
)
def test_the_number_of_epochs_is_the_files_or_its_names(
    to: str, epochs: int, first: dict[tuple[str, str], Path], tmp_path: Path
) -> None:
    converted(first["nvidia-mxnet", "resnet50"], tmp_path / NAMES[to], to=to)
    assert open_weights(tmp_path / NAMES[to]).epochs == epochs
