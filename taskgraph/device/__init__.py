"""Devices that compute beside the host: what the framework asks of one, and what speaks CUDA.

Modules:
    api      the interface
    buffers  the bulk of values that stays on its device
    cuda     CuPy: the only module that imports it
    lookup   which device an array is on
    visible  which devices a process may use, as CUDA is told
"""
