"""How PyTorch's ranks on several machines meet: by which interface, and within which time."""

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from ipaddress import IPv4Address

import pytest

from lockstep.launch.nodes import list_addresses
from lockstep.recipes import Execution
from lockstep.system.errors import BackendError
from lockstep.system.ranks import LOOPBACK, free_ports

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


def test_loopback_leaders_and_users_choices_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen("127.0.0.1") is None
    monkeypatch.setenv(world.IFNAME, "mine")
    assert chosen("10.77.0.2") == "mine"


def test_missing_ranks_are_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "COMING", timedelta(milliseconds=20))
    with pytest.raises(RuntimeError, match=r"(?i)time"):
        world.choose_interface(dist.HashStore(), 0, 2, "localhost")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_no_other_connects_to_ends(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has come, but the addresses of gloo lead nowhere."""
    [port] = free_ports(1)
    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": LOOPBACK, "MASTER_PORT": port}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(world, "CONNECTING", timedelta(milliseconds=100))
    with ThreadPoolExecutor() as pool:
        other = pool.submit(come, 1 - rank)
        with pytest.raises(BackendError, match=rf"cannot meet at {LOOPBACK}:{port}"):
            world.TorchWorld(Execution())
        other.result()
    assert not dist.is_initialized()


def come(rank: int) -> object:
    """Come to the store that the ranks meet at, as one of two ranks; return the store."""
    store, _, _ = next(dist.rendezvous("env://", rank, 2))
    store.set(f"lockstep-address-{rank}", LOOPBACK)
    return store
