"""What the HTML pages of reports and of the server share."""

import base64
import hashlib
from importlib.resources import files


def colours() -> str:
    """Return the style sheet of the colours, light and dark, and of the radius of corners."""
    return (files("lockstep.system") / "colours.css").read_text(encoding="utf-8")


def data_address(media_type: str, content: bytes) -> str:
    """Return the `data:` address that holds a file, such as a picture in a page."""
    return f"data:{media_type};base64,{base64.b64encode(content).decode('ascii')}"


def hash_source(text: str) -> str:
    """Return the source by which a content security policy allows only this script or style."""
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii")
    return f"'sha256-{digest}'"
