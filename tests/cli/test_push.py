"""`lockstep push` to a hub on this machine, by the hub's own client."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

import lockstep
from lockstep.system.errors import CheckpointError
from lockstep.weights import upload
from lockstep.weights.formats import transformers_folder
from tests.cli.conftest import Answer
from tests.weights.file_server import Hub, serve_account
from tests.weights.small_models import plain_state, recipe_of, use_narrow_models

NAME = "hf:owner/model"
Run = Callable[..., Answer]
# The hub's client calls its HTTP library so.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub whose account is logged in."""
    constants = pytest.importorskip("huggingface_hub.constants")
    with serve_account() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        resolved = hub.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", resolved)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.setenv("HF_TOKEN", hub.token)
        yield hub


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    use_narrow_models(monkeypatch)
    state = plain_state(recipe_of())
    transformers_folder.write(tmp_path / "model", recipe_of(), state, tuple("abcde"))
    return tmp_path / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_folder_is_pushed_and_loaded(hub: Hub, folder: Path, answer: Run) -> None:
    code, output, errors = answer("push", folder, NAME, "--message", "the first")
    assert (code, hub.files, hub.is_private) == (0, contents(folder), True), errors
    assert "hf:owner/model (private, a new repository)" in output
    assert "adds model.safetensors" in output
    assert hub.token not in output + errors
    assert [commit["summary"] for commit in hub.commits] == ["the first"]
    pushed = lockstep.load(NAME)
    here = lockstep.load(folder)
    assert pushed.classes == here.classes == tuple("abcde")
    for name, value in here.module().state_dict().items():
        assert np.array_equal(value, pushed.module().state_dict()[name]), name
    assert "nothing is uploaded" in answer("push", folder, NAME)[1]
    assert len(hub.commits) == 1


def test_an_export_and_the_cache_are_read(
    hub: Hub, folder: Path, answer: Run, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Without the hub, or with a wrong login, the copy in the cache is named."""
    pytest.importorskip("onnx")
    export = tmp_path / "an export"
    lockstep.load(folder).export(export, to="onnx", compare=False)
    assert answer("push", export, NAME)[0] == 0
    photo = np.full((32, 32, 3), 99, np.uint8)
    expected = lockstep.load(export).predict(photo)
    assert lockstep.load(NAME).predict(photo) == expected
    hub.refused = {"/owner/model/": 401}
    assert lockstep.load(NAME).predict(photo) == expected
    (message,) = [record.message for record in caplog.records if record.name == "lockstep"]
    assert f"the cached copy is used, commit {'a' * 40}: there is no such" in message
    with pytest.raises(CheckpointError, match=r"downloaded: there is no such .* hf auth login"):
        lockstep.load("hf:owner/model@other")
    hub.refused = {}
    (export / "model.onnx").rename(export / "other.onnx")
    assert "folder has none: download" in answer("push", export, NAME, "--dry-run")[1]


def test_other_contents_are_replaced_on_request_only(hub: Hub, folder: Path, answer: Run) -> None:
    hub.files = {"README.md": b"mine", "config.json": b"{}", "model.bin": b"other"}
    hub.is_private = True
    code, output, errors = answer("push", folder, NAME, "--public")
    assert (code, hub.commits) == (2, [])
    assert "replaces config.json" in output
    assert "note: the repository stays private" in output
    assert "note: the repository keeps model.bin, which" in output
    assert "has 1 of these files with other contents. Nothing is uploaded; --replace" in errors
    assert answer("push", folder, NAME, "--replace", "--dry-run")[0] == 0
    assert hub.commits == []
    assert answer("push", folder, NAME, "--replace")[0] == 0
    assert hub.files == contents(folder) | {"README.md": b"mine", "model.bin": b"other"}


def test_a_card_is_pushed_and_your_own_one_is_kept(
    hub: Hub, folder: Path, answer: Run, tmp_path: Path
) -> None:
    target = tmp_path / "with a card"
    lockstep.load(folder).save(target, to="timm", certificate=False)
    hub.files = {"README.md": b"mine"}
    hub.is_private = True
    code, output, _ = answer("push", target, NAME)
    assert (code, hub.files) == (2, {"README.md": b"mine"})
    assert "replaces README.md" in output
    hub.files = None
    assert answer("push", target, NAME)[0] == 0
    assert hub.files == contents(target)
    loaded = pytest.importorskip("huggingface_hub").ModelCard.load("owner/model")
    assert loaded.data.library_name == "timm"
    (target / "README.md").write_text("no card")
    code, _, errors = answer("push", target, NAME, "--replace")
    assert (code, len(hub.commits)) == (2, 1)
    assert "it is no YAML" in errors


def test_nothing_becomes_public_by_default(hub: Hub, folder: Path, answer: Run) -> None:
    hub.files = {}
    code, _, errors = answer("push", folder, NAME)
    assert (code, hub.files) == (2, {})
    assert "hf:owner/model is public: everyone could see the files; add --public" in errors
    hub.files = None
    assert answer("push", folder, NAME, "--public")[0] == 0
    assert not hub.is_private


@pytest.mark.parametrize(
    ("part", "status", "message"),
    [
        ("whoami", 401, "does not accept the login; log in again with hf auth login"),
        ("repos/create", 403, "the token may not write there"),
        ("/commit/", 412, "someone else changed the repository in the meantime"),
        ("/commit/", 400, "the repository was created, but has no file of this push: the same"),
        ("whoami", 500, "answers 500); nothing was changed: the same command tries again"),
        ("validate-yaml", 404, "/api/validate-yaml answers 404); the repository was created"),
    ],
)
def test_what_the_hub_refuses_is_explained(
    part: str, status: int, message: str, hub: Hub, folder: Path, answer: Run
) -> None:
    hub.refused = {part: status}
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    code, output, errors = answer("push", folder, NAME)
    assert (code, hub.files or {}) == (2, {})
    assert message in errors
    assert hub.token not in output + errors


def test_a_storage_that_refuses_is_explained(hub: Hub, folder: Path, answer: Run) -> None:
    pytest.importorskip("hf_xet")
    hub.storage = hub.address + "/storage"
    code, _, errors = answer("push", folder, NAME)
    assert (code, hub.uploads, hub.files) == (2, 0, {})
    assert "HF_HUB_DISABLE_XET=1 uploads without Xet; the repository was created" in errors


def test_an_interrupted_push_continues_without_xet_if_its_storage_does_not_answer(
    hub: Hub, folder: Path, answer: Run
) -> None:
    hub.storage = "http://127.0.0.1:9"
    hub.refused = {"/commit/": 400}
    assert answer("push", folder, NAME)[0] == 2
    assert (hub.uploads, hub.files) == (1, {})
    hub.refused = {}
    assert answer("push", folder, NAME)[0] == 0
    assert (hub.uploads, hub.files) == (1, contents(folder))


def test_without_login_or_network_there_is_one_message(
    hub: Hub, folder: Path, answer: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    _, _, errors = answer("push", folder, NAME)
    assert "hf:owner/model cannot be changed: [Errno 111] Connection refused" in errors
    monkeypatch.delenv("HF_TOKEN")
    _, _, errors = answer("push", folder, NAME)
    assert "nobody is logged in to the hub" in errors
    assert errors.count("\n") == 1


SPOILS: dict[str, Callable[[Path], object]] = {
    "a link": lambda folder: (folder / "b.json").symlink_to("/etc/passwd"),
    "a linked folder": lambda folder: (folder / "b").symlink_to("/etc"),
    "hidden": lambda folder: (folder / ".env").write_text("SECRET=1"),
    "a hidden folder": lambda folder: (folder / ".git").mkdir(),
    "of another kind": lambda folder: (folder / "id_rsa").write_text(""),
    "a run": lambda folder: (folder / "run.json").write_text("{}"),
    "a checkpoint": lambda folder: (folder / "state.json").write_text("{}"),
    "a run in it": lambda folder: (folder / "1" / "log.jsonl").write_text(""),
    "empty": lambda folder: list(map(Path.unlink, folder.iterdir())),
}


@pytest.mark.parametrize("spoil", SPOILS)
def test_what_lockstep_does_not_write_is_not_pushed(spoil: str, tmp_path: Path) -> None:
    save_file({"a": np.zeros(1)}, tmp_path / "model.safetensors")
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "model.onnx").write_text("")
    (tmp_path / "config.json").write_text(json.dumps({}))
    assert list(upload.list_files(tmp_path)) == ["config.json", "model.safetensors", "1/model.onnx"]
    if spoil == "empty":
        (tmp_path / "1" / "model.onnx").unlink()
        (tmp_path / "1").rmdir()
    SPOILS[spoil](tmp_path)
    with pytest.raises(
        CheckpointError, match=r"not a file that Lockstep writes|is a run|has 0 files.*hf upload"
    ):
        upload.list_files(tmp_path)


@pytest.mark.parametrize("name", ["owner/model", "hf:model", "hf:owner/model/more", "hf:a/b@"])
def test_other_names_are_refused(name: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected hf:OWNER/(NAME|MODEL)\[@REVISION\]"):
        upload.plan_push(folder, name)
