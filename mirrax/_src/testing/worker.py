"""The program of a pool's worker: calls the functions that it is given, one after another.

It is run as a file. `MIRRAX_POOL` is the descriptor of a connection to the pool. Calls and results are files; the connection carries only their names, so that neither
side ever waits in the middle of a large message.
"""

from __future__ import annotations

import os
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main() -> None:
    """Works until the pool is gone."""
    descriptor = int(os.environ.pop("MIRRAX_POOL"))
    os.set_inheritable(descriptor, False)
    pool = Connection(descriptor)
    try:
        sys.path[:] = pool.recv()
        import mirrax

        for name in dir(mirrax):  # now, while nobody waits; it starts no devices
            getattr(mirrax, name)
        pool.send(None)
        while True:
            call, result = pool.recv()
            pool.send(_answer(call, Path(result)))
    except (EOFError, ConnectionError):
        pass


def _answer(call: str, result: Path) -> dict[str, Any] | None:
    """Makes a call; None if its result is in the file, else what went wrong."""
    from mirrax._src.testing import travel

    try:
        fn, args, kwargs = travel.unpack(Path(call).read_bytes())
        value = fn(*args, **kwargs)
    except BaseException as error:
        trace = error.__traceback__
        error.__traceback__ = trace.tb_next if trace else None  # without this file
        return _describe(error)
    try:
        result.write_bytes(travel.pack(value))
    except Exception as error:
        error.add_note("The function has returned, but its result cannot be sent back.")
        return _describe(error)
    finally:
        sys.stdout.flush()
    return None


def _describe(error: BaseException) -> dict[str, Any]:
    from mirrax._src.cluster.reporting import report_of
    from mirrax._src.testing import travel

    report = report_of(error, time.time())
    try:
        report["exception"] = travel.pack(error)
        travel.unpack(report["exception"])
    except Exception:  # the text has to do
        report["exception"] = None
    return report


if __name__ == "__main__":
    main()
