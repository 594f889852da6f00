"""`--model`, `--ignore` and what is said of preprocessing, for every command that takes weights of
other programs. What is right is what PyTorch computes with the module whose file it is."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import yaml
from PIL import Image
from torch import Tensor, nn

from lockstep.inference import serving
from lockstep.inference.serving import model
from lockstep.recipes import Recipe
from lockstep.weights import open_weights
from lockstep.weights.checkpoint import read_metadata
from tests.cli.cases import set_fields
from tests.lines import check_lines
from tests.weights.small_models import compute_in_this_process

Run = Callable[..., tuple[int, str, str]]
FIELDS = (
    "{block: basic, layers: [1, 1, 1, 1], stem: tiered, stem_width: 8, widths: [8, 16, 32, 64],"
    " expansion: 1}"
)
SPEC = Recipe.of({"model": yaml.safe_load(FIELDS)}).spec
COLOURS = {"mean": [123.675, 116.28, 103.53], "std": [58.395, 57.12, 57.375]}
SIZE = 64
CHOICE = ("--model", FIELDS, "--ignore", "criterion.*")
SIZES = ("--set", f"eval_resize={SIZE}", "--set", f"eval_crop={SIZE}")


def unit(inputs: int, outputs: int, kernel: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = unit(inputs, outputs, 3, stride)
        self.conv2, self.bn2 = unit(outputs, outputs, 3, 1)
        self.downsample = nn.Sequential()
        if stride > 1:
            self.downsample = nn.Sequential(*unit(inputs, outputs, 1, stride))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + self.downsample(x))


class Network(nn.Module):
    """A ResNet of no name, as timm saves it, next to a loss with a tensor."""

    def __init__(self) -> None:
        super().__init__()
        stem = [*unit(3, 3, 3, 2), nn.ReLU(), *unit(3, 4, 3, 1), nn.ReLU()]
        last, self.bn1 = unit(4, 8, 3, 1)
        self.conv1 = nn.Sequential(*stem, last)
        for stage, width in enumerate((8, 16, 32, 64), start=1):
            inputs = width if stage == 1 else width // 2
            block = Block(inputs, width, 1 if stage == 1 else 2)
            setattr(self, f"layer{stage}", nn.Sequential(block))
        self.fc = nn.Linear(64, 3)
        self.criterion = nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.max_pool2d(torch.relu(self.bn1(self.conv1(x))), 3, 2, 1)
        for stage in range(1, 5):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


@dataclass
class Case:
    file: Path
    data: Path
    photos: list[Path]
    inputs: Tensor
    labels: Tensor
    logits: Tensor

    def check_predictions(self, output: str) -> None:
        """Check the predictions in JSON of all photos, whose classes are numbers or names."""
        predictions = json.loads(output)
        likeliest = [prediction["probabilities"][0] for prediction in predictions]
        expected = self.logits.softmax(1).max(1).values
        assert likeliest == pytest.approx(expected.tolist(), abs=2e-5)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A file, photos of three classes, and the logits of the module that was saved."""
    folder = tmp_path_factory.mktemp("choices")
    rng = np.random.default_rng(1)
    pixels = rng.integers(0, 256, (12, SIZE // 8, SIZE // 8, 3), np.uint8).repeat(8, 1).repeat(8, 2)
    photos = []
    for number, image in enumerate(pixels):
        part = "val" if number < 6 else "train"
        photo = folder / "data" / part / "abc"[number % 3] / f"{number}.png"
        photo.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(photo)
        photos.append(photo)
    inputs = (torch.from_numpy(pixels).float() - torch.tensor(COLOURS["mean"])) / torch.tensor(
        COLOURS["std"]
    )
    inputs = inputs.permute(0, 3, 1, 2)
    torch.manual_seed(1)
    network = Network()
    with torch.no_grad():
        network.fc.weight *= 20
        for _ in range(20):
            network(inputs)
        network.eval().fc.bias -= network(inputs).mean(0)
        logits = network(inputs)
    torch.save(network.state_dict(), folder / "any.pth")
    assert len(logits.argmax(1).unique()) > 1
    labels = torch.arange(12) % 3
    return Case(folder / "any.pth", folder / "data", photos[:6], inputs[:6], labels[:6], logits[:6])


def test_the_file_is_refused_without_either_of_the_options(answer: Run, case: Case) -> None:
    errors = answer("predict", case.file, *case.photos)[2]
    assert "not a complete ResNet" in errors
    errors = answer("predict", case.file, *case.photos, "--model", FIELDS)[2]
    check_lines(errors, r"described model, but also has .*: criterion\.weight;.*--ignore 'crit")


def test_predictions_are_those_of_pytorch(answer: Run, case: Case) -> None:
    code, output, errors = answer(
        "predict", case.file, *case.photos, *CHOICE, *SIZES, "--top", 1, "--json"
    )
    assert code == 0, errors
    case.check_predictions(output)
    assert "note: left out by --ignore: criterion.weight\n" in errors


def test_an_evaluation_is_that_of_pytorch(answer: Run, case: Case) -> None:
    code, output, errors = answer(
        "evaluate", case.file, "--data", case.data, *CHOICE, *SIZES, "--json"
    )
    assert code == 0, errors
    result = json.loads(output)
    hits = (case.logits.argmax(1) == case.labels).float().mean()
    loss = nn.functional.cross_entropy(case.logits, case.labels)
    assert result["top1_percent"] == pytest.approx(100 * float(hits))
    assert result["loss"] == pytest.approx(float(loss), abs=1e-4)


def test_a_conversion_stores_the_network_and_what_was_left_out(
    answer: Run, case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_in_this_process(monkeypatch)
    target = tmp_path / "a.safetensors"
    code, output, errors = answer("convert", case.file, target, *CHOICE, *SIZES)
    assert code == 0, errors
    remark = "left out by --ignore: criterion.weight"
    assert f"note: {remark}\n" in output
    certificate = json.loads(target.with_name("a.safetensors.certificate.json").read_text())
    assert remark in certificate["changes"]
    metadata = read_metadata(target)
    assert metadata is not None
    assert metadata["ignored"] == ["criterion.weight"]
    assert remark in open_weights(target).remarks
    code, output, _ = answer("predict", target, *case.photos, "--top", 1, "--json")
    case.check_predictions(output)
    again = tmp_path / "b.safetensors"
    assert answer("convert", target, again, "--no-certificate")[0] == 0
    assert (read_metadata(again) or {})["ignored"] == ["criterion.weight"]


def test_an_inspection_shows_the_account(answer: Run, case: Case, tmp_path: Path) -> None:
    code, output, errors = answer("convert", case.file, "--inspect", *CHOICE)
    assert code == 0, errors
    for line in (
        r"^model +block basic, layers",
        r"^kernels +float32 14: conv1\.0\.weight",
        r"^without effect +\w+.*: \S+num_batches_tracked",
        r"^ignored +criterion\.weight$",
        r"^preprocessing +assumed: mean \[123\.675.* eval_crop 224",
    ):
        assert re.search(line, output, flags=re.MULTILINE), line
    description = json.loads(answer("convert", case.file, "--inspect", "--json", *CHOICE)[1])
    assert description["model"] == json.loads(json.dumps(SPEC.__dict__))
    ignored = {"name": "criterion.weight", "treatment": "ignored", "reason": ""}
    assert ignored in description["account"]
    assert set(description["preprocessing_from"].values()) == {"assumed"}


def test_an_export_computes_what_pytorch_computes(answer: Run, case: Case, tmp_path: Path) -> None:
    code, output, errors = answer(
        *("export", case.file, tmp_path / "onnx", "--to", "onnx", "--bare", "--no-compare"),
        *(*CHOICE, *SIZES),
    )
    assert code == 0, errors
    assert "note: left out by --ignore: criterion.weight\n" in output
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    logits = session.run(["logits"], {session.get_inputs()[0].name: case.inputs.numpy()})[0]
    np.testing.assert_allclose(logits, case.logits, atol=1e-4)


def test_a_server_computes_what_pytorch_computes(
    answer: Run, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = np.stack([np.asarray(Image.open(photo)) for photo in case.photos])
    logits = []

    def compute_once(source: Any, options: Any, *access: Any, **how: Any) -> None:
        with model.open_model(source, replace(options, batch=2), None) as served:
            logits.append(served.predict(pixels))

    monkeypatch.setattr(serving, "_run", compute_once)
    code, _, errors = answer("serve", case.file, *CHOICE, *SIZES, "--port", 0)
    assert code == 0, errors
    np.testing.assert_allclose(logits[0], case.logits, atol=1e-4)


def test_pruned_weights_are_the_networks(answer: Run, case: Case, tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    assert answer("sparsify", case.file, target, *CHOICE)[0] == 0
    weights = open_weights(target)
    assert (weights.recipe.model, weights.ignored) == (SPEC, ("criterion.weight",))
    code, output, _ = answer("sparsify", case.file, "--check", "--json", *CHOICE)
    assert (code, json.loads(output)["model"]["stem"]) == (1, "tiered")


@pytest.mark.parametrize("option", ["--model", "--set"])
def test_training_starts_from_it(answer: Run, case: Case, tmp_path: Path, option: str) -> None:
    value = FIELDS if option == "--model" else f"model={FIELDS}"
    run = tmp_path / "run"
    changes = set_fields(
        linear_probe="false", epochs=1, global_batch_images=2, mean="[0,0,0]", loader_threads=1
    )
    code, _, errors = answer(
        *("train", "--data", case.data, "--out", run, "--weights", case.file, option, value),
        *("--ignore", "criterion.*", "--stop-after-steps", 1, "--no-tensorboard", *changes),
    )
    assert code == 0, errors
    recipe = yaml.safe_load((run / "recipe.yaml").read_text())
    assert (recipe["model"]["widths"], recipe["mean"]) == ([8, 16, 32, 64], [0, 0, 0])
    assert recipe["std"] == COLOURS["std"]
    first = open_weights(run, checkpoint="0").tensors["layer4.0.conv2.weight"]
    saved = torch.load(case.file)["layer4.0.conv2.weight"].numpy()
    np.testing.assert_array_equal(first, saved)
    assert "left out by --ignore: criterion.weight" in (run / "log.jsonl").read_text()


COMMANDS: dict[str, Callable[[Any, Path, Path], tuple[Any, ...]]] = {
    "predict": lambda source, data, out: ("predict", source, data / "val"),
    "evaluate": lambda source, data, out: ("evaluate", source, "--data", data),
    "convert": lambda source, data, out: ("convert", source, out / "a.safetensors"),
    "inspect": lambda source, data, out: ("convert", source, "--inspect"),
    "export": lambda source, data, out: ("export", source, out / "program"),
    "serve": lambda source, data, out: ("serve", source),
    "sparsify": lambda source, data, out: ("sparsify", source, "--check"),
    "train": lambda source, data, out: (
        *("train", "--weights", source, "--data", data, "--out", out / "run"),
    ),
    "find lr": lambda source, data, out: (
        *("find", "lr", "--weights", source, "--data", data, "--out", out / "lr"),
    ),
    "data show": lambda source, data, out: (
        *("data", "show", data, "--weights", source, "--out", out / "a.png"),
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_an_unknown_network_is_the_first_error(name: str, answer: Run, tmp_path: Path) -> None:
    command = COMMANDS[name]("https://127.0.0.1:1/a.pth", tmp_path / "missing", tmp_path)
    code, _, errors = answer(*command, "--model", "resnet50_v1")
    assert (code, errors.count("\n")) == (2, 1)
    assert errors.startswith("lockstep: there is no model 'resnet50_v1'. Did you mean resnet50-v1")
    assert "--model '{block: bottleneck, layers: [2, 2, 2, 2]}'" in errors


@pytest.mark.parametrize("name", COMMANDS)
def test_an_idle_pattern_is_named(name: str, answer: Run, case: Case, tmp_path: Path) -> None:
    command = COMMANDS[name](case.file, case.data, tmp_path)
    code, _, errors = answer(*command, *CHOICE, "--ignore", "critreion.*")
    assert (code, errors.count("lockstep: --ignore 'critreion.*' matches nothing")) == (2, 1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("{block: bottleneck", "model: '{block: bottleneck' is not a value"),
        ("{block: basic, layers: [1, 1]}", "model.layers"),
        ("{block: basic, layers: [1, 1, 1, 1], stam: deep}", "there is no field 'model.stam'"),
        ("[1, 2]", "there is no model '[1, 2]'"),
    ],
)
def test_a_description_that_is_none_is_an_error(fields: str, message: str, answer: Run) -> None:
    code, _, errors = answer("evaluate", "missing.pth", "--model", fields)
    assert code == 2
    assert errors.startswith(f"lockstep: {message}")


def test_json_and_the_name_of_a_described_network_mean_the_same(answer: Run, case: Case) -> None:
    fields = json.dumps(yaml.safe_load(FIELDS))
    output = answer("convert", case.file, "--inspect", "--json", *CHOICE[2:], "--model", fields)[1]
    assert json.loads(output)["model"]["stem"] == "tiered"
    named = '{"block": "bottleneck", "layers": [3, 4, 6, 3], "stride_in": "1x1"}'
    errors = answer("convert", case.file, "--inspect", "--model", named)[2]
    assert "resnet50-v1" in errors


@pytest.mark.parametrize("options", [("--model", "resnet50"), ("--ignore", "x")])
def test_how_weights_are_read_needs_weights(
    options: tuple[str, ...], answer: Run, case: Case, tmp_path: Path
) -> None:
    command: Any = partial(answer, "train", "--data", case.data, "--out", tmp_path / "run")
    code, _, errors = command(*options)
    assert code == 2
    assert re.match(r"lockstep: --model and --ignore say how --weights are read", errors)


def test_a_run_needs_no_description(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    errors = answer("convert", run_folder, tmp_path / "a.safetensors", "--ignore", "fc.*")[2]
    assert "--ignore 'fc.*' matches nothing" in errors
    errors = answer("convert", run_folder, tmp_path / "a.safetensors", "--model", "resnet18")[2]
    assert "whose tensors are not those of resnet18" in errors
