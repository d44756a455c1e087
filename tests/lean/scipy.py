raise ModuleNotFoundError("hidden: see tests/ranks.py", name="scipy")
