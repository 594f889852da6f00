"""Compare the TensorFlow engine's step with the usual Keras code for the same model.

The usual code is keras.applications.ResNet50 in a custom step under `tf.function`, in fp32 and in
mixed_bfloat16. Each turn is a new process. Both sides use the images of a held batch.

TensorFlow is imported inside the functions that use it, so that the settings of one side do not
affect the other.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial

from lockstep.recipes import Execution
from measuring import (
    BATCH,
    alternate,
    engine,
    make_batch,
    median,
    recipe,
    record,
    round_all,
    seconds,
)

ROUNDS = 5
WARMUP = 2
TIMED = 6
KERAS = {"fp32": "float32", "bf16": "mixed_bfloat16"}


def lockstep_step(precision: str, compile: str = "off") -> float:
    """Return the engine's images per second."""
    built, _ = engine(
        recipe(precision=precision), Execution.of({"backend": "tensorflow", "compile": compile})
    )
    batch = make_batch()
    return rate(lambda: built.fetch(built.train([batch], 0)))


def keras_step(precision: str, compile: str = "off") -> float:
    """Return the images per second of a custom step with Keras' model, loss and optimizer, written
    as in its guide."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    keras = tf.keras
    keras.mixed_precision.set_global_policy(KERAS[precision])
    model = keras.applications.ResNet50(weights=None, classifier_activation=None)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(0.001, momentum=0.875, weight_decay=1 / 32768)
    mean = tf.constant(recipe().mean)
    std = tf.constant(recipe().std)

    @tf.function(jit_compile=compile == "on")
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        x = (tf.cast(images, tf.float32) - mean) / std
        with tf.GradientTape() as tape:
            loss = loss_of(labels, tf.cast(model(x, training=True), tf.float32))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batch = make_batch()
    return rate(lambda: float(step(tf.constant(batch.images), tf.constant(batch.labels))))


def rate(step: Callable[[], object]) -> float:
    for _ in range(WARMUP):
        step()
    return BATCH / median(seconds(step) for _ in range(TIMED))


def run_in_process(*what: str) -> float:
    """Run one of the two steps in a separate process and return its result."""
    done = subprocess.run(
        [sys.executable, __file__, *what], capture_output=True, text=True, check=True
    )
    return float(done.stdout.splitlines()[-1])


def main() -> None:
    steps = {"lockstep": lockstep_step, "keras": keras_step}
    if len(sys.argv) > 1:
        name, *how = sys.argv[1:]
        print(steps[name](*how))
        return
    results = {}
    for precision in KERAS:
        ours, usual = alternate(
            partial(run_in_process, "lockstep", precision),
            partial(run_in_process, "keras", precision),
            ROUNDS,
        )
        results[precision] = {
            "lockstep": round_all(ours),
            "keras": round_all(usual),
            "ratio": round(median(a / b for a, b in zip(ours, usual, strict=True)), 3),
        }
    results["xla"] = {
        f"{name} {p}": round(run_in_process(name, p, "on"), 2) for name in steps for p in KERAS
    }
    record(
        "tensorflow_step",
        {
            "what": (
                f"images a second, ResNet-50 training, 224 px, batch {BATCH}; {ROUNDS} turns, one"
                " process each"
            ),
            **results,
        },
        backend="tensorflow",
    )


if __name__ == "__main__":
    main()
