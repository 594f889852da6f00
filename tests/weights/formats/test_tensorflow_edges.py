"""Graphs of TensorFlow with nodes more: computed as TensorFlow computes them, or refused by
name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from lockstep.backends.tensorflow import export
from lockstep.system.errors import CheckpointError
from lockstep.weights import Weights
from lockstep.weights.formats.tensorflow_weights import read
from tests.edges import is_same_answer, sample
from tests.inference.cases import random_tensors
from tests.weights.formats.insertions_tensorflow import (
    IMAGES,
    MEAN,
    SCOPE,
    Basic,
    Insertion,
    compute_as_read,
    freeze,
    insert,
    list_insertions,
    normalise,
    run,
    whole_graph,
)
from tests.weights.formats.onnx_cases import describe, recipe_of

REFUSALS = ("its classifier has one output", "MatMul 'MatMul:0' ")
"""What messages say that name no inserted node. The second is the node behind."""


def read_graph(graph: Any, folder: Path) -> Weights:
    (folder / "graph.pb").write_bytes(graph.SerializeToString())
    return read(folder / "graph.pb")


def test_the_graph_without_more_is_computed(tmp_path: Path) -> None:
    weights = read_graph(whole_graph(), tmp_path)
    logits = run(whole_graph(), "logits")
    assert np.abs(compute_as_read(weights) - logits).max() < 1e-4
    assert np.ptp(logits, axis=0).max() > 1, "images are told apart"
    assert weights.stated == {"mean", "std", "eval_crop"}


@pytest.mark.parametrize(
    "insertion", sample(list(list_insertions()), 23), ids=lambda parts: ": ".join(parts)
)
def test_nodes_more_are_computed_or_refused_by_name(insertion: Insertion, tmp_path: Path) -> None:
    graph, output = insert(insertion)
    try:
        weights = read_graph(graph, tmp_path)
    except CheckpointError as error:
        message = str(error)
        assert any(text in message for text in (f"{SCOPE}/", *REFUSALS))
        return
    assert is_same_answer(run(graph, output), compute_as_read(weights))


@pytest.mark.parametrize(
    "insertion",
    [
        ("before the stem", "backwards"),
        ("before the stem", "stack of channels"),
        ("before the stem", "keras normalisation"),
        ("before the classifier", "batch norm in parts"),
        ("before the classifier", "reshape of the batch"),
        ("after it", "gather"),
        ("after it", "without the first"),
        ("after it", "adjustment by a prior"),
        ("after it", "softmax of a temperature"),
        ("after it", "one sigmoid"),
        ("after it", "one sigmoid, squeezed"),
    ],
    ids=lambda parts: ": ".join(parts),
)
def test_what_is_linear_is_folded(insertion: Insertion, tmp_path: Path) -> None:
    graph, output = insert(insertion)
    assert is_same_answer(run(graph, output), compute_as_read(read_graph(graph, tmp_path)))


def tensor(name: str) -> Any:
    return tf.compat.v1.get_default_graph().get_tensor_by_name(f"{name}:0")


def classify(x: Any) -> Any:
    return tf.nn.softmax(Basic()(normalise(x)), name="probabilities")


OUTPUTS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "classes, too": (lambda x: [classify(x), tf.argmax(tensor("logits"), 1)], ""),
    "the best three, too": (lambda x: [classify(x), *tf.nn.top_k(tensor("logits"), 3)], ""),
    "logits, too": (lambda x: [classify(x), tf.identity(tensor("logits"))], ""),
    "features, too": (lambda x: [classify(x), tf.identity(tensor("features"))], ""),
    "a block, too": (lambda x: [classify(x), tf.identity(tensor("block2"))], ""),
    "names of classes, too": (
        lambda x: [
            classify(x),
            tf.gather(tf.constant(list("abcdefghij")), tf.argmax(tensor("logits"), 1)),
        ],
        "",
    ),
    "summaries, too": (
        lambda x: [
            classify(x),
            tf.compat.v1.summary.histogram("h", tensor("block1")),
            tf.compat.v1.summary.scalar("s", tf.reduce_mean(tensor("logits"))),
        ],
        "",
    ),
    "the largest, too": (
        lambda x: [tf.identity(classify(x), "answer"), tf.reduce_max(tensor("probabilities"), 1)],
        "",
    ),
    "constants, too": (lambda x: [classify(x), tf.constant([1.0, 2.0]) + 1], ""),
    "other logits, too": (
        lambda x: [classify(x), tensor("logits") + tf.constant(np.arange(10), tf.float32)],
        "several results of its classifier",
    ),
    "an auxiliary classifier, too": (
        lambda x: [classify(x), tf.reduce_mean(tensor("block2"), [1, 2]) @ tf.ones([32, 3])],
        "is used by ReduceMean 'Mean:0' and ",
    ),
    "normed features, too": (
        lambda x: [classify(x), tf.nn.l2_normalize(tensor("features"), 1)],
        "TensorFlow's Square 'l2_normalize/Square:0' follows the pooled features",
    ),
    "classes alone": (
        lambda x: tf.argmax(classify(x), 1, name="best"),
        "name only the best classes",
    ),
    "two images": (
        lambda x: classify(x) + tf.nn.softmax(Basic()(normalise(tf.reverse(x, [2])))),
        "is used by .*Slice 'ReverseV2:0'",
    ),
    "another input": (
        lambda x: classify(x * tf.compat.v1.placeholder(tf.float32, [], "scale")),
        "it has the inputs .*'scale:0'",
    ),
    "a choice of training": (
        lambda x: tf.cond(
            tf.compat.v1.placeholder_with_default(False, [], "training"),
            lambda: classify(x),
            lambda: classify(x),
        ),
        "is used by TensorFlow's StatelessIf",
    ),
}


@pytest.mark.parametrize(("function", "reason"), OUTPUTS.values(), ids=OUTPUTS)
def test_all_outputs_are_accounted_for(
    function: Callable[[Any], Any], reason: str, tmp_path: Path
) -> None:
    graph = freeze(function)
    if reason:
        with pytest.raises(CheckpointError, match=reason):
            read_graph(graph, tmp_path)
    else:
        logits = compute_as_read(read_graph(graph, tmp_path))
        assert is_same_answer(run(graph, "probabilities"), logits)


def test_bytes_are_known_by_their_type(tmp_path: Path) -> None:
    def divide(x: Any) -> Any:
        return tf.nn.softmax(Basic()(tf.cast(x, tf.float32) * 0.75), name="probabilities")

    images = IMAGES.astype(np.uint8)
    graph = freeze(lambda x: divide(x[..., ::-1]), tf.uint8)
    weights = read_graph(graph, tmp_path)
    assert (weights.stated, weights.recipe.mean) == ({"mean", "std", "eval_crop"}, (0, 0, 0))
    assert is_same_answer(run(graph, "probabilities", images), compute_as_read(weights))
    graph = freeze(lambda x: divide(x + tf.constant(9, tf.uint8)), tf.uint8)
    with pytest.raises(CheckpointError, match="Add 'add:0' before the first convolution"):
        read_graph(graph, tmp_path)


def test_a_graph_of_texts_decodes_images_itself(tmp_path: Path) -> None:
    def decode(x: Any) -> Any:
        image = tf.cast(tf.io.decode_jpeg(x[0], 3), tf.float32)
        return classify(tf.ensure_shape(image[None], [None, 64, 64, 3]))

    with tf.Graph().as_default() as graph:
        decode(tf.compat.v1.placeholder(tf.string, [None], "images"))
    with pytest.raises(CheckpointError, match="it decodes images itself"):
        read_graph(graph.as_graph_def(), tmp_path)


class Served(tf.Module):  # type: ignore[misc]
    """A ResNet whose first signature is for servers."""

    @tf.function(input_signature=[tf.TensorSpec([None, 64, 64, 3], tf.float32)])
    def probabilities(self, images: Any) -> Any:
        return {"probabilities": classify(images), "mean": tf.constant(MEAN)}

    @tf.function(input_signature=[tf.TensorSpec([None, 64, 64, 3], tf.float32)])
    def scaled(self, images: Any) -> Any:
        return {"scaled": tf.tanh(Basic()(images))}


def test_of_several_signatures_the_one_for_servers_is_read(tmp_path: Path) -> None:
    module = Served()
    signatures = {"another": module.scaled, "serving_default": module.probabilities}
    tf.saved_model.save(module, str(tmp_path / "saved"), signatures)
    weights = read(tmp_path / "saved" / "saved_model.pb")
    assert "reading the signature 'serving_default', not another" in weights.remarks
    expected = module.probabilities(tf.constant(IMAGES))["probabilities"]
    assert is_same_answer(np.asarray(expected), compute_as_read(weights))
    signatures = {"serving_default": module.scaled, "another": module.probabilities}
    tf.saved_model.save(module, str(tmp_path / "other"), signatures)
    message = r"TensorFlow's Tanh '[0-9]//Tanh:0' follows the logits"
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path / "other" / "saved_model.pb")


def remove(graph: Any, *names: str) -> None:
    for place in reversed(range(len(graph.node))):
        if graph.node[place].name in names:
            del graph.node[place]


def classify_reshaped(x: Any, reshape: Callable[[Any], Any]) -> Any:
    """Add a second classifier, of reshaped features."""
    Basic()(normalise(x))
    features = reshape(tensor("features"))
    return tf.matmul(features, tf.constant(np.eye(64, 10), tf.float32), name="reshaped")


@pytest.mark.parametrize("count", [2, 10])
@pytest.mark.parametrize(
    ("reshape", "is_read"),
    [
        (lambda x, count: tf.reshape(x, [count, -1]), True),
        (lambda x, count: tf.reshape(tf.reshape(x, [count, -1]), [-1, 64]), True),
        (lambda x, count: tf.gather(tf.reshape(x, [count, -1]), np.arange(64), axis=1), False),
        (lambda x, count: tf.reshape(x, [count, -1])[:, :64] * 2, False),
    ],
)
def test_a_reshape_for_a_number_of_images_mixes_none(
    reshape: Callable[[Any, int], Any], is_read: bool, count: int, tmp_path: Path
) -> None:
    graph = freeze(lambda x: classify_reshaped(x, lambda value: reshape(value, count)))
    remove(graph, "logits", "MatMul")
    if is_read:
        images = np.concatenate([IMAGES] * 3)[:count]
        logits = compute_as_read(read_graph(graph, tmp_path))
        expected = run(graph, "reshaped", images)
        assert is_same_answer(expected[:4], logits[:count])
    else:
        with pytest.raises(CheckpointError, match="follows the pooled features"):
            read_graph(graph, tmp_path)


def test_a_mean_over_channels_is_refused_by_the_names_of_its_axes(tmp_path: Path) -> None:
    def average(x: Any) -> Any:
        Basic()(normalise(x))
        return tf.reduce_mean(tensor("block3"), [1, 3])

    graph = freeze(average)
    remove(graph, "logits", "MatMul", "features")
    with pytest.raises(CheckpointError, match="averages over channels and height, expected"):
        read_graph(graph, tmp_path)


@pytest.mark.parametrize(
    ("place", "change"), [("before", lambda x: x - 0.5), ("after", lambda x: tf.reverse(x, [-1]))]
)
def test_exports_that_prepare_photos_otherwise_are_refused(
    place: str, change: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(eval_resize=36, eval_crop=32, image_size=32)
    crop = export.PhotoProgram.crop
    with monkeypatch.context() as patch:
        if place == "before":
            ensure = tf.ensure_shape
            patch.setattr(tf, "ensure_shape", lambda x, shape: ensure(change(x), shape))
        else:
            patch.setattr(export.PhotoProgram, "crop", lambda self, x: crop(self, change(x)))
        tensors = random_tensors(recipe, 1)
        export.export_frozen_graph(recipe, tensors, (), tmp_path / "a", describe(recipe))
    with pytest.raises(CheckpointError, match="nodes before EnsureShape"):
        read(tmp_path / "a" / "frozen_graph.pb")
