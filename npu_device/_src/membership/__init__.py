"""Read from the environment which rank this process is, and where the ranks meet.

``schemes`` chooses among Ascend's variables, ``TF_CONFIG`` and the variables of launchers. Other ranks are contacted
only through MPI, where nothing else names the host of rank 0.
"""
