"""Which plugins may load: the allow list, the block list, strictness.

Arguments and environment combine like this: an allow list given as argument replaces
``NPU_BACKEND_PLUGINS``; a block list adds to ``NPU_BACKEND_DISABLE``, so that nothing can undo an
operator's block; ``strict`` given as argument replaces ``NPU_BACKEND_STRICT``. A block beats an
allowance. An empty variable is as good as none; an empty allow list as argument allows nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from attrs import frozen
from packaging.utils import canonicalize_name

from npu_backend.catalog.versions import suggest
from npu_backend.errors import PluginError
from npu_backend.offers import PluginInfo
from npu_backend.registry.discovery import CORE_DISTRIBUTION
from npu_backend.values import items

__all__ = ["ALLOW_VARIABLE", "BLOCK_VARIABLE", "STRICT_VARIABLE", "Controls"]

ALLOW_VARIABLE = "NPU_BACKEND_PLUGINS"
BLOCK_VARIABLE = "NPU_BACKEND_DISABLE"
STRICT_VARIABLE = "NPU_BACKEND_STRICT"

_TRUE = ("1", "true", "yes", "on")
_FALSE = ("", "0", "false", "no", "off")


@frozen
class _Names:
    """Names given in one place, and the place, for messages."""

    words: tuple[str, ...]
    source: str

    @classmethod
    def of_argument(cls, value: Iterable[str] | str, argument: str) -> _Names:
        source = f"the argument {argument}"
        if isinstance(value, str):
            return cls(_split(value), source)
        words = items(PluginError, source, value, "names of plugins")
        for word in words:
            if not isinstance(word, str):
                raise PluginError(
                    f"{word!r:.80} is no plugin",
                    whom=source,
                    why=f"it is a {type(word).__name__}",
                    remedy="give names of plugins",
                )
        return cls(words, source)

    def match(self, info: PluginInfo) -> str | None:
        return next((word for word in self.words if _matches(word, info)), None)


@frozen
class Controls:
    """What may load.

    Args:
        allow: The allow list, or None where everything may.
        block: Every block list.
        third_party: Whether other distributions' plugins may.
        strict: Whether a failure is an error.
    """

    allow: _Names | None = None
    block: tuple[_Names, ...] = ()
    third_party: bool = True
    strict: bool = False

    @classmethod
    def read(
        cls,
        environ: Mapping[str, str],
        *,
        enable: Iterable[str] | str | None = None,
        disable: Iterable[str] | str = (),
        strict: bool | None = None,
        third_party: bool = True,
    ) -> Controls:
        """Combine arguments and environment.

        Raises:
            PluginError: An argument, or ``NPU_BACKEND_STRICT``, cannot be used.
        """
        for name, value in (("strict", strict), ("third_party", third_party)):
            if not isinstance(value, bool) and not (name == "strict" and value is None):
                raise PluginError(
                    f"{name} = {value!r:.80} is neither true nor false",
                    whom=f"the argument {name}",
                    why=f"it is a {type(value).__name__}",
                    remedy="give True or False",
                )
        allow = None
        if enable is not None:
            allow = _Names.of_argument(enable, "enable")
        elif words := _split(environ.get(ALLOW_VARIABLE, "")):
            allow = _Names(words, ALLOW_VARIABLE)
        block = (
            _Names.of_argument(disable, "disable"),
            _Names(_split(environ.get(BLOCK_VARIABLE, "")), BLOCK_VARIABLE),
        )
        if strict is None:
            strict = _flag(environ.get(STRICT_VARIABLE, ""))
        return cls(allow, block, third_party, strict)

    def check(self, known: Iterable[PluginInfo]) -> None:
        """Refuse names that no plugin has.

        Raises:
            PluginError: A name of a list is neither an entry point's nor a distribution's.
        """
        infos = list(known)
        for names in (*([self.allow] if self.allow else []), *self.block):
            for word in names.words:
                if not any(_matches(word, info) for info in infos):
                    raise _unknown(word, names.source, infos)

    def blocks(self, info: PluginInfo, *, installed: bool = True) -> str | None:
        """Return why a plugin must not load, or None where it may.

        Args:
            info: Who it is.
            installed: It comes from a distribution, not from the hands of a host.
        """
        for names in self.block:
            if word := names.match(info):
                return f"blocked by {word!r} in {names.source}"
        if self.allow is not None and self.allow.match(info) is None:
            return f"not in the allow list of {self.allow.source}"
        if installed and not self.third_party and info.dist != CORE_DISTRIBUTION:
            return "third-party plugins are off"
        return None


def _split(text: str) -> tuple[str, ...]:
    return tuple(word for word in re.split(r"[,\s]+", text) if word)


def _flag(text: str) -> bool:
    word = text.strip().lower()
    if word in _TRUE:
        return True
    if word in _FALSE:
        return False
    raise PluginError(
        f"{text!r} is neither true nor false",
        whom=f"the environment variable {STRICT_VARIABLE}",
        why=f"true is {', '.join(_TRUE)}; false is {', '.join(w for w in _FALSE if w)}",
        remedy=f"set {STRICT_VARIABLE}=1, or unset it",
    )


def _matches(word: str, info: PluginInfo) -> bool:
    """Whether a word is a plugin's name, ``dist/name``, or the distribution's name."""
    dist, slash, name = word.rpartition("/")
    if slash:
        return name == info.name and canonicalize_name(dist) == info.dist
    return word == info.name or canonicalize_name(word) == info.dist


def _unknown(word: str, source: str, infos: Iterable[PluginInfo]) -> PluginError:
    names = sorted({i.name for i in infos} | {i.dist for i in infos})
    full = sorted({f"{i.dist}/{i.name}" for i in infos})
    return PluginError(
        f"{word!r} is no plugin{suggest(word, full if '/' in word else names)}",
        whom=source,
        why="installed plugins are " + ", ".join(full),
        remedy="give an entry point's name, DIST/NAME, or a distribution's name",
    )
