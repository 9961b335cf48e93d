"""What a bound table costs a step, beside what hosts do inline for the same decision.

The kernel is a stand-in that returns its input, on CPU tensors, so that nothing but the decision
is timed: overhead = a call - a direct call of the kernel. All variants take turns block by block in
one run; a figure is the median of its blocks. Nothing here is a test; the last line is the ratio
that a budget is set on.

    python benchmarks/dispatch.py [--blocks 60] [--calls 20000]
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import npu_backend
from npu_backend import BmmSpec, Deployment, Envelope, MlaLayer, Offer, Phase
from npu_backend.api import Backend
from npu_backend.runtime import LayerCache, bind

# isort: split
import torch

HEADS, LATENT, V = 16, 512, 128
IGNORED = 60
"""Entries of a quantization's ignore list, none of which is kv_b_proj."""


def kernel(x: torch.Tensor) -> torch.Tensor:
    """Stand in for a kernel."""
    return x


def other_kernel(x: torch.Tensor) -> torch.Tensor:
    """Stand in for the kernel of longer steps."""
    return x


def path(hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Stand in for a path."""
    return hidden


def _impl(made: Callable[..., Any]) -> type:
    class Impl:
        def prepare(self, weights: Any) -> None:
            return None

        def bind(self, prepared: Any, cache: Any) -> Callable[..., Any]:
            return made

    return Impl


def _plugin(limit: int | None) -> Any:
    """Return a vendor's plugin: its path, and its kernels up to a row count and beyond it."""
    module = types.ModuleType("benchmark_kernels")
    for name, made in {"Short": kernel, "Long": other_kernel, "Path": path}.items():
        setattr(module, name, _impl(made))
    sys.modules[module.__name__] = module

    @npu_backend.hookimpl
    def select_bmm_kernel(bmm: BmmSpec) -> list[Offer]:
        short = Offer(
            strategy="short",
            impl="benchmark_kernels:Short",
            envelope=Envelope(tokens=(1, limit)),
            reads=[bmm.weight],
        )
        rest = Offer(strategy="long", impl="benchmark_kernels:Long", reads=[bmm.weight])
        return [short] if limit is None else [short, rest]

    @npu_backend.hookimpl
    def select_preprocess_path(layer: MlaLayer) -> Offer:
        return Offer(
            strategy="stand-in",
            impl="benchmark_kernels:Path",
            reads=["w_kc"],
            uses=["q_absorb", "v_up"],
        )

    hooks = {
        "select_bmm_kernel": staticmethod(select_bmm_kernel),
        "select_preprocess_path": staticmethod(select_preprocess_path),
    }
    return type("Vendor", (), hooks)()


def bound_layer(limit: int | None) -> Any:
    """Plan, bind and prepare a layer whose kernels and path are the stand-ins."""
    loaded = npu_backend.load(third_party=False)
    loaded.registry.register(_plugin(limit), name="bench", dist="bench", version="1.0")
    backend = Backend(loaded.registry, loaded.catalog)
    layer = MlaLayer(
        layer_id=0,
        hidden_size=256,
        num_heads=HEADS,
        kv_lora_rank=LATENT,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=V,
    )
    plan = backend.plan([layer], Deployment(role="decode", soc="A3", cann="9.1.0"))
    found = plan.layers[0]
    weights = {
        row.name: torch.empty(_shape(layer, row.name), dtype=torch.bfloat16, requires_grad=False)
        for row in found.weights
        if row.copy_of is None
    }
    bound = bind(found, weights, LayerCache.allocate(layer, 2, max_positions=64))
    bound.prepare()
    return bound


def _shape(layer: MlaLayer, name: str) -> tuple[int, ...]:
    from npu_backend.model.weights import loaded_weights

    return next(w.shape for w in loaded_weights(layer, 1) if w.name == name)


class Inline:
    """The decision as hosts take it inline, in every step."""

    def __init__(self) -> None:
        self.w_vc = torch.empty(HEADS, LATENT, V, dtype=torch.bfloat16)
        self.ignore = [f"model.layers.{i}.mlp.gate" for i in range(IGNORED)]

    def v_up(self, x: torch.Tensor) -> torch.Tensor:
        """Three comparisons before the kernel, as SGLang 0.5.23 has them (facts of its wheel)."""
        if (
            x.shape[0] >= 65536
            or x.shape[-1] * x.shape[-2] >= 65536
            or self.w_vc.shape[-1] >= 65536
        ):
            return other_kernel(x)
        return kernel(x)

    def path(
        self, hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
    ) -> torch.Tensor:
        """A regular expression over the ignore list before the path."""
        if any(re.fullmatch(r".*kv_b_proj", name) for name in self.ignore):
            return hidden
        return path(hidden, positions, slots)


def _block(call: Callable[..., Any], arguments: tuple[Any, ...], calls: int) -> float:
    each = range(calls)
    start = time.perf_counter()
    for _ in each:
        call(*arguments)
    return (time.perf_counter() - start) / calls


def interleaved(
    variants: Mapping[str, tuple[Callable[..., Any], tuple[Any, ...], int]], blocks: int
) -> dict[str, float]:
    """Return the median nanoseconds of a call of each variant, blocks taken in turn.

    Args:
        variants: Callable, arguments, and calls in a block, by name.
        blocks: Blocks of each.
    """
    times: dict[str, list[float]] = {name: [] for name in variants}
    names = list(variants)
    for index in range(blocks + 1):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            taken = _block(*variants[name])
            if index:  # the first round warms up
                times[name].append(taken)
    return {name: statistics.median(found) * 1e9 for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--calls", type=int, default=20000)
    arguments = parser.parse_args()
    blocks, calls = max(arguments.blocks, 30), arguments.calls
    torch.set_num_threads(1)

    single, two, inline = bound_layer(None), bound_layer(1024), Inline()
    for what, same in {
        "v_up is the bound kernel": single.v_up is kernel,
        "the path is the bound path": single.path_for("decode") is path,
    }.items():
        print(f"single-entry table: {what}, unwrapped: {same}")

    hidden = torch.zeros(4, 256, dtype=torch.bfloat16)
    step = (hidden, torch.arange(4), torch.arange(4))
    routed = interleaved(
        {
            "direct": (path, step, calls),
            "bound": (lambda *a: two.preprocess(*a, phase=Phase.DECODE), step, calls),
            "handed": (two.path_for("decode"), step, calls),
            "inline": (inline.path, step, max(calls // 50, 1)),
        },
        blocks,
    )
    predicate = routed["inline"] - routed["direct"]
    routing = routed["bound"] - routed["direct"]
    print(f"path, direct call: {routed['direct']:.0f} ns")
    print(f"path_for(phase), called as it is: {routed['handed'] - routed['direct']:+.0f} ns")
    print(f"layer.preprocess(phase=): +{routing:.0f} ns")
    print(f"predicate over {IGNORED} names: +{predicate:.0f} ns")
    print(f"path routing / predicate (budget 0.1): {routing / predicate:.3f}")

    x = torch.zeros(4, HEADS, LATENT, dtype=torch.bfloat16)
    found = interleaved(
        {
            "direct": (kernel, (x,), calls),
            "bound": (two.v_up, (x,), calls),
            "inline": (inline.v_up, (x,), calls),
        },
        blocks,
    )
    bound, compared = (found[name] - found["direct"] for name in ("bound", "inline"))
    print(f"kernel, direct call: {found['direct']:.0f} ns")
    print(f"bound two-entry call: +{bound:.0f} ns; three comparisons inline: +{compared:.0f} ns")
    print(f"medians of {blocks} interleaved blocks of {calls} calls")
    print(f"bound two-entry call / inline comparison (budget 0.5): {bound / compared:.2f}")


if __name__ == "__main__":
    main()
