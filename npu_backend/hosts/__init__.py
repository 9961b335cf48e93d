"""Adapters to inference engines, each only a translation of a host's objects into records.

None is written yet. What a host's own code serves and how it leaves weights is known to the planner
already: ``Deployment(host=...)`` and ``read_model(host=...)``.
"""
