"""The stages of a job: each is an object with the workers that it waits for, its deadline, and its transitions.

A stage begins when its object is created, with orders to the agents. It answers each event with the next transition
(`keepstep.protocol.recovery.transitions`), or with None. No stage knows another one: `RecoveryMachine` creates the
next.
"""
