"""``quantization_config`` of compressed-tensors: groups of targets and an ignore list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from attrs import frozen

from npu_backend.errors import ModelError
from npu_backend.model.names import Pattern, Said, string_list

__all__ = ["CompressedTensors", "parse_compressed_tensors"]

MX_GROUP = 32
FP8_BLOCKS = (None, [128, 128], "128x128")


@frozen
class _Group:
    """One group: whom it targets, and its kind, or None where the scheme has none here."""

    name: str
    targets: tuple[Pattern, ...]
    kind: str | None
    scheme: str

    def targets_class(self) -> bool:
        """Whether the group targets linear layers as a class."""
        return any(t.regex is None and t.text.endswith("Linear") for t in self.targets)


@frozen
class CompressedTensors:
    """What compressed-tensors says of the model's projections."""

    groups: tuple[_Group, ...]
    ignore: tuple[Pattern, ...]
    where: str

    def said(self, names: Sequence[str]) -> Said:
        """Return the kind of a projection known under these names.

        An ignored projection, and one that no group targets, is not quantized. A group that
        targets the name wins over one whose expression matches, and that over one for the class.

        Raises:
            ModelError: The group's scheme is none that an attention projection can have here.
        """
        for entry in self.ignore:
            if entry.meets(names):
                return Said("none", f"quantization_config: ignore has {entry.text!r}")
        group = (
            self._first(lambda g: any(t.names_one(names) for t in g.targets))
            or self._first(lambda g: any(t.matches_one(names) for t in g.targets))
            or self._first(_Group.targets_class)
        )
        if group is None:
            return Said("none", "quantization_config: no config group targets it")
        if group.kind is None:
            raise ModelError(
                f"{names[0]} has a quantization that is not known",
                whom=self.where,
                why=f"config group {group.name} gives it {group.scheme}",
                remedy="add it to ignore if it is not quantized; known are int8 weights with int8 "
                "or no activations, int4 weights with dynamic int8 or no activations, and float8 "
                "with scales for a tensor, a channel, 128 x 128 blocks or groups of 32",
            )
        return Said(group.kind, f"quantization_config: config group {group.name} is {group.kind}")

    def _first(self, test: Callable[[_Group], bool]) -> _Group | None:
        return next((group for group in self.groups if test(group)), None)


def _scheme(args: Mapping[str, Any] | None) -> str:
    if not args:
        return "no activations"
    keys = ("type", "num_bits", "strategy", "group_size", "dynamic")
    return " ".join(f"{key}={str(args[key])[:40]}" for key in keys if args.get(key) is not None)


def _kind(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None, form: str) -> str | None:
    """Return the kind of a scheme, or None where no attention projection can have it here."""
    bits, family = weights.get("num_bits"), weights.get("type", "int")
    dynamic = bool(inputs and inputs.get("dynamic"))
    acts = (inputs.get("num_bits"), inputs.get("type", "int")) if inputs else None
    if family == "int":
        plain = {(8, None): "w8a16", (4, None): "w4a16"}
        if acts is None:
            return plain.get((bits, None)) if isinstance(bits, int) else None
        if acts == (8, "int") and bits == 8:
            return "w8a8-dynamic" if dynamic else "w8a8-static-symmetric"
        return "w4a8-dynamic" if acts == (8, "int") and bits == 4 and dynamic else None
    if family != "float" or bits != 8 or acts != (8, "float"):
        return None
    strategy = weights.get("strategy")
    if strategy == "group" or "mxfp8" in form:
        return "mxfp8" if weights.get("group_size") in (None, MX_GROUP) else None
    if strategy == "block":
        return "fp8-block" if weights.get("block_structure") in FP8_BLOCKS else None
    return "fp8" if strategy in ("channel", "tensor", None) else None


def _section(group: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any] | None:
    value = group.get(key)
    if value is not None and not isinstance(value, dict):
        raise _wrong(f"{key} of a config group is not an object", str(value)[:80], where)
    return value or None


def _wrong(what: str, why: str, where: str) -> ModelError:
    return ModelError(what, whom=where, why=why, remedy="correct quantization_config")


def parse_compressed_tensors(config: Mapping[str, Any], where: str) -> CompressedTensors:
    """Return the groups and the ignore list.

    Raises:
        ModelError: A part has the wrong type, or an expression is none.
    """
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(g, dict) for g in groups.values()):
        raise _wrong("config_groups is not an object of objects", str(groups)[:80], where)
    parsed: list[_Group] = []
    for name, group in groups.items():
        targets = string_list(group.get("targets"), f"targets of config group {name}", where)
        weights = _section(group, "weights", where)
        inputs = _section(group, "input_activations", where)
        form = str(group.get("format") or config.get("format") or "")
        parsed.append(
            _Group(
                name,
                tuple(Pattern.parse(target, where) for target in targets),
                _kind(weights, inputs, form) if weights else "none",
                f"weights {_scheme(weights)}, input_activations {_scheme(inputs)}",
            )
        )
    ignore = string_list(config.get("ignore"), "quantization_config.ignore", where)
    return CompressedTensors(
        tuple(parsed), tuple(Pattern.parse(entry, where) for entry in ignore), where
    )
