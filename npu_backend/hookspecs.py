"""The three hooks, nothing else.

A plugin is a module (or an object) whose functions carry :data:`hookimpl` and one of the names
below. It is found through an entry point of the group ``npu_backend.plugins``. An implementation
may leave out arguments that it does not need; it may not give them defaults.

Hooks are called while planning, never in a forward pass. What raises or returns a wrong type is
recorded as ``plugin.failed`` and harms nobody else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pluggy import HookimplMarker, HookspecMarker

from npu_backend.deployment import Deployment
from npu_backend.model.records import MlaLayer
from npu_backend.offers import BmmSpec, Decline, Forbid, Keep, Offer, Release

__all__ = ["hookimpl", "hookspec", "release_weights", "select_bmm_kernel", "select_preprocess_path"]

hookspec = HookspecMarker("npu_backend")
hookimpl = HookimplMarker("npu_backend")
"""Marks a function as the implementation of the hook of its name.

Takes ``tryfirst=True``, ``trylast=True``, ``wrapper=True``, ``specname="HOOK"`` and
``optionalhook=True`` with pluggy's meaning. ``hookwrapper=True``, the old style, is refused.
"""


@hookspec
def select_preprocess_path(
    layer: MlaLayer, deployment: Deployment
) -> Offer | Decline | Forbid | Sequence[Offer | Decline | Forbid] | None:
    """Offer, decline or forbid strategies for what runs before attention in one layer.

    Called once for each MLA layer of each plan, before any BMM kernel is asked for. Layers that
    differ in their number only are asked one by one.

    Args:
        layer: The layer: dimensions, quantization of each projection, KV layout, indexer.
        deployment: Where and how it is served: role, chip, versions, sizes, phases, promises.

    Returns:
        One record or a sequence of them. :class:`~npu_backend.offers.Offer`: a strategy and the
        envelope where it is legal. :class:`~npu_backend.offers.Decline`: why the plugin's own
        strategy is not offered, all reasons and not the first.
        :class:`~npu_backend.offers.Forbid`: why no plugin's strategy of that name may serve.
        Reason codes are those of :data:`~npu_backend.offers.REASON_CODES`, or begin with the
        plugin's name or that of its distribution and a dot.

    None means:
        No opinion. Nothing of it stands in the plan. An empty sequence means the same.

    Order:
        All implementations are asked, the last registered first: third parties before built-ins.
        ``tryfirst`` and ``trylast`` move one inside this order. Each cell of the plan goes to the
        first legal offer that covers it, requested ones before all others. A ``wrapper=True``
        sees the list of answers and returns the list that counts.

    Example:
        >>> from npu_backend import Decline, Deployment, Envelope, MlaLayer, Offer, Reason, hookimpl
        >>> @hookimpl
        ... def select_preprocess_path(layer, deployment):
        ...     if layer.q_lora_rank is None:
        ...         why = Reason("dims.q_lora_rank", "the fused op starts from a latent query")
        ...         return Decline(strategy="vendor_path", reasons=why)
        ...     return Offer(
        ...         strategy="vendor_path",
        ...         impl="vendor.path:VendorPath",
        ...         envelope=Envelope(phases={"decode"}, tokens=(1, 1024)),
        ...         reads={"w_kc", "w_vc"},
        ...         uses={"v_up"},
        ...     )
        >>> layer = MlaLayer(
        ...     layer_id=0, hidden_size=2048, num_heads=16, kv_lora_rank=512,
        ...     qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ... )
        >>> answer = select_preprocess_path(layer, Deployment(role="decode"))
        >>> print(answer.reasons[0])
        dims.q_lora_rank: the fused op starts from a latent query
    """


@hookspec
def select_bmm_kernel(
    bmm: BmmSpec, deployment: Deployment
) -> Offer | Decline | Forbid | Sequence[Offer | Decline | Forbid] | None:
    """Offer, decline or forbid kernels for one of a layer's two batched matmuls.

    Called once for each :class:`~npu_backend.offers.BmmSpec` of each plan: per layer, for the
    sites that its paths use (``q_absorb`` with ``w_kc``, ``v_up`` with ``w_vc``), when the paths
    are known.

    Args:
        bmm: The matmul: its layer and site, B, K, N, dtypes, layouts, phases, row bound.
        deployment: Where and how it is served: role, chip, versions, sizes, phases, promises.

    Returns:
        The same records as :func:`select_preprocess_path` returns. ``uses``, ``kv_layouts`` and
        ``q_lora`` of an offer say nothing here; an envelope with ``contiguous=True`` makes the
        runtime replace the site's weight in place by a contiguous one.

    None means:
        No opinion. Nothing of it stands in the plan. An empty sequence means the same.

    Order:
        All implementations are asked, the last registered first: third parties before built-ins.
        ``tryfirst`` and ``trylast`` move one inside this order. Each range of rows goes to the
        first legal offer that covers it, requested ones before all others; what is over a
        kernel's limit falls to the next. A ``wrapper=True`` sees the list of answers and returns
        the list that counts.

    Example:
        >>> from npu_backend import BmmSpec, Envelope, MlaLayer, Offer, hookimpl
        >>> @hookimpl
        ... def select_bmm_kernel(bmm):
        ...     if bmm.site != "v_up":
        ...         return None
        ...     return Offer(
        ...         strategy="vendor_bmm",
        ...         impl="vendor.bmm:VendorBmm",
        ...         envelope=Envelope(tokens=(1, 512), contiguous=True),
        ...         reads={bmm.weight},
        ...     )
        >>> layer = MlaLayer(
        ...     layer_id=0, hidden_size=2048, num_heads=16, kv_lora_rank=512,
        ...     qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ... )
        >>> offer = select_bmm_kernel(BmmSpec(layer=layer, site="v_up", B=16, K=512, N=128))
        >>> offer.strategy, sorted(offer.reads), offer.envelope.tokens
        ('vendor_bmm', ['w_vc'], (1, 512))
    """


@hookspec
def release_weights(
    layer: MlaLayer, deployment: Deployment, readers: Mapping[str, tuple[str, ...]]
) -> Release | Keep | Sequence[Release | Keep] | None:
    """Vote on which weights of one layer may be freed once it is prepared.

    Called once for each MLA layer of each plan, when its paths and kernels are known.

    Args:
        layer: The layer: dimensions, quantization of each projection, KV layout, indexer.
        deployment: Where and how it is served: role, chip, versions, sizes, phases, promises.
        readers: Who reads each loaded weight: its name to readers such as ``absorb@extend``,
            ``v_up@decode``, ``indexer@decode``, ``host:mha@extend``, ``update`` or ``export``; an
            empty tuple where nobody does. Read-only.

    Returns:
        One vote or a sequence of them. :class:`~npu_backend.offers.Release`: the weight may go,
        and why. :class:`~npu_backend.offers.Keep`: it must stay, and why. A weight is released
        only with a vote to release, no vote to keep, no reader, and no living tensor on its
        storage; the last two are checked by the core whatever the votes are.

    None means:
        No vote. A weight that nobody votes on stays. An empty sequence means the same.

    Order:
        All implementations are asked, the last registered first. It decides only in which order
        the reasons stand in the plan: one vote to keep is enough, wherever it comes. A
        ``wrapper=True`` sees the list of answers and returns the list that counts.

    Example:
        >>> from npu_backend import Keep, Release, hookimpl
        >>> @hookimpl
        ... def release_weights(readers):
        ...     votes = [Release(w, "nothing reads it") for w, who in readers.items() if not who]
        ...     return [*votes, Keep("kv_b_proj", "a debugger of ours looks at it")]
        >>> for vote in release_weights({"w_kc": (), "w_vc": ("v_up@decode",)}):
        ...     print(type(vote).__name__, vote.weight, "-", vote.why)
        Release w_kc - nothing reads it
        Keep kv_b_proj - a debugger of ours looks at it
    """
