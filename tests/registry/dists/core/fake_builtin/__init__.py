"""Stand-ins for the built-in plugins."""
