"""Whether this is the SGLang that was read: its version, its signatures, its patched functions."""

from __future__ import annotations

import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any

from npu_backend.errors import NpuBackendError, PlanMismatchError
from npu_backend.hosts.sglang.targets import HOOKED, KNOWN

__all__ = ["check_host", "check_patched", "original_of", "reason_of", "sglang_version"]

_OVERRIDE = (
    "install SGLang "
    + ", ".join(KNOWN)
    + ", or set NPU_BACKEND_SGLANG_ANY_VERSION=1 to use it all the same"
)


def sglang_version() -> str | None:
    """Return the installed SGLang's version, or None where it is no installed package."""
    try:
        return metadata.version("sglang")
    except metadata.PackageNotFoundError:
        return None


def original_of(function: Any) -> Any:
    """Return the function below all wrappers."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _parameters(function: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(original_of(function)).parameters)


def _differences(
    known: Mapping[str, tuple[str, ...]], resolve: Callable[[str], Any]
) -> Iterable[str]:
    for target, wanted in known.items():
        try:
            found = _parameters(resolve(target))
        except (ImportError, AttributeError, ValueError, TypeError) as err:
            yield f"{target} is not there: {type(err).__name__}: {err}"
            continue
        if found != wanted:
            yield f"{target} takes ({', '.join(found)}), known is ({', '.join(wanted)})"


def check_host(
    version: str | None,
    *,
    any_version: bool = False,
    resolve: Callable[[str], Any] = pkgutil.resolve_name,
) -> tuple[str, ...]:
    """Hold SGLang against the versions and signatures that are known.

    Args:
        version: The installed version.
        any_version: Go on all the same.
        resolve: Returns a function by its dotted name.

    Returns:
        What differs, where ``any_version`` lets it pass.

    Raises:
        PlanMismatchError: The version or a signature is not known.
    """
    found = []
    if version not in KNOWN:
        said = "has no version" if version is None else f"is {version}"
        found.append(f"SGLang {said}; read and known: {', '.join(KNOWN)}")
    if not found or any_version:
        # Of a version that is not known, signatures are worth looking at only if it shall be used.
        found += _differences(KNOWN.get(version or "", HOOKED), resolve)
    if found and not any_version:
        raise PlanMismatchError(
            "this SGLang is not known",
            whom=f"SGLang {version or '(no version)'}",
            why=found,
            remedy=_OVERRIDE,
        )
    return tuple(found)


def _chain(function: Any) -> Iterable[Any]:
    while function is not None:
        yield function
        function = getattr(function, "__wrapped__", None)


def _stale(names: Mapping[int, str]) -> Iterable[str]:
    """Yield what still calls a function as it was: module attributes, partials and tables.

    Args:
        names: Name of each function as it was, by its ``id``.
    """
    for at, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or not at.startswith("sglang"):
            continue
        for attribute, value in list(vars(module).items()):
            if (name := names.get(id(value))) is not None:
                yield f"{at}.{attribute} is {name} as it was"
            elif isinstance(value, functools.partial):
                if (name := names.get(id(value.func))) is not None:
                    yield f"{at}.{attribute} is a partial of {name} as it was"
            elif isinstance(value, dict):
                # As dict has them: mappings that import what they hold are left asleep.
                held = {names[id(v)] for v in list(dict.values(value)) if id(v) in names}
                for name in sorted(held):
                    yield f"{at}.{attribute} holds {name} as it was"


def check_patched(
    targets: Iterable[str],
    *,
    resolve: Callable[[str], Any] = pkgutil.resolve_name,
    applied: Callable[[str], bool] | None = None,
) -> None:
    """Check that each target really is patched: SGLang only logs where it could not.

    Args:
        targets: Dotted names.
        resolve: Returns a function by its dotted name.
        applied: Whether SGLang's registry says that a target's hooks were applied.

    Raises:
        PlanMismatchError: One is not patched, or something still holds it as it was.
    """
    found: list[str] = []
    originals: dict[int, str] = {}
    for target in targets:
        function = resolve(target)
        if not hasattr(function, "__wrapped__"):
            found.append(f"{target} is not patched: it has no __wrapped__")
            continue
        if applied is not None and not applied(target):
            found.append(f"SGLang's registry did not apply the hooks of {target}")
        originals[id(list(_chain(function))[-1])] = target.rpartition(".")[2]
    found += _stale(originals)
    if found:
        raise PlanMismatchError(
            "SGLang is not patched as it should be",
            whom="npu-backend's SGLang adapter",
            why=found,
            remedy="see SGLang's log for the hook that failed; nothing was planned or released",
        )


def reason_of(error: BaseException) -> str:
    """Return an error as text; one of this project's has its four parts already."""
    return str(error) if isinstance(error, NpuBackendError) else f"{type(error).__name__}: {error}"
