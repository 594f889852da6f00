"""Save checkpoints with MXNet's own functions and load Lockstep's.

    with_mxnet.py arrays FOLDER     arrays of every MXNet type, and Lockstep's as MXNet loads them
    with_mxnet.py save FOLDER       models saved by Module and by Gluon, values and logits
    with_mxnet.py load FOLDER       loads ours-0007.params in every possible way
    with_mxnet.py edges FOLDER      networks with an operator more, and their outputs

Every result is a .npz. The networks have the layers of NVIDIA's symbol code. They are written for
this test and share no code with Lockstep.
"""

import sys
from pathlib import Path

import mxnet as mx
import numpy as np
from mxnet.gluon.model_zoo import vision

SMALL = (8, (32, 64, 128, 256), (2, 1, 1, 1))
RESNET50 = (64, (256, 512, 1024, 2048), (3, 4, 6, 3))
LOGITS = 10


class Builder:
    """Builds the original's symbols."""

    def __init__(self, layout, half=False, epsilon=1e-5):
        self.layout = layout
        self.half = half
        self.epsilon = epsilon

    def unit(self, x, name, norm, outputs, size, stride=1):
        pad = (size // 2, size // 2)
        x = mx.sym.Convolution(
            data=x, num_filter=outputs, kernel=(size, size), stride=(stride, stride), pad=pad,
            no_bias=True, workspace=256, name=name, layout=self.layout,
        )  # fmt: skip
        axis = 3 if self.layout == "NHWC" else 1
        return mx.sym.BatchNorm(
            data=x, axis=axis, fix_gamma=False, eps=self.epsilon, momentum=0.9, name=norm
        )

    def pool(self, x, **kwargs):
        # On a CPU, MXNet pools only in NCHW.
        if self.layout == "NHWC":
            x = mx.sym.transpose(data=x, axes=(0, 3, 1, 2))
        x = mx.sym.Pooling(data=x, layout="NCHW", **kwargs)
        return mx.sym.transpose(data=x, axes=(0, 2, 3, 1)) if self.layout == "NHWC" else x

    def block(self, x, name, outputs, stride, first):
        relu = {"act_type": "relu"}
        y = mx.sym.Activation(
            data=self.unit(x, f"{name}_conv1", f"{name}_bn1", outputs // 4, 1),
            name=f"{name}_relu1",
            **relu,
        )
        y = self.unit(y, f"{name}_conv2", f"{name}_bn2", outputs // 4, 3, stride)
        y = mx.sym.Activation(data=y, name=f"{name}_relu2", **relu)
        y = self.unit(y, f"{name}_conv3", f"{name}_bn3", outputs, 1)
        shortcut = self.unit(x, f"{name}_conv1sc", f"{name}_sc", outputs, 1, stride) if first else x
        return mx.sym.Activation(data=y + shortcut, name=f"{name}_relu3", **relu)

    def network(self, size, insert=lambda place, x: x):
        width, stages, depths = size
        x = insert("before the stem", mx.sym.Variable("data"))
        if self.half:
            x = mx.sym.Cast(data=x, dtype=np.float16)
        if self.layout == "NHWC":
            x = mx.sym.transpose(data=x, axes=(0, 2, 3, 1))
        x = mx.sym.Activation(
            data=self.unit(x, "conv0", "bn0", width, 7, 2), act_type="relu", name="relu0"
        )
        x = self.pool(x, kernel=(3, 3), stride=(2, 2), pad=(1, 1), pool_type="max")
        for stage, (outputs, depth) in enumerate(zip(stages, depths, strict=True), start=1):
            for i in range(1, depth + 1):
                x = self.block(
                    x, f"stage{stage}_unit{i}", outputs, 2 if i == 1 and stage > 1 else 1, i == 1
                )
            x = insert("between blocks", x) if stage == 2 else x
        x = mx.sym.Flatten(
            data=self.pool(x, global_pool=True, kernel=(7, 7), pool_type="avg", name="pool1")
        )
        x = insert("before the classifier", x)
        x = mx.sym.FullyConnected(data=x, num_hidden=LOGITS, name="fc1")
        if insert("after it", x) is not x:
            return insert("after it", x)
        if self.half:
            x = mx.sym.Cast(data=x, dtype=np.float32)
        return mx.sym.SoftmaxOutput(data=x, name="softmax")


def randomise(shapes):
    """Return values that are all different, and of a size that keeps activations in range."""
    arrays = {}
    for seed, (name, shape) in enumerate(sorted(shapes.items())):
        random = np.random.default_rng(seed)
        if len(shape) > 1:
            values = random.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))
        elif name.endswith("_bn3_gamma"):
            values = random.uniform(0.1, 0.5, shape)
        else:
            values = random.uniform(0.5, 1.5, shape) - (0 if name.endswith(("gamma", "var")) else 1)
        arrays[name] = values.astype(np.float32)
    return arrays


def logits_of(symbol, arguments, statistics, images):
    """Run the network up to the softmax, in float32."""
    outputs = symbol.get_internals()
    last = outputs[[name for name in outputs.list_outputs() if name.startswith("fc1")][-1]]
    module = mx.mod.Module(last, label_names=None)
    module.bind([("data", images.shape)], for_training=False)
    module.set_params(arguments, statistics)
    module.forward(mx.io.DataBatch([mx.nd.array(images)]), is_train=False)
    return module.get_outputs()[0].asnumpy()


def save_module(folder, name, builder, size, channels, images, epoch=90):
    """Save a Module as the original's callback does. Logits are computed in NCHW and float32, which
    a CPU supports."""
    symbol = builder.network(size)
    padded = np.concatenate([images, np.zeros_like(images[:, : channels - 3])], axis=1)
    shapes, _, of_statistics = symbol.infer_shape(data=padded.shape, softmax_label=(len(images),))
    arguments = dict(zip(symbol.list_arguments(), shapes, strict=True))
    values = randomise({n: s for n, s in arguments.items() if n not in ("data", "softmax_label")})
    statistics = randomise(dict(zip(symbol.list_auxiliary_states(), of_statistics, strict=True)))
    dtype = np.float16 if builder.half else np.float32
    # In fp16 the original keeps batch norms in float32.
    stored = {
        n: v.astype(np.float32 if n.endswith(("gamma", "beta")) else dtype)
        for n, v in values.items()
    }
    arrays = [
        {n: mx.nd.array(v, dtype=v.dtype) for n, v in part.items()} for part in (stored, statistics)
    ]
    mx.model.save_checkpoint(str(folder / name), epoch, symbol, *arrays)
    np.savez(folder / f"{name}.npz", **stored, **statistics)
    plain = {
        n: mx.nd.array(
            (v.transpose(0, 3, 1, 2) if builder.layout == "NHWC" and v.ndim == 4 else v).astype(
                np.float32
            )
        )
        for n, v in stored.items()
    }
    same = Builder("NCHW", epsilon=builder.epsilon).network(size)
    np.savez(folder / f"{name}-logits.npz", logits=logits_of(same, plain, arrays[1], padded))


def save_gluon(folder, name, network, images):
    network.initialize(mx.init.Xavier(magnitude=3))
    network.hybridize()
    with mx.autograd.record():
        network(mx.nd.array(images)).wait_to_read()  # statistics that are not 0 and 1
    for bias in network.collect_params(".*conv[0-9]+_bias").values():
        bias.set_data(mx.nd.random.normal(shape=bias.shape))  # initial biases are 0
    logits = network(mx.nd.array(images))
    network.export(str(folder / name), epoch=3)
    network.save_parameters(str(folder / f"{name}-paths.params"))
    network.collect_params().save(str(folder / f"{name}-names.params"))
    np.savez(folder / f"{name}-logits.npz", logits=logits.asnumpy())


class Block(mx.gluon.HybridBlock):
    """A bottleneck as NVIDIA's Gluon code builds it: all layers are counted together, and the last
    one includes the sum."""

    def __init__(self, inputs, outputs, stride, first):
        super().__init__()
        nn = mx.gluon.nn
        width = outputs // 4
        self.body = nn.HybridSequential()
        self.downsample = None
        for size, step in ((1, 1), (3, stride)):
            self.body.add(nn.Conv2D(width, size, step, size // 2, use_bias=False))
            normed = nn.HybridSequential()
            normed.add(nn.BatchNorm(epsilon=1e-5), nn.Activation("relu"))
            self.body.add(normed)
        self.body.add(nn.Conv2D(outputs, 1, use_bias=False))
        self.bn_add_relu = nn.HybridSequential()
        self.bn_add_relu.bn = nn.BatchNorm(epsilon=1e-5)
        if first:
            self.downsample = nn.HybridSequential()
            self.downsample.add(
                nn.Conv2D(outputs, 1, stride, use_bias=False), nn.BatchNorm(epsilon=1e-5)
            )

    def hybrid_forward(self, F, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        return F.relu(self.bn_add_relu.bn(self.body(x)) + shortcut)


class Network(mx.gluon.HybridBlock):
    def __init__(self, head=None):
        super().__init__()
        nn, (width, stages, depths) = mx.gluon.nn, SMALL
        with self.name_scope():
            self.features = nn.HybridSequential()
            normed = nn.HybridSequential()
            self.features.add(nn.Conv2D(width, 7, 2, 3, use_bias=False))
            normed.add(nn.BatchNorm(epsilon=1e-5), nn.Activation("relu"))
            self.features.add(normed, nn.MaxPool2D(3, 2, 1))
            inputs = width
            for stage, (outputs, depth) in enumerate(zip(stages, depths, strict=True)):
                made = nn.HybridSequential()
                for i in range(depth):
                    made.add(Block(inputs, outputs, 2 if i == 0 and stage else 1, i == 0))
                    inputs = outputs
                self.features.add(made)
            self.features.add(nn.GlobalAvgPool2D())
            self.output = nn.HybridSequential(prefix="head_") if head else nn.Dense(LOGITS)
            with self.output.name_scope():
                if head:
                    self.output.add(*head(nn))

    def hybrid_forward(self, F, x):
        return self.output(self.features(x))


def save(folder):
    images = np.load(folder / "images.npy")
    save_module(folder, "nchw", Builder("NCHW"), SMALL, 3, images)
    save_module(folder, "nhwc", Builder("NHWC"), SMALL, 3, images)
    save_module(folder, "half", Builder("NHWC", half=True), SMALL, 4, images)
    save_module(folder, "epsilon", Builder("NCHW", epsilon=2e-2), SMALL, 3, images)
    save_module(folder, "resnet50", Builder("NCHW"), RESNET50, 3, images)
    save_gluon(folder, "counted", Network(), images)
    save_gluon(folder, "resnet18_v1", vision.resnet18_v1(classes=LOGITS), images)
    save_gluon(folder, "resnet50_v1", vision.resnet50_v1(classes=LOGITS), images)


def load(folder):
    """Load as the original resumes an epoch, then as Gluon imports a graph, then train a step."""
    images = np.load(folder / "images.npy")
    labels = mx.nd.array(np.arange(len(images)))
    module = mx.mod.Module.load(str(folder / "ours"), 7)
    module.bind([("data", images.shape)], [("softmax_label", (len(images),))])
    module.init_params(force_init=False)
    module.forward(mx.io.DataBatch([mx.nd.array(images)], [labels]), is_train=False)
    outputs = {"module": module.get_outputs()[0].asnumpy()}
    arguments, statistics = module.get_params()
    outputs |= {name: value.asnumpy() for name, value in (arguments | statistics).items()}
    files = (
        str(folder / "ours-symbol.json"),
        ["data", "softmax_label"],
        str(folder / "ours-0007.params"),
    )
    block = mx.gluon.SymbolBlock.imports(*files)
    outputs["gluon"] = block(mx.nd.array(images), labels).asnumpy()
    graph = mx.sym.load(files[0])
    outputs["nodes"] = np.array([graph.tojson(), Builder("NCHW").network(SMALL).tojson()])
    np.savez(folder / "ours.npz", **outputs)
    module.init_optimizer(optimizer_params={"learning_rate": 0.1, "rescale_grad": 1 / len(images)})
    module.forward_backward(mx.io.DataBatch([mx.nd.array(images)], [labels]))
    module.update()
    # MXNet does not know that the backward pass writes statistics, and would read them before
    mx.nd.waitall()
    after = {
        "bias": module.get_params()[0]["fc1_bias"],
        "mean": module.get_params()[1]["bn0_moving_mean"],
    }
    after["probabilities"] = module.get_outputs()[0]
    np.savez(folder / "ours-after.npz", **{name: value.asnumpy() for name, value in after.items()})


def arrays(folder):
    """Write and load files of arrays, MXNet's and Lockstep's."""
    values = np.array([[1.5, 0.0, 3.0], [0.0, 2.0, 0.0]])
    kinds = ("float32", "float64", "float16", "uint8", "int32", "int8", "int64", "bool")
    dense = {kind: mx.nd.array(values, dtype=kind) for kind in kinds}
    mx.nd.save(str(folder / "theirs.params"), dense)
    np.savez(folder / "theirs.npz", **{kind: value.asnumpy() for kind, value in dense.items()})
    halves = mx.nd.amp_cast(dense["float32"], dtype=np.dtype([("bfloat16", np.uint16)]))
    mx.nd.save(str(folder / "bfloat16.params"), {"x": halves})
    for kind in ("row_sparse", "csr"):
        mx.nd.save(str(folder / f"{kind}.params"), {"x": dense["float32"].tostype(kind)})
    mx.nd.save(str(folder / "nameless.params"), [dense["float32"]])
    mx.nd.save(str(folder / "empty.params"), {})
    with mx.util.np_shape(True):
        mx.nd.save(str(folder / "numpy.params"), {"x": dense["float32"]})
    np.savez(
        folder / "loaded.npz",
        **{n: v.asnumpy() for n, v in mx.nd.load(str(folder / "ours.params")).items()},
    )
    for name in ("first", "V1"):
        np.savez(
            folder / f"{name}.npz",
            **{n: v.asnumpy() for n, v in mx.nd.load(str(folder / f"{name}.params")).items()},
        )


def edges(folder):
    """Save networks with an operator more, one after the other, and what they compute."""
    from tests.weights.formats import insertions_mxnet as insertions

    images = np.load(folder / "images.npy")
    outputs = {}
    for number, (place, name, make) in enumerate(insertions.CASES):
        turned = insertions.turn_images(name, images)
        made = {}

        def insert(where, x, place=place, make=make, made=made):
            if where == place and not made:
                with mx.name.Prefix(insertions.PREFIX):
                    made[where] = make(mx, x)
            return made[where] if where == place else x

        symbol = Builder("NCHW").network(SMALL, insert)
        bound = symbol.simple_bind(mx.cpu(), data=turned.shape, grad_req="null")
        parts = [bound.arg_dict, bound.aux_dict]
        fed = {"data"} | {name for name in bound.arg_dict if name.endswith("label")}
        shapes = {n: a.shape for part in parts for n, a in part.items() if n not in fed}
        values = randomise(shapes)
        constants = insertions.list_constants(place, insertions.CHANNELS[place])
        values |= {n: v.astype(np.float32) for n, v in constants.items() if n in values}
        bound.arg_dict["data"][:] = turned
        for part in parts:
            for name in part.keys() & values.keys():
                part[name][:] = values[name]
        outputs[str(number)] = bound.forward(is_train=False)[0].asnumpy()
        saved = [{n: a for n, a in part.items() if n in values} for part in parts]
        mx.model.save_checkpoint(str(folder / f"case{number}"), 0, symbol, *saved)
    np.savez(folder / "edges.npz", **outputs)
    for number, head in enumerate(insertions.HEADS.values()):
        save_gluon(folder, f"head{number}", Network(head), images)
    prepared = mx.gluon.nn.HybridSequential()
    transforms = mx.gluon.data.vision.transforms
    prepared.add(transforms.ToTensor(), transforms.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.4)))
    prepared.add(Network())
    save_gluon(folder, "prepared", prepared, np.load(folder / "photos.npy"))


{"arrays": arrays, "save": save, "load": load, "edges": edges}[sys.argv[1]](Path(sys.argv[2]))
