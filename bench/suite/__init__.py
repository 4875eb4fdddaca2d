"""`make bench`: every section of docs/performance.md measured, and its tables written anew. See
bench/README.md."""
