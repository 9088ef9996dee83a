"""Everything that a machine with a GPU is needed for, in one command: ``make gpu``."""
