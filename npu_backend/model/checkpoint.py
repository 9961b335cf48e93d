"""What a checkpoint's tensors are: found by name, read from headers, judged by dtype and scale."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import ceil, prod
from pathlib import Path

from attrs import field, frozen

from npu_backend.errors import ModelError
from npu_backend.model.files import read_object
from npu_backend.model.records import Measured
from npu_backend.model.safetensors import Header, Tensor, read_header

__all__ = ["Checkpoint", "Module", "measure", "open_checkpoint"]

WEIGHTS = ("weight", "weight_packed")
EXTRAS = (
    "weight_scale",
    "weight_scale_inv",
    "weight_offset",
    "weight_zero_point",
    "weight_global_scale",
    "input_scale",
    "input_offset",
    "input_zero_point",
    "input_global_scale",
    "deq_scale",
    "quant_bias",
    "scale_bias",
    "bias",
)
"""Tensors beside a weight that serve its quantization, or its bias."""

STATIC = frozenset({"input_scale", "deq_scale"})
MODELSLIM_STATIC = frozenset({"input_scale", "input_offset", "deq_scale", "quant_bias"})
"""What ModelSlim stores beside a static int8 weight, and ``mla_preprocess`` takes."""
FLOATS = frozenset({"BF16", "F16", "F32"})
FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})
EXPONENTS = frozenset({"U8", "F8_E8M0"})
"""Dtypes of a scale that is an exponent alone."""
PACKED = frozenset({"w4a8-dynamic", "w4a16"})
"""Kinds whose weight has fewer elements than the projection."""

FP8_BLOCK = 128
MX_BLOCK = 32

INDEX_GLOB = "*.safetensors.index.json"
MODELSLIM_PREFIX = "quant_model_weight"
_INDEX_REMEDY = "restore the index that belongs to the checkpoint"


@frozen
class Module:
    """One projection in the checkpoint.

    Args:
        weight: Its weight.
        extras: Scales, offsets and biases by the last part of their names.
    """

    weight: Tensor
    extras: Mapping[str, Tensor]

    def check_shape(self, rows: int, columns: int, kind: str) -> None:
        """Raise an error where the weight's shape is not the one that the config says.

        Packed weights have fewer elements; along which side differs by writer.
        """
        packed = kind in PACKED or self.weight.dtype == "I32"
        if packed or self.weight.shape == (rows, columns):
            return
        raise ModelError(
            f"{self.weight}, but the config makes it [{rows}, {columns}]",
            whom=str(self.weight.path),
            why="the checkpoint and the config do not belong together",
            remedy="use the config that the checkpoint was published with",
        )

    def kinds(self) -> tuple[str, ...]:
        """Return the quantizations that the tensors can mean, the likeliest first.

        Raises:
            ModelError: They can mean none.
        """
        dtype, extras = self.weight.dtype, self.extras
        if self.weight.name.endswith("weight_packed") or dtype == "I32":
            if dtype not in ("I32", "I8"):
                raise self._unknown()
            return ("w4a16", "w4a8-dynamic", "w8a16")
        if dtype in FLOATS:
            return ("none",)
        if dtype == "I8":
            if STATIC.intersection(extras):
                whole = extras.keys() >= MODELSLIM_STATIC
                kinds = ("w8a8-static", "w8a8-static-symmetric")
                return kinds if whole else kinds[::-1]
            if "weight_scale" in extras:
                return ("w8a8-dynamic", "w8a16", "w4a8-dynamic", "w4a16")
            raise self._unknown("it has neither weight_scale nor input_scale or deq_scale")
        if dtype in FLOAT8:
            scale = extras.get("weight_scale_inv") or extras.get("weight_scale")
            if scale is None:
                raise self._unknown("it has neither weight_scale nor weight_scale_inv")
            return (self._float8(scale),)
        raise self._unknown()

    def _float8(self, scale: Tensor) -> str:
        """Return the kind of a float8 weight by its scale's shape, else by its dtype.

        The shape comes first: scales of 128 x 128 blocks may be exponents too (``scale_fmt``
        ue8m0).
        """
        rows, columns = (*self.weight.shape, 1, 1)[:2]
        blocks = (ceil(rows / FP8_BLOCK), ceil(columns / FP8_BLOCK))
        groups = (rows, ceil(columns / MX_BLOCK))
        if blocks != groups:
            if scale.shape == blocks:
                return "fp8-block"
            if scale.shape == groups and scale.dtype in EXPONENTS:
                return "mxfp8"
        if scale.dtype in EXPONENTS:
            return "mxfp8"
        return "fp8-block" if scale.name.endswith("_inv") else "fp8"

    def _unknown(self, why: str = "no known quantization has weights of this dtype") -> ModelError:
        return ModelError(
            f"{self.weight}: its quantization is not known",
            whom=str(self.weight.path),
            why=why,
            remedy="complete the checkpoint, or quantize the attention in a known way",
        )


def measure(modules: Iterable[Module]) -> tuple[Measured, Measured | None]:
    """Return dtype and bytes of the weights, and of their scales, over all shards of a fusion."""
    modules = list(modules)
    weights = [module.weight for module in modules]
    extras = [tensor for module in modules for tensor in module.extras.values()]
    weight = Measured(weights[0].torch_dtype, sum(tensor.bytes for tensor in weights))
    if not extras:
        return weight, None
    largest = max(extras, key=lambda tensor: tensor.bytes)
    return weight, Measured(
        largest.torch_dtype,
        sum(tensor.bytes for tensor in extras),
        sum(tensor.bytes for tensor in extras if prod(tensor.shape) == 1),
    )


@frozen
class Checkpoint:
    """The tensors of a model directory, by name.

    Args:
        directory: The directory.
        files: File of each tensor.
        headers: Headers read so far, by file; filled as tensors are asked for.
    """

    directory: Path
    files: Mapping[str, Path]
    headers: dict[Path, Header] = field(factory=dict)

    def __contains__(self, module: str) -> bool:
        return any(f"{module}.{weight}" in self.files for weight in WEIGHTS)

    def module(self, name: str) -> Module | None:
        """Return a projection's tensors, or None where the checkpoint has none of that name.

        Raises:
            ModelError: A header is broken, or lacks what the index promises.
        """
        weight = next((w for w in WEIGHTS if f"{name}.{w}" in self.files), None)
        if weight is None:
            return None
        extras = {e: self._tensor(f"{name}.{e}") for e in EXTRAS if f"{name}.{e}" in self.files}
        return Module(self._tensor(f"{name}.{weight}"), extras)

    def _tensor(self, name: str) -> Tensor:
        path = self.files[name]
        if path not in self.headers:
            self.headers[path] = read_header(path)
        header = self.headers[path]
        if name not in header.entries:
            raise ModelError(
                f"{name} is missing from the file that the index names for it",
                whom=str(path),
                why="the index and the files do not belong together",
                remedy=_INDEX_REMEDY,
            )
        return header.tensor(name)


def _find_index(directory: Path) -> Path | None:
    """Return the index of a directory.

    ModelSlim copies the index of the float checkpoint beside its own, so its own wins.
    """
    found = sorted(directory.glob(INDEX_GLOB))
    chosen = [path for path in found if path.name.startswith(MODELSLIM_PREFIX)]
    chosen = chosen or [path for path in found if path.name == "model.safetensors.index.json"]
    chosen = chosen or found
    if len(chosen) > 1:
        raise ModelError(
            "the directory has several safetensors indexes",
            whom=str(directory),
            why=[path.name for path in chosen],
            remedy="keep the one that belongs to the checkpoint",
        )
    return chosen[0] if chosen else None


def _indexed(directory: Path, index: Path) -> Checkpoint:
    weight_map = read_object(index, "the safetensors index", _INDEX_REMEDY).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) for file in weight_map.values()
    ):
        raise ModelError(
            "the safetensors index cannot be used",
            whom=str(index),
            why="its weight_map is not an object that names a file for each tensor",
            remedy=_INDEX_REMEDY,
        )
    files: dict[str, Path] = {}
    problems: list[str] = []
    for file in sorted(set(weight_map.values())):
        if "\0" in file or Path(file).name != file:
            problems.append(f"{file!r:.120} is not the name of a file in the directory")
            continue
        files[file] = directory / file
        if not files[file].is_file():
            problems.append(f"{file} is missing")
    if problems:
        raise ModelError(
            "the checkpoint lacks files that its index names",
            whom=str(index),
            why=problems[:8] + [f"and {len(problems) - 8} more"][: len(problems) > 8],
            remedy="download the missing files, or give the config.json alone",
        )
    return Checkpoint(directory, {name: files[file] for name, file in weight_map.items()})


def open_checkpoint(directory: Path) -> Checkpoint | None:
    """Return the safetensors checkpoint of a directory, or None where it has none.

    With an index only its files count, and headers are read as they are needed. Without one, the
    files of ModelSlim win over others beside them.

    Raises:
        ModelError: The index or a header is broken, a file is missing, or two hold one tensor.
    """
    index = _find_index(directory)
    if index is not None:
        return _indexed(directory, index)
    found = sorted(directory.glob("*.safetensors"))
    found = [path for path in found if path.name.startswith(MODELSLIM_PREFIX)] or found
    files: dict[str, Path] = {}
    headers = {path: read_header(path) for path in found}
    for path, header in headers.items():
        for name in header.entries:
            if name in files:
                raise ModelError(
                    f"{name} is in two files of the checkpoint",
                    whom=str(directory),
                    why=[files[name].name, path.name],
                    remedy="remove the copy, or restore the index that says which file counts",
                )
            files[name] = path
    return Checkpoint(directory, files, headers) if found else None
