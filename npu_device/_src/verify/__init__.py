"""``npurun verify``: runs a script for a few steps as one process and on N ranks, and finds where they diverge.

``launch/verify.py`` calls both halves. To run it: ``plan``, ``runner``, ``forking`` and ``file_shadow``, and in each
process ``step_recorder``, ``script_calls``, ``phases`` and ``projections``. To judge what the processes have left:
``verdict``, ``compared_run``, ``causes`` (with the texts of ``causes.md``), and ``comparison/`` below them; ``report``
prints it.
"""
