"""Data sets whose images are not ranges of bytes: which form a path has, and the command that packs
it for training."""

import os
import re
import shlex
from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lockstep.data.decoding.image_formats import explain_pointer
from lockstep.system.errors import DataError
from lockstep.system.regular_files import RECORDS, open_regular

TABLE = "table"
LIST = "list"
COMPRESSED = "compressed"
_NAMES = {
    TABLE: r"(?!cache-).*\.(?:parquet|arrow)",
    COMPRESSED: r".*(?:\.(?:tar|tfrecords?)|-\d{5}-of-\d{5})\.(?:gz|bz2|xz)|.*\.(?:tgz|tbz2?|txz)",
    LIST: r".*\.(?:csv|tsv|jsonl|ndjson)",
}
"""Expressions for the names of files by form."""
_STORED = r".*\.(?:rec|tar|tfrecords?)|.*-\d{5}-of-\d{5}"
_SPLITS = {"train": "train|training", "val": "val|valid|validation|dev", "test": "test|testing"}
_WORD = re.compile(f"(?:^|[^a-z])({'|'.join(_SPLITS.values())})(?:[^a-z]|$)")
_NUMBERED = re.compile(r"(.+)-\d{5}-of-\d{5}\b")
_MOST_DEPTH = 3
_MOST_POINTER_BYTES = 1024
_MOST_FOLDERS = 20
"""In a folder of more folders than this, they count as classes, unless they are named as splits."""
_COLUMNS = {
    "image": r"(?:file|image|img|photo)s?|(?:(?:file|image|img|photo)[_ ]?)?(?:path|name|id)",
    "label": r"(?:label|class|category)(?:[_ ]?(?:name|id))?|labels|classes|target|species|breed"
    r"|synset|wnid|y|predictionstring",
    "split": r"split|set|subset|partition",
}
_OTHER = "width|height|size|index|idx|url|caption|text|__.*__"
_COLUMNS["other"] = f"{_COLUMNS['image']}|{_COLUMNS['split']}|{_OTHER}"
"""Expressions for the usual names of columns, by what they hold; `other`: no labels."""


class Form(NamedTuple):
    """A data set that must be packed once."""

    kind: str
    """`TABLE`, `LIST` or `COMPRESSED`."""
    path: Path
    """The file or folder that the user names."""
    files: tuple[Path, ...]
    """Its files, sorted."""


def is_usual(kind: str, name: str) -> bool:
    """Return whether a column of a kind may have this name.

    >>> is_usual("image", "file_name"), is_usual("label", "Class ID"), is_usual("split", "label")
    (True, True, False)
    """
    return re.fullmatch(_COLUMNS[kind], name.strip(), re.IGNORECASE) is not None


def name_split(word: str) -> str | None:
    """Return the split that a word names; None if it names none.

    >>> name_split("Validation"), name_split("fold1")
    ('val', None)
    """
    for name, words in _SPLITS.items():
        if re.fullmatch(words, word.strip(), re.IGNORECASE):
            return name
    return None


def group_by_split(form: Form) -> dict[str, list[Path]]:
    """Return the files of a form by their splits; those of a single one may be without a name.

    Raises `DataError` if files are of splits with other names, or of several data sets.
    """
    splits: dict[str, list[Path]] = {}
    words = set()
    sets = set()
    for file in form.files:
        folders = _list_folders(form.path, file)
        word = _find_word(file.name) or next(reversed(folders), "")
        splits.setdefault(name_split(word) or "", []).append(file)
        words.add(word)
        sets.add("/".join(name for name in folders if name_split(name) is None))
    if len(sets) > 1 or ("" in splits and len(words) > 1):
        raise DataError(
            f"{form.path} holds files of several data sets or of unknown splits:"
            f" {', '.join(sorted(sets if len(sets) > 1 else words))}; expected train, val,"
            " validation or test in their names. Name one of the folders or files"
        )
    return splits


def _find_word(name: str) -> str:
    """Return the word for the split in the name of a file; empty if there is none."""
    numbered = _NUMBERED.match(name)
    if numbered is None:
        return "".join(_WORD.findall(name.lower())[:1])
    # The hub's `train-00000-of-00002`, and TensorFlow's `pets-train-00000-of-00002`.
    word = re.split(r"[-.]", numbered[1])[-1]
    return word * (word not in ("data", "part"))


def _list_folders(root: Path, file: Path) -> list[str]:
    """Return the folders in a data set that lead to a file, without meaningless ones."""
    parts = file.relative_to(root).parts[:-1]
    return [name for name in parts if name.lower() not in ("data", "default")]


def refuse_pointers(paths: Iterable[Path]) -> None:
    """Raise `DataError` if one of the files is a pointer of Git LFS."""
    for path in paths:
        with suppress(OSError):
            if path.stat().st_size < _MOST_POINTER_BYTES:
                with open_regular(path, RECORDS) as file:
                    reason = explain_pointer(file.read(_MOST_POINTER_BYTES))
                if reason:
                    raise DataError(f"{path} is {reason}")


def _refuse_json(path: Path) -> None:
    """Raise `DataError` with the command that writes a JSON array as lines."""
    code = "import json, sys; [print(json.dumps(row)) for row in json.load(open(sys.argv[1]))]"
    names = f"{shlex.quote(str(path))} > {shlex.quote(str(path.with_suffix('.jsonl')))}"
    raise DataError(
        f"{path} is not a list of images; expected JSON lines: for each image an object with its"
        f" path and label. To convert a JSON array: python -c '{code}' {names}"
    )


def find_form(path: Path) -> Form | None:
    """Return the form of a file or a folder, or None. Raises `DataError` for a pointer of Git LFS,
    and for a list as one JSON value."""
    if path.is_file():
        refuse_pointers([path])
        if path.suffix.lower() == ".json":
            _refuse_json(path)
        for kind, names in (*_NAMES.items(), (LIST, r".*\.txt")):
            if re.fullmatch(names, path.name, re.IGNORECASE):
                return Form(kind, path, (path,))
    files = sorted(_walk(path))
    refuse_pointers(files)
    for kind, names in _NAMES.items():
        # Next to what was unpacked from it, an archive does not count.
        if kind != TABLE and any(re.fullmatch(_STORED, file.name) for file in files):
            continue
        members = [file for file in files if re.fullmatch(names, file.name, re.IGNORECASE)]
        members = [file for file in members if _is_data(path, kind, file)]
        if kind == LIST:
            members = [file for file in members if file.stem == "metadata"] or members
        if members:
            return Form(kind, path, tuple(members))
    return None


def _walk(root: Path) -> Iterator[Path]:
    """Yield the files of a folder and of folders in it that may be splits."""
    names = re.compile("|".join([*_NAMES.values(), _STORED]), re.IGNORECASE)
    for folder, folders, files in os.walk(root, followlinks=True):
        is_deep = len(Path(folder).relative_to(root).parts) == _MOST_DEPTH
        are_classes = len(folders) > _MOST_FOLDERS
        for name in list(folders):
            if is_deep or name.startswith(".") or (are_classes and name_split(name) is None):
                folders.remove(name)
        yield from (Path(folder, name) for name in files if names.fullmatch(name))


def _is_data(root: Path, kind: str, path: Path) -> bool:
    """Return whether a file in a folder is the data set. Next to class folders, or in one, it is
    something else, or the archive that they were unpacked from."""
    with os.scandir(path.parent) as entries:
        folders = [entry.name for entry in entries if entry.name[0] != "." and entry.is_dir()]
    if kind == TABLE:
        return len(folders) < 2
    if not all(map(name_split, _list_folders(root, path))):
        return False
    if not folders and (kind == COMPRESSED or path.stem == "metadata"):
        return True
    if kind == COMPRESSED or (path.stem != "metadata" and len(folders) > 1):
        return False
    words: list[str] = []
    with suppress(OSError), open_regular(path, RECORDS) as file:
        words = re.split(r"[^\w ]+", file.readline(2**16).decode("utf-8", "replace"))
    return any(map(partial(is_usual, "label"), words))


def refuse_form(data: Path) -> None:
    """Raise `DataError` with the command that packs a data set, if it must be packed first."""
    form = find_form(data)
    if data.is_dir() and name_split(data.name) is not None:
        form = find_form(data.parent) or form
    if form is not None:
        path = form.path.absolute()
        out = path.with_name(f"{path.name.partition('.')[0]}-packed")
        raise DataError(
            f"{form.path} must be packed once, because the images of {form.files[0].name} cannot be"
            f" read in place: lockstep data pack {shlex.quote(str(path))} {shlex.quote(str(out))}"
        )
