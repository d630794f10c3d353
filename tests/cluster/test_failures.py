"""A worker that fails, stops or does something else: the others end, and say why.

All of them are real processes. The limits on time are for a busy machine: a lost worker is
usually reported in less than a second, and after three where nobody looks.
"""

from __future__ import annotations

import os
import re
import signal
import time
from textwrap import dedent

import pytest
from helpers.waiting import SECONDS_TO_HANG

from mirrax._src.cluster.pace import describe_silence

from . import workers as processes
from .workers import Workers

LIMIT = SECONDS_TO_HANG
FAILED = (43,)

SETUP = """
def sum_of(result):
    return float(np.asarray(strategy.experimental_local_results(result)[0]).sum())

def train(steps, fn):
    for i in range(steps):
        sum_of(strategy.run(fn, (jnp.ones(2),)))
        if i % 5 == 4:
            say("step", i + 1)
        time.sleep(0.01)

compiled = mx.function(all_sum)
strategy = join()
train(5, compiled)
"""


def start(
    script: str,
    workers: int = 2,
    heartbeat: float = 3,
    step_timeout: float = 4,
    debug: bool = False,
) -> Workers:
    """Workers that have taken a few steps together when `script` begins."""
    return processes.start(
        script,
        workers,
        setup=SETUP,
        MIRRAX_HEARTBEAT=str(heartbeat),
        MIRRAX_STEP_TIMEOUT=str(step_timeout),
        MIRRAX_DEBUG=str(int(debug)),
    )


def assert_named(workers: Workers, lost: int, *pieces: str) -> None:
    """All others have said which worker is lost, and where to look."""
    address, log = re.escape(workers.addresses[lost]), re.escape(str(workers[lost].log))
    for worker in workers:
        if worker.number != lost:
            name = rf"Worker {lost} \({address}, .*, its log is {log}\)"
            assert re.search(name, worker.output), workers.show()
            for piece in pieces:
                assert piece in worker.output, f"{piece!r} is not in\n{workers.show()}"


def in_order(lost: int, code: int | tuple[int, ...]) -> list[int | tuple[int, ...]]:
    """The exit codes of two workers, of which one was lost."""
    return [code if k == lost else FAILED for k in range(2)]


# A monitor that fails ---------------------------------------------------------------------------


def test_an_error_in_a_workers_own_monitor_is_told_to_all():
    script = """
        from mirrax._src.cluster.roster import Roster
        if me == 1:
            Roster._status = lambda self: 1 / 0
        train(10_000, compiled)
        """
    with start(script, heartbeat=SECONDS_TO_HANG) as workers:
        workers.expect_end(43, 43, within=LIMIT)
        assert_named(
            workers, 1, "has an internal error in its monitor: ZeroDivisionError"
        )
        assert "division by zero" in workers[1].output


# Killed --------------------------------------------------------------------------------------

PLACES = {
    "compiled steps": "train(10_000, compiled)",
    "eager steps": "train(10_000, all_sum)",
    "asleep": "time.sleep(1000)",
    "tracing": """
        def slow(x):
            if me == {lost}:
                time.sleep(1000)
            return all_sum(x * 2)
        train(1, mx.function(slow))
        """,
    "reading": """
        def slow(x):
            if me == {lost}:
                time.sleep(1000)
            return x
        data = mx.data.Dataset.range(100).filter(lambda x: True).map(slow).batch(2)
        for batch in strategy.distribute_datasets_from_function(lambda context: data):
            pass
        """,
    "agreeing": """
        if me == {lost}:
            time.sleep(1000)
        with strategy.scope():
            mx.Variable(1.0)
        """,
    # More than JAX computes while it is called; and the program ends without a look at it.
    "ending": """
        if me == {lost}:
            time.sleep(1000)
        strategy.run(mx.function(lambda x: all_sum(x @ x)), (jnp.ones((300, 300)),))
        """,
}


@pytest.mark.parametrize(
    ("place", "lost"),
    [
        *((place, number % 2) for number, place in enumerate(PLACES)),
        ("compiled steps", 1),
        ("eager steps", 0),
    ],
)
def test_a_killed_worker_ends_the_others_who_name_it(place: str, lost: int):
    with start(PLACES[place].replace("{lost}", str(lost))) as workers:
        workers.wait_for("step 5")
        time.sleep(1)  # its steps have been reported
        workers[lost].kill()
        workers.expect_end(*in_order(lost, -signal.SIGKILL), within=LIMIT)
        assert_named(workers, lost, "its process is gone", "last at step")


@pytest.mark.parametrize("lost", [[0], [2], [1, 2]], ids=str)
def test_killed_ones_of_three(lost: list[int]):
    with start("train(10_000, compiled)", workers=3) as workers:
        workers.wait_for("step 5")
        for k in lost:
            workers[k].kill()
        codes = [-signal.SIGKILL if k in lost else FAILED for k in range(3)]
        workers.expect_end(*codes, within=LIMIT)
        for worker in workers:
            if worker.number not in lost:
                found = re.search(rf"Worker {lost} \(.*\) has failed", worker.output)
                assert found, workers.show()


OUTPUTS = {
    "closed": "os.close(1); os.close(2)",
    "closed files": "sys.stdout.close(); sys.stderr.close()",
    "a broken pipe": """
        reader, writer = os.pipe()
        os.dup2(writer, 1), os.dup2(writer, 2), os.close(writer), os.close(reader)
        """,
    "a pipe that nobody reads": """
        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, bytes(4096))
        except BlockingIOError:
            os.set_blocking(writer, True)
        os.dup2(writer, 1), os.dup2(writer, 2)
        """,
}


@pytest.mark.parametrize("output", OUTPUTS)
def test_a_worker_that_cannot_print_ends_all_the_same(output: str):
    with start(dedent(OUTPUTS[output]) + "\ntime.sleep(1000)") as workers:
        workers.wait_for("step 5")
        time.sleep(0.3)
        workers[1].kill()
        workers.expect_end(43, -signal.SIGKILL, within=LIMIT)


def test_every_call_that_waits_for_a_lost_worker_says_so():
    script = """
    large = jnp.ones((300, 300))
    caller = mx.function(lambda x: strategy.run(all_sum, (x,)))
    calls = [
        lambda: strategy.reduce("SUM", jnp.ones(3), axis=None),
        lambda: strategy.gather(jnp.ones(3), axis=0),
        lambda: caller(jnp.ones(3)),
        lambda: strategy.run(lambda: all_sum(large @ large)),
    ]
    for call in calls:
        jax.block_until_ready(strategy.experimental_local_results(call()))
    say("ready")
    time.sleep(1)
    for call in calls:
        try:
            jax.block_until_ready(strategy.experimental_local_results(call()))
        except mx.errors.UnavailableError as error:
            say("lost", error.workers)
    try:
        with strategy.scope():
            mx.Variable(large)
    except mx.errors.UnavailableError as error:
        say("lost", error.workers)
    """
    with start(script) as workers:
        workers.wait_for("ready")
        workers[1].kill()
        workers.expect_end(0, -signal.SIGKILL, within=LIMIT)
        assert workers[0].output.count("lost (1,)") == 5, workers.show()


# Ended otherwise -----------------------------------------------------------------------------

ENDS = {
    "an exception": ("raise KeyError('no such thing')", 1, "KeyError: 'no such thing'"),
    "an exit": ("sys.exit(3)", 3, "has ended its program, while"),
    "an early end": ("sys.exit(0)", 0, "has ended its program, while"),
    "a bare exit": ("os._exit(5)", 5, "its process is gone"),
    "an abort": ("os.abort()", -signal.SIGABRT, "its process is gone"),
    "a segfault": (
        "import ctypes; ctypes.string_at(0)",
        -signal.SIGSEGV,
        "its process is gone",
    ),
    "a termination": (
        "signal.raise_signal(signal.SIGTERM)",
        -signal.SIGTERM,
        "its process is gone",
    ),
    "Ctrl-C": (
        "signal.raise_signal(signal.SIGINT)",
        -signal.SIGINT,
        "KeyboardInterrupt",
    ),
    "an error without text": (
        "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()",
        1,
        "has failed: Odd: ",
    ),
    "an error with a hook": (
        "sys.excepthook = lambda *error: None; raise KeyError('hidden')",
        1,
        "KeyError: 'hidden'",
    ),
    "an error and a thread": (
        "threading.Thread(target=time.sleep, args=[5]).start(); raise KeyError('oops')",
        1,
        "KeyError: 'oops'",
    ),
}


@pytest.mark.parametrize(
    ("end", "lost"), [*((end, 1) for end in ENDS), ("an exception", 0), ("an exit", 0)]
)
def test_how_a_worker_ended_is_said_by_the_others(end: str, lost: int):
    statement, code, message = ENDS[end]
    script = f"if me == {lost}:\n    {statement}\ntrain(10_000, compiled)"
    with start(script) as workers:
        workers.expect_end(*in_order(lost, code), within=LIMIT)
        assert_named(workers, lost, message)


def test_the_line_is_that_of_the_error_not_of_the_last_report():
    script = """
    if me == 1:
        time.sleep(1.5)  # this line is reported
        strategy.run(lambda: {}["no such thing"])
    train(10_000, compiled)
    """
    with start(script) as workers:
        workers.expect_end(*in_order(1, 1), within=LIMIT)
        text = (workers[1].log.parent / "train.py").read_text()
        before = text[: text.index('{}["no such thing"]')]
        assert_named(
            workers, 1, f"last at step 6, in train.py:{before.count(chr(10)) + 1}"
        )


@pytest.mark.parametrize(
    ("used", "why"),
    [
        (
            0.4,
            "the process was suspended, or the machine was overloaded or out of memory",
        ),
        (11.0, "one call kept Python busy, at "),
    ],
)
def test_a_worker_that_could_not_report_says_why(used: float, why: str):
    text = describe_silence(12.0, used, heartbeat=20.0)
    assert text.startswith(
        f"could not report for 12 s, in which it used {used:.0f} s of"
    )
    assert (
        f"processor time: {why}" in text and "After 20 s it is considered lost" in text
    )


def test_a_long_error_does_not_fill_the_logs_of_others():
    script = """
    if me == 1:
        raise ValueError("x" * 5_000_000)
    train(10_000, compiled)
    """
    with start(script) as workers:
        workers.expect_end(*in_order(1, 1), within=LIMIT)
        assert_named(workers, 1, "has failed: ValueError: xxx")
        assert len(workers[0].output) < 100_000


def test_workers_that_fail_alike_show_their_own_error_only():
    script = """
    with strategy.scope():
        mx.Variable(jnp.ones(me + 1))
    """
    with start(script) as workers:
        workers.expect_end(1, 1, within=LIMIT)
        for worker in workers:
            assert "ValueError: Workers make different variables" in worker.output
            assert "mirrax: " not in worker.output
            assert worker.output.count("Traceback") == 1


def test_the_server_killed_ends_all():
    # JAX aborts a process that has lost its coordination service, seldom before we end it.
    with start("train(10_000, compiled)") as workers:
        workers.wait_for("step 5")
        workers.kill_servers()
        codes = (*FAILED, -signal.SIGABRT)
        workers.expect_end(codes, codes, within=LIMIT)
        for worker in workers:
            assert re.search("roster|coordination service", worker.output)
            assert not re.search(r"Worker 0 \(.*\) is gone", worker.output)
        said = "".join(worker.output for worker in workers)
        assert "The roster is gone: the process that monitors the workers" in said


# Stopped -------------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [0, 1])
def test_a_stopped_worker_is_lost_after_the_heartbeat(lost: int):
    with start("train(10_000, compiled)") as workers:
        workers.wait_for("step 100")  # a second at least: its steps have been reported
        workers[lost].send(signal.SIGSTOP)
        begin = time.monotonic()
        assert workers[1 - lost].wait(LIMIT) in FAILED
        assert time.monotonic() - begin > 2
        workers[lost].send(signal.SIGCONT)
        # Without its server, and woken up, it may be JAX that ends it.
        workers.expect_end(*in_order(lost, (*FAILED, -6)), within=LIMIT)
        assert_named(workers, lost, "has not answered for 3 s", "last at step")


@pytest.mark.parametrize("which", ["all", "one"])
def test_what_was_stopped_for_a_while_goes_on(which: str):
    with start("train(200, compiled)") as workers:
        workers.wait_for("step 10")
        stopped = workers.all_processes() if which == "all" else [workers[1].pid]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(5 if which == "all" else 2)  # the heartbeat is 3
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        workers.expect_end(0, 0, within=LIMIT)


def test_python_kept_busy_for_less_than_the_heartbeat_is_no_failure():
    script = """
    import ctypes
    for k in (0, 1, 0):
        if me == k:
            ctypes.PyDLL(None).usleep(2_500_000)  # keeps the GIL
        train(5, compiled)
    """
    with start(script) as workers:
        workers.expect_end(0, 0, within=LIMIT)


# Somewhere else ------------------------------------------------------------------------------

DIFFERENT = {
    "functions": (
        "train(1, mx.function([lambda x: all_sum(x), lambda x: all_sum(x) + 1][me]))",
        ["<lambda>(float32[2])", "<lambda>(float32[2])"],
    ),
    "names": (
        """
        def forward(x): return all_sum(x)
        def backward(x): return all_sum(x)
        train(1, mx.function([forward, backward][me]))
        """,
        ["worker 0: forward(float32[2])", "worker 1: backward(float32[2])"],
    ),
    "shapes": (
        "strategy.run(compiled, (jnp.ones(me + 3),))",
        ["worker 0: all_sum(float32[3", "worker 1: all_sum(float32[4"],
    ),
    "dtypes": (
        "strategy.run(compiled, (jnp.ones(3, [jnp.float32, jnp.int32][me]),))",
        ["worker 0: all_sum(float32[", "worker 1: all_sum(int32["],
    ),
}


@pytest.mark.parametrize("what", [k for k in DIFFERENT if k != "functions"])
def test_in_debug_mode_different_programs_are_shown_before_they_run(what: str):
    script, sides = DIFFERENT[what]
    with start(script, debug=True) as workers:
        workers.expect_end(1, 1, within=LIMIT)
        for worker in workers:
            assert "The workers are about to run different programs" in worker.output
            for side in sides:
                assert side in worker.output, workers.show()


def test_different_programs_are_found_soon_after():
    script = """
    strategy.run(compiled, (jnp.ones(3, [jnp.float32, jnp.int32][me]),))
    try:
        train(10_000, compiled)
    except mx.errors.UnavailableError as error:
        say("caught", error.workers)
        raise
    """
    with start(script) as workers:
        workers.expect_end(43, 43, within=LIMIT)
        for worker in workers:
            assert "caught (1,)" in worker.output or "caught (0,)" in worker.output
            assert re.search("(ran different|run other) programs", worker.output)


ELSEWHERE = {
    "a reduction": 'strategy.reduce("SUM", jnp.ones(2), axis=None)',
    "a variable": "with strategy.scope(): mx.Variable(1.0)",
    "data": "next(iter(strategy.experimental_distribute_dataset("
    "mx.data.Dataset.range(8).batch(2))))",
    "nothing": "time.sleep(1000)",
}


@pytest.mark.parametrize("what", ELSEWHERE)
def test_a_worker_that_does_something_else_is_found_within_the_timeout(what: str):
    script = f"if me == 1: {ELSEWHERE[what]}\ntrain(10_000, compiled)"
    script = script.replace("if me == 1: with", "if me == 1:\n  with")
    with start(script, step_timeout=2) as workers:
        workers.expect_end(FAILED, FAILED, within=LIMIT)
        for worker in workers:
            late = r"has not arrived for (\d+) s, while worker"
            found = re.search(late, worker.output)
            assert found and int(found[1]) >= 2, worker.output
            assert re.search(r"Worker [01] \(.*last at step [56]", worker.output)


def test_a_worker_that_skips_a_step_is_found_when_it_ends():
    with start("train(10 - me, compiled)") as workers:
        workers.expect_end(FAILED, 0, within=LIMIT)
        assert_named(workers, 1, "has ended its program, while worker 0 waits for it")


def test_different_numbers_of_runs_that_send_nothing_are_found_at_the_end():
    script = """
    with strategy.scope():
        v = mx.Variable(0.0)
    def add():
        v.assign_add(1.0)
    for _ in range(5 + me):
        strategy.run([add, mx.function(add)][{kind}])
    say("v", v.numpy())
    time.sleep(2 * me)
    """
    for kind in range(2):
        with start(script.replace("{kind}", str(kind))) as workers:
            workers.expect_end(0, 43, within=LIMIT)
            assert "v 5.0" in workers[0].output and "v 6.0" in workers[1].output
            text = "ended after 11 calls of `run`, but worker 0 after 10"
            assert text in workers[1].output, workers.show()


def test_a_worker_that_is_busy_alone_for_long_accuses_nobody():
    script = """
    if me == 1:
        end = time.monotonic() + 6  # the timeout is 2
        while time.monotonic() < end:
            pass
    """
    with start(script, step_timeout=2) as workers:
        workers.expect_end(0, 0, within=LIMIT)
        assert all("mirrax: " not in worker.output for worker in workers)


# Data ----------------------------------------------------------------------------------------

DATA = """
Dataset, Policy = mx.data.Dataset, mx.data.experimental.AutoShardPolicy
def without_shards(data):
    options = mx.data.Options()
    options.experimental_distribute.auto_shard_policy = Policy.OFF
    return data.with_options(options)
def from_function(data):
    return strategy.distribute_datasets_from_function(lambda context: data)
KINDS = [
    lambda n: strategy.experimental_distribute_dataset(Dataset.range(n).batch(4)),
    lambda n: strategy.experimental_distribute_dataset(
        without_shards(Dataset.range(n).batch(4))
    ),
    lambda n: from_function(Dataset.range(n).batch(2)),
    lambda n: from_function(Dataset.range(n).filter(lambda x: True).batch(2)),
]
total = mx.function(lambda x: all_sum(jnp.sum(x)))
"""


def test_leaving_loops_over_data_is_no_failure_and_makes_no_noise():
    script = """
    for k in range(24):
        for i, batch in enumerate(KINDS[k % 4](400)):
            if (7 * i + 13 * me + k) % 5 == 0:
                time.sleep(0.002)
            sum_of(strategy.run(total, (batch,)))
            if i == k // 2:
                break
    say("left")
    """
    with start(DATA + dedent(script), step_timeout=2) as workers:
        workers.expect_end(0, 0, within=LIMIT)
        for worker in workers:
            assert worker.own_output == "step 5\nleft\n"


def test_programs_that_end_while_data_is_read_ahead_end_quietly():
    script = """
    def slow(x):
        time.sleep(0.2 * me)
        return x
    slow_data = Dataset.range(400).filter(lambda x: True).map(slow).batch(2)
    iterators = [iter(kind(400)) for kind in KINDS] + [iter(from_function(slow_data))]
    for iterator in iterators * 2:
        sum_of(strategy.run(total, (next(iterator),)))
    say("left")
    """
    with start(DATA + dedent(script)) as workers:
        workers.wait_for("left")
        workers.expect_end(0, 0, within=LIMIT)
        for worker in workers:
            assert worker.own_output == "step 5\nleft\n"


def test_data_that_is_longer_on_one_worker_says_so():
    script = """
    def numbers():
        yield from range(12 + 4 * me)
    data = Dataset.from_generator(numbers, output_signature=mx.TensorSpec((), "int32"))
    for batch in strategy.experimental_distribute_dataset(data.batch(4)):
        sum_of(strategy.run(total, (batch,)))
    """
    with start(DATA + dedent(script)) as workers:
        workers.expect_end(FAILED, FAILED, within=LIMIT)
        for worker in workers:
            assert "pass 1, step 3" in worker.output, workers.show()


def test_data_of_other_kinds_is_shown_side_by_side():
    script = """
    data = Dataset.range(10)
    data = data.map(lambda x: (x, x)) if me else data
    try:
        next(iter(from_function(data.filter(lambda *x: True).batch(2))))
    except ValueError as error:
        say(error)
    floats = Dataset.from_tensor_slices(np.zeros(10, ["float32", "int32"][me]))
    next(iter(from_function(floats.batch(2))))
    """
    with start(DATA + dedent(script)) as workers:
        workers.expect_end(1, 1, within=LIMIT)
        for worker in workers:
            assert "float32" in worker.output and "int32" in worker.output
            assert "worker 0" in worker.output and "worker 1" in worker.output


def test_an_error_in_the_data_of_one_worker_reaches_the_others():
    script = """
    def check(x):
        if me == 1 and x == 5:
            raise KeyError("bad record")
        return x
    for batch in from_function(Dataset.range(100).map(check).batch(2)):
        sum_of(strategy.run(total, (batch,)))
    """
    with start(DATA + dedent(script)) as workers:
        workers.expect_end(FAILED, 1, within=LIMIT)
        assert_named(workers, 1, "KeyError: 'bad record'")


def test_exit_codes_say_that_another_was_lost_whatever_the_program_does_at_its_end():
    script = """
    import atexit
    atexit.register(say, "at exit")
    if me == 1:
        sys.excepthook = lambda *error: say("its own hook")
    if me == 2:
        threading.Thread(target=time.sleep, args=[1]).start()
    train(10_000, compiled)
    """
    with start(script, workers=4) as workers:
        workers.wait_for("step 5")
        workers[3].kill()
        workers.expect_end(43, 43, 43, -signal.SIGKILL, within=LIMIT)
        assert "its own hook" in workers[1].output
        for worker in list(workers)[:3]:
            assert "at exit" in worker.output, workers.show()


# Users who know better -----------------------------------------------------------------------


def test_a_user_may_catch_the_error_and_clean_up():
    script = """
    try:
        train(10_000, compiled)
    except mx.errors.UnavailableError as error:
        say("lost", error.workers)
        time.sleep(4)  # longer than a process has that did not see the error
        say("cleaned")
        sys.exit(7)
    """
    with start(script) as workers:
        workers.wait_for("step 5")
        workers[1].kill()
        workers.expect_end(7, -signal.SIGKILL, within=LIMIT)
        assert "lost (1,)\ncleaned\n" in workers[0].output


def test_a_user_who_goes_on_gets_the_error_again():
    script = """
    for attempt in range(3):
        try:
            train(10_000, [compiled, all_sum, compiled][attempt])
        except mx.errors.UnavailableError as error:
            say("lost", error.workers)
    with strategy.scope():
        mx.Variable(1.0)
    """
    with start(script) as workers:
        workers.wait_for("step 5")
        workers[1].kill()
        workers.expect_end(43, -signal.SIGKILL, within=LIMIT)
        assert workers[0].output.count("lost (1,)") == 3
        assert_named(workers, 1)


def test_an_error_while_cleaning_up_shows_both():
    script = """
    try:
        train(10_000, compiled)
    finally:
        raise ValueError("while cleaning up")
    """
    with start(script) as workers:
        workers.wait_for("step 5")
        workers[1].kill()
        workers.expect_end(43, -signal.SIGKILL, within=LIMIT)
        assert_named(workers, 1, "ValueError: while cleaning up")


@pytest.mark.parametrize("fn", ["step", "mx.function(step)"])
def test_an_error_that_one_worker_catches_ends_in_a_named_wait(fn: str):
    script = f"""
    def step(x):
        if me == 1:
            raise ValueError("bad model")
        return all_sum(x)
    try:
        train(1, {fn})
    except ValueError:
        say("caught")
        time.sleep(1000)
    """
    with start(script, step_timeout=2) as workers:
        workers.expect_end(FAILED, FAILED, within=LIMIT)
        assert "caught" in workers[1].output
        assert_named(workers, 1, "has not arrived for ", "in train.py:")


def test_a_save_that_fails_on_the_first_worker_ends_all():
    script = """
    with strategy.scope():
        variable = mx.Variable(jnp.ones(3))
    mx.train.Checkpoint(v=variable).save("/proc/nowhere/checkpoint")
    train(10_000, compiled)
    """
    with start(script) as workers:
        workers.expect_end(1, 1, within=LIMIT)
        assert all("/proc/nowhere" in worker.output for worker in workers)


# Children ------------------------------------------------------------------------------------

FORK = """
import warnings
warnings.simplefilter("ignore")  # JAX's about forks
"""


def test_a_forked_child_does_not_speak_for_its_worker():
    script = """
    for ending in (sys.exit, None):
        child = os.fork()
        if child == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            ending() if ending else 1 / 0
        os.waitpid(child, 0)
    train(100, compiled)
    if me == 1:
        os._exit(5)
    train(100, compiled)
    """
    with start(FORK + dedent(script)) as workers:
        workers.expect_end(FAILED, 5, within=LIMIT)
        assert "step 100" in workers[0].output
        assert_named(workers, 1, "its process is gone")


def test_a_killed_worker_is_noticed_at_once_though_its_child_lives():
    script = """
    if os.fork() == 0:
        time.sleep(1000)
    train(10_000, compiled)
    """
    with start(FORK + dedent(script), heartbeat=60, step_timeout=60) as workers:
        workers.wait_for("step 10")
        workers[1].kill()
        assert workers[0].wait(LIMIT) in FAILED
        assert_named(workers, 1, "its process is gone")


# Stopping together ---------------------------------------------------------------------------


def test_all_workers_stop_at_the_same_step():
    script = """
    steps = 0
    while True:
        sum_of(strategy.run(compiled, (jnp.ones(2),)))
        steps += 1
        if me == 1 and steps == 20 or me == 2 and steps == 21:
            strategy.request_stop()
        time.sleep(0.001 * me)
        if strategy.should_stop():
            break
    say("stopped", steps)
    """
    with start(script, workers=3) as workers:
        workers.expect_end(0, 0, 0, within=LIMIT)
        last = {worker.own_output.splitlines()[-1] for worker in workers}
        assert len(last) == 1 and re.fullmatch(r"stopped 2\d", last.pop())
