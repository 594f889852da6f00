"""Importing TensorFlow without its start-up messages, and with GPU memory that grows as needed.

TensorFlow writes the messages before it reads its log level.
"""

import importlib
import os

from lockstep.backends.shared.import_side_effects import silence_output

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
with silence_output():
    tf = importlib.import_module("tensorflow")
# Otherwise TensorFlow uses all memory. It must be set before anything is computed.
for _gpu in tf.config.list_physical_devices("GPU"):
    tf.config.experimental.set_memory_growth(_gpu, True)
