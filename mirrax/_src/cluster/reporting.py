"""A worker that ends by an exception writes down which, for whoever has started it.

A launcher sets `MIRRAX_FAILURE` to the path of a file. After a failure it reads the files of
all workers: which one failed by itself, which ones only because another was gone.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mirrax._src.base import hooks
from mirrax._src.base.errors import UnavailableError

# The exit code of a worker that cannot go on because another one is lost.
LOST_EXIT_CODE = 43

_path: Path | None = None
_is_ending = False


def install() -> None:
    """Has an uncaught exception reported; called when mirrax is imported.

    The variable is taken out of the environment: what this process starts is no worker.
    """
    global _path
    name = os.environ.pop("MIRRAX_FAILURE", None)
    if not name:
        return
    _path = Path(name)
    hooks.on_uncaught(_show_and_report)


def end_with_codes() -> None:
    """Has this process end with code 43 if it ends because another worker is lost."""
    global _is_ending
    if not _is_ending:
        _is_ending = True
        hooks.on_uncaught(_show_and_end)


def _show_and_end(error: BaseException, show: Callable[[], None]) -> None:
    show()
    if is_of_lost_worker(error) and not hasattr(sys, "ps1"):
        raise SystemExit(LOST_EXIT_CODE)  # Python ends with this in place of 1


def is_of_lost_worker(error: BaseException) -> bool:
    """Whether it would not have happened if all workers were there."""
    return _lost_workers(error) is not None


def _show_and_report(error: BaseException, show: Callable[[], None]) -> None:
    now = time.time()
    try:
        show()
    finally:
        write_report(error, now)


def write_report(
    error: BaseException, now: float | None = None, where: str = ""
) -> None:
    """Writes down why this process ends, if somebody wants to know.

    Args:
        error: Why.
        now: When it happened, in seconds since the epoch; by default now.
        where: Where the process was, if the error does not know.
    """
    if _path is None:
        return
    report = report_of(error, time.time() if now is None else now)
    if where:
        report["traceback"] += f"It was here:\n{where}"
    try:
        partial = _path.with_name(f"{_path.name}.partial")
        partial.write_text(json.dumps(report))
        partial.replace(_path)  # nobody ever reads half of it
    except OSError as problem:
        print(f"mirrax: {_path} cannot be written: {problem}", file=sys.stderr)


def report_of(error: BaseException, now: float) -> dict[str, Any]:
    """What others should know of an exception."""
    worker, lost = _own_number(), _lost_workers(error)
    return {
        "worker": worker,
        "type": type(error).__qualname__,
        "message": message_of(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": now,
        "is_consequence": lost is not None and worker not in lost,
        "lost": lost or [],
    }


def _lost_workers(error: BaseException) -> list[int] | None:
    """The workers without which this would not have happened; None if it would have."""
    seen: list[BaseException] = []
    found: BaseException | None = error
    while found is not None and found not in seen:
        if isinstance(found, UnavailableError):
            return list(found.workers)
        seen.append(found)
        hidden = None if found.__suppress_context__ else found.__context__
        found = found.__cause__ or hidden
    return None


def message_of(error: BaseException) -> str:
    """An exception's text, also of one that cannot make it."""
    try:
        return str(error)
    except Exception:
        return "(its text cannot be made)"


def _own_number() -> int | None:
    """This worker's number by `TF_CONFIG`: the chief, if any, is the first."""
    try:
        config = json.loads(os.environ["TF_CONFIG"])
        is_after_chief = config["task"]["type"] == "worker" and bool(
            config["cluster"].get("chief")
        )
        return int(config["task"]["index"]) + is_after_chief
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
