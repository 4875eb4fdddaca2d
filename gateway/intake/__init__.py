"""Validates, renders and tokenizes requests; the result cannot be invalid any more."""
