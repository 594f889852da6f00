"""Folders of transformers: what is read of its ResNets and processors, and what is written."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import nn

import lockstep
from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.recipes import Recipe
from lockstep.system.errors import CheckpointError
from lockstep.weights import checkpoint, open_weights
from tests.weights.small_models import positive_tensors

CLASSES = ("cat", "owl", "bee")
LABELS: dict[str, Any] = {"id2label": {"2": "bee", "0": "cat", "1": "owl"}}
CONFIG: dict[str, Any] = LABELS | {
    "architectures": ["ResNetForImageClassification"],
    "depths": [1, 2, 1, 1],
    "downsample_in_bottleneck": False,
    "downsample_in_first_stage": False,
    "embedding_size": 8,
    "hidden_act": "relu",
    "hidden_sizes": [32, 32, 64, 64],
    "layer_type": "bottleneck",
    "model_type": "resnet",
    "num_channels": 3,
    "out_features": ["stage4"],
    "torch_dtype": "float32",
    "transformers_version": "4.18.0.dev0",
}
V1 = CONFIG | {"downsample_in_bottleneck": True}
BASIC = CONFIG | {"layer_type": "basic", "hidden_sizes": [16, 16, 24, 32]}
PROCESSOR: dict[str, Any] = {
    "crop_pct": 0.875,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "ConvNextFeatureExtractor",
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "resample": 3,
    "size": 64,
}
"""As microsoft/resnet-50 has it, for smaller images."""
CROPPING: dict[str, Any] = {
    "image_processor_type": "CLIPImageProcessorFast",
    "size": {"shortest_edge": 73},
    "do_center_crop": True,
    "crop_size": {"height": 64, "width": 64},
}


class Layer(nn.Module):
    """A convolution with its batch norm, as transformers names them."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, act: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
        self.normalization = nn.BatchNorm2d(outputs)
        if act:
            self.activation = nn.ReLU()

    def forward(self, x: Any) -> Any:
        x = self.normalization(self.convolution(x))
        return self.activation(x) if hasattr(self, "activation") else x


class Block(nn.Module):
    """A residual block."""

    def __init__(self, config: dict[str, Any], inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = Layer(inputs, outputs, 1, stride, False)
        strides = [stride, 1] if config["downsample_in_bottleneck"] else [1, stride]
        inner = outputs // 4
        layers = [Layer(inputs, inner, 1, strides[0], True)]
        layers += [Layer(inner, inner, 3, strides[1], True), Layer(inner, outputs, 1, 1, False)]
        if config["layer_type"] == "basic":
            layers = [Layer(inputs, outputs, 3, stride, True), Layer(outputs, outputs, 3, 1, False)]
        self.layer = nn.Sequential(*layers)
        self.activation = nn.ReLU()

    def forward(self, x: Any) -> Any:
        return self.activation(self.layer(x) + self.shortcut(x))


class Peer(nn.Module):
    """transformers' ResNetForImageClassification, written after its source."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["embedding_size"]
        resnet: Any = nn.ModuleDict({"embedder": nn.ModuleDict(), "encoder": nn.ModuleDict()})
        resnet["embedder"]["embedder"] = Layer(3, width, 7, 2, True)
        resnet["embedder"]["pooler"] = nn.MaxPool2d(3, 2, 1)
        stages = resnet["encoder"]["stages"] = nn.ModuleList()
        for number, size in enumerate(config["hidden_sizes"]):
            layers = [Block(config, width, size, 2 if number else 1)]
            layers += [Block(config, size, size, 1) for _ in range(config["depths"][number] - 1)]
            stages.append(nn.ModuleDict({"layers": nn.Sequential(*layers)}))
            width = size
        resnet["pooler"] = nn.AdaptiveAvgPool2d((1, 1))
        self.resnet: Any = resnet
        self.classifier = nn.Sequential(nn.Flatten(), nn.Linear(width, len(CLASSES)))

    def forward(self, x: Any) -> Any:
        embedder = self.resnet["embedder"]
        x = embedder["pooler"](embedder["embedder"](x))
        for stage in self.resnet["encoder"]["stages"]:
            x = stage["layers"](x)
        return self.classifier(self.resnet["pooler"](x))


def make_peer(config: dict[str, Any]) -> Peer:
    torch.manual_seed(0)
    peer = Peer(config).eval()
    values: Any
    for name, values in peer.state_dict().items():
        if "running" in name or ("normalization" in name and values.ndim):
            values.uniform_(0.5, 1.5)
    return peer


def save_folder(
    folder: Path, config: dict[str, Any], processor: Any = PROCESSOR, *, pickled: bool = False
) -> Peer:
    folder.mkdir(exist_ok=True)
    peer = make_peer(config)
    if pickled:
        torch.save(peer.state_dict(), folder / "pytorch_model.bin")
    else:
        save_file(peer.state_dict(), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return peer


def images() -> torch.Tensor:
    return torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(1))


@torch.inference_mode()
def assert_computes_as(folder: Path, peer: Any) -> None:
    ours = lockstep.load(folder).module().eval()(images())
    torch.testing.assert_close(ours, peer(images()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("config", [CONFIG, V1, BASIC], ids=["v1.5", "v1", "basic"])
@pytest.mark.parametrize("pickled", [False, True])
def test_a_folder_computes_as_its_program(
    config: dict[str, Any], pickled: bool, tmp_path: Path
) -> None:
    peer = save_folder(tmp_path, config, pickled=pickled)
    assert_computes_as(tmp_path, peer)
    weights = open_weights(tmp_path)
    assert (weights.origin, weights.classes) == ("transformers", CLASSES)
    fields = {"image_size": 64, "eval_resize": 73, "eval_crop": 64, "interpolation": "bicubic"}
    assert fields.items() <= weights.recipe.fields().items()
    assert weights.recipe.mean == pytest.approx((123.675, 116.28, 103.53))
    assert not weights.remarks


def test_without_a_config_tensors_say_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer = save_folder(tmp_path, CONFIG, None, pickled=True)
    spec = ModelSpec(
        block="bottleneck", layers=(1, 2, 1, 1), stem_width=8, widths=(8, 8, 16, 16), expansion=4
    )
    monkeypatch.setitem(MODELS, "resnet50", spec)
    (tmp_path / "config.json").unlink()
    assert_computes_as(tmp_path / "pytorch_model.bin", peer)
    weights = open_weights(tmp_path)
    assert (weights.origin, weights.classes, weights.recipe.logits) == ("transformers", (), 3)
    assert "timm is assumed: shorter side 256, crop 224, bicubic" in " ".join(weights.remarks)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; expected 'relu'"),
        ({"downsample_in_first_stage": True}, "downsample_in_first_stage is True; expected false"),
        ({"num_channels": 1}, "num_channels is 1; expected 3"),
        ({"problem_type": "multi_label_classification"}, "problem_type is 'multi_label"),
        ({"temperature": 2.0}, "temperature is 2.0: .*--ignore temperature"),
        ({"layer_type": "plain"}, "layer_type is 'plain'; expected 'basic' or 'bottleneck'"),
        ({"depths": [1, 2, 1]}, "expected four whole numbers"),
        ({"hidden_sizes": [30, 32, 64, 64]}, "expected multiples of 4"),
        ({"embedding_size": "8"}, "embedding_size is '8'"),
        ({"depths": [1, 2, 1, 2]}, "does not fit: layer4.1|is not a complete ResNet"),
        ({"id2label": {"0": "a", "1": "b"}}, "has 3 classes, but config.json has names of 2"),
        ({"id2label": {"0": "a", "3": "b"}}, "id2label has a class 3, but num_classes is 3"),
        ({"id2label": "abc"}, "id2label is 'abc'; expected a list of names, or a table"),
    ],
)
def test_a_config_that_changes_numbers_is_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_folder(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(CheckpointError, match=message):
        open_weights(tmp_path)


@pytest.mark.parametrize(
    ("processor", "expected"),
    [
        (PROCESSOR | {"size": {"shortest_edge": 64}, "crop_pct": 0.95}, {"eval_resize": 67}),
        (PROCESSOR | CROPPING, {"eval_resize": 73}),
        (PROCESSOR | CROPPING | {"resample": 2, "size": 64}, {"interpolation": "bilinear"}),
        (PROCESSOR | {"do_rescale": False}, {"mean": [0.485, 0.456, 0.406]}),
        (PROCESSOR | {"do_normalize": False}, {"mean": [0, 0, 0], "std": [255, 255, 255]}),
        (PROCESSOR | {"rescale_factor": 0.5}, {"std": [0.458, 0.448, 0.45]}),
    ],
)
def test_processors_are_read(
    processor: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    save_folder(tmp_path, CONFIG, processor)
    fields = open_weights(tmp_path).recipe.fields()
    assert {name: fields[name] for name in expected} == expected
    assert (fields["eval_crop"], fields["eval_offset_rounding"]) == (64, "down")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feature_extractor_type": "ViTFeatureExtractor"}, "--ignore feature_extractor_type"),
        ({"size": 384}, "ConvNextFeatureExtractor with size 384 stretches images"),
        ({"size": {"height": 64, "width": 64}}, "expected shortest_edge.* stretch images"),
        (CROPPING | {"size": {"height": 73, "width": 73}}, "expected shortest_edge"),
        (CROPPING | {"crop_size": {"height": 64, "width": 32}}, "expected equal height and width"),
        ({"do_center_crop": True, "crop_size": 32}, "stretches images, or prepares"),
        ({"default_to_square": True}, "--ignore default_to_square"),
        ({"resample": 1}, r"resample is 1; expected 2 \(bilinear\) or 3"),
        ({"do_flip_channel_order": True}, "--ignore do_flip_channel_order"),
        ({"do_resize": False}, "do_resize is False"),
        ({"image_mean": 0.5}, "image_mean is 0.5; expected three numbers"),
        ({"image_std": [0, 1, 1]}, "std"),
        ({"crop_pct": 0}, "crop_pct|eval_resize"),
        (CROPPING | {"do_center_crop": False}, "stretches images, or prepares"),
        (CROPPING | {"crop_size": 80}, r"eval_crop \(80\) must fit"),
    ],
)
def test_other_processors_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    save_folder(tmp_path, CONFIG, PROCESSOR | changes)
    with pytest.raises(CheckpointError, match=message):
        open_weights(tmp_path)


def test_names_of_several_classes_are_left_out(tmp_path: Path) -> None:
    """As ImageNet's, which has two kinds of cranes."""
    save_folder(tmp_path, CONFIG | {"id2label": {"0": "crane", "1": "owl", "2": "crane"}})
    weights = open_weights(tmp_path)
    assert weights.classes == ()
    assert weights.remarks[0].startswith("id2label has 'crane' for several classes")


def test_colours_of_images_from_0_to_255_are_read(tmp_path: Path) -> None:
    colours = {"do_rescale": False, "image_mean": [123.5, 116.25, 103.5]}
    save_folder(tmp_path, CONFIG, PROCESSOR | colours)
    assert open_weights(tmp_path).recipe.mean == (123.5, 116.25, 103.5)


def test_a_processor_can_be_left_out(tmp_path: Path) -> None:
    save_folder(tmp_path, CONFIG, PROCESSOR | {"feature_extractor_type": "ViTFeatureExtractor"})
    weights = open_weights(tmp_path, ignore=("feature_extractor_type",))
    assert "timm is assumed" in " ".join(weights.remarks)


def source(folder: Path, config: dict[str, Any]) -> Path:
    """Save weights of Lockstep with the network of a config."""
    is_basic = config["layer_type"] == "basic"
    expansion = 1 if is_basic else 4
    spec = ModelSpec(
        block=config["layer_type"],
        layers=tuple(config["depths"]),
        stem_width=config["embedding_size"],
        widths=tuple(size // expansion for size in config["hidden_sizes"]),
        expansion=expansion,
        stride_in="1x1" if config["downsample_in_bottleneck"] else "3x3",
    )
    recipe = Recipe(model=spec, logits=3, precision="fp32", antialias=True)
    recipe = recipe.replace(interpolation="bicubic", image_size=64, eval_resize=75, eval_crop=64)
    about = {"recipe": recipe.fields(), "classes": list(CLASSES)}
    checkpoint.write_weights(folder / "a.safetensors", positive_tensors(recipe), about)
    return folder / "a.safetensors"


@pytest.mark.parametrize("config", [CONFIG, V1, BASIC], ids=["v1.5", "v1", "basic"])
def test_a_written_folder_has_what_its_program_loads(
    config: dict[str, Any], tmp_path: Path
) -> None:
    path = source(tmp_path, config)
    result = lockstep.load(path).save(tmp_path / "b", to="transformers", certificate=False)
    [remark] = [text for text in result["remarks"] if "processor" in text]
    assert "eval_offset_rounding down, not even" in remark
    assert "eval_resize" not in remark
    written = json.loads((tmp_path / "b" / "config.json").read_text())
    plain = {n: v for n, v in config.items() if n not in ("out_features", "transformers_version")}
    assert plain.items() <= written.items()
    assert written["label2id"] == {"cat": 0, "owl": 1, "bee": 2}
    peer = Peer(config).eval()
    peer.load_state_dict(load_file(tmp_path / "b" / "model.safetensors"))
    assert_computes_as(path, peer)
    assert_computes_as(tmp_path / "b", peer)
    processor = json.loads((tmp_path / "b" / "preprocessor_config.json").read_text())
    assert processor["size"] == {"shortest_edge": 75}
    assert processor["crop_size"] == {"height": 64, "width": 64}
    assert processor["image_mean"] == [0.485, 0.456, 0.406]


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("wide_resnet50_2", "cannot be this network: expansion is 2, expected 4"),
        ("resnext50-32x4d", "groups is 32, expected 1"),
        ("resnet50d", "no place for a stem of three convolutions, average pools"),
    ],
)
def test_other_networks_are_refused_with_the_reason_and_timm(
    model: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = replace(MODELS[model], layers=(1, 1, 1, 1), widths=(32, 32, 32, 32))
    if MODELS[model].widths[0] == 128:
        small = replace(small, expansion=2)
    monkeypatch.setitem(MODELS, model, small)
    recipe = Recipe(model=model, logits=3, precision="fp32")
    tensors = {t.name: np.zeros(t.shape, np.float32) for t in recipe.spec.list_tensors(3)}
    about = {"recipe": recipe.fields(), "classes": []}
    checkpoint.write_weights(tmp_path / "a.safetensors", tensors, about)
    with pytest.raises(CheckpointError, match=rf"{reason}.*timm"):
        lockstep.load(tmp_path / "a.safetensors").save(tmp_path / "b", to="transformers")
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("config", [CONFIG, V1, BASIC], ids=["v1.5", "v1", "basic"])
def test_transformers_loads_and_computes_the_same(config: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    is_certified = config is V1  # which takes seconds
    lockstep.load(source(tmp_path, config)).save(
        tmp_path / "b", to="transformers", certificate=is_certified
    )
    network = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / "b").eval()
    assert_computes_as(tmp_path / "b", lambda x: network(x).logits)
    assert tuple(network.config.id2label.values()) == CLASSES
    network.save_pretrained(tmp_path / "theirs")
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "b", use_fast=False)
    processor.save_pretrained(tmp_path / "theirs")
    assert_computes_as(tmp_path / "theirs", lambda x: network(x).logits)
    if is_certified:
        result = lockstep.load(tmp_path / "theirs").save(tmp_path / "own.safetensors")
        assert f"transformers {transformers.__version__}" in result["certificate"]["compared"]
    random = np.random.default_rng(0)
    for shape in ((80, 103, 3), (200, 77, 3), (301, 300, 3)):
        photo = Image.fromarray(random.integers(0, 256, shape, np.uint8))
        [theirs] = processor(photo, return_tensors="np")["pixel_values"]
        photo.save(tmp_path / "photo.png")
        ours = lockstep.load(tmp_path / "b").preprocess(tmp_path / "photo.png")
        np.testing.assert_allclose(np.asarray(ours).reshape(theirs.shape), theirs, atol=1e-5)
