"""NVIDIA's names and layouts, and variables with other ones. Tests with TensorFlow itself are in
test_peers."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.from_nvidia import resnet50_tensorflow_90ep
from lockstep.system.errors import CheckpointError, RecipeError
from lockstep.weights import Weights
from lockstep.weights.formats import shape_matching, tensor_bundle
from lockstep.weights.formats.nvidia_tensorflow import name_tensors, read, write
from lockstep.weights.formats.tensor_bundle import Bundle
from tests.lines import check_lines
from tests.soak import EXAMPLES
from tests.weights.formats.cases import (
    RESNET,
    RESNEXT,
    SQUEEZED,
    Variables,
    assert_canonical,
    assert_remarked,
    assert_state,
    check_other_states,
    list_names,
    rename_arrays,
    state_of,
    zeros,
)

SPECS = pytest.mark.parametrize(
    "spec", [RESNET, RESNEXT, SQUEEZED], ids=["resnet", "resnext", "squeezed"]
)
PLAIN = pytest.mark.parametrize("spec", [RESNET, RESNEXT], ids=["resnet", "resnext"])


def recipe_of(spec: ModelSpec | str, logits: int = 1001) -> Recipe:
    return resnet50_tensorflow_90ep().replace(model=spec, logits=logits, precision="fp32")


def variables_of(spec: ModelSpec, tmp_path: Path) -> Variables:
    """Return the variables that NVIDIA's code would save."""
    recipe = recipe_of(spec)
    write(tmp_path / "first", recipe, state_of(recipe))
    bundle = Bundle(tmp_path / "first")
    return {name: bundle.read(name) for name in bundle.entries}


def read_again(variables: Variables, tmp_path: Path, *, momentum: bool = True) -> Weights:
    tensor_bundle.write(tmp_path / "again", variables)
    return read(tmp_path / "again", momentum=momentum)


def test_the_names_of_resnet50_are_those_of_the_originals_code() -> None:
    table = name_tensors(MODELS["resnet50"])
    # 53 convolutions with four tensors of batch norm each, and the classifier's two.
    assert len(table) == 267
    assert table["conv1.weight"] == "conv2d/conv2d/kernel"
    assert table["bn1.running_var"] == "conv2d/BatchNorm/moving_variance"
    assert table["layer1.0.conv1.weight"] == "btlnck_block_0_0/bottleneck_1/conv2d/kernel"
    assert table["layer1.0.downsample.0.weight"] == "btlnck_block_0_0/shortcut/conv2d/conv2d/kernel"
    assert (
        table["layer1.0.downsample.1.weight"] == "btlnck_block_0_0/shortcut/conv2d/BatchNorm/gamma"
    )
    assert table["layer3.5.bn2.bias"] == "btlnck_block_2_5/bottleneck_2/BatchNorm/beta"
    assert (
        table["layer4.2.bn3.running_mean"] == "btlnck_block_3_2/bottleneck_3/BatchNorm/moving_mean"
    )
    assert (table["fc.weight"], table["fc.bias"]) == ("output/dense/kernel", "output/dense/bias")


def test_the_grouped_convolutions_of_resnext_have_a_name_of_their_own() -> None:
    table = name_tensors(MODELS["resnext101-32x4d"])
    assert (
        table["layer3.22.conv2.weight"] == "btlnck_block_2_22/bottleneck_2/bottleneck_2group_filter"
    )
    assert table["layer3.22.conv3.weight"] == "btlnck_block_2_22/bottleneck_3/conv2d/kernel"


def test_squeeze_and_excitation_is_two_dense_layers(tmp_path: Path) -> None:
    state = state_of(recipe_of(SQUEEZED))
    variables = variables_of(SQUEEZED, tmp_path)
    scope = "resnet/btlnck_block_1_0/bottleneck_se_layer"
    assert variables[f"{scope}/dense/kernel"].shape == (64, 2)
    assert variables[f"{scope}/dense_1/bias"].shape == (64,)
    first = state.tensors["layer2.0.se.fc1.weight"]
    assert variables[f"{scope}/dense/kernel"][5, 1] == first[1, 5, 0, 0]


@SPECS
def test_a_state_is_read_as_written(spec: ModelSpec, tmp_path: Path) -> None:
    recipe = recipe_of(spec)
    state = state_of(recipe, 123_456)
    write(tmp_path / "model.ckpt-123456", recipe, state)
    weights = read(tmp_path / "model.ckpt-123456")
    assert (weights.recipe, weights.state.step, weights.remarks) == (recipe, 123_456, ())
    assert_state(weights.state, state)


def test_kernels_and_classifier_are_turned(tmp_path: Path) -> None:
    recipe = recipe_of(RESNEXT)
    state = state_of(recipe)
    variables = variables_of(RESNEXT, tmp_path)
    kernel = variables["resnet/btlnck_block_1_0/bottleneck_2/bottleneck_2group_filter"]
    assert kernel.shape == (3, 3, 4, 16)
    assert kernel[0, 1, 2, 3] == state.tensors["layer2.0.conv2.weight"][3, 2, 0, 1]
    assert (
        variables["resnet/output/dense/kernel/Momentum"][5, 700]
        == state.momentum["fc.weight"][700, 5]
    )
    assert variables["global_step"].dtype == np.int64


@pytest.mark.parametrize("scope", ["", "tower_0/resnet50_v1.5/"])
@SPECS
def test_names_are_found_below_any_scope(spec: ModelSpec, scope: str, tmp_path: Path) -> None:
    variables = rename_arrays(
        variables_of(spec, tmp_path), lambda name: name.replace("resnet/", scope)
    )
    weights = read_again(variables, tmp_path)
    assert weights.remarks == ()
    assert_canonical(weights.state.tensors, state_of(recipe_of(spec)).tensors)


def test_a_classifier_made_a_convolution_is_read(tmp_path: Path) -> None:
    variables = variables_of(RESNET, tmp_path)
    for name in ("resnet/output/dense/kernel", "resnet/output/dense/kernel/Momentum"):
        variables[name] = variables[name][None, None]
    weights = read_again(variables, tmp_path)
    assert weights.remarks == ("the classifier is stored as a 1x1 convolution",)
    assert_state(weights.state, state_of(recipe_of(RESNET)))


def one_based(name: str) -> str:
    """Return a name as in NVIDIA's code of 2019, which counts from 1, but the blocks of stage 3
    from 2."""
    _, separator, rest = name.partition("btlnck_block_")
    if not separator:
        return name.replace("resnet/", "resnet50_v1.5/")
    stage = int(rest[0]) + 1
    block = int(rest[2]) + 1
    rest = rest[3:]
    return f"resnet50_v1.5/{separator}{stage}_{block + (stage == 3)}{rest}"


def other_words(name: str) -> str:
    """Return a name with another program's words in the same scopes. Block numbers go to 10 and
    beyond."""
    for ours, theirs in (
        ("resnet/conv2d/", "net/stem/"),
        ("btlnck_block_0_0", "net/unit9"),
        ("btlnck_block_0_1", "net/unit10"),
        ("btlnck_block_1_0", "net/unit11"),
        ("btlnck_block_1_1", "net/unit12"),
        ("btlnck_block_2_0", "net/unit101"),
        ("btlnck_block_3_0", "net/unit102"),
        ("bottleneck_", "x"),
        ("output/dense", "logits"),
    ):
        name = name.replace(ours, theirs)
    return name.replace("resnet/", "")


@pytest.mark.parametrize("change", [one_based, other_words])
@PLAIN
def test_other_names_are_matched_by_structure_and_that_is_said(
    spec: ModelSpec, change: Callable[[str], str], tmp_path: Path
) -> None:
    variables = rename_arrays(variables_of(spec, tmp_path), change)
    weights = read_again(variables, tmp_path)
    assert weights.recipe == recipe_of(spec)
    assert_state(weights.state, state_of(recipe_of(spec)))
    assert "matched by the order of their scopes and by their shapes" in weights.remarks[0]
    kernel = change("resnet/btlnck_block_3_0/bottleneck_1/conv2d/kernel")
    assert f"layer4.0.conv1.weight <- {kernel}" in weights.remarks[0]
    assert ("blocks count from 1" in weights.remarks[-1]) == (change is one_based)


def test_a_single_renamed_variable_is_matched_and_named(tmp_path: Path) -> None:
    old = "resnet/btlnck_block_1_0/bottleneck_2/conv2d"
    new = "resnet/btlnck_block_1_0/bottleneck_2/convolution"
    weights = read_again(
        rename_arrays(variables_of(RESNET, tmp_path), lambda name: name.replace(old, new)), tmp_path
    )
    assert_canonical(weights.state.tensors, state_of(recipe_of(RESNET)).tensors)
    assert [remark.rpartition(": ")[2] for remark in weights.remarks] == [
        f"layer2.0.conv2.weight <- {new}/kernel"
    ]


def test_a_renamed_batch_norm_or_classifier_alone_is_named(tmp_path: Path) -> None:
    def change(name: str) -> str:
        return name.replace("output/dense", "logits").replace(
            "bottleneck_1/BatchNorm", "bottleneck_1/bn"
        )

    weights = read_again(rename_arrays(variables_of(RESNET, tmp_path), change), tmp_path)
    assert_canonical(weights.state.tensors, state_of(recipe_of(RESNET)).tensors)
    assert weights.remarks[0].partition(": ")[2].split(", ") == [
        *(
            f"layer{stage}.{block}.bn1.weight <-"
            f" resnet/btlnck_block_{stage - 1}_{block}/bottleneck_1/bn/gamma"
            for stage, block in ((1, 0), (1, 1), (2, 0), (3, 0), (4, 0))
        ),
        "fc.weight <- resnet/logits/kernel",
    ]


NAMES = sorted(f"resnet/{name}" for name in name_tensors(RESNET).values())
EDITS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.sampled_from(
            [
                *("resnet", "btlnck_block_0_0", "bottleneck_1", "BatchNorm", "conv2d", "kernel"),
                *("gamma", "", "a/b"),
            ]
        ),
        st.none() | st.lists(st.sampled_from([0, 1, 3, 7, 8, 16, 32]), max_size=5),
        st.booleans(),
    ),
    min_size=1,
    max_size=4,
)


@EXAMPLES
@given(edits=EDITS, everywhere=st.booleans())
def test_whatever_variables_there_are_each_weight_is_the_right_one_or_it_is_an_error(
    edits: list[tuple[str, str, list[int] | None, bool]],
    everywhere: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("edited")
    variables = without("Momentum")(variables_of(RESNET, folder))
    for name, word, shape, gone in edits:
        value = variables.get(name)
        if value is None:
            continue
        if gone:
            del variables[name]
        elif shape is None:
            variables[name.replace(word, "x", 1)] = variables.pop(name)
        elif tuple(shape) != value.shape:
            variables[name] = zeros(*shape)
        if everywhere and word:
            variables = rename_arrays(variables, lambda name, word=word: name.replace(word, "y"))  # type: ignore[misc]
    try:
        weights = read_again(variables, folder)
    except (CheckpointError, RecipeError):
        return
    assert_canonical(weights.state.tensors, state_of(recipe_of(RESNET)).tensors)


def without(*endings: str) -> Callable[[Variables], Variables]:
    return lambda variables: {
        name: value for name, value in variables.items() if not name.endswith(endings)
    }


def swap_words(variables: Variables) -> Variables:
    """Rename the first block's last convolution and shortcut, of equal shapes, so that names do not
    identify them."""
    for old, new in (("/bottleneck_3", "/b"), ("/shortcut/conv2d", "/c"), ("/bottleneck_1", "/a")):
        variables = rename_arrays(variables, lambda name, old=old, new=new: name.replace(old, new))  # type: ignore[misc]
    return variables


def replace_value(name: str, value: np.ndarray) -> Callable[[Variables], Variables]:
    return lambda variables: variables | {f"resnet/{name}": value}


REFUSED: dict[str, tuple[Callable[[Variables], Variables], str]] = {
    "no statistics": (
        without("btlnck_block_1_0/bottleneck_2/BatchNorm/moving_mean"),
        r"btlnck_block_1_0/bottleneck_2/conv2d/kernel without all of gamma, beta, moving_mean",
    ),
    "no stem": (
        without("resnet/conv2d/conv2d/kernel"),
        "expected one 7x7 convolution of 3 channels, found none",
    ),
    "no bias": (
        without("dense/bias"),
        "expected a classifier of 256 features with its bias, found none",
    ),
    "no classifier": (without("dense/kernel"), "expected a classifier"),
    "ambiguous": (swap_words, "does not say by its names which is the shortcut"),
    "a wrong shape": (
        replace_value("btlnck_block_2_0/bottleneck_3/BatchNorm/beta", zeros(3)),
        r"beta is \[3\], expected \[128\]",
    ),
    "no floats": (
        replace_value("btlnck_block_2_0/bottleneck_3/BatchNorm/beta", np.zeros(128, np.int32)),
        r"beta is int32 \[128\], expected float32 \[128\]",
    ),
    "a wrong slot": (
        replace_value("output/dense/bias/Momentum", zeros(3)),
        r"bias/Momentum is float32 \[3\], expected float32",
    ),
    "a step of no kind": (
        lambda v: v | {"global_step": zeros()},
        "global_step is 0.0, expected a number of steps",
    ),
    "a step before the first": (
        lambda v: v | {"global_step": np.array(-1)},
        "global_step is -1, expected",
    ),
    "other things": (
        lambda v: {"a/kernel": zeros(3, 3), "b": zeros(1)},
        "not a complete ResNet .* The first of its 2 variables",
    ),
    "nothing": (lambda v: {}, "not a complete ResNet"),
}


@pytest.mark.parametrize(("change", "reason"), REFUSED.values(), ids=REFUSED)
def test_what_is_incomplete_ambiguous_or_more_is_refused(
    change: Callable[[Variables], Variables], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=f"again.*({reason})"):
        read_again(change(variables_of(RESNET, tmp_path)), tmp_path)


def test_a_missing_block_is_not_read_as_a_smaller_model(tmp_path: Path) -> None:
    """It is refused only if something distinguishes it from a smaller model."""
    variables = variables_of(RESNET, tmp_path)
    gap = {name: value for name, value in variables.items() if "btlnck_block_0_0" not in name}
    with pytest.raises(CheckpointError, match=r"btlnck_block_0_1 .* 8 channels"):
        read_again(gap, tmp_path)


def momentum_of_some(variables: Variables) -> Variables:
    return {
        name: v
        for name, v in variables.items()
        if not (name.endswith("Momentum") and "block_0_0" in name)
    }


REMARKED: dict[str, tuple[Callable[[Variables], Variables], str]] = {
    "no velocities": (without("Momentum"), r"there are no velocities \(Momentum\)"),
    "some velocities": (
        momentum_of_some,
        "12 of 62 velocities are missing, such as resnet/btlnck_block_0_0/.*left out",
    ),
    "no step": (without("global_step"), "there is no global_step; step 0 is used"),
    "other types": (
        lambda v: {
            name: value.astype(np.float16) if "gamma" in name else value
            for name, value in v.items()
        },
        "20 variables, such as resnet/conv2d/BatchNorm/gamma, are not float32 and were converted",
    ),
}


@pytest.mark.parametrize(("change", "remark"), REMARKED.values(), ids=REMARKED)
def test_what_a_reader_should_know_is_remarked(
    change: Callable[[Variables], Variables], remark: str, tmp_path: Path
) -> None:
    weights = read_again(change(variables_of(RESNET, tmp_path)), tmp_path)
    assert len(weights.remarks) == 1
    assert re.search(remark, weights.remarks[0])
    assert bool(weights.state.momentum) == ("velocities" not in remark)


def test_without_momentum_asked_for_none_is_read_and_none_is_missed(tmp_path: Path) -> None:
    weights = read_again(
        without("Momentum")(variables_of(RESNET, tmp_path)), tmp_path, momentum=False
    )
    assert (weights.state.momentum, weights.remarks) == ({}, ())


def test_other_outputs_than_the_originals_are_kept_and_remarked(tmp_path: Path) -> None:
    recipe = recipe_of(RESNET, 10)
    remarks = write(tmp_path / "ten", recipe, state_of(recipe)).remarks
    assert "NVIDIA's graph has 1001 outputs; these weights have 10" in remarks
    weights = read(tmp_path / "ten")
    assert weights.recipe.logits == 10
    check_lines(weights.remarks, "10 outputs; .* 1001")


def test_what_is_unlike_the_original_is_remarked_when_it_is_written(tmp_path: Path) -> None:
    recipe = recipe_of(RESNET, 10).replace(padding="symmetric")
    state = State(0, state_of(recipe).tensors, {}, {}, {"scale": 2.0})
    (tmp_path / "checkpoint").write_text("")
    done = write(tmp_path / "odd", recipe, state)
    assert list_names(done.files) == ["odd.index", "odd.data-00000-of-00001"]
    assert_remarked(done.remarks, "not this one", "symmetric padding", "have 10")
    assert_remarked(done.remarks, "no velocities", "loss scaling", "left as it is")
    assert (tmp_path / "checkpoint").read_text() == ""


def test_the_first_of_a_folder_is_made_its_newest(tmp_path: Path) -> None:
    variables_of(RESNET, tmp_path)
    assert tensor_bundle.find(tmp_path) == tmp_path / "first"


def test_a_model_of_basic_blocks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="bottleneck blocks only, but this network has none"):
        write(tmp_path / "a", Recipe(model="resnet18"), State(0, {}, {}))


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    check_other_states(write, recipe_of(RESNET), recipe_of(RESNEXT), tmp_path / "a")


def test_numbers_in_names_are_sorted_as_numbers() -> None:
    assert sorted(["u10/a", "u9/b", "u9/a"], key=shape_matching.natural) == [
        "u9/a",
        "u9/b",
        "u10/a",
    ]
