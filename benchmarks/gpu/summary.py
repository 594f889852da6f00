"""The summary of a campaign: what is wanted, what was measured, and whether it is reached."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lockstep.cli.terminal import print_table

Row = Mapping[str, Any]
RATE = "images_per_sec"
COMPILERS = {"default": "compile", "max-autotune": "max-autotune"}
"""The kind of loops that are judged, by mode."""
OURS = ("plain", "deterministic", "fused")
FASTEST = {"H100": 3000, "H200": 4500}
"""Images per second wanted of ResNet-50 in one process with synthetic data, by a part of the
device's name."""
FAULTS = ("FAILED ", "ERROR ")
"""How pytest's lines about tests begin that did not pass."""
SAME = ("model", "precision", "batch", "mode")
"""Fields of rows that are compared with each other."""
T_95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}
"""Student's t for a two-sided 95 % interval, by the number of rounds."""


class Line(NamedTuple):
    """A line of the summary."""

    what: str
    wanted: str
    measured: str = "-"
    verdict: str = "not measured"

    def decide(self, measured: str, is_reached: bool) -> "Line":
        """Return the line with what was measured and the verdict."""
        return self._replace(measured=measured, verdict="reached" if is_reached else "missed")


def print_summary(results: Sequence[Mapping[str, Any]]) -> None:
    """Print the summary of the results of parts on one machine."""
    rows: list[Row] = []
    for result in results:
        rows += result["rows"]
    device = results[0]["about"]["device"] if results else ""
    print(f"{device}\n")
    print_table(judge(rows, device))
    print()
    print_table(_list_rates(rows))
    for row in rows:
        if row["what"] == "conformance":
            for line in list_faults(row):
                print(line)
    for result in results:
        if result["status"] != "ok":
            print(f"{result['part']}: {result['status']}: {result['reason']}")


def list_faults(row: Row) -> list[str]:
    """Return pytest's lines about tests that did not pass."""
    return [line for line in row["lines"] if line.startswith(FAULTS)]


def judge(rows: Sequence[Row], device: str) -> list[Line]:
    """Return a line for everything that is wanted of a GPU, exactness first."""
    return [*_judge_exactness(rows, device), *_judge_speed(rows, device)]


def _judge_exactness(rows: Sequence[Row], device: str) -> list[Line]:
    def count(what: str, title: str, is_right: Callable[[Row], bool | None]) -> Line:
        """Return whether all rows are right. None: it was not measured."""
        verdicts = [is_right(row) for row in rows if row["what"] == what]
        right = [verdict for verdict in verdicts if verdict is not None]
        line = Line(title, "all")
        return line.decide(f"{sum(right)} of {len(right)}", all(right)) if right else line

    def is_verified(row: Row) -> bool:
        engine = row["engines"]["torch"]
        is_on_device = engine["device"].startswith("CPU") == device.startswith("CPU")
        return is_on_device and all(quantity["passed"] for quantity in engine["rows"])

    def is_passed(row: Row) -> bool | None:
        is_faulty = bool(list_faults(row))
        if "KeyboardInterrupt" in " ".join(row["lines"]) and not is_faulty:
            return None
        return " passed" in row["lines"][-1] and not is_faulty

    def has_advice(row: Row) -> bool:
        reasons = " ".join(done["reason"] for done in row["tries"])
        return "too little memory" in reasons and "accumulation_steps" in reasons

    empty = "same_with_an_empty_cache"
    return [
        count("repeated", "the same bits twice", lambda row: row["same"]),
        count("repeated", "from a CUDA graph", lambda row: row.get("same_from_a_graph")),
        count("killed", "killed and resumed, bit for bit", lambda row: row["same"]),
        count("killed", "with an empty cache of the compiler", lambda row: row.get(empty)),
        count("fine-tuned", "fine-tuning, killed and resumed", lambda row: row["same"]),
        count("verify", "lockstep verify in every precision", is_verified),
        count("conformance", "conformance suite on the device", is_passed),
        count("largest batch", "the message when memory is short", has_advice),
        count("fused kernel", "fused kernels against float64", lambda row: row["passed"]),
    ]


def _judge_speed(rows: Sequence[Row], device: str) -> list[Line]:
    def compare(title: str, bound: float, ours: list[Row], *others: str, **fields: Any) -> Line:
        """Judge rows against the fastest of other contenders in the same part, or where fields have
        other values."""
        pairs = []
        for row in ours:
            same = {name: row.get(name) for name in SAME} | fields
            pairs += [(row, other) for other in find_rows(rows, *others, **same)[:1]]
        return _judge_ratios(title, bound, pairs)

    lines = []
    for model in ("resnet50", "resnext101-32x4d"):
        for mode, kind in COMPILERS.items():
            ours = find_rows(rows, *OURS, model=model, mode=mode)[:1]
            loops = (f"{kind}, SGD", f"{kind}, fused SGD")
            lines.append(compare(f"{model} over {kind}", 1.3, ours, *loops))
    bf16 = find_rows(rows, "precisions", precision="bf16")
    jpegs = [(row, {RATE: row[f"compute_only_{RATE}"]}) for row in find_rows(rows, "JPEGs")]
    return [
        *lines,
        _judge_rate(find_rows(rows, *OURS, model="resnet50"), device),
        compare("bf16 over fp32", 3.5, bf16, "precisions", precision="fp32"),
        _judge_ratios("resnet50, from JPEGs over a held batch", 0.95, jpegs),
        _judge_host_time(rows, "plain", "host time of a step, ms"),
        _judge_host_time(rows, "graph", "host time of a step as a CUDA graph, ms"),
        compare("a CUDA graph over plain", 1.0, find_rows(rows, "graph"), "plain"),
        compare("deterministic over plain", 0, find_rows(rows, "deterministic"), "plain"),
        compare("fused kernels over plain", 0, find_rows(rows, "fused"), "plain"),
    ]


def find_rows(rows: Iterable[Row], *contenders: str, **fields: Any) -> list[Row]:
    """Return the training of some contenders whose fields have these values, the fastest first."""
    wanted = fields | {"what": "train", "status": "ok"}
    same = [row for row in rows if row.items() >= wanted.items()]
    matching = [row for row in same if row["contender"] in contenders]
    return sorted(matching, key=lambda row: -row[RATE])


def _judge_ratios(title: str, bound: float, pairs: Sequence[tuple[Row, Row]]) -> Line:
    """Judge ratios of rates; without a bound they are only reported."""
    line = Line(title, f">= {bound}" if bound else "(reported)")
    if not pairs:
        return line
    ratios = [compute_ratio(ours, other) for ours, other in pairs]
    texts = []
    for ratio, low, high in ratios:
        texts.append(f"{ratio:.3f}" if low == high else f"{ratio:.3f} ({low:.3f} to {high:.3f})")
    line = line.decide(", ".join(texts), min(ratios)[0] >= bound)
    return line if bound else line._replace(verdict="")


def compute_ratio(ours: Row, other: Row) -> tuple[float, float, float]:
    """Return the ratio of two rates and its 95 % interval: of contenders that alternated, by
    Student's t for the geometric mean over rounds. One measurement has no interval."""
    ratio = ours[RATE] / other[RATE]
    if "rounds" not in ours:
        return ratio, ratio, ratio
    logs = [math.log(a / b) for a, b in zip(ours["rounds"], other["rounds"], strict=True)]
    mean = statistics.fmean(logs)
    half = T_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def _judge_rate(ours: Sequence[Row], device: str) -> Line:
    line = Line("resnet50, images/s in one process", "H100: >= 3000, H200: >= 4500")
    bounds = [bound for name, bound in FASTEST.items() if name in device]
    if not (ours and bounds):
        return line
    text = f"{ours[0][RATE]:.0f} ({ours[0]['precision']}, {ours[0]['contender']})"
    return line.decide(text, ours[0][RATE] >= bounds[0])


def _judge_host_time(rows: Iterable[Row], contender: str, title: str) -> Line:
    line = Line(title, "<= 1, and returns early")
    times = [row for row in rows if row["what"] == "host" and row["contender"] == contender]
    if not times:
        return line
    longest = max(row["host_ms_a_step"] for row in times)
    share = max(row["returned_sec"] / row["done_sec"] for row in times)
    text = f"{longest:.2f}; train returns after {share:.0%} of the steps' time"
    return line.decide(text, longest <= 1 and share < 0.9)


def _list_rates(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    table = [("", "model", "precision", "batch", "contender", "images/s")]
    for row in rows:
        if row["what"] in ("train", "inference"):
            contender = row.get("contender") or row["runtime"]
            rate = row.get(RATE)
            cells = (row["what"], row["model"], row["precision"], str(row["batch"]), contender)
            table.append((*cells, row["status"] if rate is None else f"{rate:.1f}"))
    return table
