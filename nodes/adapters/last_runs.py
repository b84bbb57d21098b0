"""Store the last run of each ToMA node for the report, by a text id that survives any copying."""

from __future__ import annotations

from collections import OrderedDict

from ...toma_core.stats import RunStats

_MAX_REPORTS = 32
_reports: OrderedDict[str, RunStats] = OrderedDict()


def keep(report_id: str, stats: RunStats) -> None:
    """Store a finished run; drop the oldest beyond the limit."""
    _reports[report_id] = stats
    _reports.move_to_end(report_id)
    while len(_reports) > _MAX_REPORTS:
        _reports.popitem(last=False)


def last(report_id: str) -> RunStats | None:
    """Return the last finished run under this id, None if it was dropped."""
    return _reports.get(report_id)
