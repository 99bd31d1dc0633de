"""Devices that compute beside the host: what the framework asks of one, and what speaks CUDA.

`api` is what is asked of one; `cuda` has those of CUDA, by CuPy.
"""
