"""Triton kernels, held to the plain torch in the folder above.

They are imported by the functions there that hand over to them, and only for CUDA tensors: an installation for the CPU
has no Triton. With TRITON_INTERPRET=1, set before Triton is first imported, they run on CPU tensors (float32), which
tests use.
"""
