"""What `mirrax info` has found, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

_HINTS = {
    "Slurm": "pass cluster_resolver=SlurmClusterResolver() to the strategy",
    "JAX's detection": "pass cluster_resolver=JaxClusterResolver() to the strategy",
}


def show(content: dict[str, Any]) -> None:
    """Prints all of it."""
    console = Console(highlight=False)
    for title, rows in (
        ("Versions", list(content["versions"].items())),
        ("Devices", _devices(content["devices"])),
        ("Cluster", _cluster(content["cluster"])),
        ("Threads", _threads(content["threads"])),
        *_all_reduce(content["all_reduce"]),
    ):
        table = Table(show_header=False)
        for row in rows:
            table.add_row(*row)
        console.print(f"[bold]{title}[/bold]", table, sep="\n")


def _devices(found: Any) -> list[tuple[str, ...]]:
    if "error" in found:
        return [("error", found["error"])]
    return [
        (d["name"], d["kind"], f"{d['bytes'] / 2**30:.1f} GiB" if d["bytes"] else "")
        for d in found
    ]


def _cluster(found: dict[str, Any] | None) -> list[tuple[str, ...]]:
    if found is None:
        return [("none", "TF_CONFIG is not set, and JAX detects none")]
    source = found["source"]
    if "error" in found:
        return [("source", source), ("error", found["error"])]
    rows = [("source", source), ("this process", found["this"])]
    rows += found["workers"].items()
    return [*rows, ("to use it", _HINTS[source])] if source in _HINTS else rows


def _threads(found: dict[str, Any]) -> list[tuple[str, ...]]:
    cores = found["cores"]
    rows = [("cores", f"{cores['usable']} of the machine's {cores['machine']}")]
    return rows + list(found["environment"].items())


def _all_reduce(found: dict[str, Any]) -> list[tuple[str, list[tuple[str, ...]]]]:
    if "error" in found:
        return [("All-reduce", [("error", found["error"])])]
    if not found["all_reduce"]:
        hint = "one device only; --devices 2 makes logical ones of the CPU"
        return [("All-reduce", [("not measured", hint)])]
    workers = found["workers"]
    where = f"{found['replicas']} replicas on {workers} worker{'s' * (workers > 1)}"
    rows = [
        (
            _size(row["bytes"]),
            f"{row['seconds'] * 1e6:,.0f} µs",
            f"{row['bytes_per_second'] / 1e9:.2f} GB/s" if row["bytes"] > 4 else "",
        )
        for row in found["all_reduce"]
    ]
    return [(f"All-reduce, {where}", rows)]


def _size(count: int) -> str:
    for unit in ("B", "KiB"):
        if count < 1024:
            return f"{count} {unit}"
        count //= 1024
    return f"{count} MiB"
