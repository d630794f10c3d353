"""Whatever workers print: whole lines, in bounded memory, without waiting."""

from __future__ import annotations

import os
import pty
import re
import resource
import subprocess
from pathlib import Path

import pytest

from mirrax._src.command_line import screen

from .launching import Launcher, Process, wait_until


def test_lines_are_never_mixed(launcher: Launcher) -> None:
    done = launcher(
        """
        for i in range(3000):
            os.write(1, f"{me} {i} ".encode())
            os.write(1, b"x" * 50 + b"\\n")
        """,
        workers=3,
    )
    for worker in range(3):
        expected = [f"{worker} {i} " + "x" * 50 for i in range(3000)]
        assert done.lines_of(worker) == expected
    assert len(done.out.splitlines()) == 9000


def test_a_very_long_line_and_one_without_an_end(launcher: Launcher) -> None:
    done = launcher("sys.stdout.write('x' * 3_000_000 + '\\n' + 'the end')", workers=1)
    *pieces, end = done.lines_of(0)
    assert "".join(pieces) == "x" * 3_000_000
    assert end == "the end"


def test_progress_bars_show_their_last_state(launcher: Launcher) -> None:
    done = launcher(
        """
        for i in range(100):
            sys.stdout.write(f"\\r{i}%")
        print("\\r100%")
        print("windows\\r")
        sys.stdout.write("\\x1b[A\\x1b[2K" + "\\x1b[1mbold\\x1b[0m\\n")
        """,
        workers=1,
    )
    assert done.lines_of(0) == ["100%", "windows", "\x1b[1mbold\x1b[0m"]


def test_the_beginning_of_a_line_is_shown_when_its_end_does_not_come(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "_PATIENCE_SECONDS", 0.2)
    done = launcher(
        "print('loading...', end='', flush=True); time.sleep(0.8); print('done')",
        workers=1,
    )
    assert done.lines_of(0) == ["loading...", "done"]


def test_garbage_is_shown_as_text(launcher: Launcher, tmp_path: Path) -> None:
    done = launcher(
        "os.write(1, bytes(range(256)) * 40 + b'\\nafter\\n')",
        workers=1,
        log_dir=tmp_path / "logs",
    )
    assert done.code == 0
    assert done.lines_of(0)[-1] == "after"
    assert "\0" not in done.out and "\b" not in done.out
    log = (tmp_path / "logs/worker-0.log").read_bytes()
    assert log == bytes(range(256)) * 40 + b"\nafter\n"  # the log has all of it


def test_umlauts_are_whole_also_where_chunks_end(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "_CHUNK", 7)
    done = launcher("print('äöü€' * 20)", workers=1)
    assert done.lines_of(0) == ["äöü€" * 20]


def test_a_worker_may_close_its_output(launcher: Launcher) -> None:
    done = launcher(
        "print('before', flush=True); os.close(1); os.close(2); time.sleep(0.2)"
    )
    assert done.code == 0
    assert done.lines_of(1) == ["before"]


def test_much_output_is_fast_and_takes_no_memory(tmp_path: Path) -> None:
    body = """
        line = b"x" * 199 + b"\\n"
        for _ in range(250):
            os.write(1, line * 1000)
        """
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    with Process(tmp_path, body, "--workers", "2") as launched:
        assert launched.wait() == 0
    lines = launched.out.splitlines()
    assert len(lines) == 500_000
    assert {line[:11] for line in lines} == {"worker 0 | ", "worker 1 | "}
    assert {len(line) for line in lines} == {210}
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    assert peak == before or peak < 150 * 1024


def test_output_that_nobody_reads_any_more_ends_the_run(tmp_path: Path) -> None:
    body = """
        while True:
            print("again", flush=True)
            time.sleep(0.01)
        """
    read, write = os.pipe()
    with Process(tmp_path, body, "--workers", "2", stdout=write) as launched:
        os.close(write)
        assert os.read(read, 5) == b"worke"
        os.close(read)
        assert launched.wait() == -13


def test_a_closed_output_is_no_failure(tmp_path: Path) -> None:
    shell = ("sh", "-c", 'exec "$@" >&-', "sh")
    body = "print('hello')"
    with Process(tmp_path, body, "--workers", "2", before=shell) as launched:
        assert launched.wait() == 0
    assert launched.out == launched.err == ""


def test_a_slow_terminal_does_not_stop_the_workers(tmp_path: Path) -> None:
    body = f"""
        os.write(1, b"x" * 1_000_000 + b"\\n")
        open({str(tmp_path / "done")!r}, "w").close()
        """
    read, write = os.pipe()
    with Process(tmp_path, body, "--workers", "1", stdout=write) as launched:
        os.close(write)
        done = tmp_path / "done"
        wait_until(done.exists, lambda: "the worker waits for its output to be read")
        while os.read(read, 1 << 20):
            pass
        os.close(read)
        assert launched.wait() == 0


def test_on_a_terminal_the_prefix_has_a_colour(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm-256color")
        patch.delenv("NO_COLOR", raising=False)
        with Process(
            tmp_path, "print('hello')", "--workers", "2", stdout=theirs
        ) as launched:
            os.close(theirs)
            shown = read_all(ours)
            assert launched.wait() == 0
    colours = re.findall(r"\x1b\[0;(\d+)mworker (\d) \|\x1b\[0m hello", shown)
    assert sorted(worker for _, worker in colours) == ["0", "1"]
    assert len({colour for colour, _ in colours}) == 2


def read_all(descriptor: int) -> str:
    """What is written to a terminal until it is closed."""
    text = b""
    try:
        while chunk := os.read(descriptor, 4096):
            text += chunk
    except OSError:  # a terminal without a program
        pass
    os.close(descriptor)
    return text.decode()


def test_twelve_workers_are_aligned(launcher: Launcher) -> None:
    done = launcher("print('hello')", workers=12)
    assert "worker  3 | hello" in done.out and "worker 11 | hello" in done.out


def test_a_terminal_that_takes_no_lines_does_not_keep_the_launcher_alive(
    tmp_path: Path,
) -> None:
    read, write = os.pipe()
    body = "os.write(1, b'x' * 1_000_000 + b'\\n'); time.sleep(60)"
    with Process(tmp_path, body, "--workers", "1", stdout=write) as launched:
        os.close(write)
        assert os.read(read, 1) == b"w"
        launched.send(15)
        with pytest.raises(subprocess.TimeoutExpired):
            launched.process.wait(0.7)
        launched.send(15)
        assert launched.wait() == -15
        os.close(read)
