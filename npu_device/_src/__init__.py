"""The implementation, one component per folder; ``docs/architecture.md`` says which may import which. Scripts import
the public paths beside this folder.
"""
