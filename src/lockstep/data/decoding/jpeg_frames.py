"""The kinds of JPEGs, by the marker of their frame (ITU-T T.81, table B.1), and what decodes each.

TurboJPEG and DALI get no other kinds than those they are tested with. For a lossless JPEG, for
example, TurboJPEG before libjpeg-turbo 3.1.4 writes whole pixels to a buffer of reduced size.
"""

from itertools import islice

from lockstep.data.decoding.file_parts import START_OF_SCAN, list_segments
from lockstep.data.decoding.size_limits import MOST_SEGMENTS

_FAST = (0xC0, 0xC1, 0xC2)
"""Baseline, extended sequential and progressive, with Huffman coding."""
_KINDS = {
    **dict.fromkeys(_FAST, "with Huffman coding"),
    0xC3: "without loss",
    **dict.fromkeys((0xC5, 0xC6, 0xC7), "of a hierarchy"),
    0xC8: "of an extension of JPEG",
    **dict.fromkeys((0xC9, 0xCA), "with arithmetic coding"),
    0xCB: "without loss, with arithmetic coding",
    **dict.fromkeys((0xCD, 0xCE, 0xCF), "of a hierarchy, with arithmetic coding"),
    0xF7: "of the kind JPEG-LS",
}
"""What a frame is, by its marker: SOF0 to SOF15, and that of JPEG-LS."""
_BY_PILLOW = (0xC3, 0xC9, 0xCA)
_BITS = 8


def check_frame(data: bytes | memoryview) -> bool:
    """Return whether TurboJPEG and DALI may decode a JPEG; False if Pillow is to decode it, at its
    whole size.

    Raises `ValueError` with the kind of a JPEG that neither decodes, and for more than one frame,
    of which decoders might choose different ones.
    """
    frames = []
    for code, start, _ in islice(list_segments(data), MOST_SEGMENTS):
        if code == START_OF_SCAN:
            break
        if code in _KINDS:
            frames.append((code, data[start : start + 1]))
    if not frames:
        return False  # damaged or over the budget, as Pillow's path reports
    code, bits = frames[0]
    if len(frames) > 1:
        raise ValueError("a JPEG with more than one frame before its pixels; save the image again")
    if code not in _FAST + _BY_PILLOW or bits != bytes([_BITS]):
        depth = int.from_bytes(bits, "big")
        raise ValueError(
            f"a JPEG {_KINDS[code]} (marker 0xFF{code:02X}) and {depth} bits per sample is not"
            " supported; expected 8 bits, and a baseline, progressive or lossless JPEG; save the"
            " image as PNG"
        )
    return code in _FAST
