"""The same comparisons on a GPU: graph replay, timed by the device's own events."""
