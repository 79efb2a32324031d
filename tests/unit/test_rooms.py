"""The order of the house: who imports whom, one name a file, nothing too long, capabilities in place of names."""

from __future__ import annotations

import ast
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import hocket
from hocket.engines.catalogue import engine
from hocket.strategies import strategy

SRC = Path(hocket.__file__).parent
LEVELS = (
    ("app",), ("report",), ("lab",), ("run",), ("drivers",), ("strategies",), ("layouts", "compress", "optim", "tasks"),
    ("engines",), ("measure",), ("kernels",), ("core",),
)  # fmt: skip
"""From the top down."""
LONGEST_FILE, LONGEST_FUNCTION, LONGEST_KERNEL = 400, 50, 55
"""Lines. Compiled loops pay for being split: those of perceptrons and sparse rows took a tenth longer and more."""
FILES = {path.relative_to(SRC): path.read_text() for path in sorted(SRC.rglob("*.py"))}


def level(room: str) -> int:
    return next(i for i, rooms in enumerate(LEVELS) if room in rooms)


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[int, str]]:
    """Every import of Hocket's own modules, wherever it stands: (line, dotted name below hocket)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = ["hocket", *path.parent.parts]
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            names = [f"{module}.{alias.name}" for alias in node.names] if module == "hocket" else [module]
        else:
            continue
        yield from ((node.lineno, name.removeprefix("hocket.")) for name in names if name.startswith("hocket."))


def told(violations: list[str]) -> str:
    return "\n" + "\n".join(violations)


def test_every_room_is_known() -> None:
    rooms = {path.parts[0] for path in FILES if len(path.parts) > 1}
    assert rooms <= {room for rooms in LEVELS for room in rooms}


def test_imports_only_go_down() -> None:
    found = []
    for path, text in FILES.items():
        if len(path.parts) == 1:
            continue  # hocket itself re-exports what is above
        for line, name in imports(ast.parse(text), path):
            room = name.partition(".")[0]
            if (SRC / room).is_dir() and level(room) < level(path.parts[0]):
                found.append(f"{path}:{line} imports hocket.{name}")
    assert not found, told(found)


def test_no_two_files_have_one_name() -> None:
    names = Counter(path.name for path in FILES if path.name != "__init__.py")
    found = [str(path) for path in FILES if names[path.name] > 1]
    assert not found, told(found)


def test_files_and_functions_are_short() -> None:
    found = []
    for path, text in FILES.items():
        if (lines := text.count("\n")) > LONGEST_FILE:
            found.append(f"{path} has {lines} lines")
        for node in ast.walk(ast.parse(text)):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            compiled = any(isinstance(by, ast.Name) and by.id == "kernel" for by in node.decorator_list)
            longest = LONGEST_KERNEL if compiled else LONGEST_FUNCTION
            if (lines := (node.end_lineno or 0) - node.lineno + 1) > longest:
                found.append(f"{path}:{node.lineno} {node.name} has {lines} lines")
    assert not found, told(found)


def compared(tree: ast.AST) -> Iterator[tuple[int, ast.expr, str]]:
    """Every text that something is compared with: (line, what is compared, the text)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for side in sides:
                for leaf in side.elts if isinstance(side, (ast.Tuple, ast.List, ast.Set)) else [side]:
                    if isinstance(leaf, ast.Constant) and isinstance(leaf.value, str):
                        yield node.lineno, next((s for s in sides if s is not side), side), leaf.value
        elif isinstance(node, ast.Match):
            for case in node.cases:
                for leaf in ast.walk(case.pattern):
                    value = leaf.value if isinstance(leaf, ast.MatchValue) else None
                    if isinstance(value, ast.Constant) and isinstance(value.value, str):
                        yield value.lineno, node.subject, value.value


def test_nobody_asks_for_the_name_of_an_engine_or_a_strategy() -> None:
    """But its own file. `Sharing.method` has values of its own, some of which are called as strategies are."""
    registered = [registry[name] for registry in (engine, strategy) for name in registry]
    home = {cls.name: Path(inspect.getfile(cls)).relative_to(SRC) for cls in registered}
    found = [
        f"{path}:{line} compares {ast.unparse(what)} with {text!r}"
        for path, source in FILES.items()
        for line, what, text in compared(ast.parse(source))
        if home.get(text, path) != path and not ast.unparse(what).endswith("method")
    ]
    assert not found, told(found)
