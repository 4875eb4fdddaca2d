"""The bundled model, a small Python-writing target and its draft, with their training code."""
