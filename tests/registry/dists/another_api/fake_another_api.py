"""Must not be imported."""

raise SystemExit("this ran")
