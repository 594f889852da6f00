"""The launchers of several machines: how they find each other, and exchange messages until the
launch ends.

Node 0 listens until all nodes have joined. Each node has one connection to node 0, which passes
messages on.
"""

import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from typing import Any

from lockstep.launch import connections
from lockstep.launch.connections import Line, receive, send
from lockstep.launch.nodes import (
    Offer,
    Table,
    build_table,
    find_reachable_address,
    is_misleading,
    make_node,
)
from lockstep.launch.rendezvous_address import Meeting
from lockstep.system.errors import BackendError, LockstepError, UserError

MEET_SEC = 600.0
"""Seconds to wait until all nodes have joined."""
_BEYOND_SEC = 30
"""Seconds that other nodes wait longer for node 0 than it waits for them, so that it can tell them
which node is missing."""
_BEAT_SEC = 1.0
"""Seconds between two signs of life of a launcher."""
_LOOK_SEC = 0.1


class Link:
    """This launcher's connections to the launchers of the other nodes. Safe to use from several
    threads.

    Every launcher sends a sign of life each second. A launcher from which nothing has come for
    `silence_sec` is lost, as is one whose connection has closed.
    """

    def __init__(
        self, node: int, nodes: int, peers: Mapping[int, Line], silence_sec: float
    ) -> None:
        self.node = node
        self.nodes = nodes
        self.silence_sec = silence_sec
        self._peers = dict(peers)
        """All other nodes on node 0; only node 0 on the others."""
        self._sending = {peer: threading.Lock() for peer in peers}
        self._heard = dict.fromkeys(peers, time.monotonic())
        self._changed = threading.Condition(threading.RLock())
        self._states: dict[int, tuple[int, dict[str, Any]]] = {}
        """The latest state of each other node, and the round in which that node shared it."""
        self._lost: set[int] = set()
        self._round = 0
        """How many values this node has gathered."""
        self._given: dict[tuple[int, int], Any] = {}
        self._gathered: dict[int, list[Any]] = {}
        self._closed = threading.Event()
        loops = [(self._listen, (peer,)) for peer in peers] + [(self._beat, ())]
        for loop, arguments in loops:
            threading.Thread(target=loop, args=arguments, name="lockstep-link", daemon=True).start()

    def share(self, state: dict[str, Any]) -> None:
        """Send all other nodes this node's state, a small JSON object, which replaces the one it
        shared before. Lost nodes get none."""
        message = {"kind": "state", "state": state, "node": self.node, "round": self._round}
        self._send_all(message)

    def states(self) -> dict[int, dict[str, Any]]:
        """Return the latest states of other nodes by their numbers, without those shared before the
        last `gather`."""
        with self._changed:
            states = self._states.items()
            return {node: state for node, (number, state) in states if number == self._round}

    def lost(self) -> list[int]:
        """Return the nodes that are lost: their launcher has ended or is silent. Without node 0 all
        others are lost."""
        with self._changed:
            return sorted(self._lost)

    def gather(self, value: Any, patience_sec: float) -> list[Any]:
        """Return the values of all nodes, in their order. Every node must call it as often as the
        others.

        The value of a lost node, or of one that gives none within `patience_sec`, is None.
        """
        with self._changed:
            self._round += 1
            number = self._round
            if self.node > 0:
                self._send(0, {"kind": "one", "round": number, "value": value})
                self._changed.wait_for(
                    lambda: number in self._gathered or 0 in self._lost, patience_sec
                )
                alone = [value if node == self.node else None for node in range(self.nodes)]
                return self._gathered.pop(number, alone)
            others = range(1, self.nodes)
            self._changed.wait_for(
                lambda: all((number, node) in self._given or node in self._lost for node in others),
                patience_sec,
            )
            values = [value, *(self._given.pop((number, node), None) for node in others)]
        self._send_all({"kind": "all", "round": number, "values": values})
        return values

    def close(self) -> None:
        """Close the connections."""
        self._closed.set()
        for peer in self._peers.values():
            _shut(peer)  # the thread that reads it closes it

    def _send_all(self, message: dict[str, Any], but: int | None = None) -> None:
        for peer in self._peers:
            if peer != but and peer not in self._lost:
                self._send(peer, message)

    def _send(self, peer: int, message: dict[str, Any]) -> None:
        try:
            with self._sending[peer]:
                send(self._peers[peer], message)
        except (OSError, ValueError):  # closed, or its buffer is full
            self._lose([peer])

    def _lose(self, nodes: Sequence[int]) -> None:
        """Note that nodes are lost, and tell the others."""
        with self._changed:
            lost = [node for node in nodes if node not in self._lost]
            self._lost.update(range(self.nodes) if 0 in lost else lost)
            self._lost.discard(self.node)
            self._changed.notify_all()
        if lost and self.node == 0 and not self._closed.is_set():
            self._send_all({"kind": "lost", "nodes": lost})

    def _beat(self) -> None:
        while not self._closed.wait(_BEAT_SEC):
            self._send_all({"kind": "beat"})
            now = time.monotonic()
            for peer, heard in list(self._heard.items()):
                if now - heard > self.silence_sec:
                    self._lose([peer])
                    _shut(self._peers[peer])  # tells a suspended launcher that it was given up

    def _listen(self, peer: int) -> None:
        try:
            while True:
                message = receive(self._peers[peer])
                self._heard[peer] = time.monotonic()
                self._take(peer, message)
        # It has ended, or sends nonsense.
        except (EOFError, OSError, ValueError, KeyError, TypeError):
            self._lose([peer])
        finally:
            self._peers[peer].close()

    def _take(self, peer: int, message: dict[str, Any]) -> None:
        kind = message["kind"]
        with self._changed:
            if kind == "state":
                state = int(message["round"]), dict(message["state"])
                self._states[int(message["node"])] = state
            elif kind == "one":
                self._given[int(message["round"]), peer] = message["value"]
            elif kind == "all":
                self._gathered[int(message["round"])] = list(message["values"])
            elif kind == "lost":
                self._lose([int(node) for node in message["nodes"]])
            self._changed.notify_all()
        if kind == "state" and self.node == 0:
            self._send_all(message, but=peer)


def _shut(connection: Line) -> None:
    """Make all reads of a connection return, on both sides."""
    with suppress(OSError), socket.socket(fileno=socket.dup(connection.fileno())) as line:
        line.shutdown(socket.SHUT_RDWR)


# Coming together


@contextmanager
def meet(
    meeting: Meeting, silence_sec: float, check: Callable[[], None] | None = None
) -> Iterator[tuple[Link, str]]:
    """Yield the link to all other launchers once they have joined, and this machine's address for
    its ranks.

    While node 0 waits for them, it calls `check`, which may raise an error to end the waiting.
    Raises `BackendError` if they do not join, `UserError` if they cannot.
    """
    if meeting.node == 0:
        address = _choose_address(meeting)
        peers = _receive_all(meeting, address, check)
    else:
        host = meeting.host
        with suppress(UserError):  # the name may resolve while this node waits
            host = find_reachable_address(meeting.host)[0]  # node 0 may be on this machine, too
        line = connections.reach(host, meeting.port, meeting.secret, MEET_SEC, meeting.bind)
        address = connections.own_address(line)
        peers = {0: _introduce(line, meeting)}
    for peer in peers.values():
        connections.limit_waiting(peer, 0)
    link = Link(meeting.node, meeting.nodes, peers, silence_sec)
    try:
        yield link, address
    finally:
        link.close()


def agree(
    link: Link, meeting: Meeting, address: str, processes: int, arguments: Sequence[str]
) -> Table:
    """Return the table of a start of the ranks, with ports that are free at this moment. All nodes
    call it together.

    Raises `UserError` if the nodes were started differently, `LockstepError` if one is lost.
    """
    own = Offer.of(make_node(address, processes), arguments)
    offers = link.gather(own.fields(), MEET_SEC)
    missing = [node for node, offer in enumerate(offers) if offer is None]
    if missing:
        raise LockstepError(
            f"node {', '.join(map(str, missing))} was lost before the ranks started; see its output"
        )
    try:
        return build_table(list(map(Offer.parse, offers)), meeting.node, meeting.secret)
    except ValueError as error:
        raise LockstepError(
            f"a node sent a message that this version does not understand: {error}"
        ) from error


def _introduce(line: Line, meeting: Meeting) -> Line:
    """Tell node 0 which node this is; return the connection once all nodes have joined."""
    send(line, {"node": meeting.node, "nodes": meeting.nodes})
    # Node 0 may lose its power or its link.
    connections.limit_waiting(line, int(MEET_SEC) + _BEYOND_SEC)
    try:
        answer = receive(line)
    except (EOFError, OSError, ValueError):
        raise BackendError(
            "node 0 ended or became unreachable before all nodes joined; see its output"
        ) from None
    if "refused" in answer:
        raise UserError(f"node 0 refused this node: {answer['refused']}")
    return line


def _choose_address(meeting: Meeting) -> str:
    """Return the address at which node 0 listens. Raises `UserError`."""
    if meeting.bind is None:
        address, note = find_reachable_address(meeting.host, meeting.other)
        if note:
            sys.stderr.write(f"lockstep: {note}\n")
        return address
    if is_misleading(meeting.host, meeting.bind):
        raise UserError(
            f"--bind is {meeting.bind}, which other machines cannot reach; leave it out, or give an"
            " address that they can reach"
        )
    return meeting.bind


def _receive_all(
    meeting: Meeting, address: str, check: Callable[[], None] | None
) -> dict[int, Line]:
    """Return the connections of all other nodes."""
    try:
        server = socket.create_server((address, meeting.port), backlog=meeting.nodes)
    except OSError as error:
        raise UserError(
            f"node 0 cannot listen at {address}:{meeting.port}: {error}. Expected an address of"
            " this machine and a free port"
        ) from None
    peers: dict[int, Line] = {}
    with server, closing(connections.admit(server, meeting.secret, MEET_SEC)) as arrivals:
        while not _all_are_here(peers, meeting.nodes):
            try:
                line = next(arrivals)
            except TimeoutError:
                missing = sorted(set(range(1, meeting.nodes)) - set(peers))
                raise BackendError(
                    f"node {', '.join(map(str, missing))} did not join within {MEET_SEC:.0f} s"
                ) from None
            if check is not None:
                check()
            if line is not None:
                _take_place(line, peers, meeting)
    for peer in peers.values():
        send(peer, {"all": "here"})
    return peers


def _all_are_here(peers: dict[int, Line], nodes: int) -> bool:
    """Return whether all other nodes have joined. One that has ended since must join again."""
    if len(peers) < nodes - 1:
        return False
    for node in [node for node, line in peers.items() if connections.has_ended(line)]:
        peers.pop(node).close()
    return len(peers) == nodes - 1


def _take_place(line: Line, peers: dict[int, Line], meeting: Meeting) -> None:
    """Give a newcomer its place, or refuse it. A node that ended may join again."""
    try:
        message = receive(line)
        node = int(message["node"])
        nodes = int(message["nodes"])
        if nodes != meeting.nodes:
            refused = f"--nodes is {meeting.nodes} on node 0 and {nodes} on node {node}"
        elif not 0 < node < nodes:
            refused = f"--node-rank is {node}, expected 1 to {nodes - 1} (node 0 is here)"
        elif node in peers and not connections.has_ended(peers[node]):
            refused = f"there is already a node {node}; give each node a different --node-rank"
        else:
            peers[node] = line
            return
        send(line, {"refused": refused})
    except (EOFError, OSError, ValueError, KeyError, TypeError):  # it has ended, or sends nonsense
        pass
    line.close()
