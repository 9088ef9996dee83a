"""Deliberate faults, which the tests have to notice: one text form (mutant.py), two lists (cpu.py,
cuda.py), one program."""
