"""Gives NNX modules the name scopes that Linen modules have, by their attribute path.

An equation's scope says which registered task it belongs to. Linen enters a scope in each method
call; NNX enters none. While a function runs on a model here, a call of `model.blocks[0].attn`
enters the scope `blocks/0/attn`: relative to the module that it is called from, so that scopes
nest as calls do.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jax
from flax import nnx

from multimesh.errors import UsageError

__all__ = ["module_scopes", "scope_name"]

Path = tuple[Any, ...]
Paths = tuple[Path, ...]

# Where a module notes its paths. `nnx.remat`, `nnx.jit` and the like take modules apart and build
# new ones: an attribute goes with them, an identity would not.
_PATHS = "_multimesh_paths"

# It takes each attribute for a variable of the Linen module that it wraps.
_UNMARKED = (nnx.bridge.ToNNX,)

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
    modules = {
        path: module
        for path, module in nnx.iter_modules(model)
        if not isinstance(module, _CONTAINERS)
    }
    shared = {paths[0]: tuple(paths) for paths in nnx.find_duplicates(model, only=nnx.Module)}
    unmarked: dict[int, Paths] = {}
    for path, module in modules.items():
        paths = shared.get(path, (path,))
        if isinstance(module, _UNMARKED):
            unmarked[id(module)] = paths
        else:
            object.__setattr__(module, _PATHS, paths)
    calls: list[Paths] = [((),)]
    with contextlib.ExitStack() as restore:
        for owner in _classes(modules.values()):
            for name, method in list(vars(owner).items()):
                if _is_method(name, method):
                    setattr(owner, name, _in_scope(method, calls, unmarked))
                    restore.callback(setattr, owner, name, method)
        yield


def _classes(modules: Iterable[nnx.Module]) -> list[type]:
    """The classes that define what the modules do, without NNX's own bases."""
    owners = (owner for module in modules for owner in type(module).__mro__)
    found = {o: None for o in owners if issubclass(o, nnx.Module) and o is not nnx.Module}
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


def _in_scope(method: Any, calls: list[Paths], unmarked: Mapping[int, Paths]) -> Callable:
    """Wraps a method.

    Args:
      method: The method.
      calls: The paths of each module that is being called.
      unmarked: By identity, the paths of modules that cannot note them.
    """

    @functools.wraps(method)
    def call(module, *args, **kwargs):
        bound = method.__get__(module, type(module))
        paths = getattr(module, _PATHS, unmarked.get(id(module)))
        # A module that is made during the call has no path; one of its own methods adds nothing.
        if paths is None or paths == calls[-1]:
            return bound(*args, **kwargs)
        with jax.named_scope(scope_name(_path_from(calls[-1], paths, type(module).__name__))):
            calls.append(paths)
            try:
                return bound(*args, **kwargs)
            finally:
                calls.pop()

    return call


def _path_from(caller: Paths, paths: Paths, name: str) -> Path:
    """The path from a module to one that it calls; from the model if it only got it handed."""
    below = {
        path[len(start) :] for start in caller for path in paths if path[: len(start)] == start
    }
    found = below or set(paths)
    shortest = min(map(len, found))
    nearest = sorted((path for path in found if len(path) == shortest), key=str)
    if len(nearest) > 1:
        raise UsageError(
            f"A module must have one place. Got a {name} that is at "
            f"{' and at '.join(map(scope_name, nearest))}: which of them a call means, and so its "
            "stage, cannot be known. Use two modules that share their Params, as in "
            "`second.kernel = first.kernel`."
        )
    return nearest[0]
