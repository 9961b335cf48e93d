"""One loaded model under its plan: bind, agree, prepare, release, attach, and what comes later."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from attrs import define, evolve

from npu_backend.errors import PlanMismatchError
from npu_backend.hosts.sglang import updates
from npu_backend.hosts.sglang.ranks import same_plans
from npu_backend.hosts.sglang.route import ROUTE, Route
from npu_backend.hosts.sglang.weights import HostWeights
from npu_backend.model.records import MlaLayer
from npu_backend.plan import LayerPlan, ModelPlan
from npu_backend.runtime import BoundLayer, LayerCache, bind, prepare_and_release
from npu_backend.runtime.indexer import compressed_query
from npu_backend.runtime.streaming import ModelLedger

__all__ = ["Part", "Session", "compare"]


@define(eq=False)
class Part:
    """One attention module with its weights and its bound layer."""

    attention: Any
    weights: HostWeights
    bound: BoundLayer


def _tables(rotary: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return cos and sin, each ``(max_positions, rope)``, of SGLang's ``cos_sin_cache``: cosines of
    the pairs in the first half of a row, sines in the second."""
    cos, sin = rotary.cos_sin_cache.chunk(2, dim=-1)
    return (
        torch.cat((cos, cos), -1).to(dtype).contiguous(),
        torch.cat((sin, sin), -1).to(dtype).contiguous(),
    )


class Session:
    """A model whose attention layers are served by their plan.

    Args:
        plan: The model's plan.
        modules: Attention modules with their records, in the plan's order.

    Attributes:
        parts: The modules with their bound layers.
        ledger: What was freed, once it was.
    """

    def __init__(self, plan: ModelPlan, modules: Iterable[tuple[Any, MlaLayer]]) -> None:
        self.plan = plan
        self._modules = tuple(modules)
        self.parts: list[Part] = []
        self.ledger: ModelLedger | None = None
        self._tables: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    # --- load ------------------------------------------------------------------------------------

    def bind(self) -> tuple[LayerPlan, ...]:
        """Bind every layer, and prepare the first one of each kind. Nothing is freed.

        What a kind of layer cannot do shows here, while SGLang can still serve alone.

        Returns:
            The plans as amended by the tensors at hand.

        Raises:
            NpuBackendError: A layer's tensors are not those of its plan, or it cannot be prepared.
        """
        tried: set[int] = set()
        for (attention, layer), plan in zip(self._modules, self.plan.layers, strict=True):
            weights = HostWeights(attention, layer)
            bound = bind(plan, weights.tensors, within=weights.turned)
            if id(layer.kind) not in tried:
                tried.add(id(layer.kind))
                bound.prepare()
            self.parts.append(Part(attention, weights, bound))
            self._table_of(attention, layer)
        return tuple(part.bound.plan for part in self.parts)

    def release(self) -> ModelLedger:
        """Prepare and release layer by layer: at most one layer's copies stand beside originals.

        Raises:
            PrepareError: A layer cannot be prepared; those before it are released.
        """
        by_id = {part.bound.plan.layer_id: part.bound for part in self.parts}
        plans = [part.bound.plan for part in self.parts]
        _, self.ledger = prepare_and_release(plans, lambda plan: by_id[plan.layer_id])
        updates.refuse_what_is_gone(self)
        return self.ledger

    def undo(self) -> None:
        """Let go of everything, so that SGLang finds its weights as it left them.

        Only before :meth:`release`.
        """
        for part in self.parts:
            part.attention.__dict__.pop(ROUTE, None)
            part.weights.as_loaded()
        self.parts, self._tables = [], {}

    def _table_of(
        self, attention: Any, layer: MlaLayer
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        rotary = attention.rotary_emb
        if rotary is None:
            return None, None
        # Layers share their embedding; its tables are made once, before the KV pool is sized.
        if id(rotary) not in self._tables:
            self._tables[id(rotary)] = _tables(rotary, getattr(torch, layer.dtype))
        return self._tables[id(rotary)]

    # --- pool ------------------------------------------------------------------------------------

    def attach(self, pool: Any, modes: Any) -> None:
        """Give every layer its cache, which is held against the plan, and route its module.

        Args:
            pool: SGLang's ``token_to_kv_pool``.
            modes: SGLang's ``ForwardMode``.

        Raises:
            PlanMismatchError: The pool is not what the arguments said.
        """
        if getattr(pool, "full_kv_pool", None) is not None:
            pool = pool.full_kv_pool
        for part in self.parts:
            layer = part.bound.plan.layer
            cos, sin = self._table_of(part.attention, layer)
            k_nope, k_rope = pool.get_kv_buffer(part.attention.layer_id)
            cache = LayerCache(
                layout=layer.kv_layout, k_nope=k_nope, k_rope=k_rope, cos=cos, sin=sin
            )
            part.bound.attach(cache)
            self._route(part, modes)

    def _route(self, part: Part, modes: Any) -> None:
        plan = part.bound.plan
        compressed = None
        if any(
            reader.startswith("indexer@")
            for row in plan.weights
            if row.name == "fused_qkv_a_proj"
            for reader in row.readers
        ):
            with part.weights.turned() as tensors:
                compressed = compressed_query(
                    plan, tensors, part.bound.device, prepared=part.bound.prepared
                )
        part.attention.__dict__[ROUTE] = Route(part.bound, modes, compressed)

    def current_plan(self) -> ModelPlan:
        """Return the model's plan as the tensors at hand amended it."""
        return evolve(self.plan, layers=tuple(part.bound.plan for part in self.parts))

    # --- later -----------------------------------------------------------------------------------

    @property
    def update_refusal(self) -> str | None:
        """Why SGLang is told to refuse updates of this model, or None."""
        found = (part.attention.__dict__.get(updates.REFUSAL) for part in self.parts)
        return next((why for why in found if why is not None), None)

    def before_update(self) -> None:
        """Bring back what was released restorably; steps are refused until the update is done.

        Raises:
            PrepareError: A layer's weights cannot come back; those before it serve steps again.
        """
        opened: list[Part] = []
        try:
            for part in self.parts:
                part.bound.before_update()
                opened.append(part)
                part.weights.settle()
                self._refresh(part)
        except BaseException:
            self._close(opened)
            raise

    def after_update(self) -> None:
        """Prepare from the new weights, into the memory of the old copies, and release again.

        Graphs may have been captured by now. What is released again was gone at that time, so that
        no graph can hold its address; copies keep theirs.
        """
        self._close(self.parts)

    def _close(self, parts: Iterable[Part]) -> None:
        for part in parts:
            part.weights.converted_again()
            part.bound.after_update()
            self._refresh(part)

    def restore(self) -> int:
        """Bring back what was released restorably, for another role; return how many weights."""
        count = 0
        for part in self.parts:
            count += len(part.bound.restore())
            part.weights.settle()
            self._refresh(part)
        return count

    def release_again(self) -> None:
        """Release what :meth:`restore` brought back, where a role did not change after all."""
        for part in self.parts:
            part.bound.release()
            self._refresh(part)

    def _refresh(self, part: Part) -> None:
        route: Route | None = part.attention.__dict__.get(ROUTE)
        if route is not None:
            route.refresh()


def compare(
    plans: Iterable[LayerPlan], group: Any, failure: BaseException | None, stopped: str
) -> None:
    """Compare plans over the ranks and say what stops where they differ.

    Raises:
        PlanMismatchError: They differ, or a rank failed.
    """
    try:
        same_plans(plans, group, failure)
    except PlanMismatchError as err:
        raise PlanMismatchError(
            err.what, whom=err.whom, why=(*err.why, stopped), remedy=err.remedy, code=err.code
        ) from (failure or err)
