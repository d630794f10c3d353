"""Shells complete what `mirrax` takes."""

from __future__ import annotations

import os
import subprocess

from click.shell_completion import ShellComplete
from helpers.waiting import SECONDS_TO_HANG

from mirrax._src.command_line.commands import commands

from .launching import ROOT, command_without_jax


def completions(*words: str) -> list[tuple[str, str]]:
    """What a shell offers for the last word, and of which kind."""
    asked = ShellComplete(commands, {}, "mirrax", "_MIRRAX_COMPLETE")
    found = asked.get_completions(list(words[:-1]), words[-1])
    return [(item.value, item.type) for item in found]


def test_commands_options_choices_and_files() -> None:
    assert {"run", "info"} <= {value for value, _ in completions("")}
    assert ("--workers", "plain") in completions("run", "--wor")
    assert completions("run", "--platform", "") == [("cpu", "plain"), ("gpu", "plain")]
    assert completions("run", "--workers", "2", "tra") == [("tra", "file")]
    assert completions("run", "--log-dir", "lo") == [("lo", "dir")]


def test_the_line_of_the_documentation() -> None:
    """`eval "$(_MIRRAX_COMPLETE=bash_source mirrax)"`, and what bash then calls."""
    found = []
    for asked in (
        {"_MIRRAX_COMPLETE": "bash_source"},
        {
            "_MIRRAX_COMPLETE": "bash_complete",
            "COMP_WORDS": "mirrax run --nod",
            "COMP_CWORD": "2",
        },
    ):
        done = subprocess.run(
            command_without_jax(),
            env={**os.environ, **asked},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_HANG,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout)
    assert "_MIRRAX_COMPLETE=bash_complete" in found[0] and "mirrax" in found[0]
    assert found[1].split() == ["plain,--nodes", "plain,--node-rank"]
