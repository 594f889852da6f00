"""The order of class names, which decides the number of each class.

Programs number the same folders differently: torchvision's `ImageFolder` and Keras sort their
names as text (0, 1, 10, 2), timm sorts the numbers in them as numbers (0, 1, 2, 10). Lockstep sorts
names that are all numbers as numbers, and all others as text. Equal numbers, such as `1` and `01`,
sort as text: `01` first.
"""

import os
import re
from collections.abc import Callable, Sequence
from typing import Any

NUMBER = "number"
TEXT = "text"
AS_INDEXED = "index"
"""The order that the index of the images has."""
_PROGRAMS = {
    "text": "text order (1, 10, 2; torchvision, Keras)",
    "natural": "natural order (1, 2, 10; timm)",
}
"""The orders in which other programs number folders, in words."""


def are_numbers(names: Sequence[str]) -> bool:
    """Return whether names are all numbers: digits, perhaps with leading zeros.

    >>> are_numbers(["0", "01", "12"]), are_numbers(["1", "-1"]), are_numbers([])
    (True, False, False)
    """
    return bool(names) and all(name.isascii() and name.isdigit() for name in names)


def sort_classes(names: Sequence[str], order: str = NUMBER) -> tuple[str, ...]:
    """Return the names of classes, which are sorted as text or `AS_INDEXED`, in an order.

    >>> sort_classes(["0", "01", "1", "10", "2"]), sort_classes(["b10", "b2"])
    (('0', '01', '1', '2', '10'), ('b10', 'b2'))
    """
    if order == AS_INDEXED or not are_numbers(names):
        return tuple(names)
    return tuple(sorted(names, key=os.fsencode if order == TEXT else _rank_number))


def list_orders(names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the names of class folders in the orders of other programs, by the order in words.

    >>> list(list_orders(["2", "10"]).values()), list_orders(["ape", "zebra"])
    ([('10', '2'), ('2', '10')], {})
    """
    keys: dict[str, Callable[[str], Any]] = {"text": str, "natural": _rank_naturally}
    orders = {_PROGRAMS[name]: tuple(sorted(names, key=key)) for name, key in keys.items()}
    return orders if len(set(orders.values())) > 1 else {}


def describe_order(names: Sequence[str]) -> str:
    """Return which of the orders of other programs the names of classes have, in words; "" if it is
    none, or all orders are the same.

    >>> describe_order(["2", "10"])
    'natural order (1, 2, 10; timm)'
    """
    return next((order for order, own in list_orders(names).items() if own == tuple(names)), "")


def _rank_number(name: str) -> tuple[int, str, str]:
    digits = name.lstrip("0")
    return len(digits), digits, name


def _rank_naturally(name: str) -> list[Any]:
    """Return a key that sorts as timm's `natural_key`."""
    parts: list[Any] = re.split(r"(\d+)", name.lower())
    parts[1::2] = [_rank_number(digits)[:2] for digits in parts[1::2]]
    return parts
