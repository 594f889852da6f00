"""Where the ranks that Horovod adds up over find each other, without Horovod's own launcher."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def rendezvous(processes: int) -> Iterator[Callable[[int], dict[str, str]]]:
    """Serve it for so many processes of this machine; yield a function from a rank to its environment variables."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(f"localhost:{processes}"), processes)
    server = RendezvousServer(0)
    port = server.start()
    server.init(slots)
    shared = create_run_env_vars("127.0.0.1", ["lo"], port)
    try:
        yield lambda rank: {name: str(value) for name, value in (shared | create_slot_env_vars(slots[rank])).items()}
    finally:
        server.stop()
