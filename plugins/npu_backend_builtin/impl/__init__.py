"""What the built-in strategies run. Imported when a layer is bound, never while planning."""
