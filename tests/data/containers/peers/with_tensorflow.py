"""Read ours.tfrecord with TensorFlow and write theirs.tfrecord and shuffled.tfrecord; print what
was read as JSON."""

import hashlib
import json
import random
import sys
from pathlib import Path

import tensorflow as tf

TEXTS = (
    "image/encoded",
    "image/filename",
    "image/class/synset",
    "image/class/text",
    "image/colorspace",
    "image/format",
)
NUMBERS = ("image/class/label", "image/height", "image/width", "image/channels")


def read(path: Path) -> list[dict[str, object]]:
    keys = dict.fromkeys(TEXTS, tf.io.FixedLenFeature([], tf.string))
    keys |= dict.fromkeys(NUMBERS, tf.io.FixedLenFeature([], tf.int64))
    items = []
    for payload in tf.data.TFRecordDataset(str(path)):
        example = {
            key: value.numpy() for key, value in tf.io.parse_single_example(payload, keys).items()
        }
        shape = tf.io.decode_jpeg(example["image/encoded"]).shape.as_list()
        image = hashlib.sha256(example.pop("image/encoded")).hexdigest()
        texts = {key: value.decode() for key, value in example.items() if key in TEXTS}
        items.append(
            texts | {key: int(example[key]) for key in NUMBERS} | {"image": image, "shape": shape}
        )
    return items


def features(folder: Path) -> list[dict[str, tf.train.Feature]]:
    """Return the features that NVIDIA's script writes for every image."""
    items = []
    for _, label, name in json.loads((folder / "samples.json").read_text()):
        texts = {
            "image/colorspace": b"RGB",
            "image/class/synset": name.partition("/")[0].encode(),
            "image/class/text": b"some words",
            "image/format": b"JPEG",
            "image/filename": name.encode(),
            "image/encoded": (folder / "images" / name).read_bytes(),
        }
        numbers = {
            "image/height": 20,
            "image/width": 30,
            "image/channels": 3,
            "image/class/label": label + 1,
        }
        items.append(
            {
                key: tf.train.Feature(bytes_list=tf.train.BytesList(value=[text]))
                for key, text in texts.items()
            }
            | {
                key: tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
                for key, number in numbers.items()
            }
            | {
                "image/object/bbox/xmin": tf.train.Feature(
                    float_list=tf.train.FloatList(value=[0.25, 0.5])
                )
            }
        )
    return items


def message(feature: dict[str, tf.train.Feature]) -> bytes:
    return tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString()


def write(folder: Path) -> None:
    with tf.io.TFRecordWriter(str(folder / "theirs.tfrecord")) as writer:
        for feature in features(folder):
            writer.write(message(feature))
    with tf.io.TFRecordWriter(str(folder / "shuffled.tfrecord")) as writer:
        for seed, feature in enumerate(features(folder)):
            keys = random.Random(seed).sample(sorted(feature), len(feature))
            # Concatenated messages are one message with the fields of all, in this order.
            writer.write(b"".join(message({key: feature[key]}) for key in keys))


def main() -> None:
    folder = Path(sys.argv[1])
    write(folder)
    items = {name: read(folder / f"{name}.tfrecord") for name in ("ours", "shuffled")}
    print(json.dumps(items | {"version": tf.__version__}))


main()
