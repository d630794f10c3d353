"""Exit codes as a shell gives them, and whether it was the memory."""

from __future__ import annotations

from pathlib import Path


def shell_code(returncode: int) -> int:
    """The code that a shell gives to such an end: 128 + the signal."""
    return returncode if returncode >= 0 else 128 - returncode


def count_oom_kills() -> int:
    """How many processes the kernel has killed for want of memory, as far as can be read."""
    return sum(map(_counter, [Path("/proc/vmstat"), *_cgroup_files()]))


def guess_about_kill(oom_kills: int, peak_bytes: int) -> str:
    """Who may have sent a SIGKILL that the launcher did not send."""
    used = f"It had used up to {peak_bytes / 2**30:.2f} GiB."
    if oom_kills:
        return (
            "The machine or its container ran out of memory: the kernel has killed "
            f"processes since the start. {used} Use smaller batches or fewer workers."
        )
    return (
        "The launcher did not do that. Mostly it is the kernel, out of memory (`dmesg` may "
        f"tell), or a scheduler's limit. {used}"
    )


def _cgroup_files() -> list[Path]:
    """Where this process's control groups count such kills, version 2 and version 1."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    root, found = Path("/sys/fs/cgroup"), []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            found.append(root / path.lstrip("/") / "memory.events")
        elif "memory" in controllers.split(","):
            found.append(root / "memory" / path.lstrip("/") / "memory.oom_control")
    return found


def _counter(path: Path) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith("oom_kill "))
