"""The speed that a log tells of."""

from typing import Any

from lockstep.system.event_log import measure_throughput


def test_throughput_leaves_out_the_first_steps_of_every_process() -> None:
    def train(first: int, images: int, **others: Any) -> dict[str, Any]:
        interval = {"kind": "train", "first_step": first, "step": first + 10, "images": images}
        return interval | {"images_per_sec": 10.0, "data_wait_share": 0.5} | others

    log: Any = [
        {"kind": "start", "step": 0},
        train(0, 999),
        train(10, 40),
        train(20, 999, traced=True),
        {"kind": "start", "step": 30},
        train(30, 999),
        train(40, 60, images_per_sec=20.0, data_wait_share=0.0),
    ]
    assert measure_throughput(log) == (100 / (4 + 3), 2 / 7)  # no mean of rates
    assert measure_throughput(log[:2]) == (None, None)
