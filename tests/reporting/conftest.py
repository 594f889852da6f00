from pathlib import Path

import pytest

from lockstep.data.index import open_index
from lockstep.data.textures import draw_data_set
from lockstep.recipes import Recipe, load_recipe
from tests.reporting.cases import write_run

NASTY = "</script><script>document.title='broken'</script>"
"""A name that would end a script that contains it."""


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Indexed images: ten classes with forty validation images each."""
    root = tmp_path_factory.mktemp("images")
    draw_data_set(root, train_images=10, val_images=400)
    train = open_index(root / "train")
    open_index(root / "val", classes=train.classes)
    return root


@pytest.fixture(scope="session")
def recipe() -> Recipe:
    """A short recipe for the demo's images."""
    return load_recipe("demo")


@pytest.fixture(scope="session")
def run(data: Path, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run, with a moving average."""
    return write_finished_run(
        data, recipe.replace(ema_decay=0.99), tmp_path_factory.mktemp("one") / "run"
    )


@pytest.fixture(scope="session")
def four(data: Path, recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of four runs on the same images."""
    root = tmp_path_factory.mktemp("four")
    engines = ("torch", "tensorflow", "paddle", "mxnet")
    return [
        write_finished_run(data, recipe, root / name, seed=i, backend=name)
        for i, name in enumerate(engines)
    ]


def write_finished_run(
    data: Path, recipe: Recipe, folder: Path, *, seed: int = 0, backend: str = "torch"
) -> Path:
    index = open_index(data / "val")
    about = {"classes": list(index.classes), "data": data, "digest": index.digest}
    return write_run(folder, recipe=recipe, seed=seed, backend=backend, **about)
