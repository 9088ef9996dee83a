"""Runs the command `ngram-npu` for `python -m ngram_npu_cli`."""

import sys

from ngram_npu_cli.command import main

if __name__ == "__main__":
    sys.exit(main())
