"""The `baton` command. Imports no torch; commands import their dependencies when they run."""
