"""The protocol of keepstep, pure: data and ``now_s`` in, data out.

Nothing here reads a clock, opens a socket, draws a random number, logs or knows torch. The same code decides in a
training job and, many thousand times, in the simulator. docs/PROTOCOL.md explains the decisions and why they are
correct; this page lists the duties of the programs around the machines.

**Three machines, one for each kind of program.** Each is driven by one loop, which does input and output and takes no
decision that another process could observe.

===================== ====================================== =============================================
machine               decides                                driven by
===================== ====================================== =============================================
`WorkerMachine`       at which steps this copy can be, what  ``worker/coordination.py`` (listener thread),
                      the training thread does next          ``worker/recovery.py`` (training thread)
`AgentMachine`        which worker of a node is lost, hung   ``agent/agent.py``
                      or late, what it tells the controller
`ControllerMachine`   who is lost, which spare takes which   ``controller/controller.py``
                      rank, at which step the job resumes
===================== ====================================== =============================================

**Duties of the controller's loop.**

1. Give every packet of an agent to `ControllerMachine.receive`, and every new connection to ``reconnected``.
2. Write ``take_entries()`` to the journal, and sync it, *before* anything of ``packets()`` is sent. A restarted
  controller builds the machine from the journal (``from_journal``) and repeats the same orders.
3. Call ``tick`` at ``next_deadline()`` at the latest, with the time of one clock that never goes back.
4. Serve a run only while it holds the run's lease (`keepstep.protocol.lease`).

**Duties of an agent's loop.**

1. Perform the effects of ``take()`` in their order, then send ``packets()``.
2. Call ``exited`` for each process that it started, exactly once, after the last report of that process.
3. Read the tag pages several times a second, and pass what they show to ``observe``. If the agent has not read them for
  more than half a second, the machine counts that time against no worker.

**Duties of a worker.**

1. The listener thread passes each order to `WorkerMachine.receive` and performs the result at once: it breaks the
  communicators, which releases a training thread that waits in a collective.
2. The training thread calls ``next_move()`` at its safe points, performs the move, and reports the result
  (``connected``, ``loaded``, ``fell_out``, ``saved``). It never touches parameters between an order to stop and the
  next move.
3. Each change of phase goes through `keepstep.protocol.phases.StepMachine`, and is on the tag page before the training
  thread continues: the agent reads there the phase of a killed rank.
4. A rank enters the gradient barrier only with complete gradients, and leaves it only when all ranks have entered it.
   The resume rule (`keepstep.protocol.resume`) rests on this invariant alone.

**Guarantees.** A machine accepts any message at any time: an invalid one raises `RemoteProtocolError` without changing
state, and it drops a message of a former generation. Packets may be lost, duplicated or late;
`keepstep.protocol.reliable_channel` delivers their messages once and in order. No method blocks.

**Folders.** `messages`: all messages between programs. `recovery`: the controller's stages from training through a
recovery back to training. `waiting`: which operations ranks wait in, and why. `transfer`: which process sends which
bytes of weights to which.
"""
