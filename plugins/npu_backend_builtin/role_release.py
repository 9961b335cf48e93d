"""role_release: which weights may go, by disaggregation role and by who still reads them.

Prefill and decode workers release all that nothing reachable reads. A worker without a role (null)
releases only what *no* phase reads, reachable or not: it may be asked to do anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from npu_backend import Deployment, Keep, MlaLayer, Phase, Release, Role, hookimpl

Votes = tuple[Release | Keep, ...]


def _null_keeps(name: str, layer: MlaLayer, deployment: Deployment) -> str | None:
    """Return why a worker without a role keeps a weight that nothing reachable reads."""
    reach = deployment.reach(is_nextn=layer.is_nextn)
    missing = [p.value for p in (Phase.EXTEND, Phase.DECODE) if p not in reach]
    if not missing:
        return None
    if name.startswith("kv_b_proj") and layer.has_indexer:
        # No phase of a DSA layer reads kv_b_proj once w_kc and w_vc are made of it.
        return None
    return (
        f"a worker without a role keeps what any phase could read, and {' and '.join(missing)} "
        "would"
    )


@lru_cache(maxsize=512)
def _votes(layer: MlaLayer, deployment: Deployment, unread: tuple[tuple[str, bool], ...]) -> Votes:
    votes: list[Release | Keep] = []
    for name, promised in unread:
        if deployment.role is Role.NULL and (why := _null_keeps(name, layer, deployment)):
            votes.append(Keep(name, why))
        elif promised:
            votes.append(Release(name, "only a promise reads it, and it can be brought back"))
        else:
            votes.append(Release(name, f"role {deployment.role}: nothing reachable reads it"))
    return tuple(votes)


@hookimpl
def release_weights(
    layer: MlaLayer, deployment: Deployment, readers: Mapping[str, tuple[str, ...]]
) -> Votes:
    """Vote on every loaded weight without a reader that counts."""
    unread = []
    for name in layer.weight_names:
        who = readers.get(name, ())
        if not who:
            unread.append((name, False))
        elif deployment.restore and all(deployment.is_promised(r) for r in who):
            unread.append((name, True))
    return _votes(layer.kind, deployment, tuple(unread))
