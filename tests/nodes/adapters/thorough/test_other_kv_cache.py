"""Run tests of test_kv_cache.py on the families that it leaves out."""

from __future__ import annotations

from tests.loop import loop
from tests.nodes.adapters import test_kv_cache as quick

test_without_changes_a_merged_step_equals_the_models_own = loop(
    ("kind", "batch"),
    [(kind, batch) for kind in quick.SHOWN for batch in (1, 2) if batch == 1 or kind not in (*quick.FEW, *quick.ALONE)],
)(quick.test_without_changes_a_merged_step_equals_the_models_own.looped)

test_keys_are_propagated_as_their_destinations_change = loop(
    # families/test_qwen21.py tests Qwen-Image 2.1, because its text and image attend in separate calls.
    "kind",
    [kind for kind in quick.SHOWN if kind not in (*quick.FEW, "qwen_image21")],
)(quick.test_keys_are_propagated_as_their_destinations_change.looped)

test_presets_keep_keys_where_they_can = loop(
    "kind", [kind for kind in quick.LAYOUTS if kind not in quick.PRESET_KINDS]
)(quick.test_presets_keep_keys_where_they_can.looped)

test_of_videos_too = loop(
    ("kind", "frames"),
    [
        (kind, frames)
        for kind in ("wan", "hunyuan", "ltx", "ltx_av", "h3")
        for frames in (1, 3)
        if (kind, frames) not in quick.VIDEOS
    ],
)(quick.test_of_videos_too.looped)
