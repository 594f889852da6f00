"""Files that users and other files name are opened in one place: every other call that opens a file
is listed here.

A new reader calls `lockstep.system.regular_files`, or gets a line below with a reason.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import lockstep

SOURCE = Path(lockstep.__file__).parent
OPENING = re.compile(
    r"(.*\.)?(open|read_bytes|read_text|safe_open|load_file|fromfile|memmap|loadtxt|genfromtxt|ZipFile|is_zipfile|imread)"
    r"|(np|numpy|torch|onnx|pickle|saved_model|jit|export|nd|.*\.(saved_model|jit|export|nd))\.load"
    r"|.*\b(h5py\.File|mmap\.mmap|shutil\.(copy\w*)|io\.read_file|train\.load_checkpoint|inference\.Config|readers\.file)"
)
"""Calls that can open a file to read it."""
WRITING = re.compile(r"[wax]b?\+?|r\+b")
"""Modes of files that are written. A path to write to is another question."""
OWN = "Lockstep, or a process that it started, wrote this file a moment before"
PACKAGE = "a file of the package"
KERNEL = "a file of /proc or /sys that the code names"
OPENED = "gets an open file, or bytes"
CHECKED = "the path was checked by check_regular; the library takes only paths"
PROGRAM = "inference/programs.py checks the files of a program; the runtime takes only paths"
REMOTE = "opens an address, not a file"
CHECKER = "a part of check.py, which has nothing of Lockstep; read_file compares what it opens"
WRITTEN = "opens to write, to hold a lock or to flush"
ALLOWED = {
    "backends/jax/certificate.py": OWN,
    "backends/mxnet/certificate.py": OWN,
    "backends/mxnet/instruments.py": OWN,
    "backends/paddle/certificate.py": OWN,
    "backends/paddle/predictor.py": PROGRAM,
    "backends/shared/bound_sockets.py": KERNEL,
    "backends/tensorflow/export.py": PROGRAM,
    "backends/tensorflow/certificate.py": OWN,
    "backends/torch/export.py": PROGRAM,
    "backends/torch/certificate.py": OWN,
    "benchmark/cell_process.py": OWN,
    "benchmark/contention.py": KERNEL,
    "benchmark/failures.py": KERNEL,
    "benchmark/page.py render": PACKAGE,
    "benchmark/fingerprint.py": KERNEL,
    "benchmark/grid.py": OWN,
    "benchmark/largest_batch.py": OWN,
    "benchmark/loader.py _list_children": KERNEL,
    "benchmark/loader.py _cpu_sec": KERNEL,
    "benchmark/loader.py _peak_mb": KERNEL,
    "benchmark/step_process.py": OWN,
    "data/checking/images.py _read_header": OPENED,
    "data/packing/compressed.py _unpack_file": OPENED,
    "data/stores/cached_object.py": OWN,
    "data/stores/mirror.py _claim_folder": OWN,
    "data/containers/__init__.py __init__": WRITTEN,
    "data/containers/webdataset.py _follow": OPENED,
    "data/decoding/decode.py": OPENED,
    "data/index_files.py _map": OPENED,
    "data/staged_copy.py _copy": OPENED,
    "inference/decoding/pool.py _fork": "starts a process",
    "inference/decoding/process.py _decode_on": "opens /dev/null",
    "inference/int8.py _quantise_static": OWN,
    "inference/serving/app.py _read_template": PACKAGE,
    "proof/command.py": CHECKER,
    "proof/record.py": CHECKER,
    "proof/runtimes.py": CHECKER,
    "recipes/nvidia/table.py systems": PACKAGE,
    "recipes/published_accuracies.py": PACKAGE,
    "recipes/published_speeds.py": PACKAGE,
    "reporting/page.py _read_template": PACKAGE,
    "runs/folder.py hold_run": WRITTEN,
    "runs/begin.py _open_log": "the recorder's method of this name",
    "system/files.py": WRITTEN,
    "system/heartbeat.py": OWN,
    "system/html.py": PACKAGE,
    "launch/launcher.py": OWN,
    "system/locks.py _acquire": WRITTEN,
    "system/locks.py _machine": KERNEL,
    "system/machine.py": KERNEL,
    "system/npz.py read_npz": OPENED,
    "system/regular_files.py open_descriptor": "the one place",
    "verification/__init__.py": OWN,
    "verification/workload.py": OWN,
    "weights/certificate.py": OWN,
    "weights/checkpoint.py read_metadata": CHECKED,
    "weights/class_names.py _words": PACKAGE,
    "weights/downloads.py _receive": REMOTE,
    "weights/formats/foreign_safetensors.py add_metadata": CHECKED,
    "weights/formats/keras_variables.py _read_member": OPENED,
    "weights/formats/keras_variables.py _unpack": OPENED,
    "weights/formats/keras_variables.py is_keras": OPENED,
    "weights/formats/keras_variables.py open_variables": CHECKED,
    "weights/formats/onnx_graph.py _read_external": OPENED,
    "weights/formats/onnx_original.py compute": OWN,
    "weights/formats/torch_file.py": OPENED,
    "weights/known_weights.py read_known_weights": PACKAGE,
    "weights/logits_process.py": OWN,
    "weights/original.py": OWN,
}
"""By file, or by file and function."""


def dotted(node: ast.expr) -> str:
    """Return a function as it is written, such as `np.load`; the part before a call or an index is
    left out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def is_opening(call: ast.Call) -> bool:
    modes = [
        constant.value
        for constant in (*call.args, *(word.value for word in call.keywords))
        if isinstance(constant, ast.Constant)
    ]
    is_writing = any(isinstance(mode, str) and WRITING.fullmatch(mode) for mode in modes)
    return OPENING.fullmatch(dotted(call.func)) is not None and not is_writing


def opening_functions(path: Path) -> Iterator[str]:
    """Yield `file function` of every call that opens a file; the function is the outermost one."""
    nodes: list[tuple[ast.AST, str]] = [(ast.parse(path.read_text(encoding="utf-8")), "")]
    while nodes:
        node, function = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = function or node.name
        elif isinstance(node, ast.Call) and is_opening(node):
            yield f"{path.relative_to(SOURCE)} {function}"
        nodes += [(child, function) for child in ast.iter_child_nodes(node)]


def test_files_are_opened_in_one_place() -> None:
    opening = {place for path in SOURCE.rglob("*.py") for place in opening_functions(path)}
    others = {
        place for place in opening if ALLOWED.keys().isdisjoint({place, place.partition(" ")[0]})
    }
    assert others == set(), "call lockstep.system.regular_files, or give the reason in ALLOWED"
    unused = ALLOWED.keys() - opening - {place.partition(" ")[0] for place in opening}
    assert unused == set(), "these open nothing; remove them from ALLOWED"
