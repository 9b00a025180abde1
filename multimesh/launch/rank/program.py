"""Runs the user's Python program inside a rank as plain `python` would.

`sys.argv`, `sys.path[0]`, `__main__` and its attributes are what the program would see without
mmrun; only the way in which an uncaught exception ends it differs (`failure` says why).
"""

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
import types

from multimesh.launch import failure, wire

__all__ = ["run_program"]

_OWN_FILES = (__file__, "<frozen runpy>", runpy.__file__)


def run_program(arguments: list[str], *, safe_path: bool, alone: bool):
    """Runs a program to its end.

    Args:
      arguments: What follows the interpreter and its options: `script.py ARGS...`,
        `-m module ARGS...` or `-c code ARGS...`.
      safe_path: Whether the interpreter was asked to leave `sys.path` alone (`-P`, `-I`).
      alone: Whether this is the only rank, which may then leave as slowly as Python likes.

    Returns:
      Normally, when the program ended with exit code 0. Otherwise not at all.
    """
    process = os.getpid()
    try:
        _run(arguments, safe_path)
    except BaseException as exc:
        if os.getpid() != process:
            failure.leave_forked(exc)
        _end_by(exc, alone)
    if os.getpid() != process:
        return
    if not alone:
        failure.watch_exit_hooks(lambda exc: _end_by(exc, alone))
    wire.notify(wire.Kind.FINISHED)


def _end_by(exc, alone):
    """Ends this process by an exception that nothing caught, unless its exit code is 0."""
    code = failure.exit_code(exc)
    if code:
        text = _describe(exc)
        # A stall names the rank that was waited for.
        report = {"code": code, "traceback": text, "culprit": getattr(exc, "culprit", None)}
        if alone or not wire.notify(wire.Kind.FAILING, report):
            sys.stderr.write(text)
        sys.exit(code) if alone else failure.leave(code)


def _run(arguments, safe_path):
    first, *rest = arguments
    if first.startswith("-m"):
        module, rest = (first[2:], rest) if first[2:] else (rest[0], rest[1:])
        _set_command_line("-m", rest, None if safe_path else os.getcwd())
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    elif first.startswith("-c"):
        code, rest = (first[2:], rest) if first[2:] else (rest[0], rest[1:])
        _set_command_line("-c", rest, None if safe_path else "")
        _run_as_main(compile(code, "<string>", "exec", dont_inherit=True), {})
    elif os.path.isdir(first) or first.endswith((".zip", ".pyz")):
        _set_command_line(first, rest, None)
        runpy.run_path(first, run_name="__main__")
    else:
        folder = os.path.dirname(os.path.realpath(first))
        _set_command_line(first, rest, None if safe_path else folder)
        path = os.path.abspath(first)
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        loader = importlib.machinery.SourceFileLoader("__main__", path)
        _run_as_main(code, {"__file__": path, "__loader__": loader, "__cached__": None})


def _set_command_line(name, rest, folder):
    sys.argv[:] = [name, *rest]
    # The interpreter runs with `-P`, so nothing was put in front of the path that could hide
    # this package or the standard library while the rank was starting.
    if folder is not None:
        sys.path.insert(0, folder)


def _run_as_main(code, attributes):
    main = types.ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, **attributes)
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _describe(exc) -> str:
    """What to show of an exception; empty if the program's own hook has shown it."""
    if isinstance(exc, SystemExit):
        return "" if isinstance(exc.code, int) else f"{exc.code}\n"
    failure.give_way_to_first(exc)
    hook = sys.excepthook
    if isinstance(hook, failure.JobEndingHook):
        hook = hook.previous
    if hook is not sys.__excepthook__:
        hook(type(exc), exc, exc.__traceback__)
        return ""
    return failure.format_exception(exc, _OWN_FILES)
