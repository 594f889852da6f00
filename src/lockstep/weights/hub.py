"""Remote weights by name: `torchvision/resnet50.IMAGENET1K_V2`,
`timm/resnet50.a1_in1k`, `hf:OWNER/MODEL`, `https://HOST/FILE`.

They are downloaded once, into `~/.cache/lockstep/weights` (`XDG_CACHE_HOME`), and verified each
time they are used. Files of Hugging Face's hub are in its own cache.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from lockstep.system.errors import CheckpointError, as_path
from lockstep.system.files import user_cache
from lockstep.weights.fingerprints import hash_file
from lockstep.weights.known_weights import PUBLISHERS, KnownWeights, read_known_weights

if TYPE_CHECKING:
    from lockstep.weights.downloads import Progress

HUB = "hf:"
"""How names of models on Hugging Face's hub begin."""
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
HUB_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.onnx")
_HUB_FILES = ("config.json", "preprocessor_config.json", *HUB_WEIGHTS)
"""The files of a model that are downloaded: its configuration, and the first weights there are."""
_UNSEEN = (
    "there is no such model or revision, or this login may not see it: log in with hf auth login,"
    " or set HF_TOKEN"
)
_REFUSALS = {
    401: _UNSEEN,
    403: "this login may not read it; its page on the hub says who may",
    404: _UNSEEN,
}
_DIGEST = re.compile(r"sha256=[0-9a-fA-F]{8,64}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LONGEST_NAME = 200
"""Characters of a file's name. Most file systems take 255, with what is added to a part's name."""
_unverified = set[Path]()
"""The files that this process got by an address without a digest."""


def is_remote(name: str | Path) -> bool:
    """Return whether a name is that of remote weights. A file of this name takes precedence."""
    text = str(name)
    if text.startswith((HUB, "https://", "http://")):
        return True
    return text.startswith(PUBLISHERS) and not Path(text).exists()


def fetch_weights(name: str, *, progress: "Progress | None" = None) -> Path:
    """Return the file, or the folder of files, of remote weights. They are downloaded if they are
    not in the cache.

    Raises `CheckpointError` for unknown names, for a file with another digest, and without a
    network with the address and the place where the file can be put by hand.
    """
    from lockstep.weights.downloads import check_address, download

    if name.startswith(HUB):
        return _fetch_from_hub(name.removeprefix(HUB))
    if name.startswith(PUBLISHERS):
        known = find_known_weights(name)
        path = locate_cached(known)
        download(known.address, path, sha256=known.sha256_start, progress=progress)
        return path
    address, has_fragment, fragment = name.partition("#")
    check_address(address)
    if has_fragment and not _DIGEST.fullmatch(fragment):
        raise CheckpointError(
            f"{name:.200} ends with #{fragment:.80}; expected nothing after the address, or"
            " #sha256= and the first 8 to 64 hexadecimal digits of the file's SHA-256"
        )
    file_name = urlsplit(address).path.rpartition("/")[2]
    if file_name in ("", ".", "..") or len(file_name) > _LONGEST_NAME:
        raise CheckpointError(
            f"{name:.200} does not end with the name of a file; expected https://HOST/FOLDER/FILE,"
            f" FILE with at most {_LONGEST_NAME} characters"
        )
    # Files of several addresses can have one name.
    folder = hashlib.sha256(address.encode()).hexdigest()[:16]
    path = user_cache() / "weights" / folder / file_name
    download(address, path, sha256=fragment.removeprefix("sha256="), progress=progress)
    if not fragment:
        _unverified.add(path)
    return path


@contextmanager
def removing_refused(path: Path) -> Iterator[None]:
    """Remove a file whose download had no digest to compare if its reader raises
    `CheckpointError`."""
    try:
        yield
    except CheckpointError as error:
        if path not in _unverified:
            raise
        path.unlink(missing_ok=True)
        raise CheckpointError(
            f"{error}. The file was downloaded without a digest and was removed; the same command"
            " downloads it again"
        ) from None


def locate_weights(name: str | Path) -> Path:
    """Return the path of weights, downloaded if they are remote. Raises `CheckpointError` as
    `fetch_weights` does."""
    if is_remote(name):
        return fetch_weights(str(name))
    return as_path(name, "weights")


def find_known_weights(name: str) -> KnownWeights:
    """Return known weights. Raises `CheckpointError` with similar names for unknown ones."""
    known = read_known_weights()
    if name not in known:
        raise CheckpointError(
            f"{name:.100} is neither a file nor known weights.{_suggest_known(name, known)}"
            " `lockstep weights` lists them, all ResNets; hf:OWNER/MODEL names a model on Hugging"
            " Face's hub"
        )
    return known[name]


def _suggest_known(name: str, known: Iterable[str]) -> str:
    """Return a question that names similar weights of the network that a name has; "" if there is
    no such network."""
    publisher, _, rest = name.partition("/")
    networks: dict[str, list[str]] = {}
    for other in known:
        if other.startswith(f"{publisher}/"):
            networks.setdefault(other.partition("/")[2].partition(".")[0], []).append(other)
    close = get_close_matches(rest.partition(".")[0], networks, n=1, cutoff=0.75)
    if not close:
        return ""
    own = networks[close[0]]
    similar = [other for other in own if other.startswith(name)][:3]
    similar = similar or get_close_matches(name, own, n=3, cutoff=0)
    return f" Did you mean {' or '.join(similar)}?"


def locate_cached(known: KnownWeights) -> Path:
    """Return the path of known weights in the cache, whether they are there or not."""
    return user_cache() / "weights" / known.file_name


def check_hub_name(name: str) -> None:
    """Raise `CheckpointError` if a name without `hf:` cannot be that of a model."""
    if not _HUB_NAME.fullmatch(name):
        raise CheckpointError(f"hf:{name:.100} is not a model; expected hf:OWNER/MODEL[@REVISION]")


def explain_missing_hub(what: str) -> CheckpointError:
    """Return the error for something that needs the hub's client."""
    return CheckpointError(
        f"{what} needs the package huggingface_hub, which is not installed; pip install"
        " huggingface_hub==2.4.0, or move the files by hand and name their folder"
    )


def _fetch_from_hub(name: str) -> Path:
    """Return the folder of a model of Hugging Face's hub, with its configuration and its weights,
    or the file of weights that need no other. If the hub cannot be asked, they are the cached ones,
    and a warning is logged. Raises `CheckpointError`."""
    check_hub_name(name)
    try:
        import huggingface_hub as client
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise explain_missing_hub(f"hf:{name}") from None
    repository, _, revision = name.partition("@")
    options: dict[str, Any] = {"revision": revision or None}
    refusal: Exception | None = None
    paths: list[Path] = []
    with _naming_the_hub(name):
        try:
            client.get_hf_file_metadata(client.hf_hub_url(repository, _HUB_FILES[0], **options))
        except EntryNotFoundError:
            pass
        except Exception as error:  # they have no common class
            refusal = error
        is_offline = refusal is not None
        for file in _HUB_FILES:
            try:
                path = client.hf_hub_download(
                    repository, file, local_files_only=is_offline, **options
                )
                paths.append(Path(path))
            except EntryNotFoundError as error:
                is_known = client.try_to_load_from_cache(repository, file, **options)
                if isinstance(error, LocalEntryNotFoundError) and is_known is None:
                    raise refusal or error from None
                continue
            if file in HUB_WEIGHTS:
                break
    if not any(path.name in HUB_WEIGHTS for path in paths):
        raise CheckpointError(
            f"hf:{name} has none of the files {', '.join(HUB_WEIGHTS)}; expected PyTorch weights"
            " or an ONNX export. Download the file that you want, and name it"
        )
    for path in paths:
        _check_hub_digest(path)
    if refusal is not None:
        logging.getLogger("lockstep").warning(
            f"note: the hub cannot be queried for hf:{name}, so the cached copy is used, commit"
            f" {paths[0].parent.name}: {_describe_refusal(refusal)}"
        )
    return paths[0] if len(paths) == 1 else paths[0].parent


@contextmanager
def _naming_the_hub(name: str) -> Iterator[None]:
    """Turn the errors of the hub's client, which have no common class, into one message. Its
    warnings before each retry are left out."""
    logger = logging.getLogger("huggingface_hub.utils._http")
    logger.addFilter(_is_no_retry_warning)
    try:
        yield
    except Exception as error:
        reason = _describe_refusal(error)
        if reason not in _REFUSALS.values():
            command = f"hf download {name.partition('@')[0]}"
            reason += f". To download it elsewhere: {command}; name the folder of its files"
        raise CheckpointError(f"hf:{name} cannot be downloaded: {reason}") from None
    finally:
        logger.removeFilter(_is_no_retry_warning)


def _describe_refusal(error: Exception) -> str:
    """Return why the hub's client failed, without pages and addresses of the hub."""
    cause = error.__cause__ or error
    status = getattr(getattr(cause, "response", None), "status_code", 0)
    if status:
        return _REFUSALS.get(status, f"the hub answers {status}")
    return f"{' '.join(str(cause).split()).rstrip('.'):.300}"


def _is_no_retry_warning(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    return "thrown while requesting" not in message and not message.startswith("Retrying in")


def _check_hub_digest(file: Path) -> None:
    """Raise `CheckpointError` if a large file in the hub's cache, which is named by its SHA-256, is
    damaged."""
    content = file.resolve()
    if _SHA256.fullmatch(content.name) and hash_file(content) != content.name:
        raise CheckpointError(
            f"{content} is damaged: its SHA-256 is not its name; remove it, and the same command"
            " downloads it again"
        )
