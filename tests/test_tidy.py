"""One test over the tree: is the code still ours?

Who imports whom, no cycles, no stray prints, and the habits of CONTRIBUTING.md that a machine can
check.
Standard library only; nothing of stepwell is imported. Every message names file and line.
"""

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "stepwell"
ARCHITECTURE = ROOT / "docs" / "ARCHITECTURE.md"

# A module imports only from the left: from its own unit, or from a unit that stands before it.
LAYERS = (
    "errors",
    "core",
    "policy",
    "settings",
    "clock",
    "metrics",
    "tiers",
    "manager",
    "pipeline",
    "exporter",
    "testing",  # anything below the store; besides, nobody but tests imports it
    "store",
    "__init__",  # what `import stepwell` offers
    "engines",
    "plan",
    "bench",
    "ops",
    "cli",
    "__main__",
)
ENGINE_PACKAGES = {"torch", "vllm", "sglang", "transformers", "tokenizers"}
ENGINE_UNITS = {"engines", "bench"}
TEST_PACKAGES = {"pytest", "hypothesis", "_pytest"}
PRINTING_MODULES = {"cli", "bench.report"}
CATCH_ALL = {"Exception", "BaseException"}
NOT_OURS = {
    ".git",
    ".venv",
    ".cache",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    ".hypothesis",
    "__pycache__",
    "build",
    "dist",
}
MAX_FILE_BYTES = 1 << 20
LONG_FUNCTION_LINES = 70
LONG_FUNCTIONS_PERCENT = 1


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def python_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    """`core.keys` for stepwell/core/keys.py, `core.__init__` for its package file."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in python_files(PACKAGE)}


def unit_of(module: str) -> str:
    return module.split(".")[0]


def where(path: Path, node: ast.AST | int) -> str:
    line = node if isinstance(node, int) else getattr(node, "lineno", 1)
    return f"{path.relative_to(ROOT)}:{line}"


def report(problems: list[str]) -> None:
    assert not problems, "\n" + "\n".join(problems)


def resolve(dotted: str) -> str | None:
    """The module that `dotted` (without the leading `stepwell`) is; None if it is a name in one."""
    if dotted in modules():
        return dotted
    package = f"{dotted}.__init__" if dotted else "__init__"
    return package if package in modules() else None


def absolute_base(module: str, node: ast.ImportFrom) -> str:
    """The dotted name after `from`, a relative one made absolute."""
    if not node.level:
        return node.module or ""
    parts = ["stepwell", *module.split(".")][: -node.level]
    return ".".join(parts + ([node.module] if node.module else []))


def imports_of(module: str) -> Iterator[tuple[ast.stmt, str]]:
    """Each import as a dotted name, those in functions and under TYPE_CHECKING included."""
    for node in ast.walk(tree_of(modules()[module])):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = absolute_base(module, node)
            for alias in node.names:
                yield node, f"{base}.{alias.name}"


def own_imports(module: str) -> Iterator[tuple[ast.stmt, str]]:
    for node, dotted in imports_of(module):
        head, _, rest = dotted.partition(".")
        if head != "stepwell":
            continue
        target = resolve(rest) or resolve(rest.rpartition(".")[0])
        if target is not None and target != module:
            yield node, target


def test_every_module_belongs_to_a_layer() -> None:
    report(
        [
            f"{where(path, 1)}: unit {unit_of(module)!r} stands in no layer (see LAYERS)"
            for module, path in modules().items()
            if unit_of(module) not in LAYERS
        ]
    )


def test_modules_import_only_from_the_left() -> None:
    problems = []
    for module, path in modules().items():
        unit = unit_of(module)
        for node, target in own_imports(module):
            other = unit_of(target)
            if unit == other or unit not in LAYERS or other not in LAYERS:
                continue
            if LAYERS.index(other) > LAYERS.index(unit):
                problems.append(f"{where(path, node)}: {unit} imports {other}, which is above it")
            elif other == "testing":
                problems.append(f"{where(path, node)}: {unit} imports stepwell.testing")
    report(problems)


def test_no_import_cycles() -> None:
    graph = {module: sorted({target for _, target in own_imports(module)}) for module in modules()}
    done: set[str] = set()
    cycles = []

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            cycles.append(" -> ".join([*trail[trail.index(module) :], module]))
        elif module not in done:
            for target in graph[module]:
                visit(target, [*trail, module])
            done.add(module)

    for module in graph:
        visit(module, [])
    report(cycles)


def test_engines_and_test_tools_stay_where_they_belong() -> None:
    problems = []
    for module, path in modules().items():
        for node, dotted in imports_of(module):
            head = dotted.split(".")[0]
            if head in ENGINE_PACKAGES and unit_of(module) not in ENGINE_UNITS:
                problems.append(f"{where(path, node)}: {head} outside engines/ and bench/")
            if head in TEST_PACKAGES and unit_of(module) != "testing":
                problems.append(f"{where(path, node)}: {head} outside testing/")
    report(problems)


def test_no_stray_print() -> None:
    report(
        [
            f"{where(path, node)}: print() outside {sorted(PRINTING_MODULES)}"
            for module, path in modules().items()
            if module not in PRINTING_MODULES
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in {"print", "pprint"}
        ]
    )


def test_no_assert_outside_testing() -> None:
    report(
        [
            f"{where(path, node)}: assert; check data with raise"
            for module, path in modules().items()
            if unit_of(module) != "testing"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Assert)
        ]
    )


def comments_of(path: Path) -> dict[int, str]:
    tokens = tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline)
    return {token.start[0]: token.string for token in tokens if token.type == tokenize.COMMENT}


def catches_everything(handler: ast.ExceptHandler) -> bool:
    if handler.type is None:
        return True
    types = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    names = {getattr(each, "id", None) or getattr(each, "attr", None) for each in types}
    return bool(names & CATCH_ALL)


def test_broad_excepts_are_counted() -> None:
    problems = []
    for path in modules().values():
        comments = comments_of(path)
        problems += [
            f"{where(path, node)}: broad except; say on this line where it is counted"
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.ExceptHandler)
            and catches_everything(node)
            and "counted" not in comments.get(node.lineno, "")
        ]
    report(problems)


def test_module_names_say_something() -> None:
    report(
        [
            f"{path.relative_to(ROOT)}: no utils, no second versions"
            for path in python_files(PACKAGE)
            if re.fullmatch(r"utils?|.*_v\d+", path.stem)
        ]
    )


def test_every_module_has_a_docstring() -> None:
    report(
        [
            f"{where(path, 1)}: no module docstring"
            for path in python_files(PACKAGE) + python_files(ROOT / "tests")
            if tree_of(path).body and not ast.get_docstring(tree_of(path))
        ]
        + [
            f"{where(path, 1)}: empty module"
            for path in python_files(PACKAGE)
            if not tree_of(path).body
        ]
    )


def our_files() -> Iterator[Path]:
    for folder, subfolders, names in os.walk(ROOT):
        subfolders[:] = [
            name for name in subfolders if name not in NOT_OURS and not name.endswith(".egg-info")
        ]
        yield from (Path(folder, name) for name in names)


def test_no_large_file() -> None:
    report(
        [
            f"{path.relative_to(ROOT)}: {path.lstat().st_size} bytes, more than {MAX_FILE_BYTES}"
            for path in our_files()
            if path.lstat().st_size > MAX_FILE_BYTES
        ]
    )


def test_architecture_has_one_line_per_module() -> None:
    """A line begins, after list or table marks, with a path under stepwell/ in backticks."""
    if not ARCHITECTURE.exists():
        return  # the page comes with the code it describes
    listed: dict[str, int] = {}
    for line in ARCHITECTURE.read_text(encoding="utf-8").splitlines():
        match = re.match(r"\s*[-*|]?\s*`(?:stepwell/)?([\w/]+\.py)`", line)
        if match:
            listed[match[1]] = listed.get(match[1], 0) + 1
    present = {
        path.relative_to(PACKAGE).as_posix()
        for path in modules().values()
        if path.name != "__init__.py"
    }
    every = present | {path.relative_to(PACKAGE).as_posix() for path in modules().values()}
    report(
        [f"docs/ARCHITECTURE.md: no line for `{name}`" for name in sorted(present - set(listed))]
        + [f"docs/ARCHITECTURE.md: `{name}` is no module" for name in sorted(set(listed) - every)]
        + [f"docs/ARCHITECTURE.md: `{name}` has {n} lines" for name, n in listed.items() if n > 1]
    )


def code_lines(path: Path) -> set[int]:
    """Numbers of the lines that hold code: no blank lines, comments or docstrings."""
    quiet = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    lines: set[int] = set()
    source = io.StringIO(path.read_text(encoding="utf-8"))
    for token in tokenize.generate_tokens(source.readline):
        if token.type not in quiet:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(tree_of(path)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            text = node.body[0]
            lines.difference_update(range(text.lineno, (text.end_lineno or text.lineno) + 1))
    return lines


def test_long_functions_are_rare() -> None:
    total = 0
    long = []
    for path in modules().values():
        lines = code_lines(path)
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                total += 1
                length = len(lines & set(range(node.lineno, (node.end_lineno or 0) + 1)))
                if length > LONG_FUNCTION_LINES:
                    long.append(f"{where(path, node)}: {node.name} has {length} code lines")
    if len(long) * 100 > total * LONG_FUNCTIONS_PERCENT:
        report([*long, f"{len(long)} of {total} functions, more than {LONG_FUNCTIONS_PERCENT} %"])
