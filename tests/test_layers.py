"""A module imports only from those that the docstring of multimesh names before its own.

Imports inside functions count too: they hide a cycle, they do not break it.
"""

import ast
import re
from pathlib import Path

import pytest

import multimesh

PACKAGE = Path(multimesh.__file__).parent
MODULES = [
    module
    for line in re.findall(r"^    (\S.*?)  ", multimesh.__doc__, re.MULTILINE)
    for module in line.split(", ")
]
STRANGERS = {"stages", "schedule", "transport"}
# The package's own __init__ is above them all: it re-exports `init`.
FILES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def imports(path):
    """Every module that a file names in an import, with what it takes of it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide where a module comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def module_of(path):
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def name(path):
    return str(path.relative_to(PACKAGE))


def test_the_docstring_names_every_module():
    assert sorted(MODULES) == sorted({module_of(path) for path in FILES})


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_one_way(path):
    mine = module_of(path)
    for imported in imports(path):
        package, _, rest = imported.partition(".")
        other = rest.split(".")[0]
        if package == "multimesh" and other != mine:
            assert MODULES.index(other) < MODULES.index(mine), f"must not import {imported}"
            assert not {mine, other} <= STRANGERS, f"must not import {imported}"


def users_of(*prefixes):
    return {
        name(path)
        for path in sorted(PACKAGE.rglob("*.py"))
        for imported in imports(path)
        if f"{imported}.".startswith(prefixes)
    }


def test_only_compat_relies_on_what_jax_does_not_promise():
    assert users_of("jax._src.", "jaxlib.") == {"_compat.py"}


def test_only_one_file_starts_mpi():
    assert users_of("mpi4py.") == {"_mpi.py"}


def test_schedules_are_plain_python():
    foreign = users_of("jax.", "numpy.", "mpi4py.")
    assert not [path for path in foreign if path.startswith("schedule/")]


def test_the_library_does_not_print():
    # mmrun is a command: it speaks to its user.
    found = {
        name(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "print"
    }
    assert found <= {"launch/mmrun/cli.py"}
