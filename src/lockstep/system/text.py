"""Text for people."""


def format_count(number: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun.

    >>> format_count(1, "epoch"), format_count(5, "class", "classes")
    ('1 epoch', '5 classes')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"
