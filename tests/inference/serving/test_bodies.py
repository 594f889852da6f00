"""Bodies that give way to others."""

import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from lockstep.inference.serving.bodies import Bodies, Refused
from lockstep.inference.serving.limits import Limits


def test_a_body_that_gives_way_as_its_last_bytes_come_is_refused() -> None:
    async def read() -> None:
        bodies = Bodies(Limits())
        with bodies.hold() as reading:

            async def receive() -> Message:
                reading.drop()
                return {"type": "http.request", "body": b"the last bytes", "more_body": False}

            await reading.read(Request({"type": "http", "headers": []}, receive))

    with pytest.raises(Refused, match="stalled while others came") as refused:
        asyncio.run(read())
    assert refused.value.status == 408
