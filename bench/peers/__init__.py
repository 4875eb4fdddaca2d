"""Baton beside its alternatives on CPUs: equal weights, prompts and cores, in turns.

`python -m bench.peers` measures; `bench/peers/setup.sh` builds llama.cpp, which is not a dependency
of Baton.
"""
