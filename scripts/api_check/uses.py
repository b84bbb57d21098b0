"""Read from the pack's source which parts of ComfyUI it uses.

Kinds of uses, and their subjects:
name     a dotted name that is imported, reached through an import, or an attribute of an object of a known class
call     a dotted name that is called
wrapper  a kind of wrapper (`WrappersMP`), with the arguments that the pack reads
path     attributes that a family reads of its model: "flux double_blocks[0].img_attn"
block    a list of blocks that a family stands in for: "flux Flux.double_blocks"
loop     the methods of a model that loop over a list of blocks, by the list
derived  classes that ComfyUI derives from the classes of a family
key      a text by which the pack finds an entry of a mapping
trait    an attribute that may be absent, of an object whose class is unknown
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

THEIRS = {"comfy", "comfy_api", "comfy_execution", "comfy_extras", "comfyui_version", "execution", "server"}

# Classes of objects that the pack gets without an annotation, by the name of a variable, an attribute or a called
# function. An instance is written with a colon before its class.
VARIABLES = {
    "guider": ":comfy.samplers.CFGGuider",
    "sampler": ":comfy.samplers.KSAMPLER",
    "executor": ":comfy.patcher_extension.WrapperExecutor",
    "model_sampling": ":comfy.model_sampling.ModelSamplingDiscrete",
    "handler": ":comfy.context_windows.IndexListContextHandler",
    "server": ":server.PromptServer",
}
OF_NODES = {"model": ":comfy.model_patcher.ModelPatcher"}  # in node classes
ATTRIBUTES = {
    "comfy.samplers.CFGGuider.model_patcher": ":comfy.model_patcher.ModelPatcher",
    "comfy.model_patcher.ModelPatcher.model": ":comfy.model_base.BaseModel",
    "server.PromptServer.instance": ":server.PromptServer",
    "server.PromptServer.prompt_queue": ":execution.PromptQueue",
}
RETURNS = {"comfy.model_patcher.ModelPatcher.clone": ":comfy.model_patcher.ModelPatcher"}
SAMPLERS = "comfy.k_diffusion.sampling"  # the module whose functions the pack knows by name
# Functions that read the arguments of a wrapper, and the kind of the wrapper.
HELPERS = {"listening": "OUTER_SAMPLE"}


@dataclass(frozen=True)
class StandIn:
    """The arguments that a hook knows of the block for which it stands in, see `compat.check`."""

    places: tuple[str, ...]  # the first arguments, in order, "" for an argument without a name
    required: frozenset[str]  # arguments that must exist after the first arguments
    known: frozenset[str]  # arguments that merging handles
    rest: bool = True  # whether unknown arguments are passed on


@dataclass
class Use:
    """A part of ComfyUI that the pack uses."""

    kind: str
    subject: str
    places: int = 0  # arguments that a call passes, or a wrapper takes, by position
    named: set[str] = field(default_factory=set)  # arguments that a call passes by name
    read: set[tuple[int, str]] = field(default_factory=set)  # arguments of a wrapper, by position or by name
    optional: bool = True  # whether the pack also runs without this part
    stand_ins: list[StandIn] = field(default_factory=list)  # stand-ins for a block; at least one of them must fit
    allowed: frozenset[str] = frozenset()  # of kind loop: methods that run blocks; of kind derived: merged classes

    @property
    def item(self) -> str:
        return f"{self.kind} {self.subject}"


Uses = dict[str, Use]


def add(uses: Uses, kind: str, subject: str, optional: bool = False) -> Use:
    """Return the use of a subject, which is added if it is missing."""
    use = uses.setdefault(f"{kind} {subject}", Use(kind, subject))
    use.optional &= optional
    return use


def uses_in(text: str, uses: Uses, variables: dict[str, str], models: str = "", words: bool = False) -> None:
    """Add the uses in a module.

    variables: name of a variable -> class of the object. models: the family whose model the variable `model` holds.
    words: whether keys and traits are noted.
    """
    tree = ast.parse(text)
    bound = dict(_imports(tree, uses))
    _Reader(uses, bound | variables, models, words).visit(tree)
    for dotted in bound.values():
        if dotted == SAMPLERS:
            names = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
            for name in names:
                if isinstance(name, str) and name.startswith("sample_") and name[-1] != "_":
                    add(uses, "name", f"{dotted}.{name}", optional=True)
    wrappers = _wrappers(tree)
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and function.name in {**wrappers, **HELPERS}:
            _read_wrapper(function, add(uses, "wrapper", {**HELPERS, **wrappers}[function.name]))


def _imports(tree: ast.AST, uses: Uses) -> Iterator[tuple[str, str]]:
    attempts = [node for node in ast.walk(tree) if isinstance(node, ast.Try) and "ImportError" in ast.unparse(node)]
    optional = {inner for attempt in attempts for line in attempt.body for inner in ast.walk(line)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                short = alias.name.partition(".")[0]
                if short in THEIRS:
                    add(uses, "name", alias.name, node in optional)
                    yield alias.asname or short, alias.name if alias.asname else short
        elif isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in THEIRS:
            for alias in node.names:
                add(uses, "name", f"{node.module}.{alias.name}", node in optional)
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"


class _Reader(ast.NodeVisitor):
    """Follow names through a module. The method `path` describes what an expression refers to in one of four ways: a
    dotted name; ":" and the class of an instance; "." and the dotted name of an instance's attribute; or "%", a family,
    and the attributes that lead from the family's model to the object."""

    def __init__(self, uses: Uses, known: dict[str, str], models: str, words: bool) -> None:
        self.uses, self.known, self.models, self.words = uses, known, models, words
        self.constants: dict[str, list[str]] = {}  # possible texts of each variable

    def visit_Module(self, node: ast.Module) -> None:
        every = list(ast.walk(node))
        for each in every:
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                self.constants[each.targets[0].id] = list(_texts(each.value))
        for each in every:
            if isinstance(each, ast.comprehension | ast.For) and isinstance(each.target, ast.Name):
                self.constants[each.target.id] = self.constants.get(ast.unparse(each.iter), [])
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) -> None:
        outer = self.known
        self.known = dict(outer)
        for arg in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            annotation = getattr(arg, "annotation", None)
            named = ast.unparse(annotation).strip("'\"").partition(" |")[0] if annotation is not None else "Any"
            if self.models and arg.arg in ("model", "diffusion_model"):
                self.known[arg.arg] = f"%{self.models} "
            elif outer.get(named, "").partition(".")[0] in THEIRS:
                self.known[arg.arg] = f":{outer[named]}"
            elif named != "Any" and arg.arg in self.known:
                del self.known[arg.arg]
        self.generic_visit(node)
        self.known = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815 - named by `ast`

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit_FunctionDef(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple):
                same = isinstance(node.value, ast.Tuple) and len(node.value.elts) == len(target.elts)
                values = node.value.elts if same else [ast.Constant(None)] * len(target.elts)  # type: ignore[attr-defined]
                pairs = list(zip(target.elts, values, strict=True))
            for each, value in pairs:
                if not isinstance(each, ast.Name):
                    self.visit(each)
                elif (path := self.path(value)) is not None and path[0] != ".":
                    self.known[each.id] = path
                elif each.id not in VARIABLES:
                    self.known.pop(each.id, None)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.path(node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        path, name = self.path(node.func), ast.unparse(node.func)
        if name in ("getattr", "hasattr") and len(node.args) > 1:
            constant = isinstance(node.args[1], ast.Constant)
            optional = name == "hasattr" or len(node.args) > 2 or not constant
            for attribute in _texts(node.args[1]) if constant else self.constants.get(ast.unparse(node.args[1]), ()):
                self.attribute(node.args[0], attribute, optional)
        elif isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop") and node.args:
            self.word("key", node.args[0])
        if path is not None and path[0] not in "%:":
            use = add(self.uses, "call", path.lstrip("."))
            starred = [n for n, arg in enumerate(node.args) if isinstance(arg, ast.Starred)]
            use.places = max(use.places, min([len(node.args), *starred]))
            use.named |= {keyword.arg for keyword in node.keywords if keyword.arg}
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.word("key", node.slice)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        if isinstance(node.ops[0], ast.In | ast.NotIn):
            self.word("key", node.left)
        self.generic_visit(node)

    def word(self, kind: str, node: ast.AST) -> None:
        text = node.value if isinstance(node, ast.Constant) else None
        if self.words and isinstance(text, str) and text.isidentifier() and not text.startswith(("__", "toma")):
            add(self.uses, kind, text, optional=True)

    def attribute(self, owner: ast.AST, name: str, optional: bool = False) -> str | None:
        """Note an attribute of an expression, and return what it refers to."""
        path = self.path(owner)
        if name.startswith("__") or (path or "")[:1] == ".":
            return None
        if path is None:
            if optional:
                self.word("trait", ast.Constant(name))
            return None
        if path.startswith("%"):
            home, _, attributes = path.partition(" ")
            inside = f"{attributes}.{name}".lstrip(".")
            add(self.uses, "path", f"{home[1:]} {inside}", optional)
            return f"{home} {inside}"
        full = f"{path.lstrip(':')}.{name}"
        add(self.uses, "name", full, optional)
        return ATTRIBUTES.get(full, f".{full}" if path[0] == ":" else full)

    def path(self, node: ast.AST) -> str | None:
        """Return what an expression refers to."""
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.Attribute):
            return self.attribute(node.value, node.attr)
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) == "import_module":
                module = next(iter(_texts(node.args[0])), "")
                return add(self.uses, "name", module, optional=True).subject if module.split(".")[0] in THEIRS else None
            made = self.path(node.func)
            if made is None or made[0] in "%:":
                return None
            return RETURNS.get(made.lstrip("."), None if made[0] == "." else f":{made}")
        if isinstance(node, ast.Subscript):
            if ast.unparse(node.value) == "sys.modules" and isinstance(node.slice, ast.Constant):
                return str(node.slice.value) if node.slice.value in THEIRS else None
            inside = self.path(node.value)
            index = ast.unparse(node.slice)
            return f"{inside}[{index}]" if inside and inside[0] == "%" and index.lstrip("-").isdigit() else None
        return None


def _texts(node: ast.AST) -> Iterator[str]:
    """Yield the possible texts of an expression, or the texts in a tuple."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    elif isinstance(node, ast.IfExp):
        yield from (*_texts(node.body), *_texts(node.orelse))
    elif isinstance(node, ast.Tuple):
        yield from (text for each in node.elts for text in _texts(each))


def _wrappers(tree: ast.AST) -> dict[str, str]:
    """Return the kinds of wrappers in a module, by the names of its functions."""
    kinds = dict[str, str]()
    for node in ast.walk(tree):
        pairs = list[tuple[ast.AST, ast.AST]]()
        if isinstance(node, ast.Dict):
            pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        elif isinstance(node, ast.Call) and len(node.args) == 3:
            name = ast.unparse(node.func)
            if name.endswith("add_wrapper_with_key"):
                pairs = [(node.args[0], node.args[2])]
        for kind, function in pairs:
            text = str(kind.value) if isinstance(kind, ast.Constant) else ast.unparse(kind)
            if text.startswith("WrappersMP.") or text.isupper():
                kinds[ast.unparse(function).removeprefix("self.")] = text.removeprefix("WrappersMP.")
    return kinds


def _read_wrapper(function: ast.FunctionDef, use: Use) -> None:
    first = 1 if function.args.args[:1] and function.args.args[0].arg == "self" else 0
    use.places = max(use.places, len(function.args.args) - first - 1)
    for node in ast.walk(function):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "arguments":
            use.read |= {(ast.literal_eval(each.value), each.arg) for each in node.keywords if each.arg}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "with_argument":
            place, name = map(ast.literal_eval, node.args[2:4])
            use.read.add((place, name))


def files_of(root: Path) -> list[Path]:
    """Return the files of the pack."""
    return [root / "__init__.py", *sorted((root / "nodes").rglob("*.py")), *sorted((root / "toma_core").rglob("*.py"))]
