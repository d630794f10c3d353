"""`mirrax top`: what the workers of a running job do.

It asks the roster, each second anew, and can change nothing there.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import click

from mirrax._src.cluster.link import Link
from mirrax._src.cluster.secret import read_secret
from mirrax._src.command_line.jobs import Job, running_jobs

if TYPE_CHECKING:
    from rich.console import RenderableType

_PAUSE_SECONDS = 1.0
# A worker says where it is at least this often, unless it is one of thousands.
_SILENT_SECONDS = 5.0


@click.command()
@click.argument("address", required=False)
@click.option("--once", is_flag=True, help="Print one table and exit.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON once and exit.")
def top(address: str | None, once: bool, as_json: bool) -> None:
    """Shows the workers of a running job: step, speed, who is behind.

    Without ADDRESS it finds the job that `mirrax run` has started on this machine. ADDRESS is
    that of worker 0, HOST:PORT as in TF_CONFIG; if the job has a secret, MIRRAX_SECRET or
    MIRRAX_SECRET_FILE has to be set as on the workers.
    """
    if once or as_json:
        job = find_job(address)
        picture = look(job)
        if picture is None:
            raise click.ClickException(_nobody(job))
        click.echo(json.dumps(picture, indent=2)) if as_json else _print(job, picture)
        return
    try:
        _show_live(address)
    except KeyboardInterrupt:
        pass


def find_job(address: str | None) -> Job:
    """The job at an address, or the only one of this machine.

    Raises:
        ClickException: If there is none, or more than one.
    """
    jobs = running_jobs()
    if address is not None:
        _split(address)
        known = [job for job in jobs if job.address == address]
        return known[0] if known else Job(address, "", "", "", 0)
    if not jobs:
        raise click.ClickException(
            "No job of yours that `mirrax run` has started is running on this machine. For a "
            "job that was started in another way, or elsewhere, give the address of its "
            "worker 0: mirrax top HOST:PORT."
        )
    if len(jobs) > 1:
        lines = [f"  mirrax top {job.address}   {job.command}" for job in jobs]
        raise click.ClickException(
            "Several jobs are running on this machine. Choose one:\n" + "\n".join(lines)
        )
    return jobs[0]


def look(job: Job) -> dict[str, Any] | None:
    """What the job's roster says; None if it is not there.

    Raises:
        ClickException: If it has a different secret.
    """
    try:
        return Link(_split(job.address), job.secret or read_secret()).look()
    except (RuntimeError, ValueError) as error:
        raise click.ClickException(str(error)) from None


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        raise click.UsageError(f"{address!r} is not an address such as 10.0.0.5:12345.")
    return host.strip("[]"), int(port)


def _nobody(job: Job) -> str:
    text = f"No roster answers at {job.address}."
    if job.pid:
        return f"{text} The job's workers are starting, or it has one worker only."
    return f"{text} Is that the address of worker 0, and is the job running?"


def _print(job: Job, picture: dict[str, Any]) -> None:
    from rich.console import Console

    # Not a terminal: as wide as the table is.
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=200)
    console.print(table_of(job, picture))


def _show_live(address: str | None) -> None:
    from rich.live import Live

    job = find_job(address)
    has_answered = False
    with Live(refresh_per_second=4, screen=False) as live:
        while True:
            picture = look(job)
            has_answered |= picture is not None
            live.update(table_of(job, picture) if picture else _nobody(job))
            time.sleep(_PAUSE_SECONDS)
            if job.pid:  # a restart has another address
                again = [each for each in running_jobs() if each.pid == job.pid]
                if not again:
                    break
                job = again[0]
            elif picture is None:
                if not has_answered:
                    raise click.ClickException(_nobody(job))
                break
    click.echo("The job has ended.")


def table_of(job: Job, picture: dict[str, Any]) -> RenderableType:
    """A row for each worker, and what concerns all below it."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    workers = picture["workers"]
    most = max((row.get("step", 0) for row in workers), default=0)
    rows = _without_host([_row(row, most) for row in workers])
    table = Table(
        title=Text(f"{job.address}  {job.command}".strip()),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        padding=(0, 1, 0, 0),
    )
    shown = []
    for k, (title, is_number) in enumerate(_COLUMNS):
        # What no worker has is left out, such as temperatures; the program comes and goes.
        if title == _PROGRAM or any(row[k] for row in rows):
            justify = "right" if is_number else "left"
            table.add_column(title, justify=justify, no_wrap=title != _PROGRAM)
            shown.append(k)
    for row in rows:
        # A program's label is cut where there is no room for it; all else stays whole.
        table.add_row(*(Text(row[k], no_wrap=True, overflow="ellipsis") for k in shown))
    lines = [Text(line) for line in _lines(picture)]
    return Group(table, *lines)


_PROGRAM = "program"
_COLUMNS = (
    ("worker", True),
    ("process", False),
    ("step", True),
    ("steps/s", True),
    ("behind", True),
    ("occupied", True),
    (_PROGRAM, False),
    ("line", False),
    ("memory", True),
    ("device memory", True),
    ("°C", True),
)


def _row(row: dict[str, Any], most: int) -> list[str]:
    who = str(row.get("process") or row["address"]).removeprefix("process ")
    if "step" not in row:
        what = {"missing": "has not joined yet", "joined": "has joined"}
        state = what.get(row["state"], str(row["state"]))
        return [str(row["worker"]), who, *[""] * 4, state, *[""] * 4]
    doing = row.get("waits_in", "")
    if row["state"] in ("ended", "gone"):
        doing = {"ended": "done", "gone": "process gone"}[row["state"]]
    elif row["silent"] > _SILENT_SECONDS:
        doing = f"silent for {row['silent']:.0f} s"
    used, limit = row.get("device_memory"), row.get("device_limit")
    device = _bytes(used) + (f" of {_bytes(limit)}" if limit else "")
    return [
        str(row["worker"]),
        who,
        f"{row['step']:,}",
        f"{row.get('rate', 0):.3g}",
        f"{most - row['step']:,}",
        f"{row.get('occupied', 0):.0%}",
        doing,
        row.get("doing", ""),
        _bytes(row.get("memory")),
        device,
        str(row.get("celsius", "")),
    ]


def _without_host(rows: list[list[str]]) -> list[list[str]]:
    """The rows with processes' numbers alone if all of them are on one machine."""
    parts = [row[1].partition(" on ") for row in rows]
    if len({host for _, _, host in parts}) > 1:
        return rows
    return [[row[0], pid, *row[2:]] for row, (pid, _, _) in zip(rows, parts)]


def _lines(picture: dict[str, Any]) -> list[str]:
    found = []
    if saved := picture["saved"]:
        ago = _ago(saved["seconds"])
        where = f"{saved['path']}, written at step {saved['step']:,}"
        found.append(f"Last checkpoint: {where}, {ago}")
    elif picture["has_started"]:
        found.append("No checkpoint yet.")
    if picture["failure"]:
        found.append(f"Failed: {picture['failure']}")
    return found


def _ago(seconds: float) -> str:
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def _bytes(count: int | None) -> str:
    if count is None:
        return ""
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
