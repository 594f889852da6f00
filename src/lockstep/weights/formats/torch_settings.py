"""Values next to the weights of another program, at any depth: what each would do in inference.

A tensor or a number that inference could need refuses a file. Texts, single numbers, results and
settings of a training do not, unless one says that the network, its outputs or its images are other
than Lockstep's: `_SETTINGS` lists these. Names are compared in lower case with underscores.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from typing import Any

import numpy as np

from lockstep.system.strict_json import is_number, parsed
from lockstep.weights.formats import numbers
from lockstep.weights.formats.account import Part, describe_key, split_ignored
from lockstep.weights.weights_choice import WeightsChoice

_WORD = re.compile(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+")
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|nan|inf")
CLASSES = (
    *("classes", "class_names", "class_to_idx", "idx_to_class", "label_names", "labels"),
    *("categories", "id2label", "label2id", "label_descriptions"),
)
"""Names of tables of classes."""
_INDICES = re.compile(r"(?:\.\d+)+$")
_MOST = 16
"""At most this many items of a list are spelled."""
_MOST_PATH = 60
_MOST_TEXT = 200
"""A longer text is prose, or the settings of a program as a text."""
_EFFECTS = {
    "openmmlab": "its network and preprocessing are settings of OpenMMLab, which are not read",
    "scales": "it scales the logits",
    "factor": "it scales what it is applied to",
    "shifts": "it shifts or selects the outputs",
    "normalises": "it normalises images",
    "activation": "it changes the activation",
    "pool": "it changes the pool",
    "strides": "it changes strides",
    "epsilon": "it changes the epsilon of batch norms",
    "blurs": "it blurs before strides",
    "colours": "its images are not RGB",
    "outputs": "its outputs are sigmoids or numbers, not a softmax over classes",
    "features": "it normalises the features",
}
_NAMES = r"""
openmmlab mm(pretrain|cls|engine)_version NONE
scales temp(s|eratures?)?|tau|(?<!_)[ts] TEXT|1
scales log_?temp\w*|logit_.*|log_scale TEXT|0
factor (?<!img_)(?<!image_)(?<!crop_)(?<!min_)(?<!max_)scal(e|es|ing)(_factor)? TEXT|1|[\d.]+,[\d.]+
factor gain|multiplier|divisor|soft_?cap|sharpen\w* TEXT|1
shifts offset|shift|bias|priors?|background\w*|thresh\w*|cut_?off|calib\w* TEXT|0
normalises (mean|std)s? TEXT
activation (act|activations?|non_?linearity)(_fn|_func\w*|_layer|_name|_type)? OFF|true|raw|RELU
pool (gp|pool(ing)?)(_type|_mode|_name|_layer)? OFF|true|\d+|mean|gap|fast|(?!.*max).*(avg|aver).*
strides dilat\w+|output_stride|replace_stride\w* OFF|32|(1|false)(,(1|false))*
epsilon (bn|norm)_eps(ilon)? TEXT|1e-05
blurs aa_layer|blur_?pool\w*|anti_?aliased OFF
colours in_?ch(an(nel)?s?)?|(?<!_)((n|num|img|image|input)_)?(chans|channels?) TEXT|3|WIDTH
colours (colou?rs?|channels?|input|image|img)_?(order|format|mode|space|type) (?!COLOURS(?![a-z])).*
colours bgr|swap_rb|gr[ae]y(_?scale)? OFF|0\.\d+
colours rgb |none|true|rgb|1
outputs (multi_?(label|hot)|sigmoid|ordinal|regression|bce)(ed|s|_loss)? OFF|\d*\.\d+
outputs pos_?weights? OFF|1
features l2_?norm\w*|feat\w*_norm\w*|norm\w*_feat\w* OFF
UNUSED opt(im(?!al)\w*)?|(lr_)?sched\w*|callbacks?|ema|rng|loops?|amp|(?<!_)((grad|loss)_)?scaler
TRAINING lr|loss(es)?|grad\w*|opt(im(?!al)\w*)?|sched\w*|amp|scaler|precision|warm\w*|kd|distil\w*
TRAINING teacher|student|init\w*|aug\w*|rand\w*|decay|mix\w*|cutmix|noise|jitter|drop\w*|moco|queue
TRAINING contrast\w*|targets?|wd|momentum|early|stop\w*|plateau|monitor|clip\w*|seed
CLASSES (n|nb|no|num|number_of)_?(class(es)?|labels|outputs?)$|(?<!_)out_features$
METRIC (acc|auc|cv|f1|fold|hist|metric|result|score|test|val).*
OUTPUTS (loss|crit|act|obj|head|out|task|problem).*
SIGMOIDS bce\w*|binary_?cross.*|multi_?(label|hot)\w*|sigmoid|ordinal|regression|mse\w*|huber\w*
SIGMOIDS (smooth_)?l1_?loss|(arc|cos|sphere)_?face|asymmetric\w*|asl|hinge
PROSE (author|cmd|comment|commit|data(set)?|date|desc|dir|exp|file|folder|git|hist|host|info).*
PROSE (license|log|message|metric|monitor|name|note|paper|path|project|run|save|source|tag).*
PROSE (title|url|user).*
SAMPLES confus\w*|oof|preds?|predictions?|prob(s|abilities)|targets?|y_\w+
RESULT acc\w*|auc\w*|auroc|betas|best|cfg|config|counts?|curves?|dist\w*|epochs?|err\w*|eval\w*|f1
RESULT folds?|freq\w*|hist\w*|h?params?|hyper\w*|idx|ind\w*|kwargs|loss(es)?|lrs?|metrics?|nat|adv
RESULT num\w*|prec\w*|rank\w*|recall\w*|sampl\w*|schedule|scores?|seeds?|settings|shapes?|sizes?
RESULT stat\w*|steps?|test\w*|time\w*|top\d*|train\w*|val\w*|weights?|args|options
"""
"""What values of these names are, one line after the other:

- An effect, with the last words of names, and the values that have none.
- Without values: UNUSED continues a training, whatever is in it. A number is of the TRAINING, a
  number of CLASSES, or a mean of a METRIC. A text is about OUTPUTS, or for people (PROSE), and as a
  value names SIGMOIDS. A matrix has a row for each of the SAMPLES. A vector is a RESULT. Other
  words may follow these names."""
_VALUES = {
    "TEXT": r"(?![\d.+-]).*",
    "OFF": "|none|false|no|off|0",
    "NONE": "",
    "RELU": r"(torch_)?(nn_)?(functional_|f_)?(re_?lu|(log_?)?soft_?max|linear|identity|logits?)"
    r"(_inplace.*|_dim.*)?",
    "WIDTH": r"[\d.]+,.*|1[6-9]|[2-9]\d|\d{3,}",
    "COLOURS": "(bgr|gr[ae]y(_?scale)?|hsv|lab|l|rgba|yuv|ycbcr|ycc|cmyk)",
}


def list_values(
    values: Mapping[Any, Any], without: Collection[str | None], choice: WeightsChoice
) -> tuple[dict[str, Any], list[Part]]:
    """Return values by their paths, except those at some places and those that the user leaves out,
    and an account of the latter."""
    others = dict(values)
    for place in without:
        others.pop(place, None)
    leaves: dict[str, Any] = {}
    for name, value in _flatten(others):
        if name in leaves:
            name = f"{name}.{len(leaves)}"
        leaves[name] = value
    kept, ignored = split_ignored(leaves, choice)
    return kept, list(ignored)


def _flatten(values: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the paths and values of nested tables and lists, in order. One that occurs several
    times is yielded once. A text that is a table in JSON is a table."""
    left: list[tuple[str, Any]] = [("", values)]
    visited = set[int]()
    while left:
        path, value = left.pop()
        inner: list[tuple[str, Any]] = []
        if isinstance(value, str) and value.startswith("{"):
            with suppress(ValueError):
                value = parsed(value)
        table = value
        if isinstance(value, list | tuple) and any(map(_is_compound, value)):
            table = dict(zip(map(str, range(len(value))), value, strict=True))
        if isinstance(table, Mapping):
            for key, item in table.items():
                inner.append((f"{path[:_MOST_PATH]}.{describe_key(key)}".lstrip("."), item))
        if not inner:
            yield path, value
        elif id(value) not in visited:
            visited.add(id(value))
            left += reversed(inner)


def _is_compound(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple | np.ndarray)


def find_effect(path: str, value: Any, logits: int | None = None) -> str:
    """Return what a value would do in the inference of a network with these outputs; "" if it
    changes nothing."""
    keys = list(map(to_snake, _INDICES.sub("", path).split(".")))
    kinds = _list_kinds(to_snake(path))
    is_inner = "." in path or isinstance(value, np.ndarray | list | tuple)
    is_class = isinstance(value, str | int) and not {*CLASSES}.isdisjoint(path.split("."))
    is_unused = is_inner and "UNUSED" in _list_kinds(to_snake(path.partition(".")[0]))
    text = _spell(value)
    is_single = bool(_NUMBER.fullmatch(text))
    if value is None or is_class or is_unused or (is_single and "TRAINING" in kinds):
        return ""
    if is_single and logits and "CLASSES" in _list_kinds(keys[-1]):
        return f"it says that there are {text} outputs" * (text != str(logits))
    is_metric = is_single and "METRIC" in kinds
    for key in reversed(keys):
        for effect, harmless in _list_kinds(key).items():
            is_harmless = all(re.fullmatch(pattern, text) for pattern in harmless)
            is_harmless |= is_metric and effect == "normalises"
            if effect in _EFFECTS and not is_harmless:
                return _EFFECTS[effect]
    is_prose = isinstance(value, str) and len(value) > _MOST_TEXT
    is_text = isinstance(value, str) and "PROSE" not in _list_kinds(keys[-1])
    if not is_prose and (is_text or "OUTPUTS" in kinds):
        if "SIGMOIDS" in _list_kinds(text):
            return _EFFECTS["outputs"]
        if text == "bgr":
            return _EFFECTS["colours"]
    return "" if _is_harmless(kinds, value, logits) else "it may change its results"


@lru_cache
def _list_kinds(name: str) -> dict[str, list[str]]:
    """Return what a value of this name is, with patterns of the values that have no effect."""
    kinds: dict[str, list[str]] = {}
    for line in _NAMES.strip().splitlines():
        kind, names, *values = line.split(" ")
        harmless = "".join(values)
        for word, pattern in _VALUES.items():
            harmless = harmless.replace(word, pattern)
        others = "" if values else "([_,].*)?"
        if re.fullmatch(f"(.*[_,])?({names}){others}", name):
            kinds.setdefault(kind, []).append(harmless)
    return kinds


def to_snake(text: str) -> str:
    """Return the words of a text in lower case, with underscores between them.

    >>> to_snake("nn.BCEWithLogitsLoss()")
    'nn_bce_with_logits_loss'
    """
    return "_".join(_WORD.findall(text[:_MOST_TEXT])).lower()


def _spell(value: Any) -> str:
    """Return a value as a text: numbers with a comma between them, texts as names are compared."""
    if isinstance(value, np.ndarray):
        value = numbers(value).ravel()[:_MOST].tolist()
    if isinstance(value, list | tuple):
        return ",".join(map(_spell, value[:_MOST]))
    if isinstance(value, str):
        number = value.strip().lower()
        return number * bool(_NUMBER.fullmatch(number)) or to_snake(value)
    if is_number(value):
        return f"{value:g}"
    if isinstance(value, bool | None):
        return str(value).lower()
    return type(value).__name__ * bool(value)


def _is_harmless(kinds: Collection[str], value: Any, logits: int | None) -> bool:
    """Return whether a value without a known meaning can have no part in inference: it is a single
    number, or its name is that of a result."""
    is_result = "RESULT" in kinds
    if isinstance(value, np.ndarray):
        is_float = numbers(value).dtype.kind == "f"
        if value.size == 1 or "SAMPLES" in kinds:
            return True
        if value.ndim > 1:
            return not is_float
        return is_result or (not is_float and value.size != logits)
    if isinstance(value, list | tuple):
        has_arrays = any(isinstance(item, np.ndarray) and item.ndim > 1 for item in value)
        has_numbers = any(isinstance(item, float) for item in value)
        return not has_arrays and (is_result or not has_numbers or len(value) not in (3, logits))
    return isinstance(value, str | bytes | int | float | set | Mapping) or is_result
