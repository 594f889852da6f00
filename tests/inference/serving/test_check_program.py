"""A server as `check.py --url` sees it."""

from pathlib import Path

from lockstep.proof.command import check_server
from lockstep.proof.folder import Subject, write_proof
from lockstep.proof.record import read_proof
from lockstep.weights import open_weights
from tests.inference.cases import CLASSES
from tests.inference.serving.cases import TEMPERATURE, Server


def test_a_server_answers_the_probes_of_a_proof(
    server: Server, weights: Path, tmp_path: Path
) -> None:
    opened = open_weights(weights)
    tensors = dict(opened.tensors)
    for name in ("fc.weight", "fc.bias"):
        tensors[name] = tensors[name] / TEMPERATURE
    subject = Subject(
        target="triton",
        precision="fp32",
        recipe=opened.recipe,
        tensors=tensors,
        classes=CLASSES,
        takes="photos",
        batch=None,
        backend="torch",
        bound=1e-4,
        why="both are in fp32",
    )
    write_proof(tmp_path, subject)
    lines, code = check_server(read_proof(tmp_path / "proof"), f"{server.url}/v2/models/model", [])
    assert code == 0
    assert [line.split(":")[0] for line in lines] == [
        "13 of 13 probes",
        "Files that the server decodes",
        "13 of 13 probes",
    ]
