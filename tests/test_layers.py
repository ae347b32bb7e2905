"""The package is layered: a folder imports only from folders below it. This is the list that says which is below."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "python" / "megatrain"
LAYERS = (
    "cli",
    "integrations",
    "training",
    "planning",
    "data",
    "engine",
    "checkpoint",
    "models",
    "weights",
    "config",
    "system",
    "base",  # names, units, errors, compat and the native module
)


def layer(module: str) -> int:
    """Index in LAYERS of a module, by its name within the package."""
    first = module.partition(".")[0]
    return LAYERS.index(first if first in LAYERS else "base")


def imported(tree: ast.AST) -> set[str]:
    """Modules of the package that a file imports, at any depth of the file and for types too."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, "imports are absolute"
            found |= (
                {node.module} if node.module != "megatrain" else {f"megatrain.{alias.name}" for alias in node.names}
            )
    return {name.removeprefix("megatrain.") for name in found if name.startswith("megatrain.")}


def upward() -> set[tuple[str, str]]:
    """Files and what they import from a layer above their own. The package's own `__init__` and `__main__` are the
    face of it all and may import anything."""
    found = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if name in ("__init__.py", "__main__.py"):
            continue
        own = layer(name.removesuffix(".py").replace("/", "."))
        found |= {(name, module) for module in imported(ast.parse(path.read_text())) if layer(module) < own}
    return found


def test_a_folder_imports_only_from_folders_below_it() -> None:
    assert upward() == set()


def test_every_module_stands_in_a_folder_of_the_list() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}
    assert folders == set(LAYERS) - {"base"}
    modules = {path.stem for path in PACKAGE.glob("*.py")}
    assert modules == {"__init__", "__main__", "names", "units", "errors", "compat"}
