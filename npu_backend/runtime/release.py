"""Release a layer's dead weights, and bring back those that went restorably."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from typing import Any

import torch
from attrs import frozen

from npu_backend.deployment import Phase
from npu_backend.errors import PrepareError
from npu_backend.plan import LayerPlan, WeightPlan
from npu_backend.runtime.amend import keep_aliased, living_holders
from npu_backend.runtime.culprits import culprits
from npu_backend.runtime.ledger import AllocatorReading, Ledger, LedgerRow, read_allocator
from npu_backend.runtime.storages import StorageWatch
from npu_backend.runtime.tombstone import Tombstone, bury, is_tombstone, raise_up

__all__ = [
    "Back",
    "HostCopy",
    "Reload",
    "release_layer",
    "restorable_readings",
    "restore_weights",
]


@frozen(eq=False)
class HostCopy:
    """A weight's bytes in host memory, with what is needed to bring it back.

    Args:
        values: On the host, pinned where the weight was on a device.
        stride: Strides of the weight.
        kind: Its class, a host's own subclass of Parameter say.
        requires_grad: As it was.
    """

    values: torch.Tensor
    stride: tuple[int, ...]
    kind: type[torch.Tensor]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> HostCopy:
        """Copy a weight to the host."""
        on_device = tensor.device.type != "cpu"
        values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_device)
        with torch.no_grad():
            values.copy_(tensor)
        return cls(values, tensor.stride(), type(tensor), tensor.requires_grad)

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the weight on a device again, in its former strides."""
        back = torch.empty_strided(
            self.values.shape, self.stride, dtype=self.values.dtype, device=device
        )
        with torch.no_grad():
            back.copy_(self.values)
        return back.requires_grad_(self.requires_grad)


@frozen(eq=False)
class Reload:
    """A weight that the host's own callback brings back, instead of a copy in host memory.

    Args:
        name: The weight.
        whom: For whom, in messages.
        callback: Returns the weight by its name, on any device.
        shape: As it must come back.
        dtype: Likewise.
        stride: Strides to put it in.
        kind: Its class, a host's own subclass of Parameter say.
        requires_grad: As it was.
    """

    name: str
    whom: str
    callback: Callable[[str], torch.Tensor]
    shape: torch.Size
    dtype: torch.dtype
    stride: tuple[int, ...]
    kind: type[torch.Tensor]
    requires_grad: bool

    @classmethod
    def of(
        cls,
        plan: LayerPlan,
        row: WeightPlan,
        tensor: torch.Tensor,
        callback: Callable[[str], torch.Tensor],
    ) -> Reload:
        """Note what is to come back."""
        return cls(
            row.name,
            str(plan.layer),
            callback,
            tensor.shape,
            tensor.dtype,
            tensor.stride(),
            type(tensor),
            tensor.requires_grad,
        )

    def on(self, device: torch.device) -> torch.Tensor:
        """Return the weight on a device again, in its former strides.

        Raises:
            PrepareError: The callback returned something else.
        """
        found = self.callback(self.name)
        if found.shape != self.shape or found.dtype != self.dtype:
            raise PrepareError(
                f"the reload callback returned another {self.name}",
                whom=self.whom,
                why=f"{tuple(found.shape)} {found.dtype}, not {tuple(self.shape)} {self.dtype}",
                remedy="return the weight as it was after load; the layer is as it was",
            )
        back = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)
        with torch.no_grad():
            back.copy_(found)
        return back.requires_grad_(self.requires_grad)


Back = HostCopy | Reload
"""How a weight comes back."""


def _refuse(plan: LayerPlan, prepared: bool, captured: bool) -> None:
    if not prepared:
        raise PrepareError(
            "release() came before prepare()",
            whom=str(plan.layer),
            why="strategies still read the originals to make their copies",
            remedy="call layer.prepare() first; nothing was freed",
        )
    if captured:
        raise PrepareError(
            "nothing is released after a graph capture",
            whom=str(plan.layer),
            why="a captured graph holds addresses, and a freed one may be given to another tensor",
            remedy="release at load, before graphs are captured; nothing was freed",
        )


def _synchronize(device: torch.device) -> None:
    """Wait for streams that may still read what is about to go."""
    if device.type == "npu":
        npu: Any = torch.npu  # type: ignore[attr-defined]
        npu.synchronize(device)


def _is_capturing(device: torch.device) -> bool:
    if device.type != "npu":
        return False
    npu: Any = torch.npu  # type: ignore[attr-defined]
    # Older lines have graphs under another name, or none.
    asks = getattr(npu, "is_current_stream_capturing", None)
    return bool(asks()) if asks is not None else False


def _stone(plan: LayerPlan, row: WeightPlan, tensor: torch.Tensor) -> Tombstone:
    remedy = (
        "call layer.restore() first"
        if row.action == "restore"
        else "plan with what reads it (phases, promises such as --export or --weight-update), "
        "or request another path"
    )
    return Tombstone.like(
        tensor, layer=plan.layer_id, weight=row.name, why=row.reasons, remedy=remedy
    )


def _held(tensor: torch.Tensor, watch: StorageWatch) -> str | None:
    if not watch.dead:
        # Frames of a failed attempt, and cycles, may hold what nobody uses.
        gc.collect()
    if watch.dead:
        return None
    who = ", ".join(culprits(watch.start, watch.nbytes, watch.device))
    return "a tensor that came to share the storage while releasing" + (f": {who}" if who else "")


def _rows(
    buried: list[tuple[WeightPlan, torch.Tensor, StorageWatch, str]],
) -> tuple[LedgerRow, ...]:
    rows = []
    for row, tensor, watch, how in buried:
        held = _held(tensor, watch)
        freed = 0 if held else watch.nbytes
        rows.append(LedgerRow(row.name, row.action, row.bytes, freed, how, held))
    return tuple(rows)


def release_layer(
    plan: LayerPlan,
    weights: Mapping[str, torch.Tensor],
    others: Mapping[str, torch.Tensor],
    *,
    prepared: bool,
    captured: bool,
    host_keeps_storage: bool,
    device: torch.device,
    reload: Callable[[str], torch.Tensor] | None = None,
    elsewhere: Mapping[str, str] | None = None,
) -> tuple[LayerPlan, Ledger, dict[str, Back]]:
    """Free what the plan releases and is still there.

    Everything that can fail comes before the first byte goes.

    Args:
        plan: The layer's plan.
        weights: The loaded weights by name.
        others: Tensors that live on.
        prepared: Whether the layer is prepared.
        captured: Whether graphs were captured over it.
        host_keeps_storage: As for :func:`npu_backend.runtime.bind`.
        device: The layer's device.
        reload: As for :func:`npu_backend.runtime.bind`.
        elsewhere: Weights that another bound layer still reads, and which layer.

    Returns:
        The plan, amended where something came to share a storage since; the ledger of what went
        now; and the host copies of what of it can be brought back.

    Raises:
        PrepareError: The layer is not prepared, or graphs were captured.
    """
    _refuse(plan, prepared, captured)
    held = living_holders(
        plan, weights, others, host_keeps_storage=host_keeps_storage, elsewhere=elsewhere
    )
    plan = keep_aliased(plan, held)
    going = [r for r in plan.released() if not is_tombstone(weights[r.name])]
    copies: dict[str, Back] = {
        r.name: HostCopy.of(weights[r.name])
        if reload is None
        else Reload.of(plan, r, weights[r.name], reload)
        for r in going
        if r.action == "restore"
    }
    stones = {r.name: _stone(plan, r, weights[r.name]) for r in going}
    watches = {r.name: StorageWatch(weights[r.name]) for r in going}
    _synchronize(device)
    before = read_allocator(device)

    buried = []
    for row in going:
        tensor, watch = weights[row.name], watches[row.name]
        how = bury(tensor, stones.pop(row.name), keep_storage=host_keeps_storage)
        if how == "resized":
            watch.resized()
        buried.append((row, tensor, watch, how))
    rows = _rows(buried)
    return plan, _ledger(plan, rows, before, read_allocator(device)), copies


def _ledger(
    plan: LayerPlan,
    rows: tuple[LedgerRow, ...],
    before: AllocatorReading | None,
    after: AllocatorReading | None,
) -> Ledger:
    if before is None or after is None:
        return Ledger(plan.layer_id, rows)
    return Ledger(plan.layer_id, rows, before.statistic, before.bytes - after.bytes)


def restorable_readings(plan: LayerPlan, phase: Phase, by: str | None = None) -> frozenset[str]:
    """Return the weights released restorably that this library's own readers read.

    Args:
        plan: The layer's plan.
        phase: The readings in this phase.
        by: Only readings by this reader, ``v_up`` say. A host's own code restores for itself.
    """

    def counts(reader: str) -> bool:
        who, _, when = reader.partition("@")
        mine = who == by if by is not None else not who.startswith("host:")
        return mine and when == str(phase)

    rows = [row for row in plan.weights if row.action == "restore"]
    return frozenset(row.name for row in rows if any(map(counts, row.readers)))


def restore_weights(
    plan: LayerPlan,
    weights: Mapping[str, torch.Tensor],
    copies: Mapping[str, Back],
    device: torch.device,
) -> tuple[str, ...]:
    """Bring back released weights from their host copies, into the same objects.

    Raises:
        PrepareError: There is no memory for them, or a graph is being captured; the layer is as it
            was.
    """
    if _is_capturing(device):
        raise PrepareError(
            "nothing is brought back while a graph is being captured",
            whom=f"{plan.layer}, {', '.join(copies)}",
            why="the graph would copy from the host, to that address, at every replay",
            remedy="call layer.restore() before the capture; the layer is as it was",
        )
    try:
        back = {name: copy.on(device) for name, copy in copies.items()}
    except RuntimeError as err:
        raise PrepareError(
            "the released weights cannot be brought back",
            whom=f"{plan.layer}, {', '.join(copies)}",
            why=f"{type(err).__name__}: {err}",
            remedy="free memory and call layer.restore() again; the layer is as it was",
        ) from err
    for name in list(back):
        raise_up(weights[name], back.pop(name), copies[name].kind)
    return tuple(copies)
