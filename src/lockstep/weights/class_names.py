"""Names of classes: ImageNet's, and those in a file.

`imagenet_classes.txt` lists the 1000 classes of ILSVRC 2012 in the usual order, which is that of
their sorted synset ids. A synset id is `n` and the number of a noun in WordNet 3.0. The name is the
first word that WordNet lists for it. Two names would not be unique: as in torchvision, `crane bird`
is not the machine, and `maillot tank suit` is not the other `maillot`.

Sources: ILSVRC 2012 (https://image-net.org/challenges/LSVRC/2012) for the classes, WordNet 3.0
(https://wordnet.princeton.edu) for the names. The list was compared with timm's (ids and names) and
torchvision's (names).
"""

import codecs
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.data.class_order import are_numbers
from lockstep.recipes import Recipe
from lockstep.system.errors import DataError
from lockstep.system.regular_files import TEXT, read_regular
from lockstep.system.strict_json import parsed
from lockstep.system.text import format_count

Classes = Sequence[str] | str | Path
"""Names of classes, class 0 first, or the path of a file that lists them."""

UNNAMED = (
    "the weights name no classes, so output n is class n in the order of the program that trained"
    " them: torchvision and Keras sort class folders as text (1, 10, 2), timm and Lockstep sort"
    " numbers (1, 2, 10)"
)
"""The remark on weights without names of classes."""
_IMAGENET = Path(__file__).with_name("imagenet_classes.txt")


def imagenet_names() -> tuple[str, ...]:
    """Return the names of ImageNet's 1000 classes in their usual order. No two are equal.

    >>> imagenet_names()[281]
    'tabby'
    """
    return tuple(_words().values())


def imagenet_synsets() -> tuple[str, ...]:
    """Return the synset ids of ImageNet's 1000 classes, sorted.

    >>> imagenet_synsets()[281]
    'n02123045'
    """
    return tuple(_words())


@cache
def _words() -> dict[str, str]:
    """Return the names by synset id."""
    lines = _IMAGENET.read_text(encoding="utf-8").splitlines()
    return dict(line.split(" ", 1) for line in lines)


def describe_class(name: str) -> str:
    """Return the name of a class for people: a synset id of ImageNet with its word, any other name
    unchanged.

    >>> describe_class("n02123045"), describe_class("my cat")
    ('tabby (n02123045)', 'my cat')
    """
    word = _words().get(name)
    return name if word is None else f"{word} ({name})"


def assume_classes(recipe: Recipe) -> tuple[str, ...]:
    """Return the names that outputs have if the weights name no classes; none if nothing suggests
    ImageNet.

    - 1000 outputs have ImageNet's names.
    - 1001 outputs of a model that pads as SAME are those of NVIDIA's TensorFlow model. The first
      1000 have ImageNet's names; the last is never trained and gets none. Other programs with 1001
      outputs put a background class first, so that without this padding nothing is assumed.
    """
    is_imagenet = recipe.logits == 1000 or (recipe.logits == 1001 and recipe.padding == "same")
    return imagenet_names() if is_imagenet else ()


def are_imagenet(classes: Sequence[str]) -> bool:
    """Return whether at least 900 of the names of outputs are ImageNet's ids or words in the usual
    order. Programs spell some words differently.

    >>> are_imagenet(imagenet_synsets()), are_imagenet(["cat", "dog"])
    (True, False)
    """
    same = 0
    for own, synset, word in zip(classes, imagenet_synsets(), imagenet_names(), strict=False):
        first = own.partition(",")[0].strip().replace("_", " ")
        same += first.casefold() in (synset, word.casefold())
    return same >= 900


def find_imagenet(names: Sequence[str]) -> tuple[str, ...] | None:
    """Return 1000 names with each of these names at its place among ImageNet's classes. All must be
    ids, or words, or numbers 0 to 999, no two of one class; otherwise None.

    >>> find_imagenet(["n02123045"])[281], find_imagenet(["007", "0"])[:8:7], find_imagenet(["cat"])
    ('n02123045', ('0', '007'), None)
    """
    own = {name.replace("_", " "): name for name in names}
    for table in (imagenet_synsets(), imagenet_names()):
        if len(own) == len(names) and own.keys() <= set(table):
            return tuple(own.get(name, name) for name in table)
    return place_numbers(names, 1000)


def place_numbers(names: Sequence[str], outputs: int) -> tuple[str, ...] | None:
    """Return a name for each output, with each of these names at its number. All must be numbers of
    outputs, no two the same; otherwise None.

    >>> place_numbers(["007", "0"], 8), place_numbers(["8"], 8)
    (('0', '1', '2', '3', '4', '5', '6', '007'), None)
    """
    table = tuple(map(str, range(outputs)))
    own = {name.lstrip("0") or "0": name for name in names}
    if not are_numbers(names) or len(own) < len(names) or not own.keys() <= set(table):
        return None
    return tuple(own.get(name, name) for name in table)


def check_classes(classes: Classes, logits: int, own: Sequence[str] = ()) -> tuple[str, ...]:
    """Return the names that a user chooses for the outputs of weights, class 0 first. Equal names
    get their numbers.

    `own` are the names that the weights have. There must be a name for each of the `logits`
    outputs, or as many as the weights have, or 1000 for 1001 outputs, the last of which NVIDIA's
    TensorFlow model does not use.

    Raises `DataError` if there is another number of names, one is not usable, or a file cannot be
    read.
    """
    if isinstance(classes, str | Path):
        source = str(classes)
        names = read_classes(classes)
    else:
        source = "the list of classes"
        names = _check_names(classes, source)
    expected = {logits}
    if own:
        expected.add(len(own))
    if logits == 1001:
        expected.add(1000)
    if len(names) not in expected:
        raise DataError(
            f"{source} has {format_count(len(names), 'name')}, but the weights have"
            f" {format_count(logits, 'output')}; expected {' or '.join(map(str, sorted(expected)))}"
            " names, class 0 first"
        )
    return names


def read_classes(path: str | Path) -> tuple[str, ...]:
    r"""Return the names of classes in a file, class 0 first. Names that occur more than once get
    their numbers.

    A text file in UTF-8 has one name on each line. No character is special. Empty lines at the end
    are ignored. A file that ends in .json holds a list of names, or an object that maps "0", "1",
    ... to names or, like Keras' imagenet_class_index.json, to pairs of a synset id and a name.

    Raises `DataError` that names the file, and the line or class that cannot be used.

    >>> Path("names.txt").write_text("cat\ndog\ncat\n")
    12
    >>> read_classes("names.txt")
    ('cat (0)', 'dog', 'cat (2)')
    """
    path = Path(path)
    text = _read_text(path)
    if path.suffix.lower() == ".json":
        return _check_names(_read_json(path, text), str(path))
    # Not splitlines: it also splits at characters that names can contain.
    lines = [line.strip() for line in text.rstrip().split("\n")] if text.strip() else []
    if "" in lines:
        raise DataError(
            f"{path}: line {lines.index('') + 1} is empty; expected one name per line, class 0"
            " first"
        )
    return _check_names(lines, str(path))


def _read_text(path: Path) -> str:
    try:
        data = read_regular(path, TEXT).removeprefix(codecs.BOM_UTF8)
        return data.decode("utf-8")
    except OSError as error:
        raise DataError(
            f"{path}: {error.strerror}; expected a file with the names of the classes"
        ) from None
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(f"{path}: line {line} is not UTF-8; save the file as UTF-8") from None


def _read_json(path: Path, text: str) -> list[Any]:
    """Return the names in JSON in the order of the classes; they are not checked."""
    try:
        value = parsed(text)
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if isinstance(value, list):
        return value
    if not isinstance(value, dict):
        raise DataError(
            f'{path}: expected a list of names, or an object that maps "0", "1", ... to names'
        )
    names = []
    for number in range(len(value)):
        if str(number) not in value:
            raise DataError(
                f'{path}: class "{number}" is missing; expected the keys "0" to "{len(value) - 1}"'
            )
        name = value[str(number)]
        is_pair = isinstance(name, list) and len(name) == 2
        names.append(name[1] if is_pair else name)
    return names


def _check_names(names: Iterable[Any], source: str) -> tuple[str, ...]:
    """Return the names, with its number added to every name that occurs more than once. Raises
    `DataError` if there is none, or if one is no text, is empty or has more than one line."""
    names = tuple(names)
    if not names:
        raise DataError(f"{source} has no names; expected one for each class")
    for number, name in enumerate(names):
        if not isinstance(name, str) or not name.strip() or "\n" in name.strip():
            raise DataError(f"{source}: class {number} is {name!r}; expected a name on one line")
    names = tuple(name.strip() for name in names)
    counts = Counter(names)
    return tuple(
        name if counts[name] == 1 else f"{name} ({number})" for number, name in enumerate(names)
    )
