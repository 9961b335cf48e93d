"""How a model is served, as far as MLPs are concerned: sizes, DP attention, EP all-to-all."""

from __future__ import annotations

from typing import Any

from attrs import Attribute, field, frozen

from npu_backend.catalog.versions import suggest
from npu_backend.deployment import tp_sizes
from npu_backend.mlp.rules import broken

__all__ = ["EP_BACKENDS", "MlpParallel", "parse_parallel"]

EP_BACKENDS = ("deepep", "megamoe", "mooncake", "ascend_fuseep", "mori")
"""EP all-to-all backends (SGLang 0.5.23)."""

_WHOM = "the parallel layout"
_KEYS = {
    "tp": "tp_size",
    "attn_tp": "attn_tp_size",
    "dp_attention": "dp_attention",
    "ep": "ep_backend",
}
_WORDS = {
    **dict.fromkeys(("on", "true", "yes", "1"), True),
    **dict.fromkeys(("off", "false", "no", "0"), False),
}


def _size(_record: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise broken(
            "parallel.size",
            f"{attribute.name} is {value!r:.80}",
            whom=_WHOM,
            remedy="give the number of ranks",
        )


def _flag(_record: Any, attribute: Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise broken(
            "parallel.flag",
            f"{attribute.name} is {value!r:.80}",
            whom=_WHOM,
            why="the number of data-parallel replicas follows from TP and attention TP",
            remedy="give True or False",
        )


def _backend(_record: Any, _attribute: Attribute[Any], value: Any) -> None:
    if value is not None and value not in EP_BACKENDS:
        raise broken(
            "parallel.ep_backend",
            f"{value!r:.80} is not an EP all-to-all backend{suggest(str(value)[:80], EP_BACKENDS)}",
            whom=_WHOM,
            why="the backends are " + ", ".join(EP_BACKENDS),
            remedy="name one of them, or none",
        )


def _no_backend(value: Any) -> Any:
    return None if value == "none" else value


@frozen(kw_only=True)
class MlpParallel:
    """How a model is served, seen from one rank.

    Args:
        tp_size: Ranks of the TP group; default: ``attn_tp_size``.
        attn_tp_size: Ranks of one attention-TP group, a contiguous part of the TP group; default:
            ``tp_size``.
        dp_attention: Attention-TP groups are data-parallel replicas, each with rows of its own.
        ep_backend: One of :data:`EP_BACKENDS`; None or ``none`` where experts use no all-to-all.
        rank: This rank inside the TP group.

    Raises:
        DeploymentError: A value is impossible; the first reason names the rule.
    """

    tp_size: int = field(default=None, validator=_size)
    attn_tp_size: int = field(default=None, validator=_size)
    dp_attention: bool = field(default=False, validator=_flag)
    ep_backend: str | None = field(default=None, converter=_no_backend, validator=_backend)
    rank: int = 0

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__
        tp, attn = tp_sizes(self.tp_size, self.attn_tp_size)
        set_(self, "tp_size", tp)
        set_(self, "attn_tp_size", attn)
        rank = self.rank
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < self.tp_size:
            raise broken(
                "parallel.rank",
                f"rank {rank!r:.80} is not in a TP group of {self.tp_size}",
                whom=_WHOM,
                remedy="give the rank inside the TP group, not the one of all processes",
            )

    def __str__(self) -> str:
        ep = f"EP all-to-all {self.ep_backend}" if self.ep_backend else "no EP all-to-all"
        dp = "on" if self.dp_attention else "off"
        return f"TP {self.tp_size}, attention TP {self.attn_tp_size}, DP attention {dp}, {ep}"

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form, without the rank: a plan is every rank's."""
        return {
            "tp_size": self.tp_size,
            "attn_tp_size": self.attn_tp_size,
            "dp_attention": self.dp_attention,
            "ep_backend": self.ep_backend,
        }


def _text_error(what: str) -> Exception:
    return broken(
        "parallel.text",
        what,
        whom=_WHOM,
        why="the keys are " + ", ".join(_KEYS),
        remedy="write for example tp=64,attn_tp=16,dp_attention=on,ep=ascend_fuseep",
    )


def parse_parallel(text: str) -> dict[str, Any]:
    """Return the arguments of :class:`MlpParallel` that a text says.

    Args:
        text: ``tp=64,attn_tp=16,dp_attention=on,ep=ascend_fuseep``; any part may be absent.

    Raises:
        DeploymentError: The text is not of that form.
    """
    found: dict[str, Any] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        if not equals or not value:
            raise _text_error(f"{part.strip()!r:.80} is not KEY=VALUE")
        if key not in _KEYS:
            raise _text_error(f"{key!r:.80} is not a key{suggest(key[:80], _KEYS)}")
        name = _KEYS[key]
        if name in found:
            raise _text_error(f"{key} is given twice")
        if key == "ep":
            found[name] = value
        elif key == "dp_attention":
            # Any other word is left for the record to refuse, which names the rule.
            found[name] = _WORDS.get(value.lower(), value)
        elif value.isascii() and value.isdigit() and int(value[:19]) > 0 and len(value) < 10:
            found[name] = int(value)
        else:
            raise broken(
                "parallel.size",
                f"{key} is {value!r:.80}",
                whom=_WHOM,
                remedy="give the number of ranks",
            )
    return found
