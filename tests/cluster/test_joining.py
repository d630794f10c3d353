"""Workers that join a cluster, and all that can be wrong with it: real processes."""

from __future__ import annotations

import re
import signal
import socket
import threading
from pathlib import Path

import pytest
from helpers.waiting import SECONDS_TO_HANG

from mirrax._src.cluster.roster_server.listening import addresses_of
from mirrax._src.cluster.secret import read_secret

from .workers import start

# Says quickly, and not every 10 s, whom a worker waits for.
_JOIN = """
from mirrax._src.cluster import roster
roster._LINE_SECONDS = 0.2
strategy = join(join_timeout={timeout}, heartbeat=10)
say("joined", int(strategy.reduce("SUM", 1, axis=None)))
"""
JOIN = _JOIN.format(timeout=SECONDS_TO_HANG)
JOIN_SOON = _JOIN.format(timeout=3)
LIMIT = SECONDS_TO_HANG


def test_workers_that_never_start_are_named():
    with start(JOIN_SOON, workers=4, missing=[2, 3]) as workers:
        workers.expect_end(43, 43, within=LIMIT)
        for worker in workers:
            me = f"worker {worker.number} (this process, {worker.pid})"
            assert f"mirrax: {me} waits for worker 2, worker 3." in worker.output
            assert "has waited 3 s for worker 2, worker 3, which did" in worker.output
            assert "Start all workers of the cluster" in worker.output


def test_a_first_worker_that_never_starts_is_named():
    with start(JOIN_SOON, workers=2, missing=[0]) as workers:
        workers.expect_end(43, within=LIMIT)
        output = workers[0].output
        assert "waits for worker 0, which cannot be reached" in output
        assert "has waited 3 s for worker 0, which cannot be reached" in output
        assert "Has it been started" in output


@pytest.mark.parametrize("odd", [0, 1])
def test_clusters_of_other_sizes_are_shown_side_by_side(odd: int):
    with start(JOIN, workers=2, missing=[odd]) as workers:
        mine = ", ".join(workers.addresses)
        workers.addresses.append("127.0.0.1:9")
        theirs = ", ".join(workers.addresses)
        workers.add(odd, JOIN)
        workers.expect_end(43, 43, within=LIMIT)
        for worker in workers:
            assert "has a different list of workers from worker 0" in worker.output
            assert mine in worker.output and theirs in worker.output


def test_a_number_that_is_there_twice_is_refused_and_the_others_go_on():
    with start(JOIN, workers=3, missing=[2]) as workers:
        workers.wait_for("waits for worker 2.")
        second_one, second_zero = workers.add(1, JOIN), workers.add(0, JOIN)
        second_one.wait_for("Two processes have joined as worker 1")
        second_zero.wait_for("cannot listen at its address")
        assert workers.addresses[0] in second_zero.output
        workers.add(2, JOIN)
        workers.expect_end(0, 0, 43, 1, 0, within=LIMIT)
        assert "joined 3" in workers[0].output


def test_a_port_that_another_program_has_is_named_by_all():
    with start(JOIN_SOON, workers=2, missing=[0, 1]) as workers:
        host, port = workers.addresses[0].split(":")
        with socket.create_server((host, int(port))):  # accepts, and says nothing
            workers.add(0, JOIN_SOON)
            workers.add(1, JOIN_SOON)
            workers.expect_end(1, 43, within=LIMIT)
        text = f"Worker 0 cannot listen at its address {host}:{port}: Address already"
        assert text in workers[0].output
        assert f"{host}:{port}" in workers[1].output
        assert "another program" in workers[1].output


def test_a_port_where_another_program_answers_is_named():
    with start(JOIN_SOON, workers=2, missing=[0, 1]) as workers:
        host, port = workers.addresses[0].split(":")
        with socket.create_server((host, int(port))) as other:
            answering = threading.Thread(target=_answer_like_a_web_server, args=[other])
            answering.start()
            workers.add(1, JOIN_SOON)
            workers.expect_end(43, within=LIMIT)
            other.shutdown(socket.SHUT_RDWR)
            answering.join()
        assert "another program" in workers[0].output


def _answer_like_a_web_server(server: socket.socket) -> None:
    while True:
        try:
            connection, _ = server.accept()
        except OSError:
            return
        with connection:
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "jax.config.update('jax_enable_x64', me == 1)",
            "jax_enable_x64 is False on worker 0 and True on worker 1",
        ),
        (
            "jax.config.update('jax_default_matmul_precision', ['high', None][me])",
            "jax_default_matmul_precision is high on worker 0 and None on worker 1",
        ),
        (
            "mx.__version__ = ['1.0', '1.1'][me]",
            "mirrax is 1.0 on worker 0 and 1.1 on worker 1",
        ),
        (
            "jax.config.update('jax_num_cpu_devices', me + 1)",
            "different devices: CPU:0 on worker 0, CPU:0, CPU:1 on worker 1",
        ),
    ],
)
def test_workers_that_are_set_up_differently_say_how(setting: str, message: str):
    with start(setting + JOIN, workers=2) as workers:
        workers.expect_end(1, 1, within=LIMIT)
        assert all(message in worker.output for worker in workers), workers.show()


def test_a_strategy_after_jax_has_started_is_an_error():
    with start("jnp.ones(3)" + JOIN, workers=2) as workers:
        workers.expect_end(1, 1, within=LIMIT)
        for worker in workers:
            assert "RuntimeError" in worker.output
            assert "Make the strategy at the top of the program" in worker.output


def test_a_second_strategy_is_the_same_cluster_and_another_cluster_is_refused():
    script = """
    first, second = join(), join()
    say("sum", second.reduce("SUM", first.reduce("SUM", 1, axis=None), axis=None))
    config = os.environ["TF_CONFIG"]
    for other in (config.replace("127.0.0.1", "localhost"),
                  config.replace(f'"index": {me}', f'"index": {1 - me}')):
        os.environ["TF_CONFIG"] = other
        try:
            join()
        except RuntimeError as error:
            say(error)
    """
    with start(script, workers=2) as workers:
        workers.expect_end(0, 0, within=LIMIT)
        for worker in workers:
            lines = worker.own_output.splitlines()
            assert lines[0] == "sum 4"
            assert len(lines) == 3
            for line in lines[1:]:
                assert f"as worker {worker.number}, and cannot be in another" in line


def test_a_worker_that_is_killed_while_joining_may_be_started_again():
    with start(JOIN, workers=3, missing=[2]) as workers:
        workers.wait_for("waits for worker 2.")
        workers[1].kill()
        workers[0].wait_for("waits for worker 1, worker 2.")
        workers.add(1, JOIN)
        workers.add(2, JOIN)
        workers.expect_end(0, -9, 0, 0, within=LIMIT)
        assert "joined 3" in workers[0].output


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_without_the_first_worker_nobody_waits_on(number: int):
    with start(JOIN, workers=3, missing=[2]) as workers:
        workers.wait_for("waits for worker 2.")
        workers[0].send(number)
        workers.expect_end(-number, 43, within=LIMIT)
        assert "Worker 0 ended while the others were joining." in workers[1].output


def test_ctrl_c_while_joining_ends_at_once():
    with start(JOIN, workers=3, missing=[2]) as workers:
        workers.wait_for("waits for worker 2.")
        for worker in workers:
            worker.send(signal.SIGINT)
        workers.expect_end(-signal.SIGINT, (43, -signal.SIGINT), within=LIMIT)
        assert "KeyboardInterrupt" in workers[1].output


def test_a_first_worker_that_is_killed_before_it_has_joined_itself():
    script = """
from mirrax._src.cluster import roster
def never(*args):
    say("listening")
    time.sleep(60)
if me == 0:
    roster.Roster.join = never
"""
    with start(script + JOIN, workers=2, missing=[1]) as workers:
        workers[0].wait_for("listening")
        workers.add(1, JOIN)
        workers[1].wait_for("waits for worker 0")
        workers[0].kill()
        workers.expect_end(-9, 43, within=LIMIT)
        assert "Worker 0 ended while the others were joining." in workers[1].output


@pytest.mark.parametrize("lost", [0, 1])
def test_a_worker_that_is_killed_when_jax_connects_is_named(lost: int):
    script = f"""
from mirrax._src.cluster import runtime
def never(*args):
    say("connecting")
    time.sleep(60)
if me == {lost}:
    runtime._connect_jax = never
"""
    with start(script + JOIN, workers=3) as workers:
        workers[lost].wait_for("connecting")
        workers[lost].kill()
        codes = [-9 if k == lost else (1, 43) for k in range(3)]
        workers.expect_end(*codes, within=LIMIT)
        for worker in workers:
            if worker.number != lost:
                assert f"Worker {lost} (" in worker.output
                assert "its process is gone" in worker.output


def test_with_a_chief_messages_call_workers_as_the_cluster_does():
    script = """
import json
workers = json.loads(os.environ["TF_CONFIG"])["cluster"]["worker"]
task = {"type": "worker", "index": me - 1} if me else {"type": "chief", "index": 0}
cluster = {"chief": workers[:1], "worker": workers[1:]}
os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": task})
"""
    sleep = "\ntime.sleep(60)"
    with start(script + JOIN + sleep, workers=3, missing=[2]) as workers:
        workers.wait_for("waits for worker 1.")
        workers.add(2, script + JOIN + sleep)
        workers.wait_for("joined 3")
        workers[1].kill()
        workers.expect_end(43, -9, 43, within=LIMIT)
        for worker in (workers[0], workers[2]):
            assert f"Worker 0 ({workers.addresses[1]}" in worker.output
        assert "mirrax: chief 0 (this process" in workers[0].output


def test_a_stale_worker_of_another_job_does_not_end_one_that_trains():
    train = """
for step in range(200):
    strategy.reduce("SUM", 1, axis=None)
    time.sleep(0.02)
say("trained")
"""
    with start(JOIN + train, workers=2) as workers:
        workers.wait_for("joined 2")
        workers.addresses[1] = "127.0.0.1:9"
        stale = workers.add(1, JOIN)
        assert stale.wait(LIMIT) == 43
        assert "has a different list of workers from worker 0" in stale.output
        workers.expect_end(0, 0, 43, within=LIMIT)
        assert "trained" in workers[0].output and "trained" in workers[1].output


SECRET = "a secret of the test, long enough"


def test_workers_with_the_same_secret_train_and_never_show_it(tmp_path: Path):
    file = tmp_path / "secret"
    file.write_text(f"{SECRET}\n")
    with start(JOIN, workers=2, missing=[0, 1]) as workers:
        workers.add(0, JOIN, MIRRAX_SECRET=SECRET)
        workers.add(1, JOIN, MIRRAX_SECRET_FILE=str(file))
        workers.expect_end(0, 0, within=LIMIT)
        for worker in workers:
            assert "joined 2" in worker.output and SECRET not in worker.output


@pytest.mark.parametrize(
    ("secrets", "text"),
    [
        ((SECRET, "quite another secret"), "worker 0 has a different secret"),
        ((SECRET, ""), "worker 0 has a secret, but this worker has none"),
        (("", SECRET), "this worker has a secret, but worker 0 has none"),
    ],
)
def test_another_secret_is_said_at_once_and_ends_nobody_else(
    secrets: tuple[str, str], text: str
):
    with start(JOIN, workers=2, missing=[0, 1]) as workers:
        workers.add(0, JOIN, MIRRAX_SECRET=secrets[0])
        workers[0].wait_for("waits for worker 1.")
        stranger = workers.add(1, JOIN, MIRRAX_SECRET=secrets[1])
        assert stranger.wait(LIMIT) == 1
        assert text in stranger.output and "MIRRAX_SECRET" in stranger.output
        assert not any(s and s in stranger.output for s in secrets)
        workers.add(1, JOIN, MIRRAX_SECRET=secrets[0])
        workers.expect_end(0, 1, 0, within=LIMIT)


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"MIRRAX_SECRET": "short"}, "has 5 characters; a secret needs at least 16"),
        ({"MIRRAX_SECRET_FILE": "/nowhere"}, "/nowhere (MIRRAX_SECRET_FILE) cannot be"),
        ({"MIRRAX_SECRET": SECRET, "MIRRAX_SECRET_FILE": "/x"}, "are both set"),
    ],
)
def test_a_secret_that_cannot_be_used_is_an_error(variables: dict[str, str], text: str):
    with pytest.raises(ValueError, match=re.escape(text)):
        read_secret(variables)


def test_where_the_roster_listens():
    assert addresses_of("127.0.0.1") == ["127.0.0.1"]
    assert addresses_of("localhost") == ["localhost"]
    assert addresses_of("203.0.113.1") == []  # of no machine
    assert addresses_of("no-such-host.invalid") == []
