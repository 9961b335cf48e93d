"""Where the vendor's kernel is offered, and why it is not elsewhere. Imports no torch."""

from npu_backend import BmmSpec, Decline, Deployment, Envelope, Offer, Reason, hookimpl

SHAPES = {(32, 512, 128), (64, 512, 128)}


@hookimpl
def select_bmm_kernel(bmm: BmmSpec, deployment: Deployment) -> Offer | Decline | None:
    if bmm.site != "v_up":
        return None
    if bmm.shape in SHAPES and deployment.soc.family == "A3":
        kernel = "vendor_bmm_example.kernel:VendorBmm"
        rows = Envelope(tokens=(1, 128))
        return Offer(strategy="vendor_bmm", impl=kernel, envelope=rows, reads=[bmm.weight])
    why = f"made for {sorted(SHAPES)} on A3, not {bmm.shape} on {deployment.soc.family}"
    return Decline(strategy="vendor_bmm", reasons=Reason("vendor-bmm-example.shape", why))
