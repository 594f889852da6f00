"""Draw the picture of the first page from five runs on 2,000 drawn images of ten textures.

    lockstep train --backend torch|tensorflow|paddle|mxnet|jax --recipe demo --set precision=fp32
        --set epochs=7 --set global_batch_images=32 --set lr=0.1 --set image_size=64
        --set eval_resize=72 --set eval_crop=64 --set crop_area=[0.35,1]
        --set 'model={block: bottleneck, layers: [3, 4, 6, 3], stem_width: 32,
        widths: [32, 64, 128, 256]}'
    lockstep report torch tensorflow paddle mxnet jax -o report.html
    python docs/pictures/five_backends.py report.html

It needs Chromium and playwright (`make browser`).
"""

import sys
from pathlib import Path

from shared import chromium, keep_picture, picture_part


def main() -> None:
    report = Path(sys.argv[1]).resolve()
    with chromium() as browser:
        keep_picture(picture_part(browser, report, "#curves", 690), "report-five-backends.png")


if __name__ == "__main__":
    main()
