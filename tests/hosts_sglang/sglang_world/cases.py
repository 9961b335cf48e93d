"""What SGLang runs once alone and once with npu-backend, on the same weights and inputs."""

from __future__ import annotations

from attrs import frozen

from sglang_world.engine import Model, Step

__all__ = ["CASES", "COMPARED", "REFERRED", "Case"]

ROLES = ("null", "prefill", "decode")
_EXTEND = (Step(mode="EXTEND", rows=5, seen=0), Step(mode="EXTEND", rows=3, seen=5))
_DECODE = (Step(mode="DECODE", rows=1, seen=8), Step(mode="DECODE", rows=3, seen=9))
_STEPS = {"null": (*_EXTEND, *_DECODE), "prefill": _EXTEND, "decode": _DECODE}


@frozen(kw_only=True)
class Case:
    """One worker's life: a role, a model, and steps.

    Args:
        path: What the plan runs in decode-like phases.
        soc: The chip's family.
        role: Disaggregation role.
        model: The model.
        mlapo: ``SGLANG_NPU_USE_MLAPO``.
    """

    path: str
    soc: str
    role: str
    model: Model
    mlapo: bool

    @property
    def name(self) -> str:
        """The case's name, for test ids and file keys."""
        kind = "dsa" if self.model.dsa else "mla"
        more = ("-yarn" if self.model.yarn else "") + ("-ignored" if self.model.ignores else "")
        return f"{self.soc}-{kind}-{self.path}-{self.model.quant}{more}-{self.role}"

    @property
    def steps(self) -> tuple[Step, ...]:
        """The steps that a worker of this role runs."""
        steps = _STEPS[self.role]
        if not self.model.dsa:
            # SGLang extends these by MHA; a second chunk would need its prefix path's ops.
            steps = tuple(s for s in steps if s.mode != "EXTEND" or s.seen == 0)
        return steps


def _each(path: str, model: Model, *, mlapo: bool, soc: str = "A3") -> list[Case]:
    return [Case(path=path, soc=soc, role=r, model=model, mlapo=mlapo) for r in ROLES]


def _mlaprolog_without_indexer() -> list[Case]:
    """SGLang's own mlaprolog cannot run on these layers; on a prefill worker no path decodes."""
    models = (
        Model(dsa=False, yarn=True),
        Model(dsa=False, yarn=True, ignores=True),
        Model(dsa=False, yarn=True, quant="q_b", ignores=True),
        Model(dsa=False, yarn=True, quant="dynamic"),
    )
    return [c for m in models for c in _each("mlaprolog", m, mlapo=True) if c.role != "prefill"]


CASES: tuple[Case, ...] = (
    *_each("absorb", Model(), mlapo=False),
    *_each("absorb", Model(quant="static"), mlapo=False),
    *_each("absorb", Model(quant="dynamic"), mlapo=False),
    *_each("mlapo", Model(quant="static"), mlapo=True),
    *_each("mlaprolog", Model(ignores=True), mlapo=True),
    *_each("mlaprolog", Model(quant="q_b", ignores=True), mlapo=True),
    *_each("mlaprolog", Model(quant="dynamic"), mlapo=True),
    *_each("absorb", Model(dsa=False), mlapo=False),
    *_each("absorb", Model(dsa=False, yarn=True), mlapo=False),
    *_each("absorb", Model(dsa=False, quant="static"), mlapo=False),
    *_each("mlapo", Model(dsa=False, quant="static", yarn=True), mlapo=True),
    *_mlaprolog_without_indexer(),
    *_each("mlaprolog", Model(), mlapo=True, soc="A5"),
    *_each("mlaprolog", Model(quant="q_b"), mlapo=True, soc="A5"),
    *_each("absorb", Model(), mlapo=False, soc="A5"),
)

REFERRED: tuple[Case, ...] = tuple(c for c in CASES if c.path == "mlaprolog" and not c.model.dsa)
"""Cases that are held against the reference of the op instead of SGLang alone."""
COMPARED: tuple[Case, ...] = tuple(c for c in CASES if c not in REFERRED)
"""Cases that SGLang runs alone and planned."""
