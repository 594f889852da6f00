"""`lockstep sign`, `verify-signature`, `--sign` and `--require-signature`."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import lockstep
from lockstep.weights import signature

pytest.importorskip("cryptography")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def key(tmp_path: Path) -> Path:
    """A private key, with the public one as `.pub` next to it, by OpenSSL."""
    key = tmp_path / "k.pem"
    make = ("openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out")
    subprocess.run([*make, key], check=True)
    key.chmod(0o600)
    public = key.with_suffix(".pub")
    write = ("openssl", "ec", "-in", key, "-pubout", "-out", public)
    subprocess.run(write, check=True, capture_output=True)
    return key


def test_a_signed_conversion_predicts_and_a_changed_one_does_not(
    answer: Run, run_folder: Path, textures: Path, tmp_path: Path, key: Path
) -> None:
    target = tmp_path / "weights.safetensors"
    options = ("--no-certificate", "--sign", key)
    code, output, errors = answer("convert", run_folder, target, *options)
    assert (code, errors) == (0, "")
    assert f"wrote {target}.sig" in output.splitlines()
    public = key.with_suffix(".pub")
    code, output, errors = answer("verify-signature", target, "--certificate-chain", public)
    assert (code, errors) == (0, "")
    assert output == f"{target}: 1 file as signed by the key, trusted by {public}\n"
    photo = next((textures / "train").rglob("*.jpg"))
    predict = ("predict", target, photo, "--json", "--backend", "reference")
    code, output, errors = answer(*predict, "--require-signature", public)
    assert code == 0, errors
    assert output == answer(*predict)[1]
    evaluate = ("evaluate", target, "--data", textures, "--json", "--backend", "reference")
    code, output, errors = answer(*evaluate, "--require-signature", public)
    assert (code, json.loads(output)["source"]) == (0, str(target)), errors
    junk = tmp_path / "junk.safetensors"
    junk.write_bytes(b"junk")
    assert answer("sign", junk, "--key", key)[0] == 0
    code, _, errors = answer("predict", junk, photo, "--require-signature", public)
    assert (code, str(junk) in errors, "lockstep-verified" in errors) == (2, True, False)
    data = bytearray(target.read_bytes())
    data[-1] ^= 1
    target.write_bytes(data)
    code, output, errors = answer(*predict, "--require-signature", public)
    assert (code, output) == (2, "")
    assert "weights.safetensors is not what was signed" in errors
    assert answer(*predict)[0] == 0
    for command in ("evaluate", "serve"):
        more = ("--data", textures) if command == "evaluate" else ("--port", "0")
        code, _, errors = answer(command, target, *more, "--require-signature", public)
        assert code == 2
        assert "is not what was signed" in errors


def test_a_signed_run_is_loaded_from_a_copy_that_does_not_change(
    run_folder: Path, textures: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lockstep.sign(run_folder, key)
    expected = lockstep.load(run_folder).on("reference").logits([next(textures.rglob("*.jpg"))])
    copies = []

    def copy_verified(path: Path, key: Path, folder: Path) -> Path:
        copies.append(folder)
        copy = signature_copy(path, key, folder)
        for file in path.rglob("*"):
            if file.is_file():
                file.write_bytes(b"changed after it was verified")
        return copy

    signature_copy = signature.copy_verified
    monkeypatch.setattr(signature, "copy_verified", copy_verified)
    model = lockstep.load(run_folder, require_signature=key.with_suffix(".pub")).on("reference")
    [logits] = model.logits([next(textures.rglob("*.jpg"))])
    assert logits.tobytes() == next(iter(expected)).tobytes()
    [copy] = copies
    assert copy.stat().st_mode & 0o777 == 0o700
    with pytest.raises(lockstep.UserError, match="calibrate first, then sign"):
        model.evaluate(textures, calibrate=True)
    del model
    assert not copy.exists()


def test_what_is_not_signed_as_it_should_be_is_explained(
    answer: Run, run_folder: Path, tmp_path: Path, key: Path
) -> None:
    code, _, errors = answer("convert", run_folder, tmp_path / "w", "--sign", tmp_path / "none")
    assert code == 2
    assert "none" in errors
    assert not (tmp_path / "w").exists()
    prefix = ("convert", run_folder, tmp_path / "m.ckpt-7", "--to", "nvidia-tensorflow")
    code, _, errors = answer(*prefix, "--no-certificate", "--sign", key)
    assert code == 2
    assert "lockstep sign" in errors
    key.chmod(0o644)
    code, output, errors = answer("sign", run_folder, "--key", key)
    assert (code, output) == (2, "")
    assert "chmod 600" in errors
    assert "PRIVATE" not in errors


def test_signing_without_its_package_names_it(
    answer: Run, run_folder: Path, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    code, _, errors = answer("verify-signature", run_folder, "--key", key.with_suffix(".pub"))
    assert code == 2
    assert "pip install cryptography==" in errors
