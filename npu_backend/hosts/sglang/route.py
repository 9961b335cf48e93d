"""The five functions of SGLang's NPU backend, routed through a bound layer.

Each hook stands around the original: a module without a route is SGLang's. What a step does is
fixed when the layer is bound; here a tuple is indexed by the batch's forward mode.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from npu_backend.deployment import Phase
from npu_backend.errors import BoundExceededError
from npu_backend.runtime import BoundLayer, PreprocessResult

__all__ = ["MODES", "ROUTE", "Route", "hooks", "route_of"]

ROUTE = "_npu_backend_route"
"""Where a module's route stands, in its ``__dict__``; no parameter, no submodule."""

MODES: Mapping[str, Phase] = {
    "EXTEND": Phase.EXTEND,
    "MIXED": Phase.EXTEND,
    "SPLIT_PREFILL": Phase.EXTEND,
    "DLLM_EXTEND": Phase.EXTEND,
    "DECODE": Phase.DECODE,
    "TARGET_VERIFY": Phase.TARGET_VERIFY,
    "DRAFT_EXTEND_V2": Phase.DRAFT_EXTEND,
    "IDLE": Phase.IDLE,
}
"""Phase of each of SGLang's forward modes; ``PREBUILT`` runs no forward."""

Query = Callable[[torch.Tensor], torch.Tensor]


def _unknown(mode: object) -> Callable[..., Any]:
    def refuse(*_: Any, **__: Any) -> Any:
        raise BoundExceededError(
            f"the forward mode {mode} has no phase",
            whom="SGLang",
            why="the modes with a phase are " + ", ".join(MODES),
            remedy="report the mode; NPU_BACKEND_SGLANG=0 leaves SGLang to itself",
            code="phase",
        )

    return refuse


class Route:
    """One attention module's way through its bound layer.

    Args:
        layer: The bound layer.
        modes: SGLang's ``ForwardMode``.
        compressed: ``hidden_states -> q_lora`` from the original weights, where a path's own
            ``q_lora`` is not in the format that the indexer takes; else None.
    """

    __slots__ = ("again", "caches", "layer", "other", "paths", "phases", "v_up")

    def __init__(self, layer: BoundLayer, modes: Any, compressed: Query | None) -> None:
        self.layer = layer
        self.other = compressed
        self.caches: tuple[torch.Tensor, torch.Tensor] = (layer.cache.k_nope, layer.cache.k_rope)
        top = max(int(mode) for mode in modes) + 1
        phases: list[Phase | None] = [None] * top
        for mode in modes:
            phases[int(mode)] = MODES.get(mode.name)
        self.phases = tuple(phases)
        self.again = tuple(
            compressed is not None and phase is not None and self._asks(phase) for phase in phases
        )
        self.refresh()

    def _asks(self, phase: Phase) -> bool:
        """Whether the plan has the indexer read ``fused_qkv_a_proj`` in a phase."""
        row = self.layer.plan.weight("fused_qkv_a_proj")
        return f"indexer@{phase}" in row.readers

    def refresh(self) -> None:
        """Take the layer's callables anew, after an update or a change of what is released."""
        self.paths = tuple(
            _unknown(n) if p is None else self.layer.path_for(p) for n, p in enumerate(self.phases)
        )
        self.v_up = tuple(
            _unknown(n) if p is None else self.layer.v_up_for(p) for n, p in enumerate(self.phases)
        )

    def preprocess(
        self, attention: Any, hidden: torch.Tensor, positions: torch.Tensor, batch: Any
    ) -> tuple[PreprocessResult, torch.Tensor | None, torch.Tensor | None]:
        """Run a step's path; return its result, and what the indexer takes."""
        mode = batch.forward_mode
        slots = batch.out_cache_loc
        if slots.dtype is not torch.int64:  # a conversion to the same dtype would be dispatched too
            slots = slots.to(torch.int64)
        if hidden.shape[0] == 0:
            phase = self.phases[mode] or Phase.IDLE
            result = self.layer.preprocess(hidden, positions, slots, phase=phase)
            return result, result.q_lora, None
        if not self.again[mode]:
            result = self.paths[mode](hidden, positions, slots)
            scale = result.q_lora_scale
            if scale is not None and scale.shape[-1] == 1:
                scale = scale.view(-1)  # SGLang takes one scale a token as (tokens,)
            return result, result.q_lora, scale
        compressed, side = self.other, getattr(attention, "alt_stream", None)
        assert compressed is not None
        if side is None:
            return self.paths[mode](hidden, positions, slots), compressed(hidden), None
        phase = self.phases[mode]
        assert phase is not None
        result, q_lora = self.layer.preprocess_beside(
            hidden,
            positions,
            slots,
            phase=phase,
            other=lambda: compressed(hidden),
            stream=side,
        )
        return result, q_lora, None


def route_of(attention: Any) -> Route | None:
    """Return a module's route, or None where SGLang serves it."""
    found: Route | None = attention.__dict__.get(ROUTE)
    return found


def _gated(attention: Any, values: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    flat = values.reshape(-1, attention.num_local_heads * attention.v_head_dim)
    if gate is not None:
        flat = attention._apply_gated(flat, gate)
    output: torch.Tensor = attention.o_proj(flat)[0]
    return output


def _up(route: Route, attention: Any, values: torch.Tensor, mode: int) -> torch.Tensor:
    rows = values.view(-1, attention.num_local_heads, attention.kv_lora_rank).contiguous()
    up: torch.Tensor = route.v_up[mode](rows)
    return up


def hooks(captured: Callable[[int, Any], Any]) -> dict[str, Callable[..., Any]]:
    """Return the hooks by the name of the function that each stands around.

    Args:
        captured: ``(layer_id, rows) -> rows``: lets SGLang see which rows an indexer chose.
    """

    def npu_mla_preprocess(
        original: Any, m: Any, hidden_states: Any, positions: Any, forward_batch: Any, *rest: Any
    ) -> Any:
        route = m.__dict__.get(ROUTE)
        if route is None:
            return original(m, hidden_states, positions, forward_batch, *rest)
        result, q_lora, scale = route.preprocess(m, hidden_states, positions, forward_batch)
        k_nope, k_pe = route.caches
        return (
            *(result.q_pe, k_pe, result.q_nope, k_nope, q_lora),
            *(forward_batch, rest[0] if rest else None, positions, scale),
        )

    def forward_mla_prepare_npu(
        original: Any,
        m: Any,
        positions: Any,
        hidden_states: Any,
        forward_batch: Any,
        zero_allocator: Any,
        *rest: Any,
    ) -> Any:
        route = m.__dict__.get(ROUTE)
        if route is None:
            return original(m, positions, hidden_states, forward_batch, zero_allocator, *rest)
        result, _, _ = route.preprocess(m, hidden_states, positions, forward_batch)
        k_nope, k_pe = route.caches
        return (
            *(result.q_pe, k_pe, result.q_nope, k_nope),
            *(forward_batch, zero_allocator, positions, None),
        )

    def forward_dsa_prepare_npu(
        original: Any,
        m: Any,
        positions: Any,
        hidden_states: Any,
        forward_batch: Any,
        zero_allocator: Any,
        input_on_attn_tp_slices: Any,
        prev_topk_indices: Any = None,
    ) -> Any:
        route = m.__dict__.get(ROUTE)
        if route is None:
            return original(
                *(m, positions, hidden_states, forward_batch, zero_allocator),
                *(input_on_attn_tp_slices, prev_topk_indices),
            )
        result, q_lora, scale = route.preprocess(m, hidden_states, positions, forward_batch)
        # An MTP layer has an indexer of its own, and uses it where no choice was handed down.
        reuse = m.skip_topk and not (m.is_nextn and prev_topk_indices is None)
        chosen = prev_topk_indices
        if not reuse:
            chosen = m.indexer(
                *(hidden_states, q_lora, positions, forward_batch, m.layer_id),
                *(input_on_attn_tp_slices, scale),
            )
        chosen = captured(m.layer_id, chosen)
        k_nope, k_pe = route.caches
        return (
            *(result.q_pe, k_pe, result.q_nope, k_nope, chosen),
            *(forward_batch, zero_allocator, positions, True),
        )

    def forward_mla_core_npu(
        original: Any,
        m: Any,
        q_pe: Any,
        k_pe: Any,
        q_nope_out: Any,
        k_nope: Any,
        forward_batch: Any,
        zero_allocator: Any,
        positions: Any,
        topk_indices: Any,
        gate: Any = None,
    ) -> Any:
        route = m.__dict__.get(ROUTE)
        if route is None:
            return original(
                *(m, q_pe, k_pe, q_nope_out, k_nope, forward_batch, zero_allocator, positions),
                *(topk_indices, gate),
            )
        chosen = {} if topk_indices is None else {"topk_indices": topk_indices}
        values = m.attn_mqa(
            q_nope_out,
            k_nope,
            k_nope,
            forward_batch,
            save_kv_cache=False,
            q_rope=q_pe,
            k_rope=k_pe,
            **chosen,
        )
        return _gated(m, _up(route, m, values, forward_batch.forward_mode), gate)

    def forward_dsa_core_npu(
        original: Any,
        m: Any,
        q_pe: Any,
        k_pe: Any,
        q_nope_out: Any,
        k_nope: Any,
        topk_indices: Any,
        forward_batch: Any,
        zero_allocator: Any,
        positions: Any,
        mla_preprocess_used: Any,
        gate: Any = None,
    ) -> Any:
        route = m.__dict__.get(ROUTE)
        if route is None:
            return original(
                *(m, q_pe, k_pe, q_nope_out, k_nope, topk_indices, forward_batch),
                *(zero_allocator, positions, mla_preprocess_used, gate),
            )
        values = m.attn_mqa(
            q_nope_out.contiguous(),
            k_nope,
            k_nope,
            forward_batch,
            save_kv_cache=False,
            q_rope=q_pe.contiguous(),
            k_rope=k_pe,
            topk_indices=topk_indices,
        )
        output = _gated(m, _up(route, m, values, forward_batch.forward_mode), gate)
        return output, topk_indices if m.next_skip_topk else None

    return {
        hook.__name__: hook
        for hook in (
            npu_mla_preprocess,
            forward_mla_prepare_npu,
            forward_dsa_prepare_npu,
            forward_mla_core_npu,
            forward_dsa_core_npu,
        )
    }
