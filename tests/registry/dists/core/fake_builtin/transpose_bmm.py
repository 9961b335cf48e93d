"""Offers a kernel."""

from npu_backend import Offer, hookimpl


@hookimpl
def select_bmm_kernel(bmm):
    return Offer(strategy="torch.bmm", impl="fake_builtin.transpose_bmm:Kernel")
