"""Workers on two machines, which are network namespaces of this one, with a cable between.

Each worker has a name that resolves nowhere and one address besides loopback, as on machines
that know each other by the addresses of `TF_CONFIG` alone.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator

import pytest
from helpers.waiting import SECONDS_TO_HANG

from .workers import Workers

LIMIT = SECONDS_TO_HANG
FAILED = (43,)
TRAIN = """
strategy = join(heartbeat=3, step_timeout=60, join_timeout=30)
total = mx.function(all_sum)
for i in range(10_000):
    result = strategy.run(total, (jnp.ones(2),))
    np.asarray(strategy.experimental_local_results(result)[0])
    if i % 5 == 4:
        say("step", i + 1)
    if i == {last}:
        break
    time.sleep(0.02)
"""
TRAIN_ON, TRAIN_A_WHILE = TRAIN.replace("{last}", "-1"), TRAIN.replace("{last}", "150")


class Hosts:
    """Two namespaces with an interface each, joined by a pair of virtual ones."""

    names = [f"mirrax-{os.getpid()}-{k}" for k in range(2)]
    interfaces = ["mirrax0", "mirrax1"]
    addresses = ["10.213.77.1", "10.213.77.2"]

    def make(self) -> None:
        self.remove()
        for name in self.names:
            _run("ip", "netns", "add", name)
        pair = ["netns", self.names[0], "type", "veth", "peer", "name"]
        end = [self.interfaces[1], "netns", self.names[1]]
        _run("ip", "link", "add", self.interfaces[0], *pair, *end)
        for k in range(2):
            address = [f"{self.addresses[k]}/24", "dev", self.interfaces[k]]
            self.ip(k, "addr", "add", *address)
            self.ip(k, "link", "set", self.interfaces[k], "up")
            self.ip(k, "link", "set", "lo", "up")

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def ip(self, host: int, *command: str) -> None:
        _run("ip", "-n", self.names[host], *command)

    def start(self, script: str, chosen: tuple[int, ...] = (0, 1)) -> Workers:
        """A worker on each host."""
        workers = Workers([f"{address}:12321" for address in self.addresses])
        for k in chosen:
            workers.add(k, script, namespace=self.names[k])
        return workers


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip` to make network namespaces with")
    found = Hosts()
    try:
        found.make()
    except subprocess.CalledProcessError as error:
        found.remove()
        pytest.skip(f"network namespaces cannot be made: {error.stderr.strip()}")
    yield found
    found.remove()


def test_workers_on_two_machines_train(hosts: Hosts):
    script = (
        TRAIN.replace("{last}", "4") + 'say(strategy.reduce("SUM", me + 1, axis=None))'
    )
    with hosts.start(script) as workers:
        workers.expect_end(0, 0, within=LIMIT)
        said = (
            "mirrax: worker 0 listens at 10.213.77.1:12321, and the job has no secret"
        )
        assert said in workers[0].output and said not in workers[1].output
        for worker in workers:
            lines = worker.own_output.splitlines()
            assert [each for each in lines if said not in each] == ["step 5", "3"]


@pytest.mark.parametrize("cut", [0, 1])
def test_a_cut_cable_ends_both_sides(hosts: Hosts, cut: int):
    with hosts.start(TRAIN_ON) as workers:
        workers.wait_for("step 10")
        hosts.ip(cut, "link", "set", hosts.interfaces[cut], "down")
        workers.expect_end(FAILED, FAILED, within=LIMIT)
        for worker, other in ((workers[0], 1), (workers[1], 0)):
            assert f"Worker {other} ({hosts.addresses[other]}:12321, " in worker.output
            assert f"its log is {workers[other].log}" in worker.output
            assert "has not answered for" in worker.output


def test_a_machine_that_swallows_packets_is_lost_as_well(hosts: Hosts):
    # No interface is down, no connection refused: nothing comes back.
    with hosts.start(TRAIN_ON) as workers:
        workers.wait_for("step 10")
        # In both directions: else worker 1 hears that worker 0 has ended, JAX maybe first.
        hosts.ip(1, "route", "replace", "blackhole", "10.213.77.1/32")
        hosts.ip(0, "route", "replace", "blackhole", "10.213.77.2/32")
        workers.expect_end(FAILED, FAILED, within=LIMIT)
        assert all("has not answered for" in worker.output for worker in workers)


def test_a_cable_that_is_out_for_a_moment_is_no_failure(hosts: Hosts):
    with hosts.start(TRAIN_A_WHILE) as workers:
        workers.wait_for("step 10")
        hosts.ip(0, "link", "set", hosts.interfaces[0], "down")
        time.sleep(1)
        hosts.ip(0, "link", "set", hosts.interfaces[0], "up")
        workers.expect_end(0, 0, within=LIMIT)


def test_a_slow_link_is_no_failure(hosts: Hosts):
    limit = ["root", "tbf", "rate", "128kbit", "burst", "4kb", "latency", "500ms"]
    with hosts.start(TRAIN_A_WHILE) as workers:
        workers.wait_for("step 10")
        add = ["tc", "qdisc", "add", "dev"]
        try:
            for k in range(2):
                inside = ["ip", "netns", "exec", hosts.names[k]]
                _run(*inside, *add, hosts.interfaces[k], *limit)
        except (subprocess.CalledProcessError, FileNotFoundError) as error:
            pytest.skip(f"links cannot be slowed down here: {error}")
        workers.expect_end(0, 0, within=LIMIT)


def test_a_machine_that_cannot_be_reached_is_named(hosts: Hosts):
    hosts.ip(0, "link", "set", hosts.interfaces[0], "down")
    script = "join(join_timeout=3)"
    with hosts.start(script) as workers:
        workers.expect_end(43, 43, within=LIMIT)
        assert "for worker 1, which did not join" in workers[0].output
        assert "for worker 0, which cannot be reached" in workers[1].output
