"""How long the ranks of a job, and its hub, wait for each other: every limit that no environment variable sets.

Each name has its unit. What users set is in ``environment``, such as ``NPU_DEVICE_STALL_TIMEOUT``.
"""

from __future__ import annotations

from npu_device._src.environment import NPU_DEVICE_TIME_LIMITS

# A rank that waits for others in a collective, in whatever it moves its data by
CHECK_SECONDS = 0.1  # the longest that it sleeps, or waits for a message, before it checks whether the others are alive
SPIN_SECONDS = 1e-4  # it looks for a result so long before it sleeps: being woken takes longer than most messages
NEWS_SECONDS = 5.0  # after the end of its connection: for the hub to tell which rank is gone
# While a job starts or a group connects: for what another rank is about to send.
LATEST_ANSWER_SECONDS = 60.0
DETAILS_SECONDS = 2.0  # for the descriptions of the others, when calls differ
# For threads that do the same, to show in which group each of them calls.
THREAD_SILENT_SECONDS = 5.0
# For another thread of the function to appear, if what one does differs among the ranks.
THREAD_ORDER_SECONDS = 2.0
THREAD_LOOK_SECONDS = 0.001  # between two looks at the threads
# How long a session waits for the turn of a collective before it checks whether the other ranks are alive.
QUEUE_CHECK_SECONDS = 0.5
# Between two looks at whether the first rank of the host has copied what all ranks share.
COPY_POLL_SECONDS = 0.02
COPY_WAIT_SECONDS = 60.0  # for that copy; without it, this rank has no copy of the same step
COPY_LOOK_SECONDS = 0.1  # between two looks of npurun at whether there is a copy to be sent
# For another host to take the next bytes of a copy, and to make its own copy of the step.
COPY_SEND_SECONDS = 30.0
COPY_END_SECONDS = 10.0  # for the last copy in memory, when a checkpoint is closed
# For a rank to end an update that others have ended, before it tells them its state; and between two looks at whether
# it has.
UPDATE_END_SECONDS = 60.0
UPDATE_POLL_SECONDS = 0.001
# After the end of another rank, before npurun names the ranks that still run.
LATE_RANK_SECONDS = 60.0
STALL_POLL_SECONDS = 0.2  # between two looks at whether it waits in a collective, and for whom
WHERE_SECONDS = 2.0  # after a long wait: for the others to say where they are

# MPI, which proceeds only if a thread tests its requests
MPI_LONGEST_SLEEP_SECONDS = 500e-6
MPI_TICK_SECONDS = 0.02  # between two calls of MPI while no operation is in progress
# Before a rank of a failed job ends all ranks: the ranks report why they end in that time.
MPI_GRACE_SECONDS = 3.0

# Shared memory
MEMORY_RETRY_SECONDS = 0.2  # between two attempts to make, or to find, the memory of a group

# In load_once, before a waiting rank checks whether the loading one is alive.
LOAD_CHECK_SECONDS = 1.0
LOAD_NOTICE_SECONDS = 30.0  # in load_once, between two lines of a rank that waits

# The ranks' connections to each other

# One attempt to reach a rank; then the health of the job is checked before the next one.
ATTEMPT_SECONDS = 10.0
ATTEMPT_PAUSE_SECONDS = 0.2
DELIVER_SECONDS = 60.0  # for the hosts of the others to have what a rank that leaves has sent
DELIVER_TICK_SECONDS = 0.005  # between two looks at whether the hosts have it

# Reaching the hub
ANSWER_SECONDS = 3.0  # for the hub, which should answer at once
CONNECT_SECONDS = 3.0  # one attempt to connect to an address
# The pause after a failed accept, when the client has gone or no file descriptor is free.
ACCEPT_PAUSE_SECONDS = 0.1
VERDICT_MARGIN_SECONDS = 5.0  # how much longer than the hub says a rank waits for the roster
# The longest wait for the other ranks that a hub or a rank may ask for.
LONGEST_WAIT_SECONDS = 86400.0
OLD_HUB_SECONDS = 1.0  # for the hub of an earlier job to end after its ranks have left
OLD_HUB_PAUSE_SECONDS = 0.2
FIRST_PAUSE_SECONDS = 0.05  # between two attempts; each pause is twice the one before
LONGEST_PAUSE_SECONDS = 1.0
FIRST_PROGRESS_SECONDS = 10.0  # until a slow start is reported
NEXT_PROGRESS_SECONDS = 30.0  # until it is reported again

# Talking to the hub
SHORT_SECONDS = 10.0  # for requests that the hub answers at once
# A rank waits for so much longer than the limit of a request, which the hub enforces.
MARGIN_SECONDS = 5.0
KEEPALIVE_AFTER_SECONDS = 3  # until the kernel asks whether the other host is still there
UNACKNOWLEDGED_MILLISECONDS = 10_000  # until it takes a connection for lost
FINISHED_NOTICE_SECONDS = 10.0  # until a rank that has finished says that it waits for others
ALIVE_SECONDS = 10.0  # for those to say that they are alive

# The hub

# A client that hasn't proved the secret and sent its hello by then is not a rank.
PROOF_SECONDS = 5.0
# Between two looks at whether all ranks have come, or the time for that is up.
WAITING_TICK_SECONDS = 0.1
# After a contradiction: ranks that are just connecting get the error, too.
CONTRADICTION_SECONDS = 1.5
# Once all have come: for a process that has started one of them, and may be the rank.
CANDIDATE_SECONDS = 30.0
LAST_MESSAGE_SECONDS = 5.0  # for a client that is turned away to read why
LEFT_TOGETHER_SECONDS = 0.1  # ranks that leave within this time are reported in one message
ANSWERS_KEPT_SECONDS = 5.0  # a rank that asks the same within this time gets the same answers
LONGEST_REQUEST_SECONDS = 1e6  # the longest wait that a rank may ask the hub for

# A rank table that isn't complete yet, and the ranks of a check
TABLE_POLL_SECONDS = 0.5
CHECK_OTHERS_SECONDS = 120.0  # for another rank of ``npurun check``, which measures meanwhile

# npurun and its ranks
SWEEP_SECONDS = 0.02  # between two looks at processes, or at files that they write
# After a failure: for the other ranks to raise errors that name what they were doing.
RANKS_NOTICE_SECONDS = 2.0
KILL_SECONDS = 10.0  # a process that outlives SIGKILL so long is stuck in the kernel (network file system, driver)
# Ctrl-C can come twice: from the terminal, and from what started npurun (uv run).
SAME_SIGNAL_SECONDS = 0.5
LONGEST_BACKOFF_SECONDS = 60.0  # the longest pause between two attempts
TICK_SECONDS = 0.5  # between two looks at the output
REFRESH_SECONDS = 5.0  # between two lines of a progress bar
# A reader that is stopped delays the end of an npurun that was sent a signal by so much.
READER_SECONDS = 5.0

# npurun on several nodes or hosts
NODE_CONNECT_SECONDS = 10.0  # one attempt of a node to reach node 0
NODE_PAUSE_SECONDS = 0.3  # between two of them
NODE_ALIVE_SECONDS = 5.0  # between the messages with which node 0 says that it isn't frozen
# After this much silence, a node that only waits assumes that npurun on node 0 is frozen.
NODE_SILENT_SECONDS = 4 * NODE_ALIVE_SECONDS
NODE_NOTICE_SECONDS = 5.0  # until node 0 reports that it waits for other nodes
NODE_LAST_MESSAGE_SECONDS = 3.0  # for the other nodes to read why they end
JOIN_ASK_SECONDS = 10.0  # between two requests to the ranks to end for a node that has come
JOIN_PAUSE_SECONDS = 60.0  # between two joins; and for a node that fails soon after its first one
JOIN_SETTLED_SECONDS = 300.0  # an attempt that lasts so long hasn't failed because a node joined it
# For nodes to stop, besides the time of the ranks: notice, kill, the last lines of output.
NODE_STOP_SECONDS = 30.0
HOST_NAME_SECONDS = 3.0  # to resolve the name of a host, which may be this host
HOST_RETRY_SECONDS = 1.0  # before a lost host is tried first; each further try waits twice as long
# After the npurun of one host has ended: for the other npuruns to notice.
HOSTS_NOTICE_SECONDS = 3.0
HOSTS_END_SECONDS = 15.0  # for killing ranks, and for reports, after the grace period

# Training
PROGRESS_REPORT_SECONDS = 5.0  # one report of progress to Kubeflow
PROGRESS_PAUSE_SECONDS = 5.0  # between two of them at the least, as its guide asks
# A shorter wait for a batch raises no alarm: the machine may only be busy.
LEAST_INPUT_WAIT_SECONDS = 0.01
FIRST_SAVE_CHECK_SECONDS = 0.5  # until a rank asks again how far rank 0 is, at first
LONGEST_SAVE_CHECK_SECONDS = 5.0  # until a rank asks again after a long wait
SAVE_ANSWER_SECONDS = 10.0  # for the rank that writes to tell whether it sees a file
SAVE_LEFT_SECONDS = 1.0  # for news of a rank that has left
SAVE_PAUSE_SECONDS = 0.05  # between two questions how far a save is
# For comparing the variables at the end of a rank; what is left then isn't compared.
LAST_WORD_SECONDS = 0.7
# A launcher and the cluster manager may both send a preemption signal.
SAME_PREEMPTION_SECONDS = 1.0
PREEMPTION_JOIN_SECONDS = 5.0  # for the thread that waits for the ranks

# Tests of users, and the soak
POOL_START_SECONDS = 120.0  # for ranks to start
POOL_GRACE_SECONDS = 2.0  # after the first error: for ranks that fail by themselves
POOL_RELEASE_SECONDS = 5.0  # for ranks that wait for one that has left, to notice that
# Between two looks at whether a rank that is to connect has ended.
POOL_LOOK_SECONDS = 1.0
OUTPUT_SECONDS = 0.1  # between two looks at the output of ranks, which appears in a notebook
POOL_WAIT_SECONDS = 3600.0  # the longest single wait of a call without a limit
STACKS_SECONDS = 0.5  # for ranks to write where they are
COLLECTING_SECONDS = 120.0  # for the ranks to collect the tests
SETTLED_SECONDS = 2.0  # for what a test has closed to be gone
PROXY_DELAY_SECONDS = 0.5
FAULT_POLL_SECONDS = 0.05  # between two looks at a job
SETTLING_SECONDS = 3.0  # until a disturbed connection has ended an attempt
RECOVERY_SECONDS = 300.0  # until the job goes on after a fault

# Verification and the check
RECORDS_SECONDS = 60.0  # at least, for ranks to go as far as the single process
OTHERS_FAIL_SECONDS = 10.0  # for the other processes to end after the first one that fails
VERIFY_SECONDS = 1800  # one run of a script in ``npurun verify``
MEASURED_SECONDS = 0.5  # for each size, if that is enough for the fewest repeats
CLOCK_SECONDS = 1.0  # clocks that differ by more are reported

# The kernel takes whole numbers only, so that a limit keeps its type.
for _name, _number in NPU_DEVICE_TIME_LIMITS.get():
    globals()[_name] = type(globals()[_name])(_number)
