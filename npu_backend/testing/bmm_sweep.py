"""Every batched matmul of the bundled models, on every version and chip, against the op's limits.

For each model's shapes, attention-TP size, CANN release, chip and dtype a layer is planned, and for
each row count the kernel that its table names is bound and called on tensors without memory; the
simulated op's validator judges what the kernel in fact hands to the op: shapes, strides and
permutations. What other engines choose for the same inputs is judged by the same validators.

    python -m npu_backend.testing.bmm_sweep
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from attrs import field, frozen

from npu_backend.api import Backend, load
from npu_backend.catalog import Catalog
from npu_backend.catalog.peers import Peer, load_peers
from npu_backend.deployment import Deployment, Phase
from npu_backend.errors import NpuBackendError
from npu_backend.model.read import read_model
from npu_backend.model.records import MlaLayer
from npu_backend.offers import SITES, BmmSpec
from npu_backend.plan import LayerPlan
from npu_backend.planner.kernels import bmm_spec
from npu_backend.runtime.kernel import bind_kernel, matmul_operands
from npu_backend.testing.sim import OpRejectedError, TensorSpec, validators

if TYPE_CHECKING:
    import torch

__all__ = ["ROWS", "Case", "Sweep", "cases", "peer_table", "report", "sweep"]

PeerKey = tuple[str, str, str, str]
"""Engine, attention, site, chip."""
ROWS = (1, 1024, 1025, 65535, 65536, 200000)
DTYPES = ("bfloat16", "float16", "float32")
TP_SIZES = tuple(range(1, 65))
_PERMS = {
    "npu_transpose_batchmatmul[1,0,2]": (1, 0, 2),
    "npu_transpose_batchmatmul[0,1,2]": (0, 1, 2),
}


@frozen
class Case:
    """A layer of one rank on one chip with one CANN.

    Args:
        model: Bundled name of the first model that has such a layer.
        layer: The layer.
        attn_tp_size: Attention-TP size.
        soc: Chip family.
        cann: CANN release.
    """

    model: str
    layer: MlaLayer
    attn_tp_size: int
    soc: str
    cann: str

    @property
    def attention(self) -> str:
        """``mla``, or ``dsa`` for a layer with an indexer."""
        return "dsa" if self.layer.has_indexer else "mla"


@frozen
class Sweep:
    """What a sweep counted.

    Args:
        cases: Layers planned.
        dispatches: Calls that a validator accepted, or that need none (torch.bmm), by strategy.
        peers: By engine, attention, site and chip: ``(inputs, rejected)``.
    """

    cases: int
    dispatches: Mapping[str, int]
    peers: Mapping[PeerKey, tuple[int, int]] = field(factory=dict)

    @property
    def total(self) -> int:
        """Calls in all."""
        return sum(self.dispatches.values())


class _JudgingOps:
    """The two ops on tensors without memory: each call is judged, and gives an empty result."""

    name = "judged"

    def __init__(self, soc: str, cann: str) -> None:
        self.place: dict[str, Any] = {"soc": soc, "cann": cann}
        self.judged = 0

    def check(self, names: Iterable[str], whom: str) -> None:
        """Every op is there: validators know which lines have it."""

    def npu_transpose_batchmatmul(
        self, input: torch.Tensor, weight: torch.Tensor, **perms: Any
    ) -> torch.Tensor:
        """Judge the call; return an empty ``(rows, B, N)``."""
        validators.npu_transpose_batchmatmul(
            TensorSpec.of(input), TensorSpec.of(weight), **perms, **self.place
        )
        self.judged += 1
        swapped = tuple(perms["perm_x1"]) == (1, 0, 2)
        rows, heads = input.shape[:2] if swapped else (input.shape[1], input.shape[0])
        return input.new_empty((rows, heads, weight.shape[2]))

    def batch_matmul_transpose(
        self, tensor_a: torch.Tensor, tensor_b: torch.Tensor, tensor_c: torch.Tensor
    ) -> None:
        """Judge the call."""
        validators.batch_matmul_transpose(
            TensorSpec.of(tensor_a), TensorSpec.of(tensor_b), TensorSpec.of(tensor_c), **self.place
        )
        self.judged += 1


def _layers(catalog: Catalog) -> list[tuple[str, MlaLayer]]:
    """Return one layer of each kind of each bundled model, twins of other models left out."""
    found: dict[Any, tuple[str, MlaLayer]] = {}
    for name in catalog.models:
        for dtype in DTYPES:
            # As the host that leaves most layouts behind: some models keep w_vc strided there.
            for layer in read_model(name, dtype=dtype, host="sglang", catalog=catalog).layers:
                key = (
                    layer.num_heads,
                    layer.kv_lora_rank,
                    layer.qk_nope_head_dim,
                    layer.v_head_dim,
                    layer.has_indexer,
                    layer.w_kc_layout,
                    layer.w_vc_layout,
                    bool(catalog.notes_for(layer.model_type)),
                    dtype,
                )
                found.setdefault(key, (name, layer))
    return list(found.values())


def cases(
    catalog: Catalog,
    *,
    canns: Sequence[str] | None = None,
    socs: Sequence[str] | None = None,
    tp_sizes: Sequence[int] = TP_SIZES,
) -> Iterator[Case]:
    """Return every case; by default CANN 8.2 and newer, every chip, attention-TP 1 to 64."""
    releases = canns or [c for c in catalog.versions.cann if not c.startswith("8.1")]
    for name, layer in _layers(catalog):
        for tp in tp_sizes:
            if layer.num_heads % tp == 0:
                for cann in releases:
                    for soc in socs or catalog.versions.socs:
                        yield Case(name, layer, tp, soc, cann)


def _dispatch(plan: LayerPlan, spec: BmmSpec, ops: _JudgingOps, counts: Counter[str]) -> None:
    """Call what serves each row count of each phase.

    Raises:
        NpuBackendError: A row count is served by nobody, or the op would refuse the call.
    """
    bound: dict[Any, Any] = {}
    _, weight = matmul_operands(spec, 1, device="meta")
    for rows in ROWS:
        # One call for phases that share an entry.
        chosen = {}
        for phase in spec.phases:
            fitting = [
                e
                for e in plan.table(spec.site)
                if phase in e.phases and e.tokens[0] <= rows <= (e.tokens[1] or rows)
            ]
            if len(fitting) != 1 or fitting[0].offer is None or fitting[0].plugin is None:
                raise NpuBackendError(
                    f"{rows} rows of {phase} have {len(fitting)} entries",
                    whom=f"{spec.site} {spec.shape}, {spec.dtype}",
                    why="each row count has exactly one",
                )
            chosen[fitting[0]] = True
        for entry in chosen:
            assert entry.offer is not None
            assert entry.plugin is not None
            if entry.offer not in bound:
                bound[entry.offer] = bind_kernel(
                    entry.offer,
                    entry.plugin,
                    spec,
                    plan.deployment,
                    weight,
                    ops=ops,  # type: ignore[arg-type]
                )
            before = ops.judged
            x, _ = matmul_operands(spec, rows, device="meta")
            out = bound[entry.offer](x)
            called = ops.judged - before
            if tuple(out.shape) != (rows, spec.B, spec.N) or called != (
                entry.strategy != "torch.bmm"
            ):
                raise NpuBackendError(
                    f"{entry.strategy} gave {tuple(out.shape)} with {called} calls of an op",
                    whom=f"{spec.site} {spec.shape}, {rows} rows",
                    why=f"wanted are {(rows, spec.B, spec.N)} and one call",
                )
            counts[entry.strategy] += 1


@lru_cache(maxsize=65536)
def _accepted(
    strategy: str,
    shape: tuple[int, int, int],
    rows: int,
    dtype: str,
    strided: tuple[bool, bool],
    soc: str,
    cann: str,
) -> bool:
    """Whether the op takes an engine's call: its own layouts, nothing made contiguous for it.

    Args:
        strategy: What is called.
        shape: ``(B, K, N)``.
        rows: Rows.
        dtype: Of both operands.
        strided: Whether the activation and the weight are strided.
        soc: Chip family.
        cann: CANN release.
    """
    if strategy == "torch.bmm":
        return True
    B, K, N = shape
    weight = TensorSpec((B, K, N), dtype, stride=(K * N, 1, K) if strided[1] else (K * N, N, 1))
    wide = K + 64 if strided[0] else K
    try:
        if strategy == "batch_matmul_transpose":
            # The engines make the activation contiguous themselves.
            validators.batch_matmul_transpose(
                TensorSpec((rows, B, K), dtype),
                weight,
                TensorSpec((rows, B, N), dtype),
                soc=soc,
                cann=cann,
            )
            return True
        perm = _PERMS[strategy]
        x = (
            TensorSpec((rows, B, K), dtype, stride=(B * wide, wide, 1))
            if perm == (1, 0, 2)
            else TensorSpec((B, rows, K), dtype)
        )
        validators.npu_transpose_batchmatmul(
            x, weight, perm_x1=perm, perm_x2=(0, 1, 2), perm_y=(1, 0, 2), soc=soc, cann=cann
        )
    except OpRejectedError:
        return False
    return True


def _judge_peers(
    peers: Sequence[Peer], case: Case, spec: BmmSpec, found: Counter[tuple[PeerKey, str]]
) -> None:
    strided = (spec.input_layout == "strided", spec.weight_layout == "strided")
    for peer in peers:
        # Only SGLang leaves w_vc of some models strided; the others' loaders make it contiguous.
        layouts = strided if peer.name == "sglang" else (strided[0], False)
        for phase in (Phase.EXTEND, Phase.DECODE):
            for rows in ROWS:
                chosen = peer.choice(
                    attention=case.attention,
                    site=spec.site,
                    B=spec.B,
                    K=spec.K,
                    N=spec.N,
                    tokens=rows,
                    soc=case.soc,
                    phase=phase.value,
                )
                if chosen is not None:
                    key = (peer.title, case.attention, spec.site, case.soc)
                    found[key, "inputs"] += 1
                    found[key, "rejected"] += not _accepted(
                        chosen, spec.shape, rows, spec.dtype, layouts, case.soc, case.cann
                    )


def sweep(chosen: Iterable[Case], backend: Backend | None = None) -> Sweep:
    """Plan every case, call every dispatch, judge every engine's choice.

    Raises:
        OpRejectedError: An op would refuse a call of a table.
        NpuBackendError: A row count is served by nobody.
    """
    asked = backend or load(third_party=False)
    # Whatever is installed here, lines follow the case's CANN.
    plain = Backend(asked.registry, asked.catalog, torch_npu=None)
    peers, counts, found, number = load_peers(), Counter[str](), Counter[tuple[PeerKey, str]](), 0
    for case in chosen:
        number += 1
        deployment = Deployment(
            catalog=asked.catalog,
            soc=case.soc,
            cann=case.cann,
            attn_tp_size=case.attn_tp_size,
            requests="path=absorb@nextn" if case.layer.is_nextn else "path=absorb",
        )
        plan = plain.plan([case.layer], deployment).layers[0]
        ops = _JudgingOps(case.soc, case.cann)
        for site in SITES:
            reach = deployment.reach(is_nextn=case.layer.is_nextn)
            cells = {p: ((1, bound),) for p, bound in reach.items()}
            spec = bmm_spec(case.layer.kind, deployment, site, cells)
            _dispatch(plan, spec, ops, counts)
            _judge_peers(peers, case, spec, found)
    return Sweep(
        number,
        dict(sorted(counts.items())),
        {key: (found[key, "inputs"], found[key, "rejected"]) for key, _ in found},
    )


def peer_table(result: Sweep) -> str:
    """Return the engines' choices side by side with this project's, as text."""
    engines = list(dict.fromkeys(key[0] for key in result.peers))
    places = list(dict.fromkeys(key[1:] for key in result.peers))
    head = ("attention", "site", "chip", *engines, "npu-backend")
    lines = [head]
    for place in sorted(places):
        told = []
        for engine in engines:
            inputs, rejected = result.peers.get((engine, *place), (0, 0))
            told.append(f"{rejected} of {inputs}" if inputs else "not recorded")
        lines.append((*place, *told, "0"))
    for title, chips in (("A2, A3, A5", ("A2", "A3", "A5")), ("all", None)):
        total = []
        for engine in engines:
            rows = [
                figures
                for key, figures in result.peers.items()
                if key[0] == engine and (chips is None or key[3] in chips)
            ]
            total.append(f"{sum(r for _, r in rows)} of {sum(i for i, _ in rows)}")
        lines.append(("total", "", title, *total, "0"))
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def report(result: Sweep) -> str:
    """Return a sweep as text."""
    by_strategy = ", ".join(f"{name} {count}" for name, count in result.dispatches.items())
    return (
        f"swept {result.cases} layers, {result.total} dispatches, all accepted ({by_strategy})\n"
        "choices that the op would reject, of the same inputs (extend and decode):\n"
        + peer_table(result)
    )


if __name__ == "__main__":
    print(report(sweep(cases(load(third_party=False).catalog))))
