import json
from collections.abc import Callable
from pathlib import Path

import pytest

Run = Callable[..., tuple[int, str, str]]


def test_weights_are_pruned_and_checked(answer: Run, run_folder: Path, tmp_path: Path) -> None:
    code, output, errors = answer("sparsify", "--check", run_folder)
    *rows, last = output.splitlines()
    assert (code, errors) == (1, "")
    result = [row.split()[0] for row in rows if row.endswith("not pruned")]
    assert result == ["conv1.weight", "fc.weight"]
    assert last.startswith("not 2:4 sparse: ")
    target = tmp_path / "sparse.safetensors"
    code, output, errors = answer("sparsify", run_folder, target)
    assert (code, errors) == (0, "")
    assert output.startswith(f"wrote {target}: mask_1d set ")
    code, output, errors = answer("sparsify", "--check", target)
    header, *rows, last = output.splitlines()
    assert (code, errors, header.split()) == (0, "", ["tensor", "groups", "2", "zeros", "zeros"])
    assert {row.split()[2] for row in rows if not row.endswith("not pruned")} == {"100.00"}
    assert last.startswith("2:4 sparse in all ")
    code, output, _ = answer("sparsify", target, "--check", "--json")
    assert (code, json.loads(output)["is_sparse"]) == (0, True)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ((), "expected a file to write to, or --check"),
        (("a", "--check"), "leave out TARGET"),
        (("a", "--json"), "add --check"),
    ],
)
def test_what_is_to_be_done_must_be_clear(more: tuple[str, ...], message: str, answer: Run) -> None:
    code, _, errors = answer("sparsify", "run", *more)
    assert code == 2
    assert message in " ".join(errors.replace("│", " ").split())
