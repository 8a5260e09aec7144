"""Seer on a Ray cluster: `start(engines=8, gpus_per_engine=1)` places engines and starts all services."""

from seer.integrations.ray.system import Connection, System, start

__all__ = ["Connection", "System", "start"]
