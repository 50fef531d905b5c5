"""Comparing an engine's source with what a connector relies on, without importing it.

An engine's plug-in seams are marked experimental. A probe reads the signatures from the source
files, so that the same code checks the engine that is about to start and one that could not even
be imported here (a CUDA release, say).
"""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Calls", "Difference", "Implements", "Names", "Requirement", "compare"]


@dataclass(frozen=True, slots=True)
class Implements:
    """A class that we derive from: the engine calls these methods with these parameters.

    Attributes:
        file, name: where the class stands, relative to the package.
        methods: method -> parameter names without self, as the engine's base class has them.
        optional: method -> parameters that newer versions may add and ours takes.
        abstract_only: these are all the abstract methods; another one would be missing in ours.
    """

    file: str
    name: str
    methods: Mapping[str, Sequence[str]]
    optional: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Calls:
    """A class or function that we call: these parameters must exist, no other may be required.

    Attributes:
        file: relative to the package.
        name: of a class (dataclass fields or ``__init__`` count), or "Class.method", or of a
            function.
        parameters: that we pass.
    """

    file: str
    name: str
    parameters: Sequence[str]


@dataclass(frozen=True, slots=True)
class Names:
    """Names that we read: module globals, class members or attributes set in a class's methods."""

    file: str
    owner: str
    names: Sequence[str]


Requirement = Implements | Calls | Names


@dataclass(frozen=True, slots=True)
class Difference:
    """One way in which the engine is not what we rely on; ``str()`` is a line for people."""

    where: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.where}: expected {self.expected}, found {self.found}"


def compare(package: Path, requirements: Sequence[Requirement]) -> list[Difference]:
    """Every difference between the sources below ``package`` and the requirements.

    Args:
        package: directory of the engine's package.
        requirements: what is relied on.
    """
    trees: dict[str, ast.Module | None] = {}
    differences: list[Difference] = []
    for requirement in requirements:
        if requirement.file not in trees:
            trees[requirement.file] = _parse(package / requirement.file)
            if trees[requirement.file] is None:
                differences.append(Difference(requirement.file, "the file", "none"))
        tree = trees[requirement.file]
        if tree is not None:
            differences += _compare_one(tree, requirement)
    return differences


def _parse(path: Path) -> ast.Module | None:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return None


def _compare_one(tree: ast.Module, requirement: Requirement) -> list[Difference]:
    match requirement:
        case Implements():
            return _compare_implemented(tree, requirement)
        case Calls():
            return _compare_called(tree, requirement)
        case Names():
            return _compare_names(tree, requirement)


def _compare_implemented(tree: ast.Module, wanted: Implements) -> list[Difference]:
    owner = _class(tree, wanted.name)
    if owner is None:
        return [Difference(f"{wanted.file}: {wanted.name}", "the class", "none")]
    differences = []
    methods = {node.name: node for node in owner.body if isinstance(node, ast.FunctionDef)}
    for name, parameters in wanted.methods.items():
        where = f"{wanted.name}.{name}"
        if name not in methods:
            differences.append(Difference(where, f"({', '.join(parameters)})", "no such method"))
            continue
        optional = set(wanted.optional.get(name, ()))
        found = [p for p in _parameters(methods[name]) if p not in optional]
        if found != list(parameters):
            differences.append(
                Difference(where, f"({', '.join(parameters)})", f"({', '.join(found)})")
            )
    differences += [
        Difference(f"{wanted.name}.{name}", "no such abstract method", "a new one")
        for name, node in methods.items()
        if _is_abstract(node) and name not in wanted.methods
    ]
    return differences


def _compare_called(tree: ast.Module, wanted: Calls) -> list[Difference]:
    where = f"{wanted.file}: {wanted.name}"
    found = _call_parameters(tree, wanted.name)
    if found is None:
        return [Difference(where, f"({', '.join(wanted.parameters)})", "none")]
    names, required, open_ended = found
    differences = [
        Difference(where, f"a parameter {name}", f"({', '.join(names)})")
        for name in wanted.parameters
        if name not in names and not open_ended
    ]
    differences += [
        Difference(where, f"no required parameter {name}", f"({', '.join(names)})")
        for name in required
        if name not in wanted.parameters
    ]
    return differences


def _compare_names(tree: ast.Module, wanted: Names) -> list[Difference]:
    if wanted.owner:
        owner = _class(tree, wanted.owner)
        if owner is None:
            return [Difference(f"{wanted.file}: {wanted.owner}", "the class", "none")]
        found = _members(owner)
    else:
        found = _globals(tree)
    return [
        Difference(f"{wanted.file}: {wanted.owner or 'module'}", f"a name {name}", "none")
        for name in wanted.names
        if name not in found
    ]


def _class(tree: ast.Module, name: str) -> ast.ClassDef | None:
    return next((n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name), None)


def _parameters(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    names = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return names[1:] if names[:1] in (["self"], ["cls"]) else names


def _required(node: ast.FunctionDef) -> list[str]:
    arguments = node.args
    positional = [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
    required = positional[: len(positional) - len(arguments.defaults)]
    required += [
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is None
    ]
    return [name for name in required if name not in ("self", "cls")]


def _is_abstract(node: ast.FunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(d) for d in node.decorator_list)


def _call_parameters(tree: ast.Module, name: str) -> tuple[list[str], list[str], bool] | None:
    """(all names, required names, takes **kwargs) of a function, a method or a constructor."""
    owner_name, _, method = name.partition(".")
    owner = _class(tree, owner_name)
    body: Sequence[ast.stmt] = owner.body if owner is not None and method else tree.body
    function = next(
        (n for n in body if isinstance(n, ast.FunctionDef) and n.name == (method or name)), None
    )
    if owner is not None and not method:
        function = next(
            (n for n in owner.body if isinstance(n, ast.FunctionDef) and n.name == "__init__"),
            None,
        )
        if function is None:
            return _fields(owner)
    if function is None:
        return None
    return _parameters(function), _required(function), function.args.kwarg is not None


def _fields(owner: ast.ClassDef) -> tuple[list[str], list[str], bool]:
    annotated = [
        node for node in owner.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        and "ClassVar" not in ast.unparse(node.annotation)
        and "init=False" not in ast.unparse(node).replace(" ", "")
    ]  # fmt: skip
    names = [node.target.id for node in annotated if isinstance(node.target, ast.Name)]
    required = [
        node.target.id for node in annotated
        if isinstance(node.target, ast.Name) and node.value is None
    ]  # fmt: skip
    return names, required, False


def _members(owner: ast.ClassDef) -> set[str]:
    found = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def _globals(tree: ast.Module) -> set[str]:
    found = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        for target in ast.walk(node):
            if isinstance(target, ast.Name) and isinstance(target.ctx, ast.Store):
                found.add(target.id)
    return found
