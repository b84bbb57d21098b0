"""Two processes that sample a picture together: the cases that test_parallel.py leaves out."""

from __future__ import annotations

from tests.loop import loop
from tests.nodes.adapters import test_parallel as quick

pytestmark, found = quick.pytestmark, quick.found

KINDS = ("0-references", "1-references", "2-references", "odd", "module", "detail")
TOKENS = [case for way in ("raylight", "xdit") for kind in KINDS if (case := f"{way}-{kind}") not in quick.TOKENS]
CONDITIONS = ["flux-module", "unet-stack", "unet-module"]
COMPLETE = ["pictures-unet", "weights-flux"]

test_shared_tokens_are_not_merged = loop("name", TOKENS)(quick.test_shared_tokens_are_not_merged.looped)
test_shared_conditions_are_not_merged = loop("name", CONDITIONS)(quick.test_shared_conditions_are_not_merged.looped)
test_complete_pictures_are_merged_as_on_one_process = loop("name", COMPLETE)(
    quick.test_complete_pictures_are_merged_as_on_one_process.looped
)
