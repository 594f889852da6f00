from collections.abc import Callable
from pathlib import Path

from lockstep.weights.opening import open_weights

Run = Callable[..., tuple[int, str, str]]


def test_what_was_written_is_printed_with_every_remark(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "model.ckpt-7"
    code, output, errors = answer("convert", run_folder, prefix, "--to", "nvidia-tensorflow")
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[:3] == [
        f"wrote {path}" for path in (f"{prefix}.index", f"{prefix}.data-00000-of-00001", tmp_path / "checkpoint")
    ]
    assert all(line.startswith("note: ") for line in lines[3:])
    assert "note: the original's graph has 1001 outputs; these weights have 10" in lines


def test_weights_for_paddle_are_one_file_if_there_are_no_velocities(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, errors = answer("convert", run_folder, tmp_path / "model", "--to", "nvidia-paddle")
    lines = output.splitlines()
    assert (code, errors, lines[0]) == (0, "", f"wrote {tmp_path / 'model.pdparams'}")
    assert all(line.startswith("note: ") for line in lines[1:])
    assert "note: the original's graph has 1000 outputs; these weights have 10: --num-of-class" in lines


def test_weights_for_mxnet_are_a_graph_and_the_file_of_an_epoch(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, errors = answer("convert", run_folder, tmp_path / "model-0090.params", "--to", "nvidia-mxnet")
    lines = output.splitlines()
    assert (code, errors) == (0, "")
    assert lines[:2] == [f"wrote {tmp_path / name}" for name in ("model-symbol.json", "model-0090.params")]
    assert all(line.startswith("note: ") for line in lines[2:])
    assert "note: the original's graph has 1000 outputs; these weights have 10: --num-classes" in lines


def test_a_safetensors_file_is_written_if_nothing_else_is_said(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    code, output, _ = answer("convert", run_folder, target, "--no-certificate")
    assert (code, output) == (0, f"wrote {target}\nnote: left out, since the file holds only weights: step 7\n")


def test_names_of_classes_come_from_a_file(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    names, target = tmp_path / "names.txt", tmp_path / "weights.safetensors"
    names.write_text("".join(f"class {i}\n" for i in range(10)))
    assert answer("convert", run_folder, target, "--classes", names, "--no-certificate")[0] == 0
    assert open_weights(target).classes == tuple(f"class {i}" for i in range(10))


def test_nothing_is_overwritten(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    target.write_text("mine")
    code, output, errors = answer("convert", run_folder, target)
    assert (code, output) == (2, "")
    assert errors == f"lockstep: {target} already exists; name a new file, or remove this one\n"
    assert target.read_text() == "mine"
