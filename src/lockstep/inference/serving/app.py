"""The routes of the server."""

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

from jinja2 import DictLoader, Environment, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from lockstep.inference.serving import open_inference as oip
from lockstep.inference.serving.batching import Full
from lockstep.inference.serving.bodies import Refused
from lockstep.inference.serving.computing_routes import Infer, Parts, Predict, respond
from lockstep.inference.serving.metrics import CONTENT_TYPE
from lockstep.system.html import colours, hash_source
from lockstep.system.version import version

_BODY_LEFT = 499
_TEMPLATE = "page.html.j2"
_STYLE = "page.css"
_SCRIPT = "page.js"
_HTTP_REASONS = {
    404: "there is nothing at this path; the paths of docs/how-to/serve.md end without a slash",
    405: "this path does not accept this method",
}

Endpoint = Callable[[Request], Awaitable[Response]]


def make_application(parts: Parts) -> Starlette:
    """Return the application."""

    async def answer_full_queue(request: Request, error: Exception) -> Response:
        reason = (
            f"{parts.batcher.admitted} images are in the server, which accepts at most"
            f" {parts.limits.max_queue}; send the request again later"
        )
        return _respond_error(429, reason, parts.batcher.retry_after_sec())

    application = Starlette(
        debug=False,
        routes=[
            *_list_pages(parts),
            *_list_protocol(parts),
            Route("/predict", Predict(parts).answer, methods=["POST"]),
        ],
        exception_handlers={
            Refused: _answer_refusal,
            Full: answer_full_queue,
            HTTPException: _answer_http_error,
            ClientDisconnect: _answer_nobody,
            Exception: _answer_failure,
        },
        max_body_size=None,  # `Bodies` limits them
    )
    application.router.redirect_slashes = False  # to http://, which loses a proxy's TLS
    return application


def _respond_error(status: int, reason: str, retry_after_sec: int | None = None) -> Response:
    headers = {"retry-after": str(retry_after_sec)} if retry_after_sec else None
    return respond({"error": reason}, status, headers)


async def _answer_refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _respond_error(error.status, str(error), error.retry_after_sec)


async def _answer_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = _HTTP_REASONS.get(error.status_code, error.detail)
    return respond({"error": reason}, error.status_code, dict(error.headers or {}))


async def _answer_nobody(request: Request, error: Exception) -> Response:
    return Response(status_code=_BODY_LEFT)  # the client has left


async def _answer_failure(request: Request, error: Exception) -> Response:
    # uvicorn logs the error.
    return _respond_error(500, "the server failed to answer; its log has the reason")


class Page:
    """The page on which images are dropped, and its headers. Its HTML fetches nothing but this
    server's answers."""

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


def _list_pages(parts: Parts) -> list[Route]:
    page = Page()
    about = parts.about

    async def index(request: Request) -> Response:
        return Response(page.html, headers=page.headers, media_type="text/html")

    async def metrics(request: Request) -> Response:
        return Response(parts.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def describe(request: Request) -> Response:
        return respond(
            {
                "model": about.name,
                "runtime": about.runtime,
                "precision": about.precision,
                "classes": about.recipe.logits,
                "size": about.recipe.eval_crop,
                "explains": about.explains,
                "unknown_below": about.calibration.unknown_below,
                "body_mb": parts.limits.max_body_mb,
                "lockstep": version(),
            }
        )

    return [Route("/", index), Route("/metrics", metrics), Route("/about", describe)]


def _list_protocol(parts: Parts) -> list[Route]:
    """Return the routes of the Open Inference Protocol."""
    about = parts.about

    async def server(request: Request) -> Response:
        return respond({"name": "lockstep", "version": version(), "extensions": oip.EXTENSIONS})

    async def live(request: Request) -> Response:
        return respond({"live": True})

    def respond_ready(**fields: Any) -> Response:
        is_ready = parts.is_ready
        return respond({**fields, "ready": is_ready}, 200 if is_ready else 503)

    async def ready(request: Request) -> Response:
        return respond_ready()

    async def model_ready(request: Request) -> Response:
        return respond_ready(name=about.name)

    async def describe(request: Request) -> Response:
        platform = f"lockstep_{about.runtime}"
        return respond(oip.describe_model(about.name, platform, parts.shapes))

    def check_model(endpoint: Endpoint) -> Endpoint:
        async def check_and_answer(request: Request) -> Response:
            name = request.path_params["name"]
            number = request.path_params.get("number", oip.VERSION)
            if name != about.name:
                raise Refused(404, f"there is no model {name!r:.80}; this server has {about.name}")
            if number != oip.VERSION:
                raise Refused(
                    404, f"there is no version {number!r:.80}; the only one is {oip.VERSION}"
                )
            return await endpoint(request)

        return check_and_answer

    routes = [
        Route("/v2", server),
        Route("/v2/health/live", live),
        Route("/v2/health/ready", ready),
    ]
    infer = check_model(Infer(parts).answer)
    for path in ("/v2/models/{name}", "/v2/models/{name}/versions/{number}"):
        routes.append(Route(path, check_model(describe)))
        routes.append(Route(f"{path}/ready", check_model(model_ready)))
        routes.append(Route(f"{path}/infer", infer, methods=["POST"]))
    return routes
