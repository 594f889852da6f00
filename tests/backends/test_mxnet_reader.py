"""Evaluation in the geometry of MXNet's own reader of RecordIO files."""

import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

if "mxnet" not in os.environ.get("LOCKSTEP_BACKENDS", ""):
    pytest.skip("runs in MXNet's environment", allow_module_level=True)

# First, because it sets the number of threads.
from lockstep.backends import mxnet as mxnet_backend  # noqa: F401

# isort: split
import mxnet as mx

from lockstep.data.index import open_index
from lockstep.data.loading.loaders import make_loader
from lockstep.recipes import Execution
from lockstep.recipes.order import evaluation_plans
from lockstep.recipes.published import RECIPES

READER = {
    "eval_sampling": "half_pixel",
    "eval_side_rounding": "down",
    "eval_offset_rounding": "down",
}
"""The geometry of `ImageRecordIter` with `resize`, as docs/reference/preprocessing.md says."""
SIZES = ((354, 500), (500, 354), (375, 500), (301, 307), (97, 131))
"""Sides after the resize that end in a fraction, halves in the crop's place, and an image that is
enlarged."""


def write_images(folder: Path) -> None:
    """Write JPEGs as class folders, and the same files as RecordIO."""
    record = mx.recordio.MXIndexedRecordIO(str(folder / "val.idx"), str(folder / "val.rec"), "w")
    for number, (height, width) in enumerate(SIZES):
        coarse = np.random.default_rng(number).integers(0, 256, (9, 12, 3), np.uint8)
        file = folder / "images" / "any" / f"{number}.jpg"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(coarse).resize((width, height)).save(file, quality=95)
        header = mx.recordio.IRHeader(0, 0.0, number, 0)
        record.write_idx(number, mx.recordio.pack(header, file.read_bytes()))
    record.close()


def test_evaluation_has_the_pixels_of_mxnets_own_reader(tmp_path: Path) -> None:
    write_images(tmp_path)
    reader = mx.io.ImageRecordIter(
        path_imgrec=str(tmp_path / "val.rec"),
        path_imgidx=str(tmp_path / "val.idx"),
        data_shape=(3, 224, 224),
        batch_size=len(SIZES),
        resize=256,
        preprocess_threads=1,
    )
    expected = reader.next().data[0].asnumpy().transpose(0, 2, 3, 1)
    recipe = RECIPES["resnet50-mxnet-90ep"]().replace(**READER)
    index = open_index(tmp_path / "images")
    plans = evaluation_plans(recipe, index.sizes, len(index))
    execution = Execution(loader="host", loader_threads=1)
    with make_loader(index, recipe, execution, evaluation=True) as loader:
        [batch] = loader.batches(plans)
    assert np.array_equal(batch.images, expected)
