"""The comparison of outputs by `make docs-run` sees what it must see."""

from pathlib import Path

import pytest

from tests.docs.pages import Command, find_calls, read_blocks, read_commands
from tests.docs.run_pages import has_shape

PRINTED = """\
epoch 1 of 5, step 20 of 340: loss 1.627, 45.3 images/s, lr 0.005882, 1 min left
step 340: top-1 94.09 % (90.2 to 96.5), loss 0.2662 on 220 images
  dots        99.20 %
"""
PAGE = """\
# A page

<!-- not run: it needs a GPU -->
```console
$ lockstep train --data 'my photos' \\
    --out RUN   # a comment
trained
```

:::{note}
```python
import lockstep
```
:::

<!-- before: touch x -->
<!-- exit code: 1 -->

```console
$ cat x | lockstep predict RUN - && lockstep doctor
```
"""


@pytest.mark.parametrize(
    ("shown", "is_alike"),
    [
        (PRINTED, True),
        (PRINTED.replace("94.09", "12.5").replace("1 min", "40 s"), True),
        ("...\n  dots   99 %\n", True),
        ("epoch 1 of 5, ...\n...\n", True),
        ("...\n  rays   99 %\n", False),
        ("step 340: top-1 94.09 % (90.2 to 96.5), loss 0.2662 on 220 images\n", False),
        (PRINTED + "more\n", False),
    ],
)
def test_an_output_has_the_words_and_lines_of_the_page(shown: str, is_alike: bool) -> None:
    assert has_shape(shown, PRINTED) == is_alike


def test_blocks_are_read_with_their_marks(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    first, second, third = read_blocks(page)
    assert (first.line, first.language, first.not_run) == (5, "console", "it needs a GPU")
    assert read_commands(first) == [
        Command("lockstep train --data 'my photos' --out RUN   # a comment", "trained\n")
    ]
    assert (second.language, second.text, second.not_run) == ("python", "import lockstep", "")
    assert (third.before, third.exit_code) == ("touch x", 1)


def test_calls_are_found_in_lines_of_a_shell() -> None:
    assert find_calls("cat x | lockstep predict RUN - && lockstep doctor  # all") == [
        ["predict", "RUN", "-"],
        ["doctor"],
    ]
