"""Devices that compute beside the host: what the framework asks of one, and what speaks CUDA.

Modules:
    api      the interface
    buffers  the bulk of values that stays on its device
    cuda     CUDA's devices, by CuPy
    digest   digests of the blocks of memory on a device, taken there
    lookup   which device an array is on
    pinning  memory of the host that is page-locked, so that a device copies by itself
    shared   memory of a device that other processes of the host can open
    staging  copies to the host, piece by piece
    visible  which devices a process may use, as CUDA is told
"""
