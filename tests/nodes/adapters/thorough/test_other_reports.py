"""Test the public reports that test_public_reports.py leaves out."""

from __future__ import annotations

from tests.loop import loop
from tests.nodes.adapters import test_public_reports as quick

lab = quick.lab

test_report = loop("tried", quick.THOROUGH)(quick.test_report.looped)
