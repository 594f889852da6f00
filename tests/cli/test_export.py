import re
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[int, str, str]]


def test_the_folder_is_named_when_it_is_whole(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, _ = answer("export", run_folder, tmp_path / "saved model")
    assert (code, output) == (0, f"wrote {tmp_path / 'saved model'}\n")
    assert (tmp_path / "saved model" / "saved_model.pb").is_file()


def test_a_program_for_paddle_inference_is_written(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, _ = answer("export", run_folder, tmp_path / "model", "--to", "paddle-inference")
    assert (code, output) == (0, f"wrote {tmp_path / 'model'}\n")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["classes.txt", "model.json", "model.pdiparams"]


def test_a_program_for_pytorch_is_written(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, _ = answer("export", run_folder, tmp_path / "model", "--to", "torchscript")
    assert (code, output) == (0, f"wrote {tmp_path / 'model'}\n")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["classes.txt", "model.pt"]


def test_an_onnx_model_is_written(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, _ = answer("export", run_folder, tmp_path / "model", "--to", "onnx")
    assert (code, output) == (0, f"wrote {tmp_path / 'model'}\n")
    assert sorted(path.name for path in (tmp_path / "model").iterdir()) == ["classes.txt", "model.onnx"]


def test_given_names_of_classes_are_exported(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    names, model = tmp_path / "names.txt", tmp_path / "model"
    names.write_text("".join(f"class {i}\n" for i in range(10)))
    assert answer("export", run_folder, model, "--to", "onnx", "--classes", names)[0] == 0
    assert (model / "classes.txt").read_text() == names.read_text()
    names.write_text("cat\n")
    code, _, errors = answer("export", run_folder, tmp_path / "other", "--to", "onnx", "--classes", names)
    assert (code, (tmp_path / "other").exists()) == (2, False)
    assert f"{names} has 1 names, but the weights have 10 outputs" in errors


def test_an_unknown_format_is_wrong_use(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, _, errors = answer("export", run_folder, tmp_path / "model", "--to", "saved_modle")
    assert code == 2
    assert re.match("lockstep: there is no format 'saved_modle' to export to", errors)


def test_what_was_trained_in_bf16_is_exported_in_fp32_with_a_note(answer: Run, run_in_bf16: Path, tmp_path: Path) -> None:
    code, output, _ = answer("export", run_in_bf16, tmp_path / "model", "--to", "onnx")
    assert code == 0
    assert output.splitlines()[1:] == ["note: computes in fp32; the weights were trained in bf16"]
