"""`check.py` next to a model: it finds planted faults, names them, and raises no false alarm."""

import base64
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper, numpy_helper

from lockstep.proof.command import check_model
from lockstep.proof.diagnosis import Comparison, judge, read_answers
from lockstep.proof.record import CannotCheck, Proof, read_proof
from lockstep.proof.runtimes import open_onnx
from tests.inference.cases import CLASSES
from tests.proof.planted import Predictor, softmax


@pytest.fixture(scope="module")
def proof(folder: Path) -> Proof:
    return read_proof(folder / "proof")


def ask(proof: Proof, function: Callable[[str], Any]) -> tuple[str, int]:
    """Return what is printed for a user's function, and the exit code."""
    rows = [function(str(proof.path(number))) for number in range(len(proof.probes))]
    lines, code = judge(Comparison(proof, read_answers(proof, rows)), {})
    return "\n".join(lines), code


PLANTED = {
    "BGR": "colours swapped",
    "not normalised": "pixels not normalised",
    "0 to 1": "pixels from 0 to 1",
    "-1 to 1": "pixels from -1 to 1",
    "normalised twice": "normalised twice",
    "another mean": "a wrong mean or scale",
    "no antialiasing": "antialiasing",
    "squashed": "squashed to a square",
    "no margin": "no margin",
    "corner": "corner instead of centre",
    "EXIF ignored": "EXIF orientation",
    "CMYK inverted": "CMYK inverted",
    "alpha over white": "transparency over white",
    "softmax twice": "softmax twice",
    "shifted": "classes shifted up by one",
    "another order": "classes in the wrong order",
    "the photo before": "a batch that mixes images",
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_in_the_users_own_code_is_named(fault: str, folder: Path, proof: Proof) -> None:
    text, code = ask(proof, Predictor(folder / "bare.onnx", CLASSES, fault))
    assert code == 1
    named = [line for line in text.splitlines() if line.startswith(("Cause", "Probable cause"))]
    assert [PLANTED[fault] in line for line in named] == [True], text


def test_the_users_own_code_without_a_fault_raises_no_alarm(folder: Path, proof: Proof) -> None:
    text, code = ask(proof, Predictor(folder / "bare.onnx", CLASSES))
    assert (text.split(",")[-1], code) == (" classes equal", 0)
    text, code = ask(proof, Predictor(folder / "bare.onnx", CLASSES, "OpenCV"))
    assert code == 0, text


def reverse_colours(model: onnx.ModelProto) -> None:
    reorder_input(model, [2, 1, 0], axis=3)


def swap_photos(model: onnx.ModelProto) -> None:
    """Give each photo the answer of its neighbour in the batch: of one photo, its own."""
    output = model.graph.output[1].name
    rename_output(model, output, "before")
    steps = {"start": [-1], "end": [-(2**60)], "axis": [0], "step": [-1]}
    for name, value in steps.items():
        model.graph.initializer.append(numpy_helper.from_array(np.array(value, np.int64), name))
    model.graph.node.append(helper.make_node("Slice", ["before", *steps], [output]))


def add_softmax(model: onnx.ModelProto) -> None:
    output = model.graph.output[1].name
    rename_output(model, output, "before")
    model.graph.node.append(helper.make_node("Softmax", ["before"], [output], axis=1))


def leave_out_softmax(model: onnx.ModelProto) -> None:
    for node in model.graph.node:
        if node.op_type == "Softmax":
            node.op_type = "Identity"
            del node.attribute[:]


def roll_classes(model: onnx.ModelProto) -> None:
    for tensor in model.graph.initializer:
        if tensor.name in ("fc.weight", "fc.bias"):
            values = np.roll(numpy_helper.to_array(tensor), 1, axis=0)
            tensor.CopyFrom(numpy_helper.from_array(values, tensor.name))


def reorder_input(model: onnx.ModelProto, order: list[int], axis: int) -> None:
    name = model.graph.input[0].name
    for node in model.graph.node:
        node.input[:] = ["reordered" if entry == name else entry for entry in node.input]
    model.graph.initializer.append(numpy_helper.from_array(np.array(order, np.int64), "order"))
    gather = helper.make_node("Gather", [name, "order"], ["reordered"], axis=axis)
    model.graph.node.insert(0, gather)


def rename_output(model: onnx.ModelProto, name: str, new: str) -> None:
    for node in model.graph.node:
        node.output[:] = [new if entry == name else entry for entry in node.output]


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (reverse_colours, "colours swapped"),
        (add_softmax, "softmax twice"),
        (leave_out_softmax, "the softmax is missing"),
        (roll_classes, "classes shifted up by one"),
        (swap_photos, "a batch that mixes images"),
    ],
)
def test_a_fault_in_the_graph_is_named(
    edit: Callable[[onnx.ModelProto], None], name: str, folder: Path, proof: Proof, tmp_path: Path
) -> None:
    model = onnx.load(folder / "model.onnx")
    edit(model)
    onnx.save(model, tmp_path / "model.onnx")
    lines, code = check_model(proof, *open_onnx(tmp_path), must_normalise=True)
    assert code == 1
    assert [line for line in lines if line.startswith(f"Cause: {name};")], lines


def run_check(
    folder: Path, *arguments: str, without: str = "lockstep", where: Path = Path("/")
) -> tuple[str, int]:
    """Run `check.py` from another folder, in an interpreter that does not have a package."""
    code = (
        "import runpy, sys;"
        f"sys.modules[{without!r}] = None;"
        f"sys.argv = {['check.py', *arguments]!r};"
        f"runpy.run_path({str(folder / 'proof/check.py')!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-I", "-c", code], capture_output=True, text=True, cwd=where
    )
    assert result.stderr == ""
    return result.stdout, result.returncode


def test_check_py_needs_nothing_of_lockstep(folder: Path) -> None:
    text, code = run_check(folder)
    assert text.startswith("13 of 13 probes: preprocessing within 0")
    assert text.endswith("classes equal\n")
    assert code == 0


def test_check_py_says_what_to_install(folder: Path) -> None:
    text, code = run_check(folder, without="onnxruntime")
    assert "pip install onnxruntime" in text
    assert code == 2
    text, code = run_check(folder, without="PIL")
    assert "pip install numpy Pillow" in text
    assert code == 2


def test_a_model_that_has_changed_is_named_before_it_runs(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy/model.onnx").write_bytes(b"not a model")
    text, code = run_check(tmp_path / "copy")
    first, second = text.splitlines()
    assert first == "model.onnx has changed since the export: its SHA-256 differs"
    assert second.startswith("the model does not run here: ")
    assert code == 2
    model = onnx.load(folder / "model.onnx")
    model.doc_string = "other bytes, the same answers"
    onnx.save(model, tmp_path / "copy/model.onnx")
    text, code = run_check(tmp_path / "copy")
    assert text.splitlines()[0] == first
    assert text.endswith("classes equal\n")
    assert code == 1


def test_a_model_that_answers_everything_alike_proves_nothing(proof: Proof, tmp_path: Path) -> None:
    document = json.loads(json.dumps(proof.document))
    content = np.tile(proof.logits[:1], (len(proof.probes), 1)).astype("<f4").tobytes()
    document["expected"]["float32"] = base64.b64encode(content).decode()
    (tmp_path / "proof.json").write_text(json.dumps(document), encoding="utf-8")
    shutil.copytree(proof.folder / "photos", tmp_path / "photos")
    with pytest.raises(CannotCheck, match="a comparison proves nothing"):
        read_proof(tmp_path)


APP = """
def classify(path):
    if path.endswith("cmyk.jpg"):
        raise OSError("cannot identify it")
    return ANSWERS[path.rpartition("/")[2]]
"""


def test_a_function_in_the_current_folder_is_asked(
    folder: Path, proof: Proof, tmp_path: Path
) -> None:
    answers: dict[str, Any] = {}
    for probe, logs in zip(proof.probes, proof.logs, strict=True):
        best = np.argsort(-logs)[:3]
        named = {CLASSES[number]: f"{math.exp(logs[number]):.3%}" for number in best}
        answers[probe["file"].rpartition("/")[2]] = named
    answers["plain.jpg"]["blob"] = 0.5
    (tmp_path / "my_app.py").write_text(f"ANSWERS = {answers!r}\n{APP}", encoding="utf-8")
    text, code = run_check(folder, "--predictor", "my_app:classify", where=tmp_path)
    assert text.startswith("2 of 13 probes differ by more than 0.005 of")
    assert "photos/plain.jpg (a JPEG): ValueError: the model has no class 'blob'" in text
    assert "photos/cmyk.jpg (a CMYK JPEG): OSError: cannot identify it" in text
    assert code == 1
    text, code = run_check(folder, "--predictor", "my_app:nothing", where=tmp_path)
    assert text.startswith("my_app:nothing cannot be imported (AttributeError:")
    assert code == 2


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "probabilities": lambda logits: softmax(logits),
    "logits": lambda logits: [logits.tolist()],
    "float16": lambda logits: softmax(logits).astype(np.float16),
    "percent": lambda logits: dict(zip(CLASSES, (100 * softmax(logits)).round(1), strict=True)),
    "one digit": lambda logits: softmax(logits).round(1),
    "pairs": lambda logits: list(zip(CLASSES, softmax(logits), strict=True))[::-1],
    "labels": lambda logits: [
        {"label": name, "score": share}
        for name, share in zip(CLASSES[:4], softmax(logits), strict=False)
    ],
    "numbers": lambda logits: dict(enumerate(softmax(logits))),
}


@pytest.mark.parametrize("form", FORMS)
def test_answers_are_read_in_many_forms(form: str, proof: Proof) -> None:
    rows = [FORMS[form](logits) for logits in proof.logits]
    assert judge(Comparison(proof, read_answers(proof, rows)), {})[1] == 0
    rows[3] = FORMS[form](proof.logits[3][::-1])
    lines, code = judge(Comparison(proof, read_answers(proof, rows)), {})
    assert (lines[0].split(" by")[0], code) == ("1 of 13 probes differ", 1)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (np.full(len(CLASSES), np.nan), "not finite"),
        ({"dots": "nan"}, "not finite"),
        ({"dots": [0.5]}, "could not convert"),
        ({}, "float"),
        ([0.5, 0.5], "reshape"),
        ("dots", "could not convert"),
        ([["dot", 0.5]], "no class 'dot'; expected one such as ['dots']"),
        ({-1: 0.5}, "no class -1"),
    ],
    ids=str,
)
def test_what_is_no_answer_is_said(answer: Any, reason: str, proof: Proof) -> None:
    rows: list[Any] = [answer, *proof.logits[1:]]
    lines, code = judge(Comparison(proof, read_answers(proof, rows)), {})
    assert reason in lines[1]
    assert (len(lines), code) == (2, 1)


def test_answers_of_two_classes_may_be_a_batch_of_one(proof: Proof) -> None:
    two = replace(proof, classes=("cat", "dog"), logits=proof.logits[:, :2], faults=())
    rows = [[softmax(logits).tolist()] for logits in two.logits]
    assert judge(Comparison(two, read_answers(two, rows)), {})[1] == 0


def test_values_of_int8_that_saturate_are_the_last_diagnosis(proof: Proof) -> None:
    model = {**proof.document["model"], "precision": "int8"}
    quantised = replace(proof, document={**proof.document, "model": model})
    lowest, highest = np.quantile(proof.logits, [0.2, 0.8])
    rows = list(np.clip(proof.logits, lowest, highest))
    lines, code = judge(Comparison(quantised, read_answers(quantised, rows)), {})
    assert "quantised values saturated" in lines[-1]
    assert code == 1


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("format",), 2),
        (("probes",), []),
        (("probes", 0, "file"), 3),
        (("probes", 0, "file"), "../../export.json"),
        (("probes", 0, "file"), "/etc/passwd"),
        (("probes", 0, "seen", "grid"), [1, 2]),
        (("probes", 0, "decoded", "means"), ["a", "b", "c"]),
        (("probes", 0, "sha256"), "0" * 64),
        (("expected", "float32"), "AAAA"),
        (("expected", "float32"), "%%%"),
        (("expected", "float32"), "\u00e9"),
        (("model", "logits"), 2**40),
        (("model", "classes"), [1]),
        (("model", "files"), []),
        (("bounds", "logits"), "1"),
        (("bounds", "logits"), 1e9),
        (("faults", 0, "probes"), [99]),
        (("faults", 0, "columns"), [2**63]),
        (("faults", 0, "advice"), None),
        (("input",), []),
        (("input", "batch"), 10**6),
        (("input", "std"), [1.0]),
        (("probes",), {}),
    ],
    ids=str,
)
def test_a_proof_that_lockstep_did_not_write_is_refused(
    keys: tuple[Any, ...], value: Any, proof: Proof, tmp_path: Path
) -> None:
    document = json.loads(json.dumps(proof.document))
    part = document
    for key in keys[:-1]:
        part = part[key]
    part[keys[-1]] = value
    (tmp_path / "proof.json").write_text(json.dumps(document), encoding="utf-8")
    shutil.copytree(proof.folder / "photos", tmp_path / "photos")
    with pytest.raises(CannotCheck, match="export"):
        read_proof(tmp_path)
