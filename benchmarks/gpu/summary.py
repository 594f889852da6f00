"""The summary of a campaign: what is wanted, what was measured, and whether it is reached."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.parts import DETERMINISTIC, FUSED, GRAPH, PLAIN
from benchmarks.gpu.results import FAILED, OK, Results, Row
from lockstep.benchmark.roofline import limit_images_per_sec
from lockstep.models.operations import Work

REACHED = "reached"
MISSED = "missed"
NOT_MEASURED = "not measured"
COMPILED = {"compile": "torch.compile, default", "max-autotune": "torch.compile, max-autotune"}
"""The baselines by the kind of their network: a ratio is judged against the better one, so both
must be measured."""
MODELS = ("resnet50", "resnext101-32x4d")
FASTEST = {"H100": 3000.0, "H200": 4500.0}
"""Images per second wanted of ResNet-50 in one process with synthetic data, by a part of the
device's name."""


@dataclass(frozen=True)
class Line:
    """A line of the summary."""

    what: str
    wanted: str
    measured: str
    verdict: str


def summary(results: Results, machine: str) -> str:
    """Return the summary of all that was measured on a machine."""
    about = results.machines[machine]
    of_machine = [result for result in results.results if result["machine"] == machine]
    rows = [row | {"part": result["part"]} for result in of_machine for row in result["rows"]]
    title = (
        f"{about['device']}, torch {about['torch']}, CUDA {about['cuda']}, sources"
        f" {about['sources']}"
    )
    lines = [*wanted(rows, str(about["device"]))]
    parts = [
        title,
        "",
        *_table([(line.what, line.wanted, line.measured, line.verdict) for line in lines]),
    ]
    if speeds := _speeds(rows):
        parts += ["", *_table(speeds)]
    if inferences := _inference(rows):
        parts += ["", *_table(inferences)]
    problems = [
        f"{result['part']}: {result['status']}: {result['reason']}"
        for result in of_machine
        if result["status"] != OK
    ]
    return "\n".join([*parts, *([""] if problems else []), *problems])


def wanted(rows: Sequence[Row], device: str) -> Iterable[Line]:
    """Yield a line for everything that is wanted of a GPU, exactness first."""
    yield _all(
        rows,
        "repeated",
        "the same bits twice, narrow models, deterministic",
        lambda row: row["same"],
    )
    yield _all(
        rows, "repeated", "the same bits after a resume, narrow models", lambda row: row["resumed"]
    )
    yield _all(
        rows, "captured", "the bits of plain steps from a CUDA graph", lambda row: row["same"]
    )
    fixed = [row for row in rows if row.get("contender") == DETERMINISTIC]
    yield _all(
        fixed, "same bits", "the same bits twice at the size that is timed", lambda row: row["same"]
    )
    yield _all(
        rows, "killed", "lockstep train killed and resumed, bit for bit", lambda row: row["same"]
    )
    fresh = [row for row in rows if "same_with_an_empty_cache" in row]
    title = "the same, resumed with an empty cache of the compiler"
    yield _all(fresh, "killed", title, lambda row: row["same_with_an_empty_cache"])
    yield _all(
        rows, "gpu against cpu", "a step in fp32 against the CPU's", lambda row: row["passed"]
    )
    yield _all(rows, "verify", "lockstep verify in every precision", lambda row: row["passed"])
    yield _conformance(rows)
    yield _all(
        rows,
        "out of memory",
        "the message when memory is short",
        lambda row: row["is_right"] and row["goes_on"],
    )
    yield _all(
        _without(rows, "ranks", "status"),
        "ranks",
        "ranks against parts of one process",
        lambda row: row["passed"],
    )
    yield _all(
        rows, "fused update", "the fused update against its plain path", lambda row: row["passed"]
    )
    yield _all(
        rows, "fused kernel", "fused kernels against their plain path", lambda row: row["passed"]
    )
    for model in MODELS:
        yield _over_compiled(rows, model)
    yield _fast_enough(rows, device)
    yield _mixed_over_fp32(rows)
    yield _from_jpegs(rows)
    yield _host_time(rows, OURS, "host time of a step, ms")
    yield _host_time_of_new_batches(rows)
    yield _host_time(rows, (GRAPH,), "host time of a step as a CUDA graph, ms")
    yield _ratio(rows, "resnet50, a CUDA graph over the plain step", 1.0, GRAPH, PLAIN)
    yield _over_default(rows, "deterministic over not deterministic", DETERMINISTIC)
    yield _over_default(rows, "fused kernels over the plain path", FUSED)


def _without(rows: Iterable[Row], what: str, field: str) -> list[Row]:
    return [row for row in rows if row["what"] != what or field not in row]


def _all(rows: Iterable[Row], what: str, title: str, is_right: Callable[[Row], bool]) -> Line:
    found = [row for row in rows if row["what"] == what]
    right = sum(bool(is_right(row)) for row in found)
    verdict = NOT_MEASURED if not found else REACHED if right == len(found) else MISSED
    return Line(title, "all", f"{right} of {len(found)}" if found else "-", verdict)


def _conformance(rows: Iterable[Row]) -> Line:
    title = "conformance suite on the device"
    found = [row for row in rows if row["what"] == "conformance"]
    if not found:
        return Line(title, "no failure", "-", NOT_MEASURED)
    wrong, tests = (
        sum(row[key] for row in found for key in keys)
        for keys in (("failures", "errors"), ("tests",))
    )
    skipped = sum(row["skipped"] for row in found)
    said = f"{wrong} of {tests} failed, {skipped} skipped"
    if not wrong and any(row.get("interrupted") for row in found):
        return Line(title, "no failure", f"{said}; not finished", NOT_MEASURED)
    return Line(title, "no failure", said, REACHED if tests > skipped and not wrong else MISSED)


def best(rows: Iterable[Row], **fields: Any) -> Row | None:
    """Return the fastest row of a contender's turns whose fields have these values, or one of these
    for a tuple."""

    def fits(row: Row) -> bool:
        return all(
            row.get(name) in (value if isinstance(value, tuple) else (value,))
            for name, value in fields.items()
        )

    found = [
        row for row in rows if row["what"] == "train" and "images_per_sec" in row and fits(row)
    ]
    return max(found, key=lambda row: float(row["images_per_sec"]), default=None)


OURS = (PLAIN, DETERMINISTIC, FUSED)


def _over_compiled(rows: Sequence[Row], model: str) -> Line:
    """Judge Lockstep's fastest engine against the better of the compiled loops, in one precision
    and batch.

    Engine and loop of a ratio are from the same part, in which they alternate. The precision and
    batch with the fastest engine count.
    """
    title = f"{model} over the better torch.compile"
    bound = ">= 1.3"
    fastest = best(
        [row for row in rows if row.get("mode") in ("default", "max-autotune")],
        model=model,
        contender=OURS,
    )
    if fastest is None:
        return Line(title, bound, "-", NOT_MEASURED)
    same = {"model": model, "precision": fastest["precision"], "batch": fastest["batch"]}
    ratios = {}
    for kind in COMPILED:
        mode = "default" if kind == "compile" else kind
        ours = best(rows, contender=OURS, mode=mode, **same)
        loop = best(rows, contender=(f"{kind}, SGD", f"{kind}, fused SGD"), mode=mode, **same)
        if ours is not None and loop is not None:
            ratios[kind] = ours["images_per_sec"] / loop["images_per_sec"]
    said = ", ".join(f"{ratio:.2f} ({kind})" for kind, ratio in ratios.items())
    said = f"{said or '-'} in {same['precision']} at {same['batch']}"
    if any(ratio < 1.3 for ratio in ratios.values()):
        return Line(title, bound, said, MISSED)
    return Line(title, bound, said, REACHED if len(ratios) == len(COMPILED) else NOT_MEASURED)


def _fast_enough(rows: Sequence[Row], device: str) -> Line:
    title = "resnet50, images/s in one process"
    fastest = best(rows, model="resnet50", contender=OURS)
    bound = next((value for name, value in FASTEST.items() if name in device), None)
    said = (
        "-"
        if fastest is None
        else f"{fastest['images_per_sec']:.0f} ({fastest['precision']}, {fastest['contender']})"
    )
    if bound is None:
        return Line(title, "H100: >= 3000, H200: >= 4500", said, NOT_MEASURED)
    verdict = (
        NOT_MEASURED
        if fastest is None
        else REACHED
        if fastest["images_per_sec"] >= bound
        else MISSED
    )
    return Line(title, f">= {bound:.0f}", said, verdict)


def _ratio(rows: Iterable[Row], title: str, bound: float, of: str, over: str) -> Line:
    found = [
        row for row in rows if row["what"] == "ratio" and (row["of"], row["over"]) == (of, over)
    ]
    if not found:
        return Line(title, f">= {bound}", "-", NOT_MEASURED)
    said = ", ".join(
        f"{row['ratio']:.3f} ({row['interval'][0]:.3f} to {row['interval'][1]:.3f})"
        for row in found
    )
    return Line(
        title,
        f">= {bound}",
        said,
        REACHED if all(row["ratio"] >= bound for row in found) else MISSED,
    )


def _mixed_over_fp32(rows: Iterable[Row]) -> Line:
    return _ratio(
        rows, "resnet50, bf16 over fp32 (not TF32)", 3.5, "lockstep bf16", "lockstep fp32"
    )


def _from_jpegs(rows: Sequence[Row]) -> Line:
    line = _ratio(rows, "resnet50, from JPEGs over a held batch", 0.95, "from JPEGs", "held batch")
    alone = [row for row in rows if row["what"] == "loader alone"]
    if not alone:
        return line
    said = (
        f"{line.measured}; the loader alone: {max(row['images_per_sec'] for row in alone):.0f}"
        " images/s"
    )
    return Line(line.what, line.wanted, said, line.verdict)


def _host_time(rows: Iterable[Row], contenders: Sequence[str], title: str) -> Line:
    bound = "<= 1, and returns early"
    trained = (row for row in rows if row["what"] == "train" and row.get("contender") in contenders)
    found = [row for row in trained if "host_ms_a_step" in row]
    if not found:
        return Line(title, bound, "-", NOT_MEASURED)
    longest = max(row["host_ms_a_step"] for row in found)
    share = max(row["returned_sec"] / row["done_sec"] for row in found)
    said = f"{longest:.2f}; train returns after {share:.0%} of the steps' time"
    return Line(title, bound, said, REACHED if longest <= 1 and share < 0.9 else MISSED)


def _host_time_of_new_batches(rows: Iterable[Row]) -> Line:
    """Say the longest time; no figure is wanted, since it depends on how fast the host copies
    memory."""
    title = "the same with new batches, ms"
    found = [
        row
        for row in rows
        if row["what"] == "train" and row.get("contender") in OURS and "host_ms_a_new_batch" in row
    ]
    if not found:
        return Line(title, "(reported)", "-", NOT_MEASURED)
    wall, own = (
        max(row[f"{what}_ms_a_new_batch"] for row in found) for what in ("host", "processor")
    )
    return Line(title, "(reported)", f"{wall:.2f}, of which {own:.2f} of the processor", "")


def _over_default(rows: Iterable[Row], title: str, contender: str) -> Line:
    """Say how fast a contender is over the plain, not deterministic engine, `PLAIN`; no figure is
    wanted."""
    ours = {
        (row["model"], row["precision"], row["batch"], row["contender"]): row
        for row in rows
        if _is_ours(row)
    }
    shares = [
        f"{row['images_per_sec'] / ours[*key[:3], PLAIN]['images_per_sec']:.3f} ({key[0]} {key[1]}"
        f" {key[2]})"
        for key, row in ours.items()
        if key[3] == contender and (*key[:3], PLAIN) in ours
    ]
    return Line(title, "(reported)", "; ".join(shares) or "-", "" if shares else NOT_MEASURED)


def _is_ours(row: Row) -> bool:
    return (
        row["what"] == "train"
        and row.get("mode") == "default"
        and row.get("contender") in OURS
        and "turns" in row
    )


def ceilings(rows: Iterable[Row]) -> tuple[float | None, dict[str, float]]:
    """Return the rate of the copy in GB/s, and of products in GFLOP/s by precision, if they were
    measured."""
    copy = None
    products = {}
    for row in rows:
        if row["what"] == "copy":
            copy = float(row["gb_per_sec"])
        elif row["what"] == "product":
            products[row["precision"]] = float(row["gflops"])
    return copy, products


def shares(row: Row, copy: float | None, products: Mapping[str, float]) -> list[str]:
    """Return the shares that a row reaches of the rates of products and copies and of the limit of
    both; "-" if unknown."""
    product = products.get(row.get("computes_in", ""))
    if copy is None or product is None or "flop_an_image" not in row:
        return ["-", "-", "-"]
    rate = row["images_per_sec"]
    of_image = Work(row["flop_an_image"], row["bytes_an_image"])
    limit = limit_images_per_sec(of_image, product, copy)
    parts = (
        rate * of_image.flops / (product * 1e9),
        rate * of_image.bytes / (copy * 1e9),
        rate / limit,
    )
    return [f"{part:.0%}" for part in parts]


def _speeds(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    copy, products = ceilings(rows)
    head = (
        "training",
        "batch",
        "contender",
        "images/s",
        "95 %",
        "GiB",
        "of products",
        "of copies",
        "of the limit",
    )
    body = []
    for row in (row for row in rows if row["what"] == "train"):
        start = (f"{row['model']} {row['precision']}", str(row["batch"]), row["contender"])
        if "images_per_sec" not in row:
            body.append((*start, "failed", "", "", "", "", ""))
            continue
        low, high = row["interval"]
        memory = "-" if row.get("peak_gib") is None else f"{row['peak_gib']:.1f}"
        body.append(
            (
                *start,
                f"{row['images_per_sec']:.1f}",
                f"{low:.1f} to {high:.1f}",
                memory,
                *shares(row, copy, products),
            )
        )
    return [head, *body] if body else []


def _inference(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    head = ("inference", "precision", "batch", "ms", "images/s")
    found = [row for row in rows if row["what"] == "inference" and row.get("status") == OK]
    cells = [
        (
            row["engine"],
            row["precision"],
            str(row["batch"]),
            f"{row['ms']:.2f}",
            f"{row['images_per_sec']:.0f}",
        )
        for row in found
    ]
    failed = [row for row in rows if row["what"] == "inference" and row.get("status") == FAILED]
    cells += [(row["engine"], row["precision"], "-", "failed", "") for row in failed]
    return [head, *cells] if cells else []


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
