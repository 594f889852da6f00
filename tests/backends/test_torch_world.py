"""The network interface by which PyTorch's ranks on several machines meet."""

import os
from datetime import timedelta
from ipaddress import IPv4Address

import pytest

from lockstep.launch.nodes import list_addresses

dist = pytest.importorskip("torch.distributed")
world = pytest.importorskip("lockstep.backends.torch.world")

OUTSIDE = next(
    (place for place in list_addresses().items() if not place[0].startswith("127.")), None
)
"""An address of this machine that is not loopback, and its interface."""


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(world.IFNAME, "")  # it is restored after the test
    monkeypatch.delenv(world.IFNAME)


def chosen(other: str, leading: str = "localhost") -> str | None:
    """Return the interface that rank 0 of two chooses, the other of which has an address."""
    store = dist.HashStore()
    store.set("lockstep-address-1", other)
    world.choose_interface(store, 0, 2, leading)
    return os.environ.get(world.IFNAME)


@pytest.mark.skipif(OUTSIDE is None, reason="this machine has no address but loopback")
def test_gloo_takes_the_way_to_the_others_also_where_the_leading_host_is_loopback() -> None:
    assert OUTSIDE is not None
    address, interface = OUTSIDE
    assert chosen(_neighbour(address)) == interface
    assert chosen(_neighbour(address), leading=address) == interface


def _neighbour(address: str) -> str:
    """Return an address of the same network."""
    return str(IPv4Address(int(IPv4Address(address)) ^ 1))


@pytest.mark.skipif(OUTSIDE is None, reason="this machine has no address but loopback")
def test_ranks_of_one_machine_stay_on_loopback_also_with_an_address_of_the_network() -> None:
    assert OUTSIDE is not None
    assert chosen(OUTSIDE[0], leading=OUTSIDE[0]) == "lo"


def test_ranks_whose_leading_host_is_loopback_and_a_users_own_choice_stay_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert chosen("127.0.0.1") is None
    monkeypatch.setenv(world.IFNAME, "mine")
    assert chosen("10.77.0.2") == "mine"


def test_ranks_that_do_not_come_are_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(world, "COMING", timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        world.choose_interface(dist.HashStore(), 0, 2, "localhost")
