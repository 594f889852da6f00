import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import lockstep
from lockstep.models.accuracy_interval import format_accuracy
from lockstep.recipes import Recipe
from lockstep.weights.calibration import write_calibration
from tests.inference.cases import FIT
from tests.lines import check_lines
from tests.processes import python

Run = Callable[..., tuple[int, str, str]]


def test_scores_and_their_images_are_shown(answer: Run, run_folder: Path, textures: Path) -> None:
    code, output, errors = answer("evaluate", run_folder, "--data", textures, "--batch", 7)
    expected = lockstep.load(run_folder).evaluate(textures).to_json()
    assert (code, errors) == (0, "")
    *lines, speed, small = output.splitlines()
    assert re.fullmatch(
        r"  speed   \d+\.\d images/s with decoding; native, batch 7: mean \d+\.\d ms", speed
    )
    assert lines == [
        f"{run_folder / 'checkpoints' / 'step-00000007'} on {textures / 'val'}",
        f"  top-1   {format_accuracy(expected['top1_percent'], 20)} of 20 images",
        f"  classes balanced accuracy {expected['balanced_accuracy_percent']:.2f} %, macro F1"
        f" {expected['macro_f1_percent']:.2f} %",
        f"  top-5   {expected['top5_percent']:.2f} %",
        f"  loss    {expected['loss']:.4f}",
    ]
    assert "fewer than 20 images" in small
    assert small.endswith("and 5 more")


def test_how_images_are_prepared_is_set_or_taken_from_a_recipe(
    answer: Run, run_folder: Path, textures: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    recipe = tiny_recipe.replace(eval_resize=80, eval_crop=40)
    (tmp_path / "other.yaml").write_text(recipe.format_yaml())
    sizes = {"eval_resize": 80, "eval_crop": 40}
    expected = lockstep.load(run_folder, preprocessing=sizes).evaluate(textures).to_json()
    assert expected["loss"] != lockstep.load(run_folder).evaluate(textures).to_json()["loss"]
    for options in (
        ("--set", "eval_resize=80", "--set", "eval_crop=40"),
        ("--recipe", tmp_path / "other.yaml"),
    ):
        code, output, _ = answer("evaluate", run_folder, "--data", textures, "--json", *options)
        assert (code, json.loads(output)["loss"]) == (0, expected["loss"])


def test_bad_images_are_listed(
    answer: Run, run_folder: Path, textures: Path, tmp_path: Path
) -> None:
    shutil.copytree(textures / "val", tmp_path / "val", ignore=shutil.ignore_patterns(".*"))
    (tmp_path / "val" / "dots" / "broken.jpg").write_bytes(b"")
    output = answer("evaluate", run_folder, "--data", tmp_path)[1]
    assert output.splitlines()[-1] == f"  left out: {tmp_path}/val/dots/broken.jpg: empty file"


def test_json_is_the_whole_result(answer: Run, run_folder: Path, textures: Path) -> None:
    code, output, errors = answer(
        "evaluate", run_folder, "--data", textures, "--json", "--set", "loader_threads=1"
    )
    assert (code, errors) == (0, "")
    expected = lockstep.load(run_folder).evaluate(textures).to_json()
    content = json.loads(output)
    wanted = json.loads(json.dumps(expected))
    assert content["speed"].keys() == wanted["speed"].keys()
    wanted |= {"loss": pytest.approx(expected["loss"], rel=1e-6), "speed": content["speed"]}
    assert content == wanted


def test_the_threshold_has_its_precision(answer: Run, run_folder: Path, textures: Path) -> None:
    """The threshold answers as many images as any can with this precision."""
    images = sorted((textures / "val").glob("[!.]*/*"))
    precision = 0.2
    words = ("evaluate", run_folder, "--data", textures, "--json")
    code, output, warning = answer(*words, "--precision-at", precision)
    threshold = json.loads(output)["threshold"]
    rows = json.loads(answer("predict", run_folder, *images, "--json")[1])
    assert (code, threshold["wanted_percent"]) == (0, 20.0)
    rows.sort(key=lambda row: -row["probabilities"][0])
    hits = np.cumsum([row["classes"][0] == Path(row["path"]).parent.name for row in rows])
    best = max(count for count in range(1, 21) if hits[count - 1] / count >= precision)
    known = [row for row in rows if not row["unknown"]]
    assert 0 < len(known) < len(rows)
    assert len(known) == best == threshold["answered"] < 20
    assert f"warning: the threshold rests on {best} answered image" in warning
    assert threshold["precision_percent"] == pytest.approx(100 * hits[best - 1] / best)
    output = answer(*words[:-1], "--precision-at", hits[-1] / 20)[1]
    assert "  stored  no threshold is needed: all images are answered, and" in output
    assert "warning:" not in output
    code, _, errors = answer(*words, "--precision-at", 0.99)
    assert code == 2
    assert "no threshold reaches a precision of 99 %" in errors


def test_a_threshold_of_too_few_images_for_a_temperature_is_that_of_the_stored_one(
    answer: Run, run_folder: Path, textures: Path, tmp_path: Path
) -> None:
    file = run_folder / "checkpoints" / "step-00000007" / "model.safetensors"
    write_calibration(file, FIT)
    shutil.copytree(textures / "val", tmp_path / "val", ignore=shutil.ignore_patterns(".*"))
    images = sorted((tmp_path / "val").glob("*/*"))
    images.pop(0).unlink()
    rows = json.loads(answer("predict", run_folder, *images, "--json")[1])
    rows.sort(key=lambda row: -row["probabilities"][0])
    hits = [row["classes"][0] == Path(row["path"]).parent.name for row in rows]
    shares = np.cumsum(hits) / np.arange(1, 20)
    last = int(shares.argmax())
    assert last < 18, "not all images are answered"
    words = ("evaluate", run_folder, "--data", tmp_path / "val", "--precision-at", shares[last])
    code, output, _ = answer(*words)
    assert code == 0
    assert "19 validation images, fewer than 20; the stored temperature 3 is kept" in output
    stored = json.loads(file.with_name("calibration.json").read_text())[file.name]
    assert stored["temperature"] == FIT["temperature"]
    probabilities = [rows[place]["probabilities"][0] for place in (last, last + 1)]
    assert stored["unknown_below"] == pytest.approx(np.mean(probabilities), rel=1e-5)


def test_a_run_of_a_published_recipe_on_other_images_is_not_compared(
    answer: Run, run_folder: Path, textures: Path, tiny_recipe: Recipe
) -> None:
    (run_folder / "recipe.yaml").write_text(
        "based_on: resnet50-paddle-90ep\n" + tiny_recipe.format_yaml()
    )
    output = answer("evaluate", run_folder, "--data", textures)[1]
    check_lines(output.splitlines()[6], "^  published not compared: .* 10 and 20$")


def test_names_of_classes_come_from_a_file(
    answer: Run, run_folder: Path, textures: Path, tmp_path: Path
) -> None:
    names = sorted((path.name for path in (textures / "val").glob("[!.]*")), reverse=True)
    (tmp_path / "names.json").write_text(json.dumps(names))
    output = answer(
        "evaluate", run_folder, "--data", textures, "--classes", tmp_path / "names.json", "--json"
    )[1]
    assert json.loads(output)["classes"] == names


def test_another_runtime_computes_the_same(answer: Run, run_folder: Path, textures: Path) -> None:
    code, output, errors = answer(
        "evaluate", run_folder, "--data", textures, "--runtime", "onnxruntime", "--json"
    )
    content = json.loads(output)
    expected = lockstep.load(run_folder).evaluate(textures).to_json()
    assert (code, errors) == (0, "")
    assert (content["runtime"], content["precision"], content["per_class"]) == (
        "onnxruntime",
        "fp32",
        expected["per_class"],
    )
    assert content["loss"] == pytest.approx(expected["loss"], rel=1e-5)


def test_another_runtime_needs_no_framework(run_folder: Path, textures: Path) -> None:
    code = (
        "import lockstep, sys\n"
        f"model = lockstep.load({str(run_folder)!r}).on('onnxruntime')\n"
        f"model.evaluate({str(textures)!r})\n"
        "print(sorted({'torch', 'tensorflow', 'paddle', 'onnxruntime'} & set(sys.modules)))"
    )
    assert python(code) == (0, "['onnxruntime']\n", "")


def test_unknown_runtimes_are_errors(answer: Run, run_folder: Path, textures: Path) -> None:
    code, _, errors = answer("evaluate", run_folder, "--data", textures, "--runtime", "openvno")
    assert code == 2
    check_lines(errors, r"^lockstep: .*'openvno'.* openvino\?$")
    code, _, errors = answer("evaluate", run_folder, "--data", textures, "--runtime", "tensorrt")
    assert code == 2
    assert errors.startswith("lockstep: the runtime tensorrt needs tensorrt")


@pytest.mark.usefixtures("without_bf16")
def test_a_runtime_without_bf16_has_fp32(answer: Run, run_in_bf16: Path, textures: Path) -> None:
    runtime = ("--runtime", "onnxruntime")
    code, output, errors = answer("evaluate", run_in_bf16, "--data", textures, "--json", *runtime)
    assert (code, json.loads(output)["precision"]) == (0, "fp32")
    check_lines(errors, r"^note: computing in fp32, .* bf16: .* onnxruntime .* on a CPU$")
    code, _, errors = answer(
        "evaluate", run_in_bf16, "--data", textures, *runtime, "--set", "precision=bf16"
    )
    assert code == 2
    check_lines(errors, r"^lockstep: .* onnxruntime .* bf16 on a CPU.*--set precision=fp32$")


@pytest.mark.usefixtures("without_bf16")
def test_emulated_bf16_is_evaluated_in_fp32(answer: Run, run_in_bf16: Path, textures: Path) -> None:
    code, output, errors = answer("evaluate", run_in_bf16, "--data", textures, "--json")
    assert (code, json.loads(output)["precision"]) == (0, "fp32")
    assert errors.startswith("note: computing in fp32, because bf16 is emulated on this processor")
    output, errors = answer(
        "evaluate", run_in_bf16, "--data", textures, "--json", "--set", "precision=bf16"
    )[1:]
    assert json.loads(output)["precision"] == "bf16"
    assert errors.startswith("note: bf16 is emulated on this processor")


def test_a_folder_of_data_sets_is_a_table_with_labels(
    answer: Run, run_folder: Path, textures: Path, tmp_path: Path
) -> None:
    """The classes are those of the images but for one; `dots` is left out, `grid` is right as
    two."""
    for place in ("fog/1", "fog/2", "snow/1", "snow/2"):
        (tmp_path / "c" / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "c" / place).symlink_to(textures / "val")
    labels = {"dots": [], "grid": ["grid", "checks"]}
    (tmp_path / "labels.json").write_text(json.dumps(labels))
    words = ("evaluate", run_folder, "--data", tmp_path / "c", "--labels", tmp_path / "labels.json")
    code, output, errors = answer(*words)
    single = lockstep.load(run_folder).evaluate(textures, labels=labels)
    assert (code, errors, single.images) == (0, "", 18)
    top1 = f"{single.top1:6.2f}"
    assert output.splitlines()[1:6] == [
        "  top-1, %      1      2",
        f"  fog      {top1} {top1}  mean {top1}",
        f"  snow     {top1} {top1}  mean {top1}",
        "  means over 4 data sets:",
        f"  top-1   {format_accuracy(single.top1, 18)} of 72 images",
    ]
    code, output, _ = answer(*words, "--json")
    result = json.loads(output)
    assert list(result["sets"]) == ["fog/1", "fog/2", "snow/1", "snow/2"]
    assert result["sets"]["snow/2"]["loss"] == pytest.approx(single.metrics["loss"])
    code, _, errors = answer(*words[:3], tmp_path / "c/fog/1", "--labels", "missing.json")
    assert code == 2
    assert errors.startswith("lockstep: missing.json: No such file or directory; expected JSON")
