"""The shape of the house: who imports whom, and what stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

import specbench

ROOT = Path(specbench.__file__).parent
FOLDERS = ("cli", "results", "strategies", "models", "hardware", "tasks")
LEAVES = {"errors", "options"}  # modules of the root that every folder may import
MAY_IMPORT = {
    "hardware": set(),
    "tasks": set(),
    "models": {"hardware"},
    "strategies": {"models", "hardware"},
    "results": {"strategies", "models", "hardware", "tasks"},
    "cli": {"results", "strategies", "models", "hardware", "tasks"},
}
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.py"))


def imported_folders(path: Path) -> set[str]:
    """Folders and root modules of specbench that a module imports, inside functions and for types only included."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level >= 2:
            assert node.level == 2, f"{path.name}: leaves the package"
            found |= {node.module.split(".")[0]} if node.module else {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            assert node.module.split(".")[0] not in ("specbench", *FOLDERS), f"{path.name}: use a relative import"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                assert alias.name.split(".")[0] not in ("specbench", *FOLDERS), f"{path.name}: use a relative import"
    return found - {"__version__"}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_imports_go_one_way(path):
    """cli -> results -> strategies -> models -> hardware, results -> tasks; hardware and tasks know nobody."""
    assert imported_folders(path) <= MAY_IMPORT[path.parent.name] | LEAVES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_every_module_says_what_it_is(path):
    assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("words", [["--help"], ["run", "--help"], ["list", "strategies"], ["list", "tasks"],
                                   ["list", "models"], ["list", "devices"]], ids=" ".join)  # fmt: skip
def test_help_and_lists_do_not_import_torch(words):
    code = (
        "import sys; sys.argv = ['specbench', *sys.argv[1:]]\n"
        "from specbench.cli import app\n"
        "try: app()\n"
        "except SystemExit as leave: assert not leave.code, leave.code\n"
        "heavy = {'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_help_is_quick():
    """Under half a second on a quiet machine; the best of five is taken, and a busy machine is given three times it."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "specbench", "--help"], capture_output=True, check=True)
        best = min(best, time.perf_counter() - start)
    assert best < 1.5
