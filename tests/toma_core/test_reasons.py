"""Test the messages of `toma_core`, which consist of an id and values. The core has no texts for users."""

from toma_core.config import ConfigError, Refusal, shown
from toma_core.reasons import Message, Reason, json_of


def test_a_message_is_its_id_and_values() -> None:
    message = Reason.TOO_FEW_TOKENS(least=256)
    assert message == Message(Reason.TOO_FEW_TOKENS, (("least", 256),))
    assert message != Reason.TOO_FEW_TOKENS(least=64)
    assert {message: 1}[Reason.TOO_FEW_TOKENS(least=256)] == 1
    assert json_of(message) == {"id": "too_few_tokens", "params": {"least": 256}}


def test_alone_it_is_written_so() -> None:
    assert str(Reason.TILES()) == "tiles"
    error = ConfigError(Refusal.OUT_OF_RANGE(setting="ratio", value=2))
    assert str(error) == "ToMA: out_of_range: setting=ratio, value=2"
    by = (Reason.SETTING(setting="ratio", value=0.5), Reason.TILES())
    assert str(Reason.EVERY_STEP_FULL_BY(by=by)) == "every_step_full_by: by=(setting: setting=ratio, value=0.5, tiles)"


def test_a_value_is_shown_on_one_line_of_a_screen() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert shown("x" * 78) == f"'{'x' * 78}'"
    assert shown("x" * 79) == f"'{'x' * 59}... (81 characters)"
    assert shown(10**5000) == "a very large int"
