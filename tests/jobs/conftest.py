"""Fixtures of these tests."""

from tests.helpers.ray_head import head
from tests.helpers.ray_session import ray_address, ray_session
from tests.helpers.s3_fixture import bucket, s3

__all__ = ["bucket", "head", "ray_address", "ray_session", "s3"]
