"""Kernels in Triton, for `POLYAD_KERNELS=triton`.

Nobody has measured them on a GPU, so none is chosen otherwise. Importing a module of this folder
takes the package `triton`. With `TRITON_INTERPRET=1` they run on a CPU, slowly, as their tests do.
"""
