import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lockstep.models.state import State
from lockstep.recipes import Recipe
from lockstep.recipes.initial_weights import initial_tensors
from lockstep.weights import checkpoint, open_weights
from tests.lines import check_lines
from tests.weights.small_models import (
    compute_in_this_process,
    nvidia_pytorch,
    plain_state,
    recipe_of,
    use_narrow_models,
    zip_file,
)

Run = Callable[..., tuple[int, str, str]]


def test_what_was_written_is_printed(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "model.ckpt-7"
    code, output, errors = answer("convert", run_folder, prefix, "--to", "nvidia-tensorflow")
    assert (code, errors) == (0, "")
    lines = output.splitlines()
    assert lines[:3] == [
        f"wrote {path}"
        for path in (f"{prefix}.index", f"{prefix}.data-00000-of-00001", tmp_path / "checkpoint")
    ]
    assert all(line.startswith("note: ") for line in lines[3:])
    assert any(re.search(r"1001 outputs.* 10$", line) for line in lines)


def test_safetensors_is_the_default(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "weights.safetensors"
    code, output, _ = answer("convert", run_folder, target, "--no-certificate")
    assert code == 0
    check_lines(output, f"^wrote {target}$", "^note: left out.*: step 7$")


def test_names_of_classes_come_from_a_file(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    target = tmp_path / "weights.safetensors"
    names.write_text("".join(f"class {i}\n" for i in range(10)))
    assert answer("convert", run_folder, target, "--classes", names, "--no-certificate")[0] == 0
    assert open_weights(target).classes == tuple(f"class {i}" for i in range(10))


def test_a_name_in_a_file_cannot_make_a_line_of_its_own(answer: Run, tmp_path: Path) -> None:
    tensors = {
        name: torch.from_numpy(value)
        for name, value in initial_tensors(Recipe(model="resnet18", logits=3)).items()
    }
    torch.save({"state_dict": tensors, "a\nwrote b": torch.ones(7)}, tmp_path / "a.pth")
    command = ("convert", tmp_path / "a.pth", tmp_path / "a.safetensors", "--no-certificate")
    assert "--ignore 'a?wrote b'\n" in answer(*command)[2]
    assert "left out by --ignore: a\\nwrote b\n" in answer(*command, "--ignore", "a?wrote b")[1]


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_in_this_process(monkeypatch)


def test_the_certificate_is_the_last_line(
    answer: Run, run_folder: Path, tmp_path: Path, one_process: None
) -> None:
    target = tmp_path / "weights.safetensors"
    code, output, errors = answer("convert", run_folder, target)
    assert (code, errors) == (0, "")
    check_lines(
        output,
        f"^wrote {target}$",
        f"^wrote {target}.certificate.json$",
        "^note: left out.*: step 7$",
        rf"^certificate: .* 0 .*0\.0001.* 87 of 87 .* reference {np.__version__}$",
        "^original: Lockstep itself wrote the source$",
    )
    result = json.loads((tmp_path / "weights.safetensors.certificate.json").read_text())["holds"]
    assert result is True


def test_a_nameless_model_has_no_certificate(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, _ = answer("convert", run_folder, tmp_path / "model", "--to", "nvidia-paddle")
    assert code == 0
    assert "note: no certificate was written: nvidia-paddle cannot" in output


def test_without_a_target_the_command_says_what_is_missing(answer: Run, run_folder: Path) -> None:
    code, output, errors = answer("convert", run_folder)
    assert (code, output) == (2, "")
    assert "expected a target to write to, or --inspect" in errors


def test_json_is_only_for_inspections(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, errors = answer("convert", run_folder, tmp_path / "a.safetensors", "--json")
    assert (code, output) == (2, "")
    assert "add --inspect" in errors
    errors = answer("convert", run_folder, "--inspect", "--require-signature", "key.pem")[2]
    assert "--inspect shows SOURCE as is; leave out" in errors
    assert not (tmp_path / "a.safetensors").exists()


def test_a_file_that_fits_two_models_is_converted_as_the_named_one(
    answer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_narrow_models(monkeypatch)
    zip_file(tmp_path / "a.pth", plain_state(recipe_of()))
    target = tmp_path / "b.safetensors"
    assert (
        answer("convert", tmp_path / "a.pth", target, "--model", "resnet50-v1", "--no-certificate")[
            0
        ]
        == 0
    )
    assert open_weights(target).recipe.model == "resnet50-v1"
    code, _, errors = answer(
        "convert", tmp_path / "a.pth", tmp_path / "c.safetensors", "--model", "resnet51"
    )
    assert code == 2
    check_lines(errors, "^lockstep: there is no model 'resnet51'.* resnet")
    assert not (tmp_path / "c.safetensors").exists()


def test_how_images_are_prepared_is_set_and_stored(
    answer: Run, run_folder: Path, tiny_recipe: Recipe, tmp_path: Path
) -> None:
    (tmp_path / "like.yaml").write_text(
        tiny_recipe.replace(interpolation="bicubic", eval_resize=80).format_yaml()
    )
    options = (
        "--recipe",
        tmp_path / "like.yaml",
        "--set",
        "image_size=64",
        "--set",
        "mean=[1, 2, 3]",
        "--no-certificate",
    )
    code, output, _ = answer("convert", run_folder, tmp_path / "a.safetensors", *options)
    recipe = open_weights(tmp_path / "a.safetensors").recipe
    assert (code, recipe.interpolation, recipe.mean, recipe.eval_resize) == (
        0,
        "bicubic",
        (1, 2, 3),
        73,
    )
    assert "mean [1.0, 2.0, 3.0], not [" in output


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "device=cpu",
            (
                "--set takes only preprocessing here, not device; set that for evaluate,"
                " predict or serve"
            ),
        ),
        ("precision=bf16", "--set takes only preprocessing here, not precision"),
        ("epochs=3", "epochs cannot be set for trained weights"),
        ("eval_corp=3", "there is no field 'eval_corp'. Did you mean --set eval_crop=3?"),
    ],
)
@pytest.mark.parametrize("command", ["convert", "export"])
def test_what_a_conversion_or_an_export_does_not_use_cannot_be_set(
    command: str, setting: str, message: str, answer: Run, run_folder: Path, tmp_path: Path
) -> None:
    code, output, errors = answer(command, run_folder, tmp_path / "a.safetensors", "--set", setting)
    assert (code, output, message in errors) == (2, "", True)


# --inspect


def test_an_inspection_shows_what_a_file_is(
    answer: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_narrow_models(monkeypatch)
    state = plain_state(recipe_of())
    nvidia_pytorch(tmp_path / "checkpoint.pth.tar", state)
    code, output, errors = answer("convert", tmp_path / "checkpoint.pth.tar", "--inspect")
    assert (code, errors) == (0, "")
    shown = {line[:16].strip(): line[17:] for line in output.splitlines()}
    parameters = sum(value.size for name, value in state.tensors.items() if "running_" not in name)
    expected = {
        "origin": "NVIDIA PyTorch",
        "model": "resnet50",
        "logits": "5",
        "classes": "no names",
        "parameters": str(parameters),
        "tensors": str(len(state.tensors)),
        "dtypes": f"float32 {len(state.tensors)}",
        "kernels": (
            "float32 17: conv1.weight, layers.0.0.conv1.weight, layers.0.0.conv2.weight, ..."
        ),
        "classifier": "float32 2: fc.weight, fc.bias",
        "without effect": "it describes the training: epoch, arch, best_prec1, optimizer",
        "preprocessing": "assumed: mean [123.675, 116.28, 103.53]",
        "step": "unknown",
        "epochs": "3",
        "velocities": "yes",
        "moving average": "yes",
    }
    assert {name: shown[name][: len(text)] for name, text in expected.items()} == expected
    assert "without effect   counters: bn1.num_batches_tracked" in output
    assert [path.name for path in tmp_path.iterdir() if "certificate" in path.name] == []


def test_an_inspection_of_tensors_alone_has_no_empty_line(answer: Run, tmp_path: Path) -> None:
    tensors = {name: torch.from_numpy(v) for name, v in plain_state(recipe_of()).tensors.items()}
    torch.save(tensors, tmp_path / "a.pth")
    output = answer("convert", tmp_path / "a.pth", "--inspect")[1]
    assert "origin" in output
    assert "it describes the training" not in output


def test_an_inspection_as_json_is_strict(answer: Run, tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    # No weights.
    torch.save({"epoch": 1, "state_dict": {}, "best_prec1": float("nan")}, tmp_path / "a.pth")
    assert answer("convert", tmp_path / "a.pth", "--inspect", "--json")[0] == 2
    recipe = Recipe(model="resnet18", logits=3)
    tensors = {name: torch.from_numpy(value) for name, value in initial_tensors(recipe).items()}
    tensors["conv1.weight"][0] = float("nan")
    tensors["layer1.0.conv1.weight"][2] = 0
    tensors["fc.bias"] = tensors["fc.bias"].half()
    tensors["bn1.running_var"][1] = 0
    scaler = {"scale": float("inf"), "_growth_tracker": 3}
    torch.save({"model": tensors, "scaler": scaler, "epoch": 4}, tmp_path / "b.pth")
    code, output, errors = answer("convert", tmp_path / "b.pth", "--inspect", "--json")
    assert (code, errors) == (0, "")
    description = json.loads(output, parse_constant=refuse)
    assert (description["model"], description["logits"], description["loss_scale"]) == (
        "resnet18",
        3,
        None,
    )
    assert description["dtypes"] == {"float32": len(tensors) - 1, "float16": 1}
    result = description["stored"][-1]
    assert result == {"name": "fc.bias", "dtype": "float16", "shape": [3], "tensors": ["fc.bias"]}
    assert description["oddities"] == [
        "values that are not finite: conv1.weight",
        "output channels whose weights are all 0: layer1.0.conv1.weight",
        "running variances of 0: bn1.running_var",
        "all running means are 0: batch norm never saw an image",
    ]


def test_inspections_show_classes_if_any(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    output = answer("convert", run_folder, "--inspect")[1]
    assert "classes          10: " in output
    assert "step             7\n" in output
    backbone = {
        name: value
        for name, value in initial_tensors(Recipe(model="resnet18")).items()
        if "fc." not in name
    }
    torch.save(
        {name: torch.from_numpy(value) for name, value in backbone.items()},
        tmp_path / "backbone.pth",
    )
    assert "logits           none\n" in answer("convert", tmp_path / "backbone.pth", "--inspect")[1]


def test_an_inspection_names_a_git_lfs_pointer(answer: Run, tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
    )
    code, output, errors = answer("convert", tmp_path / "a.safetensors", "--inspect")
    assert (code, output) == (2, "")
    assert errors.startswith(
        f"lockstep: {tmp_path / 'a.safetensors'} is a Git LFS pointer, not weights"
    )


def test_a_hostile_name_is_shown_escaped(answer: Run, tiny_recipe: Recipe, tmp_path: Path) -> None:
    about = {"recipe": tiny_recipe.fields(), "classes": ["cat\x1b[31m", "owl"]}
    state = State(
        1, {name: np.asarray(value) for name, value in initial_tensors(tiny_recipe).items()}, {}
    )
    checkpoint.save(tmp_path / "run" / "checkpoints", state, data_digest="", about=about)
    code, output, _ = answer("convert", tmp_path / "run", "--inspect")
    assert (code, "\x1b" in output, "cat" in output) == (0, False, True)
