"""The command line of the server: what it refuses before it listens."""

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lockstep.backends import Framework
from lockstep.inference.serving import INSTALL
from lockstep.inference.serving.access import Access, make_access

Run = Callable[..., tuple[int, str, str]]
LONG = "0123456789-0123456789"


def test_another_address_is_refused_without_a_token(
    answer: Run, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("LOCKSTEP_SERVE_TOKEN", raising=False)
    code, output, errors = answer("serve", run_folder, "--host", "0.0.0.0", "--port", 0)
    assert (code, output) == (2, "")
    assert "everyone who reaches 0.0.0.0" in errors
    assert "--no-token" in errors


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"short\n", "the token has 5 characters"),
        (b"", "the token has 0 characters"),
        (b"\xff" * 30, "it is not ASCII"),
        (None, "cannot be read: No such file or directory"),
    ],
)
def test_a_token_file_must_hold_a_token(
    answer: Run, run_folder: Path, tmp_path: Path, content: bytes | None, message: str
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    code, _, errors = answer("serve", run_folder, "--port", 0, "--token-file", tmp_path / "token")
    assert code == 2
    assert message in errors


def test_a_token_from_a_pipe_is_refused(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "token")
    code, _, errors = answer("serve", run_folder, "--port", 0, "--token-file", tmp_path / "token")
    assert code == 2
    assert "a pipe" in errors
    assert "regular file" in errors
    assert "LOCKSTEP_SERVE_TOKEN" in errors


@pytest.mark.parametrize("begins", ["before", "while the model opens"])
def test_a_port_in_use_is_named(
    answer: Run, run_folder: Path, begins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]

        def listen_late(*args: Any, **options: Any) -> Access:
            other.listen()
            return make_access(*args, **options)

        if begins == "before":
            other.listen()
        else:
            monkeypatch.setattr("lockstep.inference.serving.make_access", listen_late)
        code, printed, errors = answer("serve", run_folder, "--port", port)
    assert (code, printed) == (2, "")
    assert errors.startswith(
        f"lockstep: cannot listen on 127.0.0.1 port {port}: Address already in use; "
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "no.such.host.invalid"], "there is no address 'no.such.host.invalid'"),
        (["--host", "192.0.2.1"], "cannot listen on 192.0.2.1"),
        (["--port", 70000], "port is 70000; expected 0 to 65535"),
        (["--name", "a/b"], "a name without slashes"),
        (["--max-batch", 64, "--max-queue", 32], "max_queue is 32, but a batch has 64"),
        (["--runtime", "onnxrun"], "Did you mean onnxruntime?"),
        (["--set", "epochs=3"], "epochs cannot be set for trained weights"),
        (["--set", "eval_crop=99"], "eval_crop (99) must fit into eval_resize (36)"),
        (
            ["--recipe", "resnet50-mxnet-90ep", "--set", "eval_crop=300"],
            "eval_crop (300) must fit into eval_resize (256)",
        ),
    ],
)
def test_wrong_options_are_named(
    answer: Run, run_folder: Path, options: list[object], message: str
) -> None:
    code, _, errors = answer("serve", run_folder, "--port", 0, *options)
    assert code == 2
    assert message in errors


def test_missing_weights_and_launchers_are_named(
    answer: Run, run_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, errors = answer("serve", tmp_path / "none", "--port", 0)
    assert (code, "none" in errors) == (2, True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    code, _, errors = answer("serve", run_folder, "--port", 0)
    assert (code, "start it without one" in errors) == (2, True)


def test_a_missing_package_is_named_with_what_to_type(
    answer: Run, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Framework, "version", lambda self: None if self.distributions == ("uvicorn",) else "1"
    )
    code, _, errors = answer("serve", run_folder, "--port", 0)
    assert (code, errors) == (2, f"lockstep: serving needs uvicorn: {INSTALL}\n")
