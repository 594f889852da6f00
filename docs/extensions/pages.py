"""Pages that are nice to read in a clone as well: what Sphinx needs besides is added while it reads
them.

- An index page lists its pages under headings. The sidebar gets them from these lists, and so does
  `llms.txt`.
- A page that only says "The text of this page is [FILE](PATH)." gets the text of that file.
- Links to files outside of the site lead to the page that has their text, or to the repository.
"""

import os
import re
from functools import cache
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx

SITE = Path(__file__).parents[1]
ROOT = SITE.parent
SECTIONS = ("tutorial", "how-to", "reference", "explanation", "results")

LONGEST_UNBROKEN = 24
"""Code with at most this many letters stays in one line."""

ENTRY = re.compile(r"^- \[(?P<title>[^\]]+)\]\((?P<page>[\w./-]+)\.md\): (?P<about>.*)$", re.M)
TEXT_ELSEWHERE = re.compile(r"^The text of this page is \[[^\]]+\]\((?P<path>[^)]+)\)\.$", re.M)
LINK = re.compile(r"(?<=\]\()(?P<path>[^()#\s:]+)(?P<anchor>#[^()\s]*)?(?=\))")


@cache
def find_texts_elsewhere() -> dict[Path, Path]:
    """Return the pages whose text is in another file, by that file."""
    pages = {}
    for page in SITE.rglob("*.md"):
        match = TEXT_ELSEWHERE.search(page.read_text(encoding="utf-8"))
        if match:
            pages[(page.parent / match["path"]).resolve()] = page
    return pages


def complete_page(app: Sphinx, name: str, source: list[str]) -> None:
    """Change the text of a page before it is parsed."""
    page = SITE / f"{name}.md"
    file = page
    elsewhere = TEXT_ELSEWHERE.search(source[0])
    if elsewhere:
        file = (page.parent / elsewhere["path"]).resolve()
        app.env.note_dependency(str(file))
        source[0] = file.read_text(encoding="utf-8")
    source[0] = redirect_links(source[0], page, file, app.config.html_theme_options)
    if page.name == "index.md" and page.parent != SITE:
        source[0] += "\n".join(["", *list_toctrees(source[0])])


def redirect_links(text: str, page: Path, file: Path, repository: dict[str, str]) -> str:
    """Return a text that `file` has and `page` shows with links that work on the site."""
    web = f"{repository['source_repository']}/blob/{repository['source_branch']}"

    def redirect(match: re.Match[str]) -> str:
        anchor = match["anchor"] or ""
        target = (file.parent / match["path"]).resolve()
        target = find_texts_elsewhere().get(target, target)
        if target.is_relative_to(SITE):
            return os.path.relpath(target, page.parent) + anchor
        if target.exists():
            return f"{web}/{target.relative_to(ROOT)}{anchor}"
        return match[0]  # Sphinx warns of it

    return LINK.sub(redirect, text)


def list_toctrees(index: str) -> list[str]:
    """Return the lines of hidden tables of contents, one for each heading of an index page."""
    lines = []
    for part in re.split(r"^## ", index, flags=re.M):
        pages = [entry["page"] for entry in ENTRY.finditer(part)]
        if pages:
            lines += ["```{toctree}", ":hidden:", "", *pages, "```", ""]
    return lines


def mark_short_code(app: Sphinx, tree: nodes.document) -> None:
    """Give short names in code a class of their own, for the style sheet."""
    for code in tree.findall(nodes.literal):
        if len(code.astext()) <= LONGEST_UNBROKEN:
            code["classes"].append("short")


def write_dashes(app: Sphinx, tree: nodes.document) -> None:
    """Replace the two hyphens that Sphinx writes between an argument and its meaning."""
    for text in list(tree.findall(lambda node: isinstance(node, nodes.Text) and node == " -- ")):
        text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def write_llms_txt(app: Sphinx, error: Exception | None) -> None:
    """Write what pages there are, for programs that read (llmstxt.org)."""
    if error or app.builder.format != "html":
        return
    lines = [f"# {app.config.project}", "", f"> {read_summary()}"]
    for section in SECTIONS:
        index = (SITE / section / "index.md").read_text(encoding="utf-8")
        title = index.partition("\n")[0].removeprefix("# ")
        entries = list(ENTRY.finditer(index))
        if entries:
            lines += ["", f"## {title}", ""]
        for entry in entries:
            page = os.path.normpath(f"{section}/{entry['page']}.html")
            lines.append(f"- [{entry['title']}]({page}): {entry['about']}")
    (Path(app.outdir) / "llms.txt").write_text("\n".join([*lines, ""]), encoding="utf-8")


def read_summary() -> str:
    """Return the first paragraph of the site."""
    paragraphs = (SITE / "index.md").read_text(encoding="utf-8").split("\n\n")
    return " ".join(paragraphs[1].split())


def setup(app: Sphinx) -> dict[str, bool]:
    """Connect to Sphinx."""
    app.connect("source-read", complete_page)
    app.connect("doctree-read", mark_short_code)
    app.connect("doctree-read", write_dashes)
    app.connect("build-finished", write_llms_txt)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
