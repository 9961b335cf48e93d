"""What stands in a released parameter's place: metadata stays readable, any read is a named error.

Torch on freed storage can segfault, or give garbage without a word. A tombstone has no storage at
all (a wrapper subclass), so whatever reaches for the bytes meets :class:`WeightReleasedError`
instead, whichever Python reference it came by and in whichever thread. What asks torch's C++ for an
address without asking the tensor (``torch.utils.dlpack.to_dlpack``) gets torch's RuntimeError.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from npu_backend.errors import WeightReleasedError

__all__ = ["Tombstone", "bury", "is_tombstone"]

_RECORD = "_npu_backend_released"

_METADATA_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "nbytes",
    "itemsize",
    "requires_grad",
    "is_leaf",
    "grad",
    "is_sparse",
    "is_quantized",
    "is_meta",
    "is_cpu",
    "is_cuda",
    "name",
)
_METADATA_METHODS = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "get_device",
    "requires_grad_",
    "__len__",
    "__hash__",
)
_METADATA_SETTERS = ("requires_grad", "grad")
_METADATA_FUNCTIONS = ("numel", "is_floating_point", "is_complex", "is_signed")


def _allowed() -> frozenset[Any]:
    """Return the functions, as ``__torch_function__`` sees them, that read no byte."""
    tensor = torch.Tensor
    found = [getattr(getattr(tensor, n, None), "__get__", None) for n in _METADATA_PROPERTIES]
    found += [getattr(getattr(tensor, n, None), "__set__", None) for n in _METADATA_SETTERS]
    found += [getattr(tensor, n, None) for n in _METADATA_METHODS]
    found += [getattr(torch, n, None) for n in _METADATA_FUNCTIONS]
    # What this torch does not have is None.
    return frozenset(f for f in found if f is not None)


_ALLOWED = _allowed()


class Tombstone(torch.Tensor):
    """A tensor without bytes; every read raises :class:`WeightReleasedError`."""

    # Set on the instance, so that it travels with the attributes of the parameter it replaces.
    _npu_backend_released: Mapping[str, Any]

    @staticmethod
    def like(
        tensor: torch.Tensor, *, layer: int, weight: str, why: Sequence[str], remedy: str
    ) -> Tombstone:
        """Return a tombstone of a tensor's name, shape, strides, dtype and device.

        Args:
            tensor: The tensor that is about to go.
            layer: The layer's id.
            weight: The weight's name in the plan.
            why: Why it was released.
            remedy: What whoever reads it should do.
        """
        stone: Tombstone = torch.Tensor._make_wrapper_subclass(
            Tombstone,
            tensor.shape,
            strides=tensor.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            requires_grad=False,
        )
        # What goes past every Python class (to_dlpack) asks the storage for its address.
        guard = getattr(torch._C, "_set_throw_on_mutable_data_ptr", None)
        if guard is not None:
            guard(stone)
        # Loader metadata of the host (weight_loader and the like) stays with the parameter.
        stone.__dict__.update(tensor.__dict__)
        stone.__dict__[_RECORD] = {
            "layer": layer,
            "weight": weight,
            "why": tuple(why),
            "remedy": remedy,
        }
        if isinstance(tensor, torch.nn.Parameter):
            # What nn.Parameter's isinstance() looks at, so that modules go on listing it.
            stone.__dict__["_is_param"] = True
        return stone

    def _refuse(self, what: str) -> NoReturn:
        record = self.__dict__.get(_RECORD, {})
        raise WeightReleasedError(
            f"a released weight was about to be read: {what}",
            layer=record.get("layer"),
            weight=record.get("weight"),
            why=record.get("why", ()),
            remedy=record.get("remedy"),
        )

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _ALLOWED:
            _find(args, kwargs)._refuse(_name(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **dict(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        _find(args, kwargs)._refuse(_name(func))

    def __tensor_flatten__(self) -> NoReturn:
        # torch.compile asks a wrapper for its inner tensors; there are none.
        self._refuse("torch.compile")

    @staticmethod
    def __tensor_unflatten__(*_: Any) -> NoReturn:
        raise WeightReleasedError("a released weight was about to be rebuilt")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        record = self.__dict__.get(_RECORD, {})
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype, device = tuple(self.shape), self.dtype, self.device
        return (
            f"Tombstone(layer {record.get('layer')}, {record.get('weight')}, released; "
            f"shape={shape}, dtype={dtype}, device='{device}')"
        )

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("pickling, as torch.save and copy.copy do")

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse("copy.deepcopy")

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        # The one method that torch does not offer to __torch_function__.
        self._refuse("set_")


def _name(func: Callable[..., Any]) -> str:
    owner = getattr(func, "__self__", None)
    name = getattr(func, "__name__", None)
    if name in ("__get__", "__set__") and owner is not None:
        return f"Tensor.{getattr(owner, '__name__', 'attribute')}"
    return str(name or func)


def _find(args: Iterable[Any], kwargs: Mapping[str, Any] | None) -> Tombstone:
    """Return the first tombstone among arguments, looking into lists and tuples."""
    todo = [*args, *(kwargs or {}).values()]
    for item in todo:
        if isinstance(item, Tombstone):
            return item
        if isinstance(item, list | tuple):
            todo.extend(item)
        elif isinstance(item, dict):
            todo.extend(item.values())
    raise WeightReleasedError("a released weight was about to be read")


def is_tombstone(tensor: object) -> bool:
    """Whether a tensor's bytes were released by this project."""
    return isinstance(tensor, Tombstone)


def bury(tensor: torch.Tensor, stone: Tombstone, *, keep_storage: bool = False) -> str:
    """Make the very object ``tensor`` a tombstone and give up its bytes.

    All Python references to the object see the tombstone, for it is the same object; the storage
    dies with its last tensor. Where a host's C++ keeps the storage it is resized to zero as well.

    Args:
        tensor: The tensor or parameter to release; :func:`unswappable` must have nothing to say.
        stone: Its tombstone, made before, so that nothing can fail here. The caller must drop it.
        keep_storage: The host keeps the storage: resize it, for it does not die.

    Returns:
        ``swapped`` or ``resized``.
    """
    storage = tensor.untyped_storage() if keep_storage else None
    _swap(tensor, stone)
    if storage is None:
        return "swapped"
    storage.resize_(0)
    return "resized"


def raise_up(buried: torch.Tensor, tensor: torch.Tensor, kind: type[torch.Tensor]) -> None:
    """Make the very object ``buried`` the given tensor; loader metadata stays with the object.

    Args:
        buried: The tombstone.
        tensor: What comes back. The caller must drop it.
        kind: The class that the object had, a host's own subclass of Parameter say.
    """
    kept = {k: v for k, v in buried.__dict__.items() if k not in (_RECORD, "_is_param")}
    _swap(buried, tensor)
    buried.__class__ = kind
    buried.__dict__.update(kept)


def unswappable(tensor: torch.Tensor) -> str | None:
    """Return in words why a tensor object cannot become a tombstone, or None.

    Whatever in C++ holds the object beside Python (an autograd graph, a view's base) would go on
    reading the bytes, past any class of Python, and end the process.
    """
    if not hasattr(torch._C, "_swap_tensor_impl"):
        return f"torch {torch.__version__}, which cannot swap tensors (2.3 and later can)"
    if _uses(tensor) > 1:
        # A graph in a cycle that nobody holds any more does not count.
        gc.collect()
    if _uses(tensor) > 1:
        return "torch's C++, which holds the very tensor (an autograd graph, or a view of it)"
    return None


def _uses(tensor: torch.Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return int(tensor._use_count())  # type: ignore[attr-defined]


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange what two tensor objects are; their identities stay.

    As ``torch.utils.swap_tensors``, but weak references do not matter: torch.compile's guards hold
    one on each parameter, and they shall see the change.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)
