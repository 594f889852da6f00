"""Names of classes are those of ImageNet as other libraries publish them, or those of a file."""

import hashlib
import json
from pathlib import Path

import pytest

from lockstep.recipes import Recipe
from lockstep.system.errors import DataError
from lockstep.weights.class_names import (
    assume_classes,
    check_classes,
    describe_class,
    imagenet_names,
    imagenet_synsets,
    read_classes,
)

# From the categories of torchvision's weights and from Keras' imagenet_class_index.json.
ANCHORS = {
    **{0: ("n01440764", "tench"), 1: ("n01443537", "goldfish")},
    **{207: ("n02099601", "golden retriever"), 281: ("n02123045", "tabby")},
    **{285: ("n02124075", "Egyptian cat"), 388: ("n02510455", "giant panda")},
    999: ("n15075141", "toilet tissue"),
}


@pytest.mark.parametrize("number", ANCHORS)
def test_a_class_has_the_id_and_the_name_that_keras_gives_it(number: int) -> None:
    assert (imagenet_synsets()[number], imagenet_names()[number]) == ANCHORS[number]


def test_all_names_are_those_of_torchvision_in_its_order() -> None:
    # Of the categories in torchvision 0.29 models/_meta.py, joined by newlines.
    published = "0b0f9fee7c952f257418d62aa701f023a9da13b443a14f5c4291e5724d92967c"
    assert hashlib.sha256("\n".join(imagenet_names()).encode()).hexdigest() == published


def test_all_synset_ids_are_those_of_timm_in_its_order() -> None:
    # Of data/_info/imagenet_synsets.txt in timm 1.0.31, without the newline at its end.
    published = "385e0240499426c022b773be1ae4da780f057b89c9694c7f47199f62746b6edd"
    assert hashlib.sha256("\n".join(imagenet_synsets()).encode()).hexdigest() == published


def test_no_two_of_imagenets_classes_have_the_same_name() -> None:
    assert len(set(imagenet_names())) == len(set(imagenet_synsets())) == 1000
    assert (imagenet_names()[134], imagenet_names()[517]) == ("crane bird", "crane")
    assert (imagenet_names()[638], imagenet_names()[639]) == ("maillot", "maillot tank suit")


def test_a_synset_id_is_shown_with_its_word_and_other_names_are_unchanged() -> None:
    assert [describe_class(name) for name in ("n02123045", "cat", "n00000001", "281", "")] == [
        *("tabby (n02123045)", "cat", "n00000001", "281", "")
    ]


@pytest.mark.parametrize(
    ("logits", "padding", "names"),
    [
        (1000, "symmetric", 1000),
        (1000, "same", 1000),
        # NVIDIA's TensorFlow model: labels 0 to 999, and an output that is never trained.
        (1001, "same", 1000),
        (1001, "symmetric", 0),  # it may have a background class, which comes first
        (999, "symmetric", 0),
        (10, "same", 0),
    ],
)
def test_imagenet_is_assumed_of_1000_outputs(logits: int, padding: str, names: int) -> None:
    classes = assume_classes(Recipe(model="resnet18").replace(logits=logits, padding=padding))
    assert classes == imagenet_names()[:names]


def text_file(folder: Path, content: bytes, name: str = "names.txt") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (b"cat\ndog\n", ("cat", "dog")),
        (b"cat\ndog", ("cat", "dog")),
        (b"cat\r\ndog\r\n\r\n", ("cat", "dog")),
        (b"\xef\xbb\xbfcat\n dog \n", ("cat", "dog")),
        (b"# cat\n[dog]\n", ("# cat", "[dog]")),
        ("Käuzchen\n猫\na\u2028b\n".encode(), ("Käuzchen", "猫", "a\u2028b")),
        (b"n01440764 tench, Tinca tinca\n", ("n01440764 tench, Tinca tinca",)),
    ],
)
def test_text_has_one_name_a_line(content: bytes, names: tuple[str, ...], tmp_path: Path) -> None:
    assert read_classes(text_file(tmp_path, content)) == names


@pytest.mark.parametrize(
    "value",
    [
        ["tench", "great white shark"],
        {"0": "tench", "1": "great white shark"},
        {"1": "great white shark", "0": "tench"},
        {"0": ["n01440764", "tench"], "1": ["n01484850", "great white shark"]},
    ],
)
def test_a_json_file_holds_a_list_or_what_keras_publishes(value: object, tmp_path: Path) -> None:
    path = text_file(tmp_path, json.dumps(value).encode(), "index.JSON")
    assert read_classes(path) == ("tench", "great white shark")


def test_more_than_ten_classes_of_a_json_object_are_ordered_by_number(tmp_path: Path) -> None:
    value = {str(i): f"class {i}" for i in sorted(range(12), key=str)}
    path = text_file(tmp_path, json.dumps(value).encode(), "index.json")
    assert read_classes(path) == tuple(f"class {i}" for i in range(12))


def test_classes_with_the_same_name_get_their_numbers(tmp_path: Path) -> None:
    value = {"0": ["n02012849", "crane"], "1": ["n02123045", "tabby"], "2": ["n03126707", "crane"]}
    path = text_file(tmp_path, json.dumps(value).encode(), "index.json")
    assert read_classes(path) == ("crane (0)", "tabby", "crane (2)")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "a.txt has no names"),
        ("a.txt", b"\n \n", "a.txt has no names"),
        ("a.txt", b"cat\n\ndog\n", "a.txt: line 2 is empty"),
        ("a.txt", b"\ncat\n", "a.txt: line 1 is empty"),
        ("a.txt", b"\xef\xbb\xbfcat\ndog\nK\xe4uzchen\n", "a.txt: line 3 is not UTF-8"),
        ("a.json", b'["cat",\n"dog"', "a.json is not JSON: .*line 2"),
        ("a.json", b'"cat"', "a.json: expected a list of names, or an object"),
        ("a.json", b"{}", "a.json has no names"),
        ("a.json", b'["cat", 7]', "a.json: class 1 is 7; expected a name on one line"),
        ("a.json", b'["cat", " "]', "a.json: class 1 is ' '"),
        ("a.json", b'["cat\\nowl"]', "a.json: class 0 is"),
        (
            "a.json",
            b'{"0": "cat", "2": "dog"}',
            'a.json: class "1" is missing; expected the keys "0" to "1"',
        ),
        ("a.json", b'{"cat": 0, "dog": 1}', 'a.json: class "0" is missing'),
        ("a.json", b'{"0": ["n02123045", "tabby", 3]}', "a.json: class 0 is"),
        ("a.json", b"[" * 100_000, "a.json is not JSON: nested too deep"),
    ],
)
def test_other_files_are_refused(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        read_classes(text_file(tmp_path, content, name))


def test_a_file_that_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no\.txt: No such file"):
        read_classes(tmp_path / "no.txt")


@pytest.mark.parametrize(
    ("names", "logits", "own"), [(3, 3, 0), (2, 3, 2), (3, 3, 2), (1000, 1001, 0), (1001, 1001, 0)]
)
def test_names_are_as_many_as_outputs_or_classes(names: int, logits: int, own: int) -> None:
    classes = [f"class {i}" for i in range(names)]
    assert check_classes(classes, logits, [str(i) for i in range(own)]) == tuple(classes)


@pytest.mark.parametrize(
    ("names", "logits", "own", "message"),
    [
        (
            2,
            3,
            0,
            "the list of classes has 2 names, but the weights have 3 outputs; expected 3 names",
        ),
        (
            4,
            3,
            2,
            (
                "the list of classes has 4 names, but the weights have 3 outputs; expected 2 or 3"
                " names"
            ),
        ),
        (999, 1000, 0, "999 names, but the weights have 1000 outputs"),
        (999, 1001, 0, "999 names, but the weights have 1001 outputs; expected 1000 or 1001 names"),
    ],
)
def test_other_numbers_are_refused(names: int, logits: int, own: int, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_classes([f"class {i}" for i in range(names)], logits, [str(i) for i in range(own)])


def test_one_text_is_the_path_of_a_file(tmp_path: Path) -> None:
    path = text_file(tmp_path, b"cat\ndog\n")
    assert check_classes(str(path), 2) == check_classes(path, 2) == ("cat", "dog")
    with pytest.raises(DataError, match=f"{path} has 2 names, .* 3 outputs"):
        check_classes(path, 3)


def test_a_name_that_is_no_text_is_refused_in_a_list_too() -> None:
    with pytest.raises(DataError, match="the list of classes: class 1 is 7"):
        check_classes(["cat", 7], 2)  # type: ignore[list-item]
