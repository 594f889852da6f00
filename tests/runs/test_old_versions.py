"""Runs, exports, converted weights and packs of version 0.2, before runs had ids: later versions
resume, evaluate and read them.

`version-0.2.tar.xz` was made by that version, with PyTorch on a CPU: a run of a narrow network that
was stopped after the first of two epochs, trained on a pack of 30 images; all of its exports;
its weights in the formats that hold such a network; and the losses at the end of the whole run.
"""

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.system.errors import BackendError
from lockstep.weights import choose, open_weights
from lockstep.weights.checkpoint import read_identities
from lockstep.weights.run_identity import read_identity
from tests.runs.cases import read_entries
from tests.soak import in_a_soak

PACKS = ["webdataset", "tfrecord", "recordio"]
RUNNING = ["onnx", "openvino", "torchscript", "triton"]
SLOW = ["torch-export", "executorch", "litert", "paddle-inference", "stablehlo"]
"""Exports whose runtime takes seconds to import; `make soak` runs them."""
WEIGHTS = [
    *("exports/savedmodel", "exports/frozen-graph"),
    *("converted/flax/w.msgpack", "converted/nvidia-mxnet/w-0000.params"),
    *("converted/nvidia-paddle/w.pdparams", "converted/nvidia-pytorch/w.pth"),
    *("converted/nvidia-tensorflow/w.index", "converted/safetensors/w.safetensors"),
    "converted/torchvision/w.pth",
]


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What version 0.2 wrote. Tests must only read it."""
    folder = tmp_path_factory.mktemp("version-0.2")
    with tarfile.open(Path(__file__).with_name("version-0.2.tar.xz")) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def losses(old: Path) -> dict[str, Any]:
    """The losses of that version."""
    values: dict[str, Any] = json.loads((old / "expected.json").read_text())
    return values


def test_a_run_resumes_and_is_adopted(old: Path, losses: dict[str, Any], tmp_path: Path) -> None:
    run = shutil.copytree(old / "run", tmp_path / "run")
    events: list[dict[str, Any]] = []
    data = old / "packs/webdataset"
    execution = lockstep.Execution(loggers=())
    report = lockstep.train(out=run, data=data, execution=execution, listener=events.append)
    assert report["steps"] == losses["steps"]
    for weights in ("trained", "ema"):
        assert report["final"][weights]["loss"] == pytest.approx(losses[weights], rel=1e-3)
    identity = read_identity(run)
    assert identity is not None
    assert identity.adopted_step == 4
    saved = read_identities(run / "checkpoints")
    assert {step: number for step, (number, _) in saved.items()} == {4: "", 8: identity.id}
    starts = read_entries(run, "start")
    assert [start.get("run") for start in starts] == [None, identity.id]
    assert f"the run did not have an id: it gets {identity.id}" in starts[-1]["details"]
    assert report["run"] == identity.id


@pytest.mark.parametrize("name", PACKS)
def test_a_run_is_evaluated_on_every_pack(old: Path, losses: dict[str, Any], name: str) -> None:
    evaluation = lockstep.load(old / "run").evaluate(old / "packs" / name).to_json()
    assert evaluation["loss"] == pytest.approx(losses["best"], rel=1e-4)
    assert evaluation["images"] == 10


@pytest.mark.parametrize(
    "name", [*RUNNING, *(pytest.param(name, marks=in_a_soak) for name in SLOW)]
)
def test_an_export_computes_the_same(old: Path, losses: dict[str, Any], name: str) -> None:
    data = old / "packs/webdataset"
    try:
        evaluation = lockstep.load(old / "exports" / name).on("program").evaluate(data).to_json()
    except BackendError as error:
        pytest.skip(str(error))
    assert evaluation["loss"] == pytest.approx(losses["best"], rel=1e-4)


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_are_read(old: Path, name: str) -> None:
    run = open_weights(choose(old / "run"))
    try:
        weights = open_weights(choose(old / name, model=run.recipe.model))
    except BackendError as error:
        pytest.skip(str(error))
    assert weights.tensors.keys() == run.tensors.keys()
    for tensor, values in run.tensors.items():
        np.testing.assert_array_equal(weights.tensors[tensor], values)
