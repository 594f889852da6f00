"""Which folders in a tar are classes."""

from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from itertools import chain, pairwise
from operator import itemgetter
from typing import NamedTuple

from lockstep.data.sources import ALIASES

_SPLITS = tuple(chain.from_iterable(ALIASES.values()))


class TarClasses(NamedTuple):
    """The classes of a tar without numbers."""

    names: dict[str, str]
    """By the paths of their folders."""
    depth: int
    """The number of folders in these paths."""

    def find_nested(self, path: str) -> str:
        """Return the folder inside a class folder in which a path is; "" if it is in none."""
        parts = path.split("/")
        return "/".join(parts[: self.depth + 1]) if len(parts) > self.depth else ""


def find_classes(folders: Collection[str]) -> TarClasses:
    """Return the classes of a tar by the paths of the folders that hold images.

    Folders of different names that are equally deep are classes. Otherwise the tar is read as it
    would be after unpacking: only the folders in the folder that holds all others are classes.

    >>> find_classes(["train/cat", "train/dog"])
    TarClasses(names={'train/cat': 'cat', 'train/dog': 'dog'}, depth=2)
    >>> find_classes(["cat", "cat/2023", "dog"])
    TarClasses(names={'cat': 'cat', 'dog': 'dog'}, depth=1)
    """
    paths = [path.split("/") for path in folders]
    depths = set(map(len, paths))
    names = set(map(itemgetter(-1), paths))
    depth = max(depths, default=0)
    if len(depths) > 1 or len(names) < len(paths):
        depth = _find_root(paths) + 1
    classes = {}
    for path, parts in zip(folders, paths, strict=True):
        if len(parts) == depth:
            classes[path] = parts[-1]
    return TarClasses(classes, depth)


def find_classes_of_tars(tars: Sequence[Collection[str]]) -> list[TarClasses]:
    """Return the classes of tars of one data set by the paths of their folders.

    Each tar decides by itself, as they can be made in different folders, unless a class of one is a
    folder inside a class of another: then all of them are read as one.
    """
    classes = list(map(find_classes, tars))
    paths = {f"{path}/" for item in classes for path in item.names}
    for outer, inner in pairwise(sorted(paths)):
        if inner.startswith(outer):
            return [find_classes(set(chain.from_iterable(tars)))] * len(tars)
    return classes


def list_unused(directories: Iterable[str], folders: Collection[str]) -> list[str]:
    """Return the directories that are none of the folders, and around none.

    >>> list_unused(["", "train", "train/cat", "train/dog"], ["train/cat"])
    ['train/dog']
    """
    inside = sorted(f"/{folder}/" for folder in folders)
    unused = []
    for directory in sorted(directories):
        place = bisect_left(inside, f"/{directory}/")
        if directory and not (place < len(inside) and inside[place].startswith(f"/{directory}/")):
            unused.append(directory)
    return unused


def _find_root(paths: Sequence[Sequence[str]]) -> int:
    """Return the depth of the folder that holds class folders: the first that has several folders,
    or one with images, unless that is named as a split or has several folders itself."""
    depth = 0
    while True:
        tops = set()
        inside = set()
        has_images = False
        for parts in paths:
            tops |= set(parts[depth : depth + 1])
            inside |= set(parts[depth + 1 : depth + 2])
            has_images |= len(parts) == depth + 1
        if len(tops) != 1 or (has_images and len(inside) < 2 and not tops <= set(_SPLITS)):
            return depth
        depth += 1
