"""`lockstep.verify`: right engines pass. Wrong engines are found, each by the quantity that it gets
wrong."""

import json
import stat
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lockstep
from lockstep import backends
from lockstep.backends import Engine, World
from lockstep.backends.torch.engine import TorchEngine
from lockstep.data import Batch
from lockstep.models.metrics import Counts
from lockstep.models.optimizers import OPTIMIZERS
from lockstep.models.state import State
from lockstep.recipes import Execution, Recipe
from lockstep.recipes.from_nvidia import resnet50_paddle_90ep
from lockstep.system.errors import BackendError, LockstepError, RecipeError
from lockstep.verification.backend_process import Worker
from lockstep.verification.comparison import compare
from lockstep.verification.plot import plot
from lockstep.verification.workload import CROSS_ENTROPY, Workload, build
from tests.soak import in_a_soak

OTHERS = [name for name in OPTIMIZERS if name != "sgd"]
QUANTITIES = [
    "logits",
    "evaluation",
    "loss",
    "statistics",
    "gradient",
    "two parts",
    "weighted loss",
    "binary loss",
    "initial gradient",
    "frozen gradient",
    "frozen statistics",
    "rates by tensor",
    "weights",
    "moving average",
    "losses",
    "decay",
    "momentum",
    "update",
    *(f"{name} velocity" for name in OTHERS),
    *(f"{name} moments" for name in OTHERS),
    *(f"{name} update" for name in OTHERS),
    "counts",
    "state",
]
EXACT = {"counts", "state"}


def list_failures(report: dict[str, Any], engine: str = "torch") -> list[str]:
    return [row["quantity"] for row in report["engines"][engine]["rows"] if not row["passed"]]


@pytest.fixture(scope="module")
def events() -> list[dict[str, Any]]:
    """Return what a listener of `report` hears."""
    return []


@pytest.fixture(scope="module")
def report(events: list[dict[str, Any]]) -> dict[str, Any]:
    return lockstep.verify(["torch"], steps=5, listener=events.append)


def test_a_sound_engine_passes(report: dict[str, Any]) -> None:
    assert list_failures(report) == []
    assert report["passed"]
    assert [row["quantity"] for row in report["engines"]["torch"]["rows"]] == QUANTITIES


def test_differences_are_rounding_and_not_nothing(report: dict[str, Any]) -> None:
    # An engine compared with itself would not differ at all.
    for row in report["engines"]["torch"]["rows"]:
        assert (
            row["relative"] == 0 if row["quantity"] in EXACT else 0 < row["relative"] < row["bound"]
        ), row


def test_a_report_says_what_was_run(report: dict[str, Any]) -> None:
    assert (report["steps"], report["images"], report["full"]) == (5, 16, False)
    assert report["engines"]["torch"]["version"].startswith("2.")
    assert len(report["losses"]["torch"]) == len(report["losses"]["reference"]) == 5
    assert json.loads(json.dumps(report)) == report


def test_the_loader_of_the_same_environment_gives_the_same_pixels(report: dict[str, Any]) -> None:
    loader = report["engines"]["torch"]["loader"]
    same = dict.fromkeys(("samples", "windows", "flips", "draws", "augmentations", "passed"), True)
    assert loader == same | {"largest_pixel_difference": 0}


@pytest.mark.parametrize("suffix", ["png", "svg"])
def test_curves_are_drawn(report: dict[str, Any], tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"the curves.{suffix}"
    plot(report, path)
    assert path.read_bytes().startswith(b"\x89PNG" if suffix == "png" else b"<?xml")


@pytest.mark.usefixtures("report")
def test_progress_is_reported_for_every_engine(events: list[dict[str, Any]]) -> None:
    for backend in ("reference", "torch"):
        progress = [(event["done"], event["total"]) for event in events if event["what"] == backend]
        total = len(progress)
        assert total > 1
        assert progress == [(done, total) for done in range(1, total + 1)]


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        (["tortch"], "no backend 'tortch'. Did you mean torch"),
        (["reference"], "no backend to compare"),
        ([], "no backend to compare"),
    ],
)
def test_engines_that_cannot_be_compared_are_refused(engines: list[str], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        lockstep.verify(engines)


def test_too_few_steps_are_refused() -> None:
    with pytest.raises(RecipeError, match="at least 3"):
        lockstep.verify(["torch"], steps=2)


# Wrong engines


@dataclass(frozen=True)
class Wrong:
    """A wrong PyTorch engine: each function changes the input of the right engine."""

    recipe: Callable[[Recipe], Recipe] = lambda recipe: recipe
    rates: Callable[[np.ndarray], np.ndarray] = lambda rates: rates
    execution: Callable[[Execution], Execution] = lambda execution: execution
    batches: Callable[[Batch], Batch] = lambda batch: batch
    evaluated: Callable[[Batch], bool] = lambda batch: True
    written: Callable[[State], State] = lambda state: state
    counted: Callable[[Counts], Counts] = lambda counts: counts

    def engine(
        self, recipe: Recipe, rates: np.ndarray, world: World, execution: Execution
    ) -> Engine:
        wrong = self

        class WrongEngine(TorchEngine):
            def train(self, batches: Iterable[Batch], first: int) -> Any:
                return super().train(map(wrong.batches, batches), first)

            def evaluate(self, batches: Iterable[Batch], *, ema: bool = False) -> Any:
                return super().evaluate(filter(wrong.evaluated, batches), ema=ema)

            def write(self, state: State) -> None:
                super().write(wrong.written(state))

            def fetch(self, handle: Any) -> Any:
                interval = super().fetch(handle)
                return replace(interval, counts=wrong.counted(interval.counts))

        return WrongEngine(
            wrong.recipe(recipe), wrong.rates(rates), world, wrong.execution(execution)
        )


def decay_also(role: str) -> Wrong:
    return Wrong(
        recipe=lambda recipe: recipe.replace(weight_decay_roles=(*recipe.weight_decay_roles, role))
    )


def change(**changes: Any) -> Wrong:
    return Wrong(recipe=lambda recipe: recipe.replace(**changes))


def forget_running_means(state: State) -> State:
    means = {n: value * 0 for n, value in state.tensors.items() if n.endswith("running_mean")}
    return replace(state, tensors=state.tensors | means)


def shift_partners(batch: Batch) -> Batch:
    return batch if batch.partners is None else replace(batch, partners=np.roll(batch.partners, 1))


def shift_kept_features(batch: Batch) -> Batch:
    if batch.kept_features is None:
        return batch
    return replace(batch, kept_features=np.roll(batch.kept_features, 1, axis=0))


def shift_kept_blocks(batch: Batch) -> Batch:
    if batch.kept_blocks is None:
        return batch
    return replace(batch, kept_blocks=np.roll(batch.kept_blocks, 1, axis=0))


def paste_nothing(batch: Batch) -> Batch:
    return batch if batch.boxes is None else replace(batch, boxes=0 * batch.boxes)


def crop_to_the_smallest(batch: Batch) -> Batch:
    return replace(batch, images=batch.pixels[:, :48, :48])


def move_stride(model: Any) -> Any:
    return replace(model, stride_in="1x1")


FAULTS: dict[str, tuple[Wrong, list[str]]] = {
    "decays the scale of batch norm": (decay_also("bn_scale"), ["decay"]),
    "decays the bias of batch norm": (decay_also("bn_bias"), ["decay"]),
    "does not decay the classifier's bias": (
        change(weight_decay_roles=("conv_weight", "fc_weight")),
        ["decay"],
    ),
    "takes the next step's rate": (Wrong(rates=lambda rates: np.roll(rates, -1)), ["update"]),
    "strides in the first convolution": (
        Wrong(recipe=lambda recipe: recipe.replace(model=move_stride(recipe.model))),
        ["logits", "loss", "gradient"],
    ),
    "forgets half of its momentum": (
        Wrong(recipe=lambda recipe: recipe.replace(momentum=recipe.momentum / 2)),
        ["momentum"],
    ),
    "does not smooth": (change(label_smoothing=0.0), ["loss", "gradient"]),
    "follows statistics too fast": (change(bn_momentum=0.9), ["statistics"]),
    "averages too fast": (
        Wrong(recipe=lambda recipe: recipe.replace(ema_decay=recipe.ema_decay and 0.3)),
        ["moving average"],
    ),
    "forgets the running mean": (
        Wrong(written=forget_running_means),
        ["logits", "evaluation", "state"],
    ),
    "mixes with another partner": (Wrong(batches=shift_partners), ["loss"]),
    "computes parts as one": (
        Wrong(execution=lambda how: how.replace(accumulation_steps=1)),
        ["two parts"],
    ),
    "forgets the class weights": (change(class_weights="none"), ["two parts", "weighted loss"]),
    "cross-entropy where binary was asked": (
        change(**CROSS_ENTROPY),
        ["binary loss", "frozen gradient"],
    ),
    "pastes no boxes": (Wrong(batches=paste_nothing), ["frozen statistics", "frozen gradient"]),
    "drops the features of another image": (
        Wrong(batches=shift_kept_features),
        ["two parts", "weighted loss"],
    ),
    "drops the blocks of another image": (
        Wrong(batches=shift_kept_blocks),
        ["two parts", "weighted loss"],
    ),
    "takes another probability of the last block": (
        Wrong(
            recipe=lambda recipe: recipe.replace(stochastic_depth=recipe.stochastic_depth and 0.1)
        ),
        ["two parts", "weighted loss"],
    ),
    "trains what is frozen": (
        change(frozen=()),
        ["frozen gradient", "frozen statistics", "rates by tensor"],
    ),
    "one rate for all tensors": (
        change(lr_multipliers={}, lr_depth_decay=1.0),
        ["rates by tensor"],
    ),
    "no decay of rates by depth": (change(lr_depth_decay=1.0), ["rates by tensor"]),
    "does not limit the gradient": (
        change(clip_norm=0.0),
        ["two parts", *(f"{name} velocity" for name in OTHERS)],
    ),
    "takes AdamW for LAMB": (
        Wrong(
            recipe=lambda recipe: recipe.replace(
                optimizer=recipe.optimizer.replace("lamb", "adamw")
            )
        ),
        ["lamb update"],
    ),
    "keeps less of old moments": (
        change(beta1=0.5, beta2=0.99),
        [
            *("adamw velocity", "lamb velocity", "nadam velocity"),
            *(f"{name} moments" for name in OTHERS),
        ],
    ),
    "has another epsilon": (
        change(optimizer_epsilon=1e-8),
        ["adamw update", "lamb update", "nadam update", "rmsprop_tf velocity"],
    ),
    "takes AdamW for NAdam": (
        Wrong(
            recipe=lambda recipe: recipe.replace(
                optimizer=recipe.optimizer.replace("nadam", "adamw")
            )
        ),
        ["nadam update"],
    ),
    "averages every step": (change(ema_every_steps=1), ["lamb update"]),
    "drops the tail": (
        Wrong(evaluated=lambda batch: bool((batch.labels >= 0).all())),
        ["evaluation", "counts"],
    ),
    "evaluates without mirror images": (change(eval_flips=False), ["evaluation"]),
    "crops images to one size": (Wrong(batches=crop_to_the_smallest), ["losses"]),
    "counts the first four": (
        Wrong(counted=lambda counts: replace(counts, top5=max(counts.top5 - 1, 0))),
        ["counts"],
    ),
}


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workload:
    recipe = resnet50_paddle_90ep().replace(nesterov=True)  # `report` has a recipe without it
    return build(tmp_path_factory.mktemp("work"), recipe, None, 6, "fp32", full=False)


def run_worker(work: Workload, name: str, wrong: Wrong | None = None) -> dict[str, np.ndarray]:
    """Run a worker in this process, with the right engine or a wrong one; return the arrays that
    are compared."""
    backend = backends.load(name)
    execution = Execution(backend=name)
    world = backend.world(execution)
    maker: Any = backend if wrong is None else SimpleNamespace(engine=wrong.engine)
    return Worker(maker, world, execution, work, rules=name != "reference").run()


@pytest.fixture(scope="module")
def expected(work: Workload) -> dict[str, np.ndarray]:
    return run_worker(work, "reference")


def find_differences(
    work: Workload, actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]
) -> set[str]:
    rows = [row.fields() for row in compare(actual, expected, work, False)]
    assert json.dumps(rows, allow_nan=False)
    return {row["quantity"] for row in rows if not row["passed"]}


def test_the_right_engine_misses_nothing(work: Workload, expected: dict[str, np.ndarray]) -> None:
    assert find_differences(work, run_worker(work, "torch", Wrong()), expected) == set()


def list_faults() -> Iterator[Any]:
    """Yield all faults. Those whose quantities are caught in earlier ones run under `make soak`."""
    caught: set[str] = set()
    for name, fault in sorted(FAULTS.items(), key=lambda item: -len(item[1][1])):
        yield pytest.param(
            *fault, id=name, marks=[in_a_soak] if caught.issuperset(fault[1]) else []
        )
        caught |= set(fault[1])


@pytest.mark.slow
@pytest.mark.parametrize(("wrong", "quantities"), [*list_faults()])
def test_a_wrong_engine_is_caught_by_what_it_gets_wrong(
    work: Workload, expected: dict[str, np.ndarray], wrong: Wrong, quantities: list[str]
) -> None:
    assert set(quantities) <= find_differences(work, run_worker(work, "torch", wrong), expected)


# Wrong workers, in the Python that LOCKSTEP_TORCH_PYTHON names

WRONG_PYTHON = """#!{python}
import sys
from pathlib import Path
from lockstep.data.loading import host
from lockstep.verification import backend_process

{fault}
folder, name = sys.argv[-2:]
backend_process.main(Path(folder), name)
"""


@pytest.fixture
def wrong_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes the engine's worker wrong."""

    def make(fault: str) -> None:
        script = tmp_path / "python"
        script.write_text(WRONG_PYTHON.format(python=sys.executable, fault=fault))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)
        monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", str(script))

    return make


@pytest.mark.slow
def test_a_loader_that_prepares_images_otherwise_is_caught(wrong_python: Any) -> None:
    wrong_python(
        "from dataclasses import replace\nsound = host.decode_into\n"
        "def mirror(data, size, square, out):\n"
        "    sound(data, size, replace(square, flip=not square.flip), out)\n"
        "host.decode_into = mirror\n"
        "from lockstep.recipes import order\norder.keep_blocks = lambda *_: None\n"
        "from lockstep.recipes.pixel_operators import OPERATORS\n"
        "OPERATORS['rotate'] = OPERATORS['identity']"
    )
    report = lockstep.verify(["torch"], steps=3)
    loader = report["engines"]["torch"]["loader"]
    assert loader["samples"]
    assert loader["largest_pixel_difference"] > 3
    assert not loader["draws"]
    assert not loader["augmentations"]
    assert not report["passed"]


@pytest.mark.slow
def test_a_loader_that_draws_every_image_once_is_caught(wrong_python: Any) -> None:
    wrong_python(
        "import numpy as np\nfrom lockstep.recipes import epoch_order\n"
        "epoch_order.draw_by_class = lambda *arguments: np.arange(len(arguments[-1]))"
    )
    report = lockstep.verify(["torch"], steps=3)
    assert not report["engines"]["torch"]["loader"]["samples"]
    assert not report["passed"]


@pytest.mark.slow
def test_an_engine_that_fails_is_reported_with_its_own_words(wrong_python: Any) -> None:
    wrong_python("raise SystemExit('no such instruction')")
    result = lockstep.verify(["torch"], steps=3)["engines"]["torch"]
    assert result["error"].endswith("python ended with exit code 1: no such instruction")
    assert (result["passed"], result["rows"]) == (False, [])


@pytest.mark.slow
def test_an_engine_without_an_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_program = tmp_path / "python"
    no_program.write_bytes(b"\x00\x01")
    no_program.chmod(0o700)
    for python, message in (
        (Path("/bin/true"), "exit code 0 and printed nothing"),
        (no_program, "cannot run"),
    ):
        monkeypatch.setenv("LOCKSTEP_TORCH_PYTHON", str(python))
        report = lockstep.verify(["torch"], steps=3)
        assert message in report["engines"]["torch"]["error"]
        assert not report["passed"]


def test_a_reference_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_REFERENCE_PYTHON", "/bin/false")
    with pytest.raises(LockstepError, match="the reference failed"):
        lockstep.verify(["torch"], steps=3)
