"""The runner's port is worker_service/core/runner_port.py; launcher.py still names it here."""

from worker_service.core.runner_port import BatchRunner, DeviceTimes, LaunchTokens, Submitted

__all__ = ["BatchRunner", "DeviceTimes", "LaunchTokens", "Submitted"]
