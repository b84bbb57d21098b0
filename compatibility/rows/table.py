"""The one table that all rows go into."""

from __future__ import annotations

from ..row import Table

TABLE = Table()
row = TABLE.row
