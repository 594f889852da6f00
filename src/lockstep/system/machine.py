"""The machine this process runs on: cores, memory, processor, and what the processor and GPU
multiply in hardware."""

import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path


def cores() -> int:
    """Return the number of cores this process may use, or of all cores if the system does not
    report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def share_of_cores(processes: int | None = None) -> int:
    """Return the number of cores for each of some processes, by default those that a launcher
    started on this machine together with this one."""
    if processes is None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(cores() // processes, 1)


def memory_bytes() -> int:
    """Return the size of the main memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


_GROUPS = (
    ("", "memory.max", "memory.current"),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
)
"""Of the control groups of Linux, versions 2 and 1: folder below /sys/fs/cgroup, file of the limit
and of what is used."""


def free_memory_bytes(root: Path = Path("/")) -> int | None:
    """Return how much more main memory this process can use, in bytes; None if the system does not
    report it.

    This is the memory that the system has available, within what is left of a container's limit.
    """
    available = _find_number(r"^MemAvailable:\s+(\d+) kB$", root / "proc" / "meminfo")
    if available is None:
        return None
    left = [1024 * available]
    for folder, limit_file, use_file in _GROUPS:
        group = root / "sys" / "fs" / "cgroup" / folder
        limit = _find_number(r"^(\d+)$", group / limit_file)  # "max": there is no limit
        use = _find_number(r"^(\d+)$", group / use_file)
        if limit is not None and use is not None:
            # The system frees cached files when memory is needed.
            copies = _find_number(r"^(?:total_)?inactive_file (\d+)$", group / "memory.stat")
            left.append(limit - use + (copies or 0))
    return max(min(left), 0)


def _find_number(pattern: str, file: Path) -> int | None:
    """Return the number in one of the system's files whose line matches a pattern."""
    match = re.search(pattern, _read(file), re.MULTILINE)
    return int(match[1]) if match else None


def peak_memory_bytes() -> int | None:
    """Return the most main memory that this process has used so far, in bytes; None if the system
    does not report it."""
    kilobytes = _find_number(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status"))
    return None if kilobytes is None else 1024 * kilobytes


def processor() -> str:
    """Return the name of the processor."""
    match = re.search(r"^model name[^:]*: *(.*\S)", _read_cpuinfo(), re.MULTILINE)
    return match[1] if match else platform.processor() or platform.machine()


@dataclass(frozen=True)
class Arithmetic:
    """What a processor or GPU multiplies in hardware."""

    extensions: tuple[str, ...]
    """Instruction sets that libraries may use, such as "AVX2"; for a GPU its compute capability."""
    precisions: tuple[str, ...]
    """The precisions that are multiplied in hardware, out of "fp32", "tf32", "bf16", "fp16" and
    "int8"."""
    pays: str
    """The precision to train in: the fastest that the hardware multiplies. "fp16", on older GPUs,
    needs loss scaling."""
    limit: str | None = None
    """The environment variable and value that restrict libraries to these extensions; None if there
    is no restriction."""

    @property
    def emulated(self) -> tuple[str, ...]:
        """Precisions of recipes that the processor emulates with other precisions."""
        return tuple(name for name in ("bf16", "fp16") if name not in self.precisions)


@dataclass(frozen=True)
class _Extension:
    name: str
    flags: tuple[str, ...]
    """All of these flags must be in /proc/cpuinfo."""
    bit: int
    """The extension's bit in oneDNN's `dnnl_cpu_isa_t`; 0 if oneDNN's limit does not apply to it.
    """
    multiplies: tuple[str, ...] = ()


_X86 = (
    _Extension("AVX2", ("avx2", "fma"), 0x4),
    _Extension("AVX-VNNI", ("avx_vnni",), 0x8, ("int8",)),
    _Extension("AVX-512", ("avx512f", "avx512bw", "avx512dq", "avx512vl"), 0x20),
    _Extension("AVX512-VNNI", ("avx512_vnni",), 0x40, ("int8",)),
    _Extension("AVX512-BF16", ("avx512_bf16",), 0x80, ("bf16",)),
    _Extension("AVX512-FP16", ("avx512_fp16",), 0x100, ("fp16",)),
    _Extension("AMX-INT8", ("amx_tile", "amx_int8"), 0x400, ("int8",)),
    _Extension("AMX-BF16", ("amx_tile", "amx_bf16"), 0x800, ("bf16",)),
    _Extension("AMX-FP16", ("amx_tile", "amx_fp16"), 0x1000, ("fp16",)),
)
"""AVX-NE-CONVERT is not listed: it converts bf16 and fp16, but multiplies in float32."""
_ARM = (
    _Extension("NEON", ("asimd",), 0),
    _Extension("SVE", ("sve",), 0),
    _Extension("FP16", ("asimdhp",), 0, ("fp16",)),
    _Extension("BF16", ("bf16",), 0, ("bf16",)),
    _Extension("I8MM", ("i8mm",), 0, ("int8",)),
)

_LIMITS = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
_MASKS = {
    "SSE41": 0x1,
    "AVX": 0x3,
    "AVX2": 0x7,
    "AVX2_VNNI": 0xF,
    "AVX2_VNNI_2": 0x1F,
    "AVX512_CORE": 0x27,
    "AVX512_CORE_VNNI": 0x67,
    "AVX512_CORE_BF16": 0xE7,
    "AVX512_CORE_FP16": 0x1EF,
    "AVX10_1_512": 0x1EF,
    "AVX512_CORE_AMX": 0xFEF,
    "AVX10_1_512_AMX": 0xFEF,
    "AVX512_CORE_AMX_FP16": 0x1FEF,
    "AVX10_1_512_AMX_FP16": 0x1FEF,
}
"""The extensions that a limit allows, by its value. Source: oneDNN 3, `dnnl_types.h`. oneDNN
ignores other values."""


def parse_arithmetic(cpuinfo: str, environment: Mapping[str, str]) -> Arithmetic:
    """Return what a processor multiplies in hardware, from the text of its /proc/cpuinfo.

    All backends use oneDNN for convolutions on CPUs. oneDNN uses only the instruction sets that
    ONEDNN_MAX_CPU_ISA allows, so that a processor can act as a smaller one. bf16 pays where an x86
    processor multiplies it in hardware. On ARM, fp32 is recommended: no backend's training in bf16
    has been measured there.
    """
    words: dict[str, set[str]] = {}
    for line in cpuinfo.splitlines():
        name, _, values = line.partition(":")
        words[name.strip()] = set(values.split())
    limit = None
    is_arm = "Features" in words
    if is_arm:
        extensions = _select(_ARM, words["Features"])
    else:
        present = _select(_X86, words.get("flags", set()))
        limit, mask = _read_limit(environment)
        extensions = [extension for extension in present if extension.bit & mask]
        if extensions == present:
            limit = None
    multiplied = set[str]().union(*(extension.multiplies for extension in extensions))
    return Arithmetic(
        extensions=tuple(extension.name for extension in extensions),
        precisions=("fp32", *(name for name in ("bf16", "fp16", "int8") if name in multiplied)),
        pays="bf16" if "bf16" in multiplied and not is_arm else "fp32",
        limit=limit,
    )


def _select(extensions: tuple[_Extension, ...], flags: set[str]) -> list[_Extension]:
    return [extension for extension in extensions if flags.issuperset(extension.flags)]


def _read_limit(environment: Mapping[str, str]) -> tuple[str | None, int]:
    for name in _LIMITS:
        value = environment.get(name, "").upper()
        if value:
            return f"{name}={value}", _MASKS.get(value, -1)
    return None, -1


@cache
def arithmetic() -> Arithmetic:
    """Return what this processor multiplies in hardware, as far as libraries may use it."""
    return parse_arithmetic(_read_cpuinfo(), os.environ)


def describe_gpu_arithmetic(capability: tuple[int, int]) -> Arithmetic:
    """Return what an NVIDIA GPU multiplies in its tensor cores (fp32: outside of them), from its
    compute capability.

    Source: the table of tensor core types in the CUDA C++ programming guide: fp16 from 7.0, int8
    from 7.2, bf16 and tf32 from 8.0. bf16 pays from 8.0; fp16, which needs loss scaling, from 7.0.
    """
    since = {"fp32": (0, 0), "tf32": (8, 0), "bf16": (8, 0), "fp16": (7, 0), "int8": (7, 2)}
    precisions = tuple(name for name, first in since.items() if capability >= first)
    pays = next((name for name in ("bf16", "fp16") if name in precisions), "fp32")
    return Arithmetic((f"compute capability {capability[0]}.{capability[1]}",), precisions, pays)


@cache
def gpu() -> tuple[str, Arithmetic] | None:
    """Return the name and arithmetic of the first GPU, from NVIDIA's driver; None without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return _parse_gpu(done.stdout) if done.returncode == 0 else None


def _parse_gpu(answer: str) -> tuple[str, Arithmetic] | None:
    name, _, capability = (answer.splitlines() or [""])[0].rpartition(", ")
    major, dot, minor = capability.strip().partition(".")
    if not dot or not (major + minor).isdigit():
        return None
    return name, describe_gpu_arithmetic((int(major), int(minor)))


def fast_precision(on_gpu: bool) -> str:
    """Return the precision to train in on this machine's GPU or processor: "bf16", "fp16" (older
    GPUs) or "fp32"."""
    if not on_gpu:
        return arithmetic().pays
    device = gpu()
    return "fp32" if device is None else device[1].pays


def process_facts(pid: int) -> tuple[str, float]:
    """Return the state of a process in the letters of /proc, and the processor time in seconds that
    it has used.

    They are "" and 0 if the system does not report them, or if there is no such process.
    """
    words = _read(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()
    try:
        return words[0], (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    except (ValueError, IndexError):
        return "", 0.0


def first_number(text: str) -> int | None:
    """Return the first number of a value such as OMP_NUM_THREADS: "4", or "4,2" for nested
    threads."""
    match = re.match(r"\d+", text)
    return match and int(match[0])


@cache
def _read_cpuinfo() -> str:
    return _read(Path("/proc/cpuinfo"))


def _read(file: Path) -> str:
    """Return the text of one of the system's files; "" if it is missing."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
