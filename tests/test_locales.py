"""The texts of the nodes in the languages of ComfyUI's page: every key exists, and English texts are the nodes' own.

After a change of a node or of the config, write the English texts again, then translate the keys that this test names:

TOMA_WRITE_LOCALES=1 make test ARGS=tests/test_locales.py
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator
from typing import Any

from scripts.comfy_pack import load_pack
from scripts.comfy_server import ComfyServer
from scripts.comfyui import ROOT
from tests.loop import loop

LOCALES = ROOT / "locales"
LANGUAGES = ("en", "es", "fr", "ja", "ko", "pt-BR", "ru", "zh", "zh-TW")
TRANSLATED = tuple(language for language in LANGUAGES if language != "en")
# Words that are the same in any language: names and numbers.
NUMBER = re.compile(r"\d+(?:[.,]\d+)?")
QUOTED = re.compile(r"'([a-z][a-z -]*)'")

every_translation = loop("language", TRANSLATED)


def english() -> dict[str, Any]:
    """Return the nodes' own texts in the format of nodeDefs.json. ComfyUI translates names of types, so outputs named
    after their type have no text; its page shows the choices of a list untranslated."""

    async def listed() -> list[Any]:
        extension = await load_pack().comfy_entrypoint()
        return [node.GET_SCHEMA() for node in await extension.get_node_list()]

    return {
        schema.node_id: {
            "display_name": schema.display_name,
            "description": schema.description,
            "inputs": {item.id: described(item.display_name or item.id, item.tooltip) for item in schema.inputs},
            "outputs": {
                str(index): described(item.display_name, item.tooltip) for index, item in enumerate(schema.outputs)
            },
        }
        for schema in asyncio.run(listed())
    }


def described(name: str | None, tooltip: str | None) -> dict[str, str]:
    return {key: text for key, text in (("name", name), ("tooltip", tooltip)) if text}


def texts(language: str) -> dict[str, Any]:
    return json.loads((LOCALES / language / "nodeDefs.json").read_text(encoding="utf-8"))


def leaves(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield (dotted path, text) of every text."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from leaves(value, f"{path}.{key}" if path else key)
    else:
        yield path, tree


def test_languages() -> None:
    assert tuple(sorted(path.name for path in LOCALES.iterdir())) == LANGUAGES


def test_english_is_what_the_nodes_say() -> None:
    if os.environ.get("TOMA_WRITE_LOCALES"):
        (LOCALES / "en" / "nodeDefs.json").write_text(json.dumps(english(), indent=1) + "\n", encoding="utf-8")
    assert texts("en") == english()


@every_translation
def test_every_key_is_translated(language: str) -> None:
    wanted, found = dict(leaves(english())), dict(leaves(texts(language)))
    missing, superfluous = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    assert (missing, superfluous) == ([], []), f"locales/{language}/nodeDefs.json"
    same = [
        path
        for path, text in found.items()
        if text == wanted[path] and (path.endswith(("tooltip", "description")) or not text.strip())
    ]
    assert same == [], f"locales/{language}/nodeDefs.json: not translated"


@every_translation
def test_numbers_and_choices_are_those_of_the_nodes(language: str) -> None:
    """Translations have the current defaults and ranges, and quoted choices are those of the list."""
    found = dict(leaves(texts(language)))
    for path, text in leaves(english()):
        assert sorted(numbers(found[path])) == sorted(numbers(text)), f"{language}: {path}"
        for choice in QUOTED.findall(text):
            assert choice in found[path], f"{language}: {path}"


def numbers(text: str) -> list[str]:
    return [number.replace(",", ".") for number in NUMBER.findall(text)]


@loop("language", LANGUAGES)
def test_page_can_read_every_text(language: str) -> None:
    """vue-i18n interprets these characters."""
    for path, text in leaves(texts(language)):
        assert not set(text) & set("{}@|"), f"{language}: {path}"


def test_server_hands_them_out(server: ComfyServer) -> None:
    served = server.get("/i18n")
    for language in LANGUAGES:
        assert texts(language).items() <= served[language]["nodeDefs"].items()
