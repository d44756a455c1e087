"""How long the fuzz tests run: a few examples of each kind; with ``pytest --hypothesis-profile=long``, many.

A failure prints its example, and how to run it again.
"""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, Phase, settings

_ALWAYS: dict[str, Any] = {
    "deadline": None,  # the machine may be busy; what must not hang has limits of its own
    "database": None,
    "print_blob": True,
    "phases": [Phase.explicit, Phase.generate, Phase.shrink],
    "suppress_health_check": list(HealthCheck),  # fixtures are shared by a test's examples
}

settings.register_profile("short", max_examples=25, **_ALWAYS)
settings.register_profile("long", max_examples=1000, **_ALWAYS)
settings.load_profile("short")
