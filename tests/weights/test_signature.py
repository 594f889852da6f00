"""Signatures of OpenSSF Model Signing: the vectors of its reference, the reference itself, and
what an attacker can change."""

import base64
import hashlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from lockstep import UserError, sign, verify_signature
from lockstep.weights.signature import copy_verified
from tests.soak import SOAK
from tests.weights.signers import FILES, write_files, write_key

REFERENCE = json.loads(Path(__file__).with_name("signatures.json").read_text(encoding="utf-8"))
PAYLOAD = "application/vnd.in-toto+json"


@pytest.fixture
def key(tmp_path: Path) -> Path:
    return write_key(tmp_path / "k.pem", ec.generate_private_key(ec.SECP256R1()))


@pytest.fixture
def signed(tmp_path: Path, key: Path) -> Path:
    folder = write_files(tmp_path / "model")
    assert sign(folder, key) == [str(folder / "model.sig")]
    return folder


def verify(path: Path, signature: Path | None = None) -> list[str]:
    """Verify with the public key of the fixture `key`."""
    files: list[str] = verify_signature(path, path.parent / "k.pub", signature=signature)["files"]
    return files


def change_bundle(folder: Path, key: Path, change: Callable[[Any, Any], Any]) -> None:
    """Change the bundle and its statement, and sign the result with the right key."""
    file = folder / "model.sig"
    bundle = json.loads(file.read_text())
    envelope = bundle["dsseEnvelope"]
    statement = json.loads(base64.b64decode(envelope["payload"]))
    text = change(bundle, statement)
    payload = (text if isinstance(text, str) else json.dumps(statement)).encode()
    private: Any = serialization.load_pem_private_key(key.read_bytes(), None)
    sealed = b"DSSEv1 %d %s %d %s" % (len(PAYLOAD), PAYLOAD.encode(), len(payload), payload)
    envelope["payload"] = base64.b64encode(payload).decode()
    seal = private.sign(sealed, ec.ECDSA(hashes.SHA256()))
    envelope["signatures"][0]["sig"] = base64.b64encode(seal).decode()
    file.write_text(json.dumps(bundle))


# The vectors of the reference.


def write_vector(name: str, folder: Path) -> tuple[Path, Path, Path]:
    """Return the path, the signature and what is trusted of a vector."""
    for file, data in REFERENCE["vectors"][name].items():
        text = json.dumps(data).encode() if file == "model.sig" else base64.b64decode(data)
        (folder / file).write_bytes(text)
    trusted = folder.parent / "trusted.pem"
    kind = "signing-key-pub.pem" if "key" in name else "ca-cert.pem"
    trusted.write_text(REFERENCE["trusted"][kind])
    path = folder / "signme-1" if name == "v0.3.1-elliptic-key" else folder
    return path, folder / "model.sig", trusted


@pytest.mark.parametrize("name", REFERENCE["vectors"])
def test_vectors_of_the_reference_are_judged_right(tmp_path: Path, name: str) -> None:
    (tmp_path / "m").mkdir()
    path, signature, trusted = write_vector(name, tmp_path / "m")
    if "sigstore" in name:
        with pytest.raises(UserError, match="keyless"):
            verify_signature(path, trusted, signature=signature)
        return
    if name.startswith("v1.0.1"):  # an option of the reference leaves this file out
        with pytest.raises(UserError, match=r"added.*ignore-me"):
            verify_signature(path, trusted, signature=signature)
        (path / "ignore-me").unlink()
    covered = verify_signature(path, trusted, signature=signature)["files"]
    assert covered == (["."] if path.is_file() else ["signme-1", "signme-2"])
    (tmp_path / "m/signme-1").write_bytes(b"signme-2\n")
    with pytest.raises(UserError, match=r"signme-1 is not what was signed"):
        verify_signature(path, trusted, signature=signature)


# The reference itself, which `make signatures` installs.


@pytest.mark.parametrize("curve", [ec.SECP256R1, ec.SECP384R1, ec.SECP521R1])
@pytest.mark.parametrize("is_file", [False, True])
def test_the_reference_and_lockstep_verify_each_other(
    tmp_path: Path, curve: Any, is_file: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = Path(__file__).parents[2] / "build/model-signing"
    monkeypatch.setattr(sys, "path", [*sys.path, str(installed)])
    pytest.importorskip("model_signing", reason="model-signing is missing: make signatures")
    from model_signing import hashing, signing, verifying

    key = write_key(tmp_path / "k.pem", ec.generate_private_key(curve()))
    folder = write_files(tmp_path / "m", {**FILES, ".gitignore": b"x", "ü\n b": b"2"})
    path = folder / "part/weights.bin" if is_file else folder
    [ours] = map(Path, sign(path, key))
    theirs = hashing.Config().set_ignored_paths(paths=["model.sig"])
    config = verifying.Config().use_elliptic_key_verifier(public_key=key.with_suffix(".pub"))
    config.set_hashing_config(theirs).verify(path, ours)
    ours.unlink()
    for hashed in (
        hashing.Config().use_file_serialization(hashing_algorithm="blake2"),
        hashing.Config().use_shard_serialization(shard_size=100),
        hashing.Config(),
    ):
        private = signing.Config().use_elliptic_key_signer(private_key=key)
        private.set_hashing_config(hashed.set_ignored_paths(paths=["model.sig"])).sign(path, ours)
        verify_signature(path, key.with_suffix(".pub"), signature=ours)
        data = (folder / "part/weights.bin").read_bytes()
        (folder / "part/weights.bin").write_bytes(data[:-1])
        with pytest.raises(UserError, match=r"weights.bin is not what was signed"):
            verify_signature(path, key.with_suffix(".pub"), signature=ours)
        (folder / "part/weights.bin").write_bytes(data)
        ours.unlink()


# What is written, and what is covered.


def test_a_signature_is_what_its_specification_says(signed: Path, key: Path) -> None:
    bundle = json.loads((signed / "model.sig").read_text())
    envelope = bundle["dsseEnvelope"]
    payload = base64.b64decode(envelope["payload"])
    statement = json.loads(payload)
    digests = {name: hashlib.sha256(FILES[name]).digest() for name in sorted(FILES)}
    resources = [
        {"name": name, "algorithm": "sha256", "digest": value.hex()}
        for name, value in digests.items()
    ]
    assert statement["predicate"]["resources"] == resources
    root = hashlib.sha256(b"".join(digests.values())).hexdigest()
    assert statement["subject"] == [{"name": "model", "digest": {"sha256": root}}]
    public: Any = serialization.load_pem_public_key(key.with_suffix(".pub").read_bytes())
    sealed = f"DSSEv1 28 {PAYLOAD} {len(payload)} ".encode() + payload
    seal = base64.b64decode(envelope["signatures"][0]["sig"])
    public.verify(seal, sealed, ec.ECDSA(hashes.SHA256()))  # raises an error if it is not valid


def test_every_changed_byte_is_refused(tmp_path: Path, key: Path) -> None:
    folder = write_files(tmp_path / "m", {"a": bytes(500), "b/c": b"x" * 500})
    sign(folder, key)
    for name in ("a", "b/c"):
        data = (folder / name).read_bytes()
        for place in range(0, 500, 1 if SOAK else 50):
            changed = data[:place] + bytes([data[place] ^ 1 << place % 8]) + data[place + 1 :]
            (folder / name).write_bytes(changed)
            with pytest.raises(UserError, match=f"{name} is not what was signed"):
                verify(folder)
        (folder / name).write_bytes(data)
    assert verify(folder) == ["a", "b/c"]


def test_every_changed_byte_of_a_signature_is_refused_or_means_the_same(signed: Path) -> None:
    signature = signed.parent / "model.sig"
    data = (signed / "model.sig").read_bytes()
    refused = 0
    places = range(0, len(data), 1 if SOAK else 25)
    for place in places:
        signature.write_bytes(data[:place] + bytes([data[place] ^ 2]) + data[place + 1 :])
        try:
            assert verify(signed, signature) == sorted(FILES)
        except UserError:
            refused += 1
    assert refused > 0.8 * len(places)  # names and places that nobody reads are the rest
    for size in (0, 1, len(data) // 2, len(data) - 1):
        signature.write_bytes(data[:size])
        with pytest.raises(UserError):
            verify(signed, signature)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "new").write_bytes(b""), r"added: 'new'"),
        (lambda f: (f / "a\nb").write_bytes(b""), r"added: 'a\\nb'"),
        (lambda f: (f / "part/.gitignore").write_bytes(b""), "added: 'part/.gitignore'"),
        (lambda f: (f / "empty").unlink(), "missing: 'empty'"),
        (lambda f: (f / "empty").rename(f / "void"), "added: 'void'"),
        (lambda f: (f / "part").rename(f / "other"), "added: 'other/weights.bin'"),
        (lambda f: (f / "empty").symlink_to((f / "empty").rename(f.parent / "moved")), "link"),
        (lambda f: (f / "out").symlink_to("/etc"), "link"),
        (lambda f: os.mkfifo(f / "pipe"), "pipe"),
        (lambda f: (f / os.fsdecode(b"\xff")).write_bytes(b""), "utf-8"),
        (lambda f: os.truncate(f / "part/weights.bin", 2**34), "weights.bin"),
        (lambda f: (f / "model.sig").unlink(), "is not signed"),
        (lambda f: (f / "model.sig").write_bytes(b"[" * 99999), "nested too deep"),
    ],
)
def test_a_changed_folder_is_refused(signed: Path, change: Any, message: str) -> None:
    change(signed)
    with pytest.raises(UserError, match=message):
        verify(signed)


def test_git_and_the_signature_are_left_out_and_not_copied(signed: Path, tmp_path: Path) -> None:
    write_files(signed, {".git/config": b"x", ".gitattributes": b"x", ".github/a": b"x"})
    (signed / "nothing").mkdir()
    assert verify(signed) == sorted(FILES)
    (tmp_path / "private").mkdir()
    copy = copy_verified(signed, tmp_path / "k.pub", tmp_path / "private")
    assert {str(path.relative_to(copy)) for path in copy.rglob("*")} == {*FILES, "part"}
    for name, data in FILES.items():
        assert (copy / name).read_bytes() == data


def test_a_file_has_its_signature_next_to_it(tmp_path: Path, key: Path) -> None:
    write_files(tmp_path, {"w.pth": b"weights", "w.pth.certificate.json": b"{}"})
    written = sign(tmp_path / "w.pth", key)
    assert [Path(name).name for name in written] == ["w.pth.sig", "w.pth.certificate.json.sig"]
    assert verify(tmp_path / "w.pth") == ["."]
    (tmp_path / "one").mkdir()
    copy_verified(tmp_path / "w.pth", tmp_path / "k.pub", tmp_path / "one")
    copied = {path.name for path in (tmp_path / "one").iterdir()}
    assert copied == {"w.pth", "w.pth.certificate.json"}
    (tmp_path / "w.pth.certificate.json.sig").unlink()
    (tmp_path / "two").mkdir()
    with pytest.raises(UserError, match=r"w\.pth\.certificate\.json is not signed"):
        copy_verified(tmp_path / "w.pth", tmp_path / "k.pub", tmp_path / "two")


def test_nothing_is_overwritten_and_nothing_is_not_signed(signed: Path, key: Path) -> None:
    with pytest.raises(UserError, match="already exists"):
        sign(signed, key)
    with pytest.raises(UserError, match="already exists"):
        sign(signed, key, signature=signed / "config.json")
    assert verify(signed) == sorted(FILES)
    (signed.parent / "none").mkdir()
    with pytest.raises(UserError, match="no files"):
        sign(signed.parent / "none", key)
    with pytest.raises(UserError, match="No such file"):
        sign(signed.parent / "nowhere", key)


# What a bundle and its statement may say.


def drop(values: Any, *names: Any) -> None:
    for name in names[:-1]:
        values = values[name]
    del values[names[-1]]


@pytest.mark.parametrize(
    "change",
    [
        lambda b, s: b.update(mediaType="application/vnd.dev.sigstore.bundle+json;version=0.1"),
        lambda b, s: b["dsseEnvelope"].update(payloadType="text/plain"),
        lambda b, s: b["dsseEnvelope"]["signatures"].append({"sig": ""}),
        lambda b, s: b["verificationMaterial"].update(x509CertificateChain={"certificates": []}),
        lambda b, s: drop(b, "verificationMaterial"),
        lambda b, s: b.update(verificationMaterial={"certificate": {"rawBytes": ""}}),
        lambda b, s: b.update(verificationMaterial={"publicKey": []}),
        lambda b, s: s.update(_type="https://in-toto.io/Statement/v0.1"),
        lambda b, s: s.update(predicateType="https://slsa.dev/provenance/v1"),
        lambda b, s: s.update(predicateType="https://model_signing/Digests/v0.1"),
        lambda b, s: s["subject"][0]["digest"].update(sha256="0" * 64),
        lambda b, s: s["subject"].append(s["subject"][0]),
        lambda b, s: s.update(subject=[]),
        lambda b, s: drop(s, "predicate"),
        lambda b, s: s["predicate"]["resources"].append(s["predicate"]["resources"][0]),
        lambda b, s: s["predicate"]["resources"].pop(),
        lambda b, s: s["predicate"]["resources"][0].update(digest="zz"),
        lambda b, s: s["predicate"]["resources"][0].update(algorithm="md5"),
        lambda b, s: s["predicate"]["resources"][0].update(name="../k.pub"),
        lambda b, s: s["predicate"].update(resources={}),
        lambda b, s: s["predicate"]["serialization"].update(hash_type="md5"),
        lambda b, s: s["predicate"]["serialization"].update(method="tensors"),
        lambda b, s: s["predicate"]["serialization"].update(method="shards", shard_size=0),
        lambda b, s: s["predicate"]["serialization"].update(ignore_paths=[1]),
        lambda b, s: json.dumps(s)[:-1] + ', "predicate": {}}',
        lambda b, s: "[]",
        lambda b, s: "{",
    ],
)
def test_a_signature_that_says_something_else_is_refused(
    signed: Path, key: Path, change: Any
) -> None:
    change_bundle(signed, key, lambda bundle, statement: None)
    assert verify(signed) == sorted(FILES)  # the test itself signs
    change_bundle(signed, key, change)
    with pytest.raises(UserError, match="model"):
        verify(signed)


def test_what_is_signed_is_never_ignored(signed: Path, key: Path) -> None:
    ignored = {"ignore_paths": ["."]}
    change_bundle(signed, key, lambda b, s: s["predicate"]["serialization"].update(ignored))
    assert verify(signed) == sorted(FILES)
    (signed / "part/weights.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r"weights.bin is not what was signed"):
        verify(signed)


# Keys.


def test_another_key_is_refused(signed: Path) -> None:
    other = write_key(signed.parent / "o.pem", ec.generate_private_key(ec.SECP256R1()))
    with pytest.raises(UserError, match="a key other than"):
        verify_signature(signed, other.with_suffix(".pub"))
    bundle = json.loads((signed / "model.sig").read_text())
    drop(bundle, "verificationMaterial", "publicKey", "hint")  # which old signatures do not have
    (signed / "model.sig").write_text(json.dumps(bundle))
    assert verify(signed) == sorted(FILES)
    with pytest.raises(UserError, match="a key other than"):
        verify_signature(signed, other.with_suffix(".pub"))


def test_other_kinds_of_keys_are_refused(signed: Path) -> None:
    curve = ec.generate_private_key(ec.SECP256K1())
    for private in (
        rsa.generate_private_key(65537, 1024),
        curve,
        ed25519.Ed25519PrivateKey.generate(),
    ):
        key = write_key(signed.parent / "other.pem", private)
        for work, file in (sign, key), (verify_signature, key.with_suffix(".pub")):
            with pytest.raises(UserError, match=r"expected ECDSA on P-256"):
                work(signed, file)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_private_key_that_others_reach_is_refused(signed: Path, key: Path, mode: int) -> None:
    key.chmod(mode)
    with pytest.raises(UserError, match="chmod 600"):
        sign(signed, key, signature=signed.parent / "s")
    assert not (signed.parent / "s").exists()


def test_an_encrypted_key_needs_its_password(signed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    key = ec.generate_private_key(ec.SECP384R1())
    file = write_key(signed.parent / "e.pem", key, b"a secret")
    where = signed.parent / "s"
    monkeypatch.setattr("sys.stdin.isatty", lambda: False)
    with pytest.raises(UserError, match="LOCKSTEP_SIGN_PASSWORD"):
        sign(signed, file, signature=where)
    monkeypatch.setenv("LOCKSTEP_SIGN_PASSWORD", "another")
    with pytest.raises(UserError, match="password is wrong"):
        sign(signed, file, signature=where)
    monkeypatch.setenv("LOCKSTEP_SIGN_PASSWORD", "a secret")
    (signed / "model.sig").unlink()  # it is left out only at the usual place
    sign(signed, file, signature=where)
    verify_signature(signed, file.with_suffix(".pub"), signature=where)


def test_files_that_are_no_keys_are_refused(signed: Path, key: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it is private"):
        verify_signature(signed, key)
    (tmp_path / "text").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    (tmp_path / "text").chmod(0o600)
    os.mkfifo(tmp_path / "pipe", 0o600)
    for file in (tmp_path / "text", tmp_path / "pipe", tmp_path, tmp_path / "nowhere"):
        for work in (sign, verify_signature):
            with pytest.raises(UserError, match=file.name):
                work(signed, file)
