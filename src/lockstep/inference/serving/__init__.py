"""`lockstep serve`: an HTTP server for one model, with dynamic batching.

It speaks the Open Inference Protocol, so that Triton's clients work, takes images at `/predict`,
and has a page. This module needs none of the packages of the extra `serve`; the modules that
`serve` imports do.
"""

import importlib
import socket
from collections.abc import Iterable

from lockstep.backends import Framework
from lockstep.inference.serving.access import make_access
from lockstep.inference.serving.limits import Limits
from lockstep.inference.serving.model import Source
from lockstep.recipes import Execution
from lockstep.runs.events import Listener
from lockstep.system.errors import BackendError, UserError
from lockstep.weights import AnySource, Classes, Preprocessing, choose

HOST = "127.0.0.1"
PORT = 8000
PACKAGES = ("starlette", "uvicorn", "prometheus-client", "python-multipart")
INSTALL = (
    "pip install starlette==1.10.0 uvicorn==0.54.0 prometheus-client==0.26.0"
    " python-multipart==0.0.34"
)
_MOST_PORT = 65535


def serve(
    source: AnySource,
    *,
    host: str = HOST,
    port: int = PORT,
    token: str | None = None,
    no_token: bool = False,
    allow_hosts: Iterable[str] = (),
    name: str | None = None,
    limits: Limits | None = None,
    quiet: bool = False,
    checkpoint: str | None = None,
    ema: bool | None = None,
    model: str | None = None,
    classes: Classes | None = None,
    unknown_below: float | None = None,
    precision: str | None = None,
    runtime: str | None = None,
    execution: Execution | None = None,
    preprocessing: Preprocessing | None = None,
    listener: Listener | None = None,
) -> None:
    """Serve weights or an exported model over HTTP, until SIGTERM or Ctrl-C (docs/how-to/serve.md).

    It listens on the loopback interface, unless `host` is another address. There a `token` of at
    least 16 characters is needed, which clients send as `Authorization: Bearer TOKEN`, or
    `no_token`. `port` 0 takes a free port. On loopback, the Host header of requests must be a
    name of this machine; `allow_hosts` adds names, such as that of a proxy. `name` is that of the
    model in addresses; by default that of its architecture. `limits` are sizes and times. `quiet`
    leaves requests that succeed out of the log on standard error: words on a terminal, elsewhere
    lines of JSON. The other arguments are those of `lockstep.predict`; without a `listener`, notes
    go to the log.

    Returns when all accepted requests are answered. A second signal ends the process at
    once. Call it in the main thread, which is the one that gets signals.

    Raises `UserError` if the address is in use or the token is missing, `BackendError` if a package
    of the extra `serve` is missing, and what `lockstep.predict` raises.
    """
    missing = [package for package in PACKAGES if not Framework((package,), INSTALL).version()]
    if missing:
        raise BackendError(f"serving needs {', '.join(missing)}: {INSTALL}")
    if not 0 <= port <= _MOST_PORT:
        raise UserError(f"port is {port}; expected 0 to {_MOST_PORT}")
    if name is not None and (not name or "/" in name):
        raise UserError(f"the model's name is {name!r}; expected a name without slashes")
    choice = choose(source, checkpoint, ema, model, preprocessing)
    served = Source(choice, classes, precision, runtime, execution, unknown_below)
    with bind_socket(host, port) as sock:
        address = str(sock.getsockname()[0])
        access = make_access(host, address, token, no_token=no_token, hosts=allow_hosts)
        server = importlib.import_module(f"{__name__}.server")
        server.run(
            served, sock, access, limits or Limits(), name=name, listener=listener, quiet=quiet
        )


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
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise UserError(
            f"cannot listen on {host} port {port}: {error.strerror}; stop the other server, or use"
            " --port (0: a free port)"
        ) from None
    return sock


__all__ = ["HOST", "PORT", "Limits", "serve"]
