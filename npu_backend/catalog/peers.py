"""What other engines choose for the same batched matmul: their rules as data.

For comparison only; no decision rests on it. A rule's ``any`` lists alternatives, each an object of
conditions that must all hold; a rule without ``any`` always holds. The first that holds counts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from attrs import field, frozen

__all__ = ["Peer", "load_peers"]

_CONDITIONS: Mapping[str, Callable[[Mapping[str, Any], Any], bool]] = {
    "tokens_from": lambda said, bound: said["tokens"] >= bound,
    "tokens_upto": lambda said, bound: said["tokens"] <= bound,
    "bk_from": lambda said, bound: said["B"] * said["K"] >= bound,
    "n_from": lambda said, bound: said["N"] >= bound,
    "soc": lambda said, families: said["soc"] in families,
    "phase": lambda said, phases: said["phase"] in phases,
}
"""What a rule may look at; bounds are inclusive."""


def _holds(condition: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    return all(_CONDITIONS[name](said, value) for name, value in condition.items())


@frozen
class Peer:
    """One version of another engine.

    Args:
        name: Its name.
        version: Version or commit.
        kernels: The library that supplies what torch_npu lacks; ``none`` where nobody does.
        source: Where the rules were read.
    """

    name: str
    version: str
    kernels: str
    source: str
    _rules: Mapping[tuple[str, str], tuple[Mapping[str, Any], ...]] = field(repr=False, hash=False)

    @property
    def title(self) -> str:
        """``NAME VERSION``."""
        return f"{self.name} {self.version}"

    def choice(
        self,
        *,
        attention: str,
        site: str,
        B: int,
        K: int,
        N: int,
        tokens: int,
        soc: str,
        phase: str,
    ) -> str | None:
        """Return the strategy, by this project's names, that the engine would call.

        None where what it chooses is not recorded.

        Args:
            attention: ``mla``, or ``dsa`` for a layer with an indexer.
            site: ``q_absorb`` or ``v_up``.
            B: Local heads.
            K: Depth.
            N: Width.
            tokens: Rows.
            soc: Chip family.
            phase: Phase of the step.
        """
        said = {"B": B, "K": K, "N": N, "tokens": tokens, "soc": soc, "phase": phase}
        for rule in self._rules.get((attention, site), ()):
            if "any" not in rule or any(_holds(c, said) for c in rule["any"]):
                return str(rule["choose"])
        return None


@lru_cache(maxsize=1)
def load_peers() -> tuple[Peer, ...]:
    """Return the engines that are known."""
    text = files("npu_backend.catalog").joinpath("data").joinpath("peers.json").read_text("utf-8")
    return tuple(
        Peer(
            row["name"],
            row["version"],
            row["kernels"],
            row["source"],
            {(c["attention"], c["site"]): tuple(c["rules"]) for c in row["choices"]},
        )
        for row in json.loads(text)["peers"]
    )
