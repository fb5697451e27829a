"""The stages of a job: each is an object with what it waits for, its deadline, and what may come after it.

A stage begins when its object is made, with the orders that it gives to the agents. It answers each event with the
transition that follows (`keepstep.protocol.recovery.transitions`), or with None. No stage knows another one:
`RecoveryMachine` makes the next.
"""
