"""Has the name of another distribution's plugin."""

from npu_backend import Offer, hookimpl


@hookimpl
def select_bmm_kernel(bmm):
    return Offer(strategy="another_bmm", impl="fake_another_works:Kernel")
