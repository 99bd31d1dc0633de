"""The exception of a simulation whose protocol breaks a guarantee."""

__all__ = ["Violation"]


class Violation(AssertionError):
    """Raised if the protocol breaks one of its guarantees."""
