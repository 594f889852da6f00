"""What the HTML pages of reports and of the server share."""

import base64
import hashlib
from importlib.resources import files


def colours() -> str:
    """Return the style sheet that defines the colours, light and dark, and the radius of corners."""
    return (files("lockstep.system") / "colours.css").read_text(encoding="utf-8")


def allowed(text: str) -> str:
    """Return the source by which a content security policy allows this script or style and no other
    one."""
    return (
        "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode("ascii") + "'"
    )
