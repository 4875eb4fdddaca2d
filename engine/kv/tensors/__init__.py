"""Memory of KV pools."""
