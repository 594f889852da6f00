"""Folders of timm: which paths name one, what is read from it, and what is written for timm."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from lockstep.models.architectures import MODELS, narrow_model
from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats import timm_folder
from lockstep.weights.weights_choice import WeightsChoice
from tests.weights.formats.cases import assert_canonical

CLASSES = ("cat", "owl", "bee")
RECIPE = Recipe(
    model="resnet18", logits=3, antialias=True, interpolation="bicubic", precision="fp32"
).replace(image_size=64)
CONFIG: dict[str, Any] = {
    "architecture": "resnet18",
    "num_classes": 3,
    "label_names": list(CLASSES),
    "pretrained_cfg": {
        **{"custom_load": False, "input_size": [3, 64, 64], "interpolation": "bicubic"},
        **{"crop_pct": 0.875, "crop_mode": "center", "mean": [0.485, 0.456, 0.406]},
        "std": [0.229, 0.224, 0.225],
    },
}


@pytest.fixture(scope="module", autouse=True)
def narrow_models() -> Iterator[None]:
    """Make networks narrow, whose files are quickly written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "resnet18", narrow_model(MODELS["resnet18"]))
        patch.setitem(MODELS, "resnet34", replace(MODELS["resnet18"], layers=(3, 2, 2, 2)))
        yield


@pytest.fixture(scope="module")
def state(narrow_models: None) -> State:
    """Weights of a narrow ResNet-18 in which every tensor has another value."""
    expected = MODELS["resnet18"].list_tensors(3)
    tensors = {t.name: np.full(t.shape, i / 7, np.float32) for i, t in enumerate(expected)}
    return State(9, tensors, {})


def convert_state(state: State) -> dict[str, torch.Tensor]:
    values = {name: torch.from_numpy(value.copy()) for name, value in state.tensors.items()}
    norms = [name.removesuffix("running_var") for name in values if name.endswith("running_var")]
    return values | {f"{name}num_batches_tracked": torch.tensor(9) for name in norms}


def save_folder(folder: Path, state: State, config: Any = CONFIG) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(convert_state(state), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return folder


def read(folder: Path, model: Any = None, *ignore: str) -> Weights:
    choice = WeightsChoice(model=model, ignore=ignore)
    return timm_folder.read(folder / "model.safetensors", momentum=False, choice=choice)


def empty(folder: Path, *names: str, config: str = json.dumps(CONFIG)) -> Path:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text(config if name == "config.json" else "")
    return folder


@pytest.mark.parametrize("named", ["", "config.json", "model.safetensors"])
def test_folder_config_and_weights_name_the_same_file(named: str, tmp_path: Path) -> None:
    folder = empty(tmp_path, "config.json", "model.safetensors", "pytorch_model.bin")
    assert timm_folder.find(folder / named) == folder / "model.safetensors"


def test_weights_of_pytorch_are_taken_where_they_are_named_or_alone(tmp_path: Path) -> None:
    both = empty(tmp_path / "both", "config.json", "model.safetensors", "pytorch_model.bin")
    alone = empty(tmp_path / "alone", "config.json", "pytorch_model.bin")
    assert timm_folder.find(both / "pytorch_model.bin") == both / "pytorch_model.bin"
    assert timm_folder.find(alone) == alone / "pytorch_model.bin"


@pytest.mark.parametrize(
    "named", ["", "model.safetensors", "config.json", "other.safetensors", "missing"]
)
def test_other_paths_are_no_folder_of_timm(named: str, tmp_path: Path) -> None:
    config = '{"architectures": ["ResNet"]}'
    empty(tmp_path, "config.json", "model.safetensors", "other.safetensors", config=config)
    assert timm_folder.find(tmp_path / named) is None
    (tmp_path / "config.json").unlink()
    assert timm_folder.find(tmp_path / named) is None


def test_a_file_beside_timms_weights_is_not_taken_for_them(tmp_path: Path) -> None:
    empty(tmp_path, "config.json", "model.safetensors", "other.safetensors")
    assert timm_folder.find(tmp_path / "other.safetensors") is None


def test_a_config_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors or pytorch_model\.bin"):
        timm_folder.find(empty(tmp_path, "config.json"))


@pytest.mark.parametrize("text", ["{", "", "[" * 100_000, "\ud800"])
def test_a_config_that_is_not_json_is_refused(text: str, tmp_path: Path) -> None:
    empty(tmp_path, "config.json", "model.safetensors")
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config.json cannot be read as JSON"):
        timm_folder.find(tmp_path)


def test_a_folder_of_timm_is_read_with_its_preprocessing(state: State, tmp_path: Path) -> None:
    weights = read(save_folder(tmp_path, state))
    assert weights.recipe == RECIPE.replace(eval_resize=73, eval_crop=64)
    assert (weights.recipe.image_size, weights.recipe.interpolation) == (64, "bicubic")
    assert weights.classes == CLASSES
    assert_canonical(weights.state.tensors, state.tensors)
    assert (weights.state.step, weights.state.momentum, weights.remarks) == (0, {}, ())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(dtype: torch.dtype, state: State, tmp_path: Path) -> None:
    values = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in convert_state(state).items()
    }
    save_file(values, save_folder(tmp_path, state) / "model.safetensors")
    weights = read(tmp_path)
    expected = {
        name: value.float().numpy() for name, value in values.items() if name in state.tensors
    }
    assert_canonical(weights.state.tensors, expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            CONFIG | {"num_classes": 4, "label_names": None},
            "has 3 classes, but num_classes of config.json is 4",
        ),
        (
            CONFIG | {"architecture": "resnet34"},
            r"closest model, resnet34, does not fit: layer1\.2\.\S+ is missing",
        ),
        (CONFIG | {"architecture": "vit_base"}, "config.json: architecture is 'vit_base'"),
        ('{"architectures": ["ResNet"]}', "config.json is not timm's"),
    ],
)
def test_a_wrong_config_is_refused(config: Any, message: str, state: State, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read(save_folder(tmp_path, state, config))


@pytest.mark.parametrize(
    "name", ["resnet18.a1_in1k", "tv_resnet18", "gluon_resnet18_v1b", "ssl_resnet18"]
)
def test_tags_and_old_names_of_timm_are_known(name: str, state: State, tmp_path: Path) -> None:
    weights = read(save_folder(tmp_path, state, CONFIG | {"architecture": name}))
    assert weights.recipe.model == "resnet18"


@pytest.mark.parametrize("where", ["config", "pretrained_cfg", "metadata"])
def test_unknown_settings_are_refused_or_ignored(where: str, state: State, tmp_path: Path) -> None:
    config = CONFIG | {"tags": ["a"], "label_smoothing": 0.1}
    metadata = {"format": "pt"}
    if where == "config":
        config |= {"head": {"temperature": 1.5}}
    elif where == "metadata":
        metadata["head"] = '{"temperature": 1.5}'
    else:
        config["pretrained_cfg"] = CONFIG["pretrained_cfg"] | {"temperature": 1.5}
    folder = save_folder(tmp_path, state, config)
    save_file(convert_state(state), folder / "model.safetensors", metadata=metadata)
    with pytest.raises(CheckpointError, match=r"temperature.*scales the logits.*--ignore") as error:
        read(folder)
    pattern = str(error.value).rpartition("--ignore ")[2].strip("'")
    assert read(folder, None, pattern).ignored


@pytest.mark.parametrize(
    ("name", "prefix"),
    [
        ("model.safetensors", "timm_model."),
        ("model.safetensors", "model."),
        ("model.safetensors", "net.body."),
        ("pytorch_model.bin", "module."),
        ("pytorch_model.bin", "_orig_mod."),
        ("pytorch_model.bin", ""),
    ],
)
def test_a_prefix_is_taken_off(name: str, prefix: str, state: State, tmp_path: Path) -> None:
    values = {f"{prefix}{key}": value for key, value in convert_state(state).items()}
    folder = save_folder(tmp_path, state)
    if name.endswith(".bin"):
        torch.save(values, folder / name)
    else:
        save_file(values, folder / name)
    weights = timm_folder.read(folder / name)
    assert_canonical(weights.state.tensors, state.tensors)
    assert (weights.recipe.image_size, weights.classes) == (64, CLASSES)


def test_tensors_that_are_left_over_refuse_a_folder(state: State, tmp_path: Path) -> None:
    values = convert_state(state) | {f"more.{i}": torch.zeros(2) for i in range(40)}
    save_file(values, save_folder(tmp_path, state) / "model.safetensors")
    expected = r"more\.0 and 39 more; .*--ignore 'more\.\*'$"
    with pytest.raises(CheckpointError, match=expected) as error:
        read(tmp_path)
    assert "more.30" not in str(error.value)
    weights = read(tmp_path, None, "more.*")
    assert_canonical(weights.state.tensors, state.tensors)


@pytest.mark.parametrize("mean", [(0.0, 0.0, 0.0), (-127.5, 0.0, 510.0)])
@pytest.mark.parametrize("std", [(255.0, 255.0, 255.0), (1.0, 1.0, 1.0), (510.0, 1.0, 2.0)])
def test_any_mean_and_deviation_is_read_as_it_was_written(
    mean: tuple[float, ...], std: tuple[float, ...], state: State, tmp_path: Path
) -> None:
    recipe = RECIPE.replace(mean=mean, std=std)
    timm_folder.write(tmp_path / "new", recipe, state, CLASSES)
    written = json.loads((tmp_path / "new" / "config.json").read_text())["pretrained_cfg"]
    assert written["mean"] == pytest.approx([value / 255 for value in mean])
    read_again = read(tmp_path / "new")
    assert (read_again.recipe.mean, read_again.recipe.std) == (mean, std)


def test_a_described_network_replaces_an_unknown_one(state: State, tmp_path: Path) -> None:
    folder = save_folder(tmp_path, state, CONFIG | {"architecture": "my_resnet"})
    with pytest.raises(CheckpointError, match=r"'my_resnet'.*name that: --model resnet50"):
        read(folder)
    for model in ("resnet18", MODELS["resnet18"]):
        weights = read(folder, model)
        assert weights.recipe.spec == MODELS["resnet18"]
        assert_canonical(weights.state.tensors, state.tensors)
        assert (weights.recipe.image_size, weights.classes) == (64, CLASSES)
    other = replace(MODELS["resnet18"], layers=(2, 2, 2, 3))
    expected = r"closest model, the described model, does not fit: layer4\.2\.conv1"
    with pytest.raises(CheckpointError, match=expected):
        read(folder, other)


NORMALISES = {f"normalize.{kind}": torch.full((3,), 0.5) for kind in ("mean", "std")}
ONE_OUTPUT = {"fc.weight": torch.ones(1, 64), "fc.bias": torch.zeros(1)}


@pytest.mark.parametrize(
    ("prefix", "changes", "config", "message"),
    [
        ("model.", NORMALISES, {}, "has a module that normalises images"),
        ("", ONE_OUTPUT, {"num_classes": 1, "label_names": ["cat"]}, "has one output"),
        ("", {"conv1.weight": torch.ones(8, 3, 7, 7).char()}, {}, r"conv1.weight is int8"),
    ],
)
def test_weights_that_cannot_be_used_are_refused(
    prefix: str,
    changes: dict[str, torch.Tensor],
    config: dict[str, Any],
    message: str,
    state: State,
    tmp_path: Path,
) -> None:
    values = {f"{prefix}{name}": value for name, value in convert_state(state).items()} | changes
    save_file(values, save_folder(tmp_path, state, CONFIG | config) / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path)


def test_a_written_folder_has_what_timm_loads(state: State, tmp_path: Path) -> None:
    done = timm_folder.write(tmp_path / "new", RECIPE, state, CLASSES)
    expected_files = {tmp_path / "new" / n for n in ("config.json", "model.safetensors")}
    assert set(done.files) == set((tmp_path / "new").iterdir()) == expected_files
    assert done.remarks == ()
    with safe_open(tmp_path / "new" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    written = load_file(tmp_path / "new" / "model.safetensors")
    expected = convert_state(state)
    assert {name: (value.dtype, value.shape) for name, value in written.items()} == {
        name: (value.dtype, value.shape) for name, value in expected.items()
    }
    assert all(torch.equal(written[name], value) for name, value in expected.items())


def test_a_written_config_names_what_timm_reads(state: State, tmp_path: Path) -> None:
    timm_folder.write(tmp_path / "new", RECIPE, state, CLASSES)
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    nested = config["pretrained_cfg"]
    assert (config["architecture"], config["num_classes"]) == ("resnet18", 3)
    assert (config["num_features"], config["label_names"]) == (64, ["cat", "owl", "bee"])
    assert (nested["interpolation"], nested["crop_mode"]) == ("bicubic", "center")
    assert nested["mean"] == [0.485, 0.456, 0.406]
    assert (nested["input_size"], int(64 / nested["crop_pct"])) == ([3, 64, 64], RECIPE.eval_resize)


def test_a_written_folder_is_read_as_it_was(state: State, tmp_path: Path) -> None:
    timm_folder.write(tmp_path / "new", RECIPE, state, CLASSES)
    place = timm_folder.find(tmp_path / "new")
    assert place is not None
    weights = timm_folder.read(place, momentum=False)
    assert (weights.recipe, weights.classes, weights.remarks) == (RECIPE, CLASSES, ())
    assert_canonical(weights.state.tensors, state.tensors)


@pytest.mark.parametrize(
    ("changes", "remark"),
    [
        ({"antialias": False}, "timm's resize filters"),
        ({"eval_sampling": "asymmetric"}, "evaluated with eval_sampling: asymmetric"),
        ({"dct_scaling": True}, "evaluated with dct_scaling"),
        ({"exif_orientation": True}, "evaluated with exif_orientation"),
        ({"padding": "same"}, "SAME padding"),
        ({"bn_epsilon": 1e-3}, "batch norm adds 0.001 to the variance; timm's model adds"),
    ],
)
def test_what_timm_would_compute_differently_is_remarked_upon(
    changes: dict[str, Any], remark: str, state: State, tmp_path: Path
) -> None:
    [line] = timm_folder.write(tmp_path / "new", RECIPE.replace(**changes), state, ()).remarks
    assert remark in line


def test_a_folder_that_exists_is_not_written_to(state: State, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="already exists"):
        timm_folder.write(tmp_path, RECIPE, state, CLASSES)
    assert not list(tmp_path.iterdir())


def test_after_an_error_there_is_no_folder(
    state: State, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(timm_folder, "write_json", full)
    with pytest.raises(CheckpointError, match=r"cannot be written.*No space left"):
        timm_folder.write(tmp_path / "new", RECIPE, state, CLASSES)
    assert not list(tmp_path.iterdir())


def test_a_state_of_another_model_is_not_written(state: State, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="missing"):
        timm_folder.write(tmp_path / "new", RECIPE.replace(model="resnet34"), state, CLASSES)
    assert not list(tmp_path.iterdir())


def test_a_written_folder_has_the_permissions_of_any_new_one(state: State, tmp_path: Path) -> None:
    timm_folder.write(tmp_path / "a", RECIPE, state, CLASSES)
    (tmp_path / "other").mkdir()
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "other").stat().st_mode
