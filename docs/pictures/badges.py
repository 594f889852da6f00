"""Draw the badges of README from pyproject.toml.

    python docs/pictures/badges.py

They are files of the project, so they are there without a network, and a test compares them with
pyproject.toml.
"""

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
BADGES = ROOT / "docs/images/badges"
PYTHON = "Programming Language :: Python :: "
SYSTEM = "Operating System :: POSIX :: "
LETTER = 7
"""Width of a letter of 11 px, in pixels."""
PADDING = 7


def main() -> None:
    BADGES.mkdir(exist_ok=True)
    for name, (label, value) in find_texts().items():
        (BADGES / f"{name}.svg").write_text(draw_badge(label, value), encoding="utf-8")


def find_texts() -> dict[str, tuple[str, str]]:
    """Return label and value of each badge, by the name of its file."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    classifiers = project["classifiers"]
    versions = [text.removeprefix(PYTHON) for text in classifiers if text.startswith(PYTHON + "3.")]
    (system,) = (text.removeprefix(SYSTEM) for text in classifiers if text.startswith(SYSTEM))
    return {
        "python": ("Python", f"{versions[0]} to {versions[-1]}"),
        "system": ("system", system),
        "licence": ("licence", project["license"]),
    }


def draw_badge(label: str, value: str) -> str:
    """Return a badge as SVG: a label and a value next to each other."""
    left = LETTER * len(label) + 2 * PADDING
    right = LETTER * len(value) + 2 * PADDING
    texts = "".join(
        f'<text x="{x}" y="14" textLength="{LETTER * len(text)}">{text}</text>'
        for x, text in ((PADDING, label), (left + PADDING, value))
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img"'
        f' aria-label="{label}: {value}"><title>{label}: {value}</title>'
        f'<rect width="{left + right}" height="20" rx="3" fill="#1d4ed8"/>'
        f'<path d="M3 0H{left}V20H3A3 3 0 0 1 0 17V3A3 3 0 0 1 3 0Z" fill="#475569"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{texts}</g></svg>\n"
    )


if __name__ == "__main__":
    main()
