"""An index of as many images as ImageNet has: the memory to open it and to plan from it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.cases import sample, write

IMAGENET = 1_281_167


STORED = """
import os, sys
from pathlib import Path
import numpy as np
from lockstep.data import index as indexing
from lockstep.data import listing as listing_module
from lockstep.data.images import ROW, Names
from lockstep.data.sources import find_split

count = int(sys.argv[2])
source = find_split(Path(sys.argv[1]), "train")
rows = np.zeros(count, ROW)
i = np.arange(count, dtype=np.int64)
rows["offset"], rows["length"], rows["label"] = 110_000 * i, 110_000 - i % 7, i * 1000 // count
rows["height"], rows["width"] = 300 + i % 200, 400 + i % 300
text = np.tile(np.frombuffer(b"n01440764/n01440764_10026.JPEG", np.uint8), count)
names = Names(text, (30 * (i + 1)).astype(np.uint32))
classes = tuple(f"n{i:08d}" for i in range(1000))
os.truncate(Path(sys.argv[1], "train.rec"), 110_000 * count)  # it takes no room on the disk
states = tuple(indexing._state(source.root / name) for name in source.files)
index = indexing.Index(
    source, rows, names, classes, False,
    times=np.zeros(0, np.uint32), orientations=np.ones(count, np.uint8), states=states,
    quarantined=(), skipped=(),
    digest=indexing._digest(rows, classes), checksums=i.astype(np.uint32),
)
indexing._store(index, indexing.find_cache_folder(source), indexing._stamp(source), 0)
print(index.digest)
"""
OPENED = """
import json, sys
from pathlib import Path
import numpy as np
import lockstep.data.index, lockstep.recipes.order, lockstep.recipes.recipe

def anonymous():
    # Resident bytes but those of mapped files.
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return 1024 * int(fields["RssAnon"].split()[0])

before = anonymous()
index = lockstep.data.index.open_index(lockstep.data.sources.find_split(Path(sys.argv[1]), "train"))
opened = anonymous()
recipe = lockstep.recipes.recipe.Recipe(model=json.loads(sys.argv[2]), global_batch_images=256)
plan = next(lockstep.recipes.order.training_plans(recipe, index.sizes, 0))
found = {"digest": index.digest, "images": len(index), "mapped": isinstance(index.rows, np.memmap),
    "samples": plan.samples.tolist(), "inside": bool((plan.windows[:, :2] >= 0).all()
    and (plan.windows[:, 0] + plan.windows[:, 2] <= 300 + plan.samples % 200).all()
    and (plan.windows[:, 1] + plan.windows[:, 3] <= 400 + plan.samples % 300).all()),
    "labels": index.rows["label"][plan.samples].tolist(), "name": index.name(len(index) - 1),
    "added": opened - before}
print(json.dumps(found))
"""


@pytest.mark.slow
def test_an_index_of_imagenets_size_is_opened_and_planned_from(tmp_path: Path) -> None:
    write("recordio", tmp_path / "train.rec", [sample(0, 0)])
    made = subprocess.run(
        [sys.executable, "-c", STORED, str(tmp_path), str(IMAGENET)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    model = {
        "block": "bottleneck",
        "layers": [1, 1, 1, 1],
        "stem_width": 8,
        "widths": [8, 8, 16, 16],
        "groups": 2,
        "expansion": 2,
    }
    output = subprocess.run(
        [sys.executable, "-c", OPENED, str(tmp_path), json.dumps(model)],
        stdout=subprocess.PIPE, text=True, check=True,
    ).stdout  # fmt: skip
    facts = json.loads(output)
    assert (facts["digest"], facts["images"]) == (made.stdout.strip(), IMAGENET)
    assert facts["mapped"]
    # The rows alone take 24 bytes for each image. They are mapped, so the system can drop the parts
    # that were read.
    assert facts["added"] < 8 * IMAGENET
    assert len(set(facts["samples"])) == 256
    assert facts["labels"] == [i * 1000 // IMAGENET for i in facts["samples"]]
    assert facts["inside"]
    assert facts["name"] == "n01440764/n01440764_10026.JPEG"
