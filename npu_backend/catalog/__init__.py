"""What is known of versions, chips, ops and models, as data with a source beside each figure.

:func:`load_catalog` is the one loader. Nothing here imports torch.
"""

from npu_backend.catalog.loader import Catalog, Figure, load_catalog
from npu_backend.catalog.tuning import KernelOrder
from npu_backend.catalog.versions import SocRecord, Versions

__all__ = ["Catalog", "Figure", "KernelOrder", "SocRecord", "Versions", "load_catalog"]
