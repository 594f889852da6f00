"""Fingerprints of what readers get."""

import hashlib

import numpy as np
import torch

from lockstep.weights.fingerprints import compute_fingerprints


def test_a_fingerprint_is_type_shape_and_digest_of_little_endian_bytes() -> None:
    # 1 and -2
    expected = f"float32 [2, 1] {hashlib.sha256(bytes.fromhex('0000803f000000c0')).hexdigest()}"
    values = np.array([[1], [-2]], np.float32)
    for same in (
        values,
        values.astype(">f4"),
        torch.tensor([[1.0], [-2.0]]),
        np.array([[1, 0], [-2, 0]], np.float32)[:, :1],
    ):
        assert compute_fingerprints({"a": {"b": [0, same]}}) == {"a/b/0": "0", "a/b/1": expected}


def test_zeros_of_other_signs_types_and_shapes_have_other_fingerprints() -> None:
    zeros = [
        np.zeros(2, np.float32),
        -np.zeros(2, np.float32),
        np.zeros(2, np.int32),
        np.zeros((1, 2), np.float32),
        0,
        "0",
    ]
    assert len({str(compute_fingerprints([zero])) for zero in zeros}) == len(zeros)
