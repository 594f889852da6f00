"""Find out why a cell has no figures."""

import re
import signal
from pathlib import Path

from lockstep.system.workers import Ended

OK = "ok"
OUT_OF_MEMORY = "out of memory"
FAILED = "failed"
MISSING = "missing"
_WORDS = re.compile(
    r"out.of.memory|too little memory|not enough memory|can't allocate memory|cannot allocate"
    r" memory|unable to allocate"
    r"|could not allocate|fail(ed)? to alloc|alloc_failed|cannot malloc|\boom when"
    r" allocating|bad_alloc"
    r"|could not create a memory|ResourceExhausted|memory allocation (still )?failed|failed to map"
    r" segment"
    r"|Status: 1, message: could not create",
    re.IGNORECASE,
)
"""The words of the frameworks, NumPy, oneDNN (whose status 1 is `dnnl_out_of_memory`), OpenBLAS,
C++ and the system for lack of memory."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error reports a lack of memory."""
    return isinstance(error, MemoryError) or says_out_of_memory(f"{type(error).__name__}: {error}")


def says_out_of_memory(text: str) -> bool:
    """Return whether a text reports a lack of memory.

    >>> says_out_of_memory("terminate called after throwing an instance of 'std::bad_alloc'")
    True
    """
    return _WORDS.search(text) is not None


def describe_error(error: Exception) -> dict[str, str]:
    """Return the status and the reason that a process leaves when it fails."""
    status = OUT_OF_MEMORY if is_out_of_memory(error) else FAILED
    reason = f"{type(error).__name__}: {str(error).strip():.1000}"
    return {"status": status, "reason": reason.removesuffix(": ")}


def explain_failure(
    ended: Ended, failures: list[dict[str, str]], *, killed: bool, ranks: int
) -> tuple[str, str]:
    """Return status and reason of a cell if not all of its processes wrote a result.

    `failures` are the statuses and reasons that ranks wrote. `killed` says whether the system
    killed some process during the measurement because memory ran out: a killed process reports
    nothing, and its launcher reports only that it failed.
    """
    for failure in failures:
        if failure["status"] == OUT_OF_MEMORY:
            return OUT_OF_MEMORY, failure["reason"]
    if killed and (ended.code == -signal.SIGKILL or ranks > 1):
        return OUT_OF_MEMORY, "the system killed a process because memory ran out"
    if failures:
        return FAILED, failures[0]["reason"]
    how = signal.Signals(-ended.code).name if ended.code < 0 else f"exit code {ended.code}"
    status = OUT_OF_MEMORY if says_out_of_memory(ended.errors) else FAILED
    return status, f"the process ended with {how}: {ended.errors or 'it printed nothing'}"


def count_kills() -> int | None:
    """Return how many processes the system has killed for lack of memory since it started; None if
    it does not report it."""
    try:
        lines = Path("/proc/vmstat").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
