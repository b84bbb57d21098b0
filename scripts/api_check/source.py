"""Look up names, classes and signatures in a folder of Python files without importing them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Function = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(eq=False)
class Module:
    """A parsed Python file."""

    name: str  # dotted
    tree: ast.Module
    package: str  # the package at which relative imports begin
    names: dict[str, ast.AST | str] = field(default_factory=dict)  # definitions, or the dotted name of an import
    stars: list[str] = field(default_factory=list)  # modules of `from x import *`

    def __post_init__(self) -> None:
        self._bind(self.tree.body)

    def _bind(self, body: list[ast.stmt]) -> None:
        for node in body:
            if isinstance(node, (ast.ClassDef, *Function)):
                self.names[node.name] = node
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    short = alias.name.partition(".")[0]
                    self.names[alias.asname or short] = alias.name if alias.asname else short
            elif isinstance(node, ast.ImportFrom):
                home = self.home_of(node)
                for alias in node.names:
                    if alias.name == "*":
                        self.stars.append(home)
                    else:
                        self.names[alias.asname or alias.name] = f"{home}.{alias.name}"
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    for name in ast.walk(target):
                        if isinstance(name, ast.Name):
                            self.names.setdefault(name.id, node)
            else:
                for inner in ("body", "orelse", "finalbody"):
                    self._bind(getattr(node, inner, []))
                for handler in getattr(node, "handlers", []):
                    self._bind(handler.body)

    def home_of(self, node: ast.ImportFrom) -> str:
        """Return the dotted name of the module from which an import takes names."""
        if not node.level:
            return node.module or ""
        parts = self.package.split(".")
        return ".".join([*parts[: len(parts) - node.level + 1], *([node.module] if node.module else [])])

    @cached_property
    def texts(self) -> frozenset[str]:
        """The string constants in the file."""
        constants = (node.value for node in ast.walk(self.tree) if isinstance(node, ast.Constant))
        return frozenset(text for text in constants if isinstance(text, str))

    @cached_property
    def keywords(self) -> frozenset[str]:
        """Names by which calls in the file pass arguments."""
        return frozenset(node.arg for node in ast.walk(self.tree) if isinstance(node, ast.keyword) and node.arg)

    @cached_property
    def functions(self) -> list[tuple[ast.AST, list[ast.AST]]]:
        """Functions in the file, each with all nodes inside."""
        return [(node, list(ast.walk(node))) for node in ast.walk(self.tree) if isinstance(node, Function)]

    @cached_property
    def attributes(self) -> frozenset[str]:
        """The names of the attributes that the file reads or sets."""
        return frozenset(node.attr for node in ast.walk(self.tree) if isinstance(node, ast.Attribute))


@dataclass(frozen=True)
class Found:
    """The definition to which a dotted name leads. node: for a module, the tree of the module."""

    module: Module
    node: ast.AST


class Source:
    """A folder of Python files."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._modules: dict[str, Module | None] = {}
        self._chains: dict[int, list[Found]] = {}

    def module(self, name: str) -> Module | None:
        """Return the module of a dotted name, None if the folder has no file for it."""
        if name not in self._modules:
            self._modules[name] = self._parsed(name)
        return self._modules[name]

    def _parsed(self, name: str) -> Module | None:
        base = self.root.joinpath(*name.split("."))
        for file, package in ((base / "__init__.py", name), (base.with_suffix(".py"), name.rpartition(".")[0])):
            if name and file.is_file():
                return Module(name, ast.parse(file.read_text(encoding="utf-8")), package)
        return None

    def modules(self, package: str, pattern: str = "") -> Iterator[Module]:
        """Yield each module below a package if the pattern is found in the module's text."""
        for file in sorted(self.root.joinpath(*package.split(".")).rglob("*.py")):
            if re.search(pattern, file.read_text(encoding="utf-8")):
                parts = file.relative_to(self.root).with_suffix("").parts
                module = self.module(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
                if module is not None:
                    yield module

    def lacks(self, dotted: str) -> bool:
        """Return whether the folder lacks the file that would define a name."""
        for module, rest in self._prefixes(dotted):
            if module is not None:
                bound = module.names.get(rest[0]) if rest else None
                return bool(module.stars) or (isinstance(bound, str) and bound != dotted and self.lacks(bound))
        return True

    def lacks_bases(self, found: Found) -> bool:
        """Return whether the folder lacks the file of one of the class's bases from ComfyUI."""
        for each in self.mro(found):
            for base in getattr(each.node, "bases", []):
                bound = each.module.names.get(ast.unparse(base).partition(".")[0])
                if isinstance(bound, str) and bound.startswith("comfy") and self.scoped(each.module, base) is None:
                    return True
        return False

    def _prefixes(self, dotted: str) -> Iterator[tuple[Module | None, list[str]]]:
        parts = dotted.split(".")
        for count in range(len(parts), 0, -1):
            yield self.module(".".join(parts[:count])), parts[count:]

    def find(self, dotted: str, depth: int = 0) -> Found | None:
        """Return the definition to which a dotted name leads through imports and base classes, or None if there is
        none."""
        if depth > 20:
            return None
        for module, rest in self._prefixes(dotted):
            if module is None:
                continue
            if not rest:
                return Found(module, module.tree)
            found = self._in_module(module, rest[0], depth + 1)
            for part in rest[1:]:
                found = None if found is None else self._inside(found, part, depth + 1)
            if found is not None:
                return found
        return None

    def _in_module(self, module: Module, name: str, depth: int) -> Found | None:
        bound = module.names.get(name)
        if isinstance(bound, str):
            return self.find(bound, depth) if bound != f"{module.name}.{name}" else None
        if bound is not None:
            return Found(module, bound)
        return next((hit for star in module.stars if (hit := self.find(f"{star}.{name}", depth))), None)

    def _inside(self, found: Found, name: str, depth: int) -> Found | None:
        if isinstance(found.node, ast.Module):
            return self._in_module(found.module, name, depth)
        if isinstance(found.node, ast.ClassDef):
            return self.member(found, name)
        # `found` is an alias of a class, or an instance: search its class.
        return next((hit for each in self.classes_in(found) if (hit := self.member(each, name))), None)

    def scoped(self, module: Module, node: ast.AST) -> Found | None:
        """Return the definition to which a name or a dotted name in a module's code leads."""
        root, _, rest = ast.unparse(node).partition(".")
        if not all(part.isidentifier() for part in (root, *rest.split(".")) if part):
            return None
        found = self._in_module(module, root, 0)
        for part in rest.split(".") if rest else ():
            found = None if found is None else self._inside(found, part, 0)
        return found

    def mro(self, found: Found) -> list[Found]:
        """Return a class and its bases, as far as they are in the folder."""
        if id(found.node) in self._chains:
            return self._chains[id(found.node)]
        chain, queue = list[Found](), [found]
        while queue:
            each = queue.pop(0)
            if isinstance(each.node, ast.ClassDef) and each not in chain:
                chain.append(each)
                bases = (self.scoped(each.module, base) for base in each.node.bases)
                queue += [base for base in bases if base is not None]
        self._chains[id(found.node)] = chain
        return chain

    def member(self, found: Found, name: str) -> Found | None:
        """Return the definition of a member of a class or of its instances."""
        for each in self.mro(found):
            for node in ast.iter_child_nodes(each.node):
                if isinstance(node, (ast.ClassDef, *Function)) and node.name == name:
                    return Found(each.module, node)
                if isinstance(node, ast.Assign | ast.AnnAssign) and name in _targets(node):
                    return Found(each.module, node)
            at = f"self.{name}", f"cls.{name}", f"{each.node.name}.{name}"  # type: ignore[attr-defined]
            for node in ast.walk(each.node):
                if isinstance(node, ast.Assign | ast.AnnAssign) and not _targets(node).isdisjoint(at):
                    return Found(each.module, node)
                if isinstance(node, ast.Call) and ast.unparse(node).startswith(f"self.register_buffer('{name}'"):
                    return Found(each.module, node)
        return None

    def classes_in(self, found: Found, owner: Found | None = None) -> list[Found]:
        """Return the classes of the objects that a definition makes. These are classes that the definition's value
        calls or names, and classes of objects that the enclosing function appends to the value. A parameter of the
        enclosing function stands for its default, and for the values that derived classes pass.

        owner: the class in which the definition was looked up. It may be derived from the class that has the
        definition.
        """
        if isinstance(found.node, ast.ClassDef):
            return [found]
        values = [getattr(found.node, "value", None)]
        if isinstance(found.node, ast.Assign | ast.AnnAssign):
            appends = {f"{target}.append" for target in _targets(found.node)}
            nodes = [node for _, around in found.module.functions if found.node in around for node in around]
            values += [n.args[0] for n in nodes if isinstance(n, ast.Call) and ast.unparse(n.func) in appends]
        classes = list[Found]()
        for name in [name for value in values if value is not None for name in _calls(value)]:
            targets = [(found.module, name)]
            if isinstance(name, ast.Name) and self._in_module(found.module, name.id, 0) is None:
                targets = list(self._passed(found, owner, name.id))
            for module, target in targets:
                hit = self.scoped(module, target)
                if hit is not None and isinstance(hit.node, ast.ClassDef) and hit not in classes:
                    classes.append(hit)
        return classes

    def _passed(self, found: Found, owner: Found | None, name: str) -> Iterator[tuple[Module, ast.AST]]:
        """Yield what `name` may stand for in the functions around the definition `found`: each value assigned to it,
        its default if it is a parameter, and each value that a derived class passes as the keyword argument `name`."""
        around = [each for each in found.module.functions if any(node is found.node for node in each[1])]
        places = [(found.module, each) for each in around]
        for each in self.mro(owner) if owner is not None else ():
            methods = {id(node) for node in ast.iter_child_nodes(each.node)}
            places += [(each.module, function) for function in each.module.functions if id(function[0]) in methods]
        for module, (function, nodes) in places:
            for node in nodes:
                if isinstance(node, ast.Assign) and name in _targets(node):
                    yield from ((module, called) for called in _calls(node.value))
                elif isinstance(node, ast.keyword) and node.arg == name:
                    yield module, node.value
            yield from ((module, default) for parameter, default in _defaults(function) if parameter == name)


def _targets(node: ast.Assign | ast.AnnAssign) -> set[str]:
    every = node.targets if isinstance(node, ast.Assign) else [node.target]
    flat = (part for each in every for part in (each.elts if isinstance(each, ast.Tuple) else [each]))
    return {ast.unparse(each) for each in flat}


def _calls(value: ast.AST) -> list[ast.AST]:
    """If the expression is a name, return the name. Otherwise return all names that the expression calls."""
    if isinstance(value, ast.Name | ast.Attribute):
        return [value]
    return [node.func for node in ast.walk(value) if isinstance(node, ast.Call)]


def _defaults(function: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    a: ast.arguments = function.args  # type: ignore[attr-defined]
    places = [*a.posonlyargs, *a.args]
    yield from zip([p.arg for p in places[len(places) - len(a.defaults) :]], a.defaults, strict=True)
    yield from ((p.arg, d) for p, d in zip(a.kwonlyargs, a.kw_defaults, strict=True) if d is not None)


def signature_of(node: ast.AST, bound: bool = False) -> str:
    """Return the arguments of a function as "a, b=, *, c=, **rest", where `=` stands for a default. bound: leave out
    `self`."""
    a: ast.arguments = node.args  # type: ignore[attr-defined]
    with_default = {name for name, _ in _defaults(node)}
    names = [p.arg + "=" * (p.arg in with_default) for p in (*a.posonlyargs, *a.args)]
    static = any(ast.unparse(d) == "staticmethod" for d in node.decorator_list)  # type: ignore[attr-defined]
    names = names[1:] if bound and not static else names
    names += [f"*{a.vararg.arg}"] if a.vararg else ["*"] if a.kwonlyargs else []
    names += [p.arg + "=" * (p.arg in with_default) for p in a.kwonlyargs]
    return ", ".join([*names, *([f"**{a.kwarg.arg}"] if a.kwarg else [])])
