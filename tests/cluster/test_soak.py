"""What the soak takes for memory that grows."""

from __future__ import annotations

from tests.cluster.soak import compare

# Every two seconds for ten minutes; a process that has compiled what it runs after 40 s.
SAMPLES = [100_000_000 + 5_000_000 * min(k, 20) // 20 for k in range(300)]


def leaking(bytes_a_second: int) -> list[int]:
    return [used + 2 * k * bytes_a_second for k, used in enumerate(SAMPLES)]


def test_a_process_that_keeps_its_size_has_not_grown() -> None:
    assert compare(SAMPLES, since=0.25) == (105_000_000, 105_000_000, False)


def test_a_small_leak_is_found() -> None:
    first, last, has_grown = compare(leaking(40_000), since=0.25)
    assert last - first == 300 / 2 * 2 * 40_000
    assert has_grown


def test_a_leak_that_restarts_end_is_not_found_but_what_they_add_is() -> None:
    life = leaking(40_000)[:60]
    assert not compare(life * 5, since=0.0)[2]
    lives = [used + 4_000_000 * k for k in range(5) for used in life]
    assert compare(lives, since=0.0)[2]
