"""No name in a data set leads a pack out of its folder."""

from pathlib import Path

import pytest

from lockstep.data.containers import Sample
from lockstep.data.packing.splits import shard_name
from lockstep.system.errors import DataError
from tests.data.cases import jpeg, write
from tests.data.sets import pack_as

HOSTILE = [
    "../../x.jpg",
    "/etc/x.jpg",
    "..",
    "../..",
    "a/../../../x.jpg",
    ".x.jpg",
    "x\0y.jpg",
    "x\ny.jpg",
    "",
    "/",
    "a/.",
]


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
def test_no_image_leads_out_of_the_target(format: str, name: str, tmp_path: Path) -> None:
    source = tmp_path / "in/source"
    images = {"a": jpeg(8, 8), "b": jpeg(9, 9)}
    samples = [
        Sample(i, name, i, class_name, data, 8, 8)
        for i, (class_name, data) in enumerate(images.items())
    ]
    write(format, source / shard_name(format, "", 0, 1), samples)
    target = pack_as(source, tmp_path / "out/deep/target", "folder")
    for class_name, data in images.items():
        assert [path.read_bytes() for path in (target / class_name).iterdir()] == [data]
    everything = {
        path for path in tmp_path.rglob("*") if path.is_file() and source not in path.parents
    }
    result = {path.parent for path in everything}
    assert result == {target, target / ".lockstep", target / "a", target / "b"}


@pytest.mark.parametrize("name", ["..", "../x", "/etc", "a/b", ".hidden", "x\0y"], ids=ascii)
@pytest.mark.parametrize("format", ["tfrecord", "webdataset"])
def test_no_class_leads_out_of_the_target(format: str, name: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    samples = [Sample(0, "x.jpg", 0, name, jpeg(), 8, 8)]
    write(format, source / shard_name(format, "", 0, 1), samples)
    with pytest.raises(DataError, match=r"class 0 .* cannot be .*(folder|classes\.txt)"):
        pack_as(source, tmp_path / "target", "folder")
    assert not (tmp_path / "target").exists()
