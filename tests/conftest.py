from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("hypothesis") is None:
    import without_hypothesis

    without_hypothesis.install()

from hypothesis import HealthCheck, settings

# CI repeats one run exactly; a developer's machine looks further each time.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("dev", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("ci" if os.environ.get("CI") else "dev")
