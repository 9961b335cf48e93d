"""Named by two entry points."""

from npu_backend import Offer, hookimpl


@hookimpl
def select_bmm_kernel(bmm):
    return Offer(strategy="same_bmm", impl="fake_same:Kernel")
