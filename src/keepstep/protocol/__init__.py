"""The rules of keepstep, pure: data and ``now_s`` in, data out.

Nothing here reads a clock, opens a socket, draws a random number, logs or knows torch, so the same code runs in a
training job and, by the hundred thousand, in a simulation.
"""
