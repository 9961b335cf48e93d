"""Compute for aten ops on the simulated device.

One generic kernel runs each op's CPU kernel on aliases of the device memory. Allocation, views and
resizing stay torch_npu's own, which is the point: its allocator, its statistics, its errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from npu_backend.testing.sim.alias import DEVICE_TYPE, alias, from_cpu, new_library
from npu_backend.testing.sim.kernels.float8 import FLOAT8, check_cast

__all__ = ["register"]

# torch_npu's own kernels: allocation, metadata, memory that never becomes a computed result.
_NATIVE = frozenset(
    {
        "as_strided",
        "as_strided_",
        "data",
        "empty",
        "empty_like",
        "empty_strided",
        "is_pinned",
        "is_set_to",
        "new_empty",
        "new_empty_strided",
        "_pin_memory",
        "pin_memory",
        "record_stream",
        "scaled_dot_product_attention",
        "resize_",
        "resize_as_",
        "_resize_output_",
        "set_",
        "set_data",
        "_reshape_alias",
        "view",
        "_unsafe_view",
        "_to_copy",
        "to",
    }
)

# Ops that take tensors of two devices on purpose. Index tensors may live on the host.
_CROSS_DEVICE = frozenset(
    {
        "copy_",
        "copy",
        "_copy_from",
        "_copy_from_and_resize",
        "index",
        "_unsafe_index",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "_local_scalar_dense",
        "set_",
    }
)


# Ops that move or compare elements without computing: 8-bit floats go through them as bytes where
# the CPU has no kernel for their dtype.
_MOVES = frozenset(
    {
        "cat",
        "constant_pad_nd",
        "flip",
        "gather",
        "index",
        "index_copy",
        "index_copy_",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "index_select",
        "masked_select",
        "repeat_interleave",
        "roll",
        "scatter",
        "scatter_",
        "stack",
        "_unsafe_index",
        "where",
    }
)
_COMPARISONS = frozenset({"equal"})
_CONVERSIONS = frozenset({"copy_", "copy", "_copy_from", "_copy_from_and_resize"})
"""Ops through which an element can change its dtype; the bytes of one dtype move on any chip."""


def _host_generator(generator: torch.Generator) -> torch.Generator:
    """Return a host generator for one call, and move the device generator on.

    The device generator's state is a seed and an offset; both choose the host's numbers, so that
    seeding, saving and restoring the device generator mean what they always do.
    """
    if generator.device.type != DEVICE_TYPE:
        return generator
    state = generator.get_state().clone()
    seed, offset = state.view(torch.int64).tolist()
    state.view(torch.int64)[1] = offset + 4
    generator.set_state(state)
    return torch.Generator().manual_seed((seed * 1_000_003 + offset) % (1 << 63))


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Apply a change to each tensor of a nested argument or result."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_mapped(item, change) for item in value)
    return value


def _without_float8(op: Any, args: Any, kwargs: Any, moves: bool) -> Any:
    """Run an op that the CPU lacks for 8-bit floats.

    An op that moves elements gets their bytes, and its result is of their dtype again; in place on
    the bytes of an alias is in place on the alias. A comparison gets them as fp32.
    """
    replaced: list[tuple[torch.Tensor, torch.Tensor]] = []

    def replace(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in FLOAT8:
            return tensor
        replaced.append((tensor, tensor.view(torch.uint8) if moves else tensor.float()))
        return replaced[-1][1]

    def restore(tensor: torch.Tensor) -> torch.Tensor:
        for original, stand_in in replaced:
            if stand_in is tensor:
                return original
        return tensor.view(replaced[0][0].dtype) if tensor.dtype == torch.uint8 else tensor

    host_args = _mapped(args, replace)
    host_kwargs = {key: _mapped(value, replace) for key, value in kwargs.items()}
    result = op(*host_args, **host_kwargs)
    return _mapped(result, restore) if moves else result


class _Call:
    """One call: device tensors in, CPU aliases through the op, device tensors out."""

    def __init__(self, name: str, cross_device: bool) -> None:
        self.name = name
        self.cross_device = cross_device
        self.device: torch.device | None = None
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.host: list[torch.Tensor] = []

    def to_host(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.device.type != DEVICE_TYPE:
                self.host.append(value)
                return value
            if self.device is None:
                self.device = value.device
            elif self.device != value.device and not self.cross_device:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {self.device} and {value.device}! ({self.name})"
                )
            for original, view in self.pairs:
                if original is value:
                    return view
            view = alias(value, self.name)
            self.pairs.append((value, view))
            return view
        if isinstance(value, list | tuple):
            return type(value)(self.to_host(item) for item in value)
        if isinstance(value, torch.device):
            if value.type != DEVICE_TYPE:
                return value
            self.device = value if value.index is not None else _current_device()
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return _host_generator(value)
        return value

    def check_devices(self) -> None:
        if self.cross_device or not self.pairs:
            return
        for tensor in self.host:
            # A zero-dimensional host tensor counts as a number, as everywhere in torch.
            if tensor.dim() > 0 and tensor.device.type == "cpu":
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two "
                    f"devices, {self.device} and {tensor.device}! ({self.name})"
                )

    def settle(self) -> None:
        """Carry a resize that the CPU kernel made to an output over to the device tensor."""
        for original, view in self.pairs:
            if view.shape != original.shape:
                original.resize_(view.shape)
                if view.numel():
                    alias(original, self.name).copy_(view)

    def to_device(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            for original, view in self.pairs:
                if view is value:
                    return original
            if any(tensor is value for tensor in self.host):
                return value
            if value.numel():
                base = value.untyped_storage().data_ptr()
                for original, view in self.pairs:
                    if view.numel() and view.untyped_storage().data_ptr() == base:
                        return torch.as_strided(
                            original, value.shape, value.stride(), value.storage_offset()
                        )
            return from_cpu(value, self.device or _current_device())
        if isinstance(value, list | tuple):
            return type(value)(self.to_device(item) for item in value)
        return value


def _current_device() -> torch.device:
    return torch.device(DEVICE_TYPE, torch.get_device_module(DEVICE_TYPE).current_device())


def _default_generator(device: torch.device | None) -> torch.Generator:
    index = (device or _current_device()).index
    generator: torch.Generator = torch.get_device_module(DEVICE_TYPE).default_generators[index]
    return generator


def _writes_out(op: Any) -> frozenset[str]:
    return frozenset(a.name for a in op._schema.arguments if a.is_out)


def _generic(op: Any, name: str) -> Callable[..., Any]:
    outs = _writes_out(op)
    base = op._schema.name.split("::")[1]
    cross_device, moves = base in _CROSS_DEVICE, base in _MOVES
    random = any(a.name == "generator" for a in op._schema.arguments)
    converts = base in _CONVERSIONS

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _Call(name, cross_device)
        host_args = call.to_host(args)
        host_kwargs = {key: call.to_host(value) for key, value in kwargs.items()}
        call.check_devices()
        if converts:
            check_cast(name, {a.dtype for a in host_args if isinstance(a, torch.Tensor)})
        if random and host_kwargs.get("generator") is None:
            host_kwargs["generator"] = _host_generator(_default_generator(call.device))
        try:
            result = op(*host_args, **host_kwargs)
        except RuntimeError as err:
            # NotImplementedError from torch 2.7 on.
            if "not implemented for 'Float8" in str(err) and (moves or base in _COMPARISONS):
                return call.to_device(_without_float8(op, host_args, host_kwargs, moves))
            if not outs or "resizable" not in str(err):
                raise
            # An alias cannot grow. Let the CPU kernel size fresh outputs; settle() copies them.
            for key in outs & host_kwargs.keys():
                for index, (original, view) in enumerate(call.pairs):
                    if view is host_kwargs[key]:
                        host_kwargs[key] = torch.empty(0, dtype=view.dtype)
                        call.pairs[index] = (original, host_kwargs[key])
            result = op(*host_args, **host_kwargs)
        call.settle()
        return call.to_device(result)

    return kernel


def _is_view(op: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def _computed(full: str) -> bool:
    """Whether the generic kernel serves an op: torch_npu computes it, or nobody does."""

    def has(key: str) -> bool:
        return bool(torch._C._dispatch_has_kernel_for_dispatch_key(full, key))

    explicit = has("CompositeExplicitAutograd") or has("CompositeImplicitAutograd")
    if has("PrivateUse1"):
        return has("CPU") or explicit or has("CompositeExplicitAutogradNonFunctional")
    return has("CPU") and not explicit


def _overload(rest: str) -> Any:
    packet, _, overload = rest.partition(".")
    return getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Attention from matmul and softmax: torch_npu's fused kernel is not simulated."""
    result: torch.Tensor = torch.ops.aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )[0]
    return result


def _softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    result: torch.Tensor = torch.ops.aten._softmax(x if dtype is None else x.to(dtype), dim, False)
    return result


def _log_softmax(x: torch.Tensor, dim: int, dtype: torch.dtype | None = None) -> torch.Tensor:
    x = x if dtype is None else x.to(dtype)
    result: torch.Tensor = torch.ops.aten._log_softmax(x, dim, False)
    return result


def register() -> tuple[Any, int]:
    """Register compute for every aten op that a CPU can serve.

    Returns:
        The library, which must stay alive, and the number of ops registered.
    """
    library = new_library("aten", "IMPL")
    count = 0
    for full in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = full.partition("::")
        packet = rest.partition(".")[0]
        if namespace != "aten" or packet in _NATIVE or packet.startswith("npu_"):
            continue
        if not _computed(full):
            continue
        op = _overload(rest)
        if op is None or _is_view(op):
            continue
        library.impl(rest, _generic(op, full), "PrivateUse1")
        count += 1
    for key in ("PrivateUse1", "AutogradPrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    # torch_npu puts kernels of its own before these composites, and looks for CANN's there.
    library.impl("softmax.int", _softmax, "AutogradPrivateUse1")
    library.impl("log_softmax.int", _log_softmax, "AutogradPrivateUse1")
    return library, count
