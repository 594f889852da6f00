"""Sign weights, and verify signatures, in the format of OpenSSF Model Signing.

A signature is a Sigstore bundle in JSON: a DSSE envelope around an in-toto statement, which has the
digest of every file (`https://github.com/sigstore/model-transparency`). A key or a certificate
signs it; keyless signatures are refused. What a signature says is believed once it is verified.
"""

import getpass
import hashlib
import importlib
import os
import stat
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.system import regular_files
from lockstep.system.errors import BackendError, CheckpointError, as_path
from lockstep.system.files import appearing
from lockstep.system.strict_json import is_list_of, is_positive, is_text, parsed, to_json
from lockstep.system.text import list_first
from lockstep.weights.preprocessing import CERTIFICATE

INSTALL = "pip install cryptography==50.0.2"
PASSWORD = "LOCKSTEP_SIGN_PASSWORD"
"""Environment variable with the password of an encrypted private key."""
AnyPath = str | Path
_PREDICATE = "https://model_signing/signature/v1.0"
_FIRST_PREDICATE = "https://model_signing/Digests/v0.1"
"""That of version 0.2 of the package model-signing, whose signatures are still in use."""
_PAYLOAD = "application/vnd.in-toto+json"
_ENVELOPE = {"payload": str, "payloadType": _PAYLOAD, "signatures": [{"sig": str}]}
_BUNDLE = {
    "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
    "verificationMaterial": dict,
    "dsseEnvelope": _ENVELOPE,
}
_STATEMENT = {"_type": "https://in-toto.io/Statement/v1", "subject": list, "predicate": dict}
_SUBJECT = {"name": str, "digest": {"sha256": str}}
_RESOURCE = {"name": str, "algorithm": str, "digest": str}
_WHOLE_FILES = {"method": "files", "hash_type": "sha256", "allow_symlinks": False}
_METHOD = {"method": str, "hash_type": str}
_HASHES: dict[str, Any] = {"sha256": hashlib.sha256, "blake2b": hashlib.blake2b}
_PART = 2**20
_GIT_PATHS = [".git", ".gitattributes", ".github", ".gitignore"]
"""The format leaves these out of its manifest."""
_CURVES = {"secp256r1": "SHA256", "secp384r1": "SHA384", "secp521r1": "SHA512"}
"""The curves of keys, each with its hash."""


def sign(
    path: AnyPath,
    key: AnyPath,
    *,
    certificate_chain: AnyPath | None = None,
    signature: AnyPath | None = None,
) -> list[str]:
    """Sign a folder or a file in the format of OpenSSF Model Signing.

    Args:
        path: What `convert` or `export` wrote. All files of a folder are covered, except Git's. The
            certificate of a conversion, `PATH.certificate.json`, gets its own signature.
        key: A private key that only you can read: PEM, ECDSA on P-256, P-384 or P-521. The password
            of an encrypted key comes from `LOCKSTEP_SIGN_PASSWORD`, or you are asked for it.
        certificate_chain: The X.509 certificate of the key, and those between it and the root, PEM.
        signature: A new file; by default `model.sig` in the folder, or `FILE.sig`.

    Returns:
        The paths of the new signatures.

    Raises:
        CheckpointError: The key, a certificate or a file cannot be used, or a signature exists.
        BackendError: `cryptography` is not installed.

    >>> import lockstep
    >>> lockstep.sign("run", "key.pem")
    ['run/model.sig']
    """
    path = as_path(path, "weights")
    private = _read_private_key(Path(key))
    signer: dict[str, Any] = {"publicKey": {"hint": _hash_key(private.public_key())}}
    if certificate_chain is not None:
        with _naming(Path(certificate_chain)):
            chain = _read_pem(Path(certificate_chain))
            if not isinstance(chain, list) or chain[0].public_key() != private.public_key():
                raise ValueError(f"it does not begin with the certificate of {key}")
            _check_usage(chain[0])
        der = _load("hazmat.primitives.serialization").Encoding.DER
        rows = [{"rawBytes": b64encode(one.public_bytes(der)).decode()} for one in chain]
        signer = {"x509CertificateChain": {"certificates": rows}}
    written = []
    for target in [path] if signature else _list_targets(path):
        place = Path(signature or _find_signature(target))
        _sign(target, private, signer, place)
        written.append(str(place))
    return written


def verify_signature(
    path: AnyPath, key: AnyPath, *, signature: AnyPath | None = None
) -> dict[str, Any]:
    """Verify a signature of OpenSSF Model Signing, and every file that it covers.

    Args:
        path: A folder or a file.
        key: The public key of the signer, or trusted X.509 certificates, PEM. They must be
            valid at the start of the signer's certificate's validity period, because a signature
            carries no trusted timestamp.
        signature: The signature; by default `model.sig` in the folder, or `FILE.sig`.

    Returns:
        The `signer`, and the `files` by name; "." stands for a path that is a file.

    Raises:
        CheckpointError: The signature is not valid, or a file differs, is missing or was added.
        BackendError: `cryptography` is not installed.

    >>> import lockstep
    >>> signatures = lockstep.sign("tiny.yaml", "key.pem")
    >>> lockstep.verify_signature("tiny.yaml", "key.pub")["files"]
    ['.']
    """
    path = as_path(path, "weights")
    return _verify(path, Path(key), Path(signature or _find_signature(path)))


def copy_verified(path: Path, key: AnyPath, folder: Path) -> Path:
    """Copy a signed path into a private folder while it is verified; return the copy.

    Nothing that is not signed is copied. The certificate of a conversion, which has preprocessing,
    must be signed, too. Raises errors as `verify_signature` does.
    """
    for target in _list_targets(path):
        _verify(target, Path(key), _find_signature(target), folder / target.resolve().name)
    return folder / path.resolve().name


def _find_signature(path: Path) -> Path:
    """Return the usual place of the signature of a folder or a file."""
    return path / "model.sig" if path.is_dir() else path.with_name(f"{path.name}.sig")


def _list_targets(path: Path) -> list[Path]:
    """Return what is signed for a path: itself, and the certificate of its conversion."""
    certificate = path.resolve().parent / f"{path.resolve().name}{CERTIFICATE}"
    return [path, certificate] if certificate.is_file() else [path]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turn what is wrong with a file into a `CheckpointError` that names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path!s:.300} cannot be used: {reason!s:.400}") from None


def _load(module: str) -> Any:
    try:
        return importlib.import_module(f"cryptography.{module}")
    except ImportError:
        raise BackendError(f"signatures need cryptography: {INSTALL}") from None


def _read_private_key(path: Path) -> Any:
    with _naming(path):
        descriptor, status = regular_files.open_descriptor(path, regular_files.SETTINGS)
        with os.fdopen(descriptor, "rb") as file:
            if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
                raise ValueError("it must belong to you and be readable only by you: chmod 600")
            data = file.read()
        password = os.environ.get(PASSWORD)
        if b"ENCRYPTED" not in data:
            password = None
        elif password is None and sys.stdin.isatty():
            password = getpass.getpass(f"Password of {path}: ")
        elif password is None:
            raise ValueError(f"it is encrypted; set {PASSWORD}, or use a terminal")
        load = _load("hazmat.primitives.serialization").load_pem_private_key
        try:
            key = load(data, password and password.encode())
        except Exception:  # its message could quote the file
            raise ValueError("it is not a PEM private key, or the password is wrong") from None
        _find_hash(key.public_key())
        return key


def _read_pem(path: Path) -> Any:
    """Return the public key, or the list of certificates, that a file holds."""
    serialization = _load("hazmat.primitives.serialization")
    with _naming(path):
        data = regular_files.read_regular(path, regular_files.TEXT)
        if b"PRIVATE KEY" in data:
            raise ValueError("it is private; make the public one: openssl ec -in KEY -pubout")
        try:
            if b"BEGIN CERTIFICATE" in data:
                return _load("x509").load_pem_x509_certificates(data)
            key = serialization.load_pem_public_key(data)
        except Exception:
            raise ValueError("it is neither a public key nor certificates in PEM") from None
        _find_hash(key)
        return key


def _find_hash(key: Any) -> Any:
    """Return the hash that belongs to a public key. Raises `ValueError` for other kinds of keys."""
    curve = getattr(getattr(key, "curve", None), "name", type(key).__name__)
    if curve not in _CURVES:
        raise ValueError(
            f"its key is {curve}; expected ECDSA on P-256, P-384 or P-521: openssl"
            " ecparam -name prime256v1 -genkey -noout -out KEY"
        )
    return getattr(_load("hazmat.primitives.hashes"), _CURVES[curve])()


def _hash_key(key: Any) -> str:
    """Return what signatures call a public key: the SHA-256 of its PEM."""
    forms = _load("hazmat.primitives.serialization")
    pem = key.public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
    return hashlib.sha256(pem).hexdigest()


def _check_usage(certificate: Any) -> None:
    """Raise `ValueError` if a certificate is not for signing code, or says nothing about it."""
    x509 = _load("x509")
    answers = []
    for extension in certificate.extensions:
        if isinstance(extension.value, x509.KeyUsage):
            answers.append(extension.value.digital_signature)
        elif isinstance(extension.value, x509.ExtendedKeyUsage):
            answers.append(x509.oid.ExtendedKeyUsageOID.CODE_SIGNING in extension.value)
    if not (answers and all(answers)):
        raise ValueError("the signer's certificate is not for signing code")


def _check_chain(chain: list[Any], trusted: list[Any]) -> None:
    """Raise an error if certificates, the signer's first, lead to no root that is trusted."""
    x509 = _load("x509")
    rules = _load("x509.verification")

    def check_issuer(_: Any, __: Any, value: Any) -> None:
        if not getattr(value, "ca", True) or not getattr(value, "key_cert_sign", True):
            raise ValueError("an issuer's certificate does not allow issuing certificates")

    _check_usage(chain[0])
    roots = [one for one in trusted if one.issuer == one.subject]
    if chain[0] in roots:
        return
    anything = rules.ExtensionPolicy.permit_all()
    either = rules.Criticality.AGNOSTIC
    issuers = anything.require_present(x509.BasicConstraints, either, check_issuer)
    issuers = issuers.may_be_present(x509.KeyUsage, either, check_issuer)
    policy = rules.PolicyBuilder().store(rules.Store(roots))
    policy = policy.extension_policies(ee_policy=anything, ca_policy=issuers)
    policy = policy.time(chain[0].not_valid_before_utc)
    policy.build_client_verifier().verify(chain[0], [*chain[1:], *trusted])


def _sign(path: Path, private: Any, signer: dict[str, Any], signature: Path) -> None:
    """Write the signature of one path."""
    ignored = [*_find_inside(path, signature), *_GIT_PATHS]
    method: dict[str, Any] = _WHOLE_FILES | ({"ignore_paths": ignored} if path.is_dir() else {})
    resources = []
    for name, file in _list_files(path, ignored).items():
        digest = _hash_file(file, name, method, None)[name]
        resources.append({"name": name, "algorithm": "sha256", "digest": digest})
    if not resources:
        raise CheckpointError(f"{path} has no files; expected what convert or export wrote")
    root = {"sha256": _hash_digests(resources)}
    statement = _STATEMENT | {
        "subject": [{"name": path.resolve().name, "digest": root}],
        "predicateType": _PREDICATE,
        "predicate": {"serialization": method, "resources": resources},
    }
    payload = to_json(statement).encode()
    algorithm = _load("hazmat.primitives.asymmetric.ec").ECDSA(_find_hash(private.public_key()))
    seal = {"sig": b64encode(private.sign(_encode(payload), algorithm)).decode(), "keyid": ""}
    envelope = _ENVELOPE | {"payload": b64encode(payload).decode(), "signatures": [seal]}
    material = signer | {"tlogEntries": []}
    bundle = _BUNDLE | {"verificationMaterial": material, "dsseEnvelope": envelope}
    if os.path.lexists(signature):
        raise CheckpointError(f"{signature} already exists; remove it to sign again")
    with appearing(signature) as partial:
        partial.write_text(to_json(bundle), encoding="utf-8")


def _verify(path: Path, key: Path, signature: Path, copy: Path | None = None) -> dict[str, Any]:
    """Verify one path, and copy its files while they are hashed."""
    trusted = _read_pem(key)
    if not signature.exists():
        raise CheckpointError(f"{path} is not signed: {signature} is missing; sign it first")
    with _naming(signature):
        bundle = regular_files.read_regular(signature, regular_files.TEXT)
        payload, signer = _open_bundle(bundle, trusted)
        files, method = _read_statement(payload)
    ignored = {*method.get("ignore_paths", ()), *_GIT_PATHS, *_find_inside(path, signature)}
    for name in files:  # what is signed is not ignored
        ignored -= {place for place in ignored if PurePosixPath(name).is_relative_to(place)}
    places = _list_files(path, ignored)
    # An empty file has no shards, so the format leaves it out; it is not copied either.
    sized = {name for name in places if places[name].lstat().st_size or "shard_size" not in method}
    for change, names in ("added", sized - files.keys()), ("missing", files.keys() - places):
        if names:
            raise CheckpointError(
                f"{path} is not what was signed: {change}: {list_first(sorted(map(repr, names)))};"
                f" expected exactly the {len(files)} files that {signature} covers"
            )
    for name in sorted(files):
        if _hash_file(places[name], name, method, copy and copy / name) != files[name]:
            place = f"{places[name]!s:.300}"
            raise CheckpointError(f"{place} is not what was signed; get it again from its source")
    return {"signer": f"{signer}, trusted by {key}", "files": sorted(files)}


def _open_bundle(data: bytes, trusted: Any) -> tuple[bytes, str]:
    """Return the signed payload of a bundle, and the signer. Raises `ValueError` unless the user
    trusts that signer."""
    bundle = parsed(data.decode())
    if not _fits(bundle, _BUNDLE):
        raise ValueError("it is not a signature of OpenSSF Model Signing by one signer")
    material = bundle["verificationMaterial"]
    if "certificate" in material:
        raise ValueError(
            "it is keyless (Sigstore); expected a signature by a key or a certificate. The package"
            " model-signing verifies it"
        )
    kinds = {"publicKey", "x509CertificateChain"} & material.keys()
    wanted = "x509CertificateChain" if isinstance(trusted, list) else "publicKey"
    if kinds != {wanted} or not isinstance(material[wanted], dict):
        raise ValueError(f"it names a signer by {' and '.join(kinds)}, but you trust a {wanted}")
    key = trusted
    signer = "the key"
    if isinstance(trusted, list):
        load = _load("x509").load_der_x509_certificate
        try:
            rows = material[wanted]["certificates"]
            chain = [load(b64decode(row["rawBytes"], validate=True)) for row in rows]
            _check_chain(chain, trusted)
        except Exception as error:
            raise ValueError(f"no certificate that you trust signed it: {error!s:.300}") from None
        key = chain[0].public_key()
        signer = chain[0].subject.rfc4514_string()
    elif material[wanted].get("hint", "") not in ("", _hash_key(key)):
        raise ValueError("it was made with a key other than the trusted one")
    envelope = bundle["dsseEnvelope"]
    payload = b64decode(envelope["payload"], validate=True)
    if not _is_signed(payload, b64decode(envelope["signatures"][0]["sig"], validate=True), key):
        raise ValueError("it was changed, or made with a key other than the trusted one")
    return payload, signer


def _is_signed(payload: bytes, seal: bytes, key: Any) -> bool:
    """Return whether a public key's owner signed a payload."""
    ec = _load("hazmat.primitives.asymmetric.ec")
    usual = _find_hash(key)
    # Version 0.2 of model-signing signed the payload as Python prints it, with certificates in
    # SHA-256 whatever the curve.
    old = f"DSSEV1 {len(_PAYLOAD)} {_PAYLOAD} {len(payload)} {payload!r}".encode()
    sha256 = _load("hazmat.primitives.hashes").SHA256()
    for text, algorithm in (_encode(payload), usual), (old, sha256), (old, usual):
        with suppress(_load("exceptions").InvalidSignature):
            key.verify(seal, text, ec.ECDSA(algorithm))
            return True
    return False


def _encode(payload: bytes) -> bytes:
    """Return what is signed of a payload: DSSE's encoding of it and its type."""
    return f"DSSEv1 {len(_PAYLOAD)} {_PAYLOAD} {len(payload)} ".encode() + payload


def _fits(value: Any, form: Any) -> bool:
    """Return whether JSON has a form: a type, a value, an object with these keys at least, or a
    list of exactly these entries."""
    if isinstance(form, dict):
        fits = isinstance(value, dict)
        return fits and all(_fits(value.get(key), part) for key, part in form.items())
    if isinstance(form, list):
        fits = isinstance(value, list) and len(value) == len(form)
        return fits and all(map(_fits, value, form))
    return type(value) is form if isinstance(form, type) else value == form


def _read_statement(payload: bytes) -> tuple[dict[str, dict[str, str]], dict[str, Any]]:
    """Return the digests of each file by the names of its parts, and how they were made. Raises
    `ValueError`."""
    statement = parsed(payload.decode())
    subjects = statement["subject"] if _fits(statement, _STATEMENT) else []
    if not (subjects and _fits(subjects, [_SUBJECT] * len(subjects))):
        raise ValueError("it signs something other than an in-toto statement, version 1")
    digests = [subject["digest"]["sha256"] for subject in subjects]
    kind = statement.get("predicateType")
    if kind == _FIRST_PREDICATE:
        resources = []
        for subject, digest in zip(subjects, digests, strict=True):
            resources.append({**subject, "algorithm": "sha256", "digest": digest})
        return _group_digests(resources, _WHOLE_FILES), _WHOLE_FILES
    if kind != _PREDICATE:
        raise ValueError(f"it signs {kind!r:.100}; expected {_PREDICATE}")
    method = statement["predicate"].get("serialization")
    resources = statement["predicate"].get("resources")
    if not (_fits(method, _METHOD) and isinstance(resources, list)):
        raise ValueError("its manifest has no files, or no method")
    shard_bytes = method.get("shard_size")
    if isinstance(shard_bytes, float) and shard_bytes.is_integer():  # protobuf writes 100.0
        method["shard_size"] = int(shard_bytes)
    is_sharded = method["method"] == "shards" and is_positive(method.get("shard_size"))
    is_known = is_sharded or (method["method"] == "files" and "shard_size" not in method)
    is_known = is_known and is_list_of(is_text)(method.get("ignore_paths", []))
    if not (is_known and method["hash_type"] in _HASHES):
        raise ValueError(f"it does not hash with {' or '.join(_HASHES)}: {method!r:.150}")
    if not _fits(resources, [_RESOURCE] * len(resources)) or digests != [_hash_digests(resources)]:
        raise ValueError("its manifest contradicts itself")
    return _group_digests(resources, method), method


def _group_digests(resources: list[Any], method: dict[str, Any]) -> dict[str, dict[str, str]]:
    shard_bytes = method.get("shard_size")
    algorithm = method["hash_type"] + (f"-sharded-{shard_bytes}" if shard_bytes else "")
    files: dict[str, dict[str, str]] = {}
    for resource in resources:
        name = resource["name"]
        parts = files.setdefault(name.rsplit(":", 2)[0] if shard_bytes else name, {})
        if name in parts or resource["algorithm"] != algorithm:
            raise ValueError(f"{name!r:.100} is listed twice, or not as {algorithm}")
        parts[name] = resource["digest"].lower()
    return files


def _hash_digests(resources: list[Any]) -> str:
    """Return the digest of all digests in their order."""
    digests = [bytes.fromhex(resource["digest"]) for resource in resources]
    return hashlib.sha256(b"".join(digests)).hexdigest()


def _find_inside(path: Path, signature: Path) -> list[str]:
    """Return the name of a signature in a folder; nothing if it is elsewhere."""
    place = signature.parent.resolve() / signature.name
    root = path.resolve()
    return [place.relative_to(root).as_posix()] if place.is_relative_to(root) else []


def _list_files(path: Path, ignored: Iterable[str]) -> dict[str, Path]:
    """Return the files of a path by the names that the format gives them, in its order. Raises
    `CheckpointError` for links, devices, and names that are not UTF-8."""
    files = {}
    left = [PurePosixPath()]
    while left:
        name = left.pop()
        place = path / name
        if name.parts and any(map(name.is_relative_to, ignored)):
            continue
        with _naming(place):
            str(name).encode()
            mode = place.lstat().st_mode
            if stat.S_ISDIR(mode):
                left += [name / entry.name for entry in place.iterdir()]
            elif stat.S_ISREG(mode):
                files[name] = place
            else:
                raise ValueError("it is a link, a pipe or a device; expected files and folders")
    return {str(name): files[name] for name in sorted(files)}


def _hash_file(file: Path, name: str, method: dict[str, Any], copy: Path | None) -> dict[str, str]:
    """Return the digests of a file by the names of its parts, and copy what was hashed."""
    size = method.get("shard_size") or sys.maxsize
    parts = {}
    digest = _HASHES[method["hash_type"]]()
    begin = 0
    end = 0
    with ExitStack() as stack:
        stack.enter_context(_naming(file))
        source = stack.enter_context(regular_files.open_regular(file, regular_files.WEIGHTS))
        write: Any = len  # does nothing
        if copy is not None:
            copy.parent.mkdir(parents=True, exist_ok=True)
            write = stack.enter_context(copy.open("xb")).write
        while data := source.read(min(_PART, begin + size - end)):
            digest.update(data)
            write(data)
            end += len(data)
            if end == begin + size:
                parts[f"{name}:{begin}:{end}"] = digest.hexdigest()
                digest = _HASHES[method["hash_type"]]()
                begin = end
    if "shard_size" not in method:
        return {name: digest.hexdigest()}
    if end > begin:
        parts[f"{name}:{begin}:{end}"] = digest.hexdigest()
    return parts
