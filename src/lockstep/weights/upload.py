"""Upload a folder that `convert` or `export` wrote to Hugging Face's hub: `lockstep push`.

A push is one commit: a repository has all files of it or none, and its history keeps those before.
A large file that was uploaded by a push that was killed is not sent again.
"""

import hashlib
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from json import JSONDecodeError
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from lockstep.system.errors import CheckpointError
from lockstep.system.regular_files import WEIGHTS, read_regular
from lockstep.weights.fingerprints import hash_file
from lockstep.weights.hub import HUB, check_hub_name, explain_missing_hub

_ENDINGS = (
    *(".bin", ".data-00000-of-00001", ".index", ".json", ".md", ".onnx", ".pb", ".pbtxt"),
    *(".pdiparams", ".pdmodel", ".pt", ".pt2", ".pte", ".py", ".safetensors", ".sig", ".stablehlo"),
    *(".tflite", ".txt", ".xml", ".yaml"),
)
"""How the names of files end that `convert` and `export` write."""
_PHOTOS = ("proof", "photos")
"""The folders of a proof that have photos, too; others may be private."""
_OF_RUN = ("run.json", "log.jsonl", "checkpoints", "state.json", "momentum.safetensors")
"""Files of runs and checkpoints, which other programs cannot load."""
_EXPECTED = "expected a folder that convert --to transformers, --to timm or export wrote"
_MOST_FILES = 200
_OF_EVERY_REPOSITORY = (".gitattributes", "README.md", "LICENSE", ".gitignore")
_SECONDS = 10
"""How long a server may take to say whether it speaks Xet."""
_REASONS = {
    401: "the hub does not accept the login; log in again with hf auth login, or set HF_TOKEN",
    403: "the token may not write there; create one that may, or name an OWNER that is you",
    404: "there is no such repository, revision or service, or the token may not see it",
    412: "someone else changed the repository in the meantime; run the command again",
}


class Push(NamedTuple):
    """What a push would change: new and changed `files` by their names in the repository; the names
    of those that would be `replaced`; the newest commit, `parent`, None if the repository is new;
    and the files that `stay`, which the folder does not have."""

    name: str
    revision: str | None
    files: dict[str, Path]
    replaced: list[str]
    parent: str | None
    is_public: bool
    stay: list[str]


def list_files(folder: Path) -> dict[str, Path]:
    """Return the files of a folder to upload by their names in the repository.

    Raises `CheckpointError` for a run's folder, and for everything that `convert` and `export` do
    not write: links, hidden files, devices, and files with other endings.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; {_EXPECTED}")
    files: dict[str, Path] = {}
    left = [folder]
    while left:
        place = left.pop()
        _refuse_run(place)
        for entry in sorted(os.scandir(place), key=lambda entry: entry.name):
            path = Path(entry.path)
            is_folder = entry.is_dir(follow_symlinks=False)
            is_known = entry.name.endswith(_ENDINGS)
            if path.relative_to(folder).parts[-3:-1] == _PHOTOS:
                is_known = entry.name.endswith((".jpg", ".png"))
            is_file = is_known and entry.is_file(follow_symlinks=False)
            if entry.name.startswith(".") or not (is_folder or is_file):
                raise CheckpointError(
                    f"{path} is a link, hidden, or not a file that Lockstep writes; {_EXPECTED}"
                )
            if is_folder:
                left.append(path)
            else:
                files[path.relative_to(folder).as_posix()] = path
    if not 0 < len(files) <= _MOST_FILES:
        raise CheckpointError(
            f"{folder} has {len(files)} files; expected 1 to {_MOST_FILES} for one commit. Use the"
            f" hub's command: hf upload OWNER/NAME {shlex.quote(str(folder))}"
        )
    return files


def _refuse_run(folder: Path) -> None:
    """Raise `CheckpointError` if a folder is a run or a checkpoint, also one within a run."""
    if not any((folder / name).exists() for name in _OF_RUN):
        return
    raise CheckpointError(
        f"{folder} is a run or a checkpoint, which names folders of this machine; first write what"
        f" to share: lockstep convert {shlex.quote(str(folder))} MODEL --to transformers"
    )


def plan_push(folder: Path, target: str, *, public: bool = False) -> Push:
    """Compare a folder with the repository `hf:OWNER/NAME[@REVISION]`, and change nothing.

    Raises `CheckpointError` as `list_files` does, if the hub cannot be reached or refuses the
    login, and if the repository is public and `public` is false.
    """
    files = list_files(folder)
    if not target.startswith(HUB):
        raise CheckpointError(f"{target:.100} is not on the hub; expected hf:OWNER/NAME[@REVISION]")
    name = target.removeprefix(HUB)
    check_hub_name(name)
    repository, _, revision = name.partition("@")
    api = _open_hub()
    from huggingface_hub.errors import RepositoryNotFoundError

    with _naming_the_hub(name):
        api.whoami()
        try:
            about = api.model_info(repository, revision=revision or None)
        except RepositoryNotFoundError:
            return Push(repository, revision or None, files, [], None, public, [])
        stored = api.get_paths_info(repository, list(files), revision=revision or None)
    if not (about.private or public):
        raise CheckpointError(
            f"hf:{repository} is public: everyone could see the files; add --public to allow that"
        )
    stay = {entry.rfilename for entry in about.siblings or ()} - {*files, *_OF_EVERY_REPOSITORY}
    replaced = []
    for entry in stored:
        if _is_same(files[entry.path], entry):
            del files[entry.path]
        else:
            replaced.append(entry.path)
    seen = not about.private
    return Push(repository, revision or None, files, replaced, about.sha, seen, sorted(stay))


def carry_out(push: Push, message: str) -> str:
    """Upload the files of a push as one commit; return its address. Raises `CheckpointError` if the
    hub cannot be reached, or refuses it."""
    api = _open_hub()
    from huggingface_hub import CommitOperationAdd

    state = "nothing was changed"
    if push.parent is None:
        with _naming_the_hub(push.name):
            api.create_repo(push.name, private=not push.is_public, exist_ok=True)
        state = "the repository was created, but has no file of this push"
    with _naming_the_hub(push.name, state), _choosing_protocol(api, push):
        if push.parent is None and push.revision is not None:
            api.create_branch(push.name, branch=push.revision, exist_ok=True)
        done = api.create_commit(
            push.name,
            [CommitOperationAdd(name, str(path)) for name, path in push.files.items()],
            commit_message=message,
            revision=push.revision,
            parent_commit=push.parent,
        )
    return str(done.commit_url)


@contextmanager
def _choosing_protocol(api: Any, push: Push) -> Iterator[None]:
    """Have large files sent by plain HTTP if the hub names no storage for Xet, or that does not
    answer: the package hf_xet would repeat its requests for minutes."""
    from huggingface_hub import constants, get_session, get_token

    before = constants.HF_HUB_DISABLE_XET
    revision = quote(push.revision or "main", safe="")
    address = f"{api.endpoint}/api/models/{push.name}/xet-write-token/{revision}"
    login = {"Authorization": f"Bearer {get_token()}"}
    try:
        answer = get_session().get(address, headers=login, timeout=_SECONDS)
        get_session().get(answer.headers["X-Xet-Cas-Url"], timeout=_SECONDS)
    except Exception:  # the client's errors have no common class
        constants.HF_HUB_DISABLE_XET = True
    try:
        yield
    except Exception as error:
        if not constants.HF_HUB_DISABLE_XET:
            error.add_note("; HF_HUB_DISABLE_XET=1 uploads without Xet")
        raise
    finally:
        constants.HF_HUB_DISABLE_XET = before


def _open_hub() -> Any:
    """Return the hub's client. Raises `CheckpointError` without it, or without a login."""
    try:
        from huggingface_hub import HfApi, get_token
        from huggingface_hub.utils.tqdm import disable_progress_bars
    except ImportError:
        raise explain_missing_hub("lockstep push") from None
    if get_token() is None:
        raise CheckpointError(
            "nobody is logged in to the hub; expected a token that may write: hf auth login, or the"
            " environment variable HF_TOKEN"
        )
    if not sys.stderr.isatty():
        disable_progress_bars()
    return HfApi()


def _is_same(path: Path, entry: Any) -> bool:
    """Return whether a file has the contents of an entry of a repository: large ones are identified
    by their SHA-256, others by Git's SHA-1."""
    if entry.lfs is not None:
        return bool(hash_file(path) == entry.lfs.sha256)
    data = read_regular(path, WEIGHTS)
    blob = hashlib.sha1(b"blob %d\0%b" % (len(data), data), usedforsecurity=False)
    return bool(blob.hexdigest() == entry.blob_id)


@contextmanager
def _naming_the_hub(name: str, state: str = "nothing was changed") -> Iterator[None]:
    """Turn the errors of the hub's client, which have no common class, into one message without the
    token: the reason, the address that failed, and the state of the repository."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as error:  # of an upload, it is the cause that says why
        cause = error.__cause__ or error
        response = getattr(cause, "response", None)
        status = getattr(response, "status_code", 0)
        text = " ".join(str(cause).split()).rstrip(".")
        reason = _REASONS.get(status, f"{text:.300}")
        if isinstance(cause, JSONDecodeError):
            reason = "an answer is not JSON: HF_ENDPOINT must speak the hub's protocol"
        if response is not None:  # what follows ? may be a signature
            address = str(response.url).partition("?")[0]
            reason += f" ({address:.200} answers {status})"
        else:
            reason += "".join(getattr(error, "__notes__", ()))
        if status not in _REASONS:
            state += ": the same command tries again"
        raise CheckpointError(f"hf:{name} cannot be changed: {reason}; {state}") from None
