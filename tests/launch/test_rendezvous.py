"""Launchers that meet over real sockets of this machine, each in a thread; and strangers."""

import pickle
import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from itertools import count, islice
from multiprocessing.connection import wait
from types import SimpleNamespace
from typing import Any

import pytest

from lockstep.launch import nodes, rendezvous
from lockstep.launch.connections import Line, admit, reach, receive, send
from lockstep.launch.nodes import Table
from lockstep.launch.rendezvous import Link, agree, meet
from lockstep.launch.rendezvous_address import Meeting
from lockstep.system.errors import BackendError, LockstepError, UserError
from lockstep.system.ranks import free_ports
from tests.processes import wait_until

SECRET = "a secret of the tests"
SILENCE_SEC = 60.0
SOON_SEC = 30.0


@pytest.fixture
def port() -> int:
    return free_ports(1)[0]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Do not wait for minutes if a test fails."""
    monkeypatch.setattr(rendezvous, "MEET_SEC", SOON_SEC)


def meeting(node: int, nodes: int, port: int, secret: str = SECRET) -> Meeting:
    return Meeting(node, nodes, "127.0.0.1", port, secret)


def together(
    count: int, port: int, work: Callable[[Link, Meeting, str], Any], silence: float = SILENCE_SEC
) -> list[Any]:
    """Return what `work` returns for each of n launchers that have met, or the error that it
    raises."""

    def one(node: int) -> Any:
        place = meeting(node, count, port)
        try:
            with meet(place, silence) as (link, address):
                return work(link, place, address)
        except LockstepError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(one, node) for node in range(count)]
        return [future.result(SOON_SEC) for future in futures]


@contextmanager
def links(count: int, port: int, silence: float = SILENCE_SEC) -> Iterator[list[Link]]:
    """Yield the links of n launchers that have met."""
    with ExitStack() as stack, ThreadPoolExecutor(count) as pool:
        entered: list[Future[tuple[Link, str]]] = [
            pool.submit(stack.enter_context, meet(meeting(node, count, port), silence))
            for node in range(count)
        ]
        yield [future.result(SOON_SEC)[0] for future in entered]


# The table


def test_all_nodes_agree_on_one_table_in_which_each_finds_itself(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = count(20000)  # nodes of one machine, which choose apart, may choose the same port
    monkeypatch.setattr(nodes, "free_ports", lambda number, address: list(islice(free, number)))
    tables: list[Table] = together(
        3, port, lambda link, place, address: agree(link, place, address, 2, ["train"])
    )
    assert [table.here for table in tables] == [0, 1, 2]
    assert [table.first for table in tables] == [0, 2, 4]
    assert len({table.nodes for table in tables}) == 1
    assert {table.ranks for table in tables} == {6}
    assert len(set(tables[0].places)) == 6
    assert not {int(place.rpartition(":")[2]) for place in tables[0].places} & set(
        tables[0].shared_ports
    )


def test_the_ranks_of_each_start_have_another_secret_that_only_members_know(port: int) -> None:
    def twice(link: Link, place: Meeting, address: str) -> list[str]:
        return [agree(link, place, address, 1, []).secret for _ in range(2)]

    first, second = together(2, port, twice)
    assert first == second
    assert first[0] != first[1]
    assert all(SECRET not in secret and len(secret) == 64 for secret in first)


@pytest.mark.parametrize(
    ("processes", "arguments", "reason"),
    [
        (2, ["train", "--out", "here"], "the digest of the command after --"),
        (3, ["train"], "-n is 2 on node 0 and 3 on node 1"),
    ],
    ids=["another command", "other numbers of ranks"],
)
def test_nodes_that_were_not_started_alike_are_all_refused(
    port: int, processes: int, arguments: list[str], reason: str
) -> None:
    def start(link: Link, place: Meeting, address: str) -> Table:
        return agree(
            link, place, address, *((processes, arguments) if place.node == 1 else (2, ["train"]))
        )

    errors = together(2, port, start)
    assert all(isinstance(error, UserError) and reason in str(error) for error in errors), errors


def test_another_version_is_refused(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = iter(["1.0", "1.1"])
    monkeypatch.setattr("lockstep.launch.nodes.version", lambda: next(versions))
    errors = together(2, port, lambda link, place, address: agree(link, place, address, 1, []))
    assert all(
        isinstance(error, UserError) and "Lockstep's version" in str(error) for error in errors
    ), errors


# What they tell each other


def test_every_node_sees_the_latest_state_of_the_others(port: int) -> None:
    with links(3, port) as (first, second, third):
        second.share({"is_busy": True})
        wait_until(lambda: third.states() == {1: {"is_busy": True}} == first.states())
        second.share({"is_busy": False})
        first.share({"is_busy": True})
        wait_until(lambda: third.states() == {0: {"is_busy": True}, 1: {"is_busy": False}})
        wait_until(lambda: second.states() == {0: {"is_busy": True}})


def test_what_a_node_shared_before_the_last_gathering_does_not_count(port: int) -> None:
    """A fault of the ranks that have ended is none of those that are started again."""
    with links(3, port) as all_links, ThreadPoolExecutor(3) as pool:
        second, third = all_links[1:]
        second.share({"fault": "of the first ranks"})
        wait_until(lambda: third.states() == {1: {"fault": "of the first ranks"}})
        for value in [pool.submit(link.gather, link.node, SOON_SEC) for link in all_links]:
            assert value.result() == [0, 1, 2]
        assert [link.states() for link in all_links] == [{}, {}, {}]
        second.share({"is_busy": True})
        wait_until(lambda: third.states() == {1: {"is_busy": True}})


def test_a_silent_node_0_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MEET_SEC", 0.0)
    monkeypatch.setattr(rendezvous, "_BEYOND_SEC", 1)
    with (
        socket.create_server(("127.0.0.1", port)) as server,
        closing(admit(server, SECRET, SOON_SEC)) as arrivals,
        ThreadPoolExecutor(1) as pool,
    ):
        coming = pool.submit(enter, meeting(1, 2, port))
        admitted_line = next(line for line in arrivals if line is not None)
        with (
            admitted_line,
            pytest.raises(BackendError, match="node 0 ended or became unreachable"),
        ):
            coming.result(SOON_SEC)


# Who may come


@pytest.mark.parametrize(
    ("node", "nodes", "reason"),
    [(1, 3, "--nodes is 2 on node 0 and 3 on node 1"), (0, 2, "--node-rank is 0, expected 1 to 1")],
)
def test_a_node_without_a_place_is_refused(port: int, node: int, nodes: int, reason: str) -> None:
    with leading(2, port), meet_after(1, 2, port):
        line = newcomer(port, node, nodes)
        assert reason in receive(line)["refused"]


def enter(place: Meeting) -> Link:
    return meet(place, SILENCE_SEC).__enter__()[0]


@contextmanager
def leading(nodes: int, port: int) -> Iterator[Future[Link]]:
    """Let node 0 wait for the others in the block; after it they have come, and its link closes."""
    with ThreadPoolExecutor(1) as pool:
        link = pool.submit(enter, meeting(0, nodes, port))
        yield link
        link.result(SOON_SEC).close()


@contextmanager
def meet_after(node: int, nodes: int, port: int) -> Iterator[None]:
    """Let a node come after the block."""
    yield
    with meet(meeting(node, nodes, port), SILENCE_SEC):
        pass


def refuse(error: type[Exception], message: str, place: Meeting, check: Any = None) -> str:
    """Check that a node cannot meet the others; return the message."""
    with pytest.raises(error, match=message) as refused, meet(place, SILENCE_SEC, check):
        pass
    return str(refused.value)


def newcomer(port: int, node: int, nodes: int) -> Line:
    """Return a connection that has introduced itself."""
    line = reach("127.0.0.1", port, SECRET, SOON_SEC)
    send(line, {"node": node, "nodes": nodes})
    return line


def test_of_two_nodes_with_one_number_the_second_is_refused(port: int) -> None:
    with leading(3, port), meet_after(2, 3, port):
        both: list[Any] = [newcomer(port, 1, 3) for _ in range(2)]
        (refused,) = wait(both, SOON_SEC)
        assert "already a node 1" in receive(refused)["refused"]


def test_a_node_that_ended_may_come_again_also_after_all_others(port: int) -> None:
    with leading(3, port):
        newcomer(port, 1, 3).close()
        others = [newcomer(port, 2, 3), newcomer(port, 1, 3)]
        assert [receive(line) for line in others] == [{"all": "here"}] * 2


def is_open(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex(("127.0.0.1", port)) == 0


def test_who_does_not_know_the_secret_is_refused_and_keeps_nobody_out(port: int) -> None:
    with leading(2, port), ExitStack() as stack, meet_after(1, 2, port):
        wait_until(lambda: is_open(port))
        for data in (b"", b"", b"", b"GET / HTTP/1.1\r\n\r\n"):
            line = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            line.sendall(data)
        refuse(BackendError, "uses a different secret", meeting(1, 2, port, SECRET[::-1]))


def test_nothing_listens_after_all_have_come(port: int) -> None:
    with links(2, port):
        assert not is_open(port)


def test_a_node_that_does_not_come_is_named(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "MEET_SEC", 0.5)
    refuse(BackendError, "node 1, 2 did not join", meeting(0, 3, port))
    refuse(BackendError, f"nothing answers at 127.0.0.1:{port}", meeting(1, 2, port))


def test_a_port_that_is_taken_is_refused_with_the_address(port: int) -> None:
    with socket.create_server(("127.0.0.1", port)):
        refuse(UserError, f"cannot listen at 127.0.0.1:{port}", meeting(0, 2, port))


def test_waiting_ends_when_the_check_fails(port: int) -> None:
    def check() -> None:
        raise LockstepError("it is gone")

    refuse(LockstepError, "it is gone", meeting(0, 2, port), check)


def test_loopback_as_an_address_for_other_machines_is_refused(port: int) -> None:
    place = Meeting(0, 2, "node0", port, SECRET, bind="127.0.0.1")
    refuse(UserError, "--bind is 127.0.0.1, which other machines cannot reach", place)


# The link


def test_every_node_gathers_the_values_of_all(port: int) -> None:
    values = together(
        3,
        port,
        lambda link, place, _: [link.gather([place.node, round], SOON_SEC) for round in (1, 2)],
    )
    assert values == [[[[0, 1], [1, 1], [2, 1]], [[0, 2], [1, 2], [2, 2]]]] * 3


def test_a_node_that_ends_is_lost_to_all_and_gives_no_value(port: int) -> None:
    with links(3, port) as (zero, one, two):
        two.close()
        wait_until(lambda: zero.lost() == one.lost() == [2])
        with ThreadPoolExecutor(2) as pool:
            values = [pool.submit(link.gather, link.node, SOON_SEC) for link in (zero, one)]
            assert [value.result() for value in values] == [[0, 1, None]] * 2


def test_without_node_0_all_others_are_lost(port: int) -> None:
    with links(3, port) as (zero, one, two):
        zero.close()
        wait_until(lambda: one.lost() == [0, 2] and two.lost() == [0, 1])
        assert one.gather("a value", SOON_SEC) == [None, "a value", None]


def test_a_node_that_is_not_heard_is_lost(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "_BEAT_SEC", 0.05)
    with links(2, port, silence=0.5) as (zero, one):
        monkeypatch.setattr(one, "_send_all", lambda message: None)
        wait_until(lambda: zero.lost() == [1] and one.lost() == [0])


def test_nodes_that_say_nothing_but_live_are_not_lost(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By a clock of the test: if this machine stands still for a moment, nothing is heard by a real
    # one.
    now = [0.0]
    monkeypatch.setattr(rendezvous, "_BEAT_SEC", 0.05)
    monkeypatch.setattr(rendezvous, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with links(2, port) as (zero, one):
        for _ in range(3):
            now[0] += 0.6 * SILENCE_SEC
            wait_until(lambda: zero._heard[1] == one._heard[0] == now[0])
        assert zero.lost() == one.lost() == []


def test_what_is_no_message_loses_the_sender_and_is_not_unpickled(port: int, tmp_path: Any) -> None:
    class Touch:
        def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
            return (tmp_path / "touched").touch, ()

    with leading(2, port) as future, newcomer(port, 1, 2) as stranger:
        stranger.send_bytes(pickle.dumps(Touch()))
        wait_until(lambda: future.result(SOON_SEC).lost() == [1])
    assert not (tmp_path / "touched").exists()


# A relay


def test_a_relay_is_named_on_both_sides(port: int, capsys: pytest.CaptureFixture[str]) -> None:
    with leading(2, port), relay(port) as place, meet_after(1, 2, port):
        wait_until(lambda: is_open(port))
        message = refuse(BackendError, "a relay, a proxy or NAT", meeting(1, 2, place))
        assert re.search(rf" to 127.0.0.1:{place} here, and .* to 127.0.0.1:{port} there", message)
    lines: list[str] = []
    wait_until(lambda: lines.extend(capsys.readouterr().err.splitlines()) or lines)
    assert len(lines) == 1
    assert re.search(rf"refused .*:\d+: .*relay.* to 127.0.0.1:{place} there", lines[0])


@contextmanager
def relay(port: int) -> Iterator[int]:
    """Yield a port of this machine at which everything is passed on to another port and back,
    unchanged."""
    lines: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                near, _ = server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", port))
            lines.extend((near, far))
            for source, target in ((near, far), (far, near)):
                threading.Thread(target=pass_on, args=(source, target), daemon=True).start()

    def pass_on(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    with socket.create_server(("127.0.0.1", 0)) as server:
        serving = threading.Thread(target=serve, daemon=True)
        serving.start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)
        serving.join()
        for line in lines:
            line.close()
