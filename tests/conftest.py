"""What every test shares. Plain ``import torch`` must work with torch-npu installed and no CANN."""

from __future__ import annotations

import os

from hypothesis import settings

os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

settings.register_profile("default", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))
