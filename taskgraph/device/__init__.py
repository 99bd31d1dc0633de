"""Devices that compute beside the host: what the framework asks of one, and what speaks CUDA.

Modules:
    afterwards  what finalizers leave to threads
    api         the interface
    buffers     the bulk of values that stays on its device
    cuda        CUDA's devices, by CuPy
    digest      digests of the blocks of memory on a device, taken there
    handles     file descriptors that other processes of the host are given
    lookup      which device an array is on
    memory      how much of a device's memory a process holds
    pinning     memory of the host that is page-locked, so that a device copies by itself
    shared      memory of a device that other processes of the host can open
    staging     copies to the host, piece by piece
    virtual     memory of a CUDA device that other processes can map
    visible     which devices a process may use, as CUDA is told
"""
