"""What ranks send: gradients once a step, however many parts a step has."""

import math
from pathlib import Path

import pytest

from tests.backends.launchers import LAUNCHED
from tests.conftest import TINY, TINY_MODEL
from tests.hosts import Host, two_hosts, with_hosts
from tests.processes import finish
from tests.soak import in_a_soak

pytestmark = [pytest.mark.slow, with_hosts]
STEPS = 12
NATIVE = tuple(name for name in LAUNCHED if " " not in name)
"""Without Horovod, whose ranks also send while they wait."""
GRADIENT_BYTES = 4 * sum(
    math.prod(tensor.shape) for tensor in TINY_MODEL.list_tensors(TINY.logits) if tensor.is_trained
)


def sent_on_loopback(host: Host) -> int:
    """Return the bytes that programs of a host have sent to each other."""
    line = next(
        line
        for line in host.run("cat", "/proc/net/dev").splitlines()
        if line.strip().startswith("lo:")
    )
    return int(line.split()[9])  # the first column of what was transmitted


@in_a_soak
@pytest.mark.parametrize("backend", NATIVE)
def test_gradients_are_exchanged_once_a_step_although_it_has_two_parts(
    backend: str, recipe_file: Path, textures: Path, tmp_path: Path
) -> None:
    changes = (f"backend={backend}", "epochs=2", "accumulation_steps=2")
    options = [word for change in changes for word in ("--set", change)]
    places = ["--recipe", recipe_file, "--data", textures, "--out", tmp_path / "run"]
    trains = ["train", *places, *options]
    with two_hosts() as (host, _):
        code, _, errors = finish(
            host.start("launch", "-n", 2, "--", *trains, "--stop-after-steps", STEPS)
        )
        assert code == 0, errors
        sent = sent_on_loopback(host)
    # In a ring of two ranks, each sends all gradients. With a server, it also sends all sums to
    # each rank.
    times = 4 if backend == "mxnet" else 2
    assert 1.0 < sent / (times * STEPS * GRADIENT_BYTES) < 1.6
