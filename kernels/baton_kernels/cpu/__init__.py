"""Kernels for CPUs with AVX-512, BF16 and VNNI, in C++ built on first use; see
docs/adr/0006-native-cpu-kernels.md."""
