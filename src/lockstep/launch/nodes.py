"""Nodes: the machines of a launch, the addresses where their ranks listen, and the table by which
ranks find each other."""

import hashlib
import hmac
import ipaddress
import json
import os
import secrets
import socket
import struct
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from lockstep.system.errors import UserError
from lockstep.system.machine import share_of_cores
from lockstep.system.ranks import LISTEN_ADDRESS, LOOPBACK, free_ports
from lockstep.system.version import version


@dataclass(frozen=True)
class Node:
    """One machine of a launch, and the ranks on it."""

    address: str
    """The IPv4 address at which its ranks listen."""
    interface: str
    """The network interface that has the address."""
    processes: int
    """Number of ranks on it."""
    ports: tuple[int, ...]
    """Free TCP ports at the address: one for each rank, and `SHARED_PORTS` more."""


SHARED_PORTS = 2
"""Ports of a node besides those of its ranks: for a store or a scheduler, and for exchanges between
hosts."""


@dataclass(frozen=True)
class Table:
    """All nodes of one start of the ranks. Every node has the same table, apart from `here`."""

    nodes: tuple[Node, ...]
    here: int
    """Which of the nodes this machine is."""
    secret: str = field(repr=False)
    """A secret that the ranks of this start share. It is never sent."""

    @property
    def ranks(self) -> int:
        """The number of ranks on all nodes."""
        return sum(node.processes for node in self.nodes)

    @property
    def own(self) -> Node:
        """This machine's row."""
        return self.nodes[self.here]

    @property
    def first(self) -> int:
        """The number of this node's first rank."""
        return sum(node.processes for node in self.nodes[: self.here])

    @property
    def places(self) -> list[str]:
        """An address of each rank, as host:port."""
        return [
            f"{node.address}:{port}" for node in self.nodes for port in node.ports[: node.processes]
        ]

    @property
    def shared_ports(self) -> tuple[int, ...]:
        """Ports of node 0 that belong to no rank."""
        return self.nodes[0].ports[self.nodes[0].processes :]

    def variables(self, local_rank: int) -> dict[str, str]:
        """Return the environment variables that identify a rank of this node, and confine it to the
        node's address."""
        own = {
            "RANK": self.first + local_rank,
            "LOCAL_RANK": local_rank,
            "WORLD_SIZE": self.ranks,
            "LOCAL_WORLD_SIZE": self.own.processes,
            "GROUP_RANK": self.here,
        }
        interface = self.own.interface
        network = {
            LISTEN_ADDRESS: self.own.address,
            "GLOO_SOCKET_IFNAME": interface,
            "NCCL_SOCKET_IFNAME": f"={interface}",  # = means an exact match
        }
        return {name: str(value) for name, value in own.items()} | network


def one_machine(processes: int) -> Table:
    """Return the table of a launch on this machine alone, on loopback."""
    return Table((make_node(LOOPBACK, processes),), 0, secrets.token_hex())


def make_node(address: str, processes: int) -> Node:
    """Return this machine's row of a table. Raises `UserError` if it does not have the address."""
    interface = _find_interface(address)
    return Node(address, interface, processes, tuple(free_ports(processes + SHARED_PORTS, address)))


@dataclass(frozen=True)
class Start:
    """How a backend's ranks are started on this machine."""

    table: Table
    environment: Callable[[int], dict[str, str]]
    """Maps the number of a rank on this machine to its environment variables, in addition to
    `Table.variables`."""
    inherited: tuple[int, ...] = ()
    """File descriptors that every rank gets."""


# Agreeing on a table


@dataclass(frozen=True)
class Offer:
    """What each launcher tells the others before ranks start."""

    node: Node
    run: str
    """Chosen at random. That of node 0 counts."""
    command: str
    """A digest of the command that the ranks run."""
    version: str
    """The version of Lockstep."""

    @classmethod
    def of(cls, node: Node, arguments: Sequence[str]) -> "Offer":
        """Return this launcher's offer. `arguments` is the launched command."""
        command = hashlib.sha256(json.dumps(list(arguments), allow_nan=False).encode()).hexdigest()
        return cls(node, secrets.token_hex(8), command, version())

    def fields(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return asdict(self)

    @classmethod
    def parse(cls, fields: Mapping[str, Any]) -> "Offer":
        """Return the offer in an object of JSON. Raises `ValueError` if it is not one."""
        try:
            node = fields["node"]
            row = Node(
                str(ipaddress.IPv4Address(node["address"])),
                str(node["interface"]),
                int(node["processes"]),
                tuple(map(int, node["ports"])),
            )
            return cls(row, str(fields["run"]), str(fields["command"]), str(fields["version"]))
        except (KeyError, TypeError) as error:
            raise ValueError(f"not an offer: {error}") from error


def build_table(offers: Sequence[Offer], here: int, secret: str) -> Table:
    """Return the table that follows from the offers of all nodes, in their order. `secret` is the
    one that launchers share.

    Raises `UserError`, the same on every node, if two nodes were started differently.
    """
    first = offers[0]
    for number, offer in enumerate(offers):
        differences = {
            "Lockstep's version": (first.version, offer.version),
            "-n": (first.node.processes, offer.node.processes),
            "the digest of the command after --": (first.command[:12], offer.command[:12]),
        }
        for name, (expected, value) in differences.items():
            if value != expected:
                raise UserError(
                    f"the nodes were started differently: {name} is {expected} on node 0 and"
                    f" {value} on node {number}; give every node the same command"
                )
    run = hmac.new(secret.encode(), first.run.encode(), "sha256").hexdigest()
    return Table(tuple(offer.node for offer in offers), here, run)


# Addresses of this machine

_SIOCGIFCONF = 0x8912
_ROW_BYTES = 40
"""Bytes of `struct ifreq` on 64-bit Linux: 16 of a name, then a socket address."""


def list_addresses() -> dict[str, str]:
    """Return the IPv4 addresses of this machine, each with the interface that has it. Only on
    Linux; elsewhere loopback."""
    if not sys.platform.startswith("linux"):
        return {LOOPBACK: "lo0"}
    import fcntl  # not on every system

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        room = array("B", bytes(_ROW_BYTES * 1024))
        request = struct.pack("iL", len(room), room.buffer_info()[0])
        length = struct.unpack("iL", fcntl.ioctl(line.fileno(), _SIOCGIFCONF, request))[0]
    interfaces = {}
    for start in range(0, length, _ROW_BYTES):
        row = room[start : start + _ROW_BYTES].tobytes()
        interfaces[socket.inet_ntoa(row[20:24])] = row[:16].split(b"\0")[0].decode()
    return interfaces


def _find_interface(address: str) -> str:
    own = list_addresses()
    if address not in own:
        raise UserError(f"this machine does not have the address {address}; it has {_format(own)}")
    return own[address].partition(":")[0]  # of an alias such as eth0:1


def find_interface(hosts: Iterable[str]) -> str | None:
    """Return the network interface by which this machine's ranks reach those on the hosts: loopback
    if all hosts are this machine.

    None if it is unknown, as with names that stand for loopback: other machines may resolve them to
    another address.
    """
    own = list_addresses()
    is_here = False
    for host in hosts:
        with suppress(UserError):  # it has no IPv4 address, or cannot be reached
            source = find_address(host)
            if source.startswith("127.") or source not in own:
                continue
            if resolve(host) not in own:
                return own[source].partition(":")[0]  # of an alias such as eth0:1
            is_here = True
    return own[LOOPBACK] if is_here else None


def resolve_bind(text: str) -> str:
    """Return the address of this machine that `--bind` names: an address or an interface. Raises
    `UserError`."""
    own = list_addresses()
    if text in own:
        return text
    addresses = [address for address, interface in own.items() if interface == text]
    if len(addresses) == 1:
        return addresses[0]
    if addresses:
        raise UserError(
            f"--bind {text}: the interface has several addresses; give one of"
            f" {', '.join(addresses)}"
        )
    raise UserError(
        f"--bind {text}: expected an IPv4 address or an interface of this machine; it has"
        f" {_format(own)}"
    )


def _format(interfaces: Mapping[str, str]) -> str:
    return ", ".join(f"{address} ({interface})" for address, interface in interfaces.items())


def resolve(host: str) -> str:
    """Return the IPv4 address of a host's name. Raises `UserError`."""
    try:
        return str(socket.getaddrinfo(host, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise UserError(f"{host} is not the name or IPv4 address of a machine: {error}") from None


def find_address(host: str) -> str:
    """Return this machine's IPv4 address on the way to a host. Nothing is sent.

    Raises `UserError`.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as line:
        try:
            line.connect((resolve(host), 9))  # any port
        except OSError as error:
            raise UserError(f"this machine cannot reach {host}: {error.strerror}") from None
        return str(line.getsockname()[0])


# Names of this machine that stand for loopback

_ANYWHERE = "192.0.2.1"
"""An address that no machine has (RFC 5737). It is reached by the default route."""


def is_misleading(host: str, address: str) -> bool:
    """Return whether a name that other machines know stands for loopback here, as in /etc/hosts of
    Debian."""
    return address.startswith("127.") and host not in ("localhost", address)


def find_reachable_address(host: str, other: str | None = None) -> tuple[str, str]:
    """Return the IPv4 address by which other machines reach a host, and a note to print, or "".

    It differs from that of `resolve` if the name stands for loopback here. The host is then this
    machine, and its address is the one from which it reaches `other`, the name of another node, or
    that of the default route, or the only one it has. Raises `UserError` if none is known.
    """
    address = resolve(host)
    if not is_misleading(host, address):
        return address, ""
    reason = f"{host} is {address} on this machine (see /etc/hosts)"
    own = {place: name for place, name in list_addresses().items() if not place.startswith("127.")}
    candidates = []
    for target in filter(None, (other, _ANYWHERE)):
        with suppress(UserError):
            candidates.append(find_address(target))
    if len(own) == 1:
        candidates += own
    for candidate in candidates:
        if candidate in own:
            note = f"{reason}; using {candidate} instead, which other machines can reach"
            return candidate, note
    advice = ", and this machine has only loopback addresses; connect it to their network"
    if own:
        advice = f"; give --bind one of {_format(own)} that they can reach"
    raise UserError(f"{reason}, which other machines cannot reach{advice}")


def share_cores(variable: str, table: Table) -> dict[str, str]:
    """Return the environment variable that gives each rank of this machine an equal share of its
    cores, unless the user has set it."""
    return {variable: os.environ.get(variable) or str(share_of_cores(table.own.processes))}
