"""Save checkpoints with Paddle's own functions and load Lockstep's.

    with_paddle.py layers FOLDER      models saved by paddle.save, and their logits
    with_paddle.py programs FOLDER    the same as static programs, saved in every way
    with_paddle.py load FOLDER        loads ours/ into programs

With FLAGS_enable_pir_api=0 programs are those of Paddle 2, which the original uses. Only these
support fp16 on a CPU. The network has the layers of NVIDIA's model code. It is written for this
test and shares no code with Lockstep.
"""

import sys
from pathlib import Path

import numpy as np
import paddle
from paddle import nn, static

OF_AMP = ("loss_scaling_0", "num_good_steps_0", "num_bad_steps_0", "conv2d_1.w_0_velocity_0")
STEM = 8
WIDTHS = (8, 16, 32, 64)
LAYERS = (2, 1, 1, 1)
LOGITS = 10


class Unit(nn.Layer):
    def __init__(self, inputs, outputs, size, stride=1, act=True):
        super().__init__()
        self.conv = nn.Conv2D(inputs, outputs, size, stride, (size - 1) // 2, bias_attr=False)
        self.bn = nn.BatchNorm(outputs)
        self.act = act

    def forward(self, x):
        y = self.bn(self.conv(x))
        return nn.functional.relu(y) if self.act else y


class Block(nn.Layer):
    def __init__(self, inputs, width, stride, first):
        super().__init__()
        self.conv0 = Unit(inputs, width, 1)
        self.conv1 = Unit(width, width, 3, stride)
        self.conv2 = Unit(width, width * 4, 1, act=False)
        self.short = Unit(inputs, width * 4, 1, stride, act=False) if first else None

    def forward(self, x):
        short = x if self.short is None else self.short(x)
        return nn.functional.relu(self.conv2(self.conv1(self.conv0(x))) + short)


class Network(nn.Layer):
    def __init__(self, channels):
        super().__init__()
        self.stem = nn.Sequential(Unit(channels, STEM, 7, 2))
        self.pool = nn.MaxPool2D(3, 2, 1)
        blocks = []
        inputs = STEM
        for stage, (width, depth) in enumerate(zip(WIDTHS, LAYERS, strict=True)):
            for i in range(depth):
                blocks.append(Block(inputs, width, 2 if i == 0 and stage else 1, i == 0))
                inputs = width * 4
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(inputs, LOGITS)

    def forward(self, x):
        y = self.blocks(self.pool(self.stem(x)))
        return self.fc(paddle.mean(y, axis=[2, 3]))


def tensor_of(name):
    return static.global_scope().find_var(name).get_tensor()


def randomise(names):
    """Give every variable different values."""
    for seed, name in enumerate(sorted(names)):
        tensor = tensor_of(name)
        old = np.array(tensor)
        values = np.random.default_rng(seed).uniform(0.5, 1.5, old.shape).astype(old.dtype)
        tensor.set(
            values / np.sqrt(old[0].size).astype(old.dtype) if old.ndim > 1 else values,
            paddle.CPUPlace(),
        )


class Program:
    """The original's static program for training, and one for evaluation of the same variables."""

    def __init__(self, make, channels, amp=False, half=False):
        self.main = static.Program()
        self.startup = static.Program()
        self.test = static.Program()
        self.executor = static.Executor(paddle.CPUPlace())
        paddle.set_default_dtype("float16" if half else "float32")
        dtype = "float16" if half else "float32"
        with static.program_guard(self.main, self.startup), paddle.utils.unique_name.guard():
            x = static.data("x", [None, channels, 64, 64], dtype)
            self.network = make()
            loss = self.network(x).mean()
            optimizer = paddle.optimizer.Momentum(
                paddle.optimizer.lr.StepDecay(0.1, 30), 0.9, weight_decay=1e-4, multi_precision=half
            )
            if amp:
                optimizer = static.amp.decorate(
                    optimizer, init_loss_scaling=4.0, use_dynamic_loss_scaling=True
                )
            optimizer.minimize(loss, self.startup)
            self.loss = loss
        with static.program_guard(self.test, static.Program()), paddle.utils.unique_name.guard():
            x = static.data("x", [None, channels, 64, 64], dtype)
            network = make()
            network.eval()
            self.logits = network(x)
        if not paddle.framework.in_pir_mode():
            self.test = self.test.clone(for_test=True)
        self.executor.run(self.startup)
        paddle.set_default_dtype("float32")

    def layers(self):
        return {
            name: parameter.name
            for name, parameter in self.network.state_dict(use_hook=False).items()
        }

    def values(self, names):
        """Return values by layer names. Names of velocities and masters have a suffix."""
        values = {}
        for layer, parameter in self.layers().items():
            for ending in ("", "_velocity_0", "_fp32_master_0", "_fp32_master_0_velocity_0"):
                if parameter + ending in names:
                    values[layer + ending] = np.array(tensor_of(parameter + ending))
        return values

    def names(self):
        return [var.name for var in self.main.list_vars() if var.persistable]

    def run(self, images):
        return self.executor.run(self.test, feed={"x": images}, fetch_list=[self.logits])[0]


def save(folder, name, program, images=None, epoch=7, **how):
    names = program.names()
    randomise([name for name in names if name.startswith(("conv2d", "batch_norm", "linear"))])
    static.save(
        program.main, str(folder / name / "ResNet50" / str(epoch) / "resnet_50_paddle"), **how
    )
    np.savez(folder / f"{name}.npz", **program.values(names))
    if images is not None:
        np.savez(folder / f"{name}-logits.npz", logits=program.run(images))


def add_channel(images):
    return np.concatenate([images, np.zeros_like(images[:, :1])], axis=1)


def save_layers(folder):
    images = np.load(folder / "images.npy").transpose(0, 3, 1, 2).copy()
    for name, layer in {
        "layers": Network(3),
        "resnet18": paddle.vision.models.resnet18(num_classes=LOGITS),
        "resnet50": paddle.vision.models.resnet50(num_classes=LOGITS),
    }.items():
        layer.train()
        layer(paddle.to_tensor(images))  # statistics that are not 0 and 1
        layer.eval()
        paddle.save(layer.state_dict(), str(folder / f"{name}.pdparams"))
        np.savez(folder / f"{name}-logits.npz", logits=layer(paddle.to_tensor(images)).numpy())
    layer = Network(3)
    optimizer = paddle.optimizer.Momentum(0.1, 0.9, parameters=layer.parameters())
    layer(paddle.to_tensor(images)).mean().backward()
    optimizer.step()
    paddle.save(layer.state_dict(), str(folder / "trained.pdparams"))
    paddle.save(optimizer.state_dict(), str(folder / "trained.pdopt"))
    np.savez(
        folder / "trained.npz",
        fc=layer.fc.weight.grad.numpy(),
        stem=layer.stem[0].conv.weight.grad.numpy(),
    )


def save_programs(folder):
    paddle.enable_static()
    images = np.load(folder / "images.npy").transpose(0, 3, 1, 2).copy()
    trained = Program(lambda: Network(4), 4)
    trained.executor.run(trained.main, feed={"x": add_channel(images)}, fetch_list=[trained.loss])
    save(folder, "static", trained, add_channel(images))
    save(folder, "protocol2", trained, protocol=2)
    if not paddle.framework.in_pir_mode():
        save(folder, "amp", Program(lambda: Network(4), 4, amp=True))
        save(folder, "half", Program(lambda: Network(3), 3, half=True))
    vision = Program(lambda: paddle.vision.models.resnet18(num_classes=LOGITS), 3)
    save(folder, "vision", vision, images)


def load(folder):
    paddle.enable_static()
    images = np.load(folder / "images.npy").transpose(0, 3, 1, 2).copy()
    prefix = str(folder / "ours" / "resnet_50_paddle")
    program = Program(lambda: Network(4), 4)
    static.load(program.main, prefix, program.executor)
    names = program.names()
    np.savez(folder / "ours.npz", **program.values(names))
    np.savez(folder / "ours-logits.npz", logits=program.run(add_channel(images)))
    # Continues training.
    program.executor.run(program.main, feed={"x": add_channel(images)}, fetch_list=[program.loss])
    np.savez(folder / "ours-after.npz", **program.values(names))
    if not paddle.framework.in_pir_mode():
        amp = Program(lambda: Network(4), 4, amp=True)
        static.load(amp.main, prefix, amp.executor)
        np.savez(folder / "ours-amp.npz", **{name: np.array(tensor_of(name)) for name in OF_AMP})
    pretrained = Program(lambda: Network(4), 4)
    static.set_program_state(
        pretrained.main, static.load_program_state(str(folder / "pretrained" / "any"))
    )
    np.savez(folder / "ours-pretrained-logits.npz", logits=pretrained.run(add_channel(images)))


{"layers": save_layers, "programs": save_programs, "load": load}[sys.argv[1]](Path(sys.argv[2]))
