"""The environment variables that the adapter itself reads."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from npu_backend.deployment import PROMISES
from npu_backend.errors import DeploymentError

__all__ = ["Environment"]

_PREFIX = "NPU_BACKEND_SGLANG"


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


@frozen(kw_only=True)
class Environment:
    """What the adapter was told by environment variables.

    Args:
        off: ``NPU_BACKEND_SGLANG=0``: SGLang runs as if npu-backend were not installed.
        shadow: ``NPU_BACKEND_SGLANG_SHADOW=1``: plan, log and compare; change nothing.
        any_version: ``NPU_BACKEND_SGLANG_ANY_VERSION=1``: also on versions and signatures that are
            not known.
        promises: ``NPU_BACKEND_SGLANG_PROMISES``: what SGLang's own arguments do not say, such as
            ``weight_update,export,local_prefill``.
        restore: ``NPU_BACKEND_SGLANG_RESTORE=1``: release restorably instead of keeping what only
            a promise reads.
        requests: ``NPU_BACKEND_SGLANG_REQUESTS``: requests beside the path, such as
            ``v_up=torch.bmm``; a ``path=`` here replaces the one of ``SGLANG_NPU_USE_MLAPO``.
        strict: ``NPU_BACKEND_STRICT=1``: stop instead of standing aside.
    """

    off: bool = False
    shadow: bool = False
    any_version: bool = False
    promises: tuple[str, ...] = ()
    restore: bool = False
    requests: tuple[str, ...] = ()
    strict: bool = False

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> Environment:
        """Read the variables.

        Raises:
            DeploymentError: A promise is unknown.
        """

        def on(name: str) -> bool:
            return environ.get(name, "").strip().lower() in ("1", "true", "yes", "on")

        promises = _words(environ.get(f"{_PREFIX}_PROMISES", ""))
        if unknown := [word for word in promises if word not in PROMISES]:
            raise DeploymentError(
                f"{', '.join(unknown)}: no such promise",
                whom=f"{_PREFIX}_PROMISES",
                why="the promises are " + ", ".join(PROMISES),
                remedy="name some of them, with commas between",
            )
        return cls(
            off=environ.get(_PREFIX, "").strip().lower() in ("0", "false", "no", "off"),
            shadow=on(f"{_PREFIX}_SHADOW"),
            any_version=on(f"{_PREFIX}_ANY_VERSION"),
            promises=promises,
            restore=on(f"{_PREFIX}_RESTORE"),
            requests=_words(environ.get(f"{_PREFIX}_REQUESTS", "")),
            strict=on("NPU_BACKEND_STRICT"),
        )
