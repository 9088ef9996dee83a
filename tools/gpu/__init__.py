"""Everything that needs a machine with a GPU, in one command: ``make gpu``."""
