"""What goes out: tokens merged, turned into text, and written to the client."""
