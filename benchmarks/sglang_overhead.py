"""What the routed call costs a step in SGLang, beside what SGLang's own router costs it.

SGLang 0.5.23's own code on the simulated NPU: its attention module, its hook registry, its
``NPUFusedMLAPreprocess``. The path that a step runs is a stand-in that returns a result made
before, so that nothing but the decision is timed:

* routed: SGLang's hooked ``npu_mla_preprocess`` on a module with a route - a direct call of the
  stand-in. The registry's wrapper, the hook, the lookup of phase and path, and the tuple that
  SGLang takes are all in it;
* SGLang's own: ``uses_mlaprolog()``, which ``npu_mla_preprocess`` asks and ``forward`` asks again
  in each layer and step, a regular expression over the quantization's ignore list.

Both take turns block by block in one run; a figure is the median of its blocks. Nothing here is a
test; the last line is the ratio that a budget is set on. Needs what ``tox -e sglang`` installs.

    python benchmarks/sglang_overhead.py [--blocks 60] [--calls 5000]
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
os.environ["SGLANG_NPU_USE_MLAPO"] = os.environ["NPU_BACKEND_STRICT"] = "1"
sys.path.append(str(Path(__file__).parents[1] / "tests" / "hosts_sglang"))

from dispatch import interleaved
from sglang_world.engine import HIDDEN, Model, Step, Worker, prepare, published
from sglang_world.start import start

# isort: split
import torch

IGNORED = (60, 183)
"""Lengths of ignore lists of published checkpoints; none of the entries is kv_b_proj."""
ROWS = 4


def _stand_in(route: Any, mode: int, hidden: torch.Tensor, batch: Any) -> Any:
    """Put a path that returns a made result in the place of a route's; return it."""
    made = route.paths[mode](hidden, batch.positions, batch.out_cache_loc)
    q_lora = None if route.other is None else route.other(hidden)

    def path(hidden: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor) -> Any:
        return made

    route.paths = tuple(path if n == mode else p for n, p in enumerate(route.paths))
    if route.other is not None:
        route.other = lambda hidden: q_lora
    return path


def _own_router(world: Any, attention: Any) -> Any:
    """Return SGLang's preprocess object of a module, as ``npu_mla_preprocess`` makes it."""
    return world.pre.NPUFusedMLAPreprocess(
        attention.fused_qkv_a_proj_with_mqa,
        attention.q_a_layernorm,
        attention.kv_a_layernorm,
        attention.q_b_proj,
        attention.w_kc,
        attention.rotary_emb,
        attention.layer_id,
        attention.num_local_heads,
        attention.qk_nope_head_dim,
        attention.qk_rope_head_dim,
        attention.v_head_dim,
        attention.quant_config,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=60)
    parser.add_argument("--calls", type=int, default=5000)
    arguments = parser.parse_args()
    blocks, calls = max(arguments.blocks, 30), arguments.calls
    torch.set_num_threads(1)

    world = start()
    prepare("npu_backend")
    with published(Model(quant="static"), "null") as server, torch.inference_mode():
        worker = Worker(server)
        worker.allocate()
        attention = worker.attentions[0]
        route = attention.__dict__["_npu_backend_route"]
        batch = worker.batch(Step(mode="DECODE", rows=ROWS, seen=8))
        hidden = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device="npu")
        mode = int(batch.forward_mode)
        path = _stand_in(route, mode, hidden, batch)
        own = _own_router(world, attention)
        variants: dict[str, Any] = {
            "direct": (path, (hidden, batch.positions, batch.out_cache_loc), calls),
            "routed": (
                world.npu_mod.npu_mla_preprocess,
                (attention, hidden, batch.positions, batch, None),
                calls,
            ),
        }
        for length in IGNORED:
            names = [f"model.layers.{n}.mlp.gate" for n in range(length)]
            predicate = _with_ignored(own, names)
            assert not predicate(), "one of the names is kv_b_proj"
            variants[f"own {length}"] = (predicate, (), max(calls // 50, 20))
        found = interleaved(variants, blocks)
    routing = found["routed"] - found["direct"]
    print(f"stand-in path, direct call: {found['direct']:.0f} ns")
    print(f"routed npu_mla_preprocess: +{routing:.0f} ns")
    for length in IGNORED:
        asked = 2 * found[f"own {length}"]
        print(f"uses_mlaprolog() twice, {length} ignored names: {asked:.0f} ns")
        print(f"  routing / own router: {routing / asked:.3f}")
    print(f"medians of {blocks} interleaved blocks of {calls} calls")
    ratio = routing / (2 * found[f"own {IGNORED[0]}"])
    print(f"routing / SGLang's own per-step predicate (budget 0.1): {ratio:.3f}")


def _with_ignored(own: Any, names: list[str]) -> Any:
    """Return ``uses_mlaprolog`` of a preprocess object whose quantization ignores these names."""
    import copy

    asked = copy.copy(own)
    asked.quant_config = copy.copy(own.quant_config)
    asked.quant_config.ignore = names
    return asked.uses_mlaprolog


if __name__ == "__main__":
    main()
