"""One rank of two: loads a model in several scenarios and prints what it met, as JSON."""

from __future__ import annotations

import gc
import json
import logging
import sys
import types
from contextlib import ExitStack
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
RANK, STORE = int(sys.argv[1]), sys.argv[2]
FUSED = {"SGLANG_NPU_USE_MLAPO": "1"}


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def scenario(name: str, environ: dict[str, str]) -> dict[str, Any]:
    from sglang_world.model import Runner, attentions, build, config_of, published

    from npu_backend.hosts.sglang import ranks, session
    from npu_backend.hosts.sglang.adapter import make_adapter
    from npu_backend.hosts.sglang.route import route_of
    from npu_backend.runtime import is_tombstone

    gc.collect()
    dist = import_module("torch.distributed")
    seen = Lines()
    logging.getLogger("npu_backend").addHandler(seen)
    logging.getLogger("npu_backend").setLevel(logging.INFO)
    error, kept = None, []
    adapter = make_adapter(environ)
    with ExitStack() as stack:
        context = stack.enter_context(published(disaggregation_mode="decode"))
        group = types.SimpleNamespace(cpu_group=dist.group.WORLD, world_size=2)
        stack.enter_context(context.get_parallel().override(tp_group=group))
        model = build(config_of(layers=2))
        if RANK == 1 and name == "alias":
            kept.append(attentions(model)[1].w_kc.view(-1, 512)[:1])
        bind, release = session.bind, session.prepare_and_release
        if RANK == 1 and name == "unbound":
            session.bind = failing("no memory to prepare with")
        if RANK == 1 and name == "unreleased":
            session.prepare_and_release = failing("the device was lost")
        if name == "absent":
            ranks.PATIENCE = timedelta(seconds=3)
        try:
            if not (name == "absent" and RANK == 1):
                adapter.after_load(None, Runner(model))
        except Exception as err:
            error = {"type": type(err).__name__, "text": str(err)}
        finally:
            session.bind, session.prepare_and_release = bind, release
    logging.getLogger("npu_backend").removeHandler(seen)
    parts = attentions(model).values()
    return {
        "error": error,
        "lines": seen.lines,
        "applied": bool(adapter.sessions),
        "released": sorted({n for a in parts for n in ("w_kc",) if is_tombstone(getattr(a, n))}),
        "routed": any(route_of(a) is not None for a in parts),
        "strides": [list(a.w_kc.stride()) for a in parts],
        "refused": any("_derived_weight_cache_error" in vars(a) for a in parts),
    }


def failing(text: str) -> Any:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError(text)

    return fail


SCENARIOS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    # name: environment of rank 0, of rank 1
    "agree": (FUSED, FUSED),
    "differ": (FUSED, {}),
    "unread": (FUSED, {**FUSED, "NPU_BACKEND_SGLANG_PROMISES": "moon"}),
    "unbound": (FUSED, FUSED),
    "alias": (FUSED, FUSED),
    "unreleased": (FUSED, FUSED),
    "absent": (FUSED, FUSED),
}


def main() -> None:
    from sglang_world.start import start

    start()
    dist = import_module("torch.distributed")
    dist.init_process_group("gloo", init_method=f"file://{STORE}", rank=RANK, world_size=2)
    adapters = import_module("npu_backend.hosts.sglang.adapter")
    # Hooks are set by SGLang's registry in test_load; here the two ranks' talk is looked at.
    adapters.check_patched = lambda *_, **__: None
    found = {name: scenario(name, both[RANK]) for name, both in SCENARIOS.items()}
    print(json.dumps(found))


main()
