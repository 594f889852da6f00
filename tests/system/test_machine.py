import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from lockstep.backends.emulation import find_emulation
from lockstep.system import machine
from lockstep.system.machine import (
    Arithmetic,
    cores,
    describe_gpu_arithmetic,
    fast_precision,
    free_memory_bytes,
    memory_bytes,
    parse_arithmetic,
    processor,
    share_of_cores,
)

# Parts of Linux's /proc/cpuinfo that concern arithmetic.
HASWELL = (
    "processor : 0\nmodel name\t: Intel(R) Xeon(R) CPU E5-2699 v3\nflags\t\t: fpu sse4_1 avx f16c"
    " fma avx2 bmi2\n"
)
MILAN = "model name\t: AMD EPYC 7763\nflags\t\t: fpu sse4_1 avx f16c fma avx2 vaes vpclmulqdq\n"
SKYLAKE = "flags\t\t: fpu fma avx2 avx512f avx512dq avx512cd avx512bw avx512vl\n"
GENOA = SKYLAKE.strip() + " avx512_bf16 avx512vbmi avx512_vnni\n"
SAPPHIRE_RAPIDS = GENOA.strip() + " avx_vnni avx512_fp16 amx_bf16 amx_tile amx_int8\n"
SIERRA_FOREST = "flags : fma avx2 avx_vnni avx_vnni_int8 avx_ne_convert avx_ifma\n"
GRAVITON_2 = (
    "Features\t: fp asimd evtstrm aes crc32 atomics fphp asimdhp cpuid asimdrdm dcpop asimddp\n"
)
GRAVITON_3 = "Features\t: fp asimd fphp asimdhp asimddp sve svei8mm svebf16 i8mm bf16 dgh rng\n"


def test_cores_are_those_this_process_may_use() -> None:
    assert cores() == len(os.sched_getaffinity(0))


LIMIT = "memory/memory.limit_in_bytes"
USAGE = "memory/memory.usage_in_bytes"
CACHED = "inactive_file 50\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 4096_000),
        ({"memory.max": "max\n", "memory.current": "7\n"}, 4096_000),
        ({"memory.max": "3000000", "memory.current": "1000000"}, 2_000_000),
        ({"memory.max": "300", "memory.current": "100", "memory.stat": "anon 5\n" + CACHED}, 250),
        ({"memory.max": "3000000", "memory.current": "4000000"}, 0),
        ({LIMIT: "9223372036854771712", USAGE: "5"}, 4096_000),
        ({LIMIT: "100", USAGE: "60"}, 40),
    ],
)
def test_free_memory_has_both_limits(tmp_path: Path, files: dict[str, str], expected: int) -> None:
    assert free_memory_bytes(tmp_path) is None
    texts = {"proc/meminfo": "MemTotal:  9 kB\nMemAvailable:    4000 kB\n"}
    texts |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert free_memory_bytes(tmp_path) == expected


def test_all_cores_count_where_a_system_does_not_say_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert cores() == 7


@pytest.mark.parametrize(
    ("processes", "share"), [(None, 6), ("1", 6), ("2", 3), ("4", 1), ("16", 1)]
)
def test_launched_processes_share_the_cores(
    processes: str | None, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lockstep.system.machine.cores", lambda: 6)
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    if processes is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", processes)
    assert share_of_cores() == share


def test_memory_is_what_the_system_counts() -> None:
    total = next(
        line
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemTotal")
    )
    assert memory_bytes() == int(total.split()[1]) * 1024


def test_the_processor_has_a_name() -> None:
    assert processor()


@pytest.mark.parametrize(
    ("cpuinfo", "precisions", "pays"),
    [
        (HASWELL, ("fp32",), "fp32"),
        (MILAN, ("fp32",), "fp32"),
        (SKYLAKE, ("fp32",), "fp32"),
        (GENOA, ("fp32", "bf16", "int8"), "bf16"),
        (SAPPHIRE_RAPIDS, ("fp32", "bf16", "fp16", "int8"), "bf16"),
        (SIERRA_FOREST, ("fp32", "int8"), "fp32"),
        (GRAVITON_2, ("fp32", "fp16"), "fp32"),
        (GRAVITON_3, ("fp32", "bf16", "fp16", "int8"), "fp32"),
        ("", ("fp32",), "fp32"),
    ],
)
def test_products_follow_from_flags(cpuinfo: str, precisions: tuple[str, ...], pays: str) -> None:
    arithmetic = parse_arithmetic(cpuinfo, {})
    assert (arithmetic.precisions, arithmetic.pays, arithmetic.limit) == (precisions, pays, None)


def test_extensions_are_named_in_the_order_they_came() -> None:
    result = parse_arithmetic(GENOA, {}).extensions
    assert result == ("AVX2", "AVX-512", "AVX512-VNNI", "AVX512-BF16")
    assert parse_arithmetic(GRAVITON_3, {}).extensions == ("NEON", "SVE", "FP16", "BF16", "I8MM")


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
@pytest.mark.parametrize(
    ("value", "precisions"),
    [
        ("AVX2", ("fp32",)),
        ("avx512_core_vnni", ("fp32", "int8")),
        ("AVX512_CORE_BF16", ("fp32", "bf16", "int8")),
        ("AVX512_CORE_AMX", ("fp32", "bf16", "fp16", "int8")),
    ],
)
def test_limited_libraries_get_less(variable: str, value: str, precisions: tuple[str, ...]) -> None:
    assert parse_arithmetic(SAPPHIRE_RAPIDS, {variable: value}).precisions == precisions


def test_the_limit_is_named_only_where_it_takes_something_away() -> None:
    result = parse_arithmetic(GENOA, {"ONEDNN_MAX_CPU_ISA": "AVX2"}).limit
    assert result == "ONEDNN_MAX_CPU_ISA=AVX2"
    assert parse_arithmetic(MILAN, {"ONEDNN_MAX_CPU_ISA": "AVX2"}).limit is None
    result = parse_arithmetic(GENOA, {"ONEDNN_MAX_CPU_ISA": "NOTHING_KNOWN"})
    assert result == parse_arithmetic(GENOA, {})


def test_the_newer_name_of_the_limit_counts() -> None:
    both = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "DNNL_MAX_CPU_ISA": "AVX2"}
    assert parse_arithmetic(GENOA, both) == parse_arithmetic(GENOA, {})


@pytest.mark.parametrize(
    ("capability", "precisions", "pays"),
    [
        ((6, 1), ("fp32",), "fp32"),
        ((7, 0), ("fp32", "fp16"), "fp16"),
        ((7, 5), ("fp32", "fp16", "int8"), "fp16"),
        ((8, 0), ("fp32", "tf32", "bf16", "fp16", "int8"), "bf16"),
        ((12, 0), ("fp32", "tf32", "bf16", "fp16", "int8"), "bf16"),
    ],
)
def test_what_a_gpu_multiplies_follows_from_its_capability(
    capability: tuple[int, int], precisions: tuple[str, ...], pays: str
) -> None:
    arithmetic = describe_gpu_arithmetic(capability)
    assert (arithmetic.precisions, arithmetic.pays) == (precisions, pays)


def driver(folder: Path, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a fake nvidia-smi with this script on the path."""
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    machine.gpu.cache_clear()


def test_a_gpu_is_what_its_driver_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(tmp_path, "echo NVIDIA H100 80GB HBM3, 9.0; echo Tesla T4, 7.5", monkeypatch)
    assert machine.gpu() == ("NVIDIA H100 80GB HBM3", describe_gpu_arithmetic((9, 0)))
    assert fast_precision(on_gpu=True) == "bf16"


@pytest.mark.parametrize(
    "says", ["exit 9", "echo", "echo 'Failed to initialize NVML'", "echo Tesla K80, [N/A]"]
)
def test_a_driver_that_tells_nothing_is_no_gpu(
    says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, says, monkeypatch)
    assert machine.gpu() is None
    assert fast_precision(on_gpu=True) == "fp32"


@pytest.fixture(autouse=True)
def forgotten_gpu() -> Iterator[None]:
    """Clear the cached GPU after each test."""
    yield
    machine.gpu.cache_clear()


def slower(precision: str, backend: str, cpuinfo: str) -> bool:
    return (
        find_emulation(
            precision, on_gpu=False, backend=backend, processor=parse_arithmetic(cpuinfo, {})
        )
        is not None
    )


@pytest.mark.parametrize("backend", ["torch", "tensorflow", "paddle"])
def test_bf16_is_emulated_where_no_instruction_multiplies_it(backend: str) -> None:
    assert slower("bf16", backend, MILAN)
    assert not slower("bf16", backend, GENOA)


def test_fp16_is_emulated_by_the_engines_that_have_it_only_in_hardware_or_never() -> None:
    assert slower("fp16", "torch", GENOA)
    assert not slower("fp16", "torch", SAPPHIRE_RAPIDS)
    assert slower("fp16", "paddle", SAPPHIRE_RAPIDS)
    assert not slower("fp16", "tensorflow", MILAN)


def test_single_precision_is_emulated_nowhere_and_the_reference_emulates_nothing() -> None:
    for backend in ("torch", "tensorflow", "paddle", "mxnet", "reference"):
        assert not slower("fp32", backend, HASWELL)
        assert not slower("tf32", backend, HASWELL)
    assert not slower("bf16", "reference", HASWELL)
    assert not slower("fp16", "reference", HASWELL)


def test_a_gpu_leaves_the_processor_out_of_it() -> None:
    assert (
        find_emulation(
            "bf16", on_gpu=True, backend="torch", processor=parse_arithmetic(HASWELL, {})
        )
        is None
    )


def test_an_emulation_says_how_slow_it_is_and_what_to_take() -> None:
    milan = parse_arithmetic(MILAN, {})
    emulated = find_emulation("bf16", on_gpu=False, backend="torch", processor=milan)
    assert emulated is not None
    assert "7 to 16 times slower than fp32" in str(emulated)
    assert emulated.instead == "fp32"
    in_fp16 = find_emulation(
        "fp16", on_gpu=False, backend="torch", processor=parse_arithmetic(GENOA, {})
    )
    assert in_fp16 is not None
    assert in_fp16.instead == "bf16"


def test_this_processor_is_one_of_those_that_are_known() -> None:
    arithmetic = machine.arithmetic()
    assert isinstance(arithmetic, Arithmetic)
    assert arithmetic.extensions
