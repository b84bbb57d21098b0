"""The table of all rows."""

from __future__ import annotations

from ..row import Table

TABLE = Table()
row = TABLE.row
