"""Compare the training step of a backend with code that its users write by hand.

    python benchmarks/train_step.py --backend tensorflow

MXNet needs the Python of its environment. Flax and Optax, JAX's contender, are found in a folder:

    pip install --no-deps --target DIR flax optax
    PYTHONPATH=DIR python benchmarks/train_step.py --backend jax

The contenders alternate, and each turn is a new process with all cores. All use a held batch.
Frameworks are imported in the functions that use them, so that the settings of one side do not
affect the other. On a busy machine the seconds of processor time say more.
"""

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from lockstep.backends import Engine
from lockstep.data import Batch
from lockstep.recipes import Execution
from lockstep.system.machine import cores
from measuring import (
    BATCH,
    describe_load,
    engine,
    make_batch,
    make_parser,
    median,
    recipe,
    record,
    round_all,
)

WARMUP = 3
TIMED = 6
LR = 0.001
MOMENTUM = 0.875
DECAY = 1 / 32768


class Clock:
    """The moments at which steps end."""

    def __init__(self) -> None:
        self.moments: list[tuple[float, float]] = []

    def tick(self) -> None:
        """Note that a step has ended."""
        self.moments.append((time.perf_counter(), time.process_time()))

    def run(self, step: Callable[[], object]) -> None:
        """Take all steps of a turn."""
        for _ in range(WARMUP + TIMED):
            step()
            self.tick()

    def median_seconds(self) -> tuple[float, float]:
        """Return the seconds of a step after the warm-up, and those of processor time."""
        seconds, processor_seconds = np.diff(self.moments[WARMUP - 1 :], axis=0).T
        return float(np.median(seconds)), float(np.median(processor_seconds))


@dataclass(frozen=True)
class Contender:
    """What one side of a comparison computes, and how."""

    program: str
    """A key of `PROGRAMS`."""
    backend: str = "torch"
    precision: str = "fp32"
    compile: str = "auto"
    model: str = "resnet50"
    is_held: bool = False
    """Whether the engine may keep the batch on the device, as the hand-written code does."""
    steps: int = 1
    """Steps between two looks at the loss."""
    batch: int = BATCH
    size: int = 224

    def make_batch(self) -> Batch:
        """Return the batch of every step."""
        return replace(make_batch(self.size, self.batch), is_held=self.is_held)

    def normalise(self) -> np.ndarray:
        """Return the batch's images as float32 [N, 3, H, W], normalised."""
        pixels = self.make_batch().images
        normalised = (pixels - np.asarray(recipe().mean)) / np.asarray(recipe().std)
        return normalised.astype(np.float32).transpose(0, 3, 1, 2)

    def make_engine(self) -> Engine:
        """Return the backend's engine."""
        changes = {"precision": self.precision, "model": self.model}
        execution = Execution.of({"backend": self.backend, "compile": self.compile})
        built, _ = engine(recipe(**changes, global_batch_images=self.batch), execution)
        return built


def run_lockstep(contender: Contender, clock: Clock) -> None:
    """Take steps of the backend's engine."""
    engine = contender.make_engine()
    batches = [contender.make_batch()] * contender.steps
    clock.run(lambda: engine.fetch(engine.train(batches, 0)))


def run_inference(contender: Contender, clock: Clock) -> None:
    """Predict with the backend's engine."""
    engine = contender.make_engine()
    images = contender.make_batch().images
    clock.run(lambda: engine.predict(images))


def run_eager(contender: Contender, clock: Clock) -> None:
    """Run the usual loop of PyTorch on the same architecture: eager, float32, NCHW, and a batch
    that is already normalised."""
    import torch
    import torch.nn.functional as F

    from lockstep.backends.torch.model import Model
    from lockstep.models.architectures import MODELS

    model = Model(MODELS["resnet50"], recipe())
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, weight_decay=1e-4)
    images = torch.randn(contender.batch, 3, contender.size, contender.size)
    labels = torch.randint(0, 1000, (contender.batch,))

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        loss.item()

    clock.run(step)


def run_product(contender: Contender, clock: Clock) -> None:
    """Multiply two large matrices, whose rate is the upper limit of a step."""
    import torch

    matrix = torch.randn(2048, 2048)
    if contender.precision == "bf16":
        matrix = matrix.bfloat16()
    clock.run(lambda: matrix @ matrix)


def run_keras(contender: Contender, clock: Clock) -> None:
    """Run a custom step with Keras' model, loss and optimizer, written as in its guide."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    keras = tf.keras
    policies = {"fp32": "float32", "bf16": "mixed_bfloat16"}
    keras.mixed_precision.set_global_policy(policies[contender.precision])
    shape = (contender.size, contender.size, 3)
    model = keras.applications.ResNet50(
        weights=None, classifier_activation=None, input_shape=shape, include_top=True
    )
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = keras.optimizers.SGD(LR, momentum=MOMENTUM, weight_decay=DECAY)
    mean = tf.constant(recipe().mean)
    std = tf.constant(recipe().std)

    @tf.function(jit_compile=contender.compile == "on")
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        x = (tf.cast(images, tf.float32) - mean) / std
        with tf.GradientTape() as tape:
            loss = loss_of(labels, tf.cast(model(x, training=True), tf.float32))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    batch = contender.make_batch()
    clock.run(lambda: float(step(tf.constant(batch.images), tf.constant(batch.labels))))


def run_fit(contender: Contender, clock: Clock) -> None:
    """Run `paddle.Model.fit` on paddle.vision's resnet50, written as in its guide, with two
    exceptions.

    It uses all cores, which Paddle does not do by default. Its images are already normalised.
    """
    warnings.simplefilter("ignore")
    import paddle

    paddle.base.core.set_num_threads(cores())
    count = contender.batch
    labels = contender.make_batch().labels
    images = contender.normalise()

    class Images(paddle.io.Dataset):
        def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
            return images[index % count], np.array([labels[index % count]])

        def __len__(self) -> int:
            return count * (WARMUP + TIMED)

    class Ticking(paddle.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            clock.tick()

    model = paddle.Model(paddle.vision.models.resnet50())
    optimizer = paddle.optimizer.Momentum(
        LR, MOMENTUM, parameters=model.parameters(), weight_decay=DECAY
    )
    model.prepare(optimizer, paddle.nn.CrossEntropyLoss())
    model.fit(Images(), batch_size=count, epochs=1, verbose=0, shuffle=False, callbacks=[Ticking()])


def run_gluon(contender: Contender, clock: Clock) -> None:
    """Run a Gluon loop on the model zoo's resnet50_v1, hybridised, with `gluon.Trainer` and MXNet's
    own AMP, written as in its guide, on images that are already normalised."""
    import mxnet as mx
    from mxnet.contrib import amp

    if contender.precision == "bf16":
        amp.init("bfloat16")
    net = mx.gluon.model_zoo.vision.resnet50_v1()
    net.initialize(mx.init.Xavier())
    net.hybridize(static_alloc=True, static_shape=True)
    loss_of = mx.gluon.loss.SoftmaxCrossEntropyLoss()
    options = {"learning_rate": LR, "momentum": MOMENTUM, "wd": DECAY}
    trainer = mx.gluon.Trainer(net.collect_params(), "sgd", options)
    images = mx.nd.array(contender.normalise())
    labels = mx.nd.array(contender.make_batch().labels)

    def take_steps() -> None:
        total = 0
        for _ in range(contender.steps):
            with mx.autograd.record():
                loss = loss_of(net(images), labels)
            loss.backward()
            trainer.step(contender.batch)
            total = total + loss.mean()
        total.asscalar()

    clock.run(take_steps)


def run_flax(contender: Contender, clock: Clock) -> None:
    """Take steps of `flax_resnet50.py`, on images that are already normalised and on the device."""
    import jax.numpy as jnp

    import flax_resnet50 as flax

    images = jnp.asarray(contender.normalise().transpose(0, 2, 3, 1))
    labels = jnp.asarray(contender.make_batch().labels)
    state = flax.draw_state(images)

    def step() -> None:
        nonlocal state
        state, loss = flax.take_step(state, images, labels)
        float(loss)

    clock.run(step)


PROGRAMS = {
    "lockstep": run_lockstep,
    "inference": run_inference,
    "eager": run_eager,
    "product": run_product,
    "keras": run_keras,
    "fit": run_fit,
    "gluon": run_gluon,
    "flax": run_flax,
}

TENSORFLOW = Contender("lockstep", "tensorflow", compile="off")
KERAS = Contender("keras", "tensorflow", compile="off")
PADDLE = Contender("lockstep", "paddle")
FIT = Contender("fit", "paddle")
ONEDNN = Contender("inference", "paddle", compile="on")
# The model zoo's resnet50_v1 strides in the first 1x1, and so does this model. v1.5 is 6 % more
# work. The batch is in MXNet's arrays, as for Gluon.
MXNET = Contender("lockstep", "mxnet", model="resnet50-v1", is_held=True, steps=4)
GLUON = Contender("gluon", "mxnet", steps=4)
JAX = Contender("lockstep", "jax", is_held=True)
RESNEXT = replace(JAX, model="resnext101-32x4d")

COMPARISONS: dict[str, dict[str, tuple[Contender, Contender]]] = {
    "torch": {
        "bf16 over eager fp32 in NCHW": (
            Contender("lockstep", precision="bf16"),
            Contender("eager"),
        ),
        "bf16 over fp32 matrix products": (
            Contender("product", precision="bf16"),
            Contender("product"),
        ),
    },
    "tensorflow": {
        "fp32": (TENSORFLOW, KERAS),
        "bf16": (replace(TENSORFLOW, precision="bf16"), replace(KERAS, precision="bf16")),
        "fp32 with XLA": (replace(TENSORFLOW, compile="on"), replace(KERAS, compile="on")),
        "bf16 with XLA": (
            replace(TENSORFLOW, precision="bf16", compile="on"),
            replace(KERAS, precision="bf16", compile="on"),
        ),
    },
    "paddle": {
        "training": (PADDLE, FIT),
        "training uncompiled": (replace(PADDLE, compile="off"), FIT),
        "inference with oneDNN over without": (ONEDNN, replace(ONEDNN, compile="off")),
    },
    "mxnet": {
        "fp32": (MXNET, GLUON),
        "bf16": (replace(MXNET, precision="bf16"), replace(GLUON, precision="bf16")),
    },
    "jax": {
        "over Flax": (JAX, Contender("flax", "jax")),
        "ResNeXt101-32x4d over PyTorch's": (RESNEXT, replace(RESNEXT, backend="torch")),
    },
}
"""The comparisons of each backend, by title: the first side over the second."""


def run_turn(contender: Contender) -> dict[str, float]:
    """Return the images per second of this process, and the processor time of an image. A product
    of matrices counts as one image for each GFLOP."""
    clock = Clock()
    PROGRAMS[contender.program](contender, clock)
    seconds, processor_seconds = clock.median_seconds()
    amount: float = contender.steps * contender.batch
    if contender.program == "product":
        amount = 2 * 2048**3 / 1e9
    return {"rate": amount / seconds, "processor_sec": processor_seconds / amount}


def run_in_process(contender: Contender) -> dict[str, float]:
    """Return the figures of a turn in a separate process."""
    done = subprocess.run(
        [sys.executable, __file__, "--turn", json.dumps(asdict(contender))],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": str(cores())},
    )
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


def compare(first: Contender, second: Contender, rounds: int) -> dict[str, Any]:
    """Measure two contenders alternately, and return their figures and the median ratios."""
    turns = [(run_in_process(first), run_in_process(second)) for _ in range(rounds)]
    result: dict[str, Any] = {}
    for figure in ("rate", "processor_sec"):
        sides = [[turn[side][figure] for turn in turns] for side in (0, 1)]
        ratio = median(a / b for a, b in zip(*sides, strict=True))
        result |= {figure: [round_all(side) for side in sides], f"{figure}_ratio": round(ratio, 3)}
    return result


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--backend", choices=COMPARISONS, default="torch")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--turn", type=json.loads, help="for this program itself")
    arguments = parser.parse_args()
    if arguments.turn:
        print(json.dumps(run_turn(Contender(**arguments.turn))))
        return
    result: dict[str, Any] = {
        "what": (
            f"images a second of a training step, and seconds of processor time for an image;"
            f" {arguments.size} px, batch {arguments.batch}; {arguments.rounds} turns, one process"
            " each; matrix products in GFLOP/s"
        ),
        "load": describe_load(),
    }
    for title, sides in COMPARISONS[arguments.backend].items():
        first, second = (replace(s, batch=arguments.batch, size=arguments.size) for s in sides)
        result[title] = compare(first, second, arguments.rounds)
    record(f"{arguments.backend}_step", result, arguments.backend)


if __name__ == "__main__":
    main()
