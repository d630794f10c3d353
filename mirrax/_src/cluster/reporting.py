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
from pathlib import Path
from types import TracebackType
from typing import Any

from mirrax._src.base.errors import UnavailableError


def install() -> None:
    """Has an uncaught exception reported; called when mirrax is imported.

    The variable is taken out of the environment: what this process starts is no worker.
    """
    path = os.environ.pop("MIRRAX_FAILURE", None)
    if not path:
        return
    shows, process = sys.excepthook, os.getpid()

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        now = time.time()
        try:
            shows(kind, error, trace)
        finally:
            if os.getpid() == process:
                _write(Path(path), error, now)

    sys.excepthook = excepthook


def report_of(error: BaseException, now: float) -> dict[str, Any]:
    """What others should know of an exception."""
    worker, lost = _own_number(), _lost_workers(error)
    return {
        "worker": worker,
        "type": type(error).__qualname__,
        "message": _message_of(error),
        "traceback": "".join(traceback.format_exception(error)),
        "time": now,
        "is_consequence": lost is not None and worker not in lost,
        "lost": lost or [],
    }


def _write(path: Path, error: BaseException, now: float) -> None:
    try:
        partial = path.with_name(f"{path.name}.partial")
        partial.write_text(json.dumps(report_of(error, now)))
        partial.replace(path)  # nobody ever reads half of it
    except Exception as problem:
        print(f"mirrax: {path} cannot be written: {problem!r}", file=sys.stderr)


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


def _message_of(error: BaseException) -> str:
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
