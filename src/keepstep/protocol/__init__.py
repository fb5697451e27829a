"""The protocol of keepstep, pure: data and ``now_s`` in, data out.

Nothing here reads a clock, opens a socket, draws a random number, logs or knows torch. The same code decides in a
training job and, many thousand times, in the simulator. docs/PROTOCOL.md says what is decided and why it is right; this
page says what a program owes to the machines that decide.

**Three machines, one for each kind of program.** Each is driven by one loop, which does input and output and decides
nothing that another process could notice.

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
2. Write ``take_entries()`` to the journal, and sync it, *before* anything of ``packets()`` is sent. A controller that
   is started again builds the machine from the journal (``from_journal``) and gives the same orders again.
3. Call ``tick`` at ``next_deadline()`` at the latest, with the time of one clock that never goes back.
4. Serve a run only while it holds the run's lease (`keepstep.protocol.lease`).

**Duties of an agent's loop.**

1. Carry out the effects of ``take()`` in their order, then send ``packets()``.
2. Report the end of each process it started with ``exited``, exactly once, after the last report of that process.
3. Report what the tag pages show with ``observe``, several times a second. An agent that did not look for more than
   half a second blames no worker for that time.

**Duties of a worker.**

1. The listener thread gives each order to `WorkerMachine.receive` and does at once what the answer asks for: it breaks
   the communicators, so that a training thread that waits in a collective comes free.
2. The training thread asks ``next_move()`` at its safe points, carries the move out, and tells how it went
   (``connected``, ``loaded``, ``fell_out``, ``saved``). It never touches parameters between an order to stop and the
   move that says what becomes of them.
3. Each change of phase goes through `keepstep.protocol.phases.StepMachine`, and is on the tag page before the training
   thread goes on: the agent reads there in which phase a killed rank was.
4. A rank enters the gradient barrier only with complete gradients, and leaves it only when all ranks have entered it.
   The resume rule (`keepstep.protocol.resume`) rests on this invariant alone.

**What a loop may rely on.** A machine may be given any message at any time: one that does not fit raises
`RemoteProtocolError` and has changed nothing, one of a former generation is dropped. Packets may be lost, doubled or
late; `keepstep.protocol.reliable_channel` delivers what is in them once and in order. No method blocks.

**Folders.** `messages`: all that is said between programs. `recovery`: the controller's stages from training through a
recovery back to training. `waiting`: what ranks wait in, and why. `transfer`: who sends which bytes of weights to whom.
"""
