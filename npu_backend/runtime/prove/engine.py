"""Prove a plan on real tensors: one layer at a time, before and after its release."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from attrs import evolve

from npu_backend.errors import NotExecutedError, NpuBackendError, SchemaMismatchError
from npu_backend.plan import LayerPlan, ModelPlan
from npu_backend.runtime import AliasWarning, LayerCache, bind
from npu_backend.runtime.bound import BoundLayer
from npu_backend.runtime.prove import claims, release_claims
from npu_backend.runtime.prove.execution import execute, seeded_sequences, shape_of
from npu_backend.runtime.prove.memory import MemoryWatch
from npu_backend.runtime.prove.mla_fp32 import MlaReference, mla_reference
from npu_backend.runtime.prove.records import LayerProof, Proof, RunResult
from npu_backend.runtime.prove.scenario import ROW_CAP, Scenario, make_scenario
from npu_backend.runtime.prove.seeded import LayerWeights, check_executable, seeded_weights
from npu_backend.runtime.prove.tolerance import tolerance_of

__all__ = ["DEFAULT_ROWS", "Progress", "prove_layer", "prove_model"]

DEFAULT_ROWS = (1, 5)
"""Row counts that every phase is run with, beside the boundaries of the tables."""

Progress = Callable[[int, int, "LayerProof | None"], None]
"""Called with layers done, layers in all, and the layer just done (None at the start)."""

_TRANSFERRED = (
    "extend is not reachable, so the cache was filled as a prefill worker's transfer would: by an "
    "independent writer, from the fp32 reference, in the layer's KV layout"
)
_EXTENDED = "the cache was filled by extend steps through the plan"
_DENSE = (
    "attention is dense: with so few tokens an indexer's top-k selects all of them, and the "
    "indexer itself is not run"
)


class _Run:
    """One layer's run: collects claims, and turns an exception into a failed one."""

    def __init__(self, plan: LayerPlan, device: torch.device) -> None:
        self.plan = plan
        self.device = device
        self.record = LayerProof(
            layer_id=plan.layer_id,
            is_nextn=plan.layer.is_nextn,
            device=str(device),
            dtype=plan.layer.dtype,
            tolerance=tolerance_of(plan.layer),
        )
        self.proofs: list[Proof] = []
        self.seconds: dict[str, float] = {}
        self.stage = "start"

    @contextmanager
    def during(self, stage: str) -> Iterator[None]:
        """Note what is being done and how long it takes."""
        self.stage = stage
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started

    def failed(self, err: Exception) -> None:
        """Record an exception as a failed claim, with the stage it came in."""
        text = str(err).strip() or repr(err)
        self.proofs.append(
            Proof(
                name="layer",
                passed=False,
                text=f"{self.stage} failed: {type(err).__name__}: {text}",
                figures={"stage": self.stage, "error": type(err).__name__},
            )
        )


def _check_dtype(plan: LayerPlan, dtype: str | torch.dtype | None) -> None:
    wanted = None if dtype is None else str(dtype).removeprefix("torch.")
    if wanted not in (None, plan.layer.dtype):
        raise NpuBackendError(
            f"the layer is planned in {plan.layer.dtype} and asked to run in {wanted}",
            whom=str(plan.layer),
            why="kernels, limits and bytes of the plan are those of its own dtype",
            remedy=f"plan with --dtype {wanted}",
            code="dtype",
        )


def prove_layer(
    plan: LayerPlan,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rows: Sequence[int] = DEFAULT_ROWS,
    dtype: str | torch.dtype | None = None,
    row_cap: int = ROW_CAP,
) -> LayerProof:
    """Load, bind, prepare, step, release, step again and discard one layer, and say what held.

    Every reachable phase runs with each row count of ``rows`` and on both sides of each boundary
    between table entries. Claims: ``outputs`` and ``cache`` against an fp32 reference in textbook
    form, ``q_lora`` likewise, ``padding``, ``equality`` of everything before and after the release,
    ``bytes`` freed, ``released`` weights and ``unreachable`` phases raise. An exception on the way
    is a failed claim ``layer``, but for the two below.

    Args:
        plan: The layer's plan.
        device: Where to run: ``cpu``, or a device that is up already.
        seed: Of weights and hidden states.
        rows: Row counts to run in every phase.
        dtype: Only to make sure: the plan's own dtype is what runs.
        row_cap: Boundaries above this are named in ``skipped`` and not run.

    Raises:
        NotExecutedError: The layer is of a kind that is planned but not executed yet.
        SchemaMismatchError: ``op.missing``: an op that the plan calls is not installed.
        NpuBackendError: ``dtype`` is not the plan's.
    """
    check_executable(plan.layer)
    _check_dtype(plan, dtype)
    place = torch.device(device)
    run = _Run(plan, place)
    try:
        _prove(run, seed, rows, row_cap)
    except NotExecutedError:
        raise
    except SchemaMismatchError as err:
        if err.code == "op.missing":
            # Nothing was proved or refuted: what the plan needs is not installed.
            raise
        run.failed(err)
    except Exception as err:  # noqa: BLE001 - told in the record, as a claim that failed
        run.failed(err)
    gc.collect()
    return _finished(run)


def _finished(run: _Run) -> LayerProof:
    return evolve(run.record, proofs=tuple(run.proofs), seconds=run.seconds)


def _reference(
    run: _Run, weights: LayerWeights, scenario: Scenario, hidden: list[torch.Tensor]
) -> MlaReference:
    layer = run.plan.layer
    if not scenario.tracks:
        return MlaReference(outputs=(), latents=(), keys=())
    return mla_reference(
        shape_of(layer, run.plan.deployment.attn_tp_size),
        weights.loaded,
        weights.gammas,
        hidden,
        scenario.first_asked,
        scales=weights.channel_scales,
        dtype=torch.float64 if layer.dtype == "float32" else torch.float32,
    )


def _notes(plan: LayerPlan, scenario: Scenario) -> tuple[str, ...]:
    notes = ["weights are random, of a seed; RoPE has base 10000 and is not scaled"]
    if scenario.tracks:
        notes.append(_EXTENDED if scenario.fill else _TRANSFERRED)
    if plan.layer.has_indexer:
        notes.append(_DENSE)
    return tuple(notes)


def _prove(run: _Run, seed: int, rows: Sequence[int], row_cap: int) -> None:
    plan, layer = run.plan, run.plan.layer
    tp = plan.deployment.attn_tp_size
    scenario = make_scenario(plan, rows=rows, cap=row_cap)
    run.record = evolve(run.record, skipped=scenario.skipped, notes=_notes(plan, scenario))
    with run.during("load"):
        weights = seeded_weights(layer, tp, seed=seed)
        hidden = seeded_sequences(layer, scenario, seed)
    with run.during("reference"), torch.no_grad():
        reference = _reference(run, weights, scenario, hidden)
    with run.during("load"):
        given = weights.to(run.device)
        # The reference is computed: from here on nothing but the host's own names holds a weight.
        del weights
        longest = max((t.length for t in scenario.tracks), default=1)
        cache = LayerCache.allocate(
            layer, scenario.num_blocks, device=run.device, max_positions=longest
        )
    with run.during("prepare"):
        bound = bind(plan, given, cache)
        bound.prepare()
    with run.during("steps before release"):
        before = execute(bound, cache, scenario, hidden, reference)
        records = claims.step_records(bound.plan, scenario, before, reference)
    run.record = evolve(run.record, steps=records, fingerprint=bound.plan.fingerprint)
    bound_on_error = run.record.tolerance
    run.proofs += [
        claims.prove_outputs(records, bound_on_error),
        claims.prove_cache(scenario, before, reference, bound_on_error),
        claims.prove_q_lora(scenario, before, reference, bound_on_error),
        claims.prove_padding(scenario, before),
    ]
    _release(run, bound, given)
    with run.during("steps after release"):
        after = execute(bound, cache, scenario, hidden, reference)
    equality, records = claims.prove_equality(records, before, after)
    run.proofs.append(equality)
    run.record = evolve(run.record, steps=records)
    _release_again(run, bound)
    with run.during("reads after release"):
        run.proofs += [
            release_claims.prove_released(bound.plan, given),
            release_claims.prove_unreachable(bound),
        ]


def _release(run: _Run, bound: BoundLayer, given: dict[str, torch.Tensor]) -> None:
    with run.during("release"):
        watch = MemoryWatch(given, run.device)
        with warnings.catch_warnings():
            # What differs is a claim here, and told with its figures.
            warnings.simplefilter("ignore", AliasWarning)
            ledger = bound.release()
        proof = release_claims.prove_bytes(run.plan, bound.plan, ledger, watch)
    run.proofs.append(proof)
    run.record = evolve(run.record, ledger=ledger.to_dict(), fingerprint=bound.plan.fingerprint)


def _release_again(run: _Run, bound: BoundLayer) -> None:
    """Free what steps of another role brought back, so that every release is looked at."""
    first = run.record.ledger or {}
    with run.during("release again"):
        back = first["freed"] - (0 if bound.ledger is None else bound.ledger.freed)
        if back:
            run.proofs.append(release_claims.prove_again(bound.release(), first["freed"], back))


def prove_model(
    plan: ModelPlan,
    *,
    device: torch.device | str = "cpu",
    seed: int = 0,
    rows: Sequence[int] = DEFAULT_ROWS,
    dtype: str | torch.dtype | None = None,
    row_cap: int = ROW_CAP,
    progress: Progress | None = None,
) -> RunResult:
    """Prove every layer of a plan, one at a time: at most one layer is in memory.

    Args:
        plan: The plan.
        device: Where to run.
        seed: Of weights and hidden states; each layer has its own.
        rows: Row counts to run in every phase.
        dtype: Only to make sure: the plan's own dtype is what runs.
        row_cap: Boundaries above this are named and not run.
        progress: Called at the start and after each layer.

    Raises:
        NpuBackendError: A layer is of a kind that is planned but not executed yet; nothing has run.
    """
    for layer in plan:
        check_executable(layer.layer)
        _check_dtype(layer, dtype)
    total = len(plan.layers)
    if progress is not None:
        progress(0, total, None)
    proofs: list[LayerProof] = []
    for layer in plan:
        proof = prove_layer(
            layer, device=device, seed=seed, rows=rows, dtype=dtype, row_cap=row_cap
        )
        proofs.append(proof)
        if progress is not None:
            progress(len(proofs), total, proof)
    return RunResult(device=str(torch.device(device)), seed=seed, layers=tuple(proofs))
