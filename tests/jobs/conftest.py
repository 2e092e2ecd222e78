"""Fixtures of these tests."""

from tests.helpers.ray_session import ray_address, ray_session

__all__ = ["ray_address", "ray_session"]
