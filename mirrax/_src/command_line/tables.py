"""What `mirrax info` has found, for people: on one screen, whatever there is."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

_SHOWN_WORKERS = 6
_SHOWN_LETTERS = 80  # of an environment variable; `--json` has all
_HINTS = {
    "Slurm": "pass cluster_resolver=SlurmClusterResolver() to the strategy",
    "JAX's detection": "pass cluster_resolver=JaxClusterResolver() to the strategy",
}


def show(content: dict[str, Any]) -> None:
    """Prints all of it."""
    table = Table.grid(padding=(0, 2))
    for title, lines in (
        ("Versions", [", ".join(f"{k} {v}" for k, v in content["versions"].items())]),
        ("Devices", _devices(content["devices"])),
        ("Cluster", _cluster(content["cluster"])),
        ("Threads", _threads(content["threads"])),
        ("All-reduce", _all_reduce(content["all_reduce"])),
    ):
        for heading, line in zip(itertools.chain([title], itertools.repeat("")), lines):
            table.add_row(Text(heading, "bold"), Text(line))
    Console(highlight=False).print(table)


def _devices(found: Any) -> list[str]:
    if "error" in found:
        return [found["error"]]
    lines = []
    for kind, group in itertools.groupby(found, lambda d: (d["kind"], d["bytes"])):
        names = [device["name"] for device in group]
        span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        memory = f", {kind[1] / 2**30:.1f} GiB each" if kind[1] else ""
        lines.append(f"{span}: {kind[0]}{memory}")
    return lines


def _cluster(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["none: TF_CONFIG is not set, and JAX detects none"]
    source = found["source"]
    if "error" in found:
        return [f"of {source}: {found['error']}"]
    names = [f"{name} at {address}" for name, address in found["workers"].items()]
    lines = [f"of {source}; this process is {found['this']}", _shortened(names)]
    return [*lines, f"to use it, {_HINTS[source]}"] if source in _HINTS else lines


def _shortened(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN_WORKERS
    return ", ".join(names[:_SHOWN_WORKERS]) + (f" and {more} more" if more > 0 else "")


def _threads(found: dict[str, Any]) -> list[str]:
    cores = found["cores"]
    settings = [f"{name}={value}" for name, value in found["environment"].items()]
    return [
        f"{cores['usable']} of the machine's {cores['machine']} cores",
        *(s[:_SHOWN_LETTERS] + "…" * (len(s) > _SHOWN_LETTERS) for s in settings),
    ]


def _all_reduce(found: dict[str, Any]) -> list[str]:
    if "error" in found:
        return [found["error"]]
    if not found["all_reduce"]:
        return ["not measured: one device only; --devices 2 makes logical ones"]
    workers = found["workers"]
    where = f"{found['replicas']} replicas on {workers} worker{'s' * (workers > 1)}"
    return [where, *map(_measured, found["all_reduce"])]


def _measured(row: dict[str, Any]) -> str:
    speed = f"{row['bytes_per_second'] / 1e9:9.2f} GB/s" if row["bytes"] > 4 else ""
    return f"{_size(row['bytes']):>7} {row['seconds'] * 1e6:>11,.0f} µs{speed}"


def _size(count: int) -> str:
    for unit in ("B", "KiB"):
        if count < 1024:
            return f"{count} {unit}"
        count //= 1024
    return f"{count} MiB"
