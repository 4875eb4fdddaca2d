"""The `baton` command. Nothing here imports torch; what a command needs beyond its options is
imported when it runs."""
