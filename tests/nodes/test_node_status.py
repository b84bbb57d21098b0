from types import SimpleNamespace
from typing import Any

import pytest

from scripts.comfy_pack import pack_module
from testbed import models
from tests.loop import loop

live = pack_module("nodes.node_status")
nodes = pack_module("nodes.toma")
Report = pack_module("nodes.report").ToMAReport

WORKFLOW = "0b5d6ba8-0000-4000-8000-000000000001"


def server(send: Any) -> Any:
    """Return a stand-in for ComfyUI's module `server`, in which a prompt of the client `page` runs."""
    extra = {"client_id": "page", "extra_pnginfo": {"workflow": {"id": WORKFLOW}}}
    queue = SimpleNamespace(get_current_queue_volatile=lambda: ([(0, "prompt", {}, extra, [], {})], []))
    instance = SimpleNamespace(prompt_queue=queue, send_sync=send, extra=extra)
    return SimpleNamespace(PromptServer=SimpleNamespace(instance=instance))


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any], str]]:
    """Record the messages to a stand-in for ComfyUI's server."""
    messages: list[tuple[str, dict[str, Any], str]] = []
    monkeypatch.setitem(live.sys.modules, "server", server(lambda *message: messages.append(message)))
    return messages


def patched(model: Any, ratio: float = 0.5, node_id: str | None = "12:5", **settings: Any) -> Any:
    hidden = SimpleNamespace(unique_id=node_id)
    everything = {"ratio": ratio, "min_tokens": 16, "skip_last_blocks": 0}
    return nodes._patched(model, "balanced", {**everything, **settings}, hidden)


def test_a_run_is_sent_twice_to_its_page(unet: Any, sent: list[Any]) -> None:
    model = patched(unet).args[0]
    assert sent == []
    models.sample(model, 24, 24, steps=2)
    (begin, end) = sent
    line = {"node": "12:5", "graph": WORKFLOW}
    lines = {"lines": [{"id": "active", "params": {}}], "more": []}
    assert begin == ("toma.said", {**line, "text": str(live.Status.ACTIVE()), "details": "", **lines}, "page")
    text = "On: 50 % of the tokens merged, 17 of 17 blocks, 2 of 2 steps\nAbout 16 % less work, counted"
    status = dict(end[1])
    assert [status.pop(name)[0]["id"] for name in ("lines", "more")] == ["on", "tokens"]
    details = status.pop("details").splitlines()
    assert details[0] == "tokens: 144 -> 72 (12 x 12), 36 -> 18 (6 x 6)"
    assert "merged steps: 1-2, at ratio 0.5" in details
    preset = status.pop("preset")
    assert status == {**line, "text": text, "run": True, "first_full": False}
    assert preset["preset"] == "balanced"
    assert preset["window_size"] == 8
    assert not preset.keys() & {"ratio", "min_tokens", "skip_last_blocks"}, "those are set"
    models.sample(model, 24, 24, steps=1)
    assert len(sent) == 4, "a model that ComfyUI took from its cache tells of the next run too"


def test_a_run_says_on_its_node_whether_its_first_step_was_full(unet: Any, sent: list[Any]) -> None:
    """The web page never times the first step, but counts a full first step as an unmerged step."""
    runs = ("1", {}, False), ("2", {"full_step_interval": 2}, True), ("3", {"start_percent": 0.5}, True)
    made = [patched(unet, node_id=node_id, **settings).args[0] for node_id, settings, _ in runs]
    for model, (node_id, _, full) in zip(made, runs, strict=True):
        models.sample(model, 24, 24, steps=4)
        assert (sent[-1][1]["node"], sent[-1][1]["first_full"]) == (node_id, full)


@pytest.mark.usefixtures("previews")
def test_a_failed_run_is_sent_and_reported_too(unet: Any, sent: list[Any]) -> None:
    def stop(step: int, *_: Any) -> None:
        raise RuntimeError("enough")

    model = patched(unet).args[0]
    with pytest.raises(RuntimeError, match="enough"):
        models.sample(model, 24, 24, steps=4, callback=stop)
    assert sent[-1][1]["text"].endswith("1 of 4 steps"), "work is counted of runs that end"
    text, sheet, _ = Report.execute(model, {}).args
    assert "1 of 4 steps" in text.splitlines()[0]
    assert sheet.isfinite().all()


def test_a_node_that_is_off_says_so_and_leaves_the_model(unet: Any, sent: list[Any]) -> None:
    answer = patched(unet, ratio=0.0)
    assert answer.args[0] is unet
    (message,) = answer.ui["toma"]
    lines = [{"id": "off_ratio", "params": {}}]
    off = {"text": "Off: the ratio is 0.", "details": "", "lines": lines, "more": []}
    assert message == {"graph": WORKFLOW, **off}
    (message,) = patched(unet, start_percent=0.5, end_percent=0.5).ui["toma"]
    assert message["text"] == "Off: start percent and end percent leave no step between them."
    assert patched(unet).ui is None


def test_an_error_stands_on_the_node_and_still_ends_the_prompt(unet: Any, sent: list[Any]) -> None:
    with pytest.raises(ValueError, match="window size is 0"):
        patched(unet, window_size=0)
    (message,) = sent
    assert message[1]["error"]
    assert message[1]["node"] == "12:5"
    assert message[1]["text"].startswith("window size is 0. Allowed: ")
    (refused,) = message[1]["lines"]
    assert refused["id"] == "out_of_range"
    assert refused["params"] == {
        **{"setting": "window_size", "value": "0", "kind": {"id": "a_whole_number", "params": {}}},
        **{"low": 2, "high": 64, "usual": 8},
    }


def test_a_measurement_says_which_run_it_is_at(sent: list[Any]) -> None:
    live.NodeStatus("7").measures(3, 12)
    assert sent[0][1]["text"] == "Measuring: run 3 of 12 ..."


def test_without_a_page_nothing_is_sent(unet: Any, sent: list[Any]) -> None:
    live.sys.modules["server"].PromptServer.instance.extra.pop("client_id")
    models.sample(patched(unet).args[0], 24, 24, steps=1)
    assert sent == []


def closed(*_: Any) -> None:
    raise RuntimeError("Event loop is closed")


@loop(
    ("module", "graph"),
    [
        (None, None),
        (SimpleNamespace(), None),  # not started
        (SimpleNamespace(PromptServer=SimpleNamespace(instance=SimpleNamespace(prompt_queue=1))), None),
        (server(closed), WORKFLOW),
    ],
)
def test_without_a_server_everything_works(module: Any, graph: Any, unet: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(live.sys.modules, "server", module)
    models.sample(patched(unet).args[0], 24, 24, steps=1)
    assert patched(unet, ratio=0.0).ui["toma"][0]["graph"] == graph
