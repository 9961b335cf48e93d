"""Conformance suites: pytest classes that a plugin's tests subclass.

A suite asks the plugin's hooks what it offers and where, holds that against what the author claims,
and then runs the offered implementation through the same planner, ``bind()`` and ``prepare()`` that
a host uses: on the CPU references, on a simulated NPU of every chip and CANN version that is
offered (each in a process of its own), and on a real NPU where there is one.

What a pass shows is what these devices show: see ``docs/simulation.md``. It never shows numerics or
speed of an NPU unless it ran on one.
"""

import npu_backend.runtime  # noqa: F401 - it decides how torch is imported, here and below
