"""The commands and their options."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

import mirrax
from mirrax._src.cluster.nodes import Nodes, find_nodes
from mirrax._src.command_line import run as running
from mirrax._src.command_line.top import top


class _Sizes(click.ParamType):
    """`4`, or `2:4` for at least 2 and at most 4."""

    name = "N|MIN:MAX"

    def convert(
        self, value: str, param: click.Parameter | None, context: click.Context | None
    ) -> tuple[int, int]:
        low, _, high = value.partition(":")
        try:
            sizes = int(low), int(high or low)
        except ValueError:
            self.fail(f"{value!r} is neither a number nor MIN:MAX, such as 2:4.")
        if not 1 <= sizes[0] <= sizes[1]:
            self.fail(f"{value!r}: at least 1, and MIN at most MAX, such as 2:4.")
        return sizes


def _sizes(
    workers: tuple[int, int], min_workers: int | None, max_restarts: int
) -> tuple[int, int]:
    """How many workers there are at least and at most.

    Raises:
        UsageError: If the options say different things, or would have no effect.
    """
    fewest, most = workers
    if min_workers is not None:
        if fewest != most:
            raise click.UsageError(
                f"--workers {fewest}:{most} and --min-workers {min_workers} both say how few "
                "workers may be left. Give one of them."
            )
        if min_workers > most:
            raise click.UsageError(
                f"--min-workers {min_workers} is more than --workers {most}."
            )
        fewest = min_workers
    if fewest < most and max_restarts < 2:
        raise click.UsageError(
            "A worker is given up when it has failed in two attempts in a row: going on with "
            f"fewer than {most} needs --max-restarts of at least 2, got {max_restarts}."
        )
    return fewest, most


_positive = click.IntRange(min=1)
_seconds = click.FloatRange(min=0)


@click.group(
    epilog='Completion in bash: eval "$(_MIRRAX_COMPLETE=bash_source mirrax)"; zsh and fish '
    "have zsh_source and fish_source."
)
@click.version_option(mirrax.__version__)
def commands() -> None:
    """TensorFlow's distribution strategies for JAX."""


@commands.command(
    # What follows the script is the script's.
    context_settings={"allow_interspersed_args": False, "show_default": True}
)
@click.option(
    "--workers",
    type=_Sizes(),
    default="1",
    help="How many workers to start on this machine. They divide its GPUs; a single one gets "
    "all of them. MIN:MAX is short for --workers MAX --min-workers MIN.",
)
@click.option(
    "--min-workers",
    type=_positive,
    metavar="N",
    help="Continue without a worker that has failed in two attempts in a row, as long as N "
    "are left. Needs --max-restarts of at least 2.",
)
@click.option(
    "--devices-per-worker",
    type=_positive,
    metavar="N",
    help="Logical CPU devices of each worker; with GPUs, how many each worker gets (by default "
    "all visible ones are divided).",
)
@click.option(
    "--nodes",
    type=_positive,
    metavar="N",
    help="How many machines the job has. Run this command on each with the same options; "
    "what the next two leave out is taken from TF_CONFIG or Slurm.",
)
@click.option(
    "--node-rank",
    type=click.IntRange(min=0),
    metavar="K",
    help="The number of this machine, counting from 0.",
)
@click.option(
    "--master",
    metavar="HOST:PORT",
    help="The first machine, and a free port there that the others can reach.",
)
@click.option(
    "--max-restarts",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="How often to restart all workers after a failure. The script has to resume from "
    "its last checkpoint.",
)
@click.option(
    "--log-dir",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the workers' logs are kept, worker-0.log and so on. By default they are in "
    "$XDG_STATE_HOME/mirrax/runs (~/.local/state), and removed after a success.",
)
@click.option(
    "--log-size",
    type=_positive,
    default=100,
    metavar="MIB",
    help="When a log is this long it is continued in a new file; the last three are kept as "
    "worker-0.log.1 and so on.",
)
@click.option(
    "--platform",
    type=click.Choice(["cpu", "gpu"]),
    help="What the workers run on; by default JAX chooses.",
)
@click.option(
    "--grace-after-failure",
    type=_seconds,
    default=10,
    metavar="SECONDS",
    help="How long the other workers may keep running after one has failed.",
)
@click.option(
    "--grace-after-signal",
    type=_seconds,
    default=60,
    metavar="SECONDS",
    help="How long workers may take to save after this command receives SIGTERM or Ctrl-C.",
)
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is a module's name.")
@click.argument("script", type=click.Path())  # whose names a shell can complete
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    workers: tuple[int, int],
    min_workers: int | None,
    devices_per_worker: int | None,
    max_restarts: int,
    log_dir: Path | None,
    log_size: int,
    platform: str | None,
    grace_after_failure: float,
    grace_after_signal: float,
    nodes: int | None,
    node_rank: int | None,
    master: str | None,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Runs a script on workers: on this machine, or on several.

    Each worker runs `python SCRIPT ARGUMENTS` with a TF_CONFIG of its own, as
    mx.distribute.MultiWorkerMirroredStrategy() reads it. If one fails, the others are stopped,
    and the failing worker's own traceback is shown last. Exit codes: that of the first
    failure; 128 + n for signal n; 42 if the workers were told to stop and have saved.
    """
    if not is_module and not Path(script).exists():
        raise click.UsageError(f"There is no script {script!r} in {Path.cwd()}.")
    fewest, most = _sizes(workers, min_workers, max_restarts)
    options = running.RunOptions(
        command=(sys.executable, *(["-m"] if is_module else []), script, *arguments),
        minimum=fewest,
        maximum=most,
        devices=devices_per_worker,
        max_restarts=max_restarts,
        log_dir=log_dir,
        log_bytes=log_size * 2**20,
        platform=platform,
        grace_after_failure=grace_after_failure,
        grace_after_signal=grace_after_signal,
        nodes=_nodes(nodes, node_rank, master, (fewest, most)),
    )
    try:
        code = running.launch(options)
    except running.LaunchError as error:
        raise click.ClickException(str(error)) from None
    running.end_with(code)


def _nodes(
    nodes: int | None,
    node_rank: int | None,
    master: str | None,
    workers: tuple[int, int],
) -> Nodes | None:
    """The machines that the options name; None for this one alone."""
    if nodes is None:
        for option, value in (("--node-rank", node_rank), ("--master", master)):
            if value is not None:
                raise click.UsageError(f"{option} {value} needs --nodes.")
        return None
    if workers[0] != workers[1]:
        raise click.UsageError(
            f"Fewer workers than {workers[1]} (--min-workers or --workers MIN:MAX) do not go "
            f"with --nodes {nodes}: all machines need one number."
        )
    try:
        return find_nodes(nodes, node_rank, master)
    except ValueError as error:
        raise click.UsageError(str(error)) from None


@commands.command()
@click.option(
    "--devices", type=_positive, help="Logical CPU devices to measure between."
)
@click.option(
    "--workers",
    type=_positive,
    help="Measure between so many local workers, with --devices each.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
def info(devices: int | None, workers: int | None, as_json: bool) -> None:
    """Shows versions, devices, the cluster, and how fast collectives are."""
    # Here, because they use JAX, and a launcher should not.
    from mirrax._src.command_line import info as collecting
    from mirrax._src.command_line import tables

    content = collecting.collect(devices)
    if workers is None:
        content["all_reduce"] = collecting.measure_here()
    else:
        content["all_reduce"], code = collecting.measure_between(workers, devices)
        if code:
            running.end_with(code)
    if as_json:
        click.echo(json.dumps(content, indent=2))
    else:
        tables.show(content)


commands.add_command(top)
