"""Importing TensorFlow without its greetings, which it writes before it reads how much it should say; memory as needed."""

import importlib
import os

from lockstep.backends.shared.import_side_effects import silenced

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with silenced():
    tf = importlib.import_module("tensorflow")
for _gpu in tf.config.list_physical_devices("GPU"):  # or it takes all of its memory; to be said before anything is computed
    tf.config.experimental.set_memory_growth(_gpu, True)
