"""The program that wrote a file computes it for the certificate, too."""

import json
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

import lockstep
from lockstep.inference import onnx_model
from lockstep.system.errors import CheckpointError
from lockstep.weights import original
from lockstep.weights.formats import onnx_weights
from tests.inference.cases import random_tensors
from tests.weights.certificate_cases import RECIPE, change_bias, left, save_checkpoint, tensors

pytestmark = pytest.mark.usefixtures("narrow")


def export_onnx(folder: Path) -> Path:
    """Save the weights as a model of another program: without Lockstep's metadata."""
    model = onnx_model.build_model(RECIPE, tensors(), ())
    del model.metadata_props[:]
    onnx.save(model, str(folder / "model.onnx"))
    return folder / "model.onnx"


def test_the_program_that_wrote_a_file_computes_it_too(
    tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = export_onnx(tmp_path)
    # All files are where the next conversion finds what a killed one leaves.
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    result = lockstep.load(source).save(tmp_path / "a.safetensors")
    record = result["certificate"]
    assert record["original"]["by"] == f"ONNX Runtime {onnxruntime.__version__}"
    assert record["original"]["top1_agreement"] == 1
    assert record["original"]["largest_difference"] < 1e-5
    stored = json.loads((tmp_path / "a.safetensors.certificate.json").read_text(encoding="utf-8"))
    assert next(iter(stored.values())).startswith("ONNX Runtime")


def test_weights_that_the_program_computes_otherwise_are_not_converted(
    tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = export_onnx(tmp_path)
    real = onnx_weights.read
    monkeypatch.setattr(
        onnx_weights, "read", lambda *args, **options: change_bias(real(*args, **options))
    )
    with pytest.raises(CheckpointError, match=r"ONNX Runtime .* computes the source: .* differ by"):
        lockstep.load(source).save(tmp_path / "a.safetensors")
    assert left(tmp_path) == ["model.onnx"]


def test_without_the_program_the_first_line_says_so(
    tmp_path: Path, one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = replace(original.PROGRAMS["ONNX Runtime"], packages=("missing_package",))
    monkeypatch.setitem(original.PROGRAMS, "ONNX Runtime", program)
    lockstep.load(export_onnx(tmp_path)).save(tmp_path / "a.safetensors")
    stored = json.loads((tmp_path / "a.safetensors.certificate.json").read_text(encoding="utf-8"))
    assert next(iter(stored.values())) == (
        "not compared with the program that wrote it: ONNX Runtime is not installed"
    )


def test_other_preparation_of_images_is_seen(tmp_path: Path, one_process: None) -> None:
    sharp = RECIPE.replace(eval_antialias=False, exif_orientation=False)
    seen = {}
    for name, recipe in (("sharp", sharp), ("smooth", sharp.replace(eval_antialias=True))):
        values = random_tensors(recipe, 1)
        values["fc.weight"] *= 1e-3  # so that probabilities are not 0 and 1
        source = save_checkpoint(tmp_path / name, values, recipe)
        record = lockstep.load(source).save(tmp_path / f"{name} in timm", to="timm")["certificate"]
        assert record["through_target"]["by"] == "Lockstep's copy of timm's loader"
        seen[name] = record["through_target"]["largest_difference"]
    assert seen["smooth"] < 1e-5 < 1e-4 < seen["sharp"]


def test_an_output_with_height_and_width_is_not_taken_for_classes(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        nodes = [onnx.helper.make_node("Identity", ["images"], ["y"])]
        image = onnx.helper.make_tensor_value_info("images", onnx.TensorProto.FLOAT, None)
        graph = onnx.helper.make_graph(nodes, "a", [image], [onnx.ValueInfoProto(name="y")])
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)])
        model.ir_version = 8
        (folder / "model.onnx").write_bytes(model.SerializeToString())

    squares = np.zeros((2, 4, 4, 3), np.uint8)
    same = original.Original("ONNX Runtime", write)
    with pytest.raises(ValueError, match=r"returns \[2, 3, 4, 4\], expected one number"):
        original.compute_original(same, squares, RECIPE, tmp_path / "a")
