"""How many random examples, and how: the same ones every time, none of them made smaller."""

from __future__ import annotations

import os

from hypothesis import Phase, settings

IS_THOROUGH = bool(os.environ.get("MIRRAX_THOROUGH"))


def examples(count: int) -> settings:
    """Runs a test on `count` random examples, or on a third of many without `MIRRAX_THOROUGH`.

    They are small already, and each new shape compiles, so a failing one is not shrunk.
    """
    if count > 5 and not IS_THOROUGH:
        count = max(5, count // 3)
    return settings(
        deadline=None,
        max_examples=count,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
    )
