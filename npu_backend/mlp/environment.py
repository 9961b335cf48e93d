"""The environment variables that once set these options for one model, and are no longer read."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

from npu_backend.mlp.options import DENSE_FLAG, SHARED_FLAG, SHARED_SIZE, AttnTpOptions, flag_of
from npu_backend.mlp.rules import broken

__all__ = ["OLD_VARIABLES", "OldVariableWarning", "old_variables", "warn_of_old_variables"]

OLD_VARIABLES = {
    "SGLANG_K3_SHARED_EXPERTS_ATTN_TP": SHARED_FLAG,
    "SGLANG_K3_DENSE_MLP_ATTN_TP": DENSE_FLAG,
}
"""Each variable with the option that replaced it (SGLang 0.5.23, ``models/kimi_k3.py``)."""

_TRUE, _FALSE = ("1", "true", "yes", "y", "on"), ("0", "false", "no", "n", "off")
_told: set[str] = set()


class OldVariableWarning(UserWarning):
    """A variable is set that nothing reads any more."""


def _said(options: AttnTpOptions, option: str) -> tuple[bool | None, str]:
    """Return what the options say of a flag, None for nothing, and the words that say it."""
    if option == SHARED_FLAG and options.shared_experts_tp_size is not None:
        # The size overrides the flag, so it is what the user will get.
        size = options.shared_experts_tp_size
        return size > 1, f"{SHARED_SIZE} is {size}"
    if option not in options.given:
        return None, ""
    value = bool(getattr(options, option))
    return value, f"{option} is {value}"


def old_variables(options: AttnTpOptions, environ: Mapping[str, str]) -> dict[str, str]:
    """Return a warning for each variable of old that is set; an empty one counts as not set.

    Args:
        options: What is in force; a variable never changes it.
        environ: The environment to look at.

    Raises:
        DeploymentError: ``variable.contradicts``: a variable and its option are both set and say
            the opposite.
    """
    found = {}
    for variable, option in OLD_VARIABLES.items():
        text = environ.get(variable, "").strip()
        if not text:
            continue
        word = text.lower()
        wants = True if word in _TRUE else False if word in _FALSE else None
        says, words = _said(options, option)
        if None not in (wants, says) and wants != says:
            raise broken(
                "variable.contradicts",
                f"{variable}={text} contradicts the options",
                whom="the attention-TP options",
                why=f"{words}; the variable itself is not read any more",
                remedy=f"unset {variable}, and let {option} ({flag_of(option)}) say what is meant",
            )
        found[variable] = (
            f"{variable}={text} was not applied: the option {option} ({flag_of(option)}) replaced "
            "it; unset the variable, and set the option if that is meant"
        )
    return found


def warn_of_old_variables(options: AttnTpOptions, environ: Mapping[str, str]) -> None:
    """Warn of each variable of old that is set, once a process.

    Raises:
        DeploymentError: As :func:`old_variables`.
    """
    for variable, text in old_variables(options, environ).items():
        if variable not in _told:
            _told.add(variable)
            warnings.warn(text, OldVariableWarning, stacklevel=3)
