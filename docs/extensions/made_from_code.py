"""Parts of pages that are made from the code when the site is built.

A page marks the place with a fenced block: its language is `{made-from-code}` and the name of a
part, and its text tells readers of the Markdown file what is there. The block is replaced before
the page is parsed, so headings, anchors and links of a part are like any others.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import commands
import fields
import nvidia_tables
import published
import python_api
import schemas
from sphinx.application import Sphinx
from sphinx.util import logging

PARTS: dict[str, Callable[[], str]] = {
    "backend-protocol": python_api.describe_protocol,
    "certificate": schemas.describe_certificate,
    "commands": commands.describe_commands,
    "execution-fields": fields.describe_execution_fields,
    "model-fields": fields.describe_model_fields,
    "nvidia-benchmarks": nvidia_tables.describe_benchmarks,
    "nvidia-mxnet": partial(nvidia_tables.describe_system, "mxnet"),
    "nvidia-paddle": partial(nvidia_tables.describe_system, "paddle"),
    "nvidia-pytorch": partial(nvidia_tables.describe_system, "pytorch"),
    "nvidia-tensorflow": partial(nvidia_tables.describe_system, "tensorflow"),
    "one-step": python_api.describe_step,
    "published-accuracies": published.describe_accuracies,
    "published-speeds": published.describe_speeds,
    "python": python_api.describe_public_names,
    "recipe-fields": fields.describe_recipe_fields,
    "schemas": schemas.describe_files,
}
PLACE = re.compile(r"^```\{made-from-code\} (?P<part>[\w-]+)\n.*?^```$", re.M | re.S)
PAGE_IN_DOCS = re.compile(r"docs/(?P<page>[\w-]+/(?P<name>[\w-]+)\.md)")
"""How docstrings and help texts name a page."""


def insert_parts(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the marked places of a page."""

    def make(place: re.Match[str]) -> str:
        if place["part"] not in PARTS:
            logging.getLogger(__name__).warning(
                "there is no part %s; expected one of %s", place["part"], ", ".join(PARTS)
            )
            return place[0]
        depth = name.count("/")
        return link_pages(PARTS[place["part"]](), Path(*[".."] * depth))

    source[0] = PLACE.sub(make, source[0])


def link_pages(text: str, docs: Path) -> str:
    """Return a text in which names of pages, such as docs/reference/data.md, are links."""
    return PAGE_IN_DOCS.sub(lambda match: f"[{match['name']}]({docs / match['page']})", text)


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", insert_parts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
