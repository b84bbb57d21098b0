"""Store the last run of each ToMA node for the report, by a text id that survives any copying."""

from __future__ import annotations

from ...toma_core.stats import RunStats

_MAX_REPORTS = 32
_reports: dict[str, RunStats] = {}  # the latest last


def keep(report_id: str, stats: RunStats) -> None:
    """Store a finished run; drop the oldest beyond the limit."""
    _reports.pop(report_id, None)
    _reports[report_id] = stats
    if len(_reports) > _MAX_REPORTS:
        del _reports[next(iter(_reports))]


def last(report_id: str) -> RunStats | None:
    """Return the last finished run under this id, None if it was dropped."""
    return _reports.get(report_id)
