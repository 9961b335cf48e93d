"""The rules that options and sizes must keep; an error names the one that is broken."""

from __future__ import annotations

from npu_backend.deployment import EQUAL_PARTS
from npu_backend.errors import DeploymentError

__all__ = ["RULES", "broken"]

RULES = {
    "option.bool": "an attention-TP flag is true or false",
    "option.size": "shared_experts_tp_size is a whole number of ranks, at least 1",
    "option.name": "the options are general: no option has a model's name in it",
    "variable.contradicts": "a variable that is no longer read must not say the opposite of its "
    "option",
    "parallel.size": "a size is a whole number of ranks, at least 1",
    "parallel.rank": "a rank is one of the TP ranks, counted from 0",
    "parallel.flag": "DP attention is on or off",
    "parallel.ep_backend": "EP all-to-all is off, or one of the known backends",
    "parallel.text": "a parallel layout is written KEY=VALUE, comma separated, each key once",
    "parallel.agrees": "one number says each size",
    "attn_tp.divides_tp": EQUAL_PARTS,
    "size.needs_ep": "shared_experts_tp_size needs an EP all-to-all backend",
    "size.divides_attn_tp": "groups of shared experts are equal parts of an attention-TP group",
    "intermediate.divides": "each rank of a group holds an equal part of the intermediate size",
    "intermediate.divides_attn_tp": "enable_shared_experts_attn_tp wants a shared intermediate "
    "size that divides over attention TP, also where it is without effect",
}
"""Every rule by name. Sources: SGLang 0.5.23, ``models/kimi_k3.py``, and the shapes."""


def broken(
    rule: str, what: str, *, whom: str, why: str | tuple[str, ...] = (), remedy: str
) -> DeploymentError:
    """Return the error of a broken rule; its first reason is the rule."""
    more = (why,) if isinstance(why, str) else why
    return DeploymentError(
        what, whom=whom, why=(f"rule {rule}: {RULES[rule]}", *more), remedy=remedy
    )
