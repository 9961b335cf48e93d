"""What files *say* of a projection's quantization: ModelSlim, compressed-tensors, fp8, MXFP8.

What a checkpoint's tensors *are* is the subject of :mod:`npu_backend.model.checkpoint`. Names are
those of the checkpoint, never those of a host's modules: a pattern for ``model.layers.78.*`` meets
the MTP layer though hosts load it as ``model.decoder.*`` (sgl-project/sglang#30265).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attrs import frozen

from npu_backend.catalog.versions import suggest
from npu_backend.errors import ModelError
from npu_backend.model.compressed import CompressedTensors, parse_compressed_tensors
from npu_backend.model.files import read_object
from npu_backend.model.names import Said, covered, string_list

__all__ = [
    "DESCRIPTION_METHODS",
    "MODELSLIM_KINDS",
    "Declared",
    "Description",
    "Fp8",
    "find_description",
    "parse_quantization_config",
]

MODELSLIM_KINDS = {
    "FLOAT": "none",
    "W8A8": "w8a8-static",
    "W8A8_DYNAMIC": "w8a8-dynamic",
    "W8A8_MXFP8": "mxfp8",
    "WFP8AFP8_DYNAMIC": "fp8",
    "W8A8FP8_DYNAMIC": "fp8",
    "W8A16": "w8a16",
    "W4A8_DYNAMIC": "w4a8-dynamic",
    "W4A16": "w4a16",
}
"""ModelSlim's names, as its writer and both hosts' loaders have them."""

_MODELSLIM_NOTES = {
    "W8A8_MIX": "W8A8_MIX is static in decode and dynamic in prefill: one layer, two quantizations",
}

DESCRIPTION_NAME = "quant_model_description.json"
DESCRIPTION_GLOB = "quant_model_description*.json"
DESCRIPTION_METHODS = frozenset({"ascend", "modelslim"})
"""Values of ``quant_method`` that only point to a ModelSlim description."""

_DESCRIPTION_REMEDY = (
    "restore the file, or remove it if the checkpoint is not quantized by ModelSlim"
)
_CONFIG_REMEDY = "correct quantization_config, or remove it and say --quant"
_FP8_EXCLUDE_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")


class Declared(Protocol):
    """One file's word on quantization."""

    def said(self, names: Sequence[str]) -> Said | None:
        """Return what the file says of a projection known under these names, or None."""


@frozen
class Description:
    """ModelSlim's description: a type for each tensor, ``NAME.weight: "W8A8"``."""

    path: Path
    types: Mapping[str, Any]

    def __contains__(self, module: str) -> bool:
        return f"{module}.weight" in self.types

    def said(self, names: Sequence[str]) -> Said | None:
        """Return the type of the first name that the description knows.

        Raises:
            ModelError: The type is none that an attention projection can have here.
        """
        for name in names:
            key = f"{name}.weight"
            if key not in self.types:
                continue
            value = self.types[key]
            kind = MODELSLIM_KINDS.get(value) if isinstance(value, str) else None
            if kind is None:
                raise self._unknown(key, value)
            return Said(kind, f"{self.path.name}: {key} is {value}")
        return None

    def _unknown(self, key: str, value: Any) -> ModelError:
        text = value if isinstance(value, str) else repr(value)
        why = ["the known types are " + ", ".join(MODELSLIM_KINDS)]
        if text in _MODELSLIM_NOTES:
            why.insert(0, _MODELSLIM_NOTES[text])
        return ModelError(
            f"{key} has the quantization type {text[:80]!r}, which is not known"
            f"{suggest(text[:80], MODELSLIM_KINDS)}",
            whom=str(self.path),
            why=why,
            remedy="quantize the attention with a known type, or leave it FLOAT",
        )


def find_description(directory: Path) -> Description | None:
    """Return the ModelSlim description of a model directory, or None.

    ``quant_model_description.json`` wins; else the only ``quant_model_description*.json``.

    Raises:
        ModelError: The file is unusable, or several could be meant.
    """
    found = sorted(directory.glob(DESCRIPTION_GLOB))
    exact = [path for path in found if path.name == DESCRIPTION_NAME]
    chosen = exact or found
    if not chosen:
        return None
    if len(chosen) > 1:
        raise ModelError(
            "the directory has several quantization descriptions",
            whom=str(directory),
            why=[path.name for path in chosen],
            remedy=f"keep one, or name the right one {DESCRIPTION_NAME}",
        )
    types = read_object(chosen[0], "the quantization description", _DESCRIPTION_REMEDY)
    return Description(chosen[0], types)


@frozen
class Fp8:
    """``quant_method`` fp8 or mxfp8: one kind for all linear layers but the excluded ones."""

    kind: str
    excluded: tuple[str, ...]
    words: str

    def said(self, names: Sequence[str]) -> Said:
        """Return the one kind, or none for an excluded projection."""
        for entry in self.excluded:
            if covered(entry, names):
                return Said("none", f"quantization_config: {entry!r} is not converted")
        return Said(self.kind, self.words)


def _parse_fp8(config: Mapping[str, Any], method: str, where: str) -> Fp8:
    block = config.get("weight_block_size")
    excluded: list[str] = []
    for key in _FP8_EXCLUDE_KEYS:
        excluded += string_list(config.get(key), f"quantization_config.{key}", where)
    if block is None:
        kind = "mxfp8" if method == "mxfp8" else "fp8"
    else:
        kinds = {(128, 128): "fp8-block", (1, 32): "mxfp8"}
        sizes = block if isinstance(block, list) else []
        whole = all(isinstance(size, int) and not isinstance(size, bool) for size in sizes)
        found = kinds.get(tuple(sizes)) if whole else None
        if found is None or (method == "mxfp8" and found != "mxfp8"):
            raise ModelError(
                f"weight_block_size {str(block)[:80]} is not one that {method} can have here",
                whom=where,
                why="fp8 blocks are [128, 128], and MXFP8 scales cover [1, 32]",
                remedy=_CONFIG_REMEDY,
            )
        kind = found
    words = f"quantization_config: quant_method is {method}"
    if block is not None:
        words += f", weight_block_size is {block}"
    return Fp8(kind, tuple(excluded), words)


def parse_quantization_config(
    config: Mapping[str, Any], where: str
) -> CompressedTensors | Fp8 | None:
    """Return what ``quantization_config`` says, or None where it only names a description.

    Raises:
        ModelError: The method is unknown, or its parameters are wrong.
    """
    method = config.get("quant_method")
    if method is None and "config_groups" in config:
        method = "compressed-tensors"
    if isinstance(method, str):
        if method in ("compressed-tensors", "compressed_tensors"):
            return parse_compressed_tensors(config, where)
        if method in ("fp8", "mxfp8"):
            return _parse_fp8(config, method, where)
        if method in DESCRIPTION_METHODS:
            return None
    known = ["compressed-tensors", "fp8", "mxfp8", *sorted(DESCRIPTION_METHODS)]
    text = method if isinstance(method, str) else repr(method)
    raise ModelError(
        f"quant_method {text[:80]!r} is not known{suggest(text[:80], known)}",
        whom=where,
        why="the known methods are " + ", ".join(known),
        remedy=_CONFIG_REMEDY,
    )
