from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.data.packing import Packing, pack
from lockstep.data.stores import objects
from lockstep.data.textures import draw_data_set
from tests.data.stores.cases import Store, forget_stores
from tests.data.stores.servers import Server, serve


@pytest.fixture(scope="package")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the same images in every format; in class folders, they are in `plain`."""
    folder = tmp_path_factory.mktemp("packed")
    draw_data_set(folder / "plain", train_images=48, val_images=8, kinds=("dots", "grid"))
    for format in ("webdataset", "tfrecord", "recordio"):
        shards = 1 if format == "recordio" else 4
        pack(folder / "plain", folder / format, Packing(format, shards=shards))
    return folder


@pytest.fixture(scope="package")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    root = tmp_path_factory.mktemp("store")
    (root / "bucket").mkdir()
    with serve(root) as server:
        yield server


@pytest.fixture
def store(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A place in the store; what was listed, connected and fetched before is forgotten."""
    for name, value in server.variables().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(objects, "_RETRY", objects._RETRY | {"max_retries": 2})
    forget_stores()
    server.fail = lambda name, wanted: None
    server.requests.clear()
    server.ended.clear()
    yield Store(server, tmp_path.name)
    server.ended.set()
    forget_stores()
