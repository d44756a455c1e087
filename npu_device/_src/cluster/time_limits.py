"""How long the ranks of a job, and its hub, wait for each other: every limit that no environment variable sets.

All are in seconds. What users set is in ``environment``.
"""

from __future__ import annotations

# A rank that waits for others in a collective, in whatever it moves its data by

CHECK_SECONDS = 0.1
"""The longest that a rank sleeps, or waits for a message, before it checks whether the others are still alive."""

SPIN_SECONDS = 1e-4
"""How long a rank that needs a result looks for it before it sleeps: being woken takes longer than most messages."""

NEWS_SECONDS = 5.0
"""How long a rank whose connection has ended waits for the hub to tell which rank is gone."""

LATEST_ANSWER_SECONDS = 60.0
"""How long a rank waits, while a job starts or a group connects, for what another rank has sent or is about to send."""

DETAILS_SECONDS = 2.0
"""How long ranks whose calls differ wait for the others' descriptions."""

QUEUE_CHECK_SECONDS = 0.5
"""How long a collective in a session waits for its turn before the rank checks whether the others are alive."""

STALL_POLL_SECONDS = 0.5
"""Between two looks at whether this rank waits in a collective."""

WHERE_SECONDS = 2.0
"""How long a rank that waits too long in a collective waits for the others to say where they are."""

DEPARTURE_POLL_SECONDS = 0.2
"""Between two looks at whether a rank that has left is missing in a collective."""

# MPI, which proceeds only if a thread tests its requests

MPI_LONGEST_SLEEP_SECONDS = 500e-6
MPI_TICK_SECONDS = 0.02
"""Between two calls of MPI while no operation is in progress."""

MPI_GRACE_SECONDS = 3.0
"""How long a rank of a failed job waits before it ends all ranks: they say why they end in that time."""

# Shared memory

MEMORY_RETRY_SECONDS = 0.2
"""Between two attempts to make, or to find, the memory of a group."""

# The ranks' connections to each other

ATTEMPT_SECONDS = 10.0
"""One attempt to reach a rank; then the health of the job is checked before the next one."""

ATTEMPT_PAUSE_SECONDS = 0.2
SEND_SECONDS = 60.0
"""How long a short message may take to leave."""

DELIVER_SECONDS, DELIVER_TICK_SECONDS = 60.0, 0.005
"""How long a rank that leaves waits until the others' hosts have what it has sent; and between two looks."""

# Reaching the hub

ANSWER_SECONDS = 3.0
"""How long the hub, which should answer at once, may take."""

CONNECT_SECONDS = 3.0
"""One attempt to connect to an address."""

ACCEPT_PAUSE_SECONDS = 0.1
"""After a connection that couldn't be accepted: its client has gone, or no file descriptor is free."""

VERDICT_MARGIN_SECONDS = 5.0
"""How much longer than the hub says a rank waits for the roster."""

LONGEST_WAIT_SECONDS = 86400.0
"""The longest wait for the other ranks that a hub or a rank may ask for."""

OLD_HUB_SECONDS = 1.0
"""How long the hub of an earlier job may take to end after its ranks have left."""

OLD_HUB_PAUSE_SECONDS = 0.2
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.05, 1.0
"""Between two attempts to reach the hub; each pause is twice the one before."""

FIRST_PROGRESS_SECONDS, NEXT_PROGRESS_SECONDS = 10.0, 30.0
"""When a start that takes long is first reported, and between two reports."""

# Talking to the hub

SHORT_SECONDS = 10.0
"""Requests that the hub answers at once."""

MARGIN_SECONDS = 5.0
"""How much longer than a request's limit a rank waits for its answer: the hub enforces the limit."""

KEEPALIVE_AFTER_SECONDS = 3
UNACKNOWLEDGED_MILLISECONDS = 10_000
"""When the kernel asks whether the other host is still there, and when it takes a connection for lost."""

FINISHED_NOTICE_SECONDS = 10.0
"""When a rank that has finished says that it waits for others."""

ALIVE_SECONDS = 10.0
"""How long it waits for them to say that they are alive."""

# The hub

PROOF_SECONDS = 5.0
"""A client that hasn't proved the secret and sent its hello by then is not a rank."""

CONTRADICTION_SECONDS = 1.5
"""After a contradiction: ranks that are just connecting get the error, too."""

LAST_MESSAGE_SECONDS = 5.0
"""How long a client that is turned away may take to read why."""

LEFT_TOGETHER_SECONDS = 0.1
"""Ranks that leave within this time are reported in one message."""

ANSWERS_KEPT_SECONDS = 5.0
"""A rank that asks the same within this time gets the same answers."""

LONGEST_REQUEST_SECONDS = 1e6
"""The longest wait that a rank may ask the hub for."""

# A rank table that isn't complete yet, and addresses

TABLE_POLL_SECONDS = 0.5
CHECK_OTHERS_SECONDS = 120.0
"""How long a rank of ``npurun check`` waits for another one, which measures meanwhile."""

# npurun and its ranks

SWEEP_SECONDS = 0.02
"""Between two looks at the ranks' processes."""

RANKS_NOTICE_SECONDS = 2.0
"""After a failure, the other ranks raise errors that say what they were doing; they get this long to do so."""

KILL_SECONDS = 10.0
"""A process that SIGKILL doesn't end within this time is stuck in the kernel (a dead network file system, a driver)."""

SAME_SIGNAL_SECONDS = 0.5
"""A Ctrl-C can come twice at once: from the terminal, and passed on by the program that started npurun (uv run)."""

LONGEST_BACKOFF_SECONDS = 60.0
"""The longest pause between two attempts."""

TICK_SECONDS, REFRESH_SECONDS = 0.5, 5.0
"""Between two looks at the output, and between two summaries of it."""

READER_SECONDS = 5.0
"""A reader that is stopped delays the end of an npurun that was sent a signal by this much."""

# npurun on several nodes or hosts

NODE_CONNECT_SECONDS, NODE_PAUSE_SECONDS = 10.0, 0.3
"""One attempt of a node to reach node 0, and the pause between two."""

NODE_ALIVE_SECONDS = 5.0
"""Between the messages with which node 0 says that it isn't frozen."""

NODE_SILENT_SECONDS = 4 * NODE_ALIVE_SECONDS
"""After which a node that only waits takes npurun on node 0 for frozen."""

NODE_NOTICE_SECONDS, NODE_LAST_MESSAGE_SECONDS = 5.0, 3.0
NODE_STOP_SECONDS = 30.0
"""How long nodes may take to stop, in addition to the ranks' time: notice, kill, and the last lines of output."""

HOSTS_NOTICE_SECONDS = 3.0
"""When the npurun of one host has ended, those of the others have noticed by themselves, or get this long to do so."""

HOSTS_END_SECONDS = 15.0
"""For killing ranks, and for reports, after the grace period."""

# Training

PROGRESS_REPORT_SECONDS = 5.0
"""One report of progress to Kubeflow."""

LEAST_INPUT_WAIT_SECONDS = 0.01
"""A shorter wait for a batch raises no alarm: the machine may only be busy."""

FIRST_SAVE_CHECK_SECONDS, LONGEST_SAVE_CHECK_SECONDS = 0.5, 5.0
"""Until a rank asks again whether rank 0 has gone past the place where it writes files; the pause grows."""

SAVE_ANSWER_SECONDS, SAVE_LEFT_SECONDS, SAVE_PAUSE_SECONDS = 10.0, 1.0, 0.05
"""For the answer; for news of a rank that has left; and between two looks at files."""

LAST_WORD_SECONDS = 0.7
"""For comparing the variables at the end of a rank; what is left then isn't compared."""

SAME_PREEMPTION_SECONDS, PREEMPTION_JOIN_SECONDS = 1.0, 5.0
"""A launcher and the cluster manager may both send a preemption signal; and for the thread that waits for the ranks."""

# Tests of users, and the soak

POOL_START_SECONDS, POOL_GRACE_SECONDS, POOL_RELEASE_SECONDS = 120.0, 2.0, 5.0
"""For ranks to start; after the first error, for ranks that fail by themselves; and for those that wait for one that
has left, to notice that."""

COLLECTING_SECONDS = 120.0
"""For the ranks to collect the tests."""

PROXY_DELAY_SECONDS = 0.5
FAULT_POLL_SECONDS, SETTLING_SECONDS, RECOVERY_SECONDS = 0.05, 3.0, 300.0
"""Between two looks at a job; until a disturbed connection has ended an attempt; and for a job to recover."""

# Verification and the check

RECORDS_SECONDS = 60.0
"""How long a rank that records its steps waits for the others to come as far."""

VERIFY_SECONDS = 1800
"""One run of a script in ``npurun verify``."""

MEASURED_SECONDS = 0.5
"""For each size, if that is enough for the fewest repeats."""

CLOCK_SECONDS = 1.0
"""Clocks that differ by more are reported."""
