"""How many random examples, and how: the same ones every time, none of them made smaller."""

from __future__ import annotations

from hypothesis import Phase, settings


def examples(count: int) -> settings:
    """Runs a test on `count` random examples.

    They are small already, and each new shape compiles, so a failing one is not shrunk.
    """
    return settings(
        deadline=None,
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )
