"""The routes of the server."""

import asyncio
import base64
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from lockstep.inference.decoding.pool import Decoders, GivenUp, NotDecoded
from lockstep.inference.decoding.process import BAD_FORM, BAD_IMAGE, OVER_BUDGET
from lockstep.inference.explanation import overlaid
from lockstep.inference.images import read_square
from lockstep.inference.prediction import likeliest
from lockstep.inference.runtimes import NATIVE
from lockstep.inference.serving import open_inference as oip
from lockstep.inference.serving.batching import Batcher, Computed, Full, Ticket
from lockstep.inference.serving.bodies import Bodies, Refused
from lockstep.inference.serving.connections import Stopping
from lockstep.inference.serving.limits import LARGEST_JSON, Limits
from lockstep.inference.serving.logs import log
from lockstep.inference.serving.metrics import CONTENT_TYPE, Metrics
from lockstep.inference.serving.model import About
from lockstep.inference.serving.page import Page
from lockstep.system.errors import DivergedError
from lockstep.system.strict_json import to_json
from lockstep.system.version import version
from lockstep.weights.class_names import described

_TOP = 5
_READ = ["GET", "HEAD"]
_BODY_LEFT = 499
_STATUSES = {BAD_FORM: 400, OVER_BUDGET: 413, BAD_IMAGE: 415}
_LONGEST_CONTENT_TYPE = 1000
_QUICK = 2**14
"""JSON of up to this many bytes is parsed at once, which takes less time than another thread."""
_TRUE = ("1", "true", "yes")
_FALSE = ("0", "false", "no")


@dataclass(frozen=True)
class Parts:
    """What the routes use."""

    about: About
    limits: Limits
    batcher: Batcher
    metrics: Metrics
    stopping: Stopping
    bodies: Bodies
    decoders: Decoders
    threads: ThreadPoolExecutor
    """They parse JSON and encode answers, so that the event loop stays free."""

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests and can decode images."""
        return not self.stopping.begun and self.decoders.is_ready

    @property
    def shapes(self) -> oip.Shapes:
        """The sizes of the model's tensors."""
        return oip.Shapes(self.about.recipe.logits, self.limits.max_batch)


def application(parts: Parts) -> FastAPI:
    """Return the application."""
    app = FastAPI(
        openapi_url=None, docs_url=None, redoc_url=None
    )  # their pages load scripts from elsewhere
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
    return _json(
        {"error": reason},
        status,
        {"retry-after": str(retry_after_sec)} if retry_after_sec else None,
    )


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    return _error(error.status, str(error), error.retry_after_sec)


async def _full(parts: Parts, request: Request, error: Exception) -> Response:
    reason = (
        f"{parts.batcher.admitted} images are in the server, which takes"
        f" {parts.limits.max_queue}; send it again later"
    )
    return _error(429, reason, parts.batcher.retry_after_sec())


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reason = {404: "there is nothing at this path", 405: "this path does not take this method"}.get(
        error.status_code
    )
    headers = dict(error.headers) if error.headers else None
    return _json({"error": reason or str(error.detail)}, error.status_code, headers)


async def _left(request: Request, error: Exception) -> Response:
    return Response(status_code=_BODY_LEFT)  # nobody receives it


async def _failed(request: Request, error: Exception) -> Response:  # uvicorn logs the error
    return _error(500, "the server failed to answer; its log has the reason")


def _add_pages(app: FastAPI, parts: Parts) -> None:
    page = Page()
    about = parts.about

    async def index() -> Response:
        return Response(page.html, headers=page.headers, media_type="text/html")

    async def metrics() -> Response:
        return Response(parts.metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def describe() -> Response:
        return _json(
            {
                "model": about.name,
                "runtime": about.runtime,
                "precision": about.precision,
                "classes": about.recipe.logits,
                "size": about.recipe.eval_crop,
                "explains": about.explains,
                "body_mb": parts.limits.max_body_mb,
                "lockstep": version(),
            }
        )

    for path, function in (("/", index), ("/metrics", metrics), ("/about", describe)):
        app.add_api_route(path, function, methods=_READ)


def _add_protocol(app: FastAPI, parts: Parts) -> None:
    """Add the routes of the Open Inference Protocol."""
    about = parts.about
    infer = _Infer(parts)

    def of_model(function: Callable[[Request], Any]) -> Callable[[Request], Any]:
        async def checked(request: Request) -> Response:
            name = request.path_params["name"]
            number = request.path_params.get("number", oip.VERSION)
            if name != about.name:
                raise Refused(404, f"there is no model {name!r:.80}; this server has {about.name}")
            if number != oip.VERSION:
                raise Refused(
                    404, f"there is no version {number!r:.80}; the only one is {oip.VERSION}"
                )
            found: Response = await function(request)
            return found

        return checked

    async def server(request: Request) -> Response:
        return _json({"name": "lockstep", "version": version(), "extensions": oip.EXTENSIONS})

    async def live(request: Request) -> Response:
        return _json({"live": True})

    async def ready(request: Request) -> Response:
        state = parts.is_ready
        return _json({"ready": state}, 200 if state else 503)

    async def model_ready(request: Request) -> Response:
        state = parts.is_ready
        return _json({"name": about.name, "ready": state}, 200 if state else 503)

    async def metadata(request: Request) -> Response:
        return _json(oip.metadata(about.name, f"lockstep_{about.runtime}", parts.shapes))

    for path, function in (("/v2", server), ("/v2/health/live", live), ("/v2/health/ready", ready)):
        app.add_api_route(path, function, methods=_READ)
    for model in ("/v2/models/{name}", "/v2/models/{name}/versions/{number}"):
        app.add_api_route(model, of_model(metadata), methods=_READ)
        app.add_api_route(f"{model}/ready", of_model(model_ready), methods=_READ)
        app.add_api_route(f"{model}/infer", of_model(infer.answer), methods=["POST"])


class _Computing:
    """What the routes that compute have in common."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @contextmanager
    def _expected(self) -> Iterator[Ticket]:
        """Yield the ticket of a request whose body has not been read. Raises `Refused` or `Full` if
        none are taken."""
        if self._parts.stopping.refuses:
            raise Refused(
                503,
                "the server is stopping; send it to another one, or again later",
                retry_after_sec=1,
            )
        if self._parts.batcher.is_full:
            raise Full
        with self._parts.batcher.expect() as ticket:
            yield ticket

    async def _within_time(self, request: Request, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of work for a request whose body has been read. It is cancelled if the
        client leaves.

        Raises `Refused` if it takes too long, and `ClientDisconnect`.
        """
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(_left_by(request))
        seconds = self._parts.limits.timeout_sec
        try:
            await asyncio.wait(
                (working, leaving), timeout=seconds, return_when=asyncio.FIRST_COMPLETED
            )
            if working.done():
                return working.result()
            if leaving.done():
                raise ClientDisconnect
            reason = (
                f"no result after {seconds:g} s: the server is too busy, or the image takes too"
                " long to decode"
            )
            raise Refused(503, reason, retry_after_sec=self._parts.batcher.retry_after_sec())
        finally:
            working.cancel()
            leaving.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)

    async def _in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._parts.threads, function, *arguments
        )

    async def _decoded(
        self, bodies: tuple[bytes, ...], content_type: str | None = None
    ) -> np.ndarray:
        """Return encoded images, or that of a form, as uint8 [N, size, size, 3]. Raises `Refused`."""
        side = self._parts.about.recipe.eval_crop
        pixels = np.empty((len(bodies), side, side, 3), np.uint8)
        if len(bodies) == 1:
            await self._decode(bodies[0], content_type, pixels[0])
            return pixels
        work = [
            self._decode(data, content_type, out) for data, out in zip(bodies, pixels, strict=True)
        ]
        for each in await asyncio.gather(
            *work, return_exceptions=True
        ):  # none is ended because another one is bad
            if isinstance(each, BaseException):
                raise each
        return pixels

    async def _decode(self, body: bytes, content_type: str | None, out: np.ndarray) -> None:
        try:
            await self._parts.decoders.decode(body, content_type, out)
        except NotDecoded as error:
            kind = "not an image that can be read: " if error.kind == BAD_IMAGE else ""
            raise Refused(_STATUSES[error.kind], f"{kind}{error}") from None
        except GivenUp:
            raise Refused(
                503, "the image takes too long to decode while others wait; reduce it"
            ) from None
        except OSError:
            reason = (
                "the process that was decoding the image ended; send it again, or save the image"
                " again"
            )
            log("error", logging.WARNING, message=reason)
            raise Refused(503, reason) from None

    async def _computed(
        self, ticket: Ticket, images: np.ndarray, *, explain: bool = False
    ) -> Computed:
        """Return the results of images. Raises `Refused`."""
        try:
            return await asyncio.wrap_future(ticket.submit(images, explain=explain))
        except DivergedError as error:
            raise Refused(500, str(error)) from None


async def _left_by(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class _Predict(_Computing):
    """`POST /predict`: an image, as the body or in a form, to its likeliest classes."""

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        began = time.perf_counter()
        top, explain = self._options(request)
        kind = request.headers.get("content-type", "")
        form = kind if kind.lower().startswith("multipart/") else None
        if len(kind) > _LONGEST_CONTENT_TYPE:
            raise Refused(
                400,
                f"the Content-Type has {len(kind)} characters; expected at most"
                f" {_LONGEST_CONTENT_TYPE}",
            )
        with self._expected() as ticket, self._parts.bodies.held() as body:
            data = await body.read(request)
            ticket.admit(1)
            received = time.perf_counter()
            images, decoded, found = await self._within_time(
                request, self._found(ticket, data, form, explain=explain)
            )
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

    async def _found(
        self, ticket: Ticket, data: bytes, form: str | None, *, explain: bool
    ) -> tuple[np.ndarray, float, Computed]:
        """Return a decoded image, the time when it was, and its results."""
        images = await self._decoded((data,), form)
        decoded = time.perf_counter()
        return images, decoded, await self._computed(ticket, images, explain=explain)

    def _options(self, request: Request) -> tuple[int, bool]:
        unknown = request.query_params.keys() - {"top", "explain"}
        if unknown:
            raise Refused(
                400, f"there is no option {min(unknown)!r:.80}; expected top=N or explain=1"
            )
        top = request.query_params.get("top", str(_TOP))
        explain = request.query_params.get("explain", "0").lower()
        number = int(top) if top.isascii() and top.isdigit() and len(top) < 9 else 0
        if not number:
            raise Refused(400, f"top is {top!r:.80}; expected a number of classes, at least 1")
        if explain not in (*_TRUE, *_FALSE):
            raise Refused(400, f"explain is {explain!r:.80}; expected 1 or 0")
        if explain in _TRUE and not self._parts.about.explains:
            able = " or ".join(name for name, framework in FRAMEWORKS.items() if framework.explains)
            raise Refused(
                400,
                f"this runtime computes no Grad-CAM; serve with --runtime {NATIVE} and --backend"
                f" {able}",
            )
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
        with self._expected() as ticket, self._parts.bodies.held() as body:
            data = await body.read(request)
            try:
                asked = await self._asked(request, data)
            except oip.BadRequest as error:
                raise Refused(400, str(error)) from None
            ticket.admit(len(asked))
            logits = await self._within_time(request, self._logits(ticket, asked))
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

    async def _logits(self, ticket: Ticket, asked: oip.Asked) -> np.ndarray:
        if asked.images is None:
            squares = await self._decoded(asked.encoded)
        else:
            squares = await self._resized(asked.images)
        return (await self._computed(ticket, squares)).logits

    async def _resized(self, photos: np.ndarray) -> np.ndarray:
        """Return what evaluation sees of photos: uint8 [N, size, size, 3]. Raises `Refused`."""
        recipe = self._parts.about.recipe
        most = self._parts.limits.pixels
        height, width = photos.shape[1:3]
        if height * width > most:
            raise Refused(
                413, f"{width} x {height} pixels are too many: at most {most:,}; reduce the images"
            )
        squares = np.empty((len(photos), recipe.eval_crop, recipe.eval_crop, 3), np.uint8)
        for photo, square in zip(
            photos, squares, strict=True
        ):  # one by one: a request whose time is over ends in between
            try:
                await self._in_thread(read_square, photo, recipe, square)
            except ValueError as error:
                raise Refused(413, str(error)) from None
        return squares

    async def _asked(self, request: Request, data: bytes) -> oip.Asked:
        given = request.headers.get(oip.HEADER_LENGTH)
        if given is not None and not (given.isascii() and given.isdigit() and len(given) < 12):
            raise oip.BadRequest(
                f"{oip.HEADER_LENGTH} is {given!r:.80}; expected a number of bytes"
            )
        length = None if given is None else int(given)
        size = len(data) if length is None else length
        if size > LARGEST_JSON:
            reason = (
                f"the JSON has {size} bytes, expected at most {LARGEST_JSON}; send tensors in"
                " binary"
            )
            raise Refused(413, f"{reason} ({oip.HEADER_LENGTH})")
        if size > _QUICK:
            return await self._in_thread(oip.request, data, length, self._parts.shapes)
        return oip.request(data, length, self._parts.shapes)
