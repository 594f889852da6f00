"""Values next to the weights of another program, at any depth: what each would do in inference.

A tensor or a number that inference could need refuses a file. Texts, single numbers, results and
settings of a training do not, unless one says that the network, its outputs or its images are other
than Lockstep's: `_SETTINGS` lists these. Names are compared in lower case with underscores.
"""

import re
from collections.abc import Collection, Iterator, Mapping
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
NOT_RGB = "its images are not RGB"
NOT_SOFTMAX = "its outputs are sigmoids or numbers, not a softmax over classes"
_NORMALISES = "it normalises images"
_INDICES = re.compile(r"(?:\.\d+)+$")
_MOST = 16
"""At most this many items of a list are spelled."""
_MOST_PATH = 60
_MOST_TEXT = 200
"""A longer text is prose, or the settings of a program as a text."""
_UNUSED = re.compile(
    r"(?:.*_)?(?:opt(?:im(?!al)\w*)?|(?:lr_)?sched\w*|callbacks?|ema|rng|loops?|amp)(?:_.*)?"
    r"|(?:grad_|loss_)?scaler(?:_.*)?"
)
"""What continues a training, whatever is in it."""
_OF_TRAINING = re.compile(
    r"(?:.*_)?(?:lr|loss(?:es)?|grad\w*|opt(?:im(?!al)\w*)?|sched\w*|amp|scaler|precision|warm\w*"
    r"|kd|distil\w*|teacher|student|init\w*|aug\w*|rand\w*|decay|mix\w*|cutmix|noise|jitter|drop\w*"
    r"|moco|queue|contrast\w*|targets?|wd|momentum|early|stop\w*|plateau|monitor|clip\w*|seed)"
    r"(?:_.*)?"
)
"""Numbers whose names have one of these words are of the training."""
_RESULTS = re.compile(
    r"(?:.*_)?(?:acc\w*|auc\w*|auroc|betas|best|cfg|config|counts?|curves?|dist\w*|epochs?|err\w*"
    r"|eval\w*|f1|folds?|freq\w*|hist\w*|h?params?|hyper\w*|idx|ind\w*|kwargs|loss(?:es)?|lrs?"
    r"|metrics?|nat|adv|num\w*|prec\w*|rank\w*|recall\w*|sampl\w*|schedule|scores?|seeds?|settings"
    r"|shapes?|sizes?|stat\w*|steps?|test\w*|time\w*|top\d*|train\w*|val\w*|weights?|args|options)"
    r"(?:_.*)?"
)
"""Vectors whose names have one of these words are results or settings of a training."""
_OF_METRICS = re.compile(r"(?:.*_)?(?:acc|auc|cv|f1|fold|hist|metric|result|score|test|val)")
"""A mean with one of these words is that of a metric."""
_OF_SAMPLES = re.compile(
    r"(?:.*_)?(?:confus\w*|oof|preds?|predictions?|prob(?:s|abilities)|targets?|y_\w+)(?:_.*)?"
)
"""Matrices whose names have one of these words have a row for each image, or count images."""
_WITHOUT_NUMBER = r"(?![\d.+-]).*"
_FACTOR = "1|" + _WITHOUT_NUMBER
_OFF = r"none|false|no|off|0|"
_SETTINGS: tuple[tuple[str, str, str], ...] = (
    (
        "mm(?:pretrain|cls|engine)_version",
        "",
        "its network and preprocessing are settings of OpenMMLab, which Lockstep does not read",
    ),
    (r"(?:.*_)?temp(?:s|eratures?)?|(?:.*_)?tau|t|s", _FACTOR, "it scales the logits"),
    (
        r"(?:.*_)?(?:log_?temp\w*|logit_.*|log_scale)",
        "0|" + _WITHOUT_NUMBER,
        "it scales the logits",
    ),
    (
        r"(?!img|image|crop|m..|.*_(?:img|image|crop|m..)_)(?:.*_)?"
        r"(?:scal(?:e|es|ing)(?:_factor)?|gain|multiplier|divisor|soft_?cap|sharpen\w*)",
        r"[\d.]+,[\d.]+|" + _FACTOR,
        "it scales what it is applied to",
    ),
    (
        r"(?:.*_)?(?:offset|shift|bias|priors?|background\w*|thresh\w*|cut_?off|calib\w*)",
        "0|" + _WITHOUT_NUMBER,
        "it shifts or selects the outputs",
    ),
    (r"(?:.*_)?(?:mean|std)s?", _WITHOUT_NUMBER, _NORMALISES),
    (
        r"(?:.*_)?(?:act|activations?|non_?linearity)(?:_fn|_func\w*|_layer|_name|_type)?",
        r"(?:torch_)?(?:nn_)?(?:functional_|f_)?(?:re_?lu|(?:log_?)?soft_?max|linear|identity"
        r"|logits?)(?:_inplace.*|_dim.*)?|true|raw|" + _OFF,
        "it is another activation",
    ),
    (
        r"(?:.*_)?(?:gp|pool(?:ing)?)(?:_type|_mode|_name|_layer)?",
        r"(?!.*max)(?:.*avg.*|.*average.*|mean|gap|fast)|true|\d+|" + _OFF,
        "it is another pool",
    ),
    (
        r"(?:.*_)?(?:dilat\w+|output_stride|replace_stride\w*)",
        r"32|(?:1|false)(?:,(?:1|false))*|" + _OFF,
        "it changes strides",
    ),
    (
        r"(?:.*_)?(?:bn|norm)_eps(?:ilon)?",
        r"1e-05|" + _WITHOUT_NUMBER,
        "it is another epsilon of batch norms",
    ),
    (r"(?:.*_)?(?:aa_layer|blur_?pool\w*|anti_?aliased)", _OFF, "it blurs before strides"),
    (
        r"(?:.*_)?in_?ch(?:an(?:nel)?s?)?|(?:(?:n|num|img|image|input)_)?(?:chans|channels?)",
        r"3|[\d.]+,.*|" + _WITHOUT_NUMBER,
        NOT_RGB,
    ),
    (
        r"(?:.*_)?(?:colou?rs?|channels?|input|image|img)_?(?:order|format|mode|space|type)",
        r"(?!bgr|gr[ae]y|hsv|lab|l$|rgba|yuv|ycbcr|ycc|cmyk).*",
        NOT_RGB,
    ),
    (r"(?:.*_)?(?:bgr|swap_rb|gr[ae]y(?:_?scale)?)", r"0\.\d+|" + _OFF, NOT_RGB),
    (r"(?:.*_)?rgb", r"true|rgb|1|none|", NOT_RGB),
    (
        r"(?:.*_)?(?:multi_?(?:label|hot)|sigmoid|ordinal|regression|bce)(?:ed|s|_loss)?",
        r"\d*\.\d+|" + _OFF,
        NOT_SOFTMAX,
    ),
    (r"(?:.*_)?pos_?weights?", r"1|" + _OFF, NOT_SOFTMAX),
    (
        r"(?:.*_)?(?:l2_?norm\w*|feat\w*_norm\w*|norm\w*_feat\w*)",
        _OFF,
        "it normalises the features",
    ),
)
"""Patterns of names; the values that change nothing; and what any other value does."""
_OF_CLASSES = re.compile(
    r"(?:.*_)?(?:n|nb|no|num|number_of)_?(?:class(?:es)?|labels|outputs?)|out_features"
)
_NOT_SOFTMAX = re.compile(
    r"(?:.*[_,])?(?:bce\w*|binary_?cross.*|multi_?(?:label|hot)\w*|sigmoid|ordinal|regression|mse\w*"
    r"|(?:smooth_)?l1_?loss|huber\w*|(?:arc|cos|sphere)_?face|asymmetric\w*|asl|hinge)(?:[_,].*)?"
)
_OTHER_COLOURS = re.compile(r"bgr|gr[ae]y(?:scale)?")
_OF_OUTPUTS = re.compile(r"(?:.*_)?(?:loss|crit|act|obj|head|out|task|problem).*")
_PROSE = re.compile(
    r"(?:.*_)?(?:author|cmd|comment|commit|data(?:set)?|date|desc|dir|exp|file|folder|git|hist|host"
    r"|info|license|log|message|metric|monitor|name|note|paper|path|project|run|save|source|tag"
    r"|title|url|user).*"
)
"""Names of texts for people, unless another word says that they are about outputs."""


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
            value = _parse(value)
        table = value
        if isinstance(value, list | tuple) and any(map(_is_compound, value)):
            table = {str(i): item for i, item in enumerate(value)}
        for key, item in table.items() if isinstance(table, Mapping) else ():
            name = describe_key(key)
            inner.append((f"{path[:_MOST_PATH]}.{name}".lstrip("."), item))
        if not inner:
            yield path, value
        elif id(value) not in visited:
            visited.add(id(value))
            left += reversed(inner)


def _is_compound(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple | np.ndarray)


def _parse(text: str) -> Any:
    try:
        return parsed(text)
    except ValueError:
        return text


def find_effect(path: str, value: Any, logits: int | None = None) -> str:
    """Return what a value would do in the inference of a network with these outputs; "" if it
    changes nothing."""
    top = to_snake(path.partition(".")[0])
    keys = [*map(to_snake, _INDICES.sub("", path).split("."))]
    key = keys[-1]
    place = to_snake(path)
    is_inner = "." in path or isinstance(value, np.ndarray | list | tuple)
    is_class = isinstance(value, str | int) and not {*CLASSES}.isdisjoint(path.split("."))
    if value is None or is_class or (is_inner and _UNUSED.fullmatch(top)):
        return ""
    text = _spell(value)
    is_single = bool(_NUMBER.fullmatch(text))
    if is_single and _OF_TRAINING.fullmatch(place):
        return ""
    if is_single and _OF_CLASSES.fullmatch(key) and logits:
        return f"it says that there are {text} outputs" * (text != str(logits))
    is_metric = is_single and _OF_METRICS.match(place)
    for names, harmless, effect in _SETTINGS:
        is_set = any(re.fullmatch(names, word) for word in keys)
        is_harmless = re.fullmatch(harmless, text) or (is_metric and effect == _NORMALISES)
        if is_set and not is_harmless:
            return effect
    is_of_outputs = bool(_OF_OUTPUTS.fullmatch(place))
    if isinstance(value, str) or is_of_outputs:
        is_prose = isinstance(value, str) and len(value) > _MOST_TEXT
        if not is_prose and (is_of_outputs or not _PROSE.fullmatch(key)):
            if _NOT_SOFTMAX.fullmatch(text):
                return NOT_SOFTMAX
            if _OTHER_COLOURS.fullmatch(text):
                return NOT_RGB
    if _is_harmless(place, value, logits):
        return ""
    return "it may change its results"


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
        return ",".join(
            _spell(item) for item in value[:_MOST] if not isinstance(item, list | tuple)
        )
    if isinstance(value, str):
        number = value.strip().lower()
        return number * bool(_NUMBER.fullmatch(number)) or to_snake(value)
    if is_number(value):
        return f"{value:g}"
    if isinstance(value, bool | None):
        return str(value).lower()
    return type(value).__name__ * bool(value)


def _is_harmless(place: str, value: Any, logits: int | None) -> bool:
    """Return whether a value without a known meaning can have no part in inference: it is a single
    number, or its name is that of a result."""
    is_result = bool(_RESULTS.fullmatch(place))
    if isinstance(value, np.ndarray):
        is_float = numbers(value).dtype.kind == "f"
        if value.size == 1 or _OF_SAMPLES.fullmatch(place):
            return True
        if value.ndim > 1:
            return not is_float
        return is_result or (not is_float and value.size != logits)
    if isinstance(value, list | tuple):
        has_arrays = any(isinstance(item, np.ndarray) and item.ndim > 1 for item in value)
        has_numbers = any(isinstance(item, float) for item in value)
        return not has_arrays and (is_result or not has_numbers or len(value) not in (3, logits))
    return isinstance(value, str | bytes | int | float | set | Mapping) or is_result
