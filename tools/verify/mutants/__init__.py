"""The rules, the CPU backend, the argument checks and async_state made wrong on purpose, by someone
who had not read the tests: they have to notice each fault."""
