"""Weights files as TensorFlow and Keras read them, for the certificate of a conversion."""

from pathlib import Path

import numpy as np

from lockstep.backends.tensorflow.framework_import import tf
from lockstep.recipes import Recipe

_MODELS = {16: "ResNet50", 33: "ResNet101", 50: "ResNet152"}
"""Models of keras.applications by their number of blocks."""


def read(path: Path, recipe: Recipe) -> dict[str, np.ndarray] | None:
    """Return the variables of a checkpoint, whose `.index` is given, or of a `.h5` for
    `keras.applications`, by name.

    Keras loads a `.h5` into its own model of the recipe, and the values are those of the model's
    variables. The result is None if the installed Keras is older than the file's layout. Raises
    what TensorFlow and Keras raise.
    """
    if path.suffix != ".h5":
        reader = tf.train.load_checkpoint(str(path.with_suffix("")))
        return {name: reader.get_tensor(name) for name in reader.get_variable_to_shape_map()}
    if path.name.endswith(".weights.h5") and tf.keras.__version__.startswith("2."):
        return None
    build = getattr(tf.keras.applications, _MODELS[sum(recipe.spec.layers)])
    model = build(weights=str(path), classes=recipe.logits, classifier_activation=None)
    # Keras 3 has a path of layer and variable, Keras 2 has both in the name.
    arrays = {}
    for variable in model.weights:
        name = getattr(variable, "path", variable.name)
        arrays[name.removesuffix(":0")] = variable.numpy()
    return arrays
