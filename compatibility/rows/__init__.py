"""All rows, in the order of the table."""

from __future__ import annotations

from . import community, conditioning, guidance, images, patches, sampling, weights
from .table import TABLE

_GROUPS = [module.GROUP for module in (weights, patches, guidance, conditioning, images, sampling, community)]

ROWS = sorted(TABLE.rows, key=lambda row: _GROUPS.index(row.group))
