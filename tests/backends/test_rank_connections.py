"""The connections by which the hosts of ranks exchange values."""

import multiprocessing
import os
import socket
import threading
from typing import Any

import pytest

from lockstep.backends.shared import rank_connections
from lockstep.backends.shared.rank_connections import RankConnections, meet_ranks
from lockstep.launch.connections import reach
from lockstep.system.errors import BackendError, LockstepError
from lockstep.system.ranks import free_ports


def connect_ranks(count: int) -> list[RankConnections]:
    """Return `count` connected ranks."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    ranks = {}

    def come(rank: int) -> None:
        ranks[rank] = meet_ranks(rank, count, address, "a word")

    threads = [threading.Thread(target=come, args=[rank]) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ranks[rank] for rank in range(count)]


def test_hosts_agree_on_the_largest() -> None:
    connections = connect_ranks(3)
    answers = {}

    def ask(rank: int) -> None:
        answers[rank] = [
            connections[rank].largest([rank, -rank]),
            connections[rank].largest([7 - rank]),
        ]

    threads = [threading.Thread(target=ask, args=[rank]) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {rank: [[2, 0], [7]] for rank in range(3)}


@pytest.mark.parametrize(("gone", "left"), [(0, 1), (1, 0)])
def test_a_host_that_has_gone_is_told(gone: int, left: int) -> None:
    connections = connect_ranks(2)
    connections[gone].close()
    with pytest.raises(LockstepError, match="another rank has ended"):
        connections[left].largest([1])
    assert connections[left].lost


@pytest.mark.parametrize(("gone", "left"), [(0, 1), (1, 0)])
def test_a_host_that_has_gone_is_seen_and_no_other(gone: int, left: int) -> None:
    connections = connect_ranks(2)
    connections[left].refuse_loss()
    if left == 0:
        asking = threading.Thread(target=lambda: connections[1].largest([5]))
        asking.start()
        connections[0].refuse_loss()
        assert connections[0].largest([3]) == [5], "nothing that was said is lost"
        asking.join()
    assert not connections[left].lost
    connections[gone].close()
    with pytest.raises(LockstepError, match="another rank has ended"):
        connections[left].refuse_loss()


def test_an_address_that_others_have_taken_is_named() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        address = f"127.0.0.1:{server.getsockname()[1]}"
        with pytest.raises(BackendError, match=f"cannot find each other at .*{address}"):
            meet_ranks(0, 2, address, "a word")


SOON_SEC = 30.0


def test_strangers_are_turned_away_and_the_ranks_meet() -> None:
    server = rank_connections.open_server("127.0.0.1", 0, 2)
    port = server.getsockname()[1]
    met: list[Any] = []
    waiting = threading.Thread(
        target=lambda: met.extend(rank_connections.accept_ranks(server, 2, "a word"))
    )
    waiting.start()
    with pytest.raises(BackendError, match="uses a different secret"):
        reach("127.0.0.1", port, "another word", SOON_SEC)
    silent = socket.create_connection(("127.0.0.1", port))
    talking = socket.create_connection(("127.0.0.1", port))
    talking.sendall(b"GET / HTTP/1.1\r\n\r\n")
    line = reach("127.0.0.1", port, "a word", SOON_SEC)
    waiting.join()
    with silent, talking, line, met[0] as other:
        other.send_bytes(b"hello")
        assert line.recv_bytes(100) == b"hello"


class _Bomb:
    """An object that runs code when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def test_what_a_rank_sends_is_not_unpickled() -> None:
    here, there = multiprocessing.Pipe()
    with here, there:
        there.send(_Bomb())
        with pytest.raises(LockstepError, match="another rank has ended"):
            RankConnections(0, 2, [here]).largest([1, 2])


def test_missing_ranks_are_not_waited_for_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_connections, "PATIENCE_SEC", 0.05)
    with pytest.raises(
        BackendError, match=r"cannot find each other at .*0 of 1 other ranks joined"
    ):
        meet_ranks(0, 2, f"127.0.0.1:{free_ports(1)[0]}", "a word")
