"""How Sphinx builds the site from these pages: `make docs`."""

import sys
import tomllib
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "extensions"))
PROJECT = tomllib.loads((DOCS.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]

project = "Lockstep"
author = PROJECT["authors"][0]["name"]
release = version = PROJECT["version"]

extensions = ["myst_parser", "sphinx_copybutton", "sphinx_design", "pages", "made_from_code"]
exclude_patterns = ["pictures", "images", "extensions", "static"]

# A link to a page, a heading or a file that does not exist is a warning, and `make docs` fails.
nitpicky = True
nitpick_ignore_regex = [("py:class", ".*")]  # the types in signatures have no pages
smartquotes = False  # the two hyphens of an option stay two
python_maximum_signature_line_length = 80
myst_enable_extensions = ["colon_fence", "fieldlist"]
myst_heading_anchors = 4
"""Headings down to this level have anchors, with the names that GitHub gives them."""

copybutton_prompt_text = r"(?:node\d)?\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"

html_theme = "furo"
html_title = "Lockstep"
html_theme_options = {
    "source_repository": PROJECT["urls"]["Homepage"],
    "source_branch": "main",
    "source_directory": "docs/",
}
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["site.css"]
