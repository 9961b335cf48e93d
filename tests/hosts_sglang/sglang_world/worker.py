"""Run all cases of one chip in this process, with or without the plugin; write what came out.

``python -m sglang_world.worker CHIP PLUGINS FILE``: ``PLUGINS`` is what ``SGLANG_PLUGINS`` lets in.
A case that fails leaves its traceback in the place of its results.
"""

from __future__ import annotations

import gc
import os
import sys
import traceback
from typing import Any

import torch

from npu_backend.runtime import is_tombstone
from sglang_world.cases import CASES, Case
from sglang_world.engine import Worker, hidden_of, prepare, published
from sglang_world.reference import Loaded, expected
from sglang_world.start import start

__all__ = ["main", "run"]

_ALIVE: list[Worker] = []
"""The adapter knows models by their identity, which must not be another's later."""


def _held() -> int:
    gc.collect()
    return int(torch.npu.memory_stats()["requested_bytes.all.current"])


def _fill(worker: Worker) -> None:
    """Put the same random rows into every page, as if requests had been there."""
    made = torch.Generator().manual_seed(1)
    pool = worker.pool
    for buffer in (pool.k_buffer, pool.v_buffer, pool.index_k_buffer):
        if buffer is not None:
            buffer.copy_(torch.randn(buffer.shape, generator=made).to(buffer.dtype))


def _pages(worker: Worker) -> dict[str, torch.Tensor]:
    pool = worker.pool
    named = {"latent": pool.k_buffer, "rope": pool.v_buffer, "index": pool.index_k_buffer}
    return {name: buffer.cpu() for name, buffer in named.items() if buffer is not None}


def _session(worker: Worker) -> Any:
    """Return the adapter's session of a worker's model, or None where SGLang is alone."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    for hooks in HookRegistry._hooks.values():
        for _, hook, _ in hooks:
            adapter = getattr(hook, "__self__", None)
            if hasattr(adapter, "sessions"):
                return adapter.sessions.get(id(worker.runner.model))
    return None


def _beside(session: Any) -> dict[str, int]:
    """Return bytes that the adapter holds beside weights: none of them is a weight's copy."""
    scales = {id(t): t.nbytes for p in session.parts for t in _converted(p.weights)}
    tables = [t for pair in session._tables.values() for t in pair if t is not None]
    return {"scales": sum(scales.values()), "tables": sum(t.nbytes for t in tables)}


def _converted(weights: Any) -> list[torch.Tensor]:
    found = (weights.tensors[name] for name in weights.converted)
    return [t for t in found if not is_tombstone(t)]


def _against_reference(worker: Worker, layer: Loaded, case: Case) -> dict[str, Any]:
    """Run a layer's decode steps as far as attention; return them beside what they must be.

    Where SGLang fails by itself, its error is what comes out.
    """
    functions, pool = start().npu_mod, worker.pool
    steps = []
    for step in (s for s in case.steps if s.mode == "DECODE"):
        batch, hidden = worker.batch(step), hidden_of(step)
        latent, rope = (buffer[0].cpu() for buffer in (pool.k_buffer, pool.v_buffer))
        places = batch.positions.cpu(), batch.out_cache_loc.cpu()
        query, turned = expected(layer, hidden, *places, latent, rope)
        try:
            with worker.forward(batch):
                q_pe, k_pe, q_nope, k_nope, *_ = functions.forward_mla_prepare_npu(
                    worker.attentions[0], batch.positions, hidden.to("npu"), batch, None, False
                )
        except Exception as err:
            return {"error": f"{type(err).__name__}: {err}", "plan": None}
        steps.append(
            {
                "q_nope": (q_nope.cpu(), query),
                "q_pe": (q_pe.cpu(), turned),
                "latent": (k_nope.cpu().view(latent.shape), latent),
                "rope": (k_pe.cpu().view(rope.shape), rope),
            }
        )
    session = _session(worker)
    return {"steps": steps, "plan": None if session is None else session.current_plan().to_json()}


def run(case: Case) -> dict[str, Any]:
    """Run one case."""
    from sglang.srt.hardware_backend.npu.attention import mla_preprocess
    from sglang.srt.layers.rotary_embedding import factory

    # SGLang shares embeddings by their arguments, and DSA layers leave a step's rows in theirs.
    factory._ROPE_DICT.clear()
    os.environ["SGLANG_NPU_USE_MLAPO"] = str(int(case.mlapo))
    mla_preprocess.is_mla_preprocess_enabled.cache_clear()
    with published(case.model, case.role) as server:
        before = _held()
        layers: list[Loaded] = []
        prolog = case.path == "mlaprolog" and not case.model.dsa
        worker = Worker(
            server, lambda layer: layers.append(Loaded(layer, case.model.quant)) if prolog else None
        )
        loaded = _held()
        worker.allocate()
        _ALIVE.append(worker)
        _fill(worker)
        began = _held()
        if prolog:
            return _against_reference(worker, layers[0], case)
        outputs = [[t.cpu() for t in worker.step(step)] for step in case.steps]
        session = _session(worker)
        return {
            "outputs": outputs,
            "pages": _pages(worker),
            "loaded": loaded - before,
            "start": began - before,
            "held": _held() - before,
            "plan": None if session is None else session.current_plan().to_json(),
            "beside": {} if session is None else _beside(session),
        }


def main(soc: str, plugins: str, file: str) -> None:
    """Run the cases of a chip."""
    os.environ["NPU_BACKEND_SIM_SOC"] = soc
    os.environ["NPU_BACKEND_STRICT"] = "1"
    prepare(plugins)
    gc.freeze()  # what SGLang imported stays; collecting over it again takes half a second
    found: dict[str, Any] = {}
    for case in CASES:
        if case.soc == soc:
            try:
                found[case.name] = run(case)
            except Exception:
                found[case.name] = {"failed": traceback.format_exc()}
    torch.save(found, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
