"""A proxy that delays and limits connections to a server on this machine, as a network would.

    python benchmarks/slow_link.py PORT_OF_THE_SERVER --ms 20 --gbit 1 --count FILE

It prints its own port, and counts the server's bytes in the file `--count`, an int64. `--ms` is the
time from a request to the first byte of its answer beyond the server's own, and the time that a
connection takes to open. All connections together get `--gbit` from the server. It runs as a
process of its own.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np

CHUNK_BYTES = 2**16


class Link:
    """What all connections share: how long bytes travel, and when the line is free again."""

    def __init__(
        self, server_port: int, delay_sec: float, bytes_per_sec: float, count: Path
    ) -> None:
        self.server_port = server_port
        self.delay_sec = delay_sec
        self.bytes_per_sec = bytes_per_sec
        self.free_at = 0.0
        self.count = np.memmap(count, np.int64, "w+", shape=1)

    async def connect(self, client: asyncio.StreamReader, back: asyncio.StreamWriter) -> None:
        """Pass bytes in both directions until one side ends."""
        await asyncio.sleep(self.delay_sec)
        server, forth = await asyncio.open_connection("127.0.0.1", self.server_port)
        await asyncio.gather(
            self._pass_on(client, forth, self._arrive_later),
            self._pass_on(server, back, self._arrive_on_line),
        )

    async def _pass_on(
        self,
        source: asyncio.StreamReader,
        target: asyncio.StreamWriter,
        arrive: Callable[[int], Awaitable[None]],
    ) -> None:
        try:
            while content := await source.read(CHUNK_BYTES):
                content = name_part(content)
                await arrive(len(content))
                target.write(content)
                await target.drain()
        except ConnectionError:
            pass
        finally:
            target.close()

    async def _arrive_later(self, count: int) -> None:
        """Requests take the whole delay; answers then take none of it."""
        await asyncio.sleep(self.delay_sec)

    async def _arrive_on_line(self, count: int) -> None:
        self.count += count
        now = asyncio.get_running_loop().time()
        self.free_at = max(self.free_at, now) + count / self.bytes_per_sec
        if self.free_at - now > 0.001:  # a shorter sleep takes longer than it says
            await asyncio.sleep(self.free_at - now)


def name_part(content: bytes) -> bytes:
    """Return the first bytes of an answer with the status 206 if it is to a range: S3 has it, and
    rclone's server has 200."""
    head = content.partition(b"\r\n\r\n")[0]
    if not head.startswith(b"HTTP/1.1 200 OK") or b"\r\nContent-Range:" not in head:
        return content
    return content.replace(b"200 OK", b"206 Partial Content", 1)


async def serve(link: Link) -> None:
    server = await asyncio.start_server(link.connect, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("port", type=int)
    parser.add_argument("--ms", type=float, default=20.0)
    parser.add_argument("--gbit", type=float, default=1.0)
    parser.add_argument("--count", type=Path, required=True)
    arguments = parser.parse_args()
    asyncio.run(
        serve(Link(arguments.port, arguments.ms / 1000, arguments.gbit * 1e9 / 8, arguments.count))
    )


if __name__ == "__main__":
    main()
