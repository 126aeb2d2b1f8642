"""Triton kernels, held to the plain torch in the folder above.

The functions there import and call them, for CUDA tensors only, because an installation for the CPU has no Triton. With
TRITON_INTERPRET=1, set before Triton is first imported, they run on CPU tensors (float32), which tests use.
"""
