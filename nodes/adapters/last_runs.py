"""The last run of each ToMA node, for the report: a few entries, found by a text id that survives any copying."""

from __future__ import annotations

from collections import OrderedDict

from ...toma_core.stats import RunStats

_MAX_REPORTS = 32
_reports: OrderedDict[str, RunStats] = OrderedDict()


def keep(report_id: str, stats: RunStats) -> None:
    """Store a finished run; the oldest is dropped when there are too many."""
    _reports[report_id] = stats
    _reports.move_to_end(report_id)
    while len(_reports) > _MAX_REPORTS:
        _reports.popitem(last=False)


def last(report_id: str) -> RunStats | None:
    """The last finished run under this id, if it is still kept."""
    return _reports.get(report_id)
