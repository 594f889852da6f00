"""Measure everything that needs a GPU, in parts, within a few minutes: see docs/gpu.md.

    PYTHONPATH=src python benchmarks/gpu/campaign.py --minutes 9 --out DIR
    PYTHONPATH=src python benchmarks/gpu/campaign.py --show DIR/campaign.json

Each part runs in a separate process. Started again, the campaign measures what is missing.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    root = Path(__file__).resolve().parents[2]
    # Python puts the folder of this file first, but the campaign is a package of the source tree.
    sys.path[:1] = [str(root), str(root / "src")]
    from benchmarks.gpu.command import main

    sys.exit(main(sys.argv[1:]))
