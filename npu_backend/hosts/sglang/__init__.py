"""SGLang as a host: its objects as a plan's records, its NPU functions through bound layers.

SGLang calls :func:`register` by the entry-point group ``sglang.srt.plugins``, once in each process,
before it publishes its context and before a model loads. Nothing is decided then: hooks are set,
and the plan is made when a runner has loaded its model. See ``docs/sglang.md``.
"""

from __future__ import annotations

import logging
import os
from importlib import import_module

__all__ = ["register"]

logger = logging.getLogger(__name__)


def _device_is_missing() -> str | None:
    """Return why this process has no NPU, in SGLang's own judgement, or None where it has one."""
    try:
        there = import_module("sglang.srt.utils").is_npu()
    except RuntimeError as err:
        return str(err)
    return None if there else "SGLang runs on another device"


def register() -> None:
    """Set the hooks, or say once why SGLang runs as if npu-backend were not installed."""
    if os.environ.get("NPU_BACKEND_SGLANG", "").strip().lower() in ("0", "false", "no", "off"):
        logger.info("npu-backend: off by NPU_BACKEND_SGLANG; SGLang runs as if it were not there")
        return
    if (missing := _device_is_missing()) is not None:
        logger.info("npu-backend: no NPU (%s); SGLang runs as if it were not there", missing)
        return
    from npu_backend.hosts.sglang.adapter import make_adapter

    hooks = import_module("sglang.srt.plugins.hook_registry")
    make_adapter(os.environ).register(hooks.HookRegistry, hooks.HookType)
