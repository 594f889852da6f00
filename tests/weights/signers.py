"""Keys and folders to sign."""

from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives import serialization

FILES = {"config.json": b'{"a": 1}', "part/weights.bin": bytes(range(256)), "empty": b""}


def write_key(path: Path, key: Any, password: bytes | None = None) -> Path:
    encryption: Any = serialization.NoEncryption()
    if password:
        encryption = serialization.BestAvailableEncryption(password)
    pem = serialization.Encoding.PEM
    path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, encryption))
    path.chmod(0o600)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    path.with_suffix(".pub").write_bytes(key.public_key().public_bytes(pem, form))
    return path


def write_files(folder: Path, files: dict[str, bytes] = FILES) -> Path:
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    return folder
