"""The job's secret: what workers have to know to join it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from pathlib import Path

_VARIABLE, _FILE_VARIABLE = "MIRRAX_SECRET", "MIRRAX_SECRET_FILE"
_SHORTEST = 16


def read_secret(environment: Mapping[str, str] = os.environ) -> str:
    """The secret that the environment has, itself or in a file; "" if there is none.

    Raises:
        ValueError: If it cannot be read, or could be guessed.
    """
    secret, where = environment.get(_VARIABLE, ""), f"The environment's {_VARIABLE}"
    path = environment.get(_FILE_VARIABLE, "")
    if secret and path:
        raise ValueError(f"{_VARIABLE} and {_FILE_VARIABLE} are both set. Set one.")
    if path:
        where = f"The file {path} ({_FILE_VARIABLE})"
        try:
            secret = Path(path).read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{where} cannot be read: {error}.") from None
    elif not secret:
        return ""
    if len(secret) < _SHORTEST:
        raise ValueError(
            f"{where} has {len(secret)} characters; a secret needs at least {_SHORTEST} that "
            "nobody can guess: `python -c 'import secrets; print(secrets.token_hex())'`."
        )
    return secret


def secret_for_workers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables for workers that are started here: a new secret, unless they inherit one."""
    if environment.get(_VARIABLE) or environment.get(_FILE_VARIABLE):
        return {}
    return {_VARIABLE: secrets.token_hex(32)}
