"""Deliberate faults, which the tests have to notice: one text form (mutant.py), two lists
(cuda.py, ascendc.py), one program. tools/mutate.py makes random ones of any source."""
