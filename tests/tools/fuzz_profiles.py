"""How long the fuzz tests run: a few examples of each kind; with ``pytest --hypothesis-profile=long``, many.

A failure prints its example, and how to run it again.
"""

from hypothesis import HealthCheck, Phase, settings

for name, examples in {"short": 25, "long": 1000}.items():
    settings.register_profile(
        name,
        max_examples=examples,
        deadline=None,  # the machine may be busy; what must not hang has limits of its own
        database=None,
        print_blob=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),  # fixtures are shared by a test's examples
    )
settings.load_profile("short")
