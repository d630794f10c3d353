"""Where the roster listens, and its program."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import json
import os
import socket
import sys
from typing import Any

from .connection import Connection, Door
from .server import Roster


def addresses_of(host: str) -> list[str]:
    """The addresses of this machine that `host` names; [] if it names none of them.

    Loopback counts only where it is asked for: many machines resolve their own name to it,
    and nobody else could reach them there.
    """
    if host == "localhost" or host.startswith("127.") or host == "::1":
        return [host]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    named = dict.fromkeys(str(info[4][0]) for info in found)
    return [each for each in named if not _is_loopback(each) and _is_own(each)]


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_own(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, 0), family=family).close()
    except OSError:
        return False
    return True


async def _serve(config: dict[str, Any]) -> None:
    """Serves until all workers have gone. Its input says for whom, its output that it is ready."""
    hosts = addresses_of(config["host"])
    if not config["port"]:
        hosts = hosts[:1]  # each would get a port of its own
    roster = Roster(config["addresses"], config["heartbeat"], hosts[0] if hosts else "")
    door = Door(config.get("secret", ""), config["addresses"])
    try:
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(roster, door),
            hosts or None,
            config["port"],
            backlog=4096,
        )
    except OSError as error:
        print(json.dumps({"error": os.strerror(error.errno or 0)}), flush=True)
        return
    with contextlib.suppress(BrokenPipeError):  # gone already; its input has ended, too
        port = server.sockets[0].getsockname()[1]
        print(json.dumps({"ready": port, "hosts": hosts}), flush=True)
    tasks = [
        asyncio.create_task(roster.beat()),
        asyncio.create_task(_parent_ends(roster)),
    ]
    await roster.is_done.wait()
    for task in tasks:
        task.cancel()
    server.close()
    os._exit(0)  # JAX's service would wait for workers that are gone


async def _parent_ends(roster: Roster) -> None:
    """Ends when the worker that started this is gone and nobody else is there to serve."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    await reader.read()
    await roster.parent_ended()


def _allow_many_connections() -> None:
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run() -> None:
    """The program."""
    _allow_many_connections()
    gc.set_threshold(100_000)  # messages make garbage, but no cycles
    asyncio.run(_serve(json.loads(sys.stdin.readline())))
