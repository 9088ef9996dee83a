"""`python -m ngram_npu_cli`: the command `ngram-npu`."""

import sys

from ngram_npu_cli.command import main

if __name__ == "__main__":
    sys.exit(main())
