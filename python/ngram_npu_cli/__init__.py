"""The command ``ngram-npu``: reads logs, replays them, tunes, and learns stores from them.

The library, ``ngram_npu``, imports nothing from this package. ``ngram_npu_cli.command`` is the
entry module. It loads neither torch nor NumPy until a subcommand needs them.
"""
