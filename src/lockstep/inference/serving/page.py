"""The page on which images are dropped: one file of HTML that fetches nothing but this server's
answers."""

from importlib.resources import files

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup

from lockstep.system.html import colours, hash_source
from lockstep.system.version import version

_TEMPLATE = "page.html.j2"
_STYLE = "page.css"
_SCRIPT = "page.js"


class Page:
    """The page and its headers."""

    def __init__(self) -> None:
        style = colours() + _read_template(_STYLE)
        script = _read_template(_SCRIPT)
        environment = Environment(
            loader=DictLoader({_TEMPLATE: _read_template(_TEMPLATE)}),
            autoescape=True,
            undefined=StrictUndefined,
        )
        text = environment.get_template(_TEMPLATE).render(
            style=Markup(style), script=Markup(script), version=version()
        )
        self.html = text.encode()
        policy = (
            f"default-src 'none'; style-src {hash_source(style)}; script-src {hash_source(script)};"
            " img-src 'self' blob: data:; connect-src 'self'; base-uri 'none'; form-action 'none';"
            " frame-ancestors 'none'"
        )
        self.headers = {"content-security-policy": policy}


def _read_template(name: str) -> str:
    return (files("lockstep.inference.serving") / "templates" / name).read_text(encoding="utf-8")
