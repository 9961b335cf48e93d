"""A layer bound to its tensors: prepare, step, release."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch

from npu_backend.deployment import Phase
from npu_backend.errors import NpuBackendError, PlanMismatchError, PrepareError
from npu_backend.offers import SITES, Offer
from npu_backend.plan import LayerPlan, TableEntry
from npu_backend.runtime import refusals
from npu_backend.runtime import release as _release
from npu_backend.runtime.amend import AliasWarning
from npu_backend.runtime.cache import LayerCache
from npu_backend.runtime.dispatch import refuse_with
from npu_backend.runtime.impl import Unit
from npu_backend.runtime.indexer import compressed_query
from npu_backend.runtime.ledger import Ledger
from npu_backend.runtime.overlap import DeviceStreams, Streams, run_beside
from npu_backend.runtime.prepare import Callables, PreparedLayer, prepare_layer
from npu_backend.runtime.release import restorable_readings
from npu_backend.runtime.result import PreprocessResult
from npu_backend.runtime.sharing import enlist, read_elsewhere, refuse_buried
from npu_backend.runtime.slots import check_slots, claim_slots
from npu_backend.runtime.tombstone import is_tombstone

__all__ = ["BoundLayer"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
C = TypeVar("C", bound=Callable[..., Any])
Kernel = Callable[..., torch.Tensor]
Path = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], PreprocessResult]


def _returning(
    layer: weakref.ref[BoundLayer],
    plan: LayerPlan,
    weights: Mapping[str, torch.Tensor],
    live: Mapping[Phase, Callable[..., Any]],
    phase: Phase,
) -> Callable[..., Any]:
    """Return the callable of a phase whose bound callable may have been let go.

    Args:
        layer: The bound layer; not held, for its tensors would live with this callable.
        plan: Its plan.
        weights: Its weights.
        live: What is bound now.
        phase: The phase.
    """
    names = sorted(restorable_readings(plan, phase))

    def call(*args: Any) -> Any:
        bound = live.get(phase)
        if bound is None:
            if torch.compiler.is_compiling():
                for name in names:
                    # Dynamo tells a tombstone's error by name; of a raise in Python not every one.
                    weights[name].sum()
            mine = layer()
            if mine is None or torch.compiler.is_compiling():
                raise refusals.let_go(plan, phase, compiling=mine is not None)
            mine._bring_back(f"a step in phase {phase}")
            bound = live[phase]
        return bound(*args)

    return call


class BoundLayer:
    """One layer of a plan on real tensors; made by :func:`npu_backend.runtime.bind`.

    Attributes:
        plan: The plan as amended by what only tensors can tell; a release may have become a keep.
        captured: Set by the host once it captured graphs over this layer; refuses a release.
        v_up: ``(tokens, heads, kv_lora_rank) -> (tokens, heads, v_head_dim)``. Where every phase
            has the same entries it *is* the bound callable; else it needs ``phase=``.
        q_absorb: ``(tokens, heads, qk_nope_head_dim) -> (tokens, heads, kv_lora_rank)``, likewise.
        weights: The given tensors by name; those released are tombstones.
        ledger: What the release freed, None before it.
        generation: Counts the updates of the weights; callables that were taken out of the layer
            before the last one should be taken again.
    """

    v_up: Kernel
    q_absorb: Kernel

    def __init__(
        self,
        *,
        plan: LayerPlan,
        weights: Mapping[str, torch.Tensor],
        cache: LayerCache | None,
        units: Mapping[tuple[str | None, Offer], Unit],
        device: torch.device,
        others: Mapping[str, torch.Tensor],
        host_keeps_storage: bool,
        captured: bool,
        reload: Callable[[str], torch.Tensor] | None = None,
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self.plan = plan
        self._cache = cache
        self._made: PreparedLayer | None = None
        self.device = device
        self.captured = captured
        self.host_keeps_storage = host_keeps_storage
        self._reload = reload
        self._within = within
        self.ledger: Ledger | None = None
        self.weights: Mapping[str, torch.Tensor] = dict(weights)
        self._others = dict(others)
        self._units = units
        self._restorable: dict[str, _release.Back] = {}
        # Shared with the callables that refuse, which must not hold the layer: its tensors would
        # then live until the cycle collector comes by.
        self._gone: list[str] = []
        self._prepared = False
        self._updating = self._release_again = False
        self.generation = 0
        self._written: dict[str, tuple[int, int]] = {}
        self._compressed: Callable[[torch.Tensor], torch.Tensor] | None = None
        self._sites: dict[str, Mapping[Phase, Kernel]]
        self._paths: dict[Phase, Path] = {}
        # What is bound now, by site and phase, the path under None. Only through these is there a
        # way to callables that read what may be released restorably: they may hold views of it.
        self._live: dict[str | None, dict[Phase, Any]] = {None: {}, **{s: {} for s in SITES}}
        self._refuse_steps(refusals.unprepared(plan))
        enlist(self)

    def __repr__(self) -> str:
        state = "prepared" if self._prepared else "bound"
        if self.ledger is not None:
            state = f"released {self.ledger.freed} bytes"
        return f"BoundLayer({self.plan.layer}, {self.device}, {state})"

    @property
    def cache(self) -> LayerCache:
        """The layer's cache.

        Raises:
            PrepareError: None is attached yet.
        """
        if self._cache is None:
            raise refusals.unattached(self.plan)(0)
        return self._cache

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
            WeightReleasedError: Another bound layer released a weight of this one.
        """
        if self._prepared:
            return
        refuse_buried(self.plan, self.weights, self._gone, "prepare() came")
        check_slots(self.plan)
        with self._within():
            made, bound = prepare_layer(
                self.plan, self._units, self.weights, self._others, self._cache
            )
        self.plan, self._made, self._prepared = made.plan, made, True
        claim_slots(self, self.plan)
        if bound is None:
            self._refuse_steps(refusals.unattached(self.plan))
        else:
            self._install(bound)
        self._watch()

    def attach(self, cache: LayerCache) -> None:
        """Give the layer its cache, once the host has sized it: steps can run from here on.

        Args:
            cache: The layer's cache and RoPE tables.

        Raises:
            PlanMismatchError: It is not the plan's, or on another device.
            PrepareError: A cache is attached already, or an implementation cannot bind it.
        """
        if self._cache is not None:
            raise PrepareError(
                "the layer has its cache already",
                whom=str(self.plan.layer),
                why="its callables and captured graphs hold the cache's addresses",
                remedy="bind the layer again for another cache",
            )
        problems = cache.problems(self.plan.layer)
        if places := {str(t.device) for t in cache.tensors().values()} - {str(self.device)}:
            problems.append(f"the cache is on {', '.join(sorted(places))}, not {self.device}")
        if problems:
            raise PlanMismatchError(
                "the cache given is not that of the plan",
                whom=str(self.plan.layer),
                why=problems,
                remedy="give the layer's own cache, or plan for this one",
                code="kv.layout",
            )
        bound = None
        if self._made is not None:
            with self._within():
                bound = self._made.bind(cache, self._gone)
        self._cache = cache
        self._others = {**cache.tensors(), **self._others}
        if bound is not None:
            if self._updating:
                self._refuse_steps(refusals.updating(self.plan))
            else:
                self._install(bound)

    def release(self, *, empty_cache: bool = False) -> Ledger:
        """Free exactly what ``plan`` says; validated first, destroyed last.

        A weight whose storage something keeps alive by now, or which another bound layer reads, is
        kept, and the plan amended. What was brought back since goes again; else a second call
        returns the same ledger. Where the bytes freed are not those planned, a warning names
        who still holds them.

        Args:
            empty_cache: Give the allocator's free blocks back to the device afterwards.

        Raises:
            PrepareError: The layer is not prepared, or graphs were captured.
            WeightReleasedError: Another bound layer released a weight of this one.
        """
        if self._updating:
            raise refusals.updating(self.plan)(0)
        left = [row.name for row in self.plan.released() if row.name not in self._gone]
        if self.ledger is None or left:
            refuse_buried(self.plan, self.weights, self._gone, "release() came")
            if changed := self._changed():
                # The copies are old, and the originals would be gone.
                raise refusals.stale(self.plan, changed)
            self._let_go(left)
            try:
                self.plan, now, copies = _release.release_layer(
                    self.plan,
                    self.weights,
                    self._others,
                    prepared=self._prepared,
                    captured=self.captured,
                    host_keeps_storage=self.host_keeps_storage,
                    device=self.device,
                    reload=self._reload,
                    elsewhere=read_elsewhere(self),
                )
            except BaseException:
                self._bind_again()
                raise
            self.ledger = now if self.ledger is None else self.ledger.plus(now)
            self._restorable |= copies
            self._gone += [row.name for row in now.rows]
            self._bind_again()
            self._watch()
            if not self.ledger.agrees:
                warnings.warn(
                    f"{self.plan.layer}: {self.ledger.difference()}", AliasWarning, stacklevel=2
                )
            if empty_cache and self.device.type == "npu":
                torch.get_device_module(self.device).empty_cache()
        return self.ledger

    def restore(self, names: Iterable[str] | None = None) -> tuple[str, ...]:
        """Bring back weights that were released restorably; return their names.

        They are the same parameter objects, at new addresses. Afterwards :meth:`release` frees
        them again. A step in a phase that reads such a weight does this by itself.

        Args:
            names: Which of them, all by default; what is not released restorably is passed over.

        Raises:
            PrepareError: Out of memory, or a graph is being captured; the layer is as it was.
        """
        asked = self._restorable if names is None else set(names) & self._restorable.keys()
        copies = {name: self._restorable[name] for name in self._restorable if name in asked}
        if not copies:
            return ()
        back = _release.restore_weights(self.plan, self.weights, copies, self.device)
        self._restorable = {n: c for n, c in self._restorable.items() if n not in back}
        self._gone[:] = [name for name in self._gone if name not in back]
        self.ledger = None if self.ledger is None else self.ledger.without(back)
        self._bind_again()
        self._watch()
        return back

    def _bring_back(self, reader: str) -> None:
        """Restore what this library's own steps read; said once for each time."""
        names = [name for phase in Phase for name in restorable_readings(self.plan, phase)]
        if back := self.restore(names):
            rows = {row.name: row.bytes for row in self.plan.weights}
            logger.warning(
                "%s: %s brought back for %s, %d bytes; layer.release() frees them again",
                self.plan.layer,
                ", ".join(back),
                reader,
                sum(rows[name] for name in back),
            )
        else:
            # An attempt before this one failed after the weights were back.
            self._bind_again()

    def _let_go(self, names: Iterable[str]) -> None:
        """Drop the callables, and the shared names, that may hold views of weights about to go."""
        going = set(names)
        for site, live in self._live.items():
            for phase in [p for p in live if going & restorable_readings(self.plan, p, site)]:
                del live[phase]
        if self._made is not None:
            self._made = self._made.without(going)

    def _bind_again(self) -> None:
        """Bind the callables that were dropped and whose weights are there."""
        if self._made is None or self._cache is None or self._updating or not self._lacking():
            return
        with self._within():
            self._made = self._made.with_shared(self._gone)
            made = self._made.bind(self._cache, self._gone)
        for site, calls in self._told(made).items():
            for phase, call in calls.items():
                self._live[site].setdefault(phase, call)

    def _lacking(self) -> bool:
        return any(
            phase not in self._live[site]
            for site in self._live
            for entry in self._table(site)
            if entry.offer is not None
            for phase in entry.phases
        )

    def _told(self, made: Callables) -> dict[str | None, Mapping[Phase, Any]]:
        found: dict[str | None, Mapping[Phase, Any]] = {None: self._guarded(made.paths)}
        found.update(made.sites)
        return found

    def _table(self, site: str | None) -> tuple[TableEntry, ...]:
        return self.plan.path if site is None else self.plan.table(site)

    def before_update(self) -> tuple[str, ...]:
        """Get ready for new weights: bring back what was released restorably, and refuse steps.

        Returns:
            Names of the weights that were brought back.

        Raises:
            PrepareError: A weight was released for good, so that it cannot be written; or out of
                memory. The layer is as it was.
        """
        gone = [
            r.name for r in self.plan.released() if r.action == "release" and r.name in self._gone
        ]
        if gone:
            raise PrepareError(
                f"{', '.join(gone)} cannot be updated: released for good",
                whom=str(self.plan.layer),
                why="the deployment promised no weight update, or nobody asked for a way back",
                remedy="plan with --weight-update, and --restore to release restorably meanwhile",
                code="promise.weight_update",
            )
        names = self.restore()
        if self._prepared:
            self._refuse_steps(refusals.updating(self.plan))
        self._updating = True
        self._release_again = self._release_again or bool(names)
        return names

    def after_update(self) -> Ledger | None:
        """Prepare from the new weights, bind, and release again what was released before.

        Copies are written into the memory of those before, so their addresses stay. If it fails,
        steps stay refused and the originals are there: correct the cause and call it again.

        Returns:
            The ledger of the new release, or None where nothing had been released.

        Raises:
            PrepareError: It came without :meth:`before_update`, or preparing failed.
        """
        if not self._updating:
            raise PrepareError(
                "after_update() came without before_update()",
                whom=str(self.plan.layer),
                why="weights that were released are not written by an update that finds them gone",
                remedy="call layer.before_update() before weights are written",
                code="promise.weight_update",
            )
        if self._made is not None:
            with self._within():
                made, _ = prepare_layer(self.plan, self._units, self.weights, self._others, None)
                made = made.keep_addresses(self._made)
                bound = None if self._cache is None else made.bind(self._cache, self._gone)
            self.plan, self._made = made.plan, made
            if bound is None:
                self._refuse_steps(refusals.unattached(self.plan))
            else:
                self._install(bound)
            self._watch()
        self._updating = False
        self.generation += 1
        again, self._release_again = self._release_again, False
        return self.release() if again else None

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
            DeploymentError: There is no such phase.
            WeightReleasedError: The phase was not planned, and weights it could read are gone.
            BoundExceededError: The phase was not planned, or the step has more rows than planned.
            PlanMismatchError: The host's own code serves the phase.
            PrepareError: The layer is not prepared; or the phase reads a weight that was released
                restorably, and there is no memory to bring it back: the layer is as it was.
        """
        path = self._paths.get(phase) or self.path_for(phase)
        if hidden_states.shape[0] == 0:
            return self._nothing(hidden_states, phase)
        return path(hidden_states, positions, slot_mapping)

    def preprocess_beside(
        self,
        hidden_states: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        phase: Phase,
        other: Callable[[], T],
        stream: Any = None,
        streams: Streams | None = None,
    ) -> tuple[PreprocessResult, T]:
        """Run the path of a phase on a second stream, and ``other()`` on the current one.

        For work that does not depend on the path, such as an indexer's own ``q_lora``. Without a
        stream the path runs first and ``other()`` after it, with the same results.

        Args:
            hidden_states: As for :meth:`preprocess`.
            positions: Likewise.
            slot_mapping: Likewise.
            phase: Likewise.
            other: Runs beside the path.
            stream: The host's second stream, or None.
            streams: How to reach streams and events; the device's own by default.
        """
        inputs = (hidden_states, positions, slot_mapping)
        if stream is None or hidden_states.shape[0] == 0:
            return self.preprocess(*inputs, phase=phase), other()
        return run_beside(
            self.path_for(phase),
            inputs,
            other,
            streams=streams or DeviceStreams(self.device),
            side=stream,
            outputs=lambda result: [t for t in result if t is not None],
        )

    def compressed_query(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return ``q_lora`` from the original weights, for an indexer whose path hands none over.

        The planner keeps ``fused_qkv_a_proj`` for it (reader ``indexer``) wherever the path's own
        ``q_lora`` is not in the format that the indexer's ``wq_b`` takes.

        Args:
            hidden_states: ``(tokens, hidden_size)`` in the layer's dtype, normed by the host.

        Returns:
            ``(tokens, q_lora_rank)`` in the layer's dtype, after its norm.

        Raises:
            WeightReleasedError: The plan has no such reader, and the weight is gone.
            PlanMismatchError: The layer has no compressed query.
            PrepareError: The layer is not prepared.
        """
        if self._compressed is None:
            self._compressed = compressed_query(
                self.plan, self.weights, self.device, prepared=self._prepared
            )
        return self._compressed(hidden_states)

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

    def _refuse_steps(self, make: Callable[[int], NpuBackendError]) -> None:
        refuse = refuse_with(make)
        self.v_up = self.q_absorb = refuse
        self._paths = dict.fromkeys(Phase, refuse)
        self._sites = {site: dict.fromkeys(Phase, refuse) for site in SITES}

    def _install(self, made: Callables) -> None:
        self._compressed = None
        plan, host = self.plan, [p for e in self.plan.path if e.offer is None for p in e.phases]
        refused: dict[Phase, Any] = {
            p: refuse_with(
                refusals.host_serves(plan, p)
                if p in host
                else refusals.unplanned(plan, p, self._gone)
            )
            for p in Phase
        }
        for site, calls in self._told(made).items():
            self._live[site].clear()
            self._live[site].update(calls)
        self._paths = {**refused, **self._callables(None)}
        sites = {site: self._callables(site) for site in SITES}
        self._sites = {
            site: {
                **refused,
                **{p: refuse_with(refusals.unused(plan, site, p)) for p in self._paths_served()},
                **sites[site],
            }
            for site in SITES
        }
        self.v_up = self._without_phase("v_up", sites["v_up"])
        self.q_absorb = self._without_phase("q_absorb", sites["q_absorb"])

    def _paths_served(self) -> set[Phase]:
        return {p for entry in self.plan.path if entry.offer is not None for p in entry.phases}

    def _versions(self) -> dict[str, tuple[int, int]]:
        """Return address and version of each living original that a prepared copy was made of."""
        copied = {r.copy_of for r in self.plan.weights if r.copy_of is not None}
        found = {}
        for name in sorted(copied & self.weights.keys()):
            weight = self.weights[name]
            if not is_tombstone(weight) and not weight.is_inference():
                found[name] = (weight.data_ptr(), weight._version)
        return found

    def _changed(self) -> list[str]:
        """Return the originals that were written since their copies were made."""
        now = self._versions()
        return [name for name, at in self._written.items() if now.get(name, at) != at]

    def _watch(self) -> None:
        """Note what copies were made of; steps see where it changes."""
        self._written.clear()
        self._written.update(self._versions())

    def _guarded(self, paths: Mapping[Phase, Path]) -> Mapping[Phase, Path]:
        """Return the paths; where copies are made of originals, a step first sees that none that
        stands beside its copy was written since. The callables stay the same for life, so that
        nothing compiles anew after a release."""
        if all(r.copy_of is None for r in self.plan.weights):
            return paths
        plan, written, weights = self.plan, self._written, self.weights

        def guard(path: Path) -> Path:
            def guarded(
                hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
            ) -> PreprocessResult:
                if not torch.compiler.is_compiling() and written:
                    changed = [
                        name
                        for name, (address, version) in written.items()
                        # Another layer on the same parameters may have released one.
                        if not is_tombstone(weight := weights[name])
                        and (weight._version != version or weight.data_ptr() != address)
                    ]
                    if changed:
                        raise refusals.stale(plan, changed)
                return path(hidden, positions, slots)

            return guarded

        made = {id(path): guard(path) for path in paths.values()}
        return {phase: made[id(path)] for phase, path in paths.items()}

    def _callables(self, site: str | None) -> dict[Phase, Any]:
        """Return the callable of each phase that a table serves, for whoever asks for it.

        Where a phase reads what may be released restorably it is one that looks the bound callable
        up at each step, and brings the weights back where it was let go. Phases with the same
        entries share it. A compiled graph brings nothing back.
        """
        live, table = self._live[site], self._table(site)
        found: dict[Phase, Any] = {}
        made: dict[tuple[Any, ...], Any] = {}
        for phase in Phase:
            mine = [e for e in table if phase in e.phases and e.offer is not None]
            if not mine:
                continue
            if not restorable_readings(self.plan, phase, site):
                found[phase] = live[phase]
                continue
            # A path's callable also depends on the q_absorb that serves its phase.
            key = (
                *((e.strategy, e.provider, e.tokens) for e in mine),
                phase if site is None else 0,
            )
            if key not in made:
                made[key] = _returning(weakref.ref(self), self.plan, self.weights, live, phase)
            found[phase] = made[key]
        return found

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
            call = table.get(phase) or table[Phase.parse(phase)]
            return call(x)

        return kernel

    def _kernel(self, site: str, phase: Phase) -> Kernel:
        return self._sites[site][phase]

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
