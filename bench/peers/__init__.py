"""Baton beside what a user would otherwise run on a CPU: the same weights, the same prompts, the
same cores, by turns.

`python -m bench.peers` measures; `bench/peers/setup.sh` builds llama.cpp, on which Baton does not
depend.
"""
