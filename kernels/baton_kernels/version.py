"""The version of the kernels' results."""

#: Raise with each change that alters a bit of any kernel's results: workers of different versions
#: are then not mixed. CPU levels (baton_kernels.cpu.library.level) need not agree with each other.
NUMERICS_VERSION = 2
