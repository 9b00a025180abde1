"""Gives NNX modules the name scopes that Linen modules have, by their attribute path.

An equation's scope says which registered task it belongs to. Linen enters a scope in each method
call; NNX enters none. While a function runs on a model here, a call of `model.blocks[0].attn`
enters the scope `blocks/0/attn`: relative to the module that it is called from, so that scopes
nest as calls do.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
from flax import nnx

from multimesh.errors import UsageError

__all__ = ["module_scopes", "scope_name"]

Path = tuple[Any, ...]

# Where a module notes its paths. `nnx.remat`, `nnx.jit` and the like take modules apart and build
# new ones: an attribute goes with them, an identity would not.
_PATHS = "_multimesh_paths"

# Their attributes are their elements, and they compute nothing.
_CONTAINERS = (nnx.List, nnx.Dict)


def scope_name(path: Path) -> str:
    """The name scope of a path: `("blocks", 0)` is `blocks/0`."""
    return "/".join(map(str, path))


@contextlib.contextmanager
def module_scopes(model: nnx.Module) -> Iterator[None]:
    """While it lasts, the methods of a model's modules enter the scopes of their modules.

    The methods of the modules' classes are replaced, and put back at the end.

    Args:
      model: A model of which nothing is kept: its modules are marked.
    """
    modules = [module for _, module in nnx.iter_modules(model)]
    _note_paths(model)
    running: list[Path] = [()]
    with contextlib.ExitStack() as restore:
        for owner in _classes(modules):
            for name, method in list(vars(owner).items()):
                if _is_method(name, method):
                    setattr(owner, name, _in_scope(method, running))
                    restore.callback(setattr, owner, name, method)
        yield


def _note_paths(model: nnx.Module) -> None:
    """Marks each module with all its paths: one that is shared has several."""
    shared = {paths[0]: tuple(paths) for paths in nnx.find_duplicates(model, only=nnx.Module)}
    paths_of: dict[int, tuple[Path, ...]] = {}
    for path, module in nnx.iter_modules(model):
        if not isinstance(module, _CONTAINERS):
            paths_of[id(module)] = shared.get(path, (path,))
            object.__setattr__(module, _PATHS, paths_of[id(module)])


def _classes(modules: list[nnx.Module]) -> list[type]:
    """The classes that define what the modules do, without NNX's own bases."""
    found = {
        owner: None
        for module in modules
        if not isinstance(module, _CONTAINERS)
        for owner in type(module).__mro__
        if issubclass(owner, nnx.Module) and owner is not nnx.Module
    }
    return list(found)


def _is_method(name: str, value: Any) -> bool:
    """Whether a class attribute is a public method: a function, or what a transform made of one."""
    if name.startswith("_") and name != "__call__":
        return False
    return (
        callable(value)
        and hasattr(value, "__get__")
        and not isinstance(value, type | staticmethod | classmethod)
    )


def _in_scope(method: Any, running: list[Path]) -> Callable:
    """Wraps a method; `running` has the path of each module that is being called."""

    @functools.wraps(method)
    def call(module, *args, **kwargs):
        bound = method.__get__(module, type(module))
        path = _path(module, running[-1])
        if path == running[-1]:  # one method of a module calls another
            return bound(*args, **kwargs)
        inside = path[: len(running[-1])] == running[-1]
        running.append(path)
        try:
            with jax.named_scope(scope_name(path[len(running[-2]) :] if inside else path)):
                return bound(*args, **kwargs)
        finally:
            running.pop()

    return call


def _path(module: nnx.Module, caller: Path) -> Path:
    """The path of a module; of a shared one, that through which its caller holds it."""
    paths = getattr(module, _PATHS, None)
    if paths is None:  # made during the call
        return caller
    paths = [path for path in paths if path[: len(caller)] == caller] or paths
    nearest = [path for path in paths if len(path) == min(map(len, paths))]
    if len(nearest) > 1:
        raise UsageError(
            f"A module must have one place. Got a {type(module).__name__} that is at "
            f"{' and at '.join(map(scope_name, nearest))}: which of them a call means, and so its "
            "stage, cannot be known. Use two modules that share their Params, as in "
            "`second.kernel = first.kernel`."
        )
    return nearest[0]
