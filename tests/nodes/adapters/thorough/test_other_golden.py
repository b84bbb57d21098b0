"""Run the tests of test_golden.py on the cases that it leaves out."""

import pytest

from tests.loop import loop
from tests.nodes.adapters import test_golden as quick

golden, model_of, unsure = quick.golden, quick.model_of, quick.unsure

OTHERS = [case for case in quick.CASES if case not in quick.QUICK]
pytestmark = pytest.mark.skipif(quick.WRITE, reason="test_golden.py writes all cases")

test_without_toma = loop(("family", "run"), quick.runs_of(OTHERS))(quick.test_without_toma.looped)
test_run = loop("case", OTHERS)(quick.test_run.looped)
