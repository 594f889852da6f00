"""A fuzzer of the JPEG decoder: `python -m tests.data.decoding.fuzz_jpeg --minutes 5` (see `make
fuzz`).

It draws JPEGs, or takes those of other encoders, gives some the marker of another kind of frame,
damages most of them, decodes windows of them, and compares every answer with libjpeg-turbo's
pixels. To give no answer is always right; the decoder must answer for a damaged file only with the
pixels that libjpeg-turbo gives. All files are also decoded at an eighth of their size.
"""

import argparse
import io
import json
import re
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from lockstep.data.decoding import jpeg
from lockstep.data.decoding.decode import decode
from lockstep.data.decoding.jpeg import Window
from tests.data.decoding.other_encoders import FILES
from tests.data.pictures import any_window, encode, picture

SAMPLINGS = ("444", "422", "420", "Gray")
FRAMES = (*range(0xC0, 0xC4), *range(0xC5, 0xCC), *range(0xCD, 0xD0), 0xF7)
"""The markers of all kinds of frames. 0xC4 and 0xCC start tables, 0xC8 is an extension's."""


def module_of(path: Path | None) -> Any:
    """Return the compiled decoder, or the one in a file, such as a build with sanitizers."""
    if path is None:
        return jpeg._jpeg
    spec = spec_from_file_location("_jpeg", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def draw_case(rng: np.random.Generator) -> bytes:
    """Return a whole JPEG of a kind that the decoder answers for."""
    height = int(rng.integers(1, 150))
    width = int(rng.integers(16, 150))
    pixels = picture(rng, height, width)
    quality = int(rng.integers(1, 101))
    if rng.random() < 0.5:
        return encode(pixels, SAMPLINGS[rng.integers(4)], quality)
    options: list[dict[str, Any]] = [
        {"optimize": True},
        {"restart_marker_blocks": 3},
        {"restart_marker_rows": 1},
        {"progressive": True},
    ]
    file = io.BytesIO()
    kind = options[rng.integers(len(options))]
    Image.fromarray(pixels).save(
        file, "JPEG", quality=quality, subsampling=int(rng.integers(3)), **kind
    )
    return file.getvalue()


def set_frame(data: bytes, code: int) -> bytes:
    """Return a JPEG whose first frame has another marker."""
    return re.sub(rb"\xff[\xc0-\xc3\xc9\xca](?=\0.[\x08\x0c])", bytes([0xFF, code]), data, count=1)


def draw_other_kind(rng: np.random.Generator) -> bytes:
    """Return a JPEG of another encoder, or one whose frame has any marker, or both."""
    files = list(FILES.values())
    data = files[rng.integers(len(files))] if rng.random() < 0.6 else draw_case(rng)
    return set_frame(data, FRAMES[rng.integers(len(FRAMES))]) if rng.random() < 0.6 else data


def damage(rng: np.random.Generator, data: bytes) -> bytes:
    """Return a JPEG with bytes changed, removed, inserted or doubled; headers are hit as often as
    the codes."""
    outcome = bytearray(data)
    scan = max(data.find(b"\xff\xda"), 4)
    for _ in range(int(rng.integers(1, 5))):
        at = int(rng.integers(2, scan if rng.random() < 0.5 else len(outcome)))
        length = int(rng.integers(1, 9))
        match rng.integers(6):
            case 0:
                outcome[at] = int(rng.integers(256))
            case 1:
                outcome[at] ^= 1 << int(rng.integers(8))
            case 2:
                del outcome[at : at + length]
            case 3:
                outcome[at:at] = rng.bytes(length)
            case 4:
                outcome[at:at] = outcome[at : at + 10 * length]
            case _:
                del outcome[max(at, scan) :]
        if len(outcome) < scan + 2:
            break
    return bytes(outcome)


def run_decoder(
    module: Any, data: bytes, size: tuple[int, int], window: Window
) -> np.ndarray | None:
    """Return the decoder's answer, from buffers of exactly the size it asks for."""
    _, _, height, width = window
    room, pixels = module.sizes(len(data), height, width)
    scratch = np.zeros(room, np.uint8)
    out = np.zeros(pixels, np.uint8)
    if not module.decode_window(data, size, window, scratch, out):
        return None
    return out[: height * width * 3].reshape(height, width, 3)


def judge(module: Any, rng: np.random.Generator, data: bytes) -> str:
    """Decode a window of a file; return what came of it: "no answer", "right", "wrong", or
    "libjpeg-turbo refuses it".

    The last is damage behind the window's last row, which the decoder does not look at.
    """
    with suppress(ValueError):
        decode(data, 8)
    try:
        height, width = simplejpeg.decode_jpeg_header(data)[:2]
    except (ValueError, KeyError):
        height = 64
        width = 64
    if height * width > 2**20:
        height = 64
        width = 64
    window = any_window(rng, height, width)
    outcome = run_decoder(module, data, (height, width), window)
    if outcome is None:
        return "no answer"
    try:
        whole = decode(data)
    except ValueError:
        return "libjpeg-turbo refuses it"
    top, left, rows, columns = window
    return (
        "right"
        if np.array_equal(outcome, whole[top : top + rows, left : left + columns])
        else "wrong"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--module", type=Path, help="A compiled _jpeg to test instead of the installed one."
    )
    parser.add_argument(
        "--keep",
        type=Path,
        default=Path("build/fuzz"),
        help="Where files with a wrong answer are written.",
    )
    options = parser.parse_args()
    module = module_of(options.module)
    counts = Counter[str]()
    if module is None:
        sys.exit("the decoder is not compiled here; see `lockstep doctor`")
    end = time.monotonic() + 60 * options.minutes
    number = 0
    while time.monotonic() < end:
        rng = np.random.default_rng([options.seed, number])
        data = draw_case(rng) if rng.random() < 0.6 else draw_other_kind(rng)
        data = data if rng.random() < 0.2 else damage(rng, data)
        verdict = judge(module, rng, data)
        counts[verdict] += 1
        if verdict == "wrong":
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"wrong-{options.seed}-{number}.jpg").write_bytes(data)
        number += 1
    print(json.dumps({"files": number, **counts}))
    sys.exit(1 if counts["wrong"] else 0)


if __name__ == "__main__":
    main()
