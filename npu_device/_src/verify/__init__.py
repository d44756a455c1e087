"""``npurun verify``: runs a script for a few steps as one process and on N ranks, and finds where they diverge.

To run it: ``plan``, ``forking``, ``runner``, ``step_recorder``, ``script_calls``,
``phases``. To judge what the runs have left:
``verdict``, ``compared_run``, ``causes`` (with the texts of ``causes.md``), and ``comparison/`` below them; ``report``
prints it. ``launch/verify.py`` calls both.
"""
