"""What users are told to install exists: packages at versions that are tested, and Lockstep from
its files."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from lockstep.backends import FRAMEWORKS
from lockstep.data.decoding import image_formats
from lockstep.data.loading import dali
from lockstep.inference import serving
from lockstep.inference.runtimes import RUNTIMES
from lockstep.runs.loggers import LOGGERS
from lockstep.weights import signature
from lockstep.weights.formats import keras_variables

ROOT = Path(__file__).parent.parent
TEXTS = [
    *ROOT.glob("*.md"),
    *ROOT.glob("docs/**/*.md"),
    *ROOT.glob("benchmarks/**/*.md"),
    *ROOT.glob("src/**/*.py"),
]
LINES = [
    line
    for text in TEXTS
    for line in text.read_text(encoding="utf-8").splitlines()
    if "pip install" in line
]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]

MESSAGES = {
    **{name: FRAMEWORKS[name].install for name in ("paddle", "tensorflow", "torch")},
    **{name: LOGGERS[name].install for name in ("mlflow", "wandb")},
    **{row.extra: row.install for row in RUNTIMES.values()},
    "dali": dali.INSTALL,
    "executorch": FRAMEWORKS["torch"].exports["executorch"].install,
    "heic": image_formats.INSTALL,
    "keras": keras_variables.INSTALL,
    "serve": serving.INSTALL,
    "sign": signature.INSTALL,
}


def pins() -> dict[str, str]:
    """Versions that are tested together, by canonical name. TensorFlow's version is that of its
    package without GPUs."""
    names = ("constraints-mxnet.txt", "constraints.txt")
    lines = [
        line.split("==")
        for name in names
        for line in (ROOT / name).read_text().splitlines()
        if "==" in line
    ]
    versions = {canonicalize_name(name): version for name, version in lines}
    return versions | {"tensorflow": versions["tensorflow-cpu"]}


def test_lockstep_is_never_asked_of_an_index() -> None:
    assert len(LINES) > 10
    assert [line for line in LINES if re.search(r"pip install.*lockstep-vision", line)] == []


def test_versions_are_those_that_are_tested_together() -> None:
    named = {
        pair
        for line in LINES
        for pair in re.findall(r"([\w-]+)(?:\[[\w-]+\])?==(\d[\w.]*\d)", line)
    }
    made_up = {("frame", "1.0")}  # the example of docs/how-to/adding-a-backend.md
    assert {name for name, _ in named} > {"torch", "tensorflow", "paddlepaddle", "onnx"}
    assert {
        (name, pins().get(canonicalize_name(name))) for name, _ in named - made_up
    } == named - made_up


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_names_the_packages_of_the_extra(name: str) -> None:
    command, verb, *packages = shlex.split(MESSAGES[name])
    assert (command, verb) == ("pip", "install")
    assert {Requirement(package).name for package in packages} == {
        Requirement(package).name for package in EXTRAS[name]
    }


def test_the_version_is_the_same_everywhere() -> None:
    version = PROJECT["version"]
    named = re.findall(r"lockstep_vision-(\d[\d.]*\d)-", "\n".join(LINES))
    assert named
    assert {*named} == {version}
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {version}\n" in citation
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.findall(r"^## (\S+?),? ", changelog, re.MULTILINE)[0]
    assert newest == version
    groups = re.findall(r"^### (.*)$", changelog, re.MULTILINE)
    assert groups[:2] == ["Added", "Security"]  # nobody has had a version before
