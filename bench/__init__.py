"""Measuring tools. They use the packages as users do, and run from a checkout only."""
