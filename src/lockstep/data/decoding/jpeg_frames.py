"""The frames and scans of a JPEG: their budget, and what decodes each kind of frame.

TurboJPEG and DALI get no other kinds than those they are tested with. For a lossless JPEG, for
example, TurboJPEG before libjpeg-turbo 3.1.4 writes whole pixels to a buffer of reduced size.
"""

from lockstep.data.decoding.file_parts import START_OF_SCAN, list_segments
from lockstep.data.decoding.size_limits import (
    MOST_PIXELS,
    MOST_SCANNED_PIXELS,
    MOST_SCANS,
    MOST_SEGMENT_BYTES,
    MOST_SEGMENTS,
    OverBudget,
    check_size,
)

_FAST = (0xC0, 0xC1, 0xC2)
"""Baseline, extended sequential and progressive, with Huffman coding."""
_BY_PILLOW = (0xC3, 0xC9, 0xCA)
"""Lossless; sequential and progressive with arithmetic coding."""
_NAMES = {0xC3: "lossless JPEG", 0xF7: "JPEG-LS"}
_FRAMES = {*range(0xC0, 0xD0), *_NAMES} - {0xC4, 0xCC}
"""The markers SOF0 to SOF15 (ITU-T T.81, table B.1) and that of JPEG-LS. The two others start
tables."""
_SEQUENTIAL = (0xC0, 0xC1, 0xC9)
"""The frames whose pixels are complete after one scan if it has all their colours; libjpeg refuses
a second one."""
_BITS = 8


def check_frame(data: bytes | memoryview) -> bool:
    """Return whether TurboJPEG and DALI may decode a JPEG; False if Pillow is to decode it, at its
    whole size, or to report that it is damaged. Only markers are read.

    Raises `ValueError` with the kind of a JPEG that neither decodes, and for more than one frame,
    of which decoders might choose different ones. Raises `OverBudget` if there are more pixels,
    scans, pixels times scans, segments, or bytes of them, than allowed.
    """
    code = scans = segment_bytes = 0
    header = b""
    most = MOST_SCANS
    pixels = ""
    for number, (marker, start, end) in enumerate(list_segments(data), 1):
        segment_bytes += end - start + 2
        if number > MOST_SEGMENTS or segment_bytes > MOST_SEGMENT_BYTES:
            raise OverBudget(
                f"more than {MOST_SEGMENTS:,} segments or {MOST_SEGMENT_BYTES:,} bytes of metadata"
                " are too many; save the image again"
            )
        if marker == START_OF_SCAN:
            scans += 1
            if scans > most:
                raise OverBudget(
                    f"more than {most} scans{pixels} are too many; save the image again"
                )
            if scans == 1 and code in _SEQUENTIAL and data[start : start + 1] == header[5:]:
                break
        elif marker in _FRAMES and not scans:
            if code:
                raise ValueError("a JPEG with more than one frame; save the image again")
            code = marker
            header = bytes(data[start : start + 6]).ljust(6, b"\0")
            height, width = (int.from_bytes(header[at : at + 2], "big") for at in (1, 3))
            check_size(height, width, len(data), MOST_PIXELS)
            if height * width * most > MOST_SCANNED_PIXELS:
                most = MOST_SCANNED_PIXELS // (height * width)
                pixels = f" of {width} x {height} pixels"
    if code and (code not in _FAST + _BY_PILLOW or header[0] != _BITS):
        raise ValueError(
            f"a {_NAMES.get(code, 'JPEG')} (marker 0xFF{code:02X}) with {header[0]} bits per sample"
            " is not supported; expected 8 bits, and a baseline, progressive or lossless JPEG; save"
            " the image as PNG"
        )
    return code in _FAST
