"""A layer bound to its tensors: prepare, step, release."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from npu_backend.deployment import Phase
from npu_backend.offers import SITES, Offer
from npu_backend.plan import LayerPlan
from npu_backend.runtime import refusals
from npu_backend.runtime import release as _release
from npu_backend.runtime.cache import LayerCache
from npu_backend.runtime.dispatch import refuse_with
from npu_backend.runtime.impl import Unit
from npu_backend.runtime.ledger import Ledger
from npu_backend.runtime.prepare import Callables, prepare_layer
from npu_backend.runtime.result import PreprocessResult
from npu_backend.runtime.slots import check_slots, claim_slots

__all__ = ["BoundLayer"]

Kernel = Callable[..., torch.Tensor]
Path = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PreprocessResult]


class BoundLayer:
    """One layer of a plan on real tensors; made by :func:`npu_backend.runtime.bind`.

    Attributes:
        plan: The plan as amended by what only tensors can tell; a release may have become a keep.
        captured: Set by the host once it captured graphs over this layer; refuses a release.
        v_up: ``(tokens, heads, kv_lora_rank) -> (tokens, heads, v_head_dim)``. Where every phase
            has the same entries it *is* the bound callable; else it needs ``phase=``.
        q_absorb: ``(tokens, heads, qk_nope_head_dim) -> (tokens, heads, kv_lora_rank)``, likewise.
        ledger: What the release freed, None before it.
    """

    v_up: Kernel
    q_absorb: Kernel

    def __init__(
        self,
        *,
        plan: LayerPlan,
        weights: Mapping[str, torch.Tensor],
        cache: LayerCache,
        units: Mapping[tuple[str | None, Offer], Unit],
        device: torch.device,
        others: Mapping[str, torch.Tensor],
        host_keeps_storage: bool,
        captured: bool,
    ) -> None:
        self.plan = plan
        self.cache = cache
        self.device = device
        self.captured = captured
        self.host_keeps_storage = host_keeps_storage
        self.ledger: Ledger | None = None
        self._weights = dict(weights)
        self._others = dict(others)
        self._units = units
        self._restorable: dict[str, _release.HostCopy] = {}
        # Shared with the callables that refuse, which must not hold the layer: its tensors would
        # then live until the cycle collector comes by.
        self._gone: list[str] = []
        self._prepared = False
        self._sites: dict[str, Mapping[Phase, Kernel]] = {}
        unprepared = refuse_with(refusals.unprepared(plan))
        self.v_up = self.q_absorb = unprepared
        self._paths: dict[Phase, Path] = dict.fromkeys(Phase, unprepared)

    def __repr__(self) -> str:
        state = "prepared" if self._prepared else "bound"
        if self.ledger is not None:
            state = f"released {self.ledger.freed} bytes"
        return f"BoundLayer({self.plan.layer}, {self.device}, {state})"

    # --- life ------------------------------------------------------------------------------------

    @property
    def prepared(self) -> bool:
        """Whether :meth:`prepare` has succeeded."""
        return self._prepared

    @property
    def released(self) -> tuple[str, ...]:
        """Names of the weights that are released now."""
        return tuple(self._gone)

    def prepare(self) -> None:
        """Prepare every strategy, check what they made, and bind the callables.

        All or nothing: if anything fails the layer is as it was before, and nothing is freed. A
        second call does nothing.

        Raises:
            PrepareError: An implementation failed, its copies are not as declared, or under graph
                capture another plan's layer holds a kernel's slot.
        """
        if self._prepared:
            return
        check_slots(self.plan)
        made = prepare_layer(self.plan, self._units, self._weights, self.cache, self._others)
        self.plan = made.plan
        self._install(made)
        claim_slots(self, self.plan)
        self._prepared = True

    def release(self) -> Ledger:
        """Free exactly what ``plan`` says; validated first, destroyed last.

        A weight whose storage something keeps alive by now is kept, and the plan amended. A second
        call returns the same ledger.

        Raises:
            PrepareError: The layer is not prepared, or graphs were captured.
        """
        if self.ledger is None:
            self.plan, self.ledger, self._restorable = _release.release_layer(
                self.plan,
                self._weights,
                self._others,
                prepared=self._prepared,
                captured=self.captured,
                host_keeps_storage=self.host_keeps_storage,
                device=self.device,
            )
            self._gone += [row.name for row in self.ledger.rows]
        return self.ledger

    def restore(self) -> tuple[str, ...]:
        """Bring back the weights that were released restorably; return their names.

        They are the same parameter objects, at new addresses. Afterwards :meth:`release` frees
        them again.

        Raises:
            PrepareError: Out of memory; the layer is as it was.
        """
        names = _release.restore_weights(self.plan, self._weights, self._restorable, self.device)
        self._restorable = {}
        self._gone[:] = [name for name in self._gone if name not in names]
        if names and self.ledger is not None:
            rows = tuple(r for r in self.ledger.rows if r.name not in names)
            self.ledger = Ledger(self.ledger.layer_id, rows) if rows else None
        return names

    # --- steps -----------------------------------------------------------------------------------

    def preprocess(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        phase: Phase,
    ) -> PreprocessResult:
        """Run the path of a phase: write the cache and return the queries.

        Args:
            hidden_states: ``(tokens, hidden_size)`` in the layer's dtype, normed by the host.
            positions: ``(tokens,)`` int64, the row of each token in the RoPE tables.
            slot_mapping: ``(tokens,)`` int64, ``block * block_size + offset``.
            phase: The step's phase.

        Returns:
            The queries; of a step without rows, empty ones, and nothing is called.

        Raises:
            WeightReleasedError: The phase was not planned, and weights it could read are gone.
            BoundExceededError: The phase was not planned, or the step has more rows than planned.
            PlanMismatchError: The host's own code serves the phase.
            PrepareError: The layer is not prepared.
        """
        if hidden_states.shape[0] == 0:
            return self._nothing(hidden_states, phase)
        return self._paths[phase](hidden_states, positions, slot_mapping)

    def path_for(self, phase: Phase | str) -> Path:
        """Return the callable of a phase's path, as :meth:`preprocess` calls it."""
        return self._paths[Phase.parse(phase)]

    def v_up_for(self, phase: Phase | str) -> Kernel:
        """Return the callable of ``v_up`` in a phase, whether or not phases share it."""
        return self._kernel("v_up", Phase.parse(phase))

    def q_absorb_for(self, phase: Phase | str) -> Kernel:
        """Return the callable of ``q_absorb`` in a phase, whether or not phases share it."""
        return self._kernel("q_absorb", Phase.parse(phase))

    # --- parts -----------------------------------------------------------------------------------

    def _install(self, made: Callables) -> None:
        plan, host = self.plan, [p for e in self.plan.path if e.offer is None for p in e.phases]
        refused: dict[Phase, Any] = {
            p: refuse_with(
                refusals.host_serves(plan, p)
                if p in host
                else refusals.unplanned(plan, p, self._gone)
            )
            for p in Phase
        }
        self._paths = {**refused, **made.paths}
        self._sites = {
            site: {
                **refused,
                **{p: refuse_with(refusals.unused(plan, site, p)) for p in made.paths},
                **made.sites[site],
            }
            for site in SITES
        }
        self.v_up = self._without_phase("v_up", made.sites["v_up"])
        self.q_absorb = self._without_phase("q_absorb", made.sites["q_absorb"])

    def _without_phase(self, site: str, found: Mapping[Phase, Kernel]) -> Kernel:
        """Return the one callable that all phases share, or one that asks for the phase."""
        calls = list(found.values())
        if calls and all(call is calls[0] for call in calls):
            return calls[0]
        if not calls:
            return refuse_with(refusals.unused(self.plan, site, None))
        plan, table = self.plan, self._sites[site]

        def kernel(x: torch.Tensor, *, phase: Phase | None = None) -> torch.Tensor:
            if phase is None:
                raise refusals.phase_needed(plan, site)
            return table[phase](x)

        return kernel

    def _kernel(self, site: str, phase: Phase) -> Kernel:
        return self._sites[site][phase] if self._prepared else getattr(self, site)

    def _nothing(self, hidden_states: torch.Tensor, phase: Phase) -> PreprocessResult:
        """Return the empty result of a step without rows."""
        layer = self.plan.layer
        heads = layer.local_heads(self.plan.deployment.attn_tp_size)
        new = hidden_states.new_empty
        entries = [e.offer for e in self.plan.path if phase in e.phases and e.offer is not None]
        q_lora = scale = None
        if layer.indexer.kind == "own" and entries and (form := entries[0].q_lora) is not None:
            plain = form == "float"
            rank = layer.q_lora_rank or 0
            q_lora = new((0, rank)) if plain else new((0, rank), dtype=torch.int8)
            scale = None if plain else new((0, 1), dtype=torch.float32)
        return PreprocessResult(
            new((0, heads, layer.kv_lora_rank)),
            new((0, heads, layer.qk_rope_head_dim)),
            q_lora,
            scale,
        )
