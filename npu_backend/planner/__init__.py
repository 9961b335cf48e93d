"""The planner: ``(layers, deployment, answers) -> ModelPlan``. Pure: no torch, no globals, no
environment reads.

``tables`` knows cells and coverage, ``answers`` sorts what plugins said, ``readers`` knows who
reads a weight, ``requests`` knows explicit wishes, ``site`` decides one table, ``release`` decides
fates, ``model`` puts them together; ``bmm`` decides one matmul by itself.
"""

from npu_backend.planner.bmm import BmmPlan, matmul, plan_bmm
from npu_backend.planner.model import Answers, plan_model

__all__ = ["Answers", "BmmPlan", "matmul", "plan_bmm", "plan_model"]
