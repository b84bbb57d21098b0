"""Read the pack's families: for which models and blocks of ComfyUI they have hooks as stand-ins, and which arguments
the hooks know."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scripts.api_check.source import Found, Source
from scripts.api_check.uses import OF_NODES, VARIABLES, StandIn, Uses, add, files_of, uses_in

FAMILIES = "nodes.adapters.families"
# Block that no `BlockGroup` lists (a block of the UNet or a part of a block) -> the classes of the hooks that stand in
# for it.
PARTS = {
    "unet SpatialTransformer.transformer_blocks": ("unet.Signature", "unet.ByModule"),
    "unet BasicTransformerBlock.attn1": ("unet.MergedAttention",),
    "unet BasicTransformerBlock.attn2": ("unet.MergedAttention",),
    "unet BasicTransformerBlock.ff": ("unet.MergedFeedForward",),
}
PART_HOMES = {
    "SpatialTransformer": "comfy.ldm.modules.attention.SpatialTransformer",
    "BasicTransformerBlock": "comfy.ldm.modules.attention.BasicTransformerBlock",
}


@dataclass
class Family:
    """A family of models, as the pack declares it."""

    name: str
    models: list[str]  # ComfyUI's classes: the dotted name of MODEL, then the short names in DERIVED


def uses_of(root: Path) -> tuple[Uses, dict[str, Family]]:
    """Return the parts of ComfyUI that the pack in a folder uses, by item, and the pack's families."""
    uses: Uses = {}
    for file in files_of(root):
        where = file.relative_to(root)
        if where.parts[:3] == ("nodes", "adapters", "families"):
            uses_in(file.read_text(encoding="utf-8"), uses, VARIABLES, where.stem, words=True)
        else:
            adapters = where.parts[:2] == ("nodes", "adapters")
            variables = VARIABLES | (OF_NODES if where.parts[0] == "nodes" and not adapters else {})
            uses_in(file.read_text(encoding="utf-8"), uses, variables, words=adapters)
    pack = Source(root)
    families = {}
    for module in pack.modules(FAMILIES):
        name = module.name.rpartition(".")[2]
        if "MODEL" in module.names and "NAME" in module.names:
            families[name] = _family(pack, uses, name)
    for use in list(uses.values()):
        if use.kind == "path" and use.subject.split(" ")[0] not in families:
            del uses[use.item]
    return uses, families


def _family(pack: Source, uses: Uses, name: str) -> Family:
    home = f"{FAMILIES}.{name}"
    model = _must(pack.find(f"{home}.MODEL"), f"{home}.MODEL")
    classes = [str(model.module.names[ast.unparse(model.node.value)])]  # type: ignore[attr-defined]
    derived = pack.find(f"{home}.DERIVED")
    names = [str(each) for each in _value(pack, derived, "DERIVED")]
    add(uses, "derived", name).allowed = frozenset(names)
    classes += [each for each in names if each != classes[0].rpartition(".")[2]]
    hooks = _must(pack.find(f"{home}.Hooks"), f"{home}.Hooks")
    origin = next(iter(found.module.name for found in pack.mro(hooks) if _groups(found)), None)
    if origin is not None and origin != home:
        _copy_paths(uses, origin.rpartition(".")[2], name)
    loops = frozenset(map(str, _value(pack, pack.find("nodes.adapters.family._LOOPS"), "_LOOPS")))
    for found in pack.mro(hooks):
        for attribute, signature in _groups(found):
            for kind in classes:
                subject = f"{name} {kind.rpartition('.')[2]}.{attribute}"
                stand_in = _stand_in(pack, found.module.name, signature)
                block = add(uses, "block", subject)
                block.stand_ins += [stand_in] if stand_in not in block.stand_ins else []
                add(uses, "loop", subject).allowed = loops
        if _groups(found):
            break
    for subject, hooks_of in PARTS.items() if name == "unet" else ():
        add(uses, "block", subject).stand_ins = [_of_class(pack, f"{FAMILIES}.{each}") for each in hooks_of]
    return Family(name, classes)


def _copy_paths(uses: Uses, source: str, name: str) -> None:
    for use in [each for each in uses.values() if each.kind == "path" and each.subject.startswith(f"{source} ")]:
        copied = replace(use, subject=f"{name} {use.subject.partition(' ')[2]}")
        uses.setdefault(copied.item, copied)


def _groups(hooks: Found) -> list[tuple[str, str]]:
    """Return, for each `BlockGroup` that a class makes, the attribute of the model and the name of the signature."""
    found = []
    for function in ast.iter_child_nodes(hooks.node):
        if not isinstance(function, ast.FunctionDef) or function.name != "block_groups":
            continue
        local = dict[str, ast.AST]()
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                target, value = node.targets[0], node.value
                several = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
                pairs = zip(target.elts, value.elts, strict=True) if several else [(target, value)]  # type: ignore[attr-defined]
                local |= {ast.unparse(each): made for each, made in pairs}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "BlockGroup":
                if not ast.unparse(node.args[1]).startswith("model."):
                    continue  # a list in a part of the model, see `PARTS`
                made = local.get(ast.unparse(node.args[2]), node.args[2])
                found.append((ast.unparse(node.args[1]).removeprefix("model."), ast.unparse(made).partition("(")[0]))
    return found


def _stand_in(pack: Source, module: str, signature: str) -> StandIn:
    return _of_class(pack, f"{module}.{signature}")


def _of_class(pack: Source, dotted: str) -> StandIn:
    """Return the arguments that a hook of this class knows. The class is a `BlockSignature`, or a hook with a
    `__call__`."""
    found = _must(pack.find(dotted), dotted)
    if pack.member(found, "tokens_arg") is None:
        call: Any = _must(pack.member(found, "__call__"), f"{dotted}.__call__").node
        places = tuple([""] * len(call.args.posonlyargs) + [arg.arg for arg in call.args.args])[1:]
        return StandIn(places, frozenset(), frozenset(), call.args.kwarg is not None)

    def values(name: str) -> tuple[str, ...]:
        value = _value(pack, pack.member(found, name), name)
        return (value,) if isinstance(value, str) else tuple(map(str, value))

    known = ("tokens_arg", "rope_arg", "text_arg", "mask_arg", "row_args", "index_args", "passthrough_args")
    every = frozenset(name for each in known for name in values(each) if name)
    return StandIn(values("positional_args"), frozenset(values("required_kwargs")), every)


def _value(pack: Source, found: Found | None, name: str) -> Any:
    """Return the value of a constant: a text, a tuple (also of starred parts), or the keys of a dictionary. () if the
    constant is missing."""
    node = getattr(found.node, "value", None) if found is not None else None
    if found is None or node is None:
        return ()
    for target in found.node.targets if isinstance(found.node, ast.Assign) else ():
        if isinstance(target, ast.Tuple) and isinstance(node, ast.Tuple):
            node = node.elts[[ast.unparse(each) for each in target.elts].index(name)]
            break
    return _literal(pack, found, node)


def _literal(pack: Source, found: Found, node: ast.AST) -> Any:
    if isinstance(node, ast.Call) and len(node.args) == 1:
        return _literal(pack, found, node.args[0])
    if isinstance(node, ast.Name):
        return _value(pack, pack.scoped(found.module, node), node.id)
    if isinstance(node, ast.Dict):
        return tuple(_literal(pack, found, key) for key in node.keys if key is not None)
    if isinstance(node, ast.Tuple | ast.List | ast.Set):
        parts = [each.value if isinstance(each, ast.Starred) else each for each in node.elts]
        values = [_literal(pack, found, part) for part in parts]
        flat = [v if isinstance(e, ast.Starred) else (v,) for e, v in zip(node.elts, values, strict=True)]
        return tuple(each for value in flat for each in value)
    return ast.literal_eval(node)


def _must(found: Found | None, name: str) -> Found:
    if found is None:
        raise ValueError(f"the pack has no {name}")
    return found
