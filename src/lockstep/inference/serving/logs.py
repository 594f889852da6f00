"""Logs: words on a terminal, elsewhere lines of JSON, one object for each event. Both are ASCII, so
that no name can control a terminal or forge a line."""

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("lockstep.serving")
_OTHERS = {
    "uvicorn.error": logging.WARNING,
    "py.warnings": logging.WARNING,
    "python_multipart": logging.ERROR,
    "": logging.WARNING,
}
"""Other loggers and the least level of their events. Damaged forms of clients are warnings of
`python_multipart`."""
_LONGEST = 4000


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", None)
        about: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
        }
        if fields is None:
            about["event"] = record.getMessage()[:_LONGEST]
        else:
            about |= {"event": record.msg, **fields}
        if record.exc_info:
            about["trace"] = self.formatException(record.exc_info)[-_LONGEST:]
        return json.dumps(about, ensure_ascii=True, allow_nan=False)


class _Words(logging.Formatter):
    """For a person at a terminal, who has read on standard output that the server listens."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        fields = getattr(record, "fields", {})
        text = str(fields.get("message", record.message))[:_LONGEST]
        if text == "request":
            text = "{method} {path}: {status} in {ms:.0f} ms, from {client}".format_map(fields)
        if record.levelno >= logging.WARNING:
            text = f"{record.levelname.lower()}: {text}"
        return f"{self.formatTime(record, '%H:%M:%S')} {_escape(text)}"

    def formatException(self, ei: Any) -> str:
        return "\n".join(map(_escape, super().formatException(ei)[-_LONGEST:].splitlines()))


def _escape(text: str) -> str:
    return text.encode("unicode_escape").decode()


def log(
    event: str, level: int = logging.INFO, *, trace: BaseException | None = None, **fields: Any
) -> None:
    """Write an event with its fields: plain values that JSON has, numbers finite."""
    LOGGER.log(level, event, extra={"fields": fields}, exc_info=trace)


@contextmanager
def open_logs() -> Iterator[None]:
    """While open, write the events of this server, of libraries, and warnings to standard error."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Lines())
    if sys.stderr.isatty():
        handler.setFormatter(_Words())
        handler.addFilter(lambda record: record.msg != "listening")
    levels = {LOGGER: logging.INFO}
    for name, level in _OTHERS.items():
        levels[logging.getLogger(name)] = level
    before = [(logger, logger.level, logger.propagate) for logger in levels]
    for logger, level in levels.items():
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(level)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        for logger, level, propagate in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagate
