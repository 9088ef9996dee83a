"""Deliberate faults, which the tests have to notice: one text form (mutant.py), three lists
(cpu.py, cuda.py, ascendc.py), one program."""
