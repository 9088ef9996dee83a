"""Simulation tests of the asynchronous pipeline: a scheduler, a target model that turns every error
into a wrong token, and a device that runs work as late as streams and events allow."""
