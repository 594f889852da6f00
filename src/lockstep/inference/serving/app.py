"""The routes of the server."""

import asyncio
import base64
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import cv2
import numpy as np
from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from lockstep.backends import FRAMEWORKS
from lockstep.data.decoding.size_limits import TooManyPixels
from lockstep.inference.engines import NATIVE
from lockstep.inference.explanation import overlaid
from lockstep.inference.prediction import likeliest
from lockstep.inference.serving import open_inference as oip
from lockstep.inference.serving.batching import Batcher, Computed, Full, Ticket
from lockstep.inference.serving.bodies import Bodies, Refused, image_in
from lockstep.inference.serving.connections import Stopping
from lockstep.inference.serving.limits import LARGEST_JSON, Limits
from lockstep.inference.serving.metrics import CONTENT_TYPE, Metrics
from lockstep.inference.serving.model import About, square
from lockstep.inference.serving.page import Page
from lockstep.system.errors import DivergedError
from lockstep.system.strict_json import to_json
from lockstep.system.version import version
from lockstep.weights.class_names import described

_TOP = 5
_BODY_LEFT = 499
_QUICK = 2**14
"""JSON of up to this many bytes is parsed at once, which takes less time than another thread."""
_TRUE, _FALSE = ("1", "true", "yes"), ("0", "false", "no")


@dataclass(frozen=True)
class Parts:
    """What the routes use."""

    about: About
    limits: Limits
    batcher: Batcher
    metrics: Metrics
    stopping: Stopping
    threads: ThreadPoolExecutor
    """They decode images and encode answers, so that the event loop stays free."""

    @property
    def shapes(self) -> oip.Shapes:
        """The sizes of the model's tensors."""
        return oip.Shapes(self.about.recipe.eval_crop, self.about.recipe.logits, self.limits.batch_images)


def application(parts: Parts) -> FastAPI:
    """Return the application."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)  # their pages load scripts from elsewhere
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(Full, partial(_full, parts))
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientDisconnect, _left)
    app.add_exception_handler(Exception, _failed)
    _add_pages(app, parts)
    _add_protocol(app, parts)
    predict = _Predict(parts)
    app.add_api_route("/predict", predict.answer, methods=["POST"])
    return app


def _json(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(to_json(value), status, headers, "application/json")


def _error(status: int, reason: str, retry_after_sec: int | None = None) -> Response:
    return _json({"error": reason}, status, {"retry-after": str(retry_after_sec)} if retry_after_sec else None)


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error.status, str(error), error.retry_after_sec)


async def _full(parts: Parts, request: Request, error: Exception) -> Response:
    reason = (
        f"{parts.batcher.admitted} images are in the server, which takes {parts.limits.queue_images}; send it again later"
    )
    return _error(429, reason, parts.batcher.retry_after_sec())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = {404: "there is nothing at this path", 405: "this path does not take this method"}.get(error.status_code)
    headers = dict(error.headers) if error.headers else None
    return _json({"error": reason or str(error.detail)}, error.status_code, headers)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=_BODY_LEFT)  # nobody receives it


async def _failed(request: Request, error: Exception) -> Response:  # uvicorn logs the error
    return _error(500, "the server failed to answer; its log has the reason")


def _add_pages(app: FastAPI, parts: Parts) -> None:
    page, about = Page(), parts.about

    async def index() -> Response:
        return Response(page.html, headers=page.headers, media_type="text/html")

    async def metrics() -> Response:
        return Response(parts.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def describe() -> Response:
        return _json(
            {
                "model": about.name,
                "engine": about.engine,
                "precision": about.precision,
                "classes": about.recipe.logits,
                "size": about.recipe.eval_crop,
                "explains": about.explains,
                "body_mb": parts.limits.body_mb,
                "lockstep": version(),
            }
        )

    for path, function in (("/", index), ("/metrics", metrics), ("/about", describe)):
        app.add_api_route(path, function, methods=["GET"])


def _add_protocol(app: FastAPI, parts: Parts) -> None:
    """Add the routes of the Open Inference Protocol."""
    about, infer = parts.about, _Infer(parts)

    def of_model(function: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def checked(request: Request) -> Response:
            name, number = request.path_params["name"], request.path_params.get("number", oip.VERSION)
            if name != about.name:
                raise Refused(404, f"there is no model {name!r:.80}; this server has {about.name}")
            if number != oip.VERSION:
                raise Refused(404, f"there is no version {number!r:.80}; the only one is {oip.VERSION}")
            found: Response = await function(request)
            return found

        return checked

    async def server(request: Request) -> Response:
        return _json({"name": "lockstep", "version": version(), "extensions": oip.EXTENSIONS})

    async def live(request: Request) -> Response:
        return _json({"live": True})

    async def ready(request: Request) -> Response:
        return _json({"ready": not parts.stopping.begun}, 503 if parts.stopping.begun else 200)

    async def model_ready(request: Request) -> Response:
        state = not parts.stopping.begun
        return _json({"name": about.name, "ready": state}, 200 if state else 503)

    async def metadata(request: Request) -> Response:
        return _json(oip.metadata(about.name, f"lockstep_{about.engine}", parts.shapes))

    for path, function in (("/v2", server), ("/v2/health/live", live), ("/v2/health/ready", ready)):
        app.add_api_route(path, function, methods=["GET"])
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{number}"):
        app.add_api_route(model, of_model(metadata), methods=["GET"])
        app.add_api_route(f"{model}/ready", of_model(model_ready), methods=["GET"])
        app.add_api_route(f"{model}/infer", of_model(infer.answer), methods=["POST"])


class _Computing:
    """What the routes that compute have in common."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._bodies = parts, Bodies(parts.limits)

    def _admit(self) -> Ticket:
        if self._parts.stopping.refuses:
            raise Refused(503, "the server is stopping; send it to another one, or again later", retry_after_sec=1)
        return self._parts.batcher.admit()

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._parts.threads, function, *arguments)

    async def _decoded(self, images: tuple[bytes, ...]) -> np.ndarray:
        """Return encoded images as uint8 [N, size, size, 3]. Raises `Refused`."""
        side = self._parts.about.recipe.eval_crop
        pixels = np.empty((len(images), side, side, 3), np.uint8)
        work = [self._in_thread(self._decode, data, out) for data, out in zip(images, pixels, strict=True)]
        for each in await asyncio.gather(*work, return_exceptions=True):  # none may write on after the answer
            if isinstance(each, BaseException):
                raise each
        return pixels

    def _decode(self, data: bytes, out: np.ndarray) -> None:
        try:
            square(data, self._parts.about.recipe, self._parts.limits.pixels, out)
        except TooManyPixels as error:
            raise Refused(413, str(error)) from None
        except ValueError as error:
            raise Refused(415, f"not an image that can be read: {error}") from None

    async def _computed(self, ticket: Ticket, images: np.ndarray, *, explain: bool = False) -> Computed:
        """Return the results of images. Raises `Refused` if they take too long."""
        future = asyncio.wrap_future(ticket.submit(images, explain=explain))
        try:
            async with asyncio.timeout(self._parts.limits.timeout_sec):
                return await future
        except TimeoutError:
            reason = f"no result after {self._parts.limits.timeout_sec:g} s: the server is too busy; send it again later"
            raise Refused(503, reason, retry_after_sec=self._parts.batcher.retry_after_sec()) from None
        except DivergedError as error:
            raise Refused(500, str(error)) from None


class _Predict(_Computing):
    """`POST /predict`: an image, as the body or in a form, to its likeliest classes."""

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        began = time.perf_counter()
        top, explain = self._options(request)
        with self._admit() as ticket, self._bodies.held() as body:
            data = await body.read(request)
            received = time.perf_counter()
            kind = request.headers.get("content-type", "")
            if kind.lower().startswith("multipart/"):
                data = await self._in_thread(image_in, data, kind)
            images = await self._decoded((data,))
            decoded = time.perf_counter()
            found = await self._computed(ticket, images, explain=explain)
        times = {
            "receive": received - began,
            "decode": decoded - received,
            "wait": found.waited_sec,
            "compute": found.computed_sec,
        }
        result = self._result(found.logits[0], top)
        if found.heat is not None:
            result["explanation"] = await self._in_thread(_picture, images, found.heat)
        times["total"] = time.perf_counter() - began
        result["ms"] = {name: round(1000 * seconds, 3) for name, seconds in times.items()}
        return _json(result)

    def _options(self, request: Request) -> tuple[int, bool]:
        unknown = request.query_params.keys() - {"top", "explain"}
        if unknown:
            raise Refused(400, f"there is no option {min(unknown)!r:.80}; expected top=N or explain=1")
        top, explain = request.query_params.get("top", str(_TOP)), request.query_params.get("explain", "0").lower()
        number = int(top) if top.isascii() and top.isdigit() and len(top) < 9 else 0
        if not number:
            raise Refused(400, f"top is {top!r:.80}; expected a number of classes, at least 1")
        if explain not in (*_TRUE, *_FALSE):
            raise Refused(400, f"explain is {explain!r:.80}; expected 1 or 0")
        if explain in _TRUE and not self._parts.about.explains:
            able = " or ".join(name for name, framework in FRAMEWORKS.items() if framework.explains)
            raise Refused(400, f"this engine computes no Grad-CAM; serve with --engine {NATIVE} and --backend {able}")
        return number, explain in _TRUE

    def _result(self, logits: np.ndarray, top: int) -> dict[str, Any]:
        names = dict(enumerate(self._parts.about.classes))
        best, shares = likeliest(logits, top)
        classes = [names.get(number, str(number)) for number in best]
        return {
            "model": self._parts.about.name,
            "classes": classes,
            "names": [described(name) for name in classes],
            "probabilities": [round(share, 6) for share in shares],
        }


def _picture(images: np.ndarray, heat: np.ndarray) -> str:
    """Return an image with Grad-CAM over it as a data URL."""
    [shown] = overlaid(images, heat)
    written, data = cv2.imencode(".png", shown[:, :, ::-1])
    assert written
    return "data:image/png;base64," + base64.b64encode(data.tobytes()).decode("ascii")


class _Infer(_Computing):
    """`POST /v2/models/NAME/infer`: tensors, or encoded images, to tensors."""

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        parts = self._parts
        with self._admit() as ticket, self._bodies.held() as body:
            data = await body.read(request)
            try:
                asked = await self._asked(request, data)
            except oip.BadRequest as error:
                raise Refused(400, str(error)) from None
            if len(asked) > 1:
                ticket.grow(len(asked))
            images = await self._decoded(asked.encoded) if asked.images is None else asked.images
            logits = (await self._computed(ticket, images)).logits
        powers = np.exp(logits.astype(np.float64) - logits.max(axis=1, keepdims=True))
        tensors = {
            oip.LOGITS: logits,
            oip.PROBABILITIES: (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32),
            oip.CLASSES: logits.argmax(axis=1)[:, None].astype(np.int64),
        }
        pieces, json_length = oip.answer(asked, parts.about.name, tensors, parts.about.classes)
        if json_length is None:
            return Response(pieces[0], media_type="application/json")
        headers = {oip.HEADER_LENGTH: str(json_length)}
        return Response(b"".join(pieces), headers=headers, media_type="application/octet-stream")

    async def _asked(self, request: Request, data: bytes) -> oip.Asked:
        given = request.headers.get(oip.HEADER_LENGTH)
        if given is not None and not (given.isascii() and given.isdigit() and len(given) < 12):
            raise oip.BadRequest(f"{oip.HEADER_LENGTH} is {given!r:.80}; expected a number of bytes")
        length = None if given is None else int(given)
        size = len(data) if length is None else length
        if size > LARGEST_JSON:
            reason = f"the JSON has {size} bytes, expected at most {LARGEST_JSON}; send tensors in binary"
            raise Refused(413, f"{reason} ({oip.HEADER_LENGTH})")
        if size > _QUICK:
            return await self._in_thread(oip.request, data, length, self._parts.shapes)
        return oip.request(data, length, self._parts.shapes)
