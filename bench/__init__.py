"""Measuring tools. They stand outside the package, use it as users do, and are run from a
checkout."""
