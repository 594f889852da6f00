"""Networks of PyTorch with a module more: computed as PyTorch computes them, or refused by the name
of what is more."""

from itertools import product
from pathlib import Path

import pytest

from lockstep.system.errors import CheckpointError
from tests.edges import PLACES, Place, sample
from tests.weights.formats.insertions_torch import INSERTED, insert
from tests.weights.formats.torch_cases import check_answers, read_value

pytestmark = pytest.mark.usefixtures("few_models")

CHANNELS: dict[Place, int] = {
    "before the stem": 3,
    "between blocks": 16,
    "before the classifier": 64,
    "after it": 5,
}
CASES = list(product(PLACES, INSERTED))


@pytest.mark.parametrize(("place", "kind"), sample(CASES, 7), ids=lambda text: text)
def test_a_module_is_computed_or_named(place: Place, kind: str, tmp_path: Path) -> None:
    module = insert(INSERTED[kind](CHANNELS[place]), place)
    if (place, kind) == ("before the stem", "normalisation"):
        check_answers(read_value(module.state_dict(), tmp_path), module)
        return
    with pytest.raises(CheckpointError, match=r"looks like PyTorch's basic, but .*--ignore '"):
        read_value(module.state_dict(), tmp_path)
