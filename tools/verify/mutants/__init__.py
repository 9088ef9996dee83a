"""Deliberate faults in the rules, the CPU backend, the argument checks and async_state, chosen
without a look at the tests, which have to notice each fault."""
