"""Files of PyTorch with more than a network: computed as their program computes them, or refused by
the name of what is more."""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lockstep.models.architectures import MODELS, ModelSpec
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import foreign_safetensors
from lockstep.weights.weights_choice import WeightsChoice
from tests.weights.formats.cases import BASIC
from tests.weights.formats.insertions_torch import Normalise, insert
from tests.weights.formats.torch_cases import Plain, check_answers, read_value

pytestmark = pytest.mark.usefixtures("few_models")

Tensors = dict[str, Tensor]


def rename(tensors: Mapping[str, Tensor], old: str, new: str) -> Tensors:
    return {name.replace(old, new, 1): tensor for name, tensor in tensors.items()}


def add_prefix(tensors: Mapping[str, Tensor], prefix: str) -> Tensors:
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}


def move_head(prefix: str, head: str) -> Tensors:
    moved = add_prefix(Plain().state_dict(), prefix)
    return rename(moved, f"{prefix}fc.", head)


def take_children() -> Tensors:
    *children, fc = Plain().children()
    return add_prefix(nn.Sequential(*children).state_dict(), "features.") | {
        f"classifier.{name}": tensor for name, tensor in fc.state_dict().items()
    }


def split_batch_norms() -> Tensors:
    """Add the batch norms that timm's SplitBatchNorm2d uses in training alone."""
    tensors = Plain().state_dict()
    for name in list(tensors):
        if "bn1." in name:
            tensors[name.replace("bn1.", "bn1.aux_bn.0.")] = 2 * tensors[name]
    return tensors


def add_attacker() -> tuple[Any, nn.Module]:
    """Return a checkpoint as the robustness library writes it, and its network."""
    network = Plain()
    module = nn.Sequential(OrderedDict(normalizer=Normalise("new_"), model=network))
    tensors = module.state_dict()
    attacker = rename(add_prefix(tensors, "attacker."), "normalizer.", "normalize.")
    value = {"model": add_prefix({**tensors, **attacker}, "module."), "epoch": 3, "schedule": None}
    return value | {"nat_prec1": torch.tensor(57.0), "adv_prec1": torch.tensor(30.0)}, module


def normalise_by_name(name: str, scale: int = 1) -> tuple[Any, nn.Module]:
    """Return the tensors of a module that normalises images from 0 to `scale`, and one that does
    the same with images from 0 to 1."""
    module = nn.Sequential(OrderedDict({name: Normalise(scale=scale), "model": Plain()}))
    expected = nn.Sequential(OrderedDict({name: Normalise(), "model": Plain()}))
    return module.state_dict(), expected


def add_average(prefix: str) -> Tensors:
    average = add_prefix(Plain().double().state_dict(), prefix)
    decay = {f"{prefix}decay": torch.tensor(0.9)}
    return add_prefix(Plain().state_dict(), "net.") | average | decay


COMPUTED: dict[str, Callable[[], tuple[Any, nn.Module]]] = {
    "plain": lambda: (Plain().state_dict(), Plain()),
    **{
        wrap.__name__: lambda wrap=wrap: (wrap(Plain()).state_dict(), Plain())
        for wrap in (nn.DataParallel, torch.compile, torch.optim.swa_utils.AveragedModel)
    },
    **{
        head: lambda head=head: (move_head("", f"{head}."), Plain())
        for head in ("last_linear", "head", "head.fc", "classifier", "linear", "output")
    },
    "a head outside": lambda: (move_head("backbone.", "head.fc."), Plain()),
    "a plain head outside": lambda: (move_head("encoder.", "fc."), Plain()),
    "children": lambda: (take_children(), Plain()),
    "SplitBatchNorm2d": lambda: (split_batch_norms(), Plain()),
    "robustness": add_attacker,
    "normalize": lambda: normalise_by_name("normalize"),
    "normaliser": lambda: normalise_by_name("normaliser"),
    "normalised bytes": lambda: normalise_by_name("normalize", 255),
    "a moving average": lambda: (add_average("ema_model."), Plain()),
    "Lightning": lambda: (
        {
            "state_dict": add_prefix(Plain().state_dict(), "model."),
            "pytorch-lightning_version": "2.5.0",
            "epoch": 2,
            "global_step": 90,
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {"ModelCheckpoint{}": {"best_model_score": torch.tensor(0.9)}},
            "optimizer_states": [{"state": {0: {"exp_avg": torch.zeros(8, 3, 7, 7)}}}],
            "lr_schedulers": [],
            "hparams_name": "kwargs",
            "hyper_parameters": {"lr": 0.1, "class_weights": torch.ones(5)},
            "MixedPrecision": {"scale": 65536.0},
        },
        Plain(),
    ),
    "values of training": lambda: (
        {
            "model_state_dict": Plain().state_dict(),
            "optimizer_state_dict": {"state": {0: {"exp_avg": torch.zeros(8, 3, 7, 7)}}},
            "scheduler_state_dict": {},
            "best_val_acc": 0.9,
            "trainLosses": [0.3],
            "rng_state": torch.zeros(9, dtype=torch.uint8),
            "config": {"lr": 0.1},
            "num_classes": 5,
        },
        Plain(),
    ),
}


@pytest.mark.parametrize("case", COMPUTED)
def test_a_file_answers_as_the_module_that_it_holds(case: str, tmp_path: Path) -> None:
    value, module = COMPUTED[case]()
    check_answers(read_value(value, tmp_path), module)


def change_attacker() -> Any:
    value, _ = add_attacker()
    return {"model": value["model"] | {"module.attacker.model.fc.bias": torch.zeros(5)}}


def add_value(**values: Any) -> dict[str, Any]:
    return {"state_dict": Plain().state_dict(), **values}


def add_loss() -> dict[str, Any]:
    tensors = add_prefix(Plain().state_dict(), "model.") | {"criterion.weight": torch.ones(5)}
    return {"state_dict": tensors, "pytorch-lightning_version": "2.5.0"}


def pair_encoders(*others: str) -> dict[str, Any]:
    tensors: Tensors = {}
    for name in ("encoder_q", *others):
        tensors |= add_prefix(Plain().state_dict(), f"module.{name}.")
    return {"state_dict": tensors}


def name_values(kernel: str, *names: str) -> Tensors:
    return {name: torch.zeros(4) for name in names} | {kernel: torch.zeros(4, 3, 3, 3)}


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        name: (lambda name=name, value=value: add_value(**{name: value}), rf"values .*: {name}\b")
        for name, value in {
            "temperature": 1.5,
            "T": torch.tensor(1.5),
            "mean": [0.5, 0.5, 0.5],
            "normalizer": {"mean": [0.5]},
            "head": torch.zeros(3),
            "classifier": {"weight": torch.zeros(5, 64)},
            "best_threshold": 0.4,
            "label_offset": 1,
            "discriminator": {"weight": torch.zeros(3, 3)},
            "best_model": {"weight": torch.zeros(3, 3)},
        }.items()
    },
    "a value among tensors": (
        lambda: {**Plain().state_dict(), "temperature": 1.5},
        "values .*: temperature;",
    ),
    "a sparse tensor": (
        lambda: {**Plain().state_dict(), "prior": torch.eye(5).to_sparse()},
        "values .*: prior;",
    ),
    "one output": (lambda: Plain(1).state_dict(), r"any\.pth has one output; .* always 100 %"),
    "two linear layers": (
        lambda: insert(nn.Sequential(nn.Linear(64, 64), nn.ReLU()), "before the classifier"),
        r"tensors .*: fc\.0\.0\.bias and 3 more",
    ),
    "a projection": (
        lambda: move_head("", "projector."),
        r"is a checkpoint of self-supervised training: .*: projector\.bias and 1 more",
    ),
    "another attacker": (
        change_attacker,
        r"robustness library: .*: module\.attacker\.model\.fc\.bias;",
    ),
    "a loss": (
        add_loss,
        r"is a Lightning checkpoint with its own loss: it looks like PyTorch's basic, but"
        r" .*: criterion\.weight;.*--ignore 'criterion\.weight'$",
    ),
    "MoCo": (
        lambda: pair_encoders("encoder_k"),
        r"is a MoCo checkpoint.*several networks: encoder_q\.\*, encoder_k\.\*;.*'encoder_k\.\*'$",
    ),
    "an encoder of MoCo": (
        lambda: pair_encoders(),
        r"is a MoCo checkpoint.*--ignore 'module\.encoder_q\.fc\.weight'",
    ),
    "two networks": (
        lambda: add_prefix(Plain().state_dict(), "a.") | add_prefix(Plain().state_dict(), "b."),
        r"several networks: a\.\*, b\.\*; .*--ignore 'b\.\*'$",
    ),
    "an average of other names": (
        lambda: add_prefix(Plain().state_dict(), "net.") | {"ema_net.gate": torch.zeros(3)},
        r"tensors .*: ema_net\.gate;",
    ),
    "a Sequential that names no modules": (
        lambda: dict(rename(Plain().state_dict(), "fc.", "fc.1.")),
        r"but has a Sequential that may contain more modules: fc\.0;",
    ),
    "several classes": (
        lambda: add_value(hyper_parameters={"multi_label": True}),
        r"values .*: hyper_parameters\.multi_label; its outputs are sigmoids",
    ),
    "another network's name": (
        lambda: add_value(arch="resnetaa50"),
        r"its network is 'resnetaa50', which Lockstep does not have.*--model resnet50",
    ),
    "OpenMMLab": (
        lambda: add_value(meta={"mmpretrain_version": "1.0"}),
        r"is an OpenMMLab file: .*values .*: meta\.mmpretrain_version; .*settings of OpenMMLab",
    ),
    "Transformers": (
        lambda: name_values("resnet.embedder.embedder.convolution.weight"),
        r"is a transformers network that is not a ResNet of Lockstep: it is not .* saves it\.",
    ),
    "a DenseNet": (
        lambda: name_values("features.denseblock1.denselayer1.norm1.weight", "classifier.weight"),
        "is a DenseNet: it is not",
    ),
    "a vision transformer": (
        lambda: name_values("patch_embed.proj.weight", "cls_token"),
        "is a vision transformer: it is not",
    ),
    "a teacher next to the network": (
        lambda: (
            {f"net.{name}": value for name, value in Plain().state_dict().items()}
            | {f"net.teacher.{n}.{n}.weight": torch.zeros(3, 3) for n in range(5)}
        ),
        r"net\.teacher\.0\.0\.weight and 4 more; .*tensors --ignore 'net\.teacher\.\*'$",
    ),
    "CLIP": (
        lambda: Plain().state_dict() | {"attnpool.c_proj.weight": torch.zeros(3, 3)},
        r"is a ResNet of CLIP: .*: attnpool\.c_proj\.weight;",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_change_results_refuses_a_file(case: str, tmp_path: Path) -> None:
    build, message = REFUSED[case]
    value = build()
    value = value.state_dict() if isinstance(value, nn.Module) else value
    with pytest.raises(CheckpointError, match=message):
        read_value(value, tmp_path)


@pytest.mark.parametrize("pattern", ["*", "*.*"])
def test_a_pattern_that_leaves_out_the_network_is_refused(pattern: str, tmp_path: Path) -> None:
    for value in (Plain().state_dict(), add_value()):
        with pytest.raises(CheckpointError, match=r"any\.pth has no .* --ignore leaves out"):
            read_value(value, tmp_path, ignore=(pattern,))


LEFT_OUT: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "a tensor": (add_loss, ("criterion.*",)),
    "a value": (lambda: add_value(temperature=1.5), ("temperature",)),
    "a module": (lambda: insert(nn.Dropout(), "before the classifier").state_dict(), ("fc.0",)),
    "a network": (lambda: add_value(model=Plain().state_dict()), ("model",)),
    "a network by its prefix": (
        lambda: (
            add_prefix(Plain().state_dict(), "module.a.")
            | add_prefix(Plain().double().state_dict(), "module.b.")
        ),
        ("b.*",),
    ),
    "options of a script": (
        lambda: add_value(arch="basic", version=2, args={"crop_mode": "squash"}),
        ("args",),
    ),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_the_user_leaves_out_has_no_effect(case: str, tmp_path: Path) -> None:
    build, ignore = LEFT_OUT[case]
    with pytest.raises(CheckpointError):
        read_value(build(), tmp_path)
    weights = read_value(build(), tmp_path, ignore=ignore)
    check_answers(weights, Plain())
    assert "ignored" in {part.treatment for part in weights.parts}


@pytest.mark.parametrize(
    ("key", "names", "expected"),
    [
        ("classes", list("abcde"), "abcde"),
        ("class_to_idx", {name: i for i, name in enumerate("abcde")}, "abcde"),
        ("idx_to_class", dict(enumerate("abcde")), "abcde"),
        ("id2label", {str(i): name for i, name in enumerate("abcde")}, "abcde"),
        ("class_names", list("abcdd"), ""),
        ("label_names", ["a"], ""),
        ("class_to_idx", {name: i + 1 for i, name in enumerate("abcde")}, ""),
    ],
)
def test_names_of_all_outputs_are_used(key: str, names: Any, expected: str, tmp_path: Path) -> None:
    weights = read_value(add_value(**{key: names}), tmp_path)
    assert weights.classes == tuple(expected)
    is_reported = any(f"{key} does not name each of the 5 outputs" in r for r in weights.remarks)
    assert is_reported != bool(expected)


def test_only_a_described_network_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(MODELS, "basic")
    tensors = add_prefix(Plain().state_dict(), "timm_model.")
    with pytest.raises(CheckpointError, match="is not a complete ResNet"):
        read_value(tensors, tmp_path)
    weights = read_value(tensors, tmp_path, model=BASIC)
    assert weights.recipe.model == BASIC
    check_answers(weights, Plain())
    save_file(tensors, tmp_path / "any.safetensors")
    weights = foreign_safetensors.read(
        tmp_path / "any.safetensors", choice=WeightsChoice(model=BASIC)
    )
    check_answers(weights, Plain())
    other = ModelSpec(block="basic", layers=(1, 1, 1, 1), expansion=1)
    expected = r"closest model, the described model, does not fit: \S+conv1\.weight is"
    with pytest.raises(CheckpointError, match=expected):
        read_value(tensors, tmp_path, model=other)


class Behind(nn.Module):
    """A network with a module without tensors next to it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.backbone = Plain()
        self.add_module(name, nn.Sigmoid())


@pytest.mark.parametrize("name", ["act", "out", "final", "clip", "neck", "resize", "relu"])
def test_a_module_that_a_resnet_does_not_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=f"without tensors .*: {name};"):
        read_value(Behind(name).state_dict(), tmp_path)


@pytest.mark.parametrize("name", ["dropout", "criterion", "val_loss", "train_acc", "flatten"])
def test_a_module_without_effect_is_read(name: str, tmp_path: Path) -> None:
    assert read_value(Behind(name).state_dict(), tmp_path).has_classifier
