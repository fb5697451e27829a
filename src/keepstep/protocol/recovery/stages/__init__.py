"""The stages of a job. Each is an object with the workers for which it waits, its deadline, and its transitions.

A stage begins when its object is created, with orders to the agents. It answers each event with the next transition
(`keepstep.protocol.recovery.transitions`), or with None. Stages do not refer to each other: `RecoveryMachine` creates
the next one.
"""
