"""A real nginx in front of the server, and Chromium that uploads images through it: `make proxy`.

The names of the pages lead to this machine in this browser only. They are no names of loopback, so
Chromium treats their pages over plain HTTP as those of another machine.
"""

import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from PIL import Image

from tests.browsers import chromium, needs_browser
from tests.inference.serving.cases import ENGINE, Server, noise, serving
from tests.processes import wait_until
from tests.soak import in_a_soak

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.slow, needs_browser, in_a_soak]
PAGE = Path(__file__).parents[3] / "docs/how-to/serve.md"
NAME = "photos.example"
EVIL = "evil.example"
RENAMED = "renamed.example"
"""A name that leads to the proxy, which answers to every name."""
NGINX = """
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log {folder}/error.log;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {servers}
}}
"""
PLAIN = """
server {
    listen 127.0.0.1:PORT;
    server_name photos.example;
    location / { proxy_pass http://127.0.0.1:8000; }
}
"""
"""As nginx's manual shows it. It also answers to every other name."""
TLS_LINE = "PORT ssl; ssl_certificate CERTIFICATE; ssl_certificate_key KEY;"
TLS = PLAIN.replace("PORT;", TLS_LINE)
SUB_PATH = PLAIN.replace("location / ", "location /photos/ ").replace("8000;", "8000/;")
OTHERS = """
server {
    listen 127.0.0.1:PORT;
    server_name evil.example;
    location / { default_type text/html; return 200 "<p>another server"; }
}
"""
POST = """(address) => fetch(address, { method: "POST", body: "x", mode: "no-cors" })
  .catch(() => "refused")"""


class Proxy(NamedTuple):
    port: int
    folder: Path


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    rules = ",".join(f"MAP {name} 127.0.0.1" for name in (NAME, EVIL, RENAMED))
    with chromium(f"--host-resolver-rules={rules}") as playwright_browser:
        yield playwright_browser


@pytest.fixture(scope="module")
def allowing(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that knows the proxy's name."""
    log = tmp_path_factory.mktemp("log") / "log"
    with serving(weights, log, "--runtime", ENGINE, "--allow-host", NAME) as server:
        yield server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a self-signed certificate, and its key."""
    folder = tmp_path_factory.mktemp("certificate")
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -keyout key -out certificate"
    subprocess.run(
        [*command.split(), "-subj", f"/CN={NAME}"], cwd=folder, check=True, capture_output=True
    )
    return folder


@contextmanager
def proxy(text: str, server: Server, certificate: Path, folder: Path) -> Iterator[Proxy]:
    """Start nginx with servers of a configuration for port 8000 of this machine."""
    program = shutil.which("nginx", path="/usr/sbin:/usr/bin:/usr/local/sbin:/usr/local/bin")
    assert program is not None, "there is no nginx: make nginx"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for name, value in {
        "PORT": str(port),
        "CERTIFICATE": f"{certificate}/certificate",
        "KEY": f"{certificate}/key",
        ":8000": f":{server.port}",
    }.items():
        text = text.replace(name, value)
    user = "user root;" if Path("/proc/self").stat().st_uid == 0 else ""
    (folder / "conf").write_text(NGINX.format(folder=folder, servers=text, user=user))
    command = [program, "-p", folder, "-e", folder / "error.log", "-c", folder / "conf"]
    with subprocess.Popen(command) as process:
        try:
            wait_until(lambda: process.poll() is not None or is_open(port))
            assert process.poll() is None, (folder / "error.log").read_text()
            yield Proxy(port, folder)
        finally:
            process.terminate()


def is_open(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port)).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.fixture
def show(browser: Any) -> Iterator[Callable[[str], "Page"]]:
    """A function that opens an address, whoever signed its certificate."""
    contexts = []

    def open_page(address: str) -> "Page":
        contexts.append(browser.new_context(ignore_https_errors=True))
        page: Page = contexts[-1].new_page()
        page.set_default_timeout(60_000)
        page.goto(address)
        return page

    yield open_page
    for context in contexts:
        context.close()


def upload(page: "Page", photo: Path) -> tuple[list[str], list[str]]:
    """Return the classes and the errors that the page shows for an image."""
    page.locator("#about", has_text=ENGINE).wait_for()
    page.locator("#files").set_input_files(photo)
    page.locator("#results > li").wait_for()
    card = page.locator("#results > li")
    return card.locator(".name").all_text_contents(), card.locator(".bad").all_text_contents()


def large_photo(folder: Path) -> Path:
    """Write an image of more bytes than nginx passes on by default."""
    path = folder / "large.png"
    Image.fromarray(noise(1, 800)[0]).save(path)
    assert path.stat().st_size > 2**20
    return path


@pytest.fixture
def expected(server: Server, photos: list[Path]) -> list[str]:
    """What the server answers without a proxy."""
    names: list[str] = server.post("/predict", photos[0].read_bytes()).json()["names"]
    return names


@pytest.mark.parametrize(
    ("text", "address"),
    [
        (PLAIN, f"http://{NAME}:PORT/"),
        (SUB_PATH, f"http://{NAME}:PORT/photos/"),
        (SUB_PATH, f"http://{NAME}:PORT/photos"),
        (PLAIN.replace("; }", "; proxy_set_header Host $http_host; }"), f"http://{NAME}:PORT/"),
        (PLAIN.replace("; }", "; proxy_set_header Host $host; }"), f"http://{NAME}:PORT/"),
        (TLS, f"https://{NAME}:PORT/"),
    ],
)
def test_images_are_uploaded_through_a_proxy_whose_name_is_allowed(
    show: Callable[[str], "Page"],
    allowing: Server,
    photos: list[Path],
    expected: list[str],
    certificate: Path,
    tmp_path: Path,
    text: str,
    address: str,
) -> None:
    with proxy(text, allowing, certificate, tmp_path) as nginx:
        page = show(address.replace("PORT", str(nginx.port)))
        assert upload(page, photos[0]) == (expected, [])


@pytest.mark.parametrize("path", ["/", "/photos/"])
@pytest.mark.parametrize("name", [NAME, "localhost"])
def test_a_proxy_with_tls_needs_no_setting(
    show: Callable[[str], "Page"],
    server: Server,
    photos: list[Path],
    expected: list[str],
    certificate: Path,
    tmp_path: Path,
    path: str,
    name: str,
) -> None:
    text = TLS if path == "/" else TLS.replace("location / ", "location /photos/ ")
    if path != "/":
        text = text.replace("8000;", "8000/;")
    with proxy(text, server, certificate, tmp_path) as nginx:
        page = show(f"https://{name}:{nginx.port}{path}")
        assert upload(page, photos[0]) == (expected, [])


def test_a_proxy_on_this_machine_needs_no_setting(
    show: Callable[[str], "Page"],
    server: Server,
    photos: list[Path],
    expected: list[str],
    certificate: Path,
    tmp_path: Path,
) -> None:
    with proxy(PLAIN, server, certificate, tmp_path) as nginx:
        page = show(f"http://localhost:{nginx.port}/")
        assert upload(page, photos[0]) == (expected, [])


def test_a_proxy_without_tls_is_told_what_to_set(
    show: Callable[[str], "Page"],
    server: Server,
    photos: list[Path],
    certificate: Path,
    tmp_path: Path,
) -> None:
    with proxy(PLAIN, server, certificate, tmp_path) as nginx:
        classes, [error] = upload(show(f"http://{NAME}:{nginx.port}/"), photos[0])
    assert classes == []
    for words in (f"http://{NAME}:{nginx.port}", "--allow-host", "proxy_set_header Host"):
        assert words in error


def test_the_configuration_of_the_manual_takes_large_photos_over_tls_below_a_path(
    show: Callable[[str], "Page"], allowing: Server, certificate: Path, tmp_path: Path
) -> None:
    [text] = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(), re.DOTALL)
    text = re.sub(r"(ssl_certificate +)\S+;", r"\1CERTIFICATE;", text)
    text = re.sub(r"(ssl_certificate_key +)\S+;", r"\1KEY;", text)
    text = text.replace("listen 443", "listen 127.0.0.1:PORT")
    photo = large_photo(tmp_path)
    with proxy(text, allowing, certificate, tmp_path) as nginx:
        classes, errors = upload(show(f"https://{NAME}:{nginx.port}/photos/"), photo)
        with pytest.raises(Exception, match="ERR_SSL"):
            show(f"https://{EVIL}:{nginx.port}/photos/")
    assert (len(classes), errors) == (5, [])


def test_a_limit_of_the_proxy_is_named(
    show: Callable[[str], "Page"], allowing: Server, certificate: Path, tmp_path: Path
) -> None:
    photo = large_photo(tmp_path)
    with proxy(PLAIN, allowing, certificate, tmp_path) as nginx:
        classes, [error] = upload(show(f"http://{NAME}:{nginx.port}/"), photo)
    assert classes == []
    assert "with status 413, comes from a proxy and not from this server" in error
    assert "client_max_body_size" in error


@pytest.mark.parametrize("text", [PLAIN, TLS])
def test_pages_of_others_are_refused_through_the_proxy_too(
    show: Callable[[str], "Page"],
    allowing: Server,
    photos: list[Path],
    certificate: Path,
    tmp_path: Path,
    text: str,
) -> None:
    """Also the server's own page under another name: DNS rebinding to the proxy."""
    scheme = "http" if text == PLAIN else "https"
    others = OTHERS if text == PLAIN else OTHERS.replace("PORT;", TLS_LINE)
    with proxy(text + others, allowing, certificate, tmp_path) as nginx:
        page = show(f"{scheme}://{EVIL}:{nginx.port}/")
        assert page.locator("p").inner_text() == "another server"
        for address in (f"{scheme}://{NAME}:{nginx.port}/predict", f"{allowing.url}/predict"):
            statuses = list_statuses(allowing)
            page.evaluate(POST, address)
            wait_until(partial(has_more, allowing, len(statuses)))
            assert list_statuses(allowing) == [*statuses, 403]
        if text == PLAIN:
            _, [error] = upload(show(f"http://{RENAMED}:{nginx.port}/"), photos[0])
            assert error.startswith("the request comes from a page of another origin")


def has_more(server: Server, count: int) -> bool:
    return len(list_statuses(server)) > count


def list_statuses(server: Server) -> list[int]:
    return [event["status"] for event in server.events() if event.get("path") == "/predict"]
