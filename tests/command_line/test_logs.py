"""Logs of workers: where they are, how long they get, and disks that are full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from mirrax._src.cluster.keeper import Output

from .launching import Launcher


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be made: {error}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_is_said_once_and_ends_nobody(
    launcher: Launcher, small_disk: Path
) -> None:
    done = launcher(
        """
        for k in range(2000):
            print("x" * 200, flush=True)
        """,
        log_dir=small_disk,
    )
    assert done.code == 0, done.err
    assert done.err.count("cannot be written: No space left on device") == 1
    assert str(small_disk) in done.err and "Traceback" not in done.err


def test_a_disk_that_is_full_at_the_start_ends_nobody(
    launcher: Launcher, small_disk: Path
) -> None:
    Path(small_disk, "filler").write_bytes(bytes(64 * 1024))
    done = launcher("print('hello')", log_dir=small_disk)
    assert done.code == 0, done.err
    assert done.err.count("No space left on device") == 1
    assert "Traceback" not in done.err


def test_what_is_lost_is_counted_in_the_log(tmp_path: Path) -> None:
    log, full = tmp_path / "log", "/dev/full"
    log.symlink_to(full)
    output = Output(str(log), 1000)
    os.write(output.end, b"x" * 100)
    assert output.pump() and output.problem == "No space left on device"
    log.unlink()
    output._log = None  # as if the disk had room again
    os.write(output.end, b"later\n")
    os.close(output.end)
    assert not output.pump()
    assert log.read_text() == "\n=== 100 bytes could not be written here ===\nlater\n"


def test_logs_are_rotated_by_size_and_every_line_is_shown(
    launcher: Launcher, tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    done = launcher(
        """
        for k in range(300):
            print(f"line {k:04}", "x" * 90, flush=True)
            time.sleep(0.002)
        """,
        workers=1,
        log_dir=logs,
        log_bytes=10_000,
    )
    assert done.code == 0
    shown = [line.split()[1] for line in done.lines_of(0)]
    assert shown == [f"{k:04}" for k in range(300)]
    names = [f"worker-0.log{end}" for end in ("", ".1", ".2", ".3")]
    kept = sorted(p.name for p in logs.iterdir())
    assert kept == names[: len(kept)] and len(kept) > 1
    assert (logs / names[0]).read_text().splitlines()[-1].startswith("line 0299")


def test_as_many_logs_are_kept_as_are_said(tmp_path: Path) -> None:
    output = Output(str(tmp_path / "log"), 1000)
    for k in range(60):
        os.write(output.end, f"line {k:04} {'x' * 89}\n".encode())
        assert output.pump()
        assert (
            (tmp_path / "log").read_text().splitlines()[-1].startswith(f"line {k:04}")
        )
    names = ["log", "log.1", "log.2", "log.3"]
    assert sorted(p.name for p in tmp_path.iterdir()) == names
    kept = "".join((tmp_path / name).read_text() for name in reversed(names))
    numbers = [int(line.split()[1]) for line in kept.splitlines()]
    assert numbers == list(range(60 - len(numbers), 60)) and len(numbers) > 30
    assert all(path.stat().st_size <= 1100 for path in tmp_path.iterdir())


def test_a_line_that_comes_in_pieces_stays_in_one_log(tmp_path: Path) -> None:
    output = Output(str(tmp_path / "log"), 1000)
    for k in range(60):
        for piece in (f"line {k:04}", " ", "x" * 89, "\n"):
            os.write(output.end, piece.encode())
            assert output.pump()
    logs = [path.read_text() for path in tmp_path.iterdir()]
    assert len(logs) == 4
    assert all(text.startswith("line") and text.endswith("\n") for text in logs)


def test_a_line_without_end_is_rotated_too(tmp_path: Path) -> None:
    output = Output(str(tmp_path / "log"), 1000)
    for k in range(100):
        os.write(output.end, f"{k:04}{'x' * 95}\r".encode())
        assert output.pump()
    assert len(list(tmp_path.iterdir())) == 4
    assert all(path.stat().st_size <= 2200 for path in tmp_path.iterdir())
    assert (tmp_path / "log").read_bytes().endswith(b"0099" + b"x" * 95 + b"\r")


def test_by_default_logs_are_in_the_state_directory(
    launcher: Launcher, temporary: Path
) -> None:
    runs = temporary / "state" / "mirrax" / "runs"
    for k in range(30):
        (runs / f"2020-01-01-00-00-{k:02}-99999999").mkdir(parents=True)
    done = launcher("print('to the log'); sys.exit(3)", workers=1)
    assert done.code == 3
    (found,) = (p for p in runs.iterdir() if not p.name.startswith("2020-01-01"))
    assert f"The workers' logs are in {found}." in done.err
    assert (found / "worker-0.log").read_text() == "to the log\n"
    assert len(list(runs.iterdir())) == 20  # the newest ones
