"""The routes that compute: `/predict`, and `infer` of the Open Inference Protocol."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from lockstep.backends import FRAMEWORKS
from lockstep.inference.decoding.pool import Decoders, GivenUp, NotDecoded
from lockstep.inference.decoding.process import BAD_FORM, BAD_IMAGE, OVER_BUDGET
from lockstep.inference.grad_cam import overlay
from lockstep.inference.images import read_square
from lockstep.inference.prediction import find_most_likely
from lockstep.inference.runtimes import NATIVE
from lockstep.inference.serving import open_inference as oip
from lockstep.inference.serving.batching import Batcher, Computed, Full, Ticket
from lockstep.inference.serving.bodies import Bodies, Refused
from lockstep.inference.serving.connections import Stopping
from lockstep.inference.serving.limits import LARGEST_JSON, Limits
from lockstep.inference.serving.logs import log
from lockstep.inference.serving.metrics import Metrics
from lockstep.inference.serving.model import About
from lockstep.system.errors import DivergedError
from lockstep.system.html import data_address
from lockstep.system.strict_json import to_json
from lockstep.weights.calibration import compute_probabilities
from lockstep.weights.class_names import describe_class

_TOP = 5
_STATUSES = {BAD_FORM: 400, OVER_BUDGET: 413, BAD_IMAGE: 415}
_LONGEST_CONTENT_TYPE = 1000
_QUICK = 2**14
"""JSON of up to this many bytes is parsed at once, which takes less time than another thread."""
_TRUE = ("1", "true", "yes")
_FALSE = ("0", "false", "no")
_FLAGS = ("explain", "thumbnail")


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
    """Threads that parse JSON and encode answers, so that the event loop stays free."""

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts requests and can decode images."""
        return not self.stopping.begun and self.decoders.is_ready

    @property
    def shapes(self) -> oip.Shapes:
        """The sizes of the model's tensors."""
        return oip.Shapes(self.about.recipe.logits, self.limits.max_batch)


def respond(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a response with a value as JSON."""
    return Response(to_json(value), status, headers, "application/json")


class _Route:
    """What the routes that compute have in common."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @contextmanager
    def _expect(self) -> Iterator[Ticket]:
        """Yield the ticket of a request whose body has not been read. Raises `Refused` or `Full` if
        no requests are accepted."""
        if self._parts.stopping.refuses:
            reason = "the server is stopping; send the request to another server, or again later"
            raise Refused(503, reason, retry_after_sec=1)
        if self._parts.batcher.is_full:
            raise Full
        with self._parts.batcher.expect() as ticket:
            yield ticket

    async def _limit_time(self, request: Request, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the result of work for a request whose body has been read. It is cancelled if the
        client leaves.

        Raises `Refused` if it takes too long, and `ClientDisconnect`.
        """
        working = asyncio.ensure_future(work)
        leaving = asyncio.ensure_future(_wait_until_client_leaves(request))
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

    async def _run_in_thread(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(
            self._parts.threads, function, *arguments
        )

    def _make_squares(self, images: int) -> np.ndarray:
        """Return memory for what evaluation sees of images, uint8 [N, size, size, 3]."""
        side = self._parts.about.recipe.eval_crop
        return np.empty((images, side, side, 3), np.uint8)

    async def _decode_all(
        self, bodies: tuple[bytes, ...], content_type: str | None = None
    ) -> np.ndarray:
        """Decode images, or that of a form, to uint8 [N, size, size, 3]. Raises `Refused`."""
        squares = self._make_squares(len(bodies))
        if len(bodies) == 1:
            await self._decode(bodies[0], content_type, squares[0])
            return squares
        work = [
            self._decode(data, content_type, square)
            for data, square in zip(bodies, squares, strict=True)
        ]
        # All are decoded, even if one of them is bad.
        for error in await asyncio.gather(*work, return_exceptions=True):
            if isinstance(error, BaseException):
                raise error
        return squares

    async def _decode(self, body: bytes, content_type: str | None, out: np.ndarray) -> None:
        try:
            await self._parts.decoders.decode(body, content_type, out)
        except NotDecoded as error:
            kind = "cannot be read: " if error.kind == BAD_IMAGE else ""
            raise Refused(_STATUSES[error.kind], f"{kind}{error}") from None
        except GivenUp:
            reason = "the image takes too long to decode while others wait; reduce its size"
            raise Refused(503, reason) from None
        except OSError:
            reason = (
                "the process that decoded the image crashed; send the image again, or save it again"
            )
            log("error", logging.WARNING, message=reason)
            raise Refused(503, reason) from None

    async def _compute(
        self, ticket: Ticket, images: np.ndarray, *, explain: bool = False
    ) -> Computed:
        """Return the results of images. Raises `Refused`."""
        try:
            return await asyncio.wrap_future(ticket.submit(images, explain=explain))
        except DivergedError as error:
            raise Refused(500, str(error)) from None


async def _wait_until_client_leaves(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Predict(_Route):
    """`POST /predict`: an image, as the body or in a form, to its most likely classes."""

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        began = time.perf_counter()
        top, flags = self._read_options(request)
        explain = flags["explain"]
        kind = request.headers.get("content-type", "")
        form = kind if kind.lower().startswith("multipart/") else None
        if len(kind) > _LONGEST_CONTENT_TYPE:
            raise Refused(
                400,
                f"the Content-Type has {len(kind)} characters; expected at most"
                f" {_LONGEST_CONTENT_TYPE}",
            )
        with self._expect() as ticket, self._parts.bodies.hold() as body:
            data = await body.read(request)
            ticket.admit(1)
            received = time.perf_counter()

            async def decode_and_compute() -> tuple[np.ndarray, float, Computed]:
                images = await self._decode_all((data,), form)
                decoded = time.perf_counter()
                return images, decoded, await self._compute(ticket, images, explain=explain)

            images, decoded, computed = await self._limit_time(request, decode_and_compute())
        times = {
            "receive": received - began,
            "decode": decoded - received,
            "wait": computed.waited_sec,
            "compute": computed.computed_sec,
        }
        result = self._describe_classes(computed.logits[0], top)
        if computed.heat is not None:
            [picture] = await self._run_in_thread(overlay, images, computed.heat)
            result["explanation"] = await self._run_in_thread(_encode_picture, picture)
        if flags["thumbnail"]:
            result["thumbnail"] = await self._run_in_thread(_encode_picture, images[0])
        times["total"] = time.perf_counter() - began
        result["ms"] = {name: round(1000 * seconds, 3) for name, seconds in times.items()}
        return respond(result)

    def _read_options(self, request: Request) -> tuple[int, dict[str, bool]]:
        """Return the number of classes, and which of `_FLAGS` are set."""
        unknown = request.query_params.keys() - {"top", *_FLAGS}
        if unknown:
            raise Refused(
                400,
                f"there is no option {min(unknown)!r:.80}; expected top=N, explain=1 or"
                " thumbnail=1",
            )
        top = request.query_params.get("top", str(_TOP))
        number = int(top) if top.isascii() and top.isdigit() and len(top) < 9 else 0
        if not number:
            raise Refused(400, f"top is {top!r:.80}; expected a number of classes, at least 1")
        flags = {}
        for name in _FLAGS:
            value = request.query_params.get(name, "0").lower()
            if value not in (*_TRUE, *_FALSE):
                raise Refused(400, f"{name} is {value!r:.80}; expected 1 or 0")
            flags[name] = value in _TRUE
        if flags["explain"] and not self._parts.about.explains:
            able = " or ".join(name for name, framework in FRAMEWORKS.items() if framework.explains)
            raise Refused(
                400,
                f"this runtime cannot compute Grad-CAM; serve with --runtime {NATIVE} and --backend"
                f" {able}",
            )
        return number, flags

    def _describe_classes(self, logits: np.ndarray, top: int) -> dict[str, Any]:
        names = dict(enumerate(self._parts.about.classes))
        calibration = self._parts.about.calibration
        best, shares = find_most_likely(logits, top, calibration)
        classes = [names.get(number, str(number)) for number in best]
        unknown = {}
        if calibration.unknown_below:
            unknown = {"unknown": shares[0] < calibration.unknown_below}
        return {
            "model": self._parts.about.name,
            "classes": classes,
            "names": [describe_class(name) for name in classes],
            "probabilities": [round(share, 6) for share in shares],
            **unknown,
        }


def _encode_picture(picture: np.ndarray) -> str:
    """Return a picture, uint8 [height, width, 3], as a data URL."""
    is_encoded, data = cv2.imencode(".png", picture[:, :, ::-1])
    assert is_encoded
    return data_address("image/png", data.tobytes())


class Infer(_Route):
    """`POST /v2/models/NAME/infer`: tensors, or encoded images, to tensors."""

    async def answer(self, request: Request) -> Response:
        """Answer a request."""
        parts = self._parts
        with self._expect() as ticket, parts.bodies.hold() as body:
            data = await body.read(request)
            try:
                content = await self._parse(request, data)
            except oip.BadRequest as error:
                raise Refused(400, str(error)) from None
            ticket.admit(len(content))
            logits = await self._limit_time(request, self._compute_logits(ticket, content))
        temperature = parts.about.calibration.temperature
        tensors = {
            oip.LOGITS: logits,
            oip.PROBABILITIES: compute_probabilities(logits, temperature).astype(np.float32),
            oip.CLASSES: logits.argmax(axis=1)[:, None].astype(np.int64),
        }
        pieces, json_length = oip.encode_answer(
            content, parts.about.name, tensors, parts.about.classes
        )
        if json_length is None:
            return Response(pieces[0], media_type="application/json")
        headers = {oip.HEADER_LENGTH: str(json_length)}
        return Response(b"".join(pieces), headers=headers, media_type="application/octet-stream")

    async def _compute_logits(self, ticket: Ticket, content: oip.InferRequest) -> np.ndarray:
        if content.images is None:
            squares = await self._decode_all(content.encoded)
        else:
            squares = await self._resize(content.images)
        return (await self._compute(ticket, squares)).logits

    async def _resize(self, photos: np.ndarray) -> np.ndarray:
        """Return what evaluation sees of photos: uint8 [N, size, size, 3]. Raises `Refused`."""
        most = self._parts.limits.pixels
        height, width = photos.shape[1:3]
        if height * width > most:
            raise Refused(
                413, f"{width} x {height} pixels are too many: at most {most:,}; reduce the images"
            )
        recipe = self._parts.about.recipe
        squares = self._make_squares(len(photos))
        # One by one, so that a request whose time is over ends in between.
        for photo, square in zip(photos, squares, strict=True):
            try:
                await self._run_in_thread(read_square, photo, recipe, square)
            except ValueError as error:
                raise Refused(413, str(error)) from None
        return squares

    async def _parse(self, request: Request, data: bytes) -> oip.InferRequest:
        header = request.headers.get(oip.HEADER_LENGTH)
        if header is not None and not (header.isascii() and header.isdigit() and len(header) < 12):
            raise oip.BadRequest(
                f"{oip.HEADER_LENGTH} is {header!r:.80}; expected a number of bytes"
            )
        length = None if header is None else int(header)
        size = len(data) if length is None else length
        if size > LARGEST_JSON:
            raise Refused(
                413,
                f"the JSON has {size} bytes, expected at most {LARGEST_JSON}; send tensors in"
                f" binary ({oip.HEADER_LENGTH})",
            )
        if size > _QUICK:
            return await self._run_in_thread(oip.parse_request, data, length, self._parts.shapes)
        return oip.parse_request(data, length, self._parts.shapes)
