"""A gated MLP split over ranks as its layout says: shards, process groups, and the module.

Runs wherever ``torch.distributed`` does; the layout itself is decided without torch, by
:func:`npu_backend.mlp_shard_layout`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from npu_backend.errors import PlanMismatchError
from npu_backend.mlp.layout import MlpCommunication, MlpShardLayout
from npu_backend.mlp.parallel import MlpParallel
from npu_backend.model.mlp import MLP_PROJECTIONS

__all__ = ["MlpGroups", "ShardedMlp", "assemble_mlp", "shard_mlp"]

Weights = Mapping[str, torch.Tensor]
_FUSED = "gate_up_proj"
_BROKEN = -1

# torch 2.13 renamed both and warns of the old names; older lines have only those, and a torch built
# without distributed has neither.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(
    dist, "all_gather_into_tensor", None
)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(
    dist, "reduce_scatter_tensor", None
)


def _mismatch(what: str, layout: MlpShardLayout, why: str | list[str], remedy: str) -> Exception:
    return PlanMismatchError(what, whom=str(layout.layer), why=why, remedy=remedy)


def _split_fused(weights: Weights, rows: int) -> dict[str, torch.Tensor]:
    """Return gate, up and down, also of weights that a host has fused: gate rows, then up rows."""
    found = dict(weights)
    if _FUSED in found and not {"gate_proj", "up_proj"} & found.keys():
        fused = found.pop(_FUSED)
        if fused.dim() == 2 and fused.shape[0] == 2 * rows:
            found["gate_proj"], found["up_proj"] = fused[:rows], fused[rows:]
        else:
            found[_FUSED] = fused
    return found


def _checked(weights: Weights, layout: MlpShardLayout, rows: int) -> dict[str, torch.Tensor]:
    """Return gate, up and down once their names and shapes are seen to be right."""
    hidden = layout.layer.hidden_size
    found = _split_fused(weights, rows)
    shapes = dict.fromkeys(MLP_PROJECTIONS, (rows, hidden)) | {"down_proj": (hidden, rows)}
    wrong = [f"{n} is missing" for n in shapes if n not in found]
    wrong += [f"{n} is not a weight of a gated MLP" for n in found if n not in shapes]
    wrong += [
        f"{name} is {list(found[name].shape)}, expected is {list(shape)}"
        for name, shape in shapes.items()
        if name in found and tuple(found[name].shape) != shape
    ]
    if wrong:
        raise _mismatch(
            "the weights are not those of the MLP",
            layout,
            wrong,
            "give gate_proj and up_proj (intermediate, hidden), or gate_up_proj, and down_proj "
            "(hidden, intermediate)",
        )
    return {name: found[name] for name in MLP_PROJECTIONS}


def shard_mlp(full: Weights, layout: MlpShardLayout) -> dict[str, torch.Tensor]:
    """Return this rank's part of the full weights.

    Args:
        full: ``gate_proj`` and ``up_proj`` ``(intermediate, hidden)`` (or ``gate_up_proj``, gate
            rows first) and ``down_proj`` ``(hidden, intermediate)``, of any dtype.
        layout: This rank's layout.

    Returns:
        ``gate_proj`` and ``up_proj`` ``(local, hidden)``, ``down_proj`` ``(hidden, local)``:
        contiguous, with storage of their own, so that the full weights can go. In a group of one
        they are the given tensors.

    Raises:
        PlanMismatchError: Names or shapes are not the layout's.
    """
    weights = _checked(full, layout, layout.layer.intermediate_size)
    if layout.size == 1:
        return weights
    start, local = layout.columns.start, layout.local_intermediate_size
    return {
        name: weight.narrow(1 if name == "down_proj" else 0, start, local).clone(
            memory_format=torch.contiguous_format
        )
        for name, weight in weights.items()
    }


def assemble_mlp(shards: Sequence[Weights]) -> dict[str, torch.Tensor]:
    """Return the full weights of a group's shards, given in the order of the group's ranks."""
    return {
        name: torch.cat([shard[name] for shard in shards], dim=1 if name == "down_proj" else 0)
        for name in MLP_PROJECTIONS
    }


class MlpGroups:
    """The process groups that the MLPs of one rank use; each is built once, over contiguous ranks.

    Args:
        parallel: How the model is served, seen from this rank.
        tp_ranks: Global ranks of this rank's TP group, ascending, as ``torch.distributed`` orders
            the ranks of a group; default: ranks 0 to ``tp_size``.

    Raises:
        PlanMismatchError: The ranks are not those of the parallel layout.
    """

    def __init__(self, parallel: MlpParallel, tp_ranks: Sequence[int] | None = None) -> None:
        self.parallel = parallel
        self._ranks = tuple(range(parallel.tp_size) if tp_ranks is None else tp_ranks)
        self._groups: dict[range, dist.ProcessGroup] = {}
        mine = self._ranks[parallel.rank] if len(self._ranks) == parallel.tp_size else None
        here = dist.get_rank()
        if mine != here or sorted(set(self._ranks)) != list(self._ranks):
            raise PlanMismatchError(
                "the TP group is not the parallel layout's",
                whom=f"process {here} of {dist.get_world_size()}",
                why=(
                    f"the parallel layout: {parallel}, rank {parallel.rank}",
                    f"global ranks of the TP group: {', '.join(map(str, self._ranks))}",
                ),
                remedy="give the global ranks of this process's TP group in ascending order, and "
                "this process's place among them as the rank",
            )

    def of(self, layout: MlpShardLayout) -> dist.ProcessGroup | None:
        """Return the group of a layout, None for a group of one.

        All ranks of the group must ask, for the layouts of their layers in the same order; ranks
        of other groups need not.
        """
        if layout.size == 1:
            return None
        if layout.ranks not in self._groups:
            ranks = [self._ranks[rank] for rank in layout.ranks]
            group = dist.new_group(ranks, use_local_synchronization=True)
            self._groups[layout.ranks] = group
        return self._groups[layout.ranks]


class ShardedMlp(torch.nn.Module):
    """One rank's part of a gated MLP, ``down(act(gate(x)) * up(x))``; for inference only.

    Args:
        layout: This rank's layout.
        shards: What :func:`shard_mlp` returned, or tensors of those shapes that a host loaded.
        group: The process group of the layout's ranks (:class:`MlpGroups`, or the host's own);
            None for a group of one.
        activation: The function between, elementwise.
        check_rows: Compare the numbers of rows over the group before each forward pass that
            communicates. Costs a small all-gather and a wait for it; False where the host pads its
            batches to one number, or captures graphs.

    Raises:
        PlanMismatchError: Shards or group are not the layout's.
    """

    gate_up_proj: torch.Tensor
    down_proj: torch.Tensor

    def __init__(
        self,
        layout: MlpShardLayout,
        shards: Weights,
        *,
        group: dist.ProcessGroup | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        check_rows: bool = True,
    ) -> None:
        super().__init__()
        weights = _checked(shards, layout, layout.local_intermediate_size)
        kinds = {(w.dtype, w.device) for w in weights.values()}
        if len(kinds) > 1 or not weights["down_proj"].is_floating_point():
            raise _mismatch(
                "the module multiplies float weights of one dtype on one device",
                layout,
                [f"{name} is {w.dtype} on {w.device}" for name, w in weights.items()],
                "dequantise the weights, or shard them with shard_mlp for a kernel of your own",
            )
        self.layout = layout
        self.group = _check_group(layout, group)
        self.activation = activation
        self.check_rows = check_rows
        gate_up = torch.cat([weights["gate_proj"], weights["up_proj"]])
        self.register_parameter("gate_up_proj", _parameter(gate_up))
        self.register_parameter("down_proj", _parameter(weights["down_proj"]))

    @classmethod
    def from_full(
        cls,
        layout: MlpShardLayout,
        full: Weights,
        *,
        group: dist.ProcessGroup | None = None,
        activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
        check_rows: bool = True,
    ) -> ShardedMlp:
        """Return the module of this rank's part of the full weights."""
        shards = shard_mlp(full, layout)
        return cls(layout, shards, group=group, activation=activation, check_rows=check_rows)

    def extra_repr(self) -> str:
        """Return the layout in words, for ``print(module)``."""
        layout = self.layout
        return (
            f"{layout.group}, rank {layout.rank} of {layout.size}, {layout.communication}, "
            f"{layout.local_intermediate_size} of {layout.layer.intermediate_size}"
        )

    @torch.no_grad()
    def partial(self, rows: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of the sum, without communication.

        For hosts whose own communicator reduces.

        Args:
            rows: ``(rows, hidden)``.

        Returns:
            ``(rows, hidden)``; the output is the sum over the group.
        """
        gate, up = F.linear(rows, self.gate_up_proj).chunk(2, dim=-1)
        return F.linear(self.activation(gate) * up, self.down_proj)

    @torch.no_grad()
    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the whole MLP's output for this rank's rows; every rank of the group must call.

        Args:
            rows: ``(rows, hidden)``, of the weights' dtype and device. With all-reduce the same
                rows on every rank of the group; with all-gather + reduce-scatter each rank's own
                rows, of equal number; without communication each rank's own.

        Returns:
            ``(rows, hidden)``: the output of the rows that were given.

        Raises:
            PlanMismatchError: The rows are not of that form, or their numbers differ over the
                group; with ``check_rows`` on every rank of the group.
        """
        problem = self._problem(rows)
        if self.group is not None and self.check_rows:
            self._compare_rows(_BROKEN if problem else rows.shape[0])
        if problem:
            raise self._refused(problem)
        if self.group is None:
            return self.partial(rows)
        if rows.shape[0] == 0:
            return rows.new_empty(rows.shape)
        if self.layout.communication is MlpCommunication.ALL_REDUCE:
            out = self.partial(rows)
            dist.all_reduce(out, group=self.group)
            return out
        gathered = rows.new_empty((self.layout.size * rows.shape[0], rows.shape[1]))
        _all_gather(gathered, rows.contiguous(), group=self.group)
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        _reduce_scatter(out, self.partial(gathered), group=self.group)
        return out

    def _problem(self, rows: torch.Tensor) -> str | None:
        weight, hidden = self.down_proj, self.layout.layer.hidden_size
        if rows.dim() != 2 or rows.shape[1] != hidden:
            return f"the rows are {list(rows.shape)}, expected is [rows, {hidden}]"
        if rows.dtype != weight.dtype or rows.device != weight.device:
            return (
                f"the rows are {rows.dtype} on {rows.device}, the weights {weight.dtype} on "
                f"{weight.device}"
            )
        return None

    def _refused(self, why: str) -> Exception:
        remedy = "give rows of the shape, dtype and device of the weights"
        return _mismatch("the rows do not fit the MLP", self.layout, why, remedy)

    def _compare_rows(self, count: int) -> None:
        """Raise an error on every rank where the numbers of rows over the group differ."""
        device = self.down_proj.device
        mine = torch.tensor([count], dtype=torch.int64, device=device)
        every = torch.empty(self.layout.size, dtype=torch.int64, device=device)
        _all_gather(every, mine, group=self.group)
        counts = every.tolist()
        if count == _BROKEN or (counts[0] != _BROKEN and len(set(counts)) == 1):
            return
        ranks = zip(self.layout.ranks, counts, strict=True)
        told = [f"TP rank {r}: {'unusable' if c == _BROKEN else c} rows" for r, c in ranks]
        same = self.layout.communication is MlpCommunication.ALL_REDUCE
        raise _mismatch(
            "the ranks of the group bring different numbers of rows",
            self.layout,
            [f"{self.layout.communication} needs equal numbers of rows on every rank", *told],
            "give every rank of the group the same rows"
            if same
            else "pad each rank's rows to the largest number, and drop the padding afterwards",
        )


def _parameter(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach(), requires_grad=False)


def _check_group(
    layout: MlpShardLayout, group: dist.ProcessGroup | None
) -> dist.ProcessGroup | None:
    if layout.size == 1:
        return None
    size = 0 if group is None else dist.get_world_size(group)
    rank = -1 if group is None else dist.get_rank(group)
    if (size, rank) != (layout.size, layout.rank):
        found = "none is given" if group is None else f"it has {size} ranks, this one is {rank}"
        raise _mismatch(
            "the process group is not the layout's",
            layout,
            f"the layout is rank {layout.rank} of {layout.size} ({layout.group}); {found}",
            "give MlpGroups(parallel).of(layout), or the host's group of those ranks",
        )
    return group
