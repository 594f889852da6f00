"""`runtime="auto"`: which runtime is chosen, and when it is measured again."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep.inference.runtimes import NATIVE, RUNTIMES, fastest, list_installed
from lockstep.inference.runtimes.fastest import choose_fastest
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.runs.recorder import Recorder
from lockstep.weights import Weights
from tests.inference.cases import random_tensors, save_tensors

EXECUTION = Execution(backend="reference", device="cpu")
OF_FRAMEWORK = {name: row.framework for name, row in RUNTIMES.items()}
LOGITS = np.array([[1.0, -2.0], [0.5, 1.5]])
Choose = Callable[..., tuple[str, list[str]]]


@pytest.fixture
def weights(tiny_recipe: Recipe) -> Weights:
    return Weights(
        tiny_recipe, State(0, random_tensors(tiny_recipe, 1), {}), (), Path("weights"), "Lockstep"
    )


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "lockstep" / "runtimes.json"


@pytest.fixture
def rates(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[Any, float]]:
    """The differences of runtimes from the native one, as shares of the largest logit, and their
    images per second."""
    measurements: dict[str, tuple[Any, float]] = {
        NATIVE: (0.0, 10.0),
        "onnxruntime": (9e-5, 20.0),
        "openvino": (1.1e-4, 30.0),
    }

    def measure(name: str, *others: Any) -> tuple[np.ndarray, float]:
        difference, rate = measurements[name]
        if isinstance(difference, Exception):
            raise difference
        return LOGITS + difference * 2.0, rate

    monkeypatch.setattr(fastest, "_measure_one", measure)
    # Nothing is computed, so their packages need not be there.
    for name in ("onnxruntime", "openvino"):
        monkeypatch.setitem(RUNTIMES, name, replace(RUNTIMES[name], distributions=("numpy",)))
    return measurements


@pytest.fixture
def choose(weights: Weights, file: Path, rates: dict[str, Any]) -> Choose:
    """Return a function that returns the choice and the notes."""

    def run(chosen_weights: Weights = weights) -> tuple[str, list[str]]:
        notes: list[str] = []
        chosen = choose_fastest(
            chosen_weights, EXECUTION, Recorder(lambda event: notes.append(event["message"]))
        )  # type: ignore[typeddict-item]
        return chosen, notes

    return run


def test_the_fastest_runtime_within_the_bound_is_chosen(choose: Choose, file: Path) -> None:
    chosen, notes = choose()
    assert chosen == "onnxruntime"
    assert notes == [
        (
            "measuring the runtimes native, onnxruntime, openvino once for this machine and these"
            " weights; this takes seconds"
        ),
        (
            "the runtime openvino is not used: its logits differ by 1.1e-04 of the largest, more"
            " than the bound of 1e-04"
        ),
        "using the runtime onnxruntime (images/s: onnxruntime 20, native 10); remembered in"
        f" {file}",
    ]


@pytest.mark.usefixtures("rates")
def test_a_runtime_of_another_framework_is_not_considered(weights: Weights) -> None:
    assert RUNTIMES["paddle-inference"].framework not in ("", EXECUTION.backend)
    assert fastest._list_candidates(weights, EXECUTION) == [NATIVE, "onnxruntime", "openvino"]
    own = Execution(backend=RUNTIMES["paddle-inference"].framework, device="cpu")
    assert "paddle-inference" in fastest._list_candidates(weights, own)


@pytest.mark.parametrize("difference", [float("nan"), RuntimeError("no such instruction")])
def test_a_bad_runtime_is_left_out(choose: Choose, rates: dict[str, Any], difference: Any) -> None:
    rates["onnxruntime"] = (difference, 90.0)
    chosen, notes = choose()
    assert chosen == NATIVE
    left_out = "the runtime onnxruntime is not used: "
    assert [note.startswith(left_out) for note in notes].count(True) == 1


def test_a_choice_is_remembered(choose: Choose, rates: dict[str, Any], weights: Weights) -> None:
    choose()
    rates["openvino"] = (0.0, 30.0)
    assert choose() == ("onnxruntime", [])
    changed = {
        name: value + 1 if name == "fc.bias" else value for name, value in weights.tensors.items()
    }
    others = replace(weights, state=State(0, changed, {}))
    assert choose(others)[0] == "openvino"
    assert choose(others) == ("openvino", [])
    assert choose() == ("onnxruntime", [])


@pytest.mark.parametrize(
    "damage", ["", "[]", "{", '{"kind": "lockstep-runtimes", "choices": {"KEY": {"runtime": 3}}}']
)
def test_a_damaged_file_is_measured_again(
    choose: Choose, file: Path, rates: dict[str, Any], damage: str
) -> None:
    choose()
    [key] = json.loads(file.read_text())["choices"]
    file.write_text(damage.replace("KEY", key))
    rates["openvino"] = (0.0, 30.0)
    assert choose()[0] == "openvino"
    assert json.loads(file.read_text())["choices"][key]["runtime"] == "openvino"


def test_a_cache_that_cannot_be_written_is_no_error(choose: Choose, file: Path) -> None:
    file.parent.parent.joinpath("lockstep").write_text("a file where the folder should be")
    assert choose()[0] == "onnxruntime"


def test_an_evaluation_uses_the_choice(
    choose: Choose, tiny_recipe: Recipe, textures: Path, tmp_path: Path
) -> None:
    names = sorted(path.name for path in (textures / "val").glob("[!.]*"))
    source = save_tensors(tmp_path, tiny_recipe, random_tensors(tiny_recipe, 1), classes=names)
    result = lockstep.load(source).on("auto", execution=EXECUTION).evaluate(textures).to_json()
    expected = lockstep.load(source).on(execution=EXECUTION).evaluate(textures).to_json()
    assert (result["runtime"], expected["runtime"]) == ("onnxruntime", NATIVE)
    assert result["per_class"] == expected["per_class"]


def test_runtimes_are_measured_for_real(weights: Weights, file: Path) -> None:
    notes: list[Any] = []
    chosen = choose_fastest(weights, EXECUTION, Recorder(notes.append))
    [choice] = json.loads(file.read_text())["choices"].values()
    assert chosen in choice["images_per_sec"]
    assert choice["images_per_sec"].keys() == {
        name for name in list_installed("reference") if not OF_FRAMEWORK.get(name)
    }
