"""Models of Keras with a layer more: computed as Keras computes them, or refused by name."""

from pathlib import Path

import pytest

from lockstep.models.architectures import MODELS
from lockstep.system.errors import CheckpointError
from lockstep.weights.formats.keras_file import read
from tests.edges import EDGES, Place, is_same_answer, sample
from tests.weights.formats.insertions_keras import (
    SPEC,
    Layers,
    compute,
    compute_as_read,
    list_inserted,
    list_insertions,
    prepare,
    resnet,
)

# Keras, with NumPy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ENDINGS = ("keras", "h5", "weights.h5")
INSERTIONS = list(list_insertions())
CASES = sample([(case, "keras") for case in INSERTIONS], 61)
if EDGES:
    CASES = [*CASES, *zip(INSERTIONS[::2], (*ENDINGS[1:],) * len(INSERTIONS), strict=False)]
UNSEEN = ("oper", "ops.", "channels", "the ", "without the", "every", "several", "preprocess")
"""Begins of what is inserted without a layer: a file of weights does not show it."""


@pytest.fixture(autouse=True)
def quick(unchecked_keras: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "resnet50-v1", SPEC)


@pytest.mark.parametrize(
    ("case", "ending"), CASES, ids=lambda value: value if isinstance(value, str) else value[1]
)
def test_a_layer_more_is_computed_or_refused(
    case: tuple[Place, str, Layers], ending: str, tmp_path: Path
) -> None:
    place, name, insert = case
    if ending == "weights.h5" and name.startswith(UNSEEN):
        return
    try:
        model = resnet({place: insert})
    except ValueError:  # of Keras
        return
    file = tmp_path / f"a.{ending}"
    save = model.save_weights if ending == "weights.h5" else model.save
    save(file)
    try:
        weights = read(file)
    except CheckpointError as error:
        message = str(error)
    else:
        assert is_same_answer(compute(model, prepare(weights)), compute_as_read(weights))
        return
    others = ("one output", "'conv1_pad'", "follows the proba", "of proba", "a weight of [5, 1]")
    assert any(name in message for name in (*list_inserted(model), *others))
