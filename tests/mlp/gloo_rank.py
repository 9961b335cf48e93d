"""One rank of four over gloo: every legal layout, then what is refused. Prints one JSON object.

The reference is the unsharded MLP in float64, written out here.
"""

from __future__ import annotations

import json
import sys
from itertools import product

from npu_backend.runtime import MlpGroups, ShardedMlp  # first: it imports torch the right way

import torch  # isort: skip
import torch.distributed as dist  # isort: skip

from npu_backend import (
    AttnTpOptions,
    DeploymentError,
    MlpLayer,
    MlpParallel,
    PlanMismatchError,
    mlp_shard_layout,
)

WORLD, HIDDEN, INNER, ROWS = 4, 32, 64, 5


def full_weights(kind):
    make = torch.Generator().manual_seed(len(kind))

    def draw(rows, columns):
        return torch.randn(rows, columns, generator=make) / columns**0.5

    return {
        "gate_proj": draw(INNER, HIDDEN),
        "up_proj": draw(INNER, HIDDEN),
        "down_proj": draw(HIDDEN, INNER),
    }


def unsharded(rows, full):
    x, w = rows.double(), {name: weight.double() for name, weight in full.items()}
    gate, up = x @ w["gate_proj"].T, x @ w["up_proj"].T
    return ((gate / (1 + torch.exp(-gate)) * up) @ w["down_proj"].T).float()


def rows_of(seed, count=ROWS):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(seed))


def refused(call):
    try:
        call()
    except PlanMismatchError as err:
        return err.to_dict()
    return None


def layer(kind):
    return MlpLayer(
        layer_id=0, kind=kind, hidden_size=HIDDEN, intermediate_size=INNER, dtype="float32"
    )


def every_layout(rank):
    found, impossible = {}, 0
    for kind, attn_tp, dp, ep, shared, dense, size in product(
        ("dense", "shared_experts"),
        (1, 2, 4),
        (False, True),
        (None, "ascend_fuseep"),
        (False, True),
        (False, True),
        (None, 1, 2, 4),
    ):
        parallel = MlpParallel(
            tp_size=WORLD, attn_tp_size=attn_tp, dp_attention=dp, ep_backend=ep, rank=rank
        )
        options = AttnTpOptions(
            enable_shared_experts_attn_tp=shared,
            enable_dense_mlp_attn_tp=dense,
            shared_experts_tp_size=size,
        )
        try:
            layout = mlp_shard_layout(layer(kind), options, parallel)
        except DeploymentError:
            impossible += 1
            continue
        found[kind, layout.group, layout.size, str(layout.communication)] = layout
    return found, impossible


def main(rank, store):
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=WORLD)
    parallel = MlpParallel(tp_size=WORLD, rank=rank)
    groups = MlpGroups(parallel)
    layouts, impossible = every_layout(rank)
    errors = []
    for key, layout in layouts.items():
        full = full_weights(layout.layer.kind)
        module = ShardedMlp.from_full(layout, full, group=groups.of(layout))
        # Rows as the layout says: the group's, equally many of one's own, or any of one's own.
        rows = {
            "same": rows_of(100 + layout.ranks.start),
            "own, equal number": rows_of(rank),
            "own": rows_of(rank, rank + 1),
        }[layout.rows]
        out = module(rows)
        assert out.shape == rows.shape
        error = (out - unsharded(rows, full)).abs().max().item()
        again = module(rows[:0])
        errors.append([*key, error, list(again.shape)])

    told = {}
    for key, layout in layouts.items():
        if layout.size == WORLD and key[1] in ("tp", "attn_tp"):
            module = ShardedMlp.from_full(
                layout, full_weights(layout.layer.kind), group=groups.of(layout)
            )
            name = f"{key[0]} {key[3]}"
            told[name] = refused(lambda m=module: m(rows_of(0, ROWS + (rank == 2))))
            told[f"{name} broken"] = refused(
                lambda m=module: m(rows_of(0).double() if rank == 1 else rows_of(0))
            )
            # After a refusal the group is as it was.
            rows = rows_of(7)
            error = (module(rows) - unsharded(rows, full_weights(layout.layer.kind))).abs().max()
            told[f"{name} after"] = error.item()
            unchecked = ShardedMlp.from_full(
                layout,
                full_weights(layout.layer.kind),
                group=groups.of(layout),
                check_rows=False,
            )
            assert torch.equal(unchecked(rows), module(rows))
            # A host that reduces by itself gets the parts of the sum.
            parts = module.partial(rows)
            dist.all_reduce(parts)
            assert torch.allclose(
                parts, unsharded(rows, full_weights(layout.layer.kind)), atol=1e-5
            )

    pairs = every_layout(rank)[0]["shared_experts", "shared_experts_tp", 2, "all-gather + reduce-scatter"]  # fmt: skip  # noqa: E501
    told["wrong group"] = refused(
        lambda: ShardedMlp.from_full(pairs, full_weights("dense"), group=dist.group.WORLD)
    )
    told["same object"] = groups.of(pairs) is groups.of(pairs)
    told["wrong rank"] = refused(
        lambda: MlpGroups(MlpParallel(tp_size=WORLD, rank=(rank + 1) % WORLD))
    )
    turned = tuple(reversed(range(WORLD)))
    told["turned"] = refused(
        lambda: MlpGroups(MlpParallel(tp_size=WORLD, rank=turned.index(rank)), turned)
    )
    told["wrong size"] = refused(lambda: MlpGroups(MlpParallel(tp_size=2)))

    # Two TP groups in one world (pipeline stages).
    stage = (0, 1) if rank < 2 else (2, 3)
    mine = MlpParallel(tp_size=2, rank=stage.index(rank))
    layout = mlp_shard_layout(layer("dense"), AttnTpOptions(), mine)
    full = full_weights("dense")
    module = ShardedMlp.from_full(layout, full, group=MlpGroups(mine, stage).of(layout))
    rows = rows_of(50 + stage[0])
    told["stages"] = (module(rows) - unsharded(rows, full)).abs().max().item()
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps({"errors": errors, "impossible": impossible, "told": told}))


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
