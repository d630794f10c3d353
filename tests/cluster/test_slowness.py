"""Who makes the others wait: how a worker measures itself, and what the roster makes of it."""

from __future__ import annotations

from typing import Any

import pytest

from mirrax._src.cluster import vitals
from mirrax._src.cluster.pace import Pace
from mirrax._src.cluster.roster_server.slowness import Slowness


def watch(
    shares: list[list[float]], steps: int = 100
) -> list[tuple[int, float] | None]:
    """What is said after each half minute, in which workers were occupied so much."""
    slowness = Slowness(now=0.0)
    found = []
    for k, window in enumerate(shares):
        statuses = {
            worker: {"step": (k + 1) * steps, "occupied": share}
            for worker, share in enumerate(window)
        }
        assert slowness.look(30.0 * k + 15, statuses) is None  # not in between
        found.append(slowness.look(30.0 * (k + 1), statuses))
    return found


def test_the_worker_that_is_waited_for_is_named_once_it_is_sustained() -> None:
    late = [0.98, 0.65, 0.98, 1.0]
    # The first window has no steps to compare with yet.
    first, second, third, *rest = watch([late] * 10)
    assert first is None and second is None
    assert third == (1, pytest.approx(0.33))
    assert rest == [None] * 7  # said already


def test_it_is_said_again_after_ten_minutes_and_of_another_at_once() -> None:
    found = watch([[1.0, 0.5]] * 24)
    assert [k for k, each in enumerate(found) if each] == [2, 22]
    found = watch([[1.0, 0.5]] * 5 + [[0.5, 1.0]] * 3)
    assert [each and each[0] for each in found] == [
        None,
        None,
        1,
        None,
        None,
        None,
        0,
        None,
    ]


@pytest.mark.parametrize(
    "shares",
    [
        [[0.95, 0.90]] * 5,  # under a tenth
        [[0.2, 0.2, 0.2]] * 5,  # all read slowly: nobody waits for anybody
        [[1.0, 0.5], [0.5, 1.0]] * 4,  # in turns
        [[1.0, 1.0], [1.0, 0.2], [1.0, 1.0]] * 3,  # a single slow half minute
        [[0.3]] * 5,
    ],
)
def test_nobody_is_named_for_less(shares: list[list[float]]) -> None:
    assert set(watch(shares)) == {None}


def test_nobody_is_named_while_hardly_a_step_is_taken() -> None:
    assert set(watch([[1.0, 0.2]] * 5, steps=9)) == {None}


def test_the_first_worker_is_told_who_is_slow() -> None:
    from mirrax._src.cluster.roster_server import server, slowness

    class Connection:
        is_closed = False

        def __init__(self) -> None:
            self.told: list[Any] = []

        def tell(self, kind: str, content: Any) -> None:
            self.told.append((kind, content))

    roster = server.Roster(["a:1", "b:1"], 20.0, "")
    connections = [Connection(), Connection()]
    now = 0.0
    roster.slowness = slowness.Slowness(now)
    real = server.time.monotonic
    try:
        server.time.monotonic = lambda: now  # type: ignore[assignment]
        for k, connection in enumerate(connections):
            roster.members[k] = server.Member(connection, {"log": f"{k}.log"})  # pyright: ignore
        for window in range(1, 5):
            now = 30.0 * window
            for k, share in enumerate((0.99, 0.55)):
                status = {"step": 50 * window, "occupied": share, "doing": "read.py:7"}
                roster.members[k].status = status
            roster.look_for_slowest()
    finally:
        server.time.monotonic = real
    assert connections[1].told == []
    ((kind, text),) = connections[0].told
    assert kind == "say"
    assert text == (
        "Worker 1 (b:1, last at step 150, in read.py:7, its log is 1.log) is the slowest: "
        "the others wait for it for 44% of each step."
    )


def test_a_pace_is_of_the_last_half_minute() -> None:
    pace = Pace()
    assert pace.steps_per_second() == 0 and pace.occupied() == 0
    for tick in range(1000):  # 200 s: the first half without a step
        is_fast = tick >= 500
        pace.look(0.2 * tick, 2 * max(tick - 500, 0), is_fast and tick % 4 != 0)
    assert pace.steps_per_second() == pytest.approx(10.0)
    assert pace.occupied() == pytest.approx(0.75, abs=0.01)
    assert len(pace._looks) <= 152


def test_memory_is_measured_and_a_cpu_has_no_temperature() -> None:
    import jax

    jax.local_devices()
    found = vitals.measure(None)
    assert found["memory"] > 2**20 and "celsius" not in found


class FakeLibrary:
    """NVML with two GPUs; the second is known by a UUID, too."""

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:
        handle._obj.value = 100 + index.value
        return 0 if index.value < 2 else 2

    def nvmlDeviceGetHandleByUUID(self, name: bytes, handle: Any) -> int:
        handle._obj.value = 101
        return 0 if name == b"GPU-1" else 2

    def nvmlDeviceGetTemperature(self, handle: Any, kind: int, degrees: Any) -> int:
        assert kind == 0
        degrees._obj.value = handle.value - 60
        return 0


def test_temperatures_come_from_the_gpus_of_this_process() -> None:
    nvml = vitals.Nvml(FakeLibrary())
    assert [nvml.celsius(name) for name in ("0", "1", "GPU-1")] == [40, 41, 41]
    assert nvml.celsius("2") is None and nvml.celsius("GPU-7") is None
    assert vitals.visible_gpus("", 2) == ["0", "1"]
    assert vitals.visible_gpus(" 3, GPU-1", 2) == ["3", "GPU-1"]
    assert vitals.visible_gpus("4,5,6", 1) == ["4"]
