"""The version of the kernels' results."""

#: Raised by a change that alters a bit of what any kernel gives for any input: workers of different
#: versions are then told apart. The levels of a CPU (baton_kernels.cpu.library.level) need not
#: agree with each other.
NUMERICS_VERSION = 1
