"""Make other kinds of JPEGs of photos: those of phones and those of social networks.

    python -m benchmarks.loaders.kinds --data DIR --out DIR

`phone`: 4032 x 3024 pixels, with the noise of a small sensor, quality 90, 4:2:0: about 2 MB each.
They are enlarged from the photos, so their detail is that of a soft lens. `social` and
`progressive`: 720 pixels wide, quality 71, 4:2:0, as networks re-encode uploads, baseline and
progressive.
"""

from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.measuring import make_parser

PHONE = (4032, 3024)
PHONES = 64
"""A batch of the benchmark: some 110 MB."""
SOCIAL_WIDTH = 720
NOISE = 3.0
"""Standard deviation in levels of 255, as phones have it indoors after their own smoothing."""


def main() -> None:
    parser = make_parser(__doc__, "Folder of photos.")
    parser.add_argument("--out", type=Path, required=True, help="The folder to write.")
    options = parser.parse_args()
    photos = sorted(path for path in options.data.rglob("*") if path.suffix.lower() in _SUFFIXES)
    random = np.random.default_rng(0)
    for kind in ("phone", "social", "progressive"):
        (options.out / kind / "photos").mkdir(parents=True)
    for i, path in enumerate(photos):
        with Image.open(path) as opened:
            photo = opened.convert("RGB")
        name = f"photos/{i:05}.jpg"
        small = photo.resize((SOCIAL_WIDTH, SOCIAL_WIDTH * photo.height // photo.width))
        how = {"quality": 71, "subsampling": "4:2:0", "optimize": True}
        small.save(options.out / "social" / name, **how)
        small.save(options.out / "progressive" / name, progressive=True, **how)
        if i < PHONES:
            pixels = np.asarray(photo.resize(PHONE, Image.Resampling.LANCZOS), np.float32)
            pixels += NOISE * random.standard_normal(pixels.shape, np.float32)
            large = Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))
            large.save(options.out / "phone" / name, quality=90, subsampling="4:2:0")


_SUFFIXES = (".jpg", ".jpeg")

if __name__ == "__main__":
    main()
