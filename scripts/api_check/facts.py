"""Read a folder of ComfyUI, and find a fact on each part that the pack uses: a line of text, such as a signature."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from scripts.api_check.families import PART_HOMES, Family
from scripts.api_check.source import Found, Function, Module, Source, signature_of
from scripts.api_check.uses import Use, Uses
from scripts.comfyui import is_comfyui

GONE = "gone"
UNSEEN = "not in this folder"  # the folder has only some files of a ComfyUI
# Methods of PyTorch's modules, which no class of ComfyUI defines.
PYTORCH = {"modules", "named_modules", "children", "named_children", "parameters", "named_parameters", "buffers"}
_WRAPPED = ("comfy.samplers", "comfy.model_base", "comfy.sampler_helpers")
_COMPILE = "comfy_api.torch_helpers.torch_compile"
# Files that are searched for keys and attributes in addition to the files of models.
_FILES = (*_WRAPPED, "comfy.model_patcher", "comfy.context_windows", "comfy.controlnet", "comfy.hooks", _COMPILE)

Facts = dict[str, str]  # by item, see `Use`


def facts_of(root: Path, uses: Uses, families: Mapping[str, Family]) -> Facts:
    """Return a fact of the ComfyUI in a folder for each use: GONE, UNSEEN or the text that was read."""
    return _Reader(root, families).facts(uses.values())


class _Reader:
    def __init__(self, root: Path, families: Mapping[str, Family]) -> None:
        self.source, self.partial = Source(root), not is_comfyui(root)
        self.models = {name: list(self._models(family)) for name, family in families.items()}
        homes = [found.module.name for models in self.models.values() for found in models]
        self.files = list(dict.fromkeys([*_FILES, "comfy.ldm.modules.attention", *homes]))

    def _models(self, family: Family) -> Iterator[Found]:
        """Yield the class of a family's model, and the classes derived from it, in whatever file they are."""
        first = self.source.find(family.models[0])
        if first is not None:
            yield first
        for name in family.models[1:]:
            yield from (
                Found(module, node)
                for module in self.source.modules("comfy.ldm", rf"(?m)^class {name}\b")
                if isinstance(node := module.names.get(name), ast.ClassDef)
            )

    def facts(self, uses: Iterable[Use]) -> Facts:
        return {use.item: getattr(self, f"_{use.kind}")(use) for use in uses}

    def _found(self, dotted: str) -> Found | None:
        return self.source.find(dotted)

    def _missing(self, dotted: str) -> str:
        """Return the text for a name that was not found: UNSEEN if the folder lacks the file that would define the
        name, otherwise GONE."""
        owner = self._found(dotted.rpartition(".")[0])
        unseen = self.source.lacks(dotted) or (owner is not None and self.source.lacks_bases(owner))
        return UNSEEN if self.partial and unseen else GONE

    def _name(self, use: Use) -> str:
        head, _, option = use.subject.rpartition(".")
        if head == "comfy.cli_args.args":  # argparse makes these attributes from options
            module = self.source.module("comfy.cli_args")
            if module is not None:
                return "option" if f"--{option.replace('_', '-')}" in module.texts else GONE
        found = self._found(use.subject)
        if found is None:
            return self._missing(use.subject)
        if isinstance(found.node, ast.ClassDef):
            return "class"
        if isinstance(found.node, ast.Module):
            return "module"
        if isinstance(found.node, Function):
            properties = {"property", "cached_property", "functools.cached_property"}
            named = {ast.unparse(each) for each in found.node.decorator_list}
            return "value" if named & properties else "function"
        return "value"

    def _call(self, use: Use) -> str:
        found = self._found(use.subject)
        if found is None:
            return self._missing(use.subject)
        if isinstance(found.node, ast.ClassDef):
            init = self.source.member(found, "__init__")
            if init is not None and isinstance(init.node, Function):
                return f"({signature_of(init.node, bound=True)})"
            fields = [
                node.target.id + "=" * (node.value is not None)
                for each in reversed(self.source.mro(found))
                for node in ast.iter_child_nodes(each.node)
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
            ]
            return f"({', '.join(dict.fromkeys(fields))})"
        if isinstance(found.node, Function):
            owner = self._found(use.subject.rpartition(".")[0])
            bound = owner is not None and isinstance(owner.node, ast.ClassDef)
            return f"({signature_of(found.node, bound)})"
        return "a value that is called"

    def _wrapper(self, use: Use) -> str:
        modules = [module for name in _WRAPPED if (module := self.source.module(name)) is not None]
        calls = [call for module in modules for call in _executed(module, use.subject)]
        if not calls:
            return UNSEEN if self.partial and len(modules) < len(_WRAPPED) else GONE
        return "; ".join(f"({call})" for call in dict.fromkeys(calls))

    def _block(self, use: Use) -> str:
        return self._of_model(use, self._blocks)

    def _loop(self, use: Use) -> str:
        return self._of_model(use, self._loops)

    def _of_model(self, use: Use, describe: object) -> str:
        family, _, rest = use.subject.partition(" ")
        name, _, attribute = rest.partition(".")
        classes = [found for found in self.models[family] if _name_of(found) == name]
        if name in PART_HOMES:
            classes = [found for found in [self._found(PART_HOMES[name])] if found is not None]
        if not classes:
            return UNSEEN if self.partial else GONE
        return "; ".join(dict.fromkeys(describe(each, attribute) for each in classes))  # type: ignore[operator]

    def _blocks(self, model: Found, attribute: str) -> str:
        made = self.source.member(model, attribute)
        if made is None:
            return UNSEEN if self.partial and self.source.lacks_bases(model) else GONE
        kinds = []
        for block in self.source.classes_in(made, model):
            forward = self.source.member(block, "forward")
            if forward is not None and isinstance(forward.node, Function):
                kinds.append(f"{_name_of(block)}({signature_of(forward.node, bound=True)})")
        return "; ".join(dict.fromkeys(kinds)) or (UNSEEN if self.partial else "of an unknown class")

    def _loops(self, model: Found, attribute: str) -> str:
        """Return the methods of a model that iterate over a list of its blocks."""
        names = []
        for each in self.source.mro(model):
            for method in ast.iter_child_nodes(each.node):
                if isinstance(method, Function) and method.name != "__init__":
                    reads = any(ast.unparse(n) == f"self.{attribute}" for n in ast.walk(method) if hasattr(n, "attr"))
                    if reads and any(isinstance(node, ast.For) for node in ast.walk(method)):
                        names.append(method.name)
        return ", ".join(sorted(set(names))) or (UNSEEN if self.partial and self.source.lacks_bases(model) else GONE)

    def _path(self, use: Use) -> str:
        """Follow the path of attributes from a model, up to the first attribute whose class is not ComfyUI's."""
        family, _, path = use.subject.partition(" ")
        models = self.models[family]
        if not models:
            return UNSEEN if self.partial else GONE
        if any(self._leads(found, path) for found in models):
            return "there"
        return UNSEEN if self.partial and any(map(self.source.lacks_bases, models)) else GONE

    def _leads(self, model: Found, path: str) -> bool:
        owners = [model]
        for part in path.split("."):
            name = part.partition("[")[0]
            if name in PYTORCH:
                return True
            made = [(owner, hit) for owner in owners if (hit := self.source.member(owner, name)) is not None]
            if not made:
                return False
            owners = [kind for owner, hit in made for kind in self.source.classes_in(hit, owner)]
            owners = [kind for kind in owners if self.source.mro(kind)]
            if not owners:
                return True
        return True

    def _derived(self, use: Use) -> str:
        models = self.models[use.subject]
        if not models:
            return UNSEEN if self.partial else GONE
        bases, names = [_name_of(models[0])], list[str]()
        for base in bases:  # the loop adds to the list
            pattern = rf"(?ms)^class \w+\([^)]*\b{base}\b"
            for module in self.source.modules("comfy", pattern):
                for node in module.names.values():
                    chain = self.source.mro(Found(module, node)) if isinstance(node, ast.ClassDef) else []
                    if models[0] in chain[1:] and _name_of(chain[0]) not in names:
                        names.append(_name_of(chain[0]))
                        bases.append(names[-1])
        return ", ".join(sorted(names)) or "none"

    def _key(self, use: Use) -> str:
        found = self._files_with(lambda module: use.subject in module.texts)
        return self._files_with(lambda module: use.subject in module.keywords) if found in (GONE, UNSEEN) else found

    def _trait(self, use: Use) -> str:
        return self._files_with(lambda module: use.subject in module.attributes or use.subject in module.texts)

    def _files_with(self, has: Callable[[Module], bool]) -> str:
        modules = [module for name in self.files if (module := self.source.module(name)) is not None]
        return ", ".join(module.name for module in modules if has(module)) or (UNSEEN if self.partial else GONE)


def _name_of(found: Found) -> str:
    return str(getattr(found.node, "name", ""))


def _executed(module: Module, kind: str) -> Iterator[str]:
    """Yield the arguments that a module passes to wrappers of this kind."""
    for function in ast.walk(module.tree):
        if not isinstance(function, Function):
            continue
        if not any(isinstance(node, ast.Attribute) and node.attr == kind for node in ast.walk(function)):
            continue
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "execute":
                named = [f"{each.arg}=" if each.arg else f"**{ast.unparse(each.value)}" for each in node.keywords]
                yield ", ".join([*map(ast.unparse, node.args), *named])
