"""What a packed data set holds."""

from pathlib import Path

from lockstep.data.index import open_index
from lockstep.data.sources import find_sources


def read_packed(out: Path) -> dict[str, list[tuple[str, bytes]]]:
    """Return class and bytes of each image of a packed data set, in order, by split."""
    splits = {}
    for split, source in find_sources(out).items():
        index = open_index(source)
        images = [index.read_encoded(i) for i in range(len(index))]
        labels = [index.classes[label] for label in index.rows["label"]]
        splits[split] = list(zip(labels, images, strict=True))
    return splits
