from __future__ import annotations

import os

from without_hypothesis import install_where_missing

install_where_missing()

from hypothesis import HealthCheck, settings  # noqa: E402

# CI repeats the same examples; a developer's machine tries new ones in each run.
settings.register_profile(
    "ci", derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile("dev", deadline=None, suppress_health_check=list(HealthCheck))
settings.load_profile("ci" if os.environ.get("CI") else "dev")
