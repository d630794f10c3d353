"""`mirrax`, the command: `mirrax run` and `mirrax info`."""

from __future__ import annotations

import sys


def main() -> None:
    """The command's entry point."""
    try:
        from mirrax._src.command_line.commands import commands
    except ModuleNotFoundError as error:
        if error.name not in ("click", "rich"):
            raise
        sys.exit(
            f"The `mirrax` command needs {error.name}, which is not installed. "
            "Type: pip install 'mirrax[cli]'"
        )
    commands(prog_name="mirrax")
