"""A worker fails: which one, why, and what becomes of the others."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from .launching import Launcher, Process


def summary(err: str) -> str:
    """From the verdict on."""
    return err[err.index("Worker ") :]


def test_the_first_failure_is_shown_with_its_traceback_and_its_code(
    launcher: Launcher,
) -> None:
    done = launcher(
        """
        def train():
            raise ValueError("boom")
        meet()
        if me == 1:
            train()
        time.sleep(60)
        """,
        workers=3,
    )
    assert done.code == 1
    assert "mirrax: worker 1 has ended: exit code 1. The others get 0.3 s" in done.err
    assert "mirrax: still running and killed now: worker 0, 2." in done.err
    text = summary(done.err)
    assert re.match(
        r"Worker 1 failed first, \d+\.\d s after the start: ValueError: boom\.\n",
        text,
    )
    assert 'in train\n      raise ValueError("boom")\n  ValueError: boom\n' in text
    assert "Worker 0: was still running, and was killed; its log says where" in text
    assert "The workers' logs are in /" in text
    # Where the others were when they were killed.
    assert any("Fatal Python error: Aborted" in line for line in done.lines_of(0))


def test_logs_are_where_the_summary_says(launcher: Launcher) -> None:
    done = launcher("print('from', me); sys.exit(me)")
    match = re.search(r"logs are in (\S+)\.\n", done.err)
    assert match
    assert Path(match[1], "worker-1.log").read_text() == "from 1\n"


def test_a_consequence_is_not_blamed_though_it_ended_first(launcher: Launcher) -> None:
    done = launcher(
        """
        if me == 1:
            report("KeyError", "'lr'")
            open(__file__ + ".failed", "w").close()
            time.sleep(0.5)  # an interpreter may take long to end
            sys.exit(1)
        wait_for(__file__ + ".failed")
        report("UnavailableError", "worker 1 is gone", lost=[1])
        sys.exit(1 if me else 43)
        """,
        workers=3,
        grace_after_failure=5.0,
    )
    text = summary(done.err)
    assert done.code == 1
    assert text.startswith("Worker 1 failed first")
    assert "KeyError: 'lr'." in text and "Traceback of KeyError: 'lr'" in text
    assert "Worker 0: ended because another was lost (UnavailableError)" in text
    assert "Worker 2: ended because another was lost" in text
    assert "Traceback of UnavailableError" not in text


def test_exit_code_43_is_a_consequence_without_a_report(launcher: Launcher) -> None:
    done = launcher(
        """
        meet()
        if me == 0:
            sys.exit(43)
        wait_for_the_end_of(0)
        sys.exit(7)
        """,
        grace_after_failure=5.0,
    )
    assert done.code == 7
    assert "Worker 1 failed first" in done.err
    assert "Worker 0: ended because another was lost (exit code 43)" in done.err


def test_a_consequence_is_known_by_its_log_as_well(launcher: Launcher) -> None:
    done = launcher(
        """
        meet()
        if me == 1:
            wait_for_the_end_of(0)
            sys.exit(9)
        print("Traceback (most recent call last):\\n  File ...")
        print("mirrax.errors.UnavailableError: worker 1 is gone")
        sys.exit(1)
        """,
        grace_after_failure=5.0,
    )
    assert done.code == 9
    assert "Worker 1 failed first" in done.err
    assert (
        "Worker 0: ended because another was lost (mirrax.errors.Unavaila" in done.err
    )


def test_a_worker_that_reported_but_never_ended_is_blamed(launcher: Launcher) -> None:
    done = launcher(
        """
        if me == 1:
            report("MemoryError", "too much")
            open(__file__ + ".failed", "w").close()
            time.sleep(60)
        wait_for(__file__ + ".failed")
        report("UnavailableError", "worker 1 is gone", lost=[1])
        sys.exit(1)
        """
    )
    assert done.code == 1
    assert "Worker 1 failed first" in done.err
    assert "MemoryError: too much." in done.err


def test_a_stopped_worker_is_named_and_nothing_of_it_is_left(
    launcher: Launcher,
) -> None:
    done = launcher(
        """
        meet()
        if me == 1:
            print(os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_the_end_of(1)
        report("UnavailableError", "worker 1 has not answered for 20 s", lost=[1])
        sys.exit(1)
        """,
        grace_after_failure=60.0,  # not for what cannot end by itself
    )
    text = summary(done.err)
    assert done.code == 1
    assert "Worker 1 did not answer: its process was stopped (SIGSTOP). It was" in text
    assert "Worker 0 said:\n  Traceback of UnavailableError: worker 1 has not" in text
    assert not Path(f"/proc/{done.lines_of(1)[0]}").exists()


def test_a_stuck_worker_shows_where_it_was(launcher: Launcher) -> None:
    done = launcher(
        """
        def stuck_here():
            open(__file__ + ".stuck", "w").close()
            time.sleep(60)
        if me == 1:
            stuck_here()
        wait_for(__file__ + ".stuck")
        report("UnavailableError", "worker 1 is behind", lost=[1])
        sys.exit(1)
        """
    )
    text = summary(done.err)
    assert text.startswith("Worker 1 did not answer, and was killed")
    assert "in stuck_here" in text


def test_without_reports_the_one_that_did_not_end_is_the_lost_one(
    launcher: Launcher,
) -> None:
    done = launcher(
        """
        meet()
        if me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        wait_for_the_end_of(1)
        print("mirrax: worker 1 does not answer", flush=True)
        sys.exit(43)
        """
    )
    text = summary(done.err)
    assert done.code == 43
    assert text.startswith("Worker 1 did not answer: its process was stopped")
    assert "Worker 0 said:\n  mirrax: worker 1 does not answer" in text


def test_a_worker_that_ended_too_early_is_named(launcher: Launcher) -> None:
    done = launcher(
        """
        meet()
        if me == 1:
            sys.exit(0)
        wait_for_the_end_of(1)
        report("UnavailableError", "worker 1 has ended its program", lost=[1])
        sys.exit(1)
        """
    )
    text = summary(done.err)
    assert done.code == 1
    assert re.match(
        r"Worker 1 ended its program \d+\.\d s after the start, while", text
    )
    assert "Worker 0 said:\n  Traceback of UnavailableError" in text


def test_a_worker_that_was_told_that_it_is_the_lost_one(launcher: Launcher) -> None:
    done = launcher(
        """
        meet()
        report("UnavailableError", "worker 1 has not come", lost=[1])
        if me == 1:
            content = json.load(open(os.environ["MIRRAX_FAILURE"]))
            content["is_consequence"] = False
            json.dump(content, open(os.environ["MIRRAX_FAILURE"], "w"))
        sys.exit(43)
        """,
        grace_after_failure=5.0,
    )
    assert done.code == 43
    assert "Worker 1 failed first" in done.err
    assert "UnavailableError: worker 1 has not come (exit code 43)" in done.err


def test_a_long_message_is_cut_where_the_traceback_follows(launcher: Launcher) -> None:
    done = launcher("raise ValueError('x' * 1000)", workers=1)
    first_line = summary(done.err).splitlines()[0]
    assert first_line.endswith("xxx....") and len(first_line) < 250
    assert "x" * 1000 in done.err


def test_workers_that_fail_by_themselves_are_all_listed(launcher: Launcher) -> None:
    body = """
        meet()
        if me:
            wait_for_the_end_of(me - 1)
        sys.exit(10 + me)
        """
    done = launcher(body, workers=3, grace_after_failure=10.0)
    text = summary(done.err)
    assert done.code == 10
    assert text.startswith("Worker 0 failed first")
    assert "Worker 1: exit code 11" in text and "Worker 2: exit code 12" in text


@pytest.mark.parametrize(
    ("end", "code", "words"),
    [
        ("sys.exit(3)", 3, "exit code 3"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "signal SIGTERM (somebody"),
        ("import ctypes; ctypes.string_at(0)", 139, "SIGSEGV (native code crashed)"),
        ("os.abort()", 134, "signal SIGABRT (a check in native code failed)"),
        ("os.kill(os.getpid(), 34)", 162, "signal SIGRTMIN"),
        ("int('x')", 1, "ValueError: invalid literal for int() with base 10: 'x'"),
        ("print(1", 1, "SyntaxError: '(' was never closed"),
    ],
)
def test_how_a_process_can_end(
    end: str, code: int, words: str, launcher: Launcher
) -> None:
    done = launcher(end, workers=1)
    assert done.code == code
    assert words in done.err


def test_a_crash_in_native_code_shows_where_python_was(launcher: Launcher) -> None:
    done = launcher("def crash(): os.abort()\ncrash()", workers=1)
    assert "Its log ends with:" in done.err
    assert "in crash" in done.err


def test_an_unexpected_kill_is_explained(launcher: Launcher) -> None:
    done = launcher(
        "used = bytearray(200 << 20); os.kill(os.getpid(), signal.SIGKILL)", workers=1
    )
    assert done.code == 137
    assert "signal SIGKILL." in done.err
    assert "Mostly it is the kernel, out of memory" in done.err
    assert "It had used up to 0.2" in done.err


def test_a_kill_when_memory_ran_out_says_so(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = iter([4, 5])
    monkeypatch.setattr(
        "mirrax._src.command_line.exits.count_oom_kills", lambda: next(counts)
    )
    done = launcher("os.kill(os.getpid(), signal.SIGKILL)", workers=1)
    assert "ran out of memory: the kernel has killed" in done.err


def test_the_children_of_a_killed_worker_are_ended(launcher: Launcher) -> None:
    done = launcher(
        """
        children = [subprocess.Popen(["sleep", "100"]) for _ in range(2)]
        children.append(subprocess.Popen(["sleep", "100"], start_new_session=True))
        print(*(child.pid for child in children), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert done.code == 137
    for worker in range(2):
        for pid in done.lines_of(worker)[0].split():
            assert not Path(f"/proc/{pid}").exists()


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    body = """
        if os.fork() == 0:  # a child that has left its family
            os.setsid()
            time.sleep(100)
        subprocess.Popen(["sleep", "100"])
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        if me == 1:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(100)
        """
    with Process(tmp_path, body, "--workers", "2") as launched:
        launched.wait_for("ready", times=2)
        launched.send(signal.SIGKILL)
        assert launched.wait() == -signal.SIGKILL  # which also looks for what is left


def test_the_workers_end_when_their_keeper_is_killed(tmp_path: Path) -> None:
    body = "print(os.getppid(), flush=True); time.sleep(100)"
    with Process(tmp_path, body, "--workers", "2") as launched:
        launched.wait_for(" | ", times=2)
        keeper = int(launched.out.split("|")[1].split()[0])
        os.kill(keeper, signal.SIGKILL)
        assert launched.wait() == 1
        assert "The process that keeps the workers has ended" in launched.err
