"""YAML as values of settings are written: short, flat, and each value where it stands.

PyYAML takes more than settings need, and some of it without bounds: 400 bytes of aliases stand for gigabytes, brackets in
brackets take time that grows with their square, and tags such as `!!bool maybe` end in whatever error their reader meets.
"""

from typing import Any

import yaml

MOST_CHARACTERS = 2**16
"""Of a text. A recipe with every field has about 2,000."""
MOST_DEPTH = 16
"""Lists and mappings within each other. The fields of a model are three."""
_MOST_BITS = 1024
"""Of an integer: as far as floats reach. Longer ones take time to write in a message."""


def read_yaml(text: str) -> Any:
    """Return the value of a text. Raises `ValueError` with the reason, in one line, and where it can be told the line.

    >>> read_yaml("{epochs: 2, mean: [1, 2, 3]}")
    {'epochs': 2, 'mean': [1, 2, 3]}
    >>> read_yaml("a: *b")
    Traceback (most recent call last):
    ValueError: line 1: aliases are not taken, write the value itself instead of *b
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(line + ", ".join(filter(None, (error.context, error.problem)))) from None
    except Exception as error:  # PyYAML's readers of tags and characters raise almost anything
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


class _Loader(yaml.SafeLoader):
    """Refuses aliases and depth before the values are built, and names the line of a value that its tag does not fit."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            problem = f"aliases are not taken, write the value itself instead of *{event.anchor}"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
        if self._depth == MOST_DEPTH:
            problem = f"more than {MOST_DEPTH} lists and mappings within each other"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)
        self._depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and value.bit_length() > _MOST_BITS:
                raise ValueError
        except yaml.YAMLError:
            raise
        except Exception:
            kind = node.tag.removeprefix("tag:yaml.org,2002:")
            shown = f"{node.value!r:.60}" if isinstance(node, yaml.ScalarNode) else "the value"
            raise yaml.MarkedYAMLError(problem=f"{shown} is not a valid {kind}", problem_mark=node.start_mark) from None
        return value
