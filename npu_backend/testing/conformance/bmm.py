"""The conformance suite of a batched matmul: ``(tokens, B, K) x (B, K, N) -> (tokens, B, N)``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from attrs import evolve, frozen

import npu_backend.runtime as runtime
from npu_backend.deployment import Deployment
from npu_backend.errors import BoundExceededError, NpuBackendError, SelectionError
from npu_backend.model.records import MlaLayer
from npu_backend.offers import SITE_WEIGHTS, BmmSpec, Offer, Record
from npu_backend.plan import LayerPlan, TableEntry
from npu_backend.runtime.prove.seeded import seeded_weights
from npu_backend.testing.conformance import measure
from npu_backend.testing.conformance.base import Conformance, at_every_place
from npu_backend.testing.conformance.places import Place
from npu_backend.testing.conformance.subject import Subject, plan_alone, plan_one

__all__ = ["BmmCase", "BmmKernelConformance"]

Kernel = Callable[[torch.Tensor], torch.Tensor]

# A width that is not under test: small, and no other dimension's.
_NOPE, _V, _HIDDEN, _ROPE, _LATENT = 16, 24, 32, 8, 40


@frozen(cache_hash=True)
class BmmCase:
    """One batched matmul that a suite asks about.

    Args:
        site: ``q_absorb`` or ``v_up``.
        B: Local heads.
        K: Inner size.
        N: Outer size.
        dtype: Dtype of activation and weight.
        layout: Layout of the weight as loaded: ``strided`` or ``contiguous``.
    """

    site: str
    B: int
    K: int
    N: int
    dtype: str = "bfloat16"
    layout: str = "contiguous"

    def __str__(self) -> str:
        return f"{self.site}-{self.B}x{self.K}x{self.N}-{self.dtype}-{self.layout}"

    def layer(self) -> MlaLayer:
        """Return a layer with this matmul, everything else about it small."""
        absorb = self.site == "q_absorb"
        return MlaLayer(
            layer_id=0,
            hidden_size=_HIDDEN,
            num_heads=self.B,
            qk_nope_head_dim=self.K if absorb else _NOPE,
            kv_lora_rank=self.N if absorb else self.K,
            v_head_dim=_V if absorb else self.N,
            qk_rope_head_dim=_ROPE,
            dtype=self.dtype,
            w_kc_layout=self.layout if absorb else "strided",
            w_vc_layout="contiguous" if absorb else self.layout,
        )

    def spec(self) -> BmmSpec:
        """Return the matmul as the planner asks about it."""
        return BmmSpec(
            layer=self.layer(),
            site=self.site,
            B=self.B,
            K=self.K,
            N=self.N,
            dtype=self.dtype,
            weight_dtype=self.dtype,
            weight_layout=self.layout,
            input_layout="strided" if self.site == "q_absorb" else "contiguous",
        )


@frozen(eq=False)
class _Rig:
    """A kernel bound to a layer's weights.

    Args:
        case: The matmul.
        plan: The layer's plan.
        entries: Where the strategy serves in it.
        bound: The bound layer.
        given: The tensors it was bound to.
        device: Where they are.
    """

    case: BmmCase
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
    def weight(self) -> torch.Tensor:
        """The loaded weight of the site, ``(B, K, N)``."""
        return self.given[SITE_WEIGHTS[self.case.site]]

    @property
    def kernel(self) -> Kernel:
        """The callable of the first phase that the strategy serves, as a host calls it."""
        bound = self.bound.q_absorb_for if self.case.site == "q_absorb" else self.bound.v_up_for
        return bound(self.entries[0].phases[0])

    def activation(self, rows: int, seed: int = 0) -> torch.Tensor:
        """Return ``(rows, B, K)`` as a host has it: at q_absorb a slice of the queries."""
        case = self.case
        generator = torch.Generator().manual_seed(1000 * seed + rows)
        extra = _ROPE if case.site == "q_absorb" else 0
        x = torch.randn(rows, case.B, case.K + extra, generator=generator)
        return x.to(getattr(torch, case.dtype)).to(self.device)[..., : case.K]

    def expected(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product of the values as loaded, by no op under test: in fp32, which holds
        products of 16-bit values exactly; in fp64 where the values are fp32."""
        wide = torch.float64 if self.case.dtype == "float32" else torch.float32
        a, b = x.detach().cpu().to(wide), self.weight.detach().cpu().to(wide)
        return torch.matmul(a.transpose(0, 1), b).transpose(0, 1)

    def others(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return everything that is not the kernel's to change or to hand out."""
        return {"the activation": x, **self.given, **self.bound.cache.tensors()}


def _worst_row(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest relative error of a row; infinite where a value is not finite."""
    if not bool(torch.isfinite(found).all()):
        return float("inf")
    off = (found.double() - expected.double()).flatten(1).norm(dim=1)
    return float((off / expected.double().flatten(1).norm(dim=1)).max())


class BmmKernelConformance(Conformance):
    """Shows that a kernel multiplies as its offer says. Subclass it and set ``plugin``, ``shapes``.

    Attributes:
        shapes: ``(B, K, N)`` that the plugin serves. Required.
        sites: ``q_absorb`` and ``v_up``, those where it serves.
        dtypes: Dtypes of activation and weight.
        layouts: Layouts of the loaded weight; one that the plugin refuses is left out.
        tolerances: Largest relative error of one row against the exact product, by dtype. The
            default is what rounding the result once to the dtype can give: at most ``2 ** -p`` of
            each value with p significand bits, and for float32 sums of some hundred products.
        workspace: Bytes that one step may take beside its result, one temporary of the size of the
            result, and, where the offer says ``copies_input``, one of the activation.
        rows: Row counts to run beside the bounds of the envelope.
        row_cap: Bounds above are not run, and named so.
        backends: Backends of torch.compile; ``aot_eager`` also functionalizes, as every backend
            that generates code does.
    """

    shapes: ClassVar[Sequence[tuple[int, int, int]]] = ()
    sites: ClassVar[Sequence[str]] = ("v_up",)
    dtypes: ClassVar[Sequence[str]] = ("bfloat16",)
    layouts: ClassVar[Sequence[str]] = ("contiguous", "strided")
    tolerances: ClassVar[Mapping[str, float]] = {
        "bfloat16": 2**-8,
        "float16": 2**-11,
        "float32": 2e-5,
    }
    workspace: ClassVar[int] = 0
    rows: ClassVar[Sequence[int]] = (1, 2, 5)
    row_cap: ClassVar[int] = 2048
    backends: ClassVar[Sequence[str]] = ("eager", "aot_eager")

    @classmethod
    def cases(cls) -> tuple[BmmCase, ...]:
        """Return every matmul that is claimed."""
        return tuple(
            BmmCase(site, *shape, dtype, layout)
            for site in cls.sites
            for shape in cls.shapes
            for dtype in cls.dtypes
            for layout in cls.layouts
        )

    @classmethod
    def ask(cls, subject: Subject, case: BmmCase, deployment: Deployment) -> tuple[Record, ...]:
        """Ask ``select_bmm_kernel``."""
        return subject.kernels(case.spec(), deployment)

    # --- the kernel, bound ----------------------------------------------------------------------

    @contextmanager
    def rig(self, place: Place, case: BmmCase, **options: Any) -> Iterator[_Rig]:
        """Plan, bind and prepare a layer in which the strategy multiplies."""
        survey = self.survey()
        deployment = place.deployment(**{**self.options(), **options})
        layer = case.layer()
        plan = plan_one(survey.subject, layer, deployment, case.site, survey.strategy)
        entries = tuple(
            e
            for e in plan.table(case.site)
            if e.plugin == survey.subject.info and e.strategy == survey.strategy
        )
        device = torch.device(place.torch_device)
        given = seeded_weights(layer, 1).to(device)
        cache = runtime.LayerCache.allocate(layer, 1, device=device, max_positions=4)
        with torch.no_grad():
            bound = runtime.bind(plan, given, cache)
            bound.prepare()
            yield _Rig(case, plan, entries, bound, given, device)

    def _inside(self, rig: _Rig) -> tuple[list[int], list[int]]:
        """Return row counts inside the envelope, bounds first of all, and those above the cap."""
        wanted: set[int] = set()
        for low, high in {e.tokens for e in rig.entries}:
            near = {low, low + 1, *self.rows}
            if high is not None:
                near |= {high - 1, high}
            wanted |= {n for n in near if n >= low and (high is None or n <= high)}
        return sorted(n for n in wanted if n <= self.row_cap), sorted(
            n for n in wanted if n > self.row_cap
        )

    def _rows(self, rig: _Rig) -> int:
        """Return a row count inside the envelope that is no other size of the matmul."""
        inside, _ = self._inside(rig)
        sizes = {rig.case.B, rig.case.K, rig.case.N}
        return next((n for n in reversed(inside) if n <= 64 and n not in sizes), inside[0])

    def _fault(self, rig: _Rig, x: torch.Tensor, out: Any) -> str | None:
        """Return what is wrong with a product, or None."""
        case, rows = rig.case, x.shape[0]
        if not isinstance(out, torch.Tensor):
            return f"{rows} rows: returned {type(out).__name__}, not a tensor"
        want = (rows, case.B, case.N)
        if tuple(out.shape) != want:
            return f"{rows} rows: the result is {tuple(out.shape)}, not {want}"
        if str(out.dtype) != f"torch.{case.dtype}":
            return f"{rows} rows: the result is {out.dtype}, not torch.{case.dtype}"
        if out.device != x.device:
            return f"{rows} rows: the result is on {out.device}, not {x.device}"
        worst = _worst_row(out.detach().cpu(), rig.expected(x))
        bound = self.tolerances[case.dtype]
        if not worst <= bound:
            return f"{rows} rows: a row is off by {worst:.2g} of its size, tolerated is {bound:.2g}"
        return None

    def _run(self, rig: _Rig, row_counts: Sequence[int]) -> None:
        faults = []
        for rows in row_counts:
            x = rig.activation(rows)
            try:
                fault = self._fault(rig, x, rig.kernel(x))
            except Exception as err:  # noqa: BLE001 - told as this row count's fault
                fault = f"{rows} rows: raised {type(err).__name__}: {err}"
            if fault:
                faults.append(fault)
        if faults:
            self._fail(rig, faults)

    def _fail(self, rig: _Rig, faults: Sequence[str]) -> None:
        entry = rig.entries[0]
        pytest.fail("\n  ".join([f"{entry.strategy} of {entry.provider}, {rig.case}", *faults]))

    # --- tests ----------------------------------------------------------------------------------

    def test_numerics(self, at: Place, case: BmmCase) -> None:
        """The product is that of exact arithmetic, within the declared tolerance."""
        with self.rig(at, case) as rig:
            self._run(rig, [n for n in self._inside(rig)[0] if n in self.rows] or [self._rows(rig)])

    def test_envelope_rows(self, at: Place, case: BmmCase) -> None:
        """At N - 1 and N of every bound on rows it multiplies, at N + 1 it is refused."""
        with self.rig(at, case) as rig:
            inside, above = self._inside(rig)
            self._run(rig, inside)
            ranges = {e.tokens for e in rig.entries}
        for low, high in ranges:
            if low > 1:
                self._must_refuse(at, case, low - 1)
            if high is not None:
                self._must_refuse(at, case, high + 1)
                if low == 1:
                    self._must_stop(at, case, high)
        if above:
            pytest.skip(f"row counts {above} are above row_cap = {self.row_cap} and were not run")

    def _must_refuse(self, at: Place, case: BmmCase, rows: int) -> None:
        """With nobody beside it, rows outside the envelope have no plan."""
        survey = self.survey()
        deployment = at.deployment(**{**self.options(), "max_tokens": rows})
        try:
            plan_alone(survey.subject, case.layer(), deployment, case.site, survey.strategy)
        except SelectionError as err:
            if str(rows) not in str(err):
                pytest.fail(f"{rows} rows are refused, and the refusal does not name them: {err}")
        else:
            pytest.fail(f"{rows} rows are outside the envelope of {survey.strategy} and planned")

    def _must_stop(self, at: Place, case: BmmCase, last: int) -> None:
        """Planned up to its last row count, a step with one more raises before it computes."""
        if last >= self.row_cap:
            return
        with self.rig(at, case, max_tokens=last) as rig:
            x = rig.activation(last + 1)
            with pytest.raises(BoundExceededError):
                rig.kernel(x)

    def test_envelope_shapes(self, at: Place, case: BmmCase) -> None:
        """One below and one above each of B, K and N it is refused, or it multiplies there."""
        survey, refused, faults = self.survey(), 0, []
        for axis in "BKN":
            for step in (-1, 1):
                size = getattr(case, axis) + step
                if size < 1:
                    continue
                near = evolve(case, **{axis: size})
                records = self.ask(survey.subject, near, at.deployment(**self.options()))
                if not any(isinstance(r, Offer) and r.strategy == survey.strategy for r in records):
                    refused += 1
                    continue
                try:
                    with self.rig(at, near) as rig:
                        self._run(rig, [self._rows(rig)])
                except NpuBackendError as err:
                    faults.append(f"{near} is offered and cannot be had: {err}")
                except pytest.fail.Exception as err:
                    faults.append(f"{near} is offered: {err}")
        if faults:
            pytest.fail("\n".join(faults))

    def test_strides(self, at: Place, case: BmmCase) -> None:
        """Equal values in other strides have an equal product: a slice, turned, every second; or
        they are refused by a named error, ``layout.contiguous``."""
        with self.rig(at, case) as rig:
            x = rig.activation(self._rows(rig)).contiguous()
            wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype, device=x.device)
            wide[..., 3:] = x
            spread = torch.zeros(2 * x.shape[0], *x.shape[1:], dtype=x.dtype, device=x.device)
            spread[::2] = x
            turned = x.transpose(0, 1).contiguous().transpose(0, 1)
            views = {"a slice": wide[..., 3:], "turned": turned, "every second row": spread[::2]}
            faults = [
                f"{name} (strides {view.stride()}): {fault}"
                for name, view in views.items()
                if (fault := self._strided_fault(rig, view))
            ]
            if faults:
                self._fail(rig, faults)

    def _strided_fault(self, rig: _Rig, view: torch.Tensor) -> str | None:
        try:
            out = rig.kernel(view)
        except NpuBackendError as err:
            return None if err.code == "layout.contiguous" else str(err)
        return self._fault(rig, view, out)

    def test_readers(self, at: Place, case: BmmCase) -> None:
        """A weight that is not declared as read may be poisoned; each that is must matter."""
        with self.rig(at, case) as rig:
            x, faults = rig.activation(self._rows(rig)), []
            before = rig.kernel(x).detach().cpu().clone()
            declared = rig.offer.step_reads
            for name in (w.name for w in rig.plan.weights if w.copy_of is None):
                with measure.Poisoned(rig.given[name]):
                    how = ""
                    try:
                        matters = not measure.same_bits(before, rig.kernel(x))
                    except Exception as err:  # noqa: BLE001 - it looked at what it was given
                        matters, how = True, f" (the step raised {type(err).__name__}: {err})"
                if matters and name not in declared:
                    faults.append(
                        f"{name} is read in a step, and the offer does not declare it{how}"
                    )
                if not matters and name in declared:
                    faults.append(f"{name} is declared as read in every step, and is not")
            if faults:
                self._fail(rig, faults)

    def test_inputs_stay(self, at: Place, case: BmmCase) -> None:
        """Activation, weights and cache have the bits that they had."""
        with self.rig(at, case) as rig:
            x = rig.activation(self._rows(rig))
            loaded = seeded_weights(case.layer(), 1).to(torch.device("cpu"))
            before = measure.clones(rig.others(x))
            rig.kernel(x)
            found = [
                f"{name} is changed by a step" for name in measure.changed(before, rig.others(x))
            ]
            found += [
                f"{name} is changed while preparing" for name in measure.changed(loaded, rig.given)
            ]
            if found:
                self._fail(rig, found)

    def test_result_is_its_own(self, at: Place, case: BmmCase) -> None:
        """A result lies on nobody's storage, and the next step leaves it as it is."""
        with self.rig(at, case) as rig:
            x = rig.activation(self._rows(rig))
            first = rig.kernel(x)
            faults = [
                f"the result lies on the storage of {name}"
                for name in measure.sharing(first, rig.others(x))
            ]
            kept = first.detach().cpu().clone()
            second = rig.kernel(rig.activation(x.shape[0], seed=1))
            if measure.sharing(second, {"the last": first}) or not measure.same_bits(kept, first):
                faults.append("the next step writes where the last result lies")
            if faults:
                self._fail(rig, faults)

    def test_deterministic(self, at: Place, case: BmmCase) -> None:
        """Equal inputs give equal bits, again and in a layer that is bound anew."""
        with self.rig(at, case) as rig:
            x = rig.activation(self._rows(rig))
            results = [rig.kernel(x).detach().cpu().clone() for _ in range(3)]
        with self.rig(at, case) as rig:
            results.append(rig.kernel(x).detach().cpu().clone())
            if not all(measure.same_bits(results[0], other) for other in results[1:]):
                self._fail(rig, ["the same activation does not give the same bits"])

    def test_allocations(self, at: Place, case: BmmCase) -> None:
        """A step takes no more than it says, and leaves nothing behind."""
        with self.rig(at, case) as rig:
            x = rig.activation(self._rows(rig))
            result = x.shape[0] * case.B * case.N * x.element_size()
            copied = x.numel() * x.element_size() if rig.offer.copies_input else 0
            allowed = 2 * result + copied + self.workspace
            taken, left = measure.allocated(lambda: rig.kernel(x), [x, *rig.given.values()])
            faults = []
            if taken > allowed:
                faults.append(
                    f"a step of {x.shape[0]} rows takes {taken} bytes; result and declared copies "
                    f"are {allowed} (workspace = {self.workspace})"
                )
            if left > 0:
                faults.append(f"a step leaves {left} bytes behind")
            if faults:
                self._fail(rig, faults)

    def test_compiles(self, at: Place, case: BmmCase) -> None:
        """One full graph without a break, and the same bits, for every row count of an entry."""
        with self.rig(at, case) as rig:
            inside = [n for n in self._inside(rig)[0] if 2 <= n <= 64][:2]
            faults = []
            for backend in self.backends if inside else ():
                torch._dynamo.reset()
                try:
                    compiled = torch.compile(
                        rig.kernel, backend=backend, fullgraph=True, dynamic=True
                    )
                    for rows in inside:
                        x = rig.activation(rows)
                        if not measure.same_bits(compiled(x), rig.kernel(x)):
                            faults.append(f"{backend}, {rows} rows: compiled it gives other bits")
                except Exception as err:  # noqa: BLE001 - told as this backend's fault
                    faults.append(f"{backend}: {type(err).__name__}: {err}")
                finally:
                    torch._dynamo.reset()
            if faults:
                self._fail(rig, faults)
            if not inside:
                pytest.skip("the envelope has no row count from 2 to 64")

    @at_every_place
    def test_stable_under_cann(self, at: Place, case: BmmCase) -> None:
        """On every chip and CANN where it is offered it multiplies, from the first row count of its
        envelope to the last."""
        with self.rig(at, case) as rig:
            ends = {n for e in rig.entries for n in e.tokens if n is not None and n <= self.row_cap}
            self._run(rig, sorted({*ends, self._rows(rig)}))
