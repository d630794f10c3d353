"""Flax Linen: its BatchNorm with `axis_name="replica"` counts every row once."""

from __future__ import annotations

from flax.linen import normalization

from mirrax._src.integrations.flax_norm import synchronised

normalization._compute_stats = synchronised(normalization._compute_stats)
