"""A conversion's certificate: what it says, and that nothing is written without one or beyond its
bound."""

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from safetensors import safe_open

import lockstep
from lockstep import backends
from lockstep.backends.torch.model import Model
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights, certificate, open_weights
from lockstep.weights.formats import torch_file
from lockstep.weights.formats.common import Written
from lockstep.weights.target_formats import TARGETS
from tests.weights.certificate_cases import RECIPE, change_bias, left, save_checkpoint, tensors
from tests.weights.formats.cases import bits
from tests.weights.small_models import compute_in_this_process, keras_recipe, make_torch_tensors

TARGET_NAMES = {
    **{"safetensors": "a.safetensors", "timm": "a", "nvidia-pytorch": "a.pth.tar"},
    **{"nvidia-tensorflow": "a", "nvidia-paddle": "a", "nvidia-mxnet": "a"},
}


pytestmark = pytest.mark.usefixtures("narrow")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_checkpoint(tmp_path, tensors())


def digests(*paths: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def change_what_is_written(monkeypatch: pytest.MonkeyPatch, to: str, change: Any) -> None:
    """Make a format's writer write other weights than it is given."""
    real = TARGETS[to].write

    def write(target: Path, weights: Weights, certified: bool, folder: Path) -> Written:
        return real(target, change(weights), certified, folder)

    monkeypatch.setitem(TARGETS, to, replace(TARGETS[to], write=write))


def torchs_logits() -> np.ndarray:
    """Return what a module of PyTorch computes from the certificate's images."""
    module = Model(RECIPE.spec, RECIPE)
    module.load_state_dict(make_torch_tensors(tensors()), strict=False)
    mean, std = (torch.tensor(value).reshape(1, 3, 1, 1) for value in (RECIPE.mean, RECIPE.std))
    images = torch.from_numpy(certificate.draw_images(64)).permute(0, 3, 1, 2)
    with torch.no_grad():
        return np.asarray(module.eval()((images - mean) / std).numpy(), np.float64)


def test_two_frameworks_agree(tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "same", tensors(), RECIPE.replace(padding="same"))
    result = lockstep.load(source).save(tmp_path / "model.ckpt-7", to="nvidia-tensorflow")
    record = result["certificate"]
    engines = [record["engines"][part].split()[0] for part in ("source", "target")]
    assert engines == ["torch", "tensorflow"]
    assert record["engines"]["source"] == f"torch {torch.__version__}"
    assert record["read_by"] == f"{record['engines']['target']}: equal"
    assert 0 < record["largest_difference"] <= record["bound"] == 1e-4
    assert record["mean_difference"] <= record["largest_difference"]
    assert (record["holds"], record["top1_agreement"]) == (True, 1)
    assert record["tensors_equal"] == record["tensors"]
    assert json.loads((tmp_path / "model.ckpt-7.certificate.json").read_text()) == record
    assert result["written"][-1] == str(tmp_path / "model.ckpt-7.certificate.json")


def test_a_certificate_has_sha256_of_files(source: Path, tmp_path: Path, one_process: None) -> None:
    record = lockstep.load(source).save(tmp_path / "a", to="nvidia-paddle")["certificate"]
    assert record["source_sha256"] == digests(*source.iterdir())
    assert record["target_sha256"] == digests(tmp_path / "a.pdparams", tmp_path / "a.pdopt")
    assert any("fourth input channel" in change for change in record["changes"])


ADDED = {
    "torchvision": ("a.pth", "num_batches_tracked of every batch norm was added"),
    "timm": ("a", "num_batches_tracked of every batch norm was added"),
    "nvidia-paddle": (
        "a",
        "learning_rate_0, loss_scaling_0, num_good_steps_0, num_bad_steps_0 were added",
    ),
}


@pytest.mark.parametrize(
    ("to", "name"), [("timm", "a"), ("nvidia-mxnet", "a"), ("nvidia-paddle", "run[1]/model[2]")]
)
def test_all_files_of_the_source_are_in_the_certificate(
    to: str, name: str, source: Path, tmp_path: Path, one_process: None
) -> None:
    result = lockstep.load(source).save(tmp_path / name, to=to, certificate=False)
    record = lockstep.load(tmp_path / name).save(tmp_path / "b.safetensors")["certificate"]
    files = [Path(path) for path in result["written"]]
    files = [path for path in files if path.name != "README.md"]
    assert len(files) > 1
    assert record["source_sha256"] == digests(*files)


def test_external_data_is_certified(source: Path, tmp_path: Path, one_process: None) -> None:
    lockstep.load(source).export(tmp_path / "a", to="onnx", compare=False)
    file = tmp_path / "a" / "model.onnx"
    onnx.save(
        onnx.load(file), file, save_as_external_data=True, location="bytes.data", size_threshold=16
    )
    record = lockstep.load(file).save(tmp_path / "b.safetensors")["certificate"]
    assert set(record["source_sha256"]) == {"model.onnx", "bytes.data"}


@pytest.mark.parametrize("to", ADDED)
def test_what_a_target_has_that_the_source_does_not_have_is_in_the_certificate(
    to: str, source: Path, tmp_path: Path, one_process: None
) -> None:
    name, words = ADDED[to]
    changes = lockstep.load(source).save(tmp_path / name, to=to)["certificate"]["changes"]
    assert [words in change for change in changes].count(True) == 1


def test_biases_that_keras_gets_are_in_the_certificate(tmp_path: Path, one_process: None) -> None:
    source = save_checkpoint(
        tmp_path, tensors(), keras_recipe().replace(image_size=64, eval_resize=72, eval_crop=64)
    )
    changes = lockstep.load(source).save(tmp_path / "a.weights.h5", to="keras")["certificate"][
        "changes"
    ]
    assert any("a bias of zeros was added" in change for change in changes)


def test_arrays_that_are_not_used_are_in_the_certificate(tmp_path: Path, one_process: None) -> None:
    counters = {f"bn{i}.num_batches_tracked": torch.tensor(3) for i in (1, 2)}
    torch.save(make_torch_tensors(tensors()) | counters, tmp_path / "source.pth")
    changes = lockstep.load(tmp_path / "source.pth").save(tmp_path / "a.safetensors")[
        "certificate"
    ]["changes"]
    without = [change for change in changes if change.startswith("without effect: ")]
    assert any("bn1.num_batches_tracked" in change for change in without)


@pytest.mark.parametrize("to", ["safetensors", "timm", "nvidia-pytorch"])
def test_the_targets_own_framework_reads_what_is_written(
    to: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_this_process(monkeypatch, "torch")
    record = lockstep.load(source).save(tmp_path / TARGET_NAMES[to], to=to)["certificate"]
    assert record["read_by"] == f"torch {torch.__version__}: equal"


def test_a_mistake_that_writer_and_reader_share_is_seen(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = torch_file.save
    load = torch_file.load

    def wrong(value: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return value | {"fc.bias": -value["fc.bias"]}

    monkeypatch.setattr(torch_file, "save", lambda path, value: save(path, wrong(value)))
    monkeypatch.setattr(torch_file, "load", lambda path, **options: wrong(load(path, **options)))
    monkeypatch.setitem(
        TARGETS, "torchvision", replace(TARGETS["torchvision"], read_arrays=torch_file.load)
    )
    compute_in_this_process(monkeypatch, "torch")
    with pytest.raises(CheckpointError, match=r"torch .* a\.pth differently.* fc\.bias"):
        lockstep.load(source).save(tmp_path / "a.pth", to="torchvision")
    assert left(tmp_path) == []
    compute_in_this_process(monkeypatch, "reference")  # without torch nobody sees it
    record = lockstep.load(source).save(tmp_path / "a.pth", to="torchvision")["certificate"]
    assert record["read_by"] is None


def test_unknown_networks_are_refused(source: Path, tmp_path: Path, one_process: None) -> None:
    with pytest.raises(CheckpointError, match="padding same, not symmetric"):
        lockstep.load(source).save(tmp_path / "a", to="nvidia-tensorflow")
    with pytest.raises(CheckpointError, match="model resnet50, not resnet50-v1"):
        lockstep.load(source, network="resnet50-v1").save(tmp_path / "a.pth", to="torchvision")
    assert left(tmp_path) == []


@pytest.mark.parametrize("to", sorted(TARGET_NAMES.keys() - {"nvidia-tensorflow"}))
def test_beyond_the_bound_nothing_is_written_and_both_figures_are_said(
    to: str, source: Path, tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_what_is_written(monkeypatch, to, change_bias)
    share = 1 / np.abs(torchs_logits()).max()
    expected = (
        rf"logits differ by {share:.2g} of the largest logit; expected at most 0\.0001\. Nothing is"
        r" written; --no-certif"
    )
    with pytest.raises(CheckpointError, match=expected):
        lockstep.load(source).save(tmp_path / TARGET_NAMES[to], to=to)
    assert left(tmp_path) == []


def test_a_graph_with_another_epsilon_does_not_get_a_certificate(
    source: Path, tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(weights: Weights) -> Weights:
        return replace(weights, recipe=weights.recipe.replace(bn_epsilon=0.1))

    change_what_is_written(monkeypatch, "nvidia-mxnet", change)
    with pytest.raises(CheckpointError, match="would compute differently"):
        lockstep.load(source).save(tmp_path / "a", to="nvidia-mxnet")
    assert left(tmp_path) == []


def test_what_a_target_named_before_is_not_what_is_certified(
    source: Path, tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_what_is_written(monkeypatch, "nvidia-paddle", change_bias)
    before = sorted(source.iterdir())
    # The source is a folder of the prefix's name.
    with pytest.raises(CheckpointError, match="would compute differently"):
        lockstep.load(source).save(source, to="nvidia-paddle")
    assert (sorted(source.iterdir()), list(source.parent.iterdir())) == (before, [source])


def test_the_written_epoch_is_certified(source: Path, tmp_path: Path, one_process: None) -> None:
    other = save_checkpoint(
        tmp_path / "other", {name: value + 1 for name, value in tensors().items()}
    )
    lockstep.load(other).save(tmp_path / "model-0009.params", to="nvidia-mxnet", certificate=False)
    record = lockstep.load(source).save(tmp_path / "model", to="nvidia-mxnet")["certificate"]
    assert (record["target"], record["tensors_equal"]) == ("model-0000.params", record["tensors"])


def test_an_engine_that_fails_is_one_message_and_leaves_no_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = tmp_path / "source" / "python"
    failing.write_text("#!/bin/sh\necho some framework broke >&2\nexit 3\n")
    failing.chmod(0o755)
    monkeypatch.setattr(backends, "find_interpreter", lambda name: failing)
    with pytest.raises(CheckpointError, match=r"torch cannot .*: some framework broke"):
        lockstep.load(source).save(tmp_path / "a.safetensors")
    assert left(tmp_path) == []


def test_an_interrupted_certificate_leaves_no_files(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(certificate, "_compute_logits", interrupt)
    with pytest.raises(KeyboardInterrupt):
        lockstep.load(source).save(tmp_path / "a", to="timm")
    assert left(tmp_path) == []


def test_infinite_logits_get_no_certificate(tmp_path: Path, one_process: None) -> None:
    values = tensors()
    values["fc.bias"][1] = np.nan
    source = save_checkpoint(tmp_path, values)
    with pytest.raises(CheckpointError, match=r"not finite.*--inspect.*--no-certificate"):
        lockstep.load(source).save(tmp_path / "a.safetensors")
    assert left(tmp_path) == []
    result = lockstep.load(source).save(tmp_path / "a.safetensors", certificate=False)
    assert result["certificate"] is None


@pytest.mark.parametrize(("to", "file"), [("safetensors", ""), ("timm", "model.safetensors")])
def test_metadata_says_what_is_uncertified(
    to: str, file: str, source: Path, tmp_path: Path, one_process: None
) -> None:
    model = lockstep.load(source)
    for name, certified in (("with.safetensors", True), ("without.safetensors", False)):
        result = model.save(tmp_path / name, to=to, certificate=certified)
        assert not any("no certificate" in remark for remark in result["remarks"])
        with safe_open(tmp_path / name / file, framework="numpy") as written:
            noted = written.metadata()
        noted = json.loads(noted["lockstep"]) if to == "safetensors" else noted
        assert noted.get("certificate") == (None if certified else "none")
    expected = ["with.safetensors", "with.safetensors.certificate.json", "without.safetensors"]
    assert left(tmp_path) == expected


def test_an_existing_certificate_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors.certificate.json").write_text("mine")
    for certified in (True, False):
        with pytest.raises(
            CheckpointError, match=r"a\.safetensors\.certificate\.json .*exists.*delete"
        ):
            lockstep.load(source).save(tmp_path / "a.safetensors", certificate=certified)
    assert left(tmp_path) == ["a.safetensors.certificate.json"]


@pytest.mark.parametrize("target", [".", "..", "/"])
def test_a_target_without_a_name_is_refused(target: str, source: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a name for a new file"):
        lockstep.load(source).save(target)


def test_the_reference_replaces_a_missing_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    assert certificate.find_backend("NVIDIA Paddle") == "paddle"
    assert certificate.find_backend("ONNX") == "reference"
    monkeypatch.setattr(backends, "find_interpreter", lambda name: None)
    assert certificate.find_backend("NVIDIA Paddle") == "reference"


KILLED = """
import importlib, os, signal, sys
from dataclasses import replace
import lockstep
from lockstep.models.architectures import MODELS, narrow_model
from lockstep.weights import certificate, logits_process
MODELS["resnet50"] = replace(narrow_model(MODELS["resnet50"]), layers=(1, 1, 1, 1))
certificate.find_backend = lambda origin: "reference"
certificate._compute_logits = (
    lambda folder, backend, parts: logits_process.compute_logits(folder, backend, parts) or ""
)
module = importlib.import_module("{module}")
real = module.{function}
def killed(*arguments, **options):
    {first}
    os.kill(os.getpid(), signal.SIGKILL)
module.{function} = killed
lockstep.load(sys.argv[1]).save(sys.argv[2], to="{to}")
"""
UNFINISHED = ".a.unfinished"
CERTIFICATE = "a.certificate.json"
MOMENTS = {
    "computing": (
        "nvidia-mxnet",
        "lockstep.weights.certificate",
        "_compute_logits",
        "pass",
        [UNFINISHED],
    ),
    "writing": (
        "nvidia-mxnet",
        "lockstep.weights.formats.mxnet_params",
        "dump",
        "open(arguments[0], 'wb').write(b'half')",
        [UNFINISHED],
    ),
    "naming files": ("nvidia-mxnet", "os", "link", "real(*arguments)", [UNFINISHED, CERTIFICATE]),
    "naming a folder": ("timm", "os", "link", "real(*arguments)", [UNFINISHED, CERTIFICATE]),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_killed_conversion_is_cleaned_up(moment: str, source: Path, tmp_path: Path) -> None:
    to, module, function, first, expected = MOMENTS[moment]
    program = KILLED.format(to=to, module=module, function=function, first=first)
    target = tmp_path / "new" / "a"
    ended = subprocess.run(
        [sys.executable, "-c", program, source, target], stdout=subprocess.DEVNULL, check=False
    )
    assert ended.returncode == -9
    assert left(target.parent) == expected
    result = lockstep.load(source).save(target, to=to, certificate=False)
    written = [Path(path) for path in result["written"]]
    left_over = {target if target in path.parents else path for path in written}
    assert set(target.parent.iterdir()) == left_over
    assert bits(open_weights(target).tensors) == bits(tensors())
