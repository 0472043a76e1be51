"""A network namespace for whoever is to be cut off."""

from tests.chaos.space import apart

__all__ = ["apart"]
