"""Messages are ids and values; their English text comes from one table."""

from __future__ import annotations

import pytest

from toma_core import reasons
from toma_core.reasons import Message, Reason, english


def test_a_message_is_its_id_and_values() -> None:
    message = Reason.TOO_FEW_TOKENS(least=256)
    assert message == Message(Reason.TOO_FEW_TOKENS, (("least", 256),))
    assert message != Reason.TOO_FEW_TOKENS(least=64)
    assert {message: 1}[Reason.TOO_FEW_TOKENS(least=256)] == 1
    assert message.json() == {"id": "too_few_tokens", "params": {"least": 256}}


def test_text_comes_from_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "labels": {"ratio": "share"},
        "messages": {
            "kv_too_large": "{needed:.1f} of {limit}",
            "setting": "{setting}: {value} {label.ratio}",
        },
    }
    monkeypatch.setattr(reasons, "english", lambda: table)
    assert str(Reason.KV_TOO_LARGE(needed=7.26, limit=2.0)) == "7.3 of 2"
    assert str(Reason.SETTING(setting="ratio", value=0.5)) == "share: 0.5 share"
    inner = Reason.KV_TOO_LARGE(needed=1, limit=2)
    nested = Reason.SETTING(setting="steps", value=(3, inner))
    assert str(nested) == "steps: 3, 1.0 of 2 share"
    assert nested.json()["params"]["value"] == [3, inner.json()]


def test_every_reason_has_an_english_text() -> None:
    assert {reason.value for reason in Reason} <= english()["messages"].keys()
