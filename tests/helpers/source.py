"""Reading the project's own source: which modules there are and what each imports. Used by the layer and packaging tests."""

import ast
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("kernels", "engine", "pipeline", "jobs")


@dataclass(frozen=True)
class Import:
    """One import statement: `module` is the dotted name asked for (`from a.b import c` gives `a.b.c`), `lazy` when inside a function,
    `typing_only` when under `if TYPE_CHECKING`, `level` the number of leading dots."""

    module: str
    line: int
    lazy: bool = False
    typing_only: bool = False
    level: int = 0

    @property
    def top(self) -> str:
        return self.module.split(".")[0]


def python_files(folder: str) -> list[Path]:
    """The modules of one of the four folders, sorted; a folder that is not there has none."""
    return sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    """`engine/request.py` -> `askmany.engine.request`."""
    return ".".join(("askmany", *path.relative_to(ROOT).with_suffix("").parts))


def imports_of(source: str) -> list[Import]:
    """Every import of a module's source, wherever it stands, `importlib.import_module("x")` and `__import__("x")` included."""
    collector = _Collector()
    collector.visit(ast.parse(source))
    return collector.found


class _Collector(ast.NodeVisitor):
    def __init__(self) -> None:
        self.found: list[Import] = []
        self._functions = 0
        self._typing = 0

    def _add(self, module: str, node: ast.AST, level: int = 0) -> None:
        line = getattr(node, "lineno", 0)
        self.found.append(Import(module, line, lazy=self._functions > 0, typing_only=self._typing > 0, level=level))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            self._add(f"{node.module or ''}.{alias.name}".lstrip("."), node, node.level)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        first = node.args[0] if node.args else None
        if name in ("import_module", "__import__") and isinstance(first, ast.Constant) and isinstance(first.value, str):
            self._add(first.value, node)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._functions += 1
        self.generic_visit(node)
        self._functions -= 1

    def visit_If(self, node: ast.If) -> None:
        typing = "TYPE_CHECKING" in ast.unparse(node.test)
        self._typing += typing
        for child in node.body:
            self.visit(child)
        self._typing -= typing
        for child in node.orelse:
            self.visit(child)
