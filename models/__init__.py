"""The bundled model, a small Python-writing target and its draft, and what made them."""
