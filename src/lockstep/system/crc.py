"""The checksum of images in an index, and of TensorFlow's files: TFRecord and checkpoints."""

import crc32c


def compute_crc(*data: bytes | memoryview) -> int:
    """Return the CRC-32C of pieces."""
    crc = 0
    for piece in data:
        # 0: keep the interpreter's lock, since getting it back takes longer.
        crc = crc32c.crc32c(piece, crc, 0)
    return crc


def masked_crc(*data: bytes | memoryview) -> int:
    """Return the CRC-32C of pieces as TensorFlow stores it: rotated by 15 bits, plus a constant.

    The mask is for data that contains checksums itself.
    """
    crc = compute_crc(*data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
