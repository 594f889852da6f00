"""Images in TensorBoard's files; its scalars are tested with the recorder."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

from lockstep.runs.loggers import Opening, Picture
from lockstep.runs.loggers.tensorboard import open_logger
from tests.runs.cases import tensorboard_events


def test_an_image_is_in_the_events_pixel_for_pixel(picture: Picture, tmp_path: Path) -> None:
    logger = open_logger(Opening(tmp_path, 0, {}, None))
    logger.images([picture], 14)
    logger.close("finished")
    (event,) = [event for event in tensorboard_events(tmp_path) if event.summary.value]
    (value,) = event.summary.value
    assert (event.step, value.tag) == (14, "mistakes/01_dots_predicted_as_rays")
    image = Image.open(io.BytesIO(value.image.encoded_image_string))
    assert np.array_equal(np.asarray(image), picture.pixels)
