"""Lack of memory is recognised by the words of the programs that report it."""

import signal

import numpy as np
import pytest

from lockstep.benchmark.failures import FAILED, OUT_OF_MEMORY, explain_failure, is_out_of_memory
from lockstep.system.errors import BackendError
from lockstep.system.workers import Ended


def test_numpys_own_error_is_want_of_memory() -> None:
    with pytest.raises(MemoryError) as raised:
        np.empty(2**60, np.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize(
    "words",
    [
        "CUDA out of memory. Tried to allocate 20.00 GiB.",
        (
            "[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate"
            " memory: you tried to allocate 9"
        ),
        (
            "OOM when allocating tensor with shape[4096,64,112,112] and type float on"
            " /job:localhost/replica:0/device:GPU:0"
        ),
        "cudaMalloc retry failed: out of memory",
        "could not create a memory object",
        "the GPU has too little memory for 512 images in 1 parts: ...",
        "[Errno 12] Cannot allocate memory",
        "CUDA_ERROR_OUT_OF_MEMORY",
        "Out-of-memory while compiling",
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "Fail to alloc memory of 1073741824 size, error code is 2.",
        "Failed to alloc 4294967296 bytes",
        "OpenBLAS error: Memory allocation still failed after 10 retries, giving up.",
        (
            "Operation received an exception:Status: 1, message: could not create a primitive, in"
            " file mkl_conv.cc"
        ),
        "_bounded_integers.so: failed to map segment from shared object",
        "[12:00:00] src/storage/./cpu_device_storage.h: Cannot malloc 9 bytes",
    ],
)
def test_the_frameworks_words_are_known(words: str) -> None:
    assert is_out_of_memory(RuntimeError(words))


def test_what_pytorch_says_on_a_cpu_is_known() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(raised.value)


@pytest.mark.parametrize(
    "words",
    ["shapes (3, 4) and (5, 6) not aligned", "device is cuda, but PyTorch finds no GPU here"],
)
def test_other_failures_are_not_want_of_memory(words: str) -> None:
    assert not is_out_of_memory(BackendError(words))


SILENT = Ended(-signal.SIGKILL, "")


ENDED = {"status": FAILED, "reason": "another rank has ended"}
LITTLE = {"status": OUT_OF_MEMORY, "reason": "too little"}
ABSENT = {"status": FAILED, "reason": "no such file"}


@pytest.mark.parametrize(
    ("ended", "of_ranks", "killed", "ranks", "status", "reason"),
    [
        (SILENT, [], True, 1, OUT_OF_MEMORY, "the system killed"),
        (SILENT, [], False, 1, FAILED, "ended with SIGKILL: it printed nothing"),
        (Ended(1, "KeyError: 'x'"), [], True, 1, FAILED, "exit code 1: KeyError"),
        (Ended(-signal.SIGABRT, "what(): std::bad_alloc"), [], False, 1, OUT_OF_MEMORY, "SIGABRT"),
        (Ended(1, ""), [ENDED], True, 2, OUT_OF_MEMORY, "the system killed"),
        (Ended(1, ""), [ENDED, LITTLE], False, 2, OUT_OF_MEMORY, "too little"),
        (Ended(1, "much"), [ABSENT], False, 1, FAILED, "no such file"),
    ],
)
def test_how_a_cell_failed_is_told(
    ended: Ended, of_ranks: list[dict[str, str]], killed: bool, ranks: int, status: str, reason: str
) -> None:
    result = explain_failure(ended, of_ranks, killed=killed, ranks=ranks)
    assert result[0] == status
    assert reason in result[1]
