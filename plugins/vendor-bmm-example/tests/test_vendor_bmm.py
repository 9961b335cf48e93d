import vendor_bmm_example

from npu_backend.testing import BmmKernelConformance


class TestVendorBmm(BmmKernelConformance):
    plugin = vendor_bmm_example
    shapes = sorted(vendor_bmm_example.SHAPES)
    socs = ("A3",)
