"""Contains the command ``ngram-npu``: replays logs, tunes settings, fills stores from logs.

The library, ``ngram_npu``, imports nothing from this package. ``ngram_npu_cli.command`` is the
entry module. It loads neither torch nor NumPy before a subcommand needs these packages.
"""
