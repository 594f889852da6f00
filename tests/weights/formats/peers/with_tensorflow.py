"""Write checkpoints with TensorFlow's own Saver and restore Lockstep's.

    with_tensorflow.py make FOLDER        models, many types, two data files, a partitioned one
    with_tensorflow.py full FOLDER        ResNet-50 at full size
    with_tensorflow.py restore FOLDER     reads ours/ in every way that TensorFlow has

The graph has the scopes of NVIDIA's model code. It is written for this test and shares no code with
Lockstep.
"""

import functools
import sys
from pathlib import Path

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1
v1.disable_v2_behavior()

RESNET = {
    **{"scope": "resnet50", "layers": (2, 1, 1, 1), "stem": 8, "widths": (8, 16, 32, 64)},
    **{"expansion": 4, "groups": 1},
}
RESNEXT = RESNET | {
    **{"scope": "resnext101-32x4d", "layers": (1, 2, 1, 1), "expansion": 2, "groups": 4},
    "final_conv": True,
}
FULL = RESNET | {"layers": (3, 4, 6, 3), "stem": 64, "widths": (64, 128, 256, 512)}
MODELS = {"resnet": RESNET, "resnext": RESNEXT}
COLOURS = [123.68, 116.28, 103.53], [58.395, 57.12, 57.385]
"""Mean and standard deviation of NVIDIA's code."""
LOGITS = 1001


def variable(name, shape, low, high, seed):
    initial = np.random.default_rng(seed).uniform(low, high, shape).astype(np.float32)
    return v1.get_variable(name, initializer=initial)


def kernel(name, shape):
    bound = np.sqrt(6 / np.prod(shape[:-1]))
    return variable(name, shape, -bound, bound, len(v1.global_variables()))


def batch_norm(x, training, layout):
    channels = int(x.shape[layout.index("C")])
    with v1.variable_scope("BatchNorm"):
        count = len(v1.global_variables())
        gamma = variable("gamma", [channels], 0.5, 1.5, count)
        beta = variable("beta", [channels], -0.5, 0.5, count + 1)
        mean = v1.get_variable(
            "moving_mean", initializer=np.zeros(channels, np.float32), trainable=False
        )
        variance = v1.get_variable(
            "moving_variance", initializer=np.ones(channels, np.float32), trainable=False
        )
    if not training:
        return v1.nn.fused_batch_norm(
            x, gamma, beta, mean, variance, epsilon=1e-5, data_format=layout, is_training=False
        )[0]
    y, found_mean, found_variance = v1.nn.fused_batch_norm(
        x, gamma, beta, epsilon=1e-5, is_training=True
    )
    for running, actual in ((mean, found_mean), (variance, found_variance)):
        v1.add_to_collection(
            v1.GraphKeys.UPDATE_OPS, v1.assign_sub(running, (running - actual) * 0.1)
        )
    return y


def conv_block(x, channels, size, stride, name, training, relu=True, groups=1, layout="NHWC"):
    with v1.variable_scope(name):
        if groups == 1:
            with v1.variable_scope("conv2d"):
                weight = kernel("kernel", [size, size, int(x.shape[layout.index("C")]), channels])
            x = tf.nn.conv2d(x, weight, stride, "SAME", data_format=layout)
        else:
            weight = kernel(name + "group_filter", [3, 3, channels // groups, channels])
            if layout == "NCHW":
                x = tf.nn.conv2d(x, weight, stride, "SAME", data_format=layout)
            else:
                pairs = zip(tf.split(x, groups, 3), tf.split(weight, groups, 3), strict=True)
                x = tf.concat(
                    [tf.nn.conv2d(part, filters, stride, "SAME") for part, filters in pairs], 3
                )
        x = batch_norm(x, training, layout)
        return tf.nn.relu(x) if relu else x


def graph(images, model, training):
    layout = model.get("layout", "NHWC")
    block_of = functools.partial(conv_block, training=training, layout=layout)
    with v1.variable_scope(model["scope"], reuse=v1.AUTO_REUSE):
        x = block_of(images, model["stem"], 7, 2, "conv2d")
        x = tf.nn.max_pool2d(x, 3, 2, "SAME", data_format=layout)
        for stage, (depth, width) in enumerate(zip(model["layers"], model["widths"], strict=True)):
            for block in range(depth):
                stride = 2 if block == 0 and stage else 1
                outputs = width * model["expansion"]
                with v1.variable_scope(f"btlnck_block_{stage}_{block}"):
                    shortcut = x
                    if int(x.shape[layout.index("C")]) != outputs:
                        with v1.variable_scope("shortcut"):
                            shortcut = block_of(x, outputs, 1, stride, "conv2d", relu=False)
                    y = block_of(x, width, 1, 1, "bottleneck_1")
                    y = block_of(y, width, 3, stride, "bottleneck_2", groups=model["groups"])
                    y = block_of(y, outputs, 1, 1, "bottleneck_3", relu=False)
                    x = tf.nn.relu(shortcut + y)
        with v1.variable_scope("output"):
            x = tf.reduce_mean(x, [layout.index("H"), layout.index("W")])
            with v1.variable_scope("dense"):
                head = [int(x.shape[-1]), LOGITS]
                weight = kernel("kernel", [1, 1, *head] if model.get("final_conv") else head)
                bias = variable("bias", [LOGITS], -0.1, 0.1, 0)
            return head_of(x, weight, bias, model)


def head_of(x, weight, bias, model):
    """Return logits, in the exported graph of a final convolution by this convolution."""
    if "layout" in model and len(weight.shape) == 4:
        x = tf.reshape(x, [-1, int(x.shape[-1]), 1, 1])
        y = tf.nn.bias_add(
            tf.nn.conv2d(x, weight, 1, "SAME", data_format="NCHW"), bias, data_format="NCHW"
        )
        return tf.squeeze(y, [2, 3])
    return tf.matmul(x, tf.reshape(weight, weight.shape[-2:])) + bias


def values(session):
    variables = v1.global_variables()
    return dict(
        zip([variable.op.name for variable in variables], session.run(variables), strict=True)
    )


def make_model(folder, name, images):
    """Train two steps, so that every variable and slot has changed."""
    with tf.Graph().as_default(), v1.Session() as session:
        fed = tf.constant(images)
        step = v1.train.get_or_create_global_step()
        logits = graph(fed, MODELS[name], training=True)
        labels = tf.constant(np.arange(len(images)) * 100)
        loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        optimizer = v1.train.MomentumOptimizer(0.05, 0.9)
        with tf.control_dependencies(v1.get_collection(v1.GraphKeys.UPDATE_OPS)):
            update = optimizer.minimize(loss, global_step=step)
        session.run(v1.global_variables_initializer())
        for _ in range(2):
            session.run(update)
        v1.train.Saver().save(session, str(folder / name / "model.ckpt"), global_step=step)
        np.savez(folder / f"{name}.npz", **values(session))
    np.savez(
        folder / f"{name}-logits.npz",
        logits=restore_logits(folder / name / "model.ckpt-2", MODELS[name], images),
    )
    freeze(folder, name)


def freeze(folder, name):
    """Write what NVIDIA's code exports: a frozen graph of normalised images, and a SavedModel that
    normalises them.

    The frozen graph of ResNeXt has the layout NCHW, and is not run: TensorFlow's CPU kernels have
    no such convolution.
    """
    layout = "NCHW" if name == "resnext" else "NHWC"
    with tf.Graph().as_default(), v1.Session() as session:
        shape = [None, 64, 64, 3]
        images = v1.placeholder(
            tf.float32,
            [shape[i] for i in (0, 3, 1, 2)] if layout == "NCHW" else shape,
            name="input",
        )
        probabilities = tf.nn.softmax(
            graph(images, MODELS[name] | {"layout": layout}, training=False), name="softmax"
        )
        v1.train.Saver().restore(session, str(folder / name / "model.ckpt-2"))
        definition = session.graph.as_graph_def()
        frozen = v1.graph_util.convert_variables_to_constants(
            session, definition, [probabilities.op.name]
        )
        (folder / f"{name}.pb").write_bytes(frozen.SerializeToString())
    with tf.Graph().as_default(), v1.Session() as session:
        images = v1.placeholder(tf.uint8, [None, 64, 64, 3], name="images")
        mean, std = (tf.reshape(tf.constant(values), [1, 1, 3]) for values in COLOURS)
        logits = graph((tf.cast(images, tf.float32) - mean) / std, MODELS[name], training=False)
        v1.train.Saver().restore(session, str(folder / name / "model.ckpt-2"))
        outputs = {"classes": tf.argmax(logits, axis=1), "probabilities": tf.nn.softmax(logits)}
        v1.saved_model.simple_save(
            session, str(folder / f"{name}-saved"), {"images": images}, outputs
        )


def restore_logits(prefix, model, images):
    """Restore the inference graph, which has no slots, and return its logits."""
    with tf.Graph().as_default(), v1.Session() as session:
        v1.train.get_or_create_global_step()
        logits = graph(tf.constant(images), model, training=False)
        v1.train.Saver().restore(session, str(prefix))
        return session.run(logits)


def make_types(folder):
    """Write every type that can be read, two that cannot, and shapes of all ranks."""
    with tf.Graph().as_default(), v1.Session() as session:
        numbers = np.random.default_rng(0).standard_normal((3, 4)).astype(np.float32)
        for dtype in (
            *(tf.float32, tf.float64, tf.float16, tf.bfloat16, tf.int32, tf.int64, tf.bool),
            tf.string,
        ):
            value = np.array([["a", ""]]) if dtype == tf.string else tf.cast(numbers * 10, dtype)
            v1.get_variable(f"types/{dtype.name}", initializer=value)
        v1.get_variable("shapes/scalar", initializer=np.float32(1.5))
        v1.get_variable("shapes/empty", initializer=np.zeros((0, 3), np.float32))
        v1.get_variable(
            "shapes/long", initializer=np.arange(10_000, dtype=np.float32).reshape(1, 100, 1, 100)
        )
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(folder / "types" / "types"))
        kept = {
            name: value
            for name, value in values(session).items()
            if not name.endswith(("bool", "string", "bfloat16"))
        }
        np.savez(
            folder / "types.npz",
            **kept,
            bfloat16=session.run(tf.cast(tf.cast(numbers * 10, tf.bfloat16), tf.float32)),
        )


def make_sharded(folder):
    devices = v1.ConfigProto(device_count={"CPU": 3})
    with tf.Graph().as_default(), v1.Session(config=devices) as session:
        for i in range(6):
            with tf.device(f"/cpu:{i % 3}"):
                v1.get_variable(f"v{i}", initializer=np.full((5, i + 1), i, np.float32))
        session.run(v1.global_variables_initializer())
        v1.train.Saver(sharded=True).save(session, str(folder / "sharded" / "sharded"))


def make_partitioned(folder):
    with tf.Graph().as_default(), v1.Session() as session:
        partitioner = v1.fixed_size_partitioner(2)
        v1.get_variable("parts", [6, 2], initializer=v1.ones_initializer(), partitioner=partitioner)
        v1.get_variable("whole", initializer=np.ones(2, np.float32))
        session.run(v1.global_variables_initializer())
        v1.train.Saver().save(session, str(folder / "partitioned" / "partitioned"))


def make_many(folder):
    """Write more entries than one block of an index holds."""
    with tf.Graph().as_default(), v1.Session() as session:
        variables = [
            v1.get_variable(f"a/{i % 7}/{'long' * 50}/{i}", initializer=np.float32(i))
            for i in range(1500)
        ]
        session.run(v1.global_variables_initializer())
        v1.train.Saver(variables).save(session, str(folder / "many" / "many"))


def make(folder):
    images = np.load(folder / "images.npy")
    make_sharded(folder)  # first: a process keeps the devices of its first session
    for name in MODELS:
        make_model(folder, name, images)
    make_types(folder)
    make_partitioned(folder)
    make_many(folder)


def restore(folder):
    images = np.load(folder / "images.npy")
    for path in sorted((folder / "ours").glob("*.index")):
        prefix = path.with_suffix("")
        reader = tf.train.load_checkpoint(str(prefix))
        shapes = reader.get_variable_to_shape_map()
        np.savez(
            folder / f"ours-{prefix.name}.npz", **{name: reader.get_tensor(name) for name in shapes}
        )
        if prefix.name in MODELS:
            model = MODELS[prefix.name] | {"scope": "resnet", "final_conv": False}
            np.savez(
                folder / f"ours-{prefix.name}-logits.npz",
                logits=restore_logits(prefix, model, images),
            )
    (folder / "newest.txt").write_text(tf.train.latest_checkpoint(str(folder / "ours")))


{"make": make, "restore": restore}[sys.argv[1]](Path(sys.argv[2]))
