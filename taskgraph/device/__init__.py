"""Devices that compute beside the host. `api` is the interface; `cuda` implements it by CuPy."""
