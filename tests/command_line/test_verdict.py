"""Which worker is to blame, from what each has left behind."""

from __future__ import annotations

from typing import Any

import pytest

from mirrax._src.cluster.local_cluster import WorkerEnd
from mirrax._src.command_line.verdict import Case, judge, last_error, last_words


def case(worker: int, returncode: int, time: float = 0.0, **details: Any) -> Case:
    lost = details.pop("lost", None)
    error = details.pop("error", None)
    report = None
    if error or lost is not None:
        report = {
            "type": error or "UnavailableError",
            "message": "text",
            "traceback": "Traceback",
            "time": details.pop("failed_at", time),
            "is_consequence": lost is not None,
            "lost": lost or [],
        }
    return Case(WorkerEnd(worker, returncode, time, 0), report, **details)


@pytest.mark.parametrize(
    ("cases", "first", "blamed", "code"),
    [
        ([case(0, 0), case(1, 0)], None, (), 0),
        ([case(0, 1, 2.0), case(1, 5, 1.0)], 1, (0, 1), 5),
        # Who failed earlier, though it ended later.
        ([case(0, 1, 1.0), case(1, 1, 9.0, error="E", failed_at=0.5)], 1, (0, 1), 1),
        # A consequence is never the first, whenever it came.
        ([case(0, 43, 1.0), case(1, -9, 2.0)], 1, (1,), 137),
        ([case(0, 1, 1.0, lost=[1]), case(1, -11, 2.0)], 1, (1,), 139),
        # Nobody failed by itself: the lost one.
        ([case(0, 1, lost=[1]), case(1, -9, was_killed=True)], 1, (1,), 1),
        ([case(0, 43, lost=[1]), case(1, 0)], 1, (1,), 43),
        ([case(0, 43, 2.0), case(1, 43, 1.0)], 1, (1,), 43),
        # An exception that a worker did not get to end by.
        ([case(0, -9, error="E", was_killed=True), case(1, 1, lost=[0])], 0, (0,), 1),
        # Killed by the launcher without a reason of its own.
        ([case(0, 3), case(1, -9, was_killed=True)], 0, (0,), 3),
    ],
)
def test_who_failed_first(
    cases: list[Case], first: int | None, blamed: tuple[int, ...], code: int
) -> None:
    verdict = judge(cases)
    assert (verdict.first and verdict.first.worker) == first
    assert verdict.blamed == blamed
    assert verdict.code == code


def test_only_saved_is_a_preemption() -> None:
    assert judge([case(0, 42), case(1, 0)]).is_preemption
    assert not judge([case(0, 42), case(1, 1)]).is_preemption
    assert not judge([case(0, 0)]).is_preemption


TRACEBACK = """\
step 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    first()
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    second()
ValueError: b
A note of what it means.
"""


def test_the_error_of_a_log_is_that_of_its_last_traceback() -> None:
    assert last_error(TRACEBACK) == "ValueError: b"
    assert last_error("step 1\nstep 2\n") == last_error("") == ""
    assert last_error("Traceback (most recent call last):\n") == ""


def test_the_end_of_a_log_begins_with_its_last_traceback_if_that_is_near() -> None:
    many = "".join(f"line {i}\n" for i in range(60))
    assert last_words(many).splitlines() == [f"line {i}" for i in range(35, 60)]
    assert last_words(TRACEBACK + many).startswith("Traceback")
    assert "second()" in last_words(TRACEBACK + many)
    assert last_words(TRACEBACK + many * 5).startswith("line 35")
    assert last_words("") == ""
