raise ModuleNotFoundError("hidden: see tests/tools/ranks.py", name="matplotlib")
