"""Text for people."""

from collections.abc import Iterable, Sequence


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> format_count(1, "epoch"), format_count(0, "epoch"), format_count(5, "class")
    ('1 epoch', '0 epochs', '5 classes')
    """
    ending = "es" if noun.endswith("s") else "s"
    return f"{number} {noun if number == 1 else plural or noun + ending}"


def list_first(names: Sequence[str], most: int = 10) -> str:
    """Return the first names of a list, and how many more there are.

    >>> list_first(["conv1", "bn1", "fc"], 2)
    'conv1, bn1 and 1 more'
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def make_printable_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of classes in the form of opened weights."""
    return tuple(map(escape_halves, names))


def escape_halves(text: str) -> str:
    """Return a text with half a UTF-16 character, which no encoding can write, spelled out."""
    return text.encode(errors="backslashreplace").decode()
