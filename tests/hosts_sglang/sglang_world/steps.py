"""Steps through SGLang's own NPU functions, by a batch that has what they ask for."""

from __future__ import annotations

import types
from importlib import import_module
from typing import Any

import torch

from sglang_world.start import NPU_MODULE

__all__ = ["Gone", "batch_of", "prepare", "served"]


class Gone(Exception):
    """SGLang's own function was reached though a route should serve."""


def batch_of(mode: str, slots: torch.Tensor) -> Any:
    """Return a forward batch of one of SGLang's modes."""
    modes = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
    return types.SimpleNamespace(forward_mode=modes[mode], out_cache_loc=slots)


def inputs(rows: int, hidden: int = 7168, seed: int = 1) -> tuple[torch.Tensor, ...]:
    """Return hidden states, positions and slots of a step."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn((rows, hidden), generator=generator).to(torch.bfloat16)
    places = torch.arange(rows, dtype=torch.int64)
    return states.to("npu"), (places + 3).to("npu"), (places + 128).to("npu")


def prepare(attention: Any, mode: str = "DECODE", rows: int = 3, **more: Any) -> tuple[Any, ...]:
    """Run ``forward_mla_prepare_npu`` or, of a DSA layer, ``forward_dsa_prepare_npu``."""
    states, positions, slots = inputs(rows)
    functions, batch = import_module(NPU_MODULE), batch_of(mode, slots)
    if attention.use_dsa:
        call, chosen = functions.forward_dsa_prepare_npu, more.get("chosen")
        return call(attention, positions, states, batch, None, False, chosen)
    return functions.forward_mla_prepare_npu(attention, positions, states, batch, None, False)


def served(attention: Any, mode: str = "DECODE", rows: int = 3, **more: Any) -> list[torch.Tensor]:
    """Return a step's rotated and absorbed queries, and the cache rows it wrote, on the CPU."""
    q_pe, k_pe, q_nope, k_nope, *_ = prepare(attention, mode, rows, **more)
    slots = inputs(rows)[2].cpu()
    flat = [cache.cpu().reshape(-1, cache.shape[-1])[slots] for cache in (k_pe, k_nope)]
    return [q_pe.cpu(), q_nope.cpu(), *flat]
