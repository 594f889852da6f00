"""Images to index, and what tests read from an index."""

from pathlib import Path

import numpy as np

from lockstep.data.containers import Sample
from lockstep.data.index import Index, open_index
from lockstep.data.packing.splits import shard_name
from lockstep.data.sources import find_split
from tests.data.cases import jpeg, write
from tests.data.pictures import progressive_jpeg

FILES = {
    "owl/b.jpg": jpeg(20, 30),
    "owl/a.jpg": jpeg(16, 24),
    "cat/z.jpg": jpeg(40, 10),
    "newt/i.jpg": jpeg(11, 12),
}


def paths(index: Index) -> list[str]:
    return [Path(index.path(i)).relative_to(index.root).as_posix() for i in range(len(index))]


def list_arrays(index: Index) -> tuple[np.ndarray, ...]:
    return index.rows, index.names.text, index.names.ends, index.times, index.orientations


def both(format: str, root: Path, train: list[Sample], val: list[Sample]) -> tuple[Index, Index]:
    write(format, root / shard_name(format, "train", 0, 1), train)
    write(format, root / shard_name(format, "val", 0, 1), val)
    training = open_index(find_split(root, "train"))
    return training, open_index(find_split(root, "val"), classes=training.classes)


def labels(index: Index) -> list[int]:
    return index.rows["label"].tolist()


BAD = {
    "cat/empty.jpg": (b"", "empty file"),
    "cat/half.jpg": (jpeg()[:400], "Truncated"),
    "newt/tail.jpg": (jpeg()[:-2], "Premature end"),
    "owl/notes.jpg": (b"todo: sort these\n", "not an image"),
    "owl/scans.jpg": (
        progressive_jpeg(repeated=1000),
        "more than 100 scans are too many; save the image again",
    ),
    "owl/page.jpg": (b"<html>404</html>", "not an image"),
}
