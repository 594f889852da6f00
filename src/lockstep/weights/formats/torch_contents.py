"""Where the network of a PyTorch file is, an account of all tensors and modules, and what a file
is that Lockstep cannot read.

Names of tensors may begin with `module.` (several ranks) and `_orig_mod.` (a compiled model), and
then with a prefix that leads to the network, such as `model.`. NVIDIA's code says `layers.0.` for
`layer1.`, except in the files that it published as version 20.06.0, and `squeeze.squeeze` and
`squeeze.expand` for `se.fc1` and `se.fc2`. FFCV's code puts `.conv` into the name of a convolution
with a blur before it. A tensor elsewhere is one of these, or is left over:

- the only linear layer, under a usual name of a classifier, if the network has none;
- mean and standard deviation of a module that normalises images;
- a copy of the network: a moving average, or the attacker of the robustness library.

Names of transformers' ResNets (`resnet.encoder.stages.0.layers.0.layer.0.convolution.weight`) are
read as torchvision's. Its classifier is a Sequential of a flatten and a linear layer.

`_metadata` of a state_dict names all modules. One without tensors may compute something, such as a
sigmoid after the classifier.

Sources: PyTorch's nn/modules/module.py; robustness' attacker.py and helpers.py; Cadene's
pretrained-models.pytorch; timm's models/resnet.py; transformers' modeling_resnet.py.
"""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import Any

import numpy as np

from lockstep.system.errors import CheckpointError
from lockstep.weights.formats import numbers
from lockstep.weights.formats.account import Part, describe_key, split_ignored
from lockstep.weights.formats.common import Names
from lockstep.weights.formats.torch_values import scale_colours
from lockstep.weights.preprocessing import Changes
from lockstep.weights.weights_choice import WeightsChoice

AVERAGES = ("state_dict_ema", "model_ema", "ema", "ema_state_dict", "ema_model")
NVIDIA_SQUEEZES = {".squeeze.squeeze.": ".se.fc1.", ".squeeze.expand.": ".se.fc2."}
WEIGHTS = ("state_dict", "model", "model_state_dict", "model_state", "net", "network", "module")
_WRAPPERS = re.compile(r"^(?:(?:module|_orig_mod)(?:\.|$))+")
_NVIDIA_STAGE = re.compile(r"^layers\.([0-3])\.")
_CHILDREN = {"0": "conv1", "1": "bn1", "4": "layer1", "5": "layer2", "6": "layer3", "7": "layer4"}
"""What has these numbers in a Sequential of the children of torchvision's class."""
_FIRST = re.compile(r"(|.*?\.)(?:layer1|layers\.0|4)\.0\.conv1\.weight")
"""The first kernel of the first block, after the prefix of its network."""
_AVERAGE = re.compile(r"(?:.*[._])?ema[._].*")
_ATTACKER = "attacker."
_COUNTER = re.compile(
    r"(?:.*\.)?(?:num_batches_tracked|n_averaged|aux_bn\.\d+\.\w+)"
    r"|(?:.*[._])?ema[._](?:.*\.)?(?:decay|num_updates|initted|step)"
)
"""What has no effect on inference: counters of a batch norm, constants of a moving average, and
batch norms that timm's SplitBatchNorm2d uses in training alone."""
_HEAD = re.compile(
    r"(?:(?:fc|head|classifier)\.)?(?:fc|head|classifier|last_linear|linear|output|\d+)"
)
_NUMBER = re.compile(r"(?<![^.])[0-9]{1,3}(?![^.])")
_NORMALISER = re.compile(r"(?:normali[sz]er?|norm|0)\.(?:new_)?(mean|std)")
_OF_NETWORK = re.compile(
    r"act\d?|relu\d?|maxpool(?:\.0)?|(?:avg|global_)_?pool(?:\.\w+)?|conv1\.\d+"
    r"|(?:layer[1-4]|layers\.[0-3])\.\d+\.(?:aa|blur|act\d?|relu\d?|drop_\w+|downsample(?:\.\d)?"
    r"|(?:se|squeeze)\.\w+)"
)
"""Modules without tensors of the ResNets of torchvision, timm and NVIDIA, below their prefix."""
_WITHOUT_EFFECT = re.compile(
    r"(?:.*\.)?(?:drop\w*|identity|flatten)"
    r"|(?:.*[._])?(?:criterion|loss|losses|metrics?|acc|accuracy)(?:[._].*)?"
)
"""Modules that change nothing in inference, wherever they are."""

_TRANSFORMERS_STEM = "embedder.embedder."
_TRANSFORMERS_LAYER = re.compile(
    r"(|.*\.)encoder\.stages\.([0-3])\.layers\.(\d+)\.(?:layer\.(\d)|shortcut)"
    r"\.(convolution|normalization)\.(\w+)"
)
_TRANSFORMERS_SILENT = re.compile(
    r"(?:.*\.)?(?:embedder\.(?:embedder\.activation|pooler)|classifier(?:\.0)?"
    r"|encoder\.stages\.\d+\.layers\.\d+\.(?:layer\.\d\.activation|activation|shortcut))"
    r"|(?:resnet\.)?pooler"
)
"""Modules without tensors of transformers' ResNets."""

_NETWORKS = {
    "a transformers network that is not a ResNet of Lockstep": (
        r"embedder\.embedder\.convolution|encoder\.stages\.\d+\.layers\."
    ),
    "a MoCo checkpoint, whose fc is not a classifier": r"encoder_q\.",
    "a checkpoint of self-supervised training": (
        r"^(module\.)?(projector|projection|projection_head|predictor|prototypes|online_encoder)\."
    ),
    "a ResNet of CLIP": r"attnpool\.",
    "a ResNet of Detectron2": r"\bres2\.0\.conv1\.",
    "a network that detects or segments": r"\brpn\.|roi_heads?\.|aux_classifier\.|lateral_convs",
    "a quantized network": r"_packed_params|fake_quant|activation_post_process|zero_point$",
    "a network whose pruning masks are not applied": r"weight_mask$",
    "a network with parametrizations": r"weight_[guv]$|parametrizations\.",
    "a network with adapters (LoRA)": r"lora_[AB]\b",
    "a checkpoint of the robustness library": r"attacker\.|new_mean$",
}
"""Kinds by a pattern of the name of a tensor."""
_WITHOUT_RESNET = {
    "a DenseNet": r"denseblock1\.",
    "a VGG or an AlexNet": r"classifier\.6\.|features\.28\.|pre_logits\.fc1\.",
    "a ConvNeXt": r"features\.1\.0\.layer_scale|stages\.0\.(blocks\.0\.conv_dw|0\.dwconv)\.",
    "an EfficientNet or a MobileNet": (
        r"blocks\.0\.0\.conv|features\.1\.(conv|block|0\.block)\.|_blocks\.0\."
    ),
    "a vision transformer": r"patch_embed|cls_token|class_token|class_embedding|relative_pos",
    "an Inception": r"Mixed_5b\.|inception3a\.",
    "a RegNet": r"trunk_output\.|\bs1\.b1\.",
    "a ResNetV2": r"stages\.0\.blocks\.0\.norm3\.",
    "a ResNet for small images": r"layer\d\.0\.shortcut\.0\.",
}
"""The same for files in which no ResNet was recognised."""
_PROGRAMS = {"pytorch-lightning_version": "a Lightning checkpoint", "meta": "an OpenMMLab file"}
"""Kinds by the name of a value next to the state_dict."""
_LOSS = re.compile(r"(^|\.)(criterion|\w*loss\w*)\.", re.MULTILINE)


@dataclass(frozen=True)
class Contents:
    """What a file holds."""

    root: dict[Any, Any]
    """The whole file. A state_dict alone is below "state_dict", next to values in it that are no
    tensors."""
    weights: str
    """The key of the state_dict, which may be that of a moving average."""
    average: str | None
    """The key of the moving average next to it."""
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True)
class Network:
    """The tensors of a state_dict."""

    prefix: str
    names: Names
    """The names in the state_dict by canonical name, also of what is left over."""
    colours: Changes
    """Mean and standard deviation of a module that normalises images; none without one."""
    silent: list[str]
    """Modules without tensors that may change results."""
    is_guess: bool
    """Whether the file names no modules, so that those are what may be between others."""
    parts: list[Part]

    @property
    def has_classifier(self) -> bool:
        """Whether a classifier is among the tensors."""
        return not self.names.keys().isdisjoint(("fc.weight", "fc.bias"))


def find_weights(path: Path, value: Any, choice: WeightsChoice) -> Contents:
    """Return where a file has its weights, without values that the user leaves out. Raises
    `CheckpointError` if it has none."""
    values = {}
    if is_state_dict(value):
        values = {WEIGHTS[0]: value}
    elif isinstance(value, dict):
        values = value
    root, parts = split_ignored(values, choice)
    weights = _find_only(path, root, WEIGHTS)
    average = _find_only(path, root, AVERAGES)
    place = weights or average
    if place is None and parts:
        raise CheckpointError(
            f"{path} has no weights other than those that --ignore leaves out; leave out fewer"
        )
    if place is None:
        kind = "dict" if isinstance(value, dict) else type(value).__name__
        contents = f" with {list(map(describe_key, root))[:5]}" if root else ""
        raise CheckpointError(
            f"{path} holds no state_dict of a convolutional network, at its top or below"
            f" {', '.join(WEIGHTS + AVERAGES)}; it is a {kind}{contents}. Save it"
            " again with torch.save(model.state_dict(), path)."
        )
    others = dict(root[place])
    for name in list_named_arrays(others):
        del others[name]
    others, more = split_ignored(others, choice)
    return Contents(others | root, place, average if weights else None, parts + more)


def _find_only(path: Path, root: Mapping[Any, Any], keys: Collection[str]) -> str | None:
    """Return which of some keys has a state_dict; None if none has. Raises `CheckpointError` if
    several have."""
    places = [key for key in keys if is_state_dict(root.get(key))]
    _check_alone(path, places)
    return next(iter(places), None)


def _check_alone(path: Path, patterns: list[str]) -> None:
    """Raise `CheckpointError` for several networks, given by patterns of their names."""
    if len(patterns) > 1:
        options = "".join(f" --ignore '{pattern}'" for pattern in patterns[1:])
        raise CheckpointError(
            f"{path} holds several networks: {', '.join(patterns)}; leave out all but one: lockstep"
            f" convert {quote(str(path))} weights.safetensors{options}"
        )


def is_state_dict(value: Any) -> bool:
    """Return whether a value is a dict that holds a kernel: an array with four axes."""
    return isinstance(value, dict) and any(
        isinstance(array, np.ndarray) and array.ndim == 4 for array in value.values()
    )


def list_named_arrays(stored: Mapping[Any, Any]) -> dict[str, np.ndarray]:
    """Return the arrays of a state_dict whose names are texts."""
    names = filter(lambda name: isinstance(name, str), stored)
    return {name: stored[name] for name in names if isinstance(stored[name], np.ndarray)}


def find_network(path: Path, stored: Mapping[Any, Any], choice: WeightsChoice) -> Network:
    """Return the tensors of a state_dict by canonical name, without those that the user leaves out
    and those that have no effect.

    Raises `CheckpointError` if it has several networks, or a tensor twice.
    """
    arrays = list_named_arrays(stored)
    plain = {}
    originals = {}
    for name, array in arrays.items():
        bare = from_transformers_name(strip_wrappers(name))
        if not (choice.is_ignored(name) or choice.is_ignored(bare)):
            plain[name] = bare
            originals[bare] = array
    if not plain:
        raise CheckpointError(
            f"{path} has no tensors other than those that --ignore leaves out; leave out fewer"
        )
    prefix, copies = _find_prefix(path, plain.values())
    children = _CHILDREN if f"{prefix}4.0.conv1.weight" in plain.values() else {}
    modules = getattr(stored, "modules", ())
    is_transformers = are_transformers(plain)
    if is_transformers:
        modules = [name for name in modules if not _TRANSFORMERS_SILENT.fullmatch(name)]
    removed = "" if is_transformers else prefix  # whose networks all begin with `resnet.`
    network = Network(removed, {}, {}, [], not modules, [])
    names = network.names
    parts = network.parts
    for name, array in arrays.items():
        bare = _strip_name(name, prefix, children)
        if name not in plain or choice.is_ignored(bare):
            parts.append(Part(name, "ignored"))
        elif _COUNTER.fullmatch(bare):
            parts.append(Part(name, "without effect", "counters"))
        elif is_blur_filter(name):
            parts.append(Part(name, "folded", "into the blur of the model"))
        elif _is_copy(plain[name], array, originals, prefix, copies):
            parts.append(Part(name, "without effect", "a copy of the network"))
        elif bare in names:
            raise CheckpointError(
                f"{path} has the tensor {bare} twice: as {names[bare]} and as {name}"
            )
        else:
            names[bare] = name
    head = _take_head(names, arrays)
    if is_transformers:
        head = head.replace("classifier.1", "classifier")
    network.colours.update(_fold_colours(names, arrays, parts))
    for module in dict.fromkeys(_list_silent(modules, arrays, (prefix.rstrip("."), head))):
        if choice.is_ignored(module):
            parts.append(Part(module, "ignored"))
        else:
            network.silent.append(module)
    return network


def _find_prefix(path: Path, names: Collection[str]) -> tuple[str, list[str]]:
    """Return what the names of the network begin with, and what those of its moving averages begin
    with. Raises `CheckpointError` if there are several networks."""
    matches = filter(None, map(_FIRST.fullmatch, names))
    prefixes = dict.fromkeys(match[1] for match in matches)
    copies = list(filter(_AVERAGE.fullmatch, prefixes))
    others = [prefix for prefix in prefixes if not prefix.startswith(_ATTACKER)]
    networks = [prefix for prefix in others if prefix not in copies] or copies
    networks.sort(key=len)  # a pattern of the first one could fit the others
    _check_alone(path, [f"{prefix}*" for prefix in networks])
    network = "".join(networks)
    return network, [prefix for prefix in copies if prefix != network]


def strip_wrappers(name: str) -> str:
    """Return the name of a tensor or a module without `module.` and `_orig_mod.` before it."""
    return _WRAPPERS.sub("", name)


def from_transformers_name(name: str) -> str:
    """Return torchvision's name of a tensor of transformers' ResNets; any other name unchanged.

    >>> from_transformers_name("resnet.encoder.stages.2.layers.1.layer.0.normalization.bias")
    'resnet.layer3.1.bn1.bias'
    """
    if match := _TRANSFORMERS_LAYER.fullmatch(name):
        prefix, stage, block, layer, kind, leaf = match.groups()
        place = f"{prefix}layer{int(stage) + 1}.{block}"
        if layer is None:
            return f"{place}.downsample.{int(kind == 'normalization')}.{leaf}"
        return f"{place}.{'conv' if kind == 'convolution' else 'bn'}{int(layer) + 1}.{leaf}"
    name = name.replace(f"{_TRANSFORMERS_STEM}convolution.", "conv1.")
    return name.replace(f"{_TRANSFORMERS_STEM}normalization.", "bn1.")


def are_transformers(names: Iterable[Any]) -> bool:
    """Return whether tensors of these names are those of a ResNet of transformers."""
    return any(f"{_TRANSFORMERS_STEM}convolution." in str(name) for name in names)


def _strip_name(name: str, prefix: str, children: Mapping[str, str]) -> str:
    """Return the canonical name of a tensor, also torchvision's, from its name in a file."""
    name = from_transformers_name(strip_wrappers(name))
    if not name.startswith(prefix):
        return name
    name = name.removeprefix(prefix).replace(".conv.weight", ".weight")
    for nvidias, own in NVIDIA_SQUEEZES.items():
        name = name.replace(nvidias, own)
    first, dot, rest = name.partition(".")
    name = f"{children.get(first, first)}{dot}{rest}"
    return _NVIDIA_STAGE.sub(lambda match: f"layer{int(match[1]) + 1}.", name)


def is_blur_filter(name: str) -> bool:
    """Return whether a tensor of this name is the constant kernel of FFCV's blur."""
    return name.endswith(".blur_filter")


def _is_copy(
    name: str,
    array: np.ndarray,
    originals: Mapping[str, np.ndarray],
    prefix: str,
    copies: Collection[str],
) -> bool:
    """Return whether a tensor is of a moving average of the network, or of the robustness library's
    attacker, which computes with the same tensors."""
    if name.startswith(_ATTACKER):
        other = name.removeprefix(_ATTACKER).replace("normalize.", "normalizer.")
        return other in originals and np.array_equal(numbers(originals[other]), numbers(array))
    for copy in copies:
        original = originals.get(name.replace(copy, prefix, 1))
        if name.startswith(copy) and original is not None and original.shape == array.shape:
            return True
    return False


def _take_head(names: Names, arrays: Mapping[str, np.ndarray]) -> str:
    """Give the only linear layer the names of the classifier, if it has a usual name of one. Return
    its name; "" without one."""
    heads = []
    for bare, name in names.items():
        head, _, kind = bare.rpartition(".")
        if arrays[name].ndim == 2 and kind == "weight" and not bare.startswith("layer"):
            heads.append(head)
    if len(heads) != 1 or not _HEAD.fullmatch(heads[0]) or f"{heads[0]}.bias" not in names:
        return ""
    for kind in ("weight", "bias"):
        names[f"fc.{kind}"] = names.pop(f"{heads[0]}.{kind}")
    return strip_wrappers(names["fc.weight"]).removesuffix(".weight")


def _fold_colours(names: Names, arrays: Mapping[str, np.ndarray], parts: list[Part]) -> Changes:
    """Take out mean and standard deviation that normalise images from 0 to 1; return both."""
    sources = {}
    values = {}
    for bare, name in names.items():
        if match := _NORMALISER.fullmatch(bare):
            sources[match[1]] = bare
            values[match[1]] = arrays[name]
    if len(values) < 2 or not (changes := scale_colours(values)):
        return {}
    parts += [
        Part(names.pop(bare), "folded", "into the preprocessing") for bare in sources.values()
    ]
    return changes


def _list_silent(
    modules: Collection[str], arrays: Collection[str], places: Collection[str]
) -> Iterator[str]:
    """Yield modules without tensors that may change results: those that a ResNet does not have, and
    those next to the network or the classifier in an nn.Sequential, whose `places` are given.

    A file that does not name its modules has those before a place, or one after the first.
    """
    owners = set[str]()
    for bare in map(strip_wrappers, arrays):
        owners.update(bare[: dot.start()] for dot in re.finditer(r"\.", bare))
    alone = [name for name in map(strip_wrappers, modules) if name not in owners]
    prefix, *_ = places
    for name in filter(None, alone):
        inner = name.removeprefix(f"{prefix}.") if prefix else name
        is_inner = inner != name or not prefix
        is_known = is_inner and _OF_NETWORK.fullmatch(inner)
        if not is_known and not _WITHOUT_EFFECT.fullmatch(inner):
            yield name
    for place in places:
        for number in _NUMBER.finditer(place):
            base = place[: number.start()]
            likely = [f"{base}{i}" for i in range(int(number[0]))] or [f"{base}1"]
            for name in alone if modules else likely:
                is_sibling = name.startswith(base) and _NUMBER.fullmatch(name.removeprefix(base))
                if is_sibling and name not in owners:
                    yield name


def name_kind(
    path: Path, error: CheckpointError, names: Iterable[str], values: Collection[Any]
) -> CheckpointError:
    """Return an error that says first what a file with tensors and values of these names is, if
    that is known."""
    lines = "\n".join(names)
    kind = next((program for value, program in _PROGRAMS.items() if value in values), "")
    if kind and _LOSS.search(lines):
        kind += " with its own loss"
    networks = _NETWORKS
    if "is not a complete ResNet" in str(error):
        networks = _NETWORKS | _WITHOUT_RESNET
    for network, pattern in networks.items():
        if re.search(pattern, lines, re.MULTILINE):
            kind = network
            break
    problem = str(error)
    if not kind or not problem.startswith(f"{path} "):
        return error
    return CheckpointError(f"{path} is {kind}: it {problem.removeprefix(f'{path} ')}")
