"""Adapters to inference engines, each only a translation of a host's objects into records.

``npu_backend.hosts.sglang`` is SGLang's. What a host's own code serves and how it leaves weights is
the planner's knowledge: ``Deployment(host=...)`` and ``read_model(host=...)``.
"""
