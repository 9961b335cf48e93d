"""The conformance suite of a preprocess path: hidden states to queries and a written cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from attrs import frozen

import npu_backend.runtime as runtime
from npu_backend.deployment import Deployment, Phase
from npu_backend.errors import BoundExceededError, SelectionError
from npu_backend.model.records import MlaLayer
from npu_backend.offers import SITE_WEIGHTS, Offer, Record
from npu_backend.plan import LayerPlan, TableEntry
from npu_backend.runtime.prove import prove_layer, seeded_weights
from npu_backend.runtime.prove.records import LayerProof
from npu_backend.runtime.prove.tolerance import tolerance_of
from npu_backend.runtime.prove.writer import read_slots
from npu_backend.testing.conformance import measure
from npu_backend.testing.conformance.base import Conformance, at_every_place
from npu_backend.testing.conformance.places import Place
from npu_backend.testing.conformance.subject import Subject, plan_alone, plan_one

__all__ = ["PathCase", "PreprocessPathConformance"]

Path = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], runtime.PreprocessResult]
_SLOTS = 8
_POSITIONS = 64
_CHEAPEST = (
    Phase.TARGET_VERIFY,
    Phase.DRAFT_EXTEND,
    Phase.EXTEND,
    Phase.DECODE,
    Phase.IDLE,
)
"""Phases in the order in which many rows are few sequences, which is what proving costs."""


@frozen(cache_hash=True)
class PathCase:
    """One layer that a suite asks about; its text names tests."""

    layer: MlaLayer
    number: int

    def __str__(self) -> str:
        layer = self.layer
        kinds = "+".join(sorted({kind for _, kind in layer.quant})) or "float"
        return (
            f"layer{self.number}-{layer.hidden_size}-{layer.q_lora_rank}-{layer.kv_lora_rank}-"
            f"{layer.dtype}-{kinds}-{layer.kv_layout.cache_mode}"
        )


@frozen(eq=False)
class _Rig:
    """A path bound to a layer's weights.

    Args:
        case: The layer.
        plan: Its plan.
        entries: Where the strategy serves in it.
        bound: The bound layer.
        given: The tensors it was bound to.
        device: Where they are.
    """

    case: PathCase
    plan: LayerPlan
    entries: tuple[TableEntry, ...]
    bound: runtime.BoundLayer
    given: Mapping[str, torch.Tensor]
    device: torch.device

    @property
    def offer(self) -> Offer:
        """The offer under test."""
        offer = self.entries[0].offer
        assert offer is not None
        return offer

    @property
    def phase(self) -> Phase:
        """The first phase that the strategy serves and that has real rows."""
        served = [p for e in self.entries for p in e.phases]
        return next((p for p in served if p is not Phase.IDLE), served[0])

    @property
    def path(self) -> Path:
        """The callable of that phase, as a host calls it."""
        return self.bound.path_for(self.phase)

    def inputs(self, rows: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return hidden states, positions and slots of a step; slots are neither 0 nor in order."""
        layer = self.case.layer
        generator = torch.Generator().manual_seed(1000 * seed + rows)
        hidden = torch.randn(rows, layer.hidden_size, generator=generator)
        slots = _SLOTS + torch.arange(rows).flip(0)
        positions = (torch.arange(rows) + 3 + seed) % _POSITIONS
        return (
            hidden.to(getattr(torch, layer.dtype)).to(self.device),
            positions.to(self.device),
            slots.to(self.device),
        )

    def step(self, rows: int, seed: int = 0) -> dict[str, torch.Tensor]:
        """Run a step on an emptied cache; return what came of it by name, on the CPU."""
        cache = self.bound.cache
        cache.k_nope.zero_()
        cache.k_rope.zero_()
        return self.outcome(self.path(*self.inputs(rows, seed)))

    def outcome(self, result: runtime.PreprocessResult) -> dict[str, torch.Tensor]:
        """Return a result and the caches by name, on the CPU."""
        cache = self.bound.cache
        named = {**result._asdict(), "cache.k_nope": cache.k_nope, "cache.k_rope": cache.k_rope}
        return measure.clones({n: t for n, t in named.items() if isinstance(t, torch.Tensor)})


class PreprocessPathConformance(Conformance):
    """Shows that a path does what its offer says. Subclass it and set ``plugin`` and ``layers``.

    Attributes:
        layers: Layers that the path serves, small or full-size. Required.
        refused: Layers that it must refuse, wherever it is asked.
        tolerance: Largest relative error of the layer's output, cache and ``q_lora`` against the
            fp32 reference; default: that of :mod:`npu_backend.runtime.prove.tolerance` for the
            layer's dtype and quantization.
        workspace: Bytes that one step may take beside ``scratch`` times the bytes of its rows.
        scratch: Temporaries of a step, as a multiple of all it reads and makes for its rows:
            hidden states, compressed and full queries, absorbed queries, latent and keys.
        rows: Row counts to run beside the bounds of the envelope.
        row_cap: Bounds above are not run, and named so.
        backends: Backends of torch.compile; ``aot_eager`` also functionalizes, as every backend
            that generates code does.
    """

    layers: ClassVar[Sequence[MlaLayer]] = ()
    refused: ClassVar[Sequence[MlaLayer]] = ()
    tolerance: ClassVar[float | None] = None
    workspace: ClassVar[int] = 0
    scratch: ClassVar[int] = 8
    rows: ClassVar[Sequence[int]] = (1, 5)
    row_cap: ClassVar[int] = 2048
    backends: ClassVar[Sequence[str]] = ("eager", "aot_eager")

    @classmethod
    def cases(cls) -> tuple[PathCase, ...]:
        """Return every layer that is claimed."""
        return tuple(PathCase(layer, i) for i, layer in enumerate(cls.layers))

    @classmethod
    def ask(cls, subject: Subject, case: PathCase, deployment: Deployment) -> tuple[Record, ...]:
        """Ask ``select_preprocess_path``."""
        return subject.paths(case.layer, deployment)

    # --- the path, bound ------------------------------------------------------------------------

    def _role(self, place: Place, case: PathCase) -> dict[str, Any]:
        """Return the options of a plan in which every phase of the offer is reachable."""
        offer = self.survey().offer(case, (place.soc, place.cann))
        extends = offer is not None and Phase.EXTEND in offer.envelope.phases
        return {**self.options(), "role": "null" if extends else "decode", **self.deployment}

    def plan(self, place: Place, case: PathCase, **options: Any) -> LayerPlan:
        """Plan the layer; the strategy serves wherever it is legal."""
        survey = self.survey()
        deployment = place.deployment(**{**self._role(place, case), **options})
        return plan_one(survey.subject, case.layer, deployment, "path", survey.strategy)

    @contextmanager
    def rig(self, place: Place, case: PathCase, **options: Any) -> Iterator[_Rig]:
        """Plan, bind and prepare the layer."""
        survey, plan = self.survey(), self.plan(place, case, **options)
        entries = tuple(
            e
            for e in plan.path
            if e.plugin == survey.subject.info and e.strategy == survey.strategy
        )
        device = torch.device(place.torch_device)
        given = seeded_weights(case.layer, 1).to(device)
        size = case.layer.kv_layout.block_size
        cache = runtime.LayerCache.allocate(
            case.layer, -(-(_SLOTS + 64) // size), device=device, max_positions=_POSITIONS
        )
        with torch.no_grad():
            bound = runtime.bind(plan, given, cache)
            bound.prepare()
            yield _Rig(case, plan, entries, bound, given, device)

    def _inside(self, entries: Sequence[TableEntry]) -> tuple[list[int], list[int]]:
        """Return row counts inside the envelope, and those above the cap."""
        wanted: set[int] = set()
        for low, high in {e.tokens for e in entries}:
            near = {low, low + 1, *self.rows}
            if high is not None:
                near |= {high - 1, high}
            wanted |= {n for n in near if n >= low and (high is None or n <= high)}
        return sorted(n for n in wanted if n <= self.row_cap), sorted(
            n for n in wanted if n > self.row_cap
        )

    def _rows(self, rig: _Rig) -> int:
        inside = [n for n in self._inside(rig.entries)[0] if n <= 64]
        return inside[-1] if inside else self._inside(rig.entries)[0][0]

    def _fail(self, rig: _Rig, faults: Sequence[str]) -> None:
        entry = rig.entries[0]
        pytest.fail("\n  ".join([f"{entry.strategy} of {entry.provider}, {rig.case}", *faults]))

    def _prove(self, place: Place, case: PathCase, rows: Sequence[int], **options: Any) -> None:
        survey, plan = self.survey(), self.plan(place, case, **options)
        proof = prove_layer(plan, device=place.torch_device, rows=tuple(rows), row_cap=max(rows))
        faults = [f"{p.name}: {p.text}" for p in proof.failed]
        faults += self._tighter(proof, case)
        served = {s.path for s in proof.steps}
        if survey.strategy not in served:
            faults.append(f"no step ran through it; steps ran through {', '.join(sorted(served))}")
        if faults:
            pytest.fail(
                "\n  ".join([f"{survey.strategy} of {survey.subject.info}, {case}", *faults])
            )

    def _tighter(self, proof: LayerProof, case: PathCase) -> list[str]:
        bound = tolerance_of(case.layer) if self.tolerance is None else self.tolerance
        return [
            f"{s.phase} with {s.rows} rows: the output is off by {s.error:.2g}, declared is "
            f"{bound:.2g}"
            for s in proof.steps
            if s.error is not None and not s.error <= bound
        ]

    # --- tests ----------------------------------------------------------------------------------

    def test_refused_layers(self) -> None:
        """The layers of ``refused`` are refused on every chip and CANN."""
        survey = self.survey()
        found = [
            f"{layer} ({layer.hidden_size}, {layer.q_lora_rank}) on {place[0]}, CANN {place[1]}"
            for layer in self.refused
            for _, place in dict.fromkeys((None, p) for _, p in survey.answers)
            for record in self.ask(
                survey.subject,
                PathCase(layer, 0),
                Place("cpu", *place).deployment(**self.options()),
            )
            if isinstance(record, Offer) and record.strategy == survey.strategy
        ]
        if found:
            pytest.fail("\n  ".join([f"{survey.strategy} is offered for", *found[:12]]))

    def test_numerics(self, at: Place, case: PathCase) -> None:
        """Outputs, cache and ``q_lora`` are those of the fp32 reference, in every phase, before and
        after the layer's release; padded rows write nowhere else; bytes are as planned."""
        self._prove(at, case, self.rows)

    def test_envelope_rows(self, at: Place, case: PathCase) -> None:
        """At N - 1 and N of every bound on rows it is right, at N + 1 it is refused."""
        plan, survey = self.plan(at, case), self.survey()
        mine = [e for e in plan.path if e.strategy == survey.strategy]
        inside, above = self._inside(mine)
        bounds = [n for n in inside if n not in self.rows]
        if bounds:
            # One phase: a bound is the op's, whatever the step is for.
            served = [p for e in mine for p in e.phases]
            phase = min(served, key=_CHEAPEST.index)
            self._prove(at, case, bounds, phases=[phase])
        for high in {e.tokens[1] for e in mine if e.tokens[1] is not None}:
            self._must_refuse(at, case, high)
        if above:
            pytest.skip(f"row counts {above} are above row_cap = {self.row_cap} and were not run")

    def _must_refuse(self, at: Place, case: PathCase, last: int) -> None:
        survey = self.survey()
        options = {**self._role(at, case), "max_tokens": last + 1}
        try:
            plan_alone(
                survey.subject, case.layer, at.deployment(**options), "path", survey.strategy
            )
        except SelectionError as err:
            if str(last + 1) not in str(err):
                pytest.fail(f"{last + 1} rows are refused, and the refusal does not say so: {err}")
        else:
            pytest.fail(f"{last + 1} rows are outside the envelope and planned")
        with self.rig(at, case, max_tokens=last) as rig, pytest.raises(BoundExceededError):
            rig.path(*rig.inputs(last + 1))

    def test_readers(self, at: Place, case: PathCase) -> None:
        """A weight that is not declared as read may be poisoned; each that is must matter."""
        with self.rig(at, case) as rig:
            rows, faults = self._rows(rig), []
            before = rig.step(rows)
            declared = rig.offer.step_reads
            # What its kernel reads is the kernel's to declare; v_up is not in a path at all.
            kernels = {SITE_WEIGHTS["q_absorb"]} if "q_absorb" in rig.offer.uses else set()
            for name in (w.name for w in rig.plan.weights if w.copy_of is None):
                with measure.Poisoned(rig.given[name]):
                    how = ""
                    try:
                        matters = bool(measure.changed(before, rig.step(rows)))
                    except Exception as err:  # noqa: BLE001 - it looked at what it was given
                        matters, how = True, f" (the step raised {type(err).__name__}: {err})"
                read = name in declared or name.removesuffix(".scale") in declared
                if matters and not read and name not in kernels:
                    faults.append(
                        f"{name} is read in a step, and the offer does not declare it{how}"
                    )
                if not matters and name in declared:
                    faults.append(f"{name} is declared as read in every step, and is not")
            if faults:
                self._fail(rig, faults)

    def test_inputs_stay(self, at: Place, case: PathCase) -> None:
        """Inputs, weights and RoPE tables have the bits that they had; of the cache only the slots
        of the step are written."""
        with self.rig(at, case) as rig:
            inputs = rig.inputs(self._rows(rig))
            cache = rig.bound.cache
            tables = {n: t for n, t in cache.tensors().items() if n in ("cache.cos", "cache.sin")}
            names = ("hidden_states", "positions", "slot_mapping")
            kept = {**dict(zip(names, inputs, strict=True)), **rig.given, **tables}
            loaded = seeded_weights(case.layer, 1).to(torch.device("cpu"))
            before = measure.clones(kept)
            for tensor in (cache.k_nope, cache.k_rope):
                tensor.fill_(3.0)
            rig.path(*inputs)
            found = [f"{name} is changed by a step" for name in measure.changed(before, kept)]
            found += [
                f"{name} is changed while preparing" for name in measure.changed(loaded, rig.given)
            ]
            written = set(inputs[2].tolist())
            others = torch.tensor([s for s in range(cache.num_slots) if s not in written])
            for name, tensor in (("k_nope", cache.k_nope), ("k_rope", cache.k_rope)):
                rows = read_slots(tensor, others, cache.layout)
                if not bool((rows == 3.0).all()):
                    found.append(f"cache.{name} is written outside the slots of the step")
            if found:
                self._fail(rig, found)

    def test_result_is_its_own(self, at: Place, case: PathCase) -> None:
        """Results lie on nobody's storage, and the next step leaves them as they are."""
        with self.rig(at, case) as rig:
            rows = self._rows(rig)
            inputs = rig.inputs(rows)
            others = {
                "hidden_states": inputs[0],
                "positions": inputs[1],
                "slot_mapping": inputs[2],
                **rig.given,
                **rig.bound.cache.tensors(),
            }
            first = rig.path(*inputs)._asdict()
            made = {n: t for n, t in first.items() if isinstance(t, torch.Tensor)}
            faults = [
                f"{name} lies on the storage of {other}"
                for name, tensor in made.items()
                for other in measure.sharing(tensor, others)
            ]
            kept = measure.clones(made)
            rig.path(*rig.inputs(rows, seed=1))
            faults += [
                f"the next step writes where {name} of the last one lies"
                for name in measure.changed(kept, made)
            ]
            if faults:
                self._fail(rig, faults)

    def test_shapes_and_dtypes(self, at: Place, case: PathCase) -> None:
        """Queries have the layer's shapes, dtype and device, and strided hidden states give equal
        ones."""
        layer = case.layer
        with self.rig(at, case) as rig:
            rows = self._rows(rig)
            hidden, positions, slots = rig.inputs(rows)
            result = rig.path(hidden, positions, slots)
            heads = layer.local_heads(rig.plan.deployment.attn_tp_size)
            want = {
                "q_nope": (rows, heads, layer.kv_lora_rank),
                "q_pe": (rows, heads, layer.qk_rope_head_dim),
            }
            faults = []
            for name, shape in want.items():
                tensor = getattr(result, name)
                found = (tuple(tensor.shape), str(tensor.dtype), tensor.device)
                if found != (shape, f"torch.{layer.dtype}", hidden.device):
                    faults.append(f"{name} is {found}, not {shape} torch.{layer.dtype}")
            before = rig.step(rows)
            wide = torch.zeros(rows, layer.hidden_size + 8, dtype=hidden.dtype, device=rig.device)
            wide[:, 8:] = hidden
            again = rig.outcome(rig.path(wide[:, 8:], positions, slots))
            if changed := measure.changed(before, again):
                faults.append(f"strided hidden states give another {', '.join(changed)}")
            if faults:
                self._fail(rig, faults)

    def test_deterministic(self, at: Place, case: PathCase) -> None:
        """Equal inputs give equal bits, again and in a layer that is bound anew."""
        with self.rig(at, case) as rig:
            rows = self._rows(rig)
            before, again = rig.step(rows), rig.step(rows)
        with self.rig(at, case) as rig:
            found = measure.changed(before, again) + measure.changed(before, rig.step(rows))
            if found:
                self._fail(rig, [f"the same step gives another {', '.join(dict.fromkeys(found))}"])

    def test_allocations(self, at: Place, case: PathCase) -> None:
        """A step takes what its rows need, nothing of the size of a weight, and leaves nothing."""
        layer = case.layer
        with self.rig(at, case) as rig:
            inputs = rig.inputs(1)
            heads = layer.local_heads(rig.plan.deployment.attn_tp_size)
            wide = layer.qk_nope_head_dim + layer.qk_rope_head_dim
            row = layer.hidden_size + 2 * (layer.q_lora_rank or 0)
            row += 2 * (layer.kv_lora_rank + layer.qk_rope_head_dim)
            row += heads * (wide + layer.kv_lora_rank + layer.qk_rope_head_dim)
            allowed = self.scratch * row * inputs[0].element_size() + self.workspace
            held = [*inputs, *rig.given.values(), *rig.bound.cache.tensors().values()]
            taken, left = measure.allocated(lambda: rig.path(*inputs), held)
            faults = []
            if taken > allowed:
                faults.append(f"a step of one row takes {taken} bytes, allowed are {allowed}")
            if left > 0:
                faults.append(f"a step leaves {left} bytes behind")
            if faults:
                self._fail(rig, faults)

    def test_compiles(self, at: Place, case: PathCase) -> None:
        """One full graph without a break, and the same bits, for every row count of an entry."""
        with self.rig(at, case) as rig:
            inside = [n for n in self._inside(rig.entries)[0] if 2 <= n <= 64][:2]
            faults = []
            for backend in self.backends if inside else ():
                torch._dynamo.reset()
                try:
                    faults += self._compiled(rig, backend, inside)
                except Exception as err:  # noqa: BLE001 - told as this backend's fault
                    faults.append(f"{backend}: {type(err).__name__}: {err}")
                finally:
                    torch._dynamo.reset()
            if faults:
                self._fail(rig, faults)
            if not inside:
                pytest.skip("the envelope has no row count from 2 to 64")

    def _compiled(self, rig: _Rig, backend: str, row_counts: Sequence[int]) -> list[str]:
        compiled = torch.compile(rig.path, backend=backend, fullgraph=True, dynamic=True)
        cache, faults = rig.bound.cache, []
        for rows in row_counts:
            before = rig.step(rows)
            cache.k_nope.zero_()
            cache.k_rope.zero_()
            found = rig.outcome(compiled(*rig.inputs(rows)))
            if changed := measure.changed(before, found):
                faults.append(f"{backend}, {rows} rows: compiled, {', '.join(changed)} differ")
        return faults

    @at_every_place
    def test_stable_under_cann(self, at: Place, case: PathCase) -> None:
        """On every chip and CANN where it is offered it is right, and so is the layer's release."""
        self._prove(at, case, self.rows)
