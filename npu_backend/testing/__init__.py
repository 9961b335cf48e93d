"""What plugin authors test with: a simulated NPU and fixtures. Importing it imports no torch.

* :mod:`npu_backend.testing.sim` brings up a simulated NPU in a process.
* :mod:`npu_backend.testing.plugin` is the pytest plugin with ``npu_sim`` and ``npu_device``.
"""
