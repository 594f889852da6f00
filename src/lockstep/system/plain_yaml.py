"""A safe subset of YAML for settings: short, flat, without aliases.

PyYAML accepts more than settings need, and parts of it are not bounded: 400 bytes of aliases can
expand to gigabytes, nested brackets take time that grows with the square of their depth, and tags
such as `!!bool maybe` raise unpredictable errors.
"""

from typing import Any

import yaml

MOST_CHARACTERS = 2**16
"""A text may have at most this many characters. A recipe with every field has about 2,000."""
MOST_DEPTH = 16
"""Lists and mappings may be nested at most this deep. The fields of a model have depth 3."""
_MOST_BITS = 1024
"""An integer may have at most this many bits, the range of floats. Longer ones are slow to print in
a message."""


def read_yaml(text: str) -> Any:
    """Return the value of a text. Raises `ValueError` with the reason in one line, and with the
    line number if it is known.

    >>> read_yaml("{epochs: 2, mean: [1, 2, 3]}")
    {'epochs': 2, 'mean': [1, 2, 3]}
    >>> read_yaml("a: *b")
    Traceback (most recent call last):
    ValueError: line 1: aliases are not supported, write the value itself instead of *b
    """
    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"it has more than {MOST_CHARACTERS:,} characters")
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(line + ", ".join(filter(None, (error.context, error.problem)))) from None
    except Exception as error:  # PyYAML raises almost any exception for wrong tags and characters
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


class _Loader(yaml.SafeLoader):
    """Refuses aliases and deep nesting before values are built, and names the line of a value that
    does not fit its tag."""

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if isinstance(event, yaml.AliasEvent):
            problem = (
                f"aliases are not supported, write the value itself instead of *{event.anchor}"
            )
            place: Any = event.start_mark
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=place)
        if self._depth == MOST_DEPTH:
            problem = f"more than {MOST_DEPTH} nested lists and mappings"
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
            raise yaml.MarkedYAMLError(
                problem=f"{shown} is not a valid {kind}", problem_mark=node.start_mark
            ) from None
        return value
