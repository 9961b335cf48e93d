"""Plugins with one fault each, and the suites that must find it.

Run by test_conformance_faults.py in a process of its own; pytest does not collect it unasked.
The sound ones show that it is the fault that is found.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from npu_backend import (
    BmmSpec,
    Deployment,
    Envelope,
    Indexer,
    MlaLayer,
    Offer,
    Release,
    hookimpl,
)
from npu_backend.runtime import PreprocessResult
from npu_backend.testing import (
    BmmKernelConformance,
    PreprocessPathConformance,
    ReleasePolicyConformance,
)

B, K, N = 4, 128, 64
CANN = ("9.2.0",)
"""One release: this process's own, so that no other process is needed."""


class Kernel:
    """A sound kernel; its kin change one thing."""

    offer: ClassVar[dict[str, Any]] = {}
    soc: ClassVar[str] = "A3"
    cann: ClassVar[tuple[str, ...]] = CANN

    def prepare(self, weights: Any) -> Any:
        return None

    def bind(self, prepared: Any, cache: Any) -> Any:
        weight = prepared.weights["w_vc"]
        return lambda x: self.multiply(x, weight)

    def multiply(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return torch.einsum("thk,hkn->thn", x, w)


class Plugin:
    """Offers one kernel for one shape."""

    def __init__(self, kernel: type[Kernel], shape: tuple[int, int, int] = (B, K, N)) -> None:
        self.kernel, self.shape = kernel, shape

    @hookimpl
    def select_bmm_kernel(self, bmm: BmmSpec, deployment: Deployment) -> Offer | None:
        kernel = self.kernel
        if deployment.soc.family != kernel.soc or deployment.limits_cann not in kernel.cann:
            return None
        if bmm.site != "v_up" or bmm.shape != self.shape:
            return None
        said = {"reads": ["w_vc"], "envelope": Envelope(tokens=(1, 64)), **kernel.offer}
        impl = f"{__name__}:{kernel.__qualname__}"
        return Offer(strategy="planted", impl=impl, **said)


class Suite(BmmKernelConformance):
    name = dist = "planted"
    strategy = "planted"
    shapes = ((B, K, N),)
    layouts = ("contiguous",)
    rows = (1, 5)
    backends = ("eager",)


class TestSound(Suite):
    plugin = Plugin(Kernel)


# --- the twelve of the issue ---------------------------------------------------------------------


class WrongPerm(Kernel):
    def multiply(self, x, w):
        return torch.einsum("thk,hkn->thn", x.flip(1), w)


class TestWrongPerm(Suite):
    plugin = Plugin(WrongPerm)


class WrongScale(Kernel):
    def multiply(self, x, w):
        return super().multiply(x, w) * 1.02


class TestWrongScale(Suite):
    plugin = Plugin(WrongScale)


class TooWide(Kernel):
    """The op takes 1024 rows."""

    offer: ClassVar = {"envelope": Envelope(tokens=(1, 1025), contiguous=True)}

    def bind(self, prepared, cache):
        weight, op = prepared.weights["w_vc"], prepared.ops.batch_matmul_transpose

        def kernel(x):
            out = x.new_empty((x.shape[0], weight.shape[0], weight.shape[2]))
            op(x.contiguous(), weight, out)
            return out

        return kernel


class TestTooWide(Suite):
    plugin = Plugin(TooWide)


class UndeclaredRead(Kernel):
    """Says that it multiplies with a copy, so w_vc may go, and multiplies with w_vc."""

    offer: ClassVar = {"reads": (), "copies": ["w_vc"], "reads_once": ["w_vc"]}

    def prepare(self, weights):
        self.weight = weights["w_vc"]
        return {"copy": weights["w_vc"].clone()}

    def bind(self, prepared, cache):
        return lambda x: self.multiply(x, self.weight)


class TestUndeclaredRead(Suite):
    plugin = Plugin(UndeclaredRead)


class MutatesInput(Kernel):
    def multiply(self, x, w):
        out = super().multiply(x, w)
        x.mul_(0.5)
        return out


class TestMutatesInput(Suite):
    plugin = Plugin(MutatesInput)


class ViewOfInput(Kernel):
    def multiply(self, x, w):
        out = x[..., : w.shape[2]]
        return out.copy_(super().multiply(x, w))


class TestViewOfInput(Suite):
    plugin = Plugin(ViewOfInput)


class WrongDtype(Kernel):
    def multiply(self, x, w):
        return torch.einsum("thk,hkn->thn", x.float(), w.float())


class TestWrongDtype(Suite):
    plugin = Plugin(WrongDtype)
    workspace = 1 << 20  # what it widens is not what is looked for


class NonDeterministic(Kernel):
    """Off by less than is tolerated, each time by something else."""

    def multiply(self, x, w):
        out = torch.einsum("thk,hkn->thn", x.float(), w.float())
        return (out * (1 + 1e-3 * torch.rand_like(out))).bfloat16()


class TestNonDeterministic(Suite):
    plugin = Plugin(NonDeterministic)
    workspace = 1 << 20


class AllocatesInStep(Kernel):
    def multiply(self, x, w):
        return super().multiply(x, w.clone())


class TestAllocatesInStep(Suite):
    plugin = Plugin(AllocatesInStep)


class GraphBreak(Kernel):
    def multiply(self, x, w):
        out = super().multiply(x, w)
        return out if bool((x.sum() == x.sum()).all()) else out.clone()


class TestGraphBreak(Suite):
    plugin = Plugin(GraphBreak)


class IgnoresStrides(Kernel):
    """What an op that takes raw pointers computes."""

    def multiply(self, x, w):
        _, heads, depth = x.shape
        raw = torch.as_strided(x, x.shape, (heads * depth, depth, 1), x.storage_offset())
        return super().multiply(raw, w)


class TestIgnoresStrides(Suite):
    plugin = Plugin(IgnoresStrides)


class LiesAboutCann(Kernel):
    """B x K = 65536 is taken from CANN 9.1 on."""

    cann = ("9.0.0", "9.2.0")

    def bind(self, prepared, cache):
        weight, op = prepared.weights["w_vc"], prepared.ops.npu_transpose_batchmatmul
        return lambda x: op(x, weight, perm_x1=(1, 0, 2), perm_x2=(0, 1, 2), perm_y=(1, 0, 2))


class TestLiesAboutCann(Suite):
    plugin = Plugin(LiesAboutCann, (128, 512, 128))
    shapes = ((128, 512, 128),)


# --- and more ------------------------------------------------------------------------------------


class TestClaimsMoreThanItOffers(Suite):
    """Claimed for two releases, offered on one."""

    plugin = Plugin(Kernel)
    canns = ("9.1.0", "9.2.0")


class TestOffersMoreThanItClaims(Suite):
    plugin = Plugin(LiesAboutCann)
    canns = ("9.2.0",)


class NeedlessRead(Kernel):
    """A weight that is declared as read and is not stays in memory for nothing."""

    offer: ClassVar = {"reads": ["w_vc"], "copies": ["w_vc"]}

    def prepare(self, weights):
        return {"copy": weights["w_vc"].clone()}

    def bind(self, prepared, cache):
        weight = prepared["copy"]
        return lambda x: self.multiply(x, weight)


class TestNeedlessRead(Suite):
    plugin = Plugin(NeedlessRead)


class OneBuffer(Kernel):
    """Every result lies where the last one did."""

    def bind(self, prepared, cache):
        weight = prepared.weights["w_vc"]
        buffer = weight.new_empty((64, B, N))
        return lambda x: buffer[: x.shape[0]].copy_(self.multiply(x, weight))


class TestOneBuffer(Suite):
    plugin = Plugin(OneBuffer)


class Hoards(Kernel):
    """Keeps what it computed."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []

    def multiply(self, x, w):
        out = super().multiply(x, w)
        if not torch.compiler.is_compiling():
            self.kept.append(out)
        return out


class TestHoards(Suite):
    plugin = Plugin(Hoards)


class ChangesWeight(Kernel):
    """Scales the loaded weight in place while preparing, and takes it back in each step."""

    def prepare(self, weights):
        weights["w_vc"].mul_(2)

    def multiply(self, x, w):
        return super().multiply(x, w) * 0.5


class TestChangesWeight(Suite):
    plugin = Plugin(ChangesWeight)


class WideNeighbour(Plugin):
    """Offers K + 1 as well, where it drops the last component."""

    @hookimpl
    def select_bmm_kernel(self, bmm, deployment):
        self.shape = bmm.shape if bmm.K in (K, K + 1) and (bmm.B, bmm.N) == (B, N) else (B, K, N)
        return super().select_bmm_kernel(bmm, deployment)


class DropsLast(Kernel):
    def multiply(self, x, w):
        return super().multiply(x[..., :K], w[:, :K])


class TestWideNeighbour(Suite):
    plugin = WideNeighbour(DropsLast)


class Nothing(Plugin):
    @hookimpl
    def select_bmm_kernel(self, bmm, deployment):
        return None


class TestOffersNothing(Suite):
    plugin = Nothing(Kernel)


class Raises(Plugin):
    @hookimpl
    def select_bmm_kernel(self, bmm, deployment):
        raise RuntimeError("a fault of the plugin")


class TestRaises(Suite):
    plugin = Raises(Kernel)


# --- preprocess paths ----------------------------------------------------------------------------


class Step:
    """A sound path, taken apart so that one piece can change."""

    offer: ClassVar[dict[str, Any]] = {}

    def prepare(self, weights):
        return None

    def norm(self, x, gamma, epsilon):
        wide = x.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
        return (wide * scale * gamma.float()).to(x.dtype)

    def rotate(self, x, cos, sin):
        half = torch.cat((x[..., 0::2], x[..., 1::2]), -1).float()
        first, second = half.chunk(2, -1)
        turned = half * cos.float() + torch.cat((-second, first), -1) * sin.float()
        return turned.to(x.dtype)

    def down(self, hidden, weight):
        return hidden @ weight.t()

    def slots(self, slot_mapping):
        return slot_mapping

    def result(self, hidden, q_nope, q_pe, q_lora):
        return PreprocessResult(q_nope, q_pe, q_lora)

    def weight(self, prepared):
        return prepared.weights["q_b_proj"]

    def bind(self, prepared, cache):
        layer, given, heads = prepared.layer, prepared.weights, prepared.local_heads
        fused, up, absorb = given["fused_qkv_a_proj"], self.weight(prepared), prepared.q_absorb
        latent, rope, nope = layer.kv_lora_rank, layer.qk_rope_head_dim, layer.qk_nope_head_dim
        widths = [fused.shape[0] - latent - rope, latent, rope]
        gammas = given["q_a_layernorm"], given["kv_a_layernorm"]
        tables = cache.tables()
        k_nope, k_rope = cache.k_nope.view(-1, latent), cache.k_rope.view(-1, rope)

        def path(hidden_states, positions, slot_mapping):
            cos, sin = (table[positions] for table in tables)
            low, kv, key = torch.split(self.down(hidden_states, fused), widths, -1)
            q_lora = self.norm(low, gammas[0], layer.rms_norm_eps)
            q = (q_lora @ up.t()).view(-1, heads, nope + rope)
            slots = self.slots(slot_mapping)
            k_nope.index_copy_(0, slots, self.norm(kv, gammas[1], layer.rms_norm_eps))
            k_rope.index_copy_(0, slots, self.rotate(key, cos, sin))
            q_pe = self.rotate(q[..., nope:], cos[:, None], sin[:, None])
            return self.result(hidden_states, absorb(q[..., :nope]), q_pe, q_lora)

        return path


class PathPlugin:
    def __init__(self, step: type[Step]) -> None:
        self.step = step

    @hookimpl
    def select_preprocess_path(self, layer: MlaLayer, deployment: Deployment) -> Offer | None:
        if (deployment.soc.family, deployment.limits_cann) != ("A3", CANN[0]):
            return None
        if layer.q_lora_rank is None:
            return None
        said = {
            "reads": ["fused_qkv_a_proj", "q_b_proj"],
            "envelope": Envelope(phases={"decode", "idle"}, tokens=(1, 16)),
            "uses": ["q_absorb", "v_up"],
            "q_lora": "float",
            **self.step.offer,
        }
        impl = f"{__name__}:{self.step.__qualname__}"
        return Offer(strategy="planted", impl=impl, **said)


DIMS = {
    "layer_id": 0,
    "hidden_size": 64,
    "num_heads": 4,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 24,
}


class PathSuite(PreprocessPathConformance):
    name = dist = "planted"
    strategy = "planted"
    layers = (MlaLayer(**DIMS, q_lora_rank=32, indexer=Indexer("own")),)
    refused = (MlaLayer(**DIMS),)
    backends = ("eager",)
    devices = ("sim",)


class TestSoundPath(PathSuite):
    plugin = PathPlugin(Step)
    devices = ("cpu", "sim")


class PathWrongScale(Step):
    def norm(self, x, gamma, epsilon):
        return super().norm(x, gamma, epsilon) * 1.05


class TestPathWrongScale(PathSuite):
    plugin = PathPlugin(PathWrongScale)


class PathWrongRope(Step):
    """Leaves keys and queries interleaved where the cache is in halves."""

    def rotate(self, x, cos, sin):
        turned = super().rotate(x, cos, sin)
        return torch.stack(turned.chunk(2, -1), -1).flatten(-2)


class TestPathWrongRope(PathSuite):
    plugin = PathPlugin(PathWrongRope)


class PathWrongDtype(Step):
    def result(self, hidden, q_nope, q_pe, q_lora):
        return PreprocessResult(q_nope.float(), q_pe, q_lora)


class TestPathWrongDtype(PathSuite):
    plugin = PathPlugin(PathWrongDtype)


class PathUndeclaredRead(Step):
    """Says that it works with a copy of q_b_proj, and reads the original."""

    offer: ClassVar = {"reads": ["fused_qkv_a_proj"], "copies": ["q_b_proj"]}

    def prepare(self, weights):
        self.kept = weights["q_b_proj"]
        return {"copy": weights["q_b_proj"].clone()}

    def weight(self, prepared):
        return self.kept


class TestPathUndeclaredRead(PathSuite):
    plugin = PathPlugin(PathUndeclaredRead)


class PathMutatesInput(Step):
    def result(self, hidden, q_nope, q_pe, q_lora):
        hidden.zero_()
        return PreprocessResult(q_nope, q_pe, q_lora)


class TestPathMutatesInput(PathSuite):
    plugin = PathPlugin(PathMutatesInput)


class PathWritesElsewhere(Step):
    """Writes every latent into the next slot as well."""

    def bind(self, prepared, cache):
        path, k_rope = super().bind(prepared, cache), cache.k_rope.view(-1, 16)

        def both(hidden_states, positions, slot_mapping):
            found = path(hidden_states, positions, slot_mapping)
            k_rope[slot_mapping.max() + 1] = 0
            return found

        return both


class TestPathWritesElsewhere(PathSuite):
    plugin = PathPlugin(PathWritesElsewhere)


class PathViewOfInput(Step):
    """Puts the compressed query where the hidden states were."""

    def result(self, hidden, q_nope, q_pe, q_lora):
        return PreprocessResult(q_nope, q_pe, hidden[:, : q_lora.shape[1]].copy_(q_lora))


class TestPathViewOfInput(PathSuite):
    plugin = PathPlugin(PathViewOfInput)


class PathNonDeterministic(Step):
    def result(self, hidden, q_nope, q_pe, q_lora):
        return PreprocessResult(q_nope * (1 + 1e-2 * torch.rand_like(q_nope)), q_pe, q_lora)


class TestPathNonDeterministic(PathSuite):
    plugin = PathPlugin(PathNonDeterministic)


class PathAllocates(Step):
    def down(self, hidden, weight):
        return hidden @ weight.t().contiguous()


class TestPathAllocates(PathSuite):
    plugin = PathPlugin(PathAllocates)


class PathGraphBreak(Step):
    def slots(self, slot_mapping):
        return slot_mapping if int(slot_mapping[0]) >= 0 else slot_mapping.abs()


class TestPathGraphBreak(PathSuite):
    plugin = PathPlugin(PathGraphBreak)


class PathIgnoresStrides(Step):
    def down(self, hidden, weight):
        raw = torch.as_strided(hidden, hidden.shape, (hidden.shape[1], 1), hidden.storage_offset())
        return raw @ weight.t()


class TestPathIgnoresStrides(PathSuite):
    plugin = PathPlugin(PathIgnoresStrides)


class PathTooWide(Step):
    """Takes 15 rows and says 16."""

    def down(self, hidden, weight):
        return super().down(hidden, weight) * (1 if hidden.shape[0] < 16 else 2)

    def norm(self, x, gamma, epsilon):
        return super().norm(x, gamma, epsilon) * (1 if x.shape[0] < 16 else 2)


class TestPathTooWide(PathSuite):
    plugin = PathPlugin(PathTooWide)


class TestPathServesTheRefused(PathSuite):
    plugin = PathPlugin(Step)
    refused = PathSuite.layers


# --- release policies ----------------------------------------------------------------------------


class Policy:
    """A sound policy: what nobody reads may go."""

    @hookimpl
    def release_weights(self, layer, deployment, readers):
        return [Release(name, "unread") for name, who in readers.items() if not who]


class PolicySuite(ReleasePolicyConformance):
    name = dist = "planted"
    layers = ReleasePolicyConformance.layers[:1]
    devices = ("cpu",)


class TestSoundPolicy(PolicySuite):
    plugin = Policy()


class FreesWhatIsRead(Policy):
    @hookimpl
    def release_weights(self, layer, deployment, readers):
        return [Release(name, "why not") for name in readers]


class TestFreesWhatIsRead(PolicySuite):
    plugin = FreesWhatIsRead()


class ForgetsExport(Policy):
    @hookimpl
    def release_weights(self, layer, deployment, readers):
        return [Release(n, "unread") for n, who in readers.items() if set(who) <= {"export"}]


class TestForgetsExport(PolicySuite):
    plugin = ForgetsExport()


class ByNumber(Policy):
    """Twins do not have the same votes."""

    @hookimpl
    def release_weights(self, layer, deployment, readers):
        if layer.layer_id % 2 == 0:
            return None
        return super().release_weights(layer, deployment, readers)


class TestByNumber(PolicySuite):
    plugin = ByNumber()


class Slip(Policy):
    @hookimpl
    def release_weights(self, layer, deployment, readers):
        return [*super().release_weights(layer, deployment, readers), Release("w_kv", "a slip")]


class TestSlip(PolicySuite):
    plugin = Slip()


class Silent(Policy):
    @hookimpl
    def release_weights(self, layer, deployment, readers):
        return None


class TestSilent(PolicySuite):
    plugin = Silent()
