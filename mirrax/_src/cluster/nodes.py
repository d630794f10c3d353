"""The machines of a job that is started machine by machine, and which one this is."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

_SLURM_PORT = 8888


@dataclass(frozen=True)
class Nodes:
    """All machines of a job.

    Attributes:
        rank: The number of this machine.
        hosts: Every machine's name; only the first one's is used to connect.
        port: Where the first machine's first worker listens.
    """

    rank: int
    hosts: tuple[str, ...]
    port: int

    def addresses(self, workers: int) -> list[str]:
        """The addresses of all workers, so many on each machine."""
        return [
            f"{host}:{self.port + i}" for host in self.hosts for i in range(workers)
        ]


def find_nodes(
    count: int,
    rank: int | None,
    master: str | None,
    environment: Mapping[str, str] = os.environ,
) -> Nodes:
    """The machines of a job: what is given, and what TF_CONFIG or Slurm knows of the rest.

    Raises:
        ValueError: If something is missing or does not fit.
    """
    known = Nodes(-1, (), 0)
    source = "neither TF_CONFIG nor Slurm describes the job"
    if rank is None or master is None:
        known, source = _found(environment) or (known, source)
        if known.hosts and len(known.hosts) != count:
            raise ValueError(
                f"--nodes is {count}, but {source} has {len(known.hosts)}: "
                f"{', '.join(known.hosts)}."
            )
    if master is not None:
        host, port = _host_and_port(master)
        others = known.hosts[1:] or tuple(f"node-{i}" for i in range(1, count))
        known = Nodes(known.rank, (host, *others), port)
    rank = known.rank if rank is None else rank
    missing = {"--node-rank": rank < 0, "--master HOST:PORT": not known.hosts}
    if any(missing.values()):
        names = " and ".join(name for name, is_missing in missing.items() if is_missing)
        raise ValueError(f"--nodes {count} needs {names} as well: {source}.")
    if not 0 <= rank < count:
        raise ValueError(f"--node-rank is {rank}, but must be 0 to {count - 1}.")
    return Nodes(rank, known.hosts, known.port)


def _found(environment: Mapping[str, str]) -> tuple[Nodes, str] | None:
    """What the environment says, and where."""
    text, rank = environment.get("TF_CONFIG"), environment.get("SLURM_NODEID")
    if text:
        try:
            config = json.loads(text)
            hosts, ports = zip(*map(_host_and_port, config["cluster"]["worker"]))
            return Nodes(int(config["task"]["index"]), hosts, ports[0]), "TF_CONFIG"
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                'TF_CONFIG must list the machines as {"cluster": {"worker": [...]}, "task": '
                f'{{"type": "worker", "index": ...}}}}, got {text!r} ({error}).'
            ) from None
    names = environment.get("SLURM_STEP_NODELIST") or environment.get(
        "SLURM_JOB_NODELIST"
    )
    if rank is None or not names:
        return None
    # Here, because it brings JAX along, which a launcher does not use.
    from mirrax._src.cluster.resolver_slurm import expand_hosts

    return Nodes(int(rank), tuple(expand_hosts(names)), _SLURM_PORT), "Slurm"


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ValueError(f"{address!r} is not an address; write HOST:PORT.")
    return host, int(port)
