"""The proof of the asynchronous pipeline: a scheduler, a target model in which every error shows,
and a device on which nothing happens before somebody legitimately waits for it."""
