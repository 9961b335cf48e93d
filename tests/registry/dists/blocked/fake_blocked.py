"""Must never be imported."""

raise AssertionError("a blocked plugin was imported")
