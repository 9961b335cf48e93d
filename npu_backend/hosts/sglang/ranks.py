"""What the ranks of a TP group agree on: to go on, to stand aside, or to stop."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from attrs import frozen

from npu_backend.errors import PlanMismatchError
from npu_backend.hosts.sglang.guard import reason_of
from npu_backend.plan import LayerPlan
from npu_backend.runtime import FAILED, compare_fingerprints

PATIENCE = timedelta(minutes=5)
"""How long ranks wait for each other; SGLang has them all wait for the slowest load just before."""

__all__ = ["PATIENCE", "Verdict", "agree", "same_plans", "tp_group"]


@frozen
class Verdict:
    """What every rank of a group knows after it agreed.

    Args:
        reasons: Why a rank cannot go on, by rank; empty where all can.
        rank: This one.
    """

    reasons: tuple[tuple[int, str], ...] = ()
    rank: int = 0

    @property
    def go_on(self) -> bool:
        """Whether no rank failed."""
        return not self.reasons

    @property
    def words(self) -> tuple[str, ...]:
        """The reasons; those that ranks share are told once, with the ranks."""
        by_text: dict[str, list[int]] = {}
        for rank, text in self.reasons:
            by_text.setdefault(text, []).append(rank)
        return tuple(
            f"rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()
        )


def tp_group(context: Any) -> dist.ProcessGroup | None:
    """Return the CPU group of this rank's TP group, or None where there is one rank."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    group = context.get_parallel().tp_group
    return group.cpu_group if group.world_size > 1 else None


def _met(group: dist.ProcessGroup) -> None:
    """Wait for all ranks, so that one without npu-backend is named, not waited for.

    Raises:
        PlanMismatchError: A rank did not come.
    """
    if dist.get_backend(group) != "gloo":
        return
    try:
        dist.monitored_barrier(group, timeout=PATIENCE, wait_all_ranks=True)
    except RuntimeError as err:
        raise PlanMismatchError(
            "not all ranks came to compare their plans",
            whom=f"process group of {dist.get_world_size(group)} ranks",
            why=f"{err}",
            remedy="install npu-backend on every node, and give every rank the same environment "
            "(SGLANG_PLUGINS, NPU_BACKEND_SGLANG)",
        ) from err


def agree(failure: BaseException | None, group: dist.ProcessGroup | None) -> Verdict:
    """Tell all ranks whether this one can go on; every rank must call it.

    Args:
        failure: Why it cannot, or None.
        group: The TP group; None for one rank.

    Raises:
        PlanMismatchError: A rank did not come.
    """
    text = None if failure is None else reason_of(failure)
    if group is None:
        return Verdict(() if text is None else ((0, text),))
    _met(group)
    told: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, text, group=group)
    reasons = tuple((rank, why) for rank, why in enumerate(told) if why is not None)
    return Verdict(reasons, dist.get_rank(group))


def same_plans(
    plans: Iterable[LayerPlan],
    group: dist.ProcessGroup | None,
    failure: BaseException | None = None,
) -> None:
    """Compare the ranks' plans; a rank that failed joins with ``FAILED``.

    Raises:
        PlanMismatchError: On every rank, where one differs or has failed, with the differences.
    """
    if group is not None:
        compare_fingerprints(FAILED if failure is not None else tuple(plans), group, error=failure)
