"""What a plugin must look like before pluggy sees any of it.

pluggy accepts keyword-only and defaulted parameters and then never passes them, ignores marked
things that are no functions, and finds unknown hooks only in a later check. Here all reasons are
collected and the plugin is refused as a whole.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from attrs import frozen

from npu_backend import hookspecs
from npu_backend.catalog.versions import suggest
from npu_backend.hookspecs import hookimpl
from npu_backend.offers import PluginInfo
from npu_backend.registry.records import plugin_error

__all__ = ["HOOK_ARGUMENTS", "Implementation", "implementations"]

_MARK = f"{hookimpl.project_name}_impl"

HOOK_ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    name: tuple(inspect.signature(getattr(hookspecs, name)).parameters)
    for name in ("select_preprocess_path", "select_bmm_kernel", "release_weights")
}
"""Arguments of each hook, in the order in which guarded implementations get them."""


@frozen
class Implementation:
    """One function of a plugin that implements a hook.

    Args:
        hook: Name of the hook.
        function: Bound, with the arguments that it takes.
        arguments: Which of the hook's arguments it takes, by index; None: all, in order.
        tryfirst: pluggy's flag.
        trylast: pluggy's flag.
        wrapper: pluggy's flag.
    """

    hook: str
    function: Callable[..., Any]
    arguments: tuple[int, ...] | None = None
    tryfirst: bool = False
    trylast: bool = False
    wrapper: bool = False


def implementations(plugin: object, info: PluginInfo) -> tuple[Implementation, ...]:
    """Return what a plugin implements.

    A plugin is a module or an object. A class is refused: it is not said whether its methods are
    to be called with an instance, and creating one is the plugin's business.

    Raises:
        PluginError: It is no plugin, or something in it is not as the hooks ask.
    """
    if isinstance(plugin, type):
        raise plugin_error(
            info,
            "is a class",
            whom="the registration of its hooks",
            why=f"an entry point names a module or an object, and {plugin.__name__} is neither",
            remedy="create the instance in the module and let the entry point name that",
        )
    faults: list[str] = []
    found: list[Implementation] = []
    for name, options, static in _marked(plugin):
        hook = options.get("specname") or name
        if hook not in HOOK_ARGUMENTS:
            if not options.get("optionalhook"):
                faults.append(f"{name}: no hook is called {hook!r}{suggest(hook, HOOK_ARGUMENTS)}")
            continue
        if not isinstance(static, _FUNCTIONS):
            faults.append(f"{name}: is marked, but is a {type(static).__name__} and no function")
            continue
        function = getattr(plugin, name)
        problems = [*_option_faults(options, function), *_signature_faults(hook, function)]
        faults.extend(f"{name}: {problem}" for problem in problems)
        if not problems:
            found.append(_implementation(hook, function, options))
    if faults:
        raise plugin_error(
            info,
            "does not fit the hooks",
            whom="the registration of its hooks",
            why=faults,
            remedy="correct the implementations as npu_backend.hookspecs describes them; until "
            "then none of this plugin's hooks is called",
        )
    if not found:
        raise plugin_error(
            info,
            "implements no hook",
            whom="the registration of its hooks",
            why=_why_none(plugin),
            remedy="mark the functions with npu_backend.hookspecs.hookimpl, and let the entry "
            "point name the module that holds them",
        )
    return tuple(found)


_FUNCTIONS = (types.FunctionType, types.MethodType, staticmethod, classmethod)


def _marked(plugin: object) -> Iterator[tuple[str, Mapping[str, Any], object]]:
    """Yield name, marker options and the attribute as it is stored, sorted by name.

    Looked up statically: a property, or a lazy module, must not run because it was looked at.
    """
    for name in sorted(dir(plugin)):
        static = inspect.getattr_static(plugin, name, None)
        holder: object = static
        if isinstance(static, (staticmethod, classmethod, types.MethodType)):
            holder = static.__func__
        elif isinstance(static, property):
            holder = static.fget
        elif isinstance(static, functools.cached_property):
            holder = static.func
        for candidate in (static, holder):
            options = _own_dict(candidate).get(_MARK)
            if isinstance(options, dict):
                yield name, options, static
                break


def _own_dict(value: object) -> Mapping[str, Any]:
    try:
        own = object.__getattribute__(value, "__dict__")
    except AttributeError:  # slots, numbers, strings: nothing can be marked there
        return {}
    return own if isinstance(own, Mapping) else {}


def _option_faults(options: Mapping[str, Any], function: Callable[..., Any]) -> Iterator[str]:
    if options.get("hookwrapper"):
        yield "hookwrapper=True is the old style; use wrapper=True and return the answers"
        return
    if options.get("tryfirst") and options.get("trylast"):
        yield "tryfirst and trylast contradict each other"
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        yield "is async, and hooks are called without a loop"
    elif inspect.isgeneratorfunction(function) and not options.get("wrapper"):
        yield "yields; return a list, or mark it wrapper=True"
    elif options.get("wrapper") and not inspect.isgeneratorfunction(function):
        yield "is marked wrapper=True and does not yield"


def _signature_faults(hook: str, function: Callable[..., Any]) -> Iterator[str]:
    known = HOOK_ARGUMENTS[hook]
    takes = f"{hook} has the arguments {', '.join(known)}"
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as err:
        yield f"its signature cannot be read: {err}"
        return
    for parameter in parameters:
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            yield f"{parameter} is never filled; {takes}"
        elif parameter.name not in known:
            yield f"argument {parameter.name!r} is unknown{suggest(parameter.name, known)}; {takes}"
        elif parameter.kind is parameter.KEYWORD_ONLY:
            yield f"argument {parameter.name!r} is keyword-only and would never be passed"
        elif parameter.default is not parameter.empty:
            yield f"argument {parameter.name!r} has a default, which would never count"


def _implementation(
    hook: str, function: Callable[..., Any], options: Mapping[str, Any]
) -> Implementation:
    known = HOOK_ARGUMENTS[hook]
    taken = tuple(known.index(name) for name in inspect.signature(function).parameters)
    return Implementation(
        hook=hook,
        function=function,
        arguments=None if taken == tuple(range(len(known))) else taken,
        tryfirst=bool(options.get("tryfirst")),
        trylast=bool(options.get("trylast")),
        wrapper=bool(options.get("wrapper")),
    )


def _why_none(plugin: object) -> Iterable[str]:
    if isinstance(plugin, types.FunctionType) and _MARK in vars(plugin):
        return (f"it is the function {plugin.__name__}, not the module that holds it",)
    kind = type(plugin).__name__
    unmarked = [name for name in HOOK_ARGUMENTS if inspect.getattr_static(plugin, name, None)]
    if unmarked:
        return tuple(
            f"{name} is there, but carries no @hookimpl of npu_backend" for name in unmarked
        )
    return (f"nothing in the {kind} carries @hookimpl of npu_backend",)
