"""Programs that gather facts, each run in a process of its own by `probe.run_probe`.

A probe states what is there and judges nothing. It imports frameworks by name: it is the one place where a broken one
may end the interpreter.
"""
