"""Signatures by certificates: which chains lead to a root that is trusted."""

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from lockstep import UserError, sign, verify_signature
from tests.weights.signers import FILES, write_files, write_key

START = datetime(2026, 1, 1, tzinfo=UTC)


def issue(
    name: str, key: Any, issuer: Any = None, issuer_key: Any = None, *extensions: Any, day: int = 0
) -> x509.Certificate:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = x509.CertificateBuilder().subject_name(subject).public_key(key.public_key())
    builder = builder.issuer_name(issuer.subject if issuer else subject)
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(START + timedelta(day))
    builder = builder.not_valid_after(START + timedelta(day + 9))
    for extension in extensions:
        builder = builder.add_extension(extension, critical=True)
    return builder.sign(issuer_key or key, hashes.SHA256())


def allow(**usages: bool) -> x509.KeyUsage:
    names = ("digital_signature", "content_commitment", "key_encipherment", "data_encipherment")
    more = ("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only")
    return x509.KeyUsage(**{name: name in usages for name in (*names, *more)})


CA = x509.BasicConstraints(True, None)
ISSUES = allow(key_cert_sign=True)
SIGNS = allow(digital_signature=True)
CODE = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING])
SERVER = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
KEYS = [ec.generate_private_key(ec.SECP256R1()) for _ in range(3)]


def sign_with_chain(folder: Path, leaf: Any, middle: Any, root: Any, day: int = 0) -> Path:
    """Sign a folder with certificates of these extensions; return the root's."""
    top = issue("root", KEYS[0], None, None, *root)
    between = issue("middle", KEYS[1], top, KEYS[0], *middle, day=day)
    last = issue("signer", KEYS[2], between, KEYS[1], *leaf)
    pem = serialization.Encoding.PEM
    (folder.parent / "chain").write_bytes(last.public_bytes(pem) + between.public_bytes(pem))
    (folder.parent / "root").write_bytes(top.public_bytes(pem))
    key = write_key(folder.parent / "leaf.pem", KEYS[2])
    (folder / "model.sig").unlink(missing_ok=True)
    sign(folder, key, certificate_chain=folder.parent / "chain")
    return folder.parent / "root"


@pytest.mark.parametrize("leaf", [(SIGNS,), (CODE,), (SIGNS, CODE), (CA, SIGNS)])
def test_a_certificate_below_a_trusted_root_is_enough(tmp_path: Path, leaf: Any) -> None:
    folder = write_files(tmp_path / "m")
    root = sign_with_chain(folder, leaf, (CA, ISSUES), (CA,))
    assert verify_signature(folder, root)["signer"].startswith("CN=signer, trusted by")


def test_a_trusted_file_needs_a_root(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "m")
    root = sign_with_chain(folder, (SIGNS,), (CA,), (CA,))
    with pytest.raises(UserError, match="no certificate that you trust"):
        verify_signature(folder, tmp_path / "chain")
    bundle = json.loads((folder / "model.sig").read_text())
    del bundle["verificationMaterial"]["x509CertificateChain"]["certificates"][1:]
    (folder / "model.sig").write_text(json.dumps(bundle))
    with pytest.raises(UserError, match="no certificate that you trust"):
        verify_signature(folder, root)
    both = (tmp_path / "chain").read_bytes() + root.read_bytes()
    (tmp_path / "both").write_bytes(both)
    verify_signature(folder, tmp_path / "both")  # it has what the signature lacks


def test_a_signers_own_certificate_can_be_the_root(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "m")
    own = issue("signer", KEYS[0], None, None, SIGNS).public_bytes(serialization.Encoding.PEM)
    (tmp_path / "own").write_bytes(own)
    key = write_key(tmp_path / "k.pem", KEYS[0])
    sign(folder, key, certificate_chain=tmp_path / "own")
    assert verify_signature(folder, tmp_path / "own")["files"] == sorted(FILES)


@pytest.mark.parametrize("leaf", [(), (SERVER,), (SIGNS, SERVER), (ISSUES, CODE), (CA,)])
def test_a_certificate_for_something_else_does_not_sign(tmp_path: Path, leaf: Any) -> None:
    folder = write_files(tmp_path / "m")
    with pytest.raises(UserError, match="not for signing"):
        sign_with_chain(folder, leaf, (CA, ISSUES), (CA,))


@pytest.mark.parametrize(
    ("middle", "root"),
    [
        ((ISSUES,), (CA,)),
        ((x509.BasicConstraints(False, None),), (CA,)),
        ((CA, SIGNS), (CA,)),
        ((CA,), (x509.BasicConstraints(True, 0),)),
        ((CA, x509.UnrecognizedExtension(x509.ObjectIdentifier("1.2.3"), b"")), (CA,)),
    ],
)
def test_a_chain_that_is_not_allowed_is_refused(tmp_path: Path, middle: Any, root: Any) -> None:
    folder = write_files(tmp_path / "m")
    with pytest.raises(UserError, match="no certificate that you trust"):
        verify_signature(folder, sign_with_chain(folder, (SIGNS,), middle, root))


def test_other_roots_and_keys_of_certificates_are_refused(tmp_path: Path) -> None:
    folder = write_files(tmp_path / "m")
    root = sign_with_chain(folder, (SIGNS,), (CA,), (CA,))
    stranger = issue("root", KEYS[1], None, None, CA)
    root.write_bytes(stranger.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(UserError, match="no certificate that you trust"):
        verify_signature(folder, root)
    with pytest.raises(UserError, match="you trust a publicKey"):
        verify_signature(folder, tmp_path / "leaf.pub")
    other = write_key(tmp_path / "other.pem", KEYS[0])
    with pytest.raises(UserError, match="does not begin with the certificate"):
        sign(folder, other, certificate_chain=tmp_path / "chain", signature=tmp_path / "s")
    sign(folder, other, signature=tmp_path / "s")
    with pytest.raises(UserError, match="you trust a x509CertificateChain"):
        verify_signature(folder, root, signature=tmp_path / "s")
    bundle = json.loads((tmp_path / "s").read_text())
    right = json.loads((folder / "model.sig").read_text())
    bundle["verificationMaterial"] = right["verificationMaterial"]
    (tmp_path / "s").write_text(json.dumps(bundle))  # the right chain, another's signature
    root = sign_with_chain(folder, (SIGNS,), (CA,), (CA,))
    with pytest.raises(UserError, match=r"s cannot be used: (it was changed|no certificate)"):
        verify_signature(folder, root, signature=tmp_path / "s")


@pytest.mark.parametrize(("day", "is_valid"), [(-9, True), (-10, False), (1, False)])
def test_a_chain_is_valid_when_the_signers_certificate_begins(
    tmp_path: Path, day: int, is_valid: bool
) -> None:
    folder = write_files(tmp_path / "m")
    root = sign_with_chain(folder, (SIGNS,), (CA,), (CA,), day=day)
    if is_valid:
        assert verify_signature(folder, root)["files"] == sorted(FILES)
        return
    with pytest.raises(UserError, match="no certificate that you trust"):
        verify_signature(folder, root)
