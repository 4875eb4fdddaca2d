"""The model in the box, a small Python-writing target and its draft, and what made them."""
