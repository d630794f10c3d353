"""How a worker and the roster prove to each other that they know the job's secret.

Each side answers the other's challenge, a random number that is used once. The secret itself
never travels, and an answer is of no use in another connection, for another worker or for
the other side.
"""

from __future__ import annotations

import hmac
import secrets

VERSION = 2
LONGEST_LINE = 16 * 1024 * 1024


def new_challenge() -> str:
    """A number that nobody can guess."""
    return secrets.token_hex(32)


def proof_of(secret: str, side: str, worker: int, challenges: tuple[str, str]) -> str:
    """What `side`, "worker" or "roster", answers; the roster's challenge is the first."""
    text = f"mirrax roster {VERSION} {side} {worker} {' '.join(challenges)}"
    return hmac.new(secret.encode(), text.encode(), "sha256").hexdigest()


def is_proof(
    proof: str, secret: str, side: str, worker: int, challenges: tuple[str, str]
) -> bool:
    """Whether `side` has shown that it knows the secret."""
    expected = proof_of(secret, side, worker, challenges)
    return hmac.compare_digest(str(proof).encode(), expected.encode())
