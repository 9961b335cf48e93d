"""How dense MLPs and shared experts are split over ranks: options, layouts, bytes; no torch.

``options`` holds what a user may choose, ``parallel`` how a model is served, ``layout`` the one
decision, ``plan`` the layouts of a whole model, ``environment`` the variables that once did this.
"""

from npu_backend.mlp.layout import MlpCommunication, MlpShardLayout, mlp_shard_layout
from npu_backend.mlp.options import AttnTpOptions
from npu_backend.mlp.parallel import EP_BACKENDS, MlpParallel
from npu_backend.mlp.plan import MlpPlan, plan_mlp
from npu_backend.mlp.rules import RULES

__all__ = [
    "EP_BACKENDS",
    "RULES",
    "AttnTpOptions",
    "MlpCommunication",
    "MlpParallel",
    "MlpPlan",
    "MlpShardLayout",
    "mlp_shard_layout",
    "plan_mlp",
]
