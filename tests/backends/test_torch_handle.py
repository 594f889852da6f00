"""When steps on a GPU were done, with events that tell what CUDA would."""

import time
from typing import Any

from lockstep.backends.torch.handle import EndTimes


class Event:
    def __init__(self, over_at: float, *, is_over: bool) -> None:
        self._over_at = over_at
        self._is_over = is_over

    def query(self) -> bool:
        return self._is_over

    def synchronize(self) -> None:
        self._is_over = True

    def elapsed_time(self, end: "Event") -> float:
        return 1000 * (end._over_at - self._over_at)


def test_steps_that_were_done_earlier_have_the_time_when_they_were_done() -> None:
    times = EndTimes()
    events: list[Any] = [
        Event(7, is_over=False),
        Event(7 + 1e-5, is_over=True),
        Event(7 + 3e-5, is_over=True),
    ]
    first = times.wait(events[0])
    while time.perf_counter() < first + 1e-4:
        pass
    assert abs(times.wait(events[1]) - first - 1e-5) < 1e-7
    assert abs(times.wait(events[2]) - first - 3e-5) < 1e-7


def test_no_step_is_done_after_it_was_asked_for() -> None:
    times = EndTimes()
    events: list[Any] = [Event(7, is_over=True), Event(70, is_over=True), Event(71, is_over=False)]
    ends = [times.wait(event) for event in events]
    assert ends == sorted(ends)
    assert ends[-1] <= time.perf_counter()
