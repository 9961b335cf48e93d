"""The one decision: over which ranks an MLP is split, and what they say to each other. Pure."""

from __future__ import annotations

from enum import Enum
from typing import Any

from attrs import field, frozen

from npu_backend.mlp.options import DENSE_FLAG, SHARED_FLAG, SHARED_SIZE, AttnTpOptions
from npu_backend.mlp.parallel import MlpParallel
from npu_backend.mlp.rules import broken
from npu_backend.model.mlp import MlpLayer

__all__ = ["GROUPS", "MlpCommunication", "MlpShardLayout", "mlp_shard_layout"]

GROUPS = ("tp", "attn_tp", "shared_experts_tp", "replicated")
"""Who shares one MLP: the whole TP group, an attention-TP group, a group of
``shared_experts_tp_size`` ranks, or nobody: each rank holds it whole."""


class MlpCommunication(str, Enum):
    """What the ranks of a group exchange in one forward pass."""

    ALL_REDUCE = "all-reduce"
    ALL_GATHER_REDUCE_SCATTER = "all-gather + reduce-scatter"
    NONE = "none"

    def __str__(self) -> str:
        return self.value


_ROWS = {
    MlpCommunication.ALL_REDUCE: "same",
    MlpCommunication.ALL_GATHER_REDUCE_SCATTER: "own, equal number",
    MlpCommunication.NONE: "own",
}


@frozen(kw_only=True)
class MlpShardLayout:
    """How one rank holds and runs one MLP.

    Args:
        layer: The MLP.
        group: One of :data:`GROUPS`.
        ranks: TP ranks of this rank's group, contiguous.
        rank: This rank inside the group.
        communication: What the group exchanges; a group of one exchanges nothing.
        warnings: Options that were set and do nothing here, each with the reason.
    """

    layer: MlpLayer
    group: str
    ranks: range
    rank: int
    communication: MlpCommunication
    warnings: tuple[str, ...] = field(default=(), repr=False)

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return len(self.ranks)

    @property
    def rows(self) -> str:
        """Which rows a rank brings: ``same`` on every rank of the group (what a host with DP
        attention has to gather first where the group is larger than a replica), ``own, equal
        number``, or ``own``."""
        return _ROWS[self.communication]

    @property
    def local_intermediate_size(self) -> int:
        """Intermediate size of one rank."""
        return self.layer.intermediate_size // self.size

    @property
    def columns(self) -> range:
        """The part of the intermediate size that this rank holds: rows of gate and up, columns of
        down."""
        local = self.local_intermediate_size
        return range(self.rank * local, (self.rank + 1) * local)

    @property
    def bytes_per_rank(self) -> int:
        """Bytes of this rank's part of the gate, up and down weights; no scales, no biases."""
        return self.layer.bytes // self.size

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without what differs by rank."""
        return {
            "kind": self.layer.kind,
            "hidden_size": self.layer.hidden_size,
            "intermediate_size": self.layer.intermediate_size,
            "dtype": self.layer.dtype,
            "group": self.group,
            "size": self.size,
            "communication": self.communication.value,
            "rows": self.rows,
            "local_intermediate_size": self.local_intermediate_size,
            "bytes_per_rank": self.bytes_per_rank,
        }


def _check_size(options: AttnTpOptions, parallel: MlpParallel) -> None:
    size = options.shared_experts_tp_size
    if size is None:
        return
    if parallel.ep_backend is None:
        raise broken(
            "size.needs_ep",
            f"{SHARED_SIZE} is {size} and there is no EP all-to-all",
            whom=str(parallel),
            why="without one the shared experts run over full TP",
            remedy=f"name the EP backend, or leave {SHARED_SIZE} out",
        )
    if parallel.attn_tp_size % size:
        raise broken(
            "size.divides_attn_tp",
            f"{SHARED_SIZE} {size} does not divide attention TP {parallel.attn_tp_size}",
            whom=str(parallel),
            remedy=f"give a divisor of {parallel.attn_tp_size}",
        )


def _check_divides(layer: MlpLayer, size: int, group: str, rule: str) -> None:
    if layer.intermediate_size % size:
        raise broken(
            rule,
            f"the intermediate size {layer.intermediate_size} does not divide over {size} ranks",
            whom=f"{layer}, group {group}",
            remedy="choose sizes that divide it, or leave the option out",
        )


def _dense(options: AttnTpOptions, parallel: MlpParallel) -> tuple[str, int, tuple[str, ...]]:
    if not options.enable_dense_mlp_attn_tp:
        return "tp", parallel.tp_size, ()
    if parallel.dp_attention:
        return "attn_tp", parallel.attn_tp_size, ()
    text = f"{DENSE_FLAG} does nothing: DP attention is off, dense MLPs run over full TP"
    return "tp", parallel.tp_size, (text,)


def _shared(
    layer: MlpLayer, options: AttnTpOptions, parallel: MlpParallel
) -> tuple[str, int, tuple[str, ...]]:
    flag, size = options.enable_shared_experts_attn_tp, options.shared_experts_tp_size
    attn_tp = parallel.attn_tp_size
    warnings: tuple[str, ...] = ()
    if parallel.ep_backend is None:
        if flag:
            _check_divides(layer, attn_tp, "attn_tp", "intermediate.divides_attn_tp")
            why = "there is no EP all-to-all, shared experts run over full TP"
            warnings = (f"{SHARED_FLAG} does nothing: {why}",)
        return "tp", parallel.tp_size, warnings
    if size is not None:
        if flag and size != attn_tp:
            warnings = (f"{SHARED_FLAG} does nothing: {SHARED_SIZE} {size} overrides it",)
        return ("replicated", 1, warnings) if size == 1 else ("shared_experts_tp", size, warnings)
    if not flag:
        return "replicated", 1, ()
    if attn_tp == 1:
        return "replicated", 1, (f"{SHARED_FLAG} does nothing: attention TP is 1",)
    return "attn_tp", attn_tp, ()


def mlp_shard_layout(
    layer: MlpLayer, options: AttnTpOptions, parallel: MlpParallel
) -> MlpShardLayout:
    """Return how one rank holds and runs an MLP. Pure: reads no environment, imports no torch.

    Dense MLPs run over full TP, with ``enable_dense_mlp_attn_tp`` and DP attention inside the
    attention-TP replica. Shared experts run over full TP where there is no EP all-to-all; with one,
    each rank holds them whole, unless ``shared_experts_tp_size``, else
    ``enable_shared_experts_attn_tp``, splits them. Source of both tables: SGLang 0.5.23,
    ``models/kimi_k3.py``.

    Args:
        layer: The MLP.
        options: What the user chose.
        parallel: How the model is served, and which rank asks.

    Returns:
        The layout; options that do nothing here stand in its ``warnings``.

    Raises:
        DeploymentError: The combination is impossible; the first reason names the rule.
    """
    _check_size(options, parallel)
    if layer.kind == "dense":
        group, size, warnings = _dense(options, parallel)
        shared = MlpCommunication.ALL_REDUCE
    else:
        group, size, warnings = _shared(layer, options, parallel)
        shared = (
            MlpCommunication.ALL_REDUCE
            if group == "tp"
            else MlpCommunication.ALL_GATHER_REDUCE_SCATTER
        )
    _check_divides(layer, size, group, "intermediate.divides")
    first = parallel.rank // size * size
    return MlpShardLayout(
        layer=layer,
        group=group,
        ranks=range(first, first + size),
        rank=parallel.rank - first,
        communication=shared if size > 1 else MlpCommunication.NONE,
        warnings=warnings,
    )
