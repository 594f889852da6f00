import re
from collections.abc import Callable
from pathlib import Path

Run = Callable[..., tuple[int, str, str]]


def test_an_onnx_model_is_written(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, _ = answer("export", run_folder, tmp_path / "model", "--to", "onnx")
    wrote, takes, compared, proof = output.splitlines()
    assert (code, wrote) == (0, f"wrote {tmp_path / 'model'}")
    assert (
        proof == f"proof: python {tmp_path / 'model'}/proof/check.py checks the model where it runs"
    )
    assert takes == "takes photos of any size: uint8 RGB [N, H, W, 3]"
    assert re.fullmatch(
        r"compared on 8 photos of 21 x 17 to 97 x 131 pixels: "
        r"the export in onnxruntime [\d.]+ and the weights in torch \S+ differ by \de-\d\d of the "
        r"largest logit "
        r"\(bound 1e-04\); top-1 agrees on 100%; [\d.]+ s",
        compared,
    )
    result = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert result == ["README.md", "classes.txt", "export.json", "model.onnx", "proof"]


def test_given_names_of_classes_are_exported(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    model = tmp_path / "model"
    names.write_text("".join(f"class {i}\n" for i in range(10)))
    assert answer("export", run_folder, model, "--to", "onnx", "--classes", names)[0] == 0
    assert (model / "classes.txt").read_text() == names.read_text()
    names.write_text("cat\n")
    code, _, errors = answer(
        "export", run_folder, tmp_path / "other", "--to", "onnx", "--classes", names
    )
    assert (code, (tmp_path / "other").exists()) == (2, False)
    assert f"{names} has 1 name, but the weights have 10 outputs" in errors


def test_an_unknown_format_is_wrong_use(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, _, errors = answer("export", run_folder, tmp_path / "model", "--to", "saved_modle")
    assert code == 2
    assert re.match("lockstep: there is no format 'saved_modle' to export to", errors)


def test_bf16_is_exported_in_fp32(answer: Run, run_in_bf16: Path, tmp_path: Path) -> None:
    code, output, _ = answer("export", run_in_bf16, tmp_path / "model")
    chosen, computes = output.splitlines()[4:]
    assert (code, (tmp_path / "model/model.onnx").is_file()) == (0, True)
    assert re.match(r"note: writing onnx, because onnxruntime \S+ is installed here; --to", chosen)
    assert computes == "note: the export computes in fp32; the weights were trained in bf16"


def test_int8_after_training_shows_top_1_before_and_after(
    answer: Run, run_folder: Path, textures: Path, tmp_path: Path
) -> None:
    images = ["--data", textures, "--calibration-images", "8"]
    options = ["--to", "onnx", "--precision", "int8", "--tolerance", "100", *images]
    code, output, _ = answer(
        "export", run_folder, tmp_path / "model", *options, "--batch", "2", "--no-compare"
    )
    assert code == 0
    assert re.search(
        r"^top-1 of 20 images: [\d.]+ % \(.*\) before int8, [\d.]+ % \(.*\) after"
        r" \(minmax on 8 images\)$",
        output,
        re.MULTILINE,
    )


def test_a_wrong_batch_is_refused(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, _, errors = answer(
        "export", run_folder, tmp_path / "model", "--to", "onnx", "--batch", "many"
    )
    assert code == 2
    assert "'many' is not a batch" in errors
