"""Test texts of nodes (locales) and of messages (web/i18n): every language of ComfyUI's page has every key."""

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from scripts.comfy_pack import load_pack, pack_module
from scripts.comfyui import ROOT

LOCALES, TABLES = ROOT / "locales", ROOT / "web" / "i18n"
LANGUAGES = ["en", "es", "fr", "ja", "ko", "pt-BR", "ru", "zh", "zh-TW"]
SCRIPT = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "web").glob("*.js")))
every_translation = pytest.mark.parametrize("language", LANGUAGES[1:])


def english() -> dict[str, Any]:
    """Return the nodes' own texts in the format of nodeDefs.json, without names of types and choices of lists."""

    async def listed() -> list[Any]:
        extension = await load_pack().comfy_entrypoint()
        return [node.GET_SCHEMA() for node in await extension.get_node_list()]

    return {
        schema.node_id: {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {item.id: described(item.display_name or item.id, item.tooltip) for item in schema.inputs},
            "outputs": {str(n): described(item.display_name, item.tooltip) for n, item in enumerate(schema.outputs)},
        }
        for schema in asyncio.run(listed())
    }


def described(name: str | None, tooltip: str | None) -> dict[str, str]:
    return {key: text for key, text in (("name", name), ("tooltip", tooltip)) if text}


def texts(language: str) -> dict[str, Any]:
    return json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))


def messages(language: str) -> dict[str, Any]:
    return json.loads((TABLES / f"{language}.json").read_text(encoding="utf-8"))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def numbers(text: str) -> list[str]:
    return sorted(number.replace(",", ".") for number in re.findall(r"\d+(?:[.,]\d+)?", text))


def gaps(text: str) -> list[str]:
    return sorted(gap for gap in re.findall(r"\{([\w.:]+)\}", text) if not gap.startswith("label."))


def test_languages() -> None:
    assert sorted(path.name for path in LOCALES.iterdir()) == LANGUAGES
    assert sorted(path.stem for path in TABLES.iterdir()) == LANGUAGES
    assert json.loads(re.findall(r"const LANGUAGES = (\[.*\])", SCRIPT)[0]) == LANGUAGES


def test_english_is_what_the_nodes_say() -> None:
    assert texts("en") == english()


def test_every_message_has_a_text_and_every_text_a_message() -> None:
    for name in ("benchmark", "calibrate", "node_status", "toma", "report", "adapters.registry"):
        pack_module(f"nodes.{name}")
    kinds = [pack_module("toma_core.reasons").MessageId]
    for kind in kinds:
        kinds += kind.__subclasses__()
    ids = [member.value for kind in kinds for member in kind]
    assert len(ids) == len(set(ids)), "an id has one meaning"
    assert {*ids, *re.findall(r'\bid: "(\w+)"', SCRIPT)} == set(messages("en")["messages"])


@every_translation
def test_every_text_is_translated(language: str) -> None:
    """Translations must have the same numbers, quoted choices and message parameters as the English text."""
    wanted, found = dict(leaves(english())), dict(leaves(texts(language)))
    assert set(found) ^ set(wanted) == set()
    for path, text in wanted.items():
        long = path.endswith(("tooltip", "description"))
        assert found[path].strip(), path
        assert not long or found[path] != text, f"{path}: not translated"
        assert numbers(found[path]) == numbers(text), path
        assert [choice for choice in re.findall(r"'([a-z][a-z -]*)'", text) if choice not in found[path]] == [], path
    wanted, found = messages("en")["messages"], messages(language)["messages"]
    assert set(found) ^ set(wanted) == set()
    for name, text in wanted.items():
        assert found[name].strip(), name
        assert gaps(found[name]) == gaps(text), name
        long = len(re.findall("[a-z]{4,}", re.sub(r"\{.*?\}", "", text))) > 2
        assert not long or found[name] != text, f"{name}: not translated"


@pytest.mark.parametrize("language", LANGUAGES)
def test_page_can_read_every_text(language: str) -> None:
    """Texts have no characters that vue-i18n interprets. Messages name inputs by the labels of their widgets."""
    assert [path for path, text in leaves(texts(language)) if set(text) & set("{}@|")] == []
    shown: dict[str, str] = {}
    for node in texts(language).values():
        for name, of_input in node["inputs"].items():
            shown.setdefault(name, of_input["name"])
    plain = {name: name.replace("_", " ") for name in shown}
    assert {**plain, **messages(language)["labels"]} == shown
