"""The attention-TP options of MLPs, one record for every model and every way to say them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from attrs import Attribute, field, frozen

from npu_backend.catalog.versions import suggest
from npu_backend.errors import DeploymentError
from npu_backend.mlp.rules import broken

__all__ = ["OPTION_NAMES", "AttnTpOptions", "flag_of", "refuse_k3_name"]

SHARED_FLAG = "enable_shared_experts_attn_tp"
DENSE_FLAG = "enable_dense_mlp_attn_tp"
SHARED_SIZE = "shared_experts_tp_size"
OPTION_NAMES = (SHARED_FLAG, DENSE_FLAG, SHARED_SIZE)
"""The options, as host arguments and records name them."""
_PARTS = ("shared_experts", "dense_mlp", "attn_tp")


def flag_of(option: str) -> str:
    """Return an option's name on a command line."""
    return "--" + option.replace("_", "-")


def _is_bool(_record: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, bool):
        raise broken(
            "option.bool",
            f"{attribute.name} is {value!r:.80}",
            whom="the attention-TP options",
            remedy="give True or False",
        )


def _maybe(value: bool | None) -> bool:
    # None, for what is not said, becomes False once it has been noted.
    return value  # type: ignore[return-value]


def _is_size(_record: Any, attribute: Attribute[Any], value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise broken(
            "option.size",
            f"{attribute.name} is {value!r:.80}",
            whom="the attention-TP options",
            remedy="give the number of ranks that share the experts (1: every rank holds them "
            "whole), or leave it out",
        )


def refuse_k3_name(name: str) -> DeploymentError | None:
    """Return the error of an option that only ever existed in drafts, else None.

    Args:
        name: A host argument or a flag; ``--k3-…``, ``k3_…`` and ``enable_k3_…`` are refused.
    """
    bare = name.lstrip("-").replace("-", "_").lower()
    rest = bare.removeprefix("enable_")
    if not rest.startswith("k3_"):
        return None
    rest = rest.removeprefix("k3_")
    if "shared" in rest:
        meant: tuple[str, ...] = (SHARED_SIZE if "size" in rest else SHARED_FLAG,)
    elif "dense" in rest:
        meant = (DENSE_FLAG,)
    else:
        meant = OPTION_NAMES
    words = [flag_of(m) for m in meant] if name.startswith("-") else list(meant)
    return broken(
        "option.name",
        f"there is no option {name[:80]}"
        + (f"; did you mean {words[0]}?" if len(words) == 1 else suggest(rest, OPTION_NAMES)),
        whom="the attention-TP options",
        why="the k3 options existed in drafts and in no release",
        remedy="use " + " or ".join(words),
    )


@frozen(kw_only=True)
class AttnTpOptions:
    """What a user chooses for dense MLPs and shared experts. Not said means off.

    Args:
        enable_shared_experts_attn_tp: Split shared experts over the attention-TP group, where an
            EP all-to-all backend would otherwise have every rank hold them whole.
        enable_dense_mlp_attn_tp: Keep dense MLPs inside the attention-TP replica, where DP
            attention is on.
        shared_experts_tp_size: Ranks that share the shared experts; overrides
            ``enable_shared_experts_attn_tp``, needs an EP all-to-all backend, divides attention TP.

    Attributes:
        given: Names of the options that were said, also those said to be off.

    Raises:
        DeploymentError: A value is not of its kind. Combinations are judged with the parallel
            layout, by :func:`npu_backend.mlp_shard_layout`.
    """

    enable_shared_experts_attn_tp: bool = field(default=None, converter=_maybe, validator=_is_bool)
    enable_dense_mlp_attn_tp: bool = field(default=None, converter=_maybe, validator=_is_bool)
    shared_experts_tp_size: int | None = field(default=None, validator=_is_size)
    given: frozenset[str] = field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        set_ = object.__setattr__
        said = frozenset(name for name in OPTION_NAMES if getattr(self, name) is not None)
        set_(self, "given", said)
        for name in (SHARED_FLAG, DENSE_FLAG):
            if name not in said:
                set_(self, name, False)

    @classmethod
    def from_host_args(
        cls, args: Any, *, environ: Mapping[str, str] | None = None
    ) -> AttnTpOptions:
        """Return the options that a host's arguments say.

        Args:
            args: A mapping (such as an additional config), or an object with attributes (such as
                parsed server arguments). Other names in it are not looked at. An object's False is
                taken as its default, a mapping's as said.
            environ: Where the variables of old are looked for; default: this process's.

        Raises:
            DeploymentError: A value is not of its kind, a ``k3`` name is used, or a variable of
                old contradicts an option.
        """
        is_mapping = isinstance(args, Mapping)
        known = args if is_mapping else getattr(args, "__dict__", {})
        for name, value in known.items():
            ours = isinstance(name, str) and any(part in name for part in _PARTS)
            said = value is not None and (is_mapping or value is not False)
            error = refuse_k3_name(name) if ours and said else None
            if error is not None:
                raise error
        values: dict[str, Any] = {
            name: args.get(name) if is_mapping else getattr(args, name, None)
            for name in OPTION_NAMES
        }
        if not is_mapping:
            values = {name: None if v is False else v for name, v in values.items()}
        options = cls(**values)
        from npu_backend.mlp.environment import warn_of_old_variables

        warn_of_old_variables(options, os.environ if environ is None else environ)
        return options

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return {name: getattr(self, name) for name in OPTION_NAMES}
