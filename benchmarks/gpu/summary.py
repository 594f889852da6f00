"""The summary of a campaign: what is wanted, what was measured, and whether it is reached."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

Row = Mapping[str, Any]
REACHED = "reached"
MISSED = "missed"
NOT_MEASURED = "not measured"
COMPILERS = {"default": "compile", "max-autotune": "max-autotune"}
"""The kind of network of a mode: a ratio is judged against the better one, so both must be
measured."""
OURS = ("plain", "deterministic", "fused")
FASTEST = {"H100": 3000.0, "H200": 4500.0}
"""Images per second wanted of ResNet-50 in one process with synthetic data, by a part of the
device's name."""


class Line(NamedTuple):
    """A line of the summary."""

    what: str
    wanted: str
    measured: str
    verdict: str


def summarise(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the summary of the results of parts on one machine."""
    rows: list[Row] = []
    problems = []
    for result in results:
        rows += result["rows"]
        if result["status"] != "ok":
            problems.append(f"{result['part']}: {result['status']}: {result['reason']}")
    device = results[0]["about"]["device"] if results else ""
    tables = [*_align(judge(rows, device)), "", *_align(_list_rates(rows))]
    return "\n".join([device, "", *tables, "", *problems])


def judge(rows: Sequence[Row], device: str) -> list[Line]:
    """Return a line for everything that is wanted of a GPU, exactness first."""

    def is_verified(row: Row) -> bool:
        engine = row["engines"]["torch"]
        is_on_device = engine["device"].startswith("CPU") == device.startswith("CPU")
        return is_on_device and all(quantity["passed"] for quantity in engine["rows"])

    def has_advice(row: Row) -> bool:
        reasons = " ".join(done["reason"] for done in row["tries"])
        return "too little memory" in reasons and "accumulation_steps" in reasons

    empty = "same_with_an_empty_cache"
    precisions = {"contender": "precisions", "precision": "bf16"}
    return [
        _count(rows, "repeated", "the same bits twice", lambda row: row["same"]),
        _count(rows, "repeated", "from a CUDA graph", lambda row: row["same_from_a_graph"]),
        _count(rows, "killed", "killed and resumed, bit for bit", lambda row: row["same"]),
        _count(rows, "killed", "with an empty cache of the compiler", lambda row: row[empty]),
        _count(rows, "verify", "lockstep verify in every precision", is_verified),
        _judge_conformance(rows),
        _count(rows, "largest batch", "the message when memory is short", has_advice),
        _count(rows, "fused kernel", "fused kernels against float64", lambda row: row["passed"]),
        _judge_compilers(rows, "resnet50"),
        _judge_compilers(rows, "resnext101-32x4d"),
        _judge_rate(rows, device),
        _compare(rows, "bf16 over fp32 (not TF32)", 3.5, precisions, {"precision": "fp32"}),
        _judge_data(rows),
        _judge_host_time(rows, "plain", "host time of a step, ms"),
        _judge_host_time(rows, "graph", "host time of a step as a CUDA graph, ms"),
        _compare(rows, "a CUDA graph over the plain step", 1.0, {"contender": "graph"}),
        _compare(rows, "deterministic over plain", None, {"contender": "deterministic"}),
        _compare(rows, "fused kernels over plain", None, {"contender": "fused"}),
    ]


def _judge(title: str, wanted: str, text: str = "-", is_reached: bool | None = None) -> Line:
    """Return a line; None: it was not measured."""
    if is_reached is None:
        return Line(title, wanted, text, NOT_MEASURED)
    return Line(title, wanted, text, REACHED if is_reached else MISSED)


def _count(rows: Iterable[Row], what: str, title: str, is_right: Callable[[Row], bool]) -> Line:
    """Return whether all rows are right. Those without the field were not measured."""
    right = []
    for row in rows:
        try:
            right += [is_right(row)] if row["what"] == what else []
        except KeyError:
            continue
    if not right:
        return _judge(title, "all")
    return _judge(title, "all", f"{sum(right)} of {len(right)}", all(right))


def _judge_conformance(rows: Iterable[Row]) -> Line:
    title = "conformance suite on the device"
    for row in rows:
        if row["what"] == "conformance":
            wrong = row["failures"] + row["errors"]
            text = f"{wrong} of {row['tests']} failed, {row['skipped']} skipped"
            if row["interrupted"] and not wrong:
                return _judge(title, "no failure", f"{text}; not finished")
            return _judge(title, "no failure", text, not wrong and row["tests"] > row["skipped"])
    return _judge(title, "no failure")


def find_fastest(rows: Iterable[Row], contenders: Sequence[str], **fields: Any) -> Row | None:
    """Return the fastest training of some contenders whose fields have these values."""
    fastest = None
    for row in rows:
        if row["what"] == "train" and row["status"] == "ok" and row["contender"] in contenders:
            is_same = all(row.get(name) == value for name, value in fields.items())
            if is_same and (fastest is None or row["images_per_sec"] > fastest["images_per_sec"]):
                fastest = row
    return fastest


def _judge_compilers(rows: Sequence[Row], model: str) -> Line:
    """Judge Lockstep's fastest engine against the better of the compiled loops, in the precision
    and batch of that engine. Engine and loop of a ratio are from the same part."""
    title = f"{model} over the better torch.compile"
    fastest = find_fastest(rows, OURS, model=model)
    if fastest is None:
        return _judge(title, ">= 1.3")
    same = {"model": model, "precision": fastest["precision"], "batch": fastest["batch"]}
    ratios = {}
    for mode, kind in COMPILERS.items():
        ours = find_fastest(rows, OURS, mode=mode, **same)
        loop = find_fastest(rows, (f"{kind}, SGD", f"{kind}, fused SGD"), mode=mode, **same)
        if ours is not None and loop is not None:
            ratios[kind] = ours["images_per_sec"] / loop["images_per_sec"]
    text = ", ".join(f"{ratio:.2f} ({kind})" for kind, ratio in ratios.items()) or "-"
    text += f" in {same['precision']} at {same['batch']}"
    if min(ratios.values(), default=2) < 1.3:
        return _judge(title, ">= 1.3", text, False)
    return _judge(title, ">= 1.3", text, True if len(ratios) == len(COMPILERS) else None)


def _judge_rate(rows: Sequence[Row], device: str) -> Line:
    title = "resnet50, images/s in one process"
    fastest = find_fastest(rows, OURS, model="resnet50")
    bounds = [bound for name, bound in FASTEST.items() if name in device]
    wanted = f">= {bounds[0]:.0f}" if bounds else "H100: >= 3000, H200: >= 4500"
    if fastest is None:
        return _judge(title, wanted)
    rate = fastest["images_per_sec"]
    text = f"{rate:.0f} ({fastest['precision']}, {fastest['contender']})"
    return _judge(title, wanted, text, rate >= bounds[0] if bounds else None)


def _compare(
    rows: Sequence[Row],
    title: str,
    bound: float | None,
    fields: Mapping[str, str],
    other: Mapping[str, str] | None = None,
) -> Line:
    """Judge rows with some fields against those that are the same but for others; by default
    against the plain engine."""
    ratios = []
    for row in rows:
        if row["what"] == "train" and row["status"] == "ok" and fields.items() <= row.items():
            same = {name: row.get(name) for name in ("model", "precision", "batch", "mode")}
            contender = "plain" if other is None else row["contender"]
            over = find_fastest(rows, (contender,), **same | (other or {}))
            ratios += [] if over is None else [row["images_per_sec"] / over["images_per_sec"]]
    return _judge_ratios(title, bound, ratios)


def _judge_ratios(title: str, bound: float | None, ratios: Sequence[float]) -> Line:
    wanted = "(reported)" if bound is None else f">= {bound}"
    if not ratios:
        return _judge(title, wanted)
    text = ", ".join(f"{ratio:.3f}" for ratio in ratios)
    if bound is None:
        return Line(title, wanted, text, "")
    return _judge(title, wanted, text, min(ratios) >= bound)


def _judge_data(rows: Iterable[Row]) -> Line:
    done = [row for row in rows if row.get("contender") == "JPEGs" and row["status"] == "ok"]
    ratios = [row["images_per_sec"] / row["compute_only_images_per_sec"] for row in done]
    return _judge_ratios("resnet50, from JPEGs over a held batch", 0.95, ratios)


def _judge_host_time(rows: Iterable[Row], contender: str, title: str) -> Line:
    wanted = "<= 1, and returns early"
    times = [row for row in rows if row["what"] == "host" and row["contender"] == contender]
    if not times:
        return _judge(title, wanted)
    longest = max(row["host_ms_a_step"] for row in times)
    share = max(row["returned_sec"] / row["done_sec"] for row in times)
    text = f"{longest:.2f}; train returns after {share:.0%} of the steps' time"
    return _judge(title, wanted, text, longest <= 1 and share < 0.9)


def _list_rates(rows: Iterable[Row]) -> list[tuple[str, ...]]:
    table = [("", "model", "precision", "batch", "contender", "images/s")]
    for row in rows:
        if row["what"] in ("train", "inference"):
            contender = row.get("contender") or row["runtime"]
            rate = row.get("images_per_sec")
            cells = (row["what"], row["model"], row["precision"], str(row["batch"]), contender)
            table.append((*cells, row["status"] if rate is None else f"{rate:.1f}"))
    return table


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for row in table:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(cells).rstrip())
    return lines
