"""Compare answers to probe photos with those that are expected, and name the fault that explains
the difference.

Its source is a part of `proof/check.py`, like that of `record.py`.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from lockstep.proof.record import LEAST, Fault, Proof, take_log_softmax

DECODER = "another JPEG decoder"
"""Not a real fault: it shows how far answers differ if another library decodes JPEGs."""
MIXES = "a batch that mixes images"
SATURATED = "quantised values saturated"
_CONSISTENT = 0.4
"""A fault is named if the answers to the photos that it changes are at most this far from what it
predicts: 0 is equal, 1 is no nearer than the right answers."""
_EXACT = 0.1
_OTHER_DECODER = 0.05
"""Answers may differ by this share of the largest logit with another JPEG decoder, unless the
proof says otherwise."""
_EQUAL_PIXELS = 0.01
"""Means of pixels are printed with three digits."""
_ROUNDED_PIXELS = 5e-3
"""Answers may differ by this share of the largest logit if another resize rounds pixels by a level.
"""
_RESOLVED = 2e-3
"""Answers that differ by a smaller share may be equal: float16 has 11 bits."""


@dataclass(frozen=True)
class Answers:
    """What a model answered to the photos."""

    logs: np.ndarray
    """Logarithms of probabilities, float64 [photos, logits]; NaN if unknown."""
    slack: float = 0.0
    """Probabilities that differ by no more are equal."""
    are_logits: bool = False
    problems: Mapping[int, str] = field(default_factory=dict)
    """Why there is no answer, by the number of the photo."""


def read_answers(proof: Proof, rows: Sequence[Any]) -> Answers:
    """Return answers to all photos.

    Args:
        proof: The photos and the classes.
        rows: For each photo probabilities or logits [logits], or the probabilities by class: a
            mapping, a list of pairs, or a list of mappings with a text and a number. Probabilities
            may be in percent, and texts. An exception: there is no answer.
    """
    values = np.full(proof.logits.shape, np.nan)
    problems = {}
    for number, row in enumerate(rows):
        try:
            if isinstance(row, Exception):
                raise row
            values[number] = _read_row(proof, row)
        except Exception as error:
            values[number] = np.nan
            problems[number] = f"{type(error).__name__}: {error!s:.300}"
    is_known = ~np.isnan(values)
    answered = is_known.any(axis=1)
    known = values[is_known]
    is_partial = not is_known[answered].all()
    sums = np.nansum(values[answered], axis=1)
    for whole in (1.0, 100.0):
        # Rounded probabilities add up to less or more: by a half of the last digit each.
        slack = min(0.02 + proof.logits.shape[1] * _find_rounding(known / whole), 0.5)
        is_whole = sums <= (1 + slack) * whole
        is_whole &= is_partial | (sums >= (1 - slack) * whole)
        if known.size and known.min() >= 0 and is_whole.all():
            logs = np.log(np.maximum(values / whole, LEAST))
            return Answers(logs, _find_rounding(known / whole), False, problems)
    if is_partial:
        problems = dict.fromkeys(range(len(rows)), "these are not probabilities of classes")
        return Answers(np.full(values.shape, np.nan), 0.0, True, problems)
    values[answered] = take_log_softmax(values[answered])
    return Answers(values, 0.0, True, problems)


def _read_row(proof: Proof, row: Any) -> np.ndarray:
    """Return the numbers of an answer, NaN where it has none. Raises `ValueError` for a class that
    the model does not have."""
    pairs: list[Any] = []
    if isinstance(row, Mapping):
        pairs = list(row.items())
    elif isinstance(row, list | tuple):
        for item in row:
            pair = list(item.values()) if isinstance(item, Mapping) else item
            if isinstance(pair, list | tuple) and any(isinstance(part, str) for part in pair):
                pairs.append(pair if isinstance(pair[0], str) else pair[::-1])
    if not pairs:
        values = np.asarray(row, np.float64).reshape(proof.logits.shape[1])
    else:
        values = np.full(proof.logits.shape[1], np.nan)
    for name, value in pairs:
        text = str(value).strip()
        number = float(text.rstrip("% "))
        values[_find_class(proof, name)] = number / 100 if text.endswith("%") else number
    if len(values[np.isfinite(values)]) < (len(pairs) or len(values)):
        raise ValueError("the answer has numbers that are not finite, or a class twice")
    return values


def _find_class(proof: Proof, name: Any) -> int:
    if name in proof.classes:
        return proof.classes.index(name)
    if str(name).isdecimal() and int(name) < proof.logits.shape[1]:
        return int(name)
    nearest = difflib.get_close_matches(str(name), proof.classes, 1, 0.0)
    raise ValueError(f"the model has no class {name!r:.80}; expected one such as {nearest}")


def _find_rounding(values: np.ndarray) -> float:
    """Return how far probabilities are rounded that are printed with a few digits, or are of
    float16; 0 for others."""
    if np.isin(values, (0, 1)).all():
        return 0.0
    for digits in range(1, 7):
        if np.allclose(values, np.round(values, digits), rtol=1e-6, atol=0):
            return float(0.51 * 10.0**-digits)
    return 5e-4 if np.array_equal(values, values.astype(np.float16)) else 0.0


def _differ(row: np.ndarray, logs: np.ndarray, slack: float) -> np.ndarray:
    """Return by how much logarithms of probabilities differ where both are known."""
    known = ~np.isnan(row)
    differences: np.ndarray = np.abs(row - logs)[known]
    is_equal = np.abs(np.exp(row) - np.exp(logs))[known] <= slack
    return np.where(is_equal, 0.0, differences)


@dataclass(frozen=True)
class Comparison:
    """Answers next to those that are expected."""

    proof: Proof
    answers: Answers

    def measure(self, probe: int, other: int | None = None) -> float:
        """Return the largest difference of an answer from the right one, or from the right one of
        another photo, as a share of the largest logit; infinity if there is none."""
        logs = self.proof.logs[probe if other is None else other]
        differences = _differ(self.answers.logs[probe], logs, self.answers.slack)
        return float(differences.max()) / self.proof.unit if differences.size else math.inf

    def find_class(self, probe: int) -> int | None:
        """Return the most likely class of an answer."""
        row = self.answers.logs[probe]
        return None if np.isnan(row).all() else int(np.nanargmax(row))

    def has_class(self, probe: int) -> bool:
        """Return whether the most likely class is right, or the right one is as likely within the
        bound."""
        number = self.find_class(probe)
        logs = self.proof.logs[probe]
        bound = self.proof.document["bounds"]["logits"] * self.proof.unit
        return number is not None and bool(logs[number] >= logs.max() - bound)

    def resemble(self, fault: Fault) -> dict[int, float]:
        """Return for each photo that a fault changes how far the answer is from what the fault
        predicts: 0 is equal, 1 is no nearer than the right answer.

        Photos whose answers it changes by less than float16 resolves are left out.
        """
        distances = {}
        for logs, probe in zip(fault.logs, fault.probes, strict=True):
            row = self.answers.logs[probe, fault.columns]
            known = ~np.isnan(row)
            if not known.any():
                distances[probe] = 1.0
                continue
            vectors = [row[known], logs[known], self.proof.logs[probe, fault.columns][known]]
            if len(fault.columns) < self.proof.logits.shape[1]:
                # The other classes have a share of the probabilities, too.
                vectors = list(map(take_log_softmax, vectors))
            [row, logs, right] = vectors
            change = _mean_size(logs - right)
            if change > _RESOLVED * _mean_size(logs):
                wrong = _mean_size(_differ(row, logs, self.answers.slack))
                size = _mean_size(_differ(row, right, self.answers.slack))
                distances[probe] = max(wrong / (size + change), 1 - _correlate(row, logs))
        return distances


def _mean_size(values: np.ndarray) -> float:
    """Return the root of the mean square."""
    return float(np.sqrt(np.mean(values**2)))


def _correlate(row: np.ndarray, logs: np.ndarray) -> float:
    """Return the correlation of two answers; 0 if one of them is the same for all classes, because
    it would resemble the answers of a double softmax."""
    if len(row) < 3:
        return 1.0
    shapes = [values - values.mean() for values in (row, logs)]
    size = _mean_size(shapes[0]) * _mean_size(shapes[1])
    return float(np.mean(shapes[0] * shapes[1])) / size if size else 0.0


@dataclass(frozen=True)
class Diagnosis:
    """What explains wrong answers."""

    names: list[str]
    """Faults; if there are several, each one explains the answers."""
    advice: str
    is_exact: bool
    probes: set[int]
    """The photos that it explains."""


def name_faults(comparison: Comparison, failing: Iterable[int]) -> list[Diagnosis]:
    """Return faults that together explain the answers to some photos, those that explain most
    first. Photos that no fault explains are left out."""
    proof = comparison.proof
    left = set(failing)
    candidates = []
    for fault in proof.faults:
        distances = comparison.resemble(fault)
        score = float(np.mean(list(distances.values()) or [1.0]))
        explained = {probe for probe, distance in distances.items() if distance <= 0.5}
        if explained:
            explained |= set(range(fault.computed, len(proof.probes)))
        # By chance, answers to a few photos resemble those of some fault.
        is_likely = score <= _CONSISTENT and 2 * len(explained & left) >= len(left)
        if fault.name != DECODER and (score <= _EXACT or is_likely):
            candidates.append((fault, score, distances, explained))
    is_named = any(score <= _EXACT for _, score, _, _ in candidates)
    mixed = {probe for probe in left if _is_of_another(comparison, probe)}
    if 2 * len(mixed) > len(left) and not is_named:
        advice = "each answer belongs to another photo: check how answers are matched to requests"
        return [Diagnosis([MIXES], advice, True, mixed)]
    if left and not is_named and _are_sorted_alike(comparison, left):
        advice = "the model's first output is the first class of classes.txt, and so on"
        return [Diagnosis(["classes in the wrong order"], advice, True, left)]
    diagnoses: list[Diagnosis] = []
    while left and candidates:
        gains = []
        for _, _, distances, _ in candidates:
            gains.append(sum(1 - distances[probe] for probe in left & distances.keys()))
        fault, score, distances, explained = candidates[gains.index(max(gains))]
        if not explained & left & distances.keys():
            break
        names = {fault.name, *fault.twins}
        for (other, *_), gain in zip(candidates, gains, strict=True):
            if gain >= 0.98 * max(gains):
                names.add(other.name)
        if score > _EXACT and proof.document["model"]["precision"] == "int8":
            names.add(SATURATED)
        diagnoses.append(Diagnosis(sorted(names), fault.advice, score <= _EXACT, explained & left))
        left -= explained
    return diagnoses


def _is_of_another(comparison: Comparison, probe: int) -> bool:
    """Return whether the answer to a photo is the right one for exactly one other photo. With few
    classes, it may resemble several."""
    bound = comparison.proof.document["bounds"]["logits"]
    others = range(len(comparison.proof.probes))
    alike = [other for other in others if comparison.measure(probe, other) <= bound]
    return len(alike) == 1


def judge(
    comparison: Comparison, pixels: Mapping[str, Sequence[float]], mixing: Sequence[str] = ()
) -> tuple[list[str], int]:
    """Compare all answers.

    Args:
        comparison: The answers and the proof.
        pixels: For "decoded" and "seen", by how many levels of 255 each photo differs; empty if
            unknown.
        mixing: Sentences on photos that have other answers in a batch.

    Returns:
        The lines to print, and the exit code: 0 if all is right, 1 if something differs.
    """
    proof = comparison.proof
    bounds = proof.document["bounds"]
    shares = [comparison.measure(probe) for probe in range(len(proof.probes))]
    failing = []
    for probe, share in enumerate(shares):
        # Pixels that are rounded differently, within their bounds, change the answer as well.
        is_rounded = any(sizes[probe] > _EQUAL_PIXELS for sizes in pixels.values())
        least = is_rounded * measure_decoder(proof) if pixels else _ROUNDED_PIXELS
        if share > max(bounds["logits"], least):
            failing.append(probe)
    lines = []
    for stage, sizes in pixels.items():
        for probe, size in enumerate(sizes):
            if size > bounds[stage]:
                how = f"differ by {size:.3g} of 255, expected at most {bounds[stage]:g}"
                if size == math.inf:
                    how = "have the wrong size"
                lines.append(f"{proof.name(probe)}: {stage} pixels {how}")
    lines += mixing
    if mixing:
        lines.append(f"Cause: {MIXES}; a photo must not change the answers to others")
    remark = []
    if failing and _is_decoder(comparison, failing):
        remark = [
            f"only JPEGs differ ({len(failing)}, by up to {max(shares):.2g} of the largest logit)."
            f" Cause: {DECODER}, which is not a fault as long as classes are equal"
        ]
        failing = []
    elif failing:
        lines += _describe_failing(comparison, failing, shares)
    if lines:
        return lines + remark, 1
    agreeing = sum(comparison.has_class(probe) for probe in range(len(shares)))
    classes = "classes equal" if agreeing == len(shares) else f"{agreeing} classes equal"
    stages = ""
    if pixels:
        stages = f"preprocessing within {max(map(max, pixels.values())):.2f} of 255, "
    count = len(shares)
    line = f"{count} of {count} probes: {stages}logits within {max(shares):.1g}, {classes}"
    return [line, *remark], 0


def measure_decoder(proof: Proof) -> float:
    """Return by which share of the largest logit answers may differ if pixels are rounded
    differently: three times what the fault `DECODER` changes."""
    for fault in proof.faults:
        if fault.name == DECODER:
            right = proof.logs[list(fault.probes)][:, fault.columns]
            return 3 * float(np.abs(fault.logs - right).max()) / proof.unit
    return _OTHER_DECODER


def _is_decoder(comparison: Comparison, failing: Sequence[int]) -> bool:
    """Return whether only JPEGs differ, by no more than another decoder explains, the classes are
    equal, and no fault explains it."""
    proof = comparison.proof
    if any(diagnosis.is_exact for diagnosis in name_faults(comparison, failing)):
        return False
    limit = measure_decoder(proof)
    for probe in failing:
        is_jpeg = proof.probes[probe]["file"].endswith(".jpg")
        if not (is_jpeg and comparison.has_class(probe)) or comparison.measure(probe) > limit:
            return False
    return True


def _describe_failing(
    comparison: Comparison, failing: Sequence[int], shares: Sequence[float]
) -> list[str]:
    """Return which answers differ, by how much, and what explains it."""
    proof = comparison.proof
    bound = proof.document["bounds"]["logits"]
    lines = [
        f"{len(failing)} of {len(shares)} probes differ by more than {bound:g} of the largest logit"
    ]
    for probe in failing:
        reason = comparison.answers.problems.get(probe)
        number = comparison.find_class(probe)
        if reason is None and number is not None:
            right = proof.name_class(int(proof.logs[probe].argmax()))
            reason = f"by {shares[probe]:.2g}; class {proof.name_class(number)!r}"
            if not comparison.has_class(probe):
                reason += f", expected {right!r}"
        lines.append(f"  {proof.name(probe)}: {reason}")
    answered = set(failing) - set(comparison.answers.problems)
    for diagnosis in name_faults(comparison, answered):
        how = "Cause" if diagnosis.is_exact else "Probable cause"
        lines.append(f"{how}: {', or '.join(diagnosis.names)}; {diagnosis.advice}")
        if diagnosis.probes != set(failing):
            files = [proof.probes[probe]["file"] for probe in sorted(diagnosis.probes)]
            lines.append(f"  explains {', '.join(files)}")
        answered -= diagnosis.probes
    if answered and proof.document["model"]["precision"] == "int8":
        lines.append(
            f"Probable cause: {SATURATED}; processors with AVX2 but without VNNI add pairs of"
            " products in 16 bits: use the runtime's option for 7-bit weights, or another processor"
        )
    elif len(answered) == len(shares):
        lines.append(
            "Probable cause: a wrong mean or scale, a wrong resize, or other weights, because all"
            " photos differ"
        )
    elif answered:
        files = [proof.probes[probe]["file"] for probe in sorted(answered)]
        lines.append(f"No known fault explains {', '.join(files)}")
    return lines


def _are_sorted_alike(comparison: Comparison, probes: set[int]) -> bool:
    """Return whether answers have the right numbers in another order, and so other classes."""
    if all(map(comparison.has_class, probes)):
        return False
    for probe in probes:
        logs = np.sort(comparison.proof.logs[probe])
        differences = _differ(np.sort(comparison.answers.logs[probe]), logs, 0.0)
        bound = comparison.proof.document["bounds"]["logits"] * comparison.proof.unit
        if len(differences) < len(logs) or differences.max() > bound:
            return False
    return True
