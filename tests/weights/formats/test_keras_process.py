"""HDF5's library may hang or crash on a damaged file: a message, and the process goes on."""

import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import keras_file, keras_process


def save_broken(path: Path) -> Path:
    """Write a layer as Keras 3 does."""
    with h5py.File(path, "w") as file:
        group = file.create_group("layers/dense/vars")
        group.attrs["name"] = "predictions"
        group["0"] = np.zeros((2, 3), np.float32)
    return path


def test_a_file_that_hangs_hdf5_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytearray(save_broken(tmp_path / "a.h5").read_bytes())
    data[data.index(b"GCOL") + 9] += 4  # a heap of texts that is larger by 1024 bytes
    (tmp_path / "a.h5").write_bytes(data)
    monkeypatch.setattr(keras_process, "LEAST_SECONDS", 1.0)
    with pytest.raises(CheckpointError, match=r"a\.h5 is damaged: .* within 1 seconds"):
        keras_file.read(tmp_path / "a.h5")


def test_a_file_on_which_hdf5_crashes_is_refused() -> None:
    crashing = [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"]
    assert keras_process.describe_ending(crashing, 60) == "crashed on it (SIGSEGV)"


def test_a_file_with_other_damage_is_left_to_the_reader(tmp_path: Path) -> None:
    save_broken(tmp_path / "a.h5").write_bytes(
        save_broken(tmp_path / "whole.h5").read_bytes()[:-300]
    )
    keras_process.check(tmp_path / "a.h5")
    with pytest.raises(CheckpointError, match="truncated file"):
        keras_file.read(tmp_path / "a.h5")
