"""`lockstep serve`: an HTTP server for one model, with dynamic batching.

It speaks the Open Inference Protocol, so that Triton's clients work, takes images at `/predict`,
and has a page. This module needs none of the packages of the extra `serve`; the modules that
`serve` imports do.
"""

import importlib
import logging
import socket
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from lockstep.backends import Framework
from lockstep.inference.serving.access import Access, make_access
from lockstep.inference.serving.limits import Limits
from lockstep.inference.session import SessionOptions
from lockstep.inference.source import ModelSource
from lockstep.system.errors import BackendError, UserError
from lockstep.system.machine import share_of_cores

HOST = "127.0.0.1"
PACKAGES = ("starlette", "uvicorn", "prometheus-client", "python-multipart")
INSTALL = (
    "pip install starlette==1.10.0 uvicorn==0.54.0 prometheus-client==0.26.0"
    " python-multipart==0.0.34"
)
_MOST_PORT = 65535


def serve(
    source: ModelSource,
    options: SessionOptions,
    *,
    host: str,
    port: int,
    token: str | None,
    no_token: bool,
    allow_hosts: Iterable[str],
    name: str | None,
    limits: Limits | None,
    quiet: bool,
) -> None:
    """Serve a model; the arguments and errors are those of `Model.serve`."""
    missing = [package for package in PACKAGES if not Framework((package,), INSTALL).version()]
    if missing:
        raise BackendError(f"serving needs {', '.join(missing)}: {INSTALL}")
    if not 0 <= port <= _MOST_PORT:
        raise UserError(f"port is {port}; expected 0 to {_MOST_PORT}")
    if name is not None and (not name or "/" in name):
        raise UserError(f"the model's name is {name!r}; expected a name without slashes")
    with bind_socket(host, port) as sock:
        address = str(sock.getsockname()[0])
        access = make_access(host, address, token, no_token=no_token, hosts=allow_hosts)
        _run(source, options, sock, access, limits or Limits(), name=name, quiet=quiet)


def _run(
    source: ModelSource,
    options: SessionOptions,
    sock: socket.socket,
    access: Access,
    limits: Limits,
    *,
    name: str | None,
    quiet: bool,
) -> None:
    """Serve on a bound socket. While a thread opens the model and a process imports what decoding
    needs, this thread imports the packages for HTTP."""
    from lockstep.inference.decoding.pool import Decoders
    from lockstep.inference.serving.batching import Batcher
    from lockstep.inference.serving.engine_thread import compute_in_thread
    from lockstep.inference.serving.logs import log, open_logs

    def report(failure: str) -> None:
        log("error", logging.ERROR, message=failure)

    threads = options.execution.loader_threads or share_of_cores()
    batcher = Batcher(limits)
    options = replace(options, batch=limits.max_batch)
    with (
        open_logs(),
        closing(Decoders(threads, report)) as decoders,
        compute_in_thread(batcher, source, options, name) as engine,
    ):
        server = importlib.import_module(f"{__name__}.server")
        about = engine.result()
        server.run(about, sock, access, limits, batcher, decoders, threads=threads, quiet=quiet)


def bind_socket(host: str, port: int) -> socket.socket:
    """Return a socket that has an address but does not listen yet. Raises `UserError` if the
    address is not free."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
    except (OSError, UnicodeError) as error:
        raise UserError(
            f"there is no address {host!r}: {error}; use an address of this machine, such as {HOST}"
        ) from None
    sock = socket.socket(family, kind, protocol)
    try:
        with name_address(host, port):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(address)
    except UserError:
        sock.close()
        raise
    return sock


@contextmanager
def name_address(host: str, port: int) -> Iterator[None]:
    """Raise `UserError` with the address if what is done with a socket fails."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror}; stop the other server, or use"
            " --port (0: a free port)"
        ) from None


__all__ = ["HOST", "Limits", "serve"]
