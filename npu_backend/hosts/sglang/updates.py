"""What happens to a loaded model later: new weights, a flipped role, sleep and wake.

All four of SGLang's update paths, and the session around two of them, are stood around. Where the
plan released a weight for good, or SGLang would replace the parameters that copies were made of,
nothing is hooked away: the module says so by the attribute that SGLang asks before it writes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from npu_backend.deployment import ROLE_PHASES, Role

if TYPE_CHECKING:
    from npu_backend.hosts.sglang.session import Session

__all__ = ["EXPORT_REFUSAL", "REFUSAL", "Updates", "refuse_what_is_gone", "role_switch_refusal"]

logger = logging.getLogger(__name__)

REFUSAL = "_derived_weight_cache_error"
"""What SGLang's update paths ask of every module before they write."""
EXPORT_REFUSAL = "_weight_export_error"
"""What SGLang's exporter asks of every module before it sends or saves."""

_UPDATES = (
    "update_weights_from_disk",
    "load_weights_from_distributed",
    "update_weights_from_tensor",
    "update_weights_from_ipc",
)


def refuse_what_is_gone(session: Session) -> None:
    """Set SGLang's own refusals on modules whose weights cannot be written or read any more."""
    for part in session.parts:
        plan, fixed = part.bound.plan, part.weights.not_updated
        gone = [row.name for row in plan.released() if row.action == "release"]
        what = f"npu-backend released {', '.join(gone)} of {plan.layer} for good"
        remedy = "start with NPU_BACKEND_SGLANG_PROMISES="
        if fixed is not None:
            why = f"npu-backend: in {plan.layer} {fixed}; restart with the new weights"
            setattr(part.attention, REFUSAL, why)
        elif gone:
            setattr(part.attention, REFUSAL, f"{what}; {remedy}weight_update")
        if gone:
            setattr(part.attention, EXPORT_REFUSAL, f"{what}; {remedy}export")


class Updates:
    """Hooks around the life of loaded models.

    Args:
        session_of: Returns the session of a model, or None where SGLang serves it alone.
    """

    def __init__(self, session_of: Callable[[Any], Session | None]) -> None:
        self._session_of = session_of
        self._open: set[int] = set()

    def hooks(self) -> dict[str, Callable[..., Any]]:
        """Return the hooks of a runner's ``WeightUpdater`` by method."""
        return {
            "begin_weight_update": self.begin,
            "end_weight_update": self.end,
            **dict.fromkeys(_UPDATES, self.update),
        }

    def begin(self, original: Any, updater: Any) -> Any:
        """Bring weights back before a session of updates; back to serving where SGLang refuses it.

        Where every update of this model is refused, so is what SGLang does around a session of
        them: at its end it would derive ``w_kc`` from weights that are gone, and turn W8A8 weights
        that nobody wrote.
        """
        session = self._session_of(updater.get_model())
        if session is None:
            return original(updater)
        if (refusal := session.update_refusal) is not None:
            logger.error("npu-backend: a session of weight updates changes nothing: %s", refusal)
            return None
        session.before_update()
        try:
            result = original(updater)
        except BaseException:
            session.after_update()  # no session was begun, so that none will be ended
            raise
        self._open.add(id(session))
        return result

    def end(self, original: Any, updater: Any, **options: Any) -> Any:
        """Prepare anew after SGLang processed what it loaded."""
        session = self._session_of(updater.get_model())
        if session is not None and session.update_refusal is not None:
            return None
        result = original(updater, **options)
        if session is not None and id(session) in self._open:
            self._open.discard(id(session))
            session.after_update()
        return result

    def update(self, original: Any, updater: Any, *args: Any, **options: Any) -> Any:
        """Stand around one update; inside a session only the session's ends do."""
        session = self._session_of(updater.get_model())
        # SGLang refuses in the words of REFUSAL, before it writes.
        if session is None or session.update_refusal is not None or id(session) in self._open:
            return original(updater, *args, **options)
        session.before_update()
        try:
            return original(updater, *args, **options)
        finally:
            # Also after a failure: SGLang rolls back to weights that it wrote again.
            session.after_update()

    @staticmethod
    def wake(sessions: Iterable[Session]) -> None:
        """Apply the plan anew where weights came back from sleep."""
        for session in sessions:
            if session.update_refusal is None:
                session.before_update()
                session.after_update()


def role_switch_refusal(sessions: Iterable[Session], new_role: str) -> str | None:
    """Return why the role cannot become another one under the plan, or None where it can."""
    if new_role not in {role.value for role in Role}:
        return None  # SGLang refuses it in its own words
    wanted = ROLE_PHASES[Role.parse(new_role)]
    for session in sessions:
        for part in session.parts:
            reach = part.bound.plan.reach
            is_nextn = part.bound.plan.layer.is_nextn
            left = [
                str(p)
                for p in wanted
                if p not in reach and str(p) != ("target_verify" if is_nextn else "draft_extend")
            ]
            if left:
                return (
                    f"npu-backend planned {part.bound.plan.layer} without {', '.join(left)}; start "
                    "with --enable-pd-role-switch, or NPU_BACKEND_SGLANG_PROMISES=role_switch"
                )
    return None
