"""`mirrax`, the command: `mirrax run`, `mirrax info` and `mirrax top`."""

from __future__ import annotations


def main() -> None:
    """The command's entry point."""
    from mirrax._src.command_line.commands import commands

    commands(prog_name="mirrax")
