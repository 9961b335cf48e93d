"""Random lives of one bound layer beside a twin that is never released; run as a script.

    python sequences.py --seed 1 --count 100 --device cpu --log life.log

Each sequence is logged before it runs, so that a crash leaves its name. After every operation the
outputs are those of the twin, or a named error was raised; at the end nothing is left allocated.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import random
import sys
from pathlib import Path

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

PHASES = ("decode", "target_verify", "idle", "extend")
OPERATIONS = (
    ["step"] * 5
    + ["release"] * 3
    + ["restore", "update", "write", "save", "alias", "drop", "out of memory", "prepare", "again"]
    + ["lora", "role switch"]
)
DEPLOYMENTS = (
    {},
    {"promises": ["weight_update"]},
    {"promises": ["weight_update"], "restore": True},
    {"promises": ["role_switch"], "restore": True},
    {"promises": ["role_switch"]},
    {"promises": ["export"], "restore": True},
    {"promises": ["export"]},
    {"promises": ["lora"]},
    {"promises": ["lora"], "restore": True},
    {"promises": ["draft_sharing", "parallel_copies"], "restore": True},
    {"promises": ["parallel_copies"]},
    {"promises": ["local_prefill"]},
    {"role": "null"},
)


def _arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--device", choices=["cpu", "sim"], default="cpu")
    parser.add_argument("--log", type=Path, required=True)
    return parser.parse_args()


class Life:
    """One layer, its twin, and what happens to them."""

    def __init__(self, backend, torch, device, deployment, quant, contiguous):
        import npu_backend
        from npu_backend.runtime import LayerCache, bind
        from npu_backend.runtime.prove import seeded_weights

        self.torch, self.device, self.errors = torch, device, npu_backend.NpuBackendError
        layer = npu_backend.MlaLayer(
            layer_id=3, hidden_size=1024, num_heads=2, q_lora_rank=1536, kv_lora_rank=512,
            qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, quant=quant,
            w_kc_layout="contiguous" if contiguous else "strided",
        )  # fmt: skip
        given = {"role": "decode", "soc": "A3", "cann": "9.2.0", **deployment}
        plan = backend.plan([layer], npu_backend.Deployment(**given)).layers[0]
        from attrs import evolve

        kept = tuple(
            evolve(row, action="keep") if row.copy_of is None else row for row in plan.weights
        )
        made = seeded_weights(layer, 1)
        self.weights = made.to(device)
        if device.type == "cpu":
            self.weights = {n: t.clone(memory_format=torch.preserve_format)
                            for n, t in self.weights.items()}  # fmt: skip
        self.others = made.to(device)
        cache = [LayerCache.allocate(layer, 2, device=device, max_positions=64) for _ in "ab"]
        self.bound = bind(plan, self.weights, cache[0])
        self.twin = bind(plan.evolve(weights=kept), self.others, cache[1])
        self.twin.prepare()
        self.phase = npu_backend.Phase
        self.held = None
        self.failing = 0
        self.promises = deployment.get("promises", [])

    # --- operations; each may raise a named error ---

    def step(self, rng):
        self._both(self.phase(rng.choice(PHASES)), rng)

    def _both(self, phase, rng):
        rows, seed = rng.randint(1, 3), rng.randint(0, 99)
        mine = self._step(self.bound, phase, rows, seed)
        theirs = self._step(self.twin, phase, rows, seed)
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            assert a is None or self.torch.equal(a.cpu(), b.cpu()), "another output than the twin"

    def _step(self, bound, phase, rows, seed):
        torch = self.torch
        generator = torch.Generator().manual_seed(seed)
        hidden = torch.randn(rows, 1024, generator=generator).bfloat16().to(self.device)
        at = torch.arange(rows).to(self.device)
        result = bound.preprocess(hidden, at + 3, at + 9, phase=phase)
        return (*result, bound.v_up_for(phase)(result.q_nope))

    def prepare(self, rng):
        self.bound.prepare()

    def release(self, rng):
        ledger = self.bound.release(empty_cache=rng.random() < 0.2)
        assert ledger.agrees, ledger.difference()

    def restore(self, rng):
        self.bound.restore()

    def update(self, rng):
        self.bound.before_update()
        self.twin.before_update()
        self._write(rng.randint(0, 99))
        self.twin.after_update()
        self.again(rng)

    def again(self, rng):
        self.bound.after_update()

    def write(self, rng):
        """What a host does that knows no hooks: the twin is told, the layer is not."""
        if self.bound.released:
            name = self.bound.released[0]
            self.weights[name].copy_(self.torch.zeros(1))
            raise AssertionError("a released weight was written")
        self.twin.before_update()
        self._write(rng.randint(0, 99))
        self.twin.after_update()

    def _write(self, seed):
        torch = self.torch
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, tensor in self.weights.items():
                if name.endswith(".scale") or not tensor.dtype.is_floating_point:
                    continue
                values = torch.randn(tensor.shape, generator=generator) * tensor.shape[-1] ** -0.5
                for target in (tensor, self.others[name]):
                    target.copy_(values.to(tensor.dtype))

    def lora(self, rng):
        """Attach an adapter: its base is the original projection."""
        name = rng.choice(("fused_qkv_a_proj", "q_b_proj"))
        assert name not in self.bound.released or "lora" not in self.promises, "the base is gone"
        adapted = self.weights[name].float() + 1
        assert self.torch.equal(adapted.cpu(), self.others[name].float().cpu() + 1)

    def role_switch(self, rng):
        """A step of the other role, and one of the first again; with the promise both are served
        wherever a step of the first is."""
        decode = self.phase("decode")
        self._both(decode, rng)
        failing = self.failing
        try:
            self._both(self.phase("extend"), rng)
        except self.errors:
            assert failing or "role_switch" not in self.promises, "the promise is broken"
            raise
        self._both(decode, rng)

    def save(self, rng):
        for name, tensor in self.weights.items():
            buffer = io.BytesIO()
            if name in self.bound.released:
                try:
                    self.torch.save(tensor, buffer)
                except self.errors:
                    continue
                raise AssertionError(f"{name} is released and was saved")
            assert self.torch.equal(tensor.cpu(), self.others[name].cpu()), name

    def alias(self, rng):
        names = [n for n in sorted(self.weights) if n not in self.bound.released]
        self.held = self.weights[rng.choice(names)].data

    def drop(self, rng):
        self.held = None

    def out_of_memory(self, rng):
        self.failing = 1


def _run(life, names, rng, failures):
    for name in names:
        try:
            getattr(life, name.replace(" ", "_"))(rng)
        except life.errors as err:
            assert err.why, f"{name}: an error without a reason: {err}"
            failures[type(err).__name__] = failures.get(type(err).__name__, 0) + 1


def main():
    args = _arguments()
    if args.device == "sim":
        from npu_backend.testing import sim

        sim.start()
    import torch

    import npu_backend
    import npu_backend.runtime  # before torch: it decides how torch is imported

    device = torch.device("cpu")
    if args.device == "sim":
        torch.npu.config.allow_internal_format = True
        device = torch.device("npu", 0)
    _fail_on_demand(torch)
    backend = npu_backend.load(third_party=False)
    both = ("fused_qkv_a_proj", "q_b_proj")
    quants = ({}, {"q_b_proj": "w8a8-dynamic"}, dict.fromkeys(both, "w8a8-dynamic"))
    failures, baseline = {}, None
    log = args.log.open("a", buffering=1)
    for number in range(args.count):
        rng = random.Random(args.seed * 1_000_003 + number)
        deployment, quant = rng.choice(DEPLOYMENTS), rng.choice(quants)
        contiguous = rng.random() < 0.5
        names = ["prepare", *rng.choices(OPERATIONS, k=rng.randint(4, 12))]
        log.write(f"{args.seed}/{number} {deployment} {quant} {contiguous} {names}\n")
        life = Life(backend, torch, device, deployment, quant, contiguous)
        global current
        current = life
        with torch.no_grad():
            _run(life, names, rng, failures)
        current = life = None
        gc.collect()
        if device.type == "npu":
            stats = torch.npu.memory_stats()
            now = stats.get("requested_bytes.all.current", stats["allocated_bytes.all.current"])
            baseline = now if baseline is None else baseline
            assert now <= baseline, f"{now - baseline} bytes more than after the first sequence"
    print(f"ok {args.count} sequences, named errors {failures}")


current = None


def _fail_on_demand(torch):
    """Let the next copy or restored weight fail, where a sequence asked for it."""
    from npu_backend.runtime import release
    from npu_backend_builtin.impl.mlaprolog import MlaProlog

    right_on, right_prepare = release.HostCopy.on, MlaProlog.prepare

    def spend():
        if current is not None and current.failing:
            current.failing = 0
            raise RuntimeError("out of memory")

    def on(self, place):
        spend()
        return right_on(self, place)

    def prepared(self, weights):
        made = right_prepare(self, weights)
        spend()
        return made

    release.HostCopy.on = on
    MlaProlog.prepare = prepared


if __name__ == "__main__":
    main()
    sys.stdout.flush()
