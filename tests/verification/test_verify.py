"""`lockstep.verify`: sound engines pass, wrong ones are caught and named, each by the quantity it gets wrong."""

import json
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.errors import BackendError, LockstepError, RecipeError
from lockstep.verification.plot import plot

QUANTITIES = [
    "logits",
    "evaluation",
    "loss",
    "statistics",
    "gradient",
    "two parts",
    "initial gradient",
    "weights",
    "moving average",
    "losses",
    "decay",
    "momentum",
    "update",
    "counts",
    "state",
]
EXACT = {"counts", "state"}


def failed(report: dict[str, Any], engine: str = "torch") -> list[str]:
    return [row["quantity"] for row in report["engines"][engine]["rows"] if not row["passed"]]


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    return lockstep.verify(["torch"], steps=5)


def test_a_sound_engine_passes(report: dict[str, Any]) -> None:
    assert failed(report) == []
    assert report["passed"]
    assert [row["quantity"] for row in report["engines"]["torch"]["rows"]] == QUANTITIES


def test_differences_are_rounding_and_not_nothing(report: dict[str, Any]) -> None:
    # An engine compared with itself would differ by nothing.
    for row in report["engines"]["torch"]["rows"]:
        assert row["relative"] == 0 if row["quantity"] in EXACT else 0 < row["relative"] < row["bound"], row


def test_a_report_says_what_was_run(report: dict[str, Any]) -> None:
    assert (report["steps"], report["images"], report["full"]) == (5, 16, False)
    assert report["engines"]["torch"]["version"].startswith("2.")
    assert len(report["losses"]["torch"]) == len(report["losses"]["reference"]) == 5
    assert json.loads(json.dumps(report)) == report


def test_the_loader_of_the_same_environment_gives_the_same_pixels(report: dict[str, Any]) -> None:
    loader = report["engines"]["torch"]["loader"]
    assert loader == {"samples": True, "windows": True, "flips": True, "largest_pixel_difference": 0, "passed": True}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_curves_are_drawn(report: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"the curves.{suffix}"
    plot(report, path)
    start = path.read_bytes()[:200]
    assert start.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in start or b"<?xml" in start


def test_progress_is_told_for_every_engine() -> None:
    told: list[dict[str, Any]] = []
    lockstep.verify(["torch"], steps=3, listener=told.append)
    for engine in ("reference", "torch"):
        done = [event["done"] for event in told if event["what"] == engine]
        assert done == list(range(1, len(done) + 1))
        assert {event["total"] for event in told if event["what"] == engine} == {len(done)}


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        (["tortch"], "no backend 'tortch'. Did you mean torch"),
        (["reference"], "no engine to compare"),
        ([], "no engine to compare"),
    ],
)
def test_engines_that_cannot_be_compared_are_refused(engines: list[str], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        lockstep.verify(engines)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(RecipeError, match="at least 3"):
        lockstep.verify(["torch"], steps=2)


# Wrong engines, in the Python that LOCKSTEP_TORCH_PYTHON names

FAULTS: dict[str, tuple[str, list[str]]] = {
    "decays the scale of batch norm": ("change(lambda recipe: decaying(recipe, 'bn_scale'))", ["decay"]),
    "decays the bias of batch norm": ("change(lambda recipe: decaying(recipe, 'bn_bias'))", ["decay"]),
    "does not decay the classifier's bias": (
        "change(lambda recipe: recipe.replace(weight_decay_roles=('conv_weight', 'fc_weight')))",
        ["decay"],
    ),
    "takes the next step's rate": ("change(rates=lambda rates: np.roll(rates, -1))", ["update"]),
    "strides in the first convolution": (
        "change(lambda recipe: recipe.replace(model=dataclasses.replace(recipe.model, stride_in='1x1')))",
        ["logits", "loss", "gradient"],
    ),
    "forgets half of its momentum": ("change(lambda recipe: recipe.replace(momentum=recipe.momentum / 2))", ["momentum"]),
    "does not smooth": ("change(lambda recipe: recipe.replace(label_smoothing=0.0))", ["loss", "gradient"]),
    "follows statistics too fast": ("change(lambda recipe: recipe.replace(bn_momentum=0.9))", ["statistics"]),
    "averages too fast": (
        "change(lambda recipe: recipe.replace(ema_decay=recipe.ema_decay and 0.3))",
        ["moving average"],
    ),
    "forgets the running mean": (
        "write = TorchEngine.write\n"
        "TorchEngine.write = lambda self, state: write(self, dataclasses.replace(state, tensors={name: value * 0 "
        "if name.endswith('running_mean') else value for name, value in state.tensors.items()}))",
        ["logits", "evaluation", "state"],
    ),
    "mixes with another partner": ("batches(lambda batch: swapped(batch))", ["loss"]),
    "computes parts as one": ("execute(lambda execution: execution.replace(accumulation_steps=1))", ["two parts"]),
    "drops the tail": (
        "evaluate = TorchEngine.evaluate\n"
        "TorchEngine.evaluate = lambda self, batches, ema=False: "
        "evaluate(self, [batch for batch in batches if (batch.labels >= 0).all()], ema=ema)",
        ["evaluation", "counts"],
    ),
    "counts the first four": (
        "fetch = TorchEngine.fetch\n"
        "def fewer(self, handle):\n"
        "    interval = fetch(self, handle)\n"
        "    counts = dataclasses.replace(interval.counts, top5=max(interval.counts.top5 - 1, 0))\n"
        "    return dataclasses.replace(interval, counts=counts)\n"
        "TorchEngine.fetch = fewer",
        ["counts"],
    ),
}

WRONG_PYTHON = """#!{python}
import dataclasses, sys
import numpy as np
from pathlib import Path
from lockstep.backends.torch.engine import TorchEngine
from lockstep.data import host
from lockstep.verification import worker

def change(recipe=lambda recipe: recipe, rates=lambda rates: rates, execution=lambda execution: execution):
    sound = TorchEngine.__init__
    TorchEngine.__init__ = lambda self, r, t, world, e: sound(self, recipe(r), rates(t), world, execution(e))

def execute(execution):
    change(execution=execution)

def decaying(recipe, role):
    return recipe.replace(weight_decay_roles=(*recipe.weight_decay_roles, role))

def swapped(batch):
    return batch if batch.partners is None else dataclasses.replace(batch, partners=np.roll(batch.partners, 1))

def batches(other):
    sound = TorchEngine.train
    TorchEngine.train = lambda self, batches, first: sound(self, map(other, batches), first)

{fault}
worker.main(Path(sys.argv[3]), sys.argv[4])
"""


@pytest.fixture
def wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes the engine of the workers wrong."""

    def make(fault: str) -> None:
        script = tmp_path / "python"
        script.write_text(WRONG_PYTHON.format(python=sys.executable, fault=fault))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", str(script))

    return make


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "quantities"), FAULTS.values(), ids=FAULTS)
def test_a_wrong_engine_is_caught_by_what_it_gets_wrong(wrong: Any, fault: str, quantities: list[str]) -> None:
    wrong(fault)
    report = lockstep.verify(["torch"], steps=6)
    assert not report["passed"]
    assert set(quantities) <= set(failed(report))
    assert json.dumps(report, allow_nan=False)


@pytest.mark.slow
def test_a_loader_that_mirrors_images_is_caught(wrong: Any) -> None:
    wrong("sound = host.decode_into\nhost.decode_into = lambda *a, flip, **k: sound(*a, flip=not flip, **k)")
    report = lockstep.verify(["torch"], steps=3)
    loader = report["engines"]["torch"]["loader"]
    assert loader["samples"]
    assert loader["largest_pixel_difference"] > 3
    assert not report["passed"]


@pytest.mark.slow
def test_an_engine_that_fails_is_reported_with_its_own_words(wrong: Any) -> None:
    wrong("raise SystemExit('no such instruction')")
    found = lockstep.verify(["torch"], steps=3)["engines"]["torch"]
    assert found["error"].endswith("python ended with exit code 1: no such instruction")
    assert (found["passed"], found["rows"]) == (False, [])


@pytest.mark.slow
def test_an_engine_that_leaves_nothing_or_cannot_run_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_program = tmp_path / "python"
    no_program.write_bytes(b"\x00\x01")
    no_program.chmod(0o700)
    for python, message in ((Path("/bin/true"), "exit code 0 and said nothing"), (no_program, "cannot be run")):
        monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", str(python))
        report = lockstep.verify(["torch"], steps=3)
        assert message in report["engines"]["torch"]["error"]
        assert not report["passed"]


def test_a_reference_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REFERENCE_PYTHON", "/bin/false")
    with pytest.raises(LockstepError, match="the reference failed"):
        lockstep.verify(["torch"], steps=3)
