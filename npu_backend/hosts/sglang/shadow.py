"""Shadow mode: SGLang serves alone; what it does is held against the plan, and told.

Nothing is bound, prepared, freed or routed. Each routed function is watched: which path SGLang ran
in which phase, and which weights lost their bytes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

from attrs import define, field, frozen

from npu_backend.baseline import baseline_of
from npu_backend.deployment import Phase
from npu_backend.hosts.sglang.route import MODES
from npu_backend.hosts.sglang.translate import MODULES
from npu_backend.model.records import MlaLayer
from npu_backend.plan import LayerPlan, ModelPlan
from npu_backend.planner.readers import HOST_MHA

__all__ = ["PATHS", "Difference", "Shadow", "hooks"]

logger = logging.getLogger(__name__)

_BASELINE = "sglang-0.5.23"
PATHS = {
    "forward_mlapo": "mlapo",
    "forward_mlaprolog": "mlaprolog",
    "forward_absorb_prepare_npu_rms_norm_cache": "absorb",
}
"""Path by the method of SGLang's preprocess object that runs it."""


@frozen
class Difference:
    """Something that SGLang did otherwise than the plan.

    Args:
        layer_id: The layer.
        what: What differs, in one sentence.
        unsafe: A reachable step reads what SGLang freed.
    """

    layer_id: int
    what: str
    unsafe: bool = False

    def __str__(self) -> str:
        mark = "UNSAFE: " if self.unsafe else ""
        return f"layer {self.layer_id}: {mark}{self.what}"


@define(eq=False)
class _Watched:
    attention: Any
    plan: LayerPlan
    readers: dict[str, tuple[str, ...]] = field(factory=dict)


def _bytes(tensor: Any) -> int:
    return 0 if tensor is None else int(tensor.untyped_storage().nbytes())


def _is_read_by_sglang(reader: str) -> bool:
    """Whether a reader of the plan is one of SGLang's as well.

    Its preprocess object absorbs by copies of its own in every phase but extend.
    """
    who, _, phase = reader.partition("@")
    return who not in ("absorb", "q_absorb") or phase == Phase.EXTEND.value


def _serves(plan: LayerPlan, phase: Phase, rows: int) -> str | None:
    for entry in plan.path:
        low, high = entry.tokens
        if phase in entry.phases and low <= rows <= (high or rows):
            return entry.strategy
    return None


class Shadow:
    """Watches one model.

    Args:
        plan: The plan that is not applied.
        modules: Attention modules with their records, in the plan's order.

    Attributes:
        differences: What SGLang did otherwise, each told once.
    """

    def __init__(self, plan: ModelPlan, modules: Iterable[tuple[Any, MlaLayer]]) -> None:
        self.plan = plan
        unsafe = {layer.layer_id: layer.unsafe for layer in baseline_of(plan, _BASELINE).layers}
        self._watched = {
            id(attention): _Watched(attention, layer, readers=dict(unsafe[layer.layer_id]))
            for (attention, _), layer in zip(modules, plan.layers, strict=True)
        }
        self._alive = {
            (key, name): size
            for key, watched in self._watched.items()
            for name, tensor in self._tensors(watched)
            if (size := _bytes(tensor))
        }
        self._seen: set[Phase] = set()
        self.differences: list[Difference] = []
        self._told: set[Difference] = set()

    @staticmethod
    def _tensors(watched: _Watched) -> Iterable[tuple[str, Any]]:
        for name in watched.plan.layer.weight_names:
            if name in ("w_kc", "w_vc"):
                yield name, getattr(watched.attention, name)
            elif name in MODULES:
                yield name, getattr(watched.attention, MODULES[name]).weight

    def watches(self, attention: Any) -> bool:
        """Whether a module is of this model."""
        return id(attention) in self._watched

    def stepped(self, attention: Any, ran: str, mode: Any, rows: int) -> None:
        """Compare what a step ran, and what is gone since, with the plan.

        Args:
            attention: The module that stepped.
            ran: The path that SGLang ran.
            mode: SGLang's forward mode.
            rows: Rows of the step.
        """
        watched = self._watched.get(id(attention))
        if watched is None:
            return
        phase = MODES.get(getattr(mode, "name", ""))
        plan = watched.plan
        if phase is None or phase not in plan.reach:
            self._tell(Difference(plan.layer_id, f"SGLang ran {mode}, which is not planned"))
        elif (mine := _serves(plan, phase, rows)) not in (ran, HOST_MHA):
            self._tell(
                Difference(plan.layer_id, f"SGLang ran {ran} in {phase}, the plan says {mine}")
            )
        self._gone(watched)
        if phase is not None and phase not in self._seen and watched is self._last:
            self._seen.add(phase)
            logger.info("npu-backend (shadow): %s", self.summary(f"after the first {phase} step"))

    @property
    def _last(self) -> _Watched:
        return list(self._watched.values())[-1]

    def _gone(self, watched: _Watched) -> None:
        for name, tensor in self._tensors(watched):
            if _bytes(tensor) or self._alive.pop((id(watched.attention), name), 0) == 0:
                continue
            row = watched.plan.weight(name)
            mine = (reader for reader in row.readers if _is_read_by_sglang(reader))
            readers = tuple(dict.fromkeys((*watched.readers.get(name, ()), *mine)))
            if readers:
                told = ", ".join(readers)
                what = f"SGLang freed {name}, and {told} can still read it"
                self._tell(Difference(watched.plan.layer_id, what, unsafe=True))
            elif row.action == "keep":
                self._tell(
                    Difference(watched.plan.layer_id, f"SGLang freed {name}, the plan keeps it")
                )

    def left(self) -> tuple[Difference, ...]:
        """Return what the plan releases and SGLang still holds."""
        return tuple(
            Difference(w.plan.layer_id, f"the plan releases {name}, SGLang holds {size} bytes")
            for w in self._watched.values()
            for name, tensor in self._tensors(w)
            if w.plan.weight(name).action != "keep" and (size := _bytes(tensor))
        )

    def _tell(self, difference: Difference) -> None:
        if difference not in self._told:
            self._told.add(difference)
            self.differences.append(difference)
            logger.warning("npu-backend (shadow): %s", difference)

    def summary(self, when: str) -> str:
        """Return in one line what SGLang freed so far and what the plan releases."""
        held = sum(
            size
            for w in self._watched.values()
            for name, tensor in self._tensors(w)
            if w.plan.weight(name).action != "keep" and (size := _bytes(tensor))
        )
        unsafe = sum(difference.unsafe for difference in self.differences)
        totals = self.plan.totals
        return (
            f"{when}: {len(self.differences)} differences, {unsafe} unsafe; the plan releases "
            f"{totals.release + totals.restore} bytes, of which SGLang holds {held}"
        )

    def report(self) -> str:
        """Return everything that differs, with what SGLang holds that the plan releases."""
        lines = [*map(str, self.differences), *map(str, self.left())]
        return "\n".join(lines) or "SGLang does as the plan says"


def hooks(shadow_of: Callable[[Any], Shadow | None]) -> dict[str, Callable[..., Any]]:
    """Return the hooks that watch and change nothing, by the last part of their target's name.

    Args:
        shadow_of: Returns the shadow of an attention module's model, or None.
    """
    ran: list[str] = []

    def prepare(
        original: Any, m: Any, positions: Any, hidden_states: Any, batch: Any, *rest: Any
    ) -> Any:
        ran.clear()
        result = original(m, positions, hidden_states, batch, *rest)
        if (shadow := shadow_of(m)) is not None:
            path = ran[-1] if ran else "absorb"
            shadow.stepped(m, path, batch.forward_mode, int(hidden_states.shape[0]))
        return result

    def noting(path: str) -> Callable[..., Any]:
        def note(original: Any, preprocess: Any, *args: Any) -> Any:
            ran.append(path)
            return original(preprocess, *args)

        return note

    return {
        "forward_mla_prepare_npu": prepare,
        "forward_dsa_prepare_npu": prepare,
        **{method: noting(path) for method, path in PATHS.items()},
    }
